// Robust merging on packed rows that lie in as many places: inner products, weighted sums of signs, and the trimmed
// mean of mixtures of them. A block of all rows is copied into the L2 cache line by line, so that inputs are read
// once and outputs written once, whatever happens between.
#include <algorithm>
#include <array>
#include <cstdlib>
#include <limits>
#include <memory>
#include <utility>

#include "common.h"

#if defined(_MSC_VER)
#define GQ_MEMBER __forceinline
#else
#define GQ_MEMBER inline __attribute__((always_inline))
#endif

namespace gq {
namespace {

constexpr int MOST_SLICES = 32;
constexpr int64_t PAIRS = 8;              // rows against as many others in one piece of `products`
constexpr int64_t LONG = 128;             // bytes of a group from which on vectors count its distances
constexpr int64_t BLOCK_BYTES = 1 << 19;  // of all rows in one block: it stays in the L2 cache
constexpr int64_t MOST_LINES = 16;        // of a row in one block
constexpr int BATCH = 4;                  // registers of places that are mixed at once
constexpr int64_t PIECE = 64;             // lines of a row, at least, in one piece of work

struct alignas(64) Line {
    uint8_t byte[64];
};

GQ_INLINE void prefetch(const void* p) {
#if defined(__GNUC__) || defined(__clang__)
    __builtin_prefetch(p, 0, 2);
#else
    (void)p;
#endif
}

// --- plans ----------------------------------------------------------------------------------------------------

// Weights as sums of signed powers of two: `terms` of slice p are those of the power p, 2 * row + 1 where the signs of
// the row are turned. The sum is factor * (2 * count - total), in arithmetic modulo 2^32.
struct VotePlan {
    std::vector<int32_t> terms;
    int64_t first[MOST_SLICES + 1];
    int slices;
    uint32_t total, factor;
};

VotePlan plan_votes(const int32_t* weights, int64_t n) {
    int64_t common = 0;
    for (int64_t j = 0; j < n; ++j) {
        int64_t a = common, b = std::llabs(static_cast<int64_t>(weights[j]));
        while (b) std::swap(a %= b, b);
        common = a;
    }
    if (common == 0) common = 1;
    std::vector<int32_t> levels[MOST_SLICES + 1];
    uint64_t total = 0;
    for (int64_t j = 0; j < n; ++j) {
        // The non-adjacent form: 7 is 8 - 1, so that a third of the digits are not zero instead of half.
        int64_t left = weights[j] / common;
        for (int p = 0; left; ++p, left /= 2) {
            if (left % 2 == 0) continue;
            const int64_t digit = 2 - ((left % 4 + 4) % 4);
            left -= digit;
            levels[p].push_back(static_cast<int32_t>(2 * j + (digit < 0)));
            total += uint64_t{1} << p;
        }
    }
    VotePlan plan;
    plan.slices = 0;
    plan.total = static_cast<uint32_t>(total);
    plan.factor = static_cast<uint32_t>(common);
    while (plan.slices < MOST_SLICES && total >> plan.slices) ++plan.slices;
    for (int p = 0; p <= MOST_SLICES; ++p) {
        plan.first[p] = static_cast<int64_t>(plan.terms.size());
        if (p < MOST_SLICES) plan.terms.insert(plan.terms.end(), levels[p].begin(), levels[p].end());
    }
    return plan;
}

struct Weighted {
    int32_t row, weight;
};
struct MixRow {
    bool from_total;
    int64_t first, minus, plus, first_own, own;
};

// How the mixed rows are made. `columns`: rows of signs with their most frequent weight; their sum is the total. A
// mixed row begins with the total or with nothing, whichever leaves fewer terms: columns it takes away or adds, and
// terms of its own weights. Equal rows are made once; order[k] is where row k of the mixture stands,
// in registers, as the terms are where a column stands.
struct MixPlan {
    std::vector<Weighted> columns, own;
    std::vector<MixRow> rows;
    std::vector<int32_t> terms, order;
    int64_t m, trim;
    int64_t below, above;  // pads of the sorting network
    int size;              // of the network; 0: counting
    bool wide;             // whether 16 bits do not hold every value
};

constexpr int SIZES[] = {8, 12, 16, 24, 32, 48, 64};

void plan_row(MixPlan& plan, const int32_t* weights, const std::vector<int32_t>& column, const int32_t* usual,
              int64_t n) {
    MixRow row{};
    int64_t present = 0, unusual = 0;
    for (int64_t j = 0; j < n; ++j) {
        present += weights[j] != 0;
        unusual += weights[j] != usual[j];
    }
    row.from_total = unusual < present;
    row.first = static_cast<int64_t>(plan.terms.size());
    row.first_own = static_cast<int64_t>(plan.own.size());
    for (const int64_t sign : {-1, 1}) {
        for (int64_t j = 0; j < n; ++j) {
            const int64_t term = int64_t{weights[j]} - (row.from_total ? usual[j] : 0);
            if (term != 0 && term == sign * usual[j]) plan.terms.push_back(BATCH * column[j]);
        }
        (sign < 0 ? row.minus : row.plus) = static_cast<int64_t>(plan.terms.size()) - row.first - row.minus;
    }
    for (int64_t j = 0; j < n; ++j) {
        const int64_t term = int64_t{weights[j]} - (row.from_total ? usual[j] : 0);
        if (term == 0 || term == usual[j] || term == -int64_t{usual[j]}) continue;
        plan.own.push_back({static_cast<int32_t>(j), static_cast<int32_t>(static_cast<uint32_t>(term))});
    }
    row.own = static_cast<int64_t>(plan.own.size()) - row.first_own;
    plan.rows.push_back(row);
}

MixPlan plan_mix(const int32_t* mixing, int64_t m, int64_t n, int64_t trim) {
    MixPlan plan;
    plan.m = m;
    plan.trim = trim;
    std::vector<int32_t> usual(static_cast<size_t>(n)), column(static_cast<size_t>(n)), found;
    for (int64_t j = 0; j < n; ++j) {
        found.clear();
        for (int64_t k = 0; k < m; ++k)
            if (mixing[k * n + j]) found.push_back(mixing[k * n + j]);
        std::sort(found.begin(), found.end());
        for (size_t i = 0, most = 0; i < found.size();) {
            const size_t start = i;
            while (i < found.size() && found[i] == found[start]) ++i;
            if (i - start > most) most = i - start, usual[j] = found[start];
        }
        column[j] = static_cast<int32_t>(plan.columns.size());
        if (usual[j]) plan.columns.push_back({static_cast<int32_t>(j), usual[j]});
    }
    std::vector<int32_t> sorted(static_cast<size_t>(m));
    for (int64_t k = 0; k < m; ++k) sorted[k] = static_cast<int32_t>(k);
    const auto row_of = [&](int32_t k) { return mixing + int64_t{k} * n; };
    std::stable_sort(sorted.begin(), sorted.end(), [&](int32_t a, int32_t b) {
        return std::lexicographical_compare(row_of(a), row_of(a) + n, row_of(b), row_of(b) + n);
    });
    plan.order.resize(static_cast<size_t>(m));
    plan.wide = m > std::numeric_limits<int16_t>::max();
    for (int64_t i = 0; i < m; ++i) {
        const int32_t* const weights = row_of(sorted[i]);
        if (i == 0 || !std::equal(weights, weights + n, row_of(sorted[i - 1]))) {
            plan_row(plan, weights, column, usual.data(), n);
            int64_t size = 0;
            for (int64_t j = 0; j < n; ++j) size += std::llabs(int64_t{weights[j]});
            plan.wide |= size > std::numeric_limits<int16_t>::max();
        }
        plan.order[sorted[i]] = BATCH * static_cast<int32_t>(plan.rows.size() - 1);
    }
    plan.size = 0;
    plan.below = plan.above = 0;
    if (trim == 0 || m > SIZES[6]) return plan;
    for (const int size : SIZES) {
        plan.size = size;
        if (size >= m) break;
    }
    plan.below = (plan.size - m) / 2;
    plan.above = plan.size - m - plan.below;
    const int32_t pads = BATCH * static_cast<int32_t>(plan.rows.size());
    plan.order.insert(plan.order.end(), static_cast<size_t>(plan.below), pads);
    plan.order.insert(plan.order.end(), static_cast<size_t>(plan.above), pads + BATCH);
    return plan;
}

// Batcher's odd-even merge sort (1968) of the next power of two, without the exchanges beyond M.
template <int M>
struct Network {
    int low[1024] = {}, high[1024] = {};
    size_t size = 0;

