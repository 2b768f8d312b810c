// y[b] += delta of b's own variant @ x[b], by tables of the 16 signed sums of four inputs in 8 or 16 bits (T-MAC,
// arXiv 2407.00088). A row's tables depend on its inputs alone, so every delta of as many inputs takes the same.
//
// Tables of a row: [unit][128]: 16 sums for the low half of each of its 4 bytes, then for the high halves; with 16 bits
// [unit][256], upper bytes first.
//
// What a path may not change: a step for every block of 1,024 inputs (of the row, whatever the groups); entries
// round(most / largest sum * sum), half to even; whole numbers are added exactly; then in float32, each operation
// rounded by itself, for every block: sums = 0; for every group's part of it: sums += count * scale [, sums += ones *
// offset]; total += sums * step. At the end y += total.
#include <cmath>
#include <limits>

#include "sign_tiles.h"

namespace gq {
namespace {

constexpr int64_t BLOCK = 128;   // bytes of a row with one step
constexpr int64_t AHEAD = 4096;  // bytes of bits asked for ahead of use
constexpr int64_t FAR = 8192;    // the same by vpermb, into the second cache: the first has too few misses in flight
constexpr int64_t CACHE = 384 * 1024;  // bytes of tables that stay in a core's second cache
constexpr int64_t PIECE = 32 * 1024;   // bytes of bits in a piece of work, about
constexpr int MOST_ROWS = 4;
constexpr float LEAST = 1e-30f;  // a block whose largest sum is smaller counts as zero: its factor would overflow

inline int64_t blocks_of(int64_t bytes) { return (bytes + BLOCK - 1) / BLOCK; }

// ------------------------------------------------------------------------------------------------ tables

// x of whole units (zeros past the end). False where a sum of four is not finite.
template <bool WIDE>
GQ_INLINE bool tables_body(const float* x, int64_t units, uint8_t* codes, float* steps) {
    constexpr float TOP = WIDE ? 32767.0f : 127.0f;
    bool finite = true;
    for (int64_t at = 0; at < units; at += BLOCK / UNIT) {
        const int64_t stop = std::min(units, at + BLOCK / UNIT);
        float most = 0.0f;
        for (int64_t n = 8 * at; n < 8 * stop; ++n) {
            const float* v = x + 4 * n;
            const float sum = (std::fabs(v[0]) + std::fabs(v[1])) + (std::fabs(v[2]) + std::fabs(v[3]));
            most = sum > most ? sum : most;
            finite &= sum < INFINITY;
        }
        const float factor = most > LEAST ? TOP / most : 0.0f;
        *steps++ = most > LEAST ? most / TOP : 0.0f;
        for (int64_t n = 8 * at; n < 8 * stop; ++n) {
            const float* v = x + 4 * n;
            const float low[4] = {-v[0] - v[1], v[0] - v[1], -v[0] + v[1], v[0] + v[1]};
            const float high[4] = {-v[2] - v[3], v[2] - v[3], -v[2] + v[3], v[2] + v[3]};
            uint8_t* to = codes + (n / 8) * (WIDE ? 256 : 128) + 64 * (n & 1) + 16 * ((n & 7) >> 1);
            for (int j = 0; j < 16; ++j) {
                const float shifted = (low[j & 3] + high[j >> 2]) * factor + 12582912.0f;  // 1.5 * 2^23: half to even
                uint32_t bits;
                std::memcpy(&bits, &shifted, 4);
                if (WIDE) {
                    to[j] = static_cast<uint8_t>((bits + 32768u) >> 8);
                    to[128 + j] = static_cast<uint8_t>(bits + 32768u);
                } else {
                    to[j] = static_cast<uint8_t>(bits + 128u);
                }
            }
        }
    }
    return finite;
}

template <bool WIDE>
bool tables_scalar(const float* x, int64_t units, uint8_t* codes, float* steps) {
    return tables_body<WIDE>(x, units, codes, steps);
}

#if GQ_X86
// Eight sums of four a time: quad's low sums in both lanes, its high sums spread.
template <bool WIDE>
GQ_AVX2 bool tables_avx2(const float* x, int64_t units, uint8_t* codes, float* steps) {
    constexpr float TOP = WIDE ? 32767.0f : 127.0f;
    const __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff)), inf = _mm256_set1_ps(INFINITY);
    const __m256 minus = _mm256_set1_ps(-0.0f), zero = _mm256_setzero_ps();
    const __m256 first = _mm256_blend_ps(zero, minus, 0x55), second = _mm256_blend_ps(zero, minus, 0x33);
    __m256 good = _mm256_castsi256_ps(_mm256_set1_epi32(-1));
    for (int64_t at = 0; at < units; at += BLOCK / UNIT) {
        const int64_t stop = std::min(units, at + BLOCK / UNIT);
        __m256 large = zero;
        for (int64_t c = 32 * at; c < 32 * stop; c += 8) {
            __m256 a = _mm256_and_ps(_mm256_loadu_ps(x + c), magnitude);
            a = _mm256_add_ps(a, _mm256_permute_ps(a, 0xB1));
            a = _mm256_add_ps(a, _mm256_permute_ps(a, 0x4E));
            good = _mm256_and_ps(good, _mm256_cmp_ps(a, inf, _CMP_LT_OQ));
            large = _mm256_max_ps(large, a);
        }
        float lanes[8];
        _mm256_storeu_ps(lanes, large);
        const float most = std::max(lanes[0], lanes[4]);
        const __m256 factor = _mm256_set1_ps(most > LEAST ? TOP / most : 0.0f);
        *steps++ = most > LEAST ? most / TOP : 0.0f;
        for (int64_t u = at; u < stop; ++u) {
            uint8_t* to = codes + u * (WIDE ? 256 : 128);
            for (int i = 0; i < 4; ++i) {  // byte i of the unit: a quad in each lane
                const __m256 v = _mm256_loadu_ps(x + 32 * u + 8 * i);
                const __m256 low = _mm256_add_ps(_mm256_xor_ps(_mm256_permute_ps(v, 0x00), first),
                                                 _mm256_xor_ps(_mm256_permute_ps(v, 0x55), second));
                const __m256 high = _mm256_add_ps(_mm256_xor_ps(_mm256_permute_ps(v, 0xAA), first),
                                                  _mm256_xor_ps(_mm256_permute_ps(v, 0xFF), second));
                __m256i q[4];  // sums 4p to 4p + 3 of both quads
#define GQ_PART(p)                                                                                              \
    q[p] = _mm256_cvtps_epi32(                                                                                  \
        _mm256_mul_ps(_mm256_add_ps(low, _mm256_permute_ps(high, 0x55 * p)), factor));
                GQ_PART(0) GQ_PART(1) GQ_PART(2) GQ_PART(3)
#undef GQ_PART
                const __m256i a = _mm256_packs_epi32(q[0], q[1]), b = _mm256_packs_epi32(q[2], q[3]);
                __m256i upper, lower = a;
                if (WIDE) {
                    const __m256i mask = _mm256_set1_epi16(255);
                    upper = _mm256_packs_epi16(_mm256_srai_epi16(a, 8), _mm256_srai_epi16(b, 8));
                    lower = _mm256_packus_epi16(_mm256_and_si256(a, mask), _mm256_and_si256(b, mask));
                } else {
                    upper = _mm256_packs_epi16(a, b);
                }
                upper = _mm256_xor_si256(upper, _mm256_set1_epi8(-128));
                _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 16 * i), _mm256_castsi256_si128(upper));
                _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 64 + 16 * i), _mm256_extracti128_si256(upper, 1));
                if (WIDE) {
                    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 128 + 16 * i), _mm256_castsi256_si128(lower));
                    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 192 + 16 * i),
                                     _mm256_extracti128_si256(lower, 1));
                }
            }
        }
    }
    return _mm256_movemask_ps(good) == 255;
}

