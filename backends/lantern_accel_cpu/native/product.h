// Products of a few rows with weights in panels.
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
#ifdef DOT_PRODUCTS
template <> struct Activation<bf16> {
    typedef bf16 type;
};
#endif

constexpr int64_t even(int64_t k) { return (k + 1) / 2 * 2; }
template <class T> constexpr int64_t panel_size(int64_t k) {
    return (sizeof(T) == 2 ? even(k) : k) * PANEL;
}

// Two places that a product fetches for later, a line of each with every turn of its loop.
struct Ahead {
    const char *first, *second;
    int64_t stride;
    INLINE_MEMBER void fetch() {
        __builtin_prefetch(first, 0, 2);
        __builtin_prefetch(second, 0, 2);
        first += stride;
        second += stride;
    }
};

template <int M> INLINE void begin(F (&acc)[M][COLUMNS], const float* y, bool more) {
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
        for (int c = 0; c < COLUMNS; ++c) acc[m][c] = more ? load<F>(y + m * PANEL + c * W) : F{};
}

template <int M> INLINE void finish(const F (&acc)[M][COLUMNS], float* y) {
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
        for (int c = 0; c < COLUMNS; ++c) put(y + m * PANEL + c * W, acc[m][c]);
}

template <int M>
void rows(const float* x, int64_t ldx, const float* w, int64_t k, float* y, bool more, Ahead ahead) {
    F acc[M][COLUMNS];
    begin<M>(acc, y, more);
    for (int64_t i = 0; i < k; ++i, w += PANEL) {
        ahead.fetch();
        F b[COLUMNS];
#pragma GCC unroll 8
        for (int c = 0; c < COLUMNS; ++c) b[c] = load<F>(w + c * W);
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) {
            F a = splat(x[m * ldx + i]);
#pragma GCC unroll 8
            for (int c = 0; c < COLUMNS; ++c) acc[m][c] += a * b[c];
        }
    }
    finish<M>(acc, y);
}

template <int M>
void rows(const float* x, int64_t ldx, const bf16* w, int64_t k, float* y, bool more, Ahead ahead) {
    F acc[M][COLUMNS];
    begin<M>(acc, y, more);
    for (int64_t i = 0; i < k; i += 2, w += 2 * PANEL) {
        ahead.fetch();
        F b[COLUMNS];
        U pair[COLUMNS];
#pragma GCC unroll 8
        for (int c = 0; c < COLUMNS; ++c) pair[c] = load<U>(w + 2 * c * W), b[c] = lower(pair[c]);
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) {
            F a = splat(x[m * ldx + i]);
#pragma GCC unroll 8
            for (int c = 0; c < COLUMNS; ++c) acc[m][c] += a * b[c];
        }
#pragma GCC unroll 8
        for (int c = 0; c < COLUMNS; ++c) b[c] = upper(pair[c]);
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) {
            F a = splat(x[m * ldx + i + 1]);
#pragma GCC unroll 8
            for (int c = 0; c < COLUMNS; ++c) acc[m][c] += a * b[c];
        }
    }
    finish<M>(acc, y);
}

#ifdef DOT_PRODUCTS
// Activations are rounded to bfloat16.
template <int M>
void rows(const bf16* x, int64_t ldx, const bf16* w, int64_t k, float* y, bool more, Ahead ahead) {
    F acc[M][COLUMNS];
    begin<M>(acc, y, more);
    for (int64_t i = 0; i < k; i += 2, w += 2 * PANEL) {
        ahead.fetch();
        U pairs[COLUMNS];
#pragma GCC unroll 8
        for (int c = 0; c < COLUMNS; ++c) pairs[c] = load<U>(w + 2 * c * W);
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) {
            uint32_t pair;
            memcpy(&pair, x + m * ldx + i, sizeof pair);
#pragma GCC unroll 8
            for (int c = 0; c < COLUMNS; ++c) acc[m][c] = dot(acc[m][c], pairs[c], pair);
        }
    }
    finish<M>(acc, y);
}
#endif

template <int M, class A, class T>
INLINE void pick(int m, const A* x, int64_t ldx, const T* w, int64_t k, float* y, bool more, Ahead ahead) {
    if (m == M)
        rows<M>(x, ldx, w, k, y, more, ahead);
    else if constexpr (M > 1)
        pick<M - 1>(m, x, ldx, w, k, y, more, ahead);
}

