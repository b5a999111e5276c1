"""Which weight costs what: the relative error of each quantized weight's product on held-out text, ||x(W - W')|| / ||xW||."""
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from ..ir import DTYPE_NAMES, Graph, argument
from ..ops import aten, codes
from ..quant.matrices import PRODUCTS
from ..quant.scheme import stored_as
from ..verification import CODED
from .evaluate import StepEvaluator

ROWS = 64
"""Rows of its input that are kept of each product."""

STANDS_OUT = 3.0
"""Times the median of its kind from which a weight is to blame. On SmolLM2-135M the worst of a kind is below twice its median (round to
nearest, 4 and 8 bits); wrong scales are far beyond."""


@dataclass(frozen=True)
class Probe:
    """Some of a weight's inputs, and what the wide weight made of them: rows [r, K] -> [r, N]; of a table, ids [r] -> [r, K]."""

    given: Tensor
    made: Tensor


@dataclass(frozen=True)
class Layer:
    """One weight of the final graph. error is None where nothing was measured: it is wide, or no product read it."""

    weight: str
    modules: list[str]
    scheme: str                    # "w4:g64"; of a wide weight its dtype
    bits: float                    # stored, scales and offsets counted
    values: int
    error: float | None = None

    @property
    def kind(self) -> str:
        """The weights it is compared with: those of its scheme in the same place of other layers."""
        return f"{self.scheme} " + " ".join(".".join(part for part in path.split(".") if not part.isdigit()) for path in self.modules)

    def json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def probes(wide: Graph, ids: Sequence[int]) -> dict[str, Probe]:
    """One run of the graph that is about to be quantized; a probe for each matrix that a product or a lookup reads, by its name."""
    found: dict[str, Probe] = {}

    def call(node: fx.Node, args: tuple, kwargs: dict) -> Any:
        result = node.target(*args, **kwargs)                                # type: ignore[operator]
        if node.target in PRODUCTS and (name := _weight(wide, node.args[1])):
            x = args[0].reshape(-1, args[0].shape[-1])
            rows = x[torch.linspace(0, len(x) - 1, min(ROWS, len(x))).long()].float()
            found[name] = Probe(rows, rows @ args[1].float().T)
        elif node.target is aten.embedding.default and (name := _weight(wide, node.args[0])) and name not in found:
            rows = args[1].flatten()[:ROWS]
            found[name] = Probe(rows, args[0][rows].float())
        return result

    StepEvaluator(wide).logits(ids, call=call)
    return found


def _weight(graph: Graph, node: Any) -> str | None:
    return str(node.target) if isinstance(node, fx.Node) and graph.weight(node) is not None else None


def layers(graph: Graph, found: Mapping[str, Probe]) -> list[Layer]:
    """Every matrix of the final graph that a product or a lookup reads, in its order, with the error of those held as codes."""
    made: dict[str, Layer] = {}
    for node in graph.nodes:
        layer = _coded(graph, node, found) if node.target in CODED else _wide(graph, node)
        if layer is None: continue
        known = made.get(layer.weight)
        if known is not None:                                                # a tied table: the product that reads it says more
            layer = replace(layer, modules=[*dict.fromkeys([*known.modules, *layer.modules])])
        made[layer.weight] = layer
    return list(made.values())


def _coded(graph: Graph, node: fx.Node, found: Mapping[str, Probe]) -> Layer | None:
    at = {name: argument(node, name) for name in ("codes", "scale", "offset")}
    parts = {name: None if placeholder is None else graph.weights[str(placeholder.target)] for name, placeholder in at.items()}
    bits, group = argument(node, "bits"), argument(node, "group")
    x = argument(node, "x")
    k = int(x.meta["val"].shape[-1] if x is not None else argument(node, "k"))
    assert parts["codes"] is not None and parts["scale"] is not None
    scheme = replace(stored_as(parts["codes"], parts["scale"], parts["offset"], bits, group), act_bits=argument(node, "act_bits") or 0,
                     act_group=argument(node, "act_group") or 0)
    name = str(at["codes"].target).removesuffix("_codes")
    error = None
    if name in found:
        narrow = codes.weight(parts["codes"], parts["scale"], parts["offset"], bits, group, k, torch.float32)
        error = _error(found[name], narrow)
    return Layer(name, list(node.meta.get("origin") or ()), str(scheme), scheme.stored_bits(k), len(parts["codes"]) * k, error)


def _wide(graph: Graph, node: fx.Node) -> Layer | None:
    at = node.args[1] if node.target in PRODUCTS else node.args[0] if node.target is aten.embedding.default else None
    name = _weight(graph, at)
    if name is None: return None
    weight = graph.weights[name]
    return Layer(name, list(node.meta.get("origin") or ()), DTYPE_NAMES[weight.dtype], 8.0 * weight.element_size(), weight.numel())


def _error(probe: Probe, narrow: Tensor) -> float:
    made = probe.given @ narrow.T if probe.given.is_floating_point() else narrow[probe.given]
    size = float(probe.made.norm())
    return float((made - probe.made).norm()) / size if size else 0.0


def bits_per_weight(every: Sequence[Layer]) -> float:
    """Stored bits over values, of all matrices."""
    return sum(layer.bits * layer.values for layer in every) / max(1, sum(layer.values for layer in every))


def most_to_blame(every: Sequence[Layer]) -> str:
    """The weight whose error stands out most from its kind's, in words; or that none does."""
    measured = [layer for layer in every if layer.error is not None]
    if not measured: return "no weight is held as codes, so it is the KV cache's format, or the dtype"
    kinds, schemes = defaultdict(list), defaultdict(list)
    for layer in measured:
        kinds[layer.kind].append(layer.error)
        schemes[layer.scheme].append(layer.error)

    def usual(layer: Layer) -> float:
        return statistics.median(kinds[layer.kind] if len(kinds[layer.kind]) > 2 else schemes[layer.scheme])

    worst = max(measured, key=lambda layer: _times(layer.error, usual(layer)))
    times = _times(worst.error, usual(worst))
    if times < STANDS_OUT:
        worst = max(measured, key=lambda layer: layer.error or 0.0)
        return f"no layer stands out: it is the format; the largest error of a product is {worst.error:.2g}, {_named(worst)}"
    return f"most to blame is {_named(worst)}: the error of its product is {worst.error:.2g}, {times:.3g} times what is usual"


def _times(error: float | None, usual: float) -> float:
    if error is None: return 0.0
    if error != error: return float("inf")                                   # NaN: nothing is worse
    return error / usual if usual else float("inf") if error else 1.0


def _named(layer: Layer) -> str:
    return f"{layer.weight} ({', '.join(layer.modules) or 'no module'}, {layer.scheme})"
