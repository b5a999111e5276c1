"""Golden cases: a bound is worth something only where the model itself has an answer."""
import itertools

import pytest
import torch
from infc import passes
from infc.compiler.contracts import run_plain
from infc.compiler.errors import CheckFailed
from infc.compiler.frontends import capture, load
from infc.compiler.ops.linear_quantized import PRODUCTS
from infc.compiler.pipeline import run_pipeline
from infc.compiler.quant.plan import Plan
from infc.compiler.quant.scheme import parse
from infc.compiler.rewrite import set_arguments
from infc.compiler.verification import SHORT, golden, lengths, step_sample


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


def test_a_bound_holds_for_rows_beside_those_of_other_sequences():
    """Products that are of bf16 from so many rows on take a prompt's rows one way alone and another in a fuller step."""
    captured = capture("random:tiny?layers=1")
    graph = captured.copy()
    given = {"dtype": "bf16", "quantization": Plan(parse("w8")), "bf16_rows": {16: 20}}
    run_pipeline(graph, passes.pipeline("bf16", quantized=True), check="off", allow="approximate", options=given)
    found = golden(captured, graph, (1, 64))
    errors = dict.fromkeys((0, 1, 20), 0.0)
    for case, rows in itertools.product(found.cases, errors):
        for node in graph.nodes:
            if node.target in PRODUCTS: set_arguments(node, bf16_rows=rows)
        logits = run_plain(graph, step_sample(graph, torch.tensor(case.tokens), case.rows))[graph.outputs.index("logits")]
        errors[rows] = max(errors[rows], float((logits.double() - case.logits).abs().max()))
    assert found.graph_error == pytest.approx(max(errors[0], errors[1]), rel=1e-4) and errors[20] < max(errors[0], errors[1])
