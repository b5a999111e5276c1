"""The captured graph is the module: both run on the samples, batch 1 and length 1 among them."""
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from ..errors import CheckFailed, UserError, not_finite
from ..ir import Graph
from .messages import first_line

RELATIVE = 1e-6
"""Graph and module call the same kernels in the same order: the bits are equal but where a kernel is not deterministic."""


def compare(graph: Graph, module: nn.Module) -> None:
    """Run graph and module on the graph's samples; CheckFailed unless outputs agree to 1e-6 of their largest value.

    Raises UserError where the module itself is at fault: its logits are NaN, or something differs and its outputs are.
    """
    samples = graph.sample_inputs() if graph.sample_inputs else []
    for sample in samples:
        shapes = _shapes(graph, sample)
        expected = _outputs(module, sample)
        try:
            found = graph.run(*sample)
        except (RuntimeError, IndexError, ValueError) as error:
            raise CheckFailed(f"the captured graph fails where the module runs ({shapes}): {first_line(error)}") from error
        for name, a, b in zip(graph.outputs, found, expected, strict=True):
            reason = _difference(a, b)
            if reason or (name == "logits" and b.isnan().any()): _check_own(graph, module, samples)
            if reason: raise CheckFailed(f"the captured graph differs from the module in {name} ({shapes}): {reason}")


def _check_own(graph: Graph, module: nn.Module, samples: Sequence[Sequence[Tensor]]) -> None:
    """UserError where the module's own outputs hold NaN. Attention as plain operators: fused ones drop a NaN of some lengths."""
    for sample in samples:
        with sdpa_kernel(SDPBackend.MATH): found = _outputs(module, sample)
        for name, x in zip(graph.outputs, found, strict=True):
            if x.isnan().any():
                raise UserError(f"the module's own {name} are not finite ({_shapes(graph, sample)}: {not_finite(x)}); "
                                "mend its weights or its config, such as rope_theta or a norm's eps")


def _shapes(graph: Graph, sample: Sequence[Tensor]) -> str:
    return ", ".join(f"{name} {list(x.shape)}" for name, x in zip(graph.inputs, sample, strict=True))


def _outputs(module: nn.Module, sample: Sequence[Tensor]) -> list[Tensor]:
    with torch.no_grad(): return [x for x in pytree.tree_leaves(module(*sample)) if isinstance(x, Tensor)]


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
