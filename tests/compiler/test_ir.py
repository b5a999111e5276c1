"""The graph: text form, verify, evaluation, copies, keys, house-keeping."""
import pytest
import torch
from golden import filecheck, trace
from infc.compiler.errors import CheckFailed
from infc.compiler.ir import Graph, content_key, drop_dead_nodes, fake_propagate, impure, random, same_graph, text, verify
from infc.compiler.ops import aten, infc
from torch import fx, nn

X = torch.randn(4, 8)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.embed(ids))


def tied() -> Graph:
    return trace(Tied(), torch.randint(0, 11, (2, 3)), dynamic=({0: "B", 1: "S"},), names=("ids",))


def test_text_names_types_weights_inputs_and_public_dims():
    filecheck(tied(), r"""
    CHECK:      [[W:%\w+]]: f32[11,8] = weight
    CHECK-NEXT: %ids: i64[B,S] = input
    CHECK-NEXT: [[E:%\w+]]: f32[B,S,8] = aten.embedding([[W]], %ids)
    CHECK-NEXT: [[Y:%\w+]]: f32[B,S,11] = aten.linear([[E]], [[W]])
    CHECK-NEXT: return [[Y]]
    """)


def test_tied_weights_are_one_placeholder():
    assert len(tied().weights) == 1


def test_text_prints_kwargs_and_sizes():
    graph = trace(lambda x: x.to(torch.float16) * x.shape[0], X, dynamic=({0: "B"},))
    filecheck(graph, r"""
    CHECK: %sym_size_int{{.*}}: sym[B] = aten.sym_size.int(%x, 0)
    CHECK: f16[B,8] = aten._to_copy(%x, dtype=f16)
    """)


def test_run_and_copy_are_independent():
    graph = tied()
    twin = graph.copy()
    ids = torch.tensor([[1, 2, 3, 4]])
    assert torch.equal(graph.run(ids)[0], twin.run(ids)[0])
    assert text(twin) == text(graph) and same_graph(twin, graph)
    twin.output.args = ((next(n for n in twin.nodes if n.target is aten.embedding.default),),)
    assert not same_graph(twin, graph)
    verify(graph)


def test_run_names_the_inputs_it_wants():
    with pytest.raises(TypeError, match="takes 1 inputs \\(ids\\), got 0"):
        tied().run()


def test_same_graph_ignores_names():
    a, b = tied(), tied()
    next(n for n in b.nodes if n.op == "call_function")._rename("other")
    assert text(a) != text(b) and same_graph(a, b)


def test_key_changes_with_weights_and_arguments_and_not_with_names():
    graph = tied()
    key = content_key(graph)
    twin = graph.copy()
    next(n for n in twin.nodes if n.op == "call_function")._rename("other")
    assert content_key(twin) == key
    with torch.no_grad():
        next(iter(twin.weights.values()))[0, 0] += 1                  # in place: a remembered hash must not survive it
    assert content_key(twin) != key
    a = trace(lambda x: x + 1e-5, X)
    assert content_key(a) != content_key(trace(lambda x: x + 1e-6, X))
    b = a.copy()
    b.meta["eos"] = [2]
    assert content_key(a) != content_key(b)


def test_add_weight_is_placed_first_and_named_uniquely():
    graph = tied()
    name = next(iter(graph.weights))
    node = graph.add_weight(name, torch.ones(3))
    assert node.target == f"{name}_1" and graph.weight(node) is not None
    computed = next(n for n in graph.nodes if n.op == "call_function").name
    other = graph.add_weight(computed, torch.ones(2))
    assert other.name == other.target and other.name.startswith(computed)
    verify(graph)
    graph.drop_weight(node)
    verify(graph)


def test_fake_propagate_finds_a_stale_value():
    graph = trace(lambda x: x.sum(-1), X)
    call = next(n for n in graph.nodes if n.op == "call_function")
    call.meta["val"] = call.args[0].meta["val"]
    with pytest.raises(CheckFailed, match=r"recorded as f32\[4,8\], inferred as f32\[4\]"):
        fake_propagate(graph)
    fake_propagate(graph, accept_changes=True)
    assert tuple(call.meta["val"].shape) == (4,)


def test_fake_propagate_keeps_symbols_apart():
    graph = trace(lambda x, y: x.sum() + y.sum(), X, X, dynamic=({0: "B"}, {0: "S"}))
    fake_propagate(graph)
    assert "f32[B,8] = input" in text(graph) and "f32[S,8] = input" in text(graph)


@pytest.mark.parametrize(("damage", "reason"), [
    (lambda g, c: setattr(g.output, "args", (c,)), "must be a tuple"),
    (lambda g, c: g.outputs.append("more"), "1 results for outputs"),
    (lambda g, c: c.meta.pop("val"), "has no value"),
    (lambda g, c: setattr(c, "target", torch.relu), "is no operator"),
    (lambda g, c: c.prepend(g.output), "not defined before it"),
    (lambda g, c: g.weights.update(ghost=X), "without a placeholder"),
    (lambda g, c: g.inputs.append("x"), "disagree"),
])
def test_verify_names_the_fault(damage, reason):
    graph = trace(lambda x: x.sum(-1), X)
    damage(graph, next(n for n in graph.nodes if n.op == "call_function"))
    with pytest.raises(CheckFailed, match=reason):
        verify(graph)


def test_verify_compares_weights_with_their_placeholders():
    graph = tied()
    graph.weights[next(iter(graph.weights))] = torch.ones(3)
    with pytest.raises(CheckFailed, match=r"is f32\[3\], its placeholder says f32\[11,8\]"):
        verify(graph)


def test_optimized_dialect_forbids_leftovers():
    graph = trace(lambda x: x.to(torch.float16), X)
    verify(graph, "captured")
    with pytest.raises(CheckFailed, match="optimized dialect does not allow"):
        verify(graph, "optimized")


def _call(target, *args):
    graph = fx.Graph()
    return graph.call_function(target, tuple(graph.placeholder(f"a{i}") if a is X else a for i, a in enumerate(args)))


@pytest.mark.parametrize(("node", "is_random"), [
    (_call(aten.dropout.default, X, 0.5, True), True),
    (_call(aten.dropout.default, X, 0.5, False), False),
    (_call(aten.dropout.default, X, 0.0, True), False),
    (_call(aten.scaled_dot_product_attention.default, X, X, X), False),
    (_call(aten.scaled_dot_product_attention.default, X, X, X, None, 0.1), True),
    (_call(aten.bernoulli.default, X), True),
    (_call(aten.add.Tensor, X, X), False),
])
def test_random(node, is_random):
    assert random(node) == is_random and impure(node) == is_random


def test_writes_to_a_cache_survive_dead_code():
    node = _call(infc.kv_write.default, X, X, X, X, X)
    assert impure(node)
    graph = Graph(fx.GraphModule({}, node.graph))
    dead = node.graph.call_function(aten.neg.default, (next(iter(node.graph.nodes)),))
    node.graph.output(())
    assert drop_dead_nodes(graph) == 1 and dead._erased and not node._erased
