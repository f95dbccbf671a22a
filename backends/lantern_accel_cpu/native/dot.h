// Products by bfloat16 dot products of pairs (AVX512_BF16): activations are rounded to bfloat16.
//
// LANTERN_EMULATED replaces the instruction by multiply-adds, so that a processor without it can test all
// but the instruction itself.
INLINE F dot(F sum, U weights, uint32_t pair) {
#ifdef LANTERN_EMULATED
    U x = splat_bits(pair);
    return lower(x) * lower(weights) + (upper(x) * upper(weights) + sum);
#else
    return (F)_mm512_dpbf16_ps((__m512)sum, (__m512bh)(__m512i)splat_bits(pair), (__m512bh)(__m512i)weights);
#endif
}

template <int M>
void rows(const bf16* x, int64_t ldx, const bf16* w, int64_t k, float* y, bool more, const char* ahead,
          int64_t stride) {
    F acc[M][COLUMNS];
    begin<M>(acc, y, more);
    for (int64_t i = 0; i < k; i += 2, w += 2 * PANEL, ahead += stride) {
        __builtin_prefetch(ahead, 0, 2);
        __builtin_prefetch(ahead + 64, 0, 2);
        U pairs[COLUMNS];
#pragma GCC unroll 8
        for (int c = 0; c < COLUMNS; ++c) pairs[c] = load<U>(w + 2 * c * W);
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) {
            uint32_t pair;
            memcpy(&pair, x + m * ldx + i, sizeof pair);
#pragma GCC unroll 8
            for (int c = 0; c < COLUMNS; ++c) acc[m][c] = dot(acc[m][c], pairs[c], pair);
        }
    }
    finish<M>(acc, y);
}
