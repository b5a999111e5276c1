"""Runs passes in order and answers for them: requirements, contract ceiling, time, checks, dump, roll back, blame.

A pass changes the graph and counts; everything else about running it is here. A pass that breaks the graph or its contract
is rolled back, and the compile fails; or, if asked to keep going, goes on without it and without what requires it.
"""
import copy
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import debug
from .blame import guilty_rewrite
from .contracts import LIFTED, Broken
from .dump.dumps import Dump
from .errors import CheckFailed, UserError, nearest
from .ir import Graph, text, verify
from .judge import CheckLevel, Judge, samples
from .kept import Kept
from .rewrite import AnyPass, Contract, NearMiss, Report


@dataclass
class PassResult:
    """What one pass did."""

    name: str
    contract: Contract
    fired: int = 0
    """Rewrites that are in the graph: 0 for a dropped pass."""
    refused: dict[str, str] = field(default_factory=dict)
    misses: list[NearMiss] = field(default_factory=list)
    error: float | None = None
    """The worst error its contract check measured; None when it did not fire or nothing was checked."""
    bound: float | None = None
    """What `error` may be at most, `promise` says of what."""
    promise: str = ""
    dropped: str = ""
    """Why its rewrites were taken back, where the compile kept going."""
    skipped: str = ""
    """Why it was not run."""
    kept_from: str = ""
    """When its contract was checked, where an earlier compile did that for the very same graphs; empty where it was now."""
    seconds: float = 0.0
    check_seconds: float = 0.0

    def json(self) -> dict[str, Any]:
        """The stable form of `infc compile --json`."""
        refused = [{"site": site, "reason": reason} for site, reason in self.refused.items()]
        misses = [{"site": m.site, "matched": m.matched, "of": m.of, "reason": m.reason, "expected": m.expected, "found": m.found}
                  for m in self.misses]
        return {"name": self.name, "fired": self.fired, "refused": refused, "misses": misses, "contract": self.contract.label,
                "error": self.error, "bound": self.bound, "promise": self.promise, "dropped": self.dropped, "skipped": self.skipped,
                "kept_from": self.kept_from, "seconds": round(self.seconds, 4), "check_seconds": round(self.check_seconds, 4)}

    @property
    def note(self) -> str:
        """One line about a pass that was left out; empty for every other."""
        return f"pass {self.name} was dropped: {self.dropped}" if self.dropped else f"pass {self.name} was skipped: {self.skipped}" \
            if self.skipped else ""

    @property
    def stated_bound(self) -> str:
        """The bound and of what: `1e-09 of each row's largest value, ...`; empty where nothing was measured."""
        return f"{self.bound:.3g} {self.promise}" if self.bound is not None else ""


@dataclass
class PipelineReport:
    """What the passes did, in order."""

    passes: list[PassResult] = field(default_factory=list)

    @property
    def weakest(self) -> Contract:
        """The weakest contract of any pass that fired."""
        return max((p.contract for p in self.passes if p.fired), default=Contract.EXACT)

    @property
    def skipped(self) -> list[str]:
        """Passes that were not run: INFC_STOP was reached, or a pass they require was left out."""
        return [p.name for p in self.passes if p.skipped]

    @property
    def dropped(self) -> list[str]:
        """Passes whose rewrites were taken back."""
        return [p.name for p in self.passes if p.dropped]

    @property
    def notes(self) -> list[str]:
        """One line for each pass that was left out."""
        return [p.note for p in self.passes if p.note]

    def fired(self, name: str) -> int:
        """How often the pass of that name fired, over all its runs."""
        return sum(p.fired for p in self.passes if p.name == name)

    def json(self) -> list[dict[str, Any]]:
        """One entry per pass."""
        return [p.json() for p in self.passes]


class PassFailed(CheckFailed):
    """A pass broke the graph or its contract: which pass, by which rewrite, where it shows first, and by how much.

    `error` and `bound` are None where no number was measured: the graph is malformed, or the pass's own check said no.
    """

    def __init__(self, name: str, failure: CheckFailed, site: str | None):
        by = f"; by {site}" if site else ""
        super().__init__(f"pass {name}: {failure.message}{by}")
        self.pass_name, self.site, self.node = name, site, ""
        self.error: float | None = None
        self.bound: float | None = None
        if isinstance(failure, Broken):
            self.node, self.error, self.bound = failure.node, failure.error, failure.bound


def contract_named(name: str) -> Contract:
    """The contract behind a public name: exact, distribution, approximate."""
    labels = {c.label: c for c in Contract}
    if name not in labels:
        raise UserError(f"unknown contract {name!r}; {nearest(name, labels)}")
    return labels[name]


