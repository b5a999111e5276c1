"""infc::linear_swiglu: the merged gate/up product with its activation; the 2F-wide product never reaches memory."""
import torch
from torch import Tensor

from .linear import product
from .registry import Cost, nbytes, operator, out_bytes
from .swiglu import activation


def cost(x: Tensor, w: Tensor, act: str, out_dtype: torch.dtype | None = None) -> Cost:
    rows, width = x.numel() // x.shape[-1], w.shape[0]
    written = out_bytes((*x.shape[:-1], width // 2), out_dtype or x.dtype)
    return Cost(flops=2 * x.numel() * width + 3 * rows * width, bytes=nbytes(x) + nbytes(w) + written)


@operator("infc::linear_swiglu", cost=cost)
def linear_swiglu(x: Tensor, w: Tensor, act: str, out_dtype: torch.dtype | None = None) -> Tensor:
    """act(g) * u with g, u = halves of x wᵀ.  x [..., K], w [2F, K] (rows 0..F-1 gate, F..2F-1 up) -> [..., F].

    Product and activation in fp32 (fp64 for fp64), rounded once at the end.
    """
    if x.dtype != w.dtype: raise TypeError(f"x is {x.dtype}, w is {w.dtype}")
    gate, up = product(x, w).chunk(2, -1)
    return (activation(act)(gate) * up).to(out_dtype or x.dtype).contiguous()


@linear_swiglu.register_fake
def _(x: Tensor, w: Tensor, act: str, out_dtype: torch.dtype | None = None) -> Tensor:
    if x.dtype != w.dtype: raise TypeError(f"x is {x.dtype}, w is {w.dtype}")
    activation(act)
    return x.new_empty((*x.shape[:-1], w.shape[0] // 2), dtype=out_dtype or x.dtype)
