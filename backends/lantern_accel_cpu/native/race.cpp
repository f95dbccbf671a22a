// Threefry-2x32-20 and the exponential race, compiled once for each instruction set with -ffp-contract=off.
#include "race.h"

#include "vector.h"

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

// Whether a comparison holds in some lane.
INLINE bool any(U lanes) {
#if WIDTH == 16
    return _mm512_test_epi32_mask((__m512i)lanes, (__m512i)lanes) != 0;
#elif WIDTH == 8
    return _mm256_movemask_ps((__m256)lanes) != 0;
#else
    uint64_t halves[2];
    memcpy(halves, &lanes, sizeof halves);
    return (halves[0] | halves[1]) != 0;
#endif
}

template <int BY> INLINE U rotated(U x) { return (x << BY) | (x >> (32 - BY)); }

// Both words of a block of counters.
struct Key {
    U k0, k1, k2, image;
    uint32_t base;  // of the position's counters

    Key(const int32_t* key, int64_t position)
        : k0(splat_bits(uint32_t(key[0]))), k1(splat_bits(uint32_t(key[1]))),
          k2(splat_bits(uint32_t(key[0]) ^ uint32_t(key[1]) ^ 0x1BD11BDAu)), image(splat_bits(uint32_t(key[2]))),
          base(uint32_t(position) << 16) {}

    INLINE_MEMBER void words(U counter, U& x0, U& x1) const {
        x0 = counter + k0, x1 = image + k1;
#define FOUR(a, b, c, d)                                  \
    x0 += x1, x1 = rotated<a>(x1) ^ x0, x0 += x1, x1 = rotated<b>(x1) ^ x0; \
    x0 += x1, x1 = rotated<c>(x1) ^ x0, x0 += x1, x1 = rotated<d>(x1) ^ x0;
        FOUR(13, 15, 26, 6) x0 += k1, x1 += k2 + 1u;
        FOUR(17, 29, 16, 24) x0 += k2, x1 += k0 + 2u;
        FOUR(13, 15, 26, 6) x0 += k0, x1 += k1 + 3u;
        FOUR(17, 29, 16, 24) x0 += k1, x1 += k2 + 4u;
        FOUR(13, 15, 26, 6) x0 += k2, x1 += k0 + 5u;
#undef FOUR
    }
};

// A word as a number of (0, 2^31): the word's complement where it is 2^31 or more.
INLINE F small_of(U words) {
    I signs = (I)words >> 31;
    return __builtin_convertvector((I)words ^ signs, F) + 0.5f;
}

// The operations of exponential_of in device/noise.py, one by one; small: what small_of made of the words.
INLINE F exponential_of(U words, F small) {
    U upper = (U)((I)words >> 31);
    I bits = (I)small;
    I exponent = (bits >> 23) - 127;
    F mantissa = (F)((bits & 0x7fffff) | 0x3f800000);
    F share = small * 0x1p-32f;
    F above = either(upper, share, 1.0f - mantissa);
    F below = either(upper, 2.0f - share, 1.0f + mantissa);
    F halvings = __builtin_convertvector((32 - exponent) & ~(I)upper, F);
    F t = above / below;
    F z = t * t;
    F series = z * float(1.0 / 13) + float(1.0 / 11);
    series = series * z + float(1.0 / 9);
    series = series * z + float(1.0 / 7);
    series = series * z + float(1.0 / 5);
    series = series * z + float(1.0 / 3);
    series = series * z + 1.0f;
    return halvings * 0.693147182464599609375f + (t + t) * series;
}

// At most the noise of words: of a word in the upper half its share, and ln 2 below; a little less, for rounding.
INLINE F least_of(U words, F small) {
    return either((U)((I)words >> 31), small * (0x1p-32f * 0.9999f), splat(0.6931f));
}

// Weights i to i + 2 W, of which those behind n are 0.
INLINE void pair_of(const float* weights, int64_t i, int64_t n, F& even, F& odd) {
    if (i + 2 * W <= n) {
        F a = load<F>(weights + i), b = load<F>(weights + i + W);
        even = evens(a, b), odd = odds(a, b);
        return;
    }
    float rest[2 * W] = {};
    memcpy(rest, weights + i, size_t(n - i) * sizeof(float));
    F a = load<F>(rest), b = load<F>(rest + W);
    even = evens(a, b), odd = odds(a, b);
}

