// Panels of weights in fewer bits: a piece at a time becomes numbers in the first cache, for all rows.
//
// Activations stay what they are. With float32 activations the numbers are the weights; with bfloat16 ones, where
// the processor multiplies these, they are whole numbers, which bfloat16 has exactly, and steps and offsets follow
// the sums: the weights themselves are never rounded a second time.
#pragma once

#include "panel.h"

namespace {

constexpr int GROUP = 64;          // inputs that share a step and an offset
template <class A> constexpr int64_t PIECE = 512 / sizeof(A);  // inputs that are made at a time
constexpr int64_t FAR = 16384;     // bytes that are fetched ahead of their use

// A packed weight by its address, which says how it is kept.
struct Weights {
    const char* start;
    int kept;
    bool drafts;  // a copy's, whose products may round activations

    explicit Weights(const void* address)
        : start((const char*)((uintptr_t)address & ~uintptr_t(63))), kept(int((uintptr_t)address & 7)),
          drafts(((uintptr_t)address & DRAFTS) != 0) {}

    // Bytes from one panel to the next.
    template <class T> int64_t panel(int64_t k) const {
        int64_t groups = (k + GROUP - 1) / GROUP;
        switch (kept) {
            case INT8: return PANEL * 4 + (k + 3) / 4 * PANEL * 4;
            case INT6: return groups * PANEL * (4 + GROUP * 6 / 8);
            case INT4: return groups * PANEL * (4 + GROUP * 4 / 8);
            case WORDS: return PANEL * 4 + even(k) * PANEL * 2;
            default: return panel_size<T>(k) * int64_t(sizeof(T));
        }
    }
};

INLINE F signed_byte(U x, int at) { return __builtin_convertvector((I)(x << (24 - 8 * at)) >> 24, F); }

// Byte `at` of each lane as a signed number times 2^24, which float32 has exactly: two operations in place of three.
constexpr float LIFTED = 0x1p-24f;  // what takes that off again, with a step
INLINE F lifted_byte(U x, int at) {
#if WIDTH > 4
    const int8_t o = -1, a = int8_t(at), b = int8_t(4 + at), c = int8_t(8 + at), d = int8_t(12 + at);
    __m128i order = _mm_setr_epi8(o, o, o, a, o, o, o, b, o, o, o, c, o, o, o, d);
#endif
#if WIDTH == 16
    x = (U)_mm512_shuffle_epi8((__m512i)x, _mm512_broadcast_i32x4(order));
#elif WIDTH == 8
    x = (U)_mm256_shuffle_epi8((__m256i)x, _mm256_broadcastsi128_si256(order));
#else
    x = x << (24 - 8 * at) & 0xff000000u;
#endif
    return __builtin_convertvector((I)x, F);
}

// Codes 2 t and 2 t + 1 of 16 in the lower and upper half of each lane. `from`: for int4 two rows of lanes of 8 codes,
// for int6 two rows of lower bits and one of upper bits.
template <int BITS> INLINE U codes(const char* from, int t) {
    constexpr int64_t ROW = PANEL * 4;
    U pair = (load<U>(from + t / 4 * ROW) >> (t % 4 * 4)) & 0x000f000fu;
    if (BITS == 6) pair |= ((load<U>(from + 2 * ROW) >> (t % 2 * 2 + t / 2 % 2 * 8 + t / 4 * 4)) & 0x00030003u) << 4;
    return pair;
}

// Lines that are fetched while a piece is made and multiplied: half of them each, so that memory never rests.
struct Lines {
    const char* at;
    int64_t stride;
    INLINE_MEMBER void fetch() {
        __builtin_prefetch(at, 0, 2);
        at += stride;
    }
};

constexpr int GROUP_ROWS = 6;  // whose sums of a group, and in all, the registers hold
constexpr float ADDED = 128;  // what bits 0x4300 in the upper half add to the number in the seven below them

// The steps and offsets of W columns of a group, whose codes become numbers with ADDED.
struct Scale {
    F step, offset;
    explicit Scale(const char* group, int column = 0)
        : step(get((const bf16*)group + column)), offset(get((const bf16*)group + PANEL + column) - ADDED * step) {}
};

// [K][PANEL] as float32: signed bytes lifted, without their steps, and the weights of groups.
struct Floats {
    static void bytes(const char* from, int64_t deep, float* to, Lines far) {
        for (int64_t i = 0; i < deep; i += 4, from += PANEL * 4, to += 4 * PANEL, far.fetch())
            for (int c = 0; c < PANEL; c += W) {
                U x = load<U>(from + c * 4);
#pragma GCC unroll 4
                for (int j = 0; j < 4; ++j) put(to + j * PANEL + c, lifted_byte(x, j));
            }
    }

