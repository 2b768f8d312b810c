// Rules that sort the contributors' values at each coordinate: trimmed means, medians, means around the median.
//
// Floats become integers of the same order, so that minima and maxima are the same everywhere (-0.0 below 0.0), and
// go through sorting networks, a coordinate a lane: Batcher's odd-even mergesort for up to 32 rows in registers, and
// bitonic merges of such groups above (Batcher 1968, "Sorting networks and their applications"). A result is added
// up in float64 in ascending order of value.
#include <algorithm>
#include <limits>
#include <memory>
#include <utility>

#include "common.h"

namespace gq {
namespace {

enum Rule : int { TRIMMED = 0, MEDIAN = 1, AROUND = 2, WEIGHTED = 3 };

struct Job {
    const float* x;         // [n, d]
    const double* weights;  // [n], of WEIGHTED alone
    int64_t n, d, trim, keep;
    float* out;  // [d]
    int rule;
};

template <class T>
struct Aligned {
    std::unique_ptr<unsigned char[]> memory;
    T* data;
    explicit Aligned(int64_t size) : memory(new unsigned char[static_cast<size_t>(size) * sizeof(T) + 63]) {
        const auto address = reinterpret_cast<uintptr_t>(memory.get());
        data = reinterpret_cast<T*>((address + 63) & ~uintptr_t{63});
    }
};

constexpr int GROUP = 32;  // rows sorted in registers

// Processors follow fewer streams than there are rows: while a tile of coordinates is sorted strip by strip, some rows
// of the next are fetched with every strip, in pieces long enough for the memory. 32 rows took a third less time.
GQ_INLINE void fetch(const Job& job, int64_t row, int64_t last, int64_t from, int64_t to) {
#if defined(__GNUC__) || defined(__clang__)
    for (; row < last; ++row)
        for (int64_t c = from; c < to; c += 16) __builtin_prefetch(job.x + row * job.d + c, 0, 2);
#else
    (void)job, (void)row, (void)last, (void)from, (void)to;
#endif
}

struct Step {
    int low, high;
};

template <int SIZE>
struct Steps {
    Step list[SIZE > 0 ? SIZE : 1] = {};
};

constexpr int batcher(int n, Step* out) {
    int count = 0;
    for (int p = 1; p < n; p *= 2)
        for (int k = p; k >= 1; k /= 2)
            for (int j = k % p; j + k < n; j += 2 * k)
                for (int i = 0; i < k && i + j + k < n; ++i)
                    if ((i + j) / (2 * p) == (i + j + k) / (2 * p)) {
                        if (out) out[count] = Step{i + j, i + j + k};
                        ++count;
                    }
    return count;
}

constexpr void settling(int n, Step* out) {
    int count = 0;
    for (int k = n / 2; k >= 1; k /= 2)
        for (int i = 0; i < n; ++i)
            if (!(i & k)) out[count++] = Step{i, i + k};
}

template <int N>
struct Network {  // sorts N rows
    static constexpr int SIZE = batcher(N, nullptr);
    static constexpr Steps<SIZE> make() {
        Steps<SIZE> made;
        batcher(N, made.list);
        return made;
    }
    static constexpr Steps<SIZE> steps = make();
};

template <int N>
struct Settling {  // sorts a bitonic sequence of N rows, a power of two
    static constexpr Steps<5 * N / 2> make() {
        Steps<5 * N / 2> made;
        settling(N, made.list);
        return made;
    }
    static constexpr int SIZE = 5 * N / 2;  // half of 32 at each of five distances
    static constexpr Steps<SIZE> steps = make();
};
static_assert(GROUP == 32, "Settling counts its steps for 32 rows");

GQ_INLINE int32_t key_of(float value) {
    int32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits ^ static_cast<int32_t>(static_cast<uint32_t>(bits >> 31) >> 1);
}
GQ_INLINE double value_of(int32_t key) {
    const int32_t bits = key ^ static_cast<int32_t>(static_cast<uint32_t>(key >> 31) >> 1);
    float value;
    std::memcpy(&value, &bits, 4);
    return static_cast<double>(value);
}

namespace plain {
#define GQ_T

template <int N>
struct WideOf {
    double v[N];
    GQ_INLINE WideOf splat(double value) {
        WideOf w;
        for (int l = 0; l < N; ++l) w.v[l] = value;
        return w;
    }
    void narrow(float* out) const {
        for (int l = 0; l < N; ++l) out[l] = static_cast<float>(v[l]);
    }
};
#define GQ_EACH(operation)                           \
    WideOf<N> w;                                     \
    for (int l = 0; l < N; ++l) w.v[l] = operation;  \
    return w;
template <int N>
GQ_INLINE WideOf<N> operator+(WideOf<N> a, WideOf<N> b) { GQ_EACH(a.v[l] + b.v[l]) }
template <int N>
GQ_INLINE WideOf<N> operator-(WideOf<N> a, WideOf<N> b) { GQ_EACH(a.v[l] - b.v[l]) }
template <int N>
GQ_INLINE WideOf<N> operator*(WideOf<N> a, WideOf<N> b) { GQ_EACH(a.v[l] * b.v[l]) }
template <int N>
GQ_INLINE WideOf<N> operator/(WideOf<N> a, WideOf<N> b) { GQ_EACH(a.v[l] / b.v[l]) }
// c where a < b, else 0.0.
template <int N>
GQ_INLINE WideOf<N> below(WideOf<N> a, WideOf<N> b, WideOf<N> c) { GQ_EACH(a.v[l] < b.v[l] ? c.v[l] : 0.0) }
#undef GQ_EACH

template <class L, bool RANK>
struct Rows {
    using Lane = L;
    static constexpr int LANES = 4;
    static constexpr bool VECTORS = false, RANKED = RANK;
    using Wide = WideOf<LANES>;
    Lane v[LANES];
    GQ_INLINE Rows of(const float* p, int64_t row) {
        Rows r;
        for (int l = 0; l < LANES; ++l)
            r.v[l] = RANK ? static_cast<Lane>(int64_t{key_of(p[l] == 0.0f ? 0.0f : p[l])} * (int64_t{1} << 32) + row)
                          : static_cast<Lane>(key_of(p[l]));
        return r;
    }
    GQ_INLINE Rows at(const Lane* p) {
        Rows r;
        std::memcpy(r.v, p, sizeof(r.v));
        return r;
    }
    GQ_INLINE void put(Lane* p, const Rows& r) { std::memcpy(p, r.v, sizeof(r.v)); }
    GQ_INLINE void order(Rows& a, Rows& b) {
        for (int l = 0; l < LANES; ++l) {
            const Lane x = a.v[l], y = b.v[l];
            a.v[l] = x < y ? x : y;
            b.v[l] = x < y ? y : x;
        }
    }
    GQ_INLINE Wide wide(const Lane* p) {
        Wide w;
        for (int l = 0; l < LANES; ++l) w.v[l] = value_of(static_cast<int32_t>(RANK ? int64_t{p[l]} >> 32 : p[l]));
        return w;
    }
    GQ_INLINE Wide weight(const Lane* p, const double* weights) {
        Wide w;
        for (int l = 0; l < LANES; ++l) w.v[l] = weights[static_cast<uint32_t>(p[l])];
        return w;
    }
};
using Keys = Rows<int32_t, false>;
using Ranked = Rows<int64_t, true>;

#include "order_body.h"
#undef GQ_T
}  // namespace plain

#if GQ_X86
namespace avx2 {
#define GQ_T GQ_AVX2

struct Wide4 {
    __m256d v;
    GQ_T GQ_INLINE Wide4 splat(double value) { return {_mm256_set1_pd(value)}; }
    GQ_T void narrow(float* out) const { _mm_storeu_ps(out, _mm256_cvtpd_ps(v)); }
};
GQ_T GQ_INLINE Wide4 operator+(Wide4 a, Wide4 b) { return {_mm256_add_pd(a.v, b.v)}; }
GQ_T GQ_INLINE Wide4 operator-(Wide4 a, Wide4 b) { return {_mm256_sub_pd(a.v, b.v)}; }
GQ_T GQ_INLINE Wide4 operator*(Wide4 a, Wide4 b) { return {_mm256_mul_pd(a.v, b.v)}; }
GQ_T GQ_INLINE Wide4 operator/(Wide4 a, Wide4 b) { return {_mm256_div_pd(a.v, b.v)}; }
GQ_T GQ_INLINE Wide4 below(Wide4 a, Wide4 b, Wide4 c) {
    return {_mm256_and_pd(_mm256_cmp_pd(a.v, b.v, _CMP_LT_OQ), c.v)};
}

struct Wide8 {
    Wide4 low, high;
    GQ_T GQ_INLINE Wide8 splat(double value) { return {Wide4::splat(value), Wide4::splat(value)}; }
    GQ_T void narrow(float* out) const {
        low.narrow(out);
        high.narrow(out + 4);
    }
};
GQ_T GQ_INLINE Wide8 operator+(Wide8 a, Wide8 b) { return {a.low + b.low, a.high + b.high}; }
GQ_T GQ_INLINE Wide8 operator-(Wide8 a, Wide8 b) { return {a.low - b.low, a.high - b.high}; }
GQ_T GQ_INLINE Wide8 operator*(Wide8 a, Wide8 b) { return {a.low * b.low, a.high * b.high}; }
GQ_T GQ_INLINE Wide8 operator/(Wide8 a, Wide8 b) { return {a.low / b.low, a.high / b.high}; }
GQ_T GQ_INLINE Wide8 below(Wide8 a, Wide8 b, Wide8 c) {
    return {below(a.low, b.low, c.low), below(a.high, b.high, c.high)};
}

GQ_T GQ_INLINE __m256i flip(__m256i bits) {  // to keys and back
    return _mm256_xor_si256(bits, _mm256_srli_epi32(_mm256_srai_epi32(bits, 31), 1));
}

struct Keys {
    using Lane = int32_t;
    static constexpr int LANES = 8;
    static constexpr bool VECTORS = true, RANKED = false;
    using Wide = Wide8;
    __m256i v;
    GQ_T GQ_INLINE Keys of(const float* p, int64_t) { return {flip(at(reinterpret_cast<const Lane*>(p)).v)}; }
    GQ_T GQ_INLINE Keys at(const Lane* p) { return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))}; }
    GQ_T GQ_INLINE void put(Lane* p, Keys a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a.v); }
    GQ_T GQ_INLINE void order(Keys& a, Keys& b) {
        const __m256i low = _mm256_min_epi32(a.v, b.v);
        b.v = _mm256_max_epi32(a.v, b.v);
        a.v = low;
    }
    GQ_T GQ_INLINE Wide wide(const Lane* p) {
        const __m256 values = _mm256_castsi256_ps(flip(at(p).v));
        return {{_mm256_cvtps_pd(_mm256_castps256_ps128(values))}, {_mm256_cvtps_pd(_mm256_extractf128_ps(values, 1))}};
    }
};