// The codes that have a weight and their weights, with 0 behind them up to 2 W; returns how many, or -1 where they are not
// few enough that noise of them alone, half of each block left unused, takes less time than that of all.
INLINE int64_t few_weighted(Scratch& scratch, const float* weights, int64_t n, uint32_t*& codes, float*& found) {
    int64_t bound = (n + n / 8) / 3 + W, many = 0;
    codes = scratch.take<uint32_t>(2 * size_t(bound + 3 * W));
    found = (float*)(codes + bound + 3 * W);
    U lanes = counters();
    auto take = [&](F p, int64_t i) INLINE_LAMBDA {
        many += put_chosen((U)(p > 0.0f), p, lanes + uint32_t(i), found + many, codes + many);
    };
    int64_t i = 0;
    for (; i + W <= n; i += W) {
        take(load<F>(weights + i), i);
        if (3 * many > i + n / 8) return -1;
    }
    if (i < n) {
        float rest[W] = {};
        memcpy(rest, weights + i, size_t(n - i) * sizeof(float));
        take(load<F>(rest), i);
    }
    for (int64_t i = 0; i < 2 * W; i += W) put(codes + many + i, U{}), put(found + many + i, F{});
    return many;
}

// The largest of scores so far, by lane and half, and its code.
struct Best {
    F score[2] = {}, bar{};
    U code[2] = {};

    INLINE_MEMBER void offer(const F (&p)[2], const U (&words)[2], const U (&codes)[2]) {
        F small[2] = {small_of(words[0]), small_of(words[1])};
        // What cannot come near the best so far needs no logarithm.
        U near = (U)(p[0] > bar * least_of(words[0], small[0])) | (U)(p[1] > bar * least_of(words[1], small[1]));
        if (!any(near)) return;
        for (int half = 0; half < 2; ++half) {
            F one = p[half] / exponential_of(words[half], small[half]);
            U more = (U)(one > score[half]);
            score[half] = either(more, one, score[half]);
            code[half] = (codes[half] & more) | (code[half] & ~more);
        }
        float most = 0;
        F top = larger(score[0], score[1]);
        for (int j = 0; j < W; ++j) most = most > top[j] ? most : top[j];
        bar = splat(most);
    }

    INLINE_MEMBER int64_t winner() const {
        float most = 0;
        uint32_t first = 0;
        for (int half = 0; half < 2; ++half)
            for (int j = 0; j < W; ++j) {
                float one = score[half][j];
                if (one > most || (one == most && most > 0 && code[half][j] < first)) most = one, first = code[half][j];
            }
        return first;
    }
};

}  // namespace

int64_t OF_UNIT(race)(const float* weights, int64_t n, const int32_t* key, int64_t position) {
    Key at(key, position);
    Best best;
    Scratch scratch;
    uint32_t* some;
    float* found;
    int64_t many = few_weighted(scratch, weights, n, some, found);
    for (int64_t i = 0; i < many; i += 2 * W) {
        F p[2] = {load<F>(found + i), load<F>(found + i + W)};
        U codes[2] = {load<U>(some + i), load<U>(some + i + W)}, words[2];
        for (int half = 0; half < 2; ++half) {
            U even, odd;
            at.words((codes[half] >> 1) | at.base, even, odd);
            words[half] = even ^ ((even ^ odd) & -(codes[half] & 1u));
        }
        best.offer(p, words, codes);
    }
    U lanes = counters();
    for (int64_t i = 0; i < n && many < 0; i += 2 * W) {
        F p[2];
        pair_of(weights, i, n, p[0], p[1]);
        if (!any((U)(p[0] > 0.0f) | (U)(p[1] > 0.0f))) continue;
        U block = lanes + uint32_t(i / 2), words[2], codes[2] = {block * 2u, block * 2u + 1u};
        at.words(block | at.base, words[0], words[1]);
        best.offer(p, words, codes);
    }
    return best.winner();
}

void OF_UNIT(perturb)(const float* weights, int64_t n, const int32_t* key, int64_t position, float* out) {
    Key at(key, position);
    U lanes = counters();
    for (int64_t i = 0; i < n; i += 2 * W) {
        F p[2];
        pair_of(weights, i, n, p[0], p[1]);
        F scores[2] = {};
        if (any((U)(p[0] > 0.0f) | (U)(p[1] > 0.0f))) {
            U words[2];
            at.words((lanes + uint32_t(i / 2)) | at.base, words[0], words[1]);
            for (int odd = 0; odd < 2; ++odd) scores[odd] = p[odd] / exponential_of(words[odd], small_of(words[odd]));
        }
        float rest[2 * W];
        put(rest, zip_low(scores[0], scores[1]));
        put(rest + W, zip_high(scores[0], scores[1]));
        memcpy(out + i, rest, size_t(n - i < 2 * W ? n - i : 2 * W) * sizeof(float));
    }
}
