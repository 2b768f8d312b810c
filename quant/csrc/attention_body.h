// Attention of some rows of one request and one key head; included once for each instruction set. No include guard.
//
// Expects GQ_T, the target attribute, V of lanes.h, and WIDTH, the vectors V that registers
// hold as sums. A query's result does not depend on what is computed beside it: each of its sums runs over the tokens
// from the first on, in tiles of TILE tokens that begin at multiples of TILE, and a token that it does not see adds 0.

// exp of what is not above 0, by 2^n and a polynomial of degree 6 (Cephes), within 2 units of the last place. NaN stays.
GQ_T GQ_INLINE V exponential(V x) {
    const V shifted = x * all(1.44269504f) + all(12582912.0f);
    const V n = shifted - all(12582912.0f);
    const V r = (x - n * all(0.693359375f)) - n * all(-2.12194440e-4f);
    V p = all(1.9875691500e-4f);
    p = p * r + all(1.3981999507e-3f);
    p = p * r + all(8.3334519073e-3f);
    p = p * r + all(4.1665795894e-2f);
    p = p * r + all(1.6666665459e-1f);
    p = p * r + all(5.0000001201e-1f);
    p = (p * r) * r + r + all(1.0f);
    return zero_below(x, -87.0f, p * power_of(shifted));
}

GQ_T GQ_INLINE float most_of(V x) {
    float lanes[16];
    put(lanes, x);
    for (int step = 8; step > 0; step /= 2)
        for (int j = 0; j < step; ++j) lanes[j] = lanes[j + step] > lanes[j] ? lanes[j + step] : lanes[j];
    return lanes[0];
}

// Scores of R queries and the tokens of K blocks: `q` is [dim, QUERIES], `to` rows are TILE apart. With AHEAD the K
// blocks behind these are fetched meanwhile.
template <class T, int R, int K, bool AHEAD>
GQ_T GQ_INLINE void score(const float* q, const View<T>* blocks, int64_t dim, float* to) {
    V sums[R][K];
    for (int r = 0; r < R; ++r)
        for (int b = 0; b < K; ++b) sums[r][b] = all(0.0f);
    for (int64_t i = 0; i < dim; ++i) {
        V keys[K];
        for (int b = 0; b < K; ++b) keys[b] = get(blocks[b].keys + i * BLOCK);
        if constexpr (AHEAD)
            if (i % LINE<T> == 0)
                for (int b = 0; b < K; ++b) GQ_FETCH(blocks[K + b].keys + i * BLOCK);
        for (int r = 0; r < R; ++r) {
            const V one = all(q[i * QUERIES + r]);
            for (int b = 0; b < K; ++b) sums[r][b] = sums[r][b] + one * keys[b];
        }
    }
    for (int b = 0; b < K; ++b)
        for (int r = 0; r < R; ++r) {
            if (blocks[b].key_scales) sums[r][b] = sums[r][b] * get(blocks[b].key_scales);
            put(to + r * TILE + b * BLOCK, sums[r][b]);
        }
}

template <class T, int R>
GQ_T void scores_of(const float* q, const View<T>* blocks, int64_t count, int64_t dim, float* to) {
    constexpr int MOST = WIDTH / R >= 4 ? 4 : WIDTH / R >= 2 ? 2 : 1;
    int64_t b = 0;
    for (; b + 2 * MOST <= count; b += MOST) score<T, R, MOST, true>(q, blocks + b, dim, to + b * BLOCK);
    for (; b + MOST <= count; b += MOST) score<T, R, MOST, false>(q, blocks + b, dim, to + b * BLOCK);
    if constexpr (MOST > 2)
        for (; b + 2 <= count; b += 2) score<T, R, 2, false>(q, blocks + b, dim, to + b * BLOCK);
    for (; b < count; ++b) score<T, R, 1, false>(q, blocks + b, dim, to + b * BLOCK);
}

// Adds N * 16 columns of the values of tokens [first, last) of a tile to the sums of R queries.
template <class T, int R, int N>
GQ_T GQ_INLINE void collect(const float* weights, const View<T>* blocks, int64_t first, int64_t last, int64_t width,
                            int64_t column, float* sums_at) {
    V sums[R][N];
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < N; ++c) sums[r][c] = get(sums_at + r * width + column + c * 16);
    for (int64_t t = first; t < last; ++t) {
        const T* row = blocks[t / BLOCK].values + (t % BLOCK) * width + column;
        if (t + BLOCK < last) {
            const T* next = blocks[t / BLOCK + 1].values + (t % BLOCK) * width + column;
            for (int c = 0; c < N; c += LINE<T>) GQ_FETCH(next + c * 16);
        }
        V values[N];
        for (int c = 0; c < N; ++c) values[c] = get(row + c * 16);
        for (int r = 0; r < R; ++r) {
            const V one = all(weights[r * TILE + t]);
            for (int c = 0; c < N; ++c) sums[r][c] = sums[r][c] + one * values[c];
        }
    }
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < N; ++c) put(sums_at + r * width + column + c * 16, sums[r][c]);
}

