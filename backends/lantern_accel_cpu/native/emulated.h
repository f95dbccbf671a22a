// The instructions of AVX-512 that units of 16 floats a register name, in C++: a processor with AVX2 can then test all of
// such a unit but the instructions themselves. Included by vector.h, whose types these are.
#pragma once

#include <stdlib.h>

namespace {

typedef int8_t Bytes64 __attribute__((vector_size(64)));
typedef uint16_t Words32 __attribute__((vector_size(64)));

#define EMULATED static inline __attribute__((unused))
#define CALLED static __attribute__((noinline, unused))
#define EACH(count) for (int i = 0; i < count; ++i)

// A processor with tiles has all that functions ask for; the other emulated unit's has none of it.
#ifdef TILES
#define HAS(feature) true
#else
#define HAS(feature) false
#endif
#define NEEDS(feature)

// --- float32 ----------------------------------------------------------------------------------------

EMULATED float emulated_sum(F x) {
    float all[W];
    memcpy(all, &x, sizeof all);
    for (int half = W / 2; half; half /= 2) EACH(half) all[i] += all[i + half];
    return all[0];
}
EMULATED float emulated_most(F x) {
    float most = x[0];
    EACH(W) most = most > x[i] ? most : x[i];
    return most;
}
EMULATED F emulated_larger(F a, F b) {
    I first = a > b;
    return (F)(((I)a & first) | ((I)b & ~first));
}
EMULATED F emulated_smaller(F a, F b) {
    I first = a < b;
    return (F)(((I)a & first) | ((I)b & ~first));
}
EMULATED F emulated_fma(F a, F b, F c) {
    __m256 x[2], y[2], z[2];
    memcpy(x, &a, sizeof a), memcpy(y, &b, sizeof b), memcpy(z, &c, sizeof c);
    EACH(2) x[i] = _mm256_fmadd_ps(x[i], y[i], z[i]);
    memcpy(&a, x, sizeof a);
    return a;
}

// --- bfloat16: numbers below 2^-126 are 0 -------------------------------------------------------------

CALLED H emulated_bfloat16(F x) {
    U bits = (U)x, nan = (U)(x != x), small = (U)((bits & 0x7f800000u) == 0);
    U upper = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    upper = (upper & ~small) | (bits >> 16 & 0x8000u & small);
    return __builtin_convertvector((upper & ~nan) | ((bits >> 16 | 0x40u) & nan), H);
}
CALLED Words32 emulated_two_bfloat16(F second, F first) {
    H both[2] = {emulated_bfloat16(first), emulated_bfloat16(second)};
    Words32 out;
    memcpy(&out, both, sizeof out);
    return out;
}
CALLED F emulated_dot(F sum, U a, U b) {
    F low = (F)(a << 16), high = (F)(a & 0xffff0000u);
    return emulated_fma(low, (F)(b << 16), emulated_fma(high, (F)(b & 0xffff0000u), sum));
}

// --- bytes and 16-bit words ---------------------------------------------------------------------------

EMULATED Bytes64 emulated_load(const void* p, bool aligned) {
    if (aligned && uintptr_t(p) % 64) abort();
    Bytes64 out;
    memcpy(&out, p, sizeof out);
    return out;
}
CALLED Words32 emulated_words_of(Words32 at, Words32 x) {
    Words32 out;
    EACH(32) out[i] = x[at[i] & 31];
    return out;
}
CALLED Bytes64 emulated_bytes_of(Bytes64 low, Bytes64 at, Bytes64 high) {
    Bytes64 out;
    EACH(64) out[i] = at[i] & 64 ? high[at[i] & 63] : low[at[i] & 63];
    return out;
}
CALLED Bytes64 emulated_shuffled(Bytes64 x, Bytes64 at) {
    Bytes64 out;
    EACH(64) out[i] = at[i] < 0 ? 0 : x[(i & 48) + (at[i] & 15)];
    return out;
}
CALLED Bytes64 emulated_four_times(__m128i x) {
    Bytes64 out;
    EACH(4) memcpy((char*)&out + 16 * i, &x, 16);
    return out;
}
CALLED I emulated_byte_dot(I sum, Bytes64 a, Bytes64 b) {  // unsigned times signed
    EACH(64) sum[i / 4] += int(uint8_t(a[i])) * int(b[i]);
    return sum;
}
EMULATED int emulated_total(I x) {
    int all = 0;
    EACH(W) all += x[i];
    return all;
}

}  // namespace

#define _mm512_reduce_add_ps(x) emulated_sum((F)(x))
#define _mm512_reduce_max_ps(x) emulated_most((F)(x))
#define _mm512_max_ps(a, b) emulated_larger((F)(a), (F)(b))
#define _mm512_min_ps(a, b) emulated_smaller((F)(a), (F)(b))
#define _mm512_fmadd_ps(a, b, c) emulated_fma((F)(a), (F)(b), (F)(c))
#define _mm512_cvtneps_pbh(x) emulated_bfloat16((F)(x))
#define _mm512_cvtne2ps_pbh(second, first) emulated_two_bfloat16((F)(second), (F)(first))
#define _mm512_dpbf16_ps(sum, a, b) emulated_dot((F)(sum), (U)(a), (U)(b))
#define _mm512_load_si512(p) ((__m512i)emulated_load(p, true))
#define _mm512_loadu_si512(p) ((__m512i)emulated_load(p, false))
#define _mm512_storeu_si512(p, x) ((void)(*(__m512i_u*)(p) = (x)))
#define _mm512_set1_epi8(x) ((__m512i)(Bytes64{} + int8_t(x)))
#define _mm512_abs_epi8(x) ((__m512i)((Bytes64)(x) < 0 ? -(Bytes64)(x) : (Bytes64)(x)))
#define _mm512_permutexvar_epi16(at, x) ((__m512i)emulated_words_of((Words32)(at), (Words32)(x)))
#define _mm512_permutex2var_epi8(low, at, high) \
    ((__m512i)emulated_bytes_of((Bytes64)(low), (Bytes64)(at), (Bytes64)(high)))
#define _mm512_shuffle_epi8(x, at) ((__m512i)emulated_shuffled((Bytes64)(x), (Bytes64)(at)))
#define _mm512_broadcast_i32x4(x) ((__m512i)emulated_four_times(x))
#define _mm512_ternarylogic_epi32(a, b, c, table) (table == 0xf8 ? (__m512i)((a) | ((b) & (c))) : (abort(), __m512i{}))
#define _mm512_dpbusd_epi32(sum, a, b) emulated_byte_dot((I)(sum), (Bytes64)(a), (Bytes64)(b))
#define _mm512_reduce_add_epi32(x) emulated_total((I)(x))
#define _mm512_test_epi32_mask(a, b) (emulated_total((I)(((U)(a) & (U)(b)) != 0)) != 0)
