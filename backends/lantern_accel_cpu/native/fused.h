// Products of very few rows with weights in fewer bits, made in registers: the sums of one row are a chain of
// dependent steps, between which the processor makes the weights that follow. In the order of rounded_panel's sums.
#pragma once

#include "rounded.h"

namespace {

#ifdef DOT_PRODUCTS

constexpr int FUSED_ROWS = 4;

INLINE U pair_of(const bf16* x) {
    uint32_t pair;
    memcpy(&pair, x, sizeof pair);
    return splat_bits(pair);
}
INLINE F dot_pair(F sum, __m512i weights, U pair) {
    return (F)_mm512_dpbf16_ps((__m512)sum, (__m512bh)(__m512i)pair, (__m512bh)weights);
}

// A panel of signed bytes: the sums of whole numbers, without the steps.
template <int M>
NEEDS("avx512vbmi") void fused_bytes(const bf16* x, int64_t ldx, const char* from, int64_t k, float* y, Lines far) {
    const Bytes& t = byte_tables;
    __m512i low0 = _mm512_load_si512(t.low), low1 = _mm512_load_si512(t.low + 64);
    __m512i high0 = _mm512_load_si512(t.high), high1 = _mm512_load_si512(t.high + 64);
    __m512i first = _mm512_load_si512(t.first), second = _mm512_load_si512(t.second);
    __m512i sign = _mm512_set1_epi8(char(0x80));
    F acc[M][COLUMNS] = {};
    for (int64_t i = 0; i < k; i += 4, from += PANEL * 4) {
        bool both = i + 2 < k;  // what is behind a row's end is not a number perhaps
        far.fetch();
        far.fetch();
#pragma GCC unroll 2
        for (int c = 0; c < COLUMNS; ++c) {
            __m512i codes = _mm512_loadu_si512(from + c * 64), size = _mm512_abs_epi8(codes);
            __m512i low = _mm512_permutex2var_epi8(low0, size, low1);
            __m512i high = _mm512_permutex2var_epi8(high0, size, high1);
            high = _mm512_ternarylogic_epi32(high, codes, sign, 0xf8);  // high | (codes & sign)
            __m512i pairs = _mm512_permutex2var_epi8(low, first, high);
#pragma GCC unroll 4
            for (int m = 0; m < M; ++m) acc[m][c] = dot_pair(acc[m][c], pairs, pair_of(x + m * ldx + i));
            if (!both) continue;
            pairs = _mm512_permutex2var_epi8(low, second, high);
#pragma GCC unroll 4
            for (int m = 0; m < M; ++m) acc[m][c] = dot_pair(acc[m][c], pairs, pair_of(x + m * ldx + i + 2));
        }
    }
    finish(acc, y);
}

// Whole groups of a panel, k a multiple of GROUP; as group_rows.
template <int M, int BITS>
void fused_groups(const bf16* x, int64_t ldx, const char* from, int64_t k, const float* sums, int64_t ld_sums, float* y,
                  Lines far) {
    constexpr int64_t BYTES = PANEL * (4 + GROUP * BITS / 8);
    F acc[M][COLUMNS] = {};
    for (int64_t at = 0; at < k; at += GROUP, from += BYTES, ++sums) {
        F part[M][COLUMNS] = {};
        const char* lanes = from + PANEL * 4;
        for (int64_t i = at; i < at + GROUP; i += 16, lanes += 2 * BITS * PANEL) {
#pragma GCC unroll 8
            for (int t = 0; t < 8; ++t) {
                if (t * BITS % 8 < BITS) far.fetch();
#pragma GCC unroll 2
                for (int c = 0; c < COLUMNS; ++c) {
                    U pairs = codes<BITS>(lanes + c * 64, t) | 0x43004300u;
#pragma GCC unroll 4
                    for (int m = 0; m < M; ++m)
                        part[m][c] = dot_pair(part[m][c], (__m512i)pairs, pair_of(x + m * ldx + i + 2 * t));
                }
            }
        }
#pragma GCC unroll 2
        for (int c = 0; c < COLUMNS; ++c) {
            F step = get((const bf16*)from + c * W);
            F offset = get((const bf16*)from + PANEL + c * W) - ADDED * step;
#pragma GCC unroll 4
            for (int m = 0; m < M; ++m) acc[m][c] += part[m][c] * step + splat(sums[m * ld_sums]) * offset;
        }
    }
    finish(acc, y);
}

template <int M>
void fused_rows(const bf16* x, int64_t ldx, const char* w, int kept, int64_t k, float* y, const float* sums,
                int64_t ld_sums) {
    if (kept == INT8) {
        const char* from = w + PANEL * 4;
        fused_bytes<M>(x, ldx, from, k, y, Lines{from + FAR, 64});
        for (int m = 0; m < M; ++m)
            for (int c = 0; c < PANEL; c += W)
                put(y + m * PANEL + c, load<F>(y + m * PANEL + c) * load<F>((const float*)w + c));
    } else if (kept == INT6) {
        fused_groups<M, 6>(x, ldx, w, k, sums, ld_sums, y, Lines{w + FAR, 64});
    } else {
        fused_groups<M, 4>(x, ldx, w, k, sums, ld_sums, y, Lines{w + FAR, 64});
    }
}

bool fused(const bf16* x, int64_t ldx, int64_t m, const char* w, int kept, int64_t k, float* y, const float* sums,
           int64_t ld_sums) {
    if (m > FUSED_ROWS || (kept == INT8 ? !looks_up() : k % GROUP != 0)) return false;
    switch (m) {
        case 1: fused_rows<1>(x, ldx, w, kept, k, y, sums, ld_sums); break;
        case 2: fused_rows<2>(x, ldx, w, kept, k, y, sums, ld_sums); break;
        case 3: fused_rows<3>(x, ldx, w, kept, k, y, sums, ld_sums); break;
        default: fused_rows<4>(x, ldx, w, kept, k, y, sums, ld_sums);
    }
    return true;
}
#endif


// --- float32 activations ---------------------------------------------------------------------------

// Rows whose sums of V vectors of columns, next to the weights that are being made, the registers hold: all columns of
// a panel in one go, or the first and the other half one after the other.
constexpr int PANEL_VECTORS = PANEL / W, HALF_VECTORS = PANEL_VECTORS / 2;
constexpr int PANEL_ROWS = WIDTH == 16 ? 4 : WIDTH == 8 ? 2 : 0, HALF_ROWS = WIDTH > 4 ? 4 : 0;

// Inputs [i, i + N), whose weights weight(i, c) makes, times M rows.
template <int M, int V, int N, class Weight>
INLINE void add_inputs(F (&acc)[M][V], const float* x, int64_t ldx, Weight weight) {
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) {
        F a[M];
#pragma GCC unroll 4
        for (int m = 0; m < M; ++m) a[m] = splat(x[m * ldx + i]);
#pragma GCC unroll 4
        for (int c = 0; c < V; ++c) {
            F w = weight(i, c);
#pragma GCC unroll 4
            for (int m = 0; m < M; ++m) acc[m][c] += a[m] * w;
        }
    }
}

