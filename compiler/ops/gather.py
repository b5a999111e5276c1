"""ATen operators that pick rows: what they cost. A table is not read whole, only the rows that are asked for."""
from torch import Tensor

from .registry import Cost, nbytes, out_bytes


def embedding(weight: Tensor, indices: Tensor, **_: object) -> Cost:
    """Read a row of weight [V, K] for each index, write it to [..., K]."""
    return _rows(indices, (*indices.shape, weight.shape[-1]), weight)


def index_select(self: Tensor, dim: int, index: Tensor) -> Cost:
    """Read and write the picked slices of `self` along `dim`."""
    return _rows(index, (*self.shape[:dim], index.shape[0], *self.shape[dim:][1:]), self)


def _rows(indices: Tensor, shape: tuple[int, ...], table: Tensor) -> Cost:
    moved = out_bytes(shape, table.dtype)
    return Cost(flops=0, bytes=2 * moved + nbytes(indices), table=moved)


COSTS = {"aten.embedding.default": embedding, "aten.index_select.default": index_select}
"""ATen operator -> its cost."""
