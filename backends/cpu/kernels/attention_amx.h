// Attention's two products by AMX: sixteen query rows against pages of bf16 (or of codes widened to bf16).
//
// A page of K is the right-hand side of q @ K.T as it lies, two tiles of 16 tokens a step of 32 k; one of V that of p @ V, two
// tokens to a row. A row of queries, or of probabilities, lies whole.
#pragma once
#include "amx.h"
#include "paged.h"

namespace infc {

#if INFC_AMX
template <int D> constexpr bool HEAD_IN_TILES = D % 32 == 0;

// q [16][D] @ one page of K.T -> s [16][32], rows `stride` values apart
template <int D> INFC_INLINE void tile_scores(const void* q, const char* k, float* s, int64_t stride) {
    _tile_zero(0);
    _tile_zero(1);
#pragma GCC unroll 8
    for (int at = 0; at < D; at += 32) {
        _tile_loadd(4, static_cast<const char*>(q) + at * 2, D * 2);
        _tile_loadd(6, k + at * 64, 128);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, k + at * 64 + 64, 128);
        _tile_dpbf16ps(1, 4, 7);
    }
    _tile_stored(0, s, stride * 4);
    _tile_stored(1, s + 16, stride * 4);
}

// p [16][pages * 32], rows `stride` bytes apart, @ columns of V (64 from v, or 32) -> o [16][64]
template <int D, int COLUMNS>
INFC_INLINE void tile_values(const void* p, int64_t stride, const char* const* v, int64_t from, int64_t pages, float* o) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t j = 0; j < pages; j++) {
        const char* page = v[j] + from * 4;
        _tile_loadd(4, static_cast<const char*>(p) + j * PAGE * 2, stride);
        _tile_loadd(6, page, D * 4);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, page + 64, D * 4);
        _tile_dpbf16ps(1, 4, 7);
        if (COLUMNS == 64) {
            _tile_loadd(6, page + 128, D * 4);
            _tile_dpbf16ps(2, 4, 6);
            _tile_loadd(7, page + 192, D * 4);
            _tile_dpbf16ps(3, 4, 7);
        }
    }
    _tile_stored(0, o, 256);
    _tile_stored(1, o + 16, 256);
    if (COLUMNS == 64) {
        _tile_stored(2, o + 32, 256);
        _tile_stored(3, o + 48, 256);
    }
}

// The two products of an Attention A whose TILES is true; Held is what a thread keeps while it uses them.
template <class A> struct TilesOf {
    using Held = typename std::conditional<A::TILES, Tiles, Nothing>::type;
    static constexpr int D = A::DIM;

    // q @ K.T of a chunk, and each row's largest scores
    template <int64_t WIDTH> static INFC_INLINE void scores(const void* q, const typename A::Chunk& c, float (*s)[WIDTH], f32x16* top) {
        tiles_meet_memory();
        for (int64_t j = 0; j < c.pages; j++) {
            tile_scores<D>(q, c.k[j], &s[0][j * PAGE], WIDTH);
            fetch<2>(c.v[j], A::PAGE_BYTES);
        }
        tiles_meet_memory();
        for (int r = 0; r < TILE_ROWS; r++)
            for (int64_t at = 0; at < c.pages * PAGE; at += 16) {
                f32x16 x = load16(&s[r][at]);
                if (A::CODED) store16(&s[r][at], x = x * A::scaled(load16(c.k_scale[at / PAGE] + at % PAGE)));
                top[r] = maximum(x, top[r]);
            }
    }

    static INFC_INLINE void values(const typename A::L* p, const typename A::Chunk& c, const float* alpha, float (*o)[D]) {
        constexpr int COLUMNS = D % 64 ? 32 : 64;
        alignas(64) float sum[TILE_ROWS][64];
        alignas(64) char last[A::PAGE_BYTES];
        const char* v[sizeof c.v / sizeof *c.v];
        for (int64_t j = 0; j < c.pages; j++) v[j] = c.v[j], fetch<2>(c.next[j], A::PAGE_BYTES);
        if (const int64_t n = c.tokens % PAGE; n && !A::CODED) {       // behind the last token may be NaN
            const int64_t whole = n / 2 * D * 4, j = c.pages - 1;
            memcpy(last, v[j], size_t(whole));
            memset(last + whole, 0, size_t(A::PAGE_BYTES - whole));
            for (int64_t i = 0; n % 2 && i < D; i++) memcpy(last + whole + i * 4, v[j] + whole + i * 4, 2);
            v[j] = last;
        }
        for (int64_t from = 0; from < D; from += COLUMNS) {
            tiles_meet_memory();
            tile_values<D, COLUMNS>(p, A::P_LDA * int64_t(sizeof *p), v, from, c.pages, &sum[0][0]);
            tiles_meet_memory();
            for (int r = 0; r < TILE_ROWS; r++)
                for (int i = 0; i < COLUMNS; i += 16) {
                    float* at = o[r] + from + i;
                    store16(at, fma(load16(at), splat(alpha[r]), A::scaled(load16(&sum[r][i]))));
                }
        }
    }
};
#else
template <int D> constexpr bool HEAD_IN_TILES = false;
template <class A> struct TilesOf { struct Held {}; };
#endif

}  // namespace infc
