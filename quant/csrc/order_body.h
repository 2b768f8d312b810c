// Sorting along the rows of a [n, d] matrix, a strip of coordinates at a time; included once for each instruction set.
//
// Expects GQ_T, the target attribute, and two types of lanes that are sorted: Keys (values) and Ranked (values with
// their row), each with Lane, LANES, Wide, of(), at(), put(), order(), wide(), VECTORS, RANKED. Every lane is a coordinate of its
// own, so results depend neither on the width of a vector nor on which thread took the strip. No include guard.

template <class K>
GQ_T GQ_INLINE void order_rows(typename K::Lane* sorted, int64_t low, int64_t high) {
    K a = K::at(sorted + low * K::LANES), b = K::at(sorted + high * K::LANES);
    K::order(a, b);
    K::put(sorted + low * K::LANES, a);
    K::put(sorted + high * K::LANES, b);
}

template <class Net, class K, size_t... I>
GQ_T GQ_INLINE void run([[maybe_unused]] K* rows, std::index_sequence<I...>) {
    (K::order(rows[Net::steps.list[I].low], rows[Net::steps.list[I].high]), ...);
}

// Rows through a network: in registers where the type is vectors, row by row in memory where it is not.
template <class Net, int N, class K>
GQ_T GQ_INLINE void pass(K* rows, typename K::Lane* out) {
    if constexpr (K::VECTORS) run<Net>(rows, std::make_index_sequence<Net::SIZE>{});
    for (int i = 0; i < N; ++i) K::put(out + i * K::LANES, rows[i]);
    if constexpr (!K::VECTORS)
        for (int i = 0; i < Net::SIZE; ++i) order_rows<K>(out, Net::steps.list[i].low, Net::steps.list[i].high);
}

// N rows of x, sorted, as keys into `out` [N, LANES]. `first` is the number of the first row.
template <class K, int N>
GQ_T void sort_group(const float* x, int64_t stride, int64_t first, typename K::Lane* out) {
    K rows[N];
    for (int i = 0; i < N; ++i) rows[i] = K::of(x + i * stride, first + i);
    pass<Network<N>, N>(rows, out);
}

template <class K>
using Sorter = void (*)(const float*, int64_t, int64_t, typename K::Lane*);

template <class K, size_t... I>
Sorter<K> sorter(int n, std::index_sequence<I...>) {
    static constexpr Sorter<K> all[] = {sort_group<K, static_cast<int>(I) + 1>...};
    return all[n - 1];
}

// The last steps of a bitonic merge, within GROUP rows.
template <class K>
GQ_T void settle(typename K::Lane* sorted) {
    K rows[GROUP];
    for (int i = 0; i < GROUP; ++i) rows[i] = K::at(sorted + i * K::LANES);
    pass<Settling<GROUP>, GROUP>(rows, sorted);
}

// Sorted groups to one sorted whole, bitonic with the smaller always below, so that a step beyond the end is left out.
template <class K>
GQ_T void merge_groups(typename K::Lane* sorted, int64_t rows) {
    for (int64_t size = 2 * GROUP; size < 2 * rows; size *= 2) {
        for (int64_t base = 0; base + size / 2 < rows; base += size) {
            const int64_t end = std::min(rows, base + size);
            for (int64_t low = std::max(base, 2 * base + size - end); low < base + size / 2; ++low)
                order_rows<K>(sorted, low, 2 * base + size - 1 - low);
            for (int64_t step = size / 4; step >= GROUP; step /= 2)
                for (int64_t from = base; from < end; from += 2 * step)
                    for (int64_t low = from; low < std::min(from + step, end - step); ++low)
                        order_rows<K>(sorted, low, low + step);
            for (int64_t from = base; from < end; from += GROUP)
                settle<K>(sorted + from * K::LANES);
        }
    }
}

// LANES coordinates of n rows, ascending, into `sorted`, which has room for n rounded up to whole groups.
template <class K>
GQ_T void sort_strip(const float* x, int64_t stride, int64_t n, typename K::Lane* sorted) {
    const auto sizes = std::make_index_sequence<GROUP>{};
    for (int64_t first = 0; first < n; first += GROUP) {
        const int64_t size = std::min<int64_t>(GROUP, n - first);
        sorter<K>(static_cast<int>(size), sizes)(x + first * stride, stride, first, sorted + first * K::LANES);
    }
    if (n <= GROUP) return;
    const int64_t rows = (n + GROUP - 1) / GROUP * GROUP;
    for (int64_t i = n * K::LANES; i < rows * K::LANES; ++i) sorted[i] = std::numeric_limits<typename K::Lane>::max();
    merge_groups<K>(sorted, rows);
}

