// Sign bits of a matrix: pack, encode (delta, sign and magnitude in one pass) and decode.
//
// Bits run along a row, least significant first; rows are padded to whole bytes with zeros. Magnitudes are summed
// in float64 in 16 lanes (column modulo 16 within the group), lanes combined pairwise (8, 4, 2, 1): one order for
// every instruction set, so that results agree to the last bit.
#include <cmath>

#include "common.h"

namespace gq {
namespace {

struct bf16 {
    uint16_t bits;
};
GQ_INLINE float widen(float value) { return value; }
GQ_INLINE float widen(bf16 value) {
    const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}

template <class A, class B>
GQ_INLINE float delta_at(const A* a, const B* b, const float* r, int64_t i) {
    float d = widen(a[i]);
    if (b) d = d - widen(b[i]);
    if (r) d = d + r[i];
    return d;
}

GQ_INLINE double combine(double* lanes) {
    for (int step = 8; step; step >>= 1)
        for (int l = 0; l < step; ++l) lanes[l] += lanes[l + step];
    return lanes[0];
}

// From element i, a multiple of 16, to the end.
template <class A, class B>
GQ_INLINE double finish(const A* a, const B* b, const float* r, int64_t i, int64_t n, uint8_t* out, double* lanes) {
    while (i < n) {
        unsigned byte = 0;
        for (int k = 0; k < 8 && i < n; ++k, ++i) {
            const float d = delta_at(a, b, r, i);
            byte |= static_cast<unsigned>(d >= 0.0f) << k;
            lanes[i & 15] += static_cast<double>(std::fabs(d));
        }
        out[(i - 1) >> 3] = static_cast<uint8_t>(byte);
    }
    return combine(lanes);
}

template <class A, class B>
double encode_scalar(const A* a, const B* b, const float* r, int64_t n, uint8_t* out) {
    double lanes[16] = {};
    return finish(a, b, r, 0, n, out, lanes);
}

#if GQ_X86
GQ_AVX2 GQ_INLINE __m256 load8(const float* p) { return _mm256_loadu_ps(p); }
GQ_AVX2 GQ_INLINE __m256 load8(const bf16* p) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}
GQ_AVX512 GQ_INLINE __m512 load16(const float* p) { return _mm512_loadu_ps(p); }
GQ_AVX512 GQ_INLINE __m512 load16(const bf16* p) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

template <class A, class B>
GQ_AVX2 double encode_avx2(const A* a, const B* b, const float* r, int64_t n, uint8_t* out) {
    __m256d acc[4] = {_mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd()};
    const __m256 sign = _mm256_set1_ps(-0.0f);
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        for (int h = 0; h < 2; ++h) {
            __m256 d = load8(a + i + 8 * h);
            if (b) d = _mm256_sub_ps(d, load8(b + i + 8 * h));
            if (r) d = _mm256_add_ps(d, _mm256_loadu_ps(r + i + 8 * h));
            const __m256 positive = _mm256_cmp_ps(d, _mm256_setzero_ps(), _CMP_GE_OQ);
            out[(i >> 3) + h] = static_cast<uint8_t>(_mm256_movemask_ps(positive));
            d = _mm256_andnot_ps(sign, d);
            acc[2 * h] = _mm256_add_pd(acc[2 * h], _mm256_cvtps_pd(_mm256_castps256_ps128(d)));
            acc[2 * h + 1] = _mm256_add_pd(acc[2 * h + 1], _mm256_cvtps_pd(_mm256_extractf128_ps(d, 1)));
        }
    }
    if (i == n) {  // the order of combine(), in registers
        const __m256d four = _mm256_add_pd(_mm256_add_pd(acc[0], acc[2]), _mm256_add_pd(acc[1], acc[3]));
        const __m128d two = _mm_add_pd(_mm256_castpd256_pd128(four), _mm256_extractf128_pd(four, 1));
        return _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)));
    }
    double lanes[16];
    for (int k = 0; k < 4; ++k) _mm256_storeu_pd(lanes + 4 * k, acc[k]);
    return finish(a, b, r, i, n, out, lanes);
}

template <class A, class B>
GQ_AVX512 double encode_avx512(const A* a, const B* b, const float* r, int64_t n, uint8_t* out) {
    __m512d low = _mm512_setzero_pd(), high = _mm512_setzero_pd();
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        __m512 d = load16(a + i);
        if (b) d = _mm512_sub_ps(d, load16(b + i));
        if (r) d = _mm512_add_ps(d, _mm512_loadu_ps(r + i));
        const uint16_t bits = static_cast<uint16_t>(_mm512_cmp_ps_mask(d, _mm512_setzero_ps(), _CMP_GE_OQ));
        std::memcpy(out + (i >> 3), &bits, 2);
        d = _mm512_abs_ps(d);
        low = _mm512_add_pd(low, _mm512_cvtps_pd(_mm512_castps512_ps256(d)));
        high = _mm512_add_pd(high, _mm512_cvtps_pd(_mm512_extractf32x8_ps(d, 1)));
    }
    if (i == n) {  // the order of combine(), in registers
        const __m512d eight = _mm512_add_pd(low, high);
        const __m256d four = _mm256_add_pd(_mm512_castpd512_pd256(eight), _mm512_extractf64x4_pd(eight, 1));
        const __m128d two = _mm_add_pd(_mm256_castpd256_pd128(four), _mm256_extractf128_pd(four, 1));
        return _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)));
    }
    double lanes[16];
    _mm512_storeu_pd(lanes, low);
    _mm512_storeu_pd(lanes + 8, high);
    return finish(a, b, r, i, n, out, lanes);
}
#endif

