// Sixteen lanes everywhere: one vector vocabulary that is native on AVX-512 and made of halves elsewhere.
//
// Kernels are written once against f32x16 / i32x16. With AVX-512 these are GCC vectors of 64 bytes; else a `Halves` of
// narrower ones (GCC lowers a too-wide vector through memory, halves stay in registers). Intrinsics stand only in blocks
// guarded by the ISA they need, each beside the portable form it replaces.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define INFC_INLINE inline __attribute__((always_inline))

namespace infc {

struct bf16 { uint16_t bits; };

INFC_INLINE float to_f32(float x) { return x; }
INFC_INLINE float to_f32(bf16 x) {
    uint32_t u = uint32_t(x.bits) << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}

template <class T> INFC_INLINE T from_f32(float x);
template <> INFC_INLINE float from_f32<float>(float x) { return x; }
template <> INFC_INLINE bf16 from_f32<bf16>(float x) {        // round to nearest even; a NaN stays a NaN
    uint32_t u;
    memcpy(&u, &x, 4);
    if ((u & 0x7fffffff) > 0x7f800000) return bf16{uint16_t((u >> 16) | 0x40)};
    return bf16{uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16)};
}

// ---- vectors -------------------------------------------------------------------------------------------------------
template <class H> struct Halves { H lo, hi; };

#if defined(__AVX512F__)
constexpr int NATIVE = 16;
#elif defined(__AVX2__)
constexpr int NATIVE = 8;
#else
constexpr int NATIVE = 4;
#endif

template <class T, int N> struct Vector { typedef T type __attribute__((vector_size(N * sizeof(T)))); };
template <class T, int N, bool FITS = (N <= NATIVE)> struct Lanes { using type = typename Vector<T, N>::type; };
template <class T, int N> struct Lanes<T, N, false> { using type = Halves<typename Lanes<T, N / 2>::type>; };

using f32x16 = typename Lanes<float, 16>::type;
using i32x16 = typename Lanes<int32_t, 16>::type;
using u32x16 = typename Lanes<uint32_t, 16>::type;

template <class H> INFC_INLINE Halves<H> operator+(Halves<H> a, Halves<H> b) { return {a.lo + b.lo, a.hi + b.hi}; }
template <class H> INFC_INLINE Halves<H> operator-(Halves<H> a, Halves<H> b) { return {a.lo - b.lo, a.hi - b.hi}; }
template <class H> INFC_INLINE Halves<H> operator*(Halves<H> a, Halves<H> b) { return {a.lo * b.lo, a.hi * b.hi}; }
template <class H> INFC_INLINE Halves<H> operator/(Halves<H> a, Halves<H> b) { return {a.lo / b.lo, a.hi / b.hi}; }
template <class H> INFC_INLINE Halves<H> operator-(Halves<H> a) { return {-a.lo, -a.hi}; }
template <class H> INFC_INLINE Halves<H> operator&(Halves<H> a, Halves<H> b) { return {a.lo & b.lo, a.hi & b.hi}; }
template <class H> INFC_INLINE Halves<H> operator|(Halves<H> a, Halves<H> b) { return {a.lo | b.lo, a.hi | b.hi}; }
template <class H> INFC_INLINE Halves<H> operator<<(Halves<H> a, int n) { return {a.lo << n, a.hi << n}; }
template <class H> INFC_INLINE Halves<H> operator>>(Halves<H> a, int n) { return {a.lo >> n, a.hi >> n}; }
template <class H> INFC_INLINE auto operator<(Halves<H> a, Halves<H> b) -> Halves<decltype(a.lo < b.lo)> {
    return {a.lo < b.lo, a.hi < b.hi};
}
template <class H> INFC_INLINE auto operator>(Halves<H> a, Halves<H> b) -> Halves<decltype(a.lo > b.lo)> {
    return {a.lo > b.lo, a.hi > b.hi};
}
template <class H> INFC_INLINE auto operator>=(Halves<H> a, Halves<H> b) -> Halves<decltype(a.lo >= b.lo)> {
    return {a.lo >= b.lo, a.hi >= b.hi};
}
template <class H> INFC_INLINE auto operator==(Halves<H> a, Halves<H> b) -> Halves<decltype(a.lo == b.lo)> {
    return {a.lo == b.lo, a.hi == b.hi};
}

