"""The command line: `infc compile run inspect verify tune check bench targets models`.

Results go to stdout (with --json one JSON document and nothing else), progress and errors to stderr. A user's mistake is
one line and exit code 2, a failed check is 1, Ctrl-C is 130. `infc run` must start fast, so nothing heavy is imported
before the command that needs it: typer takes 45 ms, rich 45, torch 2000.
"""

import contextlib
import errno
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
import typer.core
from typer.exceptions import TyperException

from ..runtime.errors import RuntimeFault
from .errors import CheckFailed, InfcError, UserError

if TYPE_CHECKING:
    from ..runtime.session import Model


class _MeasureByDefault(typer.core.TyperGroup):
    """`infc bench ARTIFACT` is `infc bench measure ARTIFACT`; so with quality."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, "--help"):
            args = ["measure", *args]
        return super().parse_args(ctx, args)


_OPTIONS: dict[str, Any] = {"no_args_is_help": True, "add_completion": False, "pretty_exceptions_enable": False}
app = typer.Typer(help="infc: a compiler for inference graphs.", **_OPTIONS)
bench = typer.Typer(
    help="Measure an artifact, `infc bench ARTIFACT [--rounds N] [-o FILE]` (more: infc bench ARTIFACT --help), or compare two of them.",
    cls=_MeasureByDefault, **_OPTIONS,
)
app.add_typer(bench, name="bench")
quality = typer.Typer(
    help="Measure what an artifact's answers are worth, `infc quality ARTIFACT [--data FILE]` (more: infc quality ARTIFACT --help), or "
         "compare two of them.",
    cls=_MeasureByDefault, **_OPTIONS,
)
app.add_typer(quality, name="quality")

Artifact = Annotated[Path, typer.Argument(metavar="ARTIFACT", help="what `infc compile` wrote: NAME.infc", show_default=False)]
ModelName = Annotated[str, typer.Argument(help="a name from `infc models`, a Hugging Face folder, a GGUF file", show_default=False)]
Dtype = Literal["bf16", "fp16", "fp32"]
Json = Annotated[bool, typer.Option("--json", help="one JSON document on stdout")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="no progress, no tables")]
Threads = Annotated[int | None, typer.Option(min=1, help="threads to use [default: one a core]", show_default=False)]


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", "-V", help="of infc, and of what it works with")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="with --version: one JSON document on stdout")] = False,
) -> None:
    """infc: a compiler for inference graphs."""
    if not version:
        if as_json: raise UserError("--json stands behind a command, or beside --version: infc targets --json")
        return
    found = versions()
    if as_json:
        _print_json(found)
    else:
        print(f"infc {found['infc']} ({', '.join(f'{name} {number}' for name, number in found.items() if name != 'infc' and number)})")
    raise typer.Exit


def versions() -> dict[str, str | None]:
    """Of infc, Python, torch and Triton as they are installed, None of what is not; nothing is imported for it."""
    import platform
    from importlib import metadata

    found: dict[str, str | None] = {"infc": None, "python": platform.python_version(), "torch": None, "triton": None}
    for name in ("infc", "torch", "triton"):
        with contextlib.suppress(metadata.PackageNotFoundError): found[name] = metadata.version(name)
    return found


@app.command("compile")
def compile_model(
    model: ModelName,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="[default: ./NAME.infc]", show_default=False)] = None,
    target: Annotated[str, typer.Option(help="a name from `infc targets`; cpu is this machine")] = "cpu",
    dtype: Annotated[Dtype, typer.Option(help="of weights, KV cache and products; fp16 on a GPU")] = "bf16",
    allow: Annotated[
        Literal["exact", "distribution", "approximate"], typer.Option(help="the weakest contract a pass may have")
    ] = "approximate",
    check: Annotated[
        Literal["off", "fast", "strict"], typer.Option(help="each pass: the graph's form; and its contract; on many more samples")
    ] = "fast",
    keep_going: Annotated[bool, typer.Option("--keep-going", help="leave out a pass that breaks its contract, and say so")] = False,
    quant: Annotated[str | None, typer.Option(show_default=False, help=(
        "weights and what they meet: w8, w4, w8a8, w4:g128:asym ..., on a GPU that has e4m3 fp8, fp8a8, fp8:tensor; keep (a GGUF's own "
        "blocks); a recipe (.yaml); auto: search "
        "[default: none; auto where --quality stands alone]"))] = None,
    candidates: Annotated[
        str | None, typer.Option(help="formats a search chooses among, for each weight", show_default=False)
    ] = None,
    search_for: Annotated[Literal["bytes", "time"], typer.Option(help="what a search makes least: weights, or a decode step")] = "bytes",
    quant_method: Annotated[
        str, typer.Option(help="how codes are chosen: rtn, mse; by a text: awq, gptq, tuned, smooth; auto: rtn for 8 bits, gptq for 4; "
                          "fp8 takes rtn and mse")
    ] = "auto",
    calib: Annotated[
        Path | None, typer.Option(help="text to choose codes on [default: the one that travels with infc]", show_default=False)
    ] = None,
    kv_quant: Annotated[str, typer.Option(help="KV cache: int8, fp8; :keep=N leaves the first and last N layers wide")] = "none",
    data: Annotated[
        Path | None, typer.Option(help="held-out text to measure quality on [default: the one that travels with infc]", show_default=False)
    ] = None,
    limits: Annotated[
        str | None, typer.Option("--quality", metavar="LIMITS", show_default=False, help=(
            "what must hold, like ppl<=+1%,kl<=0.02; of ppl, kl, kl_p99, top1, retrieval, json, layer"))
    ] = None,
    keep_slow: Annotated[bool, typer.Option("--keep-slow", help="use a format also where it makes a decode step slower")] = False,
    unverified: Annotated[bool, typer.Option("--unverified", help="quantize without measuring; the artifact says so")] = False,
    buckets: Annotated[str | None, typer.Option(help="token counts, like 1,16,256 [default: chosen]", show_default=False)] = None,
    max_sequences: Annotated[
        int | None, typer.Option(min=1, help="sequences in one step [default: 16, on a GPU 64]", show_default=False)] = None,
    strict: Annotated[bool, typer.Option("--strict", help="fail where a step would fall back")] = False,
    dump: Annotated[
        Path | None, typer.Option(help="new folder for every stage as text, JSON and a runnable program", show_default=False)
    ] = None,
    dump_asm: Annotated[bool, typer.Option("--dump-asm", help="put the kernels' assembly into the dump too")] = False,
    force: Annotated[bool, typer.Option("--force", help="replace the output if it exists")] = False,
    reuse: Annotated[bool, typer.Option("--reuse/--no-reuse", help="copy a finished compile of the same model and options")] = True,
    cache: Annotated[
        bool, typer.Option("--cache/--no-cache", help="take finished compiles, golden answers and verdicts that earlier compiles found")
    ] = True,
    expect: Annotated[
        list[str] | None, typer.Option(help="PASS=COUNT: fail where it fires another number of times; may repeat", show_default=False)
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compile MODEL to an artifact."""
    from . import console, misses

    if output is not None:
        from ..runtime.artifact import refuse_place

        refuse_place(output if output.suffix == ".infc" else output.with_name(output.name + ".infc"), force)   # before torch loads
    with console.Reporter(quiet=quiet) as report:
        from .. import passes
        from . import driver

        options = driver.Options(
            target, dtype, allow, check, _given("buckets", buckets), max_sequences=max_sequences,
            strict=strict, dump=dump, dump_asm=dump_asm, force=force, reuse=reuse, cache=cache, keep_going=keep_going,
            quant=("auto" if limits and kv_quant == "none" else "none") if quant is None else quant,
            candidates=driver.Options.candidates if candidates is None else candidates,
            search_for=search_for, quant_method=quant_method, calib=calib, kv_quant=kv_quant, data=data, quality=limits,
            unverified=unverified, keep_slow=keep_slow, expect=misses.counts(expect or (), passes.PIPELINE))
        result = driver.compile(model, output, options=options, on_event=report).json()
    if as_json:
        _print_json(result)
    elif quiet:
        print(result["artifact"])
    else:
        console.compiled(result)


