"""How far two graphs' next-token distributions are apart, beside what bf16 itself costs."""
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.utils._pytree import tree_map

from .ir import Graph, evaluate
from .judge import samples
from .step_batch import StepSamples

NARROW, WIDE = torch.bfloat16, torch.float32


def divergences(
    before: Graph, after: Graph, convert: Callable[[tuple[Tensor, ...]], Sequence[Tensor]] | None = None,
) -> tuple[float, float]:
    """Mean KL of next-token distributions, for a step graph over whole prompts: (fp32 || ours, fp32 || eager bf16).

    convert: a sample of `before` -> one of `after`; by default the same tensors in its dtypes.
    """
    index = before.outputs.index("logits") if "logits" in before.outputs else len(before.outputs) - 1
    every = before.sample_inputs.prompts() if isinstance(before.sample_inputs, StepSamples) else samples(before, "fast")
    ours, eager, dtypes = [], [], input_dtypes(after)
    for sample in every:
        truth = before.run(*map(torch.clone, sample))[index]
        given = converted(sample, dtypes) if convert is None else convert(sample)
        ours.append(divergence(truth, after.run(*map(torch.clone, given))[index]))
        eager.append(divergence(truth, _run_eager_bf16(before, sample)[index]))
    return float(torch.cat(ours).mean()), float(torch.cat(eager).mean())


def divergence(truth: Tensor, other: Tensor) -> Tensor:
    p, q = (t.double().log_softmax(-1) for t in (truth, other))
    return (p.exp() * (p - q)).sum(-1).flatten()


def _run_eager_bf16(graph: Graph, sample: tuple[Tensor, ...]) -> tuple[Any, ...]:
    """What PyTorch computes with bf16 weights and activations: each operator in fp32 inside, its result rounded to bf16.

    Everything downstream of a matrix is an activation. Angles and masks come from positions alone and stay fp32, as they do in
    Hugging Face's models.
    """
    active: set[fx.Node] = set()
    matrices = {name for name, w in graph.weights.items() if w.dim() > 1}
    for node in graph.nodes:
        if any(n in active or (n.op == "placeholder" and str(n.target) in matrices) for n in node.all_input_nodes):
            active.add(node)
    weights = {name: _rounded(graph.weights[name]) if any(u in active for u in node.users) else graph.weights[name]
               for name, node in graph.placeholders.items() if name in graph.weights}

    def call(node: fx.Node, args: tuple, kwargs: dict) -> Any:
        result = node.target(*args, **kwargs)               # type: ignore[operator]
        if node not in active:
            return result
        if isinstance(node.target, OpOverload) and node.target._schema.is_mutable:
            for found, value in zip(node.target._schema.arguments, args, strict=False):
                if found.is_write: value.copy_(_rounded(value))
        return tree_map(_rounded, result)

    return evaluate(graph, [t.clone() for t in sample], weights, call)


def _rounded(value: Any) -> Any:
    return value.to(NARROW).to(WIDE) if isinstance(value, Tensor) and value.dtype == WIDE else value



def converted(sample: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> tuple[Tensor, ...]:
    """A sample in the dtypes of another graph's inputs and caches."""
    return tuple(t.to(dtype) for t, dtype in zip(sample, dtypes, strict=True))


def input_dtypes(graph: Graph) -> tuple[torch.dtype, ...]:
    """Of every input, then of every KV cache."""
    placeholders = graph.placeholders
    return tuple(placeholders[name].meta["val"].dtype for name in graph.inputs + graph.kv)
