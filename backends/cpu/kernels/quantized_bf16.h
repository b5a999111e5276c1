// Weights held as codes, made bf16 a panel at a time for products of many rows: each then costs what a product of bf16 weights costs.
//
// A panel is met by tile after tile, so that what it costs to make is divided by the rows. It is made while tiles meet the one before
// it, 64 bytes of codes after some steps: a longer piece would keep the products waiting. Zen 4, two cores, a layer's gate and up
// (576 x 3072) and down (1536 x 576) beside the same of bf16 weights, 30 layers, no weight in a cache; in brackets a whole panel at once:
// 200 rows +3 % (+6), 256 +2 % (+5), 512 +1.5 % (+2.5). Half of what is left is the multiplication by the scale.
// Not kept: panels made by all threads for each other (they travel from core to core: 4 % slower end to end with 512 tokens), columns
// instead of rows divided among threads (each then packs all of x: as fast), tiles of 10, 11, 13 and 14 rows.
#pragma once
#include "quantized.h"

#if defined(__AVX512BF16__)
namespace infc {

// Four codes of each of 16 columns as bf16, two k to a word. A code goes to the top of the fraction of 1.0, where it is worth
// code / 2**BITS (a shift and a merge, which leave the pipes of the multiplications alone), and one fma takes the one off again:
// exactly, as a scale has 11 bits. The offset then rounds once, and bf16 once more.
template <class W> struct Bf16Codes {
    f32x16 scale, one, offset;                           // one: what is to come off again
    INFC_INLINE void head(const char* group, int v) {
        const f32x16 s = W::scale(group, v);
        scale = s * splat(float(1 << W::WIDTH));
        one = -(W::OFFSETS ? scale : scale + s * splat(W::MIDDLE));
        if (W::OFFSETS) offset = load16(reinterpret_cast<const f16*>(group) + COLS + v * 16);
    }
    // low: the bit where the code starts
    INFC_INLINE __m512 value(__m512i bytes, int low) const {
        const int up = 23 - W::WIDTH - low;
        const __m512i mask = _mm512_set1_epi32(((1 << W::WIDTH) - 1) << (23 - W::WIDTH)), top = _mm512_set1_epi32(0x3f800000);
        const __m512i placed = up < 0 ? _mm512_srli_epi32(bytes, unsigned(-up)) : _mm512_slli_epi32(bytes, unsigned(up));
        const __m512i number = _mm512_ternarylogic_epi32(placed, mask, top, 0xea);     // (placed & mask) | top
        const f32x16 code = fma(f32x16(_mm512_castsi512_ps(number)), scale, one);
        return (__m512)(W::OFFSETS ? code + offset : code);
    }
    INFC_INLINE void pair(char* to, __m512i bytes, int low) const {
        const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4,
                                               19, 3, 18, 2, 17, 1, 16, 0);
        const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(value(bytes, low + 8), value(bytes, low));
        _mm512_storeu_si512(to, _mm512_permutexvar_epi16(order, both));
    }
};

// A panel being made as Wide<bf16> reads it, in pieces of 64 bytes of codes.
template <class W> struct Making {
    static constexpr int PARTS = 8 / W::WIDTH, PIECES = 2 * STEPS / PARTS;             // of 64 bytes, of a block
    const char* from;
    char* to;
    int64_t left = 0, in_group = 0;                      // pieces of the panel, of the group
    int64_t steps = 0, each = 0;                         // after so many steps of tiles come so many pieces
    int at = 0;                                          // of the block
    Bf16Codes<W> codes[2];

    // tile_steps: of all tiles that it is to be made beside; 0: `finish` makes it
    void start(const char* w, int64_t k, char* room, int64_t tile_steps) {
        from = w, to = room, left = W::blocks(k) * PIECES, in_group = 0, at = 0;
        steps = tile_steps > left ? tile_steps / left : 1;
        each = tile_steps ? (left + tile_steps - 1) / tile_steps : 0;
    }
    void finish() {
        while (left) make();
    }
    INFC_INLINE void piece() {
        for (int64_t i = 0; i < each && left; i++) make();
    }
    INFC_INLINE void make() {
        if (in_group == 0) {
            in_group = W::IN_GROUP == INT64_MAX ? INT64_MAX : W::IN_GROUP * PIECES;
            for (int v = 0; v < 2; v++) codes[v].head(from, v);
            from += W::HEAD;
        }
        const __m512i bytes = _mm512_loadu_si512(from);
        const Bf16Codes<W>& c = codes[at % 2];
        char* step = to + at / 2 * 256 + at % 2 * 64;
#pragma GCC unroll 2
        for (int part = 0; part < PARTS; part++, step += STEPS / 2 * 256) {
            c.pair(step, bytes, part * 4);
            c.pair(step + 128, bytes, part * 4 + 16);
        }
        from += 64, left--, in_group--;
        if (++at == PIECES) at = 0, to += BLOCK_K / 2 * 128;
    }
};

// The panels of a thread, each made while tiles meet the one before it: two lie at the end of its scratch.
template <class F> struct Made {
    const char* w;
    int64_t k, stored, room, end, making = -1;           // making: the panel that is, if one is
    char* rooms;
    Making<typename F::W> beside;

    Made(const infc_run* r, const void* weights, int64_t k, Span mine)
        : w(static_cast<const char*>(weights)), k(k), stored(F::panel_bytes(k)), room(F::tile_bytes(k)), end(mine.end),
          rooms(static_cast<char*>(r->scratch) + SCRATCH_BYTES - 2 * room) {}

    const char* at(int64_t p, int64_t tiles) {
        if (p != making) start(p, 0);
        beside.finish();
        making = p + 1 < end ? p + 1 : -1;
        if (making >= 0) start(making, tiles * F::steps(k));
        return rooms + p % 2 * room;
    }
    void start(int64_t p, int64_t tile_steps) { beside.start(w + p * stored, k, rooms + p % 2 * room, tile_steps); }
    const char* next(int64_t p) const { return w + (p + 2) * stored; }
};

// x of type XT rounded to bf16, w stored as Packed.
template <class XT, int BITS, int GROUP, bool OFFSET> struct CodedBf16 : Wide<bf16> {
    using W = Packed<BITS, GROUP, OFFSET>;
    using X = XT;
    template <class F> using Source = Made<F>;
    static constexpr int64_t ROWS = 12;                  // 24 sums, 2 weights, and 6 for the panel that is being made
    static int64_t steps(int64_t k) { return Lhs<bf16>::steps(k); }
    static int64_t panel_bytes(int64_t k) { return W::panel_bytes(k); }
    static int64_t tile_bytes(int64_t k) { return W::blocks(k) * BLOCK_K / 2 * 128; }
    static bool in_place(int64_t rows, int64_t k) { return sizeof(X) == sizeof(bf16) && Wide<bf16>::in_place(rows, k); }
    static void pack(void* to, const X* x, int64_t height, int64_t k) { pack_rows<bf16>(static_cast<L*>(to), x, height, k); }
};

}  // namespace infc
#endif
