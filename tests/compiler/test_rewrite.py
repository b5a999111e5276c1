"""The matcher: commuted operands, wildcards, shared and returned intermediates, refusals, nearest misses, the budget."""
import pytest
import torch
from golden import filecheck, trace
from infc.compiler.ir import fake_propagate, text, verify
from infc.compiler.ops import aten, rms_norm
from infc.compiler.rewrite import APPROXIMATE, DISTRIBUTION, EXACT, Pass, Report, Rule, RuleSet, emit

X, W = torch.randn(4, 8), torch.randn(8)


def _norm(x, w, eps):
    scale = aten.rsqrt.default(aten.add.Tensor(aten.mean.dim(aten.mul.Tensor(x, x), [-1], True), eps))
    return aten.mul.Tensor(aten.mul.Tensor(x, scale), w)


NORM = Rule("norm", _norm, lambda x, w, eps: rms_norm(x, w, eps))


def norm(x, w):
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * w


def test_contracts_are_ordered_by_trust():
    assert EXACT < DISTRIBUTION < APPROXIMATE


@pytest.mark.parametrize("spelling", [
    norm,
    lambda x, w: w * (x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)),
    lambda x, w: w * (torch.rsqrt(1e-6 + (x * x).mean(-1, keepdim=True)) * x),
])
def test_both_orders_of_commutative_operators(spelling):
    graph = trace(spelling, X, W)
    assert NORM.apply(graph) == 1
    filecheck(graph, r"""
    CHECK:      %y: f32[8] = input
    CHECK-NEXT: [[Y:%\w+]]: f32[4,8] = infc.rms_norm(%x, %y, 1e-06)
    CHECK-NEXT: return [[Y]]
    """)
    verify(graph)
    fake_propagate(graph)


def test_keyword_and_positional_arguments_are_the_same():
    rule = Rule("mean", lambda x: aten.mean.dim(x, [-1], keepdim=True), lambda x: aten.amax.default(x, [-1], True))
    assert rule.apply(trace(lambda x: x.mean(dim=-1, keepdim=True), X)) == 1
    assert rule.apply(trace(lambda x: x.mean(dim=-1), X)) == 0


def test_a_parameter_used_twice_matches_one_thing():
    rule = Rule("square", lambda x: aten.mul.Tensor(x, x), lambda x: aten.square.default(x))
    assert rule.apply(trace(lambda x, y: x * x + x * y, X, X)) == 1


def test_a_number_is_not_a_bool():
    rule = Rule("one", lambda x: aten.add.Tensor(x, 1), lambda x: aten.neg.default(x))
    assert rule.apply(trace(lambda x: x + 1.0, X)) == 1
    assert rule.apply(trace(lambda x: x + True, X)) == 0


@pytest.mark.parametrize("fn", [
    lambda x, w: (norm(x, w), x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)),
])
def test_two_chains_in_a_graph_stay_apart(fn):
    graph = trace(fn, X, W)
    assert NORM.apply(graph) == 1


def test_a_returned_intermediate_is_kept():
    def fn(x, w):
        h = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)
        return h * w, h

    graph, report = trace(fn, X, W), Report("norm")
    before = text(graph)
    assert NORM.apply(graph, report) == 0 and text(graph) == before
    assert "is also returned" in next(iter(report.refused.values()))


def test_an_intermediate_used_elsewhere_is_kept():
    def fn(x, w):
        scale = torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)
        return x * scale * w + scale

    graph, report = trace(fn, X, W), Report("norm")
    assert NORM.apply(graph, report) == 0
    assert "is also used by %add" in next(iter(report.refused.values()))


def test_a_cast_shared_by_two_matches_does_not_stop_them():
    rule = Rule("up", lambda x, w: aten.mul.Tensor(aten._to_copy.default(x, dtype=torch.float32), w),
                lambda x, w: aten.mul.Tensor(x, w))

    def fn(x, a, b):
        h = x.to(torch.float32)
        return h * a, h * b

    graph = trace(fn, X.half(), W, W)
    for node in list(graph.nodes):                                   # the assertion export adds reads x, not the cast
        if "assert" in str(node.target):
            graph.module.graph.erase_node(node)
    assert rule.apply(graph) == 2
    assert "_to_copy" not in text(graph)


