// A KV cache of 8-bit codes: rounding a row to them, and the products that read them.
//
// A code is a whole number from -127 to 127; each token of a kv head has one scale. Four codes that are multiplied together lie
// together, as VNNI takes them. code8 widens them to fp32. digits8 leaves them bytes: a row that meets them is rounded to 16 bits,
// two digits in base 256, each multiplied with the codes and summed exactly in 32 bits. At a row's largest value that is 2**8 times
// finer than bf16.
#pragma once
#include <type_traits>
#include "codes.h"
#include "tile.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__)
#define INFC_DIGITS 1
#else
#define INFC_DIGITS 0
#endif

namespace infc {

struct code8 { int8_t code; };
struct biased8 { uint8_t code; };                        // of K: code + 128, the unsigned side of VNNI's product
struct digits8 { int8_t code; };
constexpr uint8_t K_BIAS = 128;
constexpr float SMALLEST_ROW = 1e-30f;                   // no larger value: codes are 0, since an inverse scale could overflow

struct Extent { float largest; float odd; };             // odd: 0, or NaN where a value is NaN or infinite, which maximum may hide
template <class X> INFC_INLINE Extent extent(const X* x, int64_t n) {
    f32x16 top = splat(0.0f), odd = splat(0.0f);
    for (int64_t d = 0; d < n; d += 16) {
        f32x16 v = load16(x + d);
        top = maximum(cast<f32x16>(cast<u32x16>(v) & splat_u32(0x7fffffff)), top);
        odd = odd + (v - v);
    }
    return {reduce_max(top), reduce_add(odd)};
}

// Codes and scale of one row of n values (n % 16 == 0), as compiler/ops/codes.py gives them: the largest value at 127, ties to even.
INFC_INLINE float round_row(const float* x, int64_t n, int8_t* codes) {
    const Extent found = extent(x, n);
    const float inverse = found.largest > SMALLEST_ROW ? 1.0f / found.largest * 127.0f : 0.0f;
    int32_t code[16];
    for (int64_t d = 0; d < n; d += 16) {
        store(code, nearest(load16(x + d) * splat(inverse)));
        for (int i = 0; i < 16; i++) codes[d + i] = int8_t(code[i]);
    }
    return found.largest / 127.0f + found.odd;
}

// ---- products in fp32 --------------------------------------------------------------------------------------------------
template <> struct Dot<code8> {                                        // sixteen columns x four codes, widened by shifts
    using Lhs = float;
    struct Rhs { f32x16 of[4]; };
    static constexpr int K = 4, A = 4;
    static INFC_INLINE Rhs rhs(const void* w) {
        i32x16 words = load<i32x16>(w);
        return {floats((words << 24) >> 24), floats((words << 16) >> 24), floats((words << 8) >> 24), floats(words >> 24)};
    }
    template <int V> static INFC_INLINE void row(f32x16* acc, const Rhs* w, const Lhs* a) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++)
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) acc[v] = fma(splat(a[i]), w[v].of[i], acc[v]);
    }
};
template <> struct Dot<biased8> : Dot<code8> {
    static INFC_INLINE Rhs rhs(const void* w) {
        u32x16 words = load<u32x16>(w);
        auto at = [](u32x16 low) { return floats(cast<i32x16>(low & splat_u32(0xff)) - splat_i32(K_BIAS)); };
        return {at(words), at(words >> 8), at(words >> 16), at(words >> 24)};
    }
};
#if INFC_DIGITS
template <> struct Dot<digits8> {                                      // of a row's panel: K/4 words of high digits, K/4 of low ones
    using Lhs = uint32_t;
    static constexpr int K = 4, A = 2;
};
#else
template <> struct Dot<digits8> : Dot<code8> {};
#endif

template <> struct Shape<code8> {                                      // beside the sums: four widened vectors and a broadcast
#if defined(__AVX512F__)
    static constexpr int ROWS = 12, VECS = 1;
#elif defined(__AVX2__) || defined(__aarch64__)
    static constexpr int ROWS = 3, VECS = 1;
#else
    static constexpr int ROWS = 2, VECS = 1;
#endif
};
#if INFC_DIGITS
template <> struct Shape<digits8> { static constexpr int ROWS = 6, VECS = 2; };        // two sums each: 24
#else
template <> struct Shape<digits8> : Shape<code8> {};
#endif