@app.command()
def run(
    artifact: Artifact,
    prompt: Annotated[list[str], typer.Option("--prompt", "-p", help="may repeat; - reads it from stdin", show_default=False)],
    chat: Annotated[bool, typer.Option("--chat", help="wrap each prompt in the model's chat template")] = False,
    max_tokens: Annotated[int, typer.Option(help="new tokens a prompt")] = 128,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token")] = 0.0,
    top_p: Annotated[float, typer.Option(help="1 is off")] = 1.0,
    top_k: Annotated[int, typer.Option(help="0 is off")] = 0,
    seed: Annotated[int, typer.Option(help="of the sampler")] = 0,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="go on after the end token")] = False,
    threads: Threads = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Load ARTIFACT and answer; a single prompt's answer is streamed."""
    model = _load(artifact, threads, text=True)
    prompts = [sys.stdin.read() if p == "-" else p for p in prompt]
    options: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "seed": seed,
        "ignore_eos": ignore_eos,
        "chat": chat,
    }
    with model:
        if as_json:
            outputs = model.generate(prompts, **options)
            _print_json({"outputs": outputs, "timing": model.timing})
        elif len(prompts) == 1:
            reason, shown = "", 0
            for piece in model.stream(prompts[0], **options):
                print(piece, end="", flush=True)
                reason, shown = piece.finish_reason or reason, shown + len(piece.text)
            print()
            if not shown and not chat and not quiet and model.manifest.model.chat_template:
                print(f"[no text: {reason} at once; this model has a chat template, try --chat]", file=sys.stderr)
        else:
            for text, output in zip(prompts, model.generate(prompts, **options), strict=True):
                print(f"--- {text}\n{output.text}")
    if not (quiet or as_json):
        timing = model.timing
        then = f", then {1 / timing.tpot_s:.0f} tokens/s" if timing.tpot_s else ""
        print(f"[loaded in {timing.load_s:.2f} s, first token in {timing.ttft_s:.3f} s{then}]", file=sys.stderr)


