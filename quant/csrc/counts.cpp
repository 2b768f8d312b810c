// Counting over packed rows: pairwise Hamming distances, bit-sliced votes, weighted votes and majorities.
//
// Votes are counted in slices: word p of a column holds bit p of the counts of 64 places at once, and rows are added
// by carry-save adders, two operations a row and word instead of one addition a bit.
#include <algorithm>
#include <mutex>

#include "common.h"

namespace gq {
namespace {

// --- distances ------------------------------------------------------------------------------------------------

inline uint64_t ones(uint64_t v) {
#if defined(__GNUC__) || defined(__clang__)
    return static_cast<uint64_t>(__builtin_popcountll(v));
#else
    v -= (v >> 1) & 0x5555555555555555u;
    v = (v & 0x3333333333333333u) + ((v >> 2) & 0x3333333333333333u);
    return (((v + (v >> 4)) & 0x0F0F0F0F0F0F0F0Fu) * 0x0101010101010101u) >> 56;
#endif
}

GQ_INLINE uint64_t word_at(const uint8_t* p) {
    uint64_t v;
    std::memcpy(&v, p, 8);
    return v;
}

uint64_t differ_scalar(const uint8_t* a, const uint8_t* b, int64_t n) {
    uint64_t total = 0;
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) total += ones(word_at(a + i) ^ word_at(b + i));
    for (; i < n; ++i) total += ones(static_cast<uint64_t>(a[i] ^ b[i]));
    return total;
}

#if GQ_X86
// Counts of four bits at a time by a table in a register (Mula, Kurz, Lemire 2016, "Faster Population Counts").
GQ_AVX2 GQ_INLINE __m256i count_avx2(__m256i v) {
    const __m256i table = _mm256_setr_epi8(0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4, 0, 1, 1, 2, 1, 2, 2, 3, 1,
                                           2, 2, 3, 2, 3, 3, 4);
    const __m256i low = _mm256_set1_epi8(15);
    const __m256i l = _mm256_shuffle_epi8(table, _mm256_and_si256(v, low));
    const __m256i h = _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(v, 4), low));
    return _mm256_sad_epu8(_mm256_add_epi8(l, h), _mm256_setzero_si256());
}

GQ_AVX2 uint64_t differ_avx2(const uint8_t* a, const uint8_t* b, int64_t n) {
    __m256i sum = _mm256_setzero_si256();
    int64_t i = 0;
    for (; i + 32 <= n; i += 32) {
        const __m256i va = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(a + i));
        const __m256i vb = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b + i));
        sum = _mm256_add_epi64(sum, count_avx2(_mm256_xor_si256(va, vb)));
    }
    uint64_t parts[4];
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(parts), sum);
    uint64_t total = parts[0] + parts[1] + parts[2] + parts[3];
    for (; i < n; ++i) total += ones(static_cast<uint64_t>(a[i] ^ b[i]));
    return total;
}

GQ_AVX512 GQ_INLINE __m512i count_avx512(__m512i v) {
    const __m512i table = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4));
    const __m512i low = _mm512_set1_epi8(15);
    const __m512i l = _mm512_shuffle_epi8(table, _mm512_and_si512(v, low));
    const __m512i h = _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16(v, 4), low));
    return _mm512_sad_epu8(_mm512_add_epi8(l, h), _mm512_setzero_si512());
}

GQ_AVX512 GQ_INLINE __m512i xor_at(const uint8_t* a, const uint8_t* b, int64_t i) {
    return _mm512_xor_si512(_mm512_loadu_si512(a + i), _mm512_loadu_si512(b + i));
}

// One carry-save adder: `sum` becomes the sum of the three, the carry is returned.
GQ_AVX512 GQ_INLINE __m512i csa(__m512i& sum, __m512i x, __m512i y) {
    const __m512i carry = _mm512_ternarylogic_epi64(sum, x, y, 0xE8);
    sum = _mm512_ternarylogic_epi64(sum, x, y, 0x96);
    return carry;
}

GQ_AVX512 GQ_INLINE uint64_t tail_avx512(const uint8_t* a, const uint8_t* b, int64_t i, int64_t n, __m512i sum) {
    for (; i + 64 <= n; i += 64) sum = _mm512_add_epi64(sum, count_avx512(xor_at(a, b, i)));
    uint64_t total = static_cast<uint64_t>(_mm512_reduce_add_epi64(sum));
    for (; i < n; ++i) total += ones(static_cast<uint64_t>(a[i] ^ b[i]));
    return total;
}