struct Ranked {
    using Lane = int64_t;
    static constexpr int LANES = 4;
    static constexpr bool VECTORS = true, RANKED = true;
    using Wide = Wide4;
    __m256i v;
    GQ_T GQ_INLINE Ranked of(const float* p, int64_t row) {
        const __m256i bits = _mm256_cvtepu32_epi64(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
        const __m256i minus_zero = _mm256_cmpeq_epi64(bits, _mm256_set1_epi64x(0x80000000));
        const __m256i high = _mm256_slli_epi64(flip(_mm256_andnot_si256(minus_zero, bits)), 32);
        return {_mm256_or_si256(high, _mm256_set1_epi64x(row))};
    }
    GQ_T GQ_INLINE Ranked at(const Lane* p) { return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))}; }
    GQ_T GQ_INLINE void put(Lane* p, Ranked a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a.v); }
    GQ_T GQ_INLINE void order(Ranked& a, Ranked& b) {
        const __m256d x = _mm256_castsi256_pd(a.v), y = _mm256_castsi256_pd(b.v);
        const __m256d swap = _mm256_castsi256_pd(_mm256_cmpgt_epi64(a.v, b.v));
        a.v = _mm256_castpd_si256(_mm256_blendv_pd(x, y, swap));
        b.v = _mm256_castpd_si256(_mm256_blendv_pd(y, x, swap));
    }
    GQ_T GQ_INLINE Wide wide(const Lane* p) {
        const __m256i places = _mm256_setr_epi32(1, 3, 5, 7, 1, 3, 5, 7);
        const __m256i high = _mm256_permutevar8x32_epi32(flip(at(p).v), places);
        return {_mm256_cvtps_pd(_mm_castsi128_ps(_mm256_castsi256_si128(high)))};
    }
    GQ_T GQ_INLINE Wide weight(const Lane* p, const double* weights) {
        const __m256i row = _mm256_and_si256(at(p).v, _mm256_set1_epi64x(0xFFFFFFFF));
        return {_mm256_i64gather_pd(weights, row, 8)};
    }
};

