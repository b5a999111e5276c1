"""compile(): the whole story on one page, and the only file that knows frontends, passes, backends and the artifact."""
import difflib
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from .. import passes
from ..backends import reference
from ..backends.aten import check_strict, coverage
from ..backends.host_device import HostDevice
from ..backends.launch import Context
from ..backends.loops import cost as loop_cost
from ..backends.program import DTYPES as NAMES
from ..backends.program import Store, build
from ..backends.reference import Bound
from ..backends.regions import LoopUnit
from ..runtime.artifact import GOLDEN, REPORT, Parts, read, refuse_place, verify_files, write
from ..runtime.golden import Case, GoldenReport, pack, replay
from ..runtime.library import default_threads
from ..runtime.manifest import BLOCK, GPU, GoldenInfo, KvBuffer, Manifest, ModelInfo, PassInfo
from ..runtime.program import Program
from ..runtime.session import load
from ..runtime.writer import amend
from . import debug, kept, keys, misses, targets, verification
from .costs import cost, machine
from .costs.cost_table import CostTable
from .costs.data_sheet import data_sheet
from .costs.explain import at_rate
from .costs.step_times import step_times
from .dump.dump_files import refuse_filled
from .dump.dump_programs import write_programs
from .errors import CheckFailed, UserError
from .files import write_whole
from .fits import machine_of
from .frontends import capture
from .frontends.identity import identity
from .graph_json import graph_json
from .ir import Graph, text
from .kept import Kept
from .pipeline import PassResult, PipelineReport, run_pipeline
from .placement import Placement, Unit, place
from .quality import compile_gate, limits, per_layer
from .quality.text import CALIBRATION, HELD_OUT
from .quality.text import read as read_text
from .quant import recipe, search
from .quant.kv import parse_kv
from .quant.pays import Pays
from .quant.plan import METHODS, Plan, blind, check_floats
from .quant.scheme import Scheme
from .reuse import Entry
from .rewrite import Report

if TYPE_CHECKING:
    from torch import nn

DTYPES = ("bf16", "fp16", "fp32")
BUCKETS = {"cpu": (1, 16, 128, 512), "cuda": (1, 8, 64, 512, 2048)}
"""Tokens per step. CPU kernels take the live count, so a bucket only bounds memory; 512 is where products reach their peak. A GPU runs a
step at its bucket's size: decode at 1, 8 and 64 sequences, prompts in chunks of up to 2048."""

SEQUENCES = {"cpu": 16, "cuda": 64}
"""Sequences in one step."""

VERIFY_TOKENS = 4096
"""Room of the KV pool when a GPU's program is verified here: more than all golden cases together, twice."""

MAX_BUCKET = 16384

AUTO = "auto"
"""--quant auto: formats are searched for."""


@dataclass(frozen=True)
class Options:
    """What a user may choose. Every field reaches the version key."""

    target: str = "cpu"
    dtype: str = "bf16"
    allow: str = "approximate"
    check: str = "fast"
    buckets: tuple[int, ...] | None = None            # None: BUCKETS
    max_sequences: int | None = None                  # None: SEQUENCES
    strict: bool = False
    dump: Path | None = None
    dump_asm: bool = False                            # the kernels' assembly as well
    force: bool = False
    reuse: bool = True                                # copy a finished compile of the same model, options, sources and toolchain
    cache: bool = True                                # take what an earlier compile found out: that, and answers and verdicts (kept.py)
    expect: tuple[tuple[str, int], ...] = ()          # (pass, how often it must fire), else CheckFailed
    keep_going: bool = False                          # drop a pass that breaks its contract, rather than fail
    quant: str = "none"                               # a scheme (compiler.quant.scheme), a recipe's file or text, or "auto": searched for
    quant_method: str = "auto"                        # how codes are chosen (compiler.quant.plan.METHODS); auto: rtn for 8 bits, gptq for 4
    calib: Path | None = None                         # the text they are chosen on; None: the one that travels with infc
    kv_quant: str = "none"                            # how each layer's KV cache is held (compiler.quant.kv)
    data: Path | None = None                          # held-out text (or token ids, .json); None: the text that travels with infc
    quality: str | None = None                        # limits (compiler.quality.limits); None: its DEFAULT
    unverified: bool = False                          # go on without measuring what quantization costs
    keep_slow: bool = False                           # use a format also where it makes a decode step slower
    candidates: str = search.CANDIDATES               # with quant "auto": the formats to choose among, for each weight
    search_for: str = "bytes"                         # with quant "auto": the fewest bytes, or the least decode time


@dataclass(frozen=True)
class Event:
    """What is happening: a phase began, a pass ended, or something worth a line."""

    kind: str                                         # "phase" | "pass" | "note"
    name: str
    text: str = ""
    fraction: float | None = None


