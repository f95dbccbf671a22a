// One instruction set's code: compiled once for each, with its flags and
// -DUNIT=<name> -DWIDTH=<floats of a register> [-DDOT_PRODUCTS] [-DTILES]. Nothing is computed when the library is loaded: that would
// run one unit's instructions on a processor that needs another unit.
#include "advance.h"
#include "beam.h"
#include "choose.h"
#include "copy.h"

namespace {

// Reads memory as a product of one row does; what comes back depends on every byte.
uint64_t read(const void* p, size_t bytes) {
    const uint32_t* from = (const uint32_t*)p;
    U a{}, b{}, c{}, d{};
    for (size_t i = 0; i + 4 * W <= bytes / 4; i += 4 * W) {
        __builtin_prefetch(from + i + 512);
        a ^= load<U>(from + i);
        b ^= load<U>(from + i + W);
        c ^= load<U>(from + i + 2 * W);
        d ^= load<U>(from + i + 3 * W);
    }
    a ^= b ^ c ^ d;
    uint64_t all = 0;
    for (int i = 0; i < W; ++i) all += a[i];
    return all;
}

// Chains of multiply-adds in registers: the rate that products can come near to.
constexpr int CHAINS = 12;
double multiply(int64_t rounds) {
    F acc[CHAINS], x = splat(1.0f - 0x1p-20f), y = splat(0x1p-20f);
    for (int i = 0; i < CHAINS; ++i) acc[i] = splat(float(i));
    for (int64_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 12
        for (int i = 0; i < CHAINS; ++i) acc[i] = acc[i] * x + y;
    }
    float sum = 0;
    for (int i = 0; i < CHAINS; ++i) sum += total(acc[i]);
    return sum;
}

#ifdef TILES
void multiply_by_tiles_from(int rows) {
    for (auto& one : borders) one = rows;
}
#else
constexpr void (*multiply_by_tiles_from)(int) = nullptr;
#endif

}  // namespace

#ifdef WORD_PRODUCTS
#define TAKES_WORDS 1
#else
#define TAKES_WORDS 0
#endif
#define NAMED2(x) unit_##x
#define NAMED(x) NAMED2(x)
#define TEXT2(x) #x
#define TEXT(x) TEXT2(x)

extern const Unit NAMED(UNIT);
const Unit NAMED(UNIT) = {
    TEXT(UNIT), linear, OF_UNIT(copy), attend, rotate_write, rms_norm, swiglu, trunk, window_pass, guide, filter, draw,
    accept, advance, race, perturb, choose, advance_chosen, fresh_guesses, likeliest, tree_step, read, multiply, CHAINS * W, TAKES_WORDS, multiply_by_tiles_from,
};
