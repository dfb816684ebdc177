// Attention of packed sequences in bfloat16 with Intel AMX tiles: one instruction multiplies 16 x 32 by 32 x 16 numbers
// and accumulates in float32. Data is rearranged so that a tile is 16 contiguous rows.
#pragma once

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__linux__)
#define QUINTET_TILES 1

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

constexpr index_t PAIRS = 2 * LANES;      // numbers in a tile's row
constexpr index_t TILE = LANES * PAIRS;   // numbers in a tile

// Whether the operating system permits tiles; requested once.
inline bool tiles_allowed() {
    constexpr long REQUEST = 0x1023, DATA = 18;
    static const bool allowed = syscall(SYS_arch_prctl, REQUEST, DATA) == 0;
    return allowed;
}

struct TileShapes {
    alignas(64) uint8_t palette = 1;
    uint8_t start = 0, reserved[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
inline void open_tiles() {
    const TileShapes shapes;
    _tile_loadconfig(&shapes);
}

using half = uint16_t;

inline __m256i halves_of(lanes x) { return (__m256i)_mm512_cvtneps_pbh((__m512)x); }
inline __m512i words_of(const half* x) { return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)x)); }

// Transpose 16 x 16 words.
inline void transpose_words(__m512i* rows) {
    const __m512i place = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
#pragma GCC unroll 4
    for (int step = 1; step < 16; step *= 2) {
        const __m512i by = _mm512_set1_epi32(step);
        const __mmask16 high = _mm512_test_epi32_mask(place, by);
        const __m512i beyond = _mm512_add_epi32(place, _mm512_set1_epi32(16));
        const __m512i first = _mm512_mask_sub_epi32(place, high, beyond, by);
        const __m512i second = _mm512_mask_mov_epi32(_mm512_add_epi32(place, by), high, beyond);
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) {
            if (i & step) continue;
            const __m512i a = rows[i], b = rows[i + step];
            rows[i] = _mm512_permutex2var_epi32(a, first, b);
            rows[i + step] = _mm512_permutex2var_epi32(a, second, b);
        }
    }
}

// Rows of `dim` numbers in the arrangements that tile products need. Spans start at a multiple of 16 rows; the capacity
// is a multiple of 32.
struct TiledRows {
    index_t dim = 0, room = 0;
    std::vector<half> rows;     // [room, dim]
    std::vector<half> columns;  // tiles [room / 16, dim / 32] of dim pairs x rows: the right side of · xᵀ
    std::vector<half> pairs;    // tiles [room / 32, dim / 16] of row pairs x dims: the right side of · x
    std::vector<half> across;   // [dim, room]: the left side of xᵀ ·
    bool with_rows = false, with_columns = false, with_pairs = false, with_across = false;

    void size(index_t to_float, index_t count) {
        dim = to_float;
        room = count;
        if (with_rows) rows.assign(room * dim, 0);
        if (with_columns) columns.assign(room * dim, 0);
        if (with_pairs) pairs.assign(room * dim, 0);
        if (with_across) across.assign(room * dim, 0);
    }
    const half* column_tile(index_t row, index_t part) const { return columns.data() + (row / 16 * (dim / 32) + part) * TILE; }
    half* column_tile(index_t row, index_t part) { return columns.data() + (row / 16 * (dim / 32) + part) * TILE; }
    const half* pair_tile(index_t row, index_t part) const { return pairs.data() + (row / 32 * (dim / 16) + part) * TILE; }