// Groups that do not begin at whole bytes: bit by bit, in the same order of summation.
template <class A, class B>
void encode_ragged(const A* a, const B* b, const float* r, int64_t cols, int64_t group, uint8_t* out, double* sums) {
    std::memset(out, 0, static_cast<size_t>((cols + 7) / 8));
    for (int64_t start = 0; start < cols; start += group, ++sums) {
        double lanes[16] = {};
        const int64_t n = group < cols - start ? group : cols - start;
        for (int64_t i = 0; i < n; ++i) {
            const int64_t c = start + i;
            const float d = delta_at(a, b, r, c);
            out[c >> 3] |= static_cast<uint8_t>(static_cast<unsigned>(d >= 0.0f) << (c & 7));
            lanes[i & 15] += static_cast<double>(std::fabs(d));
        }
        *sums = combine(lanes);
    }
}

template <class A, class B>
void encode(int path, int threads, const A* a, const B* b, const float* r, int64_t rows, int64_t cols, int64_t group,
            uint8_t* bits, double* sums) {
    double (*segment)(const A*, const B*, const float*, int64_t, uint8_t*) = encode_scalar<A, B>;
#if GQ_X86
    if (path == AVX2) segment = encode_avx2<A, B>;
    if (path == AVX512) segment = encode_avx512<A, B>;
#endif
    if (group <= 0 || group > cols) group = cols;
    const int64_t width = (cols + 7) / 8, groups = (cols + group - 1) / group, piece = rows_a_piece(cols);
    auto body = [&](int64_t p) {
        const int64_t stop = (p + 1) * piece < rows ? (p + 1) * piece : rows;
        for (int64_t row = p * piece; row < stop; ++row) {
            const A* ra = a + row * cols;
            const B* rb = b ? b + row * cols : nullptr;
            const float* rr = r ? r + row * cols : nullptr;
            uint8_t* out = bits + row * width;
            double* sum = sums + row * groups;
            if (group % 8 && groups > 1) {
                encode_ragged(ra, rb, rr, cols, group, out, sum);
                continue;
            }
            for (int64_t c = 0; c < cols; c += group) {
                const int64_t n = group < cols - c ? group : cols - c;
                *sum++ = segment(ra + c, rb ? rb + c : nullptr, rr ? rr + c : nullptr, n, out + (c >> 3));
            }
        }
    };
    parallel_for(threads, (rows + piece - 1) / piece, body);
}

void pack_scalar(const float* x, int64_t n, uint8_t* out) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        unsigned byte = 0;
        for (int k = 0; k < 8; ++k) byte |= static_cast<unsigned>(x[i + k] >= 0.0f) << k;
        out[i >> 3] = static_cast<uint8_t>(byte);
    }
    if (i < n) {
        unsigned byte = 0;
        for (int k = 0; i + k < n; ++k) byte |= static_cast<unsigned>(x[i + k] >= 0.0f) << k;
        out[i >> 3] = static_cast<uint8_t>(byte);
    }
}

GQ_INLINE void decode_one(const uint8_t* bits, int64_t c, float scale, float* out, bool add) {
    const float value = (bits[c >> 3] >> (c & 7)) & 1 ? scale : -scale;
    *out = add ? *out + value : value;
}

// Columns [c, stop) of one row, all with one scale; `out` is the row.
void decode_scalar(const uint8_t* bits, int64_t c, int64_t stop, float scale, float* out, bool add) {
    for (; c < stop; ++c) decode_one(bits, c, scale, out + c, add);
}

#if GQ_X86
GQ_AVX2 void pack_avx2(const float* x, int64_t n, uint8_t* out) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        const __m256 positive = _mm256_cmp_ps(_mm256_loadu_ps(x + i), _mm256_setzero_ps(), _CMP_GE_OQ);
        out[i >> 3] = static_cast<uint8_t>(_mm256_movemask_ps(positive));
    }
    pack_scalar(x + i, n - i, out + (i >> 3));
}

GQ_AVX512 void pack_avx512(const float* x, int64_t n, uint8_t* out) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        const __m512 v = _mm512_loadu_ps(x + i);
        const uint16_t bits = static_cast<uint16_t>(_mm512_cmp_ps_mask(v, _mm512_setzero_ps(), _CMP_GE_OQ));
        std::memcpy(out + (i >> 3), &bits, 2);
    }
    pack_scalar(x + i, n - i, out + (i >> 3));
}

