"""What several kernels compute inside: products of tiles and activations, the same compiled and interpreted."""
# ruff: noqa: RET505  # Triton compiles what follows a constant `if`; only an `else` leaves it out
from typing import Any

import triton
import triton.language as tl
from triton import knobs

INTERPRETED = tl.constexpr(knobs.runtime.interpret)


@triton.jit
def dot(a, b, acc):
    """a b + acc, summed in fp32. Interpreted, operands are widened first: Triton 3.7's interpreter multiplies the bits of bf16."""
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """fp32 rounded to the nearest of dtype, ties to even. Interpreted, bf16 is rounded here: the interpreter cuts bits off."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits = tl.where(x == x, bits + 0x7FFF + ((bits >> 16) & 1), bits)
        x = (bits & 0xFFFF0000).to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def narrow_e4m3(x):
    """fp32 within +-448 rounded to the nearest e4m3, ties to even. Interpreted, it is rounded here: the interpreter loses the carry."""
    if INTERPRETED:
        bits = x.to(tl.uint32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & 0xFFF00000).to(tl.float32, bitcast=True)
        x = tl.where(tl.abs(x) < 0.015625, x + 24576.0 - 24576.0, normal)       # below 2**-6 in steps of 2**-9: 1.5 * 2**(23 - 9)
    return x.to(tl.float8e4nv)


# Codes become numbers by their bits: c under the exponent of 2**7 (bf16), 2**10 (fp16) or 2**23 (fp32) is that power plus c, and one
# subtraction is left. Plain casts of bytes cost 8 instructions a 4-bit code on sm_90, of which 128 lanes must do 40 a cycle to keep up with
# 4.8 TB/s; these cost 1.4 (4 bits) and 2.5 (8 bits). Words of two bytes lie in registers as bf16 pairs do, so nothing is moved.
_PARTS_4 = """{
.reg .b32 h, one, less;
mov.b32 one, ONE; mov.b32 less, LESS;
lop3.b32 $0, $4, 0x000F000F, BASE, 0xEA; shr.u32 h, $4, 4;
lop3.b32 $1, h, 0x000F000F, BASE, 0xEA; shr.u32 h, $4, 8;
lop3.b32 $2, h, 0x000F000F, BASE, 0xEA; shr.u32 h, $4, 12;
lop3.b32 $3, h, 0x000F000F, BASE, 0xEA;
FMA $0, $0, one, less; FMA $1, $1, one, less; FMA $2, $2, one, less; FMA $3, $3, one, less;
}"""
_HALVES_4 = """{
.reg .b32 t, h, one, less;
mov.b32 one, ONE; mov.b32 less, LESS;
prmt.b32 t, $4, 0, 0x4140; shr.u32 h, t, 4;
lop3.b32 $0, t, 0x000F000F, BASE, 0xEA; lop3.b32 $2, h, 0x000F000F, BASE, 0xEA;
prmt.b32 t, $4, 0, 0x4342; shr.u32 h, t, 4;
lop3.b32 $1, t, 0x000F000F, BASE, 0xEA; lop3.b32 $3, h, 0x000F000F, BASE, 0xEA;
FMA $0, $0, one, less; FMA $1, $1, one, less; FMA $2, $2, one, less; FMA $3, $3, one, less;
}"""
_BF16_8 = """{
.reg .f32 a, b, c, d;
.reg .b32 s, t, base;
mov.b32 base, 0x4B000000; xor.b32 s, $2, FLIP;
prmt.b32 t, s, base, 0x7440; mov.b32 a, t; prmt.b32 t, s, base, 0x7441; mov.b32 b, t;
prmt.b32 t, s, base, 0x7442; mov.b32 c, t; prmt.b32 t, s, base, 0x7443; mov.b32 d, t;
add.rn.f32 a, a, 0fCB000080; add.rn.f32 b, b, 0fCB000080; add.rn.f32 c, c, 0fCB000080; add.rn.f32 d, d, 0fCB000080;
cvt.rn.bf16x2.f32 $0, FIRST; cvt.rn.bf16x2.f32 $1, SECOND;
}"""                                                    # cvt puts its first source into the high half
_FP16_8 = """{
.reg .b32 s, one, less, base;
mov.b32 one, 0x3C003C00; mov.b32 less, 0xE480E480; mov.b32 base, 0x64646464; xor.b32 s, $2, FLIP;
prmt.b32 $0, s, base, FIRST; prmt.b32 $1, s, base, SECOND;
fma.rn.f16x2 $0, $0, one, less; fma.rn.f16x2 $1, $1, one, less;
}"""


def _filled(text: str, **values: str) -> Any:
    for name, value in values.items(): text = text.replace(name, value)
    return tl.constexpr(text)


_BF16 = {"ONE": "0x3F803F80", "LESS": "0xC308C308", "BASE": "0x43004300", "FMA": "fma.rn.bf16x2"}          # 1, -136, 128
_FP16 = {"ONE": "0x3C003C00", "LESS": "0xE408E408", "BASE": "0x64006400", "FMA": "fma.rn.f16x2"}           # 1, -1032, 1024
_BF16_PARTS_4, _FP16_PARTS_4 = _filled(_PARTS_4, **_BF16), _filled(_PARTS_4, **_FP16)
_BF16_HALVES_4, _FP16_HALVES_4 = _filled(_HALVES_4, **_BF16), _filled(_HALVES_4, **_FP16)
_BF16_BYTES_8 = _filled(_BF16_8, FLIP="0", FIRST="b, a", SECOND="d, c")
_BF16_PARTS_8 = _filled(_BF16_8, FLIP="0", FIRST="c, a", SECOND="d, b")
_BF16_SIGNED_8 = _filled(_BF16_8, FLIP="0x80808080", FIRST="b, a", SECOND="d, c")
_FP16_BYTES_8 = _filled(_FP16_8, FLIP="0", FIRST="0x4140", SECOND="0x4342")
_FP16_PARTS_8 = _filled(_FP16_8, FLIP="0", FIRST="0x4240", SECOND="0x4341")
_FP16_SIGNED_8 = _filled(_FP16_8, FLIP="0x80808080", FIRST="0x4140", SECOND="0x4342")
_E4M3 = """{
.reg .b32 t, sign, up, none;
mov.b32 up, UP; mov.b32 none, 0x80008000;
prmt.b32 t, $2, 0, FIRST; lop3.b32 sign, t, 0x80008000, 0, 0xC0; shr.u32 t, t, BY; lop3.b32 $0, t, MASK, sign, 0xEA;
prmt.b32 t, $2, 0, SECOND; lop3.b32 sign, t, 0x80008000, 0, 0xC0; shr.u32 t, t, BY; lop3.b32 $1, t, MASK, sign, 0xEA;
FMA $0, $0, up, none; FMA $1, $1, up, none;
}"""                                                    # exponent and fraction to their places, then times 2**120 (fp16: 2**8)
_BF16_E4M3 = {"UP": "0x7B807B80", "BY": "4", "MASK": "0x07F007F0", "FMA": "fma.rn.bf16x2"}
_FP16_E4M3 = {"UP": "0x5C005C00", "BY": "1", "MASK": "0x3F803F80", "FMA": "fma.rn.f16x2"}
_BF16_BYTES_E4M3 = _filled(_E4M3, FIRST="0x1404", SECOND="0x3424", **_BF16_E4M3)
_BF16_PARTS_E4M3 = _filled(_E4M3, FIRST="0x2404", SECOND="0x3414", **_BF16_E4M3)
_FP16_BYTES_E4M3 = _filled(_E4M3, FIRST="0x1404", SECOND="0x3424", **_FP16_E4M3)
_FP16_PARTS_E4M3 = _filled(_E4M3, FIRST="0x2404", SECOND="0x3414", **_FP16_E4M3)
_INT8_HALVES_4: Any = tl.constexpr("""{
.reg .b32 h;
lop3.b32 $0, $2, 0x0F0F0F0F, 0x80808080, 0xEA; sub.u32 $0, $0, 0x08080808; xor.b32 $0, $0, 0x80808080;
shr.u32 h, $2, 4;
lop3.b32 $1, h, 0x0F0F0F0F, 0x80808080, 0xEA; sub.u32 $1, $1, 0x08080808; xor.b32 $1, $1, 0x80808080;
}""")


@triton.jit
def _plain(codes, HALF: tl.constexpr, dtype: tl.constexpr):
    """Codes less HALF in dtype, by casts."""
    return (codes.to(tl.int32) - HALF).to(tl.float32).to(dtype)


@triton.jit
def bytes_as(b, dtype: tl.constexpr):
    """Codes of 8 bits, u8, less 128, in dtype: exact."""
    if dtype == tl.int8: return (b ^ 128).to(tl.int8, bitcast=True)
    elif INTERPRETED or dtype == tl.float32: return _plain(b, 128, dtype)
    elif dtype == tl.bfloat16: return tl.inline_asm_elementwise(_BF16_BYTES_8, "=r,=r,r", [b], dtype=tl.bfloat16, is_pure=True, pack=4)
    else: return tl.inline_asm_elementwise(_FP16_BYTES_8, "=r,=r,r", [b], dtype=tl.float16, is_pure=True, pack=4)


@triton.jit
def signed_as(b, dtype: tl.constexpr):
    """Codes of i8, or numbers of fp8, in dtype: exact."""
    if b.dtype != tl.int8: return b.to(dtype)
    elif INTERPRETED or dtype == tl.float32: return b.to(tl.float32).to(dtype)
    elif dtype == tl.bfloat16: return tl.inline_asm_elementwise(_BF16_SIGNED_8, "=r,=r,r", [b], dtype=tl.bfloat16, is_pure=True, pack=4)
    else: return tl.inline_asm_elementwise(_FP16_SIGNED_8, "=r,=r,r", [b], dtype=tl.float16, is_pure=True, pack=4)


@triton.jit
def halves_as(b, dtype: tl.constexpr):
    """Codes of 4 bits, two in a u8, less 8, in dtype: those of the low halves and those of the high, exact."""
    if INTERPRETED and dtype == tl.int8: return (b & 15).to(tl.int8) - 8, (b >> 4).to(tl.int8) - 8
    elif dtype == tl.int8:
        return tl.inline_asm_elementwise(_INT8_HALVES_4, "=r,=r,r", [b], dtype=(tl.int8, tl.int8), is_pure=True, pack=4)
    elif INTERPRETED or dtype == tl.float32: return _plain(b & 15, 8, dtype), _plain(b >> 4, 8, dtype)
    elif dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(_BF16_HALVES_4, "=r,=r,=r,=r,r", [b], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4)
    else: return tl.inline_asm_elementwise(_FP16_HALVES_4, "=r,=r,=r,=r,r", [b], dtype=(tl.float16, tl.float16), is_pure=True, pack=4)


@triton.jit
def pairs_of(w, dtype: tl.constexpr):
    """Codes of 8 bits, two in a u16, less 128, in dtype: those of the low bytes and those of the high, exact."""
    if INTERPRETED or dtype == tl.float32: return _plain(w & 255, 128, dtype), _plain(w >> 8, 128, dtype)
    elif dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(_BF16_PARTS_8, "=r,=r,r", [w], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2)
    else: return tl.inline_asm_elementwise(_FP16_PARTS_8, "=r,=r,r", [w], dtype=(tl.float16, tl.float16), is_pure=True, pack=2)


@triton.jit
def quarters_of(w, dtype: tl.constexpr):
    """Codes of 4 bits, four in a u16, less 8, in dtype, from the lowest bits up: exact."""
    if INTERPRETED or dtype == tl.float32:
        return _plain(w & 15, 8, dtype), _plain((w >> 4) & 15, 8, dtype), _plain((w >> 8) & 15, 8, dtype), _plain(w >> 12, 8, dtype)
    elif dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(_BF16_PARTS_4, "=r,=r,=r,=r,r", [w], is_pure=True, pack=2,
                                         dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16))
    else:
        return tl.inline_asm_elementwise(_FP16_PARTS_4, "=r,=r,=r,=r,r", [w], is_pure=True, pack=2,
                                         dtype=(tl.float16, tl.float16, tl.float16, tl.float16))


@triton.jit
def _plain_e4m3(b, dtype: tl.constexpr):
    """Bytes that are e4m3 in dtype, by casts."""
    return b.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32).to(dtype)


@triton.jit
def e4m3_as(b, dtype: tl.constexpr):
    """Bytes that are finite e4m3, u8, in dtype: exact."""
    if dtype == tl.float8e4nv: return b.to(tl.float8e4nv, bitcast=True)
    elif INTERPRETED or dtype == tl.float32: return _plain_e4m3(b, dtype)
    elif dtype == tl.bfloat16: return tl.inline_asm_elementwise(_BF16_BYTES_E4M3, "=r,=r,r", [b], dtype=tl.bfloat16, is_pure=True, pack=4)
    else: return tl.inline_asm_elementwise(_FP16_BYTES_E4M3, "=r,=r,r", [b], dtype=tl.float16, is_pure=True, pack=4)


@triton.jit
def e4m3_pairs_of(w, dtype: tl.constexpr):
    """Finite e4m3, two in a u16, in dtype: those of the low bytes and those of the high, exact."""
    if INTERPRETED or dtype == tl.float32: return _plain_e4m3(w & 255, dtype), _plain_e4m3(w >> 8, dtype)
    elif dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(_BF16_PARTS_E4M3, "=r,=r,r", [w], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2)
    else: return tl.inline_asm_elementwise(_FP16_PARTS_E4M3, "=r,=r,r", [w], dtype=(tl.float16, tl.float16), is_pure=True, pack=2)


@triton.jit
def sigmoid(x):
    """1 / (1 + e**-x) of fp32, with no overflow on the way."""
    e = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, e) / (1.0 + e)


@triton.jit
def tanh(x):
    """tanh of fp32, to a few ulp: 1 - e loses the low bits of small x, where its series (here within 1e-8) takes over."""
    e = tl.exp(-2.0 * tl.abs(x))
    y = (1.0 - e) / (1.0 + e)
    xx = x * x
    series = x + x * xx * (-1 / 3 + xx * (2 / 15 + xx * (-17 / 315 + xx * (62 / 2835))))
    return tl.where(xx < 0.0625, series, tl.where(x >= 0, y, -y))


@triton.jit
def activate(x, ACT: tl.constexpr):
    """The activation ACT (compiler.ops.swiglu) of fp32."""
    if ACT == "silu":
        return x * sigmoid(x)
    elif ACT == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        tl.static_assert(ACT == "gelu_tanh")
        return x * sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))      # 2 sqrt(2 / pi)
