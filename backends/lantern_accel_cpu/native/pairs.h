// Attention of a row and head by dot products of pairs: queries, and the weights of values, are rounded to
// bfloat16. Every number is made in one order, whatever the number of queries.
#pragma once

#include "dot.h"
#include "native.h"
#include "small.h"

namespace {

INLINE uint32_t pair_at(const bf16* p) {
    uint32_t pair;
    memcpy(&pair, p, sizeof pair);
    return pair;
}

// Scores of M queries with W slots, whose keys lie across.
template <int M>
void pair_scores(const bf16* q, int64_t d, const uint32_t* keys, float* out, int64_t ldo) {
    F even[M], odd[M];  // two chains: one would wait for itself
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) even[m] = odd[m] = F{};
    for (int64_t j = 0; j < d; j += 4) {
        U a = load<U>(keys + j / 2 * W), b = load<U>(keys + (j / 2 + 1) * W);
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) {
            even[m] = dot(even[m], a, pair_at(q + m * d + j));
            odd[m] = dot(odd[m], b, pair_at(q + m * d + j + 2));
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) put(out + m * ldo, even[m] + odd[m]);
}

template <int M> INLINE void pick_scores(int m, const bf16* q, int64_t d, const uint32_t* keys, float* out, int64_t ldo) {
    if (m == M)
        pair_scores<M>(q, d, keys, out, ldo);
    else if constexpr (M > 1)
        pick_scores<M - 1>(m, q, d, keys, out, ldo);
}

