// Acceptance: the walk down a tree, for each image alone. Only rows that are visited become distributions.
//
// The arithmetic is that of decoding/accept.py, step by step; a row is padded to whole vectors with zeros.
#pragma once

#include "filter.h"

namespace {

constexpr float TINY = 1e-38f;

INLINE float at_most(float x, float y) { return x < y ? x : y; }
INLINE float at_least(float x, float y) { return x > y ? x : y; }

// One draft against the target's distribution.
struct Test {
    int64_t x;
    float px, qx, mass;
    const int32_t* near;  // its neighbours, or null
    int64_t absorbed;

    float keeps() const { return at_most(mass / at_least(qx, TINY), 1.0f); }
    float quality_loss() const { return keeps() - at_most(px / at_least(qx, TINY), 1.0f); }
};

// A rule with its table, as the walk over a tree and over a window use it.
struct Judge {
    const Rule& rule;
    int64_t n, all;

    Judge(const Rule& given, int64_t vocab) : rule(given), n(vocab), all(whole(vocab)) {}

    bool relaxed() const { return rule.kind != EXACT && rule.neighbours; }

    // What draft x counts for; left: what remains of the token's budget, where there is one.
    Test examine(const float* p, const float* q, int64_t x, float left) const {
        Test t{x, p[x], q ? q[x] : 1.0f, p[x], nullptr, 0};
        if (rule.neighbours && rule.k) t.near = rule.neighbours + x * rule.neighbour_stride;
        if (!relaxed()) {
            t.near = nullptr;
            return t;
        }
        float bound = rule.kind == LANTERN ? *rule.rule_param : (*rule.rule_param - 1.0f) * t.px, borrowed = 0;
        double sum = 0;
        for (int64_t j = 0; j < rule.k; ++j) {
            sum += double(p[t.near[j]]);
            if (!(float(sum) <= bound)) break;
            borrowed = float(sum);
            ++t.absorbed;
        }
        t.mass = t.px + borrowed;
        if (rule.budget) t.mass = at_most(t.mass, t.px + left * t.qx);
        return t;
    }

    // w / sum(w) to out, and true; false where there is nothing to divide by.
    bool normalise(const float* w, float* out) const {
        float sum = float(sum_of(all, [&](int64_t i) { return load<F>(w + i); }));
        if (!(sum > 0)) return false;
        float total = at_least(sum, TINY);
        for (int64_t i = 0; i < all; i += W) put(out + i, load<F>(w + i) / total);
        return true;
    }

    // max(0, a - b) to out.
    void rest(const float* a, const float* b, float* out) const {
        for (int64_t i = 0; i < all; i += W) put(out + i, larger(load<F>(a + i) - load<F>(b + i), F{}));
    }

    void copy_row(const float* from, float* to) const { memcpy(to, from, size_t(all) * sizeof(float)); }

    // The target's distribution after a draft was refused, to `after`. q: null for a certain draft;
    // logits: of this place, where codes that they rule out may not be; spare: a row to work in.
    void residual(const float* p, const float* q, const Test& t, const float* logits, float* after, float* spare) const {
        if (rule.residual == OFFICIAL) {
            bool hit = t.near && t.absorbed > 0;
            // The table may be one wider than k: the official code takes out k + 1 codes.
            int64_t wide = rule.k + 1 < rule.neighbour_width ? rule.k + 1 : rule.neighbour_width;
            if (q) {
                copy_row(q, spare);
                for (int64_t j = 0; hit && j < wide; ++j) spare[t.near[j]] = 0.0f;
                rest(p, spare, spare);
            } else {
                copy_row(p, spare);
                for (int64_t j = 0; hit && j < wide; ++j) spare[t.near[j]] = 0.0f;
                spare[t.x] = 0.0f;
            }
            if (normalise(spare, after)) return;
            double even = 0;
            for (int64_t i = 0; i < all; ++i) {
                after[i] = i < n && (!logits || logits[i] > -INFINITY) ? 1.0f : 0.0f;
                even += double(after[i]);
            }
            for (int64_t i = 0; i < n; ++i) after[i] /= float(even);
            return;
        }
        copy_row(p, spare);
        if (rule.residual == AGGREGATE && relaxed()) {
            for (int64_t j = 0; j < t.absorbed; ++j) spare[t.near[j]] = 0.0f;
            spare[t.x] = t.mass;
        }
        if (q)
            rest(spare, q, spare);
        else
            spare[t.x] = at_least(spare[t.x] - (rule.residual == OPTIMAL ? at_most(t.mass, 1.0f) : 1.0f), 0.0f);
        if (!normalise(spare, after)) copy_row(p, after);
    }

