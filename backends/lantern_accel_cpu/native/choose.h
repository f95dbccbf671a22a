// Decoding where noise decides every token: races of rows, the walk down a tree, and what follows a pass over windows.
// The arithmetic is that of decoding/invariant.py and decoding/sources/window.py, step by step.
#pragma once

#include "guess.h"

namespace {

// --- races of tensors: weights [B][T][n], keys [B][3], positions [B][T] --------------------------------

struct RaceJob {
    const float* weights;
    const int32_t* keys;
    const int64_t* positions;
    int64_t images, count, n;
    int64_t* codes;
    float* scores;
    static int chunks(void* self, int) { return int(((RaceJob*)self)->images * ((RaceJob*)self)->count); }
    static void work(void* self, int, int row) {
        RaceJob& job = *(RaceJob*)self;
        const float* from = job.weights + row * job.n;
        const int32_t* key = job.keys + row / job.count * 3;
        if (job.codes)
            job.codes[row] = OF_UNIT(race)(from, job.n, key, job.positions[row]);
        else
            OF_UNIT(perturb)(from, job.n, key, job.positions[row], job.scores + row * job.n);
    }
    void run() { pool_run(Job{this, work, nullptr, chunks, 1}, images * count * n < FEW_LOGITS); }
};

void race(const float* weights, const int32_t* keys, const int64_t* positions, int64_t images, int64_t count, int64_t n,
          int64_t* out) {
    RaceJob{weights, keys, positions, images, count, n, out, nullptr}.run();
}

void perturb(const float* weights, const int32_t* keys, const int64_t* positions, int64_t images, int64_t count,
             int64_t n, float* out) {
    RaceJob{weights, keys, positions, images, count, n, nullptr, out}.run();
}

// Take out the first of the largest of n scores of 0 or more; what it was goes to `most`.
int64_t take_largest(float* scores, int64_t n, float& most) {
    F top = splat(-1.0f);
    int64_t i = 0, code = 0;
    for (; i + W <= n; i += W) top = larger(top, load<F>(scores + i));
    most = -1;
    for (; i < n; ++i) most = most > scores[i] ? most : scores[i];
    for (int j = 0; j < W; ++j) most = most > top[j] ? most : top[j];
    while (scores[code] != most && code + 1 < n) ++code;
    scores[code] = -1.0f;
    return code;
}

// The first `count` codes of a race, the winner first; scores: a row to work in.
void ranked_codes(const float* weights, int64_t n, const int32_t* key, int64_t position, int64_t count, float* scores,
                  int64_t* out) {
    if (count == 1) {
        *out = OF_UNIT(race)(weights, n, key, position);
        return;
    }
    OF_UNIT(perturb)(weights, n, key, position, scores);
    float most;
    for (int64_t k = 0; k < count; ++k) out[k] = take_largest(scores, n, most);
}

// --- trees -----------------------------------------------------------------------------------------------

void choose_path(const Choose& g, int64_t image) {
    int64_t n = g.vocab, node = 0, length = 0, base = image * g.nodes;
    Scratch scratch;
    float* p = scratch.take<float>(whole(n));
    const float* logits = g.logits + base * n;
    int64_t* path = g.path + image * (g.depth + 1);
    for (int32_t depth = 0; depth <= g.depth; ++depth) path[depth] = 0;
    for (int32_t depth = 0;; ++depth) {
        float most;
        if (g.keys) filter_row(g.filter, logits + node * n, n, p);
        int64_t code = g.keys ? OF_UNIT(race)(p, n, g.keys + image * 3, g.root_at[image] + 1 + depth)
                              : likeliest_code(logits + node * n, n, most);
        g.bonus[image] = code;
        int64_t child = g.first_child[base + node], end = child + g.num_children[base + node];
        while (child < end && g.tokens[base + child] != code) ++child;
        if (depth == g.depth || child == end) break;
        node = path[++length] = child;
    }
    g.length[image] = length;
    if (g.weights) memcpy(g.weights + image * n, p, size_t(n) * sizeof(float));
}

struct ChooseJob {
    const Choose* given;
    static int chunks(void* self, int) { return int(((ChooseJob*)self)->given->images); }
    static void work(void* self, int, int chunk) { choose_path(*((ChooseJob*)self)->given, chunk); }
};

void choose(const Choose& g) {
    ChooseJob job{&g};
    pool_run(Job{&job, ChooseJob::work, nullptr, ChooseJob::chunks, 1}, g.images * g.vocab < (1 << 13));
}

// --- windows, and plain decoding -------------------------------------------------------------------------

struct ChosenJob {
    const AdvanceChosen& g;
    const float* logits;
    int64_t* chosen;  // [B][L]
    // [B][L]: of each row its first probability, or greedily its largest logit; no number where the row is not finite
    float* firsts;

