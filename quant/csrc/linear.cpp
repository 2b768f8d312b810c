// y[n] = W @ x[n] for the weights of a base model: bfloat16, or codes of 8 or 4 bits with a scale for every group
// (linear.h has the layout).
//
// Activations of int8 and int4 are rounded to 16 bits with a step for every group, kept as two signed bytes (hi, lo).
// A group's sum is exact in 32 bits; groups add in float32, ascending, a product and a sum at a time. So all paths
// give the same bits, whatever the number of rows and threads. bfloat16 adds float32 products, even and odd columns
// apart, with fused multiply-add where the processor has it. Where the processor has products of bfloat16 (vdpbf16ps), it
// multiplies bfloat16 weights by activations rounded to bfloat16; many rows of int8 and int4 too, with tiles of codes
// decoded in a core's own cache.
#include <array>
#include <atomic>
#include <utility>

#include "linear.h"

#if GQ_X86
#define GQ_FMA2 __attribute__((target("avx2,fma,f16c,popcnt")))
#define GQ_VNNI512 __attribute__((target("avx2,fma,f16c,popcnt,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")))
#define GQ_BF16512 __attribute__((target("avx2,fma,f16c,popcnt,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")))
#define GQ_FMA512 __attribute__((target("avx2,fma,f16c,popcnt,avx512f,avx512bw,avx512dq,avx512vl")))
#endif

