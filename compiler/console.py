"""What a compile shows in a terminal: progress on stderr while it runs, tables on stdout when it is done."""

import math
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..runtime.manifest import GPU


class Event(Protocol):
    """What the driver reports; `compiler.progress.Event` is one."""

    @property
    def kind(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def fraction(self) -> float | None: ...
    @property
    def text(self) -> str: ...


class Reporter:
    """A context that shows events on stderr: a moving bar in a terminal, one line a phase in a log, nothing if quiet."""

    def __init__(self, quiet: bool) -> None:
        self.console = Console(stderr=True, quiet=quiet, highlight=False, soft_wrap=True)
        self.bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(24),
            TimeElapsedColumn(),
            TextColumn("[dim]{task.fields[text]}"),
            console=self.console,
            transient=True,
            disable=quiet or not self.console.is_terminal,
        )
        self.phase = "starting"
        self.began = time.perf_counter()
        self.task = self.bar.add_task(self.phase, total=None, text="")

    def __enter__(self) -> "Reporter":
        self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._close()
        self.bar.stop()

    def __call__(self, event: Event) -> None:
        if event.kind == "note":
            self.console.print(event.text, markup=False)
            return
        if event.kind == "phase" and event.name != self.phase:
            self._close()
            self.phase, self.began = event.name, time.perf_counter()
            self.bar.reset(self.task, total=None, description=event.name, text=event.text)
        text = event.text if event.kind == "phase" else f"{event.name} {event.text}".strip()
        self.bar.update(self.task, text=text)
        if event.fraction is not None:
            self.bar.update(self.task, total=1.0, completed=event.fraction)

    def _close(self) -> None:
        if self.phase != "starting":
            self.console.print(f"  {self.phase:<12} {time.perf_counter() - self.began:6.1f} s", markup=False)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], right: Sequence[int] = ()) -> None:
    """Print one table on stdout; `right` are the columns of numbers."""
    shown = Table(
        title=title, title_justify="left", show_header=any(columns), header_style="dim", box=None, pad_edge=False, padding=(0, 2, 0, 0)
    )
    for index, column in enumerate(columns):
        shown.add_column(column, justify="right" if index in right else "left", overflow="fold")
    for row in rows:
        shown.add_row(*("" if cell is None else str(cell) for cell in row))
    # A pipe has no width: do not fold lines at rich's default of 80 there.
    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 140)
    console.print(shown)
    console.print()


