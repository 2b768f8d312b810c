// Sign bits to tiles (sign_tiles.h) and back to numbers.
#include "sign_tiles.h"

namespace gq {
namespace {

// One row of a delta: out [cols] = (or +=) scale * (sum of 2^shift * sign - zero) + offset.
GQ_INLINE void decode_body(const Delta& d, int64_t row, int64_t bytes, int64_t cols, bool add, float* out) {
    const int64_t tile = row / TILE, lane = row % TILE, units = units_of(bytes), groups = (bytes + d.group - 1) / d.group;
    const uint8_t* bits = d.bits + tile * units * 256 * d.planes + UNIT * lane;
    const float* scales = d.scales + tile * groups * TILE + lane;
    const float* offsets = d.offsets ? d.offsets + tile * groups * TILE + lane : nullptr;
    int32_t lowest = -d.zero;
    for (int p = 0; p < d.planes; ++p) lowest -= 1 << d.shift[p];
    for (int64_t u = 0; u < units; ++u) {
        int32_t levels[32];
        for (int i = 0; i < 32; ++i) levels[i] = lowest;
        for (int p = 0; p < d.planes; ++p, bits += 256) {
            const uint32_t word = bits[0] | static_cast<uint32_t>(bits[1]) << 8 | static_cast<uint32_t>(bits[2]) << 16 |
                                  static_cast<uint32_t>(bits[3]) << 24;
            const int twice = d.shift[p] + 1;
            for (int i = 0; i < 32; ++i) levels[i] += static_cast<int32_t>((word >> i & 1u) << twice);
        }
        float values[32];
        for (int j = 0; j < UNIT; ++j) {
            const int64_t group = std::min(bytes - 1, UNIT * u + j) / d.group * TILE;
            const float scale = scales[group], offset = offsets ? offsets[group] : 0.0f;
            for (int i = 8 * j; i < 8 * j + 8; ++i) values[i] = static_cast<float>(levels[i]) * scale;
            if (offsets)
                for (int i = 8 * j; i < 8 * j + 8; ++i) values[i] += offset;
        }
        const int64_t here = std::min<int64_t>(32, cols - 32 * u);
        float* to = out + 32 * u;
        if (add)
            for (int64_t i = 0; i < here; ++i) to[i] += values[i];
        else
            std::memcpy(to, values, static_cast<size_t>(here) * sizeof(float));
    }
}

using Decode = void (*)(const Delta& d, int64_t row, int64_t bytes, int64_t cols, bool add, float* out);

void decode_scalar(const Delta& d, int64_t row, int64_t bytes, int64_t cols, bool add, float* out) {
    decode_body(d, row, bytes, cols, add, out);
}
#if GQ_X86
GQ_AVX2 void decode_avx2(const Delta& d, int64_t row, int64_t bytes, int64_t cols, bool add, float* out) {
    decode_body(d, row, bytes, cols, add, out);
}
GQ_AVX512 void decode_avx512(const Delta& d, int64_t row, int64_t bytes, int64_t cols, bool add, float* out) {
    decode_body(d, row, bytes, cols, add, out);
}
#endif

}  // namespace
}  // namespace gq

using namespace gq;

// Bits [planes][rows][bytes] to tiles [ceil(rows / 64)][ceil(bytes / 4)][planes][64][4]; what is not there is zero.
GQ_API int gq_tile(int threads, const uint8_t* bits, int64_t planes, int64_t rows, int64_t bytes, uint8_t* tiles) {
    return guarded([&] {
        const int64_t units = units_of(bytes), stride = 256 * planes;
        auto body = [&](int64_t t) {
            uint8_t* out = tiles + t * units * stride;
            const int64_t here = std::min(TILE, rows - t * TILE);
            if (here < TILE || bytes % UNIT) std::memset(out, 0, static_cast<size_t>(units * stride));
            for (int64_t p = 0; p < planes; ++p)
                for (int64_t u = 0; u < units; u += 16)
                    for (int64_t r = 0; r < here; ++r) {
                        const uint8_t* from = bits + (p * rows + t * TILE + r) * bytes;
                        for (int64_t v = u; v < std::min(units, u + 16); ++v)
                            std::memcpy(out + v * stride + 256 * p + UNIT * r, from + UNIT * v,
                                        static_cast<size_t>(std::min(UNIT, bytes - UNIT * v)));
                    }
        };
        parallel_for(threads, (rows + TILE - 1) / TILE, body);
        return static_cast<int>(OK);
    });
}

// Rows [count] of the deltas of one matrix (see Matrix), each of the variant that index names (-1: none) into, or added
// to, out [count] rows of `cols` that lie `stride` apart.
GQ_API int gq_decode_tiles(int path, int threads, const int64_t* words, int64_t cols, const int64_t* index,
                           const int64_t* rows, int64_t count, int add, float* out, int64_t stride) {
    return guarded([&] {
        Decode decode = decode_scalar;
#if GQ_X86
        if (path == AVX2) decode = decode_avx2;
        if (path == AVX512) decode = decode_avx512;
#endif
        (void)path;
        const Matrix matrix = Matrix::of(words);
        const int64_t bytes = (cols + 7) / 8, piece = rows_a_piece(cols);
        auto body = [&](int64_t p) {
            for (int64_t k = p * piece; k < std::min(count, (p + 1) * piece); ++k) {
                const int64_t v = matrix.variant(index[k]);
                if (v >= 0) decode(matrix.delta(v), rows[k], bytes, cols, add != 0, out + k * stride);
            }
        };
        parallel_for(threads, (count + piece - 1) / piece, body);
        return static_cast<int>(OK);
    });
}
