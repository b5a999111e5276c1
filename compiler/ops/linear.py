"""infc::linear: one matrix product with its bias, its residual and its result dtype."""
import torch
from torch import Tensor

from .registry import Cost, compute_dtype, nbytes, operator, out_bytes


def cost(
    x: Tensor, w: Tensor, bias: Tensor | None = None, residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Cost:
    written = out_bytes((*x.shape[:-1], w.shape[0]), out_dtype or x.dtype)
    return Cost(flops=2 * x.numel() * w.shape[0],
                bytes=nbytes(x) + nbytes(w) + nbytes(bias) + nbytes(residual) + written)


def product(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """x wᵀ + bias, operands as they are, summed in fp32 (fp64 for fp64) and left there."""
    wide = compute_dtype(x.dtype)
    return torch.nn.functional.linear(x.to(wide), w.to(wide), None if bias is None else bias.to(wide))


@operator("infc::linear", cost=cost)
def linear(
    x: Tensor, w: Tensor, bias: Tensor | None = None, residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """x wᵀ + bias + residual.  x [..., K], w [N, K], bias [N], residual [..., N] -> [..., N] in out_dtype (x.dtype).

    x and w have one dtype. Summed in fp32 (fp64 for fp64), rounded once at the end.
    """
    if x.dtype != w.dtype: raise TypeError(f"x is {x.dtype}, w is {w.dtype}")
    y = product(x, w, bias)
    if residual is not None: y = y + residual.to(y.dtype)
    return y.to(out_dtype or x.dtype).contiguous()


@linear.register_fake
def _(
    x: Tensor, w: Tensor, bias: Tensor | None = None, residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    if x.dtype != w.dtype: raise TypeError(f"x is {x.dtype}, w is {w.dtype}")
    torch._check(x.shape[-1] == w.shape[1], lambda: f"x has {x.shape[-1]} columns, w has {w.shape[1]}")
    return x.new_empty((*x.shape[:-1], w.shape[0]), dtype=out_dtype or x.dtype)
