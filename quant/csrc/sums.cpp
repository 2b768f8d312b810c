// Sums over the rows of a [n, d] matrix: linear combinations of rows, and inner products of all pairs of rows.
//
// Products: float32 in blocks of 256 coordinates. Lane l of 16 takes the coordinates that are l modulo 16, two
// products at a time are added to its sum, lanes are added pairwise (8, 4, 2, 1), and the block's sum is added to the
// pair's in float64. At most 13 roundings of float32 touch a product, so the error is below 13 * 2^-24 < 8e-7 of the
// sum of |x_k y_k|, which |x||y| bounds. Which tile of pairs or which thread took a block changes nothing.
#include <algorithm>
#include <memory>

#include "common.h"

namespace gq {
namespace {

GQ_INLINE void prefetch(const float* p) {
#if defined(__GNUC__) || defined(__clang__)
    __builtin_prefetch(p);
#else
    (void)p;
#endif
}

// --- linear combinations --------------------------------------------------------------------------------------

constexpr int64_t STRIP = 4096;  // coordinates: rows are read in pieces long enough for the memory

struct Terms {  // rows with their weights; those of weight zero are left out
    std::vector<const float*> rows;
    std::vector<double> weights;
};

// Four streams at a time, added in order.
GQ_INLINE void add_four(const Terms& t, size_t r, int64_t at, int64_t size, double* sums) {
    const float *x0 = t.rows[r] + at, *x1 = t.rows[r + 1] + at, *x2 = t.rows[r + 2] + at, *x3 = t.rows[r + 3] + at;
    const double w0 = t.weights[r], w1 = t.weights[r + 1], w2 = t.weights[r + 2], w3 = t.weights[r + 3];
    GQ_INDEPENDENT
    for (int64_t i = 0; i < size; ++i)
        sums[i] = (((sums[i] + w0 * static_cast<double>(x0[i])) + w1 * static_cast<double>(x1[i])) +
                   w2 * static_cast<double>(x2[i])) +
                  w3 * static_cast<double>(x3[i]);
}

GQ_INLINE void add_one(const Terms& t, size_t r, int64_t at, int64_t size, double* sums) {
    const float* x = t.rows[r] + at;
    const double weight = t.weights[r];
    GQ_INDEPENDENT
    for (int64_t i = 0; i < size; ++i) sums[i] += weight * static_cast<double>(x[i]);
}

GQ_INLINE void combine_body(const Terms& t, int64_t at, int64_t size, float* out) {
    alignas(64) double sums[STRIP];
    for (int64_t i = 0; i < size; ++i) sums[i] = 0.0;
    size_t r = 0;
    for (; r + 4 <= t.rows.size(); r += 4) add_four(t, r, at, size, sums);
    for (; r < t.rows.size(); ++r) add_one(t, r, at, size, sums);
    for (int64_t i = 0; i < size; ++i) out[at + i] = static_cast<float>(sums[i]);
}

void combine_scalar(const Terms& t, int64_t at, int64_t size, float* out) { combine_body(t, at, size, out); }

#if GQ_X86
constexpr int64_t HELD = 32;     // coordinates whose sums stay in registers while rows are added
constexpr size_t STREAMS = 16;   // rows read at once, as many as the prefetchers follow
constexpr int64_t AHEAD = 512;   // coordinates: 2 KiB, further than the hardware reads ahead in many streams

// Registers of eight sums each, added in the order of combine_body.
GQ_AVX512 void combine_avx512(const Terms& t, int64_t at, int64_t size, float* out) {
    const int64_t whole = t.rows.empty() ? 0 : size / HELD * HELD;
    alignas(64) double sums[STRIP];
    for (size_t first = 0; first < t.rows.size(); first += STREAMS) {
        const size_t stop = std::min(first + STREAMS, t.rows.size());
        for (int64_t i = 0; i < whole; i += HELD) {
            __m512d sum[4];
#pragma GCC unroll 4
            for (int k = 0; k < 4; ++k) sum[k] = first ? _mm512_load_pd(sums + i + 8 * k) : _mm512_setzero_pd();
            for (size_t r = first; r < stop; ++r) {
                const float* x = t.rows[r] + at + i;
                const __m512d weight = _mm512_set1_pd(t.weights[r]);
                prefetch(x + AHEAD);
                prefetch(x + AHEAD + 16);
#pragma GCC unroll 4
                for (int k = 0; k < 4; ++k)
                    sum[k] = _mm512_add_pd(sum[k], _mm512_mul_pd(weight, _mm512_cvtps_pd(_mm256_loadu_ps(x + 8 * k))));
            }
#pragma GCC unroll 4
            for (int k = 0; k < 4; ++k) {
                if (stop == t.rows.size()) _mm256_storeu_ps(out + at + i + 8 * k, _mm512_cvtpd_ps(sum[k]));
                else _mm512_store_pd(sums + i + 8 * k, sum[k]);
            }
        }
    }
    combine_body(t, at + whole, size - whole, out);
}

GQ_AVX2 void combine_avx2(const Terms& t, int64_t at, int64_t size, float* out) {
    const int64_t whole = t.rows.empty() ? 0 : size / HELD * HELD;
    alignas(64) double sums[STRIP];
    for (size_t first = 0; first < t.rows.size(); first += STREAMS) {
        const size_t stop = std::min(first + STREAMS, t.rows.size());
        for (int64_t i = 0; i < whole; i += HELD) {
            __m256d sum[8];
#pragma GCC unroll 8
            for (int k = 0; k < 8; ++k) sum[k] = first ? _mm256_load_pd(sums + i + 4 * k) : _mm256_setzero_pd();
            for (size_t r = first; r < stop; ++r) {
                const float* x = t.rows[r] + at + i;
                const __m256d weight = _mm256_set1_pd(t.weights[r]);
                prefetch(x + AHEAD);
                prefetch(x + AHEAD + 16);
#pragma GCC unroll 8
                for (int k = 0; k < 8; ++k)
                    sum[k] = _mm256_add_pd(sum[k], _mm256_mul_pd(weight, _mm256_cvtps_pd(_mm_loadu_ps(x + 4 * k))));
            }
#pragma GCC unroll 8
            for (int k = 0; k < 8; ++k) {
                if (stop == t.rows.size()) _mm_storeu_ps(out + at + i + 4 * k, _mm256_cvtpd_ps(sum[k]));
                else _mm256_store_pd(sums + i + 4 * k, sum[k]);
            }
        }
    }
    combine_body(t, at + whole, size - whole, out);
}
#endif

using Combine = void (*)(const Terms& t, int64_t at, int64_t size, float* out);

Combine combine_of(int path) {
#if GQ_X86
    if (path == AVX2) return combine_avx2;
    if (path == AVX512) return combine_avx512;
#else
    (void)path;
#endif
    return combine_scalar;
}

Terms terms_of(const float* x, const double* weights, int64_t n, int64_t d) {
    Terms terms;
    for (int64_t r = 0; r < n; ++r) {
        if (weights[r] == 0.0) continue;
        terms.rows.push_back(x + r * d);
        terms.weights.push_back(weights[r]);
    }
    return terms;
}

// --- products -------------------------------------------------------------------------------------------------

constexpr int SIDE = 4;             // a tile is SIDE x SIDE pairs
constexpr int PAIRS = SIDE * SIDE;
constexpr int64_t BLOCK = 256;      // coordinates
constexpr int STEPS = BLOCK / 16;
constexpr int64_t PACKED = SIDE * BLOCK;  // a block of a tile's rows: [steps][rows][16]
constexpr int64_t PANEL = 4;        // tiles of rows that stay in the L1 cache together

// Adds the block's products of 4 rows with 4 rows to sums [4, 4].
using Tile = void (*)(const float* a, const float* b, double* sums);

GQ_INLINE void fold(float (*lanes)[16], double* sums) {
    for (int p = 0; p < PAIRS; ++p) {
        for (int step = 8; step; step >>= 1)
            for (int l = 0; l < step; ++l) lanes[p][l] += lanes[p][l + step];
        sums[p] += static_cast<double>(lanes[p][0]);
    }
}

void tile_scalar(const float* a, const float* b, double* sums) {
    alignas(64) float lanes[PAIRS][16] = {};
    for (int p = 0; p < PAIRS; ++p) {
        const float *x = a + p / SIDE * 16, *y = b + p % SIDE * 16;
        for (int s = 0; s < STEPS; s += 2) {
            const int first = s * SIDE * 16, second = first + SIDE * 16;
            for (int l = 0; l < 16; ++l)
                lanes[p][l] += x[first + l] * y[first + l] + x[second + l] * y[second + l];
        }
    }
    fold(lanes, sums);
}

#if GQ_X86
// Half of the lanes and two columns of pairs at a time: eight sums in registers.
GQ_AVX2 void tile_avx2(const float* a, const float* b, double* sums) {
    alignas(64) float lanes[PAIRS][16];
    for (int half = 0; half < 16; half += 8)
        for (int j = 0; j < SIDE; j += 2) {
            __m256 sum[SIDE][2];
            for (int i = 0; i < SIDE; ++i) sum[i][0] = sum[i][1] = _mm256_setzero_ps();
            for (int s = 0; s < STEPS; s += 2) {
                const float *x = a + s * SIDE * 16 + half, *y = b + (s * SIDE + j) * 16 + half;
                const __m256 y0 = _mm256_load_ps(y), y1 = _mm256_load_ps(y + 16);
                const __m256 z0 = _mm256_load_ps(y + SIDE * 16), z1 = _mm256_load_ps(y + SIDE * 16 + 16);
                for (int i = 0; i < SIDE; ++i) {
                    const __m256 first = _mm256_load_ps(x + 16 * i), second = _mm256_load_ps(x + 16 * (SIDE + i));
                    sum[i][0] = _mm256_add_ps(
                        sum[i][0], _mm256_add_ps(_mm256_mul_ps(first, y0), _mm256_mul_ps(second, z0)));
                    sum[i][1] = _mm256_add_ps(
                        sum[i][1], _mm256_add_ps(_mm256_mul_ps(first, y1), _mm256_mul_ps(second, z1)));
                }
            }
            for (int i = 0; i < SIDE; ++i)
                for (int k = 0; k < 2; ++k) _mm256_store_ps(lanes[SIDE * i + j + k] + half, sum[i][k]);
        }
    fold(lanes, sums);
}

// Lanes l and l + 8 of both, then of both and l + 4: fold() for several pairs in one register.
GQ_AVX512 GQ_INLINE __m512 fold8(__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xEE));
}
GQ_AVX512 GQ_INLINE __m512 fold4(__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD));
}
GQ_AVX512 GQ_INLINE __m512 fold2(__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xEE));
}
GQ_AVX512 GQ_INLINE __m512 fold1(__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xDD));
}
// One row of the result: quarter i of the register is for row i of a, and this is column j of every row.
GQ_AVX512 GQ_INLINE __m512 fold_column(const __m512 (&sum)[SIDE][SIDE], int j) {
    return fold4(fold8(sum[0][j], sum[1][j]), fold8(sum[2][j], sum[3][j]));
}