    // What a residual that is not the ideal one adds to the quality loss of a rejection.
    float residual_price(const float* p, const float* q, const Test& t, const float* after, float* spare) const {
        if (q) {
            rest(p, q, spare);
            if (!normalise(spare, spare)) copy_row(p, spare);
            return float(sum_of(all, [&](int64_t i) { return larger(load<F>(after + i) - load<F>(spare + i), F{}); }));
        }
        float refused = 1.0f - t.keeps();
        copy_row(p, spare);
        spare[t.x] = 0.0f;
        double over = sum_of(all, [&](int64_t i) {
            return larger(load<F>(after + i) * refused - load<F>(spare + i), F{});
        });
        return float(over) / at_least(refused, 1e-6f);
    }
};

// A row of q, padded.
INLINE void take_row(const float* from, int64_t n, float* to) {
    memcpy(to, from, size_t(n) * sizeof(float));
    for (int64_t i = n; i < whole(n); ++i) to[i] = 0.0f;
}

void walk(const Accept& g, int64_t image) {
    int64_t n = g.vocab, all = whole(n), slot = 0, node = 0, length = 0;
    Judge judge(g.rule, n);
    Scratch scratch;
    float* work = scratch.take<float>(4 * all);
    float *p = work, *after = work + all, *spare = work + 2 * all, *q_row = work + 3 * all;
    const float* logits = g.logits + image * g.nodes * n;
    const float* uniforms = g.uniforms + image * g.uniform_stride;
    const int64_t base = image * g.nodes;
    int64_t* path = g.path + image * (g.depth + 1);
    bool alive = true;
    path[0] = 0;
    filter_row(g.filter, logits, n, p);
    for (int32_t depth = 0; depth < g.depth; ++depth) {
        int64_t width = g.widths[depth], first = g.first_child[base + node], chosen = node;
        int64_t count = alive ? std::min(width, g.num_children[base + node]) : 0;
        float quality_loss = 0, left = g.rule.budget ? *g.rule.budget : 0;
        const float* q = nullptr;
        if (g.q && count) {
            take_row(g.q + (image * g.groups + g.group[base + node]) * n, n, q_row);
            q = q_row;
        }
        bool taken = false;
        for (int64_t c = 0; c < count && !taken; ++c) {
            Test t = judge.examine(p, q, g.tokens[base + first + c], left);
            if (!(t.qx > 0)) continue;
            taken = uniforms[slot + c] * t.qx <= t.mass;
            float spent = t.quality_loss(), cost = spent;
            if (taken) {
                chosen = first + c;
            } else {
                judge.residual(p, q, t, g.masked ? logits + node * n : nullptr, after, spare);
                if (judge.relaxed() && g.rule.residual == OFFICIAL)
                    cost += judge.residual_price(p, q, t, after, spare);
                if (g.rule.budget)
                    left = at_most(at_least(left - spent, 0.0f) / at_least(1.0f - t.keeps(), 1e-6f), 1.0f);
                std::swap(p, after);
                if (q && c + 1 < width) {
                    q_row[t.x] = 0.0f;
                    judge.normalise(q_row, q_row);
                }
            }
            if (judge.relaxed()) quality_loss += cost;
        }
        slot += width;
        alive = taken;
        node = path[depth + 1] = chosen;
        length += alive;
        g.quality_loss[image * g.depth + depth] = quality_loss;
        if (alive) filter_row(g.filter, logits + node * n, n, p);
    }
    g.length[image] = length;
    g.bonus[image] = draw_row(p, n, g.bonus_uniform[image * g.bonus_stride]);
    memcpy(g.weights + image * n, p, size_t(n) * sizeof(float));
}

// --- without temperature ----------------------------------------------------------------------------------

// Of each node the lowest leaf below it: paths of equal length are in this order where their shape followed from the drafts.
INLINE void lowest_leaves(const int64_t* first_child, const int64_t* num_children, int64_t nodes, int64_t* out) {
    for (int64_t i = nodes; i-- > 0;) {
        out[i] = num_children[i] ? nodes : i;
        for (int64_t c = first_child[i]; c < first_child[i] + num_children[i]; ++c) out[i] = std::min(out[i], out[c]);
    }
}

// The longest path on which every draft x is the likeliest code, or counts for more than it: accept_greedy of
// decoding/accept.py. `shaped`: the tree's shape followed from its drafts.
void walk_greedily(const Accept& g, bool shaped, int64_t image) {
    int64_t n = g.vocab, all = whole(n), base = image * g.nodes, last = 0;
    Judge judge(g.rule, n);
    Scratch scratch;
    int64_t* work = scratch.take<int64_t>(5 * g.nodes);
    int64_t *depth = work, *parent = work + g.nodes, *best = work + 2 * g.nodes, *rank = work + 3 * g.nodes;
    int64_t* borrowed = work + 4 * g.nodes;  // whether a draft is not the likeliest code
    float* p = scratch.take<float>(all);
    const int64_t *tokens = g.tokens + base, *first_child = g.first_child + base, *num_children = g.num_children + base;
    if (shaped)
        lowest_leaves(first_child, num_children, g.nodes, rank);
    else
        for (int64_t i = 0; i < g.nodes; ++i) rank[i] = i;
    std::fill(depth, depth + g.nodes, int64_t(-1));  // refused
    depth[0] = parent[0] = borrowed[0] = 0;
    for (int64_t i = 0; i < g.nodes; ++i) {
        if (depth[i] < 0) continue;
        const float* row = g.logits + (base + i) * n;
        float most;
        best[i] = likeliest_code(row, n, most);
        if (depth[i] > depth[last] || (depth[i] == depth[last] && rank[i] < rank[last])) last = i;
        if (!num_children[i]) continue;
        take_row(row, n, p);
        std::fill(p + n, p + all, -INFINITY);
        double sum = 0;
        for (int64_t v = 0; v < all; v += W) {
            F one = exponential(larger(load<F>(p + v) - most, splat(-87.0f)));
            put(p + v, one);
            sum += double(total(one));
        }
        for (int64_t v = 0; v < all; v += W) put(p + v, load<F>(p + v) / float(sum));
        for (int64_t c = first_child[i]; c < first_child[i] + num_children[i]; ++c) {
            int64_t x = tokens[c];
            float mass = judge.examine(p, nullptr, x, 0).mass, top = p[best[i]];
            borrowed[c] = x != best[i];
            if (!borrowed[c] || mass > top || (mass == top && x < best[i])) depth[c] = depth[i] + 1, parent[c] = i;
        }
    }
    int64_t *path = g.path + image * (g.depth + 1), length = depth[last];
    float* quality_loss = g.quality_loss + image * g.depth;
    std::fill(path, path + g.depth + 1, int64_t(0));
    std::fill(quality_loss, quality_loss + g.depth, 0.0f);
    g.length[image] = length;
    g.bonus[image] = best[last];
    for (int64_t node = last; node; node = parent[node]) {
        path[depth[node]] = node;
        quality_loss[depth[node] - 1] = float(borrowed[node]);
    }
}

struct GreedyJob {
    const Accept* given;
    bool shaped;
    static int chunks(void* self, int) { return int(((GreedyJob*)self)->given->images); }
    static void work(void* self, int, int chunk) {
        GreedyJob& job = *(GreedyJob*)self;
        walk_greedily(*job.given, job.shaped, chunk);
    }
};

void accept_greedily(const Accept& g, bool shaped) {
    GreedyJob job{&g, shaped};
    pool_run(Job{&job, GreedyJob::work, nullptr, GreedyJob::chunks, 1}, g.images * g.vocab < (1 << 14));
}

struct AcceptJob {
    const Accept* given;
    static int chunks(void* self, int) { return int(((AcceptJob*)self)->given->images); }
    static void work(void* self, int, int chunk) { walk(*((AcceptJob*)self)->given, chunk); }
};

void accept(const Accept& g) {
    AcceptJob job{&g};
    pool_run(Job{&job, AcceptJob::work, nullptr, AcceptJob::chunks, 1}, g.images * g.vocab < (1 << 14));
}

}  // namespace
