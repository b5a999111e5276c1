"""infc::add_rms_norm: the residual add and the norm after it, one trip over the rows."""
import torch
from torch import Tensor

from .registry import Cost, nbytes, operator, out_bytes


def cost(x: Tensor, residual: Tensor, w: Tensor, eps: float, out_dtype: torch.dtype | None = None) -> Cost:
    written = out_bytes(x.shape, out_dtype or x.dtype) + nbytes(residual)      # y and h
    return Cost(flops=5 * x.numel(), bytes=nbytes(x) + nbytes(residual) + nbytes(w) + written)


@operator("infc::add_rms_norm", cost=cost)
def add_rms_norm(
    x: Tensor, residual: Tensor, w: Tensor, eps: float, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """h = x + residual; y = h / sqrt(mean(h², last axis) + eps) * w.  x, residual [..., n], w [n] -> (y, h).

    x and residual have one shape; y has out_dtype (x.dtype when None), h the wider dtype of x and residual.
    """
    h = x + residual
    y = h * torch.rsqrt((h * h).mean(-1, keepdim=True) + eps) * w
    return y.to(out_dtype or x.dtype).contiguous(), h.contiguous()


@add_rms_norm.register_fake
def _(
    x: Tensor, residual: Tensor, w: Tensor, eps: float, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(x.dtype, residual.dtype)
    return x.new_empty(x.shape, dtype=out_dtype or x.dtype), x.new_empty(x.shape, dtype=wide)