def size(count: float) -> str:
    """Bytes for people: 269.1 MB (decimal, as bandwidths are)."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"


def number(value: float, places: int) -> str:
    """With so many decimals; with two digits that count where those would leave fewer: what is not zero is never shown as zero."""
    if 0 < abs(value) < 10.0 ** (1 - places): places = 1 - math.floor(math.log10(abs(value)))
    return f"{value:.{places}f}"


def pairs(title: str, facts: Mapping[str, object]) -> None:
    """Print one table of names and values, nested mappings as dotted names."""
    table(title, ("", ""), flatten(facts))


def flatten(facts: Mapping[str, object], prefix: str = "") -> list[tuple[str, object]]:
    """[("memory.peak_bytes", 1), ...] of {"memory": {"peak_bytes": 1}}."""
    rows: list[tuple[str, object]] = []
    for name, value in facts.items():
        if isinstance(value, Mapping):
            rows += flatten(value, f"{prefix}{name}.")
        else:
            rows.append((prefix + str(name), _short(value)))
    return rows


def _short(value: object) -> object:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, (list, tuple)):
        return ", ".join(str(_short(v)) for v in value)
    return value


def compiled(result: Mapping[str, Any]) -> None:
    """The tables of a compile: passes, programs, and the artifact."""
    shown = [p for p in result["passes"] if p["fired"] or p["refused"] or _left_out(p)]
    passes = [
        (p["name"], p["fired"], p["contract"], _error(p["error"]), number(p["seconds"], 2), number(p["check_seconds"], 2),
         _left_out(p) or _why(p["refused"]))
        for p in shown
    ]
    table("passes", ("pass", "fired", "contract", "error", "s", "check s", "refused"), passes, right=(1, 3, 4, 5))
    if idle := [p["name"] for p in result["passes"] if p["name"] not in {one["name"] for one in shown}]:
        print(f"had nothing to do: {', '.join(dict.fromkeys(idle))}\n")
    programs = [(name, p["steps"], p["unique_kernels"], p["aten_steps"], size(p["arena_bytes"])) for name, p in result["program"].items()]
    table("programs", ("bucket", "steps", "kernels", "aten steps", "arena"), programs, right=(1, 2, 3, 4))
    pairs(
        "artifact",
        {
            "path": result["artifact"],
            "version": result["version"],
            "size": size(result["size_bytes"]),
            "verified": verdict(result["verify"]) + _since(result),
            **({"quality": _quality(result["quality"])} if result["quality"] else {}),
            "predicted": _prediction(result["predicted"]) if result["predicted"] else "nothing: it was not run here",
            "seconds": "  ".join(f"{phase} {number(seconds, 1)}" for phase, seconds in result["seconds"].items()),
        },
    )


def _since(result: Mapping[str, Any]) -> str:
    """What of it an earlier compile found out, and when; empty where nothing."""
    verify, checks = result["verify"], [p["kept_from"] for p in result["passes"] if p.get("kept_from")]
    told = [f"{len(checks)} passes checked by {max(checks)}"] if checks else []
    told += [f"{what} at {at}" for what, name in (("golden answers computed", "golden_kept_from"), ("replayed", "kept_from"))
             if (at := verify.get(name))]
    return f"; by earlier compiles of the same content: {', '.join(told)}" if told else ""


def _quality(found: Mapping[str, Any]) -> str:
    """What was measured beside the captured model, in one line."""
    bits = f"{found['bits_per_weight']:.2f} bits per weight" if found.get("bits_per_weight") else ""
    if not found["verified"]:
        return f"unverified: nobody measured what quantization costs; {bits}"
    change = found["ppl"] / found["reference_ppl"] - 1
    by = "" if found["by"] == "the artifact" else f" ({found['by']})"
    return (f"perplexity {found['ppl']:.4g}, {100 * change:+.2f} % beside fp32; KL {found['kl']:.2g}, P99 {found['kl_p99']:.2g} nats; "
            f"same likeliest token at {100 * found['top1']:.1f} % of {found['tokens']} tokens of {found['data']}{by}; "
            f"holds {found['limits']}; {bits}")


def quality(report: Mapping[str, Any]) -> None:
    """What `infc quality` measured."""
    facts: dict[str, object] = {
        "artifact": f"{report['artifact']}, {report['model']} {report['version'][:12]}",
        "data": f"{report['data']}, {report['windows']} windows of {report['length']} tokens, {report['tokens']} scored",
        "against": report["against"] or "nothing: perplexity alone",
        "perplexity": f"{report['ppl']:.4f}",
    }
    if report["against"]:
        facts["perplexity"] = f"{report['ppl']:.4f}, {100 * report['ppl_change']:+.3f} % beside {report['reference_ppl']:.4f}"
        facts["KL"] = f"mean {report['kl']:.3g}, P99 {report['kl_p99']:.3g} nats"
        facts["same likeliest token"] = f"{100 * report['top1']:.2f} %"
        for name, about in (("retrieval", "facts far back found"), ("json", "continuations that parse as JSON")):
            score = report[name]
            facts[name] = (f"skipped: {report['skipped'][name]}" if score is None else
                           f"{score['right']} of {score['asked']} {about}, the reference {score['reference_right']}; "
                           + ("nothing to keep" if score["share"] is None else f"of the reference's {100 * score['share']:.0f} % kept"))
    pairs("quality", facts)


def quality_compared(report: Mapping[str, Any]) -> None:
    """Two measurements of quality side by side."""
    words = {None: "", True: "better", False: "worse"}
    table(f"A {report['before']}  B {report['after']}", ("figure", "A", "B", ""),
          [(name, f"{r['before']:.6g}", f"{r['after']:.6g}", words[r["better"]]) for name, r in report["figures"].items()], right=(1, 2))


def explained_pass(found: Mapping[str, Any]) -> None:
    """How often one pass fired, each refusal, and each near miss with what it expected and what it met."""
    refused, missed = found["refused"], found["misses"]
    nothing = "" if found["fired"] or refused or missed else ": nothing in the graph looks like what it rewrites"
    print(f"{found['name']}: fired {found['fired']}, refused {len(refused)}, nearly matched {len(missed)}{nothing}\n")
    if found["places"]:
        table("operators it made or changed that are left at the end", ("how many", "where"),
              [(one["nodes"], one["where"]) for one in found["places"]], right=(0,))
    if refused:
        table("refused", ("where", "why"), [(one["site"], one["reason"]) for one in refused])
    if missed:
        rows = [(one["site"], f"{one['matched']} of {one['of']}", one.get("expected", ""), one.get("found", "")) for one in missed]
        table("nearly matched", ("where", "operators", "expected", "found"), rows)


def verdict(found: Mapping[str, Any]) -> str:
    """What the replay of the golden prompts says, in one sentence."""
    if not found.get("replayed", True):
        return f"not on this machine: {found['reason']}"
    who = ""
    if found.get("reference"):
        why = f"{found['reason']}: they are built, and unchecked" if "by" in found else "INFC_EAGER: the kernels are unchecked"
        who = f", reference operators in place of every kernel ({why})"
    elif "by" in found: who = f" by {found['by']}"
    count = len(found["errors"]) - 1
    return (f"{count} bucket{'s' * (count != 1)} and a mixed batch replayed{who}; "
            f"logits at most {found['error']:.3g} from the model in fp64, "
            f"{found['bound']:.3g} allowed (twice the optimized graph's own error in eager PyTorch); "
            f"same likeliest token at {100 * found['top1']:.0f} % of positions")


def _prediction(found: Mapping[str, Any]) -> str:
    rate = f", at the {found['read_gb_s']:.1f} GB/s just measured" if found["by"] == "reads alone" else ""
    least, most = ("at least ", "at most ") if found["by"] == "the data sheet" else ("", "")
    return (f"a decode step reads {size(found['bytes'])} at context {found['context']}: {least}{found['decode_ms']:.3g} ms, "
            f"{most}{number(found['decode_tok_s'], 0)} tokens/s, bound by {found['bound']}"
            f"{rate} (by {found['by']}; more: infc explain)" + "".join(f"; {line}" for line in found["findings"]))


def inspected(shown: Mapping[str, Any]) -> None:
    """An artifact's manifest, kernels and buckets."""
    manifest = shown["manifest"]
    model = manifest["model"]
    pairs(
        "artifact",
        {
            **{name: manifest[name] for name in ("name", "version", "target", "dtype", "contract")},
            **({"quality": _quality(manifest["quality"])} if manifest.get("quality") else {}),
            "model": f"{model['parameters'] / 1e6:.0f} M parameters, {model['layers']} layers, vocabulary {model['vocab']}",
            "license": model["license"],
            "made with": ", ".join(f"{name} {version}" for name, version in manifest["created_with"].items()),
            "files": f"{len(manifest['files'])}, {size(sum(f['bytes'] for f in manifest['files'].values()))}",
            "needs": _needs(manifest, shown["kernels"]),
            **({"tuned": _tuned(manifest["tuned"])} if manifest.get("tuned") else {}),
        },
    )
    if manifest["machine"] == GPU:
        table(
            "kernels; registers a thread, shared memory and spills in bytes",
            ("kernel", "operator", "threads", "registers", "shared", "spills", "tensor cores"),
            [(k["name"], k["op"], k["threads"] or None, k["registers"], k["shared_bytes"], k["spill_bytes"], k["tensor_cores"])
             for k in shown["kernels"]],
            right=(2, 3, 4, 5),
        )
        table(
            "choices, the one that runs marked; `infc tune` measures them",
            ("bucket", "operator", "calls", "candidate", "registers", "programs/SM", "waves", "predicted us", "measured us"),
            list(_choices(shown)), right=(2, 4, 5, 6, 7, 8),
        )
    else:
        table(
            "kernels",
            ("kernel", "operator", "arch", "registers", "spills"),
            [(k["name"], k["op"], k["arch"], k["registers"], k["spill_bytes"]) for k in shown["kernels"]],
            right=(3, 4),
        )
    table(
        "buckets",
        ("bucket", "maxima", "steps", "aten steps", "arena"),
        [
            (b["name"], " ".join(f"{dim}={most}" for dim, most in b["bucket"].items()), b["steps"], b["aten_steps"], size(b["arena_bytes"]))
            for b in shown["buckets"]
        ],
        right=(2, 3, 4),
    )


