// Products of pairs of bfloat16, summed in float32 (AVX512_BF16).
#pragma once

#include "vector.h"

namespace {

INLINE F dot(F sum, U weights, uint32_t pair) {
    return (F)_mm512_dpbf16_ps((__m512)sum, (__m512bh)(__m512i)splat_bits(pair), (__m512bh)(__m512i)weights);
}

}  // namespace
