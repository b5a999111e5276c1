"""Find the first rewrite, or the first kernel, that makes an answer wrong; in about log2 of their number of runs.

Three suspects, told apart by what is run:
  the passes     the graph after the first N rewrites, on reference operators, against the captured graph
  the kernels    the program, its first K steps on their kernels and the others on reference operators, against golden logits
  the program    all its steps on reference operators: wrong even so is the memory plan, or what feeds the steps
A GPU's program runs in the CPU's memory; its kernels are judged only where this process interprets them (TRITON_INTERPRET=1).
With a command of the user's, an artifact is compiled after each prefix of rewrites and the command says whether it is good.
"""
import shlex
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from .. import passes
from ..backends import reference
from ..backends.cpu.caches import Caches
from ..runtime.errors import RuntimeFault
from ..runtime.golden import replay
from ..runtime.session import Model, load
from . import driver, targets
from .errors import CheckFailed, InfcError, UserError
from .frontends import capture
from .graph_check import GraphCheck
from .ir import Graph
from .options import Options, check_options, pass_options
from .pipeline import PassResult, PipelineReport
from .prefixes import Prefixes, Ran, first_bad, needed_for, place_of
from .progress import Event, Listener
from .replays import VERIFY_TOKENS, Bounds, host_device
from .rewrite import Contract
from .scratch import scratch

LAST_NEEDED = "sample_tokens"
"""With this pass a graph has the inputs and outputs that the runtime knows: what it requires, every artifact needs."""

SKIP, NOT_EXECUTABLE, NOT_FOUND = 125, 126, 127
"""Exit codes: of a command that cannot tell (as in git bisect), and of a shell that could not run it (POSIX)."""


@dataclass(frozen=True)
class Found:
    """What was found. `rewrite` counts from 1; `untestable` rewrites before it may be at fault as well."""

    fault: Literal["none", "pass", "kernel", "program"]
    rewrites: int
    runs: int
    rewrite: int | None = None
    name: str = ""                                     # the pass, or the kernel
    site: str = ""                                     # module path and source line
    why: str = ""
    untestable: int = 0
    op: str = ""                                       # from here on: of a kernel
    bucket: str = ""
    step: int | None = None
    steps: int = 0
    error: float | None = None
    """The kernel's worst result beside its reference on the same inputs, as a share of its row's largest value."""

    @property
    def line(self) -> str:
        """One line for a person."""
        runs = f"({self.runs} run{'s' * (self.runs != 1)})"
        if self.fault == "pass":
            also = f"; the {self.untestable} before it cannot be told from it" if self.untestable else ""
            return f"first bad rewrite: {self.rewrite} of {self.rewrites}, {self.name} at {self.site} {runs}: {self.why}{also}"
        if self.fault == "kernel":
            return (f"the passes are right; first bad kernel: step {self.step} of {self.steps} in {self.bucket}, {self.name} ({self.op}) "
                    f"at {self.site or 'no module'} {runs}: {self.why}")
        if self.fault == "program":
            return f"the passes and the kernels are not at fault, the program is {runs}: {self.why}"
        return f"nothing is wrong: {self.why} {runs}"

    def json(self) -> dict[str, Any]:
        """The stable form of `infc bisect --json`."""
        return asdict(self) | {"line": self.line}


@dataclass
class Search:
    """One bisect: what it works on, how it tells of its progress, and how often it ran something."""

    captured: Graph
    options: Options
    tell: Listener
    runs: int = 0

    @property
    def pass_options(self) -> dict[str, Any]:
        return pass_options(self.options)

    def ran(self, what: str, good: bool | None, left: int = 0) -> None:
        """Count a run and tell its outcome."""
        self.runs += 1
        outcome = {True: "good", False: "bad", None: "cannot be tested"}[good]
        self.tell(Event("note", "bisect", f"  run {self.runs}: {what}: {outcome}" + (f"; {left} left" if left else "")))

    def phase(self, name: str, text: str) -> None:
        self.tell(Event("phase", name, text))


