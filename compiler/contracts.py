"""Does a changed graph keep its contract? Judged on the graph's sample inputs, against the graph as it was captured.

EXACT is checked twice (DESIGN, "Contracts"):
  (a) both graphs lifted to fp64, weights, casts and out_dtype included, agree to 1e-9 of each row's largest value: it is
      the same function;
  (b) in its own dtypes, the new graph's worst error against that fp64 result is at most twice the old graph's own plus
      one ulp of the row's largest value: no precision was thrown away. A dropped upcast passes (a) and fails (b).
A row is everything along the last axis. nan equals nan, inf equals inf.
"""
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.weak import WeakIdKeyDictionary

from .errors import CheckFailed
from .ir import Graph, evaluate, where

SAME_FUNCTION = 1e-9
"""(a)'s bound. fp64 sums of 1e5 terms differ by about 1e-14 when reordered; dropping any term or constant costs far more."""

LIFT_CACHE_BYTES = 4 << 30
"""Weights in fp64 are kept between checks up to this many bytes; past it they are lifted one by one at each use."""

Sample = Sequence[Tensor]


class _Lifted(Mapping[str, Tensor]):
    """Weights as fp64, lifted when read."""

    def __init__(self, graph: Graph, cache: WeakIdKeyDictionary, keep: bool):
        self.weights, self.exact, self.cache, self.keep = graph.weights, graph.exact, cache, keep

    def __getitem__(self, name: str) -> Tensor:
        if name in self.exact:
            return self.exact[name]
        tensor = self.weights[name]
        if not tensor.is_floating_point():
            return tensor
        lifted = self.cache.get(tensor)
        if lifted is None:
            lifted = tensor.to(torch.float64)
            if self.keep:
                self.cache[tensor] = lifted
        return lifted

    def __iter__(self) -> Iterator[str]:
        return iter(self.weights)

    def __len__(self) -> int:
        return len(self.weights)


def _lift_argument(arg: Any) -> Any:
    if isinstance(arg, torch.dtype) and arg.is_floating_point:
        return torch.float64
    return type(arg)(map(_lift_argument, arg)) if isinstance(arg, tuple | list) else arg


def lifted_call(node: fx.Node, args: tuple, kwargs: dict) -> Any:
    """One node in fp64: arguments are fp64 already, and every float dtype it names becomes fp64."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)                     # what `full` and `arange` make when no dtype is given
    try:
        return node.target(*map(_lift_argument, args), **{k: _lift_argument(v) for k, v in kwargs.items()})  # type: ignore
    finally:
        torch.set_default_dtype(default)


def run_fp64(graph: Graph, sample: Sample, cache: WeakIdKeyDictionary | None = None, *, spy: dict | None = None) -> list[Any]:
    """All results (outputs, then KV caches) of the graph lifted to fp64: every cast to a float type becomes fp64."""
    given = [t.to(torch.float64) if t.is_floating_point() else t.clone() for t in sample]
    keep = cache is not None and sum(8 * w.numel() for w in graph.weights.values()) <= LIFT_CACHE_BYTES
    weights = _Lifted(graph, WeakIdKeyDictionary() if cache is None else cache, keep)
    outputs = evaluate(graph, given, weights, _spying(lifted_call, spy))
    return [*outputs, *given[len(graph.inputs):]]


def run_plain(graph: Graph, sample: Sample, *, spy: dict | None = None) -> list[Any]:
    """All results (outputs, then KV caches) in the graph's own dtypes; the sample is not written to."""
    given = [t.clone() for t in sample]
    outputs = evaluate(graph, given, graph.weights, _spying(_plain_call, spy) if spy is not None else None)
    return [*outputs, *given[len(graph.inputs):]]


def _plain_call(node: fx.Node, args: tuple, kwargs: dict) -> Any:
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _spying(call: Any, spy: dict | None) -> Any:
    if spy is None:
        return call

    def record(node: fx.Node, args: tuple, kwargs: dict) -> Any:
        value = spy[node.name] = call(node, args, kwargs)
        return value

    return record


# ----------------------------------------------------------------------------------------------------------- comparing

def _rows(t: Tensor) -> Tensor:
    return t.reshape(1, -1) if t.dim() < 2 else t.reshape(-1, t.shape[-1])


