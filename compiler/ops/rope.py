"""infc::rope: rotary positions on queries and keys, half-split or interleaved, whole or partial width."""
import torch
from torch import Tensor

from .registry import Cost, nbytes, operator


def cost(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Cost:
    rotated = 2 * cos.shape[-1] * (q.numel() // q.shape[-1] + k.numel() // k.shape[-1])
    return Cost(flops=3 * rotated, bytes=2 * nbytes(q) + 2 * nbytes(k) + nbytes(cos) + nbytes(sin))


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """The rotation of one tensor: pairs (a, b) become (a cos - b sin, b cos + a sin), the rest passes."""
    half = cos.shape[-1]
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        out = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    else:
        a, b = turned[..., :half], turned[..., half:]
        out = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    return torch.cat((out.to(x.dtype), rest), -1)


@operator("infc::rope", cost=cost)
def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Rotate q and k.  q [..., D], k [..., D]; cos, sin [..., R/2] broadcast against q[..., :R/2] -> (q', k').

    Rotary width R <= D, the rest passes through. interleaved=False pairs channel i with i + R/2 (Hugging Face Llama),
    True pairs 2i with 2i + 1 (the RoFormer paper, GPT-J).
    """
    if 2 * cos.shape[-1] > q.shape[-1]: raise ValueError(f"rotary width {2 * cos.shape[-1]} > head size {q.shape[-1]}")
    return rotate(q, cos, sin, interleaved).contiguous(), rotate(k, cos, sin, interleaved).contiguous()


@rope.register_fake
def _(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape)
