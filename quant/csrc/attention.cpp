// Attention of packed tokens over a paged KV cache: blocks of 16 tokens, in float32, bfloat16 or int8.
//
// A block has a part for each key head: keys [dim, 16], so that the scores of 16 tokens are one vector; values
// [16, width], where width is the head's size rounded up to 16; and for int8 two times 16 float32 scales, of keys and of
// values. Query heads that share a key head are computed together, so that keys and values are read once.
#include <algorithm>
#include <atomic>
#include <cmath>

#include "lanes.h"

#if defined(__GNUC__) || defined(__clang__)
#define GQ_FETCH(at) __builtin_prefetch(at)
#else
#define GQ_FETCH(at) (void)(at)
#endif

namespace gq {
namespace {

constexpr int64_t BLOCK = 16, TILE = 128;
constexpr int64_t QUERIES = 4;       // side by side in registers
constexpr int64_t ITEM = 64;         // queries of a piece of work
constexpr int64_t MANY = 1 << 16;    // products from which on threads help

enum Kind : int { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2 };

// One request: its rows, its tokens before them, and the numbers of its blocks.
struct Span {
    int64_t start, stop, length;
    const int32_t* blocks;
};

struct Attention {
    const float *q, *k, *v;  // [rows, heads, dim], the last two dimensions contiguous
    int64_t q_stride, k_stride, v_stride;
    float* out;  // [rows, heads, value_dim]
    int64_t out_stride;
    const Span* spans;
    int64_t count;
    char* pool;  // [blocks, kv_heads, bytes]
    int64_t heads, kv_heads, dim, value_dim, kind, window;
    float scale;

    int64_t width() const { return (value_dim + 15) / 16 * 16; }
    int64_t bytes() const {
        const int64_t values = (dim + width()) * BLOCK;
        return kind == FLOAT32 ? 4 * values : kind == BFLOAT16 ? 2 * values : values + 8 * BLOCK;
    }
    char* block(const Span& span, int64_t number, int64_t head) const {
        return pool + (span.blocks[number] * kv_heads + head) * bytes();
    }
};

template <class T>
constexpr int LINE = 4 / sizeof(T);  // rows of 16 values in a line of the cache

template <class T>
struct View {
    const T *keys, *values;
    const float* key_scales;
};

// Queries of one key head: `queries` of them, `groups` of each row, the first row at `position`.
struct Work {
    int64_t queries, groups, dim, width, position, window;
    float *q, *sums, *lanes, *scores, *most;

    int64_t end_of(int64_t query) const { return position + query / groups + 1; }
    int64_t begin_of(int64_t query) const {
        return window ? std::max<int64_t>(0, end_of(query) - window) : 0;
    }
};

// Null where there is no memory.
float* room_for(int64_t floats) {
    static thread_local std::vector<float> room;
    const size_t wanted = static_cast<size_t>(floats) + 16;
    try {
        if (room.size() < wanted) room.resize(wanted);
    } catch (...) {
        return nullptr;
    }
    return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(room.data()) + 63) / 64 * 64);
}

// The scale of int8 values, and its inverse. Not a number where one of them is none, so that this is seen later.
GQ_INLINE float factor_of(const float* x, int64_t size, float& scale) {
    float most = 0.0f;
    for (int64_t i = 0; i < size; ++i) {
        const float a = std::fabs(x[i]);
        most = a > most || a != a ? a : most;
    }
    scale = most / 127.0f;
    return most > 0.0f ? 127.0f / most : 0.0f;
}

GQ_INLINE void narrow(float x, float, float& to) { to = x; }
GQ_INLINE void narrow(float x, float, uint16_t& to) {  // to nearest, ties to even; NaN stays NaN
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    to = x != x ? 0x7fc0 : static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}
GQ_INLINE void narrow(float x, float factor, int8_t& to) {  // to nearest, ties to even
    const float shifted = x * factor + 12582912.0f;
    uint32_t bits;
    std::memcpy(&bits, &shifted, 4);
    to = static_cast<int8_t>(bits);
}

namespace plain {
#define GQ_T
constexpr int WIDTH = 4;
#include "attention_body.h"
#undef GQ_T
}  // namespace plain

