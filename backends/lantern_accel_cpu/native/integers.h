// Products in whole numbers, for a copy of the model that drafts: activations are rounded to 8 bits as well, with one
// step for every SPAN inputs, so that codes are multiplied as they lie in memory. What a copy drafts need not be exact:
// the target checks it.
//
// A group's sum is a whole number, and groups are added in order: a row's result depends on no other row.
#pragma once

#include "rounded.h"

#if WIDTH == 16 || defined(__AVX2__)
#define INTEGERS
#include <immintrin.h>
#endif

namespace {

constexpr int64_t AT_ONCE = 4;  // groups that share a step of activations, and that blocks of rows take in turns
constexpr int64_t SPAN = AT_ONCE * GROUP;

// Rows of activations in 8 bits: numbers [m][spans * SPAN] with 0 behind the last input, a step of each span, and the
// sum of each group's numbers.
struct ByteRows {
    int8_t* numbers = nullptr;
    float* step = nullptr;  // [m][spans]
    int32_t* sum = nullptr;  // [m][spans * AT_ONCE]
    int64_t spans = 0;

    ByteRows from(int64_t row) const {
        return ByteRows{numbers + row * spans * SPAN, step + row * spans, sum + row * spans * AT_ONCE, spans};
    }
};

#ifdef INTEGERS
#if WIDTH == 16
#define TARGET NEEDS("avx512vnni")
INLINE bool multiplies_bytes() { return HAS("avx512vnni"); }
constexpr int BYTE_ROWS = 8;
TARGET INLINE I dot_bytes(I sum, U codes, U numbers) {
    return (I)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, (__m512i)numbers);
}
// The order in which a lane's codes of 4 and 6 bits come apart: of eight inputs 0, 4, 1, 5, then 2, 6, 3, 7.
#define APART 0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15
#else
#define TARGET
INLINE bool multiplies_bytes() { return true; }
constexpr int BYTE_ROWS = 2;
INLINE I dot_bytes(I sum, U codes, U numbers) {  // codes below 64: no pair of products leaves 16 bits
    __m256i pairs = _mm256_maddubs_epi16((__m256i)codes, (__m256i)numbers);
    return sum + (I)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}
#define APART 0, 4, 1, 5, 2, 6, 3, 7, 8, 9, 10, 11, 12, 13, 14, 15
#endif
typedef int8_t Small __attribute__((vector_size(WIDTH)));
typedef int16_t Half __attribute__((vector_size(4 * WIDTH)));

// The product of four signed codes and numbers. `INT8` sums begin at signed_start(sum of the numbers).
TARGET INLINE I dot_signed(I sum, U codes, U numbers) {
#if WIDTH == 16
    return dot_bytes(sum, codes ^ 0x80808080u, numbers);  // codes and 128
#else
    __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8((__m256i)codes), _mm256_sign_epi8((__m256i)numbers, (__m256i)codes));
    return sum + (I)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#endif
}
INLINE int32_t signed_start(int32_t sum) { return WIDTH == 16 ? -128 * sum : 0; }

INLINE int32_t total(I x) {
#if WIDTH == 16
    return _mm512_reduce_add_epi32((__m512i)x);
#else
    __m128i half = _mm_add_epi32(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
    half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(half, _mm_shuffle_epi32(half, 0xb1)));
#endif
}

INLINE Small apart(Small bytes) {
    __m128i all = _mm_setzero_si128();
    memcpy(&all, &bytes, sizeof bytes);
    all = _mm_shuffle_epi8(all, _mm_setr_epi8(APART));
    memcpy(&bytes, &all, sizeof bytes);
    return bytes;
}

