// Products in whole numbers of 16 bits, for processors that multiply pairs of these faster than float32 (AVX2). Of bfloat16
// weights a row's step is a power of two, so that weights within a 64th of the row's largest are what they were, and the others
// off by 2^-14 of it at most; codes of 4 and 6 bits are whole numbers as they are. Activations are rounded to 12 bits, with a
// step for every GROUP inputs; where a processor multiplies bfloat16 itself, they are rounded to 8.
//
// A group's sum is a whole number below 2^31, and groups are added in order: a row's result depends on no other row.
#pragma once

#include "integers.h"

namespace {

// Rows of activations as whole numbers: [m][groups * GROUP] with 0 behind the last input, a step of each group, and the sum of
// its numbers times it.
struct WordRows {
    int16_t* numbers = nullptr;
    float* step = nullptr;  // [m][groups]
    float* sum = nullptr;   // [m][groups]
    int64_t groups = 0;

    WordRows from(int64_t row) const {
        return WordRows{numbers + row * groups * GROUP, step + row * groups, sum + row * groups, groups};
    }
};

#if WIDTH == 8 && defined(__AVX2__) && !defined(TILES)
#define WORD_PRODUCTS

constexpr int WORD_ROWS = 6;
constexpr int64_t CODES_AHEAD = 4096;  // bytes of codes that are fetched ahead of their use
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
            I sum{};
#pragma GCC unroll 8
            for (int i = 0; i < VECTORS; ++i) {
                I number = nearest(get(from + i * W), turn);
                sum += number;
                Words words = __builtin_convertvector(number, Words);
                memcpy(out + i * W, &words, sizeof words);
            }
            to.sum[r * to.groups + g] = float(total(sum)) * to.step[r * to.groups + g];
        }
}

// Add `deep` inputs of M rows, ldx apart, times V vectors of columns at w, which goes on to the next ones.
template <int M, int V, class Fetch>
INLINE void add_words(I (&part)[M][V], const int16_t* x, int64_t ldx, const int16_t*& w, int64_t deep, Fetch& ahead) {
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
        add_words<M, V>(part, x, ldx, w, deep, ahead);
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
                                          InOrder{(const char*)codes + LINE_AHEAD});
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

// How a panel in fewer bits becomes words: so many inputs at a time, whose codes take so many bytes.
template <int KIND> struct Coded {
    static constexpr int BITS = KIND == INT8 ? 8 : KIND == INT6 ? 6 : 4, INPUTS = KIND == INT8 ? 4 : 16;
    static constexpr int64_t SCALES = KIND == INT8 ? 0 : PANEL * 4, BYTES = PANEL * INPUTS * BITS / 8;
    static constexpr int64_t GROUP_BYTES = SCALES + BYTES * (GROUP / INPUTS);

    // Inputs 2 t and 2 t + 1 of W columns.
    static INLINE_MEMBER U pair(const char* from, int t) {
        if constexpr (KIND != INT8) return codes<BITS>(from, t);
        const int8_t o = -1, a = int8_t(2 * t), b = int8_t(a + 1), c = int8_t(a + 4), d = int8_t(b + 4);
        const int8_t e = int8_t(a + 8), f = int8_t(b + 8), g = int8_t(a + 12), h = int8_t(b + 12);
        __m256i order = _mm256_broadcastsi128_si256(_mm_setr_epi8(o, a, o, b, o, c, o, d, o, e, o, f, o, g, o, h));
        return (U)_mm256_srai_epi16(_mm256_shuffle_epi8((__m256i)load<U>(from), order), 8);
    }
};

// M rows times V vectors of columns of a group: add to y, or begin it. `from`: its codes, or the words that these have become;
// `scales`: its steps and offsets.
template <int KIND, bool READY, int M, int V>
void coded_rows(const WordRows& x, int64_t g, const char* from, int64_t inputs, const bf16* scales, float* y, Lines ahead) {
    typedef Coded<KIND> Codes;
    const int16_t* numbers = x.numbers + g * GROUP;
    int64_t ldx = x.groups * GROUP;
    I part[M][V] = {};
    if constexpr (READY) {
        struct {
            INLINE_MEMBER void fetch() {}
        } nothing;
        const int16_t* w = (const int16_t*)from;
        add_words<M, V>(part, numbers, ldx, w, inputs, nothing);
    } else {
        for (int64_t i = 0; i < inputs; i += Codes::INPUTS, from += Codes::BYTES) {
            for (int64_t line = 0; line < Codes::BYTES / 64; ++line) ahead.fetch();
#pragma GCC unroll 8
            for (int t = 0; t < Codes::INPUTS / 2; ++t) {
                U pairs[V];
#pragma GCC unroll 4
                for (int c = 0; c < V; ++c) pairs[c] = Codes::pair(from + c * 4 * W, t);
#pragma GCC unroll 8
                for (int m = 0; m < M; ++m) {
                    uint32_t two;
                    memcpy(&two, numbers + m * ldx + i + 2 * t, sizeof two);
                    U given = splat_bits(two);
#pragma GCC unroll 4
                    for (int c = 0; c < V; ++c) part[m][c] = dot_words(part[m][c], pairs[c], given);
                }
            }
        }
    }
#pragma GCC unroll 4
    for (int c = 0; c < V; ++c) {
        F scale = splat(1.0f), offset{};
        if (KIND != INT8) scale = get(scales + c * W), offset = get(scales + PANEL + c * W);
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) {
            float* to = y + m * PANEL + c * W;
            F acc = g > 0 ? load<F>(to) : F{}, step = splat(x.step[m * x.groups + g]);
            if (KIND != INT8) acc = multiply_add(offset, splat(x.sum[m * x.groups + g]), acc);
            put(to, multiply_add(__builtin_convertvector(part[m][c], F), KIND == INT8 ? step : scale * step, acc));
        }
    }
}