@dataclass
class Result:
    """What a compile made; every field is JSON-able but `artifact`, which is a path."""

    artifact: Path
    version: str
    seconds: dict[str, float] = field(default_factory=dict)
    passes: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)    # where a pass changes what a model gives outside its contract's data
    program: dict[str, dict[str, int]] = field(default_factory=dict)
    verify: dict[str, Any] = field(default_factory=dict)
    predicted: dict[str, Any] = field(default_factory=dict)
    quality: dict[str, Any] | None = None             # beside the captured model, on held-out data; None where nothing was quantized
    size_bytes: int = 0
    reused: bool = False

    def json(self) -> dict[str, Any]:
        """The stable form of `infc compile --json`."""
        return asdict(self) | {"artifact": str(self.artifact)}


Listener = Callable[[Event], None]

Bounds = dict[str, Bound]
"""Program name -> the graph and the units behind its steps."""


@dataclass(frozen=True)
class Hooks:
    """What `infc bisect` does otherwise than a compile."""

    rewrite: Callable[[Graph], PipelineReport]                                   # in place of the pipeline
    replay: Callable[[Path, Bounds], dict[str, Any]]                             # in place of the check of what was written


class Replayed(kept.Entry, frozen=True):
    """What a replay on reference operators found that passed."""

    verified: dict[str, Any]


class _Clock:
    """Times phases and tells the listener."""

    def __init__(self, listen: Listener, phases: int):
        self.listen, self.phases, self.seconds = listen, phases, dict[str, float]()
        self.start = time.perf_counter()

    @contextmanager
    def phase(self, name: str, text: str) -> Iterator[None]:
        self.listen(Event("phase", name, text, len(self.seconds) / self.phases))
        start = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - start, 3)


