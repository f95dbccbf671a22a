// What the units (one an instruction set), the pool and the C interface share.
//
// "T" is a model's type, float32 or bfloat16 (see DType). Matrices are row-major. M is rows times
// positions of a pass, D a model's width, H heads of width d, F the feed-forward's width.
#pragma once

#include <stddef.h>
#include <stdint.h>

// A unit's function that is compiled by itself, as its bits must be the reference's: no product and sum may become one
// operation there.
#define OF_UNIT2(unit, name) unit##_##name
#define OF_UNIT1(unit, name) OF_UNIT2(unit, name)
#define OF_UNIT(name) OF_UNIT1(UNIT, name)

extern "C" {

enum DType : int32_t { FLOAT32 = 0, BFLOAT16 = 1 };

// Weights are kept in panels of PANEL output columns: float32 [panels][K][PANEL], bfloat16
// [panels][K / 2][PANEL][2], columns and K padded with zeros.
enum { PANEL = 32 };
// How a packed weight is kept. A pointer to one is its address, a multiple of 64, plus this. In fewer bits, with K
// padded with zeros:
// INT8: a panel is float32 [PANEL], the steps, then int8 [K / 4][PANEL][4].
// INT6, INT4: for every 64 inputs bfloat16 [PANEL], the steps, and [PANEL], the offsets, then codes in lanes of 32
// bits. INT4: [8][PANEL] lanes of 8 inputs, the even ones in the lower half. INT6: [4][3][PANEL], of 16 inputs first
// their lower 4 bits so, then their upper 2 bits in one lane: a byte of it has those of the same bytes of the two lanes
// below, the first one's in its lower half. DRAFTS is added where activations may be rounded as well (integers.h).
// WORDS are bfloat16 in whole numbers (words.h): float32 [PANEL], the steps, then int16 [K / 2][PANEL][2].
enum Kept : int32_t { WHOLE = 0, INT8 = 1, INT6 = 2, INT4 = 3, WORDS = 4, DRAFTS = 8 };

// Where keys and values lie, counted in elements: slot s of head h in row r of a layer begins at
// r * row + h * head + s * slot, and its d elements are neighbours.
struct Cache {
    int64_t row, head, slot;
    int32_t heads, width;
};

// Which slots each query of a pass sees: one byte a slot, [rows][count][capacity].
struct Mask {
    const uint8_t* bytes;
    int64_t row, query;  // strides in bytes
    int32_t rows, count, capacity;
};

struct Linear {
    const void* x;  // T [M][K], rows x_stride apart
    const void* weight;
    const void* bias;  // T [N], or null
    void* y;           // T [M][N], or float32
    int64_t x_stride, m, k, n;
    int32_t dtype;
    int32_t sums;  // 1: y takes the sums as they are, in float32
};

struct Attend {
    Cache cache;
    Mask mask;
    const void* q;  // T [rows][count][heads][width]
    const void *k, *v;
    void* out;  // T, as q
    int32_t dtype;
};

// The rotation of query (r, t): cos and sin, float32 [d / 2], at (r * row + t * d / 2); row 0: the same
// for all rows.
struct Rotary {
    const float *cos, *sin;
    int64_t row;
};

struct RotateWrite {
    Cache cache;
    Rotary rotary;
    const void* qkv;  // T [rows][count][3][heads][width]
    void *k, *v;
    void* q;  // T [rows][count][heads][width]
    const int64_t* slots;  // [rows][count]
    int32_t rows, count, dtype;
};

struct Block {
    const void *attention_norm, *ffn_norm;  // T [D]; the first may be null: no norm
    const void *wqkv, *wo, *w13, *w2;       // panels, with how they are kept
    void *k, *v;                            // the layer's keys and values
    float attention_eps, ffn_eps;
};

struct Trunk {
    Cache cache;
    Mask mask;
    Rotary rotary;
    const Block* blocks;
    const void* x;           // T [M][D]
    void* out;               // T [M][out_stride]: the taps, then the last states
    const int64_t* slots;    // [M]: where keys and values go
    const void* norm;        // T [D], the last norm; or null
    const int32_t* taps;     // blocks, counted from 1, whose states are wanted
    int64_t out_stride;
    int32_t layers, dim, hidden, tap_count, dtype;
    float norm_eps;
};

// A pass over windows of `span` tokens of B images (decoding/jacobi.py): from the tokens that are known and drafted to
// guided logits. The trunk's x, out, slots, mask and rotary are made here.
struct WindowPass {
    Trunk trunk;
    const void *embedding, *head;      // T [V][D], and panels
    const float *cos, *sin;            // [N][d / 2]: of image tokens
    const uint8_t* prompt;             // [B][prefix]: which prompt tokens are seen
    const int64_t *tokens, *length;    // [B][N + 1], [B]
    const float* scale;                // [N]: the guidance of each token; null with one branch
    int64_t images, span, image, vocab, prefix, slots;
    float* features;                   // [B][T][D]: where guided states go; null: nowhere
    int32_t branches, blind;           // blind: complete images are left out
};

// How logits become a distribution: divided by a temperature (null: 1), the top_k largest (0: all) with
// those that equal the last, then the codes of mass top_p (null: all); p_first: the other way round.
struct Filter {
    const float *temperature, *top_p;
    int64_t top_k;
    int32_t p_first;
};

// Logits of B images of T positions each, from rows [branches][B][T][V]. scale: of every token, null for
// none; kind: of every token, the row of `penalty` that is added, null for none.
struct Guide {
    const float *logits, *scale, *image_scale, *penalty;
    const int64_t *token, *kind;  // [B][T], or [B] with whole_image
    float* out;
    int64_t images, count, vocab;
    int32_t branches, whole_image;
};

enum RuleKind : int32_t { EXACT = 0, LANTERN = 1, LANTERN_PP = 2 };
enum Residual : int32_t { OFFICIAL = 0, OPTIMAL = 1, AGGREGATE = 2 };

struct Rule {
    const int32_t* neighbours;  // [V], neighbour_width of them neighbour_stride apart; or null
    const float *rule_param, *budget;  // one number each; no budget: null
    int64_t neighbour_stride, neighbour_width, k;
    int32_t kind, residual;
};

// A tree of B images (decoding/trees.py), its guided logits, and what becomes of it (decoding/accept.py).
struct Accept {
    Filter filter;
    Rule rule;
    const float* logits;                                             // [B][T][V]
    const int64_t *tokens, *first_child, *num_children, *group;      // [B][T]
    const float *q, *uniforms, *bonus_uniform;                       // q [B][groups][V], or null
    const int32_t* widths;                                           // [depth]
    int64_t *path, *length, *bonus;                                  // [B][depth + 1], [B], [B]
    float *weights, *quality_loss;                                          // [B][V], [B][depth]
    int64_t images, nodes, vocab, groups, uniform_stride, bonus_stride;
    int32_t depth, masked;  // masked: -inf among logits means a code that may not be
};

// A tree of B images and the tokens that noise chooses behind its nodes (decoding/invariant.py).
struct Choose {
    Filter filter;
    const float* logits;                                    // [B][T][V]
    const int64_t *tokens, *first_child, *num_children;     // [B][T]
    const int32_t* keys;                                    // [B][3]; null: the likeliest codes are chosen
    const int64_t* root_at;                                 // [B]: the root's position
    int64_t *path, *length, *bonus;                         // [B][depth + 1], [B], [B]
    float* weights;                                         // [B][V], or null
    int64_t images, nodes, vocab;
    int32_t depth;
};

// A step of a tree of T nodes for B images (decoding/engine.py), in parts. G: nodes with children, level by level; D:
// levels; F: the target's states that the drafter reads, side by side; P: `width`, the tokens that a step of the longest
// tree on these buffers brings at most. With top_k the tree's shape follows from the drafts, which are certain: a beam of
// so many paths, and no q, group, inner and inner_count; with 0 all images have one shape, which stays.
struct TreeStep {
    Trunk target, drafter;                      // as WindowPass's, each over its own cache
    Filter filter;
    Rule rule;
    const void *embedding, *head;               // the target's: T [V][D], and panels
    const void *own_embedding, *fc, *fc_bias;   // the drafter's: T [V][D], panels [D][2 D], T [D] or null
    const void *fuse;                           // panels [D][F D], or null without taps
    const void* const* tap_norms;               // F - 1 times T [D]
    const float *cos, *sin, *own_cos, *own_sin; // [N][d / 2]: of image tokens, the target's and the drafter's
    const uint8_t* prompt;                      // [B][prefix]
    const float* scale;                         // [N], or null with one branch
    int64_t *first_child, *num_children;        // [B][T]
    const int64_t *group;                       // [B][T]
    int32_t *parent, *depth_of;                 // [B][T]
    const int32_t *inner, *inner_count, *widths;  // [G], [D] twice
    int64_t *length, *root, *known, *pending_tokens, *pending_count;  // [B] twice, [B][N + 1], [B][P], [B]
    void* pending_features;                     // T [rows][P][F dim]
    const float* uniforms;                      // [B][N][columns], or null
    const int32_t* keys;                        // [B][3] in place of uniforms; neither: as in Choose
    int64_t *step, *steps, *histogram;          // [1], [B], [B][P]
    float* quality_loss;                               // [B]
    int64_t *last_path, *last_length, *slot_of, *place_of;  // [B][P], [B], [B][image_slots] twice
    uint8_t* holds;
    int64_t *finite, *report;                    // [B], [2][B]
    // From part to part.
    int64_t* tokens;                            // [B][T]
    float *q, *logits;                          // [B][G][V], [B][T][V]
    void* states;                               // T [rows][T][F dim]
    int64_t *path, *kept, *bonus;               // [B][D + 1], [B], [B]
    float *weights, *quality_losses;                    // [B][V], [B][D]
    int64_t images, nodes, depth, groups, image, prefix, vocab, columns, draft_columns, image_slots, ahead, own_slots, width,
        top_k;
    int32_t branches, blind, hides_pads;        // hides_pads: the drafter does not see the prompt's pads
    float tap_eps;
};
enum TreePart : int32_t { DRAFT, VERIFY, ACCEPT, COMMIT, ALL };

// What follows a pass of plain decoding under uniforms, over B images (decoding/engine.py). The state's buffers stay.
struct Advance {
    Filter filter;
    const float* uniforms;                           // [B][N][columns], the last of a step's for its token
    int64_t *tokens, *length, *step, *steps, *last_length;  // [B][N + 1], [B], [1], [B], [B]
    int64_t *histogram, *root;                       // [B][histogram_stride]; [B], an image's last token
    uint8_t* holds;                                  // [B], and what the host reads: [B], [2][B]
    int64_t *finite, *report;
    int64_t images, vocab, image, columns, histogram_stride;
};

// What follows a pass over B windows of L positions where noise decides (decoding/sources/window.py): the tokens that
// it chooses, which drafts are those, and further drafts. K: rows of the ring, then a trash row; M: `passes`.
// Plain decoding has a root and none of the buffers of drafts.
// A draft head: tables [6][V + 1][hidden], [N][hidden], [J][hidden]; panels [J hidden][D], [hidden + rank][D],
// [rank][hidden], [V][rank] and a bias T [V]. feature: the last exact state, [B][D]; features: of a pass, [B][T][D].
struct GuessHead {
    const float *codes, *place, *start;
    const void *state, *seen, *mid, *head, *bias;
    float *feature, *features;
    int64_t dim, hidden, rank, depths, grid;
    int32_t dtype;
};

struct AdvanceChosen {
    Filter filter;
    const int32_t* keys;                             // [B][3], or null as in Choose
    const int64_t* place;                            // where a position's row lies in the ring; null without one
    int64_t *tokens, *length, *newest, *step, *steps, *last_length;  // [B][N + 1], [B] ..., step [1]
    int64_t* histogram;                              // [B][histogram_stride]
    float* rows;                                     // [B][K + 1][V]
    int64_t *row_keys, *row_previous, *row_tokens, *root;           // [B][M][wide] thrice; [B]: an image's last token
    uint8_t* holds;                                  // [B], and what the host reads: [B], [2][B]
    int64_t *finite, *report;
    int64_t images, span, vocab, image, kept, passes, wide, histogram_stride, width;
    const GuessHead* head;                           // null without one
    int32_t fresh;                                   // Fresh
};
enum Fresh : int32_t { UNIFORM = 0, ABOVE = 1, HEAD = 2, GIVEN = 3 };  // GIVEN: none are drafted
}

