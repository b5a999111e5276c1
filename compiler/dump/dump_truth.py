"""What every stage of a dump is measured against, and how far it may be from it."""
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..contracts import SAME_FUNCTION, run_fp64, run_plain, run_rounded
from ..frontends.samples import DecoderSamples
from ..ir import DTYPE_NAMES, Graph
from .stage import worst_error

TOKENS = 37
"""Length of the sample prompt: more than one block of the KV cache, and odd."""


@dataclass
class Capture:
    """The captured graph and its answers on one sample: what every stage is measured against."""

    graph: Graph

    @cached_property
    def sample(self) -> tuple[Tensor, ...]:
        made = self.graph.sample_inputs
        if isinstance(made, DecoderSamples):
            return made.at(1, min(TOKENS, made.max_positions))
        return tuple(next(iter(made()))) if made is not None else ()

    @property
    def sample_text(self) -> str:
        """What the sample is, for people."""
        shapes = ", ".join(f"{name} {list(t.shape)}" for name, t in zip(self.graph.inputs, self.sample, strict=True))
        return f"{self.sample[0].shape[1]} random tokens" if isinstance(self.graph.sample_inputs, DecoderSamples) else shapes

    @cached_property
    def truth(self) -> dict[str, Tensor]:
        """Float outputs in fp64."""
        return self._named(run_fp64(self.graph, self.sample))

    @cached_property
    def own(self) -> float:
        """The captured graph's own error."""
        return worst_error(self._named(run_plain(self.graph, self.sample)), self.truth)

    def _named(self, results: Sequence[Any]) -> dict[str, Tensor]:
        pairs = zip(self.graph.outputs, results[: len(self.graph.outputs)], strict=True)
        return {name: value for name, value in pairs if isinstance(value, Tensor) and value.is_floating_point()}

    @cached_property
    def ulp(self) -> float:
        fakes = [node.meta["val"] for node in self.graph.output.all_input_nodes]
        return max((torch.finfo(f.dtype).eps for f in fakes if isinstance(f, Tensor) and f.is_floating_point()), default=0.0)

    def rounded(self, dtype: torch.dtype) -> float:
        """The captured graph's error in eager PyTorch of that dtype."""
        return worst_error(self._named(run_rounded(self.graph, self.sample, dtype)), self.truth)

    def bounds(self, graph: Graph, approximate: str) -> dict[str, dict[str, Any]]:
        """What a stage may be off: as DESIGN's EXACT until the pass `approximate` fired; from there as eager PyTorch in its dtype."""
        if not approximate:
            return {"fp64": {"bound": SAME_FUNCTION, "why": "every pass so far is exact: the same function"},
                    "own": {"bound": 2 * self.own + self.ulp, "why": "twice the captured graph's own error, plus one ulp"}}
        caches = (graph.placeholders[name].meta["val"] for name in graph.kv)
        floats = {t.dtype for t in (*graph.weights.values(), *caches) if t.is_floating_point()}
        narrowest = max(floats, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)
        bound = {"bound": 2 * self.rounded(narrowest) + self.ulp,
                 "why": f"{approximate} is approximate: twice the error of the captured graph in eager {DTYPE_NAMES[narrowest]}"}
        return {"fp64": bound, "own": bound}