    // Put up to 16 rows at `at`, padded with zeros.
    void put_block(const bfloat16* from, index_t stride, index_t count, index_t at) {
        for (index_t part = 0; part < dim / 32; ++part) {
            __m512i some[16];
            for (index_t t = 0; t < 16; ++t)
                some[t] = t < count ? _mm512_loadu_si512(from + t * stride + part * 32) : _mm512_setzero_si512();
            if (with_rows)
                for (index_t t = 0; t < 16; ++t) _mm512_storeu_si512(rows.data() + (at + t) * dim + part * 32, some[t]);
            if (with_pairs) put_pairs(some, at, part);
            if (!with_columns && !with_across) continue;
            transpose_words(some);
            if (with_columns) {
                half* tile = column_tile(at, part);
                for (index_t r = 0; r < 16; ++r) _mm512_storeu_si512(tile + r * PAIRS, some[r]);
            }
            if (!with_across) continue;
            for (index_t r = 0; r < 16; ++r) {
                half* to = across.data() + (part * 32 + 2 * r) * room + at;
                _mm256_storeu_si256((__m256i*)to, _mm512_cvtepi32_epi16(some[r]));
                _mm256_storeu_si256((__m256i*)(to + room), _mm512_cvtepi32_epi16(_mm512_srli_epi32(some[r], 16)));
            }
        }
    }
    void put_pairs(const __m512i* some, index_t at, index_t part) {
        for (index_t side = 0; side < 2; ++side) {
            half* tile = pairs.data() + (at / 32 * (dim / 16) + part * 2 + side) * TILE + at % 32 / 2 * PAIRS;
            for (index_t t = 0; t < 16; t += 2) {
                const __m256i even = side ? _mm512_extracti64x4_epi64(some[t], 1) : _mm512_castsi512_si256(some[t]),
                              odd = side ? _mm512_extracti64x4_epi64(some[t + 1], 1) : _mm512_castsi512_si256(some[t + 1]);
                const __m512i high = _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd), 16);
                _mm512_storeu_si512(tile + t / 2 * PAIRS, _mm512_or_si512(_mm512_cvtepu16_epi32(even), high));
            }
        }
    }
    void put(const bfloat16* from, index_t stride, index_t count, index_t at) {
        for (index_t t = 0; t < count; t += 16) put_block(from + t * stride, stride, std::min<index_t>(16, count - t), at + t);
    }
};

// C [16, 16] = or += the sum over `count` tiles of left · right. Strides are in numbers; `row` is the row stride of the
// left side.
inline void tile_product(index_t count, const half* left, index_t row, index_t left_step, const half* right,
                         index_t right_step, float* c, index_t ldc, bool add) {
    if (add)
        _tile_loadd(0, c, ldc * 4);
    else
        _tile_zero(0);
    for (index_t t = 0; t < count; ++t) {
        _tile_loadd(1, left + t * left_step, row * 2);
        _tile_loadd(2, right + t * right_step, 64);
        _tile_dpbf16ps(0, 1, 2);
    }
    _tile_stored(0, c, ldc * 4);
}
// As `tile_product`, for two adjacent column tiles of C.
inline void tile_products(index_t count, const half* left, index_t row, index_t left_step, const half* right,
                          index_t right_step, index_t next, float* c, index_t ldc, bool add) {
    if (add) {
        _tile_loadd(0, c, ldc * 4);
        _tile_loadd(3, c + 16, ldc * 4);
    } else {
        _tile_zero(0);
        _tile_zero(3);
    }
    for (index_t t = 0; t < count; ++t) {
        _tile_loadd(1, left + t * left_step, row * 2);
        _tile_loadd(2, right + t * right_step, 64);
        _tile_dpbf16ps(0, 1, 2);
        _tile_loadd(4, right + t * right_step + next, 64);
        _tile_dpbf16ps(3, 1, 4);
    }
    _tile_stored(0, c, ldc * 4);
    _tile_stored(3, c + 16, ldc * 4);
}

// Buffers of a thread for a cluster, a kv head and a block of queries.
struct TileRoom {
    TiledRows keys, values, query, grads;
    index_t prefix = 0, stem = 0, base = 0;
    std::vector<float> scores, mixed, key_grads, value_grads;
    std::vector<half> probs, slopes, slope_pairs;

    explicit TileRoom(bool backward) {
        keys.with_columns = values.with_pairs = query.with_rows = !backward;
        if (!backward) return;
        keys.with_rows = keys.with_across = values.with_rows = true;
        query.with_columns = query.with_pairs = grads.with_columns = grads.with_pairs = true;
    }

    void size(const Shape& shape, const Cluster& cluster, bool first, bool backward) {
        prefix = first && shape.prefix ? 0 : shape.prefix;
        stem = cluster.stem.length;
        base = round_up(prefix, 16) + round_up(stem, 16);
        index_t longest = 0;
        for (index_t b = cluster.from; b < cluster.to; ++b) longest = std::max(longest, shape.branches[b].length);
        const index_t room = round_up(base + round_up(longest, 16), 32);
        keys.size(shape.dim, room);
        values.size(shape.dim, room);
        if (!backward) return;
        key_grads.assign(room * shape.dim, 0.0f);
        value_grads.assign(room * shape.dim, 0.0f);
    }