namespace gq {
namespace {

constexpr int64_t AHEAD = 64 * 64;  // bytes of a tile asked for ahead of use: past the page where hardware stops
constexpr int64_t PASS = 128;           // columns of bfloat16 that a pass over a tile takes, 8 KiB
constexpr float TOP = 32512.0f;     // 127 * 256: both bytes of a rounded activation stay signed bytes
constexpr float LEAST = 1e-30f;     // a group below is zero: its step would not be finite
constexpr int64_t CACHED = 512 * 1024;  // bytes of rounded activations that a pass over the tiles uses
constexpr int64_t HELD = 4 * 1024 * 1024;  // bytes of bfloat16 activations that are held at a time
enum Feature : int { FMA = 16, VNNI = 32, BF16 = 64 };  // of gq_features
// The kernel of the last product, for measurements and tests.
enum Kernel : int { BY_SCALAR = 0, BY_AVX2 = 1, BY_AVX512 = 2, BY_VNNI = 3, BY_BF16 = 4 };
std::atomic<int> last_kernel{-1};

// n rows of rounded activations. codes [n][cols / 4][2]: the bytes hi and lo of four columns, or (`words`) columns
// 0 and 2, then 1 and 3, in 16 bits. steps, sums [n][groups].
struct Rounded {
    int64_t groups, group;  // columns are groups * group
    int32_t* codes;
    float* steps;
    int32_t* sums;
};

// One row, padded to whole groups. A group with an activation that is not finite gets NaN as its step: y is NaN.
GQ_INLINE void round_body(const float* x, int64_t groups, int64_t group, bool words, float unit, int32_t* codes,
                          float* steps, int32_t* sums) {
    for (int64_t g = 0; g < groups; ++g, x += group, codes += group / 2) {
        float most = 0.0f, check = 0.0f;
        for (int64_t c = 0; c < group; ++c) {
            const float size = std::fabs(x[c]);
            most = size > most ? size : most;
            check += x[c] * 0.0f;  // NaN where x is not finite
        }
        const bool live = most > LEAST && check == 0.0f;
        const float factor = live ? TOP / most : 0.0f;
        steps[g] = check == 0.0f ? (live ? most / TOP * unit : 0.0f) : NAN;
        int16_t rounded[MOST_GROUP];
        int32_t sum = 0;
        for (int64_t c = 0; c < group; ++c) {
            const float shifted = (live ? x[c] : 0.0f) * factor + 12582912.0f;  // 1.5 * 2^23: rounds half to even
            int32_t bits;
            std::memcpy(&bits, &shifted, 4);
            bits -= 0x4B400000;
            rounded[c] = static_cast<int16_t>(bits);
            sum += bits;
        }
        sums[g] = sum;
        if (words) {
            auto* to = reinterpret_cast<int16_t*>(codes);
            for (int64_t c = 0; c < group; c += 4)
                to[c] = rounded[c], to[c + 1] = rounded[c + 2], to[c + 2] = rounded[c + 1], to[c + 3] = rounded[c + 3];
        } else {
            auto* to = reinterpret_cast<int8_t*>(codes);
            for (int64_t c = 0; c < group; c += 4)
                for (int64_t k = 0; k < 4; ++k) {
                    const int32_t value = rounded[c + k], hi = (value + 128) >> 8;
                    to[2 * c + k] = static_cast<int8_t>(hi);
                    to[2 * c + 4 + k] = static_cast<int8_t>(value - 256 * hi);
                }
        }
    }
}

using Round = void (*)(const float*, int64_t, int64_t, bool, float, int32_t*, float*, int32_t*);
// `rows` rows from `row` of one tile: total [rows][32].
using Codes = void (*)(const uint8_t* tile, const Rounded& x, int64_t row, float* total);
// The same for bfloat16, x [rows][cols] float32 with cols even.
using Floats = void (*)(const uint8_t* tile, const float* x, int64_t cols, float* total);

void round_scalar(const float* x, int64_t groups, int64_t group, bool words, float unit, int32_t* codes, float* steps,
                  int32_t* sums) {
    round_body(x, groups, group, words, unit, codes, steps, sums);
}

template <int R, int BITS>
void codes_scalar(const uint8_t* tile, const Rounded& x, int64_t row, float* total) {
    std::fill(total, total + R * TILE, 0.0f);
    for (int64_t g = 0; g < x.groups; ++g) {
        const auto* scales = reinterpret_cast<const uint16_t*>(tile);
        const uint8_t* from = tile + header<BITS>();
        int32_t sums[R][TILE];
        for (int r = 0; r < R; ++r) {
            const int32_t start = BITS == 8 ? -128 * x.sums[(row + r) * x.groups + g] : 0;
            for (int64_t o = 0; o < TILE; ++o) sums[r][o] = start;
        }
        for (int64_t c = 0; c < x.group; c += 32 / BITS, from += 4 * TILE)
            for (int half = 0; half < 8 / BITS; ++half)
                for (int r = 0; r < R; ++r) {
                    const auto* v = reinterpret_cast<const int16_t*>(x.codes) +
                                    ((row + r) * x.groups + g) * x.group + c + 4 * half;
                    for (int64_t o = 0; o < TILE; ++o) {
                        const uint8_t* b = from + 4 * o;
                        int w[4];
                        for (int k = 0; k < 4; ++k) w[k] = BITS == 8 ? b[k] : (half ? b[k] >> 4 : b[k] & 15);
                        sums[r][o] += w[0] * v[0] + w[2] * v[1] + w[1] * v[2] + w[3] * v[3];
                    }
                }
        for (int r = 0; r < R; ++r) {
            const float step = x.steps[(row + r) * x.groups + g];
            const float sum = static_cast<float>(x.sums[(row + r) * x.groups + g]);
            for (int64_t o = 0; o < TILE; ++o) {
                float value = static_cast<float>(sums[r][o]) * from_float16(scales[o]);
                if (BITS == 4) value = value + sum * from_float16(scales[TILE + o]);
                total[r * TILE + o] += value * step;
            }
        }
        tile = from;
    }
}

template <int R>
void floats_scalar(const uint8_t* tile, const float* x, int64_t cols, float* total) {
    const auto* w = reinterpret_cast<const uint16_t*>(tile);
    float even[R][TILE] = {}, odd[R][TILE] = {};
    for (int64_t c = 0; c < cols; c += 2, w += 2 * TILE)
        for (int r = 0; r < R; ++r)
            for (int64_t o = 0; o < TILE; ++o) {
                even[r][o] += from_bfloat16(w[2 * o]) * x[r * cols + c];
                odd[r][o] += from_bfloat16(w[2 * o + 1]) * x[r * cols + c + 1];
            }
    for (int r = 0; r < R; ++r)
        for (int64_t o = 0; o < TILE; ++o) total[r * TILE + o] = even[r][o] + odd[r][o];
}

void put(const float* total, int64_t rows, int64_t tile, int64_t out, float* y, int64_t stride) {
    const int64_t here = std::min(TILE, out - tile * TILE);
    for (int64_t r = 0; r < rows; ++r)
        std::memcpy(y + r * stride + tile * TILE, total + r * TILE, static_cast<size_t>(here) * 4);
}

#if GQ_X86
// Fetches a tile's next `vectors` of 32 bytes before they are used, one cache line or two. With AVX-512 one row alone is
// faster without.
GQ_INLINE void ahead(const uint8_t* at, int vectors = 4) {
    _mm_prefetch(reinterpret_cast<const char*>(at + AHEAD), _MM_HINT_T0);
    if (vectors > 2) _mm_prefetch(reinterpret_cast<const char*>(at + AHEAD + 64), _MM_HINT_T0);
}

GQ_FMA2 void round_avx2(const float* x, int64_t groups, int64_t group, bool words, float unit, int32_t* codes, float* steps,
                        int32_t* sums) {
    round_body(x, groups, group, words, unit, codes, steps, sums);
}
GQ_FMA512 void round_avx512(const float* x, int64_t groups, int64_t group, bool words, float unit, int32_t* codes, float* steps,
                            int32_t* sums) {
    round_body(x, groups, group, words, unit, codes, steps, sums);
}

GQ_INLINE GQ_FMA2 __m256 widen256(const uint8_t* at) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
    return _mm256_cvtph_ps(bits);
}

// One half of the columns of K vectors of 8 outputs, as words, into the sums of R rows. A row's pair of activations is
// spread once for all K, and no other is held meanwhile: the sums stay in registers.
template <int R, int K>
GQ_INLINE GQ_FMA2 void add_words(const __m256i* w, const int32_t* const* v, int64_t at, __m256i (*acc)[K]) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
        const __m256i pair = _mm256_set1_epi32(v[r][at]);
#pragma GCC unroll 4
        for (int k = 0; k < K; ++k) acc[r][k] = _mm256_add_epi32(acc[r][k], _mm256_madd_epi16(w[k], pair));
    }
}