    constexpr Network() {
        int whole = 1;
        while (whole < M) whole *= 2;
        sort(0, whole);
    }
    constexpr void add(int i, int j) {
        if (j >= M) return;
        low[size] = i;
        high[size++] = j;
    }
    constexpr void sort(int start, int n) {
        if (n < 2 || start >= M) return;
        sort(start, n / 2);
        sort(start + n / 2, n / 2);
        merge(start, n, 1);
    }
    constexpr void merge(int start, int n, int step) {
        const int next = 2 * step;
        if (next >= n) return add(start, start + step);
        merge(start, n, next);
        merge(start + step, n, next);
        for (int i = start + step; i + step < start + n; i += next) add(i, i + step);
    }
};
template <int M>
constexpr Network<M> NETWORK{};

struct Segments {
    int64_t rows, width, cols, groups, step;  // step: bytes of a group
    PairCounter count;                        // of long groups; null: word by word
};

// --- registers ------------------------------------------------------------------------------------------------

namespace plain {
#define GQ_ISA
struct Bits {
    uint64_t w[8];
    GQ_INLINE Bits set(uint64_t v) { return {{v, v, v, v, v, v, v, v}}; }
    GQ_INLINE Bits zero() { return set(0); }
    GQ_INLINE Bits ones() { return set(~uint64_t{0}); }
    GQ_INLINE Bits load(const uint8_t* p) {
        Bits b;
        std::memcpy(&b, p, 64);
        return b;
    }
    GQ_MEMBER void store(uint8_t* p) const { std::memcpy(p, w, 64); }
};
GQ_INLINE Bits csa(Bits& sum, const Bits& x, const Bits& y) {
    Bits carry;
    for (int i = 0; i < 8; ++i) {
        const uint64_t s = sum.w[i], either = s ^ x.w[i];
        carry.w[i] = (s & x.w[i]) | (either & y.w[i]);
        sum.w[i] = either ^ y.w[i];
    }
    return carry;
}
GQ_INLINE Bits flipped(const Line* lines, int32_t term, const Bits&, const Bits&) {
    Bits b = Bits::load(lines[term >> 1].byte);
    const uint64_t turn = term & 1 ? ~uint64_t{0} : 0;
    for (int i = 0; i < 8; ++i) b.w[i] ^= turn;
    return b;
}
GQ_INLINE void expand(const Line* slices, int n, uint32_t* out) {
    for (int i = 0; i < 64; ++i)
        for (int k = 0; k < 8; ++k) {
            uint32_t count = 0;
            for (int p = 0; p < n; ++p) count |= static_cast<uint32_t>((slices[p].byte[i] >> k) & 1) << p;
            out[8 * i + k] = count;
        }
}

template <class Value, class Unsigned, class Total>
struct Lane {
    using T = Value;
    static constexpr int COUNT = 8, BYTES = sizeof(T);
    static constexpr bool UNROLLED = false;
    static constexpr int32_t LEAST = std::numeric_limits<T>::min(), MOST = std::numeric_limits<T>::max();
    struct V {
        T x[8];
    };
    struct Sum {
        Total x[8];
    };
    GQ_INLINE T wrap(uint32_t a) { return static_cast<T>(static_cast<Unsigned>(a)); }
    template <class F>
    GQ_INLINE V each(F f) {
        V r;
        for (int i = 0; i < 8; ++i) r.x[i] = f(i);
        return r;
    }
    GQ_INLINE V set(int32_t a) {
        return each([&](int) { return static_cast<T>(a); });
    }
    GQ_INLINE V zero() { return set(0); }
    GQ_INLINE V load(const V* p) { return *p; }
    GQ_INLINE void store(V* p, const V& a) { *p = a; }
    GQ_INLINE V add(const V& a, const V& b) {
        return each([&](int i) { return wrap(static_cast<Unsigned>(a.x[i]) + static_cast<Unsigned>(b.x[i])); });
    }
    GQ_INLINE V sub(const V& a, const V& b) {
        return each([&](int i) { return wrap(static_cast<Unsigned>(a.x[i]) - static_cast<Unsigned>(b.x[i])); });
    }
    GQ_INLINE V min(const V& a, const V& b) {
        return each([&](int i) { return a.x[i] < b.x[i] ? a.x[i] : b.x[i]; });
    }
    GQ_INLINE V max(const V& a, const V& b) {
        return each([&](int i) { return a.x[i] > b.x[i] ? a.x[i] : b.x[i]; });
    }
    GQ_INLINE V below(const V& a, const V& b) {
        return each([&](int i) { return static_cast<T>(-(a.x[i] < b.x[i])); });
    }
    // n, and one more where a is below b.
    GQ_INLINE V count(const V& n, const V& a, const V& b) {
        return each([&](int i) { return static_cast<T>(n.x[i] + (a.x[i] < b.x[i])); });
    }
    GQ_INLINE V both(const V& a, const V& b) {
        return each([&](int i) { return static_cast<T>(a.x[i] & b.x[i]); });
    }
    GQ_INLINE V either(const V& a, const V& b) {
        return each([&](int i) { return static_cast<T>(a.x[i] | b.x[i]); });
    }
    GQ_INLINE V without(const V& a, const V& b) {
        return each([&](int i) { return static_cast<T>(~a.x[i] & b.x[i]); });
    }
    // weight where the bit is 1, -weight elsewhere.
    GQ_INLINE V spread(const uint8_t* p, int32_t weight) {
        const uint32_t byte = *p, w = static_cast<uint32_t>(weight);
        return each([&](int i) {
            const uint32_t turn = ((byte >> i) & 1u) - 1u;  // all ones for -weight
            return wrap((w ^ turn) - turn);
        });
    }
    GQ_INLINE Sum nothing() { return Sum{}; }
    GQ_INLINE void accumulate(Sum& sum, const V& a) {
        for (int i = 0; i < 8; ++i) sum.x[i] += a.x[i];
    }
    GQ_INLINE void read(const Sum& sum, int64_t* out) {
        for (int i = 0; i < 8; ++i) out[i] = sum.x[i];
    }
    GQ_INLINE void write(const Sum& sum, double unit, float* out) {
        for (int i = 0; i < 8; ++i) out[i] = static_cast<float>(static_cast<double>(sum.x[i]) * unit);
    }
};
using Lane16 = Lane<int16_t, uint16_t, int32_t>;
using Lane32 = Lane<int32_t, uint32_t, int64_t>;
#include "mixing_body.h"
#undef GQ_ISA
}  // namespace plain

#if GQ_X86
namespace avx2 {
#define GQ_ISA GQ_AVX2
#define GQ_OP GQ_AVX2 GQ_INLINE
struct Bits {
    __m256i a, b;
    GQ_OP Bits zero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
    GQ_OP Bits ones() { return {_mm256_set1_epi8(-1), _mm256_set1_epi8(-1)}; }
    GQ_OP Bits load(const uint8_t* p) {
        return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
                _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32))};
    }
    GQ_AVX2 GQ_MEMBER void store(uint8_t* p) const {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 32), b);
    }
};
GQ_AVX2 GQ_INLINE __m256i csa(__m256i& sum, __m256i x, __m256i y) {
    const __m256i either = _mm256_xor_si256(sum, x);
    const __m256i carry = _mm256_or_si256(_mm256_and_si256(sum, x), _mm256_and_si256(either, y));
    sum = _mm256_xor_si256(either, y);
    return carry;
}
GQ_AVX2 GQ_INLINE Bits csa(Bits& sum, const Bits& x, const Bits& y) {
    return {csa(sum.a, x.a, y.a), csa(sum.b, x.b, y.b)};
}
GQ_AVX2 GQ_INLINE Bits flipped(const Line* lines, int32_t term, const Bits& none, const Bits& all) {
    const Bits b = Bits::load(lines[term >> 1].byte);
    const __m256i turn = term & 1 ? all.a : none.a;
    return {_mm256_xor_si256(b.a, turn), _mm256_xor_si256(b.b, turn)};
}
GQ_AVX2 GQ_INLINE void expand(const Line* slices, int n, uint32_t* out) {
    const __m256i place = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    for (int i = 0; i < 64; ++i) {
        __m256i sum = _mm256_setzero_si256();
        for (int p = 0; p < n; ++p) {
            const __m256i set = _mm256_and_si256(_mm256_set1_epi32(slices[p].byte[i]), place);
            const __m256i value = _mm256_set1_epi32(static_cast<int32_t>(uint32_t{1} << p));
            sum = _mm256_or_si256(sum, _mm256_and_si256(_mm256_cmpeq_epi32(set, place), value));
        }
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 8 * i), sum);
    }
}

