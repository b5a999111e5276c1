"""What a compile was asked to quantize, and how: the recipe, the method that chooses codes, and the text it may look at."""
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from ..errors import UserError, nearest
from ..ir import Graph
from ..ops import aten
from .rounding import Quantized, least_squares, round_to_nearest
from .scheme import Scheme

METHODS = {"rtn": round_to_nearest, "mse": least_squares}
"""Name -> how codes are chosen, from the weight alone."""


@dataclass(frozen=True)
class Plan:
    """A uniform scheme; the table that tokens are looked up in keeps at least eight bits, and the head with it where they are tied."""

    scheme_of_all: Scheme
    method: str = "rtn"
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise UserError(f"unknown quantization method {self.method!r}; {nearest(self.method, METHODS)}")

    def schemes(self, graph: Graph, weights: list[fx.Node]) -> dict[fx.Node, Scheme]:
        """What each weight is to become; those that are not in it stay as they are."""
        return {weight: self._scheme(graph, weight) for weight in weights}

    def _scheme(self, graph: Graph, weight: fx.Node) -> Scheme:
        if any(user.target is aten.embedding.default for user in weight.users) or _is_head(graph, weight):
            return Scheme(8, 32, True, self.scheme_of_all.act_bits, self.scheme_of_all.act_group)
        return self.scheme_of_all

    def statistics(self, graph: Graph, weights: list[fx.Node]) -> dict[str, Any]:
        """What the method wants to know of each weight's inputs, by the weight's name."""
        return {}

    def quantize(self, w: Tensor, scheme: Scheme, name: str, statistics: Any) -> Quantized:
        """Codes and scales of one weight f32 [N, K]."""
        return METHODS[self.method](w.float(), scheme, name)


def _is_head(graph: Graph, weight: fx.Node) -> bool:
    """Does this weight's product give the logits?"""
    logits = graph.output.args[0][graph.outputs.index("logits")] if "logits" in graph.outputs else None    # type: ignore[index]
    return logits is not None and any(user is logits for user in weight.users)
