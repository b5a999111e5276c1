"""Weights one after the other as the model reads them, each for the inputs that those before it give as codes.

All windows of the text go through the graph side by side, node by node, so that one pass does for all weights and nothing is kept
but what is still to be read, and the sums of one weight.
"""
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ..ir import Graph, last_uses, needed
from ..ops.codes import rounded_rows
from .matrices import PRODUCTS, named
from .rounding import Quantized
from .scheme import Scheme
from .statistics import Window, check_inputs, check_windows, inputs_of

FIRST = 100.0
"""Weight of a decoder's first row of each window among the others. The first token of a text is where attention looks when it finds
nothing: one row in 512, and most queries read its key. KL of SmolLM2 on text not seen, ten layers in w4 by 4,096 tokens: 0.0276 with 1,
0.0244 with 100."""

InOrder = Callable[[Tensor, Scheme, str, Tensor], Quantized]
"""(w f32 [N, K], scheme, name, gram f32 [K, K]: xᵀx of what its product reads) -> codes."""


def in_order(
    graph: Graph, schemes: Mapping[fx.Node, Scheme], known: Mapping[fx.Node, Quantized], windows: Sequence[Window], choose: InOrder,
) -> Iterator[tuple[fx.Node, Quantized]]:
    """Codes of each weight in `schemes` but those that are known, for what the first product that reads it meets.

    UserError for no windows, or where a product's inputs are not finite.
    """
    check_windows(windows)
    codes = {str(node.target): found.dequantized() for node, found in known.items()}
    rounds = {str(weight.target): scheme for weight, scheme in schemes.items()}
    asked = {str(weight.target): weight for weight in schemes if weight not in known}
    first = _first_products(graph, asked)
    walks = [_Walk(dict(zip(graph.inputs + graph.kv, inputs_of(graph, window), strict=True)), graph.weights, codes) for window in windows]
    wanted, last = needed({product.args[0] for product in first}), last_uses(graph.module.graph)      # type: ignore[misc]
    for node in graph.nodes:
        scheme = _scheme(node, rounds)
        if (name := first.get(node)) is not None and scheme is not None:
            gram = _gram([as_read(walk[node.args[0]], scheme) for walk in walks], FIRST if "sample_rows" in graph.inputs else 1.0, name)
            found = choose(graph.weights[name].float(), scheme, named(node.args[1]), gram)      # type: ignore[arg-type]
            codes[name] = found.dequantized()
            yield asked[name], found
        for walk in walks:
            if node in wanted and node.op == "call_function": walk.step(node, scheme)
            walk.forget(last.get(node, ()))


def _first_products(graph: Graph, names: Mapping[str, Any]) -> dict[fx.Node, str]:
    """The first product of each weight -> the weight's name."""
    found: dict[str, fx.Node] = {}
    for node in graph.nodes:
        if node.target in PRODUCTS and (name := str(node.args[1].target)) in names: found.setdefault(name, node)
    return {node: name for name, node in found.items()}


def _scheme(node: fx.Node, schemes: Mapping[str, Scheme]) -> Scheme | None:
    """Of the weight that a product reads."""
    weight: Any = node.args[1] if node.target in PRODUCTS else None
    return None if weight is None else schemes.get(str(weight.target))


def as_read(x: Tensor, scheme: Scheme) -> Tensor:
    """Rows as codes of eight bits mean them; those of sixteen are finer than bf16."""
    return rounded_rows(x, 8, scheme.act_group, scheme.e4m3).to(x.dtype) if scheme.act_bits == 8 else x


def _gram(windows: Sequence[Tensor], first: float, name: str) -> Tensor:
    """Of each window's rows x f32 [..., K], the first one weighed: mean xᵀx."""
    k = windows[0].shape[-1]
    gram, count = torch.zeros(k, k), 0
    for window in windows:
        x = window.reshape(-1, k).float()
        gram.addmm_(x.T, x).addr_(x[0], x[0], alpha=first - 1)
        count += len(x)
    check_inputs(gram, name)
    return gram / count


class _Walk:
    """One window on its way through the graph."""

    def __init__(self, given: dict[str, Tensor], weights: Mapping[str, Tensor], codes: Mapping[str, Tensor]):
        self.given, self.weights, self.codes = given, weights, codes
        self.values: dict[fx.Node, Any] = {}

    def __getitem__(self, node: fx.Node) -> Any:
        if node.op != "placeholder": return self.values[node]
        name = str(node.target)
        return next(values[name] for values in (self.given, self.codes, self.weights) if name in values)

    def step(self, node: fx.Node, scheme: Scheme | None) -> None:
        """Run one node. scheme: of the weight it reads, where that is codes."""
        args: Any
        args, kwargs = fx.map_arg((node.args, node.kwargs), self.__getitem__)
        if scheme is not None: args = (as_read(args[0], scheme), *args[1:])
        with torch.no_grad(): self.values[node] = node.target(*args, **kwargs)               # type: ignore[operator]

    def forget(self, nodes: Sequence[fx.Node]) -> None:
        for node in nodes:
            self.values.pop(node, None)
            self.given.pop(str(node.target), None)