struct Lane {
    using V = __m256i;
    static constexpr bool UNROLLED = true;
    GQ_OP V zero() { return _mm256_setzero_si256(); }
    GQ_OP V load(const V* p) { return _mm256_load_si256(p); }
    GQ_OP void store(V* p, V a) { _mm256_store_si256(p, a); }
    GQ_OP V both(V a, V b) { return _mm256_and_si256(a, b); }
    GQ_OP V either(V a, V b) { return _mm256_or_si256(a, b); }
    GQ_OP V without(V a, V b) { return _mm256_andnot_si256(a, b); }
    GQ_OP __m128 scaled(__m128i a, __m256d unit) { return _mm256_cvtpd_ps(_mm256_mul_pd(_mm256_cvtepi32_pd(a), unit)); }
};
struct Lane16 : Lane {
    using T = int16_t;
    static constexpr int COUNT = 16, BYTES = 2;
    static constexpr int32_t LEAST = -32768, MOST = 32767;
    struct Sum {
        __m256i even, odd;
    };
    GQ_OP V set(int32_t a) { return _mm256_set1_epi16(static_cast<int16_t>(a)); }
    GQ_OP V add(V a, V b) { return _mm256_add_epi16(a, b); }
    GQ_OP V sub(V a, V b) { return _mm256_sub_epi16(a, b); }
    GQ_OP V min(V a, V b) { return _mm256_min_epi16(a, b); }
    GQ_OP V max(V a, V b) { return _mm256_max_epi16(a, b); }
    GQ_OP V below(V a, V b) { return _mm256_cmpgt_epi16(b, a); }
    GQ_OP V count(V n, V a, V b) { return sub(n, below(a, b)); }
    GQ_OP V spread(const uint8_t* p, int32_t weight) {
        int16_t bits;
        std::memcpy(&bits, p, 2);
        const V place = _mm256_setr_epi16(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, -32768);
        const V turn = _mm256_cmpeq_epi16(_mm256_andnot_si256(_mm256_set1_epi16(bits), place), place);
        return sub(_mm256_xor_si256(set(weight), turn), turn);
    }
    GQ_OP Sum nothing() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
    GQ_OP void accumulate(Sum& sum, V a) {
        sum.even = _mm256_add_epi32(sum.even, _mm256_madd_epi16(a, _mm256_set1_epi32(1)));
        sum.odd = _mm256_add_epi32(sum.odd, _mm256_srai_epi32(a, 16));
    }
    GQ_OP void read(const Sum& sum, int64_t* out) {
        int32_t even[8], odd[8];
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(even), sum.even);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(odd), sum.odd);
        for (int i = 0; i < 8; ++i) out[2 * i] = even[i], out[2 * i + 1] = odd[i];
    }
    GQ_OP void write(const Sum& sum, double unit, float* out) {
        const __m256d u = _mm256_set1_pd(unit);
        for (int h = 0; h < 2; ++h) {
            const __m128 e = scaled(h ? _mm256_extracti128_si256(sum.even, 1) : _mm256_castsi256_si128(sum.even), u);
            const __m128 o = scaled(h ? _mm256_extracti128_si256(sum.odd, 1) : _mm256_castsi256_si128(sum.odd), u);
            _mm_storeu_ps(out + 8 * h, _mm_unpacklo_ps(e, o));
            _mm_storeu_ps(out + 8 * h + 4, _mm_unpackhi_ps(e, o));
        }
    }
};
struct Lane32 : Lane {
    using T = int32_t;
    static constexpr int COUNT = 8, BYTES = 4;
    static constexpr int32_t LEAST = std::numeric_limits<int32_t>::min(), MOST = std::numeric_limits<int32_t>::max();
    struct Sum {
        __m256i low, high;
    };
    GQ_OP V set(int32_t a) { return _mm256_set1_epi32(a); }
    GQ_OP V add(V a, V b) { return _mm256_add_epi32(a, b); }
    GQ_OP V sub(V a, V b) { return _mm256_sub_epi32(a, b); }
    GQ_OP V min(V a, V b) { return _mm256_min_epi32(a, b); }
    GQ_OP V max(V a, V b) { return _mm256_max_epi32(a, b); }
    GQ_OP V below(V a, V b) { return _mm256_cmpgt_epi32(b, a); }
    GQ_OP V count(V n, V a, V b) { return sub(n, below(a, b)); }
    GQ_OP V spread(const uint8_t* p, int32_t weight) {
        const V place = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
        const V turn = _mm256_cmpeq_epi32(_mm256_andnot_si256(_mm256_set1_epi32(*p), place), place);
        return sub(_mm256_xor_si256(set(weight), turn), turn);
    }
    GQ_OP Sum nothing() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
    GQ_OP void accumulate(Sum& sum, V a) {
        sum.low = _mm256_add_epi64(sum.low, _mm256_cvtepi32_epi64(_mm256_castsi256_si128(a)));
        sum.high = _mm256_add_epi64(sum.high, _mm256_cvtepi32_epi64(_mm256_extracti128_si256(a, 1)));
    }
    GQ_OP void read(const Sum& sum, int64_t* out) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), sum.low);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 4), sum.high);
    }
    GQ_OP void write(const Sum& sum, double unit, float* out) {
        int64_t sums[8];
        read(sum, sums);
        for (int i = 0; i < 8; ++i) out[i] = static_cast<float>(static_cast<double>(sums[i]) * unit);
    }
};
#include "mixing_body.h"
#undef GQ_OP
#undef GQ_ISA
}  // namespace avx2