GQ_AVX512 void tile_avx512(const float* a, const float* b, double* sums) {
    __m512 sum[SIDE][SIDE];
    for (int i = 0; i < SIDE; ++i)
        for (int j = 0; j < SIDE; ++j) sum[i][j] = _mm512_setzero_ps();
    for (int s = 0; s < STEPS; s += 2) {
        const float *x = a + s * SIDE * 16, *y = b + s * SIDE * 16;
        __m512 first[SIDE], second[SIDE];
        for (int i = 0; i < SIDE; ++i) {
            first[i] = _mm512_load_ps(x + 16 * i);
            second[i] = _mm512_load_ps(x + 16 * (SIDE + i));
        }
        for (int j = 0; j < SIDE; ++j) {
            const __m512 y0 = _mm512_load_ps(y + 16 * j), y1 = _mm512_load_ps(y + 16 * (SIDE + j));
            for (int i = 0; i < SIDE; ++i)
                sum[i][j] = _mm512_add_ps(
                    sum[i][j], _mm512_add_ps(_mm512_mul_ps(first[i], y0), _mm512_mul_ps(second[i], y1)));
        }
    }
    const __m512 low = fold2(fold_column(sum, 0), fold_column(sum, 1));
    const __m512 high = fold2(fold_column(sum, 2), fold_column(sum, 3));
    const __m512 all = fold1(low, high);
    const __m512d rows01 = _mm512_cvtps_pd(_mm512_castps512_ps256(all));
    const __m512d rows23 = _mm512_cvtps_pd(_mm512_extractf32x8_ps(all, 1));
    _mm512_storeu_pd(sums, _mm512_add_pd(_mm512_loadu_pd(sums), rows01));
    _mm512_storeu_pd(sums + 8, _mm512_add_pd(_mm512_loadu_pd(sums + 8), rows23));
}
#endif