def bisect(
    model: Any, *, options: Options | None = None, command: str | None = None, on_event: Listener | None = None,
) -> Found:
    """The first bad rewrite or kernel of a model's compile.

    model: as for `driver.compile`. command: a shell command with {artifact} in it; exit code 0 is good, 125 cannot tell, any
    other is bad. Without one, logits are compared with the captured graph's in fp64, within its own error (compiler/graph_check.py),
    then the program's with the golden ones. Raises UserError where the command cannot be run or fails before any rewrite, CheckFailed
    where the model has no answer to compare with.
    """
    options = options or Options()
    check_options(options)
    if command is not None and "{artifact}" not in command:
        raise UserError(f"--command {command!r} has no {{artifact}}: write it where the artifact's path belongs")
    tell = on_event or (lambda event: None)
    tell(Event("phase", "capture", "capturing the model"))
    captured = model if isinstance(model, Graph) else capture(model, progress=lambda line: tell(Event("note", "capture", line)))
    search = Search(captured, options, tell)
    return _by_command(search, command) if command else _by_answers(search)


# ------------------------------------------------------------------------------------------------- against the captured graph

def _by_answers(search: Search) -> Found:
    search.phase("passes", "running all passes once")
    chosen = passes.pipeline(search.options.dtype, search.options.quant != "none", search.options.kv_quant != "none")
    prefixes = Prefixes(search.captured, chosen, search.pass_options)
    graphs = Graphs(search, prefixes)
    search.phase("rewrites", f"{prefixes.total} rewrites")
    if graphs.fault(prefixes.total) is not None:
        return _first_rewrite(search, prefixes, graphs)
    if prefixes.failed: raise prefixes.failed
    search.phase("kernels", "every graph is right: building its program")
    with scratch("bisect") as folder:
        return _kernels(search, prefixes, folder)


@dataclass
class Graphs:
    """What is wrong with the graph after N rewrites, on reference operators; each is judged once."""

    search: Search
    prefixes: Prefixes
    known: dict[int, str | None] = field(default_factory=lambda: {0: None})
    checks: dict[int, GraphCheck] = field(default_factory=dict)

    def fault(self, cut: int, left: int = 0) -> str | None:
        """The reason, or None where the graph is right. Nothing before an approximate pass may be wrong either."""
        if cut in self.known: return self.known[cut]
        ran = self.prefixes.of(cut)
        if ran.one.contract > Contract.EXACT and (reason := self.fault(ran.first - 1, left)): return reason
        try:
            reason = self._judge(ran, self.prefixes.at(cut))
        except (CheckFailed, UserError) as error:
            reason = error.message
        self.known[cut] = reason
        self.search.ran(f"the first {cut} of {self.prefixes.total} rewrites", reason is None, left)
        return reason

    def _judge(self, ran: Ran, graph: Graph) -> str | None:
        if ran.one.contract > Contract.EXACT:
            assert ran.one.check is not None              # the pipeline admits no other
            ran.one.check(ran.before, graph)
            return None
        return self._check_before(ran).fault(graph)

    def _check_before(self, ran: Ran) -> GraphCheck:
        """Against the captured graph; after an approximate pass, against what that pass gave."""
        loose = [r for r in self.prefixes.passes if r.fired and r.last < ran.first and r.one.contract > Contract.EXACT]
        base = loose[-1].last if loose else 0
        if base not in self.checks:
            truth = self.prefixes.at(base) if base else self.search.captured
            self.checks[base] = GraphCheck(truth, self.search.captured)
        return self.checks[base]


def _first_rewrite(search: Search, prefixes: Prefixes, graphs: Graphs) -> Found:
    bad = min(cut for cut, reason in graphs.known.items() if reason is not None)
    cuts = [cut for cut in prefixes.cuts if cut <= bad]
    _, high = first_bad(cuts, lambda cut, left: graphs.fault(cut, left) is None)
    return Found("pass", prefixes.total, search.runs, high, prefixes.of(high).one.name, prefixes.site(high), graphs.known[high] or "")


# ------------------------------------------------------------------------------------------------------------------ kernels

