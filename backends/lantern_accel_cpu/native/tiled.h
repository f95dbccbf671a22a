// Products by tiles, of weights as they are kept: panels of bfloat16, and of fewer bits that become bfloat16 or bytes in
// the first cache. Of few rows vectors do the same sums in the same order: a row's result depends on no other row, and
// on no border between the two.
#pragma once

#include <atomic>
#include <chrono>
#include <stdlib.h>

#include "integers.h"
#include "small.h"

#ifdef TILES
#include "tile.h"

namespace {

static_assert(DEEP == PANEL, "a panel's columns are a row of the next product's tiles");
constexpr int FEW_ROWS = 4;  // that vectors multiply at a time
constexpr int64_t QUARTER = DEEP / 4;  // lines of a step's weights
constexpr int64_t SOON = 4096;  // bytes that are fetched into the first cache ahead of their use

INLINE int64_t tile_steps(int64_t k) { return (k + DEEP - 1) / DEEP; }
INLINE int64_t tile_blocks(int64_t m) { return (m + TILE_ROWS - 1) / TILE_ROWS; }

// The rows from which on tiles multiply by weights of a kind; below, vectors do. 0: to be measured.
constexpr int KINDS = 4;
std::atomic<int> borders[KINDS];
int border(int kept);

// Rows of activations as products take them: for vectors float32 [m][steps * DEEP], for tiles [blocks][steps][16][DEEP],
// with 0 behind the last input and row. sums: of each group's inputs, where weights have groups.
struct TileRows {
    float* floats = nullptr;
    bf16* tiles = nullptr;
    float* sums = nullptr;  // [m][groups]
    int64_t steps = 0, groups = 0;