// One group of K vectors of 8 outputs, from `part`, for R rows: added to total [R][TILE]. Codes of two columns of an
// output become words, so that vpmaddwd adds them: exact, where vpmaddubsw saturates.
template <int R, int K, int BITS>
GQ_INLINE GQ_FMA2 void add_codes(const uint8_t* tile, const Rounded& x, int64_t row, int64_t g, int64_t part, float* total) {
    const __m256i mask = _mm256_set1_epi16((1 << BITS) - 1);
    const uint8_t* from = tile + header<BITS>() + 32 * part;
    const int32_t* v[R];
    __m256i acc[R][K];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
        const int64_t at = (row + r) * x.groups + g;
        v[r] = x.codes + at * x.group / 2;
        for (int k = 0; k < K; ++k) acc[r][k] = _mm256_set1_epi32(BITS == 8 ? -128 * x.sums[at] : 0);
    }
    for (int64_t c = 0; c < x.group * BITS / 8; c += 4, from += 4 * TILE) {
        ahead(from, K);
        __m256i w[K], words[K];
#pragma GCC unroll 4
        for (int k = 0; k < K; ++k) w[k] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 32 * k));
#pragma GCC unroll 4
        for (int step = 0; step < 16 / BITS; ++step) {
            const int shift = BITS == 8 ? 8 * step : 8 * (step % 2) + 4 * (step / 2);
#pragma GCC unroll 4
            for (int k = 0; k < K; ++k) {
                words[k] = shift ? _mm256_srli_epi16(w[k], shift) : w[k];
                if (shift + BITS < 16) words[k] = _mm256_and_si256(words[k], mask);
            }
            add_words<R, K>(words, v, c * 4 / BITS + step, acc);
        }
    }
    const uint8_t* scales = tile + 16 * part;
#pragma GCC unroll 4
    for (int k = 0; k < K; ++k) {
        const __m256 scale = widen256(scales + 16 * k);
        const __m256 least = BITS == 4 ? widen256(scales + 2 * TILE + 16 * k) : scale;
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
            const int64_t at = (row + r) * x.groups + g;
            float* to = total + r * TILE + 8 * (part + k);
            __m256 value = _mm256_mul_ps(_mm256_cvtepi32_ps(acc[r][k]), scale);
            if (BITS == 4)
                value = _mm256_add_ps(value, _mm256_mul_ps(_mm256_set1_ps(static_cast<float>(x.sums[at])), least));
            value = _mm256_mul_ps(value, _mm256_set1_ps(x.steps[at]));
            _mm256_storeu_ps(to, _mm256_add_ps(_mm256_loadu_ps(to), value));
        }
    }
}

// Group by group, so that the tile is read once and meanwhile the next group comes from memory.
template <int R, int BITS>
GQ_FMA2 void codes_avx2(const uint8_t* tile, const Rounded& x, int64_t row, float* total) {
    constexpr int ROWS = R < 4 ? R : 4, K = R == 1 ? 4 : 2;
    const int64_t record = header<BITS>() + TILE * x.group * BITS / 8;
    std::fill(total, total + R * TILE, 0.0f);
    for (int64_t g = 0; g < x.groups; ++g, tile += record)
        for (int64_t part = 0; part < 4; part += K)
            for (int r = 0; r < R; r += ROWS) add_codes<ROWS, K, BITS>(tile, x, row + r, g, part, total + r * TILE);
}

GQ_INLINE GQ_FMA512 __m512 widen512(const uint8_t* at) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
    return _mm512_cvtph_ps(bits);
}

// What both AVX-512 forms do at a group's end.
template <int BITS>
GQ_INLINE GQ_FMA512 __m512 add_group(__m512 sum, __m512i counts, __m512 scale, __m512 least, const Rounded& x, int64_t at) {
    __m512 value = _mm512_mul_ps(_mm512_cvtepi32_ps(counts), scale);
    if (BITS == 4)
        value = _mm512_add_ps(value, _mm512_mul_ps(_mm512_set1_ps(static_cast<float>(x.sums[at])), least));
    return _mm512_add_ps(sum, _mm512_mul_ps(value, _mm512_set1_ps(x.steps[at])));
}

