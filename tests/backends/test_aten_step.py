"""ATen steps: arguments survive their JSON form, results land in the buffers, and none goes uncounted."""
import subprocess
import sys

import pytest
import torch
from golden import trace
from infc.backends import aten as aten_backend
from infc.backends.launch import Context, Out
from infc.backends.loops import DTYPES
from infc.compiler.errors import CheckFailed
from infc.compiler.placement import place
from infc.runtime import aten_step
from infc.runtime.aten_step import View
from torch import Tensor

CONTEXT = Context("portable", {"T": 16, "N": 4})


def view(t: Tensor) -> View:
    return View(t.data_ptr(), DTYPES[t.dtype], tuple(t.shape))


def replay(fn, *inputs: Tensor, dynamic=(), live: tuple[Tensor, ...] = (), dims: dict[str, int] | None = None):
    """Lower the single call of `fn`, and run it as a step on `live` (or the traced) inputs: (found, expected)."""
    graph = trace(fn, *inputs, dynamic=dynamic)
    call, = (n for n in graph.nodes if isinstance(n.target, torch._ops.OpOverload) and isinstance(n.meta["val"], (Tensor, tuple, list)))
    context = Context("portable", {"T": 16}, graph.symbols)
    assert aten_backend.refuse(call, context) is None
    step = aten_backend.lower(call, context)
    given = dict(zip(graph.inputs, live or inputs, strict=True)) | graph.weights
    expected = fn(*(live or inputs))
    expected = expected if isinstance(expected, tuple) else (expected,)
    buffers = [torch.full_like(e, 7).contiguous() for e in expected]
    read = [given[a.name].contiguous() for a in step.args if not isinstance(a, Out)]
    aten_step.run(step.symbol, [view(t) for t in read], [view(b) for b in buffers], dims or {})
    return buffers, expected


@pytest.mark.parametrize("fn", [
    lambda x: torch.ops.aten.topk.default(x, 3),
    lambda x: torch.cumsum(x, -1),
    lambda x: torch.ops.aten.sort.stable(x, stable=True, dim=1, descending=True),
    lambda x: torch.ops.aten.clamp.default(x, -float("inf"), 0.5),
    lambda x: torch.ops.aten.sum.dim_IntList(x, [0], dtype=torch.float64),
], ids=["topk", "cumsum", "sort", "inf", "dtype"])
def test_results_equal_eager(fn):
    for found, expected in zip(*replay(fn, torch.randn(5, 7)), strict=True):
        assert torch.equal(found, expected)


def test_live_sizes_are_read_at_run_time():
    found, expected = replay(lambda x: torch.ops.aten.new_full.default(x, [x.shape[0], 2], 3), torch.randn(5, 7),
                             dynamic=({0: "T"},), live=(torch.randn(9, 7),), dims={"T": 9})
    assert torch.equal(found[0], expected[0])


def test_an_empty_tensor_has_no_address():
    found, expected = replay(lambda x: torch.cumsum(x, -1), torch.randn(5, 7),
                             dynamic=({0: "T"},), live=(torch.randn(0, 7),), dims={"T": 0})
    assert found[0].shape == expected[0].shape


def test_refuses_what_no_step_can_call():
    graph = trace(lambda x: torch.bernoulli(x), torch.rand(3))
    call, = (n for n in graph.nodes if n.op == "call_function")
    assert "random" in (aten_backend.refuse(call, CONTEXT) or "")
    assert "no ATen operator" in (aten_backend.refuse(graph.placeholders["x"], CONTEXT) or "")


def test_every_fallback_is_counted_and_strict_names_it():
    graph = trace(lambda x: (torch.cumsum(x, -1), torch.cumsum(x, 0)), torch.randn(3, 4))
    placement = place(graph, [aten_backend.Aten()], Context("portable", {}))
    found = aten_backend.coverage(placement)
    assert found.aten_steps == found.steps == 2 and found.operators == {"aten.cumsum.default": 2}
    with pytest.raises(CheckFailed, match=r"2 x aten\.cumsum\.default"):
        aten_backend.check_strict(found)
    aten_backend.check_strict(aten_backend.Coverage(5, 0))


def test_the_runtime_does_not_import_torch_for_it():
    code = "import sys, infc.runtime.aten_step; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