// A block of rows [row, row + 4), zeros where the matrix ends.
GQ_INLINE void pack_rows(const float* x, int64_t n, int64_t d, int64_t row, int64_t at, float* out) {
    for (int64_t i = 0; i < SIDE; ++i) {
        const int64_t size = row + i < n ? std::min(BLOCK, d - at) : 0;
        const float* from = x + (row + i) * d + at;
        for (int64_t s = 0; s < STEPS; ++s) {
            float* to = out + (s * SIDE + i) * 16;
            const int64_t left = std::min<int64_t>(16, size - 16 * s);
            if (left == 16) {
                prefetch(from + 16 * s + BLOCK);
                std::memcpy(to, from + 16 * s, 64);
            } else {
                std::memset(to, 0, 64);
                if (left > 0) std::memcpy(to, from + 16 * s, static_cast<size_t>(left) * sizeof(float));
            }
        }
    }
}

// Tiles of the upper triangle, row by row: where that of tile rows i <= j stands among `tiles` rows.
GQ_INLINE int64_t place(int64_t i, int64_t j, int64_t tiles) { return i * tiles - i * (i - 1) / 2 + (j - i); }

struct Gram {
    const float* x;
    int64_t n, d, tiles, shares;
    Tile tile;
};

// Coordinates [from, to) of every `shares`-th panel of tile rows; sums are [tiles of the triangle, 16], zero before.
void products_piece(const Gram& g, int64_t from, int64_t to, int64_t share, double* sums) {
    const int64_t lowest = share * PANEL;
    const auto bytes = static_cast<size_t>((g.tiles - lowest) * PACKED) * sizeof(float) + 63;
    std::unique_ptr<unsigned char[]> memory(new unsigned char[bytes]);
    float* packed = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory.get()) + 63) & ~uintptr_t{63});
    const auto block = [&](int64_t i) { return packed + (i - lowest) * PACKED; };
    for (int64_t at = from; at < to; at += BLOCK) {
        for (int64_t i = lowest; i < g.tiles; ++i) pack_rows(g.x, g.n, g.d, i * SIDE, at, block(i));
        for (int64_t panel = lowest; panel < g.tiles; panel += g.shares * PANEL)
            for (int64_t j = panel; j < g.tiles; ++j)
                for (int64_t i = panel; i < std::min(panel + PANEL, j + 1); ++i)
                    g.tile(block(i), block(j), sums + place(i, j, g.tiles) * PAIRS);
    }
}

}  // namespace
}  // namespace gq

