// A window of drafts, for each image alone: which are kept, and what the others become. The arithmetic is that of
// decoding/maximal_coupling.py, step by step.
#pragma once

#include "accept.h"

namespace {

// max(0, p - q) to a row of whole(n), or p where nothing is left of it.
INLINE void left_over(const float* p, const float* q, int64_t n, float* out) {
    bool some = false;
    for (int64_t i = 0; i < n; ++i) {
        out[i] = at_least(p[i] - (q ? q[i] : 0.0f), 0.0f);
        some |= out[i] > 0;
    }
    if (!some) memcpy(out, p, size_t(n) * sizeof(float));
}

struct CoupleJob {
    const Couple* given;

    static int chunks(void* self, int) {
        const Couple& g = *((CoupleJob*)self)->given;
        return int(g.images * g.length);
    }
    static void work(void* self, int, int chunk) {
        CoupleJob& job = *(CoupleJob*)self;
        const Couple& g = *job.given;
        int64_t b = chunk / g.length, i = chunk % g.length, n = g.vocab, drafts = g.length - 1;
        const float* p = g.p + (b * g.length + i) * n;
        int64_t* token = g.tokens + b * g.length + i;
        float u = g.draws[b * g.draw_stride + i];
        if (i == drafts) {  // the bonus
            *token = draw_row(p, n, u);
            return;
        }
        int64_t first = g.count[b] - 1;  // the first that is replaced, if any
        if (i < first) {
            *token = g.x[b * drafts + i];
            return;
        }
        if (i > first) {
            *token = draw_row(p, n, u);
            return;
        }
        Scratch scratch;
        float* row = scratch.take<float>(whole(n));
        left_over(p, g.q + (b * drafts + i) * n, n, row);
        *token = draw_row(row, n, u);
    }
};

void couple(const Couple& g) {
    CoupleJob job{&g};
    int64_t drafts = g.length - 1;
    for (int64_t b = 0; b < g.images; ++b) {
        int64_t count = 0;
        for (; count < drafts; ++count) {
            int64_t at = b * drafts + count, x = g.x[at];
            float px = g.p[(b * g.length + count) * g.vocab + x];
            if (!(g.tests[b * g.test_stride + count] * g.q[at * g.vocab + x] < px)) break;
        }
        g.count[b] = count + 1;
    }
    pool_run(Job{&job, CoupleJob::work, nullptr, CoupleJob::chunks, 1},
             g.images * g.length * g.vocab < FEW_LOGITS);
}

}  // namespace
