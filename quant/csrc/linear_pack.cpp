// Packs the weights of a base model into the tiles of linear.h, and decodes rows of them.
//
// A group of one tile is held with its columns one after the other and the 32 outputs side by side, so that every
// step is the same for 32 outputs and every sum runs over the columns in order: the same bits on every path.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("no-trapping-math", "no-math-errno")  // else GCC keeps choices between floats as branches
#endif
#include "linear.h"

namespace gq {
namespace {

constexpr float ROUND = 12582912.0f;  // 1.5 * 2^23: adding and subtracting it rounds to whole numbers, halves to even
using Block = float[MOST_GROUP][TILE];
using Lane = float[TILE];

// Scales that are tried beside the one that covers the group: shares of it. kernels/linear_reference.py has the same.
constexpr float SHARES8[] = {0.96f, 0.97f, 0.98f, 0.99f, 1.01f, 1.02f};
constexpr float SHARES4[] = {1.0f, 0.94f, 0.88f, 0.82f, 0.76f};
constexpr int FITS = 2;  // least-squares fits of scale and minimum to the codes, a share

// The nearest float16, halves to even; below 65,520 in size.
GQ_INLINE uint16_t to_float16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    const uint32_t sign = bits >> 16 & 0x8000;
    bits &= 0x7FFFFFFF;
    if (bits < 0x38800000) {  // below the normal numbers: multiples of 2^-24, as floats above 0.5 are
        float size;
        std::memcpy(&size, &bits, 4);
        size += 0.5f;
        std::memcpy(&bits, &size, 4);
        return static_cast<uint16_t>(sign | (bits - 0x3F000000));
    }
    bits += 0xFFF + (bits >> 13 & 1);
    return static_cast<uint16_t>(sign | ((bits - 0x38000000) >> 13));
}

// The next float16 not below `value` >= 0.
GQ_INLINE uint16_t up_float16(float value) {
    const uint16_t bits = to_float16(value);
    return from_float16(bits) < value ? static_cast<uint16_t>(bits + 1) : bits;
}

// The next float16 not above `value`.
GQ_INLINE uint16_t down_float16(float value) {
    if (value < 0.0f) return static_cast<uint16_t>(up_float16(-value) | 0x8000);
    const uint16_t bits = to_float16(value);
    return from_float16(bits) > value ? static_cast<uint16_t>(bits - 1) : bits;
}

GQ_INLINE float inverse(float scale) { return scale > 0.0f ? 1.0f / scale : 0.0f; }
GQ_INLINE float within(float value, float low, float high) {
    value = value < low ? low : value;
    return value > high ? high : value;
}

// codes [cols][32] in -127 to 127, the scales' bits.
GQ_INLINE void quantise8(const Block& x, int64_t cols, uint16_t* bits, Block& codes) {
    Lane most = {}, scale, inv, error, least;
    for (int64_t c = 0; c < cols; ++c)
        for (int64_t o = 0; o < TILE; ++o) {
            const float size = std::fabs(x[c][o]);
            most[o] = size > most[o] ? size : most[o];
        }
    for (int attempt = 0; attempt <= static_cast<int>(std::size(SHARES8)); ++attempt) {
        uint16_t tried[TILE];
        for (int64_t o = 0; o < TILE; ++o) {
            const float cover = most[o] / 127.0f;
            tried[o] = attempt == 0 ? up_float16(cover) : to_float16(cover * SHARES8[attempt - 1]);
            scale[o] = from_float16(tried[o]);
            inv[o] = inverse(scale[o]);
            error[o] = 0.0f;
        }
        for (int64_t c = 0; c < cols; ++c)
            for (int64_t o = 0; o < TILE; ++o) {
                const float code = (within(x[c][o] * inv[o], -127.0f, 127.0f) + ROUND) - ROUND;
                const float lost = code * scale[o] - x[c][o];
                error[o] += lost * lost;
            }
        for (int64_t o = 0; o < TILE; ++o)
            if (attempt == 0 || error[o] < least[o]) least[o] = error[o], bits[o] = tried[o];
    }
    for (int64_t o = 0; o < TILE; ++o) inv[o] = inverse(from_float16(bits[o]));
    for (int64_t c = 0; c < cols; ++c)
        for (int64_t o = 0; o < TILE; ++o)
            codes[c][o] = (within(x[c][o] * inv[o], -127.0f, 127.0f) + ROUND) - ROUND;
}

GQ_INLINE float code4(float x, float least, float inv) {
    return (within((x - least) * inv, 0.0f, 15.0f) + ROUND) - ROUND;
}

// codes [cols][32] in 0 to 15, the scales' bits, then the minima's.
GQ_INLINE void quantise4(const Block& x, int64_t cols, uint16_t* bits, Block& codes) {
    Lane low, high, total, scale, least, inv, error, best;
    for (int64_t o = 0; o < TILE; ++o) low[o] = high[o] = x[0][o], total[o] = 0.0f;
    for (int64_t c = 0; c < cols; ++c)
        for (int64_t o = 0; o < TILE; ++o) {
            low[o] = x[c][o] < low[o] ? x[c][o] : low[o];
            high[o] = x[c][o] > high[o] ? x[c][o] : high[o];
            total[o] += x[c][o];
        }
    const float count = static_cast<float>(cols);
    for (int attempt = 0; attempt <= static_cast<int>(std::size(SHARES4)); ++attempt) {
        uint16_t tried[2 * TILE];
        for (int64_t o = 0; o < TILE; ++o) {
            if (attempt == 0) {  // covers the group: no weight is further from its value than half a step
                tried[TILE + o] = down_float16(low[o] + 0.0f);  // no negative zero
                const float reach = high[o] - from_float16(tried[TILE + o]);
                tried[o] = up_float16((reach > 0.0f ? reach : 0.0f) / 15.0f);
            } else {
                const float range = high[o] - low[o], share = SHARES4[attempt - 1];
                tried[o] = to_float16(range / 15.0f * share);
                tried[TILE + o] = to_float16(low[o] + range * ((1.0f - share) * 0.5f));
            }
        }
        for (int fit = attempt == 0 ? FITS : 0; fit <= FITS; ++fit) {
            for (int64_t o = 0; o < TILE; ++o) {
                scale[o] = from_float16(tried[o]);
                least[o] = from_float16(tried[TILE + o]);
                inv[o] = inverse(scale[o]);
            }
            if (fit == FITS) break;
            Lane sum = {}, squares = {}, products = {};
            for (int64_t c = 0; c < cols; ++c)
                for (int64_t o = 0; o < TILE; ++o) {
                    const float code = code4(x[c][o], least[o], inv[o]);
                    sum[o] += code;
                    squares[o] += code * code;
                    products[o] += code * x[c][o];
                }
            for (int64_t o = 0; o < TILE; ++o) {
                const float spread = count * squares[o] - sum[o] * sum[o];
                const float slope = count * products[o] - sum[o] * total[o];
                if (!(spread > 0.0f && slope > 0.0f)) continue;
                tried[o] = to_float16(slope / spread);
                tried[TILE + o] = to_float16((total[o] - from_float16(tried[o]) * sum[o]) / count);
            }
        }
        for (int64_t o = 0; o < TILE; ++o) error[o] = 0.0f;
        for (int64_t c = 0; c < cols; ++c)
            for (int64_t o = 0; o < TILE; ++o) {
                const float lost = code4(x[c][o], least[o], inv[o]) * scale[o] + least[o] - x[c][o];
                error[o] += lost * lost;
            }
        for (int64_t o = 0; o < TILE; ++o)
            if (attempt == 0 || error[o] < best[o])
                best[o] = error[o], bits[o] = tried[o], bits[TILE + o] = tried[TILE + o];
    }
    for (int64_t o = 0; o < TILE; ++o) inv[o] = inverse(from_float16(bits[o])), least[o] = from_float16(bits[TILE + o]);
    for (int64_t c = 0; c < cols; ++c)
        for (int64_t o = 0; o < TILE; ++o) codes[c][o] = code4(x[c][o], least[o], inv[o]);
}

struct Weights {
    const void* values;
    bool wide;  // float32, else bfloat16
};

GQ_INLINE float widened(float value) { return value; }
GQ_INLINE float widened(uint16_t value) { return from_bfloat16(value); }

// `here` columns of one tile, times `factor`; outputs past the last are zero.
template <class T>
GQ_INLINE void load_rows(const T* from, int64_t there, int64_t cols, int64_t here, float factor, Block& x) {
    for (int64_t o = 0; o < TILE; ++o, from += cols)
        if (o < there)
            for (int64_t c = 0; c < here; ++c) x[c][o] = widened(from[c]) * factor;
        else
            for (int64_t c = 0; c < here; ++c) x[c][o] = 0.0f;
}

GQ_INLINE void load(const Weights& w, const Linear& made, int64_t tile, int64_t start, int64_t here, Block& x) {
    const int64_t there = std::min(TILE, made.rows - tile * TILE), at = tile * TILE * made.cols + start;
    const float factor = 1.0f / made.unit;
    if (w.wide)
        load_rows(static_cast<const float*>(w.values) + at, there, made.cols, here, factor, x);
    else
        load_rows(static_cast<const uint16_t*>(w.values) + at, there, made.cols, here, factor, x);
}

GQ_INLINE uint16_t to_bfloat16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

// One tile of weights; `to` has groups * record bytes.
GQ_INLINE void pack_body(const Weights& w, const Linear& made, int64_t tile, uint8_t* to) {
    Block x, codes;
    const int64_t group = made.format == BFLOAT16 ? MOST_GROUP : made.group, bytes = made.record();
    for (int64_t start = 0; start < made.cols; start += group) {
        const int64_t here = std::min(group, made.cols - start);
        load(w, made, tile, start, here, x);
        if (made.format == BFLOAT16) {
            if (here % 2)
                for (int64_t o = 0; o < TILE; ++o) x[here][o] = 0.0f;
            uint16_t pair[2 * TILE];
            for (int64_t c = 0; c < here; c += 2, to += sizeof(pair)) {
                for (int64_t o = 0; o < TILE; ++o)
                    pair[2 * o] = to_bfloat16(x[c][o]), pair[2 * o + 1] = to_bfloat16(x[c + 1][o]);
                std::memcpy(to, pair, sizeof(pair));
            }
            continue;
        }
        uint16_t bits[2 * TILE];
        made.format == INT8 ? quantise8(x, here, bits, codes) : quantise4(x, here, bits, codes);
        for (int64_t c = here; c < group; ++c)
            for (int64_t o = 0; o < TILE; ++o) codes[c][o] = 0.0f;
        uint8_t* out = to;
        if (made.format == INT8) {
            std::memcpy(out, bits, header<8>());
            out += header<8>();
            for (int64_t c = 0; c < group; c += 4, out += 4 * TILE)
                for (int64_t o = 0; o < TILE; ++o)
                    for (int64_t k = 0; k < 4; ++k)
                        out[4 * o + k] = static_cast<uint8_t>(static_cast<int>(codes[c + k][o]) + 128);
        } else {
            std::memcpy(out, bits, header<4>());
            out += header<4>();
            for (int64_t c = 0; c < group; c += 8, out += 4 * TILE)
                for (int64_t o = 0; o < TILE; ++o)
                    for (int64_t k = 0; k < 4; ++k)
                        out[4 * o + k] = static_cast<uint8_t>(static_cast<int>(codes[c + k][o]) |
                                                              static_cast<int>(codes[c + k + 4][o]) << 4);
        }
        to += bytes;
    }
}

// Rows from `first` to `last` of one tile as float32; `out` is row `first`.
GQ_INLINE void decode_body(const Linear& w, int64_t tile, int64_t first, int64_t last, float* out) {
    Block x;
    const uint8_t* from = w.tiles + tile * w.groups() * w.record();
    const int64_t group = w.format == BFLOAT16 ? MOST_GROUP : w.group;
    for (int64_t start = 0; start < w.cols; start += group) {
        const int64_t here = std::min(group, w.cols - start);
        if (w.format == BFLOAT16) {
            for (int64_t c = 0; c < here; c += 2, from += 4 * TILE)
                for (int64_t o = 0; o < TILE; ++o) {
                    uint16_t pair[2];
                    std::memcpy(pair, from + 4 * o, 4);
                    x[c][o] = from_bfloat16(pair[0]);
                    x[c + 1][o] = from_bfloat16(pair[1]);
                }
        } else {
            Lane scale, least;
            for (int64_t o = 0; o < TILE; ++o) {
                uint16_t bits;
                std::memcpy(&bits, from + 2 * o, 2);
                scale[o] = from_float16(bits) * w.unit;
                if (w.format == INT4) std::memcpy(&bits, from + 2 * TILE + 2 * o, 2);
                least[o] = from_float16(bits) * w.unit;
            }
            from += w.format == INT8 ? header<8>() : header<4>();
            if (w.format == INT8)
                for (int64_t c = 0; c < group; c += 4, from += 4 * TILE)
                    for (int64_t o = 0; o < TILE; ++o)
                        for (int64_t k = 0; k < 4; ++k)
                            x[c + k][o] = static_cast<float>(static_cast<int>(from[4 * o + k]) - 128) * scale[o];
            else
                for (int64_t c = 0; c < group; c += 8, from += 4 * TILE)
                    for (int64_t o = 0; o < TILE; ++o)
                        for (int64_t k = 0; k < 4; ++k) {
                            const int code = from[4 * o + k];
                            x[c + k][o] = static_cast<float>(code & 15) * scale[o] + least[o];
                            x[c + k + 4][o] = static_cast<float>(code >> 4) * scale[o] + least[o];
                        }
        }
        for (int64_t r = first; r < last; ++r)
            for (int64_t c = 0; c < here; ++c) out[(r - first) * w.cols + start + c] = x[c][r - tile * TILE];
    }
}

using Pack = void (*)(const Weights&, const Linear&, int64_t, uint8_t*);
using Decode = void (*)(const Linear&, int64_t, int64_t, int64_t, float*);

void pack_scalar(const Weights& w, const Linear& made, int64_t tile, uint8_t* to) { pack_body(w, made, tile, to); }
void decode_scalar(const Linear& w, int64_t tile, int64_t first, int64_t last, float* out) {
    decode_body(w, tile, first, last, out);
}
#if GQ_X86
GQ_AVX2 void pack_avx2(const Weights& w, const Linear& made, int64_t tile, uint8_t* to) { pack_body(w, made, tile, to); }
GQ_AVX512 void pack_avx512(const Weights& w, const Linear& made, int64_t tile, uint8_t* to) {
    pack_body(w, made, tile, to);
}
GQ_AVX2 void decode_avx2(const Linear& w, int64_t tile, int64_t first, int64_t last, float* out) {
    decode_body(w, tile, first, last, out);
}
GQ_AVX512 void decode_avx512(const Linear& w, int64_t tile, int64_t first, int64_t last, float* out) {
    decode_body(w, tile, first, last, out);
}
#endif

}  // namespace
}  // namespace gq