// The same with two bytes, four quads, a vector.
template <bool WIDE>
GQ_AVX512 bool tables_avx512(const float* x, int64_t units, uint8_t* codes, float* steps) {
    constexpr float TOP = WIDE ? 32767.0f : 127.0f;
    const __m512 inf = _mm512_set1_ps(INFINITY), minus = _mm512_set1_ps(-0.0f);
    const __m512 first = _mm512_maskz_mov_ps(0x5555, minus), second = _mm512_maskz_mov_ps(0x3333, minus);
    const __m512i even = _mm512_setr_epi64(0, 1, 4, 5, 8, 9, 12, 13), odd = _mm512_setr_epi64(2, 3, 6, 7, 10, 11, 14, 15);
    __mmask16 good = 0xffff;
    for (int64_t at = 0; at < units; at += BLOCK / UNIT) {
        const int64_t stop = std::min(units, at + BLOCK / UNIT);
        __m512 large = _mm512_setzero_ps();
        for (int64_t c = 32 * at; c < 32 * stop; c += 16) {
            __m512 a = _mm512_abs_ps(_mm512_loadu_ps(x + c));
            a = _mm512_add_ps(a, _mm512_permute_ps(a, 0xB1));
            a = _mm512_add_ps(a, _mm512_permute_ps(a, 0x4E));
            good &= _mm512_cmp_ps_mask(a, inf, _CMP_LT_OQ);
            large = _mm512_max_ps(large, a);
        }
        const float most = _mm512_reduce_max_ps(large);
        const __m512 factor = _mm512_set1_ps(most > LEAST ? TOP / most : 0.0f);
        *steps++ = most > LEAST ? most / TOP : 0.0f;
        for (int64_t u = at; u < stop; ++u) {
            uint8_t* to = codes + u * (WIDE ? 256 : 128);
            __m512i upper[2], lower[2];
            for (int h = 0; h < 2; ++h) {
                const __m512 v = _mm512_loadu_ps(x + 32 * u + 16 * h);
                const __m512 low = _mm512_add_ps(_mm512_xor_ps(_mm512_permute_ps(v, 0x00), first),
                                                 _mm512_xor_ps(_mm512_permute_ps(v, 0x55), second));
                const __m512 high = _mm512_add_ps(_mm512_xor_ps(_mm512_permute_ps(v, 0xAA), first),
                                                  _mm512_xor_ps(_mm512_permute_ps(v, 0xFF), second));
                __m512i q[4];
#define GQ_PART(p) \
    q[p] = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_add_ps(low, _mm512_permute_ps(high, 0x55 * p)), factor));
                GQ_PART(0) GQ_PART(1) GQ_PART(2) GQ_PART(3)
#undef GQ_PART
                const __m512i a = _mm512_packs_epi32(q[0], q[1]), b = _mm512_packs_epi32(q[2], q[3]);
                if (WIDE) {
                    const __m512i mask = _mm512_set1_epi16(255);
                    upper[h] = _mm512_packs_epi16(_mm512_srai_epi16(a, 8), _mm512_srai_epi16(b, 8));
                    lower[h] = _mm512_packus_epi16(_mm512_and_si512(a, mask), _mm512_and_si512(b, mask));
                } else {
                    upper[h] = _mm512_packs_epi16(a, b);
                }
                upper[h] = _mm512_xor_si512(upper[h], _mm512_set1_epi8(-128));
            }
            _mm512_storeu_si512(to, _mm512_permutex2var_epi64(upper[0], even, upper[1]));
            _mm512_storeu_si512(to + 64, _mm512_permutex2var_epi64(upper[0], odd, upper[1]));
            if (WIDE) {
                _mm512_storeu_si512(to + 128, _mm512_permutex2var_epi64(lower[0], even, lower[1]));
                _mm512_storeu_si512(to + 192, _mm512_permutex2var_epi64(lower[0], odd, lower[1]));
            }
        }
    }
    return good == 0xffff;
}
#endif

