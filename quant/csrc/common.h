// What the kernels share: how a function is compiled for an instruction set, and how work is split over threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

// GQ_PLAIN builds what other processors get, to try it here.
#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__)) && !defined(GQ_PLAIN)
#define GQ_X86 1
#include <immintrin.h>
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"  // GCC's own AVX-512 header (its bug 105593)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#define GQ_AVX2 __attribute__((target("avx2,popcnt")))
#define GQ_AVX512 __attribute__((target("avx2,popcnt,avx512f,avx512bw,avx512dq,avx512vl")))
#define GQ_VBMI __attribute__((target("avx2,popcnt,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")))
#define GQ_POPCNT512 __attribute__((target("avx2,popcnt,avx512f,avx512bw,avx512dq,avx512vl,avx512vpopcntdq")))
#else
#define GQ_X86 0
#endif

#if defined(_MSC_VER)
#define GQ_API extern "C" __declspec(dllexport)
#define GQ_INLINE static __forceinline
#else
#define GQ_API extern "C" __attribute__((visibility("default")))
#define GQ_INLINE static inline __attribute__((always_inline))
#endif

#if defined(__GNUC__) && !defined(__clang__)
#define GQ_INDEPENDENT _Pragma("GCC ivdep")
#else
#define GQ_INDEPENDENT
#endif

namespace gq {

enum Path : int { SCALAR = 0, AVX2 = 1, AVX512 = 2 };
enum Status : int { OK = 0, NO_MEMORY = 1, NOT_MADE = 2 };

// Runs run(context, i) for i in [0, items) on up to `threads` threads, in no order; returns when all are done.
void parallel(int threads, int64_t items, void (*run)(void*, int64_t), void* context);

template <class F>
void parallel_for(int threads, int64_t items, F& body) {
    parallel(threads, items, [](void* context, int64_t i) { (*static_cast<F*>(context))(i); }, &body);
}

// Adds the distances of na rows `a` to nb rows `b`, at most COUNTED each, in `bytes` bytes from `at` to sums
// [na, COUNTED]. Where both are the `same` rows, those above the diagonal at least (counts.cpp).
constexpr int64_t COUNTED = 64;
using PairCounter = void (*)(const uint8_t* const* a, int64_t na, const uint8_t* const* b, int64_t nb, bool same,
                             int64_t at, int64_t bytes, int64_t* sums);
PairCounter pair_counter(int path, int features);

// Pairwise Hamming distances [n, n] of n packed rows of `bytes` bytes each, wherever they lie (counts.cpp).
void distances(int path, int threads, int features, const uint8_t* const* rows, int64_t n, int64_t bytes,
               int64_t* out);

// Rows of a matrix in one piece of work: about 64 Ki elements.
inline int64_t rows_a_piece(int64_t cols) {
    const int64_t wanted = (int64_t{1} << 16) / (cols > 0 ? cols : 1);
    return wanted > 0 ? wanted : 1;
}

// The C boundary: no exception crosses it.
template <class F>
int guarded(F&& body) {
    try {
        return body();
    } catch (...) {
        return NO_MEMORY;
    }
}

}  // namespace gq