namespace avx512 {
#define GQ_ISA GQ_AVX512
#define GQ_OP GQ_AVX512 GQ_INLINE
struct Bits {
    __m512i a;
    GQ_OP Bits zero() { return {_mm512_setzero_si512()}; }
    GQ_OP Bits ones() { return {_mm512_set1_epi8(-1)}; }
    GQ_OP Bits load(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
    GQ_AVX512 GQ_MEMBER void store(uint8_t* p) const { _mm512_storeu_si512(p, a); }
};
GQ_AVX512 GQ_INLINE Bits csa(Bits& sum, const Bits& x, const Bits& y) {
    const __m512i carry = _mm512_ternarylogic_epi64(sum.a, x.a, y.a, 0xE8);
    sum.a = _mm512_ternarylogic_epi64(sum.a, x.a, y.a, 0x96);
    return {carry};
}
GQ_AVX512 GQ_INLINE Bits flipped(const Line* lines, int32_t term, const Bits& none, const Bits& all) {
    return {_mm512_xor_si512(Bits::load(lines[term >> 1].byte).a, term & 1 ? all.a : none.a)};
}
// 16 slices at once: bits to 16-bit lanes.
GQ_AVX512 GQ_INLINE __m512i lanes(const Line* slices, int n, int word) {
    __m512i sum = _mm512_setzero_si512();
    for (int p = 0; p < n; ++p) {
        uint32_t set;
        std::memcpy(&set, slices[p].byte + 4 * word, 4);
        sum = _mm512_mask_add_epi16(sum, set, sum, _mm512_set1_epi16(static_cast<int16_t>(uint32_t{1} << p)));
    }
    return sum;
}
GQ_AVX512 GQ_INLINE void expand(const Line* slices, int n, uint32_t* out) {
    for (int word = 0; word < 16; ++word) {
        const __m512i low = lanes(slices, n < 16 ? n : 16, word);
        const __m512i high = n > 16 ? lanes(slices + 16, n - 16, word) : _mm512_setzero_si512();
        for (int h = 0; h < 2; ++h) {
            const __m256i l = h ? _mm512_extracti64x4_epi64(low, 1) : _mm512_castsi512_si256(low);
            const __m256i u = h ? _mm512_extracti64x4_epi64(high, 1) : _mm512_castsi512_si256(high);
            const __m512i upper = _mm512_slli_epi32(_mm512_cvtepu16_epi32(u), 16);
            _mm512_store_si512(out + 32 * word + 16 * h, _mm512_or_si512(_mm512_cvtepu16_epi32(l), upper));
        }
    }
}

struct Lane {
    using V = __m512i;
    static constexpr bool UNROLLED = true;
    GQ_OP V zero() { return _mm512_setzero_si512(); }
    GQ_OP V load(const V* p) { return _mm512_load_si512(p); }
    GQ_OP void store(V* p, V a) { _mm512_store_si512(p, a); }
    GQ_OP V both(V a, V b) { return _mm512_and_si512(a, b); }
    GQ_OP V either(V a, V b) { return _mm512_or_si512(a, b); }
    GQ_OP V without(V a, V b) { return _mm512_andnot_si512(a, b); }
};
struct Lane16 : Lane {
    using T = int16_t;
    static constexpr int COUNT = 32, BYTES = 2;
    static constexpr int32_t LEAST = -32768, MOST = 32767;
    struct Sum {
        __m512i even, odd;
    };
    GQ_OP V set(int32_t a) { return _mm512_set1_epi16(static_cast<int16_t>(a)); }
    GQ_OP V add(V a, V b) { return _mm512_add_epi16(a, b); }
    GQ_OP V sub(V a, V b) { return _mm512_sub_epi16(a, b); }
    GQ_OP V min(V a, V b) { return _mm512_min_epi16(a, b); }
    GQ_OP V max(V a, V b) { return _mm512_max_epi16(a, b); }
    GQ_OP V below(V a, V b) { return _mm512_movm_epi16(_mm512_cmplt_epi16_mask(a, b)); }
    GQ_OP V count(V n, V a, V b) {
        return _mm512_mask_sub_epi16(n, _mm512_cmplt_epi16_mask(a, b), n, set(-1));
    }
    GQ_OP V spread(const uint8_t* p, int32_t weight) {
        uint32_t bits;
        std::memcpy(&bits, p, 4);
        return _mm512_mask_blend_epi16(bits, set(static_cast<int32_t>(-static_cast<uint32_t>(weight))), set(weight));
    }
    GQ_OP Sum nothing() { return {_mm512_setzero_si512(), _mm512_setzero_si512()}; }
    GQ_OP void accumulate(Sum& sum, V a) {
        sum.even = _mm512_add_epi32(sum.even, _mm512_madd_epi16(a, _mm512_set1_epi32(1)));
        sum.odd = _mm512_add_epi32(sum.odd, _mm512_srai_epi32(a, 16));
    }
    GQ_OP void read(const Sum& sum, int64_t* out) {
        int32_t even[16], odd[16];
        _mm512_storeu_si512(even, sum.even);
        _mm512_storeu_si512(odd, sum.odd);
        for (int i = 0; i < 16; ++i) out[2 * i] = even[i], out[2 * i + 1] = odd[i];
    }
    GQ_OP __m512 scaled(V a, __m512d unit) {
        const __m256 low = _mm512_cvtpd_ps(_mm512_mul_pd(_mm512_cvtepi32_pd(_mm512_castsi512_si256(a)), unit));
        const __m256 high = _mm512_cvtpd_ps(_mm512_mul_pd(_mm512_cvtepi32_pd(_mm512_extracti64x4_epi64(a, 1)), unit));
        return _mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1);
    }
    GQ_OP void write(const Sum& sum, double unit, float* out) {
        const __m512d u = _mm512_set1_pd(unit);
        const __m512 even = scaled(sum.even, u), odd = scaled(sum.odd, u);
        const V first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        const V second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
        _mm512_storeu_ps(out, _mm512_permutex2var_ps(even, first, odd));
        _mm512_storeu_ps(out + 16, _mm512_permutex2var_ps(even, second, odd));
    }
};
struct Lane32 : Lane {
    using T = int32_t;
    static constexpr int COUNT = 16, BYTES = 4;
    static constexpr int32_t LEAST = std::numeric_limits<int32_t>::min(), MOST = std::numeric_limits<int32_t>::max();
    struct Sum {
        __m512i low, high;
    };
    GQ_OP V set(int32_t a) { return _mm512_set1_epi32(a); }
    GQ_OP V add(V a, V b) { return _mm512_add_epi32(a, b); }
    GQ_OP V sub(V a, V b) { return _mm512_sub_epi32(a, b); }
    GQ_OP V min(V a, V b) { return _mm512_min_epi32(a, b); }
    GQ_OP V max(V a, V b) { return _mm512_max_epi32(a, b); }
    GQ_OP V below(V a, V b) { return _mm512_movm_epi32(_mm512_cmplt_epi32_mask(a, b)); }
    GQ_OP V count(V n, V a, V b) {
        return _mm512_mask_sub_epi32(n, _mm512_cmplt_epi32_mask(a, b), n, set(-1));
    }
    GQ_OP V spread(const uint8_t* p, int32_t weight) {
        uint16_t bits;
        std::memcpy(&bits, p, 2);
        return _mm512_mask_blend_epi32(bits, set(static_cast<int32_t>(-static_cast<uint32_t>(weight))), set(weight));
    }
    GQ_OP Sum nothing() { return {_mm512_setzero_si512(), _mm512_setzero_si512()}; }
    GQ_OP void accumulate(Sum& sum, V a) {
        sum.low = _mm512_add_epi64(sum.low, _mm512_cvtepi32_epi64(_mm512_castsi512_si256(a)));
        sum.high = _mm512_add_epi64(sum.high, _mm512_cvtepi32_epi64(_mm512_extracti64x4_epi64(a, 1)));
    }
    GQ_OP void read(const Sum& sum, int64_t* out) {
        _mm512_storeu_si512(out, sum.low);
        _mm512_storeu_si512(out + 8, sum.high);
    }
    GQ_OP void write(const Sum& sum, double unit, float* out) {
        const __m512d u = _mm512_set1_pd(unit);
        _mm256_storeu_ps(out, _mm512_cvtpd_ps(_mm512_mul_pd(_mm512_cvtepi64_pd(sum.low), u)));
        _mm256_storeu_ps(out + 8, _mm512_cvtpd_ps(_mm512_mul_pd(_mm512_cvtepi64_pd(sum.high), u)));
    }
};
#include "mixing_body.h"
#undef GQ_OP
#undef GQ_ISA
}  // namespace avx512
#endif