// ------------------------------------------------------------------------------------------------ products

// What a call of a kernel needs of some rows with one delta.
struct Rows {
    const uint8_t* codes[MOST_ROWS];
    const float* steps[MOST_ROWS];
    const int32_t* ones[MOST_ROWS];  // of every part: whole number sum of the inputs; null where no delta needs it
    const uint8_t *end, *next;       // where the bits of this piece of work end, and those of the next begin

    // Where the bits lie that are used `FAR` bytes after `from`.
    const uint8_t* after(const uint8_t* from) const {
        const uint8_t* later = from + FAR;
        return later < end ? later : next + (later - end);
    }
};

// Asks for the first scales of a tile.
inline void ahead(const float* scales) {
#if GQ_X86
    for (int k = 0; k < 4; ++k) _mm_prefetch(reinterpret_cast<const char*>(scales + 16 * k), _MM_HINT_T0);
#else
    (void)scales;
#endif
}

// total[r][64] of one tile for R rows.
using Tile = void (*)(const Delta& delta, int64_t tile, int64_t bytes, const Rows& rows, float* const* total);

// Byte counts of a part [start, stop) of the row, added to counts[R][64] with a shift.
using Counts = void (*)(const uint8_t* bits, int64_t stride, int64_t start, int64_t stop, const Rows& rows, int shift,
                        int32_t* counts);

template <int R, bool WIDE>
void counts_scalar(const uint8_t* bits, int64_t stride, int64_t start, int64_t stop, const Rows& rows, int shift,
                   int32_t* counts) {
    for (int64_t c = start; c < stop; ++c) {
        const uint8_t* from = bits + (c / UNIT) * stride + c % UNIT;
        for (int r = 0; r < R; ++r) {
            const uint8_t* t = rows.codes[r] + (c / UNIT) * (WIDE ? 256 : 128) + 16 * (c % UNIT);
            for (int o = 0; o < TILE; ++o) {
                const int byte = from[UNIT * o], a = byte & 15, b = 64 + (byte >> 4);
                int32_t sum = t[a] + t[b];
                if (WIDE)
                    sum = 256 * sum + t[128 + a] + t[128 + b] - 65536;
                else
                    sum -= 256;
                counts[TILE * r + o] += sum * (1 << shift);
            }
        }
    }
}

#if GQ_X86
// A unit's bytes of 32 outputs, [32][4], to four vectors of one byte of each output (order: see below).
GQ_AVX2 GQ_INLINE void columns_avx2(const uint8_t* from, __m256i* out) {
    const __m256i turn = _mm256_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15, 0, 4, 8, 12, 1, 5, 9, 13,
                                          2, 6, 10, 14, 3, 7, 11, 15);
    __m256i v[4];
    for (int k = 0; k < 4; ++k)
        v[k] = _mm256_shuffle_epi8(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 32 * k)), turn);
    const __m256i a = _mm256_unpacklo_epi32(v[0], v[1]), b = _mm256_unpackhi_epi32(v[0], v[1]);
    const __m256i c = _mm256_unpacklo_epi32(v[2], v[3]), d = _mm256_unpackhi_epi32(v[2], v[3]);
    out[0] = _mm256_unpacklo_epi64(a, c), out[1] = _mm256_unpackhi_epi64(a, c);
    out[2] = _mm256_unpacklo_epi64(b, d), out[3] = _mm256_unpackhi_epi64(b, d);
}

