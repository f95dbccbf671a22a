// A pass of the target over windows in one call: what stands before the trunk and behind it is read from the
// window's buffers, where they are.
#pragma once

#include "accept.h"
#include "trunk.h"

namespace {

// Logits are the sums as they are: to round them to bfloat16 would cost more than all else that is rounded. A panel's
// are guided before the next one is multiplied, and only what guidance makes of them is kept.
template <class T> struct HeadJob {
    typedef typename Activation<T>::type A;
    const Guide& guide;
    const void* weight;
    const A* x;         // [m][ldx]
    const int64_t* at;  // [branches * B * T]: which of the m rows each is, or m
    int64_t m, k, ldx;
    Inputs inputs;

    static int chunks(void* self, int) { return pieces(panels(((HeadJob*)self)->guide.vocab)); }
    static void work(void* self, int, int chunk) {
        HeadJob& job = *(HeadJob*)self;
        const Guide& g = job.guide;
        int64_t count = panels(g.vocab), each = share(count), from = chunk * each, to = std::min(from + each, count);
        int64_t m = job.m, rows = g.images * g.count;
        Scratch scratch;
        float *kept = scratch.take<float>(m * PANEL), nothing[PANEL] = {};
        product<T>(job.x, job.ldx, m, Weights(job.weight), job.k, from, to, nullptr, job.inputs,
                [&](int64_t p, int64_t first, int64_t some, const float* sums, auto meanwhile) {
                    if (some < m) memcpy(kept + first * PANEL, sums, size_t(some * PANEL) * sizeof(float)), sums = kept;
                    if (first + some < m) return;
                    int64_t columns = std::min<int64_t>(g.vocab - p * PANEL, PANEL);
                    auto of = [&](int64_t query) { return job.at[query] < m ? sums + job.at[query] * PANEL : nothing; };
                    for (int64_t r = 0; r < rows; ++r) {
                        meanwhile.fetch();
                        const float *c = of(r), *second = g.branches > 1 ? of(rows + r) : c;
                        guide_row(g, r, p * PANEL, columns, c, second, g.branches > 2 ? of(2 * rows + r) : second);
                    }
                });
    }
};

// Guided logits of states, stride apart: those of the m rows in `heads`; the others' logits are 0.
template <class T>
void guided_logits(const T* states, int64_t stride, int64_t dim, const int64_t* heads, int64_t m, const void* weight,
                   const Guide& g) {
    typedef typename HeadJob<T>::A A;
    int64_t queries = g.branches * g.images * g.count;
    if (!m) return std::fill(g.out, g.out + g.images * g.count * g.vocab, 0.0f);
    Weights w(weight);
    Scratch scratch;
    int64_t* at = scratch.take<int64_t>(queries);
    std::fill(at, at + queries, m);
    for (int64_t r = 0; r < m; ++r) at[heads[r]] = r;
    HeadJob<T> job{g, weight, nullptr, at, m, dim, even(dim), input_scratch<T>(scratch, m, dim, w)};
    A* features = scratch.take<A>(m * job.ldx);
    for (int64_t r = 0; r < m; ++r) copy_row(states + heads[r] * stride, dim, features + r * job.ldx);
    job.x = features;
    pack_inputs(features, job.ldx, m, dim, w.kept, job.inputs);
    pool_run(Job{&job, HeadJob<T>::work, nullptr, HeadJob<T>::chunks, 1}, dim * g.vocab * (m + 3) < (1 << 18));
}

// Where the queries of a pass lie, and what they see: filled in row by row, those that see nothing left out.
template <class T> struct Queries {
    Scratch scratch;
    Trunk t;
    Seen s;
    int64_t count, half, open = 0;
    int64_t *slots, *following, *heads;  // [queries]
    float *cos, *sin;
    T* x;

    // Of so many rows of `count` queries over so many slots. `given`: the blocks; out_stride: of the states.
    Queries(const Trunk& given, int64_t rows, int64_t count, int64_t capacity, void* out, int64_t out_stride)
        : t(given), s(lists(scratch, int32_t(rows), int32_t(count), int32_t(capacity))), count(count), half(t.cache.width / 2) {
        int64_t all = rows * count;
        slots = scratch.take<int64_t>(3 * size_t(all));
        following = slots + all;
        heads = following + all;
        cos = scratch.take<float>(2 * size_t(all * half));
        sin = cos + all * half;
        x = scratch.take<T>(all * t.dim);
        t.x = x, t.out = out, t.out_stride = out_stride, t.slots = slots;
        t.mask = Mask{nullptr, 0, 0, int32_t(rows), int32_t(count), int32_t(capacity)};
        t.rotary = Rotary{cos, sin, count * half};
    }

    INLINE_MEMBER void turn(int64_t q, const float* all_cos, const float* all_sin, int64_t cell) {
        memcpy(cos + q * half, all_cos + cell * half, size_t(half) * sizeof(float));
        memcpy(sin + q * half, all_sin + cell * half, size_t(half) * sizeof(float));
    }

    int32_t* list() const { return s.slots + open * s.capacity; }
    float* keep(int64_t i) const { return s.keep + (open * count + i) * s.padded; }

    // Take `found` slots that list() has for a row; its queries have said in keep() which of these they see.
    INLINE_MEMBER void see(int64_t row, int64_t found) {
        int64_t vectors = whole(found);
        for (int64_t i = found; i < vectors; ++i) list()[i] = list()[0];
        for (int64_t i = 0; i < count; ++i) {
            std::fill(keep(i) + found, keep(i) + vectors, 0.0f);
            heads[open * count + i] = row * count + i;
        }
        s.found[open] = int32_t(found);
        s.row_of[open++] = int32_t(row);
    }

    void run() const { trunk_of<T>(t, s, int32_t(open)); }
};

// The slots of a prompt that are seen; returns how many.
INLINE int32_t seen_prompt(const uint8_t* prompt, int64_t count, int32_t* list) {
    int32_t found = 0;
    for (int64_t slot = 0; slot < count; ++slot) {
        list[found] = int32_t(slot);
        found += !prompt || prompt[slot] != 0;
    }
    return found;
}

// The states whose logits are the guided ones.
template <class T> void guided_states(const WindowPass& g, const T* states) {
    int64_t dim = g.trunk.dim;
    for (int64_t i = 0; i < g.images * g.span; ++i) {
        int64_t following = std::min(g.length[i / g.span] + i % g.span + 1, g.image - 1);
        const T *cond = states + i * dim, *free = states + (g.images * g.span + i) * dim;
        float *out = g.features + i * dim, scale = g.scale ? g.scale[following] : 1.0f;
        for (int64_t c = 0; c < dim; ++c)
            out[c] = scale > 1 ? value(free[c]) + scale * (value(cond[c]) - value(free[c])) : value(cond[c]);
    }
}

template <class T> void window_pass_of(const WindowPass& g, float* out) {
    int64_t count = g.span, rows = g.images * g.branches, queries = rows * count, dim = g.trunk.dim;
    // Behind the image's slots comes one for what is past its end.
    int64_t limit = g.slots - g.prefix - 1;
    Scratch scratch;
    T* states = scratch.take<T>(queries * dim);
    Queries<T> at(g.trunk, rows, count, g.slots, states, dim);
    auto node = [&](int64_t q, int64_t place, int64_t token, int64_t slot) {
        int64_t cell = std::min(place, g.image - 1);
        at.slots[q] = slot;
        at.following[q] = std::min(cell + 1, g.image - 1);
        at.turn(q, g.cos, g.sin, cell);
        memcpy(at.x + q * dim, (const T*)g.embedding + token * dim, size_t(dim) * sizeof(T));
    };
    for (int64_t r = 0; r < rows; ++r) {
        int64_t b = r % g.images, length = g.length[b];
        for (int64_t i = 0; i < g.span; ++i) {
            int64_t place = length + i, token = g.tokens[b * (g.image + 1) + std::min(place, g.image)];
            node(r * count + i, place, token, place < limit ? g.prefix + place : g.slots - 1);
        }
        if (g.blind && length >= g.image - 1) continue;
        int32_t* list = at.list();
        int32_t prompt = seen_prompt(g.prompt + b * g.prefix, g.prefix, list);
        int64_t image = std::min(length + count, limit), found = prompt + image;
        for (int64_t i = 0; i < image; ++i) list[prompt + i] = int32_t(g.prefix + i);
        for (int64_t i = 0; i < count; ++i) {
            float* keep = at.keep(i);
            int64_t sees = prompt + std::min(length + i + 1, limit);
            std::fill(keep, keep + sees, 1.0f);
            std::fill(keep + sees, keep + found, 0.0f);
        }
        at.see(r, found);
    }
    at.run();
    guided_logits(states, dim, dim, at.heads, at.open * count, g.head,
                  Guide{nullptr, g.scale, nullptr, nullptr, at.following, nullptr, out, g.images, count, g.vocab, g.branches, 0});
    if (g.features) guided_states(g, states);
}

void window_pass(const WindowPass& g, float* out) {
    if (g.trunk.dtype == BFLOAT16)
        window_pass_of<bf16>(g, out);
    else
        window_pass_of<float>(g, out);
}

}  // namespace
