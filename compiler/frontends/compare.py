"""The captured graph is the module: both run on the samples, batch 1 and length 1 among them."""
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..errors import CheckFailed
from ..ir import Graph
from .messages import first_line

RELATIVE = 1e-6
"""Graph and module call the same kernels in the same order: the bits are equal but where a kernel is not deterministic."""


def compare(graph: Graph, module: nn.Module) -> None:
    """Run graph and module on the graph's samples; CheckFailed unless outputs agree to 1e-6 of their largest value."""
    samples = graph.sample_inputs() if graph.sample_inputs else []
    for sample in samples:
        shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in zip(graph.inputs, sample, strict=True))
        with torch.no_grad():
            expected = [x for x in pytree.tree_leaves(module(*sample)) if isinstance(x, Tensor)]
        try:
            found = graph.run(*sample)
        except (RuntimeError, IndexError, ValueError) as error:
            raise CheckFailed(f"the captured graph fails where the module runs ({shapes}): {first_line(error)}") from error
        for name, a, b in zip(graph.outputs, found, expected, strict=True):
            reason = _difference(a, b)
            if reason:
                raise CheckFailed(f"the captured graph differs from the module in {name} ({shapes}): {reason}")


def _difference(found: Tensor, expected: Tensor) -> str | None:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return f"{found.dtype} {list(found.shape)}, expected {expected.dtype} {list(expected.shape)}"
    if torch.equal(found, expected) or not expected.numel():
        return None
    if not expected.is_floating_point():
        return f"{int((found != expected).sum())} of {expected.numel()} values differ"
    a, b = found.double(), expected.double()
    a, b = a.where(a.isfinite(), 0.0), b.where(b.isfinite(), 0.0)
    same_special = all(torch.equal(kind(found), kind(expected)) for kind in (torch.isnan, torch.isposinf, torch.isneginf))
    error, scale = float((a - b).abs().max()), float(b.abs().max())
    return None if same_special and error <= RELATIVE * scale else f"largest error {error:.3g} where the largest value is {scale:.3g}"