// Bytes are summed as pairs in 16 bits: `pairs` takes both (and wraps), `odds` the upper ones; at the end the
// lower ones are the difference (Andre et al. 2017, and faiss's fast scan).
// One row takes both halves of the outputs at once, so that its tables are spread over a vector once.
template <int R, bool WIDE>
GQ_AVX2 void counts_avx2(const uint8_t* bits, int64_t stride, int64_t start, int64_t stop, const Rows& rows, int shift,
                         int32_t* counts) {
    constexpr int W = WIDE ? 2 : 1, H = R == 1 ? 2 : 1;  // tables of a row; halves at a time
    const __m256i low = _mm256_set1_epi8(15);
    for (int half = 0; half < 2; half += H) {
        __m256i pairs[R][W][H], odds[R][W][H];
        for (int r = 0; r < R; ++r)
            for (int w = 0; w < W; ++w)
                for (int h = 0; h < H; ++h) pairs[r][w][h] = odds[r][w][h] = _mm256_setzero_si256();
        for (int64_t c = start; c < stop;) {
            const int64_t unit = c / UNIT, end = std::min(stop, UNIT * (unit + 1));
            const uint8_t* from = bits + unit * stride + 128 * half;
            __m256i column[H][4];
            for (int h = 0; h < H; ++h) {
                _mm_prefetch(reinterpret_cast<const char*>(from + AHEAD + 128 * h), _MM_HINT_T0);
                _mm_prefetch(reinterpret_cast<const char*>(from + AHEAD + 128 * h + 64), _MM_HINT_T0);
                columns_avx2(from + 128 * h, column[h]);
            }
            for (; c < end; ++c) {
                __m256i i0[H], i1[H];
#pragma GCC unroll 2
                for (int h = 0; h < H; ++h) {
                    i0[h] = _mm256_and_si256(column[h][c % UNIT], low);
                    i1[h] = _mm256_and_si256(_mm256_srli_epi16(column[h][c % UNIT], 4), low);
                }
#pragma GCC unroll 4
                for (int r = 0; r < R; ++r)
                    for (int w = 0; w < W; ++w) {
                        const uint8_t* t = rows.codes[r] + unit * 128 * W + 128 * w + 16 * (c % UNIT);
                        const __m256i t0 = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(t)));
                        const __m256i t1 =
                            _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(t + 64)));
#pragma GCC unroll 2
                        for (int h = 0; h < H; ++h) {
                            const __m256i a = _mm256_shuffle_epi8(t0, i0[h]), b = _mm256_shuffle_epi8(t1, i1[h]);
                            pairs[r][w][h] = _mm256_add_epi16(pairs[r][w][h], _mm256_add_epi16(a, b));
                            odds[r][w][h] = _mm256_add_epi16(
                                odds[r][w][h], _mm256_add_epi16(_mm256_srli_epi16(a, 8), _mm256_srli_epi16(b, 8)));
                        }
                    }
            }
        }
        const __m256i bias = _mm256_set1_epi16(static_cast<short>(256 * (stop - start)));
        for (int r = 0; r < R; ++r)
            for (int w = 0; w < W; ++w)
                for (int h = 0; h < H; ++h) {
                    int32_t* to = counts + TILE * r + 32 * (half + h);
                    const __m256i odd = odds[r][w][h];
                    const __m256i e =
                        _mm256_sub_epi16(_mm256_sub_epi16(pairs[r][w][h], _mm256_slli_epi16(odd, 8)), bias);
                    const __m256i o = _mm256_sub_epi16(odd, bias);
                    // A lane holds outputs 0-3, 8-11, 16-19, 24-27, the other those between.
                    const __m256i u = _mm256_permute4x64_epi64(_mm256_unpacklo_epi16(e, o), 0xD8);
                    const __m256i v = _mm256_permute4x64_epi64(_mm256_unpackhi_epi16(e, o), 0xD8);
                    const __m128i parts[4] = {_mm256_castsi256_si128(u), _mm256_extracti128_si256(u, 1),
                                              _mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1)};
                    const __m128i by = _mm_cvtsi32_si128(shift + (WIDE && w == 0 ? 8 : 0));
                    const __m256i more =
                        _mm256_set1_epi32(WIDE && w == 1 ? static_cast<int>(256 * (stop - start)) << shift : 0);
                    for (int k = 0; k < 4; ++k) {
                        __m256i* at = reinterpret_cast<__m256i*>(to + 8 * k);
                        const __m256i sum = _mm256_add_epi32(_mm256_sll_epi32(_mm256_cvtepi16_epi32(parts[k]), by), more);
                        _mm256_storeu_si256(at, _mm256_add_epi32(_mm256_loadu_si256(at), sum));
                    }
                }
    }
}

GQ_AVX512 GQ_INLINE void columns_avx512(const uint8_t* from, __m512i* out) {
    const __m512i turn = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    __m512i v[4];
    for (int k = 0; k < 4; ++k) v[k] = _mm512_shuffle_epi8(_mm512_loadu_si512(from + 64 * k), turn);
    const __m512i a = _mm512_unpacklo_epi32(v[0], v[1]), b = _mm512_unpackhi_epi32(v[0], v[1]);
    const __m512i c = _mm512_unpacklo_epi32(v[2], v[3]), d = _mm512_unpackhi_epi32(v[2], v[3]);
    out[0] = _mm512_unpacklo_epi64(a, c), out[1] = _mm512_unpackhi_epi64(a, c);
    out[2] = _mm512_unpacklo_epi64(b, d), out[3] = _mm512_unpackhi_epi64(b, d);
}

template <int R, bool WIDE>
GQ_AVX512 void counts_avx512(const uint8_t* bits, int64_t stride, int64_t start, int64_t stop, const Rows& rows,
                             int shift, int32_t* counts) {
    constexpr int W = WIDE ? 2 : 1;
    const __m512i low = _mm512_set1_epi8(15);
    __m512i pairs[R][W], odds[R][W];
    for (int r = 0; r < R; ++r)
        for (int w = 0; w < W; ++w) pairs[r][w] = odds[r][w] = _mm512_setzero_si512();
    for (int64_t c = start; c < stop;) {
        const int64_t unit = c / UNIT, end = std::min(stop, UNIT * (unit + 1));
        const uint8_t* from = bits + unit * stride;
        for (int k = 0; k < 4; ++k) _mm_prefetch(reinterpret_cast<const char*>(from + AHEAD + 64 * k), _MM_HINT_T0);
        __m512i column[4];
        columns_avx512(from, column);
        for (; c < end; ++c) {
            const __m512i v = column[c % UNIT];
            const __m512i i0 = _mm512_and_si512(v, low), i1 = _mm512_and_si512(_mm512_srli_epi16(v, 4), low);
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r)
                for (int w = 0; w < W; ++w) {
                    const uint8_t* t = rows.codes[r] + unit * 128 * W + 128 * w + 16 * (c % UNIT);
                    const __m512i a = _mm512_shuffle_epi8(
                        _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(t))), i0);
                    const __m512i b = _mm512_shuffle_epi8(
                        _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(t + 64))), i1);
                    pairs[r][w] = _mm512_add_epi16(pairs[r][w], _mm512_add_epi16(a, b));
                    odds[r][w] = _mm512_add_epi16(
                        odds[r][w], _mm512_add_epi16(_mm512_srli_epi16(a, 8), _mm512_srli_epi16(b, 8)));
                }
        }
    }
    const __m512i bias = _mm512_set1_epi16(static_cast<short>(256 * (stop - start)));
    const __m512i line = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    for (int r = 0; r < R; ++r)
        for (int w = 0; w < W; ++w) {
            const __m512i e = _mm512_sub_epi16(_mm512_sub_epi16(pairs[r][w], _mm512_slli_epi16(odds[r][w], 8)), bias);
            const __m512i o = _mm512_sub_epi16(odds[r][w], bias);
            const __m512i u = _mm512_permutexvar_epi64(line, _mm512_unpacklo_epi16(e, o));
            const __m512i v = _mm512_permutexvar_epi64(line, _mm512_unpackhi_epi16(e, o));
            const __m256i parts[4] = {_mm512_castsi512_si256(u), _mm512_extracti64x4_epi64(u, 1),
                                      _mm512_castsi512_si256(v), _mm512_extracti64x4_epi64(v, 1)};
            const __m128i by = _mm_cvtsi32_si128(shift + (WIDE && w == 0 ? 8 : 0));
            const __m512i more = _mm512_set1_epi32(WIDE && w == 1 ? static_cast<int>(256 * (stop - start)) << shift : 0);
            for (int k = 0; k < 4; ++k) {
                int32_t* at = counts + TILE * r + 16 * k;
                const __m512i sum = _mm512_add_epi32(_mm512_sll_epi32(_mm512_cvtepi16_epi32(parts[k]), by), more);
                _mm512_storeu_si512(at, _mm512_add_epi32(_mm512_loadu_si512(at), sum));
            }
        }
}
#endif

