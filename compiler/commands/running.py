"""`infc run`, `verify` and `tune` run an artifact on this machine; `inspect` and `check` read it, and run none of it."""
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ...runtime.errors import RuntimeFault
from ..errors import CheckFailed, UserError
from ..files import named_artifact
from .arguments import Artifact, Json, Quiet, Threads, existing, load_model
from .output import plain, print_json


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
    model = load_model(artifact, threads, text=True)
    prompts = [_from_stdin() if p == "-" else p for p in prompt]
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
            print_json({"outputs": outputs, "timing": model.timing})
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


def _from_stdin() -> str:
    if not sys.stdin: raise UserError("--prompt - reads from stdin, which is closed; give the text itself, or a file: -p - <FILE")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise UserError(f"stdin is no {error.encoding} text: {error.reason} at byte {error.start}; give it as that") from error


def inspect(artifact: Artifact, as_json: Json = False) -> None:
    """Show what ARTIFACT holds; none of its code is run."""
    from ...runtime.artifact import read
    from .. import console

    with read(existing(artifact)) as opened:
        manifest = opened.manifest
        choices = {b.name: plain(found) for b in manifest.buckets if (found := opened.program(b.name).choices)}
    kernels = [{name: getattr(kernel, name) for name in kernel.__struct_fields__} for kernel in manifest.kernels]
    whole = plain(manifest)
    shown = {"manifest": whole, "kernels": kernels, "buckets": whole["buckets"], "choices": choices}
    if as_json:
        print_json(shown)
    else:
        console.inspected(shown)


def verify(artifact: Artifact, threads: Threads = None, as_json: Json = False, quiet: Quiet = False) -> None:
    """Hash every file of ARTIFACT and replay its golden prompts; exit code 1 if an answer differs."""
    from ...runtime.artifact import verify_files
    from ...runtime.golden import replay
    from .. import console, debug

    if debug.eager():
        raise UserError("INFC_EAGER is for infc compile: an artifact holds no reference operators; compile with it, or bisect MODEL")
    verify_files(existing(artifact)).close()
    try:
        model = load_model(artifact, threads)
    except RuntimeFault as fault:                                    # of the machine: the files are what they were
        raise UserError(f"{artifact}: every file as hashed; its golden prompts cannot be replayed here: {fault}", fault.exit_code,
                        document={"hashed": True, "replayed": False, "reason": str(fault)}) from fault
    with model:
        report = {"hashed": True, "replayed": True, **plain(replay(model))}
    if not (as_json or quiet):
        print(f"{artifact}: every file as hashed; {console.verdict(report)}")
    report["largest_error"] = report.pop("error")                    # with --json `error` is what went wrong
    if not report["passed"]:
        raise CheckFailed(f"{artifact}: its answers differ from the recorded ones; compile it again, and report this if it stays",
                          document=report)
    if as_json: print_json(report)


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
    from ...runtime.tune import tune as measure_and_choose
    from .. import console

    note = (lambda text: None) if quiet or as_json else lambda text: print(f"  {text}", file=sys.stderr)
    target = None if output is None else named_artifact(output)
    report = plain(measure_and_choose(existing(artifact), target, force=force, rounds=rounds, note=note))
    if not (as_json or quiet): console.tuned(report)
    if not report["written"]:
        raise CheckFailed(f"{artifact}: its golden logits are off by {report['golden']['error']:.3g} on this GPU, "
                          f"{report['golden']['bound']:.3g} is allowed; nothing was written; report this, with: infc verify {artifact}",
                          document=report)
    if as_json: print_json(report)


def check(
    artifact: Artifact,
    target: Annotated[str, typer.Option(help="a name from `infc targets`; cpu is this machine")] = "cpu",
    as_json: Json = False,
) -> None:
    """Would ARTIFACT run on a machine? Reads its manifest and hashes its files; none of its code is run."""

    from ...runtime.artifact import verify_files
    from .. import fits, targets

    machine = targets.find(target)
    if target == "cpu":
        machine = replace(machine, flags=tuple(targets.host_flags()))    # all this CPU has, which may be more than its target asks
    with verify_files(existing(artifact)) as opened:
        manifest = opened.manifest
        if not manifest.buckets: raise RuntimeFault(f"{artifact}: has no program to run; compile it again")
        for bucket in manifest.buckets: opened.program(bucket.name)
        for kernel in manifest.kernels:
            if kernel.file: opened.cubin(kernel.file)
    reasons = fits.reasons(manifest, machine)
    notes = [] if reasons else fits.notes(manifest, machine)
    report = {"artifact": str(artifact), "target": machine.name, "runs": not reasons, "reasons": reasons, "notes": notes,
              "missing": fits.missing_flags(manifest, machine), "files": len(manifest.files)}
    if reasons:
        raise UserError(f"{artifact}: {'; '.join(reasons)}", document=report)
    if as_json:
        print_json(report)
    else:
        print(f"{artifact}: {len(manifest.files)} files as hashed; runs on {machine.name}")
        for note in notes:
            print(f"note: {note}")