template <int KIND, bool READY, int M, int V>
INLINE void pick_coded(int m, const WordRows& x, int64_t g, const char* from, int64_t inputs, const bf16* scales, float* y,
                       Lines ahead) {
    if (m == M)
        coded_rows<KIND, READY, M, V>(x, g, from, inputs, scales, y, ahead);
    else if constexpr (M > 1)
        pick_coded<KIND, READY, M - 1, V>(m, x, g, from, inputs, scales, y, ahead);
}

// As `panel`, of m rows in whole numbers and a panel in fewer bits. For many rows a group becomes words in the first cache.
template <int KIND> void coded_panel(const WordRows& x, int64_t m, const char* w, int64_t k, float* y) {
    typedef Coded<KIND> Codes;
    constexpr int FEW = KIND == INT8 ? WHOLE_ROWS : 2;  // rows for which codes come apart in registers
    alignas(64) uint32_t words[GROUP / 2 * PANEL];
    const char* at = KIND == INT8 ? w + PANEL * 4 : w;
    for (int64_t g = 0; g < x.groups; ++g, at += Codes::GROUP_BYTES) {
        int64_t inputs = std::min<int64_t>(k - g * GROUP, GROUP);
        if (KIND != INT8) inputs = GROUP;
        const bf16* scales = (const bf16*)at;
        const char* from = at + Codes::SCALES;
        Lines ahead{at + CODES_AHEAD, 64};
        for (int64_t line = 0; line < Codes::SCALES / 64; ++line) ahead.fetch();
        if (m <= FEW) {
            pick_coded<KIND, false, FEW, PANEL / W>(int(m), x, g, from, inputs, scales, y, ahead);
            continue;
        }
        for (uint32_t* to = words; to < words + inputs * PANEL / 2; to += Codes::INPUTS / 2 * PANEL, from += Codes::BYTES) {
            for (int64_t line = 0; line < Codes::BYTES / 64; ++line) ahead.fetch();
            for (int c = 0; c < PANEL; c += W)
#pragma GCC unroll 8
                for (int t = 0; t < Codes::INPUTS / 2; ++t) put(to + t * PANEL + c, Codes::pair(from + c * 4, t));
        }
        blocks_of<WORD_ROWS>(m, [&](int64_t r, int64_t count) {
            for (int c = 0; c < PANEL; c += STEP)
                pick_coded<KIND, true, WORD_ROWS, COLUMNS>(int(count), x.from(r), g, (const char*)(words + c), inputs, scales + c,
                                                           y + r * PANEL + c, ahead);
        });
    }
    if (KIND == INT8) put_steps(y, m, (const float*)w, 1.0f);
}

void word_panel(const WordRows& x, int64_t m, const char* w, int kept, int64_t k, float* y, const char* after) {
    switch (kept) {
        case INT8: return coded_panel<INT8>(x, m, w, k, y);
        case INT6: return coded_panel<INT6>(x, m, w, k, y);
        case INT4: return coded_panel<INT4>(x, m, w, k, y);
        default: word_panel(x, m, w, k, y, after);
    }
}

// Whether products with these weights take words: of a target in bfloat16, and not where bytes or float32 are asked for.
template <class T> bool takes_words(const Weights& w) {
    return w.kept == WORDS || (sizeof(T) == 2 && w.kept != WHOLE && !w.drafts);
}
#else
void word_panel(const WordRows&, int64_t, const char*, int, int64_t, float*, const char*) {}
template <class T> bool takes_words(const Weights&) { return false; }
template <class A> void to_words(const A*, int64_t, int64_t, int64_t, const WordRows&) {}
#endif

// Scratch memory for m rows of k inputs.
WordRows word_scratch(Scratch& scratch, int64_t m, int64_t k) {
    WordRows to;
    to.groups = (k + GROUP - 1) / GROUP;
    int64_t all = m * to.groups;
    to.numbers = scratch.take<int16_t>(all * GROUP);
    to.step = scratch.take<float>(2 * all);
    to.sum = to.step + all;
    return to;
}

}  // namespace