// --- work -----------------------------------------------------------------------------------------------------

// The part of out [rows, cols] that 512 values from bit `at` of the packed rows make up, without the padding.
template <class T>
void place(const T* values, int64_t at, int64_t bits, int64_t cols, T* out) {
    const int64_t wide = (cols + 7) / 8 * 8, stop = std::min(at + 512, bits);
    for (int64_t row = at / wide, start = at; start < stop; ++row, start = row * wide) {
        const int64_t column = start - row * wide, n = std::min(stop - start, cols - column);
        if (n > 0) std::memcpy(out + row * cols + column, values + (start - at), static_cast<size_t>(n) * sizeof(T));
    }
}

// Calls line(lines, work, values) for every 64 bytes of the rows, on all threads, and places what it makes.
template <class T, class F>
void by_lines(int threads, void (*gather)(const uint8_t* const*, int64_t, int64_t, int64_t, int64_t, Line*),
              const uint8_t* const* rows, int64_t n, int64_t bytes, int64_t cols, int64_t work, T* out, F& line) {
    const int64_t width = std::min(MOST_LINES, std::max<int64_t>(1, BLOCK_BYTES / (64 * n)));
    const int64_t lines = (bytes + 63) / 64, piece = std::max<int64_t>(1, PIECE / width) * width;
    auto body = [&](int64_t p) {
        std::vector<Line> held(static_cast<size_t>(width * n)), space(static_cast<size_t>(work));
        alignas(64) T values[512];
        const int64_t stop = std::min(lines, (p + 1) * piece);
        for (int64_t first = p * piece; first < stop; first += width) {
            const int64_t here = std::min(width, stop - first);
            gather(rows, n, bytes, 64 * first, here, held.data());
            for (int64_t z = 0; z < here; ++z) {
                const int64_t at = 512 * (first + z);
                if (cols % 8 == 0 && at + 512 <= 8 * bytes) {
                    line(held.data() + z * n, space.data(), out + at);
                } else {
                    line(held.data() + z * n, space.data(), values);
                    place(values, at, 8 * bytes, cols, out);
                }
            }
        }
    };
    parallel_for(threads, (lines + piece - 1) / piece, body);
}

}  // namespace
}  // namespace gq

