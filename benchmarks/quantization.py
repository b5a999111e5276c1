"""What each quantization costs in quality, on text that no scale was chosen on.

    python benchmarks/quantization.py [--model smollm2|minilm] [--only TEXT] [--reference FILE]

smollm2: perplexity and KL to fp32 of next-token distributions, over 4,320 tokens of models/text/heldout.txt. Its weights were published
as Q4_1 (4 bits, group 32, an offset): w4:asym finds them again and says nothing of quality; the other formats do.
minilm: a sentence encoder with fp32 weights: cosine to its fp32 vectors, and whether pairs of sentences keep their order.

Graphs run in eager PyTorch with the reference operators: weights as their codes mean them, activations rounded as the kernels round
them, everything else in fp32. Rows go into results/quantization.json as they are there; a row that is there is replaced. quantize_s is
null where other jobs ran beside it.
"""
import argparse
import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from infc import passes
from infc.compiler.frontends import capture
from infc.compiler.ir import Graph
from infc.compiler.ops import infc
from infc.compiler.pipeline import run_pipeline
from infc.compiler.quality.evaluate import StepEvaluator
from infc.compiler.quality.metrics import Comparison
from infc.compiler.quality.text import CALIBRATION, HELD_OUT, windows
from infc.compiler.quant.kv import parse_kv
from infc.compiler.quant.plan import METHODS, Plan
from infc.compiler.quant.scheme import parse
from infc.compiler.rewrite import Report
from infc.runtime.environment import environment
from rich.console import Console
from rich.table import Table
from torch import Tensor, fx

RESULTS = Path(__file__).parent / "results" / "quantization.json"
WINDOWS, LENGTH, FIRST = 9, 512, 32
"""Held-out windows, tokens of each, and the first that is scored."""

SENTENCES = 160
ROWS = {
    "smollm2": [("fp32", ""), ("bf16", ""), ("fp32", "", "int8"), ("fp32", "", "int8:keep=2"), ("fp32", "", "fp8"),
                ("w8", "rtn"), ("w8", "rtn", "int8"), ("w8:g128", "rtn"), ("w8:channel", "rtn"), ("w8a8", "rtn"), ("w8a8", "smooth"),
                ("w8a8:token", "rtn"), ("w8a8:token", "smooth"), ("fp8", "rtn"), ("fp8", "mse"), ("fp8:tensor", "rtn"),
                ("fp8:g128", "rtn"), ("fp8a8", "rtn"), ("fp8a8:tensor", "rtn"), ("w4:asym", "rtn"),
                *((scheme, method) for scheme in ("w4", "w4:g128", "w4:g128:asym") for method in ("rtn", "mse", "awq", "gptq")),
                ("w4a8", "rtn"), ("w4", "tuned"), ("w4a8", "gptq")],
    "minilm": [("fp32", ""), ("w8", "rtn"), ("w8a8", "rtn"), ("w8a8:token", "rtn"),
               *((scheme, method) for scheme in ("w4", "w4:asym", "w4:g128", "w4:g128:asym") for method in ("rtn", "mse", "awq", "gptq")),
               ("w4a8", "gptq")],
}  # fmt: skip


@dataclass(frozen=True)
class Bench:
    """A model, how it is measured, and the text its scales are chosen on."""

    graph: Graph
    calibration: Any
    measure: Callable[[Graph], dict[str, float]]
    columns: dict[str, str]            # figure -> how it is printed


def smollm2(reference: Path | None) -> Bench:
    graph = capture("smollm2")
    before = passes.PIPELINE[: passes.PIPELINE.index("smooth_channels")]
    run_pipeline(graph, [passes.load(name) for name in before], check="off", options={"max_sequences": 16})
    text = windows(HELD_OUT, graph.meta["tokenizer_json"], "smollm2", graph.meta["vocab_size"], count=WINDOWS, length=LENGTH).windows
    truth = torch.load(reference) if reference and reference.is_file() else [_logits(graph, ids) for ids in text]
    if reference: torch.save(truth, reference)

    def measure(changed: Graph) -> dict[str, float]:
        found, kept = Comparison(), dict[fx.Node, Tensor]()
        for ids, expected in zip(text, truth, strict=True): found.add(_logits(changed, ids, kept), ids[FIRST + 1 :], expected)
        figures = found.figures()
        more = torch.cat(found.loss) - torch.cat(found.reference_loss)
        return {"tokens": figures.tokens, "ppl": figures.ppl, "more_ppl": float(more.mean().expm1()),
                "more_ppl_error": float(more.std()) / len(more) ** 0.5, "kl": figures.kl or 0.0, "kl_p99": figures.kl_p99 or 0.0,
                "top1": figures.top1 or 0.0}

    return Bench(graph, CALIBRATION, measure, {"ppl": "{:.3f}", "more_ppl": "{:+.2%}", "more_ppl_error": "{:.2%}", "kl": "{:.5f}",
                                               "kl_p99": "{:.4f}", "top1": "{:.1%}"})


def _logits(graph: Graph, ids: list[int], kept: dict[fx.Node, Tensor] | None = None) -> Tensor:
    """Logits after the tokens from FIRST on, but the last. kept: weights that were dequantized before."""
    def call(node: fx.Node, args: tuple, kwargs: dict) -> Any:
        if kept is None or node.target is not infc.dequantize.default: return node.target(*args, **kwargs)     # type: ignore[operator]
        if node not in kept: kept[node] = node.target(*args, **kwargs)
        return kept[node]

    return StepEvaluator(graph).logits(ids, first=FIRST, call=call)[:-1]


