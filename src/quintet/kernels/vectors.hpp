// float32 and bfloat16 numbers, vectors of 16 of them and functions on vectors, shared by the kernels.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace {

using index_t = int64_t;
struct bfloat16 {
    uint16_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(bfloat16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float y;
    std::memcpy(&y, &bits, 4);
    return y;
}
inline void from_float(float x, float& y) { y = x; }
inline void from_float(float x, bfloat16& y) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    y.bits = uint16_t((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}
template <class T>
inline float rounded(float x) {
    T y;
    from_float(x, y);
    return to_float(y);
}

constexpr index_t LANES = 16;
typedef float lanes __attribute__((vector_size(64)));
typedef int32_t int_lanes __attribute__((vector_size(64)));

inline lanes load(const float* x) {
    lanes y;
    std::memcpy(&y, x, 64);
    return y;
}
inline lanes load(const bfloat16* x) {
    typedef uint16_t halves __attribute__((vector_size(32)));
    typedef uint32_t words __attribute__((vector_size(64)));
    halves bits;
    std::memcpy(&bits, x, 32);
    return reinterpret_cast<lanes>(__builtin_convertvector(bits, words) << 16);
}
inline void store(lanes x, float* y) { std::memcpy(y, &x, 64); }
inline void store(lanes x, bfloat16* y) {
#ifdef __AVX512BF16__
    const auto halves_of_x = _mm512_cvtneps_pbh((__m512)x);
    std::memcpy(y, &halves_of_x, 32);
#else
    typedef uint32_t words __attribute__((vector_size(64)));
    typedef uint16_t halves __attribute__((vector_size(32)));
    const words bits = reinterpret_cast<words>(x);
    const words near = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const words found = (bits & 0x7fffffff) > 0x7f800000 ? words{} + 0x7fc0 : near;
    const halves low = __builtin_convertvector(found, halves);
    std::memcpy(y, &low, 32);
#endif
}
inline lanes broadcast(float x) { return lanes{} + x; }

// Sums of neighbouring lanes, those of x before those of y.
inline lanes add_pairs(lanes x, lanes y) {
    return __builtin_shufflevector(x, y, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
           __builtin_shufflevector(x, y, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
}
#ifdef __AVX512F__
// Sums of lanes `step` apart: of x for lanes whose index does not have that bit, of y for the others.
template <int step>
inline lanes fold(lanes x, lanes y) {
    constexpr __mmask16 has = step == 1 ? 0xaaaa : step == 2 ? 0xcccc : step == 4 ? 0xf0f0 : 0xff00;
    const __m512 own = _mm512_mask_blend_ps(has, (__m512)x, (__m512)y), other = _mm512_mask_blend_ps(has, (__m512)y, (__m512)x);
    __m512 turned;
    if constexpr (step == 1) turned = _mm512_permute_ps(other, 0xb1);
    if constexpr (step == 2) turned = _mm512_permute_ps(other, 0x4e);
    if constexpr (step == 4) turned = _mm512_shuffle_f32x4(other, other, 0xb1);
    if constexpr (step == 8) turned = _mm512_shuffle_f32x4(other, other, 0x4e);
    return (lanes)_mm512_add_ps(own, turned);
}
#endif
// Sums of 16 vectors, each in its lane; overwrites the vectors.
inline lanes sums_of(lanes* x) {
#ifdef __AVX512F__
#pragma GCC unroll 8
    for (int t = 0; t < 8; ++t) x[t] = fold<1>(x[2 * t], x[2 * t + 1]);
#pragma GCC unroll 4
    for (int t = 0; t < 4; ++t) x[t] = fold<2>(x[2 * t], x[2 * t + 1]);
#pragma GCC unroll 2
    for (int t = 0; t < 2; ++t) x[t] = fold<4>(x[2 * t], x[2 * t + 1]);
    return fold<8>(x[0], x[1]);
#else
#pragma GCC unroll 4
    for (index_t left = LANES / 2; left; left /= 2)
#pragma GCC unroll 8
        for (index_t t = 0; t < left; ++t) x[t] = add_pairs(x[2 * t], x[2 * t + 1]);
    return x[0];
#endif
}
inline float sum_of(lanes x) {
    for (int i = 0; i < 4; ++i) x = add_pairs(x, x);
    return x[0];
}
inline lanes max_lanes(lanes x, lanes y) { return y > x ? y : x; }
inline float max_of(lanes x) {
    x = max_lanes(x, __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
    x = max_lanes(x, __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
    x = max_lanes(x, __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
    x = max_lanes(x, __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
    return x[0];
}

// e^r, r in [-ln 2 / 2, ln 2 / 2].
inline lanes small_exponential(lanes r) {
    lanes p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    return p * r * r + r + 1.0f;
}

// e^x with an error of at most 2 ulp for x <= 88; infinity slightly above, 0 below -87, NaN for NaN.
inline lanes exponential(lanes given) {
#ifdef __AVX512F__
    const lanes n = (lanes)_mm512_roundscale_ps((__m512)(given * 1.44269504f), _MM_FROUND_TO_NEAREST_INT);
    const lanes r = given - n * 0.693359375f - n * -2.12194440e-4f;
    const __mmask16 there = _mm512_cmp_ps_mask((__m512)given, _mm512_set1_ps(-87.0f), _CMP_NLT_UQ);
    return (lanes)_mm512_maskz_scalef_ps(there, (__m512)small_exponential(r), (__m512)n);
#else
    const lanes low = broadcast(-87.0f), high = broadcast(88.0f), shift = broadcast(12582912.0f);
    lanes x = given < low ? low : given;
    x = x > high ? high : x;
    // adding 1.5 · 2^23 rounds to an integer
    const lanes n = (x * 1.44269504f + shift) - shift;
    lanes r = x - n * 0.693359375f;
    r -= n * -2.12194440e-4f;
    const lanes power = reinterpret_cast<lanes>((__builtin_convertvector(n, int_lanes) + 127) << 23);
    const lanes within = given > high ? broadcast(INFINITY) : small_exponential(r) * power;
    return given < low ? lanes{} : within;
#endif
}

// 1 / x for x >= 1 with an error of at most 2 ulp.
inline lanes reciprocal(lanes x) {
#ifdef __AVX512F__
    const lanes near = (lanes)_mm512_rcp14_ps((__m512)x);
    // for infinite x the estimate is 0, and its product with x is NaN
    const lanes better = near * (2.0f - x * near);
    return better == better ? better : 1.0f / x;
#else
    return 1.0f / x;
#endif
}

}  // namespace
