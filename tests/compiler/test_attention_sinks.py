"""Sinks: one learned logit a query head in each softmax's sum, in every attention operator, against the formula in fp64."""
import math
from typing import Any

import pytest
import torch
from infc.compiler.ops import attention, by_name, paged_attention, paged_attention_quantized
from infc.compiler.ops.attention import visible
from infc.compiler.ops.kv_quantized import read, stored
from torch import Tensor

F64 = torch.float64


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def formula(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float, softcap: float, sinks: Tensor, bias: Tensor | None = None,
) -> Tensor:
    """p_j = exp(s_j - m) / (sum_j exp(s_j - m) + exp(sink - m)), m the largest of them all; one row at a time."""
    group, out = q.shape[1] // k.shape[1], torch.zeros(*q.shape[:3], v.shape[3], dtype=F64)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for i in range(q.shape[2]):
                s = k[b, h // group] @ q[b, h, i] * scale
                if softcap: s = softcap * torch.tanh(s / softcap)
                if bias is not None: s = s + bias[i]
                s = s[seen[i]]
                m = torch.cat((s, sinks[h : h + 1])).max()
                weights = torch.exp(s - m)
                out[b, h, i] = weights @ v[b, h // group][seen[i]] / (weights.sum() + torch.exp(sinks[h] - m))
    return out


@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize(("mask", "window"), [("none", 0), ("causal", 0), ("causal", 4), ("causal_top_left", 0)])
@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (5, 1)])
def test_attention_is_the_formula(heads: tuple[int, int], mask: str, window: int, softcap: float) -> None:
    q, k, v = rand(2, heads[0], 7, 8), rand(2, heads[1], 9, 8, seed=1), rand(2, heads[1], 9, 6, seed=2)
    sinks, bias = 2 * rand(heads[0], seed=3), rand(7, 9, seed=4)
    seen = visible(mask, window, 7, 9)
    for added in (None, bias):
        found = attention(q, k, v, added, 0.7, mask, window, softcap, sinks)
        torch.testing.assert_close(found, formula(q, k, v, seen, 0.7, softcap, sinks, added), rtol=1e-12, atol=1e-14)


def test_the_sink_is_neither_scaled_nor_capped() -> None:
    """Scores of 0: the one key gets 1 / (1 + e^sink), whatever scale and soft-cap are."""
    zero, one = torch.zeros(1, 1, 1, 4, dtype=F64), torch.ones(1, 1, 1, 4, dtype=F64)
    for scale, softcap in ((1.0, 0.0), (0.01, 0.0), (1.0, 0.5)):
        found = attention(zero, zero, one, None, scale, "none", 0, softcap, torch.tensor([3.0], dtype=F64))
        assert math.isclose(float(found[0, 0, 0, 0]), 1 / (1 + math.exp(3)), rel_tol=1e-12)


def test_a_row_that_sees_nothing_gives_zero() -> None:
    q, k, v = rand(1, 2, 5, 8), rand(1, 2, 3, 8, seed=1), rand(1, 2, 3, 8, seed=2)
    hidden = torch.zeros(5, 3, dtype=torch.bool)
    for sinks in (torch.zeros(2), torch.full((2,), -torch.inf), torch.full((2,), 1e30)):
        assert bool((attention(q, k, v, hidden, 0.3, sinks=sinks) == 0).all())
        assert bool((attention(q, k, v, None, 0.3, "causal", sinks=sinks)[:, :, :2] == 0).all())     # before the first key


def test_a_sink_of_minus_infinity_is_none_and_a_huge_one_leaves_nothing() -> None:
    q, k, v = (rand(2, 4, 6, 8, seed=i) for i in range(3))
    none = attention(q, k, v, None, 0.3, "causal", 3, 5.0)
    torch.testing.assert_close(attention(q, k, v, None, 0.3, "causal", 3, 5.0, torch.full((4,), -torch.inf)), none, rtol=1e-14, atol=0)
    assert bool((attention(q, k, v, None, 0.3, "causal", sinks=torch.full((4,), 1e30)) == 0).all())
    mixed = attention(q, k, v, None, 0.3, "causal", 3, 5.0, torch.tensor([-torch.inf, 1e30, -torch.inf, 0.0]))
    torch.testing.assert_close(mixed[:, ::2], none[:, ::2], rtol=1e-14, atol=0)
    assert bool((mixed[:, 1] == 0).all()) and bool((mixed[:, 3].abs() < none[:, 3].abs()).all())


