// Sign bits as every product reads them, in tiles of 64 outputs: [tile][unit of 4 bytes, 32 inputs][plane][64][4]. One
// plane is signs; several are levels: the sum over planes of 2^shift * sign.
#pragma once

#include <algorithm>

#include "common.h"

namespace gq {

constexpr int64_t TILE = 64, UNIT = 4;  // outputs; bytes of a row in a unit
constexpr int MOST_PLANES = 4;

inline int64_t units_of(int64_t bytes) { return (bytes + UNIT - 1) / UNIT; }

// A delta [rows, cols].
struct Delta {
    const uint8_t* bits;   // [tile][unit][planes][64][4]
    const float* scales;   // [tile][groups][64]
    const float* offsets;  // the same, of the sum of the inputs; null: none
    int64_t group;         // bytes of a row with one scale
    int planes;
    int zero;  // this times the sum of the inputs is taken off
    int shift[MOST_PLANES];

    // Of rows of `bytes` bytes.
    int64_t groups(int64_t bytes) const { return (bytes + group - 1) / group; }
    const uint8_t* bits_of(int64_t tile, int64_t bytes) const { return bits + tile * units_of(bytes) * 256 * planes; }
    const float* scales_of(int64_t tile, int64_t bytes) const { return scales + tile * groups(bytes) * TILE; }
};

// One matrix of the variants of a step, as Python gives it: eight numbers, of which the pointers are addresses.
struct Matrix {
    int64_t rows;               // outputs
    int64_t column;             // of y, where its outputs begin
    const int64_t* place;       // of a number of the step: that of its delta here, or -1; null: the same number
    const uint8_t* const* bits;
    const float* const* scales;
    const float* const* offsets;
    const int64_t* numbers;  // four of each delta: bytes of a group, planes, zero, shifts (4 bits a plane, the first lowest)

    static Matrix of(const int64_t* words) {
        return {words[0],
                words[1],
                reinterpret_cast<const int64_t*>(words[2]),
                reinterpret_cast<const uint8_t* const*>(words[3]),
                reinterpret_cast<const float* const*>(words[4]),
                reinterpret_cast<const float* const*>(words[5]),
                reinterpret_cast<const int64_t*>(words[6])};
    }

    int64_t variant(int64_t number) const { return number < 0 || !place ? number : place[number]; }

    Delta delta(int64_t variant) const {
        const int64_t* n = numbers + 4 * variant;
        Delta d{bits[variant], scales[variant], offsets[variant], n[0], static_cast<int>(n[1]), static_cast<int>(n[2]), {}};
        for (int p = 0; p < d.planes; ++p) d.shift[p] = static_cast<int>(n[3] >> (4 * p) & 15);
        return d;
    }
};
constexpr int64_t WORDS_OF_MATRIX = 7;

// Some tiles of one delta for some rows of the batch.
struct Piece {
    int64_t matrix;
    Delta delta;
    int64_t from, to;      // in the list of rows
    int64_t first, last;  // tiles
};

// Rows of one delta, at most `most` together, and in a piece about `size` bytes of bits. One delta after the other: so
// memory is read in long runs (a tile of each in turn took up to 1.9 times as long). `use` picks rows of the batch.
template <class F>
void split(int threads, const Matrix* matrices, int64_t count, const int64_t* index, int64_t first, int64_t last,
           int64_t bytes, int64_t most, int64_t size, F&& use, std::vector<int64_t>& rows, std::vector<Piece>& pieces) {
    rows.clear();
    pieces.clear();
    for (int64_t m = 0; m < count; ++m) {
        const Matrix& matrix = matrices[m];
        const auto begin = static_cast<int64_t>(rows.size());
        const auto variant = [&](int64_t b) { return matrix.variant(index[b]); };
        for (int64_t b = first; b < last; ++b)
            if (variant(b) >= 0 && use(matrix, b)) rows.push_back(b);
        std::stable_sort(rows.begin() + begin, rows.end(), [&](int64_t a, int64_t b) { return variant(a) < variant(b); });
        const int64_t tiles = (matrix.rows + TILE - 1) / TILE;
        for (auto k = begin; k < static_cast<int64_t>(rows.size());) {
            const int64_t from = k, v = variant(rows[static_cast<size_t>(k)]);
            const int64_t end = std::min(static_cast<int64_t>(rows.size()), from + most);
            while (k < end && variant(rows[static_cast<size_t>(k)]) == v) ++k;
            const Delta delta = matrix.delta(v);
            const int64_t wanted = std::min(size / (256 * delta.planes * units_of(bytes)), (tiles + threads - 1) / threads);
            const int64_t chunk = std::max<int64_t>(1, wanted);
            for (int64_t t = 0; t < tiles; t += chunk)
                pieces.push_back({m, delta, from, k, t, std::min(tiles, t + chunk)});
        }
    }
}

}  // namespace gq
