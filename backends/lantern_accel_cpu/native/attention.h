// Attention over the slots that are visible; the others are not read.
#pragma once

#include <type_traits>

#include "small.h"
#ifdef DOT_PRODUCTS
#include "pairs.h"
#endif
#ifdef TILES
#include "tiled.h"
#include "tiled_attention.h"
#endif

struct Seen {
    // Of row r: the slots that any of its queries sees, slots[r * capacity ...], how many they are, and for
    // each query t 1 or 0 in keep[(r * count + t) * padded + i]. Padded to whole vectors with slot 0, 0.
    int32_t *slots, *found, *row_of;  // row_of: whose keys and values a row reads
    float* keep;
    int32_t* open;  // [r * count + t]: so many of the first slots query t sees without a gap
    int64_t padded;
    int32_t capacity;
};

namespace {

constexpr int QUERIES = 16;  // of one chunk at most

// Lists for so many rows of `count` queries over `capacity` slots, not filled.
Seen lists(Scratch& scratch, int32_t rows, int32_t count, int32_t capacity) {
    Seen s;
    s.capacity = (capacity + W - 1) / W * W;
    s.padded = s.capacity;
    size_t all = size_t(rows) * s.capacity;
    s.slots = scratch.take<int32_t>(all + (2 + size_t(count)) * size_t(rows));
    s.found = s.slots + all;
    s.row_of = s.found + rows;
    s.open = s.row_of + rows;
    s.keep = scratch.take<float>(size_t(rows) * count * s.padded);
    return s;
}

Seen seen(Scratch& scratch, const Mask& mask) {
    Seen s = lists(scratch, mask.rows, mask.count, mask.capacity);
    for (int32_t r = 0; r < mask.rows; ++r) {
        const uint8_t* row = mask.bytes + r * mask.row;
        int32_t* slots = s.slots + int64_t(r) * s.capacity;
        int32_t found = 0;
        for (int32_t slot = 0; slot < mask.capacity; ++slot) {
            uint8_t any = 0;
            for (int32_t t = 0; t < mask.count; ++t) any |= row[t * mask.query + slot];
            slots[found] = slot;
            found += any != 0;
        }
        s.found[r] = found;
        s.row_of[r] = r;
        int32_t whole = (found + W - 1) / W * W;
        for (int32_t i = found; i < whole; ++i) slots[i] = found ? slots[0] : 0;
        for (int32_t t = 0; t < mask.count; ++t) {
            float* keep = s.keep + (int64_t(r) * mask.count + t) * s.padded;
            for (int32_t i = 0; i < whole; ++i)
                keep[i] = i < found && row[t * mask.query + slots[i]] ? 1.0f : 0.0f;
        }
    }
    return s;
}

// Count the slots that queries of these rows see without a gap, where attention asks for it.
INLINE void count_open([[maybe_unused]] const Seen& s, [[maybe_unused]] int32_t rows, [[maybe_unused]] int32_t count) {
#ifdef TILES
    for (int32_t r = 0; r < rows; ++r)
        for (int64_t q = int64_t(r) * count; q < int64_t(r + 1) * count; ++q) {
            const float* keep = s.keep + q * s.padded;
            int32_t open = 0;
            while (open < s.found[r] && keep[open] != 0) ++open;
            s.open[q] = open;
        }
#endif
}

// Put the rows that see anything in front; returns how many they are.
INLINE int32_t gather_seeing(Seen& s, int32_t rows, int32_t count) {
    int32_t seeing = 0;
    for (int32_t r = 0; r < rows; ++r) {
        if (!s.found[r]) continue;
        if (seeing != r) {
            memcpy(s.slots + int64_t(seeing) * s.capacity, s.slots + int64_t(r) * s.capacity,
                   size_t(s.capacity) * sizeof(int32_t));
            memcpy(s.keep + int64_t(seeing) * count * s.padded, s.keep + int64_t(r) * count * s.padded,
                   size_t(count) * size_t(s.padded) * sizeof(float));
            s.found[seeing] = s.found[r];
            s.row_of[seeing] = s.row_of[r];
        }
        ++seeing;
    }
    return seeing;
}

// Vectors of 2 W elements as they are multiplied: pairs apart for bfloat16, neighbours for float32.
INLINE void two(const bf16* p, F& a, F& b) {
    U pairs = load<U>(p);
    a = lower(pairs);
    b = upper(pairs);
}
INLINE void two(const float* p, F& a, F& b) {
    a = load<F>(p);
    b = load<F>(p + W);
}
INLINE void two_apart(const bf16*, F& a, F& b) {
    F x = evens(a, b), y = odds(a, b);
    a = x, b = y;
}
INLINE void two_apart(const float*, F&, F&) {}
INLINE void two_together(const bf16*, F& a, F& b) {
    F x = zip_low(a, b), y = zip_high(a, b);
    a = x, b = y;
}
INLINE void two_together(const float*, F&, F&) {}

// Scores of Q queries with W / Q slots, q and k in the order of two().
template <int Q, class T>
INLINE void scores(const float* q, int64_t d, const T* k, const int32_t* slots, int64_t stride, float* out,
                   int64_t ldo) {
    constexpr int S = W / Q;
    F acc[W];
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i) acc[i] = F{};
    const T* at[S];
#pragma GCC unroll 16
    for (int s = 0; s < S; ++s) at[s] = k + slots[s] * stride;
    for (int64_t c = 0; c < d; c += 2 * W) {
#pragma GCC unroll 16
        for (int s = 0; s < S; ++s) {
            F a, b;
            two(at[s] + c, a, b);
#pragma GCC unroll 4
            for (int t = 0; t < Q; ++t) {
                acc[t * S + s] += a * load<F>(q + t * d + c);
                acc[t * S + s] += b * load<F>(q + t * d + c + W);
            }
        }
    }
    float all[W];
    put(all, sums(acc));
#pragma GCC unroll 4
    for (int t = 0; t < Q; ++t) memcpy(out + t * ldo, all + t * S, S * sizeof(float));
}