def compile(
    model: "str | Path | nn.Module | Graph", output: Path | str | None = None, *, options: Options | None = None,
    on_event: Listener | None = None, hooks: Hooks | None = None,
) -> Result:
    """Compile a decoder to an artifact: capture, passes, placement, code, verification, files.

    model: a known name, a GGUF file, a Hugging Face folder, a module, or a captured graph. output: NAME.infc, by default ./<name>.infc.
    Raises UserError for what cannot be compiled as asked, CheckFailed when a pass or the program breaks its promise,
    runtime.errors.RuntimeFault when the artifact cannot be written. Nothing half-made is left behind.
    """
    options = options or Options()
    debug.check_all()
    check_options(options)
    written = options.quant
    options = replace(options, quant=recipe.text_of(written))                      # a key knows a recipe by its content
    if not isinstance(model, (str, Path, torch.nn.Module, Graph)):
        raise UserError(f"a model's name, a path or a torch.nn.Module is expected, not {type(model).__name__}")
    target = targets.find(options.target)
    options = _settled(options, target)
    _check_formats(options, target)
    backend = _backend(target.kind)
    toolchain = backend.toolchain(target.isa)
    listen = on_event or (lambda event: None)
    clock = _Clock(listen, 8 if _gated(options) else 7)
    path = _output(model, output)
    refuse_place(path, options.force)              # now, rather than after a minute of work
    beside = recipe.beside(path, options.force) if options.quant == AUTO else None
    with clock.phase("reuse", "looking for the same compile"):
        entry = _entry(model, options, target.isa, toolchain.identity, lambda line: listen(Event("note", "reuse", line)))
        if entry and (reused := _reused(entry, path, options, target, clock)):
            if beside: _save_recipe(beside, options, path, listen)
            return reused

    cache = _cache(model, options, listen) if hooks is None else None
    with clock.phase("capture", f"capturing {model if isinstance(model, (str, Path)) else type(model).__name__}"):
        captured = model if isinstance(model, Graph) else capture(
            model, progress=lambda line: listen(Event("note", "capture", line)), cache=cache)
    gate = _gate(captured, options, listen) if hooks is None else None
    searched = None
    if options.quant == AUTO:
        with clock.phase("search", "choosing formats"):
            searched = _search(captured, options, listen)
        options = replace(options, quant=str(searched.recipe), candidates=search.CANDIDATES, search_for=Options.search_for)
    pays = _pays(backend, options, target) if hooks is None else None
    with clock.phase("passes", "rewriting the graph"):
        graph = captured.copy()
        with _lines_of(written):
            report = hooks.rewrite(graph) if hooks else _run_passes(graph, options, listen, gate, pays, cache)
        misses.check_expected(report.json(), options.expect, str(model) if isinstance(model, (str, Path)) else "MODEL")
        if report.skipped and debug.stop() is not None:
            listen(Event("note", "passes", f"INFC_STOP={debug.stop()}: the rewrites end here; not run: {', '.join(report.skipped)}"))
        notes = [*report.notes, *graph.meta.get("notes", ()), *(pays.notes() if pays else ())]
        for line in notes:
            listen(Event("note", "passes", line))
    with clock.phase("programs", "placing and packing"):
        store = Store(target.isa, keys.digest([toolchain.identity, backend.headers_digest()]))
        table = CostTable(graph.weights, _region_cost)
        programs, placement, bounds = _programs(graph, options, backend, target.isa, store, table.maxima)
    folder, source = options.dump or debug.dump(), backend.source(store)
    if folder:
        write_programs(folder, programs, store.kernels, backend.SOURCE, source,
                       (lambda: toolchain.assembly(source)) if options.dump_asm else None)
    if debug.level() >= 4:
        listen(Event("note", "code", source))
    with clock.phase("code", f"building {len(store.kernels)} kernels with {toolchain.name}"):
        code, cubins = backend.code(store, toolchain, lambda line: listen(Event("note", "code", line)),
                                    lambda share, line: listen(Event("pass", "code", line, share)))
        programs, cubins, candidates = _chosen(programs, store, target, cubins)
        if folder and candidates: write_programs(folder, programs, store.kernels, backend.SOURCE, source)    # as they run
        for program in programs:
            bound = bounds[program.name]
            table.add(program, bound.units, bound.context, {key: kernel.name for key, kernel in store.kernels.items()})
    with clock.phase("golden", "computing golden outputs in fp64"):
        golden = verification.golden(captured, graph, options.buckets or (), cache)
        if golden.kept_from:
            listen(Event("note", "golden", f"golden answers are those computed at {golden.kept_from}: graphs, prompts and sources are the "
                                           "same (--no-cache computes them again)"))
    version = keys.version(graph, programs, options, target.isa, toolchain.identity)
    summary = {"passes": report.json(), "notes": notes, "program": _summary(programs, placement), "coverage": _coverage(placement),
               "candidates": candidates,
               "graph_error": golden.graph_error, "golden_kept_from": golden.kept_from,
               "recipe": None if (used := recipe.of(graph)) is None else str(used),
               "search": searched and searched.json(), "formats": pays.json() if pays else None,
               "costs": table.json(target.isa, options.dtype, _kv_bytes_per_token(graph), int(graph.meta["max_positions"]))}
    summary["quality"] = lost = compile_gate.unverified(graph) if options.unverified else None
    with clock.phase("write", f"writing and verifying {path.name}"):
        manifest = _manifest(captured, graph, target, options, report, store, version, toolchain.identity, golden)
        parts = Parts(
            manifest=msgspec.structs.replace(manifest, quality=compile_gate.info(lost) if lost else None),
            programs=programs, code=code, cubins=cubins, weights=backend.tensors(store),
            golden=pack([Case(c.tokens, c.rows, c.logits.numpy()) for c in golden.cases]),
            tokenizer=(captured.meta.get("tokenizer_json") or "").encode(),
            report=summary | {"seconds": clock.seconds, "graphs": {"captured": graph_json(captured), "final": graph_json(graph)}},
        )
        verified = dict[str, Any]()
        eager = debug.eager()
        replay_written = hooks.replay if hooks else lambda folder, bounds: (
            _replay_on_host(folder, target, bounds, cache, listen) if target.kind == "cuda" else
            _replay(folder, target, listen, bounds if eager else None))

        def check(folder: Path) -> None:
            verified.update(replay_written(folder, bounds))
            if verified.get("kept_from"): amend(folder, {**parts.report, "verify": verified})
            if gate is not None:
                with clock.phase("quality", f"measuring on {gate.data.name}"):
                    summary["quality"] = _judge(gate, graph, folder, "INFC_EAGER" if eager else verified.get("reason", ""))
            if summary["quality"] is None: return
            summary["quality"]["layers"] = per_layer.with_kernels(
                summary["quality"]["layers"], programs[0], [*store.kernels.values()], [*pays.outcomes.values()] if pays else [],
                wide_bytes=4 if options.dtype == "fp32" else 2, read_gb_s=verified.get("read_gb_s"))
            amend(folder, {**parts.report, **summary, "verify": verified}, compile_gate.info(summary["quality"]))

        write(path, parts, force=options.force, check=check)
        if entry:
            entry.keep(path)
    if gate: clock.seconds["write"] = round(clock.seconds["write"] - clock.seconds["quality"], 3)
    if beside: _save_recipe(beside, options, path, listen)
    return _result(path, clock, summary, verified, reused=False)


@contextmanager
def _lines_of(quant: str) -> Iterator[None]:
    """Let a line of a recipe that names nothing be told by its own file."""
    try:
        yield
    except recipe.Unnamed as error:
        if not isinstance(found := recipe.read(quant), recipe.Recipe): raise
        raise recipe.Unnamed(error.line, found.lines[error.line].where, error.why) from error


def passes_of(model: "str | Path | nn.Module | Graph", options: Options, listen: Listener) -> tuple[PipelineReport, Graph]:
    """Capture a model and run the passes of a compile on it; nothing is lowered, built or written. Their report and the final graph."""
    listen(Event("phase", "capture", "capturing the model"))
    captured = model if isinstance(model, Graph) else capture(model, progress=lambda line: listen(Event("note", "capture", line)))
    listen(Event("phase", "passes", "rewriting the graph"))
    return _run_passes(captured, options, listen), captured


