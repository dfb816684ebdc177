// What a decoding step does besides its matrix products, each in one pass over its data.
//
// Every function works on rows that don't depend on each other, in threads of the OpenMP library that torch brings.
// Numbers are float32, or bfloat16 that is computed in float32 and rounded where torch's own modules round.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "vectors.hpp"

namespace {

// Keys and values that tokens see: `length[i]` of the places of slot `slot[i]` for token i.
template <class T>
struct Piece {
    T* keys;
    T* values;
    index_t slot_stride, head_stride;
    const index_t* slot;
    const index_t* length;
};

template <class T>
std::vector<Piece<T>> pieces_of(const index_t* words, index_t count) {
    std::vector<Piece<T>> pieces;
    for (index_t p = 0; p < count; ++p, words += 6) {
        pieces.push_back({reinterpret_cast<T*>(words[0]), reinterpret_cast<T*>(words[1]), words[2], words[3],
                          reinterpret_cast<const index_t*>(words[4]), reinterpret_cast<const index_t*>(words[5])});
    }
    return pieces;
}

constexpr int MOST_QUERIES = 4;

// Have a line brought into the second-level cache: what is read per token and head is too short for the processor to
// see by itself what comes next.
inline void fetch(const void* place) { __builtin_prefetch(place, 0, 2); }
// Q queries of 16 · C numbers, as their products with keys are added up.
template <class T, int Q, int C>
struct Queries {
    static constexpr index_t dim = C * LANES;
    static constexpr float after = 1.0f;  // what the sums are multiplied by
    float own[Q * dim];

    Queries(const T* query, index_t stride, float scale) {
        for (int q = 0; q < Q; ++q)
            for (index_t d = 0; d < dim; ++d) own[q * dim + d] = wide(query[q * stride + d]) * scale;
    }
    // Add 16 sums of products with a key for each query.
    void add(const T* key, lanes* sums, index_t side) const {
#pragma GCC unroll 8
        for (index_t c = 0; c < C; ++c) {
            const lanes part = load(key + c * LANES);
#pragma GCC unroll 4
            for (index_t q = 0; q < Q; ++q) sums[q * side] += load(own + q * dim + c * LANES) * part;
        }
    }
};
#ifdef __AVX512BF16__
// Products of two numbers at a time, added up in float32.
template <int Q, int C>
struct PairedQueries {
    const float after;
    __m512bh own[Q][C / 2];

