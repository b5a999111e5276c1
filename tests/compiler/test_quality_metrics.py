"""Metrics against a plain computation in double precision, one token at a time; what they must be for equal models."""
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from infc.compiler.errors import CheckFailed
from infc.compiler.quality.metrics import ROWS, Comparison, percentile

INF = math.inf


def plain(ours: torch.Tensor, reference: torch.Tensor, targets: list[int]) -> dict[str, float]:
    """The figures as their definitions say, in Python floats."""
    losses, reference_losses, apart, agreed = [], [], [], 0
    for q_row, p_row, target in zip(ours.tolist(), reference.tolist(), targets, strict=True):
        p, q = (probabilities(row) for row in (p_row, q_row))
        losses.append(-math.log(q[target]))
        reference_losses.append(-math.log(p[target]))
        apart.append(math.fsum(a * (math.log(a) - math.log(b)) for a, b in zip(p, q, strict=True) if a))
        agreed += p.index(max(p)) == q.index(max(q))
    ordered = sorted(apart)
    least = next(value for value in ordered if sum(other <= value for other in ordered) >= 0.99 * len(ordered))
    n = len(targets)
    return {"ppl": math.exp(math.fsum(losses) / n), "reference_ppl": math.exp(math.fsum(reference_losses) / n),
            "kl": math.fsum(apart) / n, "kl_p99": least, "top1": agreed / n}


def probabilities(row: list[float]) -> list[float]:
    powers = [math.exp(x - max(row)) for x in row]
    return [x / math.fsum(powers) for x in powers]


def random_logits(rows: int, vocab: int, seed: int, noise: float) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    chance = torch.Generator().manual_seed(seed)
    reference = 4 * torch.randn(rows, vocab, generator=chance)
    ours = reference + noise * torch.randn(rows, vocab, generator=chance)
    return ours, reference, torch.randint(vocab, (rows,), generator=chance).tolist()


@settings(deadline=None, max_examples=40)
@given(rows=st.integers(1, 3 * ROWS), vocab=st.integers(2, 40), seed=st.integers(0, 999), noise=st.sampled_from([0.0, 1e-3, 0.3, 5.0]),
       cut=st.integers(0, 200))
def test_the_figures_are_their_definitions(rows: int, vocab: int, seed: int, noise: float, cut: int):
    ours, reference, targets = random_logits(rows, vocab, seed, noise)
    comparison = Comparison()
    for part in (slice(0, min(cut, rows)), slice(min(cut, rows), rows)):             # in two windows, as a text comes
        if targets[part]: comparison.add(ours[part], targets[part], reference[part])
    found = comparison.figures().json()
    assert found.pop("tokens") == rows
    for name, value in plain(ours.double(), reference.double(), targets).items():
        assert found[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name


def test_equal_models_are_not_apart():
    _, reference, targets = random_logits(100, 30, 1, 0.0)
    comparison = Comparison()
    comparison.add(reference.clone(), targets, reference)
    found = comparison.figures()
    assert (found.kl, found.kl_p99, found.top1) == (0.0, 0.0, 1.0) and found.ppl == found.reference_ppl


def test_a_constant_added_to_a_row_changes_nothing():
    ours, reference, targets = random_logits(20, 30, 2, 0.5)
    one, other = Comparison(), Comparison()
    one.add(ours, targets, reference)
    other.add(ours + 3.0, targets, reference - 7.0)
    for a, b in zip(one.figures().json().values(), other.figures().json().values(), strict=True):
        assert a == pytest.approx(b, rel=1e-5)


def test_without_a_reference_there_is_perplexity_alone():
    ours, _, targets = random_logits(20, 30, 3, 0.5)
    comparison = Comparison()
    comparison.add(ours, targets)
    assert comparison.figures().json() == {
        "tokens": 20, "ppl": pytest.approx(plain(ours.double(), ours.double(), targets)["ppl"]), "reference_ppl": None, "kl": None,
        "kl_p99": None, "top1": None}


def test_a_uniform_model_has_the_vocabulary_as_perplexity():
    comparison = Comparison()
    comparison.add(torch.zeros(5, 48), [0, 1, 2, 3, 47])
    assert comparison.figures().ppl == pytest.approx(48)


def test_what_is_impossible_in_the_reference_adds_nothing():
    reference = torch.tensor([[0.0, 0.0, -INF]])
    comparison = Comparison()
    comparison.add(torch.tensor([[0.0, 0.0, -INF]]), [0], reference)
    assert comparison.figures().kl == 0.0
    comparison = Comparison()
    comparison.add(torch.tensor([[0.0, -INF, 0.0]]), [0], reference)                  # what ours alone calls impossible is infinitely far
    assert comparison.figures().kl == INF


@pytest.mark.parametrize("bad", [math.nan, INF])
def test_logits_that_are_no_distribution_are_refused(bad: float):
    ours, reference, targets = random_logits(70, 9, 4, 0.1)
    ours[68, 3] = bad
    with pytest.raises(CheckFailed, match="the compiled model gives logits that are no distribution"):
        Comparison().add(ours, targets, reference)


def test_a_token_without_probability_is_refused():
    with pytest.raises(CheckFailed, match="no probability at all"):
        Comparison().add(torch.tensor([[0.0, -INF]]), [1])


def test_logits_and_targets_must_fit():
    with pytest.raises(ValueError, match="do not fit"):
        Comparison().add(torch.zeros(3, 4), [1, 2])


@settings(deadline=None)
@given(values=st.lists(st.floats(-5, 5, width=32), min_size=1, max_size=300), share=st.sampled_from([0.5, 0.9, 0.99, 1.0]))
def test_a_percentile_is_the_least_value_that_enough_do_not_pass(values: list[float], share: float):
    found = percentile(torch.tensor(values), share)
    assert sum(value <= found for value in values) >= share * len(values) - 1e-9
    assert sum(value < found for value in values) < share * len(values) + 1e-9 or found == min(values)