template <class M, class V> INFC_INLINE V select(M m, V a, V b) { return m ? a : b; }
template <class M, class V> INFC_INLINE Halves<V> select(Halves<M> m, Halves<V> a, Halves<V> b) {
    return {select(m.lo, a.lo, b.lo), select(m.hi, a.hi, b.hi)};
}

// Memory and bit casts go half by half: a memcpy of the whole would pass through the stack.
template <class V> struct Bits {
    static INFC_INLINE V load(const void* p) { V v; memcpy(&v, p, sizeof v); return v; }
    static INFC_INLINE void store(void* p, V v) { memcpy(p, &v, sizeof v); }
    template <class From> static INFC_INLINE V cast(From v) {
        static_assert(sizeof(V) == sizeof(From), "a cast keeps the size");
        V r; memcpy(&r, &v, sizeof r); return r;
    }
};
template <class H> struct Bits<Halves<H>> {
    static INFC_INLINE Halves<H> load(const void* p) {
        return {Bits<H>::load(p), Bits<H>::load(static_cast<const char*>(p) + sizeof(H))};
    }
    static INFC_INLINE void store(void* p, Halves<H> v) {
        Bits<H>::store(p, v.lo);
        Bits<H>::store(static_cast<char*>(p) + sizeof(H), v.hi);
    }
    template <class From> static INFC_INLINE Halves<H> cast(Halves<From> v) {
        return {Bits<H>::cast(v.lo), Bits<H>::cast(v.hi)};
    }
};
template <class V> INFC_INLINE V load(const void* p) { return Bits<V>::load(p); }
template <class V> INFC_INLINE void store(void* p, V v) { Bits<V>::store(p, v); }
template <class To, class From> INFC_INLINE To cast(From v) { return Bits<To>::cast(v); }

// A splat of a native vector is `x - {0}` in GCC's vector language: one broadcast (x - 0 is x, -0 too).
template <class V, class T> struct Splat { static INFC_INLINE V of(T x) { return x - V{}; } };
template <class H, class T> struct Splat<Halves<H>, T> {
    static INFC_INLINE Halves<H> of(T x) { H h = Splat<H, T>::of(x); return {h, h}; }
};
INFC_INLINE f32x16 splat(float x) { return Splat<f32x16, float>::of(x); }
INFC_INLINE i32x16 splat_i32(int32_t x) { return Splat<i32x16, int32_t>::of(x); }
INFC_INLINE u32x16 splat_u32(uint32_t x) { return Splat<u32x16, uint32_t>::of(x); }

INFC_INLINE i32x16 iota() {
    static const int32_t lanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return load<i32x16>(lanes);
}

// a * b + c, one rounding where the machine has it (INFC_FMA). Not left to contraction: a product used twice is not contracted.
#if defined(__AVX512F__)
#define INFC_FMA 1
INFC_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { return (f32x16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
#elif defined(__AVX2__) && defined(__FMA__)
#define INFC_FMA 1
INFC_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
    return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
#elif defined(__aarch64__)
#define INFC_FMA 1
INFC_INLINE float32x4_t fma(float32x4_t a, float32x4_t b, float32x4_t c) { return vfmaq_f32(c, a, b); }
template <class H> INFC_INLINE Halves<H> fma(Halves<H> a, Halves<H> b, Halves<H> c) {
    return {fma(a.lo, b.lo, c.lo), fma(a.hi, b.hi, c.hi)};
}
#else
#define INFC_FMA 0
INFC_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { return a * b + c; }
#endif

template <class V> INFC_INLINE V maximum(V a, V b) { return select(a > b, a, b); }     // b where either is NaN, as maxps
#if defined(__AVX512F__)
template <> INFC_INLINE f32x16 maximum<f32x16>(f32x16 a, f32x16 b) { return (f32x16)_mm512_max_ps((__m512)a, (__m512)b); }
#elif defined(__AVX2__)
template <> INFC_INLINE f32x16 maximum<f32x16>(f32x16 a, f32x16 b) {
    return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)};
}
#endif

