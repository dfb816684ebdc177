// Kernels of a decode step except its matrix products, each in one pass over its data.
//
// All functions process independent rows in threads of torch's OpenMP library. Numbers are float32, or bfloat16 that is
// computed in float32 and rounded where torch's own modules round.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "vectors.hpp"

namespace {

// Keys and values of a layer in blocks of `size` tokens, [kv_heads, size, dim] each, `block_stride` numbers apart. Token i
// attends to the first `length[i]` positions of the blocks in row `row[i]` of the block tables.
template <class T>
struct Blocks {
    T* keys;
    T* values;
    index_t block_stride, size, dim;
    const int32_t* tables;
    index_t table_stride;
    const index_t* row;
    const index_t* length;

    Blocks(const index_t* fields, index_t dim)
        : keys(reinterpret_cast<T*>(fields[0])), values(reinterpret_cast<T*>(fields[1])), block_stride(fields[2]),
          size(fields[3]), dim(dim), tables(reinterpret_cast<const int32_t*>(fields[4])), table_stride(fields[5]),
          row(reinterpret_cast<const index_t*>(fields[6])), length(reinterpret_cast<const index_t*>(fields[7])) {}

    const int32_t* table(index_t token) const { return tables + row[token] * table_stride; }
    index_t offset(index_t block, index_t head) const { return block * block_stride + head * size * dim; }
};

constexpr int MAX_QUERIES = 4;

// Prefetch a cache line into L2: the data per token and head is too short for the hardware prefetcher.
inline void prefetch(const void* address) { __builtin_prefetch(address, 0, 2); }

// Q queries of dimension 16 · C, in the form in which their products with keys are accumulated.
template <class T, int Q, int C>
struct Queries {
    static constexpr index_t dim = C * LANES;
    static constexpr float output_scale = 1.0f;  // factor of the sums
    float values_[Q * dim];

    Queries(const T* query, index_t stride, float scale) {
        for (int q = 0; q < Q; ++q)
            for (index_t d = 0; d < dim; ++d) values_[q * dim + d] = to_float(query[q * stride + d]) * scale;
    }
    // Accumulate 16 partial sums of the product with a key for each query.
    void add(const T* key, lanes* sums, index_t side) const {
#pragma GCC unroll 8
        for (index_t c = 0; c < C; ++c) {
            const lanes part = load(key + c * LANES);
#pragma GCC unroll 4
            for (index_t q = 0; q < Q; ++q) sums[q * side] += load(values_ + q * dim + c * LANES) * part;
        }
    }
};
#ifdef __AVX512BF16__
// Products of pairs of bfloat16, accumulated in float32.
template <int Q, int C>
struct PairedQueries {
    const float output_scale;
    __m512bh values_[Q][C / 2];