    bool any() const { return floats || tiles; }
    // Where tiles have the inputs of a row from step * DEEP on.
    INLINE_MEMBER bf16* row(int64_t r, int64_t step) const {
        return tiles + ((r / TILE_ROWS * steps + step) * TILE_ROWS + r % TILE_ROWS) * DEEP;
    }
    // How far behind a row's first input a later one lies in tiles.
    INLINE_MEMBER int64_t at(int64_t input) const { return input / DEEP * TILE_ROWS * DEEP + input % DEEP; }
    // Put 0 into the rows of the last block behind the first m.
    void clear_below(int64_t m) const {
        for (int64_t r = m; r % TILE_ROWS; ++r)
            for (int64_t s = 0; s < steps; ++s) memset(row(r, s), 0, DEEP * sizeof(bf16));
    }
    // row: a multiple of TILE_ROWS
    TileRows from(int64_t row) const {
        TileRows rest = *this;
        if (floats) rest.floats += row * steps * DEEP;
        if (tiles) rest.tiles += row * steps * DEEP;
        rest.sums += row * groups;
        return rest;
    }
};

// Whether rows of k inputs can be written where tiles have them, with nothing to be added behind.
INLINE bool in_tiles(const TileRows& to, int64_t k, int kept) {
    return to.tiles && k % DEEP == 0 && (kept == WHOLE || kept == INT8);
}

// Scratch memory for m rows of k inputs.
TileRows tile_scratch(Scratch& scratch, int64_t m, int64_t k, int kept) {
    TileRows to;
    to.steps = tile_steps(k);
    to.groups = (k + GROUP - 1) / GROUP;
    bool few = m < border(kept);
    int64_t rows = few ? m : tile_blocks(m) * TILE_ROWS;
    if (few)
        to.floats = scratch.take<float>(rows * to.steps * DEEP);
    else
        to.tiles = scratch.take<bf16>(rows * to.steps * DEEP);
    to.sums = scratch.take<float>(m * to.groups);
    return to;
}

void to_tiles(const bf16* x, int64_t ldx, int64_t m, int64_t k, int kept, const TileRows& to) {
    if (kept == INT6 || kept == INT4) group_sums(x, ldx, m, k, to.sums);
    int64_t wide = to.steps * DEEP;
    if (to.floats) {
        for (int64_t r = 0; r < m; ++r) {
            float* y = to.floats + r * wide;
            copy(x + r * ldx, k, y);
            memset(y + k, 0, size_t(wide - k) * sizeof(float));
        }
        return;
    }
    int64_t whole = k / DEEP;
    for (int64_t r = 0, rows = tile_blocks(m) * TILE_ROWS; r < rows; ++r) {
        bf16* y = to.row(r, 0);
        const bf16* from = x + r * ldx;
        int64_t s = 0;
        for (; r < m && s < whole; ++s) memcpy(y + s * TILE_ROWS * DEEP, from + s * DEEP, DEEP * sizeof(bf16));
        for (; s < to.steps; ++s) {
            bf16* piece = y + s * TILE_ROWS * DEEP;
            memset(piece, 0, DEEP * sizeof(bf16));
            if (r < m) memcpy(piece, from + s * DEEP, size_t(k - s * DEEP) * sizeof(bf16));
        }
    }
}

// --- few rows ----------------------------------------------------------------------------------------

// Add inputs to M rows, `pairs` of them, as a tile's product does: weight(t, c) has pair t of a vector of columns.
template <int M, class Weight>
INLINE void add_step(F (&acc)[M][COLUMNS], const float* x, int64_t ldx, int pairs, Weight weight) {
    F even[M][COLUMNS], odd[M][COLUMNS];
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
        for (int c = 0; c < COLUMNS; ++c) even[m][c] = odd[m][c] = F{};
    auto add = [&](int t) INLINE_LAMBDA {
        F low[COLUMNS], high[COLUMNS];
#pragma GCC unroll 2
        for (int c = 0; c < COLUMNS; ++c) {
            U pair = weight(t, c);
            low[c] = lower(pair), high[c] = upper(pair);
        }
#pragma GCC unroll 4
        for (int m = 0; m < M; ++m) {
            F first = splat(x[m * ldx + 2 * t]), second = splat(x[m * ldx + 2 * t + 1]);
#pragma GCC unroll 2
            for (int c = 0; c < COLUMNS; ++c) {
                even[m][c] = multiply_add(first, low[c], even[m][c]);
                odd[m][c] = multiply_add(second, high[c], odd[m][c]);
            }
        }
    };
    if (pairs == DEEP / 2) {
#pragma GCC unroll 16
        for (int t = 0; t < DEEP / 2; ++t) add(t);
    } else {
        for (int t = 0; t < pairs; ++t) add(t);
    }
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
        for (int c = 0; c < COLUMNS; ++c) acc[m][c] += even[m][c] + odd[m][c];
}

template <int M> INLINE void nothing(F (&acc)[M][COLUMNS]) {
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
        for (int c = 0; c < COLUMNS; ++c) acc[m][c] = F{};
}

// A group's sums, times its steps, and its offsets times the sums of inputs.
INLINE F add_group(F acc, F part, float sum, const Scale& scale) {
    return multiply_add(part, scale.step, multiply_add(splat(sum), scale.offset, acc));
}

// Codes 4 i to 4 i + 3 of a lane, signed bytes, as two pairs of bfloat16: the first or the second one.
INLINE U byte_pair(U lanes, int second) {
    const Bytes& t = byte_tables;
    __m512i codes = (__m512i)lanes, size = _mm512_abs_epi8(codes);
    __m512i low = _mm512_permutex2var_epi8(_mm512_load_si512(t.low), size, _mm512_load_si512(t.low + 64));
    __m512i high = _mm512_permutex2var_epi8(_mm512_load_si512(t.high), size, _mm512_load_si512(t.high + 64));
    high = _mm512_ternarylogic_epi32(high, codes, _mm512_set1_epi8(char(0x80)), 0xf8);  // high | (codes & sign)
    return (U)_mm512_permutex2var_epi8(low, _mm512_load_si512(second ? t.second : t.first), high);
}

// M rows times STEP columns of a panel from `column` on.
template <int M>
void few_rows(const TileRows& x, int64_t first, const char* w, int kept, int column, int64_t k, float* y, Lines far) {
    int64_t ldx = x.steps * DEEP;
    const float* at = x.floats + first * ldx;
    F acc[M][COLUMNS];
    nothing<M>(acc);
    if (kept == WHOLE) {
        const bf16* from = (const bf16*)w + 2 * column;
        for (int64_t i = 0; i < k; i += DEEP, at += DEEP, from += DEEP * PANEL)
            add_step<M>(acc, at, ldx, k - i < DEEP ? int(even(k - i) / 2) : DEEP / 2, [&](int t, int c) INLINE_LAMBDA {
                far.fetch();
                return load<U>(from + 2 * t * PANEL + 2 * c * W);
            });
    } else if (kept == INT8) {
        const char* from = w + PANEL * 4 + column * 4;
        for (int64_t i = 0; i < k; i += DEEP, at += DEEP, from += DEEP * PANEL)
            add_step<M>(acc, at, ldx, k - i < DEEP ? int((k - i + 3) / 4 * 2) : DEEP / 2, [&](int t, int c) INLINE_LAMBDA {
                if (t % 2) far.fetch();
                return byte_pair(load<U>(from + t / 2 * PANEL * 4 + c * W * 4), t % 2);
            });
    } else {
        int64_t bits = kept == INT6 ? 6 : 4, bytes = PANEL * (4 + GROUP * bits / 8);
        for (int64_t g = 0; g < x.groups; ++g, w += bytes, at += GROUP) {
            F part[M][COLUMNS];
            nothing<M>(part);
            for (int i = 0; i < GROUP / DEEP && g * GROUP + i * DEEP < k; ++i) {
                const char* from = w + PANEL * 4 + column * 4 + i * DEEP * PANEL * bits / 8;
                if (kept == INT6)
                    add_step<M>(part, at + i * DEEP, ldx, DEEP / 2, [&](int t, int c) INLINE_LAMBDA {
                        if (t * 6 % 8 < 6) far.fetch();
                        return codes<6>(from + t / 8 * 3 * PANEL * 4 + c * W * 4, t % 8) | 0x43004300u;
                    });
                else
                    add_step<M>(part, at + i * DEEP, ldx, DEEP / 2, [&](int t, int c) INLINE_LAMBDA {
                        if (t % 2) far.fetch();
                        return codes<4>(from + t / 8 * 2 * PANEL * 4 + c * W * 4, t % 8) | 0x43004300u;
                    });
            }
#pragma GCC unroll 2
            for (int c = 0; c < COLUMNS; ++c) {
                Scale scale(w, column + c * W);
#pragma GCC unroll 4
                for (int m = 0; m < M; ++m)
                    acc[m][c] = add_group(acc[m][c], part[m][c], x.sums[(first + m) * x.groups + g], scale);
            }
        }
    }
    finish(acc, y + first * PANEL + column);
}

template <int M>
INLINE void pick_few(int m, const TileRows& x, int64_t first, const char* w, int kept, int column, int64_t k, float* y,
                     Lines far) {
    if (m == M)
        few_rows<M>(x, first, w, kept, column, k, y, far);
    else if constexpr (M > 1)
        pick_few<M - 1>(m, x, first, w, kept, column, k, y, far);
}

// --- many rows ---------------------------------------------------------------------------------------

// B blocks of 16 rows times both halves of a panel, `steps` times DEEP inputs; x: blocks `ldx` apart. w: bfloat16
// [steps * DEEP / 2][PANEL][2]. more: add to what y has. `fetch` is called once a step.
template <int B, class Fetch>
INLINE void tile_product(const bf16* x, int64_t ldx, const bf16* w, int64_t steps, float* y, bool more, Fetch fetch) {
    constexpr int64_t ROW = PANEL * 4, HALF = PANEL / 2;
    float* below = y + TILE_ROWS * PANEL;
    if (more) {
        tile_load<0>(y, ROW);
        tile_load<1>(y + HALF, ROW);
        if (B > 1) tile_load<2>(below, ROW), tile_load<3>(below + HALF, ROW);
    } else {
        tile_zero<0>();
        tile_zero<1>();
        if (B > 1) tile_zero<2>(), tile_zero<3>();
    }
    for (; steps; --steps, x += TILE_ROWS * DEEP, w += DEEP * PANEL) {
        tile_load<4>(x, TILE_BYTES);
        fetch();
        tile_load<6>(w, ROW);
        tile_pairs<0, 4, 6>();
        fetch();
        if (B > 1) {
            tile_load<5>(x + ldx, TILE_BYTES);
            tile_pairs<2, 5, 6>();
        }
        fetch();
        tile_load<7>(w + 2 * HALF, ROW);
        tile_pairs<1, 4, 7>();
        fetch();
        if (B > 1) tile_pairs<3, 5, 7>();
    }
    tile_store<0>(y, ROW);
    tile_store<1>(y + HALF, ROW);
    if (B > 1) tile_store<2>(below, ROW), tile_store<3>(below + HALF, ROW);
}

// Blocks of rows by twos: call(first block, whether two).
template <class Call> INLINE void two_blocks(int64_t m, Call call) {
    for (int64_t b = 0, all = tile_blocks(m); b < all; b += 2) call(b, b + 1 < all);
}

template <class Fetch>
INLINE void tile_products(const TileRows& x, int64_t block, bool two, int64_t first_step, const bf16* w, int64_t steps,
                          float* y, bool more, Fetch fetch) {
    int64_t ldx = x.steps * TILE_ROWS * DEEP;
    const bf16* at = x.tiles + block * ldx + first_step * TILE_ROWS * DEEP;
    if (two)
        tile_product<2>(at, ldx, w, steps, y, more, fetch);
    else
        tile_product<1>(at, ldx, w, steps, y, more, fetch);
}

// What is fetched in a quarter of a step: the weights of the next steps, into the first cache, and LINES of those that this
// thread reads a panel later, into the second.
template <int LINES> struct Later {
    const char *near, *far;
    INLINE_MEMBER void operator()() {
#pragma GCC unroll 8
        for (int64_t i = 0; i < LINES; ++i) __builtin_prefetch(far + i * 64, 0, 2);
#pragma GCC unroll 8
        for (int64_t i = 0; i < QUARTER; ++i) __builtin_prefetch(near + i * 64, 0, 3);
        far += LINES * 64, near += QUARTER * 64;
    }
};

void whole_tiles(const TileRows& x, int64_t m, const bf16* w, int64_t k, float* y, const char* far) {
    int64_t steps = k / DEEP, rest = k % DEEP;
    alignas(64) bf16 last[DEEP * PANEL];
    if (rest) {
        size_t bytes = size_t(even(rest)) * PANEL * sizeof(bf16);
        memcpy(last, w + steps * DEEP * PANEL, bytes);
        memset((char*)last + bytes, 0, sizeof last - bytes);
    }
    auto products = [&](auto later) INLINE_LAMBDA {
        two_blocks(m, [&](int64_t block, bool two) {
            float* to = y + block * TILE_ROWS * PANEL;
            later.near = (const char*)w + SOON;
            tile_products(x, block, two, 0, w, steps, to, false, [&]() INLINE_LAMBDA { later(); });
            if (rest) tile_products(x, block, two, steps, last, 1, to, steps > 0, [] {});
        });
    };
    // While a step's weights are multiplied once, those of the next steps come in time, the panel behind included.
    if (m > 2 * TILE_ROWS)
        products(Later<QUARTER / 2>{nullptr, far});
    else if (far != (const char*)(w + even(k) * PANEL))
        products(Later<QUARTER>{nullptr, far});
    else
        products(Later<0>{nullptr, far});
}

// A piece at a time becomes bfloat16 in the first cache.
void rounded_tiles(const TileRows& x, int64_t m, const char* w, int kept, int64_t k, float* y, const char* far) {
    constexpr int64_t PIECE_ = 256, GROUPS = PIECE_ / GROUP;
    alignas(64) bf16 numbers[PIECE_ * PANEL];
    alignas(64) float part[2 * TILE_ROWS * PANEL];
    int64_t bytes = kept == INT8 ? 0 : PANEL * (4 + GROUP * (kept == INT6 ? 6 : 4) / 8);
    const char* at = kept == INT8 ? w + PANEL * 4 : w;
    int64_t calls = (tile_blocks(m) + 1) / 2;
    for (int64_t first = 0; first < k; first += PIECE_) {
        int64_t deep = k - first < PIECE_ ? k - first : PIECE_, groups = (deep + GROUP - 1) / GROUP;
        int64_t taken = kept == INT8 ? (deep + 3) / 4 * 4 * PANEL : groups * bytes;
        int64_t steps = kept == INT8 ? tile_steps(deep) : groups * (GROUP / DEEP);
        Lines half{far, 64};
        if (kept == INT8) {
            Wholes::bytes(at, deep, numbers, half);
            int64_t made = (deep + 3) / 4 * 4;
            memset(numbers + made * PANEL, 0, size_t(steps * DEEP - made) * PANEL * sizeof(bf16));
        }
        for (int64_t g = 0; g < groups && kept != INT8; ++g)
            kept == INT6 ? Wholes::group<6>(at + g * bytes, numbers + g * GROUP * PANEL, half)
                         : Wholes::group<4>(at + g * bytes, numbers + g * GROUP * PANEL, half);
        const char* other = far + taken / 2;
        int64_t lines = (taken / 2 / 64 / 4 + steps * calls - 1) / (steps * calls);
        auto fetch = [&]() INLINE_LAMBDA {
            for (int64_t i = 0; i < lines; ++i, other += 64) __builtin_prefetch(other, 0, 2);
        };
        two_blocks(m, [&](int64_t block, bool two) {
            float* to = y + block * TILE_ROWS * PANEL;
            if (kept == INT8) return tile_products(x, block, two, first / DEEP, numbers, steps, to, first > 0, fetch);
            int64_t rows = std::min<int64_t>(m - block * TILE_ROWS, two ? 2 * TILE_ROWS : TILE_ROWS);
            for (int64_t g = 0; g < groups; ++g) {
                int64_t step = g * (GROUP / DEEP);
                int64_t count = std::min<int64_t>(GROUP / DEEP, x.steps - first / DEEP - step);
                tile_products(x, block, two, first / DEEP + step, numbers + g * GROUP * PANEL, count, part, false, fetch);
                const float* sums = x.sums + block * TILE_ROWS * x.groups + first / GROUP + g;
                for (int c = 0; c < PANEL; c += W) {
                    Scale scale(at + g * bytes, c);
                    for (int64_t r = 0; r < rows; ++r) {
                        F before = first + g ? load<F>(to + r * PANEL + c) : F{};
                        put(to + r * PANEL + c, add_group(before, load<F>(part + r * PANEL + c), sums[r * x.groups], scale));
                    }
                }
            }
        });
        at += taken, far += taken;
    }
}

// As `panel`, of a panel of any kind; `far`: weights that this thread reads later, as many bytes as it reads here.
void tiled_panel(const TileRows& x, int64_t m, const char* w, int kept, int64_t k, float* y, const char* far) {
    if (x.floats) {
        SmallIsZero zero;
        int64_t calls = (m + FEW_ROWS - 1) / FEW_ROWS;
        blocks_of<FEW_ROWS>(m, [&](int64_t r, int64_t count) {
            for (int c = 0; c < PANEL; c += STEP)
                pick_few<FEW_ROWS>(int(count), x, r, w, kept, c, k, y, Lines{far, calls > 1 ? 0 : 64});
        });
    } else if (Tiles ours; kept == WHOLE) {
        whole_tiles(x, m, (const bf16*)w, k, y, far);
    } else {
        rounded_tiles(x, m, w, kept, k, y, far);
    }
    if (kept == INT8) put_steps(y, m, (const float*)w, 1.0f);
}

// Measured once in a process, on weights that come from beyond the second cache: the fewest rows that tiles multiply as
// fast as vectors do.
int border(int kept) {
    int known = borders[kept];
    if (known) return known;
    constexpr int64_t K = 1024, BYTES = 8 << 20, WIDE = TILE_ROWS * K;
    constexpr int ROUNDS = 3;
    Weights w((const void*)uintptr_t(kept));
    int64_t size = w.panel<bf16>(K), count = BYTES / size;
    char* memory = (char*)aligned_alloc(64, size_t((count + 1) * size));
    float *floats = (float*)aligned_alloc(64, WIDE * sizeof(float)), *y = (float*)aligned_alloc(64, WIDE * sizeof(float));
    if (memory && floats && y) {
        memset(memory, 1, size_t((count + 1) * size));
        memset(floats, 0, WIDE * sizeof(float));
        TileRows x;
        x.steps = tile_steps(K), x.groups = K / GROUP, x.sums = floats;
        auto least = [&](bool tiles, int64_t m) {
            x.floats = tiles ? nullptr : floats, x.tiles = tiles ? (bf16*)floats : nullptr;
            auto best = std::chrono::steady_clock::duration::max();
            for (int round = 0; round < ROUNDS; ++round) {
                auto began = std::chrono::steady_clock::now();
                for (int64_t p = 0; p < count; ++p)
                    tiled_panel(x, m, memory + p * size, kept, K, y, memory + (p + 1) * size);
                best = std::min(best, std::chrono::steady_clock::now() - began);
            }
            return best;
        };
        auto tiles = least(true, 1);
        for (known = 1; known <= FEW_ROWS && least(false, known) < tiles; ++known) {}
    }
    free(memory), free(floats), free(y);
    if (!known) known = FEW_ROWS;
    borders[kept] = known;
    return known;
}

// --- a copy's products, in bytes ---------------------------------------------------------------------

// Rows in 8 bits in the order of tiles, [blocks][spans * AT_ONCE][16][GROUP], with 0 behind the last row; and their steps
// and sums, which lie as they do in `rows`.
struct ByteTiles {
    ByteRows rows;
    int8_t* tiles = nullptr;