using namespace gq;

// Inner products [n, n] of n packed matrices, bits[i] [rows, ceil(cols / 8)] with scales[i]: [1] where group is 0, else
// [rows, ceil(cols / group)], the group a multiple of 8 or not less than cols.
GQ_API int gq_sign_products(int path, int threads, int features, const uint8_t* const* bits, const float* const* scales,
                       int64_t n, int64_t rows, int64_t cols, int64_t group, double* out) {
    return guarded([&] {
        const int64_t width = (cols + 7) / 8;
        if (group == 0) {
            std::unique_ptr<int64_t[]> found(new int64_t[static_cast<size_t>(n * n)]);
            distances(path, threads, features, bits, n, rows * width, found.get());
            std::vector<double> scale(static_cast<size_t>(n));
            for (int64_t i = 0; i < n; ++i) scale[i] = static_cast<double>(*scales[i]);
            auto row = [&](int64_t i) {
                for (int64_t j = 0; j < n; ++j)
                    out[i * n + j] = scale[i] * scale[j] * static_cast<double>(rows * cols - 2 * found[i * n + j]);
            };
            parallel_for(threads, n, row);
            return static_cast<int>(OK);
        }
        auto products = plain::products;
#if GQ_X86
        if (path == AVX2) products = avx2::products;
        if (path == AVX512) products = avx512::products;
#endif
        const int64_t step = std::min(width, group / 8 + (group % 8 != 0));
        const PairCounter count = step < LONG ? nullptr : pair_counter(path, features);
        const Segments segments{rows, width, cols, (width + step - 1) / step, step, count};
        const int64_t tiles = (n + PAIRS - 1) / PAIRS;
        auto body = [&](int64_t item) {
            int64_t I = 0;
            while (item >= tiles - I) item -= tiles - I++;
            const int64_t i0 = I * PAIRS, j0 = (I + item) * PAIRS;
            const int64_t ni = std::min(PAIRS, n - i0), nj = std::min(PAIRS, n - j0);
            double sums[PAIRS * PAIRS] = {};
            products(segments, bits + i0, scales + i0, ni, bits + j0, scales + j0, nj, sums);
            for (int64_t i = 0; i < ni; ++i)
                for (int64_t j = i0 == j0 ? i : 0; j < nj; ++j)
                    out[(i0 + i) * n + j0 + j] = out[(j0 + j) * n + i0 + i] = sums[i * PAIRS + j];
        };
        parallel_for(threads, tiles * (tiles + 1) / 2, body);
        return static_cast<int>(OK);
    });
}

