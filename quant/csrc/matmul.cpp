// y[b] += scale * sign(delta of b's own variant) @ x[b], by tables of the 16 signed sums of four inputs.
//
// The bits of a variant lie in tiles of 64 outputs: [tile][byte of the row][64]. Four bits of an output choose one of
// 16 sums, for 16 outputs (float32, exact) or 64 (int8, look-up) in one instruction; T-MAC, arXiv 2407.00088.
// Every output adds in one order (columns ascending, even and odd nibbles apart in `exact`), whatever the path.
#include <algorithm>
#include <cmath>

#include "common.h"

namespace gq {
namespace {

constexpr int64_t TILE = 64;
constexpr int64_t AHEAD = 64 * 64;  // bytes of a tile asked for ahead of use: past the page where hardware stops
constexpr int64_t BLOCK = 128;  // bytes whose 256 table entries of 8 bits are summed in 16 bits

// The 16 sums of four inputs: bit k of the index is 1 where input k is added, 0 where it is subtracted.
GQ_INLINE void sums_of_four(const float* x, float* sums) {
    const float low[4] = {-x[0] - x[1], x[0] - x[1], -x[0] + x[1], x[0] + x[1]};
    const float high[4] = {-x[2] - x[3], x[2] - x[3], -x[2] + x[3], x[2] + x[3]};
    for (int j = 0; j < 16; ++j) sums[j] = low[j & 3] + high[j >> 2];
}

// One row of activations, padded to whole bytes, to float tables [2 * bytes][16].
GQ_INLINE void tables_body(const float* x, int64_t bytes, float* tables) {
    for (int64_t n = 0; n < 2 * bytes; ++n) sums_of_four(x + 4 * n, tables + 16 * n);
}

// The same in 8 bits: entry 128 + round(127 * sum / most) for a block's largest sum, and most / 127 as its step.
GQ_INLINE bool steps_body(const float* x, int64_t bytes, int64_t group, uint8_t* tables, float* steps) {
    bool finite = true;
    for (int64_t start = 0; start < bytes; start += group) {
        const int64_t end = std::min(bytes, start + group);
        for (int64_t at = start; at < end; at += BLOCK) {
            const int64_t stop = std::min(end, at + BLOCK);
            float most = 0.0f;
            for (int64_t n = 2 * at; n < 2 * stop; ++n) {
                const float* v = x + 4 * n;
                const float sum = (std::fabs(v[0]) + std::fabs(v[1])) + (std::fabs(v[2]) + std::fabs(v[3]));
                most = sum > most ? sum : most;
                finite &= sum < INFINITY;
            }
            const float factor = most > 0.0f ? 127.0f / most : 0.0f;
            *steps++ = most / 127.0f;
            for (int64_t n = 2 * at; n < 2 * stop; ++n) {
                float sums[16];
                sums_of_four(x + 4 * n, sums);
                for (int j = 0; j < 16; ++j) {
                    const float shifted = sums[j] * factor + 12582912.0f;  // 1.5 * 2^23: rounds half to even
                    uint32_t bits;
                    std::memcpy(&bits, &shifted, 4);
                    tables[16 * n + j] = static_cast<uint8_t>(bits + 128u);
                }
            }
        }
    }
    return finite;
}

using Tables = void (*)(const float*, int64_t, float*);
using Steps = bool (*)(const float*, int64_t, int64_t, uint8_t*, float*);
// One tile of one variant against one row: total[64] += the groups' scaled sums. scales [groups][64].
using Exact = void (*)(const uint8_t*, const float*, int64_t, int64_t, const float*, float*);
using Lookup = void (*)(const uint8_t*, const uint8_t*, const float*, int64_t, int64_t, const float*, float*);

void tables_scalar(const float* x, int64_t bytes, float* tables) { tables_body(x, bytes, tables); }
bool steps_scalar(const float* x, int64_t bytes, int64_t group, uint8_t* tables, float* steps) {
    return steps_body(x, bytes, group, tables, steps);
}

void exact_scalar(const uint8_t* tile, const float* tables, int64_t bytes, int64_t group, const float* scales,
                  float* total) {
    for (int64_t start = 0; start < bytes; start += group, scales += TILE) {
        float even[TILE] = {}, odd[TILE] = {};
        for (int64_t c = start; c < std::min(bytes, start + group); ++c) {
            const float* table = tables + 32 * c;
            for (int r = 0; r < TILE; ++r) {
                const unsigned byte = tile[TILE * c + r];
                even[r] += table[byte & 15];
                odd[r] += table[16 + (byte >> 4)];
            }
        }
        for (int r = 0; r < TILE; ++r) total[r] += (even[r] + odd[r]) * scales[r];
    }
}

void lookup_scalar(const uint8_t* tile, const uint8_t* tables, const float* steps, int64_t bytes, int64_t group,
                   const float* scales, float* total) {
    for (int64_t start = 0; start < bytes; start += group, scales += TILE) {
        float sums[TILE] = {};
        const int64_t end = std::min(bytes, start + group);
        for (int64_t at = start; at < end; at += BLOCK) {
            const int64_t stop = std::min(end, at + BLOCK);
            int32_t counts[TILE] = {};
            for (int64_t c = at; c < stop; ++c)
                for (int r = 0; r < TILE; ++r) {
                    const unsigned byte = tile[TILE * c + r];
                    counts[r] += tables[32 * c + (byte & 15)] + tables[32 * c + 16 + (byte >> 4)] - 256;
                }
            const float step = *steps++;
            for (int r = 0; r < TILE; ++r) sums[r] += step * static_cast<float>(counts[r]);
        }
        for (int r = 0; r < TILE; ++r) total[r] += sums[r] * scales[r];
    }
}

#if GQ_X86
GQ_AVX2 void tables_avx2(const float* x, int64_t bytes, float* tables) { tables_body(x, bytes, tables); }
GQ_AVX2 bool steps_avx2(const float* x, int64_t bytes, int64_t group, uint8_t* tables, float* steps) {
    return steps_body(x, bytes, group, tables, steps);
}
GQ_AVX512 void tables_avx512(const float* x, int64_t bytes, float* tables) { tables_body(x, bytes, tables); }
GQ_AVX512 bool steps_avx512(const float* x, int64_t bytes, int64_t group, uint8_t* tables, float* steps) {
    return steps_body(x, bytes, group, tables, steps);
}

// Eight choices among 16 floats: both halves of the table, then bit 3 of the index decides.
GQ_AVX2 GQ_INLINE __m256 choose8(__m256 first, __m256 second, __m256i index, __m256i decider) {
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(first, index), _mm256_permutevar8x32_ps(second, index),
                            _mm256_castsi256_ps(decider));
}

GQ_AVX2 void exact_avx2(const uint8_t* tile, const float* tables, int64_t bytes, int64_t group, const float* scales,
                        float* total) {
    for (int64_t start = 0; start < bytes; start += group, scales += TILE) {
        const int64_t end = std::min(bytes, start + group);
        for (int part = 0; part < TILE; part += 32) {
            __m256 even[4], odd[4];
            for (int k = 0; k < 4; ++k) even[k] = odd[k] = _mm256_setzero_ps();
            for (int64_t c = start; c < end; ++c) {
                const float* t = tables + 32 * c;
                const __m256 t0 = _mm256_loadu_ps(t), t1 = _mm256_loadu_ps(t + 8);
                const __m256 t2 = _mm256_loadu_ps(t + 16), t3 = _mm256_loadu_ps(t + 24);
                for (int k = 0; k < 4; ++k) {
                    const uint8_t* from = tile + TILE * c + part + 8 * k;
                    const __m256i low = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
                    const __m256i high = _mm256_srli_epi32(low, 4);
                    even[k] = _mm256_add_ps(even[k], choose8(t0, t1, low, _mm256_slli_epi32(low, 28)));
                    odd[k] = _mm256_add_ps(odd[k], choose8(t2, t3, high, _mm256_slli_epi32(low, 24)));
                }
            }
            for (int k = 0; k < 4; ++k) {
                float* to = total + part + 8 * k;
                const __m256 scaled = _mm256_mul_ps(_mm256_add_ps(even[k], odd[k]), _mm256_loadu_ps(scales + part + 8 * k));
                _mm256_storeu_ps(to, _mm256_add_ps(_mm256_loadu_ps(to), scaled));
            }
        }
    }
}

GQ_AVX512 void exact_avx512(const uint8_t* tile, const float* tables, int64_t bytes, int64_t group,
                            const float* scales, float* total) {
    for (int64_t start = 0; start < bytes; start += group, scales += TILE) {
        const int64_t end = std::min(bytes, start + group);
        __m512 even[4], odd[4];
        for (int k = 0; k < 4; ++k) even[k] = odd[k] = _mm512_setzero_ps();
        for (int64_t c = start; c < end; ++c) {
            _mm_prefetch(reinterpret_cast<const char*>(tile + TILE * c + AHEAD), _MM_HINT_T0);
            const __m512 t0 = _mm512_loadu_ps(tables + 32 * c), t1 = _mm512_loadu_ps(tables + 32 * c + 16);
            for (int k = 0; k < 4; ++k) {
                const uint8_t* from = tile + TILE * c + 16 * k;
                const __m512i index = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
                even[k] = _mm512_add_ps(even[k], _mm512_permutexvar_ps(index, t0));
                odd[k] = _mm512_add_ps(odd[k], _mm512_permutexvar_ps(_mm512_srli_epi32(index, 4), t1));
            }
        }
        for (int k = 0; k < 4; ++k) {
            const __m512 scaled = _mm512_mul_ps(_mm512_add_ps(even[k], odd[k]), _mm512_loadu_ps(scales + 16 * k));
            _mm512_storeu_ps(total + 16 * k, _mm512_add_ps(_mm512_loadu_ps(total + 16 * k), scaled));
        }
    }
}

// Bytes are summed as pairs in 16 bits: `pairs` takes both (and wraps), `odds` the upper ones; at the end the
// lower ones are the difference (Andre et al. 2017, and faiss's fast scan).
GQ_AVX2 void lookup_avx2(const uint8_t* tile, const uint8_t* tables, const float* steps, int64_t bytes, int64_t group,
                         const float* scales, float* total) {
    const __m256i low = _mm256_set1_epi8(15);
    for (int64_t start = 0; start < bytes; start += group, scales += TILE) {
        __m256 sums[8];
        for (int k = 0; k < 8; ++k) sums[k] = _mm256_setzero_ps();
        const int64_t end = std::min(bytes, start + group);
        for (int64_t at = start; at < end; at += BLOCK) {
            const int64_t stop = std::min(end, at + BLOCK);
            __m256i pairs[2], odds[2];
            for (int h = 0; h < 2; ++h) pairs[h] = odds[h] = _mm256_setzero_si256();
            for (int64_t c = at; c < stop; ++c) {
                const __m128i* t = reinterpret_cast<const __m128i*>(tables + 32 * c);
                const __m256i t0 = _mm256_broadcastsi128_si256(_mm_loadu_si128(t));
                const __m256i t1 = _mm256_broadcastsi128_si256(_mm_loadu_si128(t + 1));
                for (int h = 0; h < 2; ++h) {
                    const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(tile + TILE * c + 32 * h));
                    const __m256i a = _mm256_shuffle_epi8(t0, _mm256_and_si256(v, low));
                    const __m256i b = _mm256_shuffle_epi8(t1, _mm256_and_si256(_mm256_srli_epi16(v, 4), low));
                    pairs[h] = _mm256_add_epi16(pairs[h], _mm256_add_epi16(a, b));
                    odds[h] = _mm256_add_epi16(odds[h], _mm256_add_epi16(_mm256_srli_epi16(a, 8), _mm256_srli_epi16(b, 8)));
                }
            }
            const __m256i bias = _mm256_set1_epi16(static_cast<short>(256 * (stop - at)));
            const __m256 step = _mm256_set1_ps(*steps++);
            for (int h = 0; h < 2; ++h) {
                const __m256i e = _mm256_sub_epi16(_mm256_sub_epi16(pairs[h], _mm256_slli_epi16(odds[h], 8)), bias);
                const __m256i o = _mm256_sub_epi16(odds[h], bias);
                const __m256i u = _mm256_unpacklo_epi16(e, o), w = _mm256_unpackhi_epi16(e, o);
                const __m128i parts[4] = {_mm256_castsi256_si128(u), _mm256_castsi256_si128(w),
                                          _mm256_extracti128_si256(u, 1), _mm256_extracti128_si256(w, 1)};
                for (int q = 0; q < 4; ++q) {
                    const __m256 counts = _mm256_cvtepi32_ps(_mm256_cvtepi16_epi32(parts[q]));
                    sums[4 * h + q] = _mm256_add_ps(sums[4 * h + q], _mm256_mul_ps(step, counts));
                }
            }
        }
        for (int k = 0; k < 8; ++k) {
            const __m256 scaled = _mm256_mul_ps(sums[k], _mm256_loadu_ps(scales + 8 * k));
            _mm256_storeu_ps(total + 8 * k, _mm256_add_ps(_mm256_loadu_ps(total + 8 * k), scaled));
        }
    }
}

