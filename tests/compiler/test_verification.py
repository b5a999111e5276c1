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
    assert max(lengths((1, 128, 512), 8192, many=192)) > 192 > max(lengths((1, 128), 8192, many=192))      # a step has no 192 rows


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


def test_a_graph_that_is_another_function_has_no_bound():
    captured = capture("random:tiny?layers=1")
    graph = step_graph(captured)
    norm = next(node for node in graph.nodes if node.target is torch.ops.infc.rms_norm.default)
    norm.update_arg(2, 2e-5)
    with pytest.raises(CheckFailed, match="the optimized graph is not the model"):
        golden(captured, graph, (1, 16))


def test_bf16_weights_may_lose_what_eager_bf16_loses():
    captured = capture("random:tiny?layers=1")
    graph = captured.copy()
    run_pipeline(graph, passes.pipeline("bf16"), check="off", allow="approximate", options={"dtype": "bf16"})
    exact, narrow = golden(captured, step_graph(captured), (1, 16)), golden(captured, graph, (1, 16))
    assert narrow.graph_error > 100 * exact.graph_error
    norm = next(node for node in graph.nodes if node.target is torch.ops.infc.rms_norm.default)
    norm.update_arg(2, 1e-1)
    with pytest.raises(CheckFailed, match="eager PyTorch in bf16"):
        golden(captured, graph, (1, 16))
