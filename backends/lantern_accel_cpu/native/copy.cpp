// A packed matrix in fewer bits. The arithmetic is that of nn/rounding.py, to the last bit, so that this is compiled with
// -ffp-contract=off; the order is that of native.h. Lanes are rows: a panel has one after the other.
#include "copy.h"

#include "rounded.h"

namespace {

INLINE F as_bfloat16(F x) { return (F)(rounded(x) << 16); }

// The largest part of a group's range that is given up for finer steps, and in how many tries.
constexpr double MOST_CUT = 0.24;
constexpr int TRIES = 9;

struct Steps {
    F step, offset;
    float most;  // the highest code

    INLINE_MEMBER F level(F x) const { return larger(smaller((x - offset) / step, splat(most)), F{}); }
};

template <class T> struct CopyJob {
    const Copy& g;
    Weights from;
    int64_t from_size, to_size, groups;

    explicit CopyJob(const Copy& given)
        : g(given), from(given.weight), from_size(from.panel<T>(given.k)), groups((given.k + GROUP - 1) / GROUP) {
        Weights to((const void*)uintptr_t(given.kept));
        to_size = to.panel<T>(given.k);
    }

    // Inputs first to first + count of W rows of a panel, as they are multiplied; 0 behind the last input.
    void take(const char* panel, int64_t row, int64_t first, int64_t count, F* x) const {
        if (sizeof(T) == 4) {
            for (int64_t i = 0; i < count; ++i)
                x[i] = first + i < g.k ? load<F>((const float*)panel + (first + i) * PANEL + row) : F{};
            return;
        }
        bool words = from.kept == WORDS;
        F step = words ? load<F>((const float*)panel + row) : F{};
        const char* pairs = panel + (words ? PANEL * 4 : 0);
        for (int64_t i = 0; i < count; i += 2) {
            F a{}, b{};
            if (first + i < g.k) {
                U pair = load<U>(pairs + ((first + i) / 2 * PANEL + row) * 4);
                a = words ? as_bfloat16(__builtin_convertvector((I)(pair << 16) >> 16, F) * step) : lower(pair);
                if (first + i + 1 < g.k)
                    b = words ? as_bfloat16(__builtin_convertvector((I)pair >> 16, F) * step) : upper(pair);
            }
            x[i] = a;
            if (i + 1 < count) x[i + 1] = b;
        }
    }

    // 1 for rows of the matrix among W of a panel, else 0: those behind them have no steps.
    F there(int64_t p, int64_t row) const {
        float one[W];
        for (int i = 0; i < W; ++i) one[i] = p * PANEL + row + i < g.n ? 1.0f : 0.0f;
        return load<F>(one);
    }

    void by_row(int64_t p, const char* panel, char* out) const {
        for (int64_t row = 0; row < PANEL; row += W) {
            F most{}, x[GROUP];
            for (int64_t first = 0; first < g.k; first += GROUP) {
                take(panel, row, first, GROUP, x);
                for (int64_t i = 0; i < GROUP; ++i) most = larger(most, (F)((U)x[i] & 0x7fffffffu));
            }
            F step = most / 127.0f;
            step = (F)((U)step | ((U)(step == 0.0f) & (U)splat(1.0f)));
            put((float*)out + row, step * there(p, row));
            for (int64_t first = 0; first < g.k; first += 4) {
                take(panel, row, first, 4, x);
                U codes{};
                for (int i = 0; i < 4; ++i) {
                    F level = larger(smaller(x[i] / step, splat(127.0f)), splat(-127.0f));
                    codes |= ((U)nearest(level) & 255u) << (8 * i);
                }
                put((uint32_t*)(out + PANEL * 4) + first / 4 * PANEL + row, codes);
            }
        }
    }

    // The steps of groups from low to high, of which a part is cut off at either end.
    static Steps steps(F low, F high, float most, int cut) {
        float kept = float(1 - MOST_CUT * cut / (TRIES - 1));
        F middle = (low + high) / 2.0f;
        F bottom = middle + (low - middle) * kept, top = middle + (high - middle) * kept;
        F step = as_bfloat16((top - bottom) / most);
        return Steps{(F)((U)step | ((U)(step == 0.0f) & (U)splat(1.0f))), as_bfloat16(bottom), most};
    }

    // The squared errors of groups, added up by halves.
    static F error(const F* x, const Steps& s) {
        F all[GROUP];
        for (int64_t i = 0; i < GROUP; ++i) {
            F off = __builtin_convertvector(nearest(s.level(x[i])), F) * s.step + s.offset - x[i];
            all[i] = off * off;
        }
        for (int64_t half = GROUP / 2; half; half /= 2)
            for (int64_t i = 0; i < half; ++i) all[i] = all[i] + all[i + half];
        return all[0];
    }

    void by_group(const char* panel, char* out, int64_t p, int bits) const {
        float most = float((1 << bits) - 1);
        for (int64_t group = 0; group < groups; ++group, out += PANEL * (4 + GROUP * bits / 8))
            for (int64_t row = 0; row < PANEL; row += W) {
                F x[GROUP], low, high;
                take(panel, row, group * GROUP, GROUP, x);
                low = high = x[0];
                for (int64_t i = 1; i < GROUP; ++i) low = smaller(low, x[i]), high = larger(high, x[i]);
                Steps best = steps(low, high, most, 0);
                if (g.tries > 1) {
                    F least = error(x, best);
                    for (int cut = 1; cut < g.tries; ++cut) {
                        Steps other = steps(low, high, most, cut);
                        F less = error(x, other);
                        U better = (U)(less < least);
                        least = either(better, less, least);
                        best.step = either(better, other.step, best.step);
                        best.offset = either(better, other.offset, best.offset);
                    }
                }
                F in = there(p, row);
                put((bf16*)out + row, best.step * in);
                put((bf16*)out + PANEL + row, best.offset * in);
                U levels[GROUP];
                for (int64_t i = 0; i < GROUP; ++i) levels[i] = (U)nearest(best.level(x[i]) * in);
                uint32_t* lanes = (uint32_t*)(out + PANEL * 4) + row;
                for (int64_t i = 0; i < GROUP; i += 16) {
                    for (int half = 0; half < 2; ++half, lanes += PANEL) put(lanes, lower_bits(levels + i + 8 * half));
                    if (bits == 6) put(lanes, upper_bits(levels + i)), lanes += PANEL;
                }
            }
    }

    // The lower four bits of 8 inputs: even ones in the lower half.
    static U lower_bits(const U* levels) {
        U lane{};
#pragma GCC unroll 8
        for (int t = 0; t < 8; ++t) lane |= (levels[t] & 15u) << (4 * (t / 2) + 16 * (t % 2));
        return lane;
    }

    // The upper two of 16, in the bytes of their lower ones.
    static U upper_bits(const U* levels) {
        U lane{};
#pragma GCC unroll 16
        for (int t = 0; t < 16; ++t) {
            int pair = t / 2;
            lane |= (levels[t] >> 4) << (pair % 2 * 2 + pair / 2 % 2 * 8 + pair / 4 * 4 + 16 * (t % 2));
        }
        return lane;
    }

    static int chunks(void* self, int) { return int(panels(((CopyJob*)self)->g.n)); }
    static void work(void* self, int, int p) {
        const CopyJob& job = *(CopyJob*)self;
        const char* panel = job.from.start + p * job.from_size;
        char* out = (char*)job.g.out + p * job.to_size;
        switch (job.g.kept) {
            case INT8: return job.by_row(p, panel, out);
            case INT6: return job.by_group(panel, out, p, 6);
            default: return job.by_group(panel, out, p, 4);
        }
    }
};

template <class T> void copy_of(const Copy& g) {
    CopyJob<T> job(g);
    pool_run(Job{&job, CopyJob<T>::work, nullptr, CopyJob<T>::chunks, 1}, g.k * g.n < (1 << 16));
}

}  // namespace

void OF_UNIT(copy)(const Copy& g) {
    if (g.dtype == BFLOAT16)
        copy_of<bf16>(g);
    else
        copy_of<float>(g);
}