template <int R, int BITS>
GQ_FMA512 void codes_avx512(const uint8_t* tile, const Rounded& x, int64_t row, float* total) {
    const __m512i byte = _mm512_set1_epi16(255), low = _mm512_set1_epi8(15);
    __m512 sum[R][2];
    for (int r = 0; r < R; ++r) sum[r][0] = sum[r][1] = _mm512_setzero_ps();
    for (int64_t g = 0; g < x.groups; ++g) {
        const uint8_t *scales = tile, *from = tile + header<BITS>();
        const int32_t* v[R];
        __m512i acc[R][2];
        for (int r = 0; r < R; ++r) {
            const int64_t at = (row + r) * x.groups + g;
            v[r] = x.codes + at * x.group / 2;
            acc[r][0] = acc[r][1] = _mm512_set1_epi32(BITS == 8 ? -128 * x.sums[at] : 0);
        }
        for (int64_t c = 0; c < x.group * BITS / 8; c += 4, from += 4 * TILE) {
            if (R > 1) ahead(from);
            const __m512i w[2] = {_mm512_loadu_si512(from), _mm512_loadu_si512(from + 64)};
#pragma GCC unroll 2
            for (int half = 0; half < 8 / BITS; ++half) {
                const int64_t at = (c * 8 / BITS + 4 * half) / 2;
#pragma GCC unroll 2
                for (int k = 0; k < 2; ++k) {
                    __m512i b = w[k];
                    if (BITS == 4) b = _mm512_and_si512(half ? _mm512_srli_epi16(b, 4) : b, low);
                    const __m512i even = _mm512_and_si512(b, byte), odd = _mm512_srli_epi16(b, 8);
#pragma GCC unroll 8
                    for (int r = 0; r < R; ++r) {
                        acc[r][k] = _mm512_add_epi32(acc[r][k], _mm512_madd_epi16(even, _mm512_set1_epi32(v[r][at])));
                        acc[r][k] = _mm512_add_epi32(acc[r][k], _mm512_madd_epi16(odd, _mm512_set1_epi32(v[r][at + 1])));
                    }
                }
            }
        }
        for (int k = 0; k < 2; ++k) {
            const __m512 scale = widen512(scales + 32 * k);
            const __m512 least = BITS == 4 ? widen512(scales + 2 * TILE + 32 * k) : scale;
            for (int r = 0; r < R; ++r)
                sum[r][k] = add_group<BITS>(sum[r][k], acc[r][k], scale, least, x, (row + r) * x.groups + g);
        }
        tile = from;
    }
    for (int r = 0; r < R; ++r)
        for (int k = 0; k < 2; ++k) _mm512_storeu_ps(total + r * TILE + 16 * k, sum[r][k]);
}

template <int R, int BITS>
GQ_VNNI512 void codes_vnni(const uint8_t* tile, const Rounded& x, int64_t row, float* total) {
    const __m512i low = _mm512_set1_epi8(15);
    __m512 sum[R][2];
    for (int r = 0; r < R; ++r) sum[r][0] = sum[r][1] = _mm512_setzero_ps();
    for (int64_t g = 0; g < x.groups; ++g) {
        const uint8_t *scales = tile, *from = tile + header<BITS>();
        const int32_t* v[R];
        __m512i high[R][2], rest[R][2];
        for (int r = 0; r < R; ++r) {
            const int64_t at = (row + r) * x.groups + g;
            v[r] = x.codes + at * x.group / 2;
            high[r][0] = high[r][1] = _mm512_setzero_si512();
            rest[r][0] = rest[r][1] = _mm512_set1_epi32(BITS == 8 ? -128 * x.sums[at] : 0);
        }
        for (int64_t c = 0; c < x.group * BITS / 8; c += 4, from += 4 * TILE) {
            if (R > 1) ahead(from);
            const __m512i w[2] = {_mm512_loadu_si512(from), _mm512_loadu_si512(from + 64)};
#pragma GCC unroll 2
            for (int half = 0; half < 8 / BITS; ++half) {
                const int64_t at = (c * 8 / BITS + 4 * half) / 2;
                __m512i b[2] = {w[0], w[1]};
                if (BITS == 4)
                    for (int k = 0; k < 2; ++k) b[k] = _mm512_and_si512(half ? _mm512_srli_epi16(b[k], 4) : b[k], low);
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r) {
                    const __m512i h = _mm512_set1_epi32(v[r][at]), l = _mm512_set1_epi32(v[r][at + 1]);
                    high[r][0] = _mm512_dpbusd_epi32(high[r][0], b[0], h);
                    high[r][1] = _mm512_dpbusd_epi32(high[r][1], b[1], h);
                    rest[r][0] = _mm512_dpbusd_epi32(rest[r][0], b[0], l);
                    rest[r][1] = _mm512_dpbusd_epi32(rest[r][1], b[1], l);
                }
            }
        }
        for (int k = 0; k < 2; ++k) {
            const __m512 scale = widen512(scales + 32 * k);
            const __m512 least = BITS == 4 ? widen512(scales + 2 * TILE + 32 * k) : scale;
            for (int r = 0; r < R; ++r) {
                const __m512i counts = _mm512_add_epi32(_mm512_slli_epi32(high[r][k], 8), rest[r][k]);
                sum[r][k] = add_group<BITS>(sum[r][k], counts, scale, least, x, (row + r) * x.groups + g);
            }
        }
        tile = from;
    }
    for (int r = 0; r < R; ++r)
        for (int k = 0; k < 2; ++k) _mm512_storeu_ps(total + r * TILE + 16 * k, sum[r][k]);
}