def _pays(backend: Any, options: Options, target: targets.Target) -> Pays | None:
    """Times formats against what they replace, where the target's code can run on this machine."""
    if options.quant == "none" or targets.missing(target): return None
    wide = torch.bfloat16 if options.dtype == "bf16" else torch.float32
    return Pays(lambda entries: backend.race(entries, target.isa, default_threads(), wide), options.keep_slow)


def _settled(options: Options, target: targets.Target) -> Options:
    """With what the target decides filled in."""
    return replace(options, buckets=options.buckets or BUCKETS[target.kind],
                   max_sequences=options.max_sequences or SEQUENCES[target.kind])


def _gated(options: Options) -> bool:
    """Is quality measured before the artifact gets its name?"""
    return not options.unverified and (_quantized(options) or options.data is not None)


def _quantized(options: Options) -> bool:
    return options.quant != "none" or options.kv_quant != "none"


def _search(captured: Graph, options: Options, listen: Listener) -> search.Found:
    """The formats that keep the limits; searched on the graph as quantize_weights would get it, wide and in fp32."""
    wide, plan = captured.copy(), _plan(options)
    assert plan is not None
    given = pass_options(replace(options, quant="none", kv_quant="none", dtype="fp32"))
    for one in passes.pipeline("fp32"):
        one.apply(wide, Report(one.name, options=given))
    return search.search(
        wide, plan, limits.parse(options.quality or limits.DEFAULT), candidates=search.parse_candidates(options.candidates),
        goal=options.search_for, wide_bytes=4 if options.dtype == "fp32" else 2,
        progress=lambda line, share: listen(Event("pass", "search", line, share)))


def _save_recipe(file: Path, options: Options, artifact: Path, listen: Listener) -> None:
    """The recipe of a search as a file that --quant reads."""
    with read(artifact) as opened:
        found = opened.report()["search"]
    kept = options.quality or limits.DEFAULT
    write_whole(file, f"# found by infc for --quality {kept}: {found['bytes']:,} bytes of matrices\n{found['recipe']}")
    listen(Event("note", "search", f"the formats that were chosen are in {file}: --quant {file} compiles with them again"))


def _gate(captured: Graph, options: Options, listen: Listener) -> compile_gate.Gate | None:
    if not _gated(options): return None
    gate = compile_gate.Gate(captured, options.data, options.quality, lambda line: listen(Event("pass", "quality", line)))
    if options.data is None:
        listen(Event("note", "quality", f"quality is measured on {gate.data.name}; name a text of your own use with --data FILE"))
    return gate


def _judge(gate: compile_gate.Gate, graph: Graph, folder: Path, why_not: str) -> dict[str, Any]:
    """why_not: why the artifact cannot run here, or is not to; empty where it can."""
    if why_not: return gate.judge(graph, None, why_not)
    with load(folder) as model:
        return gate.judge(graph, model, "")


def _output(model: "str | Path | nn.Module | Graph", output: Path | str | None) -> Path:
    """NAME.infc: as given, or after the model."""
    if output is None:
        name = str(model) if isinstance(model, (str, Path)) else type(model).__name__
        base = Path(name).name.removesuffix(".gguf") if Path(name).exists() else name
        output = "".join(c if c.isalnum() or c in "-_." else "-" for c in base).strip("-.") or "model"
    path = Path(output)
    return path if path.suffix == ".infc" else path.with_name(path.name + ".infc")


def _entry(
    model: "str | Path | nn.Module | Graph", options: Options, isa: str, toolchain: str, note: Callable[[str], None],
) -> Entry | None:
    """Where this compile would be kept; None when it must run: a module, a dump, a debug switch."""
    if not (options.reuse and options.cache) or options.dump or options.expect or debug.any_set() or not isinstance(model, (str, Path)):
        return None
    content = identity(model)
    return Entry(keys.request(content, options, isa, toolchain), note) if content else None


def _cache(model: "str | Path | nn.Module | Graph", options: Options, listen: Listener) -> Kept | None:
    """What earlier compiles found out; None where all must be found out anew: --no-cache, a debug switch, a model that is no file."""
    if not options.cache or debug.any_set() or not isinstance(model, (str, Path)): return None
    return Kept(lambda line: listen(Event("note", "cache", line)))


def _reused(entry: Entry, path: Path, options: Options, target: targets.Target, clock: _Clock) -> Result | None:
    verified = dict[str, Any]()
    def check(folder: Path) -> None:
        verified.update(_hash_only(folder) if target.kind == "cuda" else _replay(folder, target, clock.listen))

    if not entry.take(path, options.force, check):
        return None
    entry.note(f"the same compile was done before: copied {entry.path.name}, its files as hashed"
               f"{'' if target.kind == 'cuda' else ' and its answers as recorded'}")
    with read(path) as artifact:
        return _result(path, clock, artifact.report(), verified, reused=True)