// Round rows of x to 8 bits by spans, in the order that products with weights of a kind take; nothing where `to` is
// nowhere.
template <class A> void to_bytes(const A* x, int64_t ldx, int64_t m, int64_t k, int kept, const ByteRows& to) {
    constexpr int VECTORS = SPAN / W, EACH = GROUP / W;
    if (!to.numbers) return;
    for (int64_t r = 0; r < m; ++r)
        for (int64_t s = 0; s < to.spans; ++s) {
            const A* from = x + r * ldx + s * SPAN;
            A part[SPAN];
            if (k - s * SPAN < SPAN) {
                memset(part, 0, sizeof part);
                memcpy(part, from, size_t(k - s * SPAN) * sizeof(A));
                from = part;
            }
            F most{};
            for (int i = 0; i < VECTORS; ++i) most = larger(most, (F)((U)get(from + i * W) & 0x7fffffffu));
            float top = largest(most);
            F turn = splat(top > 0 ? 127.0f / top : 0.0f);
            to.step[r * to.spans + s] = top / 127.0f;
            int8_t* out = to.numbers + (r * to.spans + s) * SPAN;
            for (int g = 0; g < AT_ONCE; ++g) {
                I sum{};
#pragma GCC unroll 8
                for (int i = g * EACH; i < (g + 1) * EACH; ++i) {
                    I number = nearest(get(from + i * W), turn);
                    sum += number;
                    Small bytes = __builtin_convertvector(number, Small);
                    if (kept != INT8) bytes = apart(bytes);
                    memcpy(out + i * W, &bytes, sizeof bytes);
                }
                to.sum[(r * to.spans + s) * AT_ONCE + g] = total(sum);
            }
        }
}

// Add four inputs of M rows, whose numbers lie `ld` apart, times their codes.
template <int KIND, int M, int V>
TARGET INLINE void add_four(I (&part)[M][V], const U (&codes)[V], const int8_t* at, int64_t ld) {
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
        uint32_t four;
        memcpy(&four, at + m * ld, 4);
        U numbers = splat_bits(four);
#pragma GCC unroll 4
        for (int c = 0; c < V; ++c)
            part[m][c] = KIND == INT8 ? dot_signed(part[m][c], codes[c], numbers) : dot_bytes(part[m][c], codes[c], numbers);
    }
}

// Two places of which a line each is fetched with every row of lanes, near and for one use: keys and values stay in the
// caches that are farther away, and a pass of two rows reads a third more in the same time (AMD EPYC, Zen 5).
// Processors with tiles fetch more lines at once into the second cache.
#ifdef TILES
constexpr int64_t NEAR = FAR;  // bytes that are fetched ahead of their use
INLINE void once(const char* line) { __builtin_prefetch(line, 0, 2); }
#else
constexpr int64_t NEAR = 8192;
INLINE void once(const char* line) { __builtin_prefetch(line, 0, 0); }
#endif
struct Once {
    const char *first, *second;
    INLINE_MEMBER void fetch() {
        once(first);
        once(second);
        first += 128;
        second += 128;
    }
};

