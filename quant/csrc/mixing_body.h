// What mixing.cpp does with one block of packed rows. It is included once for every instruction set, in a namespace
// of its own in which GQ_ISA names the instruction set to the compiler, and Bits (64 bytes), Lane16 and Lane32 are its registers.

// Lines of 64 bytes of all rows from byte `at`, line after line: out[z * n + j] is line z of row j, zeros beyond the
// end. The lines that come next are fetched meanwhile: no processor follows a thousand rows by itself.
GQ_ISA static void gather(const uint8_t* const* rows, int64_t n, int64_t bytes, int64_t at, int64_t width, Line* out) {
    const int64_t left = bytes - at, whole = left < width * 64 ? left / 64 : width;
    const int64_t next = left - width * 64 < width * 64 ? left - width * 64 : width * 64;
    for (int64_t j = 0; j < n; ++j) {
        const uint8_t* row = rows[j] + at;
        for (int64_t i = 0; i < next; i += 64) prefetch(row + width * 64 + i);
        for (int64_t z = 0; z < whole; ++z) Bits::load(row + 64 * z).store(out[z * n + j].byte);
        if (whole < width) {
            std::memset(out[whole * n + j].byte, 0, 64);
            std::memcpy(out[whole * n + j].byte, row + 64 * whole, static_cast<size_t>(left - 64 * whole));
        }
    }
}

// Counts of one line of the rows, as slices: bit p of a place's count stands in slices[p]. Level after level, two
// words of a level and its sum so far become a sum and one word of the next level.
GQ_ISA static void slice(const VotePlan& plan, const Line* lines, Line* carries, Line* slices) {
    const Bits none = Bits::zero(), all = Bits::ones();
    int64_t carried = 0;
    for (int p = 0; p < plan.slices; ++p) {
        const int32_t* term = plan.terms.data() + plan.first[p];
        const int32_t* const stop = plan.terms.data() + plan.first[p + 1];
        Bits sum = none;
        int64_t used = 0, made = 0;
        for (; used + 2 <= carried; used += 2) {
            const Bits x = Bits::load(carries[used].byte), y = Bits::load(carries[used + 1].byte);
            csa(sum, x, y).store(carries[made++].byte);
        }
        if (used < carried) {
            const Bits x = Bits::load(carries[used].byte);
            const Bits y = term < stop ? flipped(lines, *term++, none, all) : none;
            csa(sum, x, y).store(carries[made++].byte);
        }
        for (; term + 2 <= stop; term += 2) {
            const Bits x = flipped(lines, term[0], none, all), y = flipped(lines, term[1], none, all);
            csa(sum, x, y).store(carries[made++].byte);
        }
        if (term < stop) csa(sum, flipped(lines, *term, none, all), none).store(carries[made++].byte);
        sum.store(slices[p].byte);
        carried = made;
    }
}

GQ_ISA static void votes(const VotePlan& plan, const Line* lines, Line* carries, int32_t* out, float* scaled,
                         double unit) {
    alignas(64) uint32_t counts[512];
    Line slices[MOST_SLICES];
    slice(plan, lines, carries, slices);
    expand(slices, plan.slices, counts);
    if (scaled) {
        for (int i = 0; i < 512; ++i) {
            const int32_t sum = static_cast<int32_t>(plan.factor * (2 * counts[i] - plan.total));
            scaled[i] = static_cast<float>(static_cast<double>(sum) * unit);
        }
    } else {
        for (int i = 0; i < 512; ++i) out[i] = static_cast<int32_t>(plan.factor * (2 * counts[i] - plan.total));
    }
}

// The mixed rows of BATCH registers of places, from byte `at` of the lines: y[r * BATCH + g] is row r in register g.
// v: BATCH registers a column.
template <class L>
GQ_ISA static void mix(const MixPlan& plan, const Line* lines, int at, typename L::V* v, typename L::V* y) {
    using V = typename L::V;
    constexpr int STEP = L::COUNT / 8;
    V total[BATCH], sum[BATCH];
    for (int g = 0; g < BATCH; ++g) total[g] = L::zero();
    for (const Weighted& column : plan.columns) {
        const uint8_t* const bits = lines[column.row].byte + at;
        for (int g = 0; g < BATCH; ++g, ++v) {
            const V x = L::spread(bits + STEP * g, column.weight);
            L::store(v, x);
            total[g] = L::add(total[g], x);
        }
    }
    v -= BATCH * plan.columns.size();
    for (const MixRow& row : plan.rows) {
        for (int g = 0; g < BATCH; ++g) sum[g] = row.from_total ? total[g] : L::zero();
        const int32_t* term = plan.terms.data() + row.first;
        for (const int32_t* stop = term + row.minus; term < stop; ++term)
            for (int g = 0; g < BATCH; ++g) sum[g] = L::sub(sum[g], L::load(v + *term + g));
        for (const int32_t* stop = term + row.plus; term < stop; ++term)
            for (int g = 0; g < BATCH; ++g) sum[g] = L::add(sum[g], L::load(v + *term + g));
        const Weighted* own = plan.own.data() + row.first_own;
        for (const Weighted* stop = own + row.own; own < stop; ++own)
            for (int g = 0; g < BATCH; ++g)
                sum[g] = L::add(sum[g], L::spread(lines[own->row].byte + at + STEP * g, own->weight));
        for (int g = 0; g < BATCH; ++g) L::store(y++, sum[g]);
    }
}

