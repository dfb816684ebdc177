// Gradient of a weight: leftᵀ · right summed over all rows, in bfloat16 with AMX tiles and float32 accumulation.
// Libraries transpose one side at half the speed, and round the sums.
#pragma once

#include <memory>

#include "tiles.hpp"

#ifdef QUINTET_TILES

namespace {

constexpr index_t DEEP = 256;  // rows per block, chosen to stay in cache

// Arrange 32 rows of 32 numbers as two tiles of row pairs x columns, padded with zeros.
inline void tile_row_pairs(const bfloat16* from, index_t stride, index_t count, __m512i* first, __m512i* second) {
    alignas(64) static const uint16_t low[32] = {0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                 8,  40, 9,  41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    const __m512i even = _mm512_load_si512(low), odd = _mm512_add_epi16(even, _mm512_set1_epi16(16));
    for (index_t pair = 0; pair < 16; ++pair) {
        const index_t row = 2 * pair;
        const __m512i one = row < count ? _mm512_loadu_si512(from + row * stride) : _mm512_setzero_si512();
        const __m512i other = row + 1 < count ? _mm512_loadu_si512(from + (row + 1) * stride) : _mm512_setzero_si512();
        first[pair] = _mm512_permutex2var_epi16(one, even, other);
        second[pair] = _mm512_permutex2var_epi16(one, odd, other);
    }
}

inline void put_tile(const __m512i* words, half* tile) {
    for (index_t r = 0; r < 16; ++r) _mm512_store_si512(tile + r * PAIRS, words[r]);
}

// Memory aligned to a cache line.
struct AlignedBuffer {
    std::unique_ptr<half[]> memory;
    explicit AlignedBuffer(index_t count) : memory(new half[count + 32]) {}
    half* data() { return memory.get() + (64 - reinterpret_cast<uintptr_t>(memory.get()) % 64) % 64 / 2; }
};

// Left side for 32 columns of `narrow` and DEEP rows: tiles [2, DEEP / 32] of columns x row pairs.
inline void tile_left(const bfloat16* from, index_t stride, index_t count, half* to) {
    __m512i first[16], second[16];
    for (index_t k = 0; k < DEEP / 32; ++k) {
        tile_row_pairs(from + k * 32 * stride, stride, count - k * 32, first, second);
        transpose_words(first);
        transpose_words(second);
        put_tile(first, to + k * TILE);
        put_tile(second, to + (DEEP / 32 + k) * TILE);
    }
}
// Right side for `columns` columns: per 32 of them tiles [2, DEEP / 32] of row pairs x columns. Memory is read by rows.
inline void tile_right(const bfloat16* from, index_t stride, index_t count, index_t columns, half* to) {
    __m512i first[16], second[16];
    for (index_t k = 0; k < DEEP / 32; ++k)
        for (index_t n = 0; n < columns; n += 32) {
            tile_row_pairs(from + k * 32 * stride + n, stride, count - k * 32, first, second);
            put_tile(first, to + n * DEEP + k * TILE);
            put_tile(second, to + n * DEEP + (DEEP / 32 + k) * TILE);
        }
}

// Accumulate 32 x 32 sums, four consecutive tiles, from zero if `is_first`.
inline void add_tiles(index_t deep, const half* left, const half* right, float* sums, bool is_first) {
    if (is_first) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    } else {
        _tile_loadd(0, sums, 64);
        _tile_loadd(1, sums + 256, 64);
        _tile_loadd(2, sums + 512, 64);
        _tile_loadd(3, sums + 768, 64);
    }
    for (index_t k = 0; k < deep; ++k) {
        _tile_loadd(4, left + k * TILE, 64);
        _tile_loadd(6, right + k * TILE, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, right + (DEEP / 32 + k) * TILE, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, left + (DEEP / 32 + k) * TILE, 64);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + 256, 64);
    _tile_stored(2, sums + 512, 64);
    _tile_stored(3, sums + 768, 64);
}

// Store 32 x 32 sums, transposed if requested.
inline void store_tiles(const float* sums, float* to, index_t stride, bool transposed) {
    for (index_t tile = 0; tile < 4; ++tile) {
        __m512i some[16];
        for (index_t r = 0; r < 16; ++r) some[r] = _mm512_loadu_si512(sums + tile * 256 + r * 16);
        if (transposed) transpose_words(some);
        const index_t below = transposed ? tile % 2 : tile / 2, beside = transposed ? tile / 2 : tile % 2;
        for (index_t r = 0; r < 16; ++r) _mm512_storeu_si512(to + (below * 16 + r) * stride + beside * 16, some[r]);
    }
}

// `sums_out` [few, many], or [many, few] if `transposed`, from `narrow` [rows, few] and `broad` [rows, many].
inline void sum_tiles(index_t rows, index_t few, index_t many, const bfloat16* narrow, const bfloat16* broad,
                      float* sums_out, bool transposed) {
    AlignedBuffer left(few * DEEP);
    half* left_tiles = left.data();
#pragma omp parallel
    {
        open_tiles();
        const ThreadRange share(many / 32);
        const index_t first = share.from * 32, columns = (share.to - share.from) * 32;
        AlignedBuffer right(columns * DEEP), sums(2 * few * columns);
        auto* own = reinterpret_cast<float*>(sums.data());
        for (index_t row = 0; row < rows; row += DEEP) {
            const index_t count = std::min(DEEP, rows - row), deep = round_up(count, 32) / 32;
#pragma omp for schedule(static) nowait
            for (index_t m = 0; m < few; m += 32) tile_left(narrow + row * few + m, few, count, left_tiles + m * DEEP);
            tile_right(broad + row * many + first, many, count, columns, right.data());
#pragma omp barrier
            for (index_t n = 0; n < columns; n += 32)
                for (index_t m = 0; m < few; m += 32)
                    add_tiles(deep, left_tiles + m * DEEP, right.data() + n * DEEP, own + n * few + m * 32, row == 0);
#pragma omp barrier
        }
        _tile_release();
        for (index_t n = 0; n < columns; n += 32)
            for (index_t m = 0; m < few; m += 32) {
                float* to = transposed ? sums_out + (first + n) * few + m : sums_out + m * many + first + n;
                store_tiles(own + n * few + m * 32, to, transposed ? few : many, transposed);
            }
    }
}

}  // namespace
#endif

namespace {

// out [out, in] = leftᵀ · right for [rows, out] and [rows, in]; returns false if not supported.
inline bool weight_gradient(index_t rows, index_t out, index_t in, const bfloat16* left, const bfloat16* right,
                              float* sums_out) {
#ifdef QUINTET_TILES
    if (!rows || out % 32 || in % 32 || !tiles_allowed()) return false;
    if (out <= in)
        sum_tiles(rows, out, in, left, right, sums_out, false);
    else
        sum_tiles(rows, in, out, right, left, sums_out, true);
    return true;
#else
    return false;
#endif
}

}  // namespace