@app.command()
def inspect(artifact: Artifact, as_json: Json = False) -> None:
    """Show what ARTIFACT holds; none of its code is run."""
    from ..runtime.artifact import read
    from . import console

    with read(_existing(artifact)) as opened:
        manifest = opened.manifest
        choices = {b.name: _plain(found) for b in manifest.buckets if (found := opened.program(b.name).choices)}
    kernels = [{name: getattr(kernel, name) for name in kernel.__struct_fields__} for kernel in manifest.kernels]
    whole = _plain(manifest)
    shown = {"manifest": whole, "kernels": kernels, "buckets": whole["buckets"], "choices": choices}
    if as_json:
        _print_json(shown)
    else:
        console.inspected(shown)


@app.command()
def verify(artifact: Artifact, threads: Threads = None, as_json: Json = False, quiet: Quiet = False) -> None:
    """Hash every file of ARTIFACT and replay its golden prompts; exit code 1 if an answer differs."""
    from ..runtime.artifact import verify_files
    from ..runtime.golden import replay
    from . import console, debug

    if debug.eager():
        raise UserError("INFC_EAGER is for infc compile: an artifact holds no reference operators; compile with it, or bisect MODEL")
    verify_files(_existing(artifact)).close()
    with _load(artifact, threads) as model:
        report = _plain(replay(model))
    if as_json:
        _print_json(report)
    elif not quiet:
        print(f"{artifact}: every file as hashed; {console.verdict(report)}")
    if not report["passed"]:
        raise CheckFailed(f"{artifact}: its answers differ from the recorded ones; compile it again, and report this if it stays")


