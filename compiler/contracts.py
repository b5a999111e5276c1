"""Does a changed graph keep its contract? Judged on the graph's sample inputs, against the graph as it was captured.

EXACT is checked twice (DESIGN, "Contracts"):
  (a) both graphs lifted to fp64, weights, casts and out_dtype included, agree to 1e-9 of each row's largest value: it is
      the same function;
  (b) in its own dtypes, the new graph's worst error against that fp64 result is at most twice the old graph's own plus
      one ulp of the row's largest value: no precision was thrown away. A dropped upcast passes (a) and fails (b).
A row is everything along the last axis. nan equals nan, inf equals inf.
"""
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakIdKeyDictionary

from .errors import CheckFailed
from .ir import Graph, evaluate, target_name, where

SAME_FUNCTION = 1e-9
"""(a)'s bound. fp64 sums of 1e5 terms differ by about 1e-14 when reordered; dropping any term or constant costs far more."""

LIFT_CACHE_BYTES = 4 << 30
"""Weights in fp64 are kept between checks up to this many bytes; past it they are lifted one by one at each use."""

LIFTED = WeakIdKeyDictionary()
"""The weights in fp64 that all checks of one pipeline share; the pipeline clears it at its end."""

PROMISE = "of each row's largest value, in fp64; and no precision lost in its own dtypes"
"""What SAME_FUNCTION is a bound of."""

Sample = Sequence[Tensor]


class Broken(CheckFailed):
    """A contract that does not hold: on which sample, where it shows first, by how much."""

    def __init__(self, message: str, *, sample: int, node: str, error: float, bound: float):
        super().__init__(message)
        self.sample, self.node, self.error, self.bound = sample, node, error, bound


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
        found: Any = self.cache.get(tensor)
        if found is not None and found[0] == tensor._version:
            return found[1]
        lifted = tensor.to(torch.float64)                          # new, or written to since: a pass must not, and it must show
        if self.keep:
            self.cache[tensor] = (tensor._version, lifted)
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
    outputs = evaluate(graph, given, graph.weights, _spying(_plain_call, spy))
    return [*outputs, *given[len(graph.inputs):]]


def run_rounded(graph: Graph, sample: Sample, dtype: torch.dtype) -> tuple[Any, ...]:
    """The outputs where matrices and every operator's result that depends on one are rounded to `dtype`: eager PyTorch in it.

    Angles and masks, which positions alone decide, stay as they are, as in Hugging Face's models. The sample is not written to.
    """
    def narrow(value: Any) -> Any:
        return value.to(dtype).to(value.dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    active: set[fx.Node] = set()
    for node in graph.nodes:
        weight = graph.weight(node)
        if (weight is not None and weight.dim() > 1) or any(used in active for used in node.all_input_nodes):
            active.add(node)

    def call(node: fx.Node, args: tuple, kwargs: dict) -> Any:
        value = _plain_call(node, args, kwargs)
        return tree_map(narrow, value) if node in active else value

    weights = {name: narrow(w) if w.dim() > 1 else w for name, w in graph.weights.items()}
    return evaluate(graph, [t.clone() for t in sample], weights, call)


def _plain_call(node: fx.Node, args: tuple, kwargs: dict) -> Any:
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _spying(call: Callable[..., Any], spy: dict | None) -> Callable[..., Any]:
    """The call, its value kept in `spy` by the node's name; CheckFailed, naming the node, where the operator raises."""
    def watched(node: fx.Node, args: tuple, kwargs: dict) -> Any:
        try:
            value = call(node, args, kwargs)
        except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError) as error:
            raise CheckFailed(f"{where(node)}: {target_name(node.target)} fails on a sample: {error}") from error
        if spy is not None:
            spy[node.name] = value
        return value

    return watched


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
        self._truth = [run_fp64(graph, s, LIFTED) for s in self.samples]
        self._own = [run_plain(graph, s) for s in self.samples]

    def compare(self, graph: Graph, only: int | None = None) -> tuple[float, Finding | None]:
        """(worst fp64 error, the first broken promise or None) of `graph` against this one, on all samples or one."""
        names = graph.outputs + graph.kv
        worst = 0.0
        for number, sample in enumerate(self.samples):
            if only not in (None, number):
                continue
            lifted, plain = run_fp64(graph, sample, LIFTED), run_plain(graph, sample)
            truth, own = self._truth[number], self._own[number]
            if len(lifted) != len(truth):
                return float("inf"), Finding("results", number, "count", len(lifted), len(truth))
            for name, new64, ref64, new, old in zip(names, lifted, truth, plain, own, strict=True):
                error = row_error(new64, ref64)
                worst = max(worst, error)
                if not error <= SAME_FUNCTION:
                    return worst, Finding(name, number, OTHER_FUNCTION, error, SAME_FUNCTION)
                finding = _precision(name, number, new, old, ref64)
                if finding:
                    return worst, finding
        return worst, None

    def described(self, number: int) -> str:
        """`sample 0 (input_ids [2, 9])`"""
        sample = self.samples[number]
        return f"sample {number}" + (f" ({self.graph.inputs[0]} {list(sample[0].shape)})" if self.graph.inputs else "")

    def forget(self, graph: Graph) -> None:
        """Keep lifted weights of `graph` only."""
        alive = {id(w) for w in graph.weights.values()}
        for tensor in [t for t in LIFTED if id(t) not in alive]:
            del LIFTED[tensor]