    PairedQueries(const bfloat16* query, index_t stride, float scale) : output_scale(scale) {
        for (int q = 0; q < Q; ++q)
            for (index_t c = 0; c < C / 2; ++c) std::memcpy(&values_[q][c], query + q * stride + c * 2 * LANES, 64);
    }
    void add(const bfloat16* key, lanes* sums, index_t side) const {
#pragma GCC unroll 4
        for (index_t c = 0; c < C / 2; ++c) {
            __m512bh part;
            std::memcpy(&part, key + c * 2 * LANES, 64);
#pragma GCC unroll 4
            for (index_t q = 0; q < Q; ++q)
                sums[q * side] = (lanes)_mm512_dpbf16_ps((__m512)sums[q * side], values_[q][c], part);
        }
    }
};
template <int Q>
struct Queries<bfloat16, Q, 2> : PairedQueries<Q, 2> {
    using PairedQueries<Q, 2>::PairedQueries;
};
template <int Q>
struct Queries<bfloat16, Q, 4> : PairedQueries<Q, 4> {
    using PairedQueries<Q, 4>::PairedQueries;
};
template <int Q>
struct Queries<bfloat16, Q, 8> : PairedQueries<Q, 8> {
    using PairedQueries<Q, 8>::PairedQueries;
};
#endif

// Scores of Q queries of dimension 16 · C for `length` keys, rounded up to a multiple of 16, which the size of a block
// is. 16 sums at a time are reduced together. `prefetch_from` is read next.
template <class T, int Q, int C>
void compute_scores(const Queries<T, Q, C>& queries, const T* keys, const T* prefetch_from, index_t length,
                    float* scores, index_t stride) {
    constexpr index_t dim = C * LANES, side = Q == 1 ? 16 : Q == 2 ? 8 : 4;
    for (index_t start = 0; start < length; start += side) {
        const T* key = keys + start * dim;
        lanes sums[LANES] = {};
#pragma GCC unroll 16
        for (index_t t = 0; t < side; ++t) {
#pragma GCC unroll 8
            for (index_t c = 0; c < C; ++c) prefetch(prefetch_from + (start + t) * dim + c * LANES);
            queries.add(key + t * dim, sums + t, side);
        }
        const lanes result = sums_of(sums) * queries.output_scale;
        for (index_t q = 0; q < Q; ++q)
            std::memcpy(scores + q * stride + start, reinterpret_cast<const float*>(&result) + q * side,
                        side * sizeof(float));
    }
}

// Add `length` weighted values to the outputs of Q queries.
template <class T, int Q, int C>
void add_weighted_values(const float* weights, index_t stride, const T* values, const T* prefetch_from, index_t length,
                         lanes (*out)[C]) {
    for (index_t t = 0; t < length; ++t)
        for (int c = 0; c < C; ++c) {
            prefetch(prefetch_from + (t * C + c) * LANES);
            const lanes value = load(values + (t * C + c) * LANES);
            for (int q = 0; q < Q; ++q) out[q][c] += weights[q * stride + t] * value;
        }
}

// Softmax in place without the division; returns the sum. `scores` must have space for 16 more.
inline float exponentials(float* scores, index_t count) {
    store(broadcast(-INFINITY), scores + count);
    lanes max_score = load(scores), sum = {};
    for (index_t t = LANES; t < count; t += LANES) {
        const lanes more = load(scores + t);
        max_score = max_lanes(max_score, more);
    }
    const lanes max_all = broadcast(max_of(max_score));
    for (index_t t = 0; t < count; t += LANES) {
        const lanes probs = exponential(load(scores + t) - max_all);
        store(probs, scores + t);
        sum += probs;
    }
    return sum_of(sum);
}

// Keys and values of one token and kv head, and the next token and head, for prefetching.
template <class T>
struct TokenContext {
    const Blocks<T>& blocks;
    index_t token, head, next_token, next_head, total;

