"""Choose each weight's format: the fewest bytes (or the least predicted decode time) that keep limits of quality on calibration text.

Sensitivity: each weight alone is rounded to nearest in the coarsest candidate, and the KL of the model's next-token distributions to
the wide model's is measured; KL grows with the square of a small error, so a finer candidate's is that times the ratio of its squared
output error ||x (W - W')||². Knapsack: a weight's candidates on the lower convex hull of (bytes, KL) are moves that save bytes at a price;
the cheapest come first. Verification: the sums are estimates, and the plan's method has less error than rounding to nearest, so the
number of moves is sought by measuring the whole model with all of them made, in the codes that a compile would choose; each measurement
corrects the estimate. Nothing is drawn at random: the same model, text and limits give the same recipe.
"""
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from ..errors import UserError
from ..ir import Graph, impure
from ..ops import aten
from ..quality import text
from ..quality.evaluate import StepEvaluator
from ..quality.limits import Limit
from ..quality.metrics import Comparison, Figures, percentile
from .blocks import format_of, kept
from .matrices import PRODUCTS, matrices
from .plan import Plan
from .recipe import Recipe, paths, written
from .rounding import Quantized, round_to_nearest
from .scheme import Scheme, parse
from .sequential import as_read

CANDIDATES = "w4:g128,w4,w4:asym,w8,none"
"""What a weight may become, besides what a GGUF's own blocks are."""

GOALS = ("bytes", "time")
SENSITIVITY_TOKENS = 128           # of one window. 256 take twice as long; what is chosen is measured anyway
SCORED = 0.75                      # of a window, its end: what comes first has too little before it
SPARE = 2.0                        # standard errors that a limit is to be met with: other text gives other figures
SEARCHED = ("ppl", "kl", "kl_p99", "top1")
WINDOWS = 12                       # of calibration text, that the whole model is measured on where the first do not tell
LEAST = 1e-12                      # nats: fp32 may find no KL at all, yet wide is better than rounded
FEWEST = 3                         # windows that a judgement needs
GUESSES = 3                        # measurements where the corrected estimates say, before the halving
LARGE = 0.5                        # of the KL that limits allow: a move that costs as much is no step among many
FINE = 0.002                       # of all bytes: what is not worth another measurement

Progress = Callable[[str, float], None]
"""(what is being done, how much of it is done, 0..1)."""


@dataclass(frozen=True)
class Option:
    """A format that a weight may have: None is wide."""

    scheme: Scheme | None
    bytes: float                   # stored, or read by a decode step where time is the goal
    kl: float                      # estimated, of this weight alone, in nats


@dataclass(frozen=True)
class Found:
    """What a search chose, and what it costs on the text it was chosen on."""

    recipe: Recipe
    bytes: int
    figures: Figures | None        # as measured, with the windows that were needed; None where nothing is rounded
    measured: int                  # how often the whole model was measured
    sensitivity: dict[str, float]  # weight -> KL of it alone in the coarsest candidate

    def json(self) -> dict[str, Any]:
        """Plain data for a report."""
        return {"recipe": str(self.recipe), "bytes": self.bytes, "figures": self.figures and self.figures.json(), "measured": self.measured,
                "sensitivity": self.sensitivity}


def search(
    graph: Graph, plan: Plan, limits: Sequence[Limit], *, candidates: Sequence[Scheme | None], goal: str = "bytes", wide_bytes: int = 2,
    progress: Progress = lambda text, share: None,
) -> Found:
    """The recipe that keeps `limits` on the plan's calibration text with the least of `goal`.

    graph: a wide step graph in fp32, as quantize_weights would get it. plan: how codes are chosen, and the text. wide_bytes: of
    a value that is not quantized. Raises UserError for what cannot be searched for.
    """
    check(limits, goal)
    weights = [weight for weight, reason in matrices(graph).items() if not reason]
    if not weights: raise UserError("no weight of this model can be quantized, so there are no formats to search")
    windows = _windows(graph, plan)
    trial = _Trial(graph, replace(plan, method="gptq") if plan.method == "tuned" else plan)    # tuned once, by the compile
    options, sensitivity = _options(trial, weights, windows[0], candidates, goal, wide_bytes, progress)
    moves = [*_moves(options)]
    judge = _Judge(trial, windows, limits)
    walk = _Walk(judge, options, progress)
    chosen = _made(options, walk.down(moves))
    found = {path: option.scheme for weight, option in chosen.items() for path in paths(weight)}
    stored = sum(_stored(weight, option.scheme, wide_bytes) for weight, option in chosen.items())
    return Found(written(found), round(stored), walk.figures, judge.measured, sensitivity)


