// Pages of 8-bit codes widened to bf16, in which codes are exact: for so many query rows that it costs less than digits of each row.
#pragma once
#include "paged.h"

#if INFC_DIGITS && defined(__AVX512BF16__)
#define INFC_WIDEN 1
#else
#define INFC_WIDEN 0
#endif

namespace infc {

struct wide8 { int8_t code; };
constexpr int64_t WIDENED_BYTES = 512 << 10;             // half of a 1 MiB L2

#if INFC_WIDEN
template <> struct Dot<wide8> : Dot<bf16> {};
template <> struct Shape<wide8> : Shape<bf16> {};
template <> struct Panel<wide8> : Panel<bf16> {};
constexpr float WIDENED = 0x1p-24f;                      // what a widened code is to be multiplied with

// Steps of `width` words of four codes -> twice as many of two bf16, each code times 2**24: a byte at the top of a word needs no
// shift down. BIASED: as K lies. The lines of `next` are fetched.
template <bool BIASED> inline void widen(char* to, const char* from, int64_t steps, int64_t width, const char* next) {
    auto top = [](int i) {                               // byte i of each word to its top, zeros below
        const int below = 0x808080;
        auto word = [&](int at) { return (at + i) << 24 | below; };
        return _mm512_broadcast_i32x4(_mm_setr_epi32(word(0), word(4), word(8), word(12)));
    };
    const __m512i second = top(1), third = top(2), high = _mm512_set1_epi32(int(0xff000000u)), bias = _mm512_set1_epi8(char(K_BIAS));
    auto pair = [](__m512i a, __m512i b) {               // as fp32 both have 16 zeros below
        const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(_mm512_cvtepi32_ps(a)), 16);
        return _mm512_or_si512(low, _mm512_castps_si512(_mm512_cvtepi32_ps(b)));
    };
    for (int64_t s = 0; s < steps; s++, to += width * 4)
        for (int64_t c = 0; c < width; c += 16, from += 64, next += 64, to += 64) {
            __m512i codes = _mm512_loadu_si512(from);
            __builtin_prefetch(next, 0, 2);
            if (BIASED) codes = _mm512_xor_si512(codes, bias);
            _mm512_storeu_si512(to, pair(_mm512_slli_epi32(codes, 24), _mm512_shuffle_epi8(codes, second)));
            _mm512_storeu_si512(to + width * 4, pair(_mm512_shuffle_epi8(codes, third), _mm512_and_si512(codes, high)));
        }
}

// Widened pages of heads of D: the blocks of rows of a prefill read the same ones again and again. A sequence's first pages have a
// place each, the others take turns, so that CHUNK pages in a row never share one.
template <int D, int CHUNK> struct Widened {
    static constexpr int64_t BYTES = PAGE * D * 2, PLACES = WIDENED_BYTES / (2 * BYTES), FIXED = PLACES - CHUNK;
    static_assert(FIXED > 0, "no room for a chunk");
    struct alignas(64) Page { char k[BYTES], v[BYTES]; } of[PLACES];
    int64_t number[PLACES];                              // of the page of the cache that is there; -1: none

    void forget() { for (int64_t& n : number) n = -1; }
    // page `index` of its sequence, page n of the cache; the codes of a later one are fetched meanwhile
    INFC_INLINE const Page& page(int64_t index, int64_t n, const char* k, const char* v, const char* later_k, const char* later_v) {
        const int64_t place = index < FIXED ? index : FIXED + index % CHUNK;
        if (number[place] != n) {
            widen<true>(of[place].k, k, D / 4, PAGE, later_k);
            widen<false>(of[place].v, v, PAGE / 4, D, later_v);
            number[place] = n;
        }
        return of[place];
    }
};
#else
template <int D, int CHUNK> struct Widened { void forget() {} };
#endif

}  // namespace infc
