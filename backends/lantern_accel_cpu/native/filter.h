// From logits to distributions, and draws by inverse CDF: one row of V codes at a time.
//
// A division, a comparison and a running sum are what torch computes, bit for bit; a softmax is not, since
// torch adds in another order. Running sums are kept in double, as torch keeps them.
#pragma once

#include <algorithm>

#include "native.h"
#include "vector.h"

namespace {

constexpr int64_t VECTORS = 4;  // independent sums of a loop, so that none waits for the other

// Sum of f(i), a vector at i, over whole vectors; n is a multiple of W.
template <class Body> INLINE double sum_of(int64_t n, Body f) {
    F acc[VECTORS] = {};
    int64_t i = 0;
    for (; i + VECTORS * W <= n; i += VECTORS * W)
        for (int64_t j = 0; j < VECTORS; ++j) acc[j] += f(i + j * W);
    for (; i < n; i += W) acc[0] += f(i);
    double sum = 0;
    for (int64_t j = 0; j < VECTORS; ++j) sum += total(acc[j]);
    return sum;
}

INLINE int64_t whole(int64_t n) { return (n + W - 1) / W * W; }

// The largest of n logits that are numbers; broken: whether one is none.
INLINE float largest_of(const float* x, int64_t n, bool& broken) {
    F top = splat(-INFINITY);
    U none{};
    int64_t i = 0;
    float most = -INFINITY;
    broken = false;
    for (; i + W <= n; i += W) {
        F v = load<F>(x + i);
        none |= (U)(v != v);
        top = larger(top, v);
    }
    for (; i < n; ++i) {
        broken |= x[i] != x[i];
        most = most > x[i] ? most : x[i];
    }
    for (int j = 0; j < W; ++j) {
        broken |= none[j] != 0;
        most = most > top[j] ? most : top[j];
    }
    return most;
}

// The order of floats as unsigned numbers, and back.
INLINE uint32_t ranked(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    return u ^ (uint32_t(int32_t(u) >> 31) | 0x80000000u);
}
INLINE float unranked(uint32_t r) {
    uint32_t u = r >> 31 ? r ^ 0x80000000u : ~r;
    float x;
    memcpy(&x, &u, 4);
    return x;
}

// A bar that k to `enough` of a row's numbers reach, whole vectors without a NaN; the k-th largest where equal ones leave
// none. `most` is the largest. Numbers from a bar on are counted, until they are enough or one bar is left. A bar lies between
// the two that are nearest to k, as far from each as the logarithm of its count is from k's; where one side stays, it counts
// for half, and soon the middle of what is left is taken, as it is after GUESSES bars. `least`: a bar that `many` numbers, k or
// more, are known to reach.
float bar_of(const float* x, int64_t all, int64_t k, int64_t enough, float most, float least = -INFINITY, int64_t many = 0) {
    uint32_t low = ranked(least), high = ranked(most) + 1;  // at least k from low on, fewer from high on
    float wanted = logf(float(k)), over = many ? logf(float(many)) - wanted : 0, under = wanted + 1, down = 8;
    int side = 0;  // how often one side stayed, and which
    constexpr int GUESSES = 12;
    for (int guesses = 0; high - low > 1; ++guesses) {
        uint32_t middle = low + (high - low) / 2;
        float from = unranked(low), bar = from + over / (over + under) * (unranked(high) - from);
        if (from == -INFINITY) bar = most - down, down *= 4;
        if (guesses < GUESSES && -3 < side && side < 3 && bar - bar == 0)
            middle = std::min(std::max(ranked(bar), low + 1), high - 1);
        else
            side = 0;
        bar = unranked(middle);
        I count{};
        for (int64_t i = 0; i < all; i += W) count -= (I)(load<F>(x + i) >= bar);
        int64_t found = 0;
        for (int i = 0; i < W; ++i) found += count[i];
        if (found >= k && found <= enough) return bar;
        float away = fabsf(logf(std::max(float(found), 0.5f)) - wanted);
        if (found > k) {
            low = middle, over = away, side = std::max(side, 0) + 1;
            if (side > 1) under /= 2;
        } else {
            high = middle, under = away, side = std::min(side, 0) - 1;
            if (side < -1) over /= 2;
        }
    }
    return unranked(low);
}

// Put the numbers from `bar` on, of whole vectors, at `to`, and their codes, in order, -inf behind them to whole vectors;
// returns how many. codes: of x, null where they count from 0 on. Where `to` and `out` are x and codes, they are replaced.
int64_t take_from(const float* x, const uint32_t* codes, int64_t all, float bar, float* to, uint32_t* out) {
    U lanes = counters();
    int64_t many = 0;
    for (int64_t i = 0; i < all; i += W) {
        F v = load<F>(x + i);
        U chosen = (U)(v >= bar);
        many += put_chosen(chosen, v, codes ? load<U>(codes + i) : lanes + uint32_t(i), to + many, out + many);
    }
    put(to + many, splat(-INFINITY));
    return many;
}

// Take out codes before which others hold more than p of the mass, largest first and equals by code. x: scaled
// logits; e: their weights, 0 for what is out already; most: the largest x. Codes are counted by their
// distance to the largest, and only the bin that the cut falls in is put in order.
void drop_top_p(float* x, float* e, int64_t n, float most, float sum, float p) {
    constexpr int BINS = 2048;
    constexpr float FINE = 32.0f;
    double mass[BINS];
    Scratch scratch;
    int64_t *in = scratch.take<int64_t>(2 * n), *some = in + n;
    int32_t* bin_of = scratch.take<int32_t>(n);
    int64_t many = 0;
    for (int64_t i = 0; i < n; ++i) {  // without a branch, which would be guessed wrong at every code that is in
        in[many] = i;
        many += e[i] > 0;
    }
    int32_t last = 0;
    for (int64_t j = 0; j < many; ++j) {
        float d = (most - x[in[j]]) * FINE;
        bin_of[j] = d < float(BINS - 1) ? int32_t(d) : BINS - 1;
        last = std::max(last, bin_of[j]);
    }
    std::fill(mass, mass + last + 1, 0.0);
    for (int64_t j = 0; j < many; ++j) mass[bin_of[j]] += double(e[in[j]] / sum);
    double before = 0;
    for (int32_t bin = 0; bin <= last; ++bin) {
        // No code of a bin is cut while all up to its end hold no more than p, by a margin for rounding.
        if (mass[bin] == 0 || before + mass[bin] <= double(p) - 1e-5) {
            before += mass[bin];
            continue;
        }
        int64_t found = 0;
        for (int64_t j = 0; j < many; ++j)
            if (bin_of[j] == bin) some[found++] = in[j];
        std::sort(some, some + found, [&](int64_t a, int64_t b) { return x[a] > x[b] || (x[a] == x[b] && a < b); });
        for (int64_t j = 0; j < found; ++j) {
            float own = e[some[j]] / sum;
            before += double(own);
            if (!(float(before) - own > p)) continue;
            float cut = x[some[j]];
            int64_t first = some[j];
            for (int64_t k = 0; k < many; ++k) {
                int64_t i = in[k];
                if (x[i] < cut || (x[i] == cut && i >= first)) x[i] = -INFINITY, e[i] = 0;
            }
            return;
        }
    }
}

// Softmax of x where it is above -inf, to e; returns the sum. Weights below 1e-37 are 0.
INLINE float weigh(const float* x, int64_t all, float most, float* e) {
    return float(sum_of(all, [&](int64_t i) {
        F d = load<F>(x + i) - most;
        F w = (F)((U)exponential(d) & (U)(d > -87.0f));
        put(e + i, w);
        return w;
    }));
}

// Take x and its weight out where it is less than `least`.
INLINE void drop_below(float* x, int64_t all, float least) {
    for (int64_t i = 0; i < all; i += W) {
        F v = load<F>(x + i);
        U gone = (U)(v < least);
        put(x + i, (F)(((U)splat(-INFINITY) & gone) | ((U)v & ~gone)));
    }
}

// Probabilities of the k largest of a row of whole vectors, and of equals of the last; 0 elsewhere.
void filter_largest(const Filter& f, const float* x, int64_t all, float most, float* out) {
    Scratch scratch;
    float *kept = scratch.take<float>(2 * size_t(all + W)), *e = kept + all + W;
    uint32_t* codes = scratch.take<uint32_t>(size_t(all + W));
    int64_t k = f.top_k, n;
    float bar = bar_of(x, all, k, 2 * k, most);
    int64_t many = take_from(x, nullptr, all, bar, kept, codes);
    if (many > k) n = whole(many), many = take_from(kept, codes, n, bar_of(kept, n, k, k, most, bar, many), kept, codes);
    float sum = weigh(kept, whole(many), most, e);
    if (f.top_p) {
        drop_top_p(kept, e, many, most, sum, *f.top_p);
        sum = float(sum_of(whole(many), [&](int64_t i) { return load<F>(e + i); }));
    }
    float share = 1.0f / sum;
    memset(out, 0, size_t(all) * sizeof(float));
    for (int64_t i = 0; i < many; ++i) out[codes[i]] = e[i] * share;
}

// Probabilities of one row of logits, n of them, to a row of whole(n); what is behind n becomes 0.
// A row with a NaN, with +inf or without any finite number gives NaN, as torch's softmax does.
void filter_row(const Filter& f, const float* logits, int64_t n, float* out) {
    int64_t all = whole(n);
    Scratch scratch;
    float t = f.temperature ? *f.temperature : 1.0f;
    bool k_first = !(f.p_first && f.top_p), some = f.top_k > 0 && f.top_k < n, few = some && k_first && f.top_k <= n / 2;
    bool as_given = (few || !(some || f.top_p)) && t == 1.0f && n == all;  // nothing is taken out of it
    float* own = as_given ? nullptr : scratch.take<float>(all);
    const float* x = as_given ? logits : own;
    if (!as_given) {
        if (t == 1.0f)  // a division would change nothing, slowly
            memcpy(own, logits, size_t(n) * sizeof(float));
        else
            for (int64_t i = 0; i < n; ++i) own[i] = logits[i] / t;
        for (int64_t i = n; i < all; ++i) own[i] = -INFINITY;
    }
    bool broken;
    float most = largest_of(x, all, broken);
    if (broken || !(most - most == 0.0f)) {
        for (int64_t i = 0; i < all; ++i) out[i] = i < n ? NAN : 0.0f;
        return;
    }
    if (few) return filter_largest(f, x, all, most, out);
    if (some && k_first) drop_below(own, all, bar_of(own, all, f.top_k, f.top_k, most));
    float sum = weigh(x, all, most, out);
    if (f.top_p) {
        drop_top_p(own, out, n, most, sum, *f.top_p);
        if (some && !k_first) {
            drop_below(own, all, bar_of(own, all, f.top_k, f.top_k, most));
            sum = weigh(own, all, most, out);
        } else {
            sum = float(sum_of(all, [&](int64_t i) { return load<F>(out + i); }));
        }
    }
    float share = 1.0f / sum;
    for (int64_t i = 0; i < all; i += W) put(out + i, load<F>(out + i) * share);
}

// Running sums of n weights, in double. Quarters are summed side by side, and then put behind each other.
INLINE double* running(Scratch& scratch, const float* w, int64_t n) {
    double* c = scratch.take<double>(n + 1);
    int64_t each = n / 4;
    double a = 0, b = 0, d = 0, e = 0;
    for (int64_t i = 0; i < each; ++i) {
        c[i] = a += double(w[i]);
        c[each + i] = b += double(w[each + i]);
        c[2 * each + i] = d += double(w[2 * each + i]);
        c[3 * each + i] = e += double(w[3 * each + i]);
    }
    double before = a;
    for (int64_t i = each; i < 2 * each; ++i) c[i] += before;
    before += b;
    for (int64_t i = 2 * each; i < 3 * each; ++i) c[i] += before;
    before += d;
    for (int64_t i = 3 * each; i < 4 * each; ++i) c[i] += before;
    before += e;
    for (int64_t i = 4 * each; i < n; ++i) c[i] = before += double(w[i]);
    return c;
}

// The first code whose running sum is above u times the whole; the last one where none is.
INLINE int64_t draw_row(const float* w, int64_t n, float u) {
    Scratch scratch;
    const double* c = running(scratch, w, n);
    float bar = u * float(c[n - 1]);
    int64_t low = 0, high = n;
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (float(c[middle]) <= bar)
            low = middle + 1;
        else
            high = middle;
    }
    return low < n ? low : n - 1;
}

