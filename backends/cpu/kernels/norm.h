// RMSNorm, RMSNorm after the residual add, LayerNorm: a row is read once from memory, all sums in fp32.
#pragma once
#include "pool.h"
#include "common.h"

namespace infc {

// sum over a row of f(16 values); four sums in flight hide the latency of the addition
template <class X, class F> INFC_INLINE float row_sum(const X* x, int64_t n, F f) {
    f32x16 s[4] = {};
    int64_t c = 0;
    for (; c + 64 <= n; c += 64)
        for (int i = 0; i < 4; i++) s[i] = s[i] + f(load16(x + c + 16 * i));
    for (; c + 16 <= n; c += 16) s[0] = s[0] + f(load16(x + c));
    float sum = reduce_add((s[0] + s[1]) + (s[2] + s[3]));
    if (c < n) {                                         // the lanes past the end hold 0; f(0) may not be 0
        float v[16];
        store16(v, f(load_some(x + c, n - c)));
        for (int64_t i = 0; i < n - c; i++) sum += v[i];
    }
    return sum;
}

template <class X, class W, class Y> INFC_INLINE void rms_norm_row(const X* x, const W* w, Y* y, int64_t n, float eps) {
    double mean_square = double(row_sum(x, n, [](f32x16 v) { return v * v; })) / double(n);
    float scale = float(1.0 / __builtin_sqrt(mean_square + double(eps)));              // rounded once
    for (int64_t c = 0; c < n; c += 16)
        store_some(y + c, load_some(x + c, n - c) * splat(scale) * load_some(w + c, n - c), n - c);
}

template <class X, class W, class Y>
void rms_norm(const infc_run* r, int64_t rows, int64_t n, float eps, const void* x, const void* w, void* y) {
    Span mine = share(rows, r->thread, r->threads);
    for (int64_t i = mine.begin; i < mine.end; i++)
        rms_norm_row(static_cast<const X*>(x) + i * n, static_cast<const W*>(w), static_cast<Y*>(y) + i * n, n, eps);
}

// h = x + residual, rounded to its type; y = rms_norm(h)
template <class X, class W, class Y>
void add_rms_norm(const infc_run* r, int64_t rows, int64_t n, float eps, const void* x, const void* residual, const void* w,
                  void* y, void* h) {
    Span mine = share(rows, r->thread, r->threads);
    for (int64_t i = mine.begin; i < mine.end; i++) {
        const X *a = static_cast<const X*>(x) + i * n, *b = static_cast<const X*>(residual) + i * n;
        X* sum = static_cast<X*>(h) + i * n;
        for (int64_t c = 0; c < n; c += 16) store_some(sum + c, load_some(a + c, n - c) + load_some(b + c, n - c), n - c);
        rms_norm_row(sum, static_cast<const W*>(w), static_cast<Y*>(y) + i * n, n, eps);
    }
}

// two passes for the variance: sum of squares minus square of the sum would cancel
template <class X, class W, class Y>
void layer_norm(const infc_run* r, int64_t rows, int64_t n, float eps, const void* x, const void* w, const void* b, void* y) {
    Span mine = share(rows, r->thread, r->threads);
    for (int64_t i = mine.begin; i < mine.end; i++) {
        const X* row = static_cast<const X*>(x) + i * n;
        f32x16 rough = splat(row_sum(row, n, [](f32x16 v) { return v; }) / float(n));   // off by some ulp of the sum: a second
        double rest = double(row_sum(row, n, [rough](f32x16 v) { return v - rough; })) / double(n);  // look at what is left
        float first;
        memcpy(&first, &rough, 4);
        double mean = double(first) + rest;
        f32x16 hi = splat(float(mean)), lo = splat(float(mean - double(float(mean))));
        auto centred = [&](f32x16 v) { return (v - hi) - lo; };
        double var = double(row_sum(row, n, [&](f32x16 v) { return centred(v) * centred(v); })) / double(n);
        f32x16 scale = splat(float(1.0 / __builtin_sqrt(var + double(eps))));
        for (int64_t c = 0; c < n; c += 16) {
            f32x16 v = centred(load_some(row + c, n - c)) * scale * load_some(static_cast<const W*>(w) + c, n - c);
            if (b) v = v + load_some(static_cast<const W*>(b) + c, n - c);
            store_some(static_cast<Y*>(y) + i * n + c, v, n - c);
        }
    }
}

}  // namespace infc