// Horizontal folds: by halves down to four lanes, then one by one.
template <class V> struct Half {
    static constexpr int N = sizeof(V) / 8;
    using type = typename Vector<float, N>::type;
    static INFC_INLINE type lo(V v) { type h; memcpy(&h, &v, sizeof h); return h; }
    static INFC_INLINE type hi(V v) { type h; memcpy(&h, reinterpret_cast<char*>(&v) + sizeof h, sizeof h); return h; }
};
template <class H> struct Half<Halves<H>> {
    using type = H;
    static INFC_INLINE H lo(Halves<H> v) { return v.lo; }
    static INFC_INLINE H hi(Halves<H> v) { return v.hi; }
};
template <class V> INFC_INLINE float reduce_add(V v) {
    if constexpr (sizeof(V) > 16) return reduce_add(Half<V>::lo(v) + Half<V>::hi(v));
    else return (v[0] + v[2]) + (v[1] + v[3]);
}
template <class V> INFC_INLINE float reduce_max(V v) {
    if constexpr (sizeof(V) > 16) return reduce_max(maximum(Half<V>::lo(v), Half<V>::hi(v)));
    else {
        float a = v[0] > v[2] ? v[0] : v[2], b = v[1] > v[3] ? v[1] : v[3];
        return a > b ? a : b;
    }
}

// ---- sixteen values from and to memory, whatever their type ----------------------------------------------------------
template <class V> struct Widen {                                      // 16-bit lanes to the high half of 32-bit lanes
    static INFC_INLINE V of(const uint16_t* p) {
        typename Vector<uint16_t, sizeof(V) / 4>::type h;
        memcpy(&h, p, sizeof h);
        return __builtin_convertvector(h, V) << 16;
    }
    static INFC_INLINE void back(uint16_t* p, V v) {
        auto h = __builtin_convertvector(v >> 16, typename Vector<uint16_t, sizeof(V) / 4>::type);
        memcpy(p, &h, sizeof h);
    }
};
template <class H> struct Widen<Halves<H>> {
    static constexpr int HALF = sizeof(H) / 4;
    static INFC_INLINE Halves<H> of(const uint16_t* p) { return {Widen<H>::of(p), Widen<H>::of(p + HALF)}; }
    static INFC_INLINE void back(uint16_t* p, Halves<H> v) { Widen<H>::back(p, v.lo); Widen<H>::back(p + HALF, v.hi); }
};

INFC_INLINE f32x16 load16(const float* p) { return load<f32x16>(p); }
INFC_INLINE f32x16 load16(const bf16* p) { return cast<f32x16>(Widen<u32x16>::of(&p->bits)); }

INFC_INLINE void store16(float* p, f32x16 v) { store(p, v); }
INFC_INLINE void store16(bf16* p, f32x16 v) {
#if defined(__AVX512BF16__)
    store(p, _mm512_cvtneps_pbh((__m512)v));
#else
    u32x16 u = cast<u32x16>(v);
    u32x16 rounded = u + splat_u32(0x7fff) + ((u >> 16) & splat_u32(1));
    u32x16 quiet = u | splat_u32(0x400000);
    Widen<u32x16>::back(&p->bits, select((u & splat_u32(0x7fffffff)) > splat_u32(0x7f800000), quiet, rounded));
#endif
}

// n of 16 values (n < 16 only at the end of a row): what lies behind is neither read nor written
template <class T> INFC_INLINE f32x16 load_some(const T* p, int64_t n) {
    if (n >= 16) return load16(p);
    float v[16] = {};
    for (int64_t i = 0; i < n; i++) v[i] = to_f32(p[i]);
    return load16(v);
}
template <class T> INFC_INLINE void store_some(T* p, f32x16 v, int64_t n) {
    if (n >= 16) return store16(p, v);
    float out[16];
    store16(out, v);
    for (int64_t i = 0; i < n; i++) p[i] = from_f32<T>(out[i]);
}

