"""What a compile was asked to quantize, and how: the recipe, the method that chooses codes, and the text it may look at."""
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, fx

from ..errors import UserError, nearest
from ..ir import Graph
from ..ops import aten
from ..quality import text
from . import awq
from .blocks import kept, note_better
from .gptq import gptq
from .matrices import named, products
from .recipe import Choice, Recipe
from .rounding import Quantized, bounded, least_squares, round_to_nearest
from .scheme import Scheme
from .sequential import InOrder, in_order
from .statistics import Inputs, Window, collect
from .tune import tuned

WINDOWS = 16
"""Windows of a calibration text that are read, text.LENGTH tokens each."""

TUNED = 48
"""Windows that scales are tuned on, a step each."""


@dataclass(frozen=True)
class Method:
    """One way to choose codes. A weight that no product reads (a table) is rounded with least squared error, whatever the method."""

    about: str
    choose: Callable[[Tensor, Scheme, str, Inputs], Quantized] | None = None     # by what the weight is multiplied with in the wide model
    plain: Callable[[Tensor, Scheme, str], Quantized] = least_squares            # by the weight alone
    factors: awq.Factors | None = None                                           # what smooth_channels may move into the weight
    in_order: InOrder | None = None                      # by what it is multiplied with after the codes of those before it
    tuned: bool = False                                  # and then the scales of all together, by gradient


def _by_size_of_inputs(w: Tensor, scheme: Scheme, name: str, inputs: Inputs) -> Quantized:
    return bounded(w, least_squares(w, scheme, name, inputs.square), round_to_nearest(w, scheme, name))


METHODS = {
    "rtn": Method("to the nearest code", plain=round_to_nearest),
    "mse": Method("the range with the least squared error of each group"),
    "awq": Method("columns with large inputs scaled up, then the range with the least error for these inputs", _by_size_of_inputs,
                  factors=awq.activation_aware),
    "gptq": Method("each column's error made up for by the others", in_order=gptq),
    "tuned": Method("gptq, then the scales of all weights together by gradient", in_order=gptq, tuned=True),
    "smooth": Method("outliers of the inputs moved into the weight, then to the nearest code", plain=round_to_nearest,
                     factors=awq.outliers_moved),
}

AUTO = "auto"
BY_BITS = {8: "rtn", 4: "gptq"}
"""What `auto` does. Eight bits lose so little that no text is needed: SmolLM2 +0.0 +- 0.1 % of perplexity."""


FLOATS = ("rtn", "mse")
"""The methods for e4m3. An error of its codes is a share of each value, so scaling columns up (awq, smooth) leaves it as it is; and gptq,
tuned take codes for evenly spaced."""


def blind() -> list[str]:
    """The methods that look at no text."""
    return [name for name, method in METHODS.items() if method.choose is method.factors is method.in_order is None]


def check_floats(method: str, choices: Sequence[Choice]) -> None:
    """UserError for e4m3 codes by a method that is made for whole ones."""
    floats = next((choice for choice in choices if isinstance(choice, Scheme) and choice.e4m3), None)
    if floats is not None and method not in (AUTO, *FLOATS):
        raise UserError(f"--quant-method {method} is for integer codes, and {floats} has e4m3: choose {', '.join((AUTO, *FLOATS))}")