// Harley-Seal: sixteen words are added to one before anything is counted.
GQ_AVX512 uint64_t differ_avx512(const uint8_t* a, const uint8_t* b, int64_t n) {
    __m512i s1 = _mm512_setzero_si512(), s2 = s1, s4 = s1, s8 = s1, sixteens = s1;
    int64_t i = 0;
    for (; i + 1024 <= n; i += 1024) {
        __m512i fours[4];
        for (int q = 0; q < 4; ++q) {
            const int64_t at = i + 256 * q;
            const __m512i x = csa(s1, xor_at(a, b, at), xor_at(a, b, at + 64));
            const __m512i y = csa(s1, xor_at(a, b, at + 128), xor_at(a, b, at + 192));
            fours[q] = csa(s2, x, y);
        }
        const __m512i x = csa(s4, fours[0], fours[1]), y = csa(s4, fours[2], fours[3]);
        sixteens = _mm512_add_epi64(sixteens, count_avx512(csa(s8, x, y)));
    }
    __m512i sum = _mm512_slli_epi64(sixteens, 4);
    sum = _mm512_add_epi64(sum, _mm512_slli_epi64(count_avx512(s8), 3));
    sum = _mm512_add_epi64(sum, _mm512_slli_epi64(count_avx512(s4), 2));
    sum = _mm512_add_epi64(sum, _mm512_slli_epi64(count_avx512(s2), 1));
    sum = _mm512_add_epi64(sum, count_avx512(s1));
    return tail_avx512(a, b, i, n, sum);
}

// Adds the differing bits of four rows of `a` and four of `b` to sums: every word that is loaded is used four times.
GQ_POPCNT512 GQ_INLINE void add_four(const __m512i* va, const __m512i* vb, __m512i* sums) {
#pragma GCC unroll 4
    for (int h = 0; h < 4; ++h)
#pragma GCC unroll 4
        for (int k = 0; k < 4; ++k)
            sums[4 * h + k] =
                _mm512_add_epi64(sums[4 * h + k], _mm512_popcnt_epi64(_mm512_xor_si512(va[h], vb[k])));
}

// The total of each of eight registers, in one register.
GQ_POPCNT512 GQ_INLINE __m512i totals(const __m512i* sums) {
    __m512i two[4], four[2];
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k)
        two[k] = _mm512_add_epi64(_mm512_unpacklo_epi64(sums[2 * k], sums[2 * k + 1]),
                                  _mm512_unpackhi_epi64(sums[2 * k], sums[2 * k + 1]));
#pragma GCC unroll 2
    for (int k = 0; k < 2; ++k)
        four[k] = _mm512_add_epi64(_mm512_shuffle_i64x2(two[2 * k], two[2 * k + 1], 0x88),
                                   _mm512_shuffle_i64x2(two[2 * k], two[2 * k + 1], 0xDD));
    const __m512i all = _mm512_add_epi64(_mm512_shuffle_i64x2(four[0], four[1], 0x88),
                                         _mm512_shuffle_i64x2(four[0], four[1], 0xDD));
    return all;
}

GQ_POPCNT512 GQ_INLINE void four_popcnt512(const uint8_t* const* a, const uint8_t* const* b, int64_t bytes,
                                           uint64_t* found) {
    __m512i sums[16], va[4], vb[4];
#pragma GCC unroll 16
    for (int k = 0; k < 16; ++k) sums[k] = _mm512_setzero_si512();
    int64_t i = 0;
    for (; i + 64 <= bytes; i += 64) {
#pragma GCC unroll 4
        for (int k = 0; k < 4; ++k) va[k] = _mm512_loadu_si512(a[k] + i), vb[k] = _mm512_loadu_si512(b[k] + i);
        add_four(va, vb, sums);
    }
    if (i < bytes) {
        const __mmask64 there = (uint64_t{1} << (bytes - i)) - 1;
#pragma GCC unroll 4
        for (int k = 0; k < 4; ++k) {
            va[k] = _mm512_maskz_loadu_epi8(there, a[k] + i);
            vb[k] = _mm512_maskz_loadu_epi8(there, b[k] + i);
        }
        add_four(va, vb, sums);
    }
    _mm512_storeu_si512(found, totals(sums));
    _mm512_storeu_si512(found + 8, totals(sums + 8));
}

