"""The dump of a compile: every stage of the graph as text, data and a program a person can run; then the lowered programs.

    DIR/00-captured.txt .json .py     the graph as captured; then NN-PASS.* for every pass that changed something
    DIR/passes.txt .json              all passes: fired, refused and why, error, seconds, and the stage's file
    DIR/weights/  samples/            one safetensors file per distinct tensor: stages share what they have in common
    DIR/program-step_T16.txt .json    a bucket's buffers with places and lifetimes, and its steps
    DIR/kernels.cpp  kernels.s        generated source; assembly if asked for

A file is written aside and renamed, and a stage's .py last: what is there is whole, whenever a compile stops.
"""
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..frontends.samples import DecoderSamples
from ..graph_json import graph_json
from ..ir import DTYPE_NAMES, Graph, text
from ..verification import step_sample
from .dump_files import Tensors, write_json, write_whole
from .dump_truth import Capture
from .python_text import function_text

STEP_INPUTS = {"input_ids", "positions", "slots", "query_start", "context_len", "block_table", "sample_rows", "temperature", "top_k",
               "top_p", "uniform"}  # fmt: skip
"""What a step graph may take besides caches: what `step_sample` makes."""

_STAGE = '''"""{title}

Run this file: it loads its weights from weights/, runs the dump's sample inputs, and prints its error against the capture.
"""
import math
import operator

import torch
from infc.compiler.dump.stage import main

aten, infc = torch.ops.aten, torch.ops.infc


{function}

if __name__ == "__main__":
    raise SystemExit(main(forward, __file__))
'''


class Dump:
    """Writes the stages of one pipeline run. `passes`: the names of all passes, in order; `graph`: as captured."""

    def __init__(self, folder: Path, graph: Graph, passes: Sequence[str]):
        self.folder, self.capture, self.approximate = folder, Capture(graph.copy()), ""
        self.weights, self.samples = Tensors(folder / "weights"), Tensors(folder / "samples")
        self.rows: list[dict[str, Any]] = [{"number": 0, "name": "captured", "ran": True},
                                           *({"number": i, "name": name, "ran": False} for i, name in enumerate(passes, 1))]
        self._stage(0, graph, "the graph as captured")
        self._tables()

    def add(self, number: int, graph: Graph, result: Mapping[str, Any]) -> None:
        """Pass `number` ran: its row (PassResult.json), and the files of the graph if it changed anything."""
        self.rows[number] |= {"ran": True, **result}
        if result["fired"]:
            if result["contract"] == "approximate":
                self.approximate = result["name"]
            self._stage(number, graph, f"after {result['name']}, which fired {result['fired']} times and is {result['contract']}")
        self._tables()

    def _stage(self, number: int, graph: Graph, what: str) -> None:
        row = self.rows[number]
        path = self.folder / f"{number:02d}-{row['name']}.json"
        weights = self.weights.add(graph.weights)
        for name, exact in self.weights.add(graph.exact).items():
            weights[name]["exact_sha256"] = exact["sha256"]
        told, why_not = self._run(graph)
        write_whole(path.with_suffix(".txt"), text(graph))
        write_json(path, {"number": number, "name": row["name"], **graph_json(graph), "weights": weights, "run": told})
        row |= {"file": path.stem, "program": why_not or path.with_suffix(".py").name}
        if told:
            title = f"Stage {path.stem}: {what}."
            write_whole(path.with_suffix(".py"), _STAGE.format(title=title, function=function_text(graph)))

    def _run(self, graph: Graph) -> tuple[dict[str, Any] | None, str]:
        """What the stage runs on and is measured by; or None and why it cannot be run."""
        capture = self.capture
        if not capture.sample:
            return None, "no program: the captured graph has no sample inputs"
        shared = {name: capture.truth[name] for name in graph.outputs if name in capture.truth}
        if not shared:
            return None, f"no program: none of its outputs ({', '.join(graph.outputs)}) is one of the capture's"
        given, caches = capture.sample, ()
        if graph.inputs != capture.graph.inputs or graph.kv:
            if not isinstance(capture.graph.sample_inputs, DecoderSamples) or not STEP_INPUTS.issuperset(graph.inputs):
                return None, f"no program: its inputs ({', '.join(graph.inputs)}) are not those of the capture"
            ids = capture.sample[0][0]
            sample = step_sample(graph, ids, range(len(ids)))
            given, caches = sample[: len(graph.inputs)], sample[len(graph.inputs):]
        return {
            "sample": capture.sample_text, "inputs": self.samples.add(dict(zip(graph.inputs, given, strict=True))),
            "kv": {name: {"dtype": DTYPE_NAMES[t.dtype], "shape": list(t.shape)} for name, t in zip(graph.kv, caches, strict=True)},
            "truth": self.samples.add(shared), "bounds": capture.bounds(graph, self.approximate),
        }, ""

    def _tables(self) -> None:
        stored = {"files": len(self.weights.known), "bytes": sum(self.weights.known.values())}
        write_json(self.folder / "passes.json", {"passes": self.rows, "weights": stored})
        write_whole(self.folder / "passes.txt", _table_text(self.rows, stored))


def _table_text(rows: Sequence[Mapping[str, Any]], stored: Mapping[str, int]) -> str:
    lines = [f"{'':2} {'pass':24} {'fired':>6} {'refused':>8} {'contract':>12} {'error':>9} {'s':>7} {'check s':>8}  files"]
    for row in rows:
        if not row["ran"]:
            lines.append(f"{row['number']:2d} {row['name']:24} not run")
            continue
        error = "" if row.get("error") is None else f"{row['error']:.1e}"
        seconds = "".join(f" {row[key]:{width}.2f}" if key in row else "" for key, width in (("seconds", 7), ("check_seconds", 8)))
        files = row.get("file", "") + (f" ({row['program']})" if row.get("program", "").startswith("no ") else "")
        files += "".join(f"{word}: {row[word]}" for word in ("dropped", "skipped") if row.get(word))
        lines.append(f"{row['number']:2d} {row['name']:24} {row.get('fired', ''):>6} {len(row['refused']) if 'refused' in row else '':>8} "
                     f"{row.get('contract', ''):>12} {error:>9}{seconds:17}  {files}".rstrip())
    refused = [f"{row['number']:2d} {row['name']} at {r['site']}: {r['reason']}" for row in rows for r in row.get("refused", ())]
    if refused:
        lines += ["", "refused", *refused]
    lines += ["", f"weights/: {stored['files']} distinct tensors, {stored['bytes'] / 1e6:.1f} MB; stages share what they have in common"]
    return "\n".join(lines) + "\n"
