// A window of drafts, for each image alone: which are kept, what the others become, and the look-up of
// earlier passes. The arithmetic is that of decoding/maximal_coupling.py and decoding/row_cache.py, step by step.
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

// Row i of what the drafts of image b were drawn from.
template <class Given> INLINE const float* drafted_from(const Given& g, int64_t b, int64_t i) {
    int64_t at = b * (g.length - 1) + i;
    return g.rows_of_q ? g.rows_of_q[at] : g.q + at * g.vocab;
}

struct CoupleJob {
    const Couple* given;
    uint8_t* kept;  // [B][L - 1]

    bool stays(int64_t b, int64_t i) const { return kept[b * (given->length - 1) + i]; }

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
        if (job.stays(b, i)) {
            *token = g.x[b * drafts + i];
            return;
        }
        if (g.anew && i > first) {
            *token = draw_row(p, n, u);
            return;
        }
        float* row = (float*)scratch(15, size_t(whole(n)) * sizeof(float));
        left_over(p, drafted_from(g, b, i), n, row);
        *token = draw_row(row, n, u);
    }
};

void couple(const Couple& g) {
    CoupleJob job{&g, (uint8_t*)scratch(17, size_t(g.images * g.length))};
    int64_t drafts = g.length - 1;
    for (int64_t b = 0; b < g.images; ++b) {
        int64_t count = drafts;
        for (int64_t i = 0; i < drafts; ++i) {
            int64_t x = g.x[b * drafts + i];
            float px = g.p[(b * g.length + i) * g.vocab + x], qx = drafted_from(g, b, i)[x];
            bool kept = g.tests[b * g.test_stride + i] * qx < px;
            if (!kept && count == drafts) count = i;
            job.kept[b * drafts + i] = kept && !(g.anew && i > count);
        }
        g.count[b] = count + 1;
    }
    pool_run(Job{&job, CoupleJob::work, nullptr, CoupleJob::chunks, 1},
             g.images * g.length * g.vocab < FEW_LOGITS);
}

struct RecallJob {
    const Recall* given;
    static int chunks(void* self, int) {
        const Recall& g = *((RecallJob*)self)->given;
        return int(g.images * g.slots);
    }
    static void work(void* self, int, int chunk) {
        const Recall& g = *((RecallJob*)self)->given;
        int64_t b = chunk / g.slots, s = chunk % g.slots, n = g.vocab, last = g.length - 1;
        int64_t slot = g.first[b] + s, row = std::min(slot, last), drafted = std::min(row, last - 1);
        int64_t before_row = std::max<int64_t>(row - 1, 0), *place = g.places + b * g.slots + s;
        const int64_t *x = g.x + b * g.length, *tokens = g.tokens + b * g.length;
        int64_t now = tokens[before_row], earlier = before_row ? tokens[before_row - 1] : x[0];
        bool changed = slot <= last && now != x[row];
        float* guess = g.rows + (b * g.slots + s) * n;
        const float* p = g.p + (b * g.length + row) * n;
        *place = g.length_of[b] + 1 + row;
        int64_t key = *place * n + now, worth = 0, entry = 0, held = g.passes * g.wide;
        for (int64_t i = 0; changed && i < held; ++i) {
            if (g.row_keys[b * held + i] != key) continue;
            int64_t age = ((i / g.wide - *g.step - 1) % g.passes + g.passes) % g.passes;
            int64_t value = 1 + age + (g.row_previous[b * held + i] == earlier ? g.passes : 0);
            if (value > worth) worth = value, entry = i;
        }
        float total = 0;
        if (worth) {
            const bf16* past = (const bf16*)g.row_probs + (b * held + entry) * n;
            double sum = 0;
            for (int64_t i = 0; i < n; ++i) sum += double(guess[i] = value(past[i]));
            total = float(sum);
        }
        if (!(total > 0)) {  // nothing better is known: past the image, where nobody reads it
            memcpy(guess, p, size_t(n) * sizeof(float));
            *place = g.image;
            return;
        }
        total = at_least(total, TINY);
        for (int64_t i = 0; i < n; ++i) guess[i] /= total;
        bool inside = row < last;
        const float* was = inside ? drafted_from(g, b, drafted) : nullptr;
        int64_t code = x[drafted + 1];
        int64_t* out = g.out + b * g.length + row;
        if (inside && g.tests[b * g.test_stride + drafted] * was[code] < guess[code]) {
            *out = code;
            return;
        }
        float* left = (float*)scratch(15, size_t(whole(n)) * sizeof(float));
        left_over(guess, was, n, left);
        *out = draw_row(left, n, g.draws[b * g.draw_stride + row]);
    }
};

void recall(const Recall& g) {
    memcpy(g.out, g.tokens, size_t(g.images * g.length) * sizeof(int64_t));
    RecallJob job{&g};
    pool_run(Job{&job, RecallJob::work, nullptr, RecallJob::chunks, 1},
             g.images * g.slots * g.vocab < FEW_LOGITS);
}

}  // namespace
