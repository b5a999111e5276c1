// Scalar primitives of generated loops: PyTorch's semantics (NaN, wrapping integers), in forms that gcc vectorises.
#pragma once
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

namespace infc::loop {

inline float from_bf16(uint16_t x) { return __builtin_bit_cast(float, uint32_t(x) << 16); }
inline uint16_t to_bf16(float x) { return uint16_t(__builtin_bit_cast(uint32_t, x) >> 16); }   // of a rounded value

// To the nearest bf16, ties to even, kept as a float. NaN stays NaN: adding the bias could carry it to -0.
inline float round_bf16(float x) {
  const uint32_t u = __builtin_bit_cast(uint32_t, x);
  const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) & 0xffff0000u;
  return __builtin_bit_cast(float, x != x ? 0x7fc00000u : rounded);
}

// fp16 by its bits, as a CPU may lack the conversions. Adding 0.5 puts what is below the normal range at the end of a float's fraction.
inline float from_f16(uint16_t x) {
  const uint32_t size = (x & 0x7fffu) << 13;
  const float below = __builtin_bit_cast(float, 0x3f000000u + (x & 0x3ffu)) - 0.5f;
  const uint32_t usual = size + ((x & 0x7c00u) == 0x7c00u ? 0x70000000u : 0x38000000u);
  return __builtin_bit_cast(float, ((x & 0x7c00u) ? usual : __builtin_bit_cast(uint32_t, below)) | uint32_t(x & 0x8000u) << 16);
}

// To the nearest, ties to even.
inline uint16_t to_f16(float x) {
  const uint32_t u = __builtin_bit_cast(uint32_t, x), size = u & 0x7fffffffu;
  const uint32_t below = __builtin_bit_cast(uint32_t, __builtin_bit_cast(float, size) + 0.5f) - 0x3f000000u;
  const uint32_t usual = size >= 0x47800000u ? 0x7c00u : (size - 0x38000000u + 0xfffu + ((size >> 13) & 1u)) >> 13;
  return uint16_t((size > 0x7f800000u ? 0x7e00u : size < 0x38800000u ? below : usual) | (u >> 16 & 0x8000u));
}

inline float round_f16(float x) { return from_f16(to_f16(x)); }

// Signed overflow wraps, as PyTorch's does.
template <class T> using unsigned_of = std::make_unsigned_t<std::conditional_t<std::is_integral_v<T> && !std::is_same_v<T, bool>, T, int>>;
template <class T> inline T add(T a, T b) {
  if constexpr (std::is_integral_v<T>) return T(unsigned_of<T>(a) + unsigned_of<T>(b)); else return a + b;
}
template <class T> inline T sub(T a, T b) {
  if constexpr (std::is_integral_v<T>) return T(unsigned_of<T>(a) - unsigned_of<T>(b)); else return a - b;
}
template <class T> inline T mul(T a, T b) {
  if constexpr (std::is_integral_v<T>) return T(uint64_t(a) * uint64_t(b)); else return a * b;
}
template <class T> inline T neg(T a) {
  if constexpr (std::is_integral_v<T>) return T(unsigned_of<T>(0) - unsigned_of<T>(a)); else return -a;
}
template <class T> inline T abs(T a) {
  if constexpr (std::is_floating_point_v<T>) return std::fabs(a); else return a < 0 ? neg(a) : a;
}
template <class T> inline T sign(T a) { return T((a > 0) - (a < 0)); }          // NaN gives 0, as in PyTorch

// A NaN in either operand wins.
template <class T> inline T max(T a, T b) { return ((a > b) | (a != a)) ? a : b; }
template <class T> inline T min(T a, T b) { return ((a < b) | (a != a)) ? a : b; }

