// y[row] += b.T @ (a @ x[row]): low-rank deltas, each row of a batch with the factors of its own variant.
//
// Factors lie [rank, in] and [rank, out], in float32 or bfloat16, and are multiplied in float32. A row's bits depend on
// that row alone, whatever the batch and the number of threads, and are the same on all paths (factors_body.h).
#include <algorithm>

#include "lanes.h"

namespace gq {
namespace {

constexpr int64_t RANKS = 64;        // that are multiplied at a time: more of them are added to y block by block
constexpr int64_t ROWS = 32;         // of a piece of work
constexpr int64_t MANY = 1 << 17;    // products from which on threads help
constexpr int64_t WORDS = 5;         // of a matrix

// Factors of one variant for one matrix.
template <class T>
struct Factors {
    const T *a, *b;  // [rank, cols], [rank, out]
    int64_t rank, cols, out;
};

// One matrix: its outputs, its first column of y, and by variant the addresses of a and b, and the rank (0: none).
struct Matrix {
    int64_t out, column;
    const uint64_t *a, *b;
    const int64_t* rank;

    static Matrix of(const int64_t* words) {
        return {words[0], words[1], reinterpret_cast<const uint64_t*>(words[2]),
                reinterpret_cast<const uint64_t*>(words[3]), reinterpret_cast<const int64_t*>(words[4])};
    }
    template <class T>
    Factors<T> factors(int64_t variant, int64_t cols) const {
        return {reinterpret_cast<const T*>(a[variant]), reinterpret_cast<const T*>(b[variant]), rank[variant], cols, out};
    }
};

namespace plain {
#define GQ_T
constexpr int WIDTH = 4;
#include "factors_body.h"
#undef GQ_T
}  // namespace plain

#if GQ_X86
namespace avx2 {
#define GQ_T GQ_AVX2
constexpr int WIDTH = 4;
#include "factors_body.h"
#undef GQ_T
}  // namespace avx2

namespace avx512 {
#define GQ_T GQ_AVX512
constexpr int WIDTH = 16;
#include "factors_body.h"
#undef GQ_T
}  // namespace avx512
#endif

template <class T>
using AddRows = void (*)(const Factors<T>&, int64_t, const float* const*, float* const*);

template <class T>
AddRows<T> add_rows_of(int path) {
#if GQ_X86
    if (path == AVX512) return avx512::add_rows<T>;
    if (path == AVX2) return avx2::add_rows<T>;
#else
    (void)path;
#endif
    return plain::add_rows<T>;
}

// Rows of one variant that are computed together: places [first, first + count) of the sorted rows.
struct Piece {
    int64_t variant, first, count;
};

template <class T>
int add(int path, int threads, const float* x, int64_t batch, int64_t cols, const int64_t* index, float* y,
        int64_t stride, int64_t count, const int64_t* words) {
    static thread_local std::vector<int64_t> sorted;
    static thread_local std::vector<Piece> pieces;
    sorted.clear(), pieces.clear();
    for (int64_t row = 0; row < batch; ++row)
        if (index[row] >= 0) sorted.push_back(row);
    std::stable_sort(sorted.begin(), sorted.end(), [&](int64_t p, int64_t q) { return index[p] < index[q]; });
    const auto total = static_cast<int64_t>(sorted.size());
    for (int64_t at = 0; at < total;) {
        Piece piece{index[sorted[static_cast<size_t>(at)]], at, 1};
        while (piece.count < ROWS && at + piece.count < total &&
               index[sorted[static_cast<size_t>(at + piece.count)]] == piece.variant)
            ++piece.count;
        pieces.push_back(piece);
        at += piece.count;
    }
    int64_t products = 0;
    for (const Piece& piece : pieces)
        for (int64_t m = 0; m < count; ++m) {
            const Matrix matrix = Matrix::of(words + WORDS * m);
            products += piece.count * matrix.rank[piece.variant] * (cols + matrix.out);
        }
    const AddRows<T> run = add_rows_of<T>(path);
    const int64_t* rows = sorted.data();
    const Piece* parts = pieces.data();
    auto work = [&](int64_t item) {
        const Piece& piece = parts[item / count];
        const Matrix matrix = Matrix::of(words + WORDS * (item % count));
        if (!matrix.rank[piece.variant]) return;
        const float* from[ROWS];
        float* to[ROWS];
        for (int64_t k = 0; k < piece.count; ++k) {
            const int64_t row = rows[piece.first + k];
            from[k] = x + row * cols, to[k] = y + row * stride + matrix.column;
        }
        run(matrix.factors<T>(piece.variant, cols), piece.count, from, to);
    };
    parallel_for(products < MANY ? 1 : threads, static_cast<int64_t>(pieces.size()) * count, work);
    return OK;
}

}  // namespace
}  // namespace gq

using namespace gq;

// Adds the terms of `count` matrices (5 numbers each, see Matrix) to their columns of y, whose rows lie `stride` apart;
// index [batch] names a row's variant, -1 none. Factors are float32 where `wide`, else bfloat16. x is [batch, cols].
GQ_API int gq_factors_add(int path, int threads, int wide, const float* x, int64_t batch, int64_t cols,
                          const int64_t* index, float* y, int64_t stride, int64_t count, const int64_t* words) {
    return guarded([&] {
        return wide ? add<float>(path, threads, x, batch, cols, index, y, stride, count, words)
                    : add<uint16_t>(path, threads, x, batch, cols, index, y, stride, count, words);
    });
}
