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
#ifdef __AVX512F__
typedef float lanes __attribute__((vector_size(64)));
inline lanes select(decltype(lanes{} < lanes{}) condition, lanes x, lanes y) { return condition ? x : y; }
#else
// Two or four vectors of the processor's width, as members: the compiler keeps a vector of 64 bytes, or an array, in memory.
#ifdef __AVX__
typedef float native __attribute__((vector_size(32)));
typedef int32_t native_ints __attribute__((vector_size(32)));
template <class Vector>
struct Parts {
    Vector first, second;
};
#else
typedef float native __attribute__((vector_size(16)));
typedef int32_t native_ints __attribute__((vector_size(16)));
template <class Vector>
struct Parts {
    Vector first, second, third, fourth;
};
#endif
struct lanes : Parts<native> {};
struct lanes_mask : Parts<native_ints> {};

// Apply a function to the vectors of each operand.
template <class Result, class F, class... Operands>
inline Result by_part(F function, const Operands&... operands) {
#ifdef __AVX__
    return {{function(operands.first...), function(operands.second...)}};
#else
    return {{function(operands.first...), function(operands.second...), function(operands.third...),
             function(operands.fourth...)}};
#endif
}
#define QUINTET_OPERATOR(symbol, Result)                                              \
    inline Result operator symbol(lanes x, lanes y) {                                 \
        return by_part<Result>([](native a, native b) { return a symbol b; }, x, y);  \
    }                                                                                 \
    inline Result operator symbol(lanes x, float y) {                                 \
        return by_part<Result>([y](native a) { return a symbol y; }, x);              \
    }                                                                                 \
    inline Result operator symbol(float x, lanes y) {                                 \
        return by_part<Result>([x](native b) { return x symbol b; }, y);              \
    }
QUINTET_OPERATOR(+, lanes)
QUINTET_OPERATOR(-, lanes)
QUINTET_OPERATOR(*, lanes)
QUINTET_OPERATOR(/, lanes)
QUINTET_OPERATOR(<, lanes_mask)
QUINTET_OPERATOR(>, lanes_mask)
#undef QUINTET_OPERATOR
inline lanes operator-(lanes x) {
    return by_part<lanes>([](native a) { return -a; }, x);
}
inline lanes& operator+=(lanes& x, lanes y) { return x = x + y; }
inline lanes& operator-=(lanes& x, lanes y) { return x = x - y; }
inline lanes select(lanes_mask condition, lanes x, lanes y) {
    return by_part<lanes>([](native_ints c, native a, native b) { return c ? a : b; }, condition, x, y);
}
#endif

#ifdef __AVX512F__
inline lanes broadcast(float x) { return lanes{} + x; }
inline lanes load(const float* x) {
    lanes y;
    std::memcpy(&y, x, 64);
    return y;
}
inline void store(lanes x, float* y) { std::memcpy(y, &x, 64); }
inline lanes load(const bfloat16* x) {
    typedef uint16_t halves __attribute__((vector_size(32)));
    typedef uint32_t words __attribute__((vector_size(64)));
    halves bits;
    std::memcpy(&bits, x, 32);
    return reinterpret_cast<lanes>(__builtin_convertvector(bits, words) << 16);
}
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
#else
inline native load_native(const float* x) {
    native y;
    std::memcpy(&y, x, sizeof(native));
    return y;
}
inline void store_native(native x, float* y) { std::memcpy(y, &x, sizeof(native)); }
#ifdef __AVX__
inline native broadcast_native(float x) { return native{x, x, x, x, x, x, x, x}; }
inline lanes load(const float* x) { return {{load_native(x), load_native(x + 8)}}; }
inline void store(lanes x, float* y) {
    store_native(x.first, y);
    store_native(x.second, y + 8);
}
#else
inline native broadcast_native(float x) { return native{x, x, x, x}; }
inline lanes load(const float* x) {
    return {{load_native(x), load_native(x + 4), load_native(x + 8), load_native(x + 12)}};
}
inline void store(lanes x, float* y) {
    store_native(x.first, y);
    store_native(x.second, y + 4);
    store_native(x.third, y + 8);
    store_native(x.fourth, y + 12);
}
#endif
inline lanes broadcast(float x) {
    const native all = broadcast_native(x);
    return by_part<lanes>([all](native) { return all; }, lanes{});
}
inline lanes load(const bfloat16* x) {
    float wide[LANES];
#pragma omp simd
    for (index_t i = 0; i < LANES; ++i) wide[i] = to_float(x[i]);
    return load(wide);
}
inline void store(lanes x, bfloat16* y) {
    float wide[LANES];
    store(x, wide);
#pragma omp simd
    for (index_t i = 0; i < LANES; ++i) from_float(wide[i], y[i]);
}
#endif

// Sums of neighbouring lanes, those of x before those of y.
inline lanes add_pairs(lanes x, lanes y) {
#ifdef __AVX512F__
    return __builtin_shufflevector(x, y, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
           __builtin_shufflevector(x, y, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
#else
#ifdef __AVX__
    const auto add = [](native low, native high) {
        return __builtin_shufflevector(low, high, 0, 2, 4, 6, 8, 10, 12, 14) +
               __builtin_shufflevector(low, high, 1, 3, 5, 7, 9, 11, 13, 15);
    };
    return {{add(x.first, x.second), add(y.first, y.second)}};
#else
    const auto add = [](native low, native high) {
        return __builtin_shufflevector(low, high, 0, 2, 4, 6) + __builtin_shufflevector(low, high, 1, 3, 5, 7);
    };
    return {{add(x.first, x.second), add(x.third, x.fourth), add(y.first, y.second), add(y.third, y.fourth)}};
#endif
#endif
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
    float sums[LANES];
    store(x, sums);
    return sums[0];
}
inline lanes max_lanes(lanes x, lanes y) { return select(y > x, y, x); }
inline float max_of(lanes x) {
#ifdef __AVX512F__
    x = max_lanes(x, __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
    x = max_lanes(x, __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
    x = max_lanes(x, __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
    x = max_lanes(x, __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
    return x[0];
#else
    float numbers[LANES];
    store(x, numbers);
    float largest = numbers[0];
#pragma GCC unroll 16
    for (index_t i = 1; i < LANES; ++i) largest = numbers[i] > largest ? numbers[i] : largest;
    return largest;
#endif
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
    lanes x = select(given < low, low, given);
    x = select(x > high, high, x);
    // adding 1.5 · 2^23 rounds to an integer
    const lanes n = (x * 1.44269504f + shift) - shift;
    lanes r = x - n * 0.693359375f;
    r -= n * -2.12194440e-4f;
    const lanes power = by_part<lanes>(
        [](native part) { return reinterpret_cast<native>((__builtin_convertvector(part, native_ints) + 127) << 23); }, n);
    const lanes within = select(given > high, broadcast(INFINITY), small_exponential(r) * power);
    return select(given < low, lanes{}, within);
#endif
}

inline float exponential(float x) {
    float powers[LANES];
    store(exponential(broadcast(x)), powers);
    return powers[0];
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