    // One group: its steps and offsets, then its codes.
    template <int BITS> static void group(const char* from, float* to, Lines& far) {
        const char* at = from + PANEL * 4;
        for (int k = 0; k < GROUP; k += 16, at += 2 * BITS * PANEL, to += 16 * PANEL)
            for (int c = 0; c < PANEL; c += W) {
                Scale scale(from, c);
#pragma GCC unroll 8
                for (int t = 0; t < 8; ++t) {
                    U pair = codes<BITS>(at + c * 4, t) | 0x43004300u;
                    if (t % (W / 4) == 0) far.fetch();
                    put(to + 2 * t * PANEL + c, lower(pair) * scale.step + scale.offset);
                    put(to + (2 * t + 1) * PANEL + c, upper(pair) * scale.step + scale.offset);
                }
            }
    }
};

#ifdef DOT_PRODUCTS
// The two bytes of the bfloat16 of 0 to 127, and where two bytes of each of a lane's codes 0, 1 and 2, 3 are then.
struct Bytes {
    alignas(64) uint8_t low[128]{}, high[128]{}, first[64]{}, second[64]{};
    constexpr Bytes() {
        for (int i = 0; i < 128; ++i) {
            int exponent = 0;
            while (i >> (exponent + 1)) ++exponent;
            int bits = i ? (127 + exponent) << 7 | (i << (7 - exponent) & 127) : 0;
            low[i] = uint8_t(bits), high[i] = uint8_t(bits >> 8);
        }
        for (int i = 0; i < 64; ++i) {  // from 64 on: of the upper bytes
            first[i] = uint8_t(i / 4 * 4 + i % 4 / 2 + i % 2 * 64);
            second[i] = uint8_t(first[i] + 2);
        }
    }
};
constexpr Bytes byte_tables;

// Signed bytes [deep / 4][PANEL][4] by look-up, where the processor has it (AVX512_VBMI).
NEEDS("avx512vbmi") void look_up_bytes(const char* from, int64_t deep, bf16* to, Lines far) {
    const Bytes& t = byte_tables;
    __m512i low0 = _mm512_load_si512(t.low), low1 = _mm512_load_si512(t.low + 64);
    __m512i high0 = _mm512_load_si512(t.high), high1 = _mm512_load_si512(t.high + 64);
    __m512i first = _mm512_load_si512(t.first), second = _mm512_load_si512(t.second);
    __m512i sign = _mm512_set1_epi8(char(0x80));
    for (int64_t i = 0; i < deep; i += 4, from += PANEL * 4, to += 4 * PANEL, far.fetch())
        for (int c = 0; c < PANEL; c += W) {
            __m512i x = _mm512_loadu_si512(from + c * 4), size = _mm512_abs_epi8(x);
            __m512i low = _mm512_permutex2var_epi8(low0, size, low1);
            __m512i high = _mm512_permutex2var_epi8(high0, size, high1);
            high = _mm512_ternarylogic_epi32(high, x, sign, 0xf8);  // high | (x & sign)
            _mm512_storeu_si512(to + 2 * c, _mm512_permutex2var_epi8(low, first, high));
            _mm512_storeu_si512(to + 2 * PANEL + 2 * c, _mm512_permutex2var_epi8(low, second, high));
        }
}
INLINE bool looks_up() { return HAS("avx512vbmi"); }

// Whole numbers [K / 2][PANEL][2] as bfloat16; those of groups with ADDED.
struct Wholes {
    static void bytes(const char* from, int64_t deep, bf16* to, Lines far) {
        if (looks_up()) return look_up_bytes(from, deep, to, far);
        for (int64_t i = 0; i < deep; i += 4, from += PANEL * 4, to += 4 * PANEL, far.fetch())
            for (int c = 0; c < PANEL; c += W) {
                U x = load<U>(from + c * 4);
#pragma GCC unroll 2
                for (int j = 0; j < 4; j += 2) {
                    U first = (U)signed_byte(x, j), second = (U)signed_byte(x, j + 1);
                    U pair = first >> 16 | (second & 0xffff0000u);
                    memcpy(to + (j * PANEL + 2 * c), &pair, sizeof pair);
                }
            }
    }