// Pairs of the same column of two rows: of columns 8 l to 8 l + 3, and of the four behind them, for each l.
typedef uint16_t Halves __attribute__((vector_size(4 * WIDTH)));
INLINE void two_rows(const bf16* x, const bf16* y, U& low, U& high) {
    Halves a = load<Halves>(x), b = load<Halves>(y);
    low = (U)SHUFFLED_AS(Halves, a, b, 0, 32, 1, 33, 2, 34, 3, 35, 8, 40, 9, 41, 10, 42, 11, 43, 16, 48, 17, 49, 18, 50,
                         19, 51, 24, 56, 25, 57, 26, 58, 27, 59);
    high = (U)SHUFFLED_AS(Halves, a, b, 4, 36, 5, 37, 6, 38, 7, 39, 12, 44, 13, 45, 14, 46, 15, 47, 20, 52, 21, 53, 22,
                          54, 23, 55, 28, 60, 29, 61, 30, 62, 31, 63);
}
// Their sums, in the order of columns.
INLINE void in_order(F& low, F& high) {
    F first = SHUFFLED(low, high, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    high = SHUFFLED(low, high, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    low = first;
}

// Sum of values weighted by p [M][n], n even: C times 2 W columns.
template <int M, int C, class A>
void pair_values(const bf16* p, int64_t ldp, const bf16* v, const int32_t* slots, int64_t n, int64_t stride,
                 const float* scale, A* out, int64_t ldo, const bf16* ahead) {
    F low[M][C], high[M][C];
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
        for (int c = 0; c < C; ++c) low[m][c] = high[m][c] = F{};
    for (int64_t i = 0; i < n; i += 2) {
        const bf16 *x = v + slots[i] * stride, *y = v + slots[i + 1] * stride;
        soon(ahead, slots + i, 2, stride, C * 2 * W);
#pragma GCC unroll 2
        for (int c = 0; c < C; ++c) {
            U a, b;
            two_rows(x + c * 2 * W, y + c * 2 * W, a, b);
#pragma GCC unroll 8
            for (int m = 0; m < M; ++m) {
                uint32_t pair = pair_at(p + m * ldp + i);
                low[m][c] = dot(low[m][c], a, pair);
                high[m][c] = dot(high[m][c], b, pair);
            }
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
        for (int c = 0; c < C; ++c) {
            in_order(low[m][c], high[m][c]);
            put(out + m * ldo + c * 2 * W, low[m][c] * scale[m]);
            put(out + m * ldo + c * 2 * W + W, high[m][c] * scale[m]);
        }
}

template <int M, int C, class A>
INLINE void pick_pairs(int m, const bf16* p, int64_t ldp, const bf16* v, const int32_t* slots, int64_t n,
                       int64_t stride, const float* scale, A* out, int64_t ldo, const bf16* ahead) {
    if (m == M)
        pair_values<M, C>(p, ldp, v, slots, n, stride, scale, out, ldo, ahead);
    else if constexpr (M > 1)
        pick_pairs<M - 1, C>(m, p, ldp, v, slots, n, stride, scale, out, ldo, ahead);
}

constexpr int SCORED = 8, WEIGHTED = 6;  // queries whose sums the registers hold
// Keys that come from main memory are fetched so many blocks ahead as well: the values' loop is too short to
// fetch all of them. More queries than FEW multiply long enough.
constexpr int FEW = 8, BLOCKS_AHEAD = 4;

// `m` queries of `width` d, a multiple of 2 W, over the slots; arguments as attend_head's. keep [m][ld]; `after`:
// the keys that are read next; `far`: they are in no cache.
template <class A>
void attend_pairs(const float* q, int64_t q_stride, const bf16* k, const bf16* v, const bf16* after, int64_t d, int64_t stride,
                  const int32_t* slots, int64_t found, const float* keep, int64_t ld, int32_t m, A* out,
                  int64_t out_stride, bool far) {
    int64_t whole = (found + W - 1) / W * W;
    size_t queries = size_t(m) * d * sizeof(bf16), keys = size_t(d) / 2 * W * sizeof(uint32_t);
    size_t scores = size_t(m) * ld * sizeof(float), weights = size_t(m) * ld * sizeof(bf16);
    auto round = [](size_t bytes) { return (bytes + 63) / 64 * 64; };
    Scratch scratch;
    char* work = scratch.take<char>(round(queries) + keys + round(scores) + round(weights) + m * sizeof(float));
    bf16* turned = (bf16*)work;
    uint32_t* across = (uint32_t*)(work += round(queries));
    float* p = (float*)(work += keys);
    bf16* weight = (bf16*)(work += round(scores));
    float* scale = (float*)(work += round(weights));
    for (int32_t t = 0; t < m; ++t)
        for (int64_t c = 0; c < d; c += W) put(turned + t * d + c, load<F>(q + t * q_stride + c));
    for (int64_t i = 0; i < whole; i += W) {
        keys_across(k, slots + i, stride, d / 2, across);
        soon(v, slots + i, W, stride, d);
        int64_t ahead = i + BLOCKS_AHEAD * W;
        if (far && m < FEW && ahead < whole) soon(k, slots + ahead, W, stride, d);
        if (far && m < FEW && ahead >= whole && ahead < 2 * whole) soon(after, slots + ahead - whole, W, stride, d);
        for (int32_t t = 0, blocks = (m + SCORED - 1) / SCORED, b = 0; b < blocks; ++b) {
            int32_t some = m * (b + 1) / blocks - t;
            pick_scores<SCORED>(some, turned + t * d, d, across, p + t * ld + i, ld);
            t += some;
        }
    }
    for (int32_t t = 0; t < m; ++t) {
        scale[t] = soften(p + t * ld, keep + t * ld, whole);
        for (int64_t i = 0; i < whole; i += W) put(weight + t * ld + i, load<F>(p + t * ld + i));
    }
    for (int32_t t = 0, blocks = (m + WEIGHTED - 1) / WEIGHTED, b = 0; b < blocks; ++b) {
        int32_t some = m * (b + 1) / blocks - t;
        int64_t c = 0;
        for (; c + 4 * W <= d; c += 4 * W)
            pick_pairs<WEIGHTED, 2>(some, weight + t * ld, ld, v + c, slots, whole, stride, scale + t,
                                    out + t * out_stride + c, out_stride, after + c);
        if (c < d)
            pick_pairs<WEIGHTED, 1>(some, weight + t * ld, ld, v + c, slots, whole, stride, scale + t,
                                    out + t * out_stride + c, out_stride, after + c);
        t += some;
    }
}

}  // namespace