    // Whether a position before the row's own tokens is a gap.
    bool is_gap(index_t place, index_t num_context) const {
        return place < num_context && ((place >= prefix && place < round_up(prefix, 16)) || place >= round_up(prefix, 16) + stem);
    }
};

struct TileForward {
    const Shape& shape;
    const bfloat16* states;
    bfloat16* out;
    float* sums;

    // 16 queries of one head from token `at` of the row.
    void queries(TileRoom& room, index_t num_context, index_t at, index_t count, index_t token, index_t head) const {
        const index_t dim = shape.dim, keys = num_context + at + 16, stride = room.keys.room;
        room.query.size(dim, 16);
        room.query.put(states + token * shape.width() + head * dim, shape.width(), count, 0);
        room.scores.resize(16 * stride);
        room.probs.resize(16 * stride);
        room.mixed.resize(16 * dim);
        for (index_t j = 0; j < keys; j += 16)
            tile_product(dim / 32, room.query.rows.data(), dim, 32, room.keys.column_tile(j, 0), TILE,
                         room.scores.data() + j, stride, false);
        float parts[16];
        for (index_t r = 0; r < 16; ++r) parts[r] = softmax(room, num_context, at + r, keys, r, r < count, token + r, head);
        for (index_t d = 0; d < dim / 16; d += 2)
            tile_products(round_up(keys, 32) / 32, room.probs.data(), stride, 32, room.values.pair_tile(0, d), dim / 16 * TILE,
                          TILE, room.mixed.data() + d * 16, dim, false);
        for (index_t r = 0; r < count; ++r)
            for (index_t d = 0; d < dim; d += LANES)
                store(load(room.mixed.data() + r * dim + d) * parts[r],
                      out + ((token + r) * shape.heads + head) * dim + d);
    }

    float softmax(TileRoom& room, index_t num_context, index_t own, index_t keys, index_t r, bool is_query, index_t token,
                  index_t head) const {
        float* row = room.scores.data() + r * room.keys.room;
        half* to = room.probs.data() + r * room.keys.room;
        for (index_t j = room.prefix; j < round_up(room.prefix, 16); ++j) row[j] = -INFINITY;
        for (index_t j = round_up(room.prefix, 16) + room.stem; j < num_context; ++j) row[j] = -INFINITY;
        for (index_t j = num_context + own + 1; j < keys; ++j) row[j] = -INFINITY;
        const float top = maximum(row, keys) * shape.scale;
        lanes sum = {};
        for (index_t j = 0; j < keys; j += LANES) {
            const lanes probs = exponential(load(row + j) * shape.scale - top);
            sum += probs;
            _mm256_storeu_si256((__m256i*)(to + j), halves_of(probs));
        }
        if (keys % 32) _mm256_storeu_si256((__m256i*)(to + keys), _mm256_setzero_si256());
        const float total = sum_of(sum);
        if (is_query) sums[token * shape.heads + head] = top + std::log(total);
        return 1.0f / total;
    }

    void row(TileRoom& room, Span span, index_t num_context, index_t kv_head) const {
        for (index_t g = 0; g < shape.group(); ++g)
            for (index_t at = 0; at < span.length; at += 16)
                queries(room, num_context, at, std::min<index_t>(16, span.length - at), span.start + at,
                        kv_head * shape.group() + g);
    }

    void cluster(index_t c, index_t kv_head, TileRoom& room) const {
        const auto& cluster = shape.clusters[c];
        const index_t width = shape.width();
        const bfloat16 *key = states + (shape.heads + kv_head) * shape.dim, *value = key + shape.kv_heads * shape.dim;
        const auto put = [&](Span span, index_t at) {
            room.keys.put(key + span.start * width, width, span.length, at);
            room.values.put(value + span.start * width, width, span.length, at);
        };
        room.size(shape, cluster, c == 0, false);
        put({0, room.prefix}, 0);
        put(cluster.stem, round_up(room.prefix, 16));
        row(room, cluster.stem, round_up(room.prefix, 16), kv_head);
        for (index_t b = cluster.from; b < cluster.to; ++b) {
            put(shape.branches[b], room.base);
            row(room, shape.branches[b], room.base, kv_head);
        }
    }
};