    // Call `use(keys, values, next_keys, length, at)` for each block, whose first position is `at`.
    template <class Use>
    void for_each_block(const Use& use) const {
        const int32_t *table = blocks.table(token), *next_table = blocks.table(next_token);
        const index_t next_last = (blocks.length[next_token] - 1) / blocks.size;
        for (index_t at = 0, i = 0; at < total; at += blocks.size, ++i) {
            const index_t offset = blocks.offset(table[i], head);
            const index_t next = blocks.offset(next_table[i < next_last ? i : next_last], next_head);
            const index_t left = total - at;
            use(blocks.keys + offset, blocks.values + offset, blocks.keys + next, left < blocks.size ? left : blocks.size,
                at);
        }
    }
};

// Attention of Q queries of dimension 16 · C.
template <class T, int Q, int C>
void attention_queries(const TokenContext<T>& context, const T* query, index_t query_stride, float scale, T* out,
                       std::vector<float>& scratch) {
    constexpr index_t dim = C * LANES;
    const index_t stride = context.total + LANES;
    const Queries<T, Q, C> queries(query, query_stride, scale);
    scratch.resize(Q * stride);
    float* scores = scratch.data();
    context.for_each_block([&](const T* keys, const T* values, const T*, index_t length, index_t at) {
        compute_scores<T, Q, C>(queries, keys, values, length, scores + at, stride);
    });
    float sums[Q];
    for (int q = 0; q < Q; ++q) sums[q] = exponentials(scores + q * stride, context.total);
    lanes mixed[Q][C] = {};
    context.for_each_block([&](const T*, const T* values, const T* next, index_t length, index_t at) {
        add_weighted_values<T, Q, C>(scores + at, stride, values, next, length, mixed);
    });
    for (int q = 0; q < Q; ++q)
        for (int c = 0; c < C; ++c) store(mixed[q][c] * (1.0f / sums[q]), out + q * dim + c * LANES);
}

// Attention of one query of any dimension.
template <class T>
void attention_one_query(const TokenContext<T>& context, index_t dim, const T* query, float scale, T* out,
                         std::vector<float>& scratch) {
    scratch.resize(context.total + LANES + dim);
    float *scores = scratch.data(), *mixed = scores + context.total + LANES;
    context.for_each_block([&](const T* keys, const T*, const T*, index_t length, index_t at) {
        for (index_t t = 0; t < length; ++t) {
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (index_t d = 0; d < dim; ++d) sum += to_float(query[d]) * scale * to_float(keys[t * dim + d]);
            scores[at + t] = sum;
        }
    });
    const float sum = exponentials(scores, context.total);
    for (index_t d = 0; d < dim; ++d) mixed[d] = 0;
    context.for_each_block([&](const T*, const T* values, const T*, index_t length, index_t at) {
        for (index_t t = 0; t < length; ++t)
#pragma omp simd
            for (index_t d = 0; d < dim; ++d) mixed[d] += scores[at + t] * to_float(values[t * dim + d]);
    });
    for (index_t d = 0; d < dim; ++d) from_float(mixed[d] / sum, out[d]);
}

// Attention of all query heads of one kv head.
template <class T, int C>
void attention_group(const TokenContext<T>& context, index_t dim, index_t group, const T* query, index_t stride, float scale,
                     T* out, std::vector<float>& scratch) {
    for (index_t q = 0; q < group; q += MAX_QUERIES, query += MAX_QUERIES * stride, out += MAX_QUERIES * dim) {
        if constexpr (C == 0) {
            for (index_t i = 0; i < MAX_QUERIES && q + i < group; ++i)
                attention_one_query(context, dim, query + i * stride, scale, out + i * dim, scratch);
        } else {
            const index_t left = group - q;
            const auto run = left == 1   ? attention_queries<T, 1, C>
                             : left == 2 ? attention_queries<T, 2, C>
                             : left == 3 ? attention_queries<T, 3, C>
                                         : attention_queries<T, MAX_QUERIES, C>;
            run(context, query, stride, scale, out, scratch);
        }
    }
}

// Queries, keys or values of new tokens, with strides of tokens and heads.
template <class T>
struct Rows {
    const T* data;
    index_t token_stride, head_stride;

    const T* at(index_t token, index_t head) const { return data + token * token_stride + head * head_stride; }
};

template <class T>
struct Call {
    index_t tokens, heads, kv_heads, dim;
    Rows<T> query, key, value;
    float scale;
    Blocks<T> blocks;
    const index_t* order;
    T* out;

    // Tokens with the same keys and values next to each other: without an order those of one head, so that these stay in
    // the cache.
    index_t token(index_t task) const { return order ? order[task / kv_heads] : task % tokens; }
    index_t kv_head(index_t task) const { return order ? task % kv_heads : task / tokens; }

