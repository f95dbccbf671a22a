// Products of pairs of bfloat16, summed in float32 (AVX512_BF16).
//
// LANTERN_EMULATED replaces the instruction by multiply-adds, so that a processor without it can test all
// but the instruction itself.
#pragma once

#include "vector.h"

#if !defined(LANTERN_EMULATED)
#include <immintrin.h>
#endif

namespace {

INLINE F dot(F sum, U weights, uint32_t pair) {
#ifdef LANTERN_EMULATED
    U x = splat_bits(pair);
    return lower(x) * lower(weights) + (upper(x) * upper(weights) + sum);
#else
    return (F)_mm512_dpbf16_ps((__m512)sum, (__m512bh)(__m512i)splat_bits(pair), (__m512bh)(__m512i)weights);
#endif
}

}  // namespace
