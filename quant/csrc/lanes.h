// V, 16 floats, in each instruction set: a kernel's body is included once in each of these namespaces.
//
// Nothing is fused and each lane adds for itself, so a body gives the same bits in all of them.
#pragma once

#include "common.h"

namespace gq {
namespace {

namespace plain {
struct V {
    float x[16];
};
GQ_INLINE V all(float x) {
    V r;
    for (float& one : r.x) one = x;
    return r;
}
GQ_INLINE V get(const float* at) {
    V r;
    std::memcpy(r.x, at, sizeof r.x);
    return r;
}
GQ_INLINE V get(const uint16_t* at) {
    V r;
    for (int j = 0; j < 16; ++j) {
        const uint32_t bits = static_cast<uint32_t>(at[j]) << 16;
        std::memcpy(&r.x[j], &bits, 4);
    }
    return r;
}
GQ_INLINE V get(const int8_t* at) {
    V r;
    for (int j = 0; j < 16; ++j) r.x[j] = at[j];
    return r;
}
GQ_INLINE void put(float* at, V v) { std::memcpy(at, v.x, sizeof v.x); }
#define GQ_EACH(op)                      \
    GQ_INLINE V operator op(V a, V b) {  \
        for (int j = 0; j < 16; ++j) a.x[j] = a.x[j] op b.x[j]; \
        return a;                        \
    }
GQ_EACH(+)
GQ_EACH(-)
GQ_EACH(*)
#undef GQ_EACH
GQ_INLINE V larger(V a, V b) {
    for (int j = 0; j < 16; ++j) a.x[j] = a.x[j] > b.x[j] ? a.x[j] : b.x[j];
    return a;
}
GQ_INLINE V zero_below(V x, float bound, V value) {
    for (int j = 0; j < 16; ++j) value.x[j] = x.x[j] < bound ? 0.0f : value.x[j];
    return value;
}
GQ_INLINE V power_of(V shifted) {
    for (float& one : shifted.x) {
        uint32_t bits;
        std::memcpy(&bits, &one, 4);
        bits = (bits << 23) + 0x3f800000u;
        std::memcpy(&one, &bits, 4);
    }
    return shifted;
}
GQ_INLINE float total_of(V v) {  // lanes 8 apart, then 4, 2 and 1
    for (int step = 8; step > 0; step /= 2)
        for (int j = 0; j < step; ++j) v.x[j] += v.x[j + step];
    return v.x[0];
}
}  // namespace plain

#if GQ_X86
namespace avx2 {
#define GQ_OP GQ_AVX2 GQ_INLINE
struct V {
    __m256 a, b;
};
GQ_OP V all(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
GQ_OP V get(const float* at) { return {_mm256_loadu_ps(at), _mm256_loadu_ps(at + 8)}; }
GQ_OP __m256 upper(const uint16_t* at) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}
GQ_OP V get(const uint16_t* at) { return {upper(at), upper(at + 8)}; }
GQ_OP __m256 whole(const int8_t* at) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at))));
}
GQ_OP V get(const int8_t* at) { return {whole(at), whole(at + 8)}; }
GQ_OP void put(float* at, V v) {
    _mm256_storeu_ps(at, v.a);
    _mm256_storeu_ps(at + 8, v.b);
}
GQ_OP V operator+(V x, V y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
GQ_OP V operator-(V x, V y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
GQ_OP V operator*(V x, V y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
GQ_OP V larger(V x, V y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
GQ_OP __m256 kept(__m256 x, float bound, __m256 value) {
    return _mm256_and_ps(_mm256_cmp_ps(x, _mm256_set1_ps(bound), _CMP_NLT_UQ), value);
}
GQ_OP V zero_below(V x, float bound, V value) { return {kept(x.a, bound, value.a), kept(x.b, bound, value.b)}; }
GQ_OP __m256 power(__m256 x) {
    const __m256i bits = _mm256_slli_epi32(_mm256_castps_si256(x), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(bits, _mm256_set1_epi32(0x3f800000)));
}
GQ_OP V power_of(V x) { return {power(x.a), power(x.b)}; }
GQ_OP float total_of(V x) {
    const __m256 eight = _mm256_add_ps(x.a, x.b);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
#undef GQ_OP
}  // namespace avx2

namespace avx512 {
#define GQ_OP GQ_AVX512 GQ_INLINE
struct V {
    __m512 a;
};
GQ_OP V all(float x) { return {_mm512_set1_ps(x)}; }
GQ_OP V get(const float* at) { return {_mm512_loadu_ps(at)}; }
GQ_OP V get(const uint16_t* at) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))};
}
GQ_OP V get(const int8_t* at) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))))};
}
GQ_OP void put(float* at, V v) { _mm512_storeu_ps(at, v.a); }
GQ_OP V operator+(V x, V y) { return {_mm512_add_ps(x.a, y.a)}; }
GQ_OP V operator-(V x, V y) { return {_mm512_sub_ps(x.a, y.a)}; }
GQ_OP V operator*(V x, V y) { return {_mm512_mul_ps(x.a, y.a)}; }
GQ_OP V larger(V x, V y) { return {_mm512_max_ps(x.a, y.a)}; }
GQ_OP V zero_below(V x, float bound, V value) {
    return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.a, _mm512_set1_ps(bound), _CMP_NLT_UQ), value.a)};
}
GQ_OP V power_of(V x) {
    const __m512i bits = _mm512_slli_epi32(_mm512_castps_si512(x.a), 23);
    return {_mm512_castsi512_ps(_mm512_add_epi32(bits, _mm512_set1_epi32(0x3f800000)))};
}
GQ_OP float total_of(V x) {
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(x.a), _mm512_extractf32x8_ps(x.a, 1));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
#undef GQ_OP
}  // namespace avx512
#endif

}  // namespace
}  // namespace gq
