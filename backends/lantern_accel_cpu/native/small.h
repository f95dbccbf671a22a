// The small kernels between products: norm, SwiGLU, rotation with the cache's write.
#pragma once

#include "native.h"
#include "vector.h"

namespace {

// y = x / rms(x) * weight, in float32 throughout.
template <class X, class G, class Y> void norm_row(const X* x, const G* weight, float eps, int64_t n, Y* y) {
    F squares[4] = {};  // one sum would wait for itself
    float rest = 0;
    int64_t i = 0;
    for (; i + 4 * W <= n; i += 4 * W)
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
            F v = get(x + i + j * W);
            squares[j] += v * v;
        }
    for (; i + W <= n; i += W) {
        F v = get(x + i);
        squares[0] += v * v;
    }
    for (; i < n; ++i) rest += value(x[i]) * value(x[i]);
    float all = total((squares[0] + squares[1]) + (squares[2] + squares[3])) + rest;
    float scale = 1.0f / sqrtf(all / float(n) + eps);
    for (i = 0; i + W <= n; i += W) put(y + i, get(x + i) * scale * get(weight + i));
    for (; i < n; ++i) put1(y + i, value(x[i]) * scale * value(weight[i]));
}

template <class T> void rms_norm_of(const T* x, const T* weight, float eps, int64_t m, int64_t n, T* y) {
    for (int64_t r = 0; r < m; ++r) norm_row(x + r * n, weight, eps, n, y + r * n);
}

void rms_norm(const void* x, const void* weight, float eps, int64_t m, int64_t n, void* y, int32_t dtype) {
    if (dtype == BFLOAT16)
        rms_norm_of((const bf16*)x, (const bf16*)weight, eps, m, n, (bf16*)y);
    else
        rms_norm_of((const float*)x, (const float*)weight, eps, m, n, (float*)y);
}

// y = silu(gate) * up, of gates and ups times a scale.
template <class X, class Y> void swiglu_row(const X* gate, const X* up, int64_t n, Y* y, float scale = 1.0f) {
    int64_t i = 0;
    for (; i + W <= n; i += W) put(y + i, silu<Y>(get(gate + i) * scale) * (get(up + i) * scale));
    if (i >= n) return;
    float g[W] = {}, u[W] = {}, out[W];
    int64_t rest = n - i < W ? n - i : W;
    for (int64_t j = 0; j < rest; ++j) g[j] = value(gate[i + j]), u[j] = value(up[i + j]);
    put(out, silu<Y>(get(g) * scale) * (get(u) * scale));
    for (int64_t j = 0; j < rest; ++j) put1(y + i + j, out[j]);
}

void swiglu(const void* x, int64_t m, int64_t hidden, void* y, int32_t dtype) {
    for (int64_t r = 0; r < m; ++r)
        if (dtype == BFLOAT16) {
            const bf16* row = (const bf16*)x + r * 2 * hidden;
            swiglu_row(row, row + hidden, hidden, (bf16*)y + r * hidden);
        } else {
            const float* row = (const float*)x + r * 2 * hidden;
            swiglu_row(row, row + hidden, hidden, (float*)y + r * hidden);
        }
}

// Cosines and sines of all M queries as a rotation of adjacent pairs takes them, [M][d] each:
// y = x * turn + swapped(x) * cross.
struct Turns {
    float *turn, *cross;
};

INLINE Turns turns(Scratch& scratch, const Rotary& rotary, int64_t queries, int32_t count, int32_t width) {
    Turns t;
    t.turn = scratch.take<float>(2 * queries * width);
    t.cross = t.turn + queries * width;
    int32_t half = width / 2;
    for (int64_t m = 0; m < queries; ++m) {
        int64_t from = m / count * rotary.row + m % count * half;
        for (int32_t j = 0; j < half; ++j) {
            int64_t to = m * width + 2 * j;
            t.turn[to] = t.turn[to + 1] = rotary.cos[from + j];
            t.cross[to + 1] = rotary.sin[from + j];
            t.cross[to] = -rotary.sin[from + j];
        }
    }
    return t;
}

