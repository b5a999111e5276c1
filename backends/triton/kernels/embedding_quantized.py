"""infc::embedding_quantized: rows of a table held as codes, made wide in registers."""
import torch
import triton
import triton.language as tl
from torch import Tensor

from ....compiler.ops import embedding_quantized
from ....compiler.ops.codes import E4M3, groups
from ..primitives import e4m3_as, narrow
from ..registry import Emit, kernel
from ..rows import power_of_2, refuse_out

COLUMNS = 1024
"""Columns of a row that one program makes."""


def refuse(
    codes: Tensor, scale: Tensor, offset: Tensor | None, indices: Tensor, bits: int, group: int, k: int,
    out_dtype: torch.dtype = torch.float32,
) -> str | None:
    """None where the kernel takes the call, else why not."""
    if bits not in (4, 8): return f"codes of {bits} bits: 4 and 8 are known"
    if codes.dtype not in (torch.uint8, E4M3): return f"codes are {codes.dtype}: u8 and e4m3 are known"
    if codes.dtype == E4M3 and (bits != 8 or offset is not None): return "e4m3 codes have 8 bits and no offset"
    if indices.dtype not in (torch.int32, torch.int64): return f"indices are {indices.dtype}: i32 and i64 are known"
    if scale.dtype != torch.float16 or (offset is not None and offset.dtype != torch.float16): return "scale or offset is not fp16"
    if not all(t.is_contiguous() for t in (codes, scale, offset, indices) if t is not None): return "an argument is not contiguous"
    return refuse_out(out_dtype)


@triton.jit
def _embedding(codes_ptr, scale_ptr, offset_ptr, index_ptr, y_ptr, V: tl.constexpr, K: tl.constexpr, BITS: tl.constexpr,
               FLOATS: tl.constexpr, GROUP: tl.constexpr, ONE_SCALE: tl.constexpr, OFFSET: tl.constexpr, BLOCK: tl.constexpr):
    BYTES: tl.constexpr = (K * BITS + 7) // 8
    G: tl.constexpr = (K + GROUP - 1) // GROUP
    place = tl.program_id(0).to(tl.int64)
    index = tl.load(index_ptr + place).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    seen = (k < K) & (index >= 0) & (index < V)                     # a row that is not there is zeros
    code = tl.load(codes_ptr.to(tl.pointer_type(tl.uint8)) + index * BYTES + k * BITS // 8, seen, other=0)
    if not FLOATS: code = code.to(tl.int32)
    if BITS == 4: code = (code >> (k % 2 * 4)) & 15
    scale = tl.load(scale_ptr + (0 if ONE_SCALE else index * G) + k // GROUP, seen, other=0.0).to(tl.float32)
    if FLOATS: y = e4m3_as(code, tl.float32) * scale
    elif OFFSET: y = code.to(tl.float32) * scale + tl.load(offset_ptr + index * G + k // GROUP, seen, other=0.0).to(tl.float32)
    else: y = (code - 2 ** (BITS - 1)).to(tl.float32) * scale
    tl.store(y_ptr + place * K + k, narrow(y, y_ptr.dtype.element_ty), k < K)


@kernel(embedding_quantized, refuse=refuse)
def lower(
    emit: Emit, y: Tensor, codes: Tensor, scale: Tensor, offset: Tensor | None, indices: Tensor, bits: int, group: int, k: int,
    out_dtype: torch.dtype = torch.float32,
) -> None:
    """codes u8 [V, ceil(k * bits / 8)] or e4m3, scale, offset f16 [V, G], indices [...] -> y [..., k]; zeros for an index outside."""
    block = min(COLUMNS, power_of_2(k))
    emit(_embedding, grid=(indices.numel(), -(-k // block)), args=(codes, scale, scale if offset is None else offset, indices, y),
         V=codes.shape[0], K=k, BITS=bits, FLOATS=codes.dtype == E4M3, GROUP=k if groups(k, group) == 1 else group,
         ONE_SCALE=scale.shape[0] < codes.shape[0], OFFSET=offset is not None, BLOCK=block)