template <class T, int R>
GQ_T void values_of(const float* weights, const View<T>* blocks, int64_t first, int64_t last, int64_t width,
                    float* sums) {
    constexpr int MOST = WIDTH / R >= 4 ? 4 : WIDTH / R >= 2 ? 2 : 1;
    int64_t c = 0;
    for (; c + MOST * 16 <= width; c += MOST * 16) collect<T, R, MOST>(weights, blocks, first, last, width, c, sums);
    for (; c < width; c += 16) collect<T, R, 1>(weights, blocks, first, last, width, c, sums);
}

// The softmax so far of one query, with the scores of tokens [low, high) of a tile of `count` blocks, which become
// weights. `most` is the largest score so far, `lanes` the sums of weights.
GQ_T GQ_INLINE void soften(float* scores, const float* const* value_scales, int64_t count, int64_t low, int64_t high,
                           int64_t width, float& most, float* lanes, float* sums) {
    for (int64_t t = 0; t < low; ++t) scores[t] = -INFINITY;
    for (int64_t t = high; t < count * BLOCK; ++t) scores[t] = -INFINITY;
    V top = all(most);
    for (int64_t b = 0; b < count; ++b) top = larger(get(scores + b * BLOCK), top);
    const float next = most_of(top);
    V sum = get(lanes);
    if (next != most) {
        const V factor = exponential(all(most - next));
        sum = sum * factor;
        for (int64_t c = 0; c < width; c += 16) put(sums + c, get(sums + c) * factor);
        most = next;
    }
    const V peak = all(most);
    for (int64_t b = 0; b < count; ++b) {
        V weight = exponential(get(scores + b * BLOCK) - peak);
        sum = sum + weight;
        if (value_scales) weight = weight * get(value_scales[b]);
        put(scores + b * BLOCK, weight);
    }
    put(lanes, sum);
}

// `count` blocks as float32, for many queries.
template <class T>
GQ_T void widen(const View<T>* from, int64_t count, int64_t dim, int64_t width, float* room, View<float>* to) {
    for (int64_t b = 0; b < count; ++b) {
        for (int64_t i = 0; i < dim; ++i) put(room + i * BLOCK, get(from[b].keys + i * BLOCK));
        float* values = room + dim * BLOCK;
        for (int64_t i = 0; i < width; ++i) put(values + i * BLOCK, get(from[b].values + i * BLOCK));
        to[b] = {room, values, from[b].key_scales};
        room += (dim + width) * BLOCK;
    }
}

template <class T>
GQ_T GQ_INLINE void tile_scores(int queries, const float* q, const View<T>* blocks, int64_t count, int64_t dim,
                                float* to) {
    switch (queries) {
        case 1: return scores_of<T, 1>(q, blocks, count, dim, to);
        case 2: return scores_of<T, 2>(q, blocks, count, dim, to);
        case 3: return scores_of<T, 3>(q, blocks, count, dim, to);
        default: return scores_of<T, 4>(q, blocks, count, dim, to);
    }
}

template <class T>
GQ_T GQ_INLINE void tile_values(int queries, const float* weights, const View<T>* blocks, int64_t first, int64_t last,
                                int64_t width, float* sums) {
    switch (queries) {
        case 1: return values_of<T, 1>(weights, blocks, first, last, width, sums);
        case 2: return values_of<T, 2>(weights, blocks, first, last, width, sums);
        case 3: return values_of<T, 3>(weights, blocks, first, last, width, sums);
        default: return values_of<T, 4>(weights, blocks, first, last, width, sums);
    }
}

// One tile of tokens for all queries of the work. Those of one row lie side by side, `groups` of them.
template <class T>
GQ_T void tile_body(const Work& w, int64_t tile, int64_t count, const View<T>* blocks, const float* const* scales) {
    for (int64_t first = 0; first < w.queries; first += QUERIES) {
        const int64_t some = std::min<int64_t>(QUERIES, w.queries - first);
        // What the first and the last of these queries see of the tile.
        const int64_t low = std::max<int64_t>(0, w.begin_of(first) - tile);
        const int64_t high = std::min(count * BLOCK, w.end_of(first + some - 1) - tile);
        if (high <= low) continue;
        float* scores = w.scores;
        tile_scores<T>(static_cast<int>(some), w.q + first * w.dim, blocks, (high + BLOCK - 1) / BLOCK, w.dim, scores);
        for (int64_t i = first; i < first + some; ++i) {
            const int64_t from = std::max<int64_t>(0, w.begin_of(i) - tile), to = std::min(high, w.end_of(i) - tile);
            soften(scores + (i - first) * TILE, scales, (high + BLOCK - 1) / BLOCK, std::min(from, high),
                   std::max<int64_t>(to, 0), w.width, w.most[i], w.lanes + i * 16, w.sums + i * w.width);
        }
        tile_values<T>(static_cast<int>(some), scores, blocks, low, high, w.width, w.sums + first * w.width);
    }
}

