// What follows a pass over windows, in one call. The arithmetic is that of decoding/jacobi.py, step by step.
#pragma once

#include "window.h"

namespace {

struct AdvanceJob {
    const Advance& g;
    float* p;            // [B][L][V]
    int64_t* places;     // of the recalled rows, [B][slots]
    float* recalled;     // [B][slots][V]
    int64_t* tokens;     // [B][L], the new ones

    float* row(int64_t b, int64_t position) const {
        return g.q + (b * (g.kept + 1) + g.place[position]) * g.vocab;
    }

    // Keep the distributions of a window: in the ring, and among those of earlier passes.
    static int kept_chunks(void* self, int) {
        const Advance& g = ((AdvanceJob*)self)->g;
        return int(g.images * g.span);
    }
    static void keep(void* self, int, int chunk) {
        AdvanceJob& job = *(AdvanceJob*)self;
        const Advance& g = job.g;
        int64_t b = chunk / g.span, i = chunk % g.span, n = g.vocab, position = g.length[b] + 1 + i;
        const float* from = job.p + chunk * n;
        if (position < g.image) memcpy(job.row(b, position), from, size_t(n) * sizeof(float));
        if (!g.passes || g.span < 2) return;
        bf16* past = (bf16*)g.row_probs + ((b * g.passes + *g.step % g.passes) * g.wide + i) * n;
        int64_t c = 0;
        for (; c + W <= n; c += W) put(past + c, load<F>(from + c));
        for (; c < n; ++c) put1(past + c, from[c]);
    }

    // Draw the tokens of images that have no drafts.
    static int plain_chunks(void* self, int) { return int(((AdvanceJob*)self)->g.images); }
    static void plain(void* self, int, int b) {
        AdvanceJob& job = *(AdvanceJob*)self;
        job.tokens[b] = draw_row(job.p + b * job.g.vocab, job.g.vocab, job.uniforms(b)[job.g.columns - 1]);
    }

    // Draw the fresh drafts behind the newest position that a pass has seen.
    static int fresh_chunks(void* self, int) {
        const Advance& g = ((AdvanceJob*)self)->g;
        return int(g.images * (g.span - 1));
    }
    static void draft(void* self, int, int chunk) {
        AdvanceJob& job = *(AdvanceJob*)self;
        const Advance& g = job.g;
        int64_t count = g.span - 1, b = chunk / count, i = chunk % count, n = g.vocab, newest = g.newest[b];
        int64_t position = newest + 1 + i;
        if (position >= g.image) return;
        int64_t last = std::min(newest, g.image - 1), near = last;
        if (g.above) {
            near = position - g.width;
            for (int64_t k = 0; k < count / g.width; ++k)
                if (near > last) near -= g.width;
            if (near < 0) near = last;
        }
        const float* from = job.row(b, near);
        float u = job.uniforms(b)[g.fresh_column + i];
        g.tokens[b * (g.image + 1) + position] = draw_row(from, n, u);
        memcpy(job.row(b, position), from, size_t(n) * sizeof(float));
    }

    const float* uniforms(int64_t b) const {
        return g.uniforms + (b * g.image + std::min(*g.step, g.image - 1)) * g.columns;
    }
};

void advance(const Advance& g, const float* logits) {
    int64_t span = g.span, n = g.vocab, drafts = span - 1, all = g.images * span;
    size_t rows = size_t(all) * n * sizeof(float), found = size_t(g.images * g.slots);
    AdvanceJob job{g, (float*)scratch(18, rows + found * n * sizeof(float)), nullptr, nullptr, nullptr};
    job.recalled = job.p + all * n;
    filter(g.filter, logits, all, n, job.p);

    // Tokens of the windows, their drafts alone, and two answers; how many are known; and where q's rows lie.
    size_t numbers = 4 * size_t(all) + size_t(g.images) + found;
    int64_t* x = (int64_t*)scratch(19, numbers * sizeof(int64_t) + size_t(all) * sizeof(float*));
    int64_t *own = x + all, *tokens = own + all, *better = tokens + all, *count = better + all;
    job.places = count + g.images;
    const float** q = (const float**)(job.places + found);
    for (int64_t b = 0; b < g.images; ++b) {
        float sum = 0;
        for (int64_t i = 0; i < span; ++i) {
            int64_t position = g.length[b] + i;
            x[b * span + i] = g.tokens[b * (g.image + 1) + std::min(position, g.image)];
            if (i) own[b * drafts + i - 1] = x[b * span + i], q[b * drafts + i - 1] = job.row(b, position);
            sum += job.p[(b * span + i) * n];
        }
        g.holds[b] = g.holds[b] && sum - sum == 0.0f;
        g.finite[b] += g.holds[b];
    }
    const float *tests = job.uniforms(0), *draws = tests + g.columns - span;
    int64_t stride = g.image * g.columns;
    bool small = all * n < FEW_LOGITS;
    if (drafts) {
        Couple test{own, job.p, nullptr, tests, draws, q, tokens, count, g.images, span, n, stride, stride, g.anew};
        couple(test);
        if (g.passes) {
            Recall look{x, tokens, count, g.length, g.step, job.p, nullptr, tests, draws, q, g.row_probs, g.row_keys, g.row_previous,
                        better, job.places, job.recalled, g.images, span, n, stride, stride, g.slots,
                        g.passes, g.wide, g.image};
            recall(look);
            tokens = better;
        }
    } else {
        job.tokens = tokens;
        std::fill(count, count + g.images, 1);
        pool_run(Job{&job, AdvanceJob::plain, nullptr, AdvanceJob::plain_chunks, 1}, small);
    }
    if (g.q) pool_run(Job{&job, AdvanceJob::keep, nullptr, AdvanceJob::kept_chunks, 1}, small);
    for (int64_t b = 0; b < g.images; ++b) {
        int64_t length = g.length[b], open = length < g.image - 1, now = std::min(length + count[b], g.image - 1);
        if (g.passes && drafts) {
            int64_t at = (b * g.passes + *g.step % g.passes) * g.wide;
            for (int64_t i = 0; i < span; ++i) {
                g.row_keys[at + i] = (length + 1 + i) * n + x[b * span + i];
                g.row_previous[at + i] = x[b * span + std::max<int64_t>(i - 1, 0)];
            }
            for (int64_t s = 0; s < g.slots; ++s) {
                int64_t k = b * g.slots + s;
                if (job.places[k] < g.image)
                    memcpy(job.row(b, job.places[k]), job.recalled + k * n, size_t(n) * sizeof(float));
            }
        }
        for (int64_t i = 0; i < span; ++i)
            g.tokens[b * (g.image + 1) + std::min(length + 1 + i, g.image)] = tokens[b * span + i];
        if (g.newest) g.newest[b] = std::max(g.newest[b], drafts ? length + span : now);
        if (g.root && open) g.root[b] = tokens[b * span];
        if (now > length) ++g.histogram[b * g.histogram_stride + now - length - 1];
        g.steps[b] += open;
        g.last_length[b] = now - length - 1;
        g.length[b] = now;
        g.report[b] = now;
        g.report[g.images + b] = g.finite[b];
    }
    if (drafts) pool_run(Job{&job, AdvanceJob::draft, nullptr, AdvanceJob::fresh_chunks, 1}, small);
    ++*g.step;
}

}  // namespace
