// The C interface, and the choice of a unit at run time.
#include "native.h"

#include <algorithm>
#include <cmath>
#include <string.h>

// -DUNITS="ONE(avx512) ONE(plain)": the units that are linked in, the best first.
#define ONE(name) extern const Unit unit_##name;
UNITS
#undef ONE

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

// Units of this library, the best first.
const Unit* const units[] = {
#define ONE(name) &unit_##name,
    UNITS
#undef ONE
};
const Unit* unit = nullptr;

#if defined(__x86_64__)
struct Leaf {
    uint32_t a = 0, b = 0, c = 0, d = 0;
    Leaf(uint32_t leaf, uint32_t sub) {
        if (leaf <= __get_cpuid_max(0, nullptr)) __cpuid_count(leaf, sub, a, b, c, d);
    }
};

// Linux saves tiles only of processes that asked for it; threads and children have what their parent was given.
bool permits_tiles() {
#ifdef SYS_arch_prctl
    constexpr int ASK = 0x1023, GIVEN = 0x1022, TILES = 18;
    unsigned long given = 0;
    return !syscall(SYS_arch_prctl, ASK, TILES) && !syscall(SYS_arch_prctl, GIVEN, &given) && (given >> TILES & 1);
#else
    return false;
#endif
}

bool runs(const char* name) {
    Leaf one(1, 0), seven(7, 0), more(7, 1);
    if (!strcmp(name, "plain")) return true;
    // What the system saves when it switches threads: 6 for AVX, 0xe6 for AVX-512.
    uint32_t low = 0, high = 0;
    if (one.c >> 27 & 1) asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    bool avx2 = (low & 6) == 6 && (one.c >> 12 & 1) && (seven.b >> 5 & 1);
    bool avx512 = avx2 && (low & 0xe6) == 0xe6 && (seven.b >> 16 & 1) && (seven.b >> 17 & 1) &&
                  (seven.b >> 30 & 1) && (seven.b >> 31 & 1);
    if (!strcmp(name, "avx2") || strstr(name, "emulated")) return avx2;
    if (!strcmp(name, "avx512")) return avx512;
    bool pairs = avx512 && (more.a >> 5 & 1);
    if (!strcmp(name, "avx512bf16")) return pairs;
    if (!strcmp(name, "amx"))  // with look-ups of bytes, and their products
        return pairs && (seven.c >> 1 & 1) && (seven.c >> 11 & 1) && (seven.d >> 22 & 1) && (seven.d >> 24 & 1) &&
               (seven.d >> 25 & 1) && permits_tiles();
    return false;
}
#else
bool runs(const char*) { return true; }  // NEON belongs to every 64-bit ARM
#endif

// Panels are packed by threads, each a chunk.
template <class Body> void for_panels(int64_t n, Body body) {
    struct Each {
        Body& body;
        int64_t n;
        static int chunks(void* self, int) { return int((((Each*)self)->n + PANEL - 1) / PANEL); }
        static void work(void* self, int, int chunk) { ((Each*)self)->body(int64_t(chunk)); }
    } job{body, n};
    pool_run(Job{&job, Each::work, nullptr, Each::chunks, 1}, n <= PANEL);
}

// Panels of numbers in groups of G along a row, to zeros: a cache line of each row at a time, so that both
// sides of what is turned stay in the cache.
template <int G, class T> void pack(const T* w, int64_t ldw, int64_t k, int64_t n, T* to) {
    const int64_t line = 64 / sizeof(T), size = (k + G - 1) / G * G * PANEL;
    for_panels(n, [&](int64_t p) {
        T* out = to + p * size;
        for (int64_t at = 0; at < k; at += line)
            for (int64_t c = 0, rows = std::min<int64_t>(PANEL, n - p * PANEL); c < rows; ++c) {
                const T* row = w + (p * PANEL + c) * ldw;
                int64_t i = at, end = std::min(at + line, k);
                for (; i + G <= end; i += G) memcpy(out + i * PANEL + c * G, row + i, G * sizeof(T));
                if (i < end) out[i * PANEL + c * G] = row[i];
            }
    });
}

float value_of(uint16_t bits) {
    uint32_t whole = uint32_t(bits) << 16;
    float x;
    memcpy(&x, &whole, 4);
    return x;
}

// A row of bfloat16 in whole numbers below 2^14: the step that they count, which is no number where a weight is none.
float word_step(const uint16_t* row, int64_t k) {
    float most = 0;
    for (int64_t i = 0; i < k; ++i) {
        float size = std::fabs(value_of(row[i]));
        if (!(size <= 3.4e38f)) return NAN;
        most = std::max(most, size);
    }
    int exponent;
    std::frexp(most, &exponent);
    return std::ldexp(1.0f, std::max(exponent, -100) - 14);
}