def run_pipeline(graph: Graph, passes: Sequence[AnyPass], *, allow: Contract | str = Contract.EXACT, check: CheckLevel = "fast",
                 dump: Path | str | None = None, progress: Callable[[PassResult], None] | None = None,
                 options: dict[str, Any] | None = None, keep_going: bool = False, needed: Collection[str] = (),
                 cache: Kept | None = None) -> PipelineReport:
    """Apply `passes` to `graph` in place. `progress` is called with each result as it is there. cache: what earlier compiles measured.

    Raises UserError (the graph untouched) for a pass weaker than `allow` or out of order, and PassFailed (the graph as it
    was before that pass) when a pass breaks the graph or its contract. With `keep_going` such a pass is dropped, and what
    requires it is skipped; CheckFailed when that hits a pass that is `needed`.
    """
    _admit(passes, contract_named(allow) if isinstance(allow, str) else allow)
    asked = debug.check()
    check = check if asked is None else "strict" if asked == 2 else "off"
    folder = Path(dump) if dump else debug.dump()
    if check != "off" and any(one.check is None for one in passes):
        samples(graph, check)                                          # now, rather than after the first pass
    run = _Run(graph, Judge(graph, check, cache), options or {}, debug.stop())
    report = PipelineReport()
    verify(graph)
    dump_to = Dump(folder, graph, [one.name for one in passes]) if folder else None
    try:
        _run_all(run, passes, keep_going, needed, report, dump_to, progress)
    finally:
        LIFTED.clear()
    return report


def _run_all(run: "_Run", passes: Sequence[AnyPass], keep_going: bool, needed: Collection[str], report: PipelineReport,
             dump_to: Dump | None, progress: Callable[[PassResult], None] | None) -> None:
    for number, one in enumerate(passes, 1):
        reason = run.obstacle(one)
        result = PassResult(one.name, one.contract, skipped=reason) if reason else run.one(one, keep_going)
        report.passes.append(result)
        if dump_to:
            dump_to.add(number, run.graph, result.json())
        if progress:
            progress(result)
        if one.name in needed and result.note and keep_going:
            first = next(p for p in report.passes if p.note)
            raise CheckFailed(f"the compile cannot go on without {one.name}: {result.note}"
                              + (f"; {first.note}" if first is not result else ""))


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


@dataclass
class _Run:
    """One graph on its way through the passes."""

    graph: Graph
    judge: Judge
    options: dict[str, Any]
    budget: int | None
    """Rewrites that may still be applied (INFC_STOP); None for no limit."""
    lost: dict[str, str] = field(default_factory=dict)
    """What is not provided though `passes` hold it -> how that came about."""

    def obstacle(self, one: AnyPass) -> str:
        """Why the pass cannot run; empty when it can."""
        reason = "INFC_STOP was reached" if self.budget == 0 else next((self.lost[n] for n in one.requires if n in self.lost), "")
        if reason:
            self._lose(one, f"it requires {one.name}, which was skipped")
        return reason

    def one(self, one: AnyPass, keep_going: bool) -> PassResult:
        """Run one pass. PassFailed, or a result that says why it was dropped, when it broke something."""
        result = PassResult(one.name, one.contract)
        try:
            self._run(one, result)
        except PassFailed as failure:
            if not keep_going:
                raise
            self._lose(one, f"it requires {one.name}, which was dropped")
            result.fired, result.error, result.bound = 0, failure.error, failure.bound
            result.dropped = failure.message.removeprefix(f"pass {one.name}: ")
            return result
        self.lost = {need: why for need, why in self.lost.items() if need not in (one.name, *one.provides)}
        self.budget = None if self.budget is None else max(0, self.budget - result.fired)
        return result

    def _lose(self, one: AnyPass, why: str) -> None:
        for name in (one.name, *one.provides):
            self.lost.setdefault(name, why)

    def _run(self, one: AnyPass, result: PassResult) -> None:
        graph, before = self.graph, self.graph.copy()
        notes = Report(one.name, options=self.options, budget=self.budget)
        start = time.perf_counter()
        try:
            result.fired = one.apply(graph, notes)
            result.seconds = time.perf_counter() - start
            result.refused, result.misses = notes.refused, notes.misses
            self._check(one, before, result)
        except CheckFailed as failure:
            after = copy.copy(graph)
            graph.restore(before)
            raise PassFailed(one.name, failure, self._site(one, before.copy(), after, notes.fired, failure)) from failure
        except BaseException:
            graph.restore(before)
            raise
        finally:
            result.check_seconds = time.perf_counter() - start - result.seconds

    def _check(self, one: AnyPass, before: Graph, result: PassResult) -> None:
        if result.fired == 0:
            if text(self.graph) != text(before):
                raise CheckFailed("says it did nothing, but the graph is another one")
            return
        measured = self.judge.judge(one, before, self.graph)
        result.kept_from = self.judge.kept_from
        if measured:
            result.error, result.bound, result.promise = measured.error, measured.bound, measured.promise

    def _site(self, one: AnyPass, before: Graph, after: Graph, fired: int, failure: CheckFailed) -> str | None:
        if fired == 0 or one.contract is Contract.APPROXIMATE:         # rounding adds up: its last drop is not to blame
            return None
        sample = failure.sample if isinstance(failure, Broken) else None

        def breaks(twin: Graph) -> None:
            self.judge.structure(twin)
            self.judge.contract(one, before, twin, sample)

        return guilty_rewrite(one, before, after, fired, self.options, breaks)


__all__ = ["CheckLevel", "PassFailed", "PassResult", "PipelineReport", "contract_named", "run_pipeline"]
