// Attention of a row and head by tiles: queries, and the weights of values, are rounded to bfloat16. Every number is made
// in one order, whatever the number of queries.
#pragma once

#include <algorithm>
#include <type_traits>

#include "integers.h"
#include "pairs.h"
#include "small.h"
#include "tile.h"

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

// A weight before it is divided by their sum, of -87 to 0: below as there, above anything.
INLINE F weight_of(F x) { return exponential_for_bfloat16(larger(x, splat(-87.0f))); }

// A score where a query sees the slot, and next to nothing where it does not; keep: 1 or 0.
INLINE F kept_score(F score, F keep) { return score + (keep - 1.0f) * 1e30f; }

alignas(64) constexpr uint16_t PAIRED[] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                           8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};

// The numbers of two vectors as bfloat16: one vector's after the other's, or by pairs.
INLINE F in_a_row(F first, F second) { return (F)(__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first); }
INLINE U in_pairs(F first, F second) {
    return (U)_mm512_permutexvar_epi16(_mm512_load_si512(PAIRED), (__m512i)in_a_row(first, second));
}

// Weights where slots are seen, 0 elsewhere, whatever they were.
INLINE F kept_weight(F weight, F keep) { return (F)((U)weight & (U)(keep != 0.0f)); }

// The softmax of 16 queries over scores [slot][query]. Of its weights every 16th is added up, then these sums: the same
// order everywhere. OPEN: all of the 16 slots are seen by all; see: else by which.
struct Softmax {
    F most, sums[W];
    INLINE_MEMBER Softmax() : most(splat(-3e38f)) {
#pragma GCC unroll 16
        for (int s = 0; s < W; ++s) sums[s] = F{};
    }
    template <bool OPEN> INLINE_MEMBER void take(const float* scores, const F* see) {
#pragma GCC unroll 16
        for (int s = 0; s < W; ++s) {
            F one = load<F>(scores + s * W);
            most = larger(most, OPEN ? one : kept_score(one, see[s]));
        }
    }
    // Weights of pairs of slots, [pair][query].
    template <bool OPEN> INLINE_MEMBER void weigh(const float* scores, const F* see, uint32_t* pairs) {
        F before{};
#pragma GCC unroll 16
        for (int s = 0; s < W; ++s) {
            F e = weight_of(load<F>(scores + s * W) - most);
            if (!OPEN) e = kept_weight(e, see[s]);
            sums[s] += e;
            if (s % 2) put(pairs + s / 2 * W, in_pairs(before, e));
            before = e;
        }
    }
    INLINE_MEMBER F scale() {
#pragma GCC unroll 4
        for (int half = W / 2; half; half /= 2)
#pragma GCC unroll 8
            for (int i = 0; i < half; ++i) sums[i] += sums[i + half];
        return (F)((U)(1.0f / sums[0]) & (U)(sums[0] > 0.0f));
    }
};

// Whether m queries see each of the 16 slots from `first` on, [slot][query]; the slots end at `found`.
struct ByQuery {
    F see[W];
    ByQuery(const float* keep, int64_t ld, int32_t m, int64_t first, int64_t found) {
#pragma GCC unroll 16
        for (int t = 0; t < W; ++t) see[t] = t < m && first < found ? load<F>(keep + t * ld + first) : F{};
        transpose(see);
    }
};

// 32 columns of two rows as pairs, in an order that in_order undoes.
INLINE void columns_in_pairs(const bf16* x, const bf16* y, bf16* out) {
    U low, high;
    two_rows(x, y, low, high);
    put((uint32_t*)out, low);
    put((uint32_t*)out + W, high);
}