// Panels of WORDS, each of which begins with its steps.
void pack_words(const uint16_t* w, int64_t ldw, int64_t k, int64_t n, char* to) {
    int64_t deep = (k + 1) / 2;
    for_panels(n, [&](int64_t p) {
        char* out = to + p * (PANEL * 4 + deep * PANEL * 4);
        float* steps = (float*)out;
        int16_t* codes = (int16_t*)(out + PANEL * 4);
        for (int64_t c = 0; c < PANEL; ++c) {
            int64_t row = p * PANEL + c;
            bool there = row < n;
            float step = steps[c] = there ? word_step(w + row * ldw, k) : 1.0f;
            float turn = step == step ? 1.0f / step : 0.0f;
            for (int64_t i = 0; i < 2 * deep; ++i) {
                float x = there && i < k && turn != 0 ? value_of(w[row * ldw + i]) * turn : 0.0f;
                codes[(i / 2 * PANEL + c) * 2 + i % 2] = int16_t(std::lrint(x));
            }
        }
    });
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

// What it was built from.
EXPORT const char* lantern_sources() { return SOURCES; }

// Choose the unit of this name, or with "" the best that runs here; 0 where there is none.
EXPORT int lantern_select(const char* name) {
    for (const Unit* one : units)
        if ((!*name || !strcmp(name, one->name)) && runs(one->name)) {
            unit = one;
            return 1;
        }
    return 0;
}
EXPORT const char* lantern_selected() { return unit ? unit->name : ""; }
// Multiply by tiles from so many rows on, 0: as measured. Returns whether the unit has tiles.
EXPORT int lantern_tiles_from(int rows) {
    if (unit->tiles_from) unit->tiles_from(rows);
    return unit->tiles_from != nullptr;
}
EXPORT void lantern_threads(int threads) { pool_resize(threads); }

EXPORT void lantern_pack(const void* w, int64_t ldw, int64_t k, int64_t n, int32_t dtype, void* out) {
    if (dtype == BFLOAT16)
        pack<2>((const uint16_t*)w, ldw, k, n, (uint16_t*)out);
    else
        pack<1>((const float*)w, ldw, k, n, (float*)out);
}
// bfloat16 weights as WORDS, where the unit takes them so.
EXPORT int lantern_takes_words() { return unit->words; }
EXPORT void lantern_pack_words(const void* w, int64_t ldw, int64_t k, int64_t n, void* out) {
    pack_words((const uint16_t*)w, ldw, k, n, (char*)out);
}
// Store [rows][count][heads][width], elements of so many bytes, in slots of a layer's keys or values.
EXPORT void lantern_store(const Cache* cache, void* to, const void* from, const int64_t* slots, int32_t rows,
                          int32_t count, int32_t size) {
    const Cache& c = *cache;
    int64_t piece = c.width * size;
    for (int64_t m = 0; m < int64_t(rows) * count; ++m)
        for (int64_t h = 0; h < c.heads; ++h) {
            int64_t at = m / count * c.row + h * c.head + slots[m] * c.slot;
            memcpy((char*)to + at * size, (const char*)from + (m * c.heads + h) * piece, size_t(piece));
        }
}
EXPORT void lantern_linear(const Linear* given) { unit->linear(*given); }
EXPORT void lantern_copy(const Copy* given) { unit->copy(*given); }
EXPORT void lantern_attend(const Attend* given) { unit->attend(*given); }
EXPORT void lantern_rotate_write(const RotateWrite* given) { unit->rotate_write(*given); }
EXPORT void lantern_rms_norm(const void* x, const void* weight, float eps, int64_t m, int64_t n, void* y,
                             int32_t dtype) {
    unit->rms_norm(x, weight, eps, m, n, y, dtype);
}
EXPORT void lantern_swiglu(const void* x, int64_t m, int64_t hidden, void* y, int32_t dtype) {
    unit->swiglu(x, m, hidden, y, dtype);
}
EXPORT void lantern_trunk(const Trunk* given) { unit->trunk(*given); }
// Guided logits [B][span][V] of a pass over windows.
EXPORT void lantern_window_pass(const WindowPass* given, float* out) { unit->window_pass(*given, out); }
EXPORT void lantern_guide(const Guide* given) { unit->guide(*given); }
EXPORT void lantern_filter(const Filter* given, const float* logits, int64_t rows, int64_t n, float* out) {
    unit->filter(*given, logits, rows, n, out);
}
// Codes [rows][count] from weights [rows][n] and uniforms [rows][count], without replacement.
EXPORT void lantern_draw(const float* weights, const float* uniforms, int64_t rows, int64_t n, int64_t count,
                         int64_t* out) {
    unit->draw(weights, uniforms, rows, n, count, out);
}
EXPORT void lantern_accept(const Accept* given) { unit->accept(*given); }
// The likeliest codes of rows of weights and the logarithms of their shares, [rows][count].
EXPORT void lantern_likeliest(const float* weights, const float* luck, int64_t rows, int64_t each, int64_t n, int64_t count,
                              int64_t* codes, float* scores) {
    unit->likeliest(weights, luck, rows, each, n, count, codes, scores);
}

// One part of a tree's step.
EXPORT void lantern_tree_step(const TreeStep* given, int32_t part) { unit->tree_step(*given, part); }
// Codes [images][count] that win the races of weights [images][count][n], or all weights over noise.
EXPORT void lantern_race(const float* weights, const int32_t* keys, const int64_t* positions, int64_t images,
                         int64_t count, int64_t n, int64_t* out) {
    unit->race(weights, keys, positions, images, count, n, out);
}
EXPORT void lantern_perturb(const float* weights, const int32_t* keys, const int64_t* positions, int64_t images,
                            int64_t count, int64_t n, float* out) {
    unit->perturb(weights, keys, positions, images, count, n, out);
}
EXPORT void lantern_choose(const Choose* given) { unit->choose(*given); }
EXPORT void lantern_fresh_guesses(const AdvanceChosen* given) { unit->fresh_guesses(*given); }

EXPORT void lantern_advance_chosen(const AdvanceChosen* given, const float* logits) {
    unit->advance_chosen(*given, logits);
}
EXPORT void lantern_advance(const Advance* given, const float* logits) { unit->advance(*given, logits); }
