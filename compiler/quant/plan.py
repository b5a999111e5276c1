"""What a compile was asked to quantize, and how: the recipe, the method that chooses codes, and the text it may look at."""
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, fx

from ..errors import UserError, nearest
from ..ir import Graph
from ..ops import aten
from ..quality import text
from . import awq
from .blocks import note_better
from .gptq import gptq
from .recipe import Recipe
from .rounding import Quantized, bounded, least_squares, round_to_nearest
from .scheme import Scheme
from .statistics import Inputs, Window, collect

WINDOWS = 8
"""Windows of a calibration text that are read, text.LENGTH tokens each."""


@dataclass(frozen=True)
class Method:
    """One way to choose codes. A weight that no product reads (a table) is rounded with least squared error, whatever the method."""

    about: str
    choose: Callable[[Tensor, Scheme, str, Inputs], Quantized] | None = None     # by what the weight is multiplied with
    plain: Callable[[Tensor, Scheme, str], Quantized] = least_squares            # by the weight alone
    factors: awq.Factors | None = None                                           # what smooth_channels may move into the weight
    gram: bool = False                                                           # `choose` reads Inputs.gram


def _by_size_of_inputs(w: Tensor, scheme: Scheme, name: str, inputs: Inputs) -> Quantized:
    return bounded(w, least_squares(w, scheme, name, inputs.square), round_to_nearest(w, scheme, name))


def _compensated(w: Tensor, scheme: Scheme, name: str, inputs: Inputs) -> Quantized:
    assert inputs.gram is not None
    return gptq(w, scheme, name, inputs.gram)


METHODS = {
    "rtn": Method("to the nearest code", plain=round_to_nearest),
    "mse": Method("the range with the least squared error of each group"),
    "awq": Method("columns with large inputs scaled up, then the range with the least error for these inputs", _by_size_of_inputs,
                  factors=awq.activation_aware),
    "gptq": Method("each column's error made up for by those after it", _compensated, gram=True),
    "smooth": Method("outliers of the inputs moved into the weight, then to the nearest code", plain=round_to_nearest,
                     factors=awq.outliers_moved),
}


def blind() -> list[str]:
    """The methods that look at no text."""
    return [name for name, method in METHODS.items() if method.choose is None and method.factors is None]


@dataclass(frozen=True)
class Plan:
    """A recipe, or a scheme for all: then the table that tokens are looked up in keeps eight bits, and so does the head."""

    asked: Scheme | Recipe
    method: str = "rtn"
    calibration: Path | Sequence[Window] = text.CALIBRATION       # a text, or windows of ids (of inputs, where it is no decoder)

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise UserError(f"unknown quantization method {self.method!r}; {nearest(self.method, METHODS)}")

    def schemes(self, graph: Graph, weights: list[fx.Node]) -> dict[fx.Node, Scheme]:
        """What each weight is to become; those that are not in it stay as they are."""
        asked = self.asked
        found = asked.schemes(graph, weights) if isinstance(asked, Recipe) else {w: _scheme(graph, w, asked) for w in weights}
        note_better(graph, found)
        return found

    @property
    def how(self) -> Method:
        return METHODS[self.method]

    def statistics(self, graph: Graph, weights: Sequence[fx.Node]) -> dict[str, Inputs]:
        """What products multiply each weight with, by its name, as far as the method wants to know; nothing of a table."""
        if self.how.choose is None: return {}
        return self.inputs(graph, [w for w in weights if not any(user.target is aten.embedding.default for user in w.users)])

    def inputs(self, graph: Graph, weights: Sequence[fx.Node]) -> dict[str, Inputs]:
        """What products multiply each weight with on the calibration text. UserError where there is no such text."""
        windows = self.calibration
        if isinstance(windows, Path):
            name, tokenizer = str(graph.meta.get("name", "the model")), graph.meta.get("tokenizer_json")
            if not tokenizer:
                raise UserError(f"{name} has no tokenizer to read a calibration text with, which --quant-method {self.method} looks at: "
                                f"choose {' or '.join(blind())}")
            length = min(text.LENGTH, int(graph.meta["max_positions"]))
            windows = text.windows(windows, tokenizer, name, count=WINDOWS, length=length).windows
        return collect(graph, weights, windows, gram=self.how.gram)

    def quantize(self, w: Tensor, scheme: Scheme, name: str, inputs: Inputs | None = None) -> Quantized:
        """Codes and scales of one weight f32 [N, K]. UserError where a value is not finite."""
        if self.how.choose is None or inputs is None: return self.how.plain(w.float(), scheme, name)
        return self.how.choose(w.float(), scheme, name, inputs)


def _scheme(graph: Graph, weight: fx.Node, of_all: Scheme) -> Scheme:
    if any(user.target is aten.embedding.default for user in weight.users) or _is_head(graph, weight):
        return Scheme(8, 32, True, of_all.act_bits, of_all.act_group)
    return of_all


def _is_head(graph: Graph, weight: fx.Node) -> bool:
    """Does this weight's product give the logits?"""
    logits = graph.output.args[0][graph.outputs.index("logits")] if "logits" in graph.outputs else None    # type: ignore[index]
    return logits is not None and any(user is logits for user in weight.users)