using namespace gq;

// Finite weights [rows, cols] of `made`, float32 (`wide`) or bfloat16, to its tiles.
GQ_API int gq_linear_pack(int path, int threads, const Linear* made, int wide, const void* weights, uint8_t* tiles) {
    return guarded([&] {
        Pack run = pack_scalar;
#if GQ_X86
        if (path == AVX2) run = pack_avx2;
        if (path == AVX512) run = pack_avx512;
#endif
        (void)path;
        const Weights w{weights, wide != 0};
        const int64_t bytes = made->groups() * made->record();
        auto work = [&](int64_t t) { run(w, *made, t, tiles + t * bytes); };
        parallel_for(threads, made->num_tiles(), work);
        return static_cast<int>(OK);
    });
}

// Rows from `start` to `stop` to out [stop - start, cols] float32.
GQ_API int gq_linear_decode(int path, int threads, const Linear* w, int64_t start, int64_t stop, float* out) {
    return guarded([&] {
        Decode run = decode_scalar;
#if GQ_X86
        if (path == AVX2) run = decode_avx2;
        if (path == AVX512) run = decode_avx512;
#endif
        (void)path;
        const int64_t before = start / TILE;
        auto work = [&](int64_t i) {
            const int64_t tile = before + i, first = std::max(start, tile * TILE), last = std::min(stop, tile * TILE + TILE);
            run(*w, tile, first, last, out + (first - start) * w->cols);
        };
        parallel_for(threads, (stop + TILE - 1) / TILE - before, work);
        return static_cast<int>(OK);
    });
}
