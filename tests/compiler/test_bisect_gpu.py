"""infc bisect for a GPU that is not there: passes and programs on reference operators, kernels where they are interpreted."""
import importlib
from dataclasses import replace
from typing import Any

import pytest
from triton_env import kernels  # first: kernels of this process are interpreted

from decoders import llama  # isort: skip
from infc.backends.triton import interpret
from infc.compiler import bisect, driver
from infc.compiler.errors import UserError
from infc.compiler.frontends import capture
from infc.compiler.ir import Graph
from infc.passes import fuse_rms_norm
from planted import spoil
from tiny_artifact import infc as command_line

OPTIONS = driver.Options(target="h100", dtype="fp32", check="off", buckets=(16,), max_sequences=2)


@pytest.fixture(scope="module")
def graph() -> Graph:
    return capture(llama(layers=1, max_positions=32))


@pytest.fixture
def compiled_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that interprets no kernel."""
    monkeypatch.setattr(importlib.import_module("infc.backends.triton.device"), "interprets", lambda: False)
    assert interpret.interprets()


@pytest.mark.slow
def test_a_bad_kernel_is_named(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    """The norm before the MLP gets another eps; a call of several launches stands before it."""
    right = kernels()["infc::rms_norm"]

    def lower(emit: Any, *tensors: Any, eps: float, **more: Any) -> None: right.lower(emit, *tensors, eps=eps + 0.3, **more)

    monkeypatch.setitem(kernels(), "infc::rms_norm", replace(right, lower=lower))
    found = bisect.bisect(graph, options=OPTIONS)
    assert (found.fault, found.op, found.bucket) == ("kernel", "infc.rms_norm", "step_T16")
    assert found.site.startswith("model.layers.0.input_layernorm [llama.py:") and found.error is not None and found.error > 0.05


def test_without_kernels_it_judges_passes_and_program(graph: Graph, compiled_only: None) -> None:
    found = bisect.bisect(graph, options=OPTIONS)
    assert (found.fault, found.runs) == ("none", 2)
    assert "its program on reference operators within" in found.line and "TRITON_INTERPRET=1" in found.line


def test_a_bad_memory_plan_is_the_programs_fault(graph: Graph, compiled_only: None, monkeypatch: pytest.MonkeyPatch) -> None:
    program = importlib.import_module("infc.backends.program")

    def overlapping(spots: list[Any]) -> int:
        for spot in spots: spot.offset = 0
        return max(spot.bytes for spot in spots)

    monkeypatch.setattr(program, "_pack_arena", overlapping)
    for name in [n for n in vars(program) if n in ("check_arena", "_check_arena")]: monkeypatch.setattr(program, name, lambda *args: None)
    found = bisect.bisect(graph, options=OPTIONS)
    assert found.fault == "program" and "buffers overlap" in found.line


def test_the_command_line_takes_a_target(monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, fuse_rms_norm, lambda graph, node: node.update_arg(2, 1e-3))
    done = command_line("bisect", "random:tiny?layers=1", "--target", "h100", "--dtype", "fp16", "--quiet")
    assert done.returncode == 1 and "fuse_rms_norm at model.layers.0.input_layernorm" in done.stdout


def test_options_are_checked_first(graph: Graph) -> None:
    with pytest.raises(UserError, match="--dtype fp16: no kernel of the target cpu"):
        bisect.bisect(graph, options=driver.Options(dtype="fp16"))
