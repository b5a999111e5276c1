"""Tuned scales bring the model nearer the wide one on text they have not seen; codes, bounds and everything else stay."""
import pytest
import torch
from decoders import VOCABULARY, before, captured, llama
from infc.compiler.errors import UserError
from infc.compiler.ops.codes import rounded_rows
from infc.compiler.quality.evaluate import StepEvaluator
from infc.compiler.quality.metrics import divergence
from infc.compiler.quant import tune
from infc.compiler.quant.matrices import PRODUCTS, matrices
from infc.compiler.quant.plan import METHODS, Plan
from infc.compiler.quant.rounding import WORST, round_to_nearest, row_errors
from infc.compiler.quant.scheme import Scheme


def text(count: int, seed: int) -> list[list[int]]:
    return torch.randint(VOCABULARY, (count, 48), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module")
def graph():
    return before(captured(llama()), "smooth_channels")


def kl(graph, found, act_bits):
    """To the wide model, on text no scale was chosen on, with this test's own rounding of rows."""
    weights = {str(node.target): codes.dequantized() for node, codes in found.items()}

    def call(node, args, kwargs):
        if act_bits == 8 and node.target in PRODUCTS: args = (rounded_rows(args[0], 8, 32), *args[1:])
        return node.target(*args, **kwargs)

    step, total = StepEvaluator(graph), 0.0
    for ids in text(6, 99):
        truth, ours = step.logits(ids).double().log_softmax(-1), step.logits(ids, weights, call=call).double().log_softmax(-1)
        total += float(divergence(truth, ours).mean()) / 6
    return total


@pytest.mark.parametrize("scheme", [Scheme(4), Scheme(4, 32, False), Scheme(4, act_bits=8)], ids=str)
def test_scales_that_are_tuned_are_nearer_on_text_not_seen(graph, scheme, monkeypatch):
    monkeypatch.setattr(tune, "RATE", 3e-3)                              # a model of two layers needs larger steps than one of thirty
    windows = text(24, 0)
    found = {}
    for method in ("gptq", "tuned"):
        plan = Plan(scheme, method, windows)
        schemes = plan.schemes(graph, [*matrices(graph)])
        found[method] = dict(plan.codes(graph, schemes))
    assert kl(graph, found["tuned"], scheme.act_bits) < 0.97 * kl(graph, found["gptq"], scheme.act_bits)
    moved = 0
    for node, plain in found["gptq"].items():
        ours, w = found["tuned"][node], graph.weights[str(node.target)].float()
        assert torch.equal(ours.codes, plain.codes) and ours.scheme == plain.scheme
        assert plain.offset is None or (ours.offset is not None and torch.equal(ours.offset, plain.offset))
        assert bool((row_errors(w, ours) <= WORST * row_errors(w, round_to_nearest(w, plain.scheme)) * (1 + 1e-5)).all())
        moved += not torch.equal(ours.scale, plain.scale)
        assert plain.scheme.bits == 4 or torch.equal(ours.scale, plain.scale)       # head and table are not GPTQ's, and stay
    assert moved >= 8


def test_the_same_text_gives_the_same_scales(graph):
    plan = Plan(Scheme(4), "tuned", text(5, 0))
    schemes = plan.schemes(graph, [*matrices(graph)])
    first, second = ({node: codes.scale for node, codes in plan.codes(graph, schemes)} for _ in range(2))
    assert all(torch.equal(first[node], second[node]) for node in first)


def test_gradients_are_those_of_small_steps(graph):
    """Of one scale's factor, against the change of the KL when it moves by a little, in fp64."""
    node = next(n for n in matrices(graph) if "gate_up" in str(n.target))
    name, ids = str(node.target), text(1, 5)[0]
    found = round_to_nearest(graph.weights[name].float(), Scheme(4))
    step = StepEvaluator(graph)
    truth = step.logits(ids).log_softmax(-1)

    def loss(share):
        call = lambda node, args, kwargs: tune._call(node, args, kwargs, {name: Scheme(4)})      # noqa: E731
        ours = step.logits(ids, {name: tune._weight(found, share)}, call=call).log_softmax(-1)
        return (truth.exp() * (truth - ours)).sum(-1).mean()

    share = torch.zeros(found.scale.shape, requires_grad=True)
    loss(share).backward()
    assert share.grad is not None
    at = int(share.grad.abs().argmax())
    with torch.no_grad():
        ends = []
        for h in (0.02, -0.02):
            moved = torch.zeros(share.numel())
            moved[at] = h
            ends.append(float(loss(moved.view_as(share))))
    assert float(share.grad.flatten()[at]) == pytest.approx((ends[0] - ends[1]) / 0.04, rel=0.05)


def test_a_model_without_logits_is_refused(graph):
    other = graph.copy()
    other.outputs = ["hidden" if name == "logits" else name for name in other.outputs]
    with pytest.raises(UserError, match="gives none: choose gptq"): tune.tuned(other, {}, (), [[1, 2]])


def test_it_is_a_method_and_not_one_that_auto_takes():
    assert METHODS["tuned"].tuned and not Plan(Scheme(4), "auto").how(Scheme(4)).tuned and Plan(Scheme(4), "tuned").reads_text
