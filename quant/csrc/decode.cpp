// The small operators of a decoder layer, float32 in and out: RMS norm with the residual sum before it, the norm and
// rotation of heads, and the gated activation. A row's result depends on that row alone, and every sum has one order
// (16 lanes, then pairs): all paths give the same bits.
#include <algorithm>
#include <cmath>

#include "common.h"
#if defined(__GNUC__) && !defined(__clang__)
// With trapping maths a choice between floats is a branch, and GCC vectorises no loop that has one. No value changes.
#pragma GCC optimize("no-trapping-math", "no-math-errno")
#endif

namespace gq {
namespace {

constexpr int64_t LANES = 16;
constexpr int64_t MANY = 1 << 15;  // values from which on rows are split over threads

GQ_INLINE float sum_of_squares(const float* x, int64_t size) {
    float lanes[LANES] = {};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES)
        for (int64_t j = 0; j < LANES; ++j) lanes[j] += x[i + j] * x[i + j];
    for (int64_t j = 0; i + j < size; ++j) lanes[j] += x[i + j] * x[i + j];
    for (int64_t half = LANES / 2; half; half /= 2)
        for (int64_t j = 0; j < half; ++j) lanes[j] += lanes[j + half];
    return lanes[0];
}

// out = (weight + delta) * x / sqrt(mean(x^2) + eps), the two products apart.
GQ_INLINE void rms_norm(const float* x, const float* weight, const float* delta, float eps, int64_t size, float* out) {
    const float factor = 1.0f / std::sqrt(sum_of_squares(x, size) / static_cast<float>(size) + eps);
    if (delta)
        for (int64_t i = 0; i < size; ++i) out[i] = weight[i] * (x[i] * factor) + delta[i] * (x[i] * factor);
    else
        for (int64_t i = 0; i < size; ++i) out[i] = weight[i] * (x[i] * factor);
}

// A norm's weight and what variants add to it.
struct Weights {
    const float* base;     // [size]; null: no norm
    const float* deltas;   // [variants, size] or null
    const int64_t* owner;  // [rows], variant or -1; null without deltas
    float eps;
    int64_t size;
};

GQ_INLINE const float* delta_of(const Weights& w, int64_t row) {
    return w.deltas && w.owner[row] >= 0 ? w.deltas + w.owner[row] * w.size : nullptr;
}

struct AddNorm {
    float* hidden;      // [rows, size], gets `term` added
    const float* term;  // [rows, size] or null
    Weights weights;
    float* out;  // [rows, size]
};

GQ_INLINE void add_norm_body(const AddNorm& c, int64_t row) {
    const int64_t size = c.weights.size;
    float* hidden = c.hidden + row * size;
    if (c.term) {
        const float* term = c.term + row * size;
        for (int64_t i = 0; i < size; ++i) hidden[i] += term[i];
    }
    rms_norm(hidden, c.weights.base, delta_of(c.weights, row), c.weights.eps, size, c.out + row * size);
}

struct Rotate {
    float* x;  // rows of `heads` vectors, rows `stride` apart
    int64_t stride, heads;
    Weights weights;  // of a head's norm; their size is the heads'
    const float *cosine, *sine;  // [rows, size]
};

GQ_INLINE void rotate_body(const Rotate& c, int64_t row) {
    const int64_t dim = c.weights.size, half = dim / 2;
    const float *cosine = c.cosine + row * dim, *sine = c.sine + row * dim;
    const float* delta = delta_of(c.weights, row);
    for (int64_t head = 0; head < c.heads; ++head) {
        float* x = c.x + row * c.stride + head * dim;
        if (c.weights.base) rms_norm(x, c.weights.base, delta, c.weights.eps, dim, x);
        GQ_INDEPENDENT
        for (int64_t i = 0; i < half; ++i) {
            const float a = x[i], b = x[i + half];
            x[i] = a * cosine[i] - b * sine[i];
            x[i + half] = b * cosine[i + half] + a * sine[i + half];
        }
    }
}

// exp(x) as 2^n times a polynomial of degree 6 on [-ln 2 / 2, ln 2 / 2] (Cephes): within 2 units of the last place for
// x from -87 to 88, and constant beyond. NaN stays.
constexpr float MOST = 88.0f, LEAST = -87.0f, LOG2_E = 1.44269504f, ROUND = 12582912.0f;  // 1.5 * 2^23
constexpr float LN2_HIGH = 0.693359375f, LN2_LOW = -2.12194440e-4f;
constexpr float P[6] = {1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f,
                        4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};

GQ_INLINE float exponential(float x) {
    x = x > MOST ? MOST : x;
    x = x < LEAST ? LEAST : x;
    const float shifted = x * LOG2_E + ROUND;
    const float n = shifted - ROUND;
    const float r = (x - n * LN2_HIGH) - n * LN2_LOW;
    float p = P[0];
    for (int k = 1; k < 6; ++k) p = p * r + P[k];
    p = (p * r) * r + r + 1.0f;
    uint32_t bits;
    std::memcpy(&bits, &shifted, 4);
    bits = (bits << 23) + 0x3f800000u;
    float power;
    std::memcpy(&power, &bits, 4);
    return p * power;
}

struct Gate {
    const float *gate, *up;  // rows `stride` apart
    int64_t stride, size;
    float* out;  // [rows, size]
};

// From column `i` on.
GQ_INLINE void gate_from(const Gate& c, int64_t row, int64_t i) {
    const float *gate = c.gate + row * c.stride, *up = c.up + row * c.stride;
    float* out = c.out + row * c.size;
    for (; i < c.size; ++i) out[i] = gate[i] / (1.0f + exponential(-gate[i])) * up[i];
}

void gate_scalar(const Gate& c, int64_t row) { gate_from(c, row, 0); }

#if GQ_X86
GQ_AVX512 void gate_avx512(const Gate& c, int64_t row) { gate_from(c, row, 0); }

// GCC makes branches of the two bounds for AVX2. min and max return their second operand where one is NaN.
GQ_AVX2 void gate_avx2(const Gate& c, int64_t row) {
    const float *gate = c.gate + row * c.stride, *up = c.up + row * c.stride;
    float* out = c.out + row * c.size;
    const __m256 one = _mm256_set1_ps(1.0f), round = _mm256_set1_ps(ROUND);
    int64_t i = 0;
    for (; i + 8 <= c.size; i += 8) {
        const __m256 a = _mm256_loadu_ps(gate + i);
        __m256 x = _mm256_xor_ps(a, _mm256_set1_ps(-0.0f));
        x = _mm256_max_ps(_mm256_set1_ps(LEAST), _mm256_min_ps(_mm256_set1_ps(MOST), x));
        const __m256 shifted = _mm256_add_ps(_mm256_mul_ps(x, _mm256_set1_ps(LOG2_E)), round);
        const __m256 n = _mm256_sub_ps(shifted, round);
        const __m256 r = _mm256_sub_ps(_mm256_sub_ps(x, _mm256_mul_ps(n, _mm256_set1_ps(LN2_HIGH))),
                                       _mm256_mul_ps(n, _mm256_set1_ps(LN2_LOW)));
        __m256 p = _mm256_set1_ps(P[0]);
        for (int k = 1; k < 6; ++k) p = _mm256_add_ps(_mm256_mul_ps(p, r), _mm256_set1_ps(P[k]));
        p = _mm256_add_ps(_mm256_add_ps(_mm256_mul_ps(_mm256_mul_ps(p, r), r), r), one);
        const __m256i bits = _mm256_slli_epi32(_mm256_castps_si256(shifted), 23);
        const __m256 power = _mm256_castsi256_ps(_mm256_add_epi32(bits, _mm256_set1_epi32(0x3f800000)));
        const __m256 silu = _mm256_div_ps(a, _mm256_add_ps(one, _mm256_mul_ps(p, power)));
        _mm256_storeu_ps(out + i, _mm256_mul_ps(silu, _mm256_loadu_ps(up + i)));
    }
    gate_from(c, row, i);
}
#endif

template <class C>
using Body = void (*)(const C&, int64_t);

#if GQ_X86
#define GQ_BODIES(name, type)                                                    \
    void name##_scalar(const type& c, int64_t row) { name##_body(c, row); }         \
    GQ_AVX2 void name##_avx2(const type& c, int64_t row) { name##_body(c, row); }   \
    GQ_AVX512 void name##_avx512(const type& c, int64_t row) { name##_body(c, row); }
#define GQ_PICK(name, path) ((path) == AVX512 ? name##_avx512 : (path) == AVX2 ? name##_avx2 : name##_scalar)
#else
#define GQ_BODIES(name, type) \
    void name##_scalar(const type& c, int64_t row) { name##_body(c, row); }
#define GQ_PICK(name, path) (name##_scalar)
#endif

GQ_BODIES(add_norm, AddNorm)
GQ_BODIES(rotate, Rotate)

template <class C>
void each_row(int threads, int64_t rows, int64_t values, Body<C> body, const C& context) {
    if (threads < 2 || rows * values < MANY) {
        for (int64_t row = 0; row < rows; ++row) body(context, row);
        return;
    }
    const int64_t step = std::max<int64_t>(1, rows / (4 * threads));
    auto work = [&](int64_t piece) {
        for (int64_t row = piece * step; row < std::min(rows, (piece + 1) * step); ++row) body(context, row);
    };
    parallel_for(threads, (rows + step - 1) / step, work);
}

}  // namespace
}  // namespace gq