def _result(path: Path, clock: _Clock, summary: dict[str, Any], verified: dict[str, Any], *, reused: bool) -> Result:
    clock.seconds["total"] = round(time.perf_counter() - clock.start, 3)
    with read(path) as artifact:
        manifest = artifact.manifest
        predicted = _predict(summary["costs"], manifest, verified)
    return Result(
        artifact=path, version=manifest.version, seconds=clock.seconds, passes=summary["passes"], notes=summary["notes"],
        program=summary["program"], quality=summary.get("quality"), predicted=predicted,
        verify={"graph_error": summary["graph_error"], "golden_kept_from": summary["golden_kept_from"]} | verified,
        size_bytes=_size(path), reused=reused)


def check_options(options: Options) -> None:
    """UserError for options that no compile can follow."""
    if options.dtype not in DTYPES:
        raise UserError(f"unknown dtype {options.dtype!r}: choose one of {', '.join(DTYPES)}")
    if options.dtype != "fp32" and options.allow != "approximate":
        raise UserError(f"--allow {options.allow} forbids rounding weights to {options.dtype}, which is approximate: add --dtype fp32")
    if options.dtype == "fp16" and targets.find(options.target).kind == "cpu":
        raise UserError(f"--dtype fp16: no kernel of the target {options.target} multiplies it, only those of GPUs: use bf16, or fp32")
    _plan(options)
    if options.quant == AUTO:
        search.check(limits.parse(options.quality or limits.DEFAULT), options.search_for)
        search.parse_candidates(options.candidates)
    elif (options.candidates, options.search_for) != (Options.candidates, Options.search_for):
        raise UserError("--candidates and --search-for are about a search for formats: give --quality and no --quant, or --quant auto")
    if options.quant != "none" and options.allow != "approximate":
        raise UserError(f"--allow {options.allow} forbids --quant {options.quant}, which is approximate: choose one of them")
    if options.quant == "none" and options.quant_method != Options.quant_method:
        raise UserError(f"--quant-method {options.quant_method} chooses codes, and nothing is quantized: add --quant, or leave it out")
    if options.keep_slow and options.quant == "none":
        raise UserError("--keep-slow keeps formats that are slower than what they replace, and nothing is quantized: leave it out")
    _check_calibration(options)
    _check_kv(options)
    compile_gate.check_options(_quantized(options), options.data, options.quality, options.unverified)
    if options.buckets is not None and (not options.buckets or any(b < 1 for b in options.buckets)):
        raise UserError(f"buckets are {list(options.buckets)}: give at least one number of tokens, each 1 or more")
    if options.buckets and max(options.buckets) > MAX_BUCKET:
        raise UserError(f"a bucket of {max(options.buckets)} tokens: {MAX_BUCKET} is the largest; longer prompts run in chunks")
    if options.keep_going and options.check == "off":
        raise UserError("--keep-going leaves out passes that break their contract, and --check off checks none: choose one of them")
    if options.max_sequences is not None and not 1 <= options.max_sequences <= 256:
        raise UserError(f"max_sequences is {options.max_sequences}: choose 1..256")
    if options.dump_asm and targets.find(options.target).kind == "cuda":
        raise UserError("--dump-asm writes a CPU's assembly; for a GPU read the artifact's code/*.cubin with nvdisasm")
    if options.dump_asm and not (options.dump or debug.dump()):
        raise UserError("assembly is part of a dump: name its folder with --dump DIR")
    refuse_filled(options.dump or debug.dump())


def _check_kv(options: Options) -> None:
    kv = parse_kv(options.kv_quant)
    if kv is None: return
    if options.allow != "approximate":
        raise UserError(f"--allow {options.allow} forbids --kv-quant {options.kv_quant}, which is approximate: choose one of them")
    target = targets.find(options.target)
    if missing := sorted(kv.used - set(target.kv_formats)):
        raise UserError(f"--kv-quant {options.kv_quant}: the target {options.target} has no {missing[0]} KV cache, only "
                        f"{', '.join(target.kv_formats)}: choose one of those, or none")