def _kernels(search: Search, prefixes: Prefixes, folder: Path) -> Found:
    found: list[Found] = []

    def judge(artifact: Path, bounds: Bounds) -> dict[str, Any]:
        machine = Machine(artifact, targets.find(search.options.target), bounds)
        with machine.load() as model:
            if not machine.kernels: reference.install(model.executor, bounds, lambda unit: False)
            report = replay(model, brief=machine.gpu)
        search.ran("the program", report.passed)
        if report.passed:
            on = "" if machine.kernels else " on reference operators"
            found.append(Found("none", prefixes.total, search.runs, why=f"the graph is right after all {prefixes.total} rewrites, and its "
                               f"program{on} within {report.error:.3g} of the golden logits ({report.bound:.3g} allowed)"
                               + ("" if machine.kernels else "; no kernel of a GPU runs here, TRITON_INTERPRET=1 has them interpreted")))
        else:
            found.append(_first_kernel(search, prefixes.total, machine, report))
        return {"replayed": False, "reason": "bisect judged it"}

    _compile(search, prefixes, prefixes.final, folder / "all.infc", judge)
    return found[0]


@dataclass(frozen=True)
class Machine:
    """Where an artifact runs: this CPU, or what stands for its GPU here."""

    artifact: Path
    target: targets.Target
    bounds: Bounds

    @property
    def gpu(self) -> bool:
        return self.target.kind == "cuda"

    @property
    def kernels(self) -> bool:
        """Does it run them?"""
        return not self.gpu or host_device(self.artifact, self.target, self.bounds)[1]

    def load(self) -> Model:
        """The model, nothing of it recorded."""
        if not self.gpu: return load(self.artifact, kv_tokens=VERIFY_TOKENS)
        device, _ = host_device(self.artifact, self.target, self.bounds)
        model = load(self.artifact, device=device, kv_tokens=VERIFY_TOKENS)
        model.cache.clear()
        return model


def _first_kernel(search: Search, rewrites: int, machine: Machine, report: Any) -> Found:
    """Units up to K on kernels, the others on reference operators; the largest bucket that is wrong has the fewest steps to run."""
    wrong = [name for name, error in report.errors.items() if not error <= report.bound]
    bounds = machine.bounds
    with machine.load() as model:
        sizes = {b.name: b.bucket["T"] for b in model.manifest.buckets}
        bucket = max(wrong, key=lambda name: sizes.get(name, 0))
        kernels = {"until": 0}
        tables = reference.install(model.executor, bounds, lambda unit: unit < kernels["until"],
                                   None if machine.gpu else Caches(model.executor))

        def good(cut: int, left: int) -> bool:
            kernels["until"] = cut
            right = replay(model, [bucket], machine.gpu).errors[bucket] <= report.bound
            search.ran(f"{bucket}: kernels for the first {cut} calls" if cut else f"{bucket}: no kernel at all", right, left)
            return right

        if not machine.kernels or not good(0, 0):
            return Found("program", rewrites, search.runs, bucket=bucket, why=f"in {bucket} its logits are off with reference operators in "
                         "place of every kernel too, so buffers overlap, a step is missing or misplaced, or its inputs are wrong")
        name = bucket if bucket in tables else max(tables, key=sizes.__getitem__)      # "mixed" is a batch, not a bucket
        steps, units = tables[name].program.steps, tables[name].bound.units
        _, high = first_bad(range(len(units) + 1), good)
        tables[name].watch, kernels["until"] = high - 1, high - 1
        replay(model, [bucket], machine.gpu)
        at, error = tables[name].steps_of(high - 1)[0], max(tables[name].differences)
        step, node = steps[at], units[high - 1].nodes[0]
        kernel = next(k for k in model.manifest.kernels if k.hash == step.kernel)
        others = sum(s.kernel == step.kernel for s in steps) - 1
        return Found("kernel", rewrites, search.runs, name=kernel.name, op=step.op, bucket=name, step=at + 1, steps=len(steps), error=error,
                     site=place_of(node),
                     why=f"its result differs from the reference operator's on the same inputs by {error:.3g} of a row's largest value"
                     + (f"; {others} more steps use it" if others else ""))


