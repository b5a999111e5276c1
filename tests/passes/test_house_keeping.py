"""drop_dead, merge_common and fold_constants: fewer nodes, the same function."""
import pytest
import torch
from golden import assert_contract, filecheck, trace
from infc.compiler.contracts import Reference, check_exact
from infc.compiler.ir import Graph, fake_propagate, text, verify
from infc.compiler.ops import infc
from infc.compiler.rewrite import Report
from infc.passes import drop_dead, fold_constants, merge_common
from torch import nn

X = torch.randn(4, 8)


def with_cache() -> tuple[Graph, list[torch.Tensor]]:
    """A graph that writes k and v to a cache and returns k * 1."""
    k, v, slots = torch.randn(3, 2, 4), torch.randn(3, 2, 4), torch.tensor([0, 5, 32], dtype=torch.int32)
    kc, vc = torch.zeros(2, 2, 32, 4), torch.zeros(2, 2, 32, 4)

    def step(k, v, slots, kc, vc):
        infc.kv_write(k, v, kc, vc, slots)
        infc.kv_write(k, v, kc, vc, slots)
        return k * 2

    graph = trace(lambda k, v, slots, kc, vc: k * 2, k, v, slots, kc, vc)
    nodes = list(graph.placeholders.values())
    with graph.module.graph.inserting_before(graph.output):
        for _ in range(2):
            graph.module.graph.call_function(infc.kv_write.default, (nodes[0], nodes[1], nodes[3], nodes[4], nodes[2]))
    graph.kv, graph.inputs = graph.inputs[3:], graph.inputs[:3]
    fake_propagate(graph, missing_only=True)
    for node in graph.nodes:
        node.meta.setdefault("origin", [])
    verify(graph)
    del step
    return graph, [k, v, slots, kc, vc]


def test_drop_dead_fires_and_keeps_its_contract():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8))

        def forward(self, x, y):
            (y.exp() + self.unused).sum()
            return x * self.used

    graph = assert_contract(drop_dead.PASS, Net(), X, X)
    assert list(graph.weights) == ["p_used"] and graph.inputs == ["x", "y"]          # an unused input is still an input
    filecheck(graph, "CHECK: %x: f32[4,8] = input\nCHECK-NEXT: %y: f32[4,8] = input\nCHECK-NEXT: aten.mul\nCHECK-NEXT: return")


def test_drop_dead_keeps_writes():
    graph, sample = with_cache()
    assert drop_dead.PASS.apply(graph) == 0
    graph.run(*sample)
    assert sample[3].any()


def test_drop_dead_leaves_a_live_graph_alone():
    graph = trace(torch.exp, X)
    before = text(graph)
    assert drop_dead.PASS.apply(graph) == 0 and text(graph) == before


def test_merge_common_fires_and_keeps_its_contract():
    graph = assert_contract(merge_common.PASS, lambda x: torch.sin(x + 1) * torch.cos(x + 1) + torch.sin(x + 1), X, fires=3)
    filecheck(graph, "CHECK-COUNT-1: aten.add.Tensor(%x, 1)\nCHECK-COUNT-1: aten.sin\nCHECK-NOT: aten.sin")


def test_merge_common_sees_defaults_and_keywords():
    graph = trace(lambda x: x.softmax(-1) + x.softmax(dim=-1, dtype=None), X)
    assert merge_common.PASS.apply(graph) == 1


@pytest.mark.parametrize("fn", [
    lambda x: (x + 1) * (x + 1.0),                       # a number's type decides the dtype of integer tensors
    lambda x: x.sum(0) + x.sum(1).sum(),
    lambda x: torch.bernoulli(x.sigmoid()) + torch.bernoulli(x.sigmoid()),
])
def test_merge_common_refuses_what_is_not_the_same(fn):
    graph = trace(fn, X)
    ops = [n.target for n in graph.nodes if "bernoulli" in str(n.target)]
    merge_common.PASS.apply(graph)
    assert [n.target for n in graph.nodes if "bernoulli" in str(n.target)] == ops
    if not ops:
        assert merge_common.PASS.apply(graph) == 0


def test_merge_common_keeps_writes_apart():
    graph, _ = with_cache()
    assert merge_common.PASS.apply(graph) == 0


def test_merge_common_keeps_every_result():
    """FIELD R10: the same value returned under two names."""
    graph = assert_contract(merge_common.PASS, lambda x: (x.exp(), x.exp()), X, fires=1)
    assert len(graph.output.args[0]) == 2 and graph.outputs == ["out0", "out1"]


class Norms(nn.Module):
    """Gemma's 1 + w, twice, and a transposed tied embedding."""

    def __init__(self):
        super().__init__()
        self.w, self.table = nn.Parameter(torch.randn(8) * 0.3), nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        return (x * (1 + self.w)) @ self.table.T.contiguous() * (self.w + 1)


def test_fold_constants_fires_and_keeps_its_contract():
    graph = assert_contract(fold_constants.PASS, Norms(), X, fires=3)
    filecheck(graph, "CHECK-NOT: aten.add\nCHECK-NOT: aten.transpose")
    assert "p_w" not in graph.weights and len(graph.weights) == 3


def test_a_folded_value_is_known_to_the_fp64_check():
    """1 + w rounds in fp32: without the exact value the fp64 check would see 6e-8."""
    before = trace(Norms(), X)
    after = before.copy()
    fold_constants.PASS.apply(after)
    assert after.exact
    assert check_exact(Reference(before, before.sample_inputs()), before, after) < 1e-15


class Tied(nn.Module):
    def __init__(self, rows: int):
        super().__init__()
        self.table = nn.Parameter(torch.randn(rows, 64))

    def forward(self, ids):
        return nn.functional.embedding(ids, self.table) @ (self.table * 2).T


def test_fold_constants_refuses_a_second_copy_of_a_tied_weight():
    """FIELD R22; a copy of at most 1 MiB is cheaper than computing it again and again."""
    ids = torch.randint(0, 9, (2, 3))
    graph, report = trace(Tied(8192), ids), Report("fold_constants")
    before = text(graph)
    assert fold_constants.PASS.apply(graph, report) == 0 and text(graph) == before
    assert "would replace 0: %p_table would be stored twice" in next(iter(report.refused.values()))
    assert fold_constants.PASS.apply(trace(Tied(16), ids)) == 1


def test_fold_constants_refuses_an_expanded_value():
    graph, report = trace(lambda x: x + torch.zeros(1024, 1).expand(1024, 1024).cos(), torch.randn(1024, 1024)), Report("fold")
    assert fold_constants.PASS.apply(graph, report) == 0
    assert "4,194,304 bytes would replace" in next(iter(report.refused.values()))


def test_fold_constants_leaves_inputs_alone():
    graph = trace(lambda x: x.exp() + torch.zeros(()), X)
    before = text(graph)
    assert fold_constants.PASS.apply(graph) == 0 and text(graph) == before