    template <int BITS> static void group(const char* from, bf16* to, Lines& far) {
        from += PANEL * 4;
        for (int k = 0; k < GROUP; k += 16, from += 2 * BITS * PANEL, to += 16 * PANEL)
            for (int c = 0; c < PANEL; c += W) {
#pragma GCC unroll 8
                for (int t = 0; t < 8; ++t) {
                    if (t % 4 == 0) far.fetch();
                    U pair = codes<BITS>(from + c * 4, t) | 0x43004300u;
                    memcpy(to + (2 * t * PANEL + 2 * c), &pair, sizeof pair);
                }
            }
    }
};

// Rows times groups of whole numbers: a group's sum, times its step, and its offset times the sum of x.
template <int M>
void group_rows(const bf16* x, int64_t ldx, const bf16* w, const char* from, int64_t bytes, int64_t k, const float* sums,
                int64_t ld_sums, float* y, bool more, Lines far) {
    F acc[M][COLUMNS];
    begin(acc, y, more);
    for (int64_t first = 0; first < k; first += GROUP, from += bytes, ++sums) {
        F part[M][COLUMNS] = {};
        int64_t deep = k - first < GROUP ? k - first : GROUP;
        for (int64_t i = first; i < first + deep; i += 2, w += 2 * PANEL) {
            far.fetch();
            U pairs[COLUMNS];
#pragma GCC unroll 8
            for (int c = 0; c < COLUMNS; ++c) pairs[c] = load<U>(w + 2 * c * W);
#pragma GCC unroll 16
            for (int m = 0; m < M; ++m) {
                uint32_t pair;
                memcpy(&pair, x + m * ldx + i, sizeof pair);
#pragma GCC unroll 8
                for (int c = 0; c < COLUMNS; ++c) part[m][c] = dot(part[m][c], pairs[c], pair);
            }
        }
#pragma GCC unroll 8
        for (int c = 0; c < COLUMNS; ++c) {
            Scale scale(from, c * W);
#pragma GCC unroll 16
            for (int m = 0; m < M; ++m)
                acc[m][c] += part[m][c] * scale.step + splat(sums[m * ld_sums]) * scale.offset;
        }
    }
    finish(acc, y);
}

template <int M>
INLINE void pick_groups(int m, const bf16* x, int64_t ldx, const bf16* w, const char* from, int64_t bytes, int64_t k,
                        const float* sums, int64_t ld_sums, float* y, bool more, Lines far) {
    if (m == M)
        group_rows<M>(x, ldx, w, from, bytes, k, sums, ld_sums, y, more, far);
    else if constexpr (M > 1)
        pick_groups<M - 1>(m, x, ldx, w, from, bytes, k, sums, ld_sums, y, more, far);
}
#endif

// Rows of x in blocks of at most MOST, as even as can be: call(first, count).
template <int MOST, class Call> INLINE void blocks_of(int64_t m, Call call) {
    int64_t blocks = (m + MOST - 1) / MOST;
    for (int64_t b = 0; b < blocks; ++b) {
        int64_t from = m * b / blocks;
        call(from, m * (b + 1) / blocks - from);
    }
}

// Multiply sums of whole numbers by the steps of a panel's signed bytes.
INLINE void put_steps(float* y, int64_t m, const float* step, float lifted) {
    for (int64_t r = 0; r < m; ++r)
        for (int c = 0; c < PANEL; c += W) put(y + r * PANEL + c, load<F>(y + r * PANEL + c) * (load<F>(step + c) * lifted));
}

// As `panel`, of a panel in fewer bits. sums: of the groups of x's rows, ld_sums a row; for groups and bfloat16 x.
template <class A>
void rounded_panel(const A* x, int64_t ldx, int64_t m, const char* w, int kept, int64_t k, int64_t size, float* y,
                   const char* after, const float* sums, int64_t ld_sums) {
    alignas(64) A tile[PIECE<A> * PANEL];
    const char* end = w + size;
    int64_t bytes = kept == INT8 ? 0 : PANEL * (4 + GROUP * (kept == INT6 ? 6 : 4) / 8);
    const char* at = kept == INT8 ? w + PANEL * 4 : w;
    bool apart = sizeof(A) == 2 && kept != INT8;  // sums of groups
    int64_t most = apart ? GROUP_ROWS : ROWS, calls = (m + most - 1) / most * (PANEL / STEP);
    for (int64_t first = 0; first < k; first += PIECE<A>) {
        int64_t deep = k - first < PIECE<A> ? k - first : PIECE<A>, groups = (deep + GROUP - 1) / GROUP;
        int64_t taken = kept == INT8 ? (deep + 3) / 4 * 4 * PANEL : groups * bytes, turns = sizeof(A) == 2 ? (deep + 1) / 2 : deep;
        const char* there = at + FAR < end || !after ? at + FAR : after + (at + FAR - end);
        Lines far{there, 64};
        if (kept == INT8) {
#ifdef DOT_PRODUCTS
            if constexpr (sizeof(A) == 2) Wholes::bytes(at, deep, tile, far);
#endif
            if constexpr (sizeof(A) == 4) Floats::bytes(at, deep, tile, far);
        }
        for (int64_t g = 0; g < groups && kept != INT8; ++g) {
            const char* from = at + g * bytes;
            A* to = tile + g * GROUP * PANEL;
#ifdef DOT_PRODUCTS
            if constexpr (sizeof(A) == 2) kept == INT6 ? Wholes::group<6>(from, to, far) : Wholes::group<4>(from, to, far);
#endif
            if constexpr (sizeof(A) == 4) kept == INT6 ? Floats::group<6>(from, to, far) : Floats::group<4>(from, to, far);
        }
        // The other half, which all calls share (see `panel`).
        int64_t stride = (taken / 2 + calls * turns - 1) / (calls * turns);
        const char* rest = there + taken / 2;
        for (int c = 0; c < PANEL; c += STEP) {
#ifdef DOT_PRODUCTS
            if constexpr (sizeof(A) == 2) {
                if (apart) {
                    blocks_of<GROUP_ROWS>(m, [&](int64_t r, int64_t count) {
                        pick_groups<GROUP_ROWS>(int(count), x + r * ldx + first, ldx, tile + 2 * c, at + 2 * c, bytes, deep,
                                                sums + r * ld_sums + first / GROUP, ld_sums, y + r * PANEL + c, first > 0,
                                                Lines{rest, stride});
                        rest += turns * stride;
                    });
                    continue;
                }
            }
#endif
            blocks_of<ROWS>(m, [&](int64_t r, int64_t count) {
                const A* w = tile + (sizeof(A) == 2 ? 2 : 1) * c;
                pick<ROWS>(int(count), x + r * ldx + first, ldx, w, deep, y + r * PANEL + c, first > 0, Lines{rest, stride});
                rest += turns * stride;
            });
        }
        at += taken;
    }
    if (kept == INT8) put_steps(y, m, (const float*)w, sizeof(A) == 4 ? LIFTED : 1.0f);
}

// Sums of groups of inputs, [m][groups], in the order of 16 lanes.
template <class A> void group_sums(const A* x, int64_t ldx, int64_t m, int64_t k, float* sums) {
    constexpr int LANES = 16, VECTORS = LANES / W;
    int64_t groups = (k + GROUP - 1) / GROUP;
    for (int64_t r = 0; r < m; ++r)
        for (int64_t g = 0; g < groups; ++g) {
            const A* from = x + r * ldx + g * GROUP;
            int64_t deep = k - g * GROUP < GROUP ? k - g * GROUP : GROUP, i = 0;
            F many[VECTORS] = {};
            float rest = 0;
            for (; i + LANES <= deep; i += LANES)
                for (int v = 0; v < VECTORS; ++v) many[v] += get(from + i + v * W);
            for (; i < deep; ++i) rest += value(from[i]);
            for (int v = 1; v < VECTORS; ++v) many[0] += many[v];
            sums[r * groups + g] = total(many[0]) + rest;
        }
}

}  // namespace