@app.command()
def tune(
    artifact: Artifact,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="[default: ARTIFACT itself, with --force]", show_default=False)
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="replace what is there")] = False,
    rounds: Annotated[int, typer.Option(min=5, help="samples of each candidate, in turns; their median counts")] = 7,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure the candidates of ARTIFACT's kernels on this machine's GPU, and store which are the fastest."""
    from ..runtime.tune import tune as measure_and_choose
    from . import console

    note = (lambda text: None) if quiet or as_json else lambda text: print(f"  {text}", file=sys.stderr)
    target = output if output is None or output.suffix == ".infc" else output.with_name(output.name + ".infc")
    report = _plain(measure_and_choose(_existing(artifact), target, force=force, rounds=rounds, note=note))
    if as_json:
        _print_json(report)
    elif not quiet:
        console.tuned(report)
    if not report["written"]:
        raise CheckFailed(f"{artifact}: its golden logits are off by {report['golden']['error']:.3g} on this GPU, "
                          f"{report['golden']['bound']:.3g} is allowed; nothing was written; report this, with: infc verify {artifact}")


@app.command()
def check(
    artifact: Artifact,
    target: Annotated[str, typer.Option(help="a name from `infc targets`; cpu is this machine")] = "cpu",
    as_json: Json = False,
) -> None:
    """Would ARTIFACT run on a machine? Reads its manifest and hashes its files; none of its code is run."""
    from dataclasses import replace

    from ..runtime.artifact import verify_files
    from . import fits, targets

    machine = targets.find(target)
    if target == "cpu":
        machine = replace(machine, flags=tuple(targets.host_flags()))    # all this CPU has, which may be more than its target asks
    with verify_files(_existing(artifact)) as opened:
        manifest = opened.manifest
        if not manifest.buckets: raise RuntimeFault(f"{artifact}: has no program to run; compile it again")
        for bucket in manifest.buckets: opened.program(bucket.name)
        for kernel in manifest.kernels:
            if kernel.file: opened.cubin(kernel.file)
    reasons = fits.reasons(manifest, machine)
    notes = [] if reasons else fits.notes(manifest, machine)
    report = {"artifact": str(artifact), "target": machine.name, "runs": not reasons, "reasons": reasons, "notes": notes,
              "missing": fits.missing_flags(manifest, machine), "files": len(manifest.files)}
    if as_json:
        _print_json(report)
    if reasons:
        raise UserError(f"{artifact}: {'; '.join(reasons)}")
    if not as_json:
        print(f"{artifact}: {len(manifest.files)} files as hashed; runs on {machine.name}")
        for note in notes:
            print(f"note: {note}")


@app.command()
def diff(
    before: Annotated[Path | None, typer.Argument(metavar="A", help="artifact, or stage: DIR/07-fuse_rope", show_default=False)] = None,
    after: Annotated[Path | None, typer.Argument(metavar="B", help="another of the same kind", show_default=False)] = None,
    fail_on: Annotated[
        str | None, typer.Option(help='budgets, like "decode_ms>+2%,unfused>0": exit code 1 when one comes true', show_default=False)
    ] = None,
    measured: Annotated[
        tuple[Path, Path] | None, typer.Option("--bench", metavar="A.json B.json", help="of each, from infc bench -o", show_default=False)
    ] = None,
    metrics: Annotated[bool, typer.Option("--metrics", help="list what a budget may name")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """What differs between two artifacts or two stages of a dump: values, kernels, backends, figures. Runs neither.

    Budgets are METRIC OP LIMIT with commas between them. OP: > >= < <= == !=. LIMIT: 3 or 300MB is about B itself, +3 or -3
    about B minus A, +2% or -2% about that as a share of A. Metrics: decode_ms, decode_bytes, memory, weights, arena, kv_per_token,
    size, buckets, kernels, steps, unfused, aten_steps, graph_error, fired.PASS, calls.OP and more: infc diff --metrics
    """
    from . import console

    if metrics:
        from .compare.metrics import METRICS

        if as_json:
            _print_json({"metrics": [{"name": name, "unit": unit, "about": about} for name, (unit, about) in METRICS.items()]})
        else:
            console.table("metrics", ("name", "unit", "what it is"), [(name, *told) for name, told in METRICS.items()])
        return
    if before is None or after is None:
        raise UserError("give two artifacts, or two stages of a dump: infc diff A B (see: infc diff --help)")
    from ..runtime.comparison import load as load_bench
    from ..runtime.cpu import default_threads
    from .compare import budgets
    from .compare import diff as core
    from .costs.machine import known_peaks

    budgets.parse(fail_on) if fail_on is not None else None          # before anything is read
    report = core.compare(
        before, after, bench=[load_bench(path) for path in measured or ()], peaks=lambda isa: known_peaks(isa, default_threads()))
    old, new = ({name: m[side] for name, m in report["metrics"].items() if m[side] is not None} for side in ("before", "after"))
    report["broken"] = budgets.judge(fail_on, old, new, report["notes"].append) if fail_on is not None else []
    if as_json:
        _print_json(report)
    elif not quiet:
        console.differs(report)
    else:                                                            # a budget on what is nowhere is not passed unseen
        print("".join(f"infc: {line}\n" for line in report["notes"]), end="", file=sys.stderr)
    for broken in report["broken"]:
        print(f"infc: {broken['text']}", file=sys.stderr)
    if report["broken"]:
        raise typer.Exit(1)


@app.command("bisect")
def find_fault(
    model: ModelName,
    target: Annotated[str, typer.Option(help="a name from `infc targets`; cpu is this machine")] = "cpu",
    dtype: Annotated[Dtype, typer.Option(help="of weights, KV cache and products; fp16 on a GPU")] = "bf16",
    check: Annotated[Literal["golden"], typer.Option(help="golden: compare logits with the captured graph's in fp64")] = "golden",
    command: Annotated[
        str | None, typer.Option(help="shell command with {artifact} in it: 0 is good, 125 cannot tell, else bad", show_default=False)
    ] = None,
    buckets: Annotated[str | None, typer.Option(help="token counts, like 1,16,256 [default: chosen]", show_default=False)] = None,
    max_sequences: Annotated[
        int | None, typer.Option(min=1, help="sequences in one step [default: 16, on a GPU 64]", show_default=False)] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Find the first rewrite, or the first kernel, that makes MODEL's answers wrong; exit code 1 if there is one."""
    from . import console

    with console.Reporter(quiet=quiet) as report:
        from . import bisect, driver

        options = driver.Options(
            target, dtype, buckets=_given("buckets", buckets), max_sequences=max_sequences)
        found = bisect.bisect(model, options=options, command=command, on_event=report)
    if as_json:
        _print_json(found.json())
    else:
        print(found.line)
    if found.fault != "none":
        raise typer.Exit(1)