// M rows times a panel's groups of span s, which lie at `from`: `rows` rows of lanes. `far` is fetched with each of them.
template <int KIND, int M>
TARGET void byte_rows(const ByteRows& x, int64_t s, int64_t rows, const char* from, int column, float* y, Once far) {
    constexpr int64_t ROW = PANEL * 4;
    constexpr int V = COLUMNS;
    int64_t ld = x.spans * SPAN, ld_sums = x.spans * AT_ONCE;
    const int8_t* at = x.numbers + s * SPAN;
    const int32_t* sums = x.sum + s * AT_ONCE;
    F acc[M][V];
    I part[M][V];
    if (KIND == INT8) {
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) {
            const int32_t* sum = sums + m * ld_sums;
#pragma GCC unroll 4
            for (int c = 0; c < V; ++c) part[m][c] = signed_start(sum[0] + sum[1] + sum[2] + sum[3]) + I{};
        }
        for (const char* lanes = from + column * 4; rows; --rows, lanes += ROW, at += 4) {
            far.fetch();
            U codes[V];
#pragma GCC unroll 4
            for (int c = 0; c < V; ++c) codes[c] = load<U>(lanes + c * 4 * W);
            add_four<KIND, M, V>(part, codes, at, ld);
        }
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
            for (int c = 0; c < V; ++c) acc[m][c] = __builtin_convertvector(part[m][c], F);
    } else {
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
            for (int c = 0; c < V; ++c) acc[m][c] = F{};
        constexpr int64_t EACH = KIND == INT4 ? GROUP / 8 : GROUP / 16 * 3;
        for (; rows; rows -= EACH, ++sums) {
            const char* lanes = from + ROW + column * 4;
            far.fetch();
#pragma GCC unroll 8
            for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
                for (int c = 0; c < V; ++c) part[m][c] = I{};
            if (KIND == INT4) {
                for (int i = 0; i < GROUP / 8; ++i, lanes += ROW, at += 8) {
                    far.fetch();
                    U low[V], high[V];
#pragma GCC unroll 4
                    for (int c = 0; c < V; ++c) {
                        U both = load<U>(lanes + c * 4 * W);
                        low[c] = both & 0x0f0f0f0fu, high[c] = both >> 4 & 0x0f0f0f0fu;
                    }
                    add_four<KIND, M, V>(part, low, at, ld);
                    add_four<KIND, M, V>(part, high, at + 4, ld);
                }
            } else {
                for (int i = 0; i < GROUP / 16; ++i, lanes += 3 * ROW, at += 16) {
                    far.fetch();
                    far.fetch();
                    far.fetch();
                    U codes[4][V];
#pragma GCC unroll 4
                    for (int c = 0; c < V; ++c) {
                        U a = load<U>(lanes + c * 4 * W), b = load<U>(lanes + ROW + c * 4 * W);
                        U upper = load<U>(lanes + 2 * ROW + c * 4 * W);
                        codes[0][c] = (a & 0x0f0f0f0fu) | (upper << 4 & 0x30303030u);
                        codes[1][c] = (a >> 4 & 0x0f0f0f0fu) | (upper << 2 & 0x30303030u);
                        codes[2][c] = (b & 0x0f0f0f0fu) | (upper & 0x30303030u);
                        codes[3][c] = (b >> 4 & 0x0f0f0f0fu) | (upper >> 2 & 0x30303030u);
                    }
#pragma GCC unroll 4
                    for (int t = 0; t < 4; ++t) add_four<KIND, M, V>(part, codes[t], at + 4 * t, ld);
                }
            }
            F step[V], offset[V];
#pragma GCC unroll 4
            for (int c = 0; c < V; ++c) {
                step[c] = get((const bf16*)from + column + c * W);
                offset[c] = get((const bf16*)from + PANEL + column + c * W);
            }
#pragma GCC unroll 8
            for (int m = 0; m < M; ++m) {
                float sum = float(sums[m * ld_sums]);
#pragma GCC unroll 4
                for (int c = 0; c < V; ++c) {
                    acc[m][c] = multiply_add(offset[c], splat(sum), acc[m][c]);
                    acc[m][c] = multiply_add(__builtin_convertvector(part[m][c], F), step[c], acc[m][c]);
                }
            }
            from += ROW * (1 + EACH);
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
        float turn = x.step[m * x.spans + s];
#pragma GCC unroll 4
        for (int c = 0; c < V; ++c) {
            float* to = y + m * PANEL + column + c * W;
            put(to, multiply_add(acc[m][c], splat(turn), s ? load<F>(to) : F{}));
        }
    }
}

template <int KIND, int M>
INLINE void pick_bytes(int m, const ByteRows& x, int64_t s, int64_t rows, const char* from, int column, float* y,
                       Once far) {
    if (m == M)
        byte_rows<KIND, M>(x, s, rows, from, column, y, far);
    else if constexpr (M > 1)
        pick_bytes<KIND, M - 1>(m, x, s, rows, from, column, y, far);
}

constexpr int64_t LANES_EACH = GROUP / 4;  // rows of lanes of a group whose codes are apart

// The codes of groups that lie at `from`, a byte each: of every four inputs a row of lanes.
template <int KIND> void take_apart(const char* from, int64_t groups, uint32_t* out) {
    for (const char* lanes = from; groups; --groups) {
        lanes += PANEL * 4;
        if (KIND == INT4) {
            for (int i = 0; i < GROUP / 8; ++i, lanes += PANEL * 4, out += 2 * PANEL)
#pragma GCC unroll 4
                for (int c = 0; c < PANEL; c += W) {
                    U both = load<U>(lanes + c * 4);
                    put(out + c, both & 0x0f0f0f0fu);
                    put(out + PANEL + c, both >> 4 & 0x0f0f0f0fu);
                }
        } else {
            for (int i = 0; i < GROUP / 16; ++i, lanes += 3 * PANEL * 4, out += 4 * PANEL)
#pragma GCC unroll 4
                for (int c = 0; c < PANEL; c += W) {
                    U a = load<U>(lanes + c * 4), b = load<U>(lanes + PANEL * 4 + c * 4);
                    U upper = load<U>(lanes + 2 * PANEL * 4 + c * 4);
                    put(out + c, (a & 0x0f0f0f0fu) | (upper << 4 & 0x30303030u));
                    put(out + PANEL + c, (a >> 4 & 0x0f0f0f0fu) | (upper << 2 & 0x30303030u));
                    put(out + 2 * PANEL + c, (b & 0x0f0f0f0fu) | (upper & 0x30303030u));
                    put(out + 3 * PANEL + c, (b >> 4 & 0x0f0f0f0fu) | (upper >> 2 & 0x30303030u));
                }
        }
    }
}

