"""Golden cases: a bound is worth something only where the model itself has an answer."""
import pytest
import torch
from infc import passes
from infc.compiler.errors import CheckFailed
from infc.compiler.frontends import capture, load
from infc.compiler.pipeline import run_pipeline
from infc.compiler.verification import SHORT, golden, lengths


def step_graph(captured):
    graph = captured.copy()
    run_pipeline(graph, passes.pipeline("fp32"), allow="exact", check="off", options={"dtype": "fp32"})
    return graph


def test_the_longest_case_needs_the_largest_bucket():
    assert max(lengths((1, 16, 128, 512), 8192)) > 128
    assert lengths((1, 16), 20) == [1, 9, 20]                  # never past the model's positions
    assert lengths((64,), 8192) == sorted(SHORT)


def test_the_bound_follows_the_graphs_own_error():
    captured = capture("random:tiny?layers=1")
    found = golden(captured, step_graph(captured), (1, 16))
    assert 0 < found.graph_error < 1e-4 and found.graph_error * 2 < found.bound < found.graph_error * 3
    assert all(torch.isfinite(case.logits).all() for case in found.cases)


def test_a_model_that_overflows_fp32_is_refused():
    module, _ = load("random:tiny?layers=1")
    with torch.no_grad():
        module.model.layers[0].mlp.down_proj.weight.mul_(1e38)
    captured = capture(module)
    with pytest.raises(CheckFailed, match="overflows or loses all precision"):
        golden(captured, captured, (1, 16))
