"""infc::layer_norm: LayerNorm over the last axis, with or without a bias."""
import torch
from torch import Tensor

from .registry import Cost, nbytes, operator, out_bytes


def cost(x: Tensor, w: Tensor, b: Tensor | None, eps: float, out_dtype: torch.dtype | None = None) -> Cost:
    written = out_bytes(x.shape, out_dtype or x.dtype)
    return Cost(flops=7 * x.numel(), bytes=nbytes(x) + nbytes(w) + nbytes(b) + written)


@operator("infc::layer_norm", cost=cost)
def layer_norm(x: Tensor, w: Tensor, b: Tensor | None, eps: float, out_dtype: torch.dtype | None = None) -> Tensor:
    """(x - mean) / sqrt(var + eps) * w + b over the last axis, var biased, as aten.layer_norm.  x [..., n], w, b [n]."""
    return torch.nn.functional.layer_norm(x, w.shape, w, b, eps).to(out_dtype or x.dtype).contiguous()


@layer_norm.register_fake
def _(x: Tensor, w: Tensor, b: Tensor | None, eps: float, out_dtype: torch.dtype | None = None) -> Tensor:
    return x.new_empty(x.shape, dtype=out_dtype or x.dtype)