// `then`: what is read next, of the same slots.
template <int Q, class T>
void all_scores(const float* q, int64_t d, const T* k, const T* then, const int32_t* slots, int64_t n, int64_t stride,
                float* out, int64_t ldo) {
    for (int64_t i = 0; i < n; i += W / Q) {
        soon(then, slots + i, W / Q, stride, d);
        scores<Q>(q, d, k, slots + i, stride, out + i, ldo);
    }
}

// Sum of values weighted by p [M][n]: C times 2 W columns. `then` as above.
template <int M, int C, class T, class A>
void values(const float* p, int64_t ldp, const T* v, const T* then, const int32_t* slots, int64_t n, int64_t stride,
            const float* scale, A* out, int64_t ldo) {
    F first[M][C], second[M][C];
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
        for (int c = 0; c < C; ++c) first[m][c] = second[m][c] = F{};
    for (int64_t i = 0; i < n; ++i) {
        F a[C], b[C];
        soon(then, slots + i, 1, stride, C * 2 * W);
#pragma GCC unroll 2
        for (int c = 0; c < C; ++c) two(v + slots[i] * stride + c * 2 * W, a[c], b[c]);
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) {
            F x = splat(p[m * ldp + i]);
#pragma GCC unroll 2
            for (int c = 0; c < C; ++c) {
                first[m][c] += x * a[c];
                second[m][c] += x * b[c];
            }
        }
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
        for (int c = 0; c < C; ++c) {
            two_together(v, first[m][c], second[m][c]);
            put(out + m * ldo + c * 2 * W, first[m][c] * scale[m]);
            put(out + m * ldo + c * 2 * W + W, second[m][c] * scale[m]);
        }
}

// Queries whose sums the registers hold, of 2 W columns; half as many of 4 W, which wait for themselves less.
constexpr int TOGETHER = WIDTH == 16 ? 8 : 4;

