// A stack of decoder blocks in one call: five stages a block, what stands between two products in the tail
// of the first.
#pragma once

#include "attention.h"
#include "product.h"

#include <atomic>

namespace {

enum Step { QKV, ATTEND, OUT, GATE, DOWN, STEPS };

// To move a line from core to core takes 50 ns, or 200 between clusters of cores: lines are asked for before they are
// needed. Of more bytes than this the first ones would be gone again.
constexpr int64_t EARLY = 32 << 10;
constexpr int64_t FAR_KEYS = 16 << 20;  // bytes of keys and values that a pass finds in no cache

template <class T> struct TrunkJob {
    typedef typename Activation<T>::type A;
    const Trunk* given;
    int64_t m, dim, hidden, wide;  // wide: heads times their width
    int64_t ld_dim, ld_wide, ld_hidden;
    float* state;   // [m][dim], the residual stream
    float* q;       // [m][wide], rotated and scaled
    float* both;    // [m][2 hidden], where a panel holds both gates and ups
    Made<A> mixed, gated;  // [m][ld_wide], [m][ld_hidden]; in tiles where the next product takes these and no sums of groups
    Inputs mixed_inputs, gated_inputs;  // the same, where a copy drafts
    uint64_t number;                    // of this job
    Turns turn;
    int64_t* places;  // [m]: where a query's keys and values lie in a head
    int64_t* given_as;  // [m]: which of the given queries each is; those of rows that see nothing are left out
    Mask mask;          // of the rows that see something
    Seen s;
    float q_scale;
    int32_t done_taps;
    bool whole_gates;  // panels of gates and of ups are apart
    bool whole_heads;  // vectors lie in one head
    bool shared;       // several threads do the chunks
    // Whether a norm's scale, one number a row, is left to what follows its product. Then the state's rows, times the
    // norm's weight, become the product's inputs as the state is written, and each thread has only their squares to add.
    bool scaled_behind = false;
    Inputs scaled;
    float* squares;  // [panels][ld_rows]: sums over a panel's columns
    int64_t ld_rows;
    bool far;          // the keys and values of all layers are more than caches keep from pass to pass

    // Ask for m pieces of n numbers, which other cores have written or, before they are written to, read.
    template <class X> void expect_rows(const X* x, int64_t n, int64_t ldx, bool write = false) const {
        if (shared && m * n * int64_t(sizeof(X)) <= EARLY)
            for (int64_t r = 0; r < m; ++r) expect(x + r * ldx, n * sizeof(X), write);
    }

#ifdef TILES
    void expect_tiles(const TileRows& of) const {
        size_t bytes = size_t(tile_blocks(m) * of.steps) * TILE_ROWS * TILE_BYTES;
        if (shared && of.tiles && bytes <= EARLY) expect(of.tiles, bytes, false);
    }
#endif

    // The state's rows behind a norm.
    struct Normed {
        A* x;  // [m][ld_dim], where inputs are not all that a product takes
        Inputs inputs;
        const float* scale;  // [m], of what is made of them

        INLINE_MEMBER float scale_of([[maybe_unused]] int64_t row) const {
            if constexpr (TILED<A>) return scale[row];
            return 1.0f;
        }
    };

    // The norm before a step, and the one before the step that follows `add`.
    struct Norm {
        const T* weight;
        float eps;
    };
    Norm norm(int layer, int step) const {
        const Block& b = given->blocks[layer];
        return step == QKV ? Norm{(const T*)b.attention_norm, b.attention_eps} : Norm{(const T*)b.ffn_norm, b.ffn_eps};
    }

#ifdef TILES
    // Make inputs of a panel of the state's rows [first, first + count), first: a multiple of W; and their squares.
    void take_panel(const Norm& norm, int64_t p, int64_t first, int64_t count) {
        const TileRows& to = scaled.tiles;
        F weight[COLUMNS];
        for (int c = 0; c < COLUMNS; ++c) weight[c] = norm.weight ? get(norm.weight + p * PANEL + c * W) : splat(1.0f);
        for (int64_t r = first, end = first + count; r < end; r += W) {
            const float* x = state + r * dim + p * PANEL;
            bf16* tile = to.tiles ? to.row(r, p) : nullptr;
            float* row = to.tiles ? nullptr : to.floats + (r * to.steps + p) * DEEP;
            // call(a row's vector, of W from r on, its number in the row)
            auto each = [&](int count, auto call) INLINE_LAMBDA {
                F square[W];
#pragma GCC unroll 16
                for (int i = 0; i < W; ++i) {
                    square[i] = F{};
                    if (i >= count) continue;
#pragma GCC unroll 2
                    for (int c = 0; c < COLUMNS; ++c) {
                        F v = load<F>(x + i * dim + c * W);
                        square[i] = multiply_add(v, v, square[i]);
                        call(i, c, v * weight[c]);
                    }
                }
                put(squares + p * ld_rows + r, sums(square));
            };
            auto in_tile = [&](int i, int c, F v) INLINE_LAMBDA { put(tile + i * DEEP + c * W, v); };
            if (tile && end - r >= W)
                each(W, in_tile);
            else if (tile)
                each(int(end - r), in_tile);
            else
                each(int(end - r), [&](int i, int c, F v) INLINE_LAMBDA {
                    bf16 numbers[W];
                    put(numbers, v);
                    put(row + i * to.steps * DEEP + c * W, get(numbers));
                });
        }
    }

    // Scales of all rows behind a norm.
    void scales(const Norm& norm, float* scale) const {
        for (int64_t r = 0; r < ld_rows; r += W) {
            F all{};
            for (int64_t p = 0; p < panels(dim); ++p) all += load<F>(squares + p * ld_rows + r);
            for (int i = 0; i < W; ++i) scale[r + i] = norm.weight ? 1.0f / sqrtf(all[i] / float(dim) + norm.eps) : 1.0f;
        }
    }
#endif

    // Every thread makes them for itself before its first chunk of a stage: what one has written takes longer to reach
    // another than to make.
    const Normed& normed(int layer, int step) {
        static thread_local uint64_t made = 0;
        static thread_local Normed mine;
        static thread_local Scratch scratch;
        uint64_t wanted = number + layer * STEPS + step;
        if (made == wanted) return mine;
        Norm norm = this->norm(layer, step);
        Weights before = weights(layer, step);
        scratch.clear();
        made = wanted;
#ifdef TILES
        float* scale = scratch.take<float>(ld_rows);
        mine.scale = scale;
        if (scaled_behind) {
            mine.inputs = scaled;
            expect_tiles(scaled.tiles);
            scales(norm, scale);
            return mine;
        }
        std::fill(scale, scale + m, 1.0f);
#endif
        mine.x = scratch.take<A>(m * ld_dim);
        mine.inputs = input_scratch<T>(scratch, m, dim, before);
        expect_rows(state, dim, dim);
        for (int64_t r = 0; r < m; ++r) {
            A* y = mine.x + r * ld_dim;
            if (norm.weight)
                norm_row(state + r * dim, norm.weight, norm.eps, dim, y);
            else
                copy(state + r * dim, dim, y);
            if (dim % 2) put1(y + dim, 0.0f);
        }
        pack_inputs(mine.x, ld_dim, m, dim, before.kept, mine.inputs);
        return mine;
    }

    // Ask for the rows of a product, or their tiles, before this thread's first chunk of it.
    void fetch(int layer, int step, const A* x, int64_t k, int64_t ldx, [[maybe_unused]] const Inputs& inputs) {
        static thread_local uint64_t fetched = 0;
        uint64_t wanted = number + layer * STEPS + step;
        if (fetched == wanted) return;
        fetched = wanted;
#ifdef TILES
        if (inputs.tiles.tiles) return expect_tiles(inputs.tiles);
#endif
        expect_rows(x, k, ldx);
    }

    void begin() {
        const Trunk& g = *given;
        for (int64_t r = 0; r < m; ++r) copy((const T*)g.x + given_as[r] * dim, dim, state + r * dim);
        done_taps = 0;
#ifdef TILES
        for (int64_t p = 0; scaled_behind && p < panels(dim); ++p) take_panel(norm(0, QKV), p, 0, m);
#endif
    }

    int parts(int step) const {
        return step == ATTEND ? attend_chunks(given->cache, mask) : pieces(panels(columns(step)));
    }

    void range(int64_t count, int chunk, int64_t& from, int64_t& to) const {
        int64_t each = share(count);
        from = chunk * each;
        to = from + each < count ? from + each : count;
    }

    // The weights of a step, what they are multiplied by, and the panels that are done in turns.
    Weights weights(int layer, int step) const {
        const Block& b = given->blocks[layer];
        return Weights(step == QKV ? b.wqkv : step == OUT ? b.wo : step == GATE ? b.w13 : b.w2);
    }
    int64_t columns(int step) const {
        if (step == QKV) return 3 * wide;
        return step != GATE ? dim : whole_gates ? hidden : 2 * hidden;
    }
    int64_t depth(int step) const { return step == OUT ? wide : step == DOWN ? hidden : dim; }

    // Where the thread that does a chunk reads on when it is the last one of its lane: the first panel of
    // that lane in the next product. Null in a lane.
    const char* after(int layer, int step, int chunk) const {
        int total = pieces(panels(columns(step))), lanes = pool_lanes(), lane = 0;
        while (lane < lanes && lane_start(total, lane + 1, lanes) != chunk + 1) ++lane;
        step = step == QKV ? OUT : step + 1;
        if (step == STEPS) ++layer, step = QKV;
        if (lane == lanes || layer == given->layers) return nullptr;
        int64_t count = panels(columns(step)), first = lane_start(pieces(count), lane, lanes) * share(count);
        Weights next = weights(layer, step);
        return next.start + (first < count ? first : 0) * next.panel<T>(depth(step));
    }

    // Columns [column, column + n) of q, k and v, all in one head, of `count` queries from `first` on.
    INLINE_MEMBER void place(const Block& b, const Normed& of, int64_t first, int64_t count, int64_t column, int64_t n,
                             const float* x, Meanwhile<A> meanwhile) {
        const Cache& cache = given->cache;
        int64_t part = column / wide, inside = column % wide, head = inside / cache.width;
        int64_t j = inside % cache.width, within = head * cache.head + j;
        const float *turn_ = turn.turn + first * cache.width + j, *cross = turn.cross + first * cache.width + j;
        for (int64_t r = 0; r < count; ++r, x += PANEL, turn_ += cache.width, cross += cache.width) {
            if (n == PANEL) meanwhile.fetch();
            int64_t to = places[first + r] + within;
            float scale = of.scale_of(first + r);
            if (part == 0)
                rotate(x, turn_, cross, n, scale * q_scale, q + (first + r) * wide + inside);
            else if (part == 1)
                rotate(x, turn_, cross, n, scale, (T*)b.k + to);
            else
                copy(x, n, (T*)b.v + to, scale);
        }
    }

    // Ask for what a panel of q, k and v is written to, from a column on that lies in one head with what follows.
    void expect_placed(const Block& b, int64_t column) const {
        const Cache& cache = given->cache;
        int64_t part = column / wide, inside = column % wide, within = inside / cache.width * cache.head + inside % cache.width;
        if (cache.width % PANEL) return;
        if (part == 0) return expect_rows(q + inside, PANEL, wide, true);
        const T* y = (const T*)(part == 1 ? b.k : b.v) + within;
        for (int64_t r = 0; shared && r < m; ++r) expect(y + places[r], PANEL * sizeof(T), true);
    }

    void qkv(const Block& b, const Normed& x, int chunk, const char* next) {
        int64_t from, to, n = 3 * wide, piece = given->cache.width % PANEL == 0 ? PANEL : whole_heads ? W : 2;
        range(panels(n), chunk, from, to);
        for (int64_t p = from; p < to; ++p) expect_placed(b, p * PANEL);
        product<T>(x.x, ld_dim, m, Weights(b.wqkv), dim, from, to, next, x.inputs,
                [&](int64_t p, int64_t first, int64_t count, const float* tile, auto meanwhile) {
                    int64_t columns = n - p * PANEL < PANEL ? n - p * PANEL : PANEL;
                    for (int64_t c = 0; c < columns; c += piece)
                        if (piece == PANEL)
                            place(b, x, first, count, p * PANEL, PANEL, tile, meanwhile);
                        else if (piece == W)
                            place(b, x, first, count, p * PANEL + c, W, tile + c, meanwhile);
                        else
                            place(b, x, first, count, p * PANEL + c, 2, tile + c, meanwhile);
                });
    }

    // Add a step's product to the state.
    void add(const A* x, int64_t ldx, const Inputs& inputs, int layer, int step, int chunk, const char* next) {
        int64_t from, to;
        range(panels(dim), chunk, from, to);
        expect_rows(state + from * PANEL, (to - from) * PANEL, dim, true);
        product<T>(x, ldx, m, weights(layer, step), depth(step), from, to, next, inputs,
                [&](int64_t p, int64_t first, int64_t count, const float* tile, auto meanwhile) {
                    int64_t columns = dim - p * PANEL < PANEL ? dim - p * PANEL : PANEL;
                    for (int64_t r = 0; r < count; ++r) {
                        meanwhile.fetch();
                        float* y = state + (first + r) * dim + p * PANEL;
                        const float* x = tile + r * PANEL;
                        int64_t c = 0;
                        for (; c + W <= columns; c += W) put(y + c, load<F>(y + c) + load<F>(x + c));
                        for (; c < columns; ++c) y[c] += x[c];
                    }
#ifdef TILES
                    if (scaled_behind && step == OUT) take_panel(norm(layer, GATE), p, first, count);
                    if (scaled_behind && step == DOWN && layer + 1 < given->layers)
                        take_panel(norm(layer + 1, QKV), p, first, count);
#endif
                });
    }

    void gate(const Block& b, const Normed& x, int chunk, const char* next) {
        int64_t from, to;
        if (!whole_gates) {
            range(panels(2 * hidden), chunk, from, to);
            product<T>(x.x, ld_dim, m, Weights(b.w13), dim, from, to, next, x.inputs,
                    [&](int64_t p, int64_t first, int64_t count, const float* tile, auto) {
                        int64_t left = 2 * hidden - p * PANEL, columns = left < PANEL ? left : PANEL;
                        for (int64_t r = 0; r < count; ++r)
                            copy(tile + r * PANEL, columns, both + (first + r) * 2 * hidden + p * PANEL, x.scale_of(first + r));
                    });
            return;
        }
        range(panels(hidden), chunk, from, to);
        if (!gated.in_tiles()) expect_rows(gated.at(0, from * PANEL), (to - from) * PANEL, ld_hidden, true);
        int64_t ups = hidden / PANEL;
        Scratch scratch;
        float* kept = scratch.take<float>(m * PANEL);
        for (int64_t one = from; one < to; ++one) {
            const char* going = one + 1 < to ? nullptr : next;
            product<T>(x.x, ld_dim, m, Weights(b.w13), dim, one, one + 1, going, x.inputs,
                    [&](int64_t, int64_t first, int64_t count, const float* tile, auto) {
                        memcpy(kept + first * PANEL, tile, count * PANEL * sizeof(float));
                    });
            product<T>(x.x, ld_dim, m, Weights(b.w13), dim, one + ups, one + ups + 1, going, x.inputs,
                    [&](int64_t, int64_t first, int64_t count, const float* tile, auto meanwhile) {
                        for (int64_t r = 0; r < count; ++r) {
                            meanwhile.fetch();
                            swiglu_row(kept + (first + r) * PANEL, tile + r * PANEL, PANEL, gated.at(first + r, one * PANEL),
                                       x.scale_of(first + r));
                        }
                    });
        }
    }

    void work(int layer, int step, int chunk) {
        const Block& b = given->blocks[layer];
        if (step == ATTEND)
            return attend_chunk(q, (const T*)b.k, (const T*)b.v, given->cache, mask, s, chunk, mixed, far);
        const char* next = after(layer, step, chunk);
        switch (step) {
            case QKV: return qkv(b, normed(layer, step), chunk, next);
            case OUT:
                fetch(layer, step, mixed.rows, wide, ld_wide, mixed_inputs);
                return add(mixed.rows, ld_wide, mixed_inputs, layer, step, chunk, next);
            case GATE: return gate(b, normed(layer, step), chunk, next);
            default:
                fetch(layer, step, gated.rows, hidden, ld_hidden, gated_inputs);
                return add(gated.rows, ld_hidden, gated_inputs, layer, step, chunk, next);
        }
    }

    void tail(int layer, int step) {
        const Trunk& g = *given;
        const Block& b = g.blocks[layer];
        if (step == ATTEND && !mixed.in_tiles())
            pack_inputs(mixed.rows, ld_wide, m, wide, Weights(b.wo).kept, mixed_inputs);
        if (step == GATE && !whole_gates)
            for (int64_t r = 0; r < m; ++r) {
                const float* x = both + r * 2 * hidden;
                swiglu_row(x, x + hidden, hidden, gated.at(r, 0));
                if (hidden % 2) put1(gated.at(r, hidden), 0.0f);
            }
        if (step == GATE && !gated.in_tiles()) pack_inputs(gated.rows, ld_hidden, m, hidden, Weights(b.w2).kept, gated_inputs);
        if (step != DOWN) return;
        T* out = (T*)g.out;
        if (done_taps < g.tap_count && g.taps[done_taps] == layer + 1) {
            for (int64_t r = 0; r < m; ++r)
                copy(state + r * dim, dim, out + given_as[r] * g.out_stride + done_taps * dim);
            ++done_taps;
        }
        if (layer + 1 < g.layers) return;
        for (int64_t r = 0; r < m; ++r) {
            T* y = out + given_as[r] * g.out_stride + g.tap_count * dim;
            if (g.norm)
                norm_row(state + r * dim, (const T*)g.norm, g.norm_eps, dim, y);
            else
                copy(state + r * dim, dim, y);
        }
    }

    static int chunks(void* self, int stage) { return ((TrunkJob*)self)->parts(stage % STEPS); }
    static void run(void* self, int stage, int chunk) {
        ((TrunkJob*)self)->work(stage / STEPS, stage % STEPS, chunk);
    }
    static void end(void* self, int stage) { ((TrunkJob*)self)->tail(stage / STEPS, stage % STEPS); }
};

// Run the blocks for the first `seeing` rows of `s`; the others' states become 0.
template <class T> void trunk_of(const Trunk& g, const Seen& s, int32_t seeing) {
    typedef typename TrunkJob<T>::A A;
    TrunkJob<T> job;
    job.given = &g;
    int64_t queries = int64_t(g.mask.rows) * g.mask.count;
    job.mask = g.mask;
    job.s = s;
    job.mask.rows = seeing;
    job.m = int64_t(seeing) * g.mask.count;
    if (job.m < queries) memset(g.out, 0, size_t(queries * g.out_stride) * sizeof(T));
    if (!job.m) return;
    count_open(s, seeing, g.mask.count);
    job.dim = g.dim;
    job.hidden = g.hidden;
    job.wide = int64_t(g.cache.heads) * g.cache.width;
    job.ld_dim = even(job.dim);
    job.ld_wide = even(job.wide);
    job.ld_hidden = even(job.hidden);
    job.whole_gates = job.hidden % PANEL == 0;
    job.whole_heads = g.cache.width % W == 0;
    int64_t seen_slots = 0;
    for (int32_t r = 0; r < seeing; ++r) seen_slots += s.found[r];
    job.far = seen_slots * g.layers * job.wide * 2 * int64_t(sizeof(T)) > FAR_KEYS;
    job.shared = pool_threads() > 1;
    job.q_scale = 1.0f / sqrtf(float(g.cache.width));
    Scratch scratch;
    float* f = scratch.take<float>(job.m * (job.dim + job.wide + 2 * job.hidden));
    job.state = f;
    job.q = f + job.m * job.dim;
    job.both = job.q + job.m * job.wide;
    job.mixed = Made<A>{scratch.take<A>(job.m * job.ld_wide), job.ld_wide};
    job.gated = Made<A>{scratch.take<A>(job.m * job.ld_hidden), job.ld_hidden};
    const Block& first = g.blocks[0];
    job.mixed_inputs = input_scratch<T>(scratch, job.m, job.wide, Weights(first.wo));
    job.gated_inputs = input_scratch<T>(scratch, job.m, job.hidden, Weights(first.w2));
#ifdef TILES
    const TileRows &mixed = job.mixed_inputs.tiles, &gated = job.gated_inputs.tiles;
    bool mixes = TILED<A> && g.cache.width % DEEP == 0, gates = TILED<A> && job.whole_gates;
    job.scaled = input_scratch<T>(scratch, job.m, job.dim, Weights(first.wqkv));
    job.scaled_behind = TILED<A> && job.dim % DEEP == 0 && job.scaled.tiles.any();
    job.ld_rows = (job.m + W - 1) / W * W;
    for (int32_t i = 0; i < g.layers; ++i) {
        for (const void* each : {g.blocks[i].wqkv, g.blocks[i].w13})
            job.scaled_behind &= Weights(each).kept == WHOLE || Weights(each).kept == INT8;
        mixes &= in_tiles(mixed, job.wide, Weights(g.blocks[i].wo).kept);
        gates &= in_tiles(gated, job.hidden, Weights(g.blocks[i].w2).kept);
    }
    if (mixes) job.mixed.tiles = mixed, mixed.clear_below(job.m);
    if (gates) job.gated.tiles = gated, gated.clear_below(job.m);
    if (job.scaled_behind) {
        job.squares = scratch.take<float>(panels(job.dim) * job.ld_rows);
        if (job.scaled.tiles.tiles) job.scaled.tiles.clear_below(job.m);
    }
#endif
    job.turn = turns(scratch, g.rotary, queries, g.mask.count, g.cache.width);
    job.places = scratch.take<int64_t>(2 * size_t(job.m));
    job.given_as = job.places + job.m;
    for (int64_t r = 0; r < job.m; ++r) {
        int64_t row = job.s.row_of[r / g.mask.count], from = row * g.mask.count + r % g.mask.count;
        job.given_as[r] = from;
        job.places[r] = row * g.cache.row + g.slots[from] * g.cache.slot;
        if (from == r) continue;
        memcpy(job.turn.turn + r * g.cache.width, job.turn.turn + from * g.cache.width, g.cache.width * sizeof(float));
        memcpy(job.turn.cross + r * g.cache.width, job.turn.cross + from * g.cache.width, g.cache.width * sizeof(float));
    }
    static std::atomic<uint64_t> jobs{0};
    job.number = ++jobs << 32;
    job.begin();
    int64_t weights = job.dim * (4 * job.wide + 3 * job.hidden) * g.layers;
    pool_run(Job{&job, TrunkJob<T>::run, TrunkJob<T>::end, TrunkJob<T>::chunks, g.layers * STEPS},
             weights * (job.m + 3) < (1 << 20));
}

template <class T> void trunk_of(const Trunk& g) {
    Scratch scratch;
    Seen s = seen(scratch, g.mask);
    int32_t seeing = gather_seeing(s, g.mask.rows, g.mask.count);
    trunk_of<T>(g, s, seeing);
}

void trunk(const Trunk& g) {
    if (g.dtype == BFLOAT16)
        trunk_of<bf16>(g);
    else
        trunk_of<float>(g);
}

}  // namespace