// The largest of n logits, the lower code of equal ones; `most` is its own, and no number where one of them is none.
INLINE int64_t likeliest_code(const float* x, int64_t n, float& most) {
    bool broken;
    int64_t code = 0;
    most = largest_of(x, n, broken);
    while (x[code] != most && code + 1 < n) ++code;
    if (broken) most = NAN;
    return code;
}

// --- whole tensors ---------------------------------------------------------------------------------

struct FilterJob {
    const Filter* f;
    const float* logits;
    int64_t rows, n, each;
    float* out;
    static int chunks(void* self, int) {
        FilterJob& job = *(FilterJob*)self;
        return int((job.rows + job.each - 1) / job.each);
    }
    static void work(void* self, int, int chunk) {
        FilterJob& job = *(FilterJob*)self;
        int64_t from = chunk * job.each, to = std::min(from + job.each, job.rows);
        for (int64_t r = from; r < to; ++r) {
            if (job.n % W == 0) {
                filter_row(*job.f, job.logits + r * job.n, job.n, job.out + r * job.n);
                continue;
            }
            Scratch scratch;
            float* row = scratch.take<float>(whole(job.n));
            filter_row(*job.f, job.logits + r * job.n, job.n, row);
            memcpy(job.out + r * job.n, row, size_t(job.n) * sizeof(float));
        }
    }
};