// Groups and blocks of a row cut it into parts; the whole numbers of a part, then the float32 additions.
template <int R>
GQ_INLINE void tile_body(const Delta& delta, int64_t tile, int64_t bytes, const Rows& rows, float* const* total,
                         Counts counted) {
    const int64_t groups = delta.groups(bytes), stride = 256 * delta.planes;
    const uint8_t* bits = delta.bits_of(tile, bytes);
    const float* scales = delta.scales_of(tile, bytes);
    const float* offsets = delta.offsets ? delta.offsets + tile * groups * TILE : nullptr;
    for (int r = 0; r < R; ++r) std::memset(total[r], 0, TILE * sizeof(float));
    int64_t part = 0;
    for (int64_t at = 0, block = 0; at < bytes; ++block) {
        const int64_t end = std::min(bytes, at + BLOCK);
        alignas(64) float sums[R][TILE] = {};
        while (at < end) {
            const int64_t group = at / delta.group, stop = std::min(end, (group + 1) * delta.group);
            alignas(64) int32_t counts[R][TILE];
            for (int r = 0; r < R; ++r) {
                const int32_t start = rows.ones[r] ? -delta.zero * rows.ones[r][part] : 0;
                for (int o = 0; o < TILE; ++o) counts[r][o] = start;
            }
            for (int p = 0; p < delta.planes; ++p)
                counted(bits + 256 * p, stride, at, stop, rows, delta.shift[p], counts[0]);
            const float* scale = scales + group * TILE;
            for (int r = 0; r < R; ++r) {
                for (int o = 0; o < TILE; ++o) sums[r][o] += static_cast<float>(counts[r][o]) * scale[o];
                if (offsets) {
                    const float ones = static_cast<float>(rows.ones[r][part]);
                    for (int o = 0; o < TILE; ++o) sums[r][o] += ones * offsets[group * TILE + o];
                }
            }
            at = stop;
            ++part;
        }
        for (int r = 0; r < R; ++r)
            for (int o = 0; o < TILE; ++o) total[r][o] += sums[r][o] * rows.steps[r][block];
    }
}

template <int R, bool WIDE>
void tile_scalar(const Delta& d, int64_t tile, int64_t bytes, const Rows& rows, float* const* total) {
    tile_body<R>(d, tile, bytes, rows, total, counts_scalar<R, WIDE>);
}

#if GQ_X86
template <int R, bool WIDE>
GQ_AVX2 void tile_avx2(const Delta& d, int64_t tile, int64_t bytes, const Rows& rows, float* const* total) {
    tile_body<R>(d, tile, bytes, rows, total, counts_avx2<R, WIDE>);
}
template <int R, bool WIDE>
GQ_AVX512 void tile_avx512(const Delta& d, int64_t tile, int64_t bytes, const Rows& rows, float* const* total) {
    tile_body<R>(d, tile, bytes, rows, total, counts_avx512<R, WIDE>);
}

// One unit of one plane: 64 outputs x 32 inputs x R rows. Four sub-tables of 16 by one vpermb; four sums by vpdpbusd.
template <int R, bool WIDE>
GQ_VBMI GQ_INLINE void unit_vbmi(const uint8_t* bits, int64_t unit, const Rows& rows, __m512i weights,
                                 __m512i (*sums)[4], __m512i (*lower)[4]) {
    const __m512i low = _mm512_set1_epi8(15), places = _mm512_set1_epi32(0x30201000);
    __m512i i0[4], i1[4];
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
        const __m512i v = _mm512_loadu_si512(bits + 64 * k);
        i0[k] = _mm512_ternarylogic_epi32(v, low, places, 0xEA);  // (v & low) | places
        i1[k] = _mm512_ternarylogic_epi32(_mm512_srli_epi16(v, 4), low, places, 0xEA);
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
        const uint8_t* t = rows.codes[r] + unit * (WIDE ? 256 : 128);
        const __m512i t0 = _mm512_loadu_si512(t), t1 = _mm512_loadu_si512(t + 64);
#pragma GCC unroll 4
        for (int k = 0; k < 4; ++k) {
            sums[r][k] = _mm512_dpbusd_epi32(sums[r][k], _mm512_permutexvar_epi8(i0[k], t0), weights);
            sums[r][k] = _mm512_dpbusd_epi32(sums[r][k], _mm512_permutexvar_epi8(i1[k], t1), weights);
        }
        if (WIDE) {
            const __m512i t2 = _mm512_loadu_si512(t + 128), t3 = _mm512_loadu_si512(t + 192);
#pragma GCC unroll 4
            for (int k = 0; k < 4; ++k) {
                lower[r][k] = _mm512_dpbusd_epi32(lower[r][k], _mm512_permutexvar_epi8(i0[k], t2), weights);
                lower[r][k] = _mm512_dpbusd_epi32(lower[r][k], _mm512_permutexvar_epi8(i1[k], t3), weights);
            }
        }
    }
}