GQ_POPCNT512 void tile_popcnt512(const uint8_t* const* a, int64_t na, const uint8_t* const* b, int64_t nb, bool same,
                                 int64_t at, int64_t bytes, int64_t* sums) {
    for (int64_t i = 0; i < na; i += 4)
        for (int64_t j = same ? i : 0; j < nb; j += 4) {
            const uint8_t *ra[4], *rb[4];
            for (int64_t k = 0; k < 4; ++k) {  // where there are fewer, the last row again, and not counted
                ra[k] = a[std::min(i + k, na - 1)] + at;
                rb[k] = b[std::min(j + k, nb - 1)] + at;
            }
            uint64_t found[16];
            four_popcnt512(ra, rb, bytes, found);
            for (int64_t h = 0; h < 4 && i + h < na; ++h)
                for (int64_t k = 0; k < 4 && j + k < nb; ++k)
                    sums[(i + h) * COUNTED + j + k] += static_cast<int64_t>(found[4 * h + k]);
        }
}
#endif

template <uint64_t (*DIFFER)(const uint8_t*, const uint8_t*, int64_t)>
void tile_pairs(const uint8_t* const* a, int64_t na, const uint8_t* const* b, int64_t nb, bool same, int64_t at,
                int64_t bytes, int64_t* sums) {
    for (int64_t i = 0; i < na; ++i)
        for (int64_t j = same ? i + 1 : 0; j < nb; ++j)
            sums[i * COUNTED + j] += static_cast<int64_t>(DIFFER(a[i] + at, b[j] + at, bytes));
}

// --- votes ----------------------------------------------------------------------------------------------------

constexpr int WORDS = 64;       // words of a block: 512 bytes of every row, so that the slices stay in the L1 cache
constexpr int MOST_SLICES = 32;

struct Slices {
    alignas(64) uint64_t count[MOST_SLICES][WORDS];
    alignas(64) uint64_t held[MOST_SLICES][WORDS];
    int used;
};

GQ_INLINE void zero(uint64_t* words) {
    for (int w = 0; w < WORDS; ++w) words[w] = 0;
}

// sum, held and v of one slice: the sum stays, the carry goes to `carry` (which may be v).
GQ_INLINE void adder(uint64_t* sum, const uint64_t* held, const uint64_t* v, uint64_t* carry) {
    GQ_INDEPENDENT
    for (int w = 0; w < WORDS; ++w) {
        const uint64_t x = sum[w], y = held[w], z = v[w], either = x ^ y;
        sum[w] = either ^ z;
        carry[w] = (x & y) | (either & z);
    }
}

// Adds `v` at slice p. Two words of one slice meet in an adder, so slice p works once for 2^p rows.
GQ_INLINE void insert(Slices& s, bool* waiting, int p, const uint64_t* v, uint64_t* carry) {
    for (;; ++p) {
        if (p == s.used) {
            zero(s.count[p]);
            ++s.used;
        }
        if (!waiting[p]) {
            std::memcpy(s.held[p], v, sizeof(s.held[p]));
            waiting[p] = true;
            return;
        }
        adder(s.count[p], s.held[p], v, carry);
        waiting[p] = false;
        v = carry;
    }
}

GQ_INLINE int slices_of(int64_t n) {
    int slices = 0;
    while (n >> slices) ++slices;
    return slices;
}

// Counts of the ones of n rows, `bytes` of them from byte `at`: how many slices they take.
GQ_INLINE int slice(const uint8_t* rows, int64_t n, int64_t stride, int64_t at, int64_t bytes, Slices& s) {
    bool waiting[MOST_SLICES] = {};
    alignas(64) uint64_t row[WORDS], carry[WORDS];
    s.used = 0;
    zero(row);
    for (int64_t r = 0; r < n; ++r) {
        std::memcpy(row, rows + r * stride + at, static_cast<size_t>(bytes));
        insert(s, waiting, 0, row, carry);
    }
    zero(row);
    const int slices = slices_of(n);
    for (int p = 0; p < slices; ++p)
        if (waiting[p]) insert(s, waiting, p, row, carry);
    return slices;
}

