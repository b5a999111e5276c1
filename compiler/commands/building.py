"""`infc compile`, and `infc bisect`, which compiles until it knows what is wrong."""
from pathlib import Path
from typing import Annotated, Literal

import typer

from ..files import named_artifact
from .arguments import Dtype, Json, ModelName, Quiet, given_counts
from .output import print_json


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
    from .. import console, misses
    from ..quant import recipe_file

    if quant is not None: recipe_file.text(quant)                    # before torch loads, and the same of the place below
    if output is not None:
        from ...runtime.artifact import refuse_place

        refuse_place(named_artifact(output), force)
    with console.Reporter(quiet=quiet) as report:
        from ... import passes
        from .. import driver

        options = driver.Options(
            target, dtype, allow, check, given_counts("buckets", buckets), max_sequences=max_sequences,
            strict=strict, dump=dump, dump_asm=dump_asm, force=force, reuse=reuse, cache=cache, keep_going=keep_going,
            quant=("auto" if limits and kv_quant == "none" else "none") if quant is None else quant,
            candidates=driver.Options.candidates if candidates is None else candidates,
            search_for=search_for, quant_method=quant_method, calib=calib, kv_quant=kv_quant, data=data, quality=limits,
            unverified=unverified, keep_slow=keep_slow, expect=misses.counts(expect or (), passes.PIPELINE))
        result = driver.compile(model, output, options=options, on_event=report).json()
    if as_json:
        print_json(result)
    elif quiet:
        print(result["artifact"])
    else:
        console.compiled(result)


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
    from .. import console

    with console.Reporter(quiet=quiet) as report:
        from .. import bisect, driver

        options = driver.Options(
            target, dtype, buckets=given_counts("buckets", buckets), max_sequences=max_sequences)
        found = bisect.bisect(model, options=options, command=command, on_event=report)
    if as_json:
        print_json(found.json())
    else:
        print(found.line)
    if found.fault != "none":
        raise typer.Exit(1)
