// The loss by a weight, from that by a layer's outputs: sums over all rows of products of two columns, in bfloat16 with
// the processor's matrix tiles, added up in float32. Libraries lay the transposed side anew at half the speed, and round
// the sums.
#pragma once

#include "tiles.hpp"

#ifdef QUINTET_TILES

namespace {

constexpr index_t DEEP = 256;  // rows at a time: what is laid for them stays near the processor

// 32 rows of 32 numbers as two tiles of row pairs x columns; rows that aren't there are zeros.
inline void lay_pairs(const bfloat16* from, index_t stride, index_t count, __m512i* first, __m512i* second) {
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

// Memory that begins where a line of the cache does.
struct Lines {
    std::vector<half> memory;
    explicit Lines(index_t count) : memory(count + 32) {}
    half* data() { return memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64 / 2; }
};

// The left side for 32 columns of `narrow` and DEEP rows: tiles [2, DEEP / 32] of columns x row pairs.
inline void lay_left(const bfloat16* from, index_t stride, index_t count, half* to) {
    __m512i first[16], second[16];
    for (index_t k = 0; k < DEEP / 32; ++k) {
        lay_pairs(from + k * 32 * stride, stride, count - k * 32, first, second);
        turn_words(first);
        turn_words(second);
        put_tile(first, to + k * TILE);
        put_tile(second, to + (DEEP / 32 + k) * TILE);
    }
}
// The right side for some columns: of each 32 of them tiles [2, DEEP / 32] of row pairs x columns. Memory is read along
// its rows.
inline void lay_right(const bfloat16* from, index_t stride, index_t count, index_t columns, half* to) {
    __m512i first[16], second[16];
    for (index_t k = 0; k < DEEP / 32; ++k)
        for (index_t n = 0; n < columns; n += 32) {
            lay_pairs(from + k * 32 * stride + n, stride, count - k * 32, first, second);
            put_tile(first, to + n * DEEP + k * TILE);
            put_tile(second, to + n * DEEP + (DEEP / 32 + k) * TILE);
        }
}

// 32 x 32 sums, begun or gone on with.
inline void add_tiles(index_t deep, const half* left, const half* right, float* sums, index_t stride, bool begins) {
    float* below = sums + 16 * stride;
    if (begins) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    } else {
        _tile_loadd(0, sums, stride * 4);
        _tile_loadd(1, sums + 16, stride * 4);
        _tile_loadd(2, below, stride * 4);
        _tile_loadd(3, below + 16, stride * 4);
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
    _tile_stored(0, sums, stride * 4);
    _tile_stored(1, sums + 16, stride * 4);
    _tile_stored(2, below, stride * 4);
    _tile_stored(3, below + 16, stride * 4);
}

// `sums` [few, many] from `narrow` [rows, few] and `broad` [rows, many].
inline void sum_tiles(index_t rows, index_t few, index_t many, const bfloat16* narrow, const bfloat16* broad,
                      float* sums) {
    Lines left(few * DEEP);
    half* laid = left.data();
#pragma omp parallel
    {
        open_tiles();
        const Share share(many / 32);
        const index_t first = share.from * 32, columns = (share.to - share.from) * 32;
        Lines right(columns * DEEP);
        for (index_t row = 0; row < rows; row += DEEP) {
            const index_t count = std::min(DEEP, rows - row), deep = up(count, 32) / 32;
#pragma omp for schedule(static) nowait
            for (index_t m = 0; m < few; m += 32) lay_left(narrow + row * few + m, few, count, laid + m * DEEP);
            lay_right(broad + row * many + first, many, count, columns, right.data());
#pragma omp barrier
            for (index_t n = 0; n < columns; n += 32)
                for (index_t m = 0; m < few; m += 32)
                    add_tiles(deep, laid + m * DEEP, right.data() + n * DEEP, sums + m * many + first + n, many, row == 0);
#pragma omp barrier
        }
        _tile_release();
    }
}

// found [columns, rows] from [rows, columns], multiples of 16 both.
inline void transpose(index_t rows, index_t columns, const float* from, float* found) {
#pragma omp parallel for schedule(static)
    for (index_t row = 0; row < rows; row += 16)
        for (index_t column = 0; column < columns; column += 16) {
            __m512i some[16];
            for (index_t r = 0; r < 16; ++r) some[r] = _mm512_loadu_si512(from + (row + r) * columns + column);
            turn_words(some);
            for (index_t r = 0; r < 16; ++r) _mm512_storeu_si512(found + (column + r) * rows + row, some[r]);
        }
}

}  // namespace
#endif

namespace {

// found [out, in] = leftᵀ · right, of [rows, out] and [rows, in]; says whether it could.
inline bool product_over_rows(index_t rows, index_t out, index_t in, const bfloat16* left, const bfloat16* right,
                              float* found) {
#ifdef QUINTET_TILES
    if (!rows || out % 32 || in % 32 || !tiles_allowed()) return false;
    if (out <= in) {
        sum_tiles(rows, out, in, left, right, found);
        return true;
    }
    std::vector<float> sums(in * out);
    sum_tiles(rows, in, out, right, left, sums.data());
    transpose(in, out, sums.data(), found);
    return true;
#else
    return false;
#endif
}

}  // namespace