GQ_INLINE void expand_plain(const Slices& s, int slices, int64_t bytes, int32_t* out) {
    for (int64_t i = 0; i < bytes; ++i) {
        int32_t counts[8] = {};
        for (int p = 0; p < slices; ++p) {
            const unsigned byte = reinterpret_cast<const uint8_t*>(s.count[p])[i];
            for (int k = 0; k < 8; ++k) counts[k] += static_cast<int32_t>((byte >> k) & 1u) << p;
        }
        std::memcpy(out + 8 * i, counts, sizeof(counts));
    }
}

// count >= threshold, decided slice by slice from the lowest.
GQ_INLINE void at_least(const Slices& s, int slices, int64_t threshold, uint64_t* result) {
    for (int w = 0; w < WORDS; ++w) result[w] = ~uint64_t{0};
    for (int p = 0; p < slices; ++p)
        for (int w = 0; w < WORDS; ++w)
            result[w] = (threshold >> p) & 1 ? s.count[p][w] & result[w] : s.count[p][w] | result[w];
}

GQ_INLINE void majority_body(const uint8_t* rows, int64_t n, int64_t stride, int64_t at, int64_t bytes, uint8_t* out) {
    Slices s;
    const int slices = slice(rows, n, stride, at, bytes, s);
    alignas(64) uint64_t result[WORDS];
    at_least(s, slices, (n + 1) / 2, result);
    std::memcpy(out + at, result, static_cast<size_t>(bytes));
}

void count_scalar(const uint8_t* rows, int64_t n, int64_t stride, int64_t at, int64_t bytes, int32_t* out) {
    Slices s;
    const int slices = slice(rows, n, stride, at, bytes, s);
    expand_plain(s, slices, bytes, out + 8 * at);
}
void majority_scalar(const uint8_t* rows, int64_t n, int64_t stride, int64_t at, int64_t bytes, uint8_t* out) {
    majority_body(rows, n, stride, at, bytes, out);
}
void weigh_scalar(const uint8_t* rows, const int32_t* weights, int64_t n, int64_t stride, int64_t at, int64_t bytes,
                  int32_t* out) {
    for (int64_t i = at; i < at + bytes; ++i) {
        int32_t sums[8] = {};
        for (int64_t r = 0; r < n; ++r)
            for (int k = 0; k < 8; ++k)
                sums[k] += weights[r] & -static_cast<int32_t>((rows[r * stride + i] >> k) & 1);
        std::memcpy(out + 8 * i, sums, sizeof(sums));
    }
}

#if GQ_X86
GQ_AVX2 void count_avx2_block(const uint8_t* rows, int64_t n, int64_t stride, int64_t at, int64_t bytes,
                              int32_t* out) {
    Slices s;
    const int slices = slice(rows, n, stride, at, bytes, s);
    const __m256i place = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    for (int64_t i = 0; i < bytes; ++i) {
        __m256i sum = _mm256_setzero_si256();
        for (int p = 0; p < slices; ++p) {
            const __m256i byte = _mm256_set1_epi32(reinterpret_cast<const uint8_t*>(s.count[p])[i]);
            const __m256i set = _mm256_cmpeq_epi32(_mm256_and_si256(byte, place), place);
            sum = _mm256_add_epi32(sum, _mm256_and_si256(set, _mm256_set1_epi32(1 << p)));
        }
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 8 * (at + i)), sum);
    }
}
GQ_AVX2 void majority_avx2(const uint8_t* rows, int64_t n, int64_t stride, int64_t at, int64_t bytes, uint8_t* out) {
    majority_body(rows, n, stride, at, bytes, out);
}
GQ_AVX2 void weigh_avx2(const uint8_t* rows, const int32_t* weights, int64_t n, int64_t stride, int64_t at,
                        int64_t bytes, int32_t* out) {
    const __m256i place = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    for (int64_t i = at; i < at + bytes; ++i) {
        __m256i sum = _mm256_setzero_si256();
        for (int64_t r = 0; r < n; ++r) {
            const __m256i set = _mm256_and_si256(_mm256_set1_epi32(rows[r * stride + i]), place);
            const __m256i weight = _mm256_set1_epi32(weights[r]);
            sum = _mm256_add_epi32(sum, _mm256_and_si256(_mm256_cmpeq_epi32(set, place), weight));
        }
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 8 * i), sum);
    }
}