def _run_passes(
    graph: Graph, options: Options, listen: Listener, gate: compile_gate.Gate | None = None, pays: Pays | None = None,
    cache: Kept | None = None,
) -> PipelineReport:
    level = debug.level()
    before = text(graph) if level >= 3 else ""
    done = 0

    def tell(result: PassResult) -> None:
        nonlocal before, done
        done += 1
        if gate and done < len(chosen) and chosen[done].name == "quantize_weights":
            gate.look(graph)
        listen(Event("pass", result.name, result.note or f"fired {result.fired}, refused {len(result.refused)}"))
        if level >= 1:
            for site, reason in result.refused.items():
                listen(Event("note", result.name, f"{result.name} refused {site}: {reason}"))
            for miss in result.misses:
                depth = f"{miss.matched} of {miss.of} operators"
                listen(Event("note", result.name, f"{result.name} nearly fired at {miss.site}, {depth}: {miss.reason}"))
        if level >= 3 and result.fired:
            after = text(graph)
            listen(Event("note", result.name, "".join(difflib.unified_diff(
                before.splitlines(True), after.splitlines(True), f"before {result.name}", f"after {result.name}", n=0))))
            before = after

    chosen = passes.pipeline(options.dtype, options.quant != "none", options.kv_quant != "none")
    return run_pipeline(
        graph, chosen, allow=options.allow, check=options.check, dump=options.dump, progress=tell,   # type: ignore[arg-type]
        options=pass_options(options) | {"pays": pays}, keep_going=options.keep_going, needed=passes.NEEDED, cache=cache)


def pass_options(options: Options) -> dict[str, Any]:
    """What passes may read of a compile's options. wide_rows: rows that are to be rounded to 16 bits stay as they are. norm_codes: norms
    write the codes that products read."""
    target = targets.find(options.target)
    options = _settled(options, target)
    return {"dtype": options.dtype, "max_sequences": options.max_sequences, "quantization": _plan(options),
            "kv": parse_kv(options.kv_quant), "wide_rows": target.kind == "cuda", "norm_codes": target.kind == "cuda"}


def _plan(options: Options) -> Plan | None:
    """What the options ask to be quantized; UserError for what they do not spell right."""
    asked = recipe.Recipe(()) if options.quant == AUTO else recipe.read(options.quant)
    return None if asked is None else Plan(asked, options.quant_method, options.calib or CALIBRATION)


def _check_formats(options: Options, target: targets.Target) -> None:
    """UserError for formats that no kernel of the target multiplies: e4m3 on all but newer GPUs; wide rows on a CPU, whose products of
    codes are of integers."""
    plan = _plan(options)
    asked = search.parse_candidates(options.candidates) if options.quant == AUTO else [] if plan is None else plan.choices
    check_floats(options.quant_method, asked)
    floats = next((choice for choice in asked if isinstance(choice, Scheme) and choice.e4m3), None)
    if floats is not None and not target.e4m3:
        having = ", ".join(t.name for t in targets.TARGETS.values() if t.e4m3)
        raise UserError(f"{floats} is e4m3, which the target {options.target} does not multiply; {having} do: choose one of them, or "
                        f"write {'w8a8' if floats.act_bits else 'w8'} here")
    wide = next((choice for choice in asked if choice is not None and choice.act_bits == 0), None)
    if wide is not None and target.kind == "cpu":
        raise UserError(f"{wide} leaves activations wide, and products of codes on a CPU are of integers: write "
                        f"{str(wide).replace('a32', '')} (activations in 16 bits, finer than bf16) or a8")


def _check_calibration(options: Options) -> None:
    plan = _plan(options)
    reads = plan is not None and (plan.reads_text or (options.quant == AUTO and options.quant_method not in blind()))
    chosen_on, measured_on = (options.calib or CALIBRATION), (options.data or HELD_OUT)
    given = [path for path in (chosen_on, measured_on) if path.is_file()]
    if reads and not options.unverified and len({path.read_bytes() for path in given}) < len(given):
        raise UserError(f"scales would be chosen on {chosen_on.name} and measured on the same text: name another with --calib or --data")
    if options.calib is None: return
    if not reads:
        raise UserError(f"--calib does nothing for --quant {options.quant} with --quant-method {options.quant_method}: name a method that "
                        f"looks at a text ({', '.join(name for name in METHODS if name not in blind())}), or leave it out")
    read_text(options.calib)


def _backend(kind: str) -> Any:
    if kind == "cpu":
        from ..backends import cpu

        return cpu
    try:
        from ..backends.triton import backend
    except ModuleNotFoundError as error:
        raise UserError("compiling for a GPU needs Triton: pip install 'infc[gpu]'") from error
    return backend