// Columns [start, stop) of K vectors of 8 outputs, from `part`, for R rows: even [R][TILE], odd behind it.
template <int R, int K>
GQ_INLINE GQ_FMA2 void add_floats(const uint8_t* from, const float* x, int64_t cols, int64_t start, int64_t stop,
                                  int64_t part, float* even, float* odd) {
    const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xFFFF0000u));
    __m256 evens[R][K], odds[R][K];
    even += 8 * part, odd += 8 * part;
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int k = 0; k < K; ++k) {
            evens[r][k] = _mm256_loadu_ps(even + r * TILE + 8 * k);
            odds[r][k] = _mm256_loadu_ps(odd + r * TILE + 8 * k);
        }
    from += 2 * TILE * start + 32 * part;
    for (int64_t c = start; c < stop; c += 2, from += 4 * TILE) {
        ahead(from, K);
        __m256i w[K];
#pragma GCC unroll 4
        for (int k = 0; k < K; ++k) w[k] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 32 * k));
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
            const __m256 value = _mm256_set1_ps(x[r * cols + c]);
#pragma GCC unroll 4
            for (int k = 0; k < K; ++k)
                evens[r][k] = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_slli_epi32(w[k], 16)), value, evens[r][k]);
        }
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
            const __m256 value = _mm256_set1_ps(x[r * cols + c + 1]);
#pragma GCC unroll 4
            for (int k = 0; k < K; ++k)
                odds[r][k] = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_and_si256(w[k], upper)), value, odds[r][k]);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int k = 0; k < K; ++k) {
            _mm256_storeu_ps(even + r * TILE + 8 * k, evens[r][k]);
            _mm256_storeu_ps(odd + r * TILE + 8 * k, odds[r][k]);
        }
}

template <int R>
GQ_FMA2 void floats_avx2(const uint8_t* tile, const float* x, int64_t cols, float* total) {
    constexpr int K = R == 1 ? 4 : 2, ROWS = R == 1 ? 1 : 2;
    float odd[R * TILE] = {};
    std::fill(total, total + R * TILE, 0.0f);
    for (int64_t start = 0; start < cols; start += PASS) {  // so much of a tile stays in the first cache
        const int64_t stop = std::min(cols, start + PASS);
        for (int64_t part = 0; part < 4; part += K)
            for (int r = 0; r < R; r += ROWS)
                add_floats<ROWS, K>(tile, x + r * cols, cols, start, stop, part, total + r * TILE, odd + r * TILE);
    }
    for (int64_t n = 0; n < R * TILE; ++n) total[n] += odd[n];
}

template <int R>
GQ_FMA512 void floats_avx512(const uint8_t* tile, const float* x, int64_t cols, float* total) {
    const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xFFFF0000u));
    __m512 even[R][2], odd[R][2];
    for (int r = 0; r < R; ++r)
        for (int k = 0; k < 2; ++k) even[r][k] = odd[r][k] = _mm512_setzero_ps();
    for (int64_t c = 0; c < cols; c += 2, tile += 4 * TILE) {
        if (R > 1) ahead(tile);
#pragma GCC unroll 2
        for (int k = 0; k < 2; ++k) {
            const __m512i w = _mm512_loadu_si512(tile + 64 * k);
            const __m512 first = _mm512_castsi512_ps(_mm512_slli_epi32(w, 16));
            const __m512 second = _mm512_castsi512_ps(_mm512_and_si512(w, upper));
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                even[r][k] = _mm512_fmadd_ps(first, _mm512_set1_ps(x[r * cols + c]), even[r][k]);
                odd[r][k] = _mm512_fmadd_ps(second, _mm512_set1_ps(x[r * cols + c + 1]), odd[r][k]);
            }
        }
    }
    for (int r = 0; r < R; ++r)
        for (int k = 0; k < 2; ++k) _mm512_storeu_ps(total + r * TILE + 16 * k, _mm512_add_ps(even[r][k], odd[r][k]));
}