    float* row(int64_t b, int64_t position) const {
        return g.rows + (b * (g.kept + 1) + g.place[position]) * g.vocab;
    }

    const float* logits_of(int64_t b, int64_t node) const {
        return logits + (b * g.span + node) * g.vocab;
    }

    // The distribution of one position, which is kept where fresh drafts may follow it, and its token.
    static int chunks(void* self, int) { return int(((ChosenJob*)self)->g.images * ((ChosenJob*)self)->g.span); }
    static void work(void* self, int, int chunk) {
        ChosenJob& job = *(ChosenJob*)self;
        const AdvanceChosen& g = job.g;
        int64_t b = chunk / g.span, n = g.vocab, position = g.length[b] + 1 + chunk % g.span;
        const float* logits = job.logits_of(b, chunk % g.span);
        bool inside = position < g.image, keeps = g.rows && inside;
        if (!g.keys) {
            job.chosen[chunk] = likeliest_code(logits, n, job.firsts[chunk]);
            return;
        }
        Scratch scratch;
        float* p = keeps && n % W == 0 ? job.row(b, position) : scratch.take<float>(whole(n));
        filter_row(g.filter, logits, n, p);
        job.firsts[chunk] = p[0];
        job.chosen[chunk] = inside ? OF_UNIT(race)(p, n, g.keys + b * 3, position) : 0;
        if (keeps && n % W) memcpy(job.row(b, position), p, size_t(n) * sizeof(float));
    }

    // Drafts behind the newest position that a pass has seen, as far as the next window goes.
    static int fresh_chunks(void* self, int) {
        return int(((ChosenJob*)self)->g.images * (((ChosenJob*)self)->g.span - 1));
    }
    static void fresh(void* self, int, int chunk) {
        ChosenJob& job = *(ChosenJob*)self;
        const AdvanceChosen& g = job.g;
        int64_t count = g.span - 1, b = chunk / count, newest = g.newest[b], position = newest + 1 + chunk % count;
        if (position >= std::min(g.length[b] + g.span, g.image)) return;
        int64_t last = std::min(newest, g.image - 1), n = g.vocab;
        if (!g.keys && g.fresh == UNIFORM) return;
        Scratch scratch;
        const float* from;
        if (g.fresh == UNIFORM) {
            float* even = scratch.take<float>(whole(n));
            std::fill(even, even + n, 1.0f / float(n));
            from = even;
        } else {
            int64_t near = position - g.width;
            for (int64_t k = 0; k < count / g.width; ++k)
                if (near > last) near -= g.width;
            if (near < 0) near = last;
            if (!g.keys) {
                g.tokens[b * (g.image + 1) + position] = g.tokens[b * (g.image + 1) + near];
                return;
            }
            from = job.row(b, near);
        }
        g.tokens[b * (g.image + 1) + position] = OF_UNIT(race)(from, n, g.keys + b * 3, position);
    }

