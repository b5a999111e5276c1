// RMSNorm, RMSNorm after the residual add, LayerNorm: a row is read once from memory.
#pragma once
#include "pool.h"
#include "common.h"

namespace infc {

// sum over a row of f(16 values): fp32 in 64 chains (four vectors hide the latency of the addition), those added in fp64
template <class X, class F> INFC_INLINE double row_sum(const X* x, int64_t n, F f) {
    f32x16 s[4] = {};
    int64_t c = 0;
    for (; c + 64 <= n; c += 64)
        for (int i = 0; i < 4; i++) s[i] = s[i] + f(load16(x + c + 16 * i));
    for (; c + 16 <= n; c += 16) s[0] = s[0] + f(load16(x + c));
    float lanes[16], rest[16];
    store16(lanes, (s[0] + s[1]) + (s[2] + s[3]));
    double sum[4] = {};
    for (int i = 0; i < 16; i++) sum[i % 4] += double(lanes[i]);
    if (c < n) {                                         // past the end f would see zeros, and f(0) may not be 0
        store16(rest, f(load_some(x + c, n - c)));
        for (int64_t i = 0; i < n - c; i++) sum[i % 4] += double(rest[i]);
    }
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

// x * w * scale, rounded once: x * w and scale are each kept in two parts
struct Scaled {
    double scale;
    f32x16 hi, lo;
    explicit Scaled(double s) : scale(s), hi(splat(float(s))), lo(splat(float(s - double(float(s))))) {}
    INFC_INLINE f32x16 of(f32x16 x, f32x16 w) const {
#if INFC_FMA
        f32x16 product = x * w, rest = fma(x, w, -product);
        return fma(product, hi, fma(rest, hi, product * lo));
#else
        float a[16], b[16];
        store16(a, x), store16(b, w);
        for (int i = 0; i < 16; i++) a[i] = float(double(a[i]) * double(b[i]) * scale);
        return load16(a);
#endif
    }
};

template <class X, class W, class Y> INFC_INLINE void rms_norm_row(const X* x, const W* w, Y* y, int64_t n, float eps) {
    double mean_square = row_sum(x, n, [](f32x16 v) { return v * v; }) / double(n);
    const Scaled scale(1.0 / __builtin_sqrt(mean_square + double(eps)));
    for (int64_t c = 0; c < n; c += 16)
        store_some(y + c, scale.of(load_some(x + c, n - c), load_some(w + c, n - c)), n - c);
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

// sum over a row of f(value) in sixteen fp64 chains
template <class X, class F> INFC_INLINE double wide_sum(const X* x, int64_t n, F f) {
    double lane[16] = {};
    int64_t c = 0;
    for (; c + 16 <= n; c += 16)
        for (int i = 0; i < 16; i++) lane[i] += f(double(to_f32(x[c + i])));
    for (; c < n; c++) lane[c % 16] += f(double(to_f32(x[c])));
    double sum = 0;
    for (double v : lane) sum += v;
    return sum;
}

// All in fp64, rounded once: in fp32 the product and the bias may cancel and leave several ulp of error. Two passes for the
// variance: the sum of squares minus the square of the sum would cancel too. b may be null.
template <class X, class W, class Y>
void layer_norm(const infc_run* r, int64_t rows, int64_t n, float eps, const void* x, const void* w, const void* b, void* y) {
    Span mine = share(rows, r->thread, r->threads);
    for (int64_t i = mine.begin; i < mine.end; i++) {
        const X* row = static_cast<const X*>(x) + i * n;
        const auto *by = static_cast<const W*>(w), *plus = static_cast<const W*>(b);
        const double mean = wide_sum(row, n, [](double v) { return v; }) / double(n);
        const double var = wide_sum(row, n, [mean](double v) { return (v - mean) * (v - mean); }) / double(n);
        const double scale = 1.0 / __builtin_sqrt(var + double(eps));
        for (int64_t c = 0; c < n; c++) {
            double v = (double(to_f32(row[c])) - mean) * scale * double(to_f32(by[c]));
            static_cast<Y*>(y)[i * n + c] = from_f32<Y>(float(b ? v + double(to_f32(plus[c])) : v));
        }
    }
}

}  // namespace infc