template <int M, int C, class T, class A>
INLINE void pick_values(int m, const float* p, int64_t ldp, const T* v, const T* then, const int32_t* slots, int64_t n,
                        int64_t stride, const float* scale, A* out, int64_t ldo) {
    if (m == M)
        values<M, C>(p, ldp, v, then, slots, n, stride, scale, out, ldo);
    else if constexpr (M > 1)
        pick_values<M - 1, C>(m, p, ldp, v, then, slots, n, stride, scale, out, ldo);
}

// Where a product's inputs are made: a row's numbers one after the other, or in its tiles.
template <class A> struct Made {
    A* rows;
    int64_t stride;
#ifdef TILES
    TileRows tiles = {};
#endif
    INLINE_MEMBER bool in_tiles() const {
#ifdef TILES
        return tiles.tiles;
#else
        return false;
#endif
    }
    INLINE_MEMBER A* at(int64_t row, int64_t column) const {
#ifdef TILES
        if (in_tiles()) return (A*)tiles.row(row, 0) + tiles.at(column);
#endif
        return rows + row * stride + column;
    }
};

// Queries [from, to) of one row and head. q: float32 [count][q_stride ...], scaled; out: from its row `first` on, a query
// each, and from `column` on. `far`: keys and values are in no cache.
template <class T, class A>
void attend_head(const float* q, int64_t q_stride, const T* k, const T* v, const Cache& cache, const Seen& s,
                 int32_t row, int32_t count, int32_t from, int32_t to, const Made<A>& mixed, int64_t first, int64_t column, bool far) {
    int64_t d = cache.width, n = s.found[row], whole = (n + W - 1) / W * W;
    const int32_t* slots = s.slots + int64_t(row) * s.capacity;
    const T* after = k + cache.head;  // the next head's keys
    int32_t m = to - from;
#ifdef TILES
    if constexpr (std::is_same<T, bf16>::value)
        if (d % DEEP == 0) {
            const float* keep = s.keep + (int64_t(row) * count + from) * s.padded;
            attend_tiles(q + from * q_stride, q_stride, k, v, after, d, cache.slot, slots, n, keep, s.padded,
                         s.open + int64_t(row) * count + from, m,
                         [&](int64_t t, int64_t c) INLINE_LAMBDA { return mixed.at(first + from + t, column + c); });
            return;
        }
#elif defined(DOT_PRODUCTS)
    if constexpr (std::is_same<T, bf16>::value)
        if (d % (2 * W) == 0) {
            const float* keep = s.keep + (int64_t(row) * count + from) * s.padded;
            attend_pairs(q + from * q_stride, q_stride, k, v, after, d, cache.slot, slots, n, keep, s.padded, m,
                         mixed.at(first + from, column), mixed.stride, far);
            return;
        }
#endif
    Scratch scratch;
    A* out = mixed.at(first, column);
    int64_t out_stride = mixed.stride;
    float* work = scratch.take<float>(QUERIES * d + QUERIES * s.padded);
    float *turned = work, *p = work + QUERIES * d, scale[QUERIES];
    bool fast = d % (2 * W) == 0;
    if (fast) {
        for (int32_t t = 0; t < m; ++t)
            for (int64_t c = 0; c < d; c += 2 * W) {
                F a = load<F>(q + (from + t) * q_stride + c), b = load<F>(q + (from + t) * q_stride + c + W);
                two_apart(k, a, b);
                put(turned + t * d + c, a);
                put(turned + t * d + c + W, b);
            }
        int32_t t = 0;
        for (; t + 4 <= m; t += 4)
            all_scores<4>(turned + t * d, d, k, v, slots, whole, cache.slot, p + t * s.padded, s.padded);
        if (t + 2 <= m) {
            all_scores<2>(turned + t * d, d, k, v, slots, whole, cache.slot, p + t * s.padded, s.padded);
            t += 2;
        }
        if (t < m) all_scores<1>(turned + t * d, d, k, v, slots, whole, cache.slot, p + t * s.padded, s.padded);
    } else {
        for (int32_t t = 0; t < m; ++t)
            for (int64_t i = 0; i < whole; ++i) {
                float sum = 0;
                for (int64_t c = 0; c < d; ++c)
                    sum += q[(from + t) * q_stride + c] * value(k[slots[i] * cache.slot + c]);
                p[t * s.padded + i] = sum;
            }
    }
    for (int32_t t = 0; t < m; ++t)
        scale[t] = soften(p + t * s.padded, s.keep + (int64_t(row) * count + from + t) * s.padded, whole);
    if (fast) {
        int32_t blocks = (m + TOGETHER - 1) / TOGETHER;
        for (int32_t b = 0; b < blocks; ++b) {
            int32_t t = m * b / blocks, some = m * (b + 1) / blocks - t;
            int64_t c = 0;
            for (; some <= TOGETHER / 2 && c + 4 * W <= d; c += 4 * W)
                pick_values<TOGETHER / 2, 2>(some, p + t * s.padded, s.padded, v + c, after + c, slots, n, cache.slot,
                                             scale + t, out + (from + t) * out_stride + c, out_stride);
            for (; c < d; c += 2 * W)
                pick_values<TOGETHER, 1>(some, p + t * s.padded, s.padded, v + c, after + c, slots, n, cache.slot,
                                         scale + t, out + (from + t) * out_stride + c, out_stride);
        }
        return;
    }
    for (int32_t t = 0; t < m; ++t)
        for (int64_t c = 0; c < d; ++c) {
            float sum = 0;
            for (int64_t i = 0; i < n; ++i) sum += p[t * s.padded + i] * value(v[slots[i] * cache.slot + c]);
            put1(out + (from + t) * out_stride + c, sum * scale[t]);
        }
}