def _programs(
    graph: Graph, options: Options, backend: Any, isa: str, store: Store, maxima: Callable[[Unit, Context], tuple[int, int]],
) -> tuple[list[Program], Placement, Bounds]:
    assert options.buckets and options.max_sequences
    programs, placement, bounds = [], None, Bounds()
    for tokens in sorted(set(options.buckets)):
        rows = min(tokens, options.max_sequences)
        blocks = -(-int(graph.meta["max_positions"]) // BLOCK)
        context = Context(isa, {"T": tokens, "N": rows, "R": rows, "M": blocks}, graph.symbols)
        placement = place(graph, backend.backends(), context)
        if options.strict: check_strict(coverage(placement))
        programs.append(build(graph, placement.units, context, store, backend.pack, maxima))
        bounds[programs[-1].name] = Bound(graph, placement.units, context)
    assert placement is not None
    return programs, placement, bounds


def _chosen(
    programs: list[Program], store: Store, target: targets.Target, cubins: dict[str, bytes],
) -> tuple[list[Program], dict[str, bytes], dict[str, Any] | None]:
    """On a GPU each call in its likeliest cut, with the code that some candidate runs and what became of the others."""
    if target.gpu is None: return programs, cubins, None
    from ..backends.triton.shortlist import choose

    programs, told = choose(store, programs, target.gpu)
    return programs, {kernel.file: cubins[kernel.file] for kernel in store.kernels.values() if kernel.file}, told


def _manifest(
    captured: Graph, graph: Graph, target: targets.Target, options: Options, report: PipelineReport, store: Store,
    version: str, toolchain: str, golden: "verification.Golden",
) -> Manifest:
    meta = captured.meta
    caches = graph.placeholders
    return Manifest(
        name=str(meta["name"]), version=version, target=options.target, machine=machine_of(target), isa=target.flags,
        dtype="fp32" if "narrow_dtype" in report.dropped else options.dtype, contract=report.weakest.label,
        model=ModelInfo(
            name=str(meta["name"]), vocab=int(meta["vocab_size"]), max_positions=int(meta["max_positions"]),
            eos_ids=tuple(meta.get("eos_token_ids") or ()), layers=int(meta.get("layers") or 0),
            chat_template=meta.get("chat_template") or "", special_tokens=dict(meta.get("special_tokens") or {}),
            parameters=sum(w.numel() for w in captured.weights.values()), license=meta.get("license") or "",
            source=":".join(str(v) for v in (meta.get("source") or {}).values())),
        passes=tuple(PassInfo(p.name, p.contract.label, p.fired, p.stated_bound) for p in report.passes if p.fired),
        created_with={"infc": keys.infc_version(), "torch": str(torch.__version__), "python": platform.python_version(),
                      "compiler": toolchain},
        kv=tuple(_kv_buffer(name, caches[name].meta["val"]) for name in graph.kv),
        kernels=tuple(store.kernels.values()), golden=GoldenInfo(GOLDEN, "max_abs", golden.bound))


def _replay(folder: Path, target: targets.Target, listen: Listener, bounds: Bounds | None = None) -> dict[str, Any]:
    """Load what was written and replay the golden cases through every bucket; on another machine, say so instead.

    bounds: given, reference operators run in place of every kernel (INFC_EAGER).
    """
    missing = targets.missing(target)
    if missing:
        return {"replayed": False, "reason": f"this CPU lacks {', '.join(missing)}: run `infc verify` on the target"}
    with load(folder) as model:
        if bounds is not None:
            reference.install(model.executor, bounds, lambda unit: False)
        report = replay(model)
        _refuse_other(report)
        size = model.memory()["weights"]
        times = sorted(model.executor.read_weights() for _ in range(5))
        if debug.level() >= 2:
            listen(Event("note", "write", "\n".join(step_times(model, size / times[2]))))
        return {"replayed": True, "reference": bounds is not None, "read_gb_s": size / times[2], **msgspec.to_builtins(report)}


def _replay_on_host(folder: Path, target: targets.Target, bounds: Bounds, cache: Kept | None, listen: Listener) -> dict[str, Any]:
    """A GPU's programs in the CPU's memory, on reference operators: buffers, places, padding and the host's side of a step are as written.

    The kernels are not, but where this process interprets them (TRITON_INTERPRET=1): then they run, grids and all, for hours if the
    model is a real one. The tests judge each kernel against its operator, and so every kernel of a small model's programs. Without kernels
    the verdict follows from what was written, the graph and our sources: that of an earlier compile is taken, once every file is hashed.
    """
    with read(folder) as artifact: manifest = artifact.manifest
    device, runs_kernels = host_device(folder, target, bounds)
    if runs_kernels: cache = None
    key = _replay_key(manifest, bounds) if cache else ""
    if cache and (found := cache.take(key, Replayed, "verdicts about programs")):
        verify_files(folder).close()
        measured = f"error {found.verified['error']:.3g}, bound {found.verified['bound']:.3g}"
        listen(Event("note", "write", f"the programs were verified at {found.made}, {measured}: files, graph and sources are the same "
                                      "(--no-cache verifies them again)"))
        return found.verified | {"kept_from": found.made}
    with load(folder, device=device, kv_tokens=VERIFY_TOKENS) as model:
        if not runs_kernels:
            model.cache.clear()                              # recordings of kernels that cannot run here
            reference.install(model.executor, bounds, lambda unit: False)
        report = replay(model, brief=True)
    _refuse_other(report)
    verified = {"replayed": True, "reference": not runs_kernels, "reason": "no kernel of a GPU runs on this machine", "by": device.name,
                **msgspec.to_builtins(report)}
    if cache: cache.keep(key, Replayed(verified=verified), "verdicts about programs")
    return verified | {"kept_from": ""}


def _replay_key(manifest: Manifest, bounds: Bounds) -> str:
    """Of all that a replay on reference operators reads: every file by its hash, but for the report, and the graph behind the steps."""
    files = {name: info for name, info in manifest.files.items() if name != REPORT}
    graphs = {id(bound.graph): bound.graph for bound in bounds.values()}
    written = msgspec.json.encode(msgspec.structs.replace(manifest, files=files, digest=""))
    return kept.key("replay", written, *map(kept.content, graphs.values()))


def host_device(folder: Path, target: targets.Target, bounds: Bounds) -> tuple[HostDevice, bool]:
    """What stands for the GPU of an artifact here, and whether it runs kernels: where this process interprets them."""
    from ..backends.triton.device import interpreter, interprets

    if not interprets(): return HostDevice(target.isa), False
    with read(folder) as artifact:
        return interpreter(target.isa, [artifact.program(name) for name in bounds], bounds), True


def _refuse_other(report: GoldenReport) -> None:
    """CheckFailed where golden prompts are not answered as they must be."""
    if report.passed: return
    raise CheckFailed(f"the program is not the graph: golden logits differ by {report.error:.3g}, the bound is {report.bound:.3g} "
                      f"(per bucket: {', '.join(f'{k} {v:.3g}' for k, v in report.errors.items())}), "
                      f"{report.wrong_tokens} tokens are not what their logits and settings give; nothing was written")


def _hash_only(folder: Path) -> dict[str, Any]:
    """A copy of an artifact that was verified when it was made."""
    verify_files(folder).close()
    return {"replayed": False, "reason": "it was verified when it was made, and every file is as it was then"}


def _kv_buffer(name: str, fake: torch.Tensor) -> KvBuffer:
    heads, block, head_dim = (int(size) for size in fake.shape[1:])
    return KvBuffer(name, NAMES[fake.dtype], heads * block * head_dim * fake.element_size())


def _summary(programs: list[Program], placement: Placement) -> dict[str, dict[str, int]]:
    return {program.name: {
        "steps": len(program.steps), "unique_kernels": len({step.kernel for step in program.steps}),
        "aten_steps": placement.count("aten"), "arena_bytes": program.arena_bytes,
        "flops": sum(step.flops for step in program.steps), "bytes": sum(step.bytes for step in program.steps),
    } for program in programs}


def _coverage(placement: Placement) -> dict[str, Any]:
    units: dict[str, int] = {}
    for unit in placement.units:
        units[unit.backend] = units.get(unit.backend, 0) + 1
    return {"steps": units, "refused": {n: why for n, why in placement.refused.items() if "loops" in why and len(why) > 1}}


def _region_cost(unit: Unit, dims: Mapping[str, int]) -> tuple[int, int] | None:
    """The loop IR's own count, which is exact where nodes are merged and views absorbed."""
    return loop_cost(unit.region, dims) if isinstance(unit, LoopUnit) else None


def _kv_bytes_per_token(graph: Graph) -> int:
    return sum(_kv_buffer(name, graph.placeholders[name].meta["val"]).block_bytes for name in graph.kv) // BLOCK


def _predict(costs: dict[str, Any], manifest: Manifest, verified: dict[str, Any]) -> dict[str, Any]:
    """Decode of one sequence at the read rate measured while verifying; nothing where the target is another CPU.

    With the peaks of this machine, where `infc explain` has measured them, step by step; else by what it reads alone. A GPU's are
    those of its data sheet.
    """
    sheet = data_sheet(targets.find(manifest.target)) if manifest.machine == GPU else None
    if "read_gb_s" not in verified and sheet is None:
        return {}
    rate = sheet.read_gb_s if sheet else verified["read_gb_s"]
    context = min(256, manifest.model.max_positions - 1)     # a short model has no longer one to decode at
    phase = cost.decode(1, context)
    moved = [cost.moved(kernel, phase.loads[0]) for kernel in cost.steps_of(costs, phase.loads[0])]
    streamed = sum(m.weights + m.kv for m in moved)
    found: dict[str, Any] = {"context": context, "bytes": int(streamed), "flops": int(sum(m.flops for m in moved)),
                             "read_gb_s": rate}
    peaks = sheet or machine.known_peaks(costs["isa"], default_threads())
    if peaks is None:
        seconds, binds = streamed / (rate * 1e9), {"memory": 1.0}
    else:
        if not sheet: peaks = at_rate(peaks, rate, costs)
        steps = cost.predict_load(costs, phase.loads[0], peaks)
        seconds = sum(step.seconds for step in steps)
        binds = {b: sum(s.seconds for s in steps if s.bound == b) / seconds for b in ("memory", "compute", "barrier")}
    return found | {"decode_ms": seconds * 1e3, "decode_tok_s": 1 / seconds, "bound": max(binds, key=binds.__getitem__),
                    "by": "the data sheet" if sheet else "reads alone" if peaks is None else "measured peaks", "shares": binds}


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
