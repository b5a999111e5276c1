// y = x @ w.T (+ bias) (+ residual): the ends of products.
#pragma once
#include "amx.h"

namespace infc {

// F: the format of w; Y, B, E: the types of y, bias and residual
template <class F, class Y, class B = float, class E = float>
void linear_of(const infc_run* r, int64_t rows, int64_t k, int64_t n, const void* x, const void* w, const void* bias,
               const void* residual, void* y) {
    const auto* plus = static_cast<const B*>(bias);
    const auto* above = static_cast<const E*>(residual);
    auto* to = static_cast<Y*>(y);
    product<F>(r, rows, static_cast<const typename F::X*>(x), w, k, (n + COLS - 1) / COLS, [&](int64_t row, int64_t panel) {
        const int64_t at = row * n + panel * COLS;
        return End{above && sizeof(E) == sizeof(Y) ? reinterpret_cast<const char*>(above + at) : nullptr,
                   reinterpret_cast<const char*>(to + at), n * int64_t(sizeof(Y)), COLS * int64_t(sizeof(Y))};
    }, [&](int64_t row, int64_t count, int64_t panel, const float* out) {
        const int64_t c = panel * COLS;
        for (int64_t i = 0, at = row * n + c; i < count; i++, at += n, out += COLS) {
            if (c + COLS <= n) {
                f32x16 lo = load16(out), hi = load16(out + 16);
                if (plus) lo = lo + load16(plus + c), hi = hi + load16(plus + c + 16);
                if (above) lo = lo + load16(above + at), hi = hi + load16(above + at + 16);
                store16(to + at, lo);
                store16(to + at + 16, hi);
                continue;
            }
            for (int64_t v = 0; c + v < n; v += 16) {
                f32x16 sum = load16(out + v);
                if (plus) sum = sum + load_some(plus + c + v, n - c - v);
                if (above) sum = sum + load_some(above + at + v, n - c - v);
                store_some(to + at + v, sum, n - c - v);
            }
        }
    });
}

template <class T, class Y, class B = float, class E = float>
void linear(const infc_run* r, int64_t rows, int64_t k, int64_t n, const void* x, const void* w, const void* bias,
            const void* residual, void* y) {
    linear_of<Wide<T>, Y, B, E>(r, rows, k, n, x, w, bias, residual, y);
}

}  // namespace infc
