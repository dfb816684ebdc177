// The loss by a weight, from that by a layer's outputs: sums over all rows of products of two columns, in bfloat16 with
// the processor's matrix tiles, added up in float32. Libraries lay the transposed side anew at half the speed, and round
// the sums.
#pragma once

#include <memory>

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
    std::unique_ptr<half[]> memory;
    explicit Lines(index_t count) : memory(new half[count + 32]) {}
    half* data() { return memory.get() + (64 - reinterpret_cast<uintptr_t>(memory.get()) % 64) % 64 / 2; }
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

// 32 x 32 sums, four tiles one behind the other, begun or gone on with.
inline void add_tiles(index_t deep, const half* left, const half* right, float* sums, bool begins) {
    if (begins) {
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

// 32 x 32 sums to where they belong, or the other way round.
inline void give_tiles(const float* sums, float* to, index_t stride, bool turned) {
    for (index_t tile = 0; tile < 4; ++tile) {
        __m512i some[16];
        for (index_t r = 0; r < 16; ++r) some[r] = _mm512_loadu_si512(sums + tile * 256 + r * 16);
        if (turned) turn_words(some);
        const index_t below = turned ? tile % 2 : tile / 2, beside = turned ? tile / 2 : tile % 2;
        for (index_t r = 0; r < 16; ++r) _mm512_storeu_si512(to + (below * 16 + r) * stride + beside * 16, some[r]);
    }
}

// `found` [few, many] from `narrow` [rows, few] and `broad` [rows, many]; [many, few] where it is `turned`.
inline void sum_tiles(index_t rows, index_t few, index_t many, const bfloat16* narrow, const bfloat16* broad,
                      float* found, bool turned) {
    Lines left(few * DEEP);
    half* laid = left.data();
#pragma omp parallel
    {
        open_tiles();
        const Share share(many / 32);
        const index_t first = share.from * 32, columns = (share.to - share.from) * 32;
        Lines right(columns * DEEP), sums(2 * few * columns);
        auto* own = reinterpret_cast<float*>(sums.data());
        for (index_t row = 0; row < rows; row += DEEP) {
            const index_t count = std::min(DEEP, rows - row), deep = up(count, 32) / 32;
#pragma omp for schedule(static) nowait
            for (index_t m = 0; m < few; m += 32) lay_left(narrow + row * few + m, few, count, laid + m * DEEP);
            lay_right(broad + row * many + first, many, count, columns, right.data());
#pragma omp barrier
            for (index_t n = 0; n < columns; n += 32)
                for (index_t m = 0; m < few; m += 32)
                    add_tiles(deep, laid + m * DEEP, right.data() + n * DEEP, own + n * few + m * 32, row == 0);
#pragma omp barrier
        }
        _tile_release();
        for (index_t n = 0; n < columns; n += 32)
            for (index_t m = 0; m < few; m += 32) {
                float* to = turned ? found + (first + n) * few + m : found + m * many + first + n;
                give_tiles(own + n * few + m * 32, to, turned ? few : many, turned);
            }
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
    if (out <= in)
        sum_tiles(rows, out, in, left, right, found, false);
    else
        sum_tiles(rows, in, out, right, left, found, true);
    return true;
#else
    return false;
#endif
}

}  // namespace
