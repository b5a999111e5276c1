"""Runs passes in order and answers for them: requirements, contract ceiling, time, verify, contract, dump, roll back.

A pass changes the graph and counts; everything else about running it is here.
"""
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from . import debug
from .contracts import Reference, check_exact
from .errors import CheckFailed, UserError, nearest
from .ir import Graph, fake_propagate, text, verify
from .rewrite import AnyPass, Contract, NearMiss, Report

CheckLevel = Literal["off", "fast", "strict"]
"""off: the graph is verified after each pass. fast: and each pass's contract, on the first sample. strict: on all samples,
and every value is inferred again after each pass."""


@dataclass
class PassResult:
    """What one pass did."""

    name: str
    contract: Contract
    fired: int = 0
    refused: dict[str, str] = field(default_factory=dict)
    misses: list[NearMiss] = field(default_factory=list)
    error: float | None = None
    """The worst error its contract check measured; None when it did not fire or nothing was checked."""
    seconds: float = 0.0
    check_seconds: float = 0.0

    def json(self) -> dict[str, Any]:
        """The stable form of `infc compile --json`."""
        refused = [{"site": site, "reason": reason} for site, reason in self.refused.items()]
        return {"name": self.name, "fired": self.fired, "refused": refused, "contract": self.contract.label,
                "error": self.error, "seconds": round(self.seconds, 4), "check_seconds": round(self.check_seconds, 4)}


@dataclass
class PipelineReport:
    """What the passes did, in order."""

    passes: list[PassResult] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    """Passes not run because INFC_STOP was reached."""

    @property
    def weakest(self) -> Contract:
        """The weakest contract of any pass that fired."""
        return max((p.contract for p in self.passes if p.fired), default=Contract.EXACT)

    def fired(self, name: str) -> int:
        """How often the pass of that name fired, over all its runs."""
        return sum(p.fired for p in self.passes if p.name == name)

    def json(self) -> list[dict[str, Any]]:
        """One entry per pass."""
        return [p.json() for p in self.passes]


def contract_named(name: str) -> Contract:
    """The contract behind a public name: exact, distribution, approximate."""
    labels = {c.label: c for c in Contract}
    if name not in labels:
        raise UserError(f"unknown contract {name!r}; {nearest(name, labels)}")
    return labels[name]


def run_pipeline(graph: Graph, passes: Sequence[AnyPass], *, allow: Contract | str = Contract.EXACT, check: CheckLevel = "fast",
                 dump: Path | str | None = None, progress: Callable[[PassResult], None] | None = None,
                 options: dict[str, Any] | None = None) -> PipelineReport:
    """Apply `passes` to `graph` in place. `progress` is called with each result as it is there.

    Raises UserError (the graph untouched) for a pass weaker than `allow` or out of order, and CheckFailed (the graph as it
    was before that pass) when a pass breaks the graph or its contract.
    """
    _admit(passes, contract_named(allow) if isinstance(allow, str) else allow)
    asked = debug.check()
    check = check if asked is None else "strict" if asked == 2 else "off"
    folder = Path(dump) if dump else debug.dump()
    judge = _Judge(graph, check)
    report, left = PipelineReport(), debug.stop()
    verify(graph)
    _write(folder, 0, "captured", graph)
    for number, one in enumerate(passes, 1):
        if left == 0:
            report.skipped.append(one.name)
            continue
        result = _run_one(graph, one, judge, options or {}, left)
        left = None if left is None else max(0, left - result.fired)
        report.passes.append(result)
        if result.fired:
            _write(folder, number, one.name, graph)
        if progress:
            progress(result)
    return report


def _admit(passes: Sequence[AnyPass], ceiling: Contract) -> None:
    provided: set[str] = set()
    for one in passes:
        if one.contract > ceiling:
            raise UserError(f"pass {one.name} is {one.contract.label}, the ceiling is {ceiling.label}: "
                            f"allow it with --allow {one.contract.label}, or leave it out")
        if one.contract > Contract.EXACT and one.check is None:
            raise UserError(f"pass {one.name} is {one.contract.label} but states no bound: it needs a check of its own")
        missing = [need for need in one.requires if need not in provided]
        if missing:
            raise UserError(f"pass {one.name} requires {', '.join(missing)}, which no earlier pass provides")
        provided |= {one.name, *one.provides}


def _run_one(graph: Graph, one: AnyPass, judge: "_Judge", options: dict[str, Any], budget: int | None) -> PassResult:
    before = graph.copy()
    result = PassResult(one.name, one.contract)
    notes = Report(one.name, options=options, budget=budget)
    start = time.perf_counter()
    try:
        result.fired = one.apply(graph, notes)
        result.seconds = time.perf_counter() - start
        result.refused, result.misses = notes.refused, notes.misses
        verify(graph)
        if result.fired == 0 and text(graph) != text(before):
            raise CheckFailed("says it did nothing, but the graph is another one")
        if result.fired:
            result.error = judge.judge(one, before, graph)
    except CheckFailed as error:
        graph.restore(before)
        raise CheckFailed(f"pass {one.name}: {error.message}") from error
    except BaseException:
        graph.restore(before)
        raise
    result.check_seconds = time.perf_counter() - start - result.seconds
    return result


class _Judge:
    """Checks contracts against the captured graph; a pass with a check of its own sets a new point of reference."""

    def __init__(self, graph: Graph, level: CheckLevel):
        self.level: CheckLevel = level
        self.reference: Reference | None = None
        self.captured: Graph | None = graph.copy() if level != "off" else None

    def judge(self, one: AnyPass, before: Graph, after: Graph) -> float | None:
        """The error measured, None where nothing was; CheckFailed when the contract is broken."""
        if self.level == "off":
            return None
        if self.level == "strict":
            fake_propagate(after)
        if one.check is not None:
            error = one.check(before, after)
            self.captured, self.reference = after.copy(), None
            return error
        if self.reference is None:
            assert self.captured is not None
            self.reference = Reference(self.captured, _samples(self.captured, self.level))
        return check_exact(self.reference, before, after)


def _samples(graph: Graph, level: str) -> list[Any]:
    if graph.sample_inputs is None:
        raise CheckFailed("the graph has no sample inputs to judge passes on: set Graph.sample_inputs, or check=\"off\"")
    samples = list(graph.sample_inputs())
    return samples if level == "strict" else samples[:1]


def _write(folder: Path | None, number: int, name: str, graph: Graph) -> None:
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number:02d}-{name}.txt").write_text(text(graph))
