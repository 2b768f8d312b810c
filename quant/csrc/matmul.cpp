// y[b] += scale * sign(delta of b's own variant) @ x[b], exactly: tables of the 16 signed sums of four inputs in float32.
//
// Four bits of an output choose one of 16 sums, for 16 outputs in one instruction. Every output adds in one order
// (columns ascending, even and odd nibbles apart), whatever the path. In 8 and 16 bits: lookup.cpp.
#include "sign_tiles.h"

namespace gq {
namespace {

constexpr int64_t AHEAD = 4096;         // bytes of a tile asked for ahead of use: past the page where hardware stops
constexpr int64_t CACHE = 2048 * 1024;  // bytes of tables that stay in a core's caches
constexpr int64_t PIECE = 32 * 1024;    // bytes of bits in a piece of work, about

// One row of activations, padded to whole bytes, to tables [2 * bytes][16]: bit k of the index is 1 where input k is
// added, 0 where it is subtracted.
GQ_INLINE void tables_body(const float* x, int64_t bytes, float* tables) {
    for (int64_t n = 0; n < 2 * bytes; ++n) {
        const float* v = x + 4 * n;
        const float low[4] = {-v[0] - v[1], v[0] - v[1], -v[0] + v[1], v[0] + v[1]};
        const float high[4] = {-v[2] - v[3], v[2] - v[3], -v[2] + v[3], v[2] + v[3]};
        for (int j = 0; j < 16; ++j) tables[16 * n + j] = low[j & 3] + high[j >> 2];
    }
}

using Tables = void (*)(const float*, int64_t, float*);
// One tile of one variant against one row: total[64] += the groups' scaled sums. scales [groups][64].
using Exact = void (*)(const uint8_t*, const float*, int64_t, int64_t, const float*, float*);

void tables_scalar(const float* x, int64_t bytes, float* tables) { tables_body(x, bytes, tables); }

void exact_scalar(const uint8_t* tile, const float* tables, int64_t bytes, int64_t group, const float* scales,
                  float* total) {
    for (int64_t start = 0; start < bytes; start += group, scales += TILE) {
        float even[TILE] = {}, odd[TILE] = {};
        for (int64_t c = start; c < std::min(bytes, start + group); ++c) {
            const float* table = tables + 32 * c;
            const uint8_t* from = tile + c / UNIT * 256 + c % UNIT;
            for (int r = 0; r < TILE; ++r) {
                const unsigned byte = from[UNIT * r];
                even[r] += table[byte & 15];
                odd[r] += table[16 + (byte >> 4)];
            }
        }
        for (int r = 0; r < TILE; ++r) total[r] += (even[r] + odd[r]) * scales[r];
    }
}

#if GQ_X86
GQ_AVX2 void tables_avx2(const float* x, int64_t bytes, float* tables) { tables_body(x, bytes, tables); }
GQ_AVX512 void tables_avx512(const float* x, int64_t bytes, float* tables) { tables_body(x, bytes, tables); }

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
                const int shift = static_cast<int>(8 * (c % UNIT));  // of this byte among the unit's four
                const __m128i low = _mm_cvtsi32_si128(shift), high = _mm_cvtsi32_si128(shift + 4);
                const __m128i low_top = _mm_cvtsi32_si128(28 - shift), high_top = _mm_cvtsi32_si128(24 - shift);
                for (int k = 0; k < 4; ++k) {
                    const uint8_t* from = tile + c / UNIT * 256 + UNIT * part + 32 * k;
                    const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
                    even[k] = _mm256_add_ps(
                        even[k], choose8(t0, t1, _mm256_srl_epi32(v, low), _mm256_sll_epi32(v, low_top)));
                    odd[k] = _mm256_add_ps(
                        odd[k], choose8(t2, t3, _mm256_srl_epi32(v, high), _mm256_sll_epi32(v, high_top)));
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

// One byte of a unit, its bits at `shift`.
GQ_AVX512 GQ_INLINE void byte_avx512(const __m512i* v, const float* table, int shift, __m512* even, __m512* odd) {
    const __m512 t0 = _mm512_loadu_ps(table), t1 = _mm512_loadu_ps(table + 16);
    const __m128i low = _mm_cvtsi32_si128(shift), high = _mm_cvtsi32_si128(shift + 4);
    for (int k = 0; k < 4; ++k) {
        even[k] = _mm512_add_ps(even[k], _mm512_permutexvar_ps(_mm512_srl_epi32(v[k], low), t0));
        odd[k] = _mm512_add_ps(odd[k], _mm512_permutexvar_ps(_mm512_srl_epi32(v[k], high), t1));
    }
}

GQ_AVX512 void exact_avx512(const uint8_t* tile, const float* tables, int64_t bytes, int64_t group,
                            const float* scales, float* total) {
    for (int64_t start = 0; start < bytes; start += group, scales += TILE) {
        const int64_t end = std::min(bytes, start + group);
        __m512 even[4], odd[4];
        for (int k = 0; k < 4; ++k) even[k] = odd[k] = _mm512_setzero_ps();
        for (int64_t c = start; c < end;) {
            const uint8_t* from = tile + c / UNIT * 256;
            __m512i v[4];
            for (int k = 0; k < 4; ++k) {
                v[k] = _mm512_loadu_si512(from + 64 * k);
                _mm_prefetch(reinterpret_cast<const char*>(from + 64 * k + AHEAD), _MM_HINT_T0);
            }
            if (c % UNIT == 0 && c + UNIT <= end) {
                byte_avx512(v, tables + 32 * c, 0, even, odd);
                byte_avx512(v, tables + 32 * c + 32, 8, even, odd);
                byte_avx512(v, tables + 32 * c + 64, 16, even, odd);
                byte_avx512(v, tables + 32 * c + 96, 24, even, odd);
                c += UNIT;
            } else {
                for (const int64_t last = std::min(end, (c / UNIT + 1) * UNIT); c < last; ++c)
                    byte_avx512(v, tables + 32 * c, static_cast<int>(8 * (c % UNIT)), even, odd);
            }
        }
        for (int k = 0; k < 4; ++k) {
            const __m512 scaled = _mm512_mul_ps(_mm512_add_ps(even[k], odd[k]), _mm512_loadu_ps(scales + 16 * k));
            _mm512_storeu_ps(total + 16 * k, _mm512_add_ps(_mm512_loadu_ps(total + 16 * k), scaled));
        }
    }
}
#endif

// `count` floats from a multiple of 64 bytes.
float* aligned(std::vector<float>& store, int64_t count) {
    if (store.size() < static_cast<size_t>(count) + 16) store.resize(static_cast<size_t>(count) + 16);
    const uintptr_t past = reinterpret_cast<uintptr_t>(store.data()) % 64 / sizeof(float);
    return store.data() + (past ? 16 - past : 0);
}

}  // namespace
}  // namespace gq

using namespace gq;

// As gq_lookup_add, in float32. Deltas are of one plane, without zero and offsets.
GQ_API int gq_exact_add(int path, int threads, const float* x, int64_t batch, int64_t cols, const int64_t* index,
                        float* y, int64_t stride, int64_t count, const int64_t* words) {
    return guarded([&] {
        Tables make_tables = tables_scalar;
        Exact run = exact_scalar;
#if GQ_X86
        if (path == AVX2) make_tables = tables_avx2, run = exact_avx2;
        if (path == AVX512) make_tables = tables_avx512, run = exact_avx512;
#endif
        (void)path;
        const int64_t bytes = (cols + 7) / 8, entries = 32 * bytes;
        static thread_local std::vector<Matrix> kept;
        static thread_local std::vector<int64_t> kept_rows;
        static thread_local std::vector<Piece> kept_pieces;
        static thread_local std::vector<float> kept_tables;
        std::vector<Matrix>& matrices = kept;
        std::vector<int64_t>& rows = kept_rows;
        std::vector<Piece>& pieces = kept_pieces;
        matrices.clear();
        for (int64_t m = 0; m < count; ++m) matrices.push_back(Matrix::of(words + WORDS_OF_MATRIX * m));

        // Rows whose tables stay in the caches, at a time.
        const int64_t most = std::max<int64_t>(4, CACHE / (entries * static_cast<int64_t>(sizeof(float))));
        for (int64_t first = 0; first < batch; first += most) {
            const int64_t last = std::min(batch, first + most);
            float* tables = aligned(kept_tables, (last - first) * entries);
            auto prepare = [&](int64_t k) {
                const int64_t b = first + k;
                if (index[b] < 0) return;
                const float* from = x + b * cols;
                static thread_local std::vector<float> padded;
                if (cols != 8 * bytes) {
                    padded.assign(static_cast<size_t>(8 * bytes), 0.0f);
                    std::memcpy(padded.data(), from, static_cast<size_t>(cols) * sizeof(float));
                    from = padded.data();
                }
                make_tables(from, bytes, tables + k * entries);
            };
            parallel_for(threads, last - first, prepare);
            split(threads, matrices.data(), count, index, first, last, bytes, most, PIECE,
                  [](const Matrix&, int64_t) { return true; }, rows, pieces);
            auto work = [&](int64_t p) {
                const Piece& piece = pieces[static_cast<size_t>(p)];
                const Matrix& matrix = matrices[static_cast<size_t>(piece.matrix)];
                const Delta& d = piece.delta;
                const int64_t groups = (bytes + d.group - 1) / d.group;
                for (int64_t t = piece.first; t < piece.last; ++t) {
                    const int64_t here = std::min(TILE, matrix.rows - t * TILE);
                    for (int64_t k = piece.from; k < piece.to; ++k) {
                        const int64_t b = rows[static_cast<size_t>(k)];
                        alignas(64) float total[TILE] = {};
                        run(d.bits + t * units_of(bytes) * 256, tables + (b - first) * entries, bytes, d.group,
                            d.scales + t * groups * TILE, total);
                        float* out = y + b * stride + matrix.column + t * TILE;
                        for (int64_t r = 0; r < here; ++r) out[r] += total[r];
                    }
                }
            };
            parallel_for(threads, static_cast<int64_t>(pieces.size()), work);
        }
        return static_cast<int>(OK);
    });
}
