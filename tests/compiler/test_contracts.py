"""EXACT tells a reordering from another function, and a dropped upcast from both."""
import math

import pytest
import torch
from golden import trace
from infc.compiler.contracts import Reference, check_exact, row_error, run_fp64
from infc.compiler.errors import CheckFailed
from infc.compiler.ir import Graph, fake_propagate
from infc.compiler.ops import aten, infc
from infc.compiler.rewrite import Rule

X, W = torch.randn(4, 64), torch.randn(64)


def judge(before: Graph, after: Graph) -> float:
    return check_exact(Reference(before, before.sample_inputs()), before, after)


def rewritten(before: Graph, pattern, replacement) -> Graph:
    after = before.copy()
    assert Rule("rule", pattern, replacement).apply(after) == 1
    return after


def upcast_norm(x, w):
    h = x.float()
    return (h * torch.rsqrt((h * h).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * w


def test_a_reordered_sum_is_exact():
    before = trace(lambda x, w: (x + w) + 1.5, X, W)
    after = rewritten(before, lambda x, w: aten.add.Tensor(aten.add.Tensor(x, w), 1.5),
                      lambda x, w: aten.add.Tensor(x, aten.add.Tensor(w, 1.5)))
    assert judge(before, after) < 1e-15


def test_another_constant_is_another_function():
    before = trace(lambda x: x * 0.5 + 1e-6, X)
    after = rewritten(before, lambda x: aten.add.Tensor(x, 1e-6), lambda x: aten.add.Tensor(x, 1e-5))
    with pytest.raises(CheckFailed, match="another function: fp64 results differ in out0 on sample 0"):
        judge(before, after)


def test_the_first_differing_node_is_named():
    before = trace(lambda x: torch.exp(x * 0.5).sum(-1), X)
    after = before.copy()
    exp = next(n for n in after.nodes if n.target is aten.exp.default)
    exp.args = (after.placeholders["x"],)
    with pytest.raises(CheckFailed, match=r"first at %exp"):
        judge(before, after)


def test_a_dropped_upcast_is_the_same_function_with_less_precision():
    """FIELD R08: squares summed in half precision. fp64 cannot see it; the graph's own dtypes can."""
    x = (torch.randn(4, 4096) * 3).half()
    before = trace(upcast_norm, x, torch.ones(4096).half())
    after = before.copy()
    for node in list(after.nodes):
        if node.op == "call_function" and "assert" in str(node.target):
            after.module.graph.erase_node(node)
    x_node, w_node = after.placeholders.values()
    with after.module.graph.inserting_before(after.output):
        fused = after.module.graph.call_function(infc.rms_norm.default, (x_node, w_node, 1e-6))
    after.output.args = ((fused,),)
    fake_propagate(after, missing_only=True)
    sample = before.sample_inputs()[0]
    assert row_error(run_fp64(after, sample)[0], run_fp64(before, sample)[0]) < 1e-9
    with pytest.raises(CheckFailed, match="precision lost: error against fp64 grew"):
        judge(before, after)


def test_a_changed_dtype_of_the_result_is_found():
    before = trace(torch.exp, X)
    after = before.copy()
    with after.module.graph.inserting_before(after.output):
        cast = after.module.graph.call_function(aten._to_copy.default, (after.output.args[0][0],), {"dtype": torch.bfloat16})
    after.output.args = ((cast,),)
    with pytest.raises(CheckFailed, match=r"torch.float32 became torch.bfloat16"):
        judge(before, after)


def test_nan_equals_nan_and_a_changed_nan_is_found():
    before = trace(lambda x: x / x, X)                                # 0/0 and inf/inf among the samples
    assert judge(before, before.copy()) == 0.0
    after = rewritten(before, lambda x: aten.div.Tensor(x, x), lambda x: aten.ones_like.default(x))
    with pytest.raises(CheckFailed, match="another function"):
        judge(before, after)


@pytest.mark.parametrize(("value", "truth", "error"), [
    (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0]), 0.0),
    (torch.tensor([[1.0, 0.0], [3e-9, 0.0]]), torch.tensor([[1.0, 0.0], [1e-9, 0.0]]), 2.0),      # per row, not per tensor
    (torch.tensor([math.nan, 1.0]), torch.tensor([math.nan, 1.0]), 0.0),
    (torch.tensor([math.inf, 1.0]), torch.tensor([-math.inf, 1.0]), math.inf),
    (torch.tensor([math.nan, 1.0]), torch.tensor([0.0, 1.0]), math.inf),
    (torch.tensor([1e-30]), torch.tensor([0.0]), math.inf),
    (torch.tensor([1, 2]), torch.tensor([1, 3]), math.inf),
    (torch.tensor([True]), torch.tensor([True]), 0.0),
    (torch.zeros(0, 3), torch.zeros(0, 3), 0.0),
    (torch.zeros(2), torch.zeros(3), math.inf),
])
def test_row_error(value, truth, error):
    assert row_error(value, truth) == pytest.approx(error)


def test_lifting_reaches_casts_and_defaults():
    graph = trace(lambda x: (x.to(torch.bfloat16) * torch.full((64,), 0.1)).to(torch.float16), X)
    (result,) = run_fp64(graph, (X,))
    assert result.dtype == torch.float64
    torch.testing.assert_close(result, X.double() * 0.1, rtol=1e-12, atol=0)


def test_the_sample_is_not_written_to():
    cache = torch.zeros(2, 1, 32, 4)
    graph = trace(lambda x: x * 1, X)
    graph.kv.append("cache")
    with graph.module.graph.inserting_before(next(n for n in graph.nodes if n.op != "placeholder")):
        node = graph.module.graph.placeholder("cache")
    node.meta["val"] = cache
    run_fp64(graph, (X, cache))
    assert not cache.any()
