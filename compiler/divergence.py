"""How far two graphs' next-token distributions are apart, beside what 16 bits themselves cost; and where fp16 ends."""
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.utils._pytree import tree_map

from .ir import Graph, evaluate, where
from .judge import samples
from .ops import aten, infc
from .step_batch import StepSamples

NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""--dtype -> what weights, KV cache and what products read become."""
WIDE = torch.float32

LARGEST = torch.finfo(torch.float16).max
"""Of fp16; bf16 reaches as far as fp32."""

READERS = {infc.linear.default, infc.linear_swiglu.default, infc.linear_quantized.default, infc.linear_swiglu_quantized.default,
           infc.paged_attention.default, infc.paged_attention_quantized.default, aten.embedding.default}
"""Operators whose first argument narrow_dtype makes narrow."""


def narrow(graph: Graph) -> torch.dtype | None:
    """The 16 bits that the graph's products read; None where they read fp32."""
    read = (node.args[0].meta["val"].dtype for node in graph.nodes if node.target in READERS)      # type: ignore[union-attr]
    return next((dtype for dtype in read if dtype in NARROW.values()), None)


def divergences(
    before: Graph, after: Graph, convert: Callable[[tuple[Tensor, ...]], Sequence[Tensor]] | None = None,
    yardstick: torch.dtype = torch.bfloat16,
) -> tuple[float, float]:
    """Mean KL of next-token distributions, for a step graph over whole prompts: (fp32 || ours, fp32 || eager in the yardstick).

    convert: a sample of `before` -> one of `after`; by default the same tensors in its dtypes.
    """
    index = before.outputs.index("logits") if "logits" in before.outputs else len(before.outputs) - 1
    ours, eager, dtypes = [], [], input_dtypes(after)
    for sample in prompts(before):
        truth = before.run(*map(torch.clone, sample))[index]
        given = converted(sample, dtypes) if convert is None else convert(sample)
        ours.append(divergence(truth, after.run(*map(torch.clone, given))[index]))
        eager.append(divergence(truth, _run_eager(before, sample, yardstick)[index]))
    return float(torch.cat(ours).mean()), float(torch.cat(eager).mean())


def prompts(graph: Graph) -> Sequence[tuple[Tensor, ...]]:
    """Samples that compute what the model itself does: whole prompts, where the graph is a step."""
    return graph.sample_inputs.prompts() if isinstance(graph.sample_inputs, StepSamples) else samples(graph, "fast")


def divergence(truth: Tensor, other: Tensor) -> Tensor:
    p, q = (t.double().log_softmax(-1) for t in (truth, other))
    return (p.exp() * (p - q)).sum(-1).flatten()


def _run_eager(graph: Graph, sample: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    """What PyTorch computes with weights and activations in `dtype`: each operator in fp32 inside, its result rounded.

    Everything downstream of a matrix is an activation. Angles and masks come from positions alone and stay fp32, as they do in
    Hugging Face's models.
    """
    def rounded(value: Any) -> Any:
        return value.to(dtype).to(WIDE) if isinstance(value, Tensor) and value.dtype == WIDE else value

    active: set[fx.Node] = set()
    matrices = {name for name, w in graph.weights.items() if w.dim() > 1}
    for node in graph.nodes:
        if any(n in active or (n.op == "placeholder" and str(n.target) in matrices) for n in node.all_input_nodes):
            active.add(node)
    weights = {name: rounded(graph.weights[name]) if any(u in active for u in node.users) else graph.weights[name]
               for name, node in graph.placeholders.items() if name in graph.weights}

    def call(node: fx.Node, args: tuple, kwargs: dict) -> Any:
        result = node.target(*args, **kwargs)               # type: ignore[operator]
        if node not in active:
            return result
        if isinstance(node.target, OpOverload) and node.target._schema.is_mutable:
            for found, value in zip(node.target._schema.arguments, args, strict=False):
                if found.is_write: value.copy_(rounded(value))
        return tree_map(rounded, result)

    return evaluate(graph, [t.clone() for t in sample], weights, call)


def overflow(before: Graph, after: Graph) -> str | None:
    """Where a value of whole prompts ends as inf in fp16, and how large it is in fp32; None where all fit."""
    for sample in prompts(before):
        sizes, found = dict[str, float](), list[fx.Node]()

        def sized(node: fx.Node, args: tuple, kwargs: dict, sizes: dict[str, float] = sizes) -> Any:
            result = node.target(*args, **kwargs)           # type: ignore[operator]
            if isinstance(result, Tensor) and result.dtype == WIDE and result.numel(): sizes[node.name] = float(result.abs().max())
            return result

        def watched(node: fx.Node, args: tuple, kwargs: dict, found: list[fx.Node] = found) -> Any:
            result = node.target(*args, **kwargs)           # type: ignore[operator]
            halves = (t for t in (result, *args) if isinstance(t, Tensor) and t.dtype == torch.float16)    # a cache is an argument
            if any(bool(t.isinf().any()) for t in halves): found.append(node)
            return result

        evaluate(before, [t.clone() for t in sample], before.weights, sized)
        evaluate(after, [t.clone() for t in converted(sample, input_dtypes(after))], after.weights, watched)
        if found:
            first = found[0]
            size = max(sizes.get(node.name, 0.0) for node in (first, *first.all_input_nodes))
            return f"{where(first)} overflows: its values reach {size:.3g}, and fp16 ends at {LARGEST:.0f}"
    return None


def converted(sample: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> tuple[Tensor, ...]:
    """A sample in the dtypes of another graph's inputs and caches."""
    return tuple(t.to(dtype) for t, dtype in zip(sample, dtypes, strict=True))


def input_dtypes(graph: Graph) -> tuple[torch.dtype, ...]:
    """Of every input, then of every KV cache."""
    placeholders = graph.placeholders
    return tuple(placeholders[name].meta["val"].dtype for name in graph.inputs + graph.kv)