#if WIDTH == 8
// --- many rows: codes of 4 and 6 bits come apart once for all of them ------------------------------------

// Sums of products stay in 16 bits for so many rows of lanes: 2 x 127 x 63 x 2 and 2 x 127 x 15 x 8 are below 2^15.
template <int KIND> constexpr int SHORT_SUMS = KIND == INT6 ? 2 : 8;
constexpr int64_t MANY_ROWS = 6;
constexpr int WIDE_ROWS = 4;

// As byte_rows, with codes that are apart; `steps`: of the first group's, `bytes` before the next one's. `lines` are
// fetched with each group.
template <int KIND, int M>
void wide_rows(const ByteRows& x, int64_t s, int64_t groups, const uint32_t* codes, const char* steps, int64_t bytes,
               int column, float* y, const char* far, int64_t lines) {
    constexpr int V = COLUMNS, LANES = SHORT_SUMS<KIND>;
    const __m256i ones = _mm256_set1_epi16(1);
    int64_t ld = x.spans * SPAN, ld_sums = x.spans * AT_ONCE;
    const int8_t* at = x.numbers + s * SPAN;
    const int32_t* sums = x.sum + s * AT_ONCE;
    F acc[M][V];
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
        for (int c = 0; c < V; ++c) acc[m][c] = F{};
    codes += column;
    for (; groups; --groups, ++sums, steps += bytes) {
        for (int64_t i = 0; i < lines; ++i, far += 64) __builtin_prefetch(far, 0, 0);
        I part[M][V];
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
            for (int c = 0; c < V; ++c) part[m][c] = I{};
        for (int i = 0; i < LANES_EACH; i += LANES, codes += LANES * PANEL, at += 4 * LANES) {
            Half sum[M][V];
#pragma GCC unroll 8
            for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
                for (int c = 0; c < V; ++c) sum[m][c] = Half{};
#pragma GCC unroll 1
            for (int lane = 0; lane < LANES; ++lane) {
                U four[V];
#pragma GCC unroll 4
                for (int c = 0; c < V; ++c) four[c] = load<U>(codes + lane * PANEL + c * W);
#pragma GCC unroll 8
                for (int m = 0; m < M; ++m) {
                    uint32_t given;
                    memcpy(&given, at + m * ld + 4 * lane, 4);
                    U numbers = splat_bits(given);
#pragma GCC unroll 4
                    for (int c = 0; c < V; ++c)
                        sum[m][c] += (Half)_mm256_maddubs_epi16((__m256i)four[c], (__m256i)numbers);
                }
            }
#pragma GCC unroll 8
            for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
                for (int c = 0; c < V; ++c) part[m][c] += (I)_mm256_madd_epi16((__m256i)sum[m][c], ones);
        }
        F step[V], offset[V];
#pragma GCC unroll 4
        for (int c = 0; c < V; ++c) {
            step[c] = get((const bf16*)steps + column + c * W);
            offset[c] = get((const bf16*)steps + PANEL + column + c * W);
        }
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) {
            float sum = float(sums[m * ld_sums]);
#pragma GCC unroll 4
            for (int c = 0; c < V; ++c) {
                acc[m][c] = multiply_add(offset[c], splat(sum), acc[m][c]);
                acc[m][c] = multiply_add(__builtin_convertvector(part[m][c], F), step[c], acc[m][c]);
            }
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
        float turn = x.step[m * x.spans + s];
#pragma GCC unroll 4
        for (int c = 0; c < V; ++c) {
            float* to = y + m * PANEL + column + c * W;
            put(to, multiply_add(acc[m][c], splat(turn), s ? load<F>(to) : F{}));
        }
    }
}

template <int KIND, int M>
INLINE void pick_wide(int m, const ByteRows& x, int64_t s, int64_t groups, const uint32_t* codes, const char* steps,
                      int64_t bytes, int column, float* y, const char* far, int64_t lines) {
    if (m == M)
        wide_rows<KIND, M>(x, s, groups, codes, steps, bytes, column, y, far, lines);
    else if constexpr (M > 1)
        pick_wide<KIND, M - 1>(m, x, s, groups, codes, steps, bytes, column, y, far, lines);
}