def _choices(shown: Mapping[str, Any]) -> Iterable[tuple[object, ...]]:
    """A row a candidate, the one that runs marked; figures of its longest launch."""
    kernels = {kernel["hash"]: kernel for kernel in shown["kernels"]}
    for bucket, choices in shown["choices"].items():
        for choice in choices:
            for at, one in enumerate(choice["candidates"]):
                first = (bucket, choice["op"], len(choice["calls"])) if not at else ("", "", "")
                registers = max(kernels[step["kernel"]]["registers"] or 0 for step in one["steps"])
                measured = one.get("measured_us", 0.0)
                yield (*first, ("* " if at == choice.get("chosen", 0) else "  ") + one["name"], registers, one.get("programs_per_sm", 0),
                       number(one.get("waves", 0.0), 2), number(one.get("predicted_us", 0.0), 2), number(measured, 2) if measured else None)


def _tuned(info: Mapping[str, Any]) -> str:
    return f"on {info['gpu']}, driver {info['driver']}: {info['changed']} of {info['choices']} choices changed"


def tuned(report: Mapping[str, Any]) -> None:
    """What `infc tune` measured and chose."""
    rows = []
    for c in report["calls"]:
        us, before, after = c["us"], c["before"], c["after"]
        fastest = min(us, key=us.__getitem__)
        kept = "kept" if after == before else after
        rows.append((c["bucket"], c["op"], c["calls"], before, number(us[before], 2), kept, number(us[after], 2),
                     c["why_not"] and f"{fastest}, {number(us[fastest], 2)}: {c['why_not']}"))
    table("choices; microseconds a call", ("bucket", "operator", "calls", "before", "us", "after", "us", ""), rows, right=(2, 4, 6))
    steps = [(bucket, number(us, 1), number(report["after_us"][bucket], 1), f"{us / report['after_us'][bucket]:.3f}x")
             for bucket, us in report["before_us"].items()]
    table("these calls of a step, microseconds", ("bucket", "before", "after", ""), steps, right=(1, 2, 3))
    info = report["info"]
    print(f"{report['artifact']}: tuned {_tuned(info)}, where a candidate is faster by more than {100 * info['margin']:g} %"
          if report["written"] else "nothing was written")