// vdpbf16ps: activations are bfloat16 too, two columns in 32 bits.
template <int R>
GQ_BF16512 void pairs_avx512(const uint8_t* tile, const int32_t* x, int64_t pairs, int64_t apart, float* total) {
    __m512 sum[R][2];
    for (int r = 0; r < R; ++r) sum[r][0] = sum[r][1] = _mm512_setzero_ps();
    for (int64_t c = 0; c < pairs; ++c, tile += 4 * TILE) {
        if (R > 1) {
            ahead(tile);
        } else {  // into the second cache: the first has too few misses in flight
            _mm_prefetch(reinterpret_cast<const char*>(tile + AHEAD), _MM_HINT_T1);
            _mm_prefetch(reinterpret_cast<const char*>(tile + AHEAD + 64), _MM_HINT_T1);
        }
        const auto w0 = reinterpret_cast<__m512bh>(_mm512_loadu_si512(tile));
        const auto w1 = reinterpret_cast<__m512bh>(_mm512_loadu_si512(tile + 64));
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const auto v = reinterpret_cast<__m512bh>(_mm512_set1_epi32(x[r * apart + c]));
            sum[r][0] = _mm512_dpbf16_ps(sum[r][0], w0, v);
            sum[r][1] = _mm512_dpbf16_ps(sum[r][1], w1, v);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int k = 0; k < 2; ++k) _mm512_storeu_ps(total + r * TILE + 16 * k, sum[r][k]);
}

// Two of the bfloat16 pairs of 16 outputs from their four codes: columns 0 and 1, then 2 and 3.
template <int BITS>
GQ_INLINE GQ_BF16512 void decode16(__m512i codes, __m512 scale, __m512 least, uint8_t* to) {
    __m512i parts[4];
    for (int k = 0; k < 4; ++k) {
        const __m512i code = _mm512_and_si512(_mm512_srli_epi32(codes, 8 * k), _mm512_set1_epi32(255));
        __m512 value = _mm512_cvtepi32_ps(BITS == 8 ? _mm512_sub_epi32(code, _mm512_set1_epi32(128)) : code);
        value = _mm512_mul_ps(value, scale);
        if (BITS == 4) value = _mm512_add_ps(value, least);
        parts[k] = _mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(value)));
    }
    _mm512_storeu_si512(to, _mm512_or_si512(parts[0], _mm512_slli_epi32(parts[1], 16)));
    _mm512_storeu_si512(to + 4 * TILE, _mm512_or_si512(parts[2], _mm512_slli_epi32(parts[3], 16)));
}

// One tile of codes to one of bfloat16, for many rows.
template <int BITS>
GQ_BF16512 void decode_tile(const uint8_t* tile, int64_t groups, int64_t group, float unit, uint8_t* to) {
    const __m512i low = _mm512_set1_epi8(15);
    for (int64_t g = 0; g < groups; ++g) {
        __m512 scale[2], least[2];
        for (int k = 0; k < 2; ++k) {
            scale[k] = _mm512_mul_ps(widen512(tile + 32 * k), _mm512_set1_ps(unit));
            least[k] = _mm512_setzero_ps();
            if (BITS == 4) least[k] = _mm512_mul_ps(widen512(tile + 2 * TILE + 32 * k), _mm512_set1_ps(unit));
        }
        tile += header<BITS>();
        for (int64_t c = 0; c < group; c += 32 / BITS, tile += 4 * TILE) {
            ahead(tile);
            for (int half = 0; half < 8 / BITS; ++half, to += 8 * TILE)
                for (int k = 0; k < 2; ++k) {
                    __m512i b = _mm512_loadu_si512(tile + 64 * k);
                    if (BITS == 4) b = _mm512_and_si512(half ? _mm512_srli_epi16(b, 4) : b, low);
                    decode16<BITS>(b, scale[k], least[k], to + 64 * k);
                }
        }
    }
}

// One row to bfloat16, zeros up to `width`; halves to even.
GQ_BF16512 void round_pairs(const float* x, int64_t cols, int64_t width, uint16_t* to) {
    for (int64_t c = 0; c < width; c += 16) {
        const auto there = static_cast<__mmask16>(cols - c >= 16 ? 0xFFFF : cols > c ? (1 << (cols - c)) - 1 : 0);
        const auto stored = static_cast<__mmask16>(width - c >= 16 ? 0xFFFF : (1 << (width - c)) - 1);
        const __m256i value = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(there, x + c)));
        _mm256_mask_storeu_epi16(to + c, stored, value);
    }
}

constexpr int64_t MOST_PAIRED = 12;  // rows at a time: their sums and two vectors of weights fill the registers
using Pairs = void (*)(const uint8_t* tile, const int32_t* x, int64_t pairs, int64_t apart, float* total);

template <size_t... N>
constexpr std::array<Pairs, sizeof...(N)> pair_kernels(std::index_sequence<N...>) {
    return {pairs_avx512<static_cast<int>(N) + 1>...};
}

// Rows of one bfloat16 tile by vdpbf16ps, in as few passes over the tile as possible, of about equal size.
GQ_BF16512 void tile_by_pairs(const uint8_t* tile, const int32_t* x, int64_t pairs, int64_t apart, int64_t rows,
                              int64_t t, int64_t out, float* y, int64_t stride) {
    static constexpr auto run = pair_kernels(std::make_index_sequence<MOST_PAIRED>());
    alignas(64) float total[MOST_PAIRED * TILE];
    const int64_t passes = (rows + MOST_PAIRED - 1) / MOST_PAIRED;
    for (int64_t pass = 0, r = 0; pass < passes; ++pass) {
        const int64_t some = (rows - r + passes - pass - 1) / (passes - pass);
        run[some - 1](tile, x + r * apart, pairs, apart, total);
        put(total, some, t, out, y + r * stride, stride);
        r += some;
    }
}
#endif

