"""What kernels that work row by row share: which tensors they take, how wide a program is, the sums and the scale of a row."""
import torch
import triton
import triton.language as tl
from torch import Tensor

FLOATS = (torch.bfloat16, torch.float16, torch.float32)

MAX_COLS = 16_384
"""The longest row one program holds in registers; 16 warps have 32 numbers of it a thread."""

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