# ----------------------------------------------------------------------------------------------------------------- a command

def _by_command(search: Search, command: str) -> Found:
    search.phase("passes", "running all passes once")
    chosen = passes.pipeline(search.options.dtype, search.options.quant != "none", search.options.kv_quant != "none")
    always = needed_for(LAST_NEEDED, chosen)
    prefixes = Prefixes(search.captured, chosen, search.pass_options, lambda index: chosen[index].name in always)
    if prefixes.failed: raise prefixes.failed
    search.phase("rewrites", f"{prefixes.total} rewrites that an artifact can do without")
    with _tester(search, prefixes, command) as good:
        if (whole := good(prefixes.total, 0)) is not False:
            if whole is None:
                raise UserError("the artifact with all rewrites cannot be tested: it does not compile, or the command says 125")
            return Found("none", prefixes.total, search.runs, why="the command succeeds with every rewrite")
        graphs = Graphs(search, prefixes)
        cuts = [cut for cut in prefixes.cuts if cut]
        base = next(cut for cut in (0, *cuts) if good(cut, 0) is not None)
        if not good(base, 0):
            return _before_any(search, prefixes, graphs, base, always)
        low, high = first_bad([cut for cut in (0, *cuts) if cut >= base], good)
    why = graphs.fault(high)
    return Found("pass", prefixes.total, search.runs, high, prefixes.of(high).one.name, prefixes.site(high),
                 why or "its graph is right on reference operators: suspect the kernels it brings in (infc bisect without --command)",
                 untestable=high - low - 1 - _inside(prefixes, high))


def _inside(prefixes: Prefixes, cut: int) -> int:
    """Rewrites that come together with this one."""
    ran = prefixes.of(cut)
    return ran.fired - 1 if ran.whole else 0


def _before_any(search: Search, prefixes: Prefixes, graphs: Graphs, base: int, always: set[str]) -> Found:
    """The command fails on the plainest artifact there is."""
    reason = GraphCheck(search.captured, search.captured).fault(prefixes.at(base))
    if reason is None:
        raise UserError("the command fails before any rewrite: the fault is not in the passes "
                        "(without --command, infc bisect looks at the kernels)")
    search.tell(Event(
        "note", "bisect", f"  wrong already with {', '.join(sorted(always))} alone, which every artifact needs: {reason}"))
    return _by_answers(search)


@contextmanager
def _tester(search: Search, prefixes: Prefixes, command: str) -> Iterator[Callable[[int, int], bool | None]]:
    known: dict[int, bool | None] = {}
    with scratch("bisect") as folder:

        def good(cut: int, left: int) -> bool | None:
            if cut not in known:
                known[cut] = _test(search, prefixes, cut, folder / f"{cut}.infc", command)
                search.ran(f"an artifact with the first {cut} of {prefixes.total} rewrites", known[cut], left)
            return known[cut]

        yield good


def _test(search: Search, prefixes: Prefixes, cut: int, artifact: Path, command: str) -> bool | None:
    try:
        unjudged = {"replayed": False, "reason": "the command judges it"}
        _compile(search, prefixes, prefixes.at(cut), artifact, lambda folder, bounds: unjudged)
    except (InfcError, RuntimeFault) as error:
        search.tell(Event("note", "bisect", f"  no artifact with the first {cut} rewrites: {error}"))
        return None
    line = command.replace("{artifact}", shlex.quote(str(artifact)))
    code = subprocess.run(line, shell=True, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode
    if code in (NOT_EXECUTABLE, NOT_FOUND):
        raise UserError(f"the command cannot be run (exit code {code}): {line}")
    return None if code == SKIP else code == 0


def _compile(search: Search, prefixes: Prefixes, graph: Graph, path: Path, judge: Callable[[Path, Bounds], dict[str, Any]]) -> None:
    def rewrite(captured: Graph) -> PipelineReport:
        captured.restore(graph)
        return PipelineReport([PassResult(ran.one.name, ran.one.contract, ran.fired) for ran in prefixes.passes])

    driver.compile(search.captured, path, options=search.options, hooks=driver.Hooks(rewrite, judge))