using namespace gq;

// out [d] float32 = sum of weights [n] float64 times the rows of x [n, d] float32; rows of weight zero are not read.
GQ_API int gq_combine(int path, int threads, const float* x, const double* weights, int64_t n, int64_t d, float* out) {
    return guarded([&] {
        const Combine combine = combine_of(path);
        const Terms terms = terms_of(x, weights, n, d);
        const int64_t strips = (d + STRIP - 1) / STRIP, each = std::max<int64_t>(1, 64 / n);
        auto body = [&](int64_t p) {
            for (int64_t s = p * each; s < std::min(strips, (p + 1) * each); ++s)
                combine(terms, s * STRIP, std::min(STRIP, d - s * STRIP), out);
        };
        parallel_for(threads, (strips + each - 1) / each, body);
        return static_cast<int>(OK);
    });
}

// out [m, d] float32: row k is the sum of the rows of x [n, d] float32, each times weights[k, row]. A short strip of x
// stays in the cache for all m.
GQ_API int gq_combinations(int path, int threads, const float* x, const double* weights, int64_t n, int64_t d,
                           int64_t m, float* out) {
    return guarded([&] {
        const Combine combine = combine_of(path);
        std::vector<Terms> terms(static_cast<size_t>(m));
        for (int64_t k = 0; k < m; ++k) terms[static_cast<size_t>(k)] = terms_of(x, weights + k * n, n, d);
        const int64_t size = std::min(STRIP, std::max<int64_t>(64, (int64_t{1} << 14) / n / 16 * 16));
        auto body = [&](int64_t s) {
            for (int64_t k = 0; k < m; ++k)
                combine(terms[static_cast<size_t>(k)], s * size, std::min(size, d - s * size), out + k * d);
        };
        parallel_for(threads, (d + size - 1) / size, body);
        return static_cast<int>(OK);
    });
}