// Sums of 32 or 64 columns of values, weighted by 16 queries' weights [n / 32][16][32]: float32 [16][columns]. n: slots,
// a multiple of 32; buffer: bfloat16 [2][32][columns].
INLINE void tile_values(const bf16* weight, const bf16* v, const int32_t* slots, int64_t n, int64_t stride,
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
        tile_load<4>(weight + i * TILE_ROWS, TILE_BYTES);
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

// The softmax of n scores of one query, as `Softmax`; weights as numbers of bfloat16, and 0 up to `deep`.
INLINE float soften_few(float* p, const float* keep, int64_t n, int64_t deep) {
    F most = splat(-3e38f), sum{};
    for (int64_t i = 0; i < n; i += W) most = larger(most, kept_score(load<F>(p + i), load<F>(keep + i)));
    float top = largest(most), sums[W];
    for (int64_t i = 0; i < n; i += W) {
        F e = kept_weight(weight_of(load<F>(p + i) - top), load<F>(keep + i));
        bf16 some[W];
        sum += e;
        put(some, e);
        put(p + i, get(some));
    }
    memset(p + n, 0, size_t(deep - n) * sizeof(float));
    put(sums, sum);
    for (int half = W / 2; half; half /= 2)
        for (int i = 0; i < half; ++i) sums[i] += sums[i + half];
    return sums[0] > 0 ? 1.0f / sums[0] : 0.0f;
}

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
template <int M, int C, class To>
INLINE void few_values(const float* weight, const bf16* v, const int32_t* slots, int64_t n, int64_t stride, const float* scale,
                       int64_t column, To out, const bf16* ahead) {
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
            put(out(m, column + c * 2 * W), zip_low(low[m][c], high[m][c]) * scale[m]);
            put(out(m, column + c * 2 * W + W), zip_high(low[m][c], high[m][c]) * scale[m]);
        }
}

template <int M, class To>
void attend_few(const float* q, int64_t q_stride, const bf16* k, const bf16* v, const bf16* after, int64_t d, int64_t stride,
                const int32_t* seen, int64_t found, const float* keep, int64_t ld_keep, To out) {
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
        for (int64_t c = 0; c < d; c += W) {
            bf16 some[W];
            put(some, load<F>(q + t * q_stride + c));
            put(turned + t * d + c, get(some));
        }
    for (int64_t i = 0; i < whole; i += W) {
        keys_across(k, slots + i, stride, d / 2, across);
        soon(v, slots + i, W, stride, d);
        few_scores<M>(turned, d, across, p + i, deep);
    }
    float scale[M];
    for (int32_t t = 0; t < M; ++t) scale[t] = soften_few(p + t * deep, keep + t * ld_keep, whole, deep);
    int64_t c = 0;
    for (; c + 4 * W <= d; c += 4 * W) few_values<M, 2>(p, v + c, slots, deep, stride, scale, c, out, after + c);
    if (c < d) few_values<M, 1>(p, v + c, slots, deep, stride, scale, c, out, after + c);
}

// --- many -------------------------------------------------------------------------------------------

