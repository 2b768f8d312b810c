// The native calls of a decoder step, one behind the other, from a list of words that is made once and run at every step.
//
// A call is its number and its words: addresses, sizes, and float32 in the low half. kernels/program.py writes them.
#include "linear.h"

using namespace gq;

GQ_API int gq_add_norm(int, int, float*, const float*, const float*, const float*, const int64_t*, float, int64_t, int64_t,
                       float*);
GQ_API int gq_rotate(int, int, float*, int64_t, int64_t, int64_t, int64_t, const float*, const float*, const int64_t*, float,
                     const float*, const float*);
GQ_API int gq_gate(int, int, const float*, const float*, int64_t, int64_t, int64_t, float*);
GQ_API int gq_attend(int, int, const float*, const float*, const float*, int64_t, int64_t, int64_t, float*, int64_t,
                     const void*, int64_t, void*, int, int64_t, int64_t, int64_t, int64_t, float, int64_t);
GQ_API int gq_lookup_add(int, int, int, int, const float*, const uint8_t*, const float*, const uint8_t*, int64_t, int64_t,
                         const int64_t*, float*, int64_t, int64_t, const int64_t*);
GQ_API int gq_factors_add(int, int, int, const float*, int64_t, int64_t, const int64_t*, float*, int64_t, int64_t,
                          const int64_t*);

namespace gq {
namespace {

enum Call : int64_t { ADD_NORM, MULTIPLY, ADD_BIAS, ROTATE, ATTEND, GATE, ADD_LOOKUP, ADD_FACTORS, CALLS };
constexpr int64_t WORDS[CALLS] = {9, 5, 6, 11, 18, 6, 9, 9};

struct Words {
    const int64_t* at;

    template <class T>
    T* pointer(int word) const { return reinterpret_cast<T*>(static_cast<uintptr_t>(at[word])); }
    float real(int word) const {
        const auto bits = static_cast<uint32_t>(at[word]);
        float value;
        std::memcpy(&value, &bits, 4);
        return value;
    }
    int whole(int word) const { return static_cast<int>(at[word]); }
};

// y[r] += bias; with `owner` that of the row's variant, biases [variants, size], and nothing where it is -1.
int add_bias(const float* biases, const int64_t* owner, int64_t rows, int64_t size, float* y, int64_t stride) {
    for (int64_t r = 0; r < rows; ++r) {
        if (owner && owner[r] < 0) continue;
        const float* bias = owner ? biases + owner[r] * size : biases;
        for (int64_t i = 0; i < size; ++i) y[r * stride + i] += bias[i];
    }
    return OK;
}

int run(int path, int threads, int features, int64_t call, const Words& w) {
    using F = float;
    using C = const float;
    using I = const int64_t;
    switch (call) {
        case ADD_NORM:
            return gq_add_norm(path, threads, w.pointer<F>(0), w.pointer<C>(1), w.pointer<C>(2), w.pointer<C>(3),
                               w.pointer<I>(4), w.real(5), w.at[6], w.at[7], w.pointer<F>(8));
        case MULTIPLY:
            multiply(path, threads, features, *w.pointer<const Linear>(0), false, w.pointer<C>(1), w.at[2],
                     w.pointer<F>(3), w.at[4]);
            return OK;
        case ADD_BIAS:
            return add_bias(w.pointer<C>(0), w.pointer<I>(1), w.at[2], w.at[3], w.pointer<F>(4), w.at[5]);
        case ROTATE:
            return gq_rotate(path, threads, w.pointer<F>(0), w.at[1], w.at[2], w.at[3], w.at[4], w.pointer<C>(5),
                             w.pointer<C>(6), w.pointer<I>(7), w.real(8), w.pointer<C>(9), w.pointer<C>(10));
        case ATTEND:
            return gq_attend(path, threads, w.pointer<C>(0), w.pointer<C>(1), w.pointer<C>(2), w.at[3], w.at[4], w.at[5],
                             w.pointer<F>(6), w.at[7], w.pointer<const void>(8), w.at[9], w.pointer<void>(10),
                             w.whole(11), w.at[12], w.at[13], w.at[14], w.at[15], w.real(16), w.at[17]);
        case GATE:
            return gq_gate(path, threads, w.pointer<C>(0), w.pointer<C>(1), w.at[2], w.at[3], w.at[4], w.pointer<F>(5));
        case ADD_LOOKUP:
            return gq_lookup_add(path, threads, features, w.whole(0), w.pointer<C>(1), nullptr, nullptr, nullptr, w.at[2],
                                 w.at[3], w.pointer<I>(4), w.pointer<F>(5), w.at[6], w.at[7], w.pointer<I>(8));
        default:
            return gq_factors_add(path, threads, w.whole(0), w.pointer<C>(1), w.at[2], w.at[3], w.pointer<I>(4),
                                  w.pointer<F>(5), w.at[6], w.at[7], w.pointer<I>(8));
    }
}

}  // namespace
}  // namespace gq

// Runs a list of `count` words; ends with the first call that fails, and its status.
GQ_API int gq_run(int path, int threads, int features, const int64_t* words, int64_t count) {
    return guarded([&] {
        for (int64_t at = 0; at < count; at += 1 + WORDS[words[at]])
            if (const int status = run(path, threads, features, words[at], {words + at + 1})) return status;
        return static_cast<int>(OK);
    });
}
