// Weights held as codes with offsets, made bf16 a panel at a time for products of many rows: one bf16 product does then what takes two of
// bytes, and nothing is left to do for each group.
//
// A panel is met by tile after tile, so that what it costs to make is divided by the rows. Prompts of SmolLM2 in its own Q4_1 blocks, two
// Zen 4 cores, tokens/s beside those of bf16 weights, by 16-bit codes of x (quantized.h) -> this: 200 tokens 0.89 -> 0.95, 256 0.88 ->
// 0.96, 512 0.87 -> 0.94, 1024 0.88 -> 0.98. Without offsets the codes of x are as fast (0.94 to 0.99 both), so they stay.
#pragma once
#include "quantized.h"

#if defined(__AVX512BF16__)
namespace infc {

// Four codes of each of 16 columns as bf16, two k to a word. A code goes to the top of the fraction of 1.0, where it is worth
// code / 2**BITS (a shift and a merge, which leave the pipes of the multiplications alone), and one fma takes the one off again:
// exactly, as a scale has 11 bits. The offset then rounds once, and bf16 once more.
template <class W> struct Bf16Codes {
    f32x16 scale, offset;
    INFC_INLINE void head(const char* group, int v) {
        const f32x16 s = W::scale(group, v);
        scale = s * splat(float(1 << W::WIDTH));
        offset = load16(reinterpret_cast<const f16*>(group) + COLS + v * 16);
    }
    // low: the bit where the code starts
    INFC_INLINE __m512 value(__m512i bytes, int low) const {
        const int up = 23 - W::WIDTH - low;
        const __m512i mask = _mm512_set1_epi32(((1 << W::WIDTH) - 1) << (23 - W::WIDTH)), one = _mm512_set1_epi32(0x3f800000);
        const __m512i placed = up < 0 ? _mm512_srli_epi32(bytes, unsigned(-up)) : _mm512_slli_epi32(bytes, unsigned(up));
        const __m512i number = _mm512_ternarylogic_epi32(placed, mask, one, 0xea);     // (placed & mask) | one
        return (__m512)(fma(f32x16(_mm512_castsi512_ps(number)), scale, -scale) + offset);
    }
    INFC_INLINE void pair(char* to, __m512i bytes, int low) const {
        const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4,
                                               19, 3, 18, 2, 17, 1, 16, 0);
        const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(value(bytes, low + 8), value(bytes, low));
        _mm512_storeu_si512(to, _mm512_permutexvar_epi16(order, both));
    }
};

// x of type XT rounded to bf16, w stored as Packed.
template <class XT, int BITS, int GROUP> struct CodedBf16 : Wide<bf16> {
    using W = Packed<BITS, GROUP, true>;
    using X = XT;
    static int64_t panel_bytes(int64_t k) { return W::panel_bytes(k); }
    static int64_t tile_bytes(int64_t k) { return W::blocks(k) * BLOCK_K / 2 * 128; }
    static bool in_place(int64_t, int64_t) { return false; }
    static void pack(void* to, const X* x, int64_t height, int64_t k) { pack_rows<bf16>(static_cast<L*>(to), x, height, k); }
    static const char* ready(const char* w, int64_t k, char* room);
};

// The panel as Wide<bf16> reads it, in `room`.
template <class XT, int B, int G> const char* CodedBf16<XT, B, G>::ready(const char* w, int64_t k, char* room) {
    constexpr int PARTS = 8 / B;
    Bf16Codes<W> codes[2];
    char* to = room;
    for (int64_t left = W::blocks(k), in_group = 0; left > 0; left--, in_group--, w += W::CODES, to += BLOCK_K / 2 * 128) {
        if (in_group == 0) {
            in_group = W::IN_GROUP;
            for (int v = 0; v < 2; v++) codes[v].head(w, v);
            w += W::HEAD;
        }
#pragma GCC unroll 8
        for (int line = 0; line < STEPS / PARTS; line++)
#pragma GCC unroll 4
            for (int i = 0; i < 2 * PARTS; i++) {
                const int v = i % 2, part = i / 2, step = line + part * STEPS / 2;
                const __m512i bytes = _mm512_loadu_si512(w + line * 128 + v * 64);
                codes[v].pair(to + step * 256 + v * 64, bytes, part * 4);
                codes[v].pair(to + step * 256 + 128 + v * 64, bytes, part * 4 + 16);
            }
    }
    return room;
}

}  // namespace infc
#endif
