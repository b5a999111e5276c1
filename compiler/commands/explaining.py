"""`infc diff`, `infc explain` and `infc report`: what an artifact is, why, and where its time goes."""
import sys
from pathlib import Path
from typing import Annotated

import typer

from ..errors import CheckFailed, UserError
from .arguments import Artifact, Dtype, Json, Quiet, Threads, existing, given_counts
from .output import print_json


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
    from .. import console

    if metrics:
        from ..compare.metrics import METRICS

        if as_json:
            print_json({"metrics": [{"name": name, "unit": unit, "about": about} for name, (unit, about) in METRICS.items()]})
        else:
            console.table("metrics", ("name", "unit", "what it is"), [(name, *told) for name, told in METRICS.items()])
        return
    if before is None or after is None:
        raise UserError("give two artifacts, or two stages of a dump: infc diff A B (see: infc diff --help)")
    from ...runtime.comparison import load as load_bench
    from ...runtime.cpu import default_threads
    from ..compare import budgets
    from ..compare import diff as core
    from ..costs.machine import known_peaks

    budgets.parse(fail_on) if fail_on is not None else None          # before anything is read
    report = core.compare(
        before, after, bench=[load_bench(path) for path in measured or ()], peaks=lambda isa: known_peaks(isa, default_threads()))
    old, new = ({name: m[side] for name, m in report["metrics"].items() if m[side] is not None} for side in ("before", "after"))
    report["broken"] = budgets.judge(fail_on, old, new, report["notes"].append) if fail_on is not None else []
    if not (as_json or quiet):
        console.differs(report)
    elif not as_json:                                                # a budget on what is nowhere is not passed unseen
        print("".join(f"infc: {line}\n" for line in report["notes"]), end="", file=sys.stderr)
    if report["broken"]:
        raise CheckFailed("; ".join(str(broken["text"]) for broken in report["broken"]), document=report)
    if as_json: print_json(report)


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
    from ..costs import explain as costs

    note = (lambda text: None) if quiet else lambda text: print(f"  {text}", file=sys.stderr)
    report = costs.explain_artifact(
        existing(Path(subject)), measured=measured, tokens=given_counts("tokens", tokens),
        contexts=given_counts("contexts", contexts), batches=given_counts("batches", batches), threads=threads, note=note)
    if as_json:
        return print_json(report)
    return None if quiet else costs.show(report)


def _explain_pass(subject: str, name: str, dtype: str, as_json: bool, quiet: bool) -> None:
    from .. import console, misses

    path = Path(subject)
    if (path / "manifest.json").exists() or path.suffix == ".infc":
        from ...runtime.artifact import read

        with read(existing(path)) as artifact:
            found = misses.of_artifact(artifact.report("passes", "graphs"), name, subject)
    else:
        from ... import passes

        misses.check_name(name, [one.name for one in passes.pipeline(dtype)])
        with console.Reporter(quiet=quiet or as_json) as report:
            from .. import driver
            from ..graph_json import graph_json

            ran, graph = driver.passes_of(subject, driver.Options(dtype=dtype, check="off"), report)
            found = misses.total(ran.json(), name) | {"places": misses.places(graph_json(graph)["nodes"], name)}
    if as_json:
        print_json(found)
    elif not quiet:
        console.explained_pass(found)


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
    from .. import report_command

    note = None if quiet or as_json else lambda text: print(f"  {text}", file=sys.stderr)
    made = report_command.write(existing(artifact), output, measured=measured, force=force, threads=threads, note=note)
    if as_json:
        print_json(made)
    elif quiet:
        print(made["report"])
    else:
        print(f"{made['report']}: {made['bytes'] / 1e6:.2f} MB, {made['passes']} passes, {made['captured']} captured and "
              f"{made['final']} final operators, {made['buckets']} buckets; open it in any browser")
