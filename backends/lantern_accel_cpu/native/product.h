// Products of a few rows with packed weights, whole (panel.h) or in fewer bits (rounded.h).
#pragma once

#include "fused.h"
#include "small.h"
#include "tiled.h"
#include "words.h"

namespace {

// Rows of activations as products with a kind of weights take them; none of these where they take them as they are.
struct Inputs {
    ByteRows bytes;
    WordRows words;
#ifdef TILES
    TileRows tiles;
    ByteTiles byte_tiles;
#endif
};

// Memory for m rows of k inputs.
template <class T> Inputs input_scratch(Scratch& scratch, int64_t m, int64_t k, const Weights& w) {
    Inputs made;
    if (takes_words<T>(w)) {
        made.words = word_scratch(scratch, m, k);
        return made;
    }
    made.bytes = byte_scratch(scratch, m, k, w);
#ifdef TILES
    made.byte_tiles = byte_tile_scratch(scratch, m, made.bytes, w.kept);
    if (sizeof(typename Activation<T>::type) == 2 && !made.bytes.numbers) made.tiles = tile_scratch(scratch, m, k, w.kept);
#endif
    return made;
}

template <class A> void pack_inputs(const A* x, int64_t ldx, int64_t m, int64_t k, int kept, const Inputs& to) {
    if (to.words.numbers) return to_words(x, ldx, m, k, to.words);
#ifdef TILES
    if constexpr (sizeof(A) == 2)
        if (to.tiles.any()) return to_tiles(x, ldx, m, k, kept, to.tiles);
#endif
    to_bytes(x, ldx, m, k, kept, to.bytes);
#ifdef TILES
    if (to.byte_tiles.tiles) to_byte_tiles(m, to.byte_tiles);
#endif
}

constexpr int64_t BLOCK = 96;
#ifdef TILES
template <class A> constexpr bool TILED = sizeof(A) == 2;
#else
template <class A> constexpr bool TILED = false;
#endif

// While a panel's products are taken, nothing is read: where tiles have multiplied, weights that nothing has asked for yet are
// asked for row by row.
template <class A> struct Meanwhile {
    const char* at;
    INLINE_MEMBER void fetch() {
        if constexpr (TILED<A>) {
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i, at += 64) __builtin_prefetch(at, 0, 2);
        }
    }
};

// Panels [from, to) of a product, in blocks of rows; each [count][PANEL] goes to
// emit(panel, first row, count, values, meanwhile). `after`: the panel that this thread reads when these are done.
// `inputs`: x as these weights take it.
template <class T, class A, class Emit>
void product(const A* x, int64_t ldx, int64_t m, const Weights& w, int64_t k, int64_t from, int64_t to,
             const char* after, const Inputs& inputs, Emit emit) {
    Scratch scratch;
    float* tile = scratch.take<float>(BLOCK * PANEL);
    int64_t size = w.panel<T>(k), groups = (k + GROUP - 1) / GROUP;
    float* sums = nullptr;
    if (!TILED<A> && !inputs.bytes.numbers && sizeof(A) == 2 && (w.kept == INT6 || w.kept == INT4)) {
        sums = scratch.take<float>(m * groups);
        group_sums(x, ldx, m, k, sums);
    }
    for (int64_t p = from; p < to; ++p)
        for (int64_t r = 0; r < m; r += BLOCK) {
            int64_t count = m - r < BLOCK ? m - r : BLOCK;
            const char *here = w.start + p * size, *next = p + 1 < to || !after ? here + size : after;
            const A* rows = x + r * ldx;
            if (inputs.words.numbers) {
                word_panel(inputs.words.from(r), count, here, w.kept, k, tile, next);
#ifdef TILES
            } else if (inputs.byte_tiles.tiles) {
                byte_tiles(inputs.byte_tiles.from(r), count, here, w.kept, k, tile);
#endif
            } else if (inputs.bytes.numbers) {
                byte_panel(inputs.bytes.from(r), count, here, w.kept, k, tile);
            } else if constexpr (TILED<A>) {
#ifdef TILES
                tiled_panel(inputs.tiles.from(r), count, here, w.kept, k, tile, w.kept == WHOLE ? next : here + FAR);
#endif
            } else if (w.kept == WHOLE) {
                panel(rows, ldx, count, (const T*)here, k, tile, (const T*)next);
            } else if (!fused(rows, ldx, count, here, w.kept, k, tile, sums + r * groups, groups)) {
                rounded_panel(rows, ldx, count, here, w.kept, k, size, tile, p + 1 < to ? next : after,
                              sums + r * groups, groups);
            }
            Meanwhile<A> meanwhile{next};
#ifdef TILES
            meanwhile.at = w.kept != WHOLE ? here + size + FAR : next + (count > 2 * TILE_ROWS ? size : SOON);
#endif
            emit(p, r, count, tile, meanwhile);
        }
}

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
    Inputs inputs;

    static int chunks(void* self, int) { return pieces(((LinearJob*)self)->count); }

    static void work(void* self, int, int chunk) {
        LinearJob& job = *(LinearJob*)self;
        const Linear& g = *job.given;
        int64_t each = share(job.count), from = chunk * each;
        int64_t to = from + each < job.count ? from + each : job.count;
        product<T>(job.x, job.ldx, g.m, Weights(g.weight), g.k, from, to, nullptr, job.inputs,
                [&](int64_t p, int64_t first, int64_t count, float* tile, auto) {
                    int64_t columns = g.n - p * PANEL < PANEL ? g.n - p * PANEL : PANEL;
                    const T* bias = (const T*)g.bias;
                    for (int64_t r = 0; r < count; ++r) {
                        int64_t to = (first + r) * g.n + p * PANEL;
                        float* t = tile + r * PANEL;
                        if (bias)
                            for (int64_t c = 0; c < columns; ++c) t[c] += value(bias[p * PANEL + c]);
                        if (g.sums)
                            copy(t, columns, (float*)g.y + to);
                        else
                            copy(t, columns, (T*)g.y + to);
                    }
                });
    }
};

template <class T, class A> void copy_row(const T* x, int64_t k, A* y) {
    copy(x, k, y);
    if (k % 2) put1(y + k, 0.0f);
}

template <class T> void linear_of(const Linear& g) {
    LinearJob<T> job;
    typedef typename LinearJob<T>::A A;
    job.given = &g;
    job.count = panels(g.n);
    job.ldx = even(g.k);
    Scratch scratch;
    A* x = scratch.take<A>(g.m * job.ldx);
    for (int64_t r = 0; r < g.m; ++r) copy_row((const T*)g.x + r * g.x_stride, g.k, x + r * job.ldx);
    job.x = x;
    Weights w(g.weight);
    job.inputs = input_scratch<T>(scratch, g.m, g.k, w);
    pack_inputs(x, job.ldx, g.m, g.k, w.kept, job.inputs);
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