// One chunk: a row, a head and up to QUERIES of its queries.
INLINE int attend_chunks(const Cache& cache, const Mask& mask) {
    return mask.rows * cache.heads * ((mask.count + QUERIES - 1) / QUERIES);
}

template <class T, class A>
void attend_chunk(const float* q, const T* k, const T* v, const Cache& cache, const Mask& mask, const Seen& s,
                  int chunk, const Made<A>& mixed, bool far) {
    int32_t blocks = (mask.count + QUERIES - 1) / QUERIES, block = chunk % blocks;
    int32_t head = chunk / blocks % cache.heads, row = chunk / blocks / cache.heads;
    int32_t from = mask.count * block / blocks, to = mask.count * (block + 1) / blocks;
    int64_t first = int64_t(row) * mask.count, d = cache.width, wide = cache.heads * d;
    int64_t at = s.row_of[row] * cache.row + head * cache.head;
    attend_head(q + first * wide + head * d, wide, k + at, v + at, cache, s, row, mask.count, from, to, mixed, first, head * d,
                far);
}

template <class T> struct AttendJob {
    const Attend* given;
    const float* q;
    Seen s;
    static int chunks(void* self, int) {
        const Attend& g = *((AttendJob*)self)->given;
        return attend_chunks(g.cache, g.mask);
    }
    static void work(void* self, int, int chunk) {
        AttendJob& job = *(AttendJob*)self;
        const Attend& g = *job.given;
        Made<T> mixed{(T*)g.out, int64_t(g.cache.heads) * g.cache.width};
        attend_chunk(job.q, (const T*)g.k, (const T*)g.v, g.cache, g.mask, job.s, chunk, mixed, false);
    }
};

template <class T> void attend_of(const Attend& g) {
    AttendJob<T> job;
    int64_t size = int64_t(g.mask.rows) * g.mask.count * g.cache.heads * g.cache.width;
    Scratch scratch;
    float* q = scratch.take<float>(size);
    float scale = 1.0f / sqrtf(float(g.cache.width));
    const T* from = (const T*)g.q;
    for (int64_t i = 0; i < size; ++i) q[i] = value(from[i]) * scale;
    job.given = &g;
    job.q = q;
    job.s = seen(scratch, g.mask);
    count_open(job.s, g.mask.rows, g.mask.count);
    bool small = size * job.s.found[0] < (1 << 17);
    pool_run(Job{&job, AttendJob<T>::work, nullptr, AttendJob<T>::chunks, 1}, small);
}

void attend(const Attend& g) {
    if (g.dtype == BFLOAT16)
        attend_of<bf16>(g);
    else
        attend_of<float>(g);
}

}  // namespace