// The bytes first to last - 1 of a unit count, by `weight`.
GQ_VBMI GQ_INLINE __m512i weights_of(int64_t first, int64_t last, int weight) {
    uint32_t word = 0;
    for (int64_t i = first; i < last; ++i) word |= static_cast<uint32_t>(weight) << (8 * i);
    return _mm512_set1_epi32(static_cast<int>(word));
}

template <int R, bool WIDE, bool ONE>
GQ_VBMI void tile_vbmi(const Delta& delta, int64_t tile, int64_t bytes, const Rows& rows, float* const* total) {
    const int planes = ONE ? 1 : delta.planes;
    const int64_t groups = delta.groups(bytes), stride = 256 * planes;
    const uint8_t* bits = delta.bits_of(tile, bytes);
    const float* scales = delta.scales_of(tile, bytes);
    const float* offsets = !ONE && delta.offsets ? delta.offsets + tile * groups * TILE : nullptr;
    int all = 1;
    if (!ONE) {
        all = 0;
        for (int p = 0; p < planes; ++p) all += 1 << delta.shift[p];
    }
    const __m512i ones = _mm512_set1_epi8(1);
    for (int r = 0; r < R; ++r)
        for (int k = 0; k < 4; ++k) _mm512_storeu_ps(total[r] + 16 * k, _mm512_setzero_ps());
    int64_t part = 0, group = 0, group_end = std::min(bytes, delta.group);
    for (int64_t at = 0, block = 0; at < bytes; ++block) {
        const int64_t end = std::min(bytes, at + BLOCK);
        __m512 sums[R][4];
        for (int r = 0; r < R; ++r)
            for (int k = 0; k < 4; ++k) sums[r][k] = _mm512_setzero_ps();
        while (at < end) {
            const int64_t stop = std::min(end, group_end);
            __m512i count[R][4], lower[R][4];
            for (int r = 0; r < R; ++r) {
                int32_t start = static_cast<int32_t>(stop - at) * all * (WIDE ? -65536 : -256);
                if (!ONE && rows.ones[r]) start -= delta.zero * rows.ones[r][part];
                for (int k = 0; k < 4; ++k) {
                    count[r][k] = _mm512_set1_epi32(WIDE ? 0 : start);
                    lower[r][k] = _mm512_set1_epi32(start);
                }
            }
            int64_t c = at;
            if (c % UNIT || stop - c < UNIT) {
                const int64_t unit = c / UNIT, last = std::min(stop, UNIT * (unit + 1));
                for (int p = 0; p < planes; ++p)
                    unit_vbmi<R, WIDE>(bits + unit * stride + 256 * p, unit, rows,
                                       weights_of(c % UNIT, last - UNIT * unit, ONE ? 1 : 1 << delta.shift[p]), count,
                                       lower);
                c = last;
            }
            int64_t unit = c / UNIT;
            const uint8_t* from = bits + unit * stride;
            for (const int64_t whole = stop / UNIT; unit < whole; ++unit) {
                for (int p = 0; p < planes; ++p, from += 256) {
                    const uint8_t* later = rows.after(from);
                    for (int k = 0; k < 4; ++k)
                        _mm_prefetch(reinterpret_cast<const char*>(later + 64 * k), _MM_HINT_T1);
                    const __m512i weights = ONE ? ones : _mm512_set1_epi8(static_cast<char>(1 << delta.shift[p]));
                    unit_vbmi<R, WIDE>(from, unit, rows, weights, count, lower);
                }
            }
            if (UNIT * unit < stop && c < stop) {
                for (int p = 0; p < planes; ++p)
                    unit_vbmi<R, WIDE>(bits + unit * stride + 256 * p, unit, rows,
                                       weights_of(0, stop - UNIT * unit, ONE ? 1 : 1 << delta.shift[p]), count, lower);
            }
            for (int r = 0; r < R; ++r)
                for (int k = 0; k < 4; ++k) {
                    const __m512i whole =
                        WIDE ? _mm512_add_epi32(_mm512_slli_epi32(count[r][k], 8), lower[r][k]) : count[r][k];
                    sums[r][k] = _mm512_add_ps(sums[r][k], _mm512_mul_ps(_mm512_cvtepi32_ps(whole),
                                                                         _mm512_loadu_ps(scales + 16 * k)));
                }
            if (offsets)
                for (int r = 0; r < R; ++r) {
                    const __m512 sum = _mm512_set1_ps(static_cast<float>(rows.ones[r][part]));
                    for (int k = 0; k < 4; ++k)
                        sums[r][k] =
                            _mm512_add_ps(sums[r][k], _mm512_mul_ps(sum, _mm512_loadu_ps(offsets + group * TILE + 16 * k)));
                }
            at = stop;
            ++part;
            if (at == group_end) {
                ++group;
                group_end = std::min(bytes, group_end + delta.group);
                scales += TILE;
            }
        }
        for (int r = 0; r < R; ++r) {
            const __m512 step = _mm512_set1_ps(rows.steps[r][block]);
            for (int k = 0; k < 4; ++k) {
                float* to = total[r] + 16 * k;
                _mm512_storeu_ps(to, _mm512_add_ps(_mm512_loadu_ps(to), _mm512_mul_ps(sums[r][k], step)));
            }
        }
    }
}
#endif