// ---- functions -------------------------------------------------------------------------------------------------------
// 2**t with a relative error of 1e-4, a twentieth of half a bf16 step: enough where the result is rounded to bf16. Exact for
// whole t; 0 below 2**-126, at least 2**127 above it, NaN for NaN. Minimax polynomials, exact at 0: degree 3 on [0, 1],
// degree 4 on [-0.5, 0.5].
INFC_INLINE f32x16 exp2_coarse(f32x16 t) {
#if defined(__AVX512DQ__)
    f32x16 f = (f32x16)_mm512_reduce_ps((__m512)t, 1);                 // t - floor(t); 0 for -inf
    f32x16 p = splat(0.0782679692f);
    p = fma(p, f, splat(0.226307675f));
    p = fma(p, f, splat(0.695424318f));
    p = fma(p, f, splat(1.0f));
    return (f32x16)_mm512_scalef_ps((__m512)p, (__m512)t);             // p * 2**floor(t)
#else
    const f32x16 magic = splat(12582912.0f);                           // 1.5 * 2**23: adding it rounds to an integer
    t = select(t > splat(127.0f), splat(127.0f), t);
    f32x16 shifted = t + magic;
    f32x16 f = t - (shifted - magic);
    f32x16 p = splat(9.78291e-3f);
    p = fma(p, f, splat(5.597688e-2f));
    p = fma(p, f, splat(2.4020711e-1f));
    p = fma(p, f, splat(6.931136e-1f));
    p = fma(p, f, splat(1.0f));
    i32x16 scaled = cast<i32x16>(p) + (cast<i32x16>(shifted) << 23);
    return select(t < splat(-126.0f), splat(0.0f), cast<f32x16>(scaled));
#endif
}

// e**x: the reduction keeps x - n ln 2 in two parts (Cody and Waite), so the error stays near one ulp for large |x| too.
// Coefficients from Cephes expf. Saturates to +inf above 88.72 and to 0 below -87.33.
INFC_INLINE f32x16 exp(f32x16 x) {
    const f32x16 magic = splat(12582912.0f);
#if defined(__AVX512F__)                                // minps and maxps give the second of two where one is NaN
    f32x16 clipped = (f32x16)_mm512_max_ps(_mm512_set1_ps(-87.5f), _mm512_min_ps(_mm512_set1_ps(88.8f), (__m512)x));
#else
    f32x16 clipped = select(x > splat(88.8f), splat(88.8f), select(x < splat(-87.5f), splat(-87.5f), x));
#endif
    f32x16 shifted = fma(clipped, splat(1.44269504088896341f), magic);
    f32x16 n = shifted - magic;
    f32x16 r = fma(n, splat(-0.693359375f), clipped);
    r = fma(n, splat(2.12194440e-4f), r);
    f32x16 p = splat(1.9875691500e-4f);
    p = fma(p, r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    p = fma(p, r * r, r) + splat(1.0f);
#if defined(__AVX512F__)
    const __mmask16 there = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-87.33f), _CMP_NLT_UQ);
    return (f32x16)_mm512_maskz_scalef_ps(there, (__m512)p, (__m512)n);
#else
    // two factors, since 2**128 is no float
    i32x16 e = cast<i32x16>(shifted) - splat_i32(0x4b400000);
    i32x16 half = e >> 1;
    f32x16 y = p * cast<f32x16>((half + splat_i32(127)) << 23) * cast<f32x16>((e - half + splat_i32(127)) << 23);
    return select(x < splat(-87.33f), splat(0.0f), select(x == x, y, x));
#endif
}

// tanh by the exponential: 1 - 2 / (e**2x + 1), odd; near 0 the odd polynomial of Cephes tanhf, which loses no digits
INFC_INLINE f32x16 tanh(f32x16 x) {
    f32x16 z = x * x;
    f32x16 p = splat(-5.70498872745e-3f);
    p = fma(p, z, splat(2.06390887954e-2f));
    p = fma(p, z, splat(-5.37397155531e-2f));
    p = fma(p, z, splat(1.33314422036e-1f));
    p = fma(p, z, splat(-3.33332819422e-1f));
    f32x16 small = fma(p * z, x, x);
    f32x16 large = splat(1.0f) - splat(2.0f) / (exp(x + x) + splat(1.0f));
    return select(z < splat(0.390625f), small, large);
}

// ---- sharing work ------------------------------------------------------------------------------------------------------
struct Span { int64_t begin, end; };
INFC_INLINE Span share(int64_t total, int64_t part, int64_t parts) {
    return {total * part / parts, total * (part + 1) / parts};
}

}  // namespace infc