struct TileBackward {
    const Shape& shape;
    const bfloat16* states;
    const bfloat16* out;
    const float* sums;
    const bfloat16* grads;
    float* found;

    // Up to 64 queries of one head from token `at` of the row.
    void queries(TileRoom& room, index_t num_context, index_t at, index_t count, index_t token, index_t head) const {
        const index_t dim = shape.dim, width = shape.width(), across = shape.heads * dim;
        const index_t rows = round_up(count, 32), tiles = round_up(count, 16) / 16, keys = num_context + at + tiles * 16;
        const bfloat16 *grad = grads + token * across + head * dim, *result = out + token * across + head * dim;
        room.query.size(dim, rows);
        room.grads.size(dim, rows);
        room.query.put(states + token * width + head * dim, width, count, 0);
        room.grads.put(grad, across, count, 0);
        float tops[64] = {}, shifts[64] = {};
        for (index_t i = 0; i < count; ++i) {
            tops[i] = sums[(token + i) * shape.heads + head];
            lanes shift = {};
            for (index_t d = 0; d < dim; d += LANES) shift += load(grad + i * across + d) * load(result + i * across + d);
            shifts[i] = sum_of(shift);
        }
        room.probs.resize(16 * rows);
        room.slopes.resize(16 * rows);
        room.slope_pairs.assign(round_up(keys, 32) / 32 * tiles * TILE, 0);
        for (index_t j = 0; j < keys; j += 16) key_block(room, num_context, at, j, rows, tiles, tops, shifts);
        room.mixed.resize(256);
        for (index_t tile = 0; tile < tiles; ++tile)
            for (index_t d = 0; d < dim; d += 16) {
                tile_product(round_up(keys, 32) / 32, room.keys.across.data() + d * room.keys.room, room.keys.room, 32,
                             room.slope_pairs.data() + tile * TILE, tiles * TILE, room.mixed.data(), 16, false);
                __m512i some[16];
                for (index_t r = 0; r < 16; ++r) some[r] = _mm512_loadu_si512(room.mixed.data() + r * 16);
                transpose_words(some);
                for (index_t r = 0; r < 16 && tile * 16 + r < count; ++r)
                    _mm512_storeu_si512(found + (token + tile * 16 + r) * width + head * dim + d, some[r]);
            }
    }

    // 16 keys from position `j`: transposed probabilities and score gradients of the queries that attend to them, and
    // the gradients of these keys and values.
    void key_block(TileRoom& room, index_t num_context, index_t at, index_t j, index_t rows, index_t tiles, const float* tops,
                   const float* shifts) const {
        const index_t dim = shape.dim, own = j - num_context - at;  // index of the first key relative to the first query
        const index_t first = own > 0 ? own / 16 : 0;
        alignas(64) float scores[256], slopes[256];
        for (index_t tile = 0; tile < rows / 16; ++tile) {
            half *to = room.probs.data() + tile * 16, *too = room.slopes.data() + tile * 16;
            if (tile < first || tile >= tiles) {
                for (index_t r = 0; r < 16; ++r) {
                    _mm256_storeu_si256((__m256i*)(to + r * rows), _mm256_setzero_si256());
                    _mm256_storeu_si256((__m256i*)(too + r * rows), _mm256_setzero_si256());
                }
                continue;
            }
            tile_product(dim / 32, room.keys.rows.data() + j * dim, dim, 32, room.query.column_tile(tile * 16, 0), TILE,
                         scores, 16, false);
            tile_product(dim / 32, room.values.rows.data() + j * dim, dim, 32, room.grads.column_tile(tile * 16, 0), TILE,
                         slopes, 16, false);
            half* pairs = room.slope_pairs.data() + (j / 32 * tiles + tile) * TILE + j % 32 / 2 * PAIRS;
            elements(room, num_context, j, own - tile * 16, scores, slopes, load(tops + tile * 16), load(shifts + tile * 16), to,
                     too, rows, pairs);
        }
        const index_t from = first / 2, parts = rows / 32 - from;
        for (index_t d = 0; d < dim / 16; d += 2) {
            tile_products(parts, room.probs.data() + from * 32, rows, 32, room.grads.pair_tile(from * 32, d),
                          dim / 16 * TILE, TILE, room.value_grads.data() + j * dim + d * 16, dim, true);
            tile_products(parts, room.slopes.data() + from * 32, rows, 32, room.query.pair_tile(from * 32, d),
                          dim / 16 * TILE, TILE, room.key_grads.data() + j * dim + d * 16, dim, true);
        }
    }

