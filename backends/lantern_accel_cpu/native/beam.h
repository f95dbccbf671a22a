// Drafting a tree whose shape follows from the drafts: a beam of the likeliest paths, level by level, of which the best
// nodes are kept (EAGLE-2; decoding/sources/drafter.py, _draft_dynamic).
#pragma once

#include "tree.h"

namespace {

constexpr float LEAST_SHARE = -1e4f;  // lowest logarithm of a share, for sums that stay finite

// The `count` likeliest of n weights, of equal ones the lower code first, and the logarithms of their shares. weights:
// whole(n), and lost; luck: what they are multiplied by, or null, and then they are shares already.
void likeliest_row(float* weights, const float* luck, int64_t n, int64_t count, int64_t* codes, float* scores) {
    float sum = 1.0f;
    if (luck) {
        for (int64_t i = 0; i < n; ++i) weights[i] *= luck[i];
        sum = float(sum_of(whole(n), [&](int64_t i) { return load<F>(weights + i); }));
    }
    for (int64_t k = 0; k < count; ++k) {
        float share;
        int64_t code = take_largest(weights, n, share);
        float score = logf(share / sum);
        codes[k] = code;
        scores[k] = score > LEAST_SHARE ? score : LEAST_SHARE;
    }
}

// The same of rows [rows][n]; luck: of every `each` rows one.
struct LikeliestJob {
    const float *weights, *luck;
    int64_t rows, each, n, count;
    int64_t* codes;
    float* scores;
    static int chunks(void* self, int) { return int(((LikeliestJob*)self)->rows); }
    static void work(void* self, int, int row) {
        LikeliestJob& job = *(LikeliestJob*)self;
        Scratch scratch;
        float* own = scratch.take<float>(whole(job.n));
        take_row(job.weights + row * job.n, job.n, own);
        const float* luck = job.luck ? job.luck + row / job.each * job.n : nullptr;
        likeliest_row(own, luck, job.n, job.count, job.codes + row * job.count, job.scores + row * job.count);
    }
};

void likeliest(const float* weights, const float* luck, int64_t rows, int64_t each, int64_t n, int64_t count,
               int64_t* codes, float* scores) {
    LikeliestJob job{weights, luck, rows, each, n, count, codes, scores};
    pool_run(Job{&job, LikeliestJob::work, nullptr, LikeliestJob::chunks, 1}, rows * n < (1 << 14));
}

// The places of the `count` largest of n values, the largest first and of equal ones the earlier.
void best_of(const float* values, int64_t n, int64_t count, int32_t* places) {
    for (int64_t i = 0; i < n; ++i) places[i] = int32_t(i);
    std::partial_sort(places, places + count, places + n, [&](int32_t a, int32_t b) {
        return values[a] > values[b] || (values[a] == values[b] && a < b);
    });
}

// The pool of an image's candidates: top_k of the first level, then top_k rows of top_k children a level. Flat number f
// lies in row f / top_k; `origin` has of every row the number of its parent and one more, 0 for the root.
template <class T> struct Beam {
    Scratch scratch;
    const TreeJob<T>& job;
    const TreeStep& g;
    int64_t k, levels, pool, room;  // levels behind the first; numbers of an image
    int64_t *codes, *origin;        // [B][pool], [B][rows of the pool]
    float* scores;                  // [B][pool]
    int32_t *at, *above, *places;   // [B][levels + 1][k]: flat numbers, and the parents' places in the beam before; [pool]
    float* luck;                    // [B][levels + 1][V]
    const float* logits;
    int64_t level;

    explicit Beam(const TreeJob<T>& given)
        : job(given), g(given.g), k(g.top_k), levels(g.depth - 1), pool(k + levels * k * k), room(1 + levels * k) {
        size_t beams = size_t(g.images * (levels + 1) * k), all = size_t(g.images * pool);
        codes = scratch.take<int64_t>(all + size_t(g.images * room));
        origin = codes + all;
        size_t numbers = all + (g.keys ? size_t(g.images * (levels + 1) * g.vocab) : 0);
        scores = scratch.take<float>(numbers);
        luck = g.keys ? scores + all : nullptr;
        at = scratch.take<int32_t>(2 * beams + size_t(pool));
        above = at + beams;
        places = above + beams;
    }

    int32_t* beam(int32_t* table, int64_t b, int64_t l) const { return table + (b * (levels + 1) + l) * k; }

    // One over the noise of the next positions.
    static int luck_chunks(void* self, int) { return int(((Beam*)self)->g.images * (((Beam*)self)->levels + 1)); }
    static void make_luck(void* self, int, int chunk) {
        Beam& beam = *(Beam*)self;
        const TreeStep& g = beam.g;
        int64_t b = chunk / (beam.levels + 1), d = chunk % (beam.levels + 1), n = g.vocab;
        Scratch scratch;
        float* even = scratch.take<float>(whole(n));
        std::fill(even, even + n, 1.0f);
        OF_UNIT(perturb)(even, n, g.keys + b * 3, g.length[b] + 1 + d, beam.luck + chunk * n);
    }

    // The children of one node of the beam: the root's at level 0.
    static int chunks(void* self, int) {
        Beam& beam = *(Beam*)self;
        return int(beam.g.images * (beam.level ? beam.k : 1));
    }
    static void work(void* self, int, int chunk) {
        Beam& beam = *(Beam*)self;
        const TreeStep& g = beam.g;
        int64_t count = beam.level ? beam.k : 1, b = chunk / count, i = chunk % count, k = beam.k, n = g.vocab;
        Scratch scratch;
        float* row = scratch.take<float>(whole(n));
        filter_row(beam.job.greedy() ? Filter{} : g.filter, beam.logits + chunk * n, n, row);
        int64_t first = b * beam.pool + (beam.level ? k + ((beam.level - 1) * k + i) * k : 0);
        const float* luck = beam.luck ? beam.luck + (b * (beam.levels + 1) + beam.level) * n : nullptr;
        likeliest_row(row, luck, n, k, beam.codes + first, beam.scores + first);
    }

    // From what children promise to what their paths do, and the next beam: the best of them.
    void choose(int64_t b) const {
        float* all = scores + b * pool;
        int64_t first = level ? k + (level - 1) * k * k : 0;
        if (!level) {
            for (int64_t i = 0; i < k; ++i) beam(at, b, 0)[i] = int32_t(i), beam(above, b, 0)[i] = 0;
            origin[b * room] = 0;
            return;
        }
        const int32_t* before = beam(at, b, level - 1);
        for (int64_t i = 0; i < k; ++i) {
            float score = all[before[i]], margin = fabsf(score) * 0x1p-22f + 0x1p-30f;
            for (int64_t c = 0; c < k; ++c) {
                float& child = all[first + i * k + c];
                child = score + at_most(child, 0.0f) - margin;
            }
            origin[b * room + 1 + (level - 1) * k + i] = before[i] + 1;
        }
        best_of(all + first, k * k, k, places);
        for (int64_t i = 0; i < k; ++i) {
            beam(at, b, level)[i] = int32_t(first) + places[i];
            beam(above, b, level)[i] = int32_t(places[i] / k);
        }
    }

    // Run the beam that was chosen last, in the scratch slots of its level.
    void run(typename TreeJob<T>::Room& in) const {
        int64_t dim = job.dim, base = g.prefix - 1 + g.image, count = level > 1 ? k : 1;
        Queries<T> q(g.drafter, job.rows, k, g.own_slots, in.next, dim);
        for (int64_t r = 0; r < job.rows; ++r) {
            int64_t b = r % g.images, found = job.committed(q, b);
            for (int64_t l = 0; l < level; ++l)
                for (int64_t j = 0; j < k; ++j) {
                    bool any = false;
                    for (int64_t i = 0; i < k; ++i) {
                        int64_t node = i;
                        for (int64_t d = level - 1; d > l; --d) node = beam(above, b, d)[node];
                        q.keep(i)[found] = node == j ? 1.0f : 0.0f;
                        any |= node == j;
                    }
                    if (any) q.list()[found++] = int32_t(base + l * k + j);
                }
            for (int64_t i = 0; i < k; ++i) {
                int64_t to = r * k + i, parent = level > 1 ? beam(above, b, level - 1)[i] : 0;
                in.codes[to] = codes[b * pool + beam(at, b, level - 1)[i]];
                memcpy(in.parents + to * dim, in.now + (r * count + parent) * dim, size_t(dim) * sizeof(T));
                q.slots[to] = base + (level - 1) * k + i;
                q.turn(to, g.own_cos, g.own_sin, job.cell(b, level));
            }
            if (!job.left_out(b)) q.see(r, found);
        }
        job.read(in.codes, in.parents, job.rows * k, q.x);
        q.run();
        std::swap(in.now, in.next);
    }

    // Keep the best candidates of an image, in the order of the pool, and link them.
    void keep(int64_t b) const {
        int64_t first = b * g.nodes, kept = g.nodes - 1;
        int32_t *parent = g.parent + first, *depth = g.depth_of + first;
        best_of(scores + b * pool, pool, kept, places);
        std::sort(places, places + kept);
        std::fill(g.first_child + first, g.first_child + first + g.nodes, 0);
        std::fill(g.num_children + first, g.num_children + first + g.nodes, 0);
        parent[0] = depth[0] = 0;
        g.tokens[first] = g.root[b];
        for (int64_t i = 0; i < kept; ++i) {
            int64_t from = origin[b * room + places[i] / k] - 1, node = i + 1;
            int64_t above = from < 0 ? 0 : std::lower_bound(places, places + i, int32_t(from)) - places + 1;
            g.tokens[first + node] = codes[b * pool + places[i]];
            parent[node] = int32_t(above);
            depth[node] = depth[above] + 1;
            if (!g.num_children[first + above]++) g.first_child[first + above] = node;
        }
    }
};

template <class T> void draft_beam(const TreeJob<T>& job) {
    const TreeStep& g = job.g;
    Beam<T> beam(job);
    Scratch scratch;
    typename TreeJob<T>::Room in = job.room(scratch, g.top_k);
    if (g.keys)
        pool_run(Job{&beam, Beam<T>::make_luck, nullptr, Beam<T>::luck_chunks, 1}, g.images * g.depth * g.vocab < (1 << 13));
    job.catch_up(in.now);
    for (beam.level = 0; beam.level < g.depth; ++beam.level) {
        if (beam.level) beam.run(in);
        int64_t count = beam.level ? g.top_k : 1;
        beam.logits = job.guided(in, count, beam.level);
        pool_run(Job{&beam, Beam<T>::work, nullptr, Beam<T>::chunks, 1}, g.images * count * g.vocab < (1 << 13));
        for (int64_t b = 0; b < g.images; ++b) beam.choose(b);
    }
    for (int64_t b = 0; b < g.images; ++b) beam.keep(b);
}

void tree_step(const TreeStep& g, int32_t part) {
    if (g.target.dtype == BFLOAT16)
        TreeJob<bf16>(g).part(part);
    else
        TreeJob<float>(g).part(part);
}

}  // namespace
