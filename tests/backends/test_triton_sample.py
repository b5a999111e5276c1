"""infc::sample on Triton, interpreted, against its meaning in fp64: token by token."""
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from infc.compiler.ops.sample import GREEDY_BELOW
from torch import Tensor
from triton_env import kernels, plain, randn, run

I32 = torch.int32


def asked(rows: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, uniform: float = 0.99) -> dict[str, Tensor]:
    return {"temperature": torch.full((rows,), temperature), "top_k": torch.full((rows,), top_k, dtype=I32),
            "top_p": torch.full((rows,), top_p), "uniform": torch.full((rows,), uniform)}


def same(**arguments: Tensor) -> Tensor:
    found = run("infc::sample", **arguments)
    assert torch.equal(found, plain("infc::sample", **arguments))
    return found


@pytest.mark.parametrize(("vocab", "rows", "dtype"), [(1000, 8, torch.float32), (1, 2, torch.float32), (300, 5, torch.bfloat16),
                                                      (5, 5, torch.float16), (9_001, 3, torch.float32)], ids=str)
def test_sample(vocab: int, rows: int, dtype: torch.dtype) -> None:
    logits = randn(rows, vocab, dtype=dtype, scale=3)                  # of bf16 many are equal
    logits[0, 1:vocab:300] = 50.0                                      # the lowest index of them wins
    logits[1] = 2.5
    given = {"temperature": torch.tensor([0.0, 0.7, 1.0, 1.6]).repeat(rows)[:rows].contiguous(),
             "top_k": torch.tensor([0, 1, 5, 50, 3, vocab], dtype=I32).repeat(rows)[:rows].contiguous(),
             "top_p": torch.tensor([1.0, 0.9, 0.5, 0.01, 0.3]).repeat(rows)[:rows].contiguous(),
             "uniform": torch.rand(rows, generator=torch.Generator().manual_seed(3))}
    same(logits=logits, **given)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(st.integers(1, 40), st.integers(1, 6), st.floats(0.0625, 5.0, width=32), st.integers(-1, 45), st.floats(0.0, 1.0, width=32),
       st.integers(0, 2**24 - 1), st.integers(0, 9))
def test_few_values_many_ties(vocab: int, values: int, heat: float, top_k: int, top_p: float, uniform: int, seed: int) -> None:
    logits = torch.randint(-2, values - 2, (1, vocab), generator=torch.Generator().manual_seed(seed)).float() * 0.37
    given = asked(1, heat, top_k, top_p, uniform / 2**24)
    found = run("infc::sample", logits=logits, **given)
    nudged = [plain("infc::sample", logits=logits, **{**given, name: (given[name].double() + by).clamp(0, 1)})
              for name in ("uniform", "top_p") for by in (-1e-6, 1e-6)]
    # where a sum ends on the border exactly, either side is right
    assert bool(torch.stack([found == token for token in (plain("infc::sample", logits=logits, **given), *nudged)]).any(0).all())


@pytest.mark.parametrize(("top_k", "top_p", "uniform"), [(0, 1.0, 0.999), (4_000, 1.0, 0.7), (0, 0.95, 0.51)])
def test_flat_and_steep_rows_of_several_blocks(top_k: int, top_p: float, uniform: float) -> None:
    logits = randn(3, 5_000, scale=0.01)                               # nearly all tokens count
    logits[1] = torch.arange(5_000).remainder(977) * -1e-3             # whole classes of equals
    logits[2] = randn(5_000, scale=30)
    same(logits=logits, **asked(3, top_k=top_k, top_p=top_p, uniform=uniform))


def test_the_last_uniform_number_gives_a_token_at_the_end_of_the_mass() -> None:
    logits = torch.stack([randn(3_000, scale=scale) for scale in (0.01, 3, 30)])
    tokens = run("infc::sample", logits=logits, **asked(3, uniform=1 - 2.0**-24))
    masses, order = torch.softmax(logits.double(), -1).sort(descending=True, stable=True)
    places = (order == tokens[:, None]).nonzero()[:, 1]
    assert bool((masses.cumsum(-1).gather(1, places[:, None]) > 1 - 2e-6).all())


def test_every_token_is_drawn_as_often_as_it_should_be() -> None:
    logits = torch.tensor([0.0, 2.0, -1.0, 1.0, -torch.inf]).repeat(20, 1)
    given = {**asked(20), "uniform": (torch.arange(20) + 0.5) / 20}
    counts = torch.bincount(run("infc::sample", logits=logits, **given), minlength=5)
    assert torch.allclose(counts / 20.0, torch.softmax(logits[0], -1), atol=1.001 / 20)      # one of 20: half a border each side


def test_argmax_ignores_nan_and_takes_the_lowest_index() -> None:
    logits = torch.full((4, 9000), -torch.inf)
    logits[0, [17, 400, 8999]] = 1.0
    logits[1] = torch.nan
    logits[1, 8999] = -5.0
    logits[3] = torch.nan
    assert same(logits=logits, **asked(4, temperature=0.0)).tolist() == [17, 8999, 0, 0]


@pytest.mark.parametrize("temperature", [1e-45, 2.9e-39, 1e-38, 9e-31, GREEDY_BELOW, 1e-29, torch.nan, -1.0])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    logits = randn(3, 1000)
    logits[2, [40, 500]] = 9.0
    same(logits=logits, **asked(3, temperature, top_k=7))


@pytest.mark.parametrize(("temperature", "top_k", "uniform"), [
    (0.0, 5, 0.3), (0.8, 0, 0.99), (0.8, 5, 0.3), (0.8, 990, 0.0), (0.8, -3, 0.5),
])
def test_nan_and_infinite_logits(temperature: float, top_k: int, uniform: float) -> None:
    logits = randn(7, 1000)
    logits[0, ::2] = torch.nan
    logits[1] = torch.nan
    logits[2] = -torch.inf
    logits[2, :20] = torch.nan
    logits[3, [700, 900]] = torch.inf
    logits[4, 3:] = torch.nan
    logits[5, 100:] = -torch.inf
    logits[6, ::2] = -0.0
    same(logits=logits, **asked(7, temperature, top_k, uniform=uniform))


def test_refuses_with_a_reason() -> None:
    refuse = kernels()["infc::sample"].refuse
    assert "logits are (3,)" in (refuse(logits=randn(3), **asked(3)) or "")
    assert "logits are (3, 0)" in (refuse(logits=randn(3, 0), **asked(3)) or "")
    assert "torch.float64" in (refuse(logits=randn(3, 4).double(), **asked(3)) or "")
    assert "top_k is torch.int64" in (refuse(logits=randn(3, 4), **{**asked(3), "top_k": torch.zeros(3).long()}) or "")