    // Write a token's key and value to the last position to which it attends.
    void put(index_t token, index_t head) const {
        const index_t position = blocks.length[token] - 1, block = blocks.table(token)[position / blocks.size];
        const index_t offset = blocks.offset(block, head) + position % blocks.size * dim;
        std::memcpy(blocks.keys + offset, key.at(token, head), dim * sizeof(T));
        std::memcpy(blocks.values + offset, value.at(token, head), dim * sizeof(T));
    }
};

template <class T, int C>
void attention_all(const Call<T>& call, bool put) {
    const index_t kv_heads = call.kv_heads, group = call.heads / kv_heads;
#pragma omp parallel if (call.tokens * call.heads > 16)
    {
        std::vector<float> scratch;
#pragma omp for schedule(dynamic, 16)
        for (index_t task = 0; task < call.tokens * kv_heads; ++task) {
            const index_t next = task + 1 < call.tokens * kv_heads ? task + 1 : task;
            const index_t token = call.token(task), head = call.kv_head(task);
            if (put) call.put(token, head);
            const index_t total = call.blocks.length[token];
            attention_group<T, C>({call.blocks, token, head, call.token(next), call.kv_head(next), total}, call.dim, group,
                                  call.query.at(token, head * group), call.query.head_stride, call.scale,
                                  call.out + (token * call.heads + head * group) * call.dim, scratch);
        }
    }
}

// `order` [tokens] puts tokens with the same blocks next to each other and implies that no token attends to another new
// one. Without an order, all keys and values are written first.
template <class T>
void attention(const Call<T>& call) {
    if (!call.order) {
#pragma omp parallel for schedule(static) if (call.tokens * call.kv_heads * call.dim > 4096)
        for (index_t task = 0; task < call.tokens * call.kv_heads; ++task)
            call.put(task / call.kv_heads, task % call.kv_heads);
    }
    const auto run = call.dim == 16    ? attention_all<T, 1>
                     : call.dim == 32  ? attention_all<T, 2>
                     : call.dim == 64  ? attention_all<T, 4>
                     : call.dim == 128 ? attention_all<T, 8>
                                       : attention_all<T, 0>;
    run(call, call.order != nullptr);
}

template <class T>
void rms_norm(index_t rows, index_t parts, index_t width, const T* in, index_t in_stride, const T* weight, float eps, T* out,
          index_t out_stride) {
#pragma omp parallel for schedule(static) if (rows * parts * width > 8192)
    for (index_t task = 0; task < rows * parts; ++task) {
        const index_t row = task / parts, part = task % parts;
        const T* x = in + row * in_stride + part * width;
        T* y = out + row * out_stride + part * width;
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (index_t d = 0; d < width; ++d) sum += to_float(x[d]) * to_float(x[d]);
        const float scale = 1.0f / std::sqrt(sum / float(width) + eps);
#pragma omp simd
        for (index_t d = 0; d < width; ++d) from_float(rounded<T>(to_float(x[d]) * scale) * to_float(weight[d]), y[d]);
    }
}

template <class T>
void rotary(index_t rows, index_t heads, index_t dim, T* x, index_t stride, const T* cosine, const T* sine) {
    const index_t half = dim / 2;
#pragma omp parallel for schedule(static) if (rows * heads * dim > 8192)
    for (index_t row = 0; row < rows; ++row) {
        const T *c = cosine + row * dim, *s = sine + row * dim;
        for (index_t head = 0; head < heads; ++head) {
            T *first = x + row * stride + head * dim, *second = first + half;
#pragma omp simd
            for (index_t d = 0; d < half; ++d) {
                const float a = to_float(first[d]), b = to_float(second[d]);
                from_float(a * to_float(c[d]) - b * to_float(s[d]), first[d]);
                from_float(b * to_float(c[d + half]) + a * to_float(s[d + half]), second[d]);
            }
        }
    }
}

// silu(gate) · up of rows [gate, up].
template <class T>
void silu_mul(index_t rows, index_t width, const T* gate_up, T* out) {
#pragma omp parallel for schedule(static) if (rows * width > 8192)
    for (index_t row = 0; row < rows; ++row) {
        const T *x = gate_up + row * 2 * width, *up = x + width;
        T* y = out + row * width;
        index_t i = 0;
        for (; i + LANES <= width; i += LANES) {
            const lanes g = load(x + i);
            store(g * reciprocal(exponential(-g) + 1.0f), y + i);
            store(load(y + i) * load(up + i), y + i);
        }
        for (; i < width; ++i) {
            const float g = to_float(x[i]);
            from_float(rounded<T>(g / (exponential(-g) + 1.0f)) * to_float(up[i]), y[i]);
        }
    }
}

constexpr index_t BLOCK = 64;

// Overwrite a block's logits with e^(logit / temperature - max_score); returns their sum.
inline float block_probs(float* x, index_t count, float temperature, float max_score) {
    if (count < BLOCK) {
        float sum = 0;
        for (index_t i = 0; i < count; ++i) sum += x[i] = exponential(x[i] / temperature - max_score);
        return sum;
    }
    lanes sum = {};
    for (index_t i = 0; i < BLOCK; i += LANES) {
        const lanes logits = temperature == 1 ? load(x + i) : load(x + i) / temperature;
        const lanes probs = exponential(logits - max_score);
        store(probs, x + i);
        sum += probs;
    }
    return sum_of(sum);
}

// Maximum; NaN counts only in the first position.
inline float maximum(const float* x, index_t count) {
    lanes max_score = broadcast(x[0]);
    index_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        const lanes more = load(x + i);
        max_score = max_lanes(max_score, more);
    }
    float result = max_of(max_score);
    for (; i < count; ++i) result = x[i] > result ? x[i] : result;
    return result;
}

