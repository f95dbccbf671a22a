// Products of bfloat16 weights in whole numbers of 16 bits, for processors that multiply pairs of these faster than
// float32 (AVX2): a step of a weight's row is a power of two, so that weights within a 64th of the row's largest are what
// they were, and the others off by 2^-14 of it at most. Activations are rounded to 12 bits, with a step for every GROUP
// inputs; where a processor multiplies bfloat16 itself, they are rounded to 8.
//
// A group's sum is a whole number below 2^31, and groups are added in order: a row's result depends on no other row.
#pragma once

#include "integers.h"

namespace {

// Rows of activations as whole numbers: [m][groups * GROUP] with 0 behind the last input, and a step of each group.
struct WordRows {
    int16_t* numbers = nullptr;
    float* step = nullptr;  // [m][groups]
    int64_t groups = 0;

    WordRows from(int64_t row) const {
        return WordRows{numbers + row * groups * GROUP, step + row * groups, groups};
    }
};

#if WIDTH == 8 && defined(__AVX2__) && !defined(TILES)
#define WORD_PRODUCTS

constexpr int WORD_ROWS = 6;
constexpr float LEVELS = 2047, NOTHING = 1e-30f;  // below it, 1 / x is no number perhaps
typedef int16_t Words __attribute__((vector_size(2 * WIDTH)));

INLINE I dot_words(I sum, U weights, U pair) {
    return sum + (I)_mm256_madd_epi16((__m256i)weights, (__m256i)pair);
}

template <class A> void to_words(const A* x, int64_t ldx, int64_t m, int64_t k, const WordRows& to) {
    constexpr int VECTORS = GROUP / W;
    for (int64_t r = 0; r < m; ++r)
        for (int64_t g = 0; g < to.groups; ++g) {
            const A* from = x + r * ldx + g * GROUP;
            A part[GROUP];
            if (k - g * GROUP < GROUP) {
                memset(part, 0, sizeof part);
                memcpy(part, from, size_t(k - g * GROUP) * sizeof(A));
                from = part;
            }
            F most{};
            U none{};
#pragma GCC unroll 8
            for (int i = 0; i < VECTORS; ++i) {
                F v = get(from + i * W);
                none |= (U)(v != v);
                most = larger(most, (F)((U)v & 0x7fffffffu));
            }
            float top = largest(most);
            F turn = splat(top > NOTHING ? LEVELS / top : 0.0f);
            bool broken = _mm256_movemask_ps((__m256)none) != 0;
            to.step[r * to.groups + g] = broken ? NAN : top / LEVELS;  // what is no number stays none
            int16_t* out = to.numbers + (r * to.groups + g) * GROUP;
#pragma GCC unroll 8
            for (int i = 0; i < VECTORS; ++i) {
                I number = nearest(get(from + i * W) * turn);
                Words words = __builtin_convertvector(number, Words);
                memcpy(out + i * W, &words, sizeof words);
            }
        }
}

// M rows, ldx apart, times V vectors of columns; `step` of each group, ld_step apart.
template <int M, int V, class Fetch>
void word_rows(const int16_t* x, int64_t ldx, const float* step, int64_t ld_step, const int16_t* w, int64_t k, float* y,
               bool more, Fetch ahead) {
    F acc[M][V];
    begin(acc, y, more);
    for (; k > 0; k -= GROUP, ++step, x += GROUP) {
        int64_t deep = k < GROUP ? even(k) : GROUP;
        I part[M][V];
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
            for (int c = 0; c < V; ++c) part[m][c] = I{};
        auto add_pair = [&](int64_t i) INLINE_LAMBDA {
            ahead.fetch();
            U pairs[V];
#pragma GCC unroll 4
            for (int c = 0; c < V; ++c) pairs[c] = load<U>(w + 2 * c * W);
#pragma GCC unroll 8
            for (int m = 0; m < M; ++m) {
                uint32_t two;
                memcpy(&two, x + m * ldx + i, sizeof two);
                U numbers = splat_bits(two);
#pragma GCC unroll 4
                for (int c = 0; c < V; ++c) part[m][c] = dot_words(part[m][c], pairs[c], numbers);
            }
            w += 2 * PANEL;
        };
        if (deep == GROUP) {  // fewer instructions that do not multiply
#pragma GCC unroll 4
            for (int64_t i = 0; i < GROUP; i += 2) add_pair(i);
        } else {
            for (int64_t i = 0; i < deep; i += 2) add_pair(i);
        }
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
            for (int c = 0; c < V; ++c)
                acc[m][c] = multiply_add(__builtin_convertvector(part[m][c], F), splat(step[m * ld_step]), acc[m][c]);
    }
    finish(acc, y);
}

template <int M, int V = COLUMNS, class Fetch>
INLINE void pick_words(int m, const int16_t* x, int64_t ldx, const float* step, int64_t ld_step, const int16_t* w, int64_t k,
                       float* y, bool more, Fetch ahead) {
    if (m == M)
        word_rows<M, V>(x, ldx, step, ld_step, w, k, y, more, ahead);
    else if constexpr (M > 1)
        pick_words<M - 1, V>(m, x, ldx, step, ld_step, w, k, y, more, ahead);
}

// As `panel`, of m rows in whole numbers.
void word_panel(const WordRows& x, int64_t m, const char* w, int64_t k, float* y, const char* after) {
    int64_t calls = (m + WORD_ROWS - 1) / WORD_ROWS * (PANEL / STEP), stride = (128 + calls - 1) / calls, ldx = x.groups * GROUP;
    const int16_t* codes = (const int16_t*)(w + PANEL * 4);
    if (m <= WHOLE_ROWS)
        pick_words<WHOLE_ROWS, PANEL / W>(int(m), x.numbers, ldx, x.step, x.groups, codes, k, y, false,
                                          Soon{(const char*)codes + SOON});
    else
        for (int64_t first = 0; first < k; first += DEPTH) {
            int64_t depth = k - first < DEPTH ? k - first : DEPTH;
            const int16_t* here = codes + first * PANEL;
            const char* next = first + depth < k ? (const char*)(here + depth * PANEL) : after;
            blocks_of<WORD_ROWS>(m, [&](int64_t r, int64_t count) {
                for (int c = 0; c < PANEL; c += STEP, next += even(depth) / 2 * stride)
                    pick_words<WORD_ROWS>(int(count), x.numbers + r * ldx + first, ldx, x.step + r * x.groups + first / GROUP,
                                          x.groups, here + 2 * c, depth, y + r * PANEL + c, first > 0, Ahead{next, stride});
            });
        }
    put_steps(y, m, (const float*)w, 1.0f);
}
#else
void word_panel(const WordRows&, int64_t, const char*, int64_t, float*, const char*) {}
template <class A> void to_words(const A*, int64_t, int64_t, int64_t, const WordRows&) {}
#endif

// Scratch memory for m rows of k inputs.
WordRows word_scratch(Scratch& scratch, int64_t m, int64_t k) {
    WordRows to;
    to.groups = (k + GROUP - 1) / GROUP;
    int64_t all = m * to.groups;
    to.numbers = scratch.take<int16_t>(all * GROUP);
    to.step = scratch.take<float>(all);
    return to;
}

}  // namespace