LENGTHS = ((5, 40), (1, 0), (1, 70), (0, 3), (33, 0))
"""(new tokens, context before them) of each sequence."""


def step(heads: int, kv_heads: int, head: int) -> tuple[dict[str, Any], list[tuple[Tensor, ...]]]:
    """Arguments of a paged call over a pool of noise, and q, k, v [H,n,D] of each sequence."""
    lens = [new + before for new, before in LENGTHS]
    width = max(-(-n // 32) for n in lens)
    blocks = torch.randperm(len(lens) * width, generator=torch.Generator().manual_seed(0)).reshape(len(lens), width).to(torch.int32)
    caches = [rand(blocks.numel(), kv_heads, 32, head, seed=seed) for seed in (1, 2)]
    starts = torch.tensor([0, *(new for new, _ in LENGTHS)]).cumsum(0).to(torch.int32)
    q = rand(int(starts[-1]), heads, head)
    alone = []
    for n, length in enumerate(lens):
        at = torch.arange(length)
        keys = (c[blocks[n, at // 32].long(), :, at % 32].transpose(0, 1) for c in caches)
        alone.append((q[starts[n] : starts[n + 1]].transpose(0, 1), *keys))
    return {"q": q, "k_cache": caches[0], "v_cache": caches[1], "query_start": starts, "context_len": torch.tensor(lens, dtype=torch.int32),
            "block_table": blocks, "scale": 0.4}, alone


@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (7, 0.0), (40, 2.0)])
def test_paged_attention_is_attention_of_each_sequence(window: int, softcap: float) -> None:
    given, alone = step(4, 2, 8)
    sinks = 2 * rand(4, seed=9)
    found = paged_attention(**given, window=window, softcap=softcap, sinks=sinks)
    each = [attention(q[None], k[None], v[None], None, 0.4, "causal", window, softcap, sinks)[0].transpose(0, 1).flatten(1)
            for q, k, v in alone]
    torch.testing.assert_close(found, torch.cat(each), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_attention_over_codes_is_that_over_what_they_mean(format: str) -> None:
    given, _ = step(4, 2, 8)
    held = [stored(given[name], format) for name in ("k_cache", "v_cache")]
    meant = {name: read(*parts, F64) for name, parts in zip(("k_cache", "v_cache"), held, strict=True)}
    codes = {f"{x}_{what}": part for x, parts in zip("kv", held, strict=True) for what, part in zip(("cache", "scale"), parts, strict=True)}
    sinks = 2 * rand(4, seed=9)
    torch.testing.assert_close(paged_attention_quantized(**given | codes, window=9, sinks=sinks),
                               paged_attention(**given | meant, window=9, sinks=sinks), rtol=1e-12, atol=1e-14)


def calls() -> dict[str, dict[str, Any]]:
    """Each operator's arguments, without sinks."""
    given, _ = step(4, 2, 8)
    given = {name: value.float() if isinstance(value, Tensor) and value.dtype == F64 else value for name, value in given.items()}
    codes = {f"{x}_{what}": part for x in "kv" for what, part in zip(("cache", "scale"), stored(given[f"{x}_cache"], "int8"), strict=True)}
    return {"infc::attention": {"q": torch.randn(1, 4, 3, 8), "k": torch.randn(1, 2, 5, 8), "v": torch.randn(1, 2, 5, 8), "scale": 0.4},
            "infc::paged_attention": given, "infc::paged_attention_quantized": given | codes}


@pytest.mark.parametrize("name", calls())
def test_what_every_operator_keeps(name: str) -> None:
    """opcheck; the bytes of the sinks; one a query head and no other number; a narrow sink is what it widens to."""
    given, operator = calls()[name], by_name(name)
    sinks = torch.randn(4)
    torch.library.opcheck(operator.call, (), given | {"sinks": sinks})
    plain, sunk = operator.cost(**given), operator.cost(**given, sinks=sinks)
    assert (sunk.bytes - plain.bytes, sunk.flops, sunk.key_bytes) == (16, plain.flops, plain.key_bytes)
    for wrong in (torch.randn(2), torch.randn(4, 1), torch.randn(1)):
        with pytest.raises(ValueError, match=r"sinks are \[.*\] for 4 query heads"): operator.call(**given, sinks=wrong)
    narrow = sinks.bfloat16()
    assert torch.equal(operator.call(**given, sinks=narrow), operator.call(**given, sinks=narrow.float()))
