// Vectors of one instruction set, in the compiler's own vector types.
//
// A unit (see unit.cpp) sets WIDTH, the floats of a register, and its flags; everything here has internal
// linkage, so that no unit's code can be linked into another's.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>
#if WIDTH > 4
#include <immintrin.h>
#endif

namespace {

constexpr int W = WIDTH;
typedef float F __attribute__((vector_size(4 * WIDTH)));
typedef int32_t I __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t U __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t H __attribute__((vector_size(2 * WIDTH)));

}  // namespace

#ifdef LANTERN_EMULATED
#include "emulated.h"
#else
#define HAS(feature) __builtin_cpu_supports(feature)
#define NEEDS(feature) __attribute__((target(feature)))
#endif

namespace {

struct bf16 {
    uint16_t bits;
};

#define INLINE static inline __attribute__((always_inline))
#define INLINE_MEMBER inline __attribute__((always_inline))
#define INLINE_LAMBDA __attribute__((always_inline))

INLINE F splat(float x) { return x - F{}; }
INLINE U splat_bits(uint32_t x) { return x + U{}; }

template <class V, class P> INLINE V load(const P* p) {
    V v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE float value(float x) { return x; }
INLINE float value(bf16 x) {
    uint32_t u = uint32_t(x.bits) << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}

// Two bfloat16 in 32 bits: the first is the lower half.
INLINE F lower(U pair) { return (F)(pair << 16); }
INLINE F upper(U pair) { return (F)(pair & 0xffff0000u); }

// Round to nearest, ties to even, as torch does; a NaN stays one.
INLINE U rounded(F x) {
    U u = (U)x;
    U r = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    U nan = (U)(x != x);
    return (r & ~nan) | (nan & 0x7fc0u);
}

INLINE F get(const float* p) { return load<F>(p); }
INLINE F get(const bf16* p) { return (F)(__builtin_convertvector(load<H>(p), U) << 16); }
INLINE void put(float* p, F x) { memcpy(p, &x, sizeof x); }
INLINE void put(uint32_t* p, U x) { memcpy(p, &x, sizeof x); }
INLINE void put(bf16* p, F x) {
#ifdef DOT_PRODUCTS
    H h = (H)_mm512_cvtneps_pbh((__m512)x);  // the same, but that it takes numbers below 1.2e-38 for 0
#else
    H h = __builtin_convertvector(rounded(x), H);
#endif
    memcpy(p, &h, sizeof h);
}
INLINE void put1(float* p, float x) { *p = x; }
INLINE void put1(bf16* p, float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    p->bits = x != x ? 0x7fc0 : uint16_t((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

// Interleaving of two vectors, and its inverse.
#if WIDTH == 16
#define ZIP_LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define ZIP_HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#define EVEN 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define ODD 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
#define SWAPPED 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14
#elif WIDTH == 8
#define ZIP_LOW 0, 8, 1, 9, 2, 10, 3, 11
#define ZIP_HIGH 4, 12, 5, 13, 6, 14, 7, 15
#define EVEN 0, 2, 4, 6, 8, 10, 12, 14
#define ODD 1, 3, 5, 7, 9, 11, 13, 15
#define SWAPPED 1, 0, 3, 2, 5, 4, 7, 6
#else
#define ZIP_LOW 0, 4, 1, 5
#define ZIP_HIGH 2, 6, 3, 7
#define EVEN 0, 2, 4, 6
#define ODD 1, 3, 5, 7
#define SWAPPED 1, 0, 3, 2
#endif

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define SHUFFLED_AS(T, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#endif
#endif
#ifndef SHUFFLED_AS  // GCC before 12
#define SHUFFLED_AS(T, a, b, ...) __builtin_shuffle(a, b, (T){__VA_ARGS__})
#endif
#define SHUFFLED(a, b, ...) SHUFFLED_AS(I, a, b, __VA_ARGS__)

INLINE F zip_low(F a, F b) { return SHUFFLED(a, b, ZIP_LOW); }
INLINE F zip_high(F a, F b) { return SHUFFLED(a, b, ZIP_HIGH); }
INLINE F evens(F a, F b) { return SHUFFLED(a, b, EVEN); }
INLINE F odds(F a, F b) { return SHUFFLED(a, b, ODD); }
INLINE F swapped(F a) { return SHUFFLED(a, a, SWAPPED); }

// Lane i of the result is the sum of vector i; destroys the vectors.
INLINE F sums(F (&a)[W]) {
#pragma GCC unroll 8
    for (int half = W / 2; half; half /= 2)
#pragma GCC unroll 16
        for (int i = 0; i < half; ++i)
            a[i] = zip_low(a[i], a[i + half]) + zip_high(a[i], a[i + half]);
    return a[0];
}

// Lane i of vector j becomes lane j of vector i.
INLINE void transpose(F (&a)[W]) {
#pragma GCC unroll 4
    for (int round = W; round > 1; round /= 2) {
        F b[W];
#pragma GCC unroll 16
        for (int i = 0; i < W / 2; ++i) {
            b[2 * i] = zip_low(a[i], a[i + W / 2]);
            b[2 * i + 1] = zip_high(a[i], a[i + W / 2]);
        }
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) a[i] = b[i];
    }
}

// The sum and the largest of all lanes.
#if WIDTH == 16
INLINE float total(F x) { return _mm512_reduce_add_ps((__m512)x); }
INLINE float largest(F x) { return _mm512_reduce_max_ps((__m512)x); }
#elif WIDTH == 8
INLINE float total(F x) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}
INLINE float largest(F x) {
    __m128 half = _mm_max_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}
#else
INLINE float total(F x) { return (x[0] + x[2]) + (x[1] + x[3]); }
INLINE float largest(F x) {
    float a = x[0] > x[2] ? x[0] : x[2], b = x[1] > x[3] ? x[1] : x[3];
    return a > b ? a : b;
}
#endif

// a > b ? a : b, and a < b ? a : b.
#if WIDTH == 16
INLINE F larger(F a, F b) { return (F)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE F smaller(F a, F b) { return (F)_mm512_min_ps((__m512)a, (__m512)b); }
#elif WIDTH == 8
INLINE F larger(F a, F b) { return (F)_mm256_max_ps((__m256)a, (__m256)b); }
INLINE F smaller(F a, F b) { return (F)_mm256_min_ps((__m256)a, (__m256)b); }
#else
INLINE F larger(F a, F b) { return a > b ? a : b; }
INLINE F smaller(F a, F b) { return a < b ? a : b; }
#endif

// Lane by lane: yes where all bits of choose are set, no where none is.
INLINE F either(U choose, F yes, F no) { return (F)(((U)yes & choose) | ((U)no & ~choose)); }

// a b + c, with one rounding in units of 8 and 16 floats.
INLINE F multiply_add(F a, F b, F c) {
#if WIDTH == 16
    return (F)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif WIDTH == 8
    return (F)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

// The whole number nearest to x, or to x times scale, ties to even, of numbers below 2^22.
INLINE I nearest(F x) { return (I)(x + 12582912.0f) - 0x4b400000; }
INLINE I nearest(F x, F scale) { return (I)multiply_add(x, scale, splat(12582912.0f)) - 0x4b400000; }

// 0, 1, 2 and so on.
INLINE U counters() {
    U at;
    for (int i = 0; i < W; ++i) at[i] = uint32_t(i);
    return at;
}

#if WIDTH == 8 && defined(__AVX2__)
// Of each set of lanes, as a mask: these lanes in order, one a byte.
struct InFront {
    uint64_t lanes[256] = {};
    constexpr InFront() {
        for (unsigned some = 0; some < 256; ++some)
            for (unsigned j = 0, many = 0; j < 8; ++j)
                if (some >> j & 1) lanes[some] |= uint64_t(j) << (8 * many++);
    }
};
constexpr InFront in_front;
#endif

// Put the lanes of x and code for which `chosen` is not 0 (all bits) at `to` and `codes`, where whole vectors have space, in
// order; returns how many.
INLINE int put_chosen(U chosen, F x, U code, float* to, uint32_t* codes) {
#if WIDTH == 16 && defined(__AVX512F__)
    __mmask16 some = _mm512_test_epi32_mask((__m512i)chosen, (__m512i)chosen);
    _mm512_storeu_ps(to, _mm512_maskz_compress_ps(some, (__m512)x));
    _mm512_storeu_si512(codes, _mm512_maskz_compress_epi32(some, (__m512i)code));
    return __builtin_popcount(some);
#elif WIDTH == 8 && defined(__AVX2__)
    unsigned some = unsigned(_mm256_movemask_ps((__m256)chosen));
    __m256i from = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)&in_front.lanes[some]));
    _mm256_storeu_ps(to, _mm256_permutevar8x32_ps((__m256)x, from));
    _mm256_storeu_si256((__m256i*)codes, _mm256_permutevar8x32_epi32((__m256i)code, from));
    return __builtin_popcount(some);
#else
    int many = 0;
    for (int j = 0; j < W; ++j) to[many] = x[j], codes[many] = code[j], many += chosen[j] != 0;
    return many;
#endif
}

// exp to about 1e-7, after Cephes' expf; arguments are held between -87.3 and 88.3. exp(0) is 1.
INLINE F exponential(F x) {
    x = smaller(larger(x, splat(-87.3f)), splat(88.3f));
    F shifted = x * 1.44269504088896341f + 12582912.0f;
    F whole = shifted - 12582912.0f;
    F r = x - whole * 0.693359375f;
    r = r - whole * -2.12194440e-4f;
    F p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    return (F)((U)p + ((U)shifted << 23));  // times a power of two
}

// exp to 3e-6, a thousandth of what the rounding to bfloat16 takes away; arguments lie between -87 and 87.
INLINE F exponential_for_bfloat16(F x) {
    F ours = splat(1.44269504088896341f), whole = multiply_add(x, ours, splat(12582912.0f)), power = whole - 12582912.0f;
    F r = multiply_add(x, ours, -power), p = splat(0.009582852944731712f);
    p = multiply_add(p, r, splat(0.055906426161527634f));
    p = multiply_add(p, r, splat(0.24024099111557007f));
    p = multiply_add(p, r, splat(0.6931241750717163f));
    p = multiply_add(p, r, splat(1.0f));
    return (F)((U)p + ((U)whole << 23));
}

// Y: what the result becomes.
template <class Y> INLINE F silu(F x) {
    F e = sizeof(Y) == 2 ? exponential_for_bfloat16(smaller(larger(-x, splat(-87.0f)), splat(87.0f))) : exponential(-x);
    return x / (1.0f + e);
}

}  // namespace
