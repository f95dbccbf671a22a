// A few rows times one panel of weights.
//
// Every element is one chain of multiply-adds over K, whatever the number of rows and of threads: a row's
// result does not depend on what is computed next to it. (Units with bfloat16 dot products chain pairs.)
#pragma once

#include "native.h"
#include "vector.h"

#ifdef DOT_PRODUCTS
#include "dot.h"
#endif

namespace {

// Rows and vectors of columns that the accumulators in registers hold.
#if WIDTH == 16
constexpr int ROWS = 12, COLUMNS = 2;
#elif WIDTH == 8
constexpr int ROWS = 5, COLUMNS = 2;
#elif defined(__aarch64__)
constexpr int ROWS = 6, COLUMNS = 4;
#else
constexpr int ROWS = 3, COLUMNS = 4;
#endif
constexpr int STEP = COLUMNS * W;  // columns of one pass
constexpr int64_t DEPTH = 2048;    // K is done in pieces of this, so that panels stay in the second cache

// What activations are kept as before a product with weights of a type.
template <class T> struct Activation {
    typedef float type;
};
#if defined(DOT_PRODUCTS) || defined(TILES)
template <> struct Activation<bf16> {
    typedef bf16 type;
};
#endif

constexpr int64_t even(int64_t k) { return (k + 1) / 2 * 2; }
template <class T> constexpr int64_t panel_size(int64_t k) {
    return (sizeof(T) == 2 ? even(k) : k) * PANEL;
}

INLINE int64_t panels(int64_t n) { return (n + PANEL - 1) / PANEL; }

// A place that a product fetches for later, further on with every turn of its loop.
struct Ahead {
    const char* at;
    int64_t stride;
    INLINE_MEMBER void fetch() {
        __builtin_prefetch(at, 0, 2);
        at += stride;
    }
};

// The same, of two lines a turn, into the second cache or (3) the first.
template <int CACHE = 2> struct AheadTwice {
    const char* at;
    INLINE_MEMBER void fetch() {
        __builtin_prefetch(at, 0, CACHE);
        __builtin_prefetch(at + 64, 0, CACHE);
        at += 128;
    }
};

// Of vectors of 8 numbers STEP is half a panel: every pass reads every other line, which memory delivers more slowly than lines
// in their order. One pass of all columns is faster for so few rows, though the sums of more than two leave the registers.
constexpr int WHOLE_ROWS = WIDTH == 8 ? 4 : 0;
constexpr int64_t LINE_AHEAD = 1024;  // bytes that are fetched ahead of their use in one pass
typedef AheadTwice<3> InOrder;

template <int M, int V> INLINE void begin(F (&acc)[M][V], const float* y, bool more) {
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
        for (int c = 0; c < V; ++c) acc[m][c] = more ? load<F>(y + m * PANEL + c * W) : F{};
}

template <int M, int V> INLINE void finish(const F (&acc)[M][V], float* y) {
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
        for (int c = 0; c < V; ++c) put(y + m * PANEL + c * W, acc[m][c]);
}

template <int M, int V, class Fetch>
void rows(const float* x, int64_t ldx, const float* w, int64_t k, float* y, bool more, Fetch ahead) {
    F acc[M][V];
    begin(acc, y, more);
    for (int64_t i = 0; i < k; ++i, w += PANEL) {
        ahead.fetch();
        F b[V];
#pragma GCC unroll 8
        for (int c = 0; c < V; ++c) b[c] = load<F>(w + c * W);
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) {
            F a = splat(x[m * ldx + i]);
#pragma GCC unroll 8
            for (int c = 0; c < V; ++c) acc[m][c] += a * b[c];
        }
    }
    finish(acc, y);
}

