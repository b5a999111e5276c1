"""What a check of a card found, as a table: failures, and steps of whole models from those of some of their layers."""
from collections.abc import Sequence
from typing import Any

from gpu_models import MODELS
from rich.console import Console
from rich.table import Table


def failures(report: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(part, name, why) of each row that is wrong, and of parts that found nothing."""
    found = []
    for part, content in report["parts"].items():
        for row in content["rows"]:
            if "error" in row: found.append((part, row.get("name", row.get("model", "")), row["error"]))
            elif part == "A" and not row["share"] <= 1: found.append((part, row["name"], f"error is {row['share']:.3g} of what is allowed"))
        if content["done"] and not content["rows"]: found.append((part, "nothing", "was tried: " + "; ".join(content["left_out"][:3])))
    return found


Line = tuple[str, str, str, str, str, str, str]
HEAD = ("", "what", "infc", "of the limit", "torch.compile", "eager", "")
"""The limit: in A the error that is allowed, in B the golden bound, in C the card's own rate of copies or of matrix products."""


def table(report: dict[str, Any]) -> list[list[Line]]:
    """Lines of each part."""
    parts = report["parts"]
    return [lines for part, make in (("A", _lines_a), ("B", _lines_b), ("C", _lines_c)) if part in parts and (lines := make(report))]


def _lines_a(report: dict[str, Any]) -> list[Line]:
    by_op: dict[str, list[dict[str, Any]]] = {}
    for row in report["parts"]["A"]["rows"]: by_op.setdefault(row["op"], []).append(row)
    lines: list[Line] = []
    for op, rows in sorted(by_op.items()):
        right = [row for row in rows if row.get("share", 2) <= 1]
        worst = max((row for row in rows if "share" in row), key=lambda row: row["share"], default=None)
        lines.append(("A", op, f"{len(right)} of {len(rows)}", f"{worst['share']:.2f}" if worst else "", "", "",
                      "FAILS" if len(right) < len(rows) else worst["name"].partition(" ")[2] if worst else ""))
    return lines


def _lines_b(report: dict[str, Any]) -> list[Line]:
    return [("B", row["name"], f"{row.get('buckets', 0)} buckets", f"{row['share']:.2f}" if "share" in row else "", "", "",
             "FAILS" if "error" in row else f"{row['replays']} equal replays") for row in report["parts"]["B"]["rows"]]


def _lines_c(report: dict[str, Any]) -> list[Line]:
    rates, lines = report.get("rates") or {}, list[Line]()
    for step in whole_models(report["parts"]["C"]["rows"]):
        ours, limit = step["ms"].get("infc"), ""
        if ours and "bytes" in step and rates:
            limit = f"{step['bytes'] / ours / 1e9:.2f} TB/s, {step['bytes'] / ours * 1e3 / rates['copy_bytes_s']:.0%}"
        if ours and "flops" in step and rates:
            limit = f"{step['flops'] / ours / 1e9:.0f} TFLOP/s, {step['flops'] / ours * 1e3 / rates['matmul_flops_s']:.0%}"
        peers = [f"{step['ms'][e]:.2f} ms {step['ms'][e] / ours:.2f}x" if ours and e in step["ms"] else "" for e in ("compile", "eager")]
        note = ([f"from {' and '.join(map(str, step['layers']))} layers"] if len(step["layers"]) > 1 else []) + (
            [f"host {step['host_us']:.0f} us"] if "host_us" in step else [])
        lines.append(("C", f"{step['model']}{'' if step['quant'] == 'none' else ' ' + step['quant']} {step['what']} {step['batch']} at "
                      f"{step['context']}", f"{ours:.3f} ms" if ours else "", limit, *peers, ", ".join(note)))
    for row in report["parts"]["C"]["rows"]:
        if row.get("what") != "tune" or "changed" not in row: continue
        gains = [f"{bucket.removeprefix('step_')} {us / row['after_us'][bucket]:.2f}x" for bucket, us in row["before_us"].items()]
        lines.append(("C", f"{row['model']} infc tune", f"{row['changed']} of {row['choices']}", "", "", "", ", ".join(gains)))
    return lines


def whole_models(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each step of each whole model: as measured, or from two measurements with some of its layers, on the line through both.

    ms, layer_ms and rest_ms (embedding, head, sampling) are by engine.
    """
    by_step: dict[tuple[Any, ...], dict[str, dict[int, dict[str, Any]]]] = {}
    for row in rows:
        if "ms" not in row: continue
        key = (row["model"], row["quant"], row["what"], row["batch"], row["context"])
        by_step.setdefault(key, {}).setdefault(row["engine"], {})[row["layers"]] = row
    found = []
    for (model, quant, what, batch, context), engines in by_step.items():
        sizes = MODELS[model]
        step: dict[str, Any] = {"model": model, "quant": quant, "what": what, "batch": batch, "context": context, "layers": sizes.tried,
                                "ms": {}, "layer_ms": {}, "rest_ms": {}}
        for engine, measured in engines.items():
            if any(layers not in measured for layers in sizes.tried): continue
            for name in ("ms", "bytes", "flops"):
                if name not in measured[sizes.tried[0]]: continue
                whole, layer, rest = _line(sizes, {layers: measured[layers][name] for layers in sizes.tried})
                if name != "ms": step[name] = whole
                else: step["ms"][engine], step["layer_ms"][engine], step["rest_ms"][engine] = whole, layer, rest
            if "host_us" in measured[sizes.tried[0]]: step["host_us"] = measured[sizes.tried[-1]]["host_us"]
        if step["ms"]: found.append(step)
    order = {name: at for at, name in enumerate(MODELS)}
    return sorted(found, key=lambda s: (order[s["model"]], s["quant"] != "none", s["quant"], s["what"], s["context"], s["batch"]))


def _line(sizes: Any, measured: dict[int, float]) -> tuple[float, float | None, float | None]:
    """(of the whole model, of a layer, of the rest), from as many layers as were tried."""
    if len(measured) == 1: return next(iter(measured.values())), None, None
    (few, low), (many, high) = sorted(measured.items())
    layer = (high - low) / (many - few)
    return low + (sizes.layers - few) * layer, layer, low - few * layer


def show(report: dict[str, Any], width: int = 118) -> None:
    """The table, and below it what is wrong, what the peers died of and what there was no time for."""
    console = Console(width=width, highlight=False, markup=False)
    drawn = Table(*HEAD, title=", ".join(filter(None, (report["card"]["name"], report["environment"].get("driver"), _rates(report)))),
                  box=None, pad_edge=False, title_justify="left")
    drawn.columns[1].no_wrap = True
    for lines in table(report):
        for line in lines: drawn.add_row(*line)
        drawn.add_section()
    console.print(drawn)
    peers = [("C", row["name"], row["peer_error"]) for row in report["parts"].get("C", {"rows": []})["rows"] if "peer_error" in row]
    for part, name, why in failures(report) + peers: console.print(f"{part}: {name}: {_last(why)}")
    for part, content in report["parts"].items():
        if content["left_out"]: console.print(f"{part}: no time for {'; '.join(content['left_out'])}")


def _rates(report: dict[str, Any]) -> str:
    rates = report["rates"]
    return f"copies {rates['copy_bytes_s'] / 1e12:.2f} TB/s, products {rates['matmul_flops_s'] / 1e12:.0f} TFLOP/s" if rates else ""


def _last(text: str) -> str:
    """What an exception says, of a text that ends with it."""
    lines = text.strip().splitlines() or [""]
    start = next((i for i in range(len(lines) - 1, -1, -1) if lines[i].startswith(("  File ", "    "))), -1)
    return "\n".join(lines[start + 1:] or lines[-1:])