using namespace gq;

// hidden += term (where there is one), out = norm(hidden).
GQ_API int gq_add_norm(int path, int threads, float* hidden, const float* term, const float* weight, const float* deltas,
                       const int64_t* owner, float eps, int64_t rows, int64_t size, float* out) {
    (void)path;
    return guarded([&] {
        const AddNorm context{hidden, term, {weight, deltas, owner, eps, size}, out};
        each_row<AddNorm>(threads, rows, size, GQ_PICK(add_norm, path), context);
        return static_cast<int>(OK);
    });
}

// In place: every head's norm (where it has a weight), then its rotation.
GQ_API int gq_rotate(int path, int threads, float* x, int64_t stride, int64_t rows, int64_t heads, int64_t dim,
                     const float* weight, const float* deltas, const int64_t* owner, float eps, const float* cosine,
                     const float* sine) {
    (void)path;
    return guarded([&] {
        const Rotate context{x, stride, heads, {weight, deltas, owner, eps, dim}, cosine, sine};
        each_row<Rotate>(threads, rows, heads * dim, GQ_PICK(rotate, path), context);
        return static_cast<int>(OK);
    });
}

// out = silu(gate) * up.
GQ_API int gq_gate(int path, int threads, const float* gate, const float* up, int64_t stride, int64_t rows, int64_t size,
                   float* out) {
    (void)path;
    return guarded([&] {
        const Gate context{gate, up, stride, size, out};
        each_row<Gate>(threads, rows, size, GQ_PICK(gate, path), context);
        return static_cast<int>(OK);
    });
}