@app.command()
def explain(
    subject: Annotated[str, typer.Argument(metavar="MODEL|ARTIFACT", help="with --pass a model too", show_default=False)],
    one: Annotated[str | None, typer.Option("--pass", help="why it fired where it did, and not elsewhere", show_default=False)] = None,
    dtype: Annotated[Dtype, typer.Option(help="with --pass, of a model")] = "bf16",
    measured: Annotated[bool, typer.Option("--measured", help="run it, and put measured times beside predicted ones")] = False,
    tokens: Annotated[str | None, typer.Option(help="of the prefills [default: 256]", show_default=False)] = None,
    contexts: Annotated[str | None, typer.Option(help="tokens before the decode step [default: 128,448]", show_default=False)] = None,
    batches: Annotated[str | None, typer.Option(help="sequences at once [default: 1,8]", show_default=False)] = None,
    threads: Threads = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Say where an artifact's time goes; or, with --pass, why a pass fired where it did and not elsewhere."""
    if one is not None:
        if measured or (tokens, contexts, batches) != (None, None, None):
            raise UserError("--measured, --tokens, --contexts and --batches are about time, --pass is about a pass: ask for one of them")
        return _explain_pass(subject, one, dtype, as_json, quiet)
    from .costs import explain as costs

    note = (lambda text: None) if quiet else lambda text: print(f"  {text}", file=sys.stderr)
    report = costs.explain_artifact(
        _existing(Path(subject)), measured=measured, tokens=_given("tokens", tokens),
        contexts=_given("contexts", contexts), batches=_given("batches", batches), threads=threads, note=note)
    if as_json:
        return _print_json(report)
    return None if quiet else costs.show(report)


def _explain_pass(subject: str, name: str, dtype: str, as_json: bool, quiet: bool) -> None:
    from . import console, misses

    path = Path(subject)
    if (path / "manifest.json").exists() or path.suffix == ".infc":
        from ..runtime.artifact import read

        with read(_existing(path)) as artifact:
            found = misses.of_artifact(artifact.report("passes", "graphs"), name, subject)
    else:
        from .. import passes

        misses.check_name(name, [one.name for one in passes.pipeline(dtype)])
        with console.Reporter(quiet=quiet or as_json) as report:
            from . import driver
            from .graph_json import graph_json

            ran, graph = driver.passes_of(subject, driver.Options(dtype=dtype, check="off"), report)
            found = misses.total(ran.json(), name) | {"places": misses.places(graph_json(graph)["nodes"], name)}
    if as_json:
        _print_json(found)
    elif not quiet:
        console.explained_pass(found)


@bench.command("measure", hidden=True)
def measure(
    artifact: Artifact,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="also save the JSON here", show_default=False)] = None,
    batches: Annotated[str, typer.Option(help="sequences at once")] = "1,8",
    contexts: Annotated[
        str | None, typer.Option(help="tokens before the decode that is measured [default: those of 128,448 that fit]", show_default=False)
    ] = None,
    new_tokens: Annotated[int, typer.Option(min=2, help="tokens decoded in a sample")] = 64,
    prefill: Annotated[
        str | None, typer.Option(help="prompt lengths [default: those of 128,256,1024 that fit]", show_default=False)
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="samples of each; medians want 5 or more")] = 5,
    threads: Threads = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure ARTIFACT on this machine: fresh process, warm, and steady apart, beside the machine's own read rate."""
    from ..runtime import bench as core
    from . import console, files

    usual = core.Workload()
    given = {"contexts": _given("contexts", contexts), "prefill": _given("prefill", prefill)}
    work = core.Workload(_counts("batches", batches), given["contexts"] or usual.contexts, new_tokens, given["prefill"] or usual.prefill,
                         rounds=rounds)
    note = None if quiet else lambda text: print(f"  {text}", file=sys.stderr)
    free = [name for name, asked in given.items() if asked is None]
    report = core.measure(_existing(artifact), work, threads=threads, note=note, may_drop=free)
    if output:
        files.write_whole(output, _json(report) + "\n")
    if as_json:
        _print_json(report)
    elif not quiet:
        console.measured(report)