// Adds the inner products of the rows of x [n, d] float32 to out [n, n] float64.
GQ_API int gq_products(int path, int threads, const float* x, int64_t n, int64_t d, double* out) {
    return guarded([&] {
        Tile tile = tile_scalar;
#if GQ_X86
        if (path == AVX2) tile = tile_avx2;
        if (path == AVX512) tile = tile_avx512;
#endif
        // Chunks of coordinates are added in order; their size follows from n and d alone, within 16 MiB of sums.
        const int64_t tiles = (n + SIDE - 1) / SIDE, triangle = tiles * (tiles + 1) / 2 * PAIRS;
        const int64_t most = std::max<int64_t>(1, (int64_t{1} << 21) / triangle);
        const int64_t blocks = (d + BLOCK - 1) / BLOCK;
        const int64_t each = std::max<int64_t>(32, (blocks + most - 1) / most);
        const int64_t chunks = (blocks + each - 1) / each;
        if (chunks == 0) return static_cast<int>(OK);
        const int64_t panels = (tiles + PANEL - 1) / PANEL;
        const int64_t shares = std::min(panels, std::max<int64_t>(1, (threads > 1 ? 4 * threads : 1) / chunks));
        const Gram gram{x, n, d, tiles, shares, tile};
        std::vector<double> sums(static_cast<size_t>(chunks * triangle));
        auto body = [&](int64_t p) {
            const int64_t chunk = p / shares, from = chunk * each * BLOCK;
            products_piece(gram, from, std::min(d, from + each * BLOCK), p % shares, sums.data() + chunk * triangle);
        };
        parallel_for(threads, chunks * shares, body);
        for (int64_t i = 0; i < n; ++i)
            for (int64_t j = i; j < n; ++j) {
                const int64_t at = place(i / SIDE, j / SIDE, tiles) * PAIRS + i % SIDE * SIDE + j % SIDE;
                double sum = 0.0;
                for (int64_t chunk = 0; chunk < chunks; ++chunk) sum += sums[static_cast<size_t>(chunk * triangle + at)];
                out[i * n + j] += sum;
                if (j != i) out[j * n + i] += sum;
            }
        return static_cast<int>(OK);
    });
}