struct Kernels {
    Tile one[3];     // 1, 2, 4 rows of a delta of one plane
    Tile levels[3];  // of more
};

template <bool WIDE>
Kernels kernels_of(int path, int features) {
#if GQ_X86
    if (path == AVX512 && (features & 8))
        return {{tile_vbmi<1, WIDE, true>, tile_vbmi<2, WIDE, true>, WIDE ? nullptr : tile_vbmi<4, WIDE, true>},
                {tile_vbmi<1, WIDE, false>, tile_vbmi<2, WIDE, false>, WIDE ? nullptr : tile_vbmi<4, WIDE, false>}};
    if (path == AVX512) {
        const Tile four = WIDE ? nullptr : tile_avx512<4, WIDE>;
        return {{tile_avx512<1, WIDE>, tile_avx512<2, WIDE>, four}, {tile_avx512<1, WIDE>, tile_avx512<2, WIDE>, four}};
    }
    if (path == AVX2) {
        const Tile four = WIDE ? nullptr : tile_avx2<4, WIDE>;
        return {{tile_avx2<1, WIDE>, tile_avx2<2, WIDE>, four}, {tile_avx2<1, WIDE>, tile_avx2<2, WIDE>, four}};
    }
#endif
    (void)path, (void)features;
    return {{tile_scalar<1, WIDE>, tile_scalar<2, WIDE>, nullptr}, {tile_scalar<1, WIDE>, tile_scalar<2, WIDE>, nullptr}};
}

// Whole number sums of the inputs of every part: entry 15 of every table. Returns how many parts.
template <bool WIDE>
int64_t ones_of(const uint8_t* codes, int64_t bytes, int64_t group, int32_t* ones) {
    int64_t parts = 0;
    for (int64_t at = 0; at < bytes;) {
        const int64_t stop = std::min({bytes, (at / BLOCK + 1) * BLOCK, (at / group + 1) * group});
        int32_t sum = 0;
        for (; at < stop; ++at) {
            const uint8_t* t = codes + (at / UNIT) * (WIDE ? 256 : 128) + 16 * (at % UNIT) + 15;
            sum += WIDE ? 256 * (t[0] + t[64]) + t[128] + t[192] - 65536 : t[0] + t[64] - 256;
        }
        ones[parts++] = sum;
    }
    return parts;
}


using Make = bool (*)(const float* x, int64_t units, uint8_t* codes, float* steps);

template <bool WIDE>
Make make_of(int path) {
#if GQ_X86
    if (path == AVX2) return tables_avx2<WIDE>;
    if (path == AVX512) return tables_avx512<WIDE>;
#endif
    (void)path;
    return tables_scalar<WIDE>;
}

// What is known of a row's tables.
enum State : uint8_t { NOT_FINITE_ROW = 0, MADE = 1, ABSENT = 2 };

void make_tables(int path, int threads, bool wide, const float* x, int64_t batch, int64_t cols, const int64_t* index,
                 uint8_t* codes, float* steps, uint8_t* states) {
    const Make make = wide ? make_of<true>(path) : make_of<false>(path);
    const int64_t bytes = (cols + 7) / 8, units = units_of(bytes), blocks = blocks_of(bytes);
    auto body = [&](int64_t b) {
        states[b] = ABSENT;
        if (index && index[b] < 0) return;
        const float* from = x + b * cols;
        static thread_local std::vector<float> padded;
        if (cols != 32 * units) {
            padded.assign(static_cast<size_t>(32 * units), 0.0f);
            std::memcpy(padded.data(), from, static_cast<size_t>(cols) * 4);
            from = padded.data();
        }
        states[b] = make(from, units, codes + b * units * (wide ? 256 : 128), steps + b * blocks) ? MADE : NOT_FINITE_ROW;
    };
    parallel_for(threads, batch, body);
}