// A packed matrix [n][k] in fewer bits, of the kind `kept`, to `out`.
struct Copy {
    const void* weight;
    void* out;
    int64_t k, n;
    int32_t dtype, kept;
    int32_t tries;  // cuts of a group's range that are compared; 1: none is cut
};

struct Seen;  // a Mask as lists of slots

// One instruction set's code.
struct Unit {
    const char* name;
    void (*linear)(const Linear&);
    void (*copy)(const Copy&);
    void (*attend)(const Attend&);
    void (*rotate_write)(const RotateWrite&);
    void (*rms_norm)(const void* x, const void* weight, float eps, int64_t m, int64_t n, void* y, int32_t dtype);
    void (*swiglu)(const void* x, int64_t m, int64_t hidden, void* y, int32_t dtype);
    void (*trunk)(const Trunk&);
    void (*window_pass)(const WindowPass&, float* out);
    void (*guide)(const Guide&);
    void (*filter)(const Filter&, const float* logits, int64_t rows, int64_t n, float* out);
    void (*draw)(const float* weights, const float* uniforms, int64_t rows, int64_t n, int64_t count, int64_t* out);
    void (*accept)(const Accept&);
    void (*advance)(const Advance&, const float* logits);
    void (*race)(const float* weights, const int32_t* keys, const int64_t* positions, int64_t images, int64_t count,
                 int64_t n, int64_t* out);
    void (*perturb)(const float* weights, const int32_t* keys, const int64_t* positions, int64_t images, int64_t count,
                    int64_t n, float* out);
    void (*choose)(const Choose&);
    void (*advance_chosen)(const AdvanceChosen&, const float* logits);
    void (*fresh_guesses)(const AdvanceChosen&);
    void (*likeliest)(const float* weights, const float* luck, int64_t rows, int64_t each, int64_t n, int64_t count,
                      int64_t* codes, float* scores);
    void (*tree_step)(const TreeStep&, int32_t part);
    int words;  // 1 where bfloat16 weights are kept as WORDS
    void (*tiles_from)(int rows);  // set the rows from which on tiles multiply, 0: to be measured; null: no tiles
};

