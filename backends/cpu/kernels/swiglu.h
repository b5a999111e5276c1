// act(gate) * up, alone or as the end of the product that makes gate and up.
#pragma once
#include <cmath>
#include "linear.h"

namespace infc {

enum Act { SILU, GELU, GELU_TANH };

// x / (1 + exp(-t)), t of x's sign. For x > 0 as x minus a small part, which costs one rounding less.
INFC_INLINE f32x16 gated(f32x16 x, f32x16 t) {
    f32x16 e = exp(-t);
    auto positive = x > splat(0.0f);
    f32x16 part = select(positive, -x * e, x) / (splat(1.0f) + e);
    return select(positive, x + part, part);
}

// The same to 1e-4, a twentieth of half a bf16 step: enough for what is rounded to bf16.
INFC_INLINE f32x16 gated_coarse(f32x16 x, f32x16 t) {
    return x / (splat(1.0f) + exp2_coarse(t * splat(-1.44269504088896341f)));
}

template <class Y, Act A> INFC_INLINE f32x16 activate(f32x16 x) {          // as a value of Y
    auto gate = [&](f32x16 t) { return sizeof(Y) == 2 ? gated_coarse(x, t) : gated(x, t); };
    if (A == SILU) return gate(x);
    if (A == GELU_TANH)                                  // 0.5 x (1 + tanh(t / 2)) = x / (1 + exp(-t))
        return gate(splat(1.5957691216057308f) * fma(splat(0.044715f) * x * x, x, x));
    float v[16];                                         // exact GELU: libm's erf, lane by lane
    store16(v, x);
    for (float& e : v) e = 0.5f * e * (1.0f + erff(e * 0.7071067811865476f));
    return load16(v);
}

// x [rows, 2f] -> y [rows, f]
template <class X, class Y, Act A> void swiglu(const infc_run* r, int64_t rows, int64_t f, const void* x, void* y) {
    Span mine = share(rows, r->thread, r->threads);
    for (int64_t i = mine.begin; i < mine.end; i++)
        for (int64_t c = 0; c < f; c += 16) {
            const X* gate = static_cast<const X*>(x) + i * 2 * f + c;
            store_some(static_cast<Y*>(y) + i * f + c, activate<Y, A>(load_some(gate, f - c)) * load_some(gate + f, f - c), f - c);
        }
}

// The panel of 32 columns holds 16 of the gate and the matching 16 of up, so the end of the product is local.
template <class F, class Y, Act A>
void linear_swiglu_of(const infc_run* r, int64_t rows, int64_t k, int64_t f, const void* x, const void* w, void* y) {
    product<F>(r, rows, static_cast<const typename F::X*>(x), w, k, (f + 15) / 16, [&](int64_t row, int64_t panel) {
        return End{nullptr, reinterpret_cast<const char*>(static_cast<Y*>(y) + row * f + panel * 16), f * int64_t(sizeof(Y)),
                   16 * int64_t(sizeof(Y))};
    }, [&](int64_t row, int64_t count, int64_t panel, const float* out) {
        for (int64_t i = 0, c = panel * 16; i < count; i++)
            store_some(static_cast<Y*>(y) + (row + i) * f + c,
                       activate<Y, A>(load16(out + i * COLS)) * load16(out + i * COLS + 16), f - c);
    });
}

template <class T, class Y, Act A>
void linear_swiglu(const infc_run* r, int64_t rows, int64_t k, int64_t f, const void* x, const void* w, void* y) {
    linear_swiglu_of<Wide<T>, Y, A>(r, rows, k, f, x, w, y);
}

}  // namespace infc