def test_the_same_value_returned_twice_and_an_input_returned():
    graph = trace(lambda x, w: (norm(x, w), x), X, W)
    graph.output.args = ((*graph.output.args[0], graph.output.args[0][0]),)
    graph.outputs.append("again")
    expected = graph.run(X, W)
    assert NORM.apply(graph) == 1
    verify(graph)
    for got, want in zip(graph.run(X, W), expected, strict=True):
        torch.testing.assert_close(got, want)


def test_several_results():
    rule = Rule("add_norm", lambda x, r: (aten.exp.default(aten.add.Tensor(x, r)), aten.add.Tensor(x, r)),
                lambda x, r: (aten.sub.Tensor(x, r), aten.mul.Tensor(x, r)))
    pattern_shares = Rule("shared", _exp_of_sum, lambda x, r: (aten.sub.Tensor(x, r), aten.mul.Tensor(x, r)))

    def fn(x, r):
        h = x + r
        early = h.sum()                                              # used before the last result exists
        return torch.exp(h) + early, h

    graph = trace(fn, X, X)
    assert pattern_shares.apply(graph) == 1
    verify(graph)
    y, h = graph.run(X, 2 * X)
    torch.testing.assert_close(h, 2 * X * X)
    torch.testing.assert_close(y, -X + (2 * X * X).sum())
    assert rule.name == "add_norm"


def _exp_of_sum(x, r):
    h = aten.add.Tensor(x, r)
    return aten.exp.default(h), h


def test_refuse_is_asked_with_fake_tensors_and_reported():
    def refuse(x, w, eps):
        return None if w.shape == x.shape[-1:] else f"weight {tuple(w.shape)} is not one row of x"

    rule = Rule("norm", _norm, lambda x, w, eps: rms_norm(x, w, eps), refuse)
    graph, report = trace(norm, X, X), Report("norm")
    assert rule.apply(graph, report) == 0
    assert list(report.refused.values()) == ["weight (4, 8) is not one row of x"]


def test_a_replacement_of_another_type_is_declined():
    rule = Rule("half", lambda x: aten.exp.default(x), lambda x: aten._to_copy.default(x, dtype=torch.float16))
    graph, report = trace(torch.exp, X), Report("half")
    before = text(graph)
    assert rule.apply(graph, report) == 0 and text(graph) == before and report.fired == 0
    assert list(report.refused.values()) == ["would turn f32[4,8] into f16[4,8]"]


def test_nearest_miss_names_what_stopped_the_match():
    report = Report("norm")
    graph = trace(lambda x, w: x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) * w, X, W)
    assert NORM.apply(graph, report) == 0
    miss = report.misses[0]
    assert (miss.matched, miss.of) == (4, 6) and "found %sum_1 = aten.sum.dim_IntList: expected aten.mean.dim" in miss.reason


def test_the_budget_stops_a_rule():
    graph, report = trace(lambda x, w: norm(norm(x, w), w), X, W), Report("norm", budget=1)
    assert NORM.apply(graph, report) == 1 and report.fired == 1


def test_rules_of_a_set_add_up():
    rules = RuleSet("both", (NORM, Rule("neg", lambda x: aten.neg.default(x), lambda x: aten.mul.Tensor(x, -1))))
    graph, report = trace(lambda x, w: -norm(x, w), X, W), Report("both")
    assert rules.apply(graph, report) == 2 and report.fired == 2


def test_new_nodes_say_where_they_come_from():
    graph = trace(norm, X, W)
    last = graph.output.args[0][0]
    last.meta |= {"origin": ["model.norm"], "line": "y = x * w"}
    NORM.apply(graph)
    meta = graph.output.args[0][0].meta
    assert (meta["origin"], meta["line"], meta["passes"]) == (["model.norm"], "y = x * w", ["norm"])


def test_a_plain_pass_is_stamped_and_its_values_are_inferred():
    def run(graph, report):
        node = graph.output.args[0][0]
        with graph.module.graph.inserting_before(graph.output):
            new = graph.module.graph.call_function(aten.neg.default, (node,))
        graph.output.args = ((new,),)
        return 1

    graph = trace(torch.exp, X)
    assert Pass("negate", run).apply(graph) == 1
    meta = graph.output.args[0][0].meta
    assert meta["passes"] == ["negate"] and tuple(meta["val"].shape) == (4, 8)


def test_emit_accepts_custom_operators():
    graph = trace(lambda x, w: x * w, X, W)
    x, w = graph.placeholders.values()
    node = emit(graph, rms_norm, (x, w, 1e-6), like=graph.output)
    assert node.name == "rms_norm" and tuple(node.meta["val"].shape) == (4, 8)