#include "order_body.h"
#undef GQ_T
}  // namespace avx2

namespace avx512 {
#define GQ_T GQ_AVX512

struct Wide8 {
    __m512d v;
    GQ_T GQ_INLINE Wide8 splat(double value) { return {_mm512_set1_pd(value)}; }
    GQ_T void narrow(float* out) const { _mm256_storeu_ps(out, _mm512_cvtpd_ps(v)); }
};
GQ_T GQ_INLINE Wide8 operator+(Wide8 a, Wide8 b) { return {_mm512_add_pd(a.v, b.v)}; }
GQ_T GQ_INLINE Wide8 operator-(Wide8 a, Wide8 b) { return {_mm512_sub_pd(a.v, b.v)}; }
GQ_T GQ_INLINE Wide8 operator*(Wide8 a, Wide8 b) { return {_mm512_mul_pd(a.v, b.v)}; }
GQ_T GQ_INLINE Wide8 operator/(Wide8 a, Wide8 b) { return {_mm512_div_pd(a.v, b.v)}; }
GQ_T GQ_INLINE Wide8 below(Wide8 a, Wide8 b, Wide8 c) {
    return {_mm512_maskz_mov_pd(_mm512_cmp_pd_mask(a.v, b.v, _CMP_LT_OQ), c.v)};
}

struct Wide16 {
    Wide8 low, high;
    GQ_T GQ_INLINE Wide16 splat(double value) { return {Wide8::splat(value), Wide8::splat(value)}; }
    GQ_T void narrow(float* out) const {
        low.narrow(out);
        high.narrow(out + 8);
    }
};
GQ_T GQ_INLINE Wide16 operator+(Wide16 a, Wide16 b) { return {a.low + b.low, a.high + b.high}; }
GQ_T GQ_INLINE Wide16 operator-(Wide16 a, Wide16 b) { return {a.low - b.low, a.high - b.high}; }
GQ_T GQ_INLINE Wide16 operator*(Wide16 a, Wide16 b) { return {a.low * b.low, a.high * b.high}; }
GQ_T GQ_INLINE Wide16 operator/(Wide16 a, Wide16 b) { return {a.low / b.low, a.high / b.high}; }
GQ_T GQ_INLINE Wide16 below(Wide16 a, Wide16 b, Wide16 c) {
    return {below(a.low, b.low, c.low), below(a.high, b.high, c.high)};
}

GQ_T GQ_INLINE __m512i flip(__m512i bits) {  // to keys and back
    return _mm512_ternarylogic_epi32(bits, _mm512_srai_epi32(bits, 31), _mm512_set1_epi32(0x7FFFFFFF), 0x78);
}

struct Keys {
    using Lane = int32_t;
    static constexpr int LANES = 16;
    static constexpr bool VECTORS = true, RANKED = false;
    using Wide = Wide16;
    __m512i v;
    GQ_T GQ_INLINE Keys of(const float* p, int64_t) { return {flip(_mm512_loadu_si512(p))}; }
    GQ_T GQ_INLINE Keys at(const Lane* p) { return {_mm512_loadu_si512(p)}; }
    GQ_T GQ_INLINE void put(Lane* p, Keys a) { _mm512_storeu_si512(p, a.v); }
    GQ_T GQ_INLINE void order(Keys& a, Keys& b) {
        const __m512i low = _mm512_min_epi32(a.v, b.v);
        b.v = _mm512_max_epi32(a.v, b.v);
        a.v = low;
    }
    GQ_T GQ_INLINE Wide wide(const Lane* p) {
        const __m512 values = _mm512_castsi512_ps(flip(at(p).v));
        return {{_mm512_cvtps_pd(_mm512_castps512_ps256(values))}, {_mm512_cvtps_pd(_mm512_extractf32x8_ps(values, 1))}};
    }
};

struct Ranked {
    using Lane = int64_t;
    static constexpr int LANES = 8;
    static constexpr bool VECTORS = true, RANKED = true;
    using Wide = Wide8;
    __m512i v;
    GQ_T GQ_INLINE Ranked of(const float* p, int64_t row) {
        const __m512i bits = _mm512_cvtepu32_epi64(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
        const __mmask8 other = _mm512_cmpneq_epi64_mask(bits, _mm512_set1_epi64(0x80000000));
        const __m512i high = _mm512_slli_epi64(flip(_mm512_maskz_mov_epi64(other, bits)), 32);
        return {_mm512_or_si512(high, _mm512_set1_epi64(row))};
    }
    GQ_T GQ_INLINE Ranked at(const Lane* p) { return {_mm512_loadu_si512(p)}; }
    GQ_T GQ_INLINE void put(Lane* p, Ranked a) { _mm512_storeu_si512(p, a.v); }
    GQ_T GQ_INLINE void order(Ranked& a, Ranked& b) {
        const __m512i low = _mm512_min_epi64(a.v, b.v);
        b.v = _mm512_max_epi64(a.v, b.v);
        a.v = low;
    }
    GQ_T GQ_INLINE Wide wide(const Lane* p) {
        const __m256i key = _mm512_cvtepi64_epi32(_mm512_srli_epi64(flip(at(p).v), 32));
        return {_mm512_cvtps_pd(_mm256_castsi256_ps(key))};
    }
    GQ_T GQ_INLINE Wide weight(const Lane* p, const double* weights) {
        return {_mm512_i64gather_pd(_mm512_and_si512(at(p).v, _mm512_set1_epi64(0xFFFFFFFF)), weights, 8)};
    }
};

#include "order_body.h"
#undef GQ_T
}  // namespace avx512
#endif

}  // namespace
}  // namespace gq

using namespace gq;

// x [n, d] float32 to out [d] float32. `amount` is what is trimmed at either end, or what is kept around the median;
// weights [n] float64 belong to WEIGHTED.
GQ_API int gq_order(int path, int threads, int rule, const float* x, const double* weights, int64_t n, int64_t d,
                    int64_t amount, float* out) {
    return guarded([&] {
        const Job job{x, weights, n, d, amount, amount, out, rule};
        auto piece = rule == WEIGHTED ? plain::order_piece<plain::Ranked> : plain::order_piece<plain::Keys>;
#if GQ_X86
        if (path == AVX2) piece = rule == WEIGHTED ? avx2::order_piece<avx2::Ranked> : avx2::order_piece<avx2::Keys>;
        if (path == AVX512)
            piece = rule == WEIGHTED ? avx512::order_piece<avx512::Ranked> : avx512::order_piece<avx512::Keys>;
#endif
        const int64_t wide = std::max<int64_t>(256, (int64_t{1} << 16) / n / 16 * 16);
        auto body = [&](int64_t p) { piece(job, p * wide, std::min(d, (p + 1) * wide)); };
        parallel_for(threads, (d + wide - 1) / wide, body);
        return static_cast<int>(OK);
    });
}