GQ_AVX512 void count_avx512_block(const uint8_t* rows, int64_t n, int64_t stride, int64_t at, int64_t bytes,
                                  int32_t* out) {
    Slices s;
    const int slices = slice(rows, n, stride, at, bytes, s);
    int64_t i = 0;
    for (; i + 2 <= bytes; i += 2) {
        __m512i sum = _mm512_setzero_si512();
        for (int p = 0; p < slices; ++p) {
            uint16_t set;
            std::memcpy(&set, reinterpret_cast<const uint8_t*>(s.count[p]) + i, 2);
            sum = _mm512_mask_add_epi32(sum, set, sum, _mm512_set1_epi32(1 << p));
        }
        _mm512_storeu_si512(out + 8 * (at + i), sum);
    }
    if (i < bytes) {
        __m512i sum = _mm512_setzero_si512();
        for (int p = 0; p < slices; ++p) {
            const __mmask16 set = reinterpret_cast<const uint8_t*>(s.count[p])[i];
            sum = _mm512_mask_add_epi32(sum, set, sum, _mm512_set1_epi32(1 << p));
        }
        _mm512_mask_storeu_epi32(out + 8 * (at + i), 0xFF, sum);
    }
}
GQ_AVX512 void majority_avx512(const uint8_t* rows, int64_t n, int64_t stride, int64_t at, int64_t bytes,
                               uint8_t* out) {
    majority_body(rows, n, stride, at, bytes, out);
}
GQ_AVX512 void weigh_avx512(const uint8_t* rows, const int32_t* weights, int64_t n, int64_t stride, int64_t at,
                            int64_t bytes, int32_t* out) {
    int64_t i = at;
    const int64_t stop = at + bytes;
    for (; i + 8 <= stop; i += 8) {
        __m512i sums[4] = {_mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512(),
                           _mm512_setzero_si512()};
        for (int64_t r = 0; r < n; ++r) {
            uint16_t sets[4];
            std::memcpy(sets, rows + r * stride + i, 8);
            const __m512i weight = _mm512_set1_epi32(weights[r]);
            for (int k = 0; k < 4; ++k) sums[k] = _mm512_mask_add_epi32(sums[k], sets[k], sums[k], weight);
        }
        for (int k = 0; k < 4; ++k) _mm512_storeu_si512(out + 8 * i + 16 * k, sums[k]);
    }
    if (i < stop) weigh_avx2(rows, weights, n, stride, i, stop - i, out);
}
#endif

constexpr int64_t BLOCK_BYTES = 1 << 18;  // of all rows compared at once: they stay in the L2 cache
constexpr int64_t PIECE_BYTES = 1 << 23;  // of all rows in one piece of work: a share of the L3 cache
constexpr int64_t VOTE_BYTES = WORDS * 8;
constexpr int64_t VOTE_PIECE = 16;     // blocks in one piece of work

}  // namespace

PairCounter pair_counter(int path, int features) {
#if GQ_X86
    if (path == AVX2) return tile_pairs<differ_avx2>;
    if (path == AVX512) return features & 4 ? tile_popcnt512 : tile_pairs<differ_avx512>;
#endif
    (void)path, (void)features;
    return tile_pairs<differ_scalar>;
}

