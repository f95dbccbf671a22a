// The processor's tiles (AMX): eight of 16 rows of 64 bytes, zeroed, loaded, stored and multiplied.
//
// A product of bfloat16 tiles adds 32 inputs: the even ones in one chain of multiply-adds, the odd ones in another; then
// the sum of both to what the tile has (Intel's manual, TDPBF16PS). Numbers below 2^-126 are 0 going in and coming out.
// The instructions are written as bytes, so that every compiler and assembler builds them. LANTERN_EMULATED computes the
// same in C++, so that a processor without tiles can test all but the instructions themselves (emulated.h).
#pragma once

#include "native.h"
#include "vector.h"

namespace {

constexpr int TILE_ROWS = 16, TILE_BYTES = 64;
constexpr int DEEP = 32;  // inputs of bfloat16 in a tile's row
static_assert(W == TILE_ROWS, "a tile's row is a register");

// Within it numbers below 2^-126 are 0 in vectors, as they are in tiles.
class SmallIsZero {
    uint32_t before = _mm_getcsr();

public:
    SmallIsZero() { _mm_setcsr(before | 0x8040); }
    SmallIsZero(const SmallIsZero&) = delete;
    ~SmallIsZero() { _mm_setcsr(before); }
};

// Within it tiles are all ours, too. They stay configured until the thread has done its part of a job: to configure them
// waits for all loads before it, so that a panel's weights would not be fetched while the one before is multiplied.
class Tiles {
    SmallIsZero zero;

public:
    Tiles() {
        if (at_end == release) return;
        configure();
        at_end = release;
    }
    Tiles(const Tiles&) = delete;
#ifdef LANTERN_EMULATED
    static constexpr int COUNT = 8;
    struct State {
        alignas(64) char tile[COUNT][TILE_ROWS][TILE_BYTES];
    };
    static State& state() {
        static thread_local State mine;
        return mine;
    }
    static void configure() {}
    static void release() {}
#else
    static void configure() {
        struct alignas(64) {
            uint8_t palette = 1, start = 0, reserved[14] = {};
            uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
        } shape;
        asm volatile(".byte 0xc4, 0xe2, 0x78, 0x49, 0x00" ::"a"(&shape) : "memory");  // ldtilecfg (%rax)
    }
    static void release() { asm volatile(".byte 0xc4, 0xe2, 0x78, 0x49, 0xc0" ::: "memory"); }  // tilerelease
#endif
};

#ifdef LANTERN_EMULATED
template <int TILE> void tile_zero() { memset(Tiles::state().tile[TILE], 0, sizeof Tiles::state().tile[TILE]); }
template <int TILE> void tile_load(const void* p, int64_t stride) {
    for (int r = 0; r < TILE_ROWS; ++r)
        memcpy(Tiles::state().tile[TILE][r], (const char*)p + r * stride, TILE_BYTES);
}
template <int TILE> void tile_store(void* p, int64_t stride) {
    for (int r = 0; r < TILE_ROWS; ++r) memcpy((char*)p + r * stride, Tiles::state().tile[TILE][r], TILE_BYTES);
}
// C += A B: bfloat16 [16][32] and [16][16][2], float32 [16][16].
template <int C, int A, int B> void tile_pairs() {
    auto& all = Tiles::state().tile;
    for (int r = 0; r < TILE_ROWS; ++r) {
        const bf16* a = (const bf16*)all[A][r];
        F even{}, odd{};
        for (int k = 0; k < TILE_ROWS; ++k) {
            U pairs = load<U>(all[B][k]);
            even = multiply_add(splat(value(a[2 * k])), lower(pairs), even);
            odd = multiply_add(splat(value(a[2 * k + 1])), upper(pairs), odd);
        }
        float* c = (float*)all[C][r];
        put(c, load<F>(c) + (even + odd));
    }
}
// C += A B: signed bytes [16][64] times [16][16][4], signed or not, int32 [16][16].
template <int C, int A, int B, bool SIGNED> void tile_bytes() {
    auto& all = Tiles::state().tile;
    for (int r = 0; r < TILE_ROWS; ++r)
        for (int n = 0; n < 16; ++n) {
            int32_t sum = ((int32_t*)all[C][r])[n];
            for (int k = 0; k < TILE_BYTES; ++k) {
                char code = all[B][k / 4][4 * n + k % 4];
                sum += int32_t(int8_t(all[A][r][k])) * (SIGNED ? int32_t(int8_t(code)) : int32_t(uint8_t(code)));
            }
            ((int32_t*)all[C][r])[n] = sum;
        }
}
#else
template <int TILE> INLINE void tile_zero() {
    asm volatile(".byte 0xc4, 0xe2, 0x7b, 0x49, 0xc0 + (%c0 << 3)" ::"i"(TILE));
}
template <int TILE> INLINE void tile_load(const void* p, int64_t stride) {  // tileloadd (%rax, %rdx), TILE
    asm volatile(".byte 0xc4, 0xe2, 0x7b, 0x4b, 0x04 + (%c0 << 3), 0x10" ::"i"(TILE), "a"(p), "d"(stride) : "memory");
}
template <int TILE> INLINE void tile_store(void* p, int64_t stride) {
    asm volatile(".byte 0xc4, 0xe2, 0x7a, 0x4b, 0x04 + (%c0 << 3), 0x10" ::"i"(TILE), "a"(p), "d"(stride) : "memory");
}
template <int C, int A, int B> INLINE void tile_pairs() {  // tdpbf16ps
    asm volatile(".byte 0xc4, 0xe2, 0x02 + ((15 - %c2) << 3), 0x5c, 0xc0 + (%c0 << 3) + %c1" ::"i"(C), "i"(A), "i"(B));
}
template <int C, int A, int B, bool SIGNED> INLINE void tile_bytes() {  // tdpbssd, tdpbsud
    asm volatile(".byte 0xc4, 0xe2, %c3 + ((15 - %c2) << 3), 0x5e, 0xc0 + (%c0 << 3) + %c1" ::"i"(C), "i"(A), "i"(B),
                 "i"(SIGNED ? 3 : 2));
}
#endif

}  // namespace