// Arguments as attend_pairs'; seen, keep: of `found` slots; open: of each query how many of the first it sees; d: a
// multiple of 32; out(query, column): where 32 numbers go.
template <class To>
void attend_tiles(const float* q, int64_t q_stride, const bf16* k, const bf16* v, const bf16* after, int64_t d, int64_t stride,
                  const int32_t* seen, int64_t found, const float* keep, int64_t ld_keep, const int32_t* open, int32_t m, To out) {
    if (m == 1) return attend_few<1>(q, q_stride, k, v, after, d, stride, seen, found, keep, ld_keep, out);
    if (m == 3) return attend_few<3>(q, q_stride, k, v, after, d, stride, seen, found, keep, ld_keep, out);
    if (m == 2) return attend_few<2>(q, q_stride, k, v, after, d, stride, seen, found, keep, ld_keep, out);
    constexpr int64_t SIZE = TILE_ROWS * TILE_ROWS;
    int64_t deep = (found + DEEP - 1) / DEEP * DEEP, blocks = deep / TILE_ROWS, all_open = found;
    for (int32_t t = 0; t < m; ++t) all_open = std::min<int64_t>(all_open, open[t]);
    size_t queries = size_t(TILE_ROWS * d) * sizeof(bf16), scores = size_t(TILE_ROWS * deep) * sizeof(float);
    Scratch scratch;
    char* work = scratch.take<char>((1 + SCORED_BLOCKS) * queries + scores + scores / 2 + size_t(deep) * sizeof(int32_t));
    bf16* turned = (bf16*)work;  // [d / 2][16][2]
    bf16* copies = (bf16*)(work += queries);
    float* p = (float*)(work += SCORED_BLOCKS * queries);  // [slot][16 queries]
    bf16* weight = (bf16*)(work += scores);                // [deep / 32][16 queries][32]
    int32_t* slots = (int32_t*)(work += scores / 2);
    alignas(64) float sum[TILE_ROWS * WIDE];
    alignas(64) bf16 values[2 * DEEP * WIDE];
    alignas(64) uint32_t pairs[SIZE];
    memcpy(slots, seen, size_t(found) * sizeof(int32_t));
    std::fill(slots + found, slots + deep, found ? seen[0] : 0);
    Tiles ours;
    for (int64_t c = 0; c < d; c += DEEP) {
        F a[W];
#pragma GCC unroll 16
        for (int t = 0; t < W; ++t) {
            const float* row = q + t * q_stride + c;
            a[t] = t < m ? in_a_row(load<F>(row), load<F>(row + W)) : F{};
        }
        transpose(a);
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) memcpy(turned + (c + 2 * i) * TILE_ROWS, &a[i], sizeof(F));
    }
    Softmax soft;
    // call(whether all queries see all of 16 slots, else who sees them)
    auto of = [&](int64_t first, auto call) INLINE_LAMBDA {
        if (first + W <= all_open) return call(std::true_type{}, nullptr);
        ByQuery by(keep, ld_keep, m, first, found);
        call(std::false_type{}, by.see);
    };
    for (int64_t b = 0; b < blocks; b += SCORED_BLOCKS) {
        KeyBlock keys[SCORED_BLOCKS];
        int some = int(std::min<int64_t>(blocks - b, SCORED_BLOCKS));
        for (int i = 0; i < some; ++i)
            keys[i] = key_block(k, slots + (b + i) * TILE_ROWS, stride, d, copies + i * TILE_ROWS * d);
        float* scores = p + b * SIZE;
        if (some == SCORED_BLOCKS)
            tile_scores<SCORED_BLOCKS>(keys, turned, d, scores);
        else if (some == 2)
            tile_scores<2>(keys, turned, d, scores);
        else
            tile_scores<1>(keys, turned, d, scores);
        soon(v, slots + b * TILE_ROWS, some * TILE_ROWS, stride, d);
        for (int64_t first = b * TILE_ROWS, end = first + some * TILE_ROWS; first < end; first += W)
            of(first, [&](auto open, const F* see) INLINE_LAMBDA { soft.take<decltype(open)::value>(p + first * W, see); });
    }
    for (int64_t first = 0; first < deep; first += DEEP) {
        for (int64_t at = 0; at < DEEP; at += W)
            of(first + at, [&](auto open, const F* see) INLINE_LAMBDA {
                soft.weigh<decltype(open)::value>(p + (first + at) * W, see, pairs + at / 2 * W);
            });
        F a[W];
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) a[i] = load<F>(pairs + i * W);
        transpose(a);
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) memcpy(weight + first * TILE_ROWS + i * DEEP, &a[i], sizeof(F));
    }
    float scale[W];
    put(scale, soft.scale());
    for (int64_t c = 0; c < d; c += WIDE) {
        int64_t columns = std::min<int64_t>(d - c, WIDE);
        tile_values(weight, v + c, slots, deep, stride, columns, values, sum, after + c);
        for (int64_t j = 0; j < columns; j += DEEP)
            for (int32_t t = 0; t < m; ++t) {
                auto to = out(t, c + j);
                F low = load<F>(sum + t * columns + j), high = load<F>(sum + t * columns + j + W);
                in_order(low, high);
                put(to, low * scale[t]);
                put(to + W, high * scale[t]);
            }
    }
}

}  // namespace