template <int M, int V, class Fetch>
void rows(const float* x, int64_t ldx, const bf16* w, int64_t k, float* y, bool more, Fetch ahead) {
    F acc[M][V];
    begin(acc, y, more);
    for (int64_t i = 0; i < k; i += 2, w += 2 * PANEL) {
        ahead.fetch();
        F b[V];
        U pair[V];
#pragma GCC unroll 8
        for (int c = 0; c < V; ++c) pair[c] = load<U>(w + 2 * c * W), b[c] = lower(pair[c]);
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) {
            F a = splat(x[m * ldx + i]);
#pragma GCC unroll 8
            for (int c = 0; c < V; ++c) acc[m][c] += a * b[c];
        }
#pragma GCC unroll 8
        for (int c = 0; c < V; ++c) b[c] = upper(pair[c]);
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) {
            F a = splat(x[m * ldx + i + 1]);
#pragma GCC unroll 8
            for (int c = 0; c < V; ++c) acc[m][c] += a * b[c];
        }
    }
    finish(acc, y);
}

#ifdef DOT_PRODUCTS
// Activations are rounded to bfloat16.
template <int M, int V, class Fetch>
void rows(const bf16* x, int64_t ldx, const bf16* w, int64_t k, float* y, bool more, Fetch ahead) {
    F acc[M][V];
    begin(acc, y, more);
    for (int64_t i = 0; i < k; i += 2, w += 2 * PANEL) {
        ahead.fetch();
        U pairs[V];
#pragma GCC unroll 8
        for (int c = 0; c < V; ++c) pairs[c] = load<U>(w + 2 * c * W);
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) {
            uint32_t pair;
            memcpy(&pair, x + m * ldx + i, sizeof pair);
#pragma GCC unroll 8
            for (int c = 0; c < V; ++c) acc[m][c] = dot(acc[m][c], pairs[c], pair);
        }
    }
    finish(acc, y);
}
#endif

template <int M, int V = COLUMNS, class A, class T, class Fetch>
INLINE void pick(int m, const A* x, int64_t ldx, const T* w, int64_t k, float* y, bool more, Fetch ahead) {
    if (m == M)
        rows<M, V>(x, ldx, w, k, y, more, ahead);
    else if constexpr (M > 1)
        pick<M - 1, V>(m, x, ldx, w, k, y, more, ahead);
}

// One panel times m rows of x: y [m][PANEL]. Rows of x lie ldx apart and have even(k) elements. `after` is
// where this thread goes on: it is fetched meanwhile, a whole panel ahead, since less is used up before it has come.
// All calls fetch their share: more than memory delivers while one of them multiplies would hold up the products.
template <class A, class T>
void panel(const A* x, int64_t ldx, int64_t m, const T* w, int64_t k, float* y, const T* after) {
    if constexpr (WHOLE_ROWS > 0)
        if (m <= WHOLE_ROWS)
            return pick<WHOLE_ROWS, PANEL / W>(int(m), x, ldx, w, k, y, false, InOrder{(const char*)w + LINE_AHEAD});
    int64_t blocks = (m + ROWS - 1) / ROWS, calls = blocks * (PANEL / STEP);
    for (int64_t first = 0; first < k; first += DEPTH) {
        int64_t depth = k - first < DEPTH ? k - first : DEPTH, turns = sizeof(T) == 2 ? (depth + 1) / 2 : depth;
        const char* next = (const char*)(first + depth < k ? w + (first + depth) * PANEL : after);
        int64_t stride = (128 + calls - 1) / calls;  // a turn reads two lines
        for (int64_t b = 0; b < blocks; ++b) {
            int64_t from = m * b / blocks, to = m * (b + 1) / blocks;
            for (int c = 0; c < PANEL; c += STEP, next += turns * stride) {
                const T* at = w + first * PANEL + c * (sizeof(T) == 2 ? 2 : 1);
                const A* rows = x + from * ldx + first;
                float* to_y = y + from * PANEL + c;
                if (calls == 1)
                    pick<ROWS>(int(to - from), rows, ldx, at, depth, to_y, first > 0, AheadTwice<>{next});
                else
                    pick<ROWS>(int(to - from), rows, ldx, at, depth, to_y, first > 0, Ahead{next, stride});
            }
        }
    }
}

}  // namespace