def check(limits: Sequence[Limit], goal: str) -> None:
    """UserError for limits and goals that formats cannot be searched for."""
    for limit in limits:
        if limit.metric not in SEARCHED:
            raise UserError(f"--quality {limit} without --quant: formats can be searched for {', '.join(SEARCHED)}; name a format or a "
                            "recipe with --quant, and it is measured")
        if limit.metric == "ppl" and not limit.relative:
            raise UserError(f"--quality {limit} without --quant: a perplexity is of one text, and formats are searched on another; give "
                            "ppl<=+1%, say, or kl<=0.02")
    if goal not in GOALS: raise UserError(f"--search-for {goal}: choose one of {', '.join(GOALS)}")


def parse_candidates(text: str) -> list[Scheme | None]:
    """The schemes of `w4,w8,none`. UserError for one that is none, or for none to choose from."""
    found = [parse(part.strip()) for part in text.split(",")]
    if not any(found): raise UserError(f"--candidates {text!r} names no format to choose: write some like {CANDIDATES}")
    return found


def _windows(graph: Graph, plan: Plan) -> list[list[int]]:
    """Of the plan's calibration text, by the model's tokenizer."""
    if not isinstance(plan.calibration, Path): return [[*map(int, window)] for window in plan.calibration]
    length = min(text.LENGTH, int(graph.meta["max_positions"]))
    return text.windows(plan.calibration, graph.meta.get("tokenizer_json"), str(graph.meta.get("name", "the model")),
                        int(graph.meta["vocab_size"]), count=WINDOWS, length=length).windows


# -------------------------------------------------------------------------------------------------------- quantized weights

@dataclass
class _Trial:
    """The graph with some of its weights as codes mean them. The plan's codes are kept: a byte a weight and format at most."""

    graph: Graph
    plan: Plan
    _known: dict[tuple[fx.Node, Scheme], Quantized] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.evaluator = StepEvaluator(self.graph)

    def nearest(self, node: fx.Node, scheme: Scheme) -> Tensor:
        """f32 [N, K]: the file's own codes where it has this format, else the nearest ones."""
        name = str(node.target)
        return (kept(self.graph, node, scheme) or round_to_nearest(self.graph.weights[name].float(), scheme, name)).dequantized()

    def weights(self, chosen: Mapping[fx.Node, Scheme], progress: Callable[[str], None]) -> dict[str, Tensor]:
        """f32 [N, K] each, by name, of the codes that the plan chooses; those of an earlier choice stay."""
        known = {node: self._known[node, scheme] for node, scheme in chosen.items() if (node, scheme) in self._known}
        if len(known) < len(chosen):
            for node, codes in self.plan.codes(self.graph, chosen, known):
                self._known[node, chosen[node]] = known[node] = codes
                progress(f"codes of {', '.join(paths(node)[:1])}")
        return {str(node.target): codes.dequantized() for node, codes in known.items()}

    def rounded(
        self, chosen: Mapping[fx.Node, Scheme], progress: Callable[[str], None] = lambda text: None,
    ) -> Callable[[Sequence[int], int], Tensor]:
        """(ids, first) -> logits [len(ids) - first, V] with these weights rounded, and the 8-bit activations that they meet."""
        weights = self.weights(chosen, progress)

        def call(node: fx.Node, args: tuple, kwargs: dict) -> Any:
            scheme = chosen.get(node.args[1]) if node.target in PRODUCTS else None         # type: ignore[arg-type]
            if scheme is not None: args = (as_read(args[0], scheme), *args[1:])
            return node.target(*args, **kwargs)                                            # type: ignore[operator]

        return lambda ids, first: self.evaluator.logits(ids, weights, first=first, call=call)


# --------------------------------------------------------------------------------------------------------------- sensitivity