// --- pool.cpp ------------------------------------------------------------------------------------

// A list of stages, each of some chunks that threads take as they come; a stage begins when the one before
// has ended and its tail, run by whoever ended it, is done.
struct Job {
    void* self;
    void (*work)(void* self, int stage, int chunk);
    void (*tail)(void* self, int stage);
    int (*chunks)(void* self, int stage);
    int stages;
};

// Fewer numbers of logits than this are done before another thread has begun.
constexpr int64_t FEW_LOGITS = 1 << 12;

// Ask for lines that another core has, to read them or to write to them.
static inline void expect(const void* first, size_t bytes, bool write) {
    for (size_t i = 0; i < bytes; i += 64) {
        const char* line = (const char*)first + i;
#if defined(__x86_64__)
        // By its name: compilers leave it out for processors that they are not told of. Those without it skip it.
        if (write)
            asm volatile("prefetchw %0" ::"m"(*line));
        else
            __builtin_prefetch(line, 0, 3);
#else
        write ? __builtin_prefetch(line, 1, 3) : __builtin_prefetch(line, 0, 3);
#endif
    }
}

// What the thread does, once, when it has done its part of a job.
extern thread_local void (*at_end)();

void pool_resize(int threads);
int pool_threads();
// Lanes that a stage's chunks lie in, and where one begins: a thread stays in its own while it has chunks.
int pool_lanes();
inline int lane_start(int total, int lane, int lanes) { return int(int64_t(total) * lane / lanes); }
void pool_run(const Job& job, bool alone);

// Memory of the thread that takes it, 64-byte aligned, for as long as this object lives: whatever a call below takes lies
// elsewhere. What is given back the thread keeps for the next of its size.
class Scratch {
public:
    __attribute__((always_inline)) Scratch() {}
    __attribute__((always_inline)) ~Scratch() { clear(); }
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    template <class T> __attribute__((always_inline)) T* take(size_t count) { return static_cast<T*>(bytes(count * sizeof(T))); }
    // Give all back.
    void clear();

private:
    void* bytes(size_t size);
    struct Piece* pieces_ = nullptr;
};