def minilm(reference: Path | None) -> Bench:
    import minilm as model

    sentences, tokenizer = model.module()
    graph = model.graph(sentences)
    held_out = model.batches(tokenizer, model.split(HELD_OUT, SENTENCES))
    with torch.no_grad(): truth = torch.cat([sentences(*batch) for batch in held_out])

    def measure(changed: Graph) -> dict[str, float]:
        found = torch.cat([changed.run(*batch)[0] for batch in held_out])
        cosines = (found * truth).sum(1)
        pairs = torch.triu_indices(SENTENCES, SENTENCES, 1)
        ours, theirs = (t @ t.T for t in (found, truth))
        nearest = [(similar - 2 * torch.eye(SENTENCES)).argmax(1) for similar in (ours, theirs)]
        return {"sentences": SENTENCES, "cosine": float(cosines.mean()), "worst_cosine": float(cosines.min()),
                "spearman": spearman(ours[*pairs], theirs[*pairs]), "same_nearest": float((nearest[0] == nearest[1]).float().mean())}

    return Bench(graph, model.batches(tokenizer, model.split(CALIBRATION, SENTENCES)), measure,
                 {"cosine": "{:.5f}", "worst_cosine": "{:.5f}", "spearman": "{:.5f}", "same_nearest": "{:.1%}"})


def spearman(a: Tensor, b: Tensor) -> float:
    """Rank correlation of two lists without ties."""
    ranks = torch.stack([t.argsort().argsort().double() for t in (a, b)])
    return float(torch.corrcoef(ranks)[0, 1])


def row(bench: Bench, scheme: str, method: str, kv: str = "none") -> dict[str, Any]:
    """One format's figures."""
    graph, start = bench.graph.copy(), time.perf_counter()
    if scheme == "bf16": passes.load("narrow_dtype").apply(graph, Report("narrow_dtype", options={"dtype": "bf16"}))
    elif scheme != "fp32":
        asked = parse(scheme)
        assert asked is not None
        options = {"quantization": Plan(asked, method, bench.calibration)}
        for name in ("smooth_channels", "quantize_weights", "quantize_activations"):
            passes.load(name).apply(graph, Report(name, options=options))
    passes.load("quantize_kv").apply(graph, Report("quantize_kv", options={"kv": parse_kv(kv)}))
    spent = time.perf_counter() - start
    return {"scheme": scheme, "method": method, "kv": kv, "bits": bits(graph), "quantize_s": round(spent, 1), **bench.measure(graph)}


def bits(graph: Graph) -> float:
    """Stored bits of a value of the model's matrices, scales and offsets counted."""
    stored = values = 0
    for node in graph.nodes:
        tensor = graph.weight(node)
        if tensor is not None and (tensor.dim() == 2 and any(user.target is not infc.dequantize.default for user in node.users)):
            stored, values = stored + 8 * tensor.nbytes, values + tensor.numel()
        elif node.target is infc.dequantize.default:
            parts = [graph.weights[str(part.target)] for part in node.args[:3] if isinstance(part, fx.Node)]
            stored, values = stored + 8 * sum(part.nbytes for part in parts), values + node.meta["val"].numel()
    return stored / values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=ROWS, default="smollm2")
    parser.add_argument("--only", help="rows, with commas between them: SCHEME, SCHEME METHOD or SCHEME METHOD KV, like w8,w4:g128 gptq")
    parser.add_argument("--reference", type=Path, help="keep the reference's logits in this file, and take them from there")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    bench = {"smollm2": smollm2, "minilm": minilm}[options.model](options.reference)
    only = options.only.split(",") if options.only else [scheme for scheme, *_ in ROWS[options.model]]
    for asked in [r for r in ROWS[options.model] if r[0] in only or " ".join(r) in only]:
        keep(options.output, options.model, row(bench, *asked))
        show(options.output, options.model, bench.columns)


def keep(path: Path, model: str, found: dict[str, Any]) -> None:
    """Put a row into the file, in the order of ROWS, in place of an older one."""
    data = json.loads(path.read_text()) if path.is_file() else {"format": 1, "models": {}}
    rows = [r for r in data["models"].get(model, []) if named(r) != named(found)] + [found]
    place = {(*name, "none")[:3]: i for i, name in enumerate(ROWS[model])}
    data["models"][model] = sorted(rows, key=lambda r: place.get(named(r), len(place)))
    data["environment"] = environment() | {"torch": torch.__version__}
    data["text"] = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in (CALIBRATION, HELD_OUT)}
    data["methods"] = {name: method.about for name, method in METHODS.items()}
    path.write_text(json.dumps(data, indent=1) + "\n")


def named(found: dict[str, Any]) -> tuple[str, str, str]:
    """What tells a row from others; those of an older file have no KV column, and a wide KV."""
    return found["scheme"], found["method"], found.get("kv", "none")


def show(path: Path, model: str, columns: dict[str, str]) -> None:
    table = Table("scheme", "method", "kv", "bits", *columns, title=model)
    for found in json.loads(path.read_text())["models"][model]:
        figures = [form.format(found[name]) for name, form in columns.items()]
        table.add_row(*named(found), f"{found['bits']:.2f}", *figures)
    Console().print(table)


if __name__ == "__main__":
    main()
