"""infc::rms_norm: what it means, what it returns, what it costs."""
import torch
from torch import Tensor

from .registry import Cost, nbytes, operator, out_bytes


def cost(x: Tensor, w: Tensor, eps: float, out_dtype: torch.dtype | None = None) -> Cost:
    written = out_bytes(x.shape, out_dtype or x.dtype)
    return Cost(flops=4 * x.numel(), bytes=nbytes(x) + nbytes(w) + written)


@operator("infc::rms_norm", cost=cost)
def rms_norm(x: Tensor, w: Tensor, eps: float, out_dtype: torch.dtype | None = None) -> Tensor:
    """x / sqrt(mean(x², last axis) + eps) * w, every step rounded to x.dtype.  x [..., n], w [n] -> [..., n]."""
    y = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * w
    return y.to(out_dtype or x.dtype).contiguous()


@rms_norm.register_fake
def _(x: Tensor, w: Tensor, eps: float, out_dtype: torch.dtype | None = None) -> Tensor:
    return x.new_empty(x.shape, dtype=out_dtype or x.dtype)