// Sums of weights[i] * sign [rows, cols]: to `sums` int32 or, times unit, to `scaled` float32; the other is null.
GQ_API int gq_signed_votes(int path, int threads, const uint8_t* const* bits, const int32_t* weights, int64_t n,
                           int64_t rows, int64_t cols, double unit, int32_t* sums, float* scaled) {
    return guarded([&] {
        auto gather = plain::gather;
        auto votes = plain::votes;
#if GQ_X86
        if (path == AVX2) gather = avx2::gather, votes = avx2::votes;
        if (path == AVX512) gather = avx512::gather, votes = avx512::votes;
#endif
        const VotePlan plan = plan_votes(weights, n);
        const int64_t bytes = rows * ((cols + 7) / 8);
        if (scaled) {
            auto line = [&](const Line* lines, Line* carries, float* out) {
                votes(plan, lines, carries, nullptr, out, unit);
            };
            by_lines(threads, gather, bits, n, bytes, cols, n + 4, scaled, line);
        } else {
            auto line = [&](const Line* lines, Line* carries, int32_t* out) {
                votes(plan, lines, carries, out, nullptr, unit);
            };
            by_lines(threads, gather, bits, n, bytes, cols, n + 4, sums, line);
        }
        return static_cast<int>(OK);
    });
}