@bench.command("compare")
def compare(
    before: Annotated[Path, typer.Argument(metavar="A.json", help="what `infc bench -o` wrote", show_default=False)],
    after: Annotated[Path, typer.Argument(metavar="B.json", show_default=False)],
    as_json: Json = False,
) -> None:
    """Show B beside A; refuses if they measured different workloads or contracts."""
    from ..runtime import comparison
    from . import console

    report = comparison.compare(comparison.load(before), comparison.load(after))
    if as_json:
        _print_json(report)
    else:
        console.compared(report)


@quality.command("measure", hidden=True)
def measure_quality(
    artifact: Artifact,
    data: Annotated[
        Path | None, typer.Option(help="held-out text, or token ids (.json) [default: the text that travels with infc]", show_default=False)
    ] = None,
    against: Annotated[str | None, typer.Option(
        metavar="MODEL|ARTIFACT|none", help="[default: the model it was made of, if infc knows it]", show_default=False)] = None,
    windows: Annotated[
        int | None, typer.Option(min=2, help="of 512 tokens, the second half scored [default: 32]", show_default=False)
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="also save the JSON here", show_default=False)] = None,
    force: Annotated[bool, typer.Option("--force", help="replace the saved JSON if it exists")] = False,
    threads: Threads = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Perplexity of ARTIFACT on a text; and beside a reference: KL, agreement, retrieval, structured output."""
    from . import console, files
    from .quality import command

    if output: files.refuse_existing(output, force)
    note = (lambda text: None) if quiet else lambda text: print(f"  {text}", file=sys.stderr)
    report = command.measure(_existing(artifact), data=data, against=against, windows=windows, threads=threads, note=note)
    if output:
        files.write_whole(output, _json(report) + "\n")
    if as_json:
        _print_json(report)
    elif not quiet:
        console.quality(report)


@quality.command("compare")
def compare_quality(
    before: Annotated[Path, typer.Argument(metavar="A", help="what `infc quality -o` wrote, or an artifact", show_default=False)],
    after: Annotated[Path, typer.Argument(metavar="B", show_default=False)],
    as_json: Json = False,
) -> None:
    """Show B beside A; refuses if they measured different models, texts or references."""
    from . import console
    from .quality import command

    report = command.compare(command.load_report(before), command.load_report(after))
    if as_json:
        _print_json(report)
    else:
        console.quality_compared(report)


@app.command("report")
def write_report(
    artifact: Artifact,
    output: Annotated[Path, typer.Option("--output", "-o", help="the page; it needs nothing beside it")] = Path("report.html"),
    measured: Annotated[bool, typer.Option("--measured", help="also run it here: replay its golden prompts and time its kernels")] = False,
    force: Annotated[bool, typer.Option("--force", help="replace the page if it exists")] = False,
    threads: Threads = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write a page about ARTIFACT: passes, graphs before and after, roofline, memory over time, buckets and kernels."""
    from . import report_command

    note = None if quiet or as_json else lambda text: print(f"  {text}", file=sys.stderr)
    made = report_command.write(_existing(artifact), output, measured=measured, force=force, threads=threads, note=note)
    if as_json:
        _print_json(made)
    elif quiet:
        print(made["report"])
    else:
        print(f"{made['report']}: {made['bytes'] / 1e6:.2f} MB, {made['passes']} passes, {made['captured']} captured and "
              f"{made['final']} final operators, {made['buckets']} buckets; open it in any browser")


