"""Weights in order: each is chosen for what it will meet, the weights before it and the rows of eight bits being codes by then."""
import pytest
import torch
from decoders import VOCABULARY, before, captured, llama
from infc.compiler.errors import UserError
from infc.compiler.ir import evaluate
from infc.compiler.ops.codes import rounded_rows
from infc.compiler.quant.matrices import PRODUCTS, matrices, products
from infc.compiler.quant.plan import Plan
from infc.compiler.quant.rounding import round_to_nearest
from infc.compiler.quant.scheme import Scheme
from infc.compiler.quant.sequential import FIRST, in_order
from infc.compiler.quant.statistics import inputs_of

TEXT = torch.randint(VOCABULARY, (3, 40), generator=torch.Generator().manual_seed(0)).tolist()


def parts(scheme):
    """(the step graph, its weights' schemes, tables as codes)."""
    graph = before(captured(llama()), "smooth_channels")
    schemes = Plan(scheme).schemes(graph, [*matrices(graph)])
    tables = {w: round_to_nearest(graph.weights[str(w.target)], s) for w, s in schemes.items() if s.bits == 8}
    return graph, schemes, tables


def seen(graph, schemes, codes, weight):
    """Rows that a weight's product reads, of a graph in which these weights are codes."""
    rows, product = [], products(weight)[0]
    for window in TEXT:
        def call(node, args, kwargs):
            its = schemes.get(node.args[1]) if node.target in PRODUCTS else None
            if its is not None and its.act_bits == 8: args = (rounded_rows(args[0], 8, its.act_group), *args[1:])
            if node is product: rows.append(args[0])
            return node.target(*args, **kwargs)

        evaluate(graph, inputs_of(graph, window), graph.weights | codes, call)
    return torch.cat(rows)


@pytest.mark.parametrize("act_bits", [16, 8])
def test_each_weight_is_chosen_for_what_those_before_it_give(act_bits):
    graph, schemes, tables = parts(Scheme(4, act_bits=act_bits))
    codes = {str(w.target): found.dequantized() for w, found in tables.items()}
    grams = {}

    def choose(w, scheme, name, gram):
        grams[name] = gram
        return round_to_nearest(w, scheme, name)

    order = []
    for weight, found in in_order(graph, schemes, tables, TEXT, choose):
        x = seen(graph, schemes, codes, weight)
        by = torch.ones(len(x), 1)
        by[:: len(TEXT[0])] = FIRST
        torch.testing.assert_close(grams[str(weight.target)], x.T @ (by * x) / len(x), rtol=1e-4, atol=1e-6)
        codes[str(weight.target)] = found.dequantized()
        order.append(weight)
    assert {*order} == {*schemes} - {*tables} and len(order) == 8
    firsts = [next(i for i, node in enumerate(graph.nodes) if node is products(weight)[0]) for weight in order]
    assert firsts == sorted(firsts)


def test_what_rounding_did_before_a_weight_is_seen_by_it():
    """The last weight's sums are not those of the wide model."""
    graph, schemes, tables = parts(Scheme(4))

    def last_gram(rounded):
        grams = []

        def choose(w, scheme, name, gram):
            grams.append(gram)
            return round_to_nearest(w, Scheme(4 if rounded else 8))

        assert len([*in_order(graph, schemes, tables, TEXT, choose)]) == 8
        return grams[-1]

    wide, ours = last_gram(False), last_gram(True)
    assert float((ours - wide).norm() / wide.norm()) > 0.01


def test_a_graph_may_change_on_the_way():
    """As a pass does it: a weight is gone as soon as its codes are there."""
    graph, schemes, _ = parts(Scheme(4))
    plan = Plan(Scheme(4), "gptq", TEXT)
    whole = {str(w.target): found.dequantized() for w, found in plan.codes(graph, schemes)}
    for weight, found in plan.codes(graph, schemes):
        node = graph.add_weight("other", found.dequantized())
        weight.replace_all_uses_with(node)
        graph.drop_weight(weight)
        assert torch.equal(found.dequantized(), whole.pop(str(weight.target)))
    assert not whole


def test_inputs_that_are_not_finite_are_refused_by_name():
    graph, schemes, tables = parts(Scheme(4))
    name = next(name for name in graph.weights if "layernorm" in name)
    graph.weights[name] = graph.weights[name] * torch.nan
    with pytest.raises(UserError, match="qkv_proj_weight: what it is multiplied with on the calibration text is not finite"):
        [*in_order(graph, schemes, tables, TEXT, lambda w, s, name, gram: round_to_nearest(w, s))]


def test_an_absent_text_is_refused():
    graph, schemes, _ = parts(Scheme(4))
    with pytest.raises(UserError, match="--calib FILE"): [*Plan(Scheme(4), "gptq", []).codes(graph, schemes)]
