// One instruction set's code: compiled once for each, with its flags and
// -DUNIT=<name> -DWIDTH=<floats of a register> [-DDOT_PRODUCTS] [-DTILES]. Nothing is computed when the library is loaded: that would
// run one unit's instructions on a processor that needs another unit.
#include "advance.h"
#include "beam.h"
#include "choose.h"
#include "copy.h"

namespace {

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
    accept, advance, race, perturb, choose, advance_chosen, fresh_guesses, likeliest, tree_step, TAKES_WORDS, multiply_by_tiles_from,
};