// ---- products of bytes -------------------------------------------------------------------------------------------------
struct QueryRow { float scale; int32_t unbias; };        // of a row in digits: value of digit 1; what undoes K_BIAS in its sums

#if INFC_DIGITS
INFC_INLINE void store_digits(uint32_t* high, uint32_t* low, i32x16 h, i32x16 l) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(high), _mm512_cvtepi32_epi8((__m512i)h));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(low), _mm512_cvtepi32_epi8((__m512i)l));
}

// a row of N values: digits from -127 (low ones -128) to 127
template <int N, class X> INFC_INLINE QueryRow pack_signed(uint32_t* to, const X* from) {
    const Extent found = extent(from, N);
    const f32x16 inverse = splat(found.largest > SMALLEST_ROW ? 32512.0f / found.largest : 0.0f);
    i32x16 sum = splat_i32(0);
    for (int d = 0; d < N; d += 16) {
        i32x16 x = nearest(load16(from + d) * inverse), h = (x + splat_i32(128)) >> 8;
        store_digits(to + d / 4, to + (N + d) / 4, h, x);              // the low byte as int8 is x - 256 h
        sum = sum + x;
    }
    return {found.largest / 32512.0f + found.odd, -K_BIAS * reduce_add(sum)};
}

// N values none of which is negative, the largest given: digits from 0 to 255
template <int N> INFC_INLINE void pack_unsigned(uint32_t* to, const float* from, float largest) {
    const f32x16 inverse = splat(largest > SMALLEST_ROW ? 65280.0f / largest : 0.0f);
#pragma GCC unroll 4
    for (int d = 0; d < N; d += 16) {
        i32x16 x = nearest(load16(from + d) * inverse);
        store_digits(to + d / 4, to + (N + d) / 4, x >> 8, x);
    }
}

// As Tile: R rows x V vectors, a step is four codes. SIGNED: rows are signed and codes biased, else rows unsigned and codes signed.
template <bool SIGNED, int R, int V, int LDA> struct DigitTile {
    __m512i high[R][V], low[R][V];

    INFC_INLINE void zero() {
#pragma GCC unroll 32
        for (int i = 0; i < R * V; i++) high[i / V][i % V] = low[i / V][i % V] = _mm512_setzero_si512();
    }
    // In place, which GCC 12 does not see in the intrinsic: it copied and spilled sums, 1.3 times the time of a prefill.
    static INFC_INLINE void add(__m512i& sum, __m512i digits, __m512i codes) {
        asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(SIGNED ? codes : digits), "v"(SIGNED ? digits : codes));
    }
    INFC_INLINE void steps(const uint32_t* a, const char* w, int64_t stride, int64_t n, const char* next) {
#pragma GCC unroll 1
        for (int64_t s = 0; s < n; s++, a++, w += stride, next += stride) {
            __m512i codes[V];
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) {
                codes[v] = _mm512_loadu_si512(w + v * 64);
                __builtin_prefetch(next + v * 64, 0, 2);
            }
#pragma GCC unroll 16
            for (int r = 0; r < R; r++) {
                const __m512i h = _mm512_set1_epi32(int(a[r * LDA])), l = _mm512_set1_epi32(int(a[r * LDA + LDA / 2]));
#pragma GCC unroll 4
                for (int v = 0; v < V; v++) add(high[r][v], h, codes[v]), add(low[r][v], l, codes[v]);
            }
        }
    }
    // in units of digit 1; the sum fits 32 bits (256 * 127 * 32512, 128 * 127 * 65280), whatever wraps on the way
    INFC_INLINE f32x16 total(int r, int v, int32_t unbias = 0) const {
        return floats(((i32x16)high[r][v] << 8) + (i32x16)low[r][v] + splat_i32(unbias));
    }
};
#endif

}  // namespace infc