    ByteTiles from(int64_t row) const { return ByteTiles{rows.from(row), tiles + row * rows.spans * SPAN}; }
};

ByteTiles byte_tile_scratch(Scratch& scratch, int64_t m, const ByteRows& rows, int kept) {
    if (!rows.numbers || m < border(kept)) return ByteTiles{};
    return ByteTiles{rows, scratch.take<int8_t>(tile_blocks(m) * TILE_ROWS * rows.spans * SPAN)};
}

void to_byte_tiles(int64_t m, const ByteTiles& to) {
    int64_t groups = to.rows.spans * AT_ONCE;
    for (int64_t r = 0; r < tile_blocks(m) * TILE_ROWS; ++r) {
        int8_t* y = to.tiles + (r / TILE_ROWS * groups * TILE_ROWS + r % TILE_ROWS) * GROUP;
        for (int64_t g = 0; g < groups; ++g, y += TILE_ROWS * GROUP)
            if (r < m)
                memcpy(y, to.rows.numbers + (r * groups + g) * GROUP, GROUP);
            else
                memset(y, 0, GROUP);
    }
}

// B blocks of 16 rows times groups of a panel's codes, [groups][GROUP / 4][PANEL][4]: whole numbers [B * 16][PANEL].
template <int B, bool SIGNED>
INLINE void tile_byte_product(const int8_t* x, int64_t ldx, const char* codes, int64_t groups, int32_t* y) {
    constexpr int64_t ROW = PANEL * 4, HALF = PANEL / 2;
    tile_zero<0>();
    tile_zero<1>();
    if (B > 1) tile_zero<2>(), tile_zero<3>();
    for (; groups; --groups, x += TILE_ROWS * GROUP, codes += LANES_EACH * ROW) {
        tile_load<4>(x, GROUP);
        tile_load<6>(codes, ROW);
        tile_bytes<0, 4, 6, SIGNED>();
        if (B > 1) {
            tile_load<5>(x + ldx, GROUP);
            tile_bytes<2, 5, 6, SIGNED>();
        }
        tile_load<7>(codes + 4 * HALF, ROW);
        tile_bytes<1, 4, 7, SIGNED>();
        if (B > 1) tile_bytes<3, 5, 7, SIGNED>();
    }
    int32_t* below = y + TILE_ROWS * PANEL;
    tile_store<0>(y, ROW);
    tile_store<1>(y + HALF, ROW);
    if (B > 1) tile_store<2>(below, ROW), tile_store<3>(below + HALF, ROW);
}

template <bool SIGNED>
INLINE void tile_byte_products(const int8_t* x, int64_t ldx, bool two, const char* codes, int64_t groups, int32_t* y) {
    if (two)
        tile_byte_product<2, SIGNED>(x, ldx, codes, groups, y);
    else
        tile_byte_product<1, SIGNED>(x, ldx, codes, groups, y);
}

// As byte_panel, to the last bit.
template <int KIND> void byte_tiles(const ByteTiles& x, int64_t m, const char* w, int64_t k, float* y) {
    constexpr int64_t LANES = KIND == INT6 ? GROUP / 16 * 3 : GROUP / 8, ROW = PANEL * 4;
    constexpr int64_t BYTES = ROW * (KIND == INT8 ? LANES_EACH : LANES + 1);  // of a group
    alignas(64) uint32_t codes[AT_ONCE * LANES_EACH * PANEL];
    alignas(64) int32_t part[2 * TILE_ROWS * PANEL];
    alignas(64) float sum[2 * TILE_ROWS * PANEL];
    Tiles ours;
    int64_t spans = x.rows.spans, ldx = spans * SPAN * TILE_ROWS, calls = (tile_blocks(m) + 1) / 2;
    const char* at = KIND == INT8 ? w + ROW : w;
    for (int64_t s = 0; s < spans; ++s, at += AT_ONCE * BYTES) {
        int64_t deep = std::min(k - s * SPAN, SPAN), groups = (deep + GROUP - 1) / GROUP;
        const char *from = at, *far = at + NEAR;
        int64_t lines = (AT_ONCE * BYTES / 64 + calls * groups - 1) / (calls * groups);
        auto fetch = [&](int64_t times) INLINE_LAMBDA {
            for (int64_t i = 0; i < times * lines; ++i, far += 64) once(far);
        };
        if constexpr (KIND == INT8) {
            if (deep % GROUP) {  // the last codes are the panel's end
                size_t bytes = size_t((deep + 3) / 4 * ROW);
                memcpy(codes, at, bytes);
                memset((char*)codes + bytes, 0, size_t(groups * BYTES) - bytes);
                from = (const char*)codes;
            }
        } else {
            take_apart<KIND>(at, groups, codes);
        }
        for (int64_t call = 0; call < calls; ++call) {
            int64_t first = call * 2 * TILE_ROWS, rows = std::min<int64_t>(m - first, 2 * TILE_ROWS);
            bool two = rows > TILE_ROWS;
            const int8_t* numbers = x.tiles + first * spans * SPAN + s * SPAN * TILE_ROWS;
            const float* turns = x.rows.step + first * spans + s;
            float* to = y + first * PANEL;
            if constexpr (KIND == INT8) {
                fetch(groups);
                tile_byte_products<true>(numbers, ldx, two, from, groups, part);
                for (int64_t r = 0; r < rows; ++r)
                    for (int c = 0; c < PANEL; c += W)
                        put(sum + r * PANEL + c, __builtin_convertvector(load<I>(part + r * PANEL + c), F));
            } else {
                for (int64_t g = 0; g < groups; ++g) {
                    fetch(1);
                    tile_byte_products<false>(numbers + g * TILE_ROWS * GROUP, ldx, two,
                                              (const char*)codes + g * LANES_EACH * ROW, 1, part);
                    const int32_t* sums = x.rows.sum + (first * spans + s) * AT_ONCE + g;
                    const bf16* steps = (const bf16*)(at + g * BYTES);
                    for (int c = 0; c < PANEL; c += W) {
                        F step = get(steps + c), offset = get(steps + PANEL + c);
                        for (int64_t r = 0; r < rows; ++r) {
                            float* acc = sum + r * PANEL + c;
                            F before = multiply_add(offset, splat(float(sums[r * spans * AT_ONCE])), g ? load<F>(acc) : F{});
                            put(acc, multiply_add(__builtin_convertvector(load<I>(part + r * PANEL + c), F), step, before));
                        }
                    }
                }
            }
            for (int64_t r = 0; r < rows; ++r)
                for (int c = 0; c < PANEL; c += W) {
                    float* one = to + r * PANEL + c;
                    put(one, multiply_add(load<F>(sum + r * PANEL + c), splat(turns[r * spans]), s ? load<F>(one) : F{}));
                }
        }
    }
    if (KIND == INT8) put_steps(y, m, (const float*)w, 1.0f);
}

void byte_tiles(const ByteTiles& x, int64_t m, const char* w, int kept, int64_t k, float* y) {
    if (kept == INT8)
        byte_tiles<INT8>(x, m, w, k, y);
    else if (kept == INT6)
        byte_tiles<INT6>(x, m, w, k, y);
    else
        byte_tiles<INT4>(x, m, w, k, y);
}

}  // namespace
#endif
