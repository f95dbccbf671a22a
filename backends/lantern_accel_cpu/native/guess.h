// Guesses of a window's drafts by a draft head. The arithmetic is that of decoding/sources/head.py and
// nn/draft_head.py; products are in the dtype of the steps.
#pragma once

#include "filter.h"
#include "product.h"
#include "race.h"
#include "small.h"

namespace {

constexpr float LEAST = 0.1f;  // a code below this share of the likeliest is not guessed
constexpr int64_t AROUND = 6;

// The largest of n logits; those that are no number are passed over, the first one apart.
template <class T> float most_of(const T* logits, int64_t n) {
    F top = splat(value(logits[0]));
    int64_t i = 0;
    for (; i + W <= n; i += W) top = larger(get(logits + i), top);
    float most = top[0];
    for (int j = 1; j < W; ++j) most = std::max(most, top[j]);
    for (; i < n; ++i) most = std::max(most, value(logits[i]));
    return most;
}

template <class T> struct Guessing {
    const GuessHead& h;
    const AdvanceChosen& g;
    int64_t b, length;     // of which image, and the last token that is known
    int64_t* known_tokens; // [N + 1]
    T *known, *seen;       // [J][hidden], [span][hidden + rank]
    T *hidden, *mixed, *logits;
    float* p;

    static Guessing of(Scratch& scratch, const GuessHead& h, const AdvanceChosen& g, int64_t b, int64_t length) {
        int64_t wide = h.hidden + h.rank, all = h.depths * h.hidden + g.span * wide + h.hidden + h.rank + g.vocab + h.dim * (g.span + 1);
        T* at = scratch.take<T>(all);
        float* p = scratch.take<float>(whole(g.vocab));
        Guessing made{h, g, b, length, g.tokens + b * (g.image + 1), at, at + h.depths * h.hidden, nullptr, nullptr, nullptr, p};
        made.hidden = made.seen + g.span * wide;
        made.mixed = made.hidden + h.hidden;
        made.logits = made.mixed + h.rank;
        return made;
    }

    static void multiply(const T* x, const void* weight, const void* bias, int64_t m, int64_t k, int64_t n, T* y) {
        linear_of<T>(Linear{x, weight, bias, y, k, m, k, n, 0});
    }

    // Project the last exact state, and the states that a pass had; null: there was none.
    void project(const float* states) {
        T* rows = logits + g.vocab;
        const float* state = h.feature + b * h.dim;
        copy(state, h.dim, rows);
        multiply(rows, h.state, nullptr, 1, h.dim, h.depths * h.hidden, known);
        if (!states) return;
        rows += h.dim;
        copy(states, g.span * h.dim, rows);
        multiply(rows, h.seen, nullptr, g.span, h.dim, h.hidden + h.rank, seen);
    }

    int64_t at(int64_t place) const { return place < 0 ? g.vocab : known_tokens[place]; }

    // The guess for a place inside the image, `ahead` of the last known token; node: of the pass that saw it, or -1;
    // saw: the token on the left there, V for none.
    int64_t guess(int64_t ahead, int64_t place, int64_t node, int64_t saw) {
        int64_t grid = h.grid, column = place % grid, none = g.vocab, which = std::min(ahead, h.depths) - 1;
        int64_t around[AROUND] = {
            at(place - 1), at(place - 2), at(place - grid), column < grid - 1 && place >= grid ? at(place - grid + 1) : none,
            column ? at(place - grid - 1) : none, saw,
        };
        const T* own = node < 0 ? nullptr : seen + node * (h.hidden + h.rank);
        const float *place_row = h.place + place * h.hidden, *start = h.start + which * h.hidden;
        const float* rows[AROUND];
        for (int64_t i = 0; i < AROUND; ++i) rows[i] = h.codes + (i * (none + 1) + around[i]) * h.hidden;
        int64_t i = 0;
        for (; i + W <= h.hidden; i += W) {
            F sum = get(known + which * h.hidden + i) + load<F>(place_row + i) + load<F>(start + i);
            for (int64_t k = 0; k < AROUND; ++k) sum += load<F>(rows[k] + i);
            if (own) sum += get(own + i);
            put(hidden + i, silu<float>(sum));
        }
        for (; i < h.hidden; ++i) {
            float sum = value(known[which * h.hidden + i]) + place_row[i] + start[i];
            for (int64_t k = 0; k < AROUND; ++k) sum += rows[k][i];
            if (own) sum += value(own[i]);
            put1(hidden + i, sum / (1.0f + expf(-sum)));
        }
        multiply(hidden, h.mid, nullptr, 1, h.hidden, h.rank, mixed);
        if (own)
            for (int64_t i = 0; i < h.rank; ++i) put1(mixed + i, value(mixed[i]) + value(own[h.hidden + i]));
        multiply(mixed, h.head, h.bias, 1, h.rank, g.vocab, logits);
        float most = most_of(logits, g.vocab);
        if (!g.keys) {
            int64_t code = 0;
            while (value(logits[code]) != most && code + 1 < g.vocab) ++code;
            return code;
        }
        float least = most + logf(LEAST);
        auto weigh = [&](int64_t i) {
            float one = value(logits[i]);
            p[i] = one >= least ? expf(one - most) : 0.0f;
        };
        i = 0;
        for (; i + W <= g.vocab; i += W) {  // few codes are near the likeliest
            U near = (U)(get(logits + i) >= least);
            put(p + i, F{});
            if (largest(either(near, splat(1.0f), F{})) > 0)
                for (int64_t j = i; j < i + W; ++j) weigh(j);
        }
        for (; i < g.vocab; ++i) weigh(i);
        return OF_UNIT(race)(p, g.vocab, g.keys + b * 3, place);
    }

    // What the newest of earlier passes chose for a place behind these tokens, or -1.
    int64_t recalled(int64_t place) const {
        int64_t held = g.passes * g.wide, now = *g.step % std::max<int64_t>(g.passes, 1), worth = 0, found = -1;
        int64_t key = place * g.vocab + at(place - 1), earlier = at(place - 2);
        for (int64_t i = 0; i < held; ++i) {
            if (g.row_keys[b * held + i] != key) continue;
            int64_t age = (i / g.wide - now - 1 + g.passes) % g.passes;
            int64_t value = 1 + age + (g.row_previous[b * held + i] == earlier ? g.passes : 0);
            if (value > worth) worth = value, found = g.row_tokens[b * held + i];
        }
        return found;
    }

    // Draft behind a pass: x, what it saw; chosen, what it chose; states: what it had.
    void after(const int64_t* x, const int64_t* chosen, int64_t count, const float* states) {
        int64_t before = length - count;  // the window's first token
        memcpy(h.feature + b * h.dim, states + (count - 1) * h.dim, size_t(h.dim) * sizeof(float));
        if (g.span == 1 || length >= g.image - 1) return;
        project(states);
        for (int64_t ahead = 1; ahead < g.span; ++ahead) {
            int64_t node = count + ahead - 1, place = before + count + ahead;
            if (place >= g.image) return;
            bool inside = node < g.span;
            int64_t saw = inside ? x[node] : g.vocab, token = inside && saw == at(place - 1) ? chosen[node] : -1;
            if (token < 0 && g.passes) token = recalled(place);
            if (token < 0 && inside && ahead > h.depths) token = chosen[node];
            known_tokens[place] = token < 0 ? guess(ahead, place, inside ? node : -1, saw) : token;
        }
    }

    // Draft what no pass has seen, behind `newest`.
    void fresh(int64_t newest) {
        project(nullptr);
        for (int64_t ahead = 1; ahead < g.span; ++ahead) {
            int64_t place = length + ahead;
            if (place >= g.image) return;
            if (place > newest) known_tokens[place] = guess(ahead, place, -1, g.vocab);
        }
    }
};

// Guess behind the pass of an image, or (x null) behind what was seen.
INLINE void guess_drafts(const AdvanceChosen& g, int64_t b, int64_t length, const int64_t* x, const int64_t* chosen, int64_t count) {
    Scratch scratch;
    const GuessHead& h = *g.head;
    const float* states = h.features + b * g.span * h.dim;
    if (h.dtype == BFLOAT16) {
        auto one = Guessing<bf16>::of(scratch, h, g, b, length);
        x ? one.after(x, chosen, count, states) : one.fresh(g.newest[b]);
    } else {
        auto one = Guessing<float>::of(scratch, h, g, b, length);
        x ? one.after(x, chosen, count, states) : one.fresh(g.newest[b]);
    }
}

void fresh_guesses(const AdvanceChosen& g) {
    for (int64_t b = 0; b < g.images; ++b) guess_drafts(g, b, g.length[b], nullptr, nullptr, 0);
}

}  // namespace