GQ_AVX512 void lookup_avx512(const uint8_t* tile, const uint8_t* tables, const float* steps, int64_t bytes,
                             int64_t group, const float* scales, float* total) {
    alignas(64) uint16_t order[64];  // even and odd outputs back in line
    for (int j = 0; j < 64; ++j) order[j] = static_cast<uint16_t>((j >> 1) + 32 * (j & 1));
    const __m512i first = _mm512_load_si512(order), second = _mm512_load_si512(order + 32);
    const __m512i low = _mm512_set1_epi8(15);
    for (int64_t start = 0; start < bytes; start += group, scales += TILE) {
        __m512 sums[4];
        for (int k = 0; k < 4; ++k) sums[k] = _mm512_setzero_ps();
        const int64_t end = std::min(bytes, start + group);
        for (int64_t at = start; at < end; at += BLOCK) {
            const int64_t stop = std::min(end, at + BLOCK);
            __m512i pairs = _mm512_setzero_si512(), odds = pairs;
            for (int64_t c = at; c < stop; ++c) {
                const __m128i* t = reinterpret_cast<const __m128i*>(tables + 32 * c);
                _mm_prefetch(reinterpret_cast<const char*>(tile + TILE * c + AHEAD), _MM_HINT_T0);
                const __m512i t0 = _mm512_broadcast_i32x4(_mm_loadu_si128(t));
                const __m512i t1 = _mm512_broadcast_i32x4(_mm_loadu_si128(t + 1));
                const __m512i v = _mm512_loadu_si512(tile + TILE * c);
                const __m512i a = _mm512_shuffle_epi8(t0, _mm512_and_si512(v, low));
                const __m512i b = _mm512_shuffle_epi8(t1, _mm512_and_si512(_mm512_srli_epi16(v, 4), low));
                pairs = _mm512_add_epi16(pairs, _mm512_add_epi16(a, b));
                odds = _mm512_add_epi16(odds, _mm512_add_epi16(_mm512_srli_epi16(a, 8), _mm512_srli_epi16(b, 8)));
            }
            const __m512i bias = _mm512_set1_epi16(static_cast<short>(256 * (stop - at)));
            const __m512 step = _mm512_set1_ps(*steps++);
            const __m512i e = _mm512_sub_epi16(_mm512_sub_epi16(pairs, _mm512_slli_epi16(odds, 8)), bias);
            const __m512i o = _mm512_sub_epi16(odds, bias);
            const __m512i u = _mm512_permutex2var_epi16(e, first, o), w = _mm512_permutex2var_epi16(e, second, o);
            const __m256i parts[4] = {_mm512_castsi512_si256(u), _mm512_extracti64x4_epi64(u, 1),
                                      _mm512_castsi512_si256(w), _mm512_extracti64x4_epi64(w, 1)};
            for (int k = 0; k < 4; ++k) {
                const __m512 counts = _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(parts[k]));
                sums[k] = _mm512_add_ps(sums[k], _mm512_mul_ps(step, counts));
            }
        }
        for (int k = 0; k < 4; ++k) {
            const __m512 scaled = _mm512_mul_ps(sums[k], _mm512_loadu_ps(scales + 16 * k));
            _mm512_storeu_ps(total + 16 * k, _mm512_add_ps(_mm512_loadu_ps(total + 16 * k), scaled));
        }
    }
}
#endif