def _options(
    trial: _Trial, weights: Sequence[fx.Node], window: Sequence[int], candidates: Sequence[Scheme | None], goal: str, wide_bytes: int,
    progress: Progress,
) -> tuple[dict[fx.Node, list[Option]], dict[str, float]]:
    """Each weight's candidates with their bytes and estimated KL; and the KL that was measured, by the weight's name."""
    ids = [*window][:SENSITIVITY_TOKENS]
    kept_values = _Values(trial, ids, _first(ids))
    options, sensitivity = {}, {}
    for i, node in enumerate(weights):
        progress(f"sensitivity of {', '.join(paths(node)[:1])}", i / len(weights))
        schemes = _candidates(trial.graph, node, candidates)
        errors = {scheme: kept_values.output_error(node, trial.nearest(node, scheme)) for scheme in schemes}
        worst = max(errors, key=errors.__getitem__, default=None)
        kl = max(LEAST, kept_values.kl(node, trial.nearest(node, worst))) if worst is not None and errors[worst] > 0 else 0.0
        sensitivity[str(node.target)] = kl
        cost = _stored if goal == "bytes" else _read
        options[node] = [Option(None, cost(node, None, wide_bytes), 0.0)] * (None in candidates) + [
            Option(scheme, cost(node, scheme, wide_bytes), kl * error / errors[worst] if kl else 0.0)             # type: ignore[index]
            for scheme, error in errors.items()]
    return options, sensitivity


def _first(ids: Sequence[int]) -> int:
    """Where a window's scored tokens begin."""
    return len(ids) - int(SCORED * len(ids))


def _candidates(graph: Graph, node: fx.Node, candidates: Sequence[Scheme | None]) -> list[Scheme]:
    """The schemes asked for, and that of the file's own blocks."""
    own = format_of(graph, node)
    return list(dict.fromkeys([scheme for scheme in candidates if scheme is not None] + ([] if isinstance(own, str) else [own])))


class _Values:
    """Every value of the wide graph on one window, so that a change of one weight is run from where it first matters."""

    def __init__(self, trial: _Trial, ids: Sequence[int], first: int):
        self.trial, self.ids, self.first = trial, ids, first
        self.values: dict[fx.Node, Any] = {}

        def record(node: fx.Node, args: tuple, kwargs: dict) -> Any:
            self.values[node] = node.target(*args, **kwargs)                               # type: ignore[operator]
            return self.values[node]

        self.reference = trial.evaluator.logits(ids, first=first, call=record)
        self.likely = self.reference.softmax(-1)

    def kl(self, weight: fx.Node, rounded: Tensor) -> float:
        """Mean KL to the wide model's distributions with this weight in the place of its own.

        With logits moved by d, KL = ln sum p exp(d - sum p d): no difference of large numbers, so fp32 does.
        """
        changed = _affected(self.trial.graph, weight)

        def call(node: fx.Node, args: tuple, kwargs: dict) -> Any:
            if node not in changed and not impure(node): return self.values[node]
            return node.target(*args, **kwargs)                                            # type: ignore[operator]

        ours = self.trial.evaluator.logits(self.ids, {str(weight.target): rounded}, first=self.first, call=call)
        moved = ours - self.reference
        moved -= (self.likely * moved).sum(-1, keepdim=True)
        return float((self.likely * moved.expm1()).sum(-1).log1p().mean())

    def output_error(self, weight: fx.Node, rounded: Tensor) -> float:
        """||x (W - W')||² over the rows x that its products meet; of the rows looked up, where only lookups read it."""
        off = rounded - self.trial.graph.weights[str(weight.target)].float()
        met = [self.values[node.args[0]] for node in weight.users if node.target in PRODUCTS and node.args[0] in self.values]
        if met: return sum(float((x.float().flatten(0, -2) @ off.T).square().sum(dtype=torch.float64)) for x in met)
        return float(off[torch.tensor(self.ids)].square().sum(dtype=torch.float64))


def _affected(graph: Graph, weight: fx.Node) -> set[fx.Node]:
    """The nodes whose value follows from a weight: by data, or through a cache that one of them writes to."""
    found = {weight}
    for node in graph.nodes:
        if found.isdisjoint(node.all_input_nodes): continue
        found.add(node)
        if node.op == "call_function" and impure(node): found |= {n for n in node.all_input_nodes if str(n.target) in graph.kv}
    return found


def _stored(weight: fx.Node, scheme: Scheme | None, wide_bytes: int) -> float:
    """Bytes of a weight in the artifact."""
    n, k = weight.meta["val"].shape
    return n * k * (wide_bytes if scheme is None else scheme.stored_bits(k) / 8)


