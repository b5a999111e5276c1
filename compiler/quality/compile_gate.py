"""The gate of one compile: reads its data before the passes run, looks at weights before they are quantized, judges what was written."""
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...runtime.manifest import QualityInfo
from ..errors import UserError
from ..ir import Graph
from . import gate, limits, text
from .evaluate import ArtifactEvaluator, CapturedEvaluator, Runnable, StepEvaluator
from .layers import Probe, bits_per_weight, layers, probes

Note = Callable[[str], object]


def check_options(quantized: bool, data: Path | None, quality: str | None, unverified: bool) -> None:
    """UserError for what contradicts itself, does nothing, or cannot be read: before anything is captured."""
    if unverified and (data is not None or quality is not None):
        other = "--data" if data is not None else "--quality"
        raise UserError(f"--unverified measures nothing, and {other} asks to: leave one of them out")
    if unverified and not quantized:
        raise UserError("--unverified goes on without measuring a quantized model, and nothing is quantized: leave it out")
    if quality is not None:
        limits.parse(quality)
        if not quantized and data is None:
            raise UserError("--quality limits what a quantized model may lose, and nothing is quantized: add --quant, or --data to measure")
    if data is not None: text.read(data)


class Gate:
    """Quality of one compile beside the model as captured."""

    def __init__(self, captured: Graph, data: Path | None, quality: str | None, note: Note):
        """UserError where the data cannot be read or there is none to read."""
        self.captured, self.note = captured, note
        self.limits = limits.parse(quality or limits.DEFAULT)
        self.data = gate.read_data(data, captured.meta.get("tokenizer_json"), model_of(captured), gate.GATE)
        self.probes: dict[str, Probe] = {}

    def look(self, wide: Graph) -> None:
        """Keep what each weight makes of its inputs, while it is wide."""
        self.probes = probes(wide, self.data.windows[0])

    def judge(self, graph: Graph, artifact: Runnable | None, why: str) -> dict[str, Any]:
        """All figures, and a row for each weight. CheckFailed where a limit does not hold.

        artifact: what was written, loaded; None where it cannot run here: then its graph runs in eager PyTorch, and `why` is said.
        """
        ours = StepEvaluator(graph) if artifact is None else ArtifactEvaluator(artifact)
        found = gate.measure(ours, CapturedEvaluator(self.captured), self.data, gate.GATE, int(self.captured.meta["max_positions"]),
                             generate=ours.generate if isinstance(ours, ArtifactEvaluator) else None, note=self.note)
        every = layers(graph, self.probes)
        held = gate.judge(found, self.limits, every)
        return {"verified": True, "by": "the artifact" if artifact is not None else f"its graph in eager PyTorch: {why}",
                "limits": ",".join(map(str, held)), **found, "bits_per_weight": bits_per_weight(every),
                "layers": [layer.json() for layer in every]}


def unverified(graph: Graph) -> dict[str, Any]:
    """What is said of a compile that went on without a measurement."""
    every = layers(graph, {})
    return {"verified": False, "bits_per_weight": bits_per_weight(every), "layers": [layer.json() for layer in every]}


def info(found: dict[str, Any]) -> QualityInfo:
    """What the manifest says of it."""
    names = [name for name in QualityInfo.__struct_fields__ if name in found]
    return QualityInfo(**{name: found[name] for name in names})


def model_of(captured: Graph) -> gate.Model:
    """What a measurement must know of the model."""
    meta = captured.meta
    return gate.Model(str(meta["name"]), int(meta["vocab_size"]), int(meta["max_positions"]))