    PairedQueries(const bfloat16* query, index_t stride, float scale) : after(scale) {
        for (int q = 0; q < Q; ++q)
            for (index_t c = 0; c < C / 2; ++c) std::memcpy(&own[q][c], query + q * stride + c * 2 * LANES, 64);
    }
    void add(const bfloat16* key, lanes* sums, index_t side) const {
#pragma GCC unroll 4
        for (index_t c = 0; c < C / 2; ++c) {
            __m512bh part;
            std::memcpy(&part, key + c * 2 * LANES, 64);
#pragma GCC unroll 4
            for (index_t q = 0; q < Q; ++q)
                sums[q * side] = (lanes)_mm512_dpbf16_ps((__m512)sums[q * side], own[q][c], part);
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

// Scores of Q queries of 16 · C numbers against `length` keys, and against those that lie behind them up to a multiple
// of 16: a slot's length is one. Sums of 16 products at a time are added up together. `soon` is what is read next.
template <class T, int Q, int C>
void score(const Queries<T, Q, C>& queries, const T* keys, const T* soon, index_t length, float* scores,
           index_t stride) {
    constexpr index_t dim = C * LANES, side = Q == 1 ? 16 : Q == 2 ? 8 : 4;
    for (index_t start = 0; start < length; start += side) {
        const T* key = keys + start * dim;
        lanes sums[LANES] = {};
#pragma GCC unroll 16
        for (index_t t = 0; t < side; ++t) {
#pragma GCC unroll 8
            for (index_t c = 0; c < C; ++c) fetch(soon + (start + t) * dim + c * LANES);
            queries.add(key + t * dim, sums + t, side);
        }
        const lanes found = totals_of(sums) * queries.after;
        for (index_t q = 0; q < Q; ++q)
            std::memcpy(scores + q * stride + start, reinterpret_cast<const float*>(&found) + q * side,
                        side * sizeof(float));
    }
}

// Add `length` values, weighted for each of Q queries, to their outputs.
template <class T, int Q, int C>
void gather(const float* weights, index_t stride, const T* values, const T* soon, index_t length, lanes (*out)[C]) {
    for (index_t t = 0; t < length; ++t)
        for (int c = 0; c < C; ++c) {
            fetch(soon + (t * C + c) * LANES);
            const lanes value = load(values + (t * C + c) * LANES);
            for (int q = 0; q < Q; ++q) out[q][c] += weights[q * stride + t] * value;
        }
}

// Softmax in place, without the division: gives the sum. There is room for 16 more scores.
inline float exponentials(float* scores, index_t count) {
    store(same(-INFINITY), scores + count);
    lanes most = load(scores), sum = {};
    for (index_t t = LANES; t < count; t += LANES) {
        const lanes more = load(scores + t);
        most = more > most ? more : most;
    }
    const lanes top = same(most_of(most));
    for (index_t t = 0; t < count; t += LANES) {
        const lanes chances = exponential(load(scores + t) - top);
        store(chances, scores + t);
        sum += chances;
    }
    return total_of(sum);
}

// What one token sees of one kind of heads, and who comes next.
template <class T>
struct View {
    const std::vector<Piece<T>>& pieces;
    index_t token, head, next_token, next_head, total;

    // Calls with keys, values, the next one's keys, the number of tokens, and how many came before.
    template <class F>
    void each(F use) const {
        index_t at = 0;
        for (const auto& piece : pieces) {
            const index_t place = piece.slot[token] * piece.slot_stride + head * piece.head_stride;
            const index_t next = piece.slot[next_token] * piece.slot_stride + next_head * piece.head_stride;
            use(piece.keys + place, piece.values + place, piece.keys + next, piece.length[token], at);
            at += piece.length[token];
        }
    }
};

// Q queries of 16 · C numbers.
template <class T, int Q, int C>
void attend_some(const View<T>& view, const T* query, index_t query_stride, float scale, T* out,
                 std::vector<float>& room) {
    constexpr index_t dim = C * LANES;
    const index_t stride = view.total + LANES;
    const Queries<T, Q, C> own(query, query_stride, scale);
    room.resize(Q * stride);
    float* scores = room.data();
    view.each([&](const T* keys, const T* values, const T*, index_t length, index_t at) {
        score<T, Q, C>(own, keys, values, length, scores + at, stride);
    });
    float sums[Q];
    for (int q = 0; q < Q; ++q) sums[q] = exponentials(scores + q * stride, view.total);
    lanes mixed[Q][C] = {};
    view.each([&](const T*, const T* values, const T* next, index_t length, index_t at) {
        gather<T, Q, C>(scores + at, stride, values, next, length, mixed);
    });
    for (int q = 0; q < Q; ++q)
        for (int c = 0; c < C; ++c) store(mixed[q][c] * (1.0f / sums[q]), out + q * dim + c * LANES);
}

// One query of any dimension.
template <class T>
void attend_one(const View<T>& view, index_t dim, const T* query, float scale, T* out, std::vector<float>& room) {
    room.resize(view.total + LANES + dim);
    float *scores = room.data(), *mixed = scores + view.total + LANES;
    view.each([&](const T* keys, const T*, const T*, index_t length, index_t at) {
        for (index_t t = 0; t < length; ++t) {
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (index_t d = 0; d < dim; ++d) sum += wide(query[d]) * scale * wide(keys[t * dim + d]);
            scores[at + t] = sum;
        }
    });
    const float sum = exponentials(scores, view.total);
    for (index_t d = 0; d < dim; ++d) mixed[d] = 0;
    view.each([&](const T*, const T* values, const T*, index_t length, index_t at) {
        for (index_t t = 0; t < length; ++t)
#pragma omp simd
            for (index_t d = 0; d < dim; ++d) mixed[d] += scores[at + t] * wide(values[t * dim + d]);
    });
    for (index_t d = 0; d < dim; ++d) narrow(mixed[d] / sum, out[d]);
}

// All queries that see the same keys.
template <class T, int C>
void attend_group(const View<T>& view, index_t dim, index_t group, const T* query, index_t stride, float scale, T* out,
                  std::vector<float>& room) {
    for (index_t q = 0; q < group; q += MOST_QUERIES, query += MOST_QUERIES * stride, out += MOST_QUERIES * dim) {
        if constexpr (C == 0) {
            for (index_t i = 0; i < MOST_QUERIES && q + i < group; ++i)
                attend_one(view, dim, query + i * stride, scale, out + i * dim, room);
        } else {
            const index_t left = group - q;
            const auto run = left == 1   ? attend_some<T, 1, C>
                             : left == 2 ? attend_some<T, 2, C>
                             : left == 3 ? attend_some<T, 3, C>
                                         : attend_some<T, MOST_QUERIES, C>;
            run(view, query, stride, scale, out, room);
        }
    }
}

// New tokens as they lie in memory: `strides` from token to token and from head to head.
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
    std::vector<Piece<T>> pieces;
    const index_t* order;
    T* out;

    index_t token(index_t task) const { return order ? order[task / kv_heads] : task / kv_heads; }

    // Put a token's key and value into the last of the places that it sees of its own.
    void put(index_t token, index_t head) const {
        const auto& own = pieces.back();
        const index_t place =
            own.slot[token] * own.slot_stride + head * own.head_stride + (own.length[token] - 1) * dim;
        std::memcpy(own.keys + place, key.at(token, head), dim * sizeof(T));
        std::memcpy(own.values + place, value.at(token, head), dim * sizeof(T));
    }
};

template <class T, int C>
void attend_all(const Call<T>& call, bool put) {
    const index_t kv_heads = call.kv_heads, group = call.heads / kv_heads;
#pragma omp parallel if (call.tokens * call.heads > 16)
    {
        std::vector<float> room;
#pragma omp for schedule(dynamic, 16)
        for (index_t task = 0; task < call.tokens * kv_heads; ++task) {
            const index_t next = task + 1 < call.tokens * kv_heads ? task + 1 : task;
            const index_t token = call.token(task), head = task % kv_heads;
            if (put) call.put(token, head);
            index_t total = 0;
            for (const auto& piece : call.pieces) total += piece.length[token];
            attend_group<T, C>({call.pieces, token, head, call.token(next), next % kv_heads, total}, call.dim, group, call.query.at(token, head * group),
                               call.query.head_stride, call.scale,
                               call.out + (token * call.heads + head * group) * call.dim, room);
        }
    }
}

// `order` [tokens] is the order in which tokens are taken, such that those which see the same pieces are neighbours; it
// says also that no two lie in one slot. Without an order, a token sees those before it in its slot.
template <class T>
void attend(const Call<T>& call) {
    if (!call.order) {
#pragma omp parallel for schedule(static) if (call.tokens * call.kv_heads * call.dim > 4096)
        for (index_t task = 0; task < call.tokens * call.kv_heads; ++task)
            call.put(task / call.kv_heads, task % call.kv_heads);
    }
    const auto run = call.dim == 16    ? attend_all<T, 1>
                     : call.dim == 32  ? attend_all<T, 2>
                     : call.dim == 64  ? attend_all<T, 4>
                     : call.dim == 128 ? attend_all<T, 8>
                                       : attend_all<T, 0>;
    run(call, call.order != nullptr);
}

template <class T>
void norm(index_t rows, index_t parts, index_t width, const T* in, index_t in_stride, const T* weight, float eps, T* out,
          index_t out_stride) {
#pragma omp parallel for schedule(static) if (rows * parts * width > 8192)
    for (index_t task = 0; task < rows * parts; ++task) {
        const index_t row = task / parts, part = task % parts;
        const T* x = in + row * in_stride + part * width;
        T* y = out + row * out_stride + part * width;
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (index_t d = 0; d < width; ++d) sum += wide(x[d]) * wide(x[d]);
        const float scale = 1.0f / std::sqrt(sum / float(width) + eps);
#pragma omp simd
        for (index_t d = 0; d < width; ++d) narrow(rounded<T>(wide(x[d]) * scale) * wide(weight[d]), y[d]);
    }
}

template <class T>
void turn(index_t rows, index_t heads, index_t dim, T* x, index_t stride, const T* cosine, const T* sine) {
    const index_t half = dim / 2;
#pragma omp parallel for schedule(static) if (rows * heads * dim > 8192)
    for (index_t row = 0; row < rows; ++row) {
        const T *c = cosine + row * dim, *s = sine + row * dim;
        for (index_t head = 0; head < heads; ++head) {
            T *first = x + row * stride + head * dim, *second = first + half;
#pragma omp simd
            for (index_t d = 0; d < half; ++d) {
                const float a = wide(first[d]), b = wide(second[d]);
                narrow(a * wide(c[d]) - b * wide(s[d]), first[d]);
                narrow(b * wide(c[d + half]) + a * wide(s[d + half]), second[d]);
            }
        }
    }
}

// silu(gate) · up of rows [gate, up].
template <class T>
void gate(index_t rows, index_t width, const T* both, T* out) {
#pragma omp parallel for schedule(static) if (rows * width > 8192)
    for (index_t row = 0; row < rows; ++row) {
        const T *x = both + row * 2 * width, *up = x + width;
        T* y = out + row * width;
        index_t i = 0;
        for (; i + LANES <= width; i += LANES) {
            const lanes g = load(x + i);
            store(g * inverse(exponential(-g) + 1.0f), y + i);
            store(load(y + i) * load(up + i), y + i);
        }
        for (; i < width; ++i) {
            const float g = wide(x[i]);
            narrow(rounded<T>(g / (exponential(same(-g))[0] + 1.0f)) * wide(up[i]), y[i]);
        }
    }
}

constexpr index_t BLOCK = 64;

// Chances e^(logit / temperature - most) take the place of a block's logits; gives their sum.
inline float chances_of(float* x, index_t count, float temperature, float most) {
    if (count < BLOCK) {
        float sum = 0;
        for (index_t i = 0; i < count; ++i) sum += x[i] = exponential(same(x[i] / temperature - most))[0];
        return sum;
    }
    lanes sum = {};
    for (index_t i = 0; i < BLOCK; i += LANES) {
        const lanes logits = temperature == 1 ? load(x + i) : load(x + i) / temperature;
        const lanes chances = exponential(logits - most);
        store(chances, x + i);
        sum += chances;
    }
    return total_of(sum);
}

// The largest of many numbers; what isn't one counts only where it stands first.
inline float largest(const float* x, index_t count) {
    lanes most = same(x[0]);
    index_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        const lanes more = load(x + i);
        most = more > most ? more : most;
    }
    float found = most_of(most);
    for (; i < count; ++i) found = x[i] > found ? x[i] : found;
    return found;
}

// The token at which the cumulated chances pass `wanted`; never one beyond the last that has a chance.
inline index_t search(const float* chances, const std::vector<double>& sums, index_t vocabulary, double wanted) {
    index_t block = 0;
    const index_t blocks = index_t(sums.size());
    double before = 0;
    while (block + 1 < blocks && before + sums[block] <= wanted) before += sums[block++];
    index_t found = block * BLOCK;
    const index_t end = found + BLOCK < vocabulary ? found + BLOCK : vocabulary;
    for (index_t i = found; i < end; ++i) {
        if (chances[i] > 0) found = i;
        before += chances[i];
        if (before > wanted) break;
    }
    return found;
}

void draw(index_t rows, index_t vocabulary, float* logits, const float* temperature, const double* draws,
          index_t* tokens, float* logprobs, double* totals) {
#pragma omp parallel if (rows * vocabulary > 16384)
    {
        std::vector<double> sums((vocabulary + BLOCK - 1) / BLOCK);
#pragma omp for schedule(static)
        for (index_t row = 0; row < rows; ++row) {
            float* x = logits + row * vocabulary;
            const float divisor = temperature[row] == 0 ? 1.0f : temperature[row];
            const float most = largest(x, vocabulary);
            index_t best = 0;
            if (temperature[row] == 0)
                while (best + 1 < vocabulary && x[best] != most) ++best;
            double total = 0;
            for (index_t block = 0; block < index_t(sums.size()); ++block) {
                const index_t left = vocabulary - block * BLOCK;
                sums[block] = chances_of(x + block * BLOCK, left < BLOCK ? left : BLOCK, divisor, most / divisor);
                total += sums[block];
            }
            const index_t token = temperature[row] == 0 ? best : search(x, sums, vocabulary, draws[row] * total);
            tokens[row] = token;
            // a logit that isn't a number makes the total none
            totals[row] = total;
            logprobs[row] = float(std::log(double(x[token])) - std::log(total));
        }
    }
}

}  // namespace

#define BOTH(TYPE, NAME)                                                                                              \
    void attend_##NAME(index_t tokens, index_t heads, index_t kv_heads, index_t dim, const TYPE* query,               \
                       const TYPE* key, const TYPE* value, const index_t* strides, float scale, const index_t* words, \
                       index_t count, const index_t* order, TYPE* out) {                                              \
        attend<TYPE>({tokens, heads, kv_heads, dim, {query, strides[0], strides[1]}, {key, strides[2], strides[3]},   \
                      {value, strides[4], strides[5]}, scale, pieces_of<TYPE>(words, count), order, out});            \
    }                                                                                                                 \
    void norm_##NAME(index_t rows, index_t parts, index_t width, const TYPE* in, index_t in_stride,                   \
                     const TYPE* weight, float eps, TYPE* out, index_t out_stride) {                                  \
        norm(rows, parts, width, in, in_stride, weight, eps, out, out_stride);                                        \
    }                                                                                                                 \
    void turn_##NAME(index_t rows, index_t heads, index_t dim, TYPE* x, index_t stride, const TYPE* cosine,           \
                     const TYPE* sine) {                                                                              \
        turn(rows, heads, dim, x, stride, cosine, sine);                                                              \
    }                                                                                                                 \
    void gate_##NAME(index_t rows, index_t width, const TYPE* both, TYPE* out) { gate(rows, width, both, out); }

extern "C" {
BOTH(float, float32)
BOTH(bfloat16, bfloat16)

void draw_float32(index_t rows, index_t vocabulary, float* logits, const float* temperature, const double* draws,
                  index_t* tokens, float* logprobs, double* totals) {
    draw(rows, vocabulary, logits, temperature, draws, tokens, logprobs, totals);
}
}
