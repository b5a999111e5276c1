"""Golden replay: passes on what was recorded, through every bucket; fails on another model, on NaN, on a wrong bound."""
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from infc.runtime import golden
from infc.runtime.errors import RuntimeFault
from infc.runtime.golden import Case
from infc.runtime.session import load


@pytest.fixture(autouse=True)
def _hashed_draws(monkeypatch):
    """The fake model's draws are a hash of the settings; tests/mutations hold the check of draws against real kernels."""
    monkeypatch.setattr(golden, "_draw", lambda *_: 0)


def cases(fake, lengths=(3, 40, 9, 70, 1)) -> list[Case]:
    draw = np.random.default_rng(1)
    prompts = [draw.integers(0, 256, n).tolist() for n in lengths]
    rows = [sorted({0, n // 2, n - 1}) for n in lengths]
    return [Case(p, r, np.stack([fake.logits(p[:i + 1]) for i in r])) for p, r in zip(prompts, rows, strict=True)]


def test_every_bucket_says_what_was_recorded(fake):
    with load(fake.write(golden=golden.pack(cases(fake)), bound=1e-6)) as model:
        report = golden.replay(model)
        assert report.passed and report.error <= 1e-6 and report.top1 == 1
        assert list(report.errors) == ["step_T1", "step_T8", "step_T64", "mixed"]
        assert model.pool.free == model.pool.count
        assert list(golden.replay(model, ["step_T8"]).errors) == ["step_T8", "mixed"]


@pytest.mark.parametrize("spoil", [float("nan"), 9.0])
def test_a_different_logit_fails(fake, spoil):
    recorded = cases(fake)
    recorded[1].logits[2, 17] = spoil
    with load(fake.write(golden=golden.pack(recorded), bound=1e-6)) as model:
        report = golden.replay(model)
        assert not report.passed and not report.error <= 1e-6


def test_a_token_that_is_not_its_logits_argmax_fails(fake, monkeypatch):
    with load(fake.write(golden=golden.pack(cases(fake)), bound=1e-6)) as model:
        monkeypatch.setattr(type(model.executor), "tokens", lambda self, rows: [7] * rows)
        report = golden.replay(model)
        assert not report.passed and report.wrong_tokens and report.error <= 1e-6


@given(st.integers(1, 400), st.integers(0, 9), st.floats(0, 80), st.sampled_from([1e-3, 1.0, 40.0]), st.integers(0, 99))
def test_every_draw_leaves_room_for_rounding(vocab, few, above, size, seed):
    """However far some tokens stand above the rest: the token's interval, counted anew in fp64, holds the fp32 number and 1e-6 about it."""
    logits = np.random.default_rng(seed).standard_normal(vocab).astype(np.float32) * np.float32(size)
    logits[:few] += np.float32(above * size)
    for sampling, uniform, token in golden._kinds(logits):
        order = np.argsort(-logits.astype(float), kind="stable")
        mass = np.exp((logits.astype(float)[order] - logits.max()) / sampling.temperature)
        mass /= mass.sum()
        kept = min(sampling.top_k or vocab, int(np.searchsorted(np.cumsum(mass), sampling.top_p)) + 1, vocab)
        if sampling.top_p < 1: assert np.abs(np.cumsum(mass) - sampling.top_p).min() > 1e-6
        share = np.concatenate(([0], np.cumsum(mass[:kept] / mass[:kept].sum())))
        at = order.tolist().index(token)
        assert at < kept and share[at] + 1e-6 < np.float32(uniform) < share[at + 1] - 1e-6


def test_kl_of_a_flatter_distribution(fake):
    recorded = [Case(c.tokens, c.rows, c.logits * 0.5) for c in cases(fake)]
    parts = fake.parts(golden=golden.pack(recorded))
    manifest = msgspec.structs.replace(parts.manifest, golden=msgspec.structs.replace(parts.manifest.golden, metric="mean_kl", bound=1.0))
    from infc.runtime import artifact

    artifact.write(fake.folder / "kl.infc", parts._replace(manifest=manifest))
    with load(fake.folder / "kl.infc") as model:
        report = golden.replay(model)
    p = np.exp(recorded[4].logits[0].astype(float))
    q = np.exp(cases(fake)[4].logits[0].astype(float))
    p, q = p / p.sum(), q / q.sum()
    assert report.error >= (p * np.log(p / q)).sum() > 0.01
    assert report.top1 == 1


def test_without_cases_it_says_so(fake):
    with load(fake.write()) as model, pytest.raises(RuntimeFault, match="no golden cases"):
        golden.replay(model)