// As byte_panel, to the last bit.
template <int KIND> void wide_panel(const ByteRows& x, int64_t m, const char* at, int64_t k, float* y) {
    constexpr int64_t LANES = KIND == INT6 ? GROUP / 16 * 3 : GROUP / 8, BYTES = PANEL * 4 * (LANES + 1);
    alignas(64) uint32_t codes[AT_ONCE * LANES_EACH * PANEL];
    int64_t calls = (m + WIDE_ROWS - 1) / WIDE_ROWS * (PANEL / STEP) * AT_ONCE;
    int64_t lines = (AT_ONCE * BYTES / 64 + calls - 1) / calls;
    for (int64_t s = 0; s < x.spans; ++s, at += AT_ONCE * BYTES) {
        int64_t groups = std::min((k - s * SPAN + GROUP - 1) / GROUP, AT_ONCE);
        take_apart<KIND>(at, groups, codes);
        const char* far = at + AT_ONCE * BYTES;
        blocks_of<WIDE_ROWS>(m, [&](int64_t r, int64_t count) {
            for (int column = 0; column < PANEL; column += STEP, far += lines * groups * 64)
                pick_wide<KIND, WIDE_ROWS>(int(count), x.from(r), s, groups, codes, at, BYTES, column, y + r * PANEL, far, lines);
        });
    }
}
#endif

// As `panel`, of m rows in 8 bits and a panel of codes.
template <int KIND> void byte_panel(const ByteRows& x, int64_t m, const char* w, int64_t k, float* y) {
    constexpr int64_t LANES = KIND == INT8 ? GROUP / 4 : KIND == INT6 ? GROUP / 16 * 3 : GROUP / 8;  // rows of a group
    constexpr int64_t BYTES = PANEL * 4 * (LANES + (KIND != INT8));
#if WIDTH == 8
    if constexpr (KIND != INT8)
        if (m >= MANY_ROWS) return wide_panel<KIND>(x, m, w, k, y);
#endif
    const char* at = KIND == INT8 ? w + PANEL * 4 : w;
    int64_t calls = (m + BYTE_ROWS - 1) / BYTE_ROWS * (PANEL / STEP);
    for (int64_t s = 0; s < x.spans; ++s, at += AT_ONCE * BYTES) {
        int64_t deep = k - s * SPAN < SPAN ? k - s * SPAN : SPAN, call = 0;
        int64_t rows = KIND == INT8 ? (deep + 3) / 4 : (deep + GROUP - 1) / GROUP * LANES;
        blocks_of<BYTE_ROWS>(m, [&](int64_t r, int64_t count) {
            for (int column = 0; column < PANEL; column += STEP, ++call) {
                // A row of lanes is two lines: the first call fetches both, or two calls one each.
                const char* far = at + NEAR + 64 * call;
                Once ahead{call < 2 ? far : at, calls == 1 ? far + 64 : at};
                pick_bytes<KIND, BYTE_ROWS>(int(count), x.from(r), s, rows, at, column, y + r * PANEL, ahead);
            }
        });
    }
    if (KIND != INT8) return;
    for (int64_t r = 0; r < m; ++r)
        for (int c = 0; c < PANEL; c += W) {
            float* to = y + r * PANEL + c;
            put(to, load<F>(to) * load<F>((const float*)w + c));
        }
}

void byte_panel(const ByteRows& x, int64_t m, const char* w, int kept, int64_t k, float* y) {
    if (kept == INT8)
        byte_panel<INT8>(x, m, w, k, y);
    else if (kept == INT6)
        byte_panel<INT6>(x, m, w, k, y);
    else
        byte_panel<INT4>(x, m, w, k, y);
}

// Scratch memory for m rows of k inputs, where products with these weights take bytes.
ByteRows byte_scratch(Scratch& scratch, int64_t m, int64_t k, const Weights& w) {
    if (!w.drafts || !multiplies_bytes()) return ByteRows{};
    int64_t spans = (k + SPAN - 1) / SPAN, all = m * spans;
    char* memory = scratch.take<char>(size_t(all) * (SPAN + 4 + 4 * AT_ONCE));
    ByteRows to{(int8_t*)memory, (float*)(memory + all * SPAN), nullptr, spans};
    to.sum = (int32_t*)(to.step + all);
    return to;
}
#else
void byte_panel(const ByteRows&, int64_t, const char*, int, int64_t, float*) {}
ByteRows byte_scratch(Scratch&, int64_t, int64_t, const Weights&) { return ByteRows{}; }
template <class A> void to_bytes(const A*, int64_t, int64_t, int64_t, int, const ByteRows&) {}
#endif

}  // namespace