#if GQ_X86
namespace avx2 {
#define GQ_T GQ_AVX2
constexpr int WIDTH = 4;
#include "attention_body.h"
#undef GQ_T
}  // namespace avx2

namespace avx512 {
#define GQ_T GQ_AVX512
constexpr int WIDTH = 16;
#include "attention_body.h"
#undef GQ_T
}  // namespace avx512
#endif

struct Functions {
    void (*append)(const Attention&, const Span&, int64_t);
    bool (*rows)(const Attention&, const Span&, int64_t, int64_t, int64_t);
};

template <class T>
Functions functions(int path) {
#if GQ_X86
    if (path == AVX512) return {avx512::append_body<T>, avx512::rows_body<T>};
    if (path == AVX2) return {avx2::append_body<T>, avx2::rows_body<T>};
#else
    (void)path;
#endif
    return {plain::append_body<T>, plain::rows_body<T>};
}

int attend(int threads, const Attention& a, const Functions& run) {
    std::atomic<bool> full{false};  // no exception may leave a thread of the pool
    const int64_t step = std::max<int64_t>(1, ITEM * a.kv_heads / a.heads);  // rows of a piece
    int64_t pieces = 0, products = 0, longest = 0;
    for (int64_t s = 0; s < a.count; ++s) {
        const int64_t rows = a.spans[s].stop - a.spans[s].start;
        pieces += (rows + step - 1) / step;
        products += rows * (a.spans[s].length + rows) * a.heads * a.dim;
        longest = std::max(longest, rows);
    }
    if (products < MANY) threads = 1;
    if (longest <= step) {  // each piece has a whole request's rows
        auto whole = [&](int64_t item) {
            const Span& span = a.spans[item / a.kv_heads];
            run.append(a, span, item % a.kv_heads);
            if (!run.rows(a, span, item % a.kv_heads, span.start, span.stop)) full = true;
        };
        parallel_for(threads, a.count * a.kv_heads, whole);
        return full ? NO_MEMORY : OK;
    }
    auto append = [&](int64_t item) { run.append(a, a.spans[item / a.kv_heads], item % a.kv_heads); };
    parallel_for(threads, a.count * a.kv_heads, append);
    struct Piece {
        const Span* span;
        int64_t start, stop;
    };
    std::vector<Piece> list;
    list.reserve(static_cast<size_t>(pieces));
    for (int64_t s = 0; s < a.count; ++s)
        for (int64_t row = a.spans[s].start; row < a.spans[s].stop; row += step)
            list.push_back({a.spans + s, row, std::min(row + step, a.spans[s].stop)});
    std::reverse(list.begin(), list.end());  // those that see most first
    auto some = [&](int64_t item) {
        const Piece& piece = list[static_cast<size_t>(item / a.kv_heads)];
        if (!run.rows(a, *piece.span, item % a.kv_heads, piece.start, piece.stop)) full = true;
    };
    parallel_for(threads, pieces * a.kv_heads, some);
    return full ? NO_MEMORY : OK;
}

}  // namespace
}  // namespace gq

using namespace gq;

// Appends the rows' keys and values to their requests' blocks and computes causal attention over them. `window` 0: none.
// `spans` are [count] of (first row, row after the last, tokens before, address of int32 block numbers).
GQ_API int gq_attend(int path, int threads, const float* q, const float* k, const float* v, int64_t q_stride,
                     int64_t k_stride, int64_t v_stride, float* out, int64_t out_stride, const void* spans,
                     int64_t count, void* pool, int kind, int64_t heads, int64_t kv_heads, int64_t dim,
                     int64_t value_dim, float scale, int64_t window) {
    const Attention a{q, k, v, q_stride, k_stride, v_stride, out, out_stride, static_cast<const Span*>(spans), count,
                      static_cast<char*>(pool), heads, kv_heads, dim, value_dim, kind, window, scale};
    return guarded([&] {
        const Functions run = kind == FLOAT32    ? functions<float>(path)
                              : kind == BFLOAT16 ? functions<uint16_t>(path)
                                                 : functions<int8_t>(path);
        return attend(threads, a, run);
    });
}