void filter(const Filter& f, const float* logits, int64_t rows, int64_t n, float* out) {
    FilterJob job{&f, logits, rows, n, (rows + 4 * pool_threads() - 1) / (4 * pool_threads()), out};
    pool_run(Job{&job, FilterJob::work, nullptr, FilterJob::chunks, 1}, rows * n < FEW_LOGITS);
}

// Codes [rows][count] from weights [rows][n] and uniforms [rows][count], without replacement.
void draw(const float* weights, const float* uniforms, int64_t rows, int64_t n, int64_t count, int64_t* out) {
    Scratch scratch;
    float* left = count > 1 ? scratch.take<float>(n) : nullptr;
    for (int64_t r = 0; r < rows; ++r) {
        const float* w = weights + r * n;
        for (int64_t c = 0; c < count; ++c) {
            int64_t code = out[r * count + c] = draw_row(w, n, uniforms[r * count + c]);
            if (c + 1 == count) break;
            if (!c) memcpy(left, w, size_t(n) * sizeof(float)), w = left;
            left[code] = 0.0f;
        }
    }
}

// Guided logits of a row from its branches' n codes from `first` on: u + s (c - u), or InstructPix2Pix's three; where s is
// at most 1, the conditional ones. Then the penalty of codes that a token may not be. u: of two branches the second one.
INLINE void guide_row(const Guide& g, int64_t row, int64_t first, int64_t n, const float* c, const float* second, const float* u) {
    int64_t token = g.token[g.whole_image ? row / g.count : row], i = 0;
    float *y = g.out + row * g.vocab + first, s = g.scale ? g.scale[token] : 1.0f;
    if (!(s > 1) || g.branches == 1) {
        memcpy(y, c, size_t(n) * sizeof(float));
    } else if (g.branches == 2) {
        for (; i + W <= n; i += W) put(y + i, load<F>(u + i) + s * (load<F>(c + i) - load<F>(u + i)));
        for (; i < n; ++i) y[i] = u[i] + s * (c[i] - u[i]);
    } else {
        float t = *g.image_scale;
        for (; i < n; ++i) y[i] = u[i] + t * (second[i] - u[i]) + s * (c[i] - second[i]);
    }
    if (!g.penalty) return;
    const float* p = g.penalty + g.kind[token] * g.vocab + first;
    for (i = 0; i < n; ++i) y[i] += p[i];
}

struct GuideJob {
    const Guide& g;
    static int chunks(void* self, int) { return int(((GuideJob*)self)->g.images * ((GuideJob*)self)->g.count); }
    static void work(void* self, int, int row) {
        const Guide& g = ((GuideJob*)self)->g;
        int64_t n = g.vocab, branch = g.images * g.count * n;
        const float *c = g.logits + row * n, *second = c + branch;
        guide_row(g, row, 0, n, c, second, g.branches == 3 ? second + branch : second);
    }
};

void guide(const Guide& g) {
    GuideJob job{g};
    pool_run(Job{&job, GuideJob::work, nullptr, GuideJob::chunks, 1}, g.images * g.count * g.vocab < (1 << 14));
}

}  // namespace
