"""compile(): the whole story on one page, and the only file that knows frontends, passes, backends and the artifact."""
import difflib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from .. import passes
from ..backends.program import Store
from ..runtime.artifact import Parts, read, refuse_place, write
from ..runtime.golden import Case, pack
from ..runtime.library import default_threads
from ..runtime.session import load
from ..runtime.writer import amend
from . import debug, keys, misses, scratch, targets, verification
from .costs.cost_table import CostTable
from .dump.dump_files import refuse_within
from .dump.dump_programs import write_programs
from .errors import UserError
from .files import named_artifact, write_whole
from .frontends import capture
from .frontends.identity import identity
from .graph_json import graph_json
from .ir import Graph, text
from .kept import Kept
from .lowering import backend_of, build_programs, chosen_cuts, coverage_of, kv_bytes_per_token, manifest_of, region_cost, summary_of
from .options import AUTO, Options, check_formats, check_options, gated, pass_options, plan_of, settled
from .pipeline import PassResult, PipelineReport, run_pipeline
from .progress import Clock, Event, Listener
from .quality import compile_gate, limits, per_layer
from .quant import recipe, search
from .quant.pays import Pays
from .replays import Bounds, hash_only, replay_here, replay_on_host
from .result import Result, result_of
from .reuse import Entry
from .rewrite import Report

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Hooks:
    """What `infc bisect` does otherwise than a compile."""

    rewrite: Callable[[Graph], PipelineReport]                                   # in place of the pipeline
    replay: Callable[[Path, Bounds], dict[str, Any]]                             # in place of the check of what was written


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
    if not isinstance(options, Options): raise UserError(f"options is {options!r}: give an infc.Options, as Options(dtype='fp32')")
    debug.check_all()
    check_options(options)
    written = options.quant
    options = replace(options, quant=recipe.text_of(written))                      # a key knows a recipe by its content
    if not isinstance(model, (str, Path, torch.nn.Module, Graph)):
        raise UserError(f"a model's name, a path or a torch.nn.Module is expected, not {type(model).__name__}")
    target = targets.find(options.target)
    options = settled(options, target)
    check_formats(options, target)
    backend = backend_of(target.kind)
    toolchain = backend.toolchain(target.isa)
    listen = on_event or (lambda event: None)
    clock = Clock(listen, 8 if gated(options) else 7)
    path = _output(model, output)
    scratch.sweep()
    refuse_place(path, options.force)              # now, rather than after a minute of work
    refuse_within(options.dump or debug.dump(), path)
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
        table = CostTable(graph.weights, region_cost)
        programs, placement, bounds = build_programs(graph, options, backend, target.isa, store, table.maxima)
    folder, source = options.dump or debug.dump(), backend.source(store)
    if folder:
        write_programs(folder, programs, store.kernels, backend.SOURCE, source,
                       (lambda: toolchain.assembly(source)) if options.dump_asm else None)
    if debug.level() >= 4:
        listen(Event("note", "code", source))
    with clock.phase("code", f"building {len(store.kernels)} kernels with {toolchain.name}"):
        code, cubins = backend.code(store, toolchain, lambda line: listen(Event("note", "code", line)),
                                    lambda share, line: listen(Event("pass", "code", line, share)))
        programs, cubins, candidates = chosen_cuts(programs, store, target, cubins)
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
    summary = {"passes": report.json(), "notes": notes, "program": summary_of(programs, placement), "coverage": coverage_of(placement),
               "candidates": candidates,
               "graph_error": golden.graph_error, "golden_kept_from": golden.kept_from,
               "recipe": None if (used := recipe.of(graph)) is None else str(used),
               "search": searched and searched.json(), "formats": pays.json() if pays else None,
               "costs": table.json(target.isa, options.dtype, kv_bytes_per_token(graph), int(graph.meta["max_positions"]))}
    summary["quality"] = lost = compile_gate.unverified(graph) if options.unverified else None
    with clock.phase("write", f"writing and verifying {path.name}"):
        manifest = manifest_of(captured, graph, target, options, report, store, version, toolchain.identity, golden)
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
            replay_on_host(folder, target, bounds, cache, listen) if target.kind == "cuda" else
            replay_here(folder, target, listen, bounds if eager else None))

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
    return result_of(path, clock, summary, verified, reused=False)


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
    rows = target.bf16_rows if options.dtype == "bf16" else {}
    return Pays(lambda entries: backend.race(entries, target.isa, default_threads(), wide, rows), options.keep_slow)


def _search(captured: Graph, options: Options, listen: Listener) -> search.Found:
    """The formats that keep the limits; searched on the graph as quantize_weights would get it, wide and in fp32."""
    wide, plan = captured.copy(), plan_of(options)
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
    if not gated(options): return None
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
    if not isinstance(output, (str, os.PathLike)):
        raise UserError(f"output is {output!r}: give a path, as 'model.infc', or leave it out")
    return named_artifact(Path(output))


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


def _reused(entry: Entry, path: Path, options: Options, target: targets.Target, clock: Clock) -> Result | None:
    verified = dict[str, Any]()
    def check(folder: Path) -> None:
        verified.update(hash_only(folder) if target.kind == "cuda" else replay_here(folder, target, clock.listen))

    if not entry.take(path, options.force, check):
        return None
    entry.note(f"the same compile was done before: copied {entry.path.name}, its files as hashed"
               f"{'' if target.kind == 'cuda' else ' and its answers as recorded'}")
    with read(path) as artifact:
        return result_of(path, clock, artifact.report(), verified, reused=True)


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
