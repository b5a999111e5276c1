"""infc::swiglu: act(gate) * up, gate and up lying side by side in the last axis."""
from collections.abc import Callable

import torch
from torch import Tensor

from .registry import Cost, nbytes, operator, out_bytes

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}


def activation(act: str) -> Callable[[Tensor], Tensor]:
    """The function called `act`. ValueError naming the known ones."""
    if act not in ACTIVATIONS: raise ValueError(f"activation {act!r} is none of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[act]


def cost(gate_up: Tensor, act: str, out_dtype: torch.dtype | None = None) -> Cost:
    written = out_bytes((*gate_up.shape[:-1], gate_up.shape[-1] // 2), out_dtype or gate_up.dtype)
    return Cost(flops=3 * gate_up.numel(), bytes=nbytes(gate_up) + written)


@operator("infc::swiglu", cost=cost)
def swiglu(gate_up: Tensor, act: str, out_dtype: torch.dtype | None = None) -> Tensor:
    """act(g) * u with g, u = halves of the last axis.  gate_up [..., 2F] -> [..., F]; act: silu, gelu, gelu_tanh."""
    gate, up = gate_up.chunk(2, -1)
    return (activation(act)(gate) * up).to(out_dtype or gate_up.dtype).contiguous()


@swiglu.register_fake
def _(gate_up: Tensor, act: str, out_dtype: torch.dtype | None = None) -> Tensor:
    activation(act)
    return gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2), dtype=out_dtype or gate_up.dtype)