OTHER_FUNCTION = "another function: fp64 results differ"


def _precision(name: str, number: int, new: Any, old: Any, truth: Any) -> Finding | None:
    if isinstance(new, Tensor) and isinstance(old, Tensor) and new.dtype != old.dtype:
        return Finding(name, number, f"{old.dtype} became {new.dtype}", float("inf"), 0.0)
    skip = _overflowed(old, truth)
    bound = 2 * row_error(old, truth, skip) + _ulp(old)
    error = row_error(new, truth, skip)
    return None if error <= bound else Finding(name, number, "precision lost: error against fp64 grew", error, bound)


def check_exact(reference: Reference, before: Graph, after: Graph, only: int | None = None) -> float:
    """The worst fp64 error of `after`; Broken, naming the first differing node, when EXACT does not hold. `only`: one sample."""
    error, finding = reference.compare(after, only)
    if finding is None:
        reference.forget(after)
        return error
    site = first_difference(before, after, reference.samples[finding.sample], lifted=finding.what == OTHER_FUNCTION)
    raise Broken(f"{finding.what} in {finding.result} on {reference.described(finding.sample)}: {finding.error:.3g}, "
                 f"bound {finding.bound:.3g}" + (f"; first at {site}" if site else ""),
                 sample=finding.sample, node=site or "", error=finding.error, bound=finding.bound)


def first_difference(before: Graph, after: Graph, sample: Sample, *, lifted: bool = False) -> str | None:
    """The first node, among those of the same name in both graphs, whose value the change altered or made less precise.

    `lifted`: altered in fp64; rounding is not looked at.
    """
    if len(sample) != len(after.inputs) + len(after.kv):
        return None
    old64, new64 = (_values(run_fp64, graph, sample) for graph in (before, after))
    old, new = ({}, {}) if lifted else (_values(run_plain, graph, sample) for graph in (before, after))
    for node in after.nodes:
        name = node.name
        if name not in old64 or name not in new64 or not isinstance(old64[name], Tensor):
            continue
        if not row_error(new64[name], old64[name]) <= SAME_FUNCTION:
            return where(node)
        if not lifted and _precision(name, 0, new[name], old[name], old64[name]):
            return where(node)
    return None


def _values(run: Callable[..., Any], graph: Graph, sample: Sample) -> dict[str, Any]:
    """Every call's value, by the node's name."""
    spy: dict[str, Any] = {}
    run(graph, sample, spy=spy)
    return spy