// Sums begin with 0.0, so that no result is -0.0 for the zeros alone.

template <class K>
GQ_T GQ_INLINE typename K::Wide trimmed_strip(const Job& job, const typename K::Lane* sorted) {
    auto sum = K::Wide::splat(0.0);
    for (int64_t i = job.trim; i < job.n - job.trim; ++i) sum = sum + K::wide(sorted + i * K::LANES);
    return sum / K::Wide::splat(static_cast<double>(job.n - 2 * job.trim));
}

template <class K>
GQ_T GQ_INLINE typename K::Wide weighted_strip(const Job& job, const typename K::Lane* sorted) {
    auto sum = K::Wide::splat(0.0), all = sum;
    for (int64_t i = job.trim; i < job.n - job.trim; ++i) {
        const auto weight = K::weight(sorted + i * K::LANES, job.weights);
        sum = sum + weight * K::wide(sorted + i * K::LANES);
        all = all + weight;
    }
    return sum / all;
}

template <class K>
GQ_T GQ_INLINE typename K::Wide median_strip(const Job& job, const typename K::Lane* sorted) {
    const auto low = K::Wide::splat(0.0) + K::wide(sorted + (job.n - 1) / 2 * K::LANES);
    return job.n % 2 ? low : (low + K::wide(sorted + job.n / 2 * K::LANES)) * K::Wide::splat(0.5);
}

// The window moves right while the value that would come in is nearer to the median than the one that would go out.
template <class K>
GQ_T GQ_INLINE typename K::Wide around_strip(const Job& job, const typename K::Lane* sorted) {
    using W = typename K::Wide;
    const W middle = median_strip<K>(job, sorted), zero = W::splat(0.0);
    W start = zero, sum = zero;
    for (int64_t i = 0; i + job.keep < job.n; ++i) {
        const W out = middle - K::wide(sorted + i * K::LANES);
        const W in = K::wide(sorted + (i + job.keep) * K::LANES) - middle;
        start = start + below(in, out, W::splat(1.0));
    }
    const W end = start + W::splat(static_cast<double>(job.keep));
    for (int64_t i = 0; i < job.n; ++i) {
        const W at = W::splat(static_cast<double>(i)), after = W::splat(static_cast<double>(i + 1));
        sum = sum + below(at, end, below(start, after, K::wide(sorted + i * K::LANES)));
    }
    return sum / W::splat(static_cast<double>(job.keep));
}

// Coordinates [from, to) of the result.
template <class K>
GQ_T void order_piece(const Job& job, int64_t from, int64_t to) {
    Aligned<typename K::Lane> sorted((job.n + GROUP - 1) / GROUP * GROUP * K::LANES);
    Aligned<float> tail((to - from) % K::LANES ? job.n * K::LANES : 0);
    const int64_t tile = std::min<int64_t>(256, std::max<int64_t>(4, 4096 / job.n) * 16), strips = tile / K::LANES;
    for (int64_t c = from; c < to; c += K::LANES) {
        const int64_t strip = (c - from) / K::LANES % strips, next = c - strip * K::LANES + tile;
        fetch(job, strip * job.n / strips, (strip + 1) * job.n / strips, next, std::min(next + tile, to));
        const int64_t size = std::min<int64_t>(K::LANES, to - c);
        const float* x = job.x + c;
        int64_t stride = job.d;
        if (size < K::LANES) {
            for (int64_t i = 0; i < job.n; ++i)
                for (int64_t l = 0; l < K::LANES; ++l) tail.data[i * K::LANES + l] = l < size ? x[i * stride + l] : 0.0f;
            x = tail.data;
            stride = K::LANES;
        }
        sort_strip<K>(x, stride, job.n, sorted.data);
        alignas(64) float result[K::LANES];
        if constexpr (K::RANKED) weighted_strip<K>(job, sorted.data).narrow(result);
        else if (job.rule == MEDIAN) median_strip<K>(job, sorted.data).narrow(result);
        else if (job.rule == AROUND) around_strip<K>(job, sorted.data).narrow(result);
        else trimmed_strip<K>(job, sorted.data).narrow(result);
        std::memcpy(job.out + c, result, static_cast<size_t>(size) * sizeof(float));
    }
}