// First token at which the cumulative sum of `probs` exceeds `threshold`, but never one with probability 0.
inline index_t find_token(const float* probs, const std::vector<double>& sums, index_t vocabulary, double threshold) {
    index_t block = 0;
    const index_t blocks = index_t(sums.size());
    double before = 0;
    while (block + 1 < blocks && before + sums[block] <= threshold) before += sums[block++];
    index_t result = block * BLOCK;
    const index_t end = result + BLOCK < vocabulary ? result + BLOCK : vocabulary;
    for (index_t i = result; i < end; ++i) {
        if (probs[i] > 0) result = i;
        before += probs[i];
        if (before > threshold) break;
    }
    return result;
}

void sample(index_t rows, index_t vocabulary, float* logits, const float* temperature, const double* uniforms,
          index_t* tokens, float* logprobs, double* totals) {
#pragma omp parallel if (rows * vocabulary > 16384)
    {
        std::vector<double> sums((vocabulary + BLOCK - 1) / BLOCK);
#pragma omp for schedule(static)
        for (index_t row = 0; row < rows; ++row) {
            float* x = logits + row * vocabulary;
            const float divisor = temperature[row] == 0 ? 1.0f : temperature[row];
            const float max_score = maximum(x, vocabulary);
            index_t best = 0;
            if (temperature[row] == 0)
                while (best + 1 < vocabulary && x[best] != max_score) ++best;
            double total = 0;
            for (index_t block = 0; block < index_t(sums.size()); ++block) {
                const index_t left = vocabulary - block * BLOCK;
                sums[block] = block_probs(x + block * BLOCK, left < BLOCK ? left : BLOCK, divisor, max_score / divisor);
                total += sums[block];
            }
            const index_t token = temperature[row] == 0 ? best : find_token(x, sums, vocabulary, uniforms[row] * total);
            tokens[row] = token;
            // NaN if a logit is NaN
            totals[row] = total;
            logprobs[row] = float(std::log(double(x[token])) - std::log(total));
        }
    }
}

}  // namespace

#define DEFINE_KERNELS(TYPE, NAME)                                                                                    \
    void attention_##NAME(index_t tokens, index_t heads, index_t kv_heads, index_t dim, const TYPE* query,            \
                       const TYPE* key, const TYPE* value, const index_t* strides, float scale, const index_t* fields,\
                       const index_t* order, TYPE* out) {                                                             \
        attention<TYPE>({tokens, heads, kv_heads, dim, {query, strides[0], strides[1]}, {key, strides[2], strides[3]},\
                      {value, strides[4], strides[5]}, scale, {fields, dim}, order, out});                            \
    }                                                                                                                 \
    void rms_norm_##NAME(index_t rows, index_t parts, index_t width, const TYPE* in, index_t in_stride,               \
                     const TYPE* weight, float eps, TYPE* out, index_t out_stride) {                                  \
        rms_norm(rows, parts, width, in, in_stride, weight, eps, out, out_stride);                                    \
    }                                                                                                                 \
    void rotary_##NAME(index_t rows, index_t heads, index_t dim, TYPE* x, index_t stride, const TYPE* cosine,         \
                     const TYPE* sine) {                                                                              \
        rotary(rows, heads, dim, x, stride, cosine, sine);                                                            \
    }                                                                                                                 \
    void silu_mul_##NAME(index_t rows, index_t width, const TYPE* gate_up, TYPE* out) { silu_mul(rows, width, gate_up, out); }

extern "C" {
DEFINE_KERNELS(float, float32)
DEFINE_KERNELS(bfloat16, bfloat16)

void sample_float32(index_t rows, index_t vocabulary, float* logits, const float* temperature, const double* uniforms,
                  index_t* tokens, float* logprobs, double* totals) {
    sample(rows, vocabulary, logits, temperature, uniforms, tokens, logprobs, totals);
}
}