int add_products(int path, int threads, int features, bool wide, const uint8_t* codes, const float* steps,
                 const uint8_t* states, int64_t batch, int64_t cols, const int64_t* index, float* y, int64_t stride,
                 const Matrix* matrices, int64_t count) {
    const Kernels kernels = wide ? kernels_of<true>(path, features) : kernels_of<false>(path, features);
    const int64_t bytes = (cols + 7) / 8, blocks = blocks_of(bytes), entries = units_of(bytes) * (wide ? 256 : 128);
    static thread_local std::vector<int64_t> kept_rows, kept_places;
    static thread_local std::vector<Piece> kept_pieces;
    static thread_local std::vector<int32_t> kept_sums;
    std::vector<int64_t>&rows = kept_rows, &places = kept_places;
    std::vector<Piece>& pieces = kept_pieces;
    std::vector<int32_t>& sums = kept_sums;

    for (int64_t b = 0; b < batch; ++b)
        if (index[b] >= 0 && states[b] == ABSENT) return NOT_MADE;
    auto use = [&](const Matrix& matrix, int64_t b) {
        if (states[b] != NOT_FINITE_ROW) return true;
        float* out = y + b * stride + matrix.column;
        std::fill(out, out + matrix.rows, std::numeric_limits<float>::quiet_NaN());
        return false;
    };
    // Rows whose tables stay in a core's cache go together.
    split(threads, matrices, count, index, 0, batch, bytes, std::max<int64_t>(MOST_ROWS, CACHE / entries), PIECE, use,
          rows, pieces);

    // Sums of the inputs, where a delta needs them: by the row's place in the list.
    places.assign(rows.size(), -1);
    int64_t wanted = 0;
    for (const Piece& piece : pieces) {
        if (piece.first || (!piece.delta.zero && !piece.delta.offsets)) continue;
        for (int64_t k = piece.from; k < piece.to; ++k) {
            places[static_cast<size_t>(k)] = wanted;
            wanted += blocks + (bytes + piece.delta.group - 1) / piece.delta.group;
        }
    }
    sums.resize(static_cast<size_t>(wanted));
    if (wanted) {
        auto add_up = [&](int64_t p) {
            const Piece& piece = pieces[static_cast<size_t>(p)];
            if (piece.first) return;
            for (int64_t k = piece.from; k < piece.to; ++k) {
                const int64_t at = places[static_cast<size_t>(k)];
                if (at < 0) return;
                const uint8_t* from = codes + rows[static_cast<size_t>(k)] * entries;
                if (wide)
                    ones_of<true>(from, bytes, piece.delta.group, sums.data() + at);
                else
                    ones_of<false>(from, bytes, piece.delta.group, sums.data() + at);
            }
        };
        parallel_for(threads, static_cast<int64_t>(pieces.size()), add_up);
    }

    auto work = [&](int64_t p) {
        const Piece& piece = pieces[static_cast<size_t>(p)];
        const Matrix& matrix = matrices[piece.matrix];
        const Delta& d = piece.delta;
        const Tile* run = d.planes == 1 && !d.zero && !d.offsets && !d.shift[0] ? kernels.one : kernels.levels;
        alignas(64) float total[MOST_ROWS][TILE];
        float* const totals[MOST_ROWS] = {total[0], total[1], total[2], total[3]};
        const bool is_last = p + 1 == static_cast<int64_t>(pieces.size());
        const Piece& next = is_last ? piece : pieces[static_cast<size_t>(p + 1)];
        const int64_t then = is_last ? piece.last : next.first;
        for (int64_t t = piece.first; t < piece.last; ++t) {
            ahead(t + 1 < piece.last ? d.scales_of(t + 1, bytes) : next.delta.scales_of(then, bytes));
            const int64_t here = std::min(TILE, matrix.rows - t * TILE);
            for (int64_t k = piece.from; k < piece.to;) {
                const int64_t left = piece.to - k;
                const int size = left >= 4 && run[2] ? 2 : left >= 2 ? 1 : 0, taken = 1 << size;
                Rows some = {};
                some.end = d.bits_of(piece.last, bytes), some.next = next.delta.bits_of(then, bytes);
                for (int r = 0; r < taken; ++r) {
                    const int64_t b = rows[static_cast<size_t>(k + r)], at = places[static_cast<size_t>(k + r)];
                    some.codes[r] = codes + b * entries;
                    some.steps[r] = steps + b * blocks;
                    some.ones[r] = at < 0 ? nullptr : sums.data() + at;
                }
                run[size](d, t, bytes, some, totals);
                for (int r = 0; r < taken; ++r) {
                    float* out = y + rows[static_cast<size_t>(k + r)] * stride + matrix.column + t * TILE;
                    for (int64_t o = 0; o < here; ++o) out[o] += total[r][o];
                }
                k += taken;
            }
        }
    };
    parallel_for(threads, static_cast<int64_t>(pieces.size()), work);
    return OK;
}

template <class T>
T* at_least(std::vector<T>& store, int64_t count) {
    if (store.size() < static_cast<size_t>(count)) store.resize(static_cast<size_t>(count));
    return store.data();
}

}  // namespace
}  // namespace gq

using namespace gq;

// Tables of x [batch, cols] for rows with index >= 0 (index null: all): codes [batch][units][128 or 256], steps [batch]
// [blocks] and states [batch]: 0 an input or a sum of four is not finite, 1 made, 2 absent.
GQ_API int gq_lookup_tables(int path, int threads, int wide, const float* x, int64_t batch, int64_t cols,
                            const int64_t* index, uint8_t* codes, float* steps, uint8_t* states) {
    return guarded([&] {
        make_tables(path, threads, wide != 0, x, batch, cols, index, codes, steps, states);
        return static_cast<int>(OK);
    });
}

// Adds the products of `count` matrices (7 numbers each, see Matrix) to their columns of y, whose rows lie `stride`
// apart; index [batch] names a row's variant, -1 none. The tables are those given, or with codes null made here. A row
// that is not finite becomes NaN.
GQ_API int gq_lookup_add(int path, int threads, int features, int wide, const float* x, const uint8_t* codes,
                         const float* steps, const uint8_t* states, int64_t batch, int64_t cols, const int64_t* index,
                         float* y, int64_t stride, int64_t count, const int64_t* words) {
    return guarded([&] {
        static thread_local std::vector<Matrix> kept;
        static thread_local std::vector<uint8_t> kept_codes, kept_states;
        static thread_local std::vector<float> kept_steps;
        std::vector<Matrix>& matrices = kept;
        matrices.clear();
        for (int64_t m = 0; m < count; ++m) matrices.push_back(Matrix::of(words + WORDS_OF_MATRIX * m));
        const int64_t bytes = (cols + 7) / 8, blocks = blocks_of(bytes), entries = units_of(bytes) * (wide ? 256 : 128);
        if (codes)
            return add_products(path, threads, features, wide != 0, codes, steps, states, batch, cols, index, y, stride,
                                matrices.data(), count);
        uint8_t* made = at_least(kept_codes, batch * entries + 64);
        made += (64 - reinterpret_cast<uintptr_t>(made) % 64) % 64;
        float* their_steps = at_least(kept_steps, batch * blocks);
        uint8_t* their_states = at_least(kept_states, batch);
        make_tables(path, threads, wide != 0, x, batch, cols, index, made, their_steps, their_states);
        return add_products(path, threads, features, wide != 0, made, their_steps, their_states, batch, cols, index, y,
                            stride, matrices.data(), count);
    });
}