GQ_AVX2 void decode_avx2(const uint8_t* bits, int64_t c, int64_t stop, float scale, float* out, bool add) {
    for (; c < stop && (c & 7); ++c) decode_one(bits, c, scale, out + c, add);
    const __m256i place = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256 plus = _mm256_set1_ps(scale), minus = _mm256_set1_ps(-scale);
    for (; c + 8 <= stop; c += 8) {
        const __m256i set = _mm256_and_si256(_mm256_set1_epi32(bits[c >> 3]), place);
        const __m256 chosen = _mm256_castsi256_ps(_mm256_cmpeq_epi32(set, place));
        __m256 v = _mm256_blendv_ps(minus, plus, chosen);
        if (add) v = _mm256_add_ps(_mm256_loadu_ps(out + c), v);
        _mm256_storeu_ps(out + c, v);
    }
    for (; c < stop; ++c) decode_one(bits, c, scale, out + c, add);
}

GQ_AVX512 void decode_avx512(const uint8_t* bits, int64_t c, int64_t stop, float scale, float* out, bool add) {
    for (; c < stop && (c & 7); ++c) decode_one(bits, c, scale, out + c, add);
    const __m512 plus = _mm512_set1_ps(scale), minus = _mm512_set1_ps(-scale);
    for (; c + 16 <= stop; c += 16) {
        uint16_t set;
        std::memcpy(&set, bits + (c >> 3), 2);
        __m512 v = _mm512_mask_blend_ps(set, minus, plus);
        if (add) v = _mm512_add_ps(_mm512_loadu_ps(out + c), v);
        _mm512_storeu_ps(out + c, v);
    }
    for (; c < stop; ++c) decode_one(bits, c, scale, out + c, add);
}
#endif

}  // namespace
}  // namespace gq

using namespace gq;

// x [rows, cols] float32 to bits [rows, ceil(cols / 8)].
GQ_API int gq_pack(int path, int threads, const float* x, int64_t rows, int64_t cols, uint8_t* bits) {
    return guarded([&] {
        void (*pack)(const float*, int64_t, uint8_t*) = pack_scalar;
#if GQ_X86
        if (path == AVX2) pack = pack_avx2;
        if (path == AVX512) pack = pack_avx512;
#endif
        const int64_t width = (cols + 7) / 8, piece = rows_a_piece(cols);
        auto body = [&](int64_t p) {
            const int64_t start = p * piece, stop = start + piece < rows ? start + piece : rows;
            if (cols % 8 == 0) return pack(x + start * cols, (stop - start) * cols, bits + start * width);
            for (int64_t row = start; row < stop; ++row) pack(x + row * cols, cols, bits + row * width);
        };
        parallel_for(threads, (rows + piece - 1) / piece, body);
        return static_cast<int>(OK);
    });
}

// delta = a - b + r (b and r may be null); bits [rows, ceil(cols / 8)], sums of |delta| [rows, groups] float64.
// group 0: one group a row. kinds: bit 0 set where a is bfloat16, bit 1 where b is.
GQ_API int gq_encode(int path, int threads, int kinds, const void* a, const void* b, const float* r, int64_t rows,
                     int64_t cols, int64_t group, uint8_t* bits, double* sums) {
    return guarded([&] {
        const float *af = static_cast<const float*>(a), *bf = static_cast<const float*>(b);
        const bf16 *ah = static_cast<const bf16*>(a), *bh = static_cast<const bf16*>(b);
        if (kinds == 0) encode(path, threads, af, bf, r, rows, cols, group, bits, sums);
        if (kinds == 1) encode(path, threads, ah, bf, r, rows, cols, group, bits, sums);
        if (kinds == 2) encode(path, threads, af, bh, r, rows, cols, group, bits, sums);
        if (kinds == 3) encode(path, threads, ah, bh, r, rows, cols, group, bits, sums);
        return static_cast<int>(OK);
    });
}

// out [rows, cols] = (or +=, where add) scale * sign. group 0: scales [1], else [rows, ceil(cols / group)].
GQ_API int gq_decode(int path, int threads, const uint8_t* bits, const float* scales, int64_t rows, int64_t cols,
                     int64_t group, float* out, int add) {
    return guarded([&] {
        void (*decode)(const uint8_t*, int64_t, int64_t, float, float*, bool) = decode_scalar;
#if GQ_X86
        if (path == AVX2) decode = decode_avx2;
        if (path == AVX512) decode = decode_avx512;
#endif
        const bool single = group <= 0;
        if (single || group > cols) group = cols;
        const int64_t width = (cols + 7) / 8, groups = (cols + group - 1) / group, piece = rows_a_piece(cols);
        auto body = [&](int64_t p) {
            const int64_t stop = (p + 1) * piece < rows ? (p + 1) * piece : rows;
            for (int64_t row = p * piece; row < stop; ++row)
                for (int64_t g = 0, c = 0; c < cols; ++g, c += group)
                    decode(bits + row * width, c, c + group < cols ? c + group : cols,
                           scales[single ? 0 : row * groups + g], out + row * cols, add != 0);
        };
        parallel_for(threads, (rows + piece - 1) / piece, body);
        return static_cast<int>(OK);
    });
}
