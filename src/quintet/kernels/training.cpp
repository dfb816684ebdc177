// Training kernels, forward and backward: everything except the large matrix products.
//
// Hidden states between layers are float32; inputs of matrix products are float32 or bfloat16 (T). Sums over rows are
// accumulated in the order of threads, so that gradients are reproducible for a given number of threads.

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "vectors.hpp"

namespace {

constexpr index_t BLOCK_ROWS = 8;  // rows of a small product that are computed together

inline index_t round_up(index_t count, index_t to) { return (count + to - 1) / to * to; }

// The calling thread's range of `count` rows.
struct ThreadRange {
    index_t from, to;
    explicit ThreadRange(index_t count) {
        const index_t size = omp_get_num_threads(), rank = omp_get_thread_num();
        from = count * rank / size;
        to = count * (rank + 1) / size;
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// Small products: C [8 m, 16 n] = or += A [8 m, k] B [k, 16 n]. A has any strides; `ldc` is the row stride of C.

// Sums that are kept in registers: 8 x 32 numbers fill half of AVX-512's, 4 x 16 half of AVX2's.
#ifdef __AVX512F__
constexpr index_t SUM_ROWS = 8;
constexpr int SUM_LANES = 2;
#else
constexpr index_t SUM_ROWS = 4;
constexpr int SUM_LANES = 1;
#endif

template <int N>
void block(index_t k, const float* a, index_t row, index_t column, const float* b, index_t ldb, float* c, index_t ldc,
           bool add) {
    lanes sums[SUM_ROWS][N];
#pragma GCC unroll 8
    for (index_t i = 0; i < SUM_ROWS; ++i)
#pragma GCC unroll 2
        for (int n = 0; n < N; ++n) sums[i][n] = add ? load(c + i * ldc + n * LANES) : lanes{};
    for (index_t t = 0; t < k; ++t) {
        lanes right[N];
#pragma GCC unroll 2
        for (int n = 0; n < N; ++n) right[n] = load(b + t * ldb + n * LANES);
#pragma GCC unroll 8
        for (index_t i = 0; i < SUM_ROWS; ++i) {
            const float left = a[i * row + t * column];
#pragma GCC unroll 2
            for (int n = 0; n < N; ++n) sums[i][n] += right[n] * left;
        }
    }
#pragma GCC unroll 8
    for (index_t i = 0; i < SUM_ROWS; ++i)
#pragma GCC unroll 2
        for (int n = 0; n < N; ++n) store(sums[i][n], c + i * ldc + n * LANES);
}

// Eight rows of C, `width` columns.
inline void product(index_t k, const float* a, index_t row, index_t column, const float* b, index_t ldb, float* c,
                    index_t ldc, index_t width, bool add) {
    index_t n = 0;
    const auto columns = [&](auto size) {
        for (index_t i = 0; i < BLOCK_ROWS; i += SUM_ROWS)
            block<size>(k, a + i * row, row, column, b + n, ldb, c + i * ldc + n, ldc, add);
    };
    for (; n + SUM_LANES * LANES <= width; n += SUM_LANES * LANES)
        columns(std::integral_constant<int, SUM_LANES>{});
    if (n < width) columns(std::integral_constant<int, 1>{});
}

// ---------------------------------------------------------------------------------------------------------------------
// Attention of packed sequences. A cluster is a stem with its branches, all of which attend to the prefix. If there is a
// prefix, the first cluster is the prefix itself.

struct Span {
    index_t start, length;
};
struct Cluster {
    Span stem;
    index_t from, to;  // of its branches
};

struct Shape {
    index_t heads, kv_heads, dim;
    index_t prefix;
    const Cluster* clusters;
    index_t count;
    const Span* branches;
    float scale;

    index_t group() const { return heads / kv_heads; }
    index_t width() const { return (heads + 2 * kv_heads) * dim; }
};

// Keys and values of a cluster and one kv head as float32: [dim, room] and [room, dim]. Each part starts at a multiple
// of 16; gaps are zeros.
struct Panel {
    index_t dim, prefix, stem, base, room;
    std::vector<float> key_columns, value_columns, keys, values;
    std::vector<float> key_grads, value_grads;

    void size(const Shape& shape, const Cluster& cluster, bool first, bool backward) {
        dim = shape.dim;
        prefix = first && shape.prefix ? 0 : shape.prefix;
        stem = cluster.stem.length;
        base = round_up(prefix, LANES) + round_up(stem, LANES);
        index_t longest = 0;
        for (index_t b = cluster.from; b < cluster.to; ++b) longest = std::max(longest, shape.branches[b].length);
        room = base + round_up(longest, LANES);
        key_columns.assign(dim * room, 0.0f);
        values.assign(dim * room, 0.0f);
        if (!backward) return;
        value_columns.assign(dim * room, 0.0f);
        keys.assign(dim * room, 0.0f);
        key_grads.assign(dim * room, 0.0f);
        value_grads.assign(dim * room, 0.0f);
    }

    // Transpose 16 rows of `dim` numbers; rows from `count` on are zeros.
    template <class T>
    void columns(const T* rows, index_t stride, index_t count, float* out) const {
        for (index_t d = 0; d < dim; ++d)
            for (index_t t = 0; t < LANES; ++t) out[d * room + t] = t < count ? to_float(rows[t * stride + d]) : 0.0f;
    }

    template <class T>
    void put(Span span, index_t at, const T* key, const T* value, index_t stride, bool backward) {
        for (index_t t = 0; t < round_up(span.length, LANES); t += LANES) {
            const index_t left = std::min(span.length - t, LANES), row = (span.start + t) * stride;
            columns(key + row, stride, left, key_columns.data() + at + t);
            rows(value + row, stride, left, values.data() + (at + t) * dim);
            if (!backward) continue;
            columns(value + row, stride, left, value_columns.data() + at + t);
            rows(key + row, stride, left, keys.data() + (at + t) * dim);
        }
    }

    template <class T>
    void rows(const T* from, index_t stride, index_t count, float* out) const {
        for (index_t t = 0; t < LANES; ++t)
            for (index_t d = 0; d < dim; d += LANES)
                store(t < count ? load(from + t * stride + d) : lanes{}, out + t * dim + d);
    }

    // Mask the scores of gaps between parts and of later tokens.
    void mask(float* scores, index_t num_context, index_t own, index_t num_keys, float hidden) const {
        for (index_t j = prefix; j < round_up(prefix, LANES); ++j) scores[j] = hidden;
        for (index_t j = round_up(prefix, LANES) + stem; j < num_context; ++j) scores[j] = hidden;
        for (index_t j = num_context + own + 1; j < num_keys; ++j) scores[j] = hidden;
    }
};

constexpr index_t QUERIES = 64;

// Queries of one head and their scores, padded to a multiple of 8 rows.
struct Queries {
    std::vector<float> query, scores, slopes, grads, out;
    index_t count, rows, stride;

    void size(index_t given, index_t dim, index_t keys, bool backward) {
        count = given;
        rows = round_up(given, BLOCK_ROWS);
        stride = keys;
        query.assign(rows * dim, 0.0f);
        scores.resize(rows * keys);
        out.resize(rows * dim);
        if (!backward) return;
        grads.assign(rows * dim, 0.0f);
        slopes.resize(rows * keys);
    }
};

// Number of keys, a multiple of 16, of eight queries that start at token `first` of the row.
inline index_t num_keys(index_t num_context, index_t first) { return num_context + round_up(first + BLOCK_ROWS, LANES); }

// e^(x - top) in place for `count` numbers, a multiple of 16; returns the sum.
inline float exponentials(float* x, index_t count, float top) {
    lanes sum = {};
    for (index_t t = 0; t < count; t += LANES) {
        const lanes probs = exponential(load(x + t) - top);
        store(probs, x + t);
        sum += probs;
    }
    return sum_of(sum);
}
inline float maximum(const float* x, index_t count) {
    lanes found = load(x);
    for (index_t t = LANES; t < count; t += LANES) {
        const lanes other = load(x + t);
        found = max_lanes(found, other);
    }
    return max_of(found);
}

template <class T>
void load_scaled(const T* from, index_t stride, index_t count, index_t dim, float scale, float* out) {
    for (index_t i = 0; i < count; ++i)
        for (index_t d = 0; d < dim; d += LANES) store(load(from + i * stride + d) * scale, out + i * dim + d);
}

// Queries of one head from token `at` of a row. The row's own keys follow the panel's first `num_context` keys.
template <class T>
void forward_queries(const Shape& shape, const Panel& panel, Queries& own, index_t num_context, index_t at, const T* query,
                     index_t stride, T* out, float* sums) {
    const index_t dim = shape.dim, room = panel.room;
    load_scaled(query, stride, own.count, dim, shape.scale, own.query.data());
    for (index_t i = 0; i < own.rows; i += BLOCK_ROWS) {
        const index_t keys = num_keys(num_context, at + i);
        float* scores = own.scores.data() + i * own.stride;
        product(dim, own.query.data() + i * dim, dim, 1, panel.key_columns.data(), room, scores, own.stride, keys, false);
        float parts[BLOCK_ROWS];
        for (index_t r = 0; r < BLOCK_ROWS; ++r) {
            float* row = scores + r * own.stride;
            panel.mask(row, num_context, at + i + r, keys, -INFINITY);
            const float top = maximum(row, keys), sum = exponentials(row, keys, top);
            parts[r] = 1.0f / sum;
            if (i + r < own.count) sums[(i + r) * shape.heads] = top + std::log(sum);
        }
        float* mixed = own.out.data();
        product(keys, scores, own.stride, 1, panel.values.data(), dim, mixed, dim, dim, false);
        for (index_t r = 0; r < BLOCK_ROWS && i + r < own.count; ++r)
            for (index_t d = 0; d < dim; d += LANES)
                store(load(mixed + r * dim + d) * parts[r], out + (i + r) * shape.heads * dim + d);
    }
}

template <class T>
struct Forward {
    const Shape& shape;
    const T* states;  // [tokens, (heads + 2 kv_heads) dim]
    T* out;           // [tokens, heads dim]
    float* sums;      // [tokens, heads]

    void row(const Panel& panel, Queries& own, Span span, index_t num_context, index_t kv_head) const {
        const index_t dim = shape.dim, width = shape.width();
        for (index_t g = 0; g < shape.group(); ++g)
            for (index_t at = 0; at < span.length; at += QUERIES) {
                own.size(std::min(QUERIES, span.length - at), dim, panel.room, false);
                const index_t head = kv_head * shape.group() + g, token = span.start + at;
                forward_queries(shape, panel, own, num_context, at, states + token * width + head * dim, width,
                                out + (token * shape.heads + head) * dim, sums + token * shape.heads + head);
            }
    }

    void cluster(index_t c, index_t kv_head, Panel& panel, Queries& own) const {
        const auto& cluster = shape.clusters[c];
        const index_t dim = shape.dim, width = shape.width();
        const T *key = states + (shape.heads + kv_head) * dim, *value = key + shape.kv_heads * dim;
        panel.size(shape, cluster, c == 0, false);
        panel.put({0, panel.prefix}, 0, key, value, width, false);
        panel.put(cluster.stem, round_up(panel.prefix, LANES), key, value, width, false);
        row(panel, own, cluster.stem, round_up(panel.prefix, LANES), kv_head);
        for (index_t b = cluster.from; b < cluster.to; ++b) {
            panel.put(shape.branches[b], panel.base, key, value, width, false);
            row(panel, own, shape.branches[b], panel.base, kv_head);
        }
    }
};

// Call `use` for every cluster and kv head with the thread's buffers.
template <class Room, class F>
void for_each_cluster(const Shape& shape, F use) {
#pragma omp parallel
    {
        Room room;
#pragma omp for schedule(dynamic, 1)
        for (index_t task = 0; task < shape.count * shape.kv_heads; ++task)
            use(task / shape.kv_heads, task % shape.kv_heads, room);
    }
}

struct Room {
    Panel panel;
    Queries own;
};

template <class T>
void attention_forward(const Forward<T>& pass) {
    for_each_cluster<Room>(pass.shape, [&](index_t c, index_t head, Room& room) { pass.cluster(c, head, room.panel, room.own); });
}

// Probabilities (in `scores`) and gradients of the scores (in `slopes`) of a row's tokens from `at` on.
inline void slopes_of(const Shape& shape, const Panel& panel, Queries& own, index_t num_context, index_t at, const float* sums,
                      const float* shifts) {
    const index_t dim = shape.dim, room = panel.room;
    for (index_t i = 0; i < own.rows; i += BLOCK_ROWS) {
        const index_t keys = num_keys(num_context, at + i);
        float *scores = own.scores.data() + i * own.stride, *slopes = own.slopes.data() + i * own.stride;
        product(dim, own.query.data() + i * dim, dim, 1, panel.key_columns.data(), room, scores, own.stride, keys, false);
        product(dim, own.grads.data() + i * dim, dim, 1, panel.value_columns.data(), room, slopes, own.stride, keys,
                false);
        for (index_t r = 0; r < BLOCK_ROWS; ++r) {
            float *row = scores + r * own.stride, *slope = slopes + r * own.stride;
            panel.mask(row, num_context, at + i + r, keys, -INFINITY);
            const lanes top = broadcast(sums[i + r]), shift = broadcast(shifts[i + r]);
            for (index_t t = 0; t < keys; t += LANES) {
                const lanes probs = exponential(load(row + t) - top);
                store(probs, row + t);
                store(probs * (load(slope + t) - shift), slope + t);
            }
        }
    }
}

template <class T>
struct Backward {
    const Shape& shape;
    const T* states;
    const T* out;
    const float* sums;
    const T* grads;  // of `out`
    float* found;    // of `states`, [tokens, (heads + 2 kv_heads) dim]

    void queries(Panel& panel, Queries& own, index_t num_context, index_t at, index_t token, index_t head) const {
        const index_t dim = shape.dim, width = shape.width(), across = shape.heads * dim;
        const T *grad = grads + token * across + head * dim, *result = out + token * across + head * dim;
        load_scaled(states + token * width + head * dim, width, own.count, dim, shape.scale, own.query.data());
        load_scaled(grad, across, own.count, dim, 1.0f, own.grads.data());
        float tops[QUERIES] = {}, shifts[QUERIES] = {};
        for (index_t i = 0; i < own.count; ++i) {
            tops[i] = sums[(token + i) * shape.heads + head];
            lanes shift = {};
            for (index_t d = 0; d < dim; d += LANES)
                shift += load(own.grads.data() + i * dim + d) * load(result + i * across + d);
            shifts[i] = sum_of(shift);
        }
        slopes_of(shape, panel, own, num_context, at, tops, shifts);
        for (index_t i = 0; i < own.rows; i += BLOCK_ROWS) {
            product(num_keys(num_context, at + i), own.slopes.data() + i * own.stride, own.stride, 1, panel.keys.data(), dim,
                    own.out.data(), dim, dim, false);
            for (index_t r = 0; r < BLOCK_ROWS && i + r < own.count; ++r)
                load_scaled(own.out.data() + r * dim, dim, 1, dim, shape.scale,
                     found + (token + i + r) * width + head * dim);
        }
        // gradients of keys and values: context is visible to all queries, an own key to its query and later ones
        const index_t keys = num_keys(num_context, at + own.rows - BLOCK_ROWS);
        for (index_t j = 0; j < keys; j += BLOCK_ROWS) {
            const index_t first = std::max<index_t>(0, j - num_context - at), left = own.rows - first;
            product(left, own.scores.data() + first * own.stride + j, 1, own.stride, own.grads.data() + first * dim, dim,
                    panel.value_grads.data() + j * dim, dim, dim, true);
            product(left, own.slopes.data() + first * own.stride + j, 1, own.stride, own.query.data() + first * dim, dim,
                    panel.key_grads.data() + j * dim, dim, dim, true);
        }
    }

    void row(Panel& panel, Queries& own, Span span, index_t num_context, index_t kv_head) const {
        for (index_t g = 0; g < shape.group(); ++g)
            for (index_t at = 0; at < span.length; at += QUERIES) {
                own.size(std::min(QUERIES, span.length - at), shape.dim, panel.room, true);
                queries(panel, own, num_context, at, span.start + at, kv_head * shape.group() + g);
            }
    }

    // Store the panel's gradients of a span and reset them.
    void store_gradients(Panel& panel, Span span, index_t at, float* key, float* value, index_t stride, bool add) const {
        for (index_t t = 0; t < span.length; ++t)
            for (index_t d = 0; d < shape.dim; d += LANES) {
                float *from = panel.key_grads.data() + (at + t) * shape.dim + d,
                      *other = panel.value_grads.data() + (at + t) * shape.dim + d;
                float *to = key + (span.start + t) * stride + d, *too = value + (span.start + t) * stride + d;
                store(add ? load(to) + load(from) : load(from), to);
                store(add ? load(too) + load(other) : load(other), too);
                store(lanes{}, from);
                store(lanes{}, other);
            }
    }

    // `shared` accumulates the thread's gradients of the prefix's keys and values, [2, kv_heads, prefix, dim].
    void cluster(index_t c, index_t kv_head, Panel& panel, Queries& own, float* shared) const {
        const auto& cluster = shape.clusters[c];
        const index_t dim = shape.dim, width = shape.width();
        const T *key = states + (shape.heads + kv_head) * dim, *value = key + shape.kv_heads * dim;
        float *by_key = found + (shape.heads + kv_head) * dim, *by_value = by_key + shape.kv_heads * dim;
        panel.size(shape, cluster, c == 0, true);
        panel.put({0, panel.prefix}, 0, key, value, width, true);
        panel.put(cluster.stem, round_up(panel.prefix, LANES), key, value, width, true);
        row(panel, own, cluster.stem, round_up(panel.prefix, LANES), kv_head);
        for (index_t b = cluster.from; b < cluster.to; ++b) {
            panel.put(shape.branches[b], panel.base, key, value, width, true);
            row(panel, own, shape.branches[b], panel.base, kv_head);
            store_gradients(panel, shape.branches[b], panel.base, by_key, by_value, width, false);
        }
        store_gradients(panel, cluster.stem, round_up(panel.prefix, LANES), by_key, by_value, width, false);
        float* mine = shared + kv_head * shape.prefix * dim;
        store_gradients(panel, {0, panel.prefix}, 0, mine, mine + shape.kv_heads * shape.prefix * dim, dim, true);
    }
};

// As `for_each_cluster`, with per-thread gradients of the prefix that are summed at the end.
template <class Room, class F>
void for_each_cluster_backward(const Shape& shape, float* found, F use) {
    const index_t part = shape.kv_heads * shape.prefix * shape.dim, width = shape.width();
    std::vector<float> shared;
#pragma omp parallel
    {
        Room room;
#pragma omp single
        shared.assign(2 * part * omp_get_num_threads(), 0.0f);
#pragma omp for schedule(static, 1)
        for (index_t task = 0; task < shape.count * shape.kv_heads; ++task)
            use(task / shape.kv_heads, task % shape.kv_heads, room, shared.data() + 2 * part * omp_get_thread_num());
    }
    if (!part) return;
    for (index_t place = 0; place < index_t(shared.size()); ++place) {
        const index_t inner = place % (2 * part), token = inner / shape.dim % shape.prefix,
                      head = inner / (shape.dim * shape.prefix);
        found[token * width + (shape.heads + head) * shape.dim + inner % shape.dim] += shared[place];
    }
}

template <class T>
void attention_backward(const Backward<T>& pass) {
    for_each_cluster_backward<Room>(pass.shape, pass.found, [&](index_t c, index_t head, Room& room, float* shared) {
        pass.cluster(c, head, room.panel, room.own, shared);
    });
}

}  // namespace

#include "tiles.hpp"
#include "tile_sums.hpp"

namespace {

#ifdef QUINTET_TILES
template <bool Back>
struct Tiles : TileRoom {
    Tiles() : TileRoom(Back) { open_tiles(); }
    ~Tiles() { _tile_release(); }
};

template <>
void attention_forward(const Forward<bfloat16>& pass) {
    const auto& shape = pass.shape;
    if (shape.dim % 32 || !tiles_allowed()) {
        for_each_cluster<Room>(shape, [&](index_t c, index_t head, Room& room) { pass.cluster(c, head, room.panel, room.own); });
        return;
    }
    const TileForward tiled{shape, pass.states, pass.out, pass.sums};
    for_each_cluster<Tiles<false>>(shape, [&](index_t c, index_t head, TileRoom& room) { tiled.cluster(c, head, room); });
}
template <>
void attention_backward(const Backward<bfloat16>& pass) {
    const auto& shape = pass.shape;
    if (shape.dim % 32 || !tiles_allowed()) {
        for_each_cluster_backward<Room>(shape, pass.found, [&](index_t c, index_t head, Room& room, float* shared) {
            pass.cluster(c, head, room.panel, room.own, shared);
        });
        return;
    }
    const TileBackward tiled{shape, pass.states, pass.out, pass.sums, pass.grads, pass.found};
    for_each_cluster_backward<Tiles<true>>(shape, pass.found, [&](index_t c, index_t head, TileRoom& room, float* shared) {
        tiled.cluster(c, head, room, shared);
    });
}
#endif

// ---------------------------------------------------------------------------------------------------------------------
// Row-wise kernels.

// out = weight · x / rms(x) with x = states (+ other), stored in `summed`; `scales` [rows] are 1 / rms.
template <class T>
void rms_norm_forward(index_t rows, index_t width, const float* states, const T* other, const float* weight, float eps,
                  float* summed, T* out, float* scales) {
#pragma omp parallel for schedule(static)
    for (index_t row = 0; row < rows; ++row) {
        const float* x = states + row * width;
        T* y = out + row * width;
        if (other) {
            const T* m = other + row * width;
            float* sum = summed + row * width;
#pragma omp simd
            for (index_t d = 0; d < width; ++d) sum[d] = x[d] + to_float(m[d]);
            x = sum;
        }
        float square = 0;
#pragma omp simd reduction(+ : square)
        for (index_t d = 0; d < width; ++d) square += x[d] * x[d];
        const float scale = 1.0f / std::sqrt(square / float(width) + eps);
        scales[row] = scale;
#pragma omp simd
        for (index_t d = 0; d < width; ++d) from_float(x[d] * scale * weight[d], y[d]);
    }
}

// Gradient of the states plus `before`, also as T if `narrowed` is not null, and gradient of the weight.
template <class T>
void rms_norm_backward(index_t rows, index_t width, const T* grad, const float* states, const float* weight,
                   const float* scales, const float* before, float* states_grad, T* narrowed, float* weight_grad) {
    std::vector<float> parts;
    index_t threads = 1;
#pragma omp parallel
    {
#pragma omp single
        {
            threads = omp_get_num_threads();
            parts.assign(threads * width, 0.0f);
        }
        float* part = parts.data() + omp_get_thread_num() * width;
        const ThreadRange share(rows);
        for (index_t row = share.from; row < share.to; ++row) {
            const T* g = grad + row * width;
            const float *x = states + row * width, *b = before ? before + row * width : nullptr, scale = scales[row];
            float* out = states_grad + row * width;
            float along = 0;
#pragma omp simd reduction(+ : along)
            for (index_t d = 0; d < width; ++d) along += to_float(g[d]) * weight[d] * x[d];
            along *= scale * scale / float(width);
#pragma omp simd
            for (index_t d = 0; d < width; ++d) {
                part[d] += to_float(g[d]) * x[d] * scale;
                out[d] = (b ? b[d] : 0.0f) + scale * (to_float(g[d]) * weight[d] - x[d] * along);
            }
            if (narrowed)
#pragma omp simd
                for (index_t d = 0; d < width; ++d) from_float(out[d], narrowed[row * width + d]);
        }
    }
    for (index_t d = 0; d < width; ++d) {
        float sum = 0;
        for (index_t t = 0; t < threads; ++t) sum += parts[t * width + d];
        weight_grad[d] = sum;
    }
}

// Rotary embeddings of the first `heads` heads of each row, in place; `cosine` and `sine` are [rows, dim].
template <class T>
void rotary_forward(index_t rows, index_t heads, index_t dim, T* x, index_t stride, const float* cosine,
                  const float* sine) {
    const index_t half = dim / 2;
#pragma omp parallel for schedule(static)
    for (index_t row = 0; row < rows; ++row) {
        const float *c = cosine + row * dim, *s = sine + row * dim;
        for (index_t head = 0; head < heads; ++head) {
            T *first = x + row * stride + head * dim, *second = first + half;
#pragma omp simd
            for (index_t d = 0; d < half; ++d) {
                const float a = to_float(first[d]), b = to_float(second[d]);
                from_float(a * c[d] - b * s[d], first[d]);
                from_float(b * c[d + half] + a * s[d + half], second[d]);
            }
        }
    }
}

// Backward of `rotary_forward`: gradient of the input from `grad` [rows, width], and its sum over rows.
template <class T>
void rotary_backward(index_t rows, index_t heads, index_t dim, index_t width, const float* grad, const float* cosine,
                   const float* sine, T* out, float* bias_grad) {
    const index_t half = dim / 2;
    std::vector<float> parts;
    index_t threads = 1;
#pragma omp parallel
    {
#pragma omp single
        {
            threads = omp_get_num_threads();
            parts.assign(threads * width, 0.0f);
        }
        float* part = parts.data() + omp_get_thread_num() * width;
        const ThreadRange share(rows);
        for (index_t row = share.from; row < share.to; ++row) {
            const float *c = cosine + row * dim, *s = sine + row * dim, *g = grad + row * width;
            T* to = out + row * width;
            for (index_t head = 0; head < heads; ++head) {
                const index_t at = head * dim;
#pragma omp simd
                for (index_t d = 0; d < half; ++d) {
                    const float first = g[at + d], second = g[at + d + half];
                    const float a = first * c[d] + second * s[d + half], b = second * c[d + half] - first * s[d];
                    part[at + d] += a;
                    part[at + d + half] += b;
                    from_float(a, to[at + d]);
                    from_float(b, to[at + d + half]);
                }
            }
#pragma omp simd
            for (index_t d = heads * dim; d < width; ++d) {
                part[d] += g[d];
                from_float(g[d], to[d]);
            }
        }
    }
    for (index_t d = 0; d < width; ++d) {
        float sum = 0;
        for (index_t t = 0; t < threads; ++t) sum += parts[t * width + d];
        bias_grad[d] = sum;
    }
}

// silu(gate) · up of rows [gate, up].
template <class T>
void silu_mul_forward(index_t rows, index_t width, const T* gate_up, T* out) {
#pragma omp parallel for schedule(static)
    for (index_t row = 0; row < rows; ++row) {
        const T *gate = gate_up + row * 2 * width, *side = gate + width;
        T* y = out + row * width;
        index_t d = 0;
        for (; d + LANES <= width; d += LANES) {
            const lanes g = load(gate + d);
            store(g * reciprocal(exponential(-g) + 1.0f) * load(side + d), y + d);
        }
        for (; d < width; ++d) {
            const float g = to_float(gate[d]);
            from_float(g / (exponential(-g) + 1.0f) * to_float(side[d]), y[d]);
        }
    }
}

// Gradients [gate, up], and the recomputed output.
template <class T>
void silu_mul_backward(index_t rows, index_t width, const T* gate_up, const T* grad, T* found, T* out) {
#pragma omp parallel for schedule(static)
    for (index_t row = 0; row < rows; ++row) {
        const T *gate = gate_up + row * 2 * width, *side = gate + width, *slope = grad + row * width;
        T *by_gate = found + row * 2 * width, *by_side = by_gate + width, *y = out + row * width;
        index_t d = 0;
        for (; d + LANES <= width; d += LANES) {
            const lanes g = load(gate + d), u = load(side + d), s = load(slope + d);
            const lanes chance = reciprocal(exponential(-g) + 1.0f), silu = g * chance;
            store(s * u * (chance + silu * (1.0f - chance)), by_gate + d);
            store(s * silu, by_side + d);
            store(silu * u, y + d);
        }
        for (; d < width; ++d) {
            const float g = to_float(gate[d]), u = to_float(side[d]), s = to_float(slope[d]);
            const float chance = 1.0f / (exponential(-g) + 1.0f), silu = g * chance;
            from_float(s * u * (chance + silu * (1.0f - chance)), by_gate[d]);
            from_float(s * silu, by_side[d]);
            from_float(silu * u, y[d]);
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Log-probs and entropies from logits.

template <class F>
inline void for_each_vector(index_t count, F use) {
    index_t i = 0;
    for (; i + LANES <= count; i += LANES) use(i, LANES);
    if (i < count) use(i, count - i);
}
template <class T>
inline lanes load_partial(const T* x, index_t count, float otherwise) {
    if (count == LANES) return load(x);
    float y[LANES];
    store(broadcast(otherwise), y);
    for (index_t i = 0; i < count; ++i) y[i] = to_float(x[i]);
    return load(y);
}
template <class T>
inline void store_partial(lanes x, T* y, index_t count) {
    if (count == LANES) return store(x, y);
    float numbers[LANES];
    store(x, numbers);
    for (index_t i = 0; i < count; ++i) from_float(numbers[i], y[i]);
}

// Per row of logits times `inverse_temperature`: log-prob of the target, entropy, log-sum-exp and sum of squared
// probabilities.
template <class T>
void token_statistics_forward(index_t rows, index_t vocabulary, const T* logits, float inverse_temperature, const index_t* targets,
                     float* logprobs, float* entropy, float* sums, float* squares) {
#pragma omp parallel for schedule(static)
    for (index_t row = 0; row < rows; ++row) {
        const T* x = logits + row * vocabulary;
        lanes high = broadcast(-INFINITY);
        for_each_vector(vocabulary, [&](index_t i, index_t count) {
            const lanes other = load_partial(x + i, count, -INFINITY);
            high = max_lanes(high, other);
        });
        const float top = max_of(high) * inverse_temperature;
        lanes sum = {}, along = {}, square = {};
        for_each_vector(vocabulary, [&](index_t i, index_t count) {
            const lanes z = load_partial(x + i, count, -INFINITY) * inverse_temperature - top;
            const lanes probs = exponential(z);
            sum += probs;
            // a logit of minus infinity has probability 0 and contributes nothing
            along += select(probs > 0.0f, probs * z, lanes{});
            square += probs * probs;
        });
        const float total = sum_of(sum), log_total = std::log(total);
        logprobs[row] = to_float(x[targets[row]]) * inverse_temperature - top - log_total;
        entropy[row] = log_total - sum_of(along) / total;
        sums[row] = top + log_total;
        squares[row] = sum_of(square) / (total * total);
    }
}

// Overwrite logits with their gradient, given those of log-prob and entropy.
template <class T>
void token_statistics_backward(index_t rows, index_t vocabulary, T* logits, float inverse_temperature, const index_t* targets,
                      const float* sums, const float* entropy, const float* logprob_grad, const float* entropy_grad) {
#pragma omp parallel for schedule(static)
    for (index_t row = 0; row < rows; ++row) {
        T* x = logits + row * vocabulary;
        const float first = logprob_grad[row] * inverse_temperature, second = entropy_grad[row] * inverse_temperature;
        const float log_total = sums[row], spread = entropy[row];
        const float own = to_float(x[targets[row]]) * inverse_temperature - log_total;
        for_each_vector(vocabulary, [&](index_t i, index_t count) {
            const lanes z = load_partial(x + i, count, -INFINITY) * inverse_temperature - log_total;
            const lanes probs = exponential(z);
            const lanes slope = second == 0.0f ? lanes{} : (z + spread) * second;
            store_partial(select(probs > 0.0f, -probs * (slope + first), lanes{}), x + i, count);
        });
        from_float(first - std::exp(own) * ((second == 0.0f ? 0.0f : (own + spread) * second) + first), x[targets[row]]);
    }
}

Shape shape_of(const index_t* descriptor, float scale) {
    const index_t count = descriptor[4];
    const auto* clusters = reinterpret_cast<const Cluster*>(descriptor + 6);
    return {descriptor[0], descriptor[1], descriptor[2], descriptor[3], clusters, count, reinterpret_cast<const Span*>(descriptor + 6 + 4 * count),
            scale};
}

}  // namespace

#define DEFINE_KERNELS(TYPE, NAME)                                                                                    \
    void attention_forward_##NAME(const index_t* descriptor, float scale, const TYPE* states, TYPE* out, float* sums) {\
        const Shape shape = shape_of(descriptor, scale);                                                              \
        attention_forward<TYPE>({shape, states, out, sums});                                                          \
    }                                                                                                                 \
    void attention_backward_##NAME(const index_t* descriptor, float scale, const TYPE* states, const TYPE* out,       \
                                const float* sums, const TYPE* grads, float* found) {                                 \
        const Shape shape = shape_of(descriptor, scale);                                                              \
        attention_backward<TYPE>({shape, states, out, sums, grads, found});                                           \
    }                                                                                                                 \
    void rms_norm_forward_##NAME(index_t rows, index_t width, const float* states, const TYPE* other, const float* weight,\
                             float eps, float* summed, TYPE* out, float* scales) {                                    \
        rms_norm_forward(rows, width, states, other, weight, eps, summed, out, scales);                               \
    }                                                                                                                 \
    void rms_norm_backward_##NAME(index_t rows, index_t width, const TYPE* grad, const float* states,                 \
                              const float* weight, const float* scales, const float* before, float* states_grad,      \
                              TYPE* narrowed, float* weight_grad) {                                                   \
        rms_norm_backward(rows, width, grad, states, weight, scales, before, states_grad, narrowed, weight_grad);     \
    }                                                                                                                 \
    void rotary_forward_##NAME(index_t rows, index_t heads, index_t dim, TYPE* x, index_t stride, const float* cosine,\
                             const float* sine) {                                                                     \
        rotary_forward(rows, heads, dim, x, stride, cosine, sine);                                                    \
    }                                                                                                                 \
    void rotary_backward_##NAME(index_t rows, index_t heads, index_t dim, index_t width, const float* grad,           \
                              const float* cosine, const float* sine, TYPE* out, float* bias_grad) {                  \
        rotary_backward(rows, heads, dim, width, grad, cosine, sine, out, bias_grad);                                 \
    }                                                                                                                 \
    void silu_mul_forward_##NAME(index_t rows, index_t width, const TYPE* gate_up, TYPE* out) {                       \
        silu_mul_forward(rows, width, gate_up, out);                                                                  \
    }                                                                                                                 \
    void silu_mul_backward_##NAME(index_t rows, index_t width, const TYPE* gate_up, const TYPE* grad, TYPE* found,    \
                              TYPE* out) {                                                                            \
        silu_mul_backward(rows, width, gate_up, grad, found, out);                                                    \
    }                                                                                                                 \
    void token_statistics_forward_##NAME(index_t rows, index_t vocabulary, const TYPE* logits, float inverse_temperature,\
                                const index_t* targets, float* logprobs, float* entropy, float* sums,                 \
                                float* squares) {                                                                     \
        token_statistics_forward(rows, vocabulary, logits, inverse_temperature, targets, logprobs, entropy, sums, squares);\
    }                                                                                                                 \
    void token_statistics_backward_##NAME(index_t rows, index_t vocabulary, TYPE* logits, float inverse_temperature,  \
                                 const index_t* targets, const float* sums, const float* entropy,                     \
                                 const float* logprob_grad, const float* entropy_grad) {                              \
        token_statistics_backward(rows, vocabulary, logits, inverse_temperature, targets, sums, entropy, logprob_grad, entropy_grad);\
    }

extern "C" {
DEFINE_KERNELS(float, float32)
DEFINE_KERNELS(bfloat16, bfloat16)

int weight_gradient_bfloat16(index_t rows, index_t out, index_t in, const bfloat16* left, const bfloat16* right,
                               float* found) {
    return weight_gradient(rows, out, in, left, right, found);
}
}
