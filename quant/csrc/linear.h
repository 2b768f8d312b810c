// Base linears: the layout of their tiles, shared by the product (linear.cpp) and by packing (linear_pack.cpp).
//
// A matrix lies in tiles of 32 outputs, so that one tile is one stream. bfloat16: [tile][pair of columns][32][2].
// int8: [tile][group]{32 scales float16, codes}, four columns of an output together: [column / 4][32][4]; a weight is
// scale * (code - 128). int4: [tile][group]{32 scales, 32 minima, codes}, a byte has column c in its low half and
// column c + 4 in its high half: [column / 8][32][4]; a weight is scale * code + minimum. Scales and minima are
// float16 times `unit`, a power of two of the matrix, so that small weights keep their scale's precision.
// Columns are padded to whole groups (bfloat16: to pairs), outputs to whole tiles.
#pragma once

#include <algorithm>
#include <cmath>

#include "common.h"

namespace gq {

constexpr int64_t TILE = 32;
constexpr int64_t MOST_GROUP = 256;  // columns that share a scale, at most; a multiple of 8
enum Format : int { BFLOAT16 = 0, INT8 = 1, INT4 = 2 };

// One packed matrix; kernels/linear.py has the same fields.
struct Linear {
    int32_t format;
    float unit;
    int64_t rows, cols, group;  // group is 2 for bfloat16
    const uint8_t* tiles;

    int64_t groups() const { return (cols + group - 1) / group; }
    int64_t width() const { return groups() * group; }
    int64_t num_tiles() const { return (rows + TILE - 1) / TILE; }
    // Bytes of a group of one tile.
    int64_t record() const {
        if (format == BFLOAT16) return 2 * TILE * group;
        return format == INT4 ? 4 * TILE + TILE * group / 2 : 2 * TILE + TILE * group;
    }
};

// Bytes of a record before its codes.
template <int BITS>
constexpr int64_t header() { return BITS == 8 ? 2 * TILE : 4 * TILE; }

GQ_INLINE float from_bfloat16(uint16_t bits) {
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
}

GQ_INLINE float from_float16(uint16_t bits) {
    const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16, rest = bits & 0x7FFF;
    if (rest < 0x400) {  // below the normal numbers
        const float value = static_cast<float>(rest) * 0x1p-24f;
        return sign ? -value : value;
    }
    const uint32_t wide = sign | ((rest << 13) + ((rest < 0x7C00 ? 112u : 224u) << 23));
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
}

// y [n, rows], whose rows lie `stride` apart, from x [n, cols]; see gq_linear.
void multiply(int path, int threads, int features, const Linear& w, bool many, const float* x, int64_t n, float* y,
              int64_t stride);

}  // namespace gq