def _read(weight: fx.Node, scheme: Scheme | None, wide_bytes: int) -> float:
    """Bytes of a weight that a decode step reads: a table that is only looked up costs one row, which is next to nothing."""
    looked_up = all(user.target is aten.embedding.default for user in weight.users)
    return _stored(weight, scheme, wide_bytes) / (weight.meta["val"].shape[0] if looked_up else 1)


# ------------------------------------------------------------------------------------------------------------------ knapsack

@dataclass(frozen=True)
class Move:
    """One weight from a format to one with fewer bytes."""

    weight: fx.Node
    to: Option
    saves: float                   # bytes
    costs: float                   # estimated KL


def _moves(options: Mapping[fx.Node, Sequence[Option]]) -> Iterator[Move]:
    """All moves down the weights' hulls, the cheapest first; a weight's own come in order, since prices rise along a hull."""
    found = []
    for place, (weight, its) in enumerate(options.items()):
        hull = efficient(its)
        found += [(_price(a, b), place, step, Move(weight, b, a.bytes - b.bytes, b.kl - a.kl))
                  for step, (a, b) in enumerate(pairwise(hull))]
    yield from (move for *_, move in sorted(found, key=lambda entry: entry[:3]))


def efficient(options: Sequence[Option]) -> list[Option]:
    """The lower convex hull of (bytes, KL), from the least KL to the fewest bytes: what a knapsack would ever take."""
    hull: list[Option] = []
    for option in sorted(options, key=lambda o: (-o.bytes, o.kl)):
        while hull and option.kl <= hull[-1].kl: hull.pop()              # fewer bytes for no more KL
        if hull and option.bytes == hull[-1].bytes: continue
        while len(hull) > 1 and _price(hull[-1], option) <= _price(hull[-2], hull[-1]): hull.pop()
        hull.append(option)
    return hull


def _price(a: Option, b: Option) -> float:
    return (b.kl - a.kl) / (a.bytes - b.bytes)


def _made(options: Mapping[fx.Node, Sequence[Option]], moves: Sequence[Move]) -> dict[fx.Node, Option]:
    """Each weight's format after these moves."""
    return {weight: efficient(its)[0] for weight, its in options.items()} | {move.weight: move.to for move in moves}


# -------------------------------------------------------------------------------------------------------------- verification

class _Judge:
    """Measures the whole model with many weights rounded, against the wide one, on the calibration windows."""

    def __init__(self, trial: _Trial, windows: Sequence[Sequence[int]], limits: Sequence[Limit]):
        self.trial, self.limits, self.measured = trial, limits, 0
        self.windows = [[*window] for window in windows]
        self._wide = trial.rounded({})
        self._reference: list[Tensor] = []         # logits of the windows that were looked at: 4 bytes a scored token and vocabulary entry

    def holds(self, chosen: Mapping[fx.Node, Scheme], progress: Callable[[str], None]) -> tuple[bool, Figures]:
        """Is every limit kept with SPARE standard errors to spare? As many windows are measured as it takes to tell."""
        self.measured += 1
        comparison, ours = Comparison(), self.trial.rounded(chosen, progress)
        for number, ids in enumerate(self.windows, 1):
            first = _first(ids)
            if len(self._reference) < number: self._reference.append(self._wide(ids[:-1], first))
            comparison.add(ours(ids[:-1], first), ids[first + 1 :], self._reference[number - 1])
            if number < min(FEWEST, len(self.windows)): continue
            if self._keeps(comparison, SPARE): return True, comparison.figures()
            if not self._keeps(comparison, -SPARE): break
        return False, comparison.figures()

    def _keeps(self, comparison: Comparison, spare: float) -> bool:
        reference = float(torch.cat(comparison.reference_loss).mean().exp())
        figures = shifted(comparison, spare)
        return all(limit.holds(figures[limit.metric], reference) for limit in self.limits)


def shifted(comparison: Comparison, spare: float) -> dict[str, float]:
    """The metrics, each so many standard errors (over tokens, paired) to its bad side."""
    apart, loss, reference = (torch.cat(part) for part in (comparison.divergence, comparison.loss, comparison.reference_loss))
    n, change = len(apart), loss - reference
    top1 = comparison.agreed / n
    return {
        "ppl": float(reference.mean().exp() * (change.mean() + spare * change.std() / math.sqrt(n)).exp()),
        "kl": float(apart.mean() + spare * apart.std() / math.sqrt(n)),
        "kl_p99": percentile(apart, min(1.0, 0.99 + spare * math.sqrt(0.99 * 0.01 / n))),
        "top1": top1 - spare * math.sqrt(top1 * (1 - top1) / n),
    }


