"""Dense attention on Triton, interpreted, against its meaning in fp64: every mask, biases that broadcast, rows that see nothing."""
from triton_env import FLOATS, conform, exact, kernels, picks, plain, randn, run, ulp  # isort: skip  # before anything of Triton

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from infc.compiler.ops.attention import MASKS
from torch import Tensor

BF16, F32 = torch.bfloat16, torch.float32


def inputs(heads: tuple[int, int], s: int, length: int, d: int, dv: int = 0, dtype: torch.dtype = BF16, batch: int = 2) -> dict[str, Any]:
    return {"q": randn(batch, heads[0], s, d, dtype=dtype), "k": randn(batch, heads[1], length, d, dtype=dtype, seed=1),
            "v": randn(batch, heads[1], length, dv or d, dtype=dtype, seed=2), "scale": d**-0.5}


def check(**arguments: Any) -> None:
    """bf16 and fp16: as STYLE says. fp32: twice the reference's own error, plus one ulp of the values that are weighed and added."""
    if arguments["q"].dtype != F32:
        conform("infc::attention", **arguments)
        return
    found, own, wide = (f("infc::attention", **arguments) for f in (run, plain, exact))
    allowed = 2 * (own - wide).abs().amax(-1) + ulp(arguments["v"].abs().max(), F32)
    assert bool(((found - wide).abs().amax(-1) <= allowed).all()) and not found.isnan().any()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("mask", MASKS)
def test_masks(mask: str, window: int, dtype: torch.dtype) -> None:
    check(**inputs((3, 1), 40, 70, 32, dtype=dtype), mask=mask, window=window)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("mask", "window", "softcap"), [("none", 0, 0.0), ("causal", 20, 0.0), ("causal", 0, 15.0)])
def test_sinks(mask: str, window: int, softcap: float, dtype: torch.dtype) -> None:
    bias = randn(2, 1, 40, 70, seed=5) if mask == "none" else None
    check(**inputs((6, 2), 40, 70, 32, dtype=dtype), mask=mask, window=window, softcap=softcap, bias=bias,
          sinks=randn(6, dtype=BF16 if dtype == BF16 else F32, seed=7, scale=2) + 2)


def test_sinks_of_no_weight_and_of_all_of_it() -> None:
    """-inf changes nothing, a huge one leaves 0; and a row that sees nothing gives 0 with any."""
    held = inputs((3, 1), 9, 5, 16)
    found = run("infc::attention", **held, mask="causal", sinks=torch.tensor([-torch.inf, 1e30, 0.0]))
    assert torch.equal(found[:, 0], run("infc::attention", **held, mask="causal")[:, 0])
    assert bool((found[:, 1] == 0).all()) and bool((found[:, :, :4] == 0).all()) and bool((found[:, 2, 4:] != 0).any())


def test_every_cut_gives_what_attention_means() -> None:
    arguments = {**inputs((2, 1), 200, 200, 64, batch=1), "mask": "causal"}
    several = picks("infc::attention", **arguments)
    assert 2 <= len(several) <= 4
    for pick in several: conform("infc::attention", pick=pick, **arguments)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.sampled_from([(1, 1), (4, 2), (7, 1)]), st.integers(1, 40), st.integers(1, 90), st.sampled_from([16, 24, 80]),
       st.sampled_from(MASKS), st.sampled_from([0, 1, 33]), st.sampled_from([0.0, 20.0]))
def test_any_size(heads: tuple[int, int], s: int, length: int, d: int, mask: str, window: int, softcap: float) -> None:
    conform("infc::attention", **inputs(heads, s, length, d, 16), mask=mask, window=window, softcap=softcap)


@pytest.mark.parametrize("shape", [(2, 4, 20, 70), (1, 1, 20, 70), (2, 1, 1, 70), (70,)], ids=str)
@pytest.mark.parametrize("kind", ["bool", "float", "-inf"])
def test_biases(shape: tuple[int, ...], kind: str) -> None:
    bias: Tensor = randn(*shape, seed=5)
    if kind == "bool": bias = bias > 0
    if kind == "-inf": bias = torch.where(bias > 0, bias, -torch.inf)
    check(**inputs((4, 2), 20, 70, 32, dtype=F32), bias=bias, mask="none", softcap=15.0)


def test_a_row_that_sees_nothing_gives_zeros() -> None:
    bias = torch.ones(1, 1, 5, 9, dtype=torch.bool)
    bias[..., 3, :] = False
    found = conform("infc::attention", **inputs((2, 1), 5, 9, 16), bias=bias)
    assert bool((found[:, :, 3] == 0).all())
    assert bool((run("infc::attention", **inputs((2, 1), 9, 5, 16), mask="causal")[:, :, :4] == 0).all())


def test_views_of_a_merged_projection() -> None:
    """[B,S,H,D] seen as [B,H,S,D]: strides, not a copy."""
    held = inputs((4, 2), 30, 30, 32)
    views = {name: held[name].transpose(1, 2).contiguous().transpose(1, 2) for name in "qkv"}
    assert not views["q"].is_contiguous() and torch.equal(run("infc::attention", **held | views), run("infc::attention", **held))


@pytest.mark.parametrize(("change", "reason"), [
    ({"k": randn(2, 3, 9, 16, dtype=BF16)}, "4 query heads do not share 3 kv heads evenly"),
    ({"mask": "diagonal"}, "mask 'diagonal' is none of none, causal, causal_top_left"),
    ({"v": randn(2, 2, 9, 16)}, "k and v are torch.bfloat16 and torch.float32"),
    ({"q": randn(2, 4, 16, 9, dtype=BF16).transpose(2, 3)}, "is not contiguous"),
    ({"bias": torch.zeros(9, dtype=torch.int32)}, "bias is torch.int32"),
    ({"sinks": torch.zeros(2)}, "sinks [2] are not one row of 4"),
])
def test_refuses(change: dict, reason: str) -> None:
    assert reason in str(kernels()["infc::attention"].refuse(**inputs((4, 2), 9, 9, 16) | change))