int64_t blocks_of(int64_t bytes, int64_t group) {
    const int64_t whole = bytes / group, rest = bytes % group;
    return whole * ((group + BLOCK - 1) / BLOCK) + (rest + BLOCK - 1) / BLOCK;
}

template <class T>
T* aligned(std::vector<T>& store, size_t count) {
    if (store.size() < count + 64) store.resize(count + 64);
    const size_t past = reinterpret_cast<uintptr_t>(store.data()) % 64 / sizeof(T);
    return store.data() + (past ? 64 / sizeof(T) - past : 0);
}

}  // namespace
}  // namespace gq

using namespace gq;

// Bits [rows, bytes] to tiles [ceil(rows / 64)][bytes][64]; rows that are not there get zeros.
GQ_API int gq_tile(int threads, const uint8_t* bits, int64_t rows, int64_t bytes, uint8_t* tiles) {
    return guarded([&] {
        auto body = [&](int64_t t) {
            uint8_t* out = tiles + t * bytes * TILE;
            const int64_t here = std::min(TILE, rows - t * TILE);
            if (here < TILE) std::memset(out, 0, static_cast<size_t>(bytes * TILE));
            for (int64_t at = 0; at < bytes; at += 64)
                for (int64_t r = 0; r < here; ++r) {
                    const uint8_t* from = bits + (t * TILE + r) * bytes;
                    for (int64_t c = at; c < std::min(bytes, at + 64); ++c) out[c * TILE + r] = from[c];
                }
        };
        parallel_for(threads, (rows + TILE - 1) / TILE, body);
        return static_cast<int>(OK);
    });
}

