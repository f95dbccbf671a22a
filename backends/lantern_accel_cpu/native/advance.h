// What follows a pass of plain decoding under uniforms, in one call. The arithmetic is that of decoding/engine.py.
#pragma once

#include "accept.h"

namespace {

struct AdvanceJob {
    const Advance& g;
    const float* p;   // [B][V]
    int64_t* tokens;  // [B], the new ones

    static int chunks(void* self, int) { return int(((AdvanceJob*)self)->g.images); }
    static void draw(void* self, int, int b) {
        AdvanceJob& job = *(AdvanceJob*)self;
        const Advance& g = job.g;
        int64_t step = b * g.image + std::min(*g.step, g.image - 1);
        job.tokens[b] = draw_row(job.p + b * g.vocab, g.vocab, g.uniforms[(step + 1) * g.columns - 1]);
    }
};

void advance(const Advance& g, const float* logits) {
    int64_t n = g.vocab;
    Scratch scratch;
    float* p = scratch.take<float>(g.images * n);
    filter(g.filter, logits, g.images, n, p);
    AdvanceJob job{g, p, scratch.take<int64_t>(g.images)};
    pool_run(Job{&job, AdvanceJob::draw, nullptr, AdvanceJob::chunks, 1}, g.images * n < FEW_LOGITS);
    for (int64_t b = 0; b < g.images; ++b) {
        float first = p[b * n];
        g.holds[b] = g.holds[b] && first - first == 0.0f;
        g.finite[b] += g.holds[b];
        int64_t length = g.length[b], open = length < g.image - 1, now = std::min(length + 1, g.image - 1);
        g.tokens[b * (g.image + 1) + std::min(length + 1, g.image)] = job.tokens[b];
        if (open) g.root[b] = job.tokens[b], ++g.histogram[b * g.histogram_stride];
        g.steps[b] += open;
        g.last_length[b] = now - length - 1;
        g.length[b] = now;
        g.report[b] = now;
        g.report[g.images + b] = g.finite[b];
    }
    ++*g.step;
}

}  // namespace
