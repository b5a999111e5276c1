// Codes in registers: f16 scales, rounding to integers, and the integer product of four k of a panel with four codes of a row.
//
// A block is 32 k. Its weights are eight steps of 4 k x 32 columns, one unsigned byte each (or a nibble: the low ones are steps
// 0..3, the high ones 4..7). With VNNI a row's codes are bytes, and one of 16 bits is two digits, 256 * high + low, all high ones
// first; elsewhere they are 16-bit words: the even k of a step, then the odd ones, which is how a mask and a shift part the
// weights' bytes.
#pragma once
#include "common.h"

namespace infc {

struct f16 { uint16_t bits; };                                         // finite ones

INFC_INLINE float to_f32(f16 x) {                                      // exponent and fraction in place, times 2**112
    uint32_t magnitude = uint32_t(x.bits & 0x7fff) << 13;
    float f;
    memcpy(&f, &magnitude, 4);
    return x.bits & 0x8000 ? -f * 0x1p112f : f * 0x1p112f;
}
#if defined(__AVX512F__)
INFC_INLINE f32x16 load16(const f16* p) { return (f32x16)_mm512_cvtph_ps(load<__m256i>(p)); }
#elif defined(__AVX2__) && defined(__F16C__)
INFC_INLINE f32x16 load16(const f16* p) { return {_mm256_cvtph_ps(load<__m128i>(p)), _mm256_cvtph_ps(load<__m128i>(p + 8))}; }
#else
INFC_INLINE f32x16 load16(const f16* p) {                              // as to_f32
    u32x16 high = Widen<u32x16>::of(&p->bits);
    f32x16 magnitude = cast<f32x16>((high & splat_u32(0x7fff0000u)) >> 3) * splat(0x1p112f);
    return cast<f32x16>(cast<u32x16>(magnitude) | (high & splat_u32(0x80000000u)));
}
#endif

template <class V> struct Integers {
    static INFC_INLINE auto floats(V v) { return __builtin_convertvector(v, typename Vector<float, sizeof(V) / 4>::type); }
    // nearest, ties to even; anything for what no int32 holds
    template <class F> static INFC_INLINE V nearest(F v) {
#if defined(__AVX512F__)
        return (V)_mm512_cvtps_epi32((__m512)v);
#elif defined(__AVX2__)
        return (V)_mm256_cvtps_epi32((__m256)v);
#elif defined(__SSE2__)
        return (V)_mm_cvtps_epi32((__m128)v);
#elif defined(__aarch64__)
        return (V)vcvtnq_s32_f32(v);
#else
        V r;
        for (unsigned i = 0; i < sizeof(V) / 4; i++) r[i] = int32_t(__builtin_lrintf(v[i]));
        return r;
#endif
    }
    // acc + the two 16-bit products of each lane: a of a column, x of a row
    static INFC_INLINE V dot_words(V acc, V a, int32_t x) {
#if defined(__AVX512BW__)
        return acc + (V)_mm512_madd_epi16((__m512i)a, _mm512_set1_epi32(x));
#elif defined(__AVX2__)
        return acc + (V)_mm256_madd_epi16((__m256i)a, _mm256_set1_epi32(x));
#elif defined(__SSE2__)
        return acc + (V)_mm_madd_epi16((__m128i)a, _mm_set1_epi32(x));
#else
        return acc + (a & 0xffff) * int16_t(x) + (a >> 16) * (x >> 16);
#endif
    }
};
template <class H> struct Integers<Halves<H>> {
    static INFC_INLINE auto floats(Halves<H> v) {
        return Halves<decltype(Integers<H>::floats(v.lo))>{Integers<H>::floats(v.lo), Integers<H>::floats(v.hi)};
    }
    template <class F> static INFC_INLINE Halves<H> nearest(Halves<F> v) {
        return {Integers<H>::nearest(v.lo), Integers<H>::nearest(v.hi)};
    }
    static INFC_INLINE Halves<H> dot_words(Halves<H> acc, Halves<H> a, int32_t x) {
        return {Integers<H>::dot_words(acc.lo, a.lo, x), Integers<H>::dot_words(acc.hi, a.hi, x)};
    }
};
INFC_INLINE f32x16 floats(i32x16 v) { return Integers<i32x16>::floats(v); }
INFC_INLINE i32x16 nearest(f32x16 v) { return Integers<i32x16>::nearest(v); }

INFC_INLINE i32x16 larger(i32x16 a, i32x16 b) { return select(a > b, a, b); }
INFC_INLINE int32_t reduce_add(i32x16 v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_epi32((__m512i)v);
#else
    int32_t lane[16], sum = 0;
    store(lane, v);
    for (int32_t x : lane) sum += x;
    return sum;
#endif
}
INFC_INLINE int32_t reduce_larger(i32x16 v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_epi32((__m512i)v);
#else
    int32_t lane[16], most;
    store(lane, v);
    most = lane[0];
    for (int32_t x : lane) most = x > most ? x : most;
    return most;
#endif
}

constexpr int BLOCK_K = 32, STEPS = 8;                                 // a block, and how many times 4 k it is

// ---- one step: 16 columns x 4 k of bytes, and a row's four codes -------------------------------------------------------
#if defined(__AVX512VNNI__)
template <int ACT_BITS> struct Step {
    static constexpr int SUMS = ACT_BITS / 8, BYTES = BLOCK_K * SUMS;                  // integer sums; bytes of a row's block
    u32x16 w;
    static INFC_INLINE Step of(u32x16 bytes) { return {bytes}; }
    INFC_INLINE void add(i32x16* sum, const char* codes, int step) const {
#pragma GCC unroll 2
        for (int d = 0; d < SUMS; d++) {
            const __m512i x = _mm512_set1_epi32(load<int32_t>(codes + d * BLOCK_K + step * 4));
            sum[d] = (i32x16)_mm512_dpbusd_epi32((__m512i)sum[d], (__m512i)w, x);
        }
    }
    static INFC_INLINE i32x16 total(const i32x16* sum) { return SUMS == 2 ? (sum[0] << 8) + sum[SUMS - 1] : sum[0]; }
    static INFC_INLINE void pack(char* to, i32x16 first, i32x16 second) {
        auto bytes = [](char* at, i32x16 v) { store(at, _mm512_cvtepi32_epi8((__m512i)v)); };
        const i32x16 half = splat_i32(128);
        if (SUMS == 2) bytes(to, (first + half) >> 8), bytes(to + 16, (second + half) >> 8), to += BLOCK_K;
        bytes(to, first), bytes(to + 16, second);        // the low byte as int8 is c - 256 * high
    }
};
#else
template <int ACT_BITS> struct Step {
    static constexpr int SUMS = 1, BYTES = BLOCK_K * 2;
    i32x16 even, odd;
    static INFC_INLINE Step of(u32x16 bytes) {
        const u32x16 low = splat_u32(0x00ff00ffu);
        return {cast<i32x16>(bytes & low), cast<i32x16>((bytes >> 8) & low)};
    }
    INFC_INLINE void add(i32x16* sum, const char* codes, int step) const {
        *sum = Integers<i32x16>::dot_words(*sum, even, load<int32_t>(codes + step * 8));
        *sum = Integers<i32x16>::dot_words(*sum, odd, load<int32_t>(codes + step * 8 + 4));
    }
    static INFC_INLINE i32x16 total(const i32x16* sum) { return *sum; }
    static INFC_INLINE void pack(char* to, i32x16 first, i32x16 second) {
#if defined(__AVX512F__)
        auto words = [](char* at, i32x16 v) {
            store(at, _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(_mm512_cvtepi32_epi16((__m512i)v), 0xd8), 0xd8));
        };
        words(to, first), words(to + BLOCK_K, second);
#else
        int32_t code[BLOCK_K];
        int16_t word[BLOCK_K];
        store(code, first), store(code + 16, second);
        for (int k = 0; k < BLOCK_K; k += 4)
            for (int i = 0; i < 4; i++) word[k + i] = int16_t(code[k + "\0\2\1\3"[i]]);
        memcpy(to, word, sizeof word);
#endif
    }
};
#endif

}  // namespace infc