// x [batch, cols], y [batch, rows] float32; variant v has tiles[v], scales[v] ([tile][groups][64]) and group[v], the
// bytes of a row that share a scale; index [batch] names a row's variant, -1 none. exact 1: float tables, 0: 8 bits.
GQ_API int gq_matmul(int path, int threads, int exact, const float* x, int64_t batch, int64_t cols, float* y,
                     int64_t rows, int64_t variants, const uint8_t* const* tiles, const float* const* scales,
                     const int64_t* group, const int64_t* index) {
    return guarded([&] {
        Tables make_tables = tables_scalar;
        Steps make_steps = steps_scalar;
        Exact run_exact = exact_scalar;
        Lookup run_lookup = lookup_scalar;
#if GQ_X86
        if (path == AVX2)
            make_tables = tables_avx2, make_steps = steps_avx2, run_exact = exact_avx2, run_lookup = lookup_avx2;
        if (path == AVX512)
            make_tables = tables_avx512, make_steps = steps_avx512, run_exact = exact_avx512,
            run_lookup = lookup_avx512;
#endif
        const int64_t bytes = (cols + 7) / 8, entries = 32 * bytes;
        std::vector<int64_t> order;  // rows with a delta, those of one variant together
        for (int64_t b = 0; b < batch; ++b)
            if (index[b] >= 0) order.push_back(b);
        std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return index[a] < index[b]; });
        int64_t most = 0;
        for (int64_t v = 0; v < variants; ++v) most = std::max(most, blocks_of(bytes, group[v]));

        static thread_local std::vector<float> floats, padded, steps;
        static thread_local std::vector<uint8_t> small;
        const size_t tables = order.size() * static_cast<size_t>(entries);
        float* sums = exact ? aligned(floats, tables) : nullptr;
        uint8_t* codes = exact ? nullptr : aligned(small, tables);
        float* step = exact ? nullptr : aligned(steps, order.size() * static_cast<size_t>(most));
        const bool whole = cols == 8 * bytes;
        float* copies = whole ? nullptr : aligned(padded, order.size() * static_cast<size_t>(8 * bytes));
        std::vector<uint8_t> finite(order.size(), 1);

        auto prepare = [&](int64_t k) {
            const int64_t b = order[static_cast<size_t>(k)];
            const float* from = x + b * cols;
            if (!whole) {
                float* copy = copies + k * 8 * bytes;
                std::memcpy(copy, from, static_cast<size_t>(cols) * 4);
                for (int64_t c = cols; c < 8 * bytes; ++c) copy[c] = 0.0f;
                from = copy;
            }
            if (exact)
                make_tables(from, bytes, sums + k * entries);
            else
                finite[static_cast<size_t>(k)] =
                    make_steps(from, bytes, group[index[b]], codes + k * entries, step + k * most);
        };
        parallel_for(threads, static_cast<int64_t>(order.size()), prepare);
        for (uint8_t good : finite)
            if (!good) return static_cast<int>(NOT_FINITE);

        auto work = [&](int64_t t) {
            const int64_t here = std::min(TILE, rows - t * TILE);
            for (size_t k = 0; k < order.size(); ++k) {
                const int64_t b = order[k], v = index[b], groups = (bytes + group[v] - 1) / group[v];
                const uint8_t* tile = tiles[v] + t * bytes * TILE;
                const float* scale = scales[v] + t * groups * TILE;
                alignas(64) float total[TILE] = {};
                if (exact)
                    run_exact(tile, sums + k * entries, bytes, group[v], scale, total);
                else
                    run_lookup(tile, codes + k * entries, step + k * most, bytes, group[v], scale, total);
                float* out = y + b * rows + t * TILE;
                for (int64_t r = 0; r < here; ++r) out[r] += total[r];
            }
        };
        parallel_for(threads, (rows + TILE - 1) / TILE, work);
        return static_cast<int>(OK);
    });
}