@app.command("targets")
def list_targets(as_json: Json = False) -> None:
    """List the machines infc compiles for."""
    from . import console, targets

    here = targets.host().name
    rows = [
        {
            "name": t.name,
            "kind": t.kind,
            "isa": t.isa,
            "description": t.description,
            "source": t.source,
            "kv_formats": t.kv_formats,
            "runs_here": None if t.gpu else not targets.missing(t),    # of a GPU the compiler cannot say
            "gpu": t.gpu,
        }
        for t in targets.TARGETS.values()
    ]
    if as_json:
        _print_json({"host": here, "targets": rows})
    else:
        console.listed_targets(here, _plain(rows))


@app.command("models")
def list_models(as_json: Json = False) -> None:
    """List the known models."""
    from ..models import table as known

    rows = [
        {"name": m.name, "about": m.about, "license": m.license, "config": m.config, "weights": "real" if m.source else "random"}
        for m in known().values()
    ]
    if as_json:
        _print_json({"models": rows})
        return
    from .console import table

    table(
        "models; a Hugging Face folder or a GGUF file works too",
        ("name", "weights", "license", "what it is"),
        [(r["name"], r["weights"], r["license"], r["about"]) for r in rows],
    )


def _existing(artifact: Path) -> Path:
    """The path, if it may be an artifact; else an error that says how to make one of it."""
    from .. import models

    if artifact.exists():
        if artifact.suffix == ".gguf" or (artifact / "config.json").exists():
            raise UserError(f"{artifact} is a model, not an artifact: compile it first, with: infc compile {artifact}")
        return artifact
    if str(artifact) in models.table() or str(artifact).startswith("random:"):
        raise UserError(f"{artifact} is a model, not an artifact: compile it first, with: infc compile {artifact}")
    near = [p.name for p in artifact.parent.glob("*.infc")] if artifact.parent.is_dir() else []
    hint = f"; there {'is' if len(near) == 1 else 'are'} {', '.join(sorted(near)[:5])}" if near else "; `infc compile MODEL` makes one"
    raise UserError(f"{artifact}: no such artifact{hint}")


def _load(artifact: Path, threads: int | None, *, text: bool = False) -> "Model":
    from ..runtime.session import load

    return load(_existing(artifact), threads=threads, text=text)


def _counts(name: str, text: str) -> tuple[int, ...]:
    """ "1,16,256" as numbers."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise UserError(f"--{name} is {text!r}: give whole numbers with commas between them, like 1,16,256") from error


def _given(name: str, text: str | None) -> tuple[int, ...] | None:
    """As `_counts`; None where the option was not given."""
    return None if text is None else _counts(name, text)


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns its exit code. Only a bug in infc leaves a traceback."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that unfinished files are removed
    try:
        command = typer.main.get_command(app)
        with command.make_context("infc", list(sys.argv[1:] if arguments is None else arguments)) as context:
            command.invoke(context)
        sys.stdout.flush()
    except typer.Exit as done:
        return done.exit_code
    except (InfcError, RuntimeFault) as error:
        return _fail(str(error), error.exit_code)
    except TyperException as error:
        return _fail(_usage(error), 2)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader left: nobody to tell
        return 128 + signal.SIGPIPE
    except OSError as error:
        return _fail(_os_error(error), 2)
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


def _fail(message: str, code: int) -> int:
    """One line on stderr, whatever the message."""
    print("infc: " + " ".join(message.split()), file=sys.stderr)
    return code


def _usage(error: TyperException) -> str:
    """A wrong option or argument, with the command that lists the right ones."""
    context = getattr(error, "ctx", None)
    command = f" (see: {context.command_path} --help)" if context else ""
    return error.format_message().replace("Value error, ", "").rstrip(".") + command


def _os_error(error: OSError) -> str:
    where = f"{error.filename}: " if error.filename else ""
    if error.errno == errno.ENOSPC:
        return f"{where}no space left on the disk"
    return f"{where}{error.strerror or error}"


def _plain(value: Any) -> Any:
    """Structs, dataclasses and paths as JSON's own types."""
    import msgspec

    return msgspec.to_builtins(value, enc_hook=str)


def _json(value: Any) -> str:
    """Structs, paths and all; NaN becomes null."""
    import msgspec

    return msgspec.json.format(msgspec.json.encode(value, enc_hook=str), indent=1).decode()


def _print_json(value: Any) -> None:
    print(_json(value))