template <class T>
T* aligned(std::vector<T>& store, size_t count) {
    if (store.size() < count + 64) store.resize(count + 64);
    const size_t past = reinterpret_cast<uintptr_t>(store.data()) % 64 / sizeof(T);
    return store.data() + (past ? 64 / sizeof(T) - past : 0);
}

#if GQ_X86
// Many rows by vdpbf16ps; tiles of codes become bfloat16 one at a time, in a core's own cache.
void many_rows(int threads, const Linear& w, const float* x, int64_t n, float* y, int64_t stride) {
    const int64_t groups = w.groups(), width = w.width(), bytes = groups * w.record();
    // Rows that are a multiple of 1024 bytes apart would share the few places of some sets of the first cache.
    const int64_t apart = width + (width % 512 == 0 ? 32 : 0);
    const int64_t pass = std::min(n, std::max(MOST_PAIRED, HELD / (2 * width) / MOST_PAIRED * MOST_PAIRED));
    static thread_local std::vector<uint16_t> rounded_store;
    uint16_t* rounded = aligned(rounded_store, static_cast<size_t>(pass * apart));
    for (int64_t start = 0; start < n; start += pass) {
        const int64_t rows = std::min(pass, n - start);
        auto prepare = [&](int64_t r) { round_pairs(x + (start + r) * w.cols, w.cols, width, rounded + r * apart); };
        parallel_for(rows < 8 ? 1 : threads, rows, prepare);
        auto work = [&](int64_t t) {
            static thread_local std::vector<uint8_t> decoded_store;
            const uint8_t* tile = w.tiles + t * bytes;
            if (w.format != BFLOAT16) {
                uint8_t* decoded = aligned(decoded_store, static_cast<size_t>(2 * TILE * width));
                (w.format == INT4 ? decode_tile<4> : decode_tile<8>)(tile, groups, w.group, w.unit, decoded);
                tile = decoded;
            }
            tile_by_pairs(tile, reinterpret_cast<const int32_t*>(rounded), width / 2, apart / 2, rows, t,
                          w.rows, y + start * stride, stride);
        };
        parallel_for(threads, w.num_tiles(), work);
    }
}
#endif

// Kernels for 8 (null where 4 are as fast), 4, 2 and 1 rows at a time.
template <class Run>
struct Kernels {
    Run by[4];
    bool words;  // needs rounded words

    // The largest for so many rows, and how many it takes.
    std::pair<Run, int64_t> at_most(int64_t rows) const {
        const int from = rows >= 8 && by[0] ? 0 : rows >= 4 ? 1 : rows >= 2 ? 2 : 3;
        return {by[from], 8 >> from};
    }
};
constexpr int64_t MOST_ROWS = 8;

template <int BITS>
Kernels<Codes> code_kernels(int kernel) {
#if GQ_X86
    if (kernel == BY_VNNI) return {{nullptr, codes_vnni<4, BITS>, codes_vnni<2, BITS>, codes_vnni<1, BITS>}, false};
    if (kernel == BY_AVX512)
        return {{nullptr, codes_avx512<4, BITS>, codes_avx512<2, BITS>, codes_avx512<1, BITS>}, true};
    if (kernel == BY_AVX2)
        return {{codes_avx2<8, BITS>, codes_avx2<4, BITS>, codes_avx2<2, BITS>, codes_avx2<1, BITS>}, true};
#endif
    (void)kernel;
    return {{nullptr, codes_scalar<4, BITS>, codes_scalar<2, BITS>, codes_scalar<1, BITS>}, true};
}

Kernels<Floats> float_kernels(int kernel) {
#if GQ_X86
    if (kernel == BY_AVX2) return {{floats_avx2<8>, floats_avx2<4>, floats_avx2<2>, floats_avx2<1>}, false};
    if (kernel == BY_AVX512) return {{nullptr, floats_avx512<4>, floats_avx512<2>, floats_avx512<1>}, false};
#endif
    (void)kernel;
    return {{nullptr, floats_scalar<4>, floats_scalar<2>, floats_scalar<1>}, false};
}

int kernel_of(int path, int features, const Linear& w, bool many) {
    if (path == SCALAR || !(features & FMA)) return BY_SCALAR;
    if (path == AVX2) return BY_AVX2;
    if ((many || w.format == BFLOAT16) && (features & BF16)) return BY_BF16;
    return w.format != BFLOAT16 && (features & VNNI) ? BY_VNNI : BY_AVX512;
}

