"""`infc bench` and `infc quality`: what an artifact is worth, and how two compare."""
import sys
from pathlib import Path
from typing import Annotated

import typer

from .arguments import Artifact, Json, Quiet, Threads, counts, existing, given_counts
from .output import give


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
    force: Annotated[bool, typer.Option("--force", help="replace the saved JSON if it exists")] = False,
    threads: Threads = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure ARTIFACT on this machine: fresh process, warm, and steady apart, beside the machine's own read rate."""
    from ...runtime import bench as core
    from .. import console, files

    if output: files.refuse_existing(output, force)
    usual = core.Workload()
    given = {"contexts": given_counts("contexts", contexts), "prefill": given_counts("prefill", prefill)}
    work = core.Workload(counts("batches", batches), given["contexts"] or usual.contexts, new_tokens, given["prefill"] or usual.prefill,
                         rounds=rounds)
    note = None if quiet else lambda text: print(f"  {text}", file=sys.stderr)
    free = [name for name, asked in given.items() if asked is None]
    report = core.measure(existing(artifact), work, threads=threads, note=note, may_drop=free)
    give(report, console.measured, as_json=as_json, quiet=quiet, output=output)


def compare(
    before: Annotated[Path, typer.Argument(metavar="A.json", help="what `infc bench -o` wrote", show_default=False)],
    after: Annotated[Path, typer.Argument(metavar="B.json", show_default=False)],
    as_json: Json = False,
) -> None:
    """Show B beside A; refuses if they measured different workloads or contracts."""
    from ...runtime import comparison
    from .. import console

    report = comparison.compare(comparison.load(before), comparison.load(after))
    give(report, console.compared, as_json=as_json)


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
    from .. import console, files
    from ..quality import command

    if output: files.refuse_existing(output, force)
    note = (lambda text: None) if quiet else lambda text: print(f"  {text}", file=sys.stderr)
    report = command.measure(existing(artifact), data=data, against=against, windows=windows, threads=threads, note=note)
    give(report, console.quality, as_json=as_json, quiet=quiet, output=output)


def compare_quality(
    before: Annotated[Path, typer.Argument(metavar="A", help="what `infc quality -o` wrote, or an artifact", show_default=False)],
    after: Annotated[Path, typer.Argument(metavar="B", show_default=False)],
    as_json: Json = False,
) -> None:
    """Show B beside A; refuses if they measured different models, texts or references."""
    from .. import console
    from ..quality import command

    report = command.compare(command.load_report(before), command.load_report(after))
    give(report, console.quality_compared, as_json=as_json)