template <class L>
GQ_ISA GQ_INLINE void exchange(typename L::V& a, typename L::V& b) {
    const typename L::V least = L::min(a, b);
    b = L::max(a, b);
    a = least;
}

template <class L, int M, size_t... C>
GQ_ISA GQ_INLINE void exchange_all(typename L::V* s, std::index_sequence<C...>) {
    const int each[] = {(exchange<L>(s[NETWORK<M>.low[C]], s[NETWORK<M>.high[C]]), 0)...};
    (void)each;
}

// Sorts up to M mixed rows, L::COUNT places side by side, and sums those that are kept. Vector sets have every
// exchange written out, so that most of the rows stay in registers.
template <class L, int M>
GQ_ISA static void trim_sorted(const MixPlan& plan, const typename L::V* y, double unit, float* out) {
    typename L::V s[M];
    const int32_t* index = plan.order.data();
    const int64_t start = plan.below + plan.trim, stop = M - plan.above - plan.trim;
    typename L::Sum sum = L::nothing();
    if constexpr (L::UNROLLED) {
#pragma GCC unroll 64
        for (int k = 0; k < M; ++k) s[k] = L::load(y + index[k]);
        exchange_all<L, M>(s, std::make_index_sequence<NETWORK<M>.size>{});
#pragma GCC unroll 64
        for (int k = 0; k < M; ++k)
            if (k >= start && k < stop) L::accumulate(sum, s[k]);
    } else {
        for (int k = 0; k < M; ++k) s[k] = L::load(y + index[k]);
        for (size_t c = 0; c < NETWORK<M>.size; ++c) exchange<L>(s[NETWORK<M>.low[c]], s[NETWORK<M>.high[c]]);
        for (int64_t k = start; k < stop; ++k) L::accumulate(sum, s[k]);
    }
    L::write(sum, unit, out);
}

// Any number of mixed rows: the values at both cuts are found bit by bit, by counting how many values are smaller.
// s: room for the rows side by side.
template <class L>
GQ_ISA static void trim_counted(const MixPlan& plan, const typename L::V* y, typename L::V* s, double unit,
                                float* out) {
    using V = typename L::V;
    const int64_t m = plan.m;
    const int32_t* index = plan.order.data();
    for (int64_t k = 0; k < m; ++k) L::store(s + k, L::load(y + index[k]));
    typename L::Sum sum = L::nothing();
    if (plan.trim == 0) {
        for (int64_t k = 0; k < m; ++k) L::accumulate(sum, L::load(s + k));
        return L::write(sum, unit, out);
    }
    const V rank = L::set(static_cast<int32_t>(plan.trim)), other = L::set(static_cast<int32_t>(m - plan.trim + 1));
    V low = L::set(L::LEAST), high = low;  // at last the trim-th smallest and the trim-th largest
    for (int b = 8 * L::BYTES - 1; b >= 0; --b) {
        const V bit = L::set(static_cast<int32_t>(uint32_t{1} << b)), a = L::add(low, bit), z = L::add(high, bit);
        V fewer_a = L::zero(), fewer_z = L::zero();
        for (int64_t k = 0; k < m; ++k) {
            const V x = L::load(s + k);
            fewer_a = L::count(fewer_a, x, a);
            fewer_z = L::count(fewer_z, x, z);
        }
        low = L::add(low, L::both(L::below(fewer_a, rank), bit));
        high = L::add(high, L::both(L::below(fewer_z, other), bit));
    }
    V under = L::zero(), over = L::zero();
    for (int64_t k = 0; k < m; ++k) {
        const V x = L::load(s + k), u = L::below(x, low), o = L::below(high, x);
        under = L::sub(under, u);
        over = L::sub(over, o);
        L::accumulate(sum, L::without(L::either(u, o), x));
    }
    // Values at the cuts themselves: as many as still have to go.
    int64_t sums[L::COUNT];
    typename L::T lows[L::COUNT], highs[L::COUNT], unders[L::COUNT], overs[L::COUNT];
    L::read(sum, sums);
    std::memcpy(lows, &low, sizeof(lows));
    std::memcpy(highs, &high, sizeof(highs));
    std::memcpy(unders, &under, sizeof(unders));
    std::memcpy(overs, &over, sizeof(overs));
    for (int i = 0; i < L::COUNT; ++i) {
        const int64_t at_low = (plan.trim - int64_t{unders[i]}) * lows[i];
        const int64_t at_high = (plan.trim - int64_t{overs[i]}) * highs[i];
        out[i] = static_cast<float>(static_cast<double>(sums[i] - at_low - at_high) * unit);
    }
}