void distances(int path, int threads, int features, const uint8_t* const* rows, int64_t n, int64_t bytes,
               int64_t* out) {
    const PairCounter tile = pair_counter(path, features);
    std::memset(out, 0, static_cast<size_t>(n * n) * 8);
    const int64_t tiles = (n + COUNTED - 1) / COUNTED, pairs = tiles * (tiles + 1) / 2;
    const int64_t held = std::min(n, 2 * COUNTED), block = std::max<int64_t>(1024, BLOCK_BYTES / held / 1024 * 1024);
    const int64_t blocks = (bytes + block - 1) / block;
    // All pairs of tiles take one piece of the bytes before the next: a piece of all rows stays in the L3 cache.
    const int64_t cached = (n * bytes + PIECE_BYTES - 1) / PIECE_BYTES, busy = (8 * threads + pairs - 1) / pairs;
    const int64_t pieces = std::max<int64_t>(1, std::min(blocks, std::max(cached, busy)));
    std::mutex guard;
    auto body = [&](int64_t item) {
        int64_t pair = item % pairs, I = 0;
        const int64_t p = item / pairs;
        while (pair >= tiles - I) pair -= tiles - I++;
        const int64_t i0 = I * COUNTED, j0 = (I + pair) * COUNTED;
        const int64_t ni = std::min(COUNTED, n - i0), nj = std::min(COUNTED, n - j0);
        std::vector<int64_t> sums(COUNTED * COUNTED);
        for (int64_t b = p * blocks / pieces; b < (p + 1) * blocks / pieces; ++b)
            tile(rows + i0, ni, rows + j0, nj, i0 == j0, b * block, std::min(block, bytes - b * block), sums.data());
        std::lock_guard<std::mutex> lock(guard);
        for (int64_t i = i0; i < i0 + ni; ++i)
            for (int64_t j = std::max(i + 1, j0); j < j0 + nj; ++j) out[i * n + j] += sums[(i - i0) * COUNTED + j - j0];
    };
    parallel_for(threads, pairs * pieces, body);
    // Tile by tile: whole rows would touch another page for every element that is copied.
    auto mirror = [&](int64_t I) {
        for (int64_t j0 = I * COUNTED; j0 < n; j0 += COUNTED)
            for (int64_t j = j0; j < std::min(n, j0 + COUNTED); ++j)
                for (int64_t i = I * COUNTED; i < std::min(j, (I + 1) * COUNTED); ++i) out[j * n + i] = out[i * n + j];
    };
    parallel_for(threads, tiles, mirror);
}

}  // namespace gq

using namespace gq;

// packed [n, bytes] to distances [n, n] int64. features: the result of gq_features.
GQ_API int gq_hamming(int path, int threads, int features, const uint8_t* packed, int64_t n, int64_t bytes,
                      int64_t* found) {
    return guarded([&] {
        std::vector<const uint8_t*> rows(static_cast<size_t>(n));
        for (int64_t i = 0; i < n; ++i) rows[i] = packed + i * bytes;
        distances(path, threads, features, rows.data(), n, bytes, found);
        return static_cast<int>(OK);
    });
}

// packed [n, bytes] to counts of ones [8 * bytes] int32, or to sums of weights where `weights` [n] is given.
GQ_API int gq_votes(int path, int threads, const uint8_t* packed, const int32_t* weights, int64_t n, int64_t bytes,
                    int32_t* out) {
    return guarded([&] {
        auto count = count_scalar;
        auto weigh = weigh_scalar;
#if GQ_X86
        if (path == AVX2) count = count_avx2_block, weigh = weigh_avx2;
        if (path == AVX512) count = count_avx512_block, weigh = weigh_avx512;
#endif
        const int64_t blocks = (bytes + VOTE_BYTES - 1) / VOTE_BYTES;
        auto body = [&](int64_t p) {
            const int64_t stop = std::min(blocks, (p + 1) * VOTE_PIECE);
            for (int64_t block = p * VOTE_PIECE; block < stop; ++block) {
                const int64_t at = block * VOTE_BYTES, size = std::min(VOTE_BYTES, bytes - at);
                weights ? weigh(packed, weights, n, bytes, at, size, out) : count(packed, n, bytes, at, size, out);
            }
        };
        parallel_for(threads, (blocks + VOTE_PIECE - 1) / VOTE_PIECE, body);
        return static_cast<int>(OK);
    });
}

// packed [n, bytes] to majority [bytes]: bit 1 where at least half of the rows have a 1.
GQ_API int gq_majority(int path, int threads, const uint8_t* packed, int64_t n, int64_t bytes, uint8_t* out) {
    return guarded([&] {
        auto majority = majority_scalar;
#if GQ_X86
        if (path == AVX2) majority = majority_avx2;
        if (path == AVX512) majority = majority_avx512;
#endif
        const int64_t blocks = (bytes + VOTE_BYTES - 1) / VOTE_BYTES;
        auto body = [&](int64_t p) {
            const int64_t stop = std::min(blocks, (p + 1) * VOTE_PIECE);
            for (int64_t block = p * VOTE_PIECE; block < stop; ++block)
                majority(packed, n, bytes, block * VOTE_BYTES, std::min(VOTE_BYTES, bytes - block * VOTE_BYTES), out);
        };
        parallel_for(threads, (blocks + VOTE_PIECE - 1) / VOTE_PIECE, body);
        return static_cast<int>(OK);
    });
}