def _needs(manifest: Mapping[str, Any], kernels: Sequence[Mapping[str, Any]]) -> str:
    if manifest["machine"] != GPU: return " ".join(manifest["isa"]) or "any CPU"
    return f"an NVIDIA GPU of {', '.join(sorted({k['arch'] for k in kernels}))}"


def listed_targets(host: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """CPUs, then GPUs with their figures, in 80 columns."""
    table(
        "targets; cpu is this machine: " + host,
        ("name", "runs here", "what it is"),
        [(r["name"], "yes" if r["runs_here"] else "no", r["description"]) for r in rows if not r["gpu"]],
    )
    gpus = [(r, r["gpu"]) for r in rows if r["gpu"]]
    table(
        "NVIDIA GPUs; peaks are dense, in TFLOP/s or TOP/s; --json has all sources",
        ("name", "arch", "SMs", "shared KiB", "L2 MiB", "GB", "GB/s", "bf16", "fp8", "int8", "fp32"),
        [(r["name"], r["isa"], g["sms"], f"{g['arch']['shared_per_sm'] >> 10}/{g['arch']['shared_per_program'] >> 10}", g["l2_bytes"] >> 20,
          f"{g['memory_bytes'] / 1e9:g}", f"{g['bandwidth_gb_s']:g}",
          *("-" if g[peak] is None else f"{g[peak]:g}" for peak in ("bf16_tflops", "fp8_tflops", "int8_tops", "fp32_tflops")))
         for r, g in gpus],
        right=(2, 3, 4, 5, 6, 7, 8, 9, 10),
    )
    print("shared: of all programs on a multiprocessor / of a single one")


def measured(report: Mapping[str, Any]) -> None:
    """A measurement."""
    machine, cold, memory = report["environment"], report["cold"], report["memory"]
    parts = (("start and import", "start_and_import_s"), ("load", "load_s"), ("first token", "first_token_s"))
    pairs(
        "machine",
        {
            "cpu": f"{machine['cpu']}, {machine['isa']}, {report['workload']['threads']} of {machine['cores']} cores",
            "settings": f"governor {machine['governor']}, huge pages {machine['huge_pages']}, load {machine['load']}",
            "pure read of the weights": f"{number(report['read_gb_s'], 1)} GB/s",
            **({"busy": "; ".join(report["findings"])} if report["findings"] else {}),
        },
    )
    decode = [
        (batch, context, number(c["tok_s"], 0), number(c["ms"], 2), number(c["share_of_read"], 2))
        for batch, d in report["decode"].items()
        for context, c in d["context"].items()
    ]
    table("decode", ("batch", "context", "tokens/s", "ms a step", "share of read"), decode, right=(0, 1, 2, 3, 4))
    table("prefill", ("prompt", "tokens/s"), [(n, number(rate, 0)) for n, rate in report["prefill"].items()], right=(0, 1))
    spreads = [
        (batch, name, *(number(1000 * d[key][p], 1) for p in ("p50", "p90", "p99")), number(d["throughput_tok_s"], 0))
        for batch, d in report["decode"].items()
        for name, key in (("first token", "ttft_s"), ("each further token", "tpot_s"), ("whole answer", "end_to_end_s"))
    ]
    table("latency, ms", ("batch", "what", "P50", "P90", "P99", "tokens/s in all"), spreads, right=(0, 2, 3, 4, 5))
    pairs(
        "start",
        {
            "fresh process to first token": f"{number(cold['total_s'], 3)} s ({report['workload']['cold_prompt']}-token prompt)",
            "of it": ", ".join(f"{part} {number(cold[key], 3)}" for part, key in parts),
            "warm": f"load {number(report['warm']['load_s'], 3)}, first token {number(report['warm']['first_token_s'], 3)}",
            "peak memory": f"{size(memory['peak_bytes'])} after the first token",
            "reserved": f"weights {size(memory['weights'])}, arena {size(memory['arena'])}",
        },
    )


def compared(report: Mapping[str, Any]) -> None:
    """Two measurements side by side."""
    rows = [
        (
            name,
            f"{r['before']:.4g}",
            f"{r['after']:.4g}",
            f"{r['ratio']:.3f}",
            "better" if r["better"] else "worse" if r["ratio"] != 1 else "",
        )
        for name, r in report["ratios"].items()
    ]
    table("second beside first", ("figure", "first", "second", "ratio", ""), rows, right=(1, 2, 3))
    if report["machine"]:
        pairs("not the same machine", {name: f"{a} -> {b}" for name, (a, b) in report["machine"].items()})
    for line in report["findings"]:
        print(f"note: {line}")


def differs(report: Mapping[str, Any]) -> None:
    """What `infc diff` found: who they are, what changed, which figures moved."""
    from .compare.budgets import change_text
    from .compare.metrics import unit_of

    print(f"A {report['a']}\nB {report['b']}\n")
    if report["differ"]:
        rows = [(name, *(_short(v) if v or v == 0 else "none" for v in pair)) for name, pair in report["differ"].items()]
        table("not the same", ("", "A", "B"), rows)
    if report["changes"]:
        rows = [(c["kind"], c["what"], f"x{c['count']}: " * (c["count"] > 1) + c["where"], c["detail"]) for c in report["changes"]]
        table("changes", ("", "what", "where", "how"), rows)
    moved = {name: m for name, m in report["metrics"].items() if m["before"] != m["after"]}
    figures = []
    for name, m in moved.items():
        if name.startswith("bench.") and not name.startswith(("bench.decode.", "bench.prefill.")): continue
        shown = ("" if v is None else size(v) if unit_of(name) == "B" else f"{v:.6g}" for v in (m["before"], m["after"]))
        change = "" if None in m.values() else change_text(m["before"], m["after"])
        figures.append((name, *shown, change, unit_of(name).replace("B", "")))
    if figures:
        table("figures that moved", ("", "A", "B", "change", ""), figures, right=(1, 2, 3))
    print(f"{len(report['metrics']) - len(moved)} figures are equal" if moved or report["changes"] else "nothing differs")
    for note in report["notes"]:
        print(f"note: {note}")


def _error(error: float | None) -> str:
    return "" if error is None else f"{error:.1e}"


def _left_out(one: Mapping[str, Any]) -> str:
    """Why a pass has no part in the result; empty for every other (artifacts of older versions do not say)."""
    return f"dropped: {one['dropped']}" if one.get("dropped") else f"skipped: {one['skipped']}" if one.get("skipped") else ""


def _why(refused: Sequence[Mapping[str, str]]) -> str:
    """The reasons of a pass's refusals, equal ones counted; --json has them all with their places."""
    counts: dict[str, int] = {}
    for refusal in refused:
        counts[refusal["reason"]] = counts.get(refusal["reason"], 0) + 1
    shown = [f"{reason} ({count}x)" if count > 1 else reason for reason, count in counts.items()]
    return "; ".join([*shown[:2], *([f"and {len(shown) - 2} more reasons"] if len(shown) > 2 else [])])