// One panel times m rows of x: y [m][PANEL]. Rows of x lie ldx apart and have even(k) elements. `after` is
// where this thread goes on: it is fetched meanwhile, a whole panel ahead, since less is used up before it has come.
template <class A, class T>
void panel(const A* x, int64_t ldx, int64_t m, const T* w, int64_t k, float* y, const T* after) {
    int64_t blocks = (m + ROWS - 1) / ROWS;
    bool once = blocks == 1 && STEP == PANEL;
    for (int64_t first = 0; first < k; first += DEPTH) {
        int64_t depth = k - first < DEPTH ? k - first : DEPTH, turns = sizeof(T) == 2 ? (depth + 1) / 2 : depth;
        const char* here = (const char*)(w + first * PANEL);
        const char* next = (const char*)(first + depth < k ? w + (first + depth) * PANEL : after);
        int64_t call = 0;  // a turn reads two lines: the first call fetches all of them, or two calls half each
        for (int64_t b = 0; b < blocks; ++b) {
            int64_t from = m * b / blocks, to = m * (b + 1) / blocks;
            for (int c = 0; c < PANEL; c += STEP, ++call) {
                const T* at = w + first * PANEL + c * (sizeof(T) == 2 ? 2 : 1);
                Ahead ahead{next, next + 64, 128};
                if (!once) ahead = Ahead{call < 2 ? next + call * turns * 64 : here, here, 64};
                pick<ROWS>(int(to - from), x + from * ldx + first, ldx, at, depth, y + from * PANEL + c, first > 0, ahead);
            }
        }
    }
}

// Panels [from, to) of a product, in blocks of rows; each [count][PANEL] goes to
// emit(panel, first row, count, values). `after`: the panel that this thread reads when these are done.
constexpr int64_t BLOCK = 96;

template <class A, class T, class Emit>
void product(const A* x, int64_t ldx, int64_t m, const T* w, int64_t k, int64_t from, int64_t to,
             const T* after, Emit emit) {
    float* tile = (float*)scratch(8, BLOCK * PANEL * sizeof(float));
    for (int64_t p = from; p < to; ++p)
        for (int64_t r = 0; r < m; r += BLOCK) {
            int64_t count = m - r < BLOCK ? m - r : BLOCK;
            const T *here = w + p * panel_size<T>(k), *next = here + panel_size<T>(k);
            panel(x + r * ldx, ldx, count, here, k, tile, p + 1 < to || !after ? next : after);
            emit(p, r, count, tile);
        }
}

INLINE int64_t panels(int64_t n) { return (n + PANEL - 1) / PANEL; }

// Panels per chunk: few enough chunks to be cheap, enough that no thread waits long at the end.
INLINE int64_t share(int64_t count) {
    int64_t pieces = pool_threads() * 12;
    return pool_threads() == 1 ? (count ? count : 1) : (count + pieces - 1) / pieces;
}

INLINE int pieces(int64_t count) {
    int64_t each = share(count);
    return int((count + each - 1) / each);
}

// --- one product alone -----------------------------------------------------------------------------

template <class T> struct LinearJob {
    typedef typename Activation<T>::type A;
    const Linear* given;
    const A* x;
    int64_t ldx, count;

    static int chunks(void* self, int) { return pieces(((LinearJob*)self)->count); }

    static void work(void* self, int, int chunk) {
        LinearJob& job = *(LinearJob*)self;
        const Linear& g = *job.given;
        int64_t each = share(job.count), from = chunk * each;
        int64_t to = from + each < job.count ? from + each : job.count;
        product(job.x, job.ldx, g.m, (const T*)g.weight, g.k, from, to, (const T*)nullptr,
                [&](int64_t p, int64_t first, int64_t count, float* tile) {
                    int64_t columns = g.n - p * PANEL < PANEL ? g.n - p * PANEL : PANEL;
                    const T* bias = (const T*)g.bias;
                    for (int64_t r = 0; r < count; ++r) {
                        T* y = (T*)g.y + (first + r) * g.n + p * PANEL;
                        float* t = tile + r * PANEL;
                        if (bias)
                            for (int64_t c = 0; c < columns; ++c) t[c] += value(bias[p * PANEL + c]);
                        int64_t c = 0;
                        for (; c + W <= columns; c += W) put(y + c, load<F>(t + c));
                        for (; c < columns; ++c) put1(y + c, t[c]);
                    }
                });
    }
};

template <class T, class A> void copy_row(const T* x, int64_t k, A* y) {
    int64_t i = 0;
    for (; i + W <= k; i += W) put(y + i, get(x + i));
    for (; i < k; ++i) put1(y + i, value(x[i]));
    if (k % 2) put1(y + k, 0.0f);
}

template <class T> void linear_of(const Linear& g) {
    LinearJob<T> job;
    typedef typename LinearJob<T>::A A;
    job.given = &g;
    job.count = panels(g.n);
    job.ldx = even(g.k);
    A* x = (A*)scratch(9, g.m * job.ldx * sizeof(A));
    for (int64_t r = 0; r < g.m; ++r) copy_row((const T*)g.x + r * g.x_stride, g.k, x + r * job.ldx);
    job.x = x;
    bool small = g.k * g.n * (g.m + 3) < (1 << 18);
    pool_run(Job{&job, LinearJob<T>::work, nullptr, LinearJob<T>::chunks, 1}, small);
}

void linear(const Linear& g) {
    if (g.dtype == BFLOAT16)
        linear_of<bf16>(g);
    else
        linear_of<float>(g);
}

}  // namespace
