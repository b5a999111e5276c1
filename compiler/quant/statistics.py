"""What a weight's products read while the model reads a calibration text: what scales and codes are chosen by.

The graph runs in eager PyTorch in its own dtypes, wide; what no product that is looked at depends on is left out.
"""
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ..errors import UserError
from ..ir import Graph, evaluate, needed
from ..verification import step_sample
from .matrices import PRODUCTS, products

ROWS = 256
"""Rows kept as they are. A search over scales tries each on them."""

Window = Sequence[int] | tuple[Tensor, ...]
"""Token ids of a decoder; the inputs of any other graph."""


@dataclass(frozen=True)
class Inputs:
    """Rows x [count, K] that the products of one weight read."""

    count: int
    mean: Tensor                   # f32 [K]: mean |x|
    square: Tensor                 # f32 [K]: mean x²
    largest: Tensor                # f32 [K]: max |x|
    rows: Tensor                   # f32 [up to ROWS, K]: evenly out of all

    def divided(self, by: Tensor) -> "Inputs":
        """Of x / by. by f32 [K]."""
        return Inputs(self.count, self.mean / by, self.square / by.square(), self.largest / by, self.rows / by)


class _Sums:
    """Inputs in the making."""

    def __init__(self, k: int):
        self.count = 0
        self.mean, self.square, self.largest = (torch.zeros(k) for _ in range(3))
        self.rows: list[Tensor] = []

    def add(self, x: Tensor, keep: int) -> None:
        x = x.flatten(0, -2).float()
        size = x.abs()
        self.count += len(x)
        self.mean += size.sum(0)
        self.square += x.square().sum(0)
        self.largest = torch.maximum(self.largest, size.amax(0))
        self.rows.append(x[torch.linspace(0, len(x) - 1, min(keep, len(x))).long()])

    def inputs(self, name: str) -> Inputs:
        check_inputs(self.square, name)
        return Inputs(self.count, self.mean / self.count, self.square / self.count, self.largest, torch.cat(self.rows))


def collect(graph: Graph, weights: Iterable[fx.Node], windows: Sequence[Window]) -> dict[str, Inputs]:
    """Weight name -> what its products read over all windows; a weight that no product reads is not in it.

    UserError for no windows, or values that are not finite.
    """
    check_windows(windows)
    read: dict[fx.Node, Any] = {weight: tuple(dict.fromkeys(user.args[0] for user in products(weight))) for weight in weights}
    sums = {xs: _Sums(int(weight.meta["val"].shape[1])) for weight, xs in read.items() if xs}
    wanted = needed({x for xs in sums for x in xs})
    keep = -(-ROWS // len(windows))

    def call(node: fx.Node, args: tuple, kwargs: dict) -> object:
        return node.target(*args, **kwargs) if node in wanted else None                       # type: ignore[operator]

    for window in windows:
        seen: set[fx.Node] = set()

        def watched(node: fx.Node, args: tuple, kwargs: dict, seen: set[fx.Node] = seen) -> object:
            x = node.args[0] if node.target in PRODUCTS else None
            if isinstance(x, fx.Node) and x not in seen:
                seen.add(x)
                for xs, found in sums.items():
                    if x in xs: found.add(args[0], keep)
            return call(node, args, kwargs)

        evaluate(graph, inputs_of(graph, window), graph.weights, watched)
    made = {xs: found.inputs(_name(read, xs)) for xs, found in sums.items()}
    return {str(weight.target): made[xs] for weight, xs in read.items() if xs}


def inputs_of(graph: Graph, window: Window) -> tuple[Tensor, ...]:
    """The graph's inputs for a window: one step of a decoder over all of its tokens, every row sampled."""
    if "sample_rows" not in graph.inputs: return tuple(window)                                # type: ignore[arg-type]
    ids = torch.tensor(window)
    return step_sample(graph, ids, range(len(ids)))


def _name(read: dict[fx.Node, tuple], xs: tuple) -> str:
    return next(str(weight.target) for weight, found in read.items() if found == xs)


def check_windows(windows: Sequence[Window]) -> None:
    """UserError where there are none."""
    if not windows: raise UserError("choosing scales by data needs a calibration text: give one with --calib FILE")


def check_inputs(sums: Tensor, name: str) -> None:
    """UserError where what a weight is multiplied with is not finite. sums: of its powers."""
    if not bool(sums.isfinite().all()):
        raise UserError(f"{name}: what it is multiplied with on the calibration text is not finite, so no scale can be chosen by it")