// a * b + c in one rounding where the machine has it: the polynomials below are half an ulp better for it.
inline float fma(float a, float b, float c) {
#if defined(__FMA__) || defined(__aarch64__)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

// 2**n in two factors, so that results below the normal range are rounded once and large ones reach inf.
inline float scale(float x, int32_t n) {
  const int32_t half = n >> 1, rest = n - half;
  return x * __builtin_bit_cast(float, uint32_t(half + 127) << 23) * __builtin_bit_cast(float, uint32_t(rest + 127) << 23);
}

// exp(x) = 2**n * exp(r), |r| <= ln(2)/2. Coefficients and the split of ln(2): Cephes, expf.c. Within 1 ulp.
inline float exp(float x) {
  x = x > 89.0f ? 89.0f : x;                       // exp(88.73) is already inf
  x = x < -105.0f ? -105.0f : x;                   // exp(-104) is already 0
  const float shifted = fma(x, 1.44269504088896341f, 12582912.0f);      // 1.5 * 2**23: the nearest integer is in the low bits
  const int32_t n = int32_t(__builtin_bit_cast(uint32_t, shifted) - 0x4b400000u);
  const float whole = shifted - 12582912.0f;
  const float r = fma(whole, 2.12194440e-4f, fma(whole, -0.693359375f, x));
  float p = 1.9875691500e-4f;
  p = fma(p, r, 1.3981999507e-3f);
  p = fma(p, r, 8.3334519073e-3f);
  p = fma(p, r, 4.1665795894e-2f);
  p = fma(p, r, 1.6666665459e-1f);
  p = fma(p, r, 5.0000001201e-1f);
  return scale(fma(p, r * r, r) + 1.0f, n);
}
inline double exp(double x) { return std::exp(x); }

// Below 0.625 a polynomial in x**2, above 1 - 2 / (exp(2x) + 1). Coefficients: Cephes, tanhf.c.
inline float tanh(float x) {
  const float a = std::fabs(x), z = x * x;
  float p = -5.70498872745e-3f;
  p = fma(p, z, 2.06390887954e-2f);
  p = fma(p, z, -5.37397155531e-2f);
  p = fma(p, z, 1.33314422036e-1f);
  p = fma(p, z, -3.33332819422e-1f);
  const float big = 1.0f - 2.0f / (exp(2.0f * a) + 1.0f);
  return a < 0.625f ? fma(p * z, x, x) : std::copysign(big, x);
}
inline double tanh(double x) { return std::tanh(x); }

// Below 0.93 a polynomial in x**2, above 1 - exp(q(|x|)). Coefficients: N. Juffa, stackoverflow.com/a/35148199; within 1.1 ulp.
inline float erf(float x) {
  const float a = std::fabs(x), z = x * x;
  float q = fma(fma(-1.72853470e-5f, a, 3.83197126e-4f), z, fma(-3.88396438e-3f, a, 2.42546219e-2f));
  q = fma(q, a, -1.06777877e-1f);
  q = fma(q, a, -6.34846687e-1f);
  q = fma(q, a, -1.28717512e-1f);
  q = fma(q, a, -a);
  const float big = 1.0f - exp(a > 4.0f ? -17.4f : q);        // 1 - erf(3.92) is half an ulp of 1; q of an infinity is NaN
  float p = fma(-5.96761703e-4f, z, 4.99119423e-3f);
  p = fma(p, z, -2.67681349e-2f);
  p = fma(p, z, 1.12819925e-1f);
  p = fma(p, z, -3.76125336e-1f);
  p = fma(p, z, 1.28379166e-1f);
  return a > 0.927734375f ? std::copysign(big, x) : fma(p, x, x);
}
inline double erf(double x) { return std::erf(x); }

using std::atan; using std::atan2; using std::ceil; using std::cos; using std::expm1; using std::floor;
using std::fmod; using std::log; using std::log1p; using std::pow; using std::sin; using std::sqrt; using std::tan; using std::trunc;
template <class T> inline T round(T x) { return std::nearbyint(x); }             // half to even

constexpr float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();

struct range { int64_t begin, end; };
// The part of n items that thread `i` of `count` does, in whole blocks.
inline range share(int64_t n, int64_t i, int64_t count, int64_t block) {
  const auto edge = [&](int64_t k) { const int64_t e = (n * k / count + block - 1) / block * block; return e < n ? e : n; };
  return {edge(i), edge(i + 1)};
}

}  // namespace infc::loop
