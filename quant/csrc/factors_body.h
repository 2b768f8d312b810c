// Products of some rows with the factors of one variant; included once for each instruction set. No include guard.
//
// Expects GQ_T, the target attribute, V of lanes.h, and WIDTH, the vectors V that registers hold as sums. A row's sums
// have one order, whatever is computed beside it: 16 lanes and their total for `a`, ascending ranks for `b`.

// The first `count` of 16 numbers, then zeros.
template <class T>
GQ_T GQ_INLINE V get_some(const T* at, int64_t count) {
    T some[16] = {};
    std::memcpy(some, at, static_cast<size_t>(count) * sizeof(T));
    return get(some);
}

// inner[m][k] = a[k] @ x[m] for M rows and K ranks.
template <class T, int M, int K>
GQ_T GQ_INLINE void shrink(const T* a, int64_t cols, const float* const* x, float* inner) {
    V sums[M][K];
    for (int m = 0; m < M; ++m)
        for (int k = 0; k < K; ++k) sums[m][k] = all(0.0f);
    int64_t c = 0;
    for (; c + 16 <= cols; c += 16) {
        V w[K];
        for (int k = 0; k < K; ++k) w[k] = get(a + k * cols + c);
        for (int m = 0; m < M; ++m) {
            const V one = get(x[m] + c);
            for (int k = 0; k < K; ++k) sums[m][k] = sums[m][k] + one * w[k];
        }
    }
    if (c < cols)
        for (int m = 0; m < M; ++m)
            for (int k = 0; k < K; ++k)
                sums[m][k] = sums[m][k] + get_some(x[m] + c, cols - c) * get_some(a + k * cols + c, cols - c);
    for (int m = 0; m < M; ++m)
        for (int k = 0; k < K; ++k) inner[m * RANKS + k] = total_of(sums[m][k]);
}

// y[m] += inner[m] @ b for M rows and N * 16 outputs from o on.
template <class T, int M, int N>
GQ_T GQ_INLINE void expand(const T* b, int64_t ranks, int64_t out, int64_t o, const float* inner, float* const* y) {
    V sums[M][N];
    for (int m = 0; m < M; ++m)
        for (int n = 0; n < N; ++n) sums[m][n] = all(0.0f);
    for (int64_t r = 0; r < ranks; ++r) {
        V w[N];
        for (int n = 0; n < N; ++n) w[n] = get(b + r * out + o + 16 * n);
        for (int m = 0; m < M; ++m) {
            const V one = all(inner[m * RANKS + r]);
            for (int n = 0; n < N; ++n) sums[m][n] = sums[m][n] + one * w[n];
        }
    }
    for (int m = 0; m < M; ++m)
        for (int n = 0; n < N; ++n) put(y[m] + o + 16 * n, get(y[m] + o + 16 * n) + sums[m][n]);
}

// The same for the outputs behind the last 16.
template <class T, int M>
GQ_T GQ_INLINE void expand_end(const T* b, int64_t ranks, int64_t out, int64_t o, const float* inner, float* const* y) {
    V sums[M];
    for (int m = 0; m < M; ++m) sums[m] = all(0.0f);
    for (int64_t r = 0; r < ranks; ++r) {
        const V w = get_some(b + r * out + o, out - o);
        for (int m = 0; m < M; ++m) sums[m] = sums[m] + all(inner[m * RANKS + r]) * w;
    }
    for (int m = 0; m < M; ++m) {
        float found[16];
        put(found, get_some(y[m] + o, out - o) + sums[m]);
        std::memcpy(y[m] + o, found, static_cast<size_t>(out - o) * 4);
    }
}

// M rows with ranks [first, first + ranks) of one variant's factors.
template <class T, int M>
GQ_T void rows_of(const Factors<T>& f, int64_t first, int64_t ranks, const float* const* x, float* const* y) {
    constexpr int MOST = std::min(WIDTH / M, WIDTH / 2);  // one row leaves registers for the factors
    float inner[M * RANKS];
    const T *a = f.a + first * f.cols, *b = f.b + first * f.out;
    int64_t r = 0;
    for (; r + MOST <= ranks; r += MOST) shrink<T, M, MOST>(a + r * f.cols, f.cols, x, inner + r);
    if constexpr (MOST > 4)
        for (; r + 4 <= ranks; r += 4) shrink<T, M, 4>(a + r * f.cols, f.cols, x, inner + r);
    for (; r < ranks; ++r) shrink<T, M, 1>(a + r * f.cols, f.cols, x, inner + r);
    int64_t o = 0;
    for (; o + 16 * MOST <= f.out; o += 16 * MOST) expand<T, M, MOST>(b, ranks, f.out, o, inner, y);
    for (; o + 16 <= f.out; o += 16) expand<T, M, 1>(b, ranks, f.out, o, inner, y);
    if (o < f.out) expand_end<T, M>(b, ranks, f.out, o, inner, y);
}

template <class T>
GQ_T void add_rows(const Factors<T>& f, int64_t count, const float* const* x, float* const* y) {
    for (int64_t first = 0; first < f.rank; first += RANKS) {
        const int64_t ranks = std::min(RANKS, f.rank - first);
        int64_t row = 0;
        for (; row + 4 <= count; row += 4) rows_of<T, 4>(f, first, ranks, x + row, y + row);
        for (; row + 2 <= count; row += 2) rows_of<T, 2>(f, first, ranks, x + row, y + row);
        for (; row < count; ++row) rows_of<T, 1>(f, first, ranks, x + row, y + row);
    }
}
