"""Run a model up to the gate that stops it, and say which one did."""
import functools
import tempfile
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

from infc import passes
from infc.compiler.errors import CheckFailed
from infc.compiler.ir import Graph
from infc.compiler.pipeline import PipelineReport, run_pipeline
from infc.compiler.quant.kv import parse_kv
from infc.compiler.quant.plan import Plan
from infc.compiler.quant.scheme import parse
from infc.compiler.rewrite import AnyPass
from infc.compiler.verification import Golden, golden
from infc.runtime.errors import RuntimeFault
from infc.runtime.golden import replay
from infc.runtime.session import load
from mutations import models
from mutations.plant import toolchain

BUCKETS = (1, 16, 64)


@dataclass(frozen=True)
class Precision:
    """A fault's `dtype`: fp32, bf16, or, over bf16, a scheme of compiler.quant.scheme (behind "gpu ": as passes for a GPU have it; behind
    "many ": its products are of bf16 from 24 rows on) or "kv int8"."""

    text: str

    @property
    def quant(self) -> str:
        return "none" if self.text in ("fp32", "bf16", "kv int8") else self.text.removeprefix("gpu ").removeprefix("many ")

    @property
    def kv(self) -> str:
        return self.text.removeprefix("kv ") if self.text.startswith("kv ") else "none"

    @property
    def dtype(self) -> str:
        return "fp32" if self.text == "fp32" else "bf16"

    def passes(self) -> list[AnyPass]:
        """The pipeline of a compile."""
        return passes.pipeline(self.dtype, self.quant != "none", self.kv != "none")

    def options(self) -> dict[str, Any]:
        """What its passes may read."""
        scheme = parse(self.quant)
        return {"max_sequences": 16, "dtype": self.dtype, "kv": parse_kv(self.kv), "quantization": Plan(scheme, "rtn") if scheme else None,
                "norm_codes": self.text.startswith("gpu "), "bf16_rows": {16: 24} if self.text.startswith("many ") else {}}


VERIFY, CONTRACT, CHECK, GRAPH, PLAN, REPLAY, RUNTIME = (
    "verify", "contract", "pass's own check", "golden, graph", "memory plan", "golden, replay", "runtime check")


@dataclass(frozen=True)
class Caught:
    """The gate that stopped a fault, and the line a user reads."""

    gate: str
    message: str


def stop(error: CheckFailed | RuntimeFault) -> Caught:
    """Which gate raised: read off where in our source it was raised."""
    while isinstance(error.__cause__, CheckFailed | RuntimeFault): error = error.__cause__
    frames = [("/".join(Path(f.filename).parts[-2:]), f.name) for f in traceback.extract_tb(error.__traceback__)]
    files = {file for file, _ in frames}
    message = getattr(error, "message", None) or str(error)
    if isinstance(error, RuntimeFault): gate = RUNTIME
    elif ("compiler/replays.py", "replay_here") in frames: gate = REPLAY
    elif "compiler/verification.py" in files: gate = GRAPH
    elif "backends/program.py" in files: gate = PLAN
    elif any(file.startswith("passes/") and name == "check" for file, name in frames): gate = CHECK
    elif "compiler/ir.py" in files: gate = VERIFY
    else: gate = CONTRACT
    return Caught(gate, message)


# ------------------------------------------------------------------------------------------------------------- the graph

@functools.cache
def _before(model: str, index: int, dtype: str) -> Graph:
    """The model's graph as pass number `index` finds it, from passes without a fault."""
    if index == 0: return models.captured(model)
    graph, precision = _before(model, index - 1, dtype).copy(), Precision(dtype)
    run_pipeline(graph, [_alone(precision.passes()[index - 1])], check="off", options=precision.options(), allow="approximate")
    return graph


def _alone(one: AnyPass) -> AnyPass:
    """Without what it requires: the passes before it ran elsewhere."""
    return replace(one, requires=()) if one.requires else one


def first(name: str, dtype: str) -> int:
    """Where in the pipeline a pass of this name stands first; its start for anything else."""
    names = [one.name for one in Precision(dtype).passes()]
    return names.index(name) if name in names else 0


def prepare(model: str, index: int, dtype: str) -> None:
    """Run the passes before number `index` now, while they have no fault; what they give is kept."""
    _before(model, index, dtype)


def run_graph(model: str, index: int, dtype: str = "fp32") -> Caught | None:
    """What stops the passes from number `index` on, checked as a compile checks them. Call `prepare` before the fault is planted."""
    graph, precision = _before(model, index, dtype).copy(), Precision(dtype)
    try:
        run_pipeline(graph, [_alone(one) for one in precision.passes()[index:]], check="fast", options=precision.options(),
                     allow="approximate")
    except CheckFailed as error:
        return stop(error)
    return None


# ----------------------------------------------------------------------------------------------------------- the compile

@functools.cache
def _optimized(model: str, dtype: str) -> tuple[Graph, PipelineReport, Golden]:
    """Graph, pass report and golden cases, computed once a model: no fault behind the passes changes them."""
    captured = models.captured(model)
    graph, precision = captured.copy(), Precision(dtype)
    report = run_pipeline(graph, precision.passes(), check="off", options=precision.options(), allow="approximate")
    return graph, report, golden(captured, graph, BUCKETS)


def compile_model(model: str, folder: Path, dtype: str = "fp32") -> Path:
    """A compile of one of our models from its optimized graph on, golden replay included. Raises CheckFailed as `infc compile` does.

    The C++ compiler is told -O1: whether a gate sees a fault does not depend on speed.
    """
    from infc.compiler import driver

    graph, report, cases = _optimized(model, dtype)
    precision = Precision(dtype)
    options = driver.Options(
        dtype=precision.dtype, quant=precision.quant, kv_quant=precision.kv, unverified=dtype not in ("fp32", "bf16"), check="off",
        reuse=False, buckets=BUCKETS)

    def rewrite(given: Graph, *_: object) -> PipelineReport:
        given.restore(graph.copy())
        return report

    with mock.patch.object(driver, "_run_passes", rewrite), mock.patch.object(driver.verification, "golden", lambda *_: cases), \
         mock.patch.object(toolchain, "COMMON", tuple("-O1" if flag == "-O3" else flag for flag in toolchain.COMMON)):
        return driver.compile(models.captured(model).copy(), folder / "model.infc", options=options).artifact


def run_compile(model: str, dtype: str = "fp32") -> Caught | None:
    """What stops a compile behind its passes. Call `prepare_compile` before the fault is planted."""
    with tempfile.TemporaryDirectory(prefix="infc-mutation-") as folder:
        try:
            compile_model(model, Path(folder), dtype)
        except (CheckFailed, RuntimeFault) as error:
            return stop(error)
    return None


def prepare_compile(model: str, dtype: str) -> None:
    """Run the passes now, while there is no fault."""
    _optimized(model, dtype)


@functools.cache
def artifact(model: str) -> tuple[tempfile.TemporaryDirectory, Path]:
    """A model compiled without a fault, and the folder that holds it."""
    folder = tempfile.TemporaryDirectory(prefix="infc-mutation-")
    return folder, compile_model(model, Path(folder.name))


def run_verify(model: str) -> Caught | None:
    """What `infc verify` says of that artifact; the fault is in the runtime. Call `artifact` before it is planted."""
    try:
        with load(artifact(model)[1]) as loaded:
            report = replay(loaded)
    except RuntimeFault as error:
        return stop(error)
    return None if report.passed else Caught(REPLAY, f"logits differ by {report.error:.3g}, bound {report.bound:.3g}; "
                                                     f"{report.wrong_tokens} tokens are not what their logits give")
