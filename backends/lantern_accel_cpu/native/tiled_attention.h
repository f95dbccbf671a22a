// Attention of a row and head by tiles: queries, and the weights of values, are rounded to bfloat16. Every number is made
// in one order, whatever the number of queries.
#pragma once

#include <algorithm>

#include "integers.h"
#include "small.h"
#include "tile.h"
#if WIDTH == 16
#include "pairs.h"
#endif

namespace {

constexpr int SCORED_BLOCKS = 3;  // of 16 slots, whose scores tiles make at a time
constexpr int WIDE = 64;          // columns of values whose sums tiles hold

// Keys of 16 slots, the rows of a tile.
struct KeyBlock {
    const bf16* rows;
    int64_t stride;  // in bytes
};

// Where the keys of these slots lie, or copies of them where they are no neighbours.
INLINE KeyBlock key_block(const bf16* k, const int32_t* slots, int64_t stride, int64_t d, bf16* copies) {
    bool neighbours = true;
    for (int s = 1; s < TILE_ROWS; ++s) neighbours &= slots[s] == slots[0] + s;
    if (neighbours) return {k + slots[0] * stride, stride * int64_t(sizeof(bf16))};
    for (int s = 0; s < TILE_ROWS; ++s) memcpy(copies + s * d, k + slots[s] * stride, size_t(d) * sizeof(bf16));
    return {copies, d * int64_t(sizeof(bf16))};
}

// Scores of B blocks of 16 slots with 16 queries: float32 [B][16 slots][16 queries]. q: bfloat16 [d / 2][16][2].
template <int B> INLINE void tile_scores(const KeyBlock* keys, const bf16* q, int64_t d, float* out) {
    constexpr int64_t SIZE = TILE_ROWS * TILE_ROWS;
    tile_zero<0>();
    if (B > 1) tile_zero<1>();
    if (B > 2) tile_zero<2>();
    for (int64_t j = 0; j < d; j += DEEP) {
        tile_load<3>(q + j * TILE_ROWS, TILE_BYTES);
        tile_load<4>(keys[0].rows + j, keys[0].stride);
        tile_pairs<0, 4, 3>();
        if (B > 1) tile_load<5>(keys[1].rows + j, keys[1].stride), tile_pairs<1, 5, 3>();
        if (B > 2) tile_load<6>(keys[2].rows + j, keys[2].stride), tile_pairs<2, 6, 3>();
    }
    tile_store<0>(out, TILE_BYTES);
    if (B > 1) tile_store<1>(out + SIZE, TILE_BYTES);
    if (B > 2) tile_store<2>(out + 2 * SIZE, TILE_BYTES);
}

// Scores [16 slots][16 queries] to the rows of m queries.
INLINE void scores_by_query(const float* from, int32_t m, float* p, int64_t ld) {
    for (int32_t t = 0; t < m; t += W)
        for (int s = 0; s < TILE_ROWS; s += W) {
            F a[W];
#pragma GCC unroll 16
            for (int i = 0; i < W; ++i) a[i] = load<F>(from + (s + i) * TILE_ROWS + t);
            transpose(a);
#pragma GCC unroll 16
            for (int i = 0; i < W; ++i)
                if (t + i < m) put(p + (t + i) * ld + s, a[i]);
        }
}

// Numbers as bfloat16 has them.
INLINE void put_pairs(bf16* p, F x) { put(p, x); }
INLINE void put_pairs(float* p, F x) {
    bf16 some[W];
    put(some, x);
    put(p, get(some));
}

// soften's softmax, of n scores whose first `open` ones are kept without asking; weights as bfloat16, and 0 up to `deep`.
template <class Weight>
INLINE float soften_to(const float* p, const float* keep, int64_t open, int64_t n, int64_t deep, Weight* weight) {
    F most = splat(-3e38f), sum{};
    int64_t i = 0;
    for (; i + W <= open; i += W) most = larger(most, load<F>(p + i));
    for (; i < n; i += W) most = larger(most, load<F>(p + i) + (load<F>(keep + i) - 1.0f) * 1e30f);
    float top = largest(most);
    for (i = 0; i < n; i += W) {
        F e = exponential(load<F>(p + i) - top);
        if (i + W > open) e = e * load<F>(keep + i);
        sum += e;
        put_pairs(weight + i, e);
    }
    memset(weight + n, 0, size_t(deep - n) * sizeof(Weight));
    float all = total(sum);
    return all > 0 ? 1.0f / all : 0.0f;
}

// 32 columns of two rows as pairs, in an order that columns_back undoes.
INLINE void columns_in_pairs(const bf16* x, const bf16* y, bf16* out) {
#if WIDTH == 16
    U low, high;
    two_rows(x, y, low, high);
    put((uint32_t*)out, low);
    put((uint32_t*)out + W, high);
#else
    for (int c = 0; c < DEEP; ++c) out[2 * c] = x[c], out[2 * c + 1] = y[c];
#endif
}
INLINE void columns_back(float* x) {
#if WIDTH == 16
    F low = load<F>(x), high = load<F>(x + W);
    in_order(low, high);
    put(x, low);
    put(x + W, high);
#endif
}

// Sums of 32 or 64 columns of values, weighted by 16 queries' weights [16][ld]: float32 [16][columns]. n: slots, a
// multiple of 32; buffer: bfloat16 [2][32][columns].
INLINE void tile_values(const bf16* weight, int64_t ld, const bf16* v, const int32_t* slots, int64_t n, int64_t stride,
                        int64_t columns, bf16* buffer, float* out, const bf16* ahead) {
    constexpr int64_t HALF = DEEP / 2;
    bool wide = columns > DEEP;
    int64_t row = columns * 2 * int64_t(sizeof(bf16));
    tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
    for (int64_t i = 0; i < n; i += DEEP) {
        bf16* pairs = buffer + i / DEEP % 2 * DEEP * columns;
        for (int64_t s = 0; s < DEEP; s += 2)
            for (int64_t c = 0; c < columns; c += DEEP)
                columns_in_pairs(v + slots[i + s] * stride + c, v + slots[i + s + 1] * stride + c, pairs + s * columns + 2 * c);
        tile_load<4>(weight + i, ld * int64_t(sizeof(bf16)));
        tile_load<5>(pairs, row), tile_pairs<0, 4, 5>();
        tile_load<6>(pairs + 2 * HALF, row), tile_pairs<1, 4, 6>();
        if (wide) {
            tile_load<5>(pairs + 4 * HALF, row), tile_pairs<2, 4, 5>();
            tile_load<6>(pairs + 6 * HALF, row), tile_pairs<3, 4, 6>();
        }
        soon(ahead, slots + i, DEEP, stride, columns);
    }
    tile_store<0>(out, row), tile_store<1>(out + HALF, row);
    if (wide) tile_store<2>(out + 2 * HALF, row), tile_store<3>(out + 3 * HALF, row);
}

// --- few queries: the same sums by vectors ----------------------------------------------------------

// Scores of M queries with W slots, whose keys lie across; q: float32 [M][d], numbers of bfloat16.
template <int M> INLINE void few_scores(const float* q, int64_t d, const uint32_t* keys, float* out, int64_t ldo) {
    F sum[M] = {};
    for (int64_t j = 0; j < d; j += DEEP) {
        F even[M] = {}, odd[M] = {};
#pragma GCC unroll 16
        for (int i = 0; i < DEEP; i += 2) {
            U pair = load<U>(keys + (j + i) / 2 * W);
            F low = lower(pair), high = upper(pair);
#pragma GCC unroll 3
            for (int m = 0; m < M; ++m) {
                even[m] = multiply_add(splat(q[m * d + j + i]), low, even[m]);
                odd[m] = multiply_add(splat(q[m * d + j + i + 1]), high, odd[m]);
            }
        }
#pragma GCC unroll 3
        for (int m = 0; m < M; ++m) sum[m] += even[m] + odd[m];
    }
#pragma GCC unroll 3
    for (int m = 0; m < M; ++m) put(out + m * ldo, sum[m]);
}

// Sums of C times 2 W columns of values, weighted by M queries' weights [M][n]; n: a multiple of 32.
template <int M, int C, class A>
INLINE void few_values(const float* weight, const bf16* v, const int32_t* slots, int64_t n, int64_t stride, const float* scale,
                       A* out, int64_t ldo, const bf16* ahead) {
    F low[M][C] = {}, high[M][C] = {};
    for (int64_t i = 0; i < n; i += DEEP) {
        F lows[2][M][C] = {}, highs[2][M][C] = {};
#pragma GCC unroll 4
        for (int s = 0; s < DEEP; s += 2)
#pragma GCC unroll 2
            for (int odd = 0; odd < 2; ++odd) {
                const bf16* row = v + slots[i + s + odd] * stride;
#pragma GCC unroll 2
                for (int c = 0; c < C; ++c) {
                    U pair = load<U>(row + c * 2 * W);
                    F first = lower(pair), second = upper(pair);
#pragma GCC unroll 3
                    for (int m = 0; m < M; ++m) {
                        F one = splat(weight[m * n + i + s + odd]);
                        lows[odd][m][c] = multiply_add(one, first, lows[odd][m][c]);
                        highs[odd][m][c] = multiply_add(one, second, highs[odd][m][c]);
                    }
                }
            }
        soon(ahead, slots + i, DEEP, stride, C * 2 * W);
#pragma GCC unroll 3
        for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
            for (int c = 0; c < C; ++c) low[m][c] += lows[0][m][c] + lows[1][m][c], high[m][c] += highs[0][m][c] + highs[1][m][c];
    }
#pragma GCC unroll 3
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
        for (int c = 0; c < C; ++c) {
            put(out + m * ldo + c * 2 * W, zip_low(low[m][c], high[m][c]) * scale[m]);
            put(out + m * ldo + c * 2 * W + W, zip_high(low[m][c], high[m][c]) * scale[m]);
        }
}

template <int M, class A>
void attend_few(const float* q, int64_t q_stride, const bf16* k, const bf16* v, const bf16* after, int64_t d, int64_t stride,
                const int32_t* seen, int64_t found, const float* keep, int64_t ld_keep, const int32_t* open,
                A* out, int64_t out_stride) {
    int64_t whole = (found + W - 1) / W * W, deep = (found + DEEP - 1) / DEEP * DEEP;
    size_t keys = size_t(d) / 2 * W * sizeof(uint32_t), queries = size_t(M) * d * sizeof(float);
    size_t scores = size_t(M) * deep * sizeof(float);
    Scratch scratch;
    char* work = scratch.take<char>(keys + queries + scores + size_t(deep) * sizeof(int32_t));
    uint32_t* across = (uint32_t*)work;
    float *turned = (float*)(work + keys), *p = (float*)(work + keys + queries);
    int32_t* slots = (int32_t*)(work + keys + queries + scores);
    memcpy(slots, seen, size_t(found) * sizeof(int32_t));
    std::fill(slots + found, slots + deep, found ? seen[0] : 0);
    SmallIsZero ours;
    for (int32_t t = 0; t < M; ++t)
        for (int64_t c = 0; c < d; c += W) put_pairs(turned + t * d + c, load<F>(q + t * q_stride + c));
    for (int64_t i = 0; i < whole; i += W) {
        keys_across(k, slots + i, stride, d / 2, across);
        soon(v, slots + i, W, stride, d);
        few_scores<M>(turned, d, across, p + i, deep);
    }
    float scale[M];
    for (int32_t t = 0; t < M; ++t) scale[t] = soften_to(p + t * deep, keep + t * ld_keep, open[t], whole, deep, p + t * deep);
    int64_t c = 0;
    for (; c + 4 * W <= d; c += 4 * W) few_values<M, 2>(p, v + c, slots, deep, stride, scale, out + c, out_stride, after + c);
    if (c < d) few_values<M, 1>(p, v + c, slots, deep, stride, scale, out + c, out_stride, after + c);
}

// --- many -------------------------------------------------------------------------------------------

// Arguments as attend_pairs'; seen, keep: of `found` slots; open: of each query how many of the first it sees; d: a
// multiple of 32.
template <class A>
void attend_tiles(const float* q, int64_t q_stride, const bf16* k, const bf16* v, const bf16* after, int64_t d, int64_t stride,
                  const int32_t* seen, int64_t found, const float* keep, int64_t ld_keep, const int32_t* open, int32_t m, A* out,
                  int64_t out_stride) {
    if (m == 1) return attend_few<1>(q, q_stride, k, v, after, d, stride, seen, found, keep, ld_keep, open, out, out_stride);
    if (m == 3) return attend_few<3>(q, q_stride, k, v, after, d, stride, seen, found, keep, ld_keep, open, out, out_stride);
    if (m == 2) return attend_few<2>(q, q_stride, k, v, after, d, stride, seen, found, keep, ld_keep, open, out, out_stride);
    constexpr int64_t SIZE = TILE_ROWS * TILE_ROWS;
    int64_t whole = (found + W - 1) / W * W, deep = (found + DEEP - 1) / DEEP * DEEP, blocks = deep / TILE_ROWS;
    int64_t ld = deep | DEEP;  // an odd number of lines: rows lie in many sets of the first cache
    size_t queries = size_t(TILE_ROWS * d) * sizeof(bf16), scores = size_t(TILE_ROWS * ld) * sizeof(float);
    size_t sums = size_t(TILE_ROWS * WIDE) * sizeof(float), buffer = size_t(2 * DEEP * WIDE) * sizeof(bf16);
    size_t turns = size_t(SCORED_BLOCKS * SIZE) * sizeof(float);
    size_t all = (1 + SCORED_BLOCKS) * queries + turns + scores + scores / 2 + sums + buffer + size_t(deep) * sizeof(int32_t);
    Scratch scratch;
    char* work = scratch.take<char>(all);
    bf16* turned = (bf16*)work;
    bf16* copies = (bf16*)(work += queries);
    float* across = (float*)(work += SCORED_BLOCKS * queries);
    float* p = (float*)(work += turns);
    bf16* weight = (bf16*)(work += scores);
    float* sum = (float*)(work += scores / 2);
    bf16* pairs = (bf16*)(work += sums);
    int32_t* slots = (int32_t*)(work += buffer);
    memcpy(slots, seen, size_t(found) * sizeof(int32_t));
    std::fill(slots + found, slots + deep, found ? seen[0] : 0);
    for (int32_t t = 0; t < m; ++t)
        for (int64_t c = 0; c < d; c += W) {
            bf16 some[W];
            put(some, load<F>(q + t * q_stride + c));
            for (int i = 0; i < W; i += 2) memcpy(turned + (c + i) * TILE_ROWS + 2 * t, some + i, 2 * sizeof(bf16));
        }
    Tiles ours;
    for (int64_t b = 0; b < blocks; b += SCORED_BLOCKS) {
        KeyBlock keys[SCORED_BLOCKS];
        int some = int(std::min<int64_t>(blocks - b, SCORED_BLOCKS));
        for (int i = 0; i < some; ++i)
            keys[i] = key_block(k, slots + (b + i) * TILE_ROWS, stride, d, copies + i * TILE_ROWS * d);
        if (some == SCORED_BLOCKS)
            tile_scores<SCORED_BLOCKS>(keys, turned, d, across);
        else if (some == 2)
            tile_scores<2>(keys, turned, d, across);
        else
            tile_scores<1>(keys, turned, d, across);
        soon(v, slots + b * TILE_ROWS, some * TILE_ROWS, stride, d);
        for (int i = 0; i < some; ++i) scores_by_query(across + i * SIZE, m, p + (b + i) * TILE_ROWS, ld);
    }
    float scale[TILE_ROWS];
    for (int32_t t = 0; t < m; ++t)
        scale[t] = soften_to(p + t * ld, keep + t * ld_keep, open[t], whole, deep, weight + t * ld);
    for (int64_t c = 0; c < d; c += WIDE) {
        int64_t columns = std::min<int64_t>(d - c, WIDE);
        tile_values(weight, ld, v + c, slots, deep, stride, columns, pairs, sum, after + c);
        for (int32_t t = 0; t < m; ++t)
            for (int64_t j = 0; j < columns; j += DEEP) {
                float* x = sum + t * columns + j;
                columns_back(x);
                for (int i = 0; i < DEEP; i += W) put(out + t * out_stride + c + j + i, load<F>(x + i) * scale[t]);
            }
    }
}

}  // namespace