@dataclass(frozen=True)
class Plan:
    """A recipe, or a scheme for all: then the table that tokens are looked up in keeps eight bits, and so does the head (e4m3 its own)."""

    asked: Scheme | Recipe
    method: str = "rtn"
    calibration: Path | Sequence[Window] = text.CALIBRATION       # a text, ids (.json), or windows of ids (of inputs: it is no decoder)

    def __post_init__(self) -> None:
        if self.method not in (AUTO, *METHODS):
            raise UserError(f"unknown quantization method {self.method!r}; {nearest(self.method, (AUTO, *METHODS))}")
        check_floats(self.method, self.choices)

    def schemes(self, graph: Graph, weights: list[fx.Node]) -> dict[fx.Node, Scheme]:
        """What each weight is to become; those that are not in it stay as they are."""
        asked = self.asked
        found = asked.schemes(graph, weights) if isinstance(asked, Recipe) else {w: _scheme(graph, w, asked) for w in weights}
        note_better(graph, found)
        return found

    def how(self, scheme: Scheme) -> Method:
        """How codes of a scheme are chosen."""
        return METHODS[BY_BITS[scheme.bits] if self.method == AUTO else self.method]

    @property
    def factors(self) -> awq.Factors | None:
        """What smooth_channels may move."""
        return None if self.method == AUTO else METHODS[self.method].factors

    @property
    def reads_text(self) -> bool:
        """Is the calibration text looked at? Not where all that `auto` is asked for has eight bits, say."""
        if self.method != AUTO: return self.method not in blind()
        return any(isinstance(choice, Scheme) and BY_BITS[choice.bits] not in blind() for choice in self.choices)

    @property
    def choices(self) -> list[Choice]:
        """What is asked for, line by line of a recipe."""
        return [line.choice for line in self.asked.lines] if isinstance(self.asked, Recipe) else [self.asked]

    def codes(
        self, graph: Graph, schemes: Mapping[fx.Node, Scheme], known: Mapping[fx.Node, Quantized] | None = None,
    ) -> Iterator[tuple[fx.Node, Quantized]]:
        """Each weight's codes but those that are known: the file's own where it has this format. The graph may change on the way.

        UserError where a value is not finite, or the method needs a text and there is none.
        """
        before = graph.copy()                                            # with the weights that are gone when their turn comes
        found = dict(known or {})
        rest = [weight for weight in schemes if weight not in found]
        own = {weight: codes for weight in rest if (codes := kept(graph, weight, schemes[weight])) is not None}
        rest = [weight for weight in rest if weight not in own]
        ordered = {weight: how.in_order for weight in rest
                   if (how := self.how(schemes[weight])).in_order and products(weight) and not _table(weight)}
        alone = [weight for weight in rest if weight not in ordered]
        weighed = [weight for weight in alone if self.how(schemes[weight]).choose and not _table(weight)]
        inputs = self.inputs(graph, weighed) if weighed else {}
        for weight in alone:
            name = str(weight.target)
            own[weight] = self.quantize(graph.weights[name], schemes[weight], named(weight), inputs.get(name))
        yield from own.items()
        for choose in dict.fromkeys(ordered.values()):
            chosen = in_order(before, schemes, found | own, self.windows(before), choose)
            if self.method in METHODS and METHODS[self.method].tuned:
                made = dict(chosen)
                yield from tuned(before, found | own | made, made, self.windows(before, TUNED)).items()
            else:
                yield from chosen

    def inputs(self, graph: Graph, weights: Sequence[fx.Node]) -> dict[str, Inputs]:
        """What products multiply each weight with on the calibration text. UserError where there is no such text."""
        return collect(graph, weights, self.windows(graph))

    def windows(self, graph: Graph, count: int = WINDOWS) -> Sequence[Window]:
        """Of the calibration text, at most `count` out of a file. UserError where the model cannot read it."""
        if not isinstance(self.calibration, Path): return self.calibration
        name, tokenizer = str(graph.meta.get("name", "the model")), graph.meta.get("tokenizer_json")
        if not tokenizer and self.calibration.suffix != ".json":
            raise UserError(f"{name} has no tokenizer to read a calibration text with, which --quant-method {self.method} looks at: "
                            f"choose {' or '.join(blind())}, or list token ids in --calib FILE.json")
        length = min(text.LENGTH, int(graph.meta["max_positions"]))
        return text.windows(self.calibration, tokenizer, name, int(graph.meta["vocab_size"]), count=count, length=length).windows

    def quantize(self, w: Tensor, scheme: Scheme, name: str, inputs: Inputs | None = None) -> Quantized:
        """Codes and scales of one weight f32 [N, K]. UserError where a value is not finite."""
        how = self.how(scheme)
        if how.choose is None or inputs is None: return how.plain(w.float(), scheme, name)
        return how.choose(w.float(), scheme, name, inputs)


def _table(weight: fx.Node) -> bool:
    """Are tokens looked up in it?"""
    return any(user.target is aten.embedding.default for user in weight.users)


def _scheme(graph: Graph, weight: fx.Node, of_all: Scheme) -> Scheme:
    if not of_all.e4m3 and (_table(weight) or _is_head(graph, weight)):
        return Scheme(8, 32, True, of_all.act_bits, of_all.act_group)
    return of_all


def _is_head(graph: Graph, weight: fx.Node) -> bool:
    """Does this weight's product give the logits?"""
    logits = graph.output.args[0][graph.outputs.index("logits")] if "logits" in graph.outputs else None    # type: ignore[index]
    return logits is not None and any(user is logits for user in weight.users)