    // What earlier passes chose behind tokens that this one did not see: x, the window; gave, what it chose; to `drafts`.
    void recall(int64_t b, const int64_t* x, int64_t first, const int64_t* gave, int64_t* drafts) const {
        int64_t held = g.passes * g.wide, now = *g.step % g.passes;
        const int64_t *keys = g.row_keys + b * held, *previous = g.row_previous + b * held, *chosen = g.row_tokens + b * held;
        for (int64_t row = first; row < g.span; ++row) {
            int64_t left = gave[row - 1], earlier = row > 1 ? gave[row - 2] : x[0];
            if (left == x[row]) continue;
            int64_t key = (g.length[b] + 1 + row) * g.vocab + left, worth = 0, entry = 0;
            for (int64_t i = 0; i < held; ++i) {
                if (keys[i] != key) continue;
                int64_t age = (i / g.wide - now - 1 + g.passes) % g.passes;
                int64_t value = 1 + age + (previous[i] == earlier ? g.passes : 0);
                if (value > worth) worth = value, entry = i;
            }
            if (worth) drafts[row] = chosen[entry];
        }
    }

    // Take in what image b's window chose, and draft what follows.
    static int images(void* self, int) { return int(((ChosenJob*)self)->g.images); }
    static void take_in(void* self, int, int b) {
        ChosenJob& job = *(ChosenJob*)self;
        const AdvanceChosen& g = job.g;
        int64_t span = g.span, n = g.vocab, length = g.length[b], open = length < g.image - 1, count = 0;
        Scratch scratch;
        int64_t *x = scratch.take<int64_t>(2 * span), *gave = x + span, *tokens = job.chosen + b * span;
        int64_t* known = g.tokens + b * (g.image + 1);
        float sum = 0;
        for (int64_t i = 0; i < span; ++i) {
            x[i] = known[std::min(length + i, g.image)];
            sum += job.firsts[b * span + i];
        }
        g.holds[b] = g.holds[b] && sum - sum == 0.0f;
        g.finite[b] += g.holds[b];
        while (count + 1 < span && x[count + 1] == tokens[count]) ++count;
        ++count;
        if (g.head && open) {  // earlier passes are looked up before this one is noted
            for (int64_t i = 0; i < span; ++i) known[std::min(length + 1 + i, g.image)] = tokens[i];
            guess_drafts(g, b, std::min(length + count, g.image - 1), x, tokens, std::min(count, g.image - 1 - length));
        }
        if (g.passes && span > 1) {
            int64_t at = (b * g.passes + *g.step % g.passes) * g.wide;
            memcpy(gave, tokens, size_t(span) * sizeof(int64_t));
            if (!g.head) job.recall(b, x, count, gave, tokens);
            for (int64_t i = 0; i < span; ++i) {
                g.row_keys[at + i] = (length + 1 + i) * n + x[i];
                g.row_previous[at + i] = x[std::max<int64_t>(i - 1, 0)];
                g.row_tokens[at + i] = gave[i];
            }
        }
        for (int64_t i = 0; i < span && !(g.head && open); ++i) known[std::min(length + 1 + i, g.image)] = tokens[i];
        int64_t now = std::min(length + count, g.image - 1);
        if (g.newest) g.newest[b] = std::max(g.newest[b], span > 1 ? length + span : now);
        if (g.root && open) g.root[b] = tokens[0];
        if (now > length) ++g.histogram[b * g.histogram_stride + now - length - 1];
        g.steps[b] += open;
        g.last_length[b] = now - length - 1;
        g.length[b] = now;
        g.report[b] = now;
        g.report[g.images + b] = g.finite[b];
    }
};

void advance_chosen(const AdvanceChosen& g, const float* logits) {
    int64_t all = g.images * g.span;
    Scratch scratch;
    ChosenJob job{g, logits, scratch.take<int64_t>(all), scratch.take<float>(all)};
    bool small = all * g.vocab < FEW_LOGITS;
    pool_run(Job{&job, ChosenJob::work, nullptr, ChosenJob::chunks, 1}, small);
    // One image's guesses are shared out product by product.
    pool_run(Job{&job, ChosenJob::take_in, nullptr, ChosenJob::images, 1}, !g.head || g.span == 1 || g.images == 1);
    if (g.span > 1 && !g.head && g.fresh != GIVEN)
        pool_run(Job{&job, ChosenJob::fresh, nullptr, ChosenJob::fresh_chunks, 1}, small);
    ++*g.step;
}

}  // namespace