// Rows of x that keep their work space in the cache.
int64_t rows_a_pass(int64_t n, int64_t bytes) {
    return std::min(n, std::max(MOST_ROWS, CACHED / bytes / MOST_ROWS * MOST_ROWS));
}

// Row by row into a work space of `width` columns, zeros past the last.
float* padded_row(const float* from, int64_t cols, int64_t width, float* to) {
    std::memcpy(to, from, static_cast<size_t>(cols) * 4);
    std::fill(to + cols, to + width, 0.0f);
    return to;
}

void multiply_codes(int kernel, int threads, const Linear& w, const float* x, int64_t n, float* y, int64_t stride) {
    const Kernels<Codes> run = w.format == INT4 ? code_kernels<4>(kernel) : code_kernels<8>(kernel);
    Round round = round_scalar;
#if GQ_X86
    if (kernel == BY_AVX2) round = round_avx2;
    if (kernel == BY_AVX512 || kernel == BY_VNNI) round = round_avx512;
#endif
    const int64_t groups = w.groups(), width = w.width(), pass = rows_a_pass(n, 2 * width);
    static thread_local std::vector<int32_t> codes_store, sums_store;
    static thread_local std::vector<float> steps_store, padded_store;
    const Rounded rounded{groups, w.group, aligned(codes_store, static_cast<size_t>(pass * width / 2)),
                          aligned(steps_store, static_cast<size_t>(pass * groups)),
                          aligned(sums_store, static_cast<size_t>(pass * groups))};
    float* padded = width == w.cols ? nullptr : aligned(padded_store, static_cast<size_t>(pass * width));
    for (int64_t start = 0; start < n; start += pass) {
        const int64_t rows = std::min(pass, n - start);
        auto prepare = [&](int64_t r) {
            const float* from = x + (start + r) * w.cols;
            if (padded) from = padded_row(from, w.cols, width, padded + r * width);
            round(from, groups, w.group, run.words, w.unit, rounded.codes + r * width / 2, rounded.steps + r * groups,
                  rounded.sums + r * groups);
        };
        parallel_for(rows < 8 ? 1 : threads, rows, prepare);
        auto work = [&](int64_t t) {
            alignas(64) float total[MOST_ROWS * TILE];
            const uint8_t* tile = w.tiles + t * groups * w.record();
            for (int64_t r = 0; r < rows;) {
                const auto [multiply, some] = run.at_most(rows - r);
                multiply(tile, rounded, r, total);
                put(total, some, t, w.rows, y + (start + r) * stride, stride);
                r += some;
            }
        };
        parallel_for(threads, w.num_tiles(), work);
    }
}

void multiply_floats(int kernel, int threads, const Linear& w, const float* x, int64_t n, float* y, int64_t stride) {
    const Kernels<Floats> run = float_kernels(kernel);
    const int64_t width = w.width(), pass = rows_a_pass(n, 4 * width);
    static thread_local std::vector<float> padded_store;
    float* padded = width == w.cols ? nullptr : aligned(padded_store, static_cast<size_t>(pass * width));
    for (int64_t start = 0; start < n; start += pass) {
        const int64_t rows = std::min(pass, n - start);
        const float* from = x + start * w.cols;
        if (padded) {
            for (int64_t r = 0; r < rows; ++r) padded_row(from + r * w.cols, w.cols, width, padded + r * width);
            from = padded;
        }
        auto work = [&](int64_t t) {
            alignas(64) float total[MOST_ROWS * TILE];
            const uint8_t* tile = w.tiles + t * width * 2 * TILE;
            for (int64_t r = 0; r < rows;) {
                const auto [multiply, some] = run.at_most(rows - r);
                multiply(tile, from + r * width, width, total);
                put(total, some, t, w.rows, y + (start + r) * stride, stride);
                r += some;
            }
        };
        parallel_for(threads, w.num_tiles(), work);
    }
}

}  // namespace

void multiply(int path, int threads, int features, const Linear& w, bool many, const float* x, int64_t n, float* y,
              int64_t stride) {
    const int kernel = kernel_of(path, features, w, many);
    last_kernel.store(kernel, std::memory_order_relaxed);
#if GQ_X86
    if (kernel == BY_BF16) return many_rows(threads, w, x, n, y, stride);
#endif
    if (w.format == BFLOAT16) return multiply_floats(kernel, threads, w, x, n, y, stride);
    multiply_codes(kernel, threads, w, x, n, y, stride);
}

}  // namespace gq

using namespace gq;

// y [n, rows] from x [n, cols], float32. `many`: by products in bfloat16 where path and processor have them.
GQ_API int gq_linear(int path, int threads, int features, const Linear* w, int many, const float* x, int64_t n, float* y) {
    return guarded([&] {
        multiply(path, threads, features, *w, many != 0, x, n, y, w->rows);
        return static_cast<int>(OK);
    });
}

// Of the last product of any thread; -1 before the first.
GQ_API int gq_linear_kernel() { return last_kernel.load(std::memory_order_relaxed); }