    // 16 keys by 16 queries. Key r is visible to the queries from `own` + r on.
    void elements(const TileRoom& room, index_t num_context, index_t j, index_t own, const float* scores, const float* slopes,
                  lanes top, lanes shift, half* probs, half* found, index_t rows, half* pairs) const {
        const __m512i place = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
        __m512i before = _mm512_setzero_si512();
        for (index_t r = 0; r < 16; ++r) {
            lanes chance = exponential(load(scores + r * 16) * shape.scale - top);
            if (j >= num_context && own + r > 0) {
                const __mmask16 sees = _mm512_cmpge_epi32_mask(place, _mm512_set1_epi32(int(own + r)));
                chance = (lanes)_mm512_maskz_mov_ps(sees, (__m512)chance);
            }
            if (room.is_gap(j + r, num_context)) chance = lanes{};
            const lanes slope = chance * (load(slopes + r * 16) - shift) * shape.scale;
            _mm256_storeu_si256((__m256i*)(probs + r * rows), halves_of(chance));
            const __m256i slope_half = halves_of(slope);
            _mm256_storeu_si256((__m256i*)(found + r * rows), slope_half);
            const __m512i words = _mm512_cvtepu16_epi32(slope_half);
            if (r % 2)
                _mm512_storeu_si512(pairs + r / 2 * PAIRS, _mm512_or_si512(before, _mm512_slli_epi32(words, 16)));
            before = words;
        }
    }

    void row(TileRoom& room, Span span, index_t num_context, index_t kv_head) const {
        for (index_t g = 0; g < shape.group(); ++g)
            for (index_t at = 0; at < span.length; at += 64)
                queries(room, num_context, at, std::min<index_t>(64, span.length - at), span.start + at,
                        kv_head * shape.group() + g);
    }

    void store_gradients(TileRoom& room, Span span, index_t at, float* key, float* value, index_t stride, bool add) const {
        for (index_t t = 0; t < span.length; ++t)
            for (index_t d = 0; d < shape.dim; d += LANES) {
                float *from = room.key_grads.data() + (at + t) * shape.dim + d,
                      *other = room.value_grads.data() + (at + t) * shape.dim + d;
                float *to = key + (span.start + t) * stride + d, *too = value + (span.start + t) * stride + d;
                store(add ? load(to) + load(from) : load(from), to);
                store(add ? load(too) + load(other) : load(other), too);
            }
        for (index_t d = at * shape.dim; d < (at + round_up(span.length, 16)) * shape.dim; ++d)
            room.key_grads[d] = room.value_grads[d] = 0.0f;
    }

    void cluster(index_t c, index_t kv_head, TileRoom& room, float* shared) const {
        const auto& cluster = shape.clusters[c];
        const index_t dim = shape.dim, width = shape.width();
        const bfloat16 *key = states + (shape.heads + kv_head) * dim, *value = key + shape.kv_heads * dim;
        float *by_key = found + (shape.heads + kv_head) * dim, *by_value = by_key + shape.kv_heads * dim;
        const auto put = [&](Span span, index_t at) {
            room.keys.put(key + span.start * width, width, span.length, at);
            room.values.put(value + span.start * width, width, span.length, at);
        };
        room.size(shape, cluster, c == 0, true);
        const index_t behind = round_up(room.prefix, 16);
        put({0, room.prefix}, 0);
        put(cluster.stem, behind);
        row(room, cluster.stem, behind, kv_head);
        for (index_t b = cluster.from; b < cluster.to; ++b) {
            put(shape.branches[b], room.base);
            row(room, shape.branches[b], room.base, kv_head);
            store_gradients(room, shape.branches[b], room.base, by_key, by_value, width, false);
        }
        store_gradients(room, cluster.stem, behind, by_key, by_value, width, false);
        float* mine = shared + kv_head * shape.prefix * dim;
        store_gradients(room, {0, room.prefix}, 0, mine, mine + shape.kv_heads * shape.prefix * dim, dim, true);
    }
};

}  // namespace
#endif