def row_error(value: Any, truth: Any, ignore: Tensor | None = None) -> float:
    """Worst |value - truth| of any row over that row's largest finite |truth|; inf where one is finite and one is not.

    Equal non-finite values (nan with nan, inf with the same inf) count as equal. Whole numbers and bools: 0 or inf.
    `ignore` marks elements that are not compared.
    """
    if not isinstance(value, Tensor) or not isinstance(truth, Tensor):
        return 0.0 if value == truth else float("inf")
    if value.shape != truth.shape:
        return float("inf")
    if truth.numel() == 0:
        return 0.0
    if not truth.is_floating_point():
        return 0.0 if torch.equal(value, truth) else float("inf")
    value, truth = _rows(value.to(torch.float64)), _rows(truth.to(torch.float64))
    same = (value == truth) | (value.isnan() & truth.isnan())
    if ignore is not None:
        same |= _rows(ignore)
    finite = value.isfinite() & truth.isfinite()
    if bool((~same & ~finite).any()):
        return float("inf")
    gap = torch.where(same, 0.0, value - truth).abs().amax(-1)
    scale = torch.where(truth.isfinite(), truth, 0.0).abs().amax(-1)
    return float(torch.where(gap == 0, 0.0, gap / scale).max())


def _ulp(*values: Any) -> float:
    return max((torch.finfo(v.dtype).eps for v in values if isinstance(v, Tensor) and v.is_floating_point()), default=0.0)


def _overflowed(old: Any, truth: Any) -> Tensor | None:
    """Elements where the old graph itself lost a finite value: whatever the new one gives there is no worse."""
    if isinstance(old, Tensor) and isinstance(truth, Tensor) and old.is_floating_point() and old.shape == truth.shape:
        return ~old.isfinite() & truth.isfinite()
    return None


@dataclass
class Finding:
    """One broken promise."""

    result: str
    sample: int
    what: str
    error: float
    bound: float


class Reference:
    """A graph whose answers are the truth, with those answers computed once per sample."""

    def __init__(self, graph: Graph, samples: Sequence[Sample]):
        self.graph, self.samples = graph, [tuple(s) for s in samples]
        self._cache = WeakIdKeyDictionary()
        self._truth = [run_fp64(graph, s, self._cache) for s in self.samples]
        self._own = [run_plain(graph, s) for s in self.samples]

    def compare(self, graph: Graph) -> tuple[float, Finding | None]:
        """(worst fp64 error, the first broken promise or None) of `graph` against this one."""
        names = graph.outputs + graph.kv
        worst = 0.0
        for number, sample in enumerate(self.samples):
            lifted, plain = run_fp64(graph, sample, self._cache), run_plain(graph, sample)
            truth, own = self._truth[number], self._own[number]
            if len(lifted) != len(truth):
                return float("inf"), Finding("results", number, "count", len(lifted), len(truth))
            for name, new64, ref64, new, old in zip(names, lifted, truth, plain, own, strict=True):
                error = row_error(new64, ref64)
                worst = max(worst, error)
                if not error <= SAME_FUNCTION:
                    return worst, Finding(name, number, "another function: fp64 results differ", error, SAME_FUNCTION)
                finding = _precision(name, number, new, old, ref64)
                if finding:
                    return worst, finding
        return worst, None

    def forget(self, graph: Graph) -> None:
        """Keep lifted weights of `graph` only."""
        alive = {id(w) for w in graph.weights.values()}
        for tensor in [t for t in self._cache if id(t) not in alive]:
            del self._cache[tensor]


def _precision(name: str, number: int, new: Any, old: Any, truth: Any) -> Finding | None:
    if isinstance(new, Tensor) and isinstance(old, Tensor) and new.dtype != old.dtype:
        return Finding(name, number, f"{old.dtype} became {new.dtype}", float("inf"), 0.0)
    skip = _overflowed(old, truth)
    bound = 2 * row_error(old, truth, skip) + _ulp(old)
    error = row_error(new, truth, skip)
    return None if error <= bound else Finding(name, number, "precision lost: error against fp64 grew", error, bound)


def check_exact(reference: Reference, before: Graph, after: Graph) -> float:
    """The worst fp64 error of `after`; CheckFailed, naming the first differing node, when EXACT does not hold."""
    error, finding = reference.compare(after)
    reference.forget(after)
    if finding is None:
        return error
    site = first_difference(before, after, reference.samples[min(finding.sample, len(reference.samples) - 1)])
    raise CheckFailed(f"{finding.what} in {finding.result} on sample {finding.sample}: {finding.error:.3g}, bound {finding.bound:.3g}"
                      + (f"; first at {site}" if site else ""))


def first_difference(before: Graph, after: Graph, sample: Sample) -> str | None:
    """The first node, among those of the same name in both graphs, whose value the change altered or made less precise."""
    if len(sample) != len(after.inputs) + len(after.kv):
        return None
    runs: list[dict[str, Any]] = []
    for graph in (before, after):
        for run in (run_fp64, run_plain):
            spy: dict[str, Any] = {}
            run(graph, sample, spy=spy)
            runs.append(spy)
    old64, old, new64, new = runs
    for node in after.nodes:
        name = node.name
        if name not in old64 or name not in new64 or not isinstance(old64[name], Tensor):
            continue
        if not row_error(new64[name], old64[name]) <= SAME_FUNCTION or _precision(name, 0, new[name], old[name], old64[name]):
            return where(node)
    return None
