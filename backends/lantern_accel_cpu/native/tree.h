// A step of a tree: the drafter catches up and drafts level by level, the target verifies, a walk decides, and the state
// takes it in. The arithmetic is that of decoding/sources/drafter.py, verify.py, accept.py and commit.py. The levels of a tree
// whose shape follows from the drafts are in beam.h.
#pragma once

#include "choose.h"
#include "pass.h"

namespace {

template <class T> struct TreeJob;
template <class T> void draft_beam(const TreeJob<T>& job);

template <class T> struct TreeJob {
    const TreeStep& g;
    int64_t rows, dim, wide;  // wide: of the states that the drafter reads

    explicit TreeJob(const TreeStep& given)
        : g(given), rows(g.images * g.branches), dim(g.target.dim), wide((g.target.tap_count + 1) * g.target.dim) {}

    const float* uniforms(int64_t b) const { return g.uniforms + (b * g.image + std::min(*g.step, g.image - 1)) * g.columns; }
    int64_t cell(int64_t b, int64_t ahead) const { return std::min(std::max<int64_t>(g.length[b] + ahead, 0), g.image - 1); }
    bool left_out(int64_t b) const { return g.blind && g.length[b] >= g.image - 1; }
    bool greedy() const { return !g.keys && !g.uniforms; }
    const int32_t* parent(int64_t b) const { return g.parent + b * g.nodes; }
    const int32_t* depth_of(int64_t b) const { return g.depth_of + b * g.nodes; }

    // --- drafting ---------------------------------------------------------------------------------

    // The pending states, the first `width` of each row, as one feature each, [rows][width][dim].
    void fused(int64_t width, T* out) const {
        int64_t count = rows * width;
        Scratch scratch;
        T* side = g.fuse ? scratch.take<T>(count * wide) : out;
        for (int64_t r = 0; r < count; ++r) {
            const T* from = (const T*)g.pending_features + (r / width * g.width + r % width) * wide;
            T* to = side + r * wide;
            for (int32_t tap = 0; tap < g.target.tap_count; ++tap, from += dim, to += dim)
                norm_row(from, (const T*)g.tap_norms[tap], g.tap_eps, dim, to);
            memcpy(to, from, size_t(dim) * sizeof(T));
        }
        if (g.fuse) linear(Linear{side, g.fuse, nullptr, out, wide, count, wide, dim, g.target.dtype});
    }

    // What the drafter's blocks read: tokens and the features that they follow.
    void read(const int64_t* codes, const T* features, int64_t count, T* x) const {
        Scratch scratch;
        T* pair = scratch.take<T>(count * 2 * dim);
        for (int64_t r = 0; r < count; ++r) {
            memcpy(pair + r * 2 * dim, (const T*)g.own_embedding + codes[r] * dim, size_t(dim) * sizeof(T));
            memcpy(pair + r * 2 * dim + dim, features + r * dim, size_t(dim) * sizeof(T));
        }
        linear(Linear{pair, g.fc, g.fc_bias, x, 2 * dim, count, 2 * dim, dim, g.target.dtype});
    }

    const uint8_t* shown(int64_t b) const { return g.hides_pads ? g.prompt + b * g.prefix : nullptr; }

    // Run the pending tokens; the root's states, [rows][dim].
    void catch_up(T* out) const {
        int64_t width = 1, prefix = g.prefix - 1;
        for (int64_t b = 0; b < g.images; ++b) width = std::max(width, g.pending_count[b]);
        int64_t all = rows * width;
        Scratch scratch;
        T* states = scratch.take<T>(2 * all * dim);
        T* features = states + all * dim;
        Queries<T> at(g.drafter, rows, width, g.own_slots, states, dim);
        int64_t* codes = scratch.take<int64_t>(all);
        for (int64_t r = 0; r < rows; ++r) {
            int64_t b = r % g.images, count = g.pending_count[b];
            int32_t* list = at.list();
            int32_t prompt = seen_prompt(shown(b), prefix, list);
            int64_t found = prompt + g.length[b] + 1;
            for (int64_t i = 0; prompt + i < found; ++i) list[prompt + i] = int32_t(prefix + i);
            for (int64_t i = 0; i < width; ++i) {
                int64_t q = r * width + i, place = g.length[b] - count + 1 + i;
                codes[q] = g.pending_tokens[b * g.width + i];
                at.slots[q] = i < count ? prefix + place : g.own_slots - 1;
                at.turn(q, g.own_cos, g.own_sin, cell(b, i + 1 - count));
                int64_t sees = prompt + std::min(place, g.length[b]) + 1;
                std::fill(at.keep(i), at.keep(i) + sees, 1.0f);
                std::fill(at.keep(i) + sees, at.keep(i) + found, 0.0f);
            }
            if (!left_out(b)) at.see(r, found);
        }
        fused(width, features);
        read(codes, features, all, at.x);
        at.run();
        for (int64_t r = 0; r < rows; ++r) {
            int64_t last = std::max<int64_t>(g.pending_count[r % g.images] - 1, 0);
            memcpy(out + r * dim, states + (r * width + last) * dim, size_t(dim) * sizeof(T));
        }
    }

    // Distributions of a level's groups, and draws from them: of image b and group i of this level.
    struct Drawing {
        const TreeJob& job;
        const float* logits;
        int64_t level, first, used;  // of all groups, and of uniforms
        static int chunks(void* self, int) {
            Drawing& d = *(Drawing*)self;
            return int(d.job.g.images * d.job.g.inner_count[d.level]);
        }
        static void work(void* self, int, int chunk) {
            Drawing& d = *(Drawing*)self;
            const TreeStep& g = d.job.g;
            int64_t n = g.vocab, count = g.inner_count[d.level], b = chunk / count, i = chunk % count;
            int64_t width = g.widths[d.level], node = g.inner[d.first + i], children = g.num_children[node];
            Scratch scratch;
            float* row = scratch.take<float>(2 * whole(n));
            int64_t* codes = g.tokens + b * g.nodes + g.first_child[node];
            if (d.job.greedy()) {
                float most;
                memcpy(row, d.logits + chunk * n, size_t(n) * sizeof(float));
                for (int64_t c = 0; c < children; ++c) {
                    codes[c] = likeliest_code(row, n, most);
                    row[codes[c]] = -INFINITY;
                }
                return;
            }
            filter_row(g.filter, d.logits + chunk * n, n, row);
            if (g.keys) {
                return ranked_codes(row, n, g.keys + b * 3, g.length[b] + 1 + d.level, children, row + whole(n), codes);
            }
            memcpy(g.q + (b * g.groups + d.first + i) * n, row, size_t(n) * sizeof(float));
            const float* u = d.job.uniforms(b) + d.used + i * width;
            for (int64_t c = 0; c < children; ++c) {
                int64_t code = draw_row(row, n, u[c]);
                codes[c] = code;
                row[code] = 0.0f;
            }
        }
    };

    // What the levels of a draft work in: states of one level, of the next, and those that its nodes follow; and logits.
    struct Room {
        T *now, *next, *parents;
        float* logits;
        int64_t *codes, *heads, *following;
    };
    Room room(Scratch& scratch, int64_t widest) const {
        int64_t all = rows * widest;
        T* states = scratch.take<T>(3 * size_t(all * dim));
        int64_t* lists = scratch.take<int64_t>(3 * size_t(all));
        float* logits = scratch.take<float>(g.images * widest * g.vocab);
        return Room{states, states + all * dim, states + 2 * all * dim, logits, lists, lists + all, lists + 2 * all};
    }

    // The committed slots of image b that a level's nodes all see; returns how many.
    int64_t committed(const Queries<T>& at, int64_t b) const {
        int32_t* list = at.list();
        int64_t prefix = g.prefix - 1, found = seen_prompt(shown(b), prefix, list);
        for (int64_t i = 0; i <= g.length[b]; ++i) list[found++] = int32_t(prefix + i);
        for (int64_t i = 0; i < at.count; ++i) std::fill(at.keep(i), at.keep(i) + found, 1.0f);
        return found;
    }

    // Guided logits [B][count][V] of a level's states, which predict the tokens at depth d + 1.
    const float* guided(const Room& in, int64_t count, int64_t d) const {
        int64_t all = rows * count;
        for (int64_t q = 0; q < all; ++q) in.heads[q] = q;
        for (int64_t b = 0; b < g.images; ++b)
            std::fill(in.following + b * count, in.following + (b + 1) * count, cell(b, d + 1));
        guided_logits(in.now, dim, dim, in.heads, all, g.head,
                      Guide{nullptr, g.scale, nullptr, nullptr, in.following, nullptr, in.logits, g.images, count, g.vocab,
                            g.branches, 0});
        return in.logits;
    }

    void draft() const {
        int64_t widest = 1;
        for (int64_t d = 0; d < g.depth; ++d) widest = std::max<int64_t>(widest, g.inner_count[d]);
        Scratch scratch;
        Room in = room(scratch, widest);
        for (int64_t b = 0; b < g.images; ++b) g.tokens[b * g.nodes] = g.root[b];
        catch_up(in.now);
        const int32_t* parent = this->parent(0);  // the same for all images
        int64_t first = 0, used = 0;
        for (int64_t d = 0; d < g.depth; ++d) {
            int64_t count = g.inner_count[d], all = rows * count;
            if (d) {
                Queries<T> at(g.drafter, rows, count, g.own_slots, in.next, dim);
                int64_t before = first - g.inner_count[d - 1], base = g.prefix - 1 + g.image;
                for (int64_t r = 0; r < rows; ++r) {
                    int64_t b = r % g.images;
                    int32_t* list = at.list();
                    int64_t found = committed(at, b);
                    for (int64_t k = 1; k < first + count; ++k) {  // scratch slots, by inner node behind the root
                        bool any = false;
                        for (int64_t i = 0; i < count; ++i) {
                            int32_t node = g.inner[first + i];
                            while (node > g.inner[k]) node = parent[node];
                            at.keep(i)[found] = node == g.inner[k] ? 1.0f : 0.0f;
                            any |= node == g.inner[k];
                        }
                        if (any) list[found++] = int32_t(base + k - 1);
                    }
                    for (int64_t i = 0; i < count; ++i) {
                        int32_t node = g.inner[first + i];
                        int64_t q = r * count + i, above = 0;
                        while (g.inner[before + above] != parent[node]) ++above;
                        in.codes[q] = g.tokens[b * g.nodes + node];
                        memcpy(in.parents + q * dim, in.now + (r * (first - before) + above) * dim, size_t(dim) * sizeof(T));
                        at.slots[q] = base + first + i - 1;
                        at.turn(q, g.own_cos, g.own_sin, cell(b, d));
                    }
                    if (!left_out(b)) at.see(r, found);
                }
                read(in.codes, in.parents, all, at.x);
                at.run();
                std::swap(in.now, in.next);
            }
            Drawing drawing{*this, guided(in, count, d), d, first, used};
            pool_run(Job{&drawing, Drawing::work, nullptr, Drawing::chunks, 1}, g.images * count * g.vocab < (1 << 13));
            first += count;
            used += count * g.widths[d];
        }
    }

    // --- verification -----------------------------------------------------------------------------

    void verify() const {
        Queries<T> at(g.target, rows, g.nodes, g.prefix + g.image_slots, g.states, wide);
        for (int64_t r = 0; r < rows; ++r) {
            int64_t b = r % g.images, length = g.length[b];
            const int64_t *slot_of = g.slot_of + b * g.image_slots, *place_of = g.place_of + b * g.image_slots;
            const int32_t *parent = this->parent(b), *depth = depth_of(b);
            int32_t* list = at.list();
            int32_t prompt = seen_prompt(g.prompt + b * g.prefix, g.prefix, list);
            int64_t reach = std::min(length + g.ahead, g.image_slots), found = prompt + reach;
            for (int64_t slot = 0; slot < reach; ++slot) list[prompt + slot] = int32_t(g.prefix + slot);
            for (int64_t i = 0; i < g.nodes; ++i) {
                int64_t q = r * g.nodes + i;
                at.slots[q] = g.prefix + slot_of[length + i];
                at.following[q] = cell(b, depth[i] + 1);
                at.turn(q, g.cos, g.sin, cell(b, depth[i]));
                int64_t token = g.tokens[b * g.nodes + i];
                memcpy(at.x + q * dim, (const T*)g.embedding + token * dim, size_t(dim) * sizeof(T));
                float* keep = at.keep(i);
                std::fill(keep, keep + prompt, 1.0f);
                for (int64_t slot = 0; slot < reach; ++slot) {
                    int64_t node = place_of[slot] - length, up = i;
                    while (up > node && up > 0) up = parent[up];
                    keep[prompt + slot] = node < 0 || up == node ? 1.0f : 0.0f;
                }
            }
            if (!left_out(b)) at.see(r, found);
        }
        at.run();
        const T* last = (const T*)g.states + wide - dim;
        guided_logits(last, wide, dim, at.heads, at.open * g.nodes, g.head,
                      Guide{nullptr, g.scale, nullptr, nullptr, at.following, nullptr, g.logits, g.images, g.nodes, g.vocab,
                            g.branches, 0});
    }

    // --- acceptance -------------------------------------------------------------------------------

    void decide() const {
        for (int64_t b = 0; b < g.images; ++b) {
            float sum = 0;  // of each node's largest: infinite or no number where a row is not finite
            for (int64_t i = 0; i < g.nodes; ++i) {
                bool broken;
                float most = largest_of(g.logits + (b * g.nodes + i) * g.vocab, g.vocab, broken);
                sum += broken ? NAN : most;
            }
            g.holds[b] = g.holds[b] && sum - sum == 0.0f;
            g.finite[b] += g.holds[b];
        }
        if (greedy() && Judge(g.rule, g.vocab).relaxed()) {
            Accept given{g.filter, g.rule, g.logits, g.tokens, g.first_child, g.num_children, nullptr, nullptr, nullptr,
                         nullptr, nullptr, g.path, g.kept, g.bonus, nullptr, g.quality_losses, g.images, g.nodes, g.vocab, 0, 0, 0,
                         int32_t(g.depth), 0};
            return accept_greedily(given, g.top_k > 0);
        }
        if (g.keys || greedy()) {
            std::fill(g.quality_losses, g.quality_losses + g.images * g.depth, 0.0f);
            return choose(Choose{g.filter, g.logits, g.tokens, g.first_child, g.num_children, g.keys, g.length, g.path, g.kept,
                                 g.bonus, nullptr, g.images, g.nodes, g.vocab, int32_t(g.depth)});
        }
        const float* tests = uniforms(0) + g.draft_columns;
        int64_t stride = g.image * g.columns;
        Accept given{g.filter, g.rule, g.logits, g.tokens, g.first_child, g.num_children, g.group, g.q, tests,
                     uniforms(0) + g.columns - 1, g.widths, g.path, g.kept, g.bonus, g.weights, g.quality_losses, g.images, g.nodes,
                     g.vocab, g.groups, stride, stride, int32_t(g.depth), 0};
        accept(given);
    }

    // --- commit -----------------------------------------------------------------------------------

    // An accepted node stays in the slot that verification wrote, which becomes that of its position.
    void enter_slots(int64_t b, const int64_t* path, int64_t kept, int64_t length) const {
        int64_t *slot_of = g.slot_of + b * g.image_slots, *place_of = g.place_of + b * g.image_slots;
        Scratch scratch;
        int64_t* slots = scratch.take<int64_t>(g.nodes);
        memcpy(slots, slot_of + length, size_t(g.nodes) * sizeof(int64_t));
        int64_t others = kept;
        for (int64_t i = 0; i < g.nodes; ++i) {
            int64_t on = 0;
            while (on <= g.depth && path[on] != i) ++on;
            int64_t position = length + (on <= g.depth ? depth_of(b)[i] : ++others);
            slot_of[position] = slots[i];
            place_of[slots[i]] = position;
        }
    }

    void commit() const {
        int64_t width = g.width, most = g.depth + 1;
        for (int64_t b = 0; b < g.images; ++b) {
            const int64_t *path = g.path + b * most, *tokens = g.tokens + b * g.nodes;
            int64_t length = g.length[b], kept = g.kept[b], open = length < g.image - 1;
            int64_t now = std::min(length + kept + 1, g.image - 1);
            if (open && g.depth) enter_slots(b, path, kept, length);
            for (int64_t i = 0; i <= kept; ++i) {
                int64_t token = i < kept ? tokens[path[i + 1]] : g.bonus[b];
                g.known[b * (g.image + 1) + std::min(length + 1 + i, g.image)] = token;
            }
            if (open) {
                for (int64_t i = 0; i < most; ++i)
                    g.pending_tokens[b * width + i] = i == kept || i == g.depth ? g.bonus[b] : tokens[path[i + 1]];
                for (int64_t branch = 0; branch < g.branches; ++branch) {
                    int64_t r = branch * g.images + b;
                    for (int64_t i = 0; i < most; ++i)
                        memcpy((T*)g.pending_features + (r * width + i) * wide,
                               (const T*)g.states + (r * g.nodes + path[i]) * wide, size_t(wide) * sizeof(T));
                }
                g.pending_count[b] = kept + 1;
                g.root[b] = g.bonus[b];
            }
            float quality_loss = 0;
            for (int64_t i = 0; i < g.depth; ++i)
                if (i <= kept && length + 1 + i < g.image) quality_loss += g.quality_losses[b * g.depth + i];
            g.quality_loss[b] += quality_loss;
            if (now > length) ++g.histogram[b * width + now - length - 1];
            g.steps[b] += open;
            memcpy(g.last_path + b * width, path, size_t(most) * sizeof(int64_t));
            g.last_length[b] = open ? kept : -1;
            g.length[b] = now;
            g.report[b] = now;
            g.report[g.images + b] = g.finite[b];
        }
        ++*g.step;
    }

    void part(int32_t which) const {
        switch (which) {
            case DRAFT: return g.top_k ? draft_beam(*this) : draft();
            case VERIFY: return verify();
            case ACCEPT: return decide();
            case COMMIT: return commit();
            default: part(DRAFT), verify(), decide(), commit();
        }
    }
};

}  // namespace