@dataclass
class _Walk:
    """Down the moves as far as the limits allow, measuring."""

    judge: _Judge
    options: Mapping[fx.Node, Sequence[Option]]
    progress: Progress
    figures: Figures | None = None                 # of the last measurement that kept the limits
    last: Figures | None = None                    # of the last one
    truth: float = 1.0                             # measured KL over estimated

    def __post_init__(self) -> None:
        self.allowed = _allowed(self.judge.limits)
        self.start = sum(efficient(its)[0].kl for its in self.options.values())
        self.enough = FINE * sum(efficient(its)[0].bytes for its in self.options.values())

    def down(self, moves: Sequence[Move]) -> list[Move]:
        """The moves to make; figures stay None where none is made and nothing was rounded before.

        A move that alone is more than LARGE of what is allowed, and does not fit, is left out with all that its weight has left, and the
        rest goes on. No other is: each measurement more is one more that may hold by luck.
        """
        if self.start > 0 and not self._holds([], 0.0) and self.last: self._refuse(self.last)
        taken, rest = list[Move](), [*moves]
        while rest:
            count = self._longest(taken, rest)
            taken += rest[:count]
            if count == len(rest) or self.allowed is None or rest[count].costs * self.truth <= LARGE * self.allowed: break
            blocked = rest[count].weight
            rest = [move for move in rest[count + 1 :] if move.weight is not blocked]
        return taken

    def _longest(self, taken: Sequence[Move], rest: Sequence[Move]) -> int:
        """How many of the rest the limits allow.

        Begins where the estimates say, goes on where they say once corrected by what was measured, and ends where what is left to decide
        saves less than FINE of all bytes.
        """
        saved = [0.0, *accumulate(move.saves for move in rest)]
        estimates = [*accumulate((move.costs for move in rest), initial=self._estimate(taken))]
        good, bad, step, guesses = 0, len(rest) + 1, max(1, len(rest) // 16), GUESSES
        while bad - good > 1 and (bad > len(rest) or saved[bad - 1] - saved[good] > self.enough or good == 0):
            if self.allowed is not None and guesses:
                probe, guesses = sum(estimate * self.truth <= self.allowed for estimate in estimates) - 1, guesses - 1
            elif bad > len(rest): probe, step = good + step, 2 * step            # not yet too far
            elif good == 0: probe, step = bad - step, 2 * step                    # not yet near enough
            else: probe = (good + bad) // 2
            probe = min(max(probe, good + 1), bad - 1)
            if self._holds([*taken, *rest[:probe]], probe / len(rest)): good = probe
            else: bad = probe
        return good

    def _estimate(self, moves: Sequence[Move]) -> float:
        return self.start + sum(move.costs for move in moves)

    def _holds(self, moves: Sequence[Move], share: float) -> bool:
        self.progress(f"measuring with {len(moves)} steps to fewer bytes", share)
        chosen = {weight: option.scheme for weight, option in _made(self.options, moves).items() if option.scheme is not None}
        kept_limits, now = self.judge.holds(chosen, lambda text: self.progress(text, share))
        if now.kl and self._estimate(moves) > LEAST: self.truth = now.kl / self._estimate(moves)
        self.last = now
        if kept_limits: self.figures = now
        return kept_limits

    def _refuse(self, found: Figures) -> None:
        raise UserError(f"no choice of these formats keeps {','.join(map(str, self.judge.limits))} with {SPARE:g} standard errors to spare "
                        f"on {found.tokens} calibration tokens (ppl {found.ppl:.5g}, kl {found.kl:.3g}): give a wider limit, "
                        "or put none among the candidates")


def _allowed(limits: Sequence[Limit]) -> float | None:
    """The KL that limits allow, in nats: text that the model foretells costs a perplexity of exp(KL). None where they name neither."""
    known = {"kl": lambda limit: limit, "ppl": math.log1p}
    return min((known[limit.metric](limit.limit) for limit in limits if limit.metric in known), default=None)