// V vectors of columns of a panel, from `column` on; a line of `far` is fetched for every 64 bytes that are read.
template <int M, int V>
void fused_bytes(const float* x, int64_t ldx, const char* w, int column, int64_t k, float* y, Lines far) {
    F acc[M][V] = {};
    const char* from = w + PANEL * 4 + column * 4;
    for (int64_t i = 0; i < k; i += 4, from += PANEL * 4) {
        U lanes[V];
#pragma GCC unroll 4
        for (int c = 0; c < V; ++c) lanes[c] = load<U>(from + c * W * 4);
        far.fetch();
        if (V * W == PANEL) far.fetch();
        auto weight = [&](int j, int c) INLINE_LAMBDA { return lifted_byte(lanes[c], j); };
        const float* at = x + i;
        switch (k - i) {  // what is behind a row's end is not a number perhaps
            case 1: add_inputs<M, V, 1>(acc, at, ldx, weight); break;
            case 2: add_inputs<M, V, 2>(acc, at, ldx, weight); break;
            case 3: add_inputs<M, V, 3>(acc, at, ldx, weight); break;
            default: add_inputs<M, V, 4>(acc, at, ldx, weight);
        }
    }
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
        for (int c = 0; c < V; ++c) put(y + m * PANEL + column + c * W, acc[m][c]);
}

// The same of whole groups, k a multiple of GROUP.
template <int M, int V, int BITS>
void fused_groups(const float* x, int64_t ldx, const char* w, int column, int64_t k, float* y, Lines far) {
    constexpr int64_t ROW = PANEL * 4, LANES = BITS == 6 ? 3 : 2;  // rows of lanes of 16 inputs
    F acc[M][V] = {};
    for (int64_t i = 0; i < k; w += ROW * (1 + GROUP / 16 * LANES)) {
        const char* from = w + ROW + column * 4;
        far.fetch();
        if (V * W == PANEL) far.fetch();
        for (int64_t end = i + GROUP; i < end; i += 16, from += LANES * ROW) {
#pragma GCC unroll 6
            for (int line = 0; line < LANES * (V * W == PANEL ? 2 : 1); ++line) far.fetch();
#pragma GCC unroll 8
            for (int t = 0; t < 8; ++t) {
                U pairs[V];
#pragma GCC unroll 4
                for (int c = 0; c < V; ++c) pairs[c] = codes<BITS>(from + c * W * 4, t) | 0x43004300u;
                add_inputs<M, V, 2>(acc, x + i + 2 * t, ldx, [&](int j, int c) INLINE_LAMBDA {
                    Scale scale(w, column + c * W);
                    return (j ? upper(pairs[c]) : lower(pairs[c])) * scale.step + scale.offset;
                });
            }
        }
    }
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
        for (int c = 0; c < V; ++c) put(y + m * PANEL + column + c * W, acc[m][c]);
}

template <int M, int V> void fused_columns(const float* x, int64_t ldx, const char* w, int kept, int64_t k, float* y) {
    for (int column = 0; column < PANEL; column += V * W) {
        bool whole = V * W == PANEL;
        Lines far{w + FAR + (column ? 64 : 0), whole ? 64 : 128};
        if (kept == INT8)
            fused_bytes<M, V>(x, ldx, w, column, k, y, far);
        else if (kept == INT6)
            fused_groups<M, V, 6>(x, ldx, w, column, k, y, far);
        else
            fused_groups<M, V, 4>(x, ldx, w, column, k, y, far);
    }
    if (kept == INT8) put_steps(y, M, (const float*)w, LIFTED);
}

template <int M> INLINE bool fused_rows(int64_t m, const float* x, int64_t ldx, const char* w, int kept, int64_t k, float* y) {
    if constexpr (M > 0) {
        if (m != M) return fused_rows<M - 1>(m, x, ldx, w, kept, k, y);
        fused_columns<M, (M <= PANEL_ROWS ? PANEL_VECTORS : HALF_VECTORS)>(x, ldx, w, kept, k, y);
        return true;
    }
    return false;
}

// A panel times m rows in registers; false where these are too many, or there is no such form.
bool fused(const float* x, int64_t ldx, int64_t m, const char* w, int kept, int64_t k, float* y, const float*, int64_t) {
    if (kept != INT8 && k % GROUP) return false;
    return fused_rows<HALF_ROWS>(m, x, ldx, w, kept, k, y);
}

}  // namespace