// Rotate n neighbours, an even number, times a scale.
template <class X, class Y>
INLINE void rotate(const X* x, const float* turn, const float* cross, int64_t n, float scale, Y* y) {
    int64_t i = 0;
    for (; i + W <= n; i += W) {
        F v = get(x + i);
        put(y + i, (v * load<F>(turn + i) + swapped(v) * load<F>(cross + i)) * scale);
    }
    for (; i < n; i += 2) {
        float a = value(x[i]), b = value(x[i + 1]);
        put1(y + i, (a * turn[i] + b * cross[i]) * scale);
        put1(y + i + 1, (b * turn[i + 1] + a * cross[i + 1]) * scale);
    }
}

template <class X, class Y> INLINE void copy(const X* x, int64_t n, Y* y, float scale = 1.0f) {
    int64_t i = 0;
    for (; i + W <= n; i += W) put(y + i, get(x + i) * scale);
    for (; i < n; ++i) put1(y + i, value(x[i]) * scale);
}

// Ask for rows of memory that are read soon: caches come from main memory, one head's piece after the other.
template <class T> INLINE void soon(const T* rows, const int32_t* slots, int count, int64_t stride, int64_t d) {
    if (stride == d && slots[count - 1] - slots[0] == count - 1) {  // in one piece
        const char *at = (const char*)(rows + slots[0] * d), *end = at + count * d * int64_t(sizeof(T));
        for (; at < end; at += 64) __builtin_prefetch(at, 0, 2);
        return;
    }
    for (int s = 0; s < count; ++s)
        for (int64_t c = 0; c < d; c += 64 / int64_t(sizeof(T))) __builtin_prefetch(rows + slots[s] * stride + c, 0, 2);
}

// Keys of W slots across: lane s of vector j is pair j of slot s.
INLINE void keys_across(const bf16* k, const int32_t* slots, int64_t stride, int64_t pairs, uint32_t* out) {
    for (int64_t first = 0; first < pairs; first += W) {
        F a[W];
#pragma GCC unroll 16
        for (int s = 0; s < W; ++s) a[s] = load<F>(k + slots[s] * stride + 2 * first);
        transpose(a);
#pragma GCC unroll 16
        for (int j = 0; j < W; ++j) memcpy(out + (first + j) * W, &a[j], sizeof(F));
    }
}

template <class T> void rotate_write_of(const RotateWrite& g) {
    int64_t queries = int64_t(g.rows) * g.count;
    int32_t d = g.cache.width, heads = g.cache.heads;
    int64_t wide = int64_t(heads) * d;
    Scratch scratch;
    Turns t = turns(scratch, g.rotary, queries, g.count, d);
    for (int64_t m = 0; m < queries; ++m) {
        const T* x = (const T*)g.qkv + m * 3 * wide;
        int64_t to = m / g.count * g.cache.row + g.slots[m] * g.cache.slot;
        for (int32_t h = 0; h < heads; ++h) {
            const float *turn = t.turn + m * d, *cross = t.cross + m * d;
            rotate(x + h * d, turn, cross, d, 1.0f, (T*)g.q + m * wide + h * d);
            rotate(x + wide + h * d, turn, cross, d, 1.0f, (T*)g.k + to + h * g.cache.head);
            copy(x + 2 * wide + h * d, d, (T*)g.v + to + h * g.cache.head);
        }
    }
}

void rotate_write(const RotateWrite& g) {
    if (g.dtype == BFLOAT16)
        rotate_write_of<bf16>(g);
    else
        rotate_write_of<float>(g);
}

// Softmax of kept scores, unnormalised; returns 1 / sum, or 0 where nothing is kept.
INLINE float soften(float* p, const float* keep, int64_t n) {
    F most = splat(-3e38f);
    for (int64_t i = 0; i < n; i += W) {
        F s = load<F>(p + i) + (load<F>(keep + i) - 1.0f) * 1e30f;
        most = larger(most, s);
    }
    float top = largest(most);
    F sum{};
    for (int64_t i = 0; i < n; i += W) {
        F e = exponential(load<F>(p + i) - top) * load<F>(keep + i);
        put(p + i, e);
        sum += e;
    }
    float all = total(sum);
    return all > 0 ? 1.0f / all : 0.0f;
}

}  // namespace