// Trimmed sums, times unit, of the m mixtures of n rows: out [rows, cols] float32.
GQ_API int gq_signed_trimmed(int path, int threads, const uint8_t* const* bits, const int32_t* mixing, int64_t m,
                             int64_t n, int64_t rows, int64_t cols, int64_t trim, double unit, float* out) {
    return guarded([&] {
        const MixPlan plan = plan_mix(mixing, m, n, trim);
        auto gather = plain::gather;
        auto trimmed = plan.wide ? plain::trimmed<plain::Lane32> : plain::trimmed<plain::Lane16>;
#if GQ_X86
        if (path == AVX2) {
            gather = avx2::gather;
            trimmed = plan.wide ? avx2::trimmed<avx2::Lane32> : avx2::trimmed<avx2::Lane16>;
        }
        if (path == AVX512) {
            gather = avx512::gather;
            trimmed = plan.wide ? avx512::trimmed<avx512::Lane32> : avx512::trimmed<avx512::Lane16>;
        }
#endif
        auto line = [&](const Line* lines, Line* work, float* values) { trimmed(plan, lines, work, unit, values); };
        const int64_t batches = static_cast<int64_t>(plan.columns.size() + plan.rows.size()) + 2;
        const int64_t work = BATCH * batches + (plan.size ? 0 : m);
        by_lines(threads, gather, bits, n, rows * ((cols + 7) / 8), cols, work, out, line);
        return static_cast<int>(OK);
    });
}