// The rows [start, stop) of a request and the query heads of one key head; false where there is no memory.
template <class T>
GQ_T bool rows_body(const Attention& a, const Span& span, int64_t head, int64_t start, int64_t stop) {
    const int64_t groups = a.heads / a.kv_heads, width = a.width();
    Work w;
    w.queries = (stop - start) * groups;
    w.groups = groups;
    w.dim = a.dim;
    w.width = width;
    w.position = span.length + start - span.start;
    w.window = a.window;
    const int64_t padded = (w.queries + QUERIES - 1) / QUERIES * QUERIES;
    const int64_t tokens = sizeof(T) < 4 && w.queries > 2 * QUERIES ? TILE : 0;
    float* room = room_for(padded * (a.dim + width + 17) + QUERIES * TILE + tokens * (a.dim + width));
    if (!room) return false;
    w.q = room;
    w.sums = w.q + padded * a.dim;
    w.lanes = w.sums + padded * width;
    w.scores = w.lanes + padded * 16;
    float* wide_room = w.scores + QUERIES * TILE;
    w.most = wide_room + tokens * (a.dim + width);
    std::fill(w.q, w.q + padded * a.dim, 0.0f);
    std::fill(w.sums, w.scores, 0.0f);
    std::fill(w.most, w.most + padded, -3.4028234e38f);
    for (int64_t i = 0; i < w.queries; ++i) {
        const float* q = a.q + (start + i / groups) * a.q_stride + (head * groups + i % groups) * a.dim;
        float* to = w.q + i / QUERIES * QUERIES * a.dim + i % QUERIES;
        for (int64_t j = 0; j < a.dim; ++j) to[j * QUERIES] = q[j] * a.scale;
    }
    const int64_t end = w.end_of(w.queries - 1);
    for (int64_t tile = w.begin_of(0) / TILE * TILE; tile < end; tile += TILE) {
        View<T> blocks[TILE / BLOCK];
        View<float> wide[TILE / BLOCK];
        const float* scales[TILE / BLOCK];
        const int64_t count = (std::min(end - tile, TILE) + BLOCK - 1) / BLOCK;
        for (int64_t b = 0; b < count; ++b) {
            char* at = a.block(span, tile / BLOCK + b, head);
            blocks[b].keys = reinterpret_cast<const T*>(at);
            blocks[b].values = blocks[b].keys + a.dim * BLOCK;
            blocks[b].key_scales = nullptr;
            if (sizeof(T) == 1) {
                blocks[b].key_scales = reinterpret_cast<const float*>(at + (a.dim + width) * BLOCK);
                scales[b] = blocks[b].key_scales + BLOCK;
            }
        }
        const float* const* value_scales = sizeof(T) == 1 ? scales : nullptr;
        if (tokens) {
            widen<T>(blocks, count, a.dim, width, wide_room, wide);
            tile_body<float>(w, tile, count, wide, value_scales);
        } else {
            tile_body<T>(w, tile, count, blocks, value_scales);
        }
    }
    for (int64_t i = 0; i < w.queries; ++i) {
        float* out = a.out + (start + i / groups) * a.out_stride + (head * groups + i % groups) * a.value_dim;
        const float factor = 1.0f / total_of(get(w.lanes + i * 16));
        const float* sums = w.sums + i * width;
        for (int64_t j = 0; j < a.value_dim; ++j) out[j] = sums[j] * factor;
    }
    return true;
}

// Keys and values of a request's new tokens into their blocks.
template <class T>
GQ_T void append_body(const Attention& a, const Span& span, int64_t head) {
    const int64_t width = a.width();
    for (int64_t row = span.start; row < span.stop; ++row) {
        const int64_t at = span.length + row - span.start, slot = at % BLOCK;
        char* block = a.block(span, at / BLOCK, head);
        const float *k = a.k + row * a.k_stride + head * a.dim, *v = a.v + row * a.v_stride + head * a.value_dim;
        T *keys = reinterpret_cast<T*>(block) + slot, *values = reinterpret_cast<T*>(block) + a.dim * BLOCK + slot * width;
        float key_factor = 0, value_factor = 0;
        if (sizeof(T) == 1) {
            float* scales = reinterpret_cast<float*>(block + (a.dim + width) * BLOCK);
            key_factor = factor_of(k, a.dim, scales[slot]);
            value_factor = factor_of(v, a.value_dim, scales[BLOCK + slot]);
        }
        for (int64_t i = 0; i < a.dim; ++i) narrow(k[i], key_factor, keys[i * BLOCK]);
        for (int64_t i = 0; i < a.value_dim; ++i) narrow(v[i], value_factor, values[i]);
        for (int64_t i = a.value_dim; i < width; ++i) values[i] = T{};
    }
}