template <class L>
GQ_ISA static void trim(const MixPlan& plan, const typename L::V* y, typename L::V* s, double unit, float* out) {
    switch (plan.size) {
        case 8: return trim_sorted<L, 8>(plan, y, unit, out);
        case 12: return trim_sorted<L, 12>(plan, y, unit, out);
        case 16: return trim_sorted<L, 16>(plan, y, unit, out);
        case 24: return trim_sorted<L, 24>(plan, y, unit, out);
        case 32: return trim_sorted<L, 32>(plan, y, unit, out);
        case 48: return trim_sorted<L, 48>(plan, y, unit, out);
        case 64: return trim_sorted<L, 64>(plan, y, unit, out);
        default: return trim_counted<L>(plan, y, s, unit, out);
    }
}

// One line of the rows to 512 trimmed values. work: registers for the columns, for the mixed rows and two
// pads, and for trim_counted.
template <class L>
GQ_ISA static void trimmed(const MixPlan& plan, const Line* lines, Line* work, double unit, float* out) {
    typename L::V* const v = reinterpret_cast<typename L::V*>(work);
    typename L::V* const y = v + BATCH * plan.columns.size();
    typename L::V* const pads = y + BATCH * plan.rows.size();
    for (int g = 0; g < BATCH; ++g) {
        L::store(pads + g, L::set(L::LEAST));
        L::store(pads + BATCH + g, L::set(L::MOST));
    }
    for (int at = 0; at < 64; at += BATCH * L::COUNT / 8) {
        mix<L>(plan, lines, at, v, y);
        for (int g = 0; g < BATCH; ++g, out += L::COUNT) trim<L>(plan, y + g, pads + 2 * BATCH, unit, out);
    }
}

GQ_ISA GQ_INLINE uint64_t ones_of(uint64_t v) {
#if defined(__GNUC__) || defined(__clang__)
    return static_cast<uint64_t>(__builtin_popcountll(v));
#else
    v -= (v >> 1) & 0x5555555555555555u;
    v = (v & 0x3333333333333333u) + ((v >> 2) & 0x3333333333333333u);
    return (((v + (v >> 4)) & 0x0F0F0F0F0F0F0F0Fu) * 0x0101010101010101u) >> 56;
#endif
}

template <class W>
GQ_ISA GQ_INLINE uint64_t word(const uint8_t* p) {
    W v;
    std::memcpy(&v, p, sizeof(v));
    return v;
}

GQ_ISA GQ_INLINE uint64_t differ(const uint8_t* a, const uint8_t* b, int64_t bytes) {
    uint64_t total = 0;
    for (; bytes >= 8; bytes -= 8, a += 8, b += 8) total += ones_of(word<uint64_t>(a) ^ word<uint64_t>(b));
    for (; bytes > 0; --bytes, ++a, ++b) total += ones_of(word<uint8_t>(a) ^ word<uint8_t>(b));
    return total;
}

// Adds s_i s_j (length - 2 distance) of every segment to sums [PAIRS, PAIRS], segment after segment. Where `a` and
// `b` are the same rows, from the diagonal on.
GQ_ISA static void products(const Segments& s, const uint8_t* const* a, const float* const* sa, int64_t na,
                            const uint8_t* const* b, const float* const* sb, int64_t nb, double* sums) {
    const bool same = a == b;
    int64_t found[PAIRS * COUNTED];
    for (int64_t row = 0; row < s.rows; ++row)
        for (int64_t g = 0; g < s.groups; ++g) {
            const int64_t at = row * s.width + g * s.step, k = row * s.groups + g;
            const int64_t bytes = g + 1 < s.groups ? s.step : s.width - g * s.step;
            const int64_t length = g + 1 < s.groups ? 8 * s.step : s.cols - 8 * g * s.step;
            if (s.count) {
                for (int64_t i = 0; i < na; ++i) std::memset(found + i * COUNTED, 0, PAIRS * sizeof(*found));
                s.count(a, na, b, nb, same, at, bytes, found);
            } else {
                for (int64_t i = 0; i < na; ++i)
                    for (int64_t j = same ? i : 0; j < nb; ++j)
                        found[i * COUNTED + j] = static_cast<int64_t>(differ(a[i] + at, b[j] + at, bytes));
            }
            double others[PAIRS];
            for (int64_t j = 0; j < nb; ++j) others[j] = sb[j][k];
            for (int64_t i = 0; i < na; ++i) {
                const double scale = sa[i][k];
                for (int64_t j = same ? i : 0; j < nb; ++j)
                    sums[i * PAIRS + j] +=
                        scale * others[j] * static_cast<double>(length - 2 * found[i * COUNTED + j]);
            }
        }
}
