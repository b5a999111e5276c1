"""Primitives of generated loops: PyTorch's semantics in fp32 and whole numbers, the same compiled and interpreted.

Triton's own exp is ex2.approx of a rounded product (22 ulp off at 88), its `/` and sqrt are approximations, and its floor takes what is
below the normal range for 0: those here are within 1.5 ulp (tan, atan and atan2: 3), below the normal range too. Its sin, cos and erf are
libdevice's full forms (sin and cos reduce their argument exactly: by three terms below 105615, by Payne and Hanek above), within 2 ulp;
they and libdevice's pow and fmod, which are CUDA's, take what is below the normal range for 0. The interpreter has no libdevice: there,
pow and fmod are spelled otherwise.
"""
# ruff: noqa: RET505  # Triton compiles what follows a constant `if`; only an `else` leaves it out
import triton
import triton.language as tl
from triton.language.extra import libdevice

from .primitives import INTERPRETED

# ---- 16 bits. The interpreter's casts of bf16 cut bits off, and lose what is below the normal range: there, bits are moved

@triton.jit
def widen(x):
    """bf16 or fp16 as fp32."""
    if INTERPRETED and x.dtype == tl.bfloat16: return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else: return x.to(tl.float32)


@triton.jit
def round_bf16(x):
    """fp32 to the nearest bf16, ties to even, kept as fp32."""
    if INTERPRETED:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    else: return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def to_bf16(x):
    """An fp32 that was rounded as bf16."""
    if INTERPRETED: return (x.to(tl.int32, bitcast=True) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else: return x.to(tl.bfloat16)


@triton.jit
def round_f16(x):
    """fp32 to the nearest fp16, ties to even, kept as fp32."""
    return x.to(tl.float16).to(tl.float32)


@triton.jit
def to_f16(x):
    """An fp32 that was rounded as fp16."""
    return x.to(tl.float16)


# ---- signs, whole numbers, order

@triton.jit
def neg(x):
    """-0 of 0: Triton's own minus is 0 - x."""
    return x * -1.0 if x.dtype.is_floating() else 0 - x


@triton.jit
def sign(x):
    """0 of NaN, as in PyTorch."""
    return (x > 0).to(x.dtype) - (x < 0).to(x.dtype)


@triton.jit
def copy_sign(size, sign):
    bits = (size.to(tl.int32, bitcast=True) & 0x7FFFFFFF) | (sign.to(tl.int32, bitcast=True) & -0x80000000)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def round(x):
    """Half to even: numbers of 2**23 and more are whole, to others it is added, which leaves no room for a fraction."""
    size = tl.abs(x)
    return tl.where(size < 8388608.0, copy_sign((size + 8388608.0) - 8388608.0, x), x)


@triton.jit
def floor(x):
    whole = round(x)
    return tl.where(whole > x, whole - 1.0, whole)


@triton.jit
def ceil(x):
    return neg(floor(neg(x)))


@triton.jit
def trunc(x):
    return copy_sign(floor(tl.abs(x)), x)


@triton.jit
def maximum(a, b):
    """A NaN in either operand wins."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def minimum(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def bit_not(x):
    if x.dtype == tl.int1: return x == 0
    elif x.dtype == tl.uint8: return 255 - x
    else: return ~x


@triton.jit
def shl(x, by, BITS: tl.constexpr):
    """0 past the width, as in PyTorch."""
    outside = (by < 0) | (by >= BITS)
    return tl.where(outside, 0, x << tl.where(outside, 0, by)).to(x.dtype)


@triton.jit
def shr(x, by, BITS: tl.constexpr):
    """The sign past the width, as in PyTorch."""
    outside = (by < 0) | (by >= BITS)
    return tl.where(outside, tl.where(x < 0, -1, 0), x >> tl.where(outside, 0, by)).to(x.dtype)


@triton.jit
def fmod(x, y):
    """Exact: the sign of x, less than y in size."""
    if INTERPRETED or not x.dtype.is_floating(): return x % y
    else: return libdevice.fmod(x, y)


# ---- exponentials: x = n ln(2) + r with |r| <= ln(2) / 2. Coefficients and the split of ln(2): Cephes, expf.c

@triton.jit
def _parts(x):
    """n and exp(r) - 1."""
    x = tl.where(x > 89.0, 89.0, x)                        # exp(88.73) is already inf
    x = tl.where(x < -105.0, -105.0, x)                    # exp(-104) is already 0
    shifted = x * 1.44269504088896341 + 12582912.0         # 1.5 * 2**23: the nearest integer is in the low bits
    n = shifted.to(tl.int32, bitcast=True) - 0x4B400000
    whole = shifted - 12582912.0
    r = (x - whole * 0.693359375) + whole * 2.12194440e-4
    p = 1.9875691500e-4 * r + 1.3981999507e-3
    p = p * r + 8.3334519073e-3
    p = p * r + 4.1665795894e-2
    p = p * r + 1.6666665459e-1
    p = p * r + 5.0000001201e-1
    return n, p * (r * r) + r


@triton.jit
def _scale(x, n):
    """x 2**n in two factors, so that results below the normal range are rounded once and large ones reach inf."""
    half = n >> 1
    first = ((half + 127) << 23).to(tl.float32, bitcast=True)
    return x * first * ((n - half + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def exp(x):
    n, p = _parts(x)  # pyright: ignore[reportGeneralTypeIssues]
    return _scale(p + 1.0, n)


@triton.jit
def expm1(x):
    n, p = _parts(x)  # pyright: ignore[reportGeneralTypeIssues]
    small = tl.where(n > 25, 0, n)                         # past 2**25 the 1 is less than half an ulp
    one = ((small + 127 - (small >> 1)) << 23).to(tl.float32, bitcast=True) * (((small >> 1) + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(n > 25, _scale(p + 1.0, n), p * one + (one - 1.0))


@triton.jit
def tanh(x):
    """Below 0.625 a polynomial in x**2 (Cephes, tanhf.c), above 1 - 2 / (exp(2x) + 1)."""
    size, z = tl.abs(x), x * x
    p = -5.70498872745e-3 * z + 2.06390887954e-2
    p = p * z - 5.37397155531e-2
    p = p * z + 1.33314422036e-1
    p = p * z - 3.33332819422e-1
    big = 1.0 - tl.div_rn(2.0, exp(2.0 * size) + 1.0)
    return tl.where(size < 0.625, p * z * x + x, copy_sign(big, x))


# ---- logarithms: x = 2**e m with sqrt(1/2) <= m < sqrt(2). Coefficients: Cephes, logf.c

@triton.jit
def log(x):
    tiny = x < 1.17549435e-38
    bits = tl.where(tiny, x * 8388608.0, x).to(tl.int32, bitcast=True)
    n = (bits - 0x3F3504F3) >> 23                          # 0x3F3504F3 is sqrt(1/2)
    m = (bits - (n << 23)).to(tl.float32, bitcast=True) - 1.0
    e = tl.where(tiny, n - 23, n).to(tl.float32)
    z = m * m
    p = 7.0376836292e-2 * m - 1.1514610310e-1
    p = p * m + 1.1676998740e-1
    p = p * m - 1.2420140846e-1
    p = p * m + 1.4249322787e-1
    p = p * m - 1.6668057665e-1
    p = p * m + 2.0000714765e-1
    p = p * m - 2.4999993993e-1
    p = p * m + 3.3333331174e-1
    y = p * m * z - e * 2.12194440e-4
    y = (m + (y - 0.5 * z)) + e * 0.693359375
    y = tl.where(x < float("inf"), y, x)                   # inf and NaN are their own
    return tl.where(x > 0.0, y, tl.where(x == 0.0, -float("inf"), tl.where(x < 0.0, float("nan"), y)))


@triton.jit
def log1p(x):
    """log(u) + what u = 1 + x was rounded by, over u."""
    u = 1.0 + x
    lost = tl.where(x < 1.0, x - (u - 1.0), 1.0 - (u - x))
    whole = (u == 0.0) | (u == float("inf")) | (u != u)
    return tl.where(whole, log(u), log(u) + tl.div_rn(lost, tl.where(whole, 1.0, u)))


# ---- the circle

@triton.jit
def tan(x):
    return tl.div_rn(tl.sin(x), tl.cos(x))


@triton.jit
def atan(x):
    """Cephes, atanf.c: |x| brought below tan(pi/8)."""
    size = tl.abs(x)
    big, middle = size > 2.414213562373095, size > 0.4142135623730950
    r = tl.div_rn(tl.where(big, -1.0, tl.where(middle, size - 1.0, size)), tl.where(big, size, tl.where(middle, size + 1.0, 1.0)))
    z = r * r
    p = 8.05374449538e-2 * z - 1.38776856032e-1
    p = p * z + 1.99777106478e-1
    p = p * z - 3.33329491539e-1
    y = p * z * r + r + tl.where(big, 1.5707963267948966, tl.where(middle, 0.7853981633974483, 0.0))
    return copy_sign(y, x)


@triton.jit
def atan2(y, x):
    """The angle of (x, y), of zeros and infinities as in C."""
    wide, high = tl.abs(x), tl.abs(y)
    least, most = tl.where(wide < high, wide, high), tl.where(wide < high, high, wide)
    plain = (most > 0.0) & (least < float("inf"))
    a = atan(tl.where(plain, tl.div_rn(least, tl.where(plain, most, 1.0)), tl.where(most > 0.0, 1.0, 0.0)))
    a = tl.where(high > wide, 1.5707963267948966 - a, a)
    a = tl.where(x.to(tl.int32, bitcast=True) < 0, 3.141592653589793 - a, a)
    return tl.where((x == x) & (y == y), copy_sign(a, y), float("nan"))


@triton.jit
def pow(x, y):
    if INTERPRETED:
        wide = y.to(tl.float64)
        size = tl.exp2(wide * tl.log2(tl.abs(x).to(tl.float64))).to(tl.float32)
        odd = (trunc(y) == y) & (trunc(0.5 * y) != 0.5 * y)
        z = tl.where(odd, copy_sign(size, x), size)
        z = tl.where((x < 0.0) & (x > -float("inf")) & (trunc(y) != y), float("nan"), z)
        return tl.where((y == 0.0) | (x == 1.0) | ((x == -1.0) & (tl.abs(y) == float("inf"))), 1.0, z)
    else: return libdevice.pow(x, y)


# ---- rows: [R, C] -> [R, 1]

@triton.jit
def row_sum(x):
    return tl.sum(x, 1, keep_dims=True).to(x.dtype)


@triton.jit
def _times(a, b):
    return a * b


@triton.jit
def row_prod(x):
    return tl.reduce(x, 1, _times, keep_dims=True)


@triton.jit
def _in_order(bits):
    """Between the bits of an fp32 and an integer of the same order."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def row_max(x):
    """NaN wins: floats are compared by their bits, as integers, for which sm_80 and later have one instruction a warp."""
    if x.dtype.is_floating():
        key = tl.where(x == x, _in_order(x.to(tl.int32, bitcast=True)), 0x7FFFFFFF)
        return _in_order(tl.max(key, 1, keep_dims=True)).to(tl.float32, bitcast=True)
    else: return tl.max(x, 1, keep_dims=True).to(x.dtype)


@triton.jit
def row_min(x):
    if x.dtype.is_floating():
        key = tl.where(x == x, _in_order(x.to(tl.int32, bitcast=True)), -0x80000000)
        return _in_order(tl.min(key, 1, keep_dims=True)).to(tl.float32, bitcast=True)
    else: return tl.min(x, 1, keep_dims=True).to(x.dtype)
