"""What kernels that work row by row share: which tensors they take, how wide a program is, the sums of a row, its rounding to codes."""
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...compiler.ops.codes import E4M3_MAX, ROW_LIMIT, TINY, groups
from .primitives import narrow, narrow_e4m3

FLOATS = (torch.bfloat16, torch.float16, torch.float32)

MAX_COLS = 16_384
"""The longest row one program holds in registers; 16 warps have 32 numbers of it a thread."""

GROUPS = (32, 64, 128, 256)
"""Columns to a scale that kernels know, beside whole rows."""

CHUNK = 1024
"""Numbers of a row that one program of a kernel without sums moves: 16 bytes a thread of two-byte numbers and 4 warps."""


def refuse_dtypes(**tensors: Tensor | None) -> str | None:
    """Why not, where one is not bf16, fp16 or fp32 or not contiguous; None where all are."""
    for name, tensor in tensors.items():
        if tensor is None: continue
        if tensor.dtype not in FLOATS: return f"{name} is {tensor.dtype}: bf16, fp16 and fp32 are known"
        if not tensor.is_contiguous(): return f"{name} is not contiguous"
    return None


def refuse_out(dtype: torch.dtype | None) -> str | None:
    """Why not, where results are wanted in another type."""
    return None if dtype in (None, *FLOATS) else f"results in {dtype}: bf16, fp16 and fp32 are known"


def refuse_norm(x: Tensor, w: Tensor, b: Tensor | None, out_dtype: torch.dtype | None) -> str | None:
    """Why not, of a norm over x's last axis with weight w and bias b of one row."""
    n = x.shape[-1] if x.dim() else 0
    if not 0 < n <= MAX_COLS: return f"rows of {n}: 1 to {MAX_COLS} are known"
    for name, tensor in (("w", w), ("b", b)):
        if tensor is not None and tuple(tensor.shape) != (n,): return f"{name} is {tuple(tensor.shape)}, x has rows of {n}"
    return refuse_dtypes(x=x, w=w, b=b) or refuse_out(out_dtype)


def refuse_codes(x: Tensor, group: int) -> str | None:
    """Why not, of a norm whose result becomes codes."""
    n = x.shape[-1] if x.dim() else 0
    return f"groups of {group}: {', '.join(map(str, GROUPS))} and whole rows are known" if 0 < group < n and group not in GROUPS else None


def codes_of_norm(x: Tensor, group: int, out_dtype: torch.dtype | None) -> dict[str, Any]:
    """The constants of a norm that makes codes of its result in out_dtype, one program a row."""
    n = x.shape[-1]
    wide = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}[out_dtype or x.dtype]
    return {"N": n, "GROUP": n if groups(n, group) == 1 else group, "WIDE": wide, "BLOCK": power_of_2(n)}


def limits(e4m3: bool) -> tuple[float, float]:
    """`tiny` and `limit` of codes of 8 bits."""
    return TINY, E4M3_MAX if e4m3 else float(ROW_LIMIT[8])


def warps_of(block: int) -> int:
    """Warps of a program that holds `block` numbers: 16 numbers a thread, up to 16 warps."""
    return min(16, max(1, block // 512))


def power_of_2(number: int) -> int:
    """The least power of 2 that is not less: what tl.arange takes."""
    return 1 << max(0, number - 1).bit_length()


def grid_of_chunks(rows: int, cols: int) -> tuple[tuple[int, int], int]:
    """Grid and block of a kernel that moves rows in chunks. Rows come first: only that axis goes past 65535."""
    block = min(CHUNK, power_of_2(cols))
    return (rows, -(-cols // block)), block


@triton.jit
def inverse_root(sum_of_squares, N: tl.constexpr, eps):
    """1 / sqrt(sum / N + eps), rounded right: once a row, so it costs nothing."""
    return tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(sum_of_squares, tl.full((), N, tl.float32)) + eps))


@triton.jit
def inverse_scale(largest, tiny, limit):
    """What values of a row are multiplied by to become codes, in the order of compiler.ops.codes.row_codes."""
    there = largest > tiny
    return tl.where(there, tl.div_rn(1.0, tl.where(there, largest, 1.0)) * limit, 0.0)


@triton.jit
def largest_of(x):
    """The largest magnitude of each row of x [rows, columns]; NaN where there is one."""
    return tl.where(tl.max((x != x).to(tl.int32), 1) > 0, float("nan"), tl.max(tl.where(x == x, tl.abs(x), 0.0), 1))


@triton.jit
def codes_of(x, inverse, limit, E4M3: tl.constexpr):
    """fp32 -> codes i8 (or e4m3): to the nearest, ties to even. Of NaN a code of 0: its scale says so."""
    scaled = x * inverse
    scaled = tl.where(scaled == scaled, tl.minimum(tl.maximum(scaled, -limit), limit), 0.0)
    return narrow_e4m3(scaled) if E4M3 else (scaled + 12582912.0 - 12582912.0).to(tl.int8)      # 1.5 * 2**23: no fraction is left


@triton.jit
def round_groups(x, tiny, limit, E4M3: tl.constexpr):
    """x [groups, columns] in fp32, zeros where nothing is -> codes i8 (or e4m3) and scales: those of compiler.ops.codes.row_codes."""
    largest = largest_of(x)
    codes = codes_of(x, inverse_scale(largest, tiny, limit)[:, None], limit, E4M3)     # pyright: ignore[reportGeneralTypeIssues]
    return codes, tl.div_rn(largest, tl.zeros_like(largest) + limit)


@triton.jit
def write_codes(y, codes_ptr, scale_ptr, tiny, limit, N: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """A program's row y [BLOCK] of fp32, rounded to WIDE first, to codes [rows, N] and scales [rows, G] of GROUP columns each."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    G: tl.constexpr = (N + GROUP - 1) // GROUP
    SPAN: tl.constexpr = BLOCK if G == 1 else GROUP
    y = tl.where(col < N, narrow(y, WIDE).to(tl.float32), 0.0)
    codes, scale = round_groups(                                    # pyright: ignore[reportGeneralTypeIssues]
        tl.reshape(y, (BLOCK // SPAN, SPAN)), tiny, limit, codes_ptr.dtype.element_ty == tl.float8e4nv)
    g = tl.arange(0, BLOCK // SPAN)
    tl.store(codes_ptr + row * N + col, tl.reshape(codes, (BLOCK,)), col < N)
    tl.store(scale_ptr + row * G + g, scale, g < G)
