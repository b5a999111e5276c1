// The one inner loop: a register tile of rows x columns, multiplied step by step down a packed right-hand side.
//
// Linear, q @ K and p @ V are all this loop. A step of the right-hand side is one 64-byte vector per 16 columns: 16 fp32 of
// one k, or 16 pairs of bf16 (two k). The left-hand side is a row-major panel with a constant row stride, so that every
// broadcast is one address plus a constant.
#pragma once
#include "common.h"

namespace infc {

// What one step means for weights of type T: K values of k, A elements of the panel per row; Lhs is the panel's type.
template <class T> struct Dot;

template <> struct Dot<float> {
    using Lhs = float;
    using Rhs = f32x16;
    static constexpr int K = 1, A = 1;
    static INFC_INLINE Rhs rhs(const void* w) { return load<f32x16>(w); }
    template <int V> static INFC_INLINE void row(f32x16* acc, const Rhs* w, const Lhs* a) {
        f32x16 x = splat(*a);
#pragma GCC unroll 4
        for (int i = 0; i < V; i++) acc[i] = fma(x, w[i], acc[i]);
    }
};

#if defined(__AVX512BF16__)
template <> struct Dot<bf16> {
    using Lhs = uint32_t;                                              // two bf16
    using Rhs = u32x16;
    static constexpr int K = 2, A = 1;
    static INFC_INLINE Rhs rhs(const void* w) { return load<u32x16>(w); }
    template <int V> static INFC_INLINE void row(f32x16* acc, const Rhs* w, const Lhs* a) {
        __m512bh x = (__m512bh)_mm512_set1_epi32(int(*a));
#pragma GCC unroll 4
        for (int i = 0; i < V; i++) acc[i] = (f32x16)_mm512_dpbf16_ps((__m512)acc[i], (__m512bh)w[i], x);
    }
};
#else
template <> struct Dot<bf16> {                                         // widen the weights, keep the panel in fp32
    using Lhs = float;
    struct Rhs { f32x16 even, odd; };
    static constexpr int K = 2, A = 2;
    static INFC_INLINE Rhs rhs(const void* w) {
        u32x16 pairs = load<u32x16>(w);
        return {cast<f32x16>(pairs << 16), cast<f32x16>(pairs & splat_u32(0xffff0000u))};
    }
    template <int V> static INFC_INLINE void row(f32x16* acc, const Rhs* w, const Lhs* a) {
        f32x16 even = splat(a[0]), odd = splat(a[1]);
#pragma GCC unroll 4
        for (int i = 0; i < V; i++) acc[i] = fma(odd, w[i].odd, fma(even, w[i].even, acc[i]));
    }
};
#endif

// The largest tile that stays in registers: rows, and vectors of 16 columns.
template <class T> struct Shape {
#if defined(__AVX512F__)
    static constexpr int ROWS = Dot<T>::A == 1 ? 14 : 12, VECS = 2;    // 28 sums + 2 weights (+ 2 halves and a broadcast)
#elif defined(__AVX2__)
    static constexpr int ROWS = Dot<T>::A == 1 ? 6 : 4, VECS = 1;      // 12 + 2 + 1 of 16 registers, 8 + 4 + 2
#elif defined(__aarch64__)
    static constexpr int ROWS = Dot<T>::A == 1 ? 6 : 4, VECS = 1;      // 24 + 4 + 1 of 32 registers, 16 + 8 + 2
#else
    static constexpr int ROWS = 2, VECS = 1;
#endif
};

// R rows x V vectors of sums in registers. steps() adds a[r, step] * w[step, v]. LDA: elements between rows of the panel;
// w_stride: bytes between steps. Each weight load is paired with a prefetch at `next`, n_stride a step. Few rows leave too
// few independent sums to hide the latency of the product (6 cycles on Zen 4), so they take U steps at once.
template <class T, int R, int V, int LDA> struct Tile {
    using L = typename Dot<T>::Lhs;
    static constexpr int REGISTERS = R * V * 16 / NATIVE, ENOUGH = NATIVE == 16 ? 12 : 6,
                         U = REGISTERS >= ENOUGH ? 1 : REGISTERS >= ENOUGH / 2 ? 2 : 4;
    f32x16 sum[U][R][V];

    INFC_INLINE void zero() {
#pragma GCC unroll 64
        for (int i = 0; i < U * R * V; i++) sum[i / (R * V)][i / V % R][i % V] = splat(0.0f);
    }
    INFC_INLINE void step(int u, const L* a, const char* w, const char* next) {
        typename Dot<T>::Rhs rhs[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) {
            rhs[v] = Dot<T>::rhs(w + v * 64);
            __builtin_prefetch(next + v * 64, 0, 2);
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) Dot<T>::template row<V>(sum[u][r], rhs, a + r * LDA);
    }
    INFC_INLINE void steps(const L* a, const char* w, int64_t w_stride, int64_t n, const char* next) {
        steps(a, w, w_stride, n, next, w_stride);
    }
    INFC_INLINE void steps(const L* a, const char* w, int64_t w_stride, int64_t n, const char* next, int64_t n_stride) {
        int64_t s = 0;
#pragma GCC unroll 2
        for (; s + U <= n; s += U, a += U * Dot<T>::A, w += U * w_stride, next += U * n_stride) {
#pragma GCC unroll 4
            for (int u = 0; u < U; u++) step(u, a + u * Dot<T>::A, w + u * w_stride, next + u * n_stride);
        }
#pragma GCC unroll 1
        for (; U > 1 && s < n; s++, a += Dot<T>::A, w += w_stride, next += n_stride) step(0, a, w, next);
    }
    INFC_INLINE f32x16 total(int r, int v) const {
        f32x16 t = sum[0][r][v];
#pragma GCC unroll 4
        for (int u = 1; u < U; u++) t = t + sum[u][r][v];
        return t;
    }
};

// how the values lie in a panel: bf16 pairs where the product takes them, else fp32
template <class T> struct Panel { using type = float; };
#if defined(__AVX512BF16__)
template <> struct Panel<bf16> { using type = bf16; };
#endif

// n values of a row into the panel's type, zeros up to `padded`
template <class T, class X> INFC_INLINE void pack_row(typename Dot<T>::Lhs* to, const X* from, int64_t n, int64_t padded) {
    using Stored = typename Panel<T>::type;
    auto* out = reinterpret_cast<Stored*>(to);
    int64_t i = 0;
    if constexpr (sizeof(Stored) == sizeof(X)) memcpy(out, from, size_t(i = n) * sizeof(X));
    for (; i + 16 <= n; i += 16) store16(out + i, load16(from + i));
    for (; i < n; i++) out[i] = from_f32<Stored>(to_f32(from[i]));
    for (; i < padded; i++) out[i] = from_f32<Stored>(0);
}

}  // namespace infc
