"""aten.embedding, aten.index_select, aten.index of one index: rows of a table, copied in chunks.

An index outside the table gives a row of zeros, as on the CPU; aten.index counts negative ones from the end.
"""
import torch
import triton
import triton.language as tl
from torch import Tensor

from ..registry import Emit, kernel
from ..rows import FLOATS, grid_of_chunks

_COPIED = (*FLOATS, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool)


def _refuse(table: Tensor, index: Tensor) -> str | None:
    if table.dtype not in _COPIED: return f"a table of {table.dtype}"
    if index.dtype not in (torch.int32, torch.int64): return f"indices are {index.dtype}: int32 and int64 are known"
    if not (table.is_contiguous() and index.is_contiguous()): return "the table or the indices are not contiguous"
    return None


def refuse_embedding(
    weight: Tensor, indices: Tensor, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False,
) -> str | None:
    """None where the kernel takes the call, else why not."""
    if weight.dim() != 2: return f"a table of {tuple(weight.shape)}: rows are known"
    return _refuse(weight, indices)


def refuse_index_select(self: Tensor, dim: int, index: Tensor) -> str | None:
    """None where the kernel takes the call, else why not."""
    if not self.dim() or index.dim() != 1: return f"indices {tuple(index.shape)} into {tuple(self.shape)}"
    return _refuse(self, index)


def refuse_index(self: Tensor, indices: list[Tensor | None]) -> str | None:
    """None where the kernel takes the call, else why not."""
    if len(indices) != 1 or indices[0] is None: return f"{len(indices)} indices: one, of the first axis, is known"
    if not self.dim(): return "it picks from a number"
    return _refuse(self, indices[0])


@triton.jit
def _gather(table_ptr, index_ptr, y_ptr, rows, count, WIDTH: tl.constexpr, BLOCK: tl.constexpr, FROM_END: tl.constexpr):
    outer = tl.program_id(0) // count                     # y [outer, count, WIDTH] from a table [outer, rows, WIDTH]
    place = tl.load(index_ptr + tl.program_id(0) % count).to(tl.int64)
    if FROM_END: place = tl.where(place < 0, place + rows, place)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = (place >= 0) & (place < rows)
    value = tl.load(table_ptr + (outer.to(tl.int64) * rows + place) * WIDTH + col, (col < WIDTH) & there, other=0)
    tl.store(y_ptr + tl.program_id(0).to(tl.int64) * WIDTH + col, value, col < WIDTH)


def _lower(emit: Emit, y: Tensor, table: Tensor, index: Tensor, dim: int, from_end: bool = False) -> None:
    if not y.numel(): return
    outer = table.shape[:dim].numel()
    width = table.shape[dim + 1 :].numel()
    grid, block = grid_of_chunks(outer * index.numel(), width)
    emit(_gather, grid=grid, args=(table, index, y, table.shape[dim], index.numel()), WIDTH=width, BLOCK=block, FROM_END=from_end)


@kernel(torch.ops.aten.embedding.default, refuse=refuse_embedding)
def lower_embedding(
    emit: Emit, y: Tensor, weight: Tensor, indices: Tensor, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False,
) -> None:
    """weight [V, K], indices [...] -> y [..., K]. What it says of gradients does not matter here."""
    _lower(emit, y, weight, indices, 0)


@kernel(torch.ops.aten.index_select.default, refuse=refuse_index_select)
def lower_index_select(emit: Emit, y: Tensor, self: Tensor, dim: int, index: Tensor) -> None:
    """self [..., n, ...], index [m] -> y [..., m, ...], along dim."""
    _lower(emit, y, self, index, dim % self.dim())


@kernel(torch.ops.aten.index.Tensor, refuse=refuse_index)
def lower_index(emit: Emit, y: Tensor, self: Tensor, indices: list[Tensor]) -> None:
    """self [n, ...], one index [...] -> y [..., ...]."""
    _lower(emit, y, self, indices[0], 0, from_end=True)
