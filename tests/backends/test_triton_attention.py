"""Paged attention on Triton, interpreted, against its meaning in fp64: mixed batches over a cache whose unwritten places are NaN."""
from triton_env import FLOATS, exact, judge, kernels, picks, plain, randn, run, ulp  # isort: skip  # before anything of Triton

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from infc.backends.triton.kernels.paged_attention import cuts, tiles
from infc.backends.triton.registry import Emit
from infc.compiler.ops.kv_quantized import stored
from torch import Tensor

BF16, F16, F32, I32 = torch.bfloat16, torch.float16, torch.float32, torch.int32
PADDING = 3                              # tokens of no sequence at the end of every batch


@dataclass(frozen=True)
class Kind:
    """Heads and mask of an attention."""

    q_heads: int = 2
    kv_heads: int = 1
    head: int = 32
    window: int = 0
    softcap: float = 0.0
    head_v: int = 0
    block: int = 32
    sinks: torch.dtype | None = None


KINDS = {
    "llama": Kind(4, 1, 128),
    "three to one": Kind(3, 1, 64),
    "equal heads": Kind(2, 2, 32, block=16),
    "soft-cap": Kind(2, 1, 80, softcap=20.0),
    "window": Kind(2, 1, 32, window=40),
    "both": Kind(7, 1, 96, window=70, softcap=30.0),
    "wide": Kind(2, 1, 256),
    "narrow values": Kind(2, 1, 64, head_v=48),
    "sinks": Kind(8, 1, 64, sinks=F32),
    "sinks of a group, in a window": Kind(6, 2, 32, window=40, sinks=BF16),
    "sinks, soft-cap": Kind(3, 1, 48, window=70, softcap=20.0, sinks=F32),
}
# (new tokens, context before them) of each sequence
BATCHES = {
    "decode": [(1, 515)],
    "decodes": [(1, 31), (1, 32), (1, 200), (1, 0)],
    "prefill": [(77, 0)],
    "mixed": [(1, 150), (20, 0), (3, 130), (0, 7), (33, 64), (0, 0)],
}


def step(kind: Kind, batch: list[tuple[int, int]], dtype: torch.dtype, seed: int = 0, codes: str | None = None,
         table: int = 0) -> dict[str, Any]:
    """Arguments of a call: blocks scattered over the pool, NaN wherever no key is, block numbers past a context out of the pool."""
    lens = [new + before for new, before in batch]
    width = max(table, max(-(-length // kind.block) for length in lens) + 1)
    pool, dice = len(batch) * width + 2, torch.Generator().manual_seed(seed)
    blocks = torch.randperm(pool, generator=dice)[: len(batch) * width].reshape(len(batch), width).to(I32)
    caches = [torch.full((pool, kind.kv_heads, kind.block, size), torch.nan, dtype=dtype) for size in (kind.head, kind.head_v or kind.head)]
    for cache in caches:
        for n, length in enumerate(lens):
            at = torch.arange(length)
            new = torch.randn(length, *cache.shape[1::2], generator=dice)
            cache[blocks[n, at // kind.block].long(), :, at % kind.block] = new.to(dtype)
    for n, length in enumerate(lens): blocks[n, -(-length // kind.block):] = 2**30
    starts = torch.tensor([0, *(new for new, _ in batch)]).cumsum(0).to(I32)
    q = randn(int(starts[-1]) + PADDING, kind.q_heads, kind.head, dtype=dtype, seed=seed)
    q[-PADDING:] = torch.nan
    held: dict[str, Tensor] = dict(zip(("k_cache", "v_cache"), caches, strict=True))
    if codes:
        for name in ("k", "v"): held[f"{name}_cache"], held[f"{name}_scale"] = stored(held[f"{name}_cache"], codes)
    return {"q": q, **held, "query_start": starts, "context_len": torch.tensor(lens, dtype=I32), "block_table": blocks,
            "scale": kind.head**-0.5, "window": kind.window, "softcap": kind.softcap,
            "sinks": None if kind.sinks is None else randn(kind.q_heads, dtype=kind.sinks, seed=seed, scale=2) + 2}


def check(arguments: dict[str, Any], pick: int = 0) -> Tensor:
    """Padding gives zeros; every other row is as near to the meaning in fp64 as the reference is, twice over where sums are fp32."""
    op = "infc::paged_attention" + ("_quantized" if "k_scale" in arguments else "")
    found, tokens = run(op, pick, **arguments), int(arguments["query_start"][-1])
    assert bool((found[tokens:] == 0).all()) and len(found) == tokens + PADDING
    heads = (found[:tokens], plain(op, **arguments)[:tokens], exact(op, **arguments)[:tokens])
    judge(*heads, times=1 if found.dtype == BF16 else 2)
    return found


@pytest.mark.parametrize(("kind", "batch"), [*((kind, "mixed") for kind in KINDS), *(("three to one", batch) for batch in BATCHES),
                                             ("both", "decode"), ("wide", "decode"), *(("sinks", batch) for batch in BATCHES)])
def test_every_kind_and_batch(kind: str, batch: str) -> None:
    check(step(KINDS[kind], BATCHES[batch], BF16))


@pytest.mark.slow
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_dtype_and_batch(kind: str, dtype: torch.dtype, batch: str) -> None:
    check(step(KINDS[kind], BATCHES[batch], dtype))


@pytest.mark.parametrize(("kind", "dtype", "batch"), [("three to one", F16, "mixed"), ("three to one", F32, "mixed"),
                                                      ("both", F16, "decodes"), ("both", F32, "decodes"),
                                                      ("sinks, soft-cap", F16, "mixed"), ("sinks, soft-cap", F32, "decodes")], ids=str)
def test_other_dtypes(kind: str, dtype: torch.dtype, batch: str) -> None:
    check(step(KINDS[kind], BATCHES[batch], dtype))


@pytest.mark.parametrize("codes", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("batch", ["decode", "mixed"])
def test_caches_of_codes(batch: str, dtype: torch.dtype, codes: str) -> None:
    check(step(KINDS["three to one"], BATCHES[batch], dtype, codes=codes))


@pytest.mark.parametrize("codes", ["int8", "fp8"])
@pytest.mark.parametrize("batch", ["decode", "mixed"])
def test_r19_zero_channels_and_rows_of_codes_are_exact_zeros(batch: str, codes: str) -> None:
    """A channel of V that is zero over a whole sequence, and tokens whose K and V are zeros: their scale is 0."""
    arguments, tokens = step(KINDS["three to one"], BATCHES[batch], BF16), slice(0, -PADDING)
    arguments["v_cache"][..., 11] = 0
    for name in "kv":
        cache = arguments[f"{name}_cache"]
        cache[:, :, :5] = torch.where(cache[:, :, :5].isnan(), cache[:, :, :5], 0)
        arguments[f"{name}_cache"], arguments[f"{name}_scale"] = stored(cache, codes)
    found = check(arguments).unflatten(1, (3, 64))[tokens]
    assert bool((found[..., 11] == 0).all()) and bool((found != 0).any())
    there = ~arguments["v_scale"].isnan()
    arguments["v_cache"].view(torch.uint8)[:], arguments["v_scale"][there] = 0, 0
    assert bool((check(arguments)[tokens] == 0).all())


@pytest.mark.parametrize(("codes", "dtype", "batch"), [("int8", BF16, "decode"), ("fp8", F16, "mixed"), ("int8", F32, "mixed"),
                                                       ("fp8", BF16, "decodes")], ids=str)
def test_caches_of_codes_and_sinks(codes: str, dtype: torch.dtype, batch: str) -> None:
    check(step(KINDS["sinks of a group, in a window"], BATCHES[batch], dtype, codes=codes))


def test_sinks_of_no_weight_and_of_all_of_it() -> None:
    """-inf changes nothing, a huge one leaves 0: of that head alone, in every cut, a split's parts together counting it once."""
    for batch in ("decode", "mixed"):
        arguments = step(KINDS["sinks"], BATCHES[batch], BF16) | {"sinks": torch.full((8,), -torch.inf)}
        arguments["sinks"][1] = 1e30
        for pick in picks("infc::paged_attention", **arguments):
            found, without = (run("infc::paged_attention", pick, **arguments | more)[:-PADDING].unflatten(1, (8, 64))
                              for more in ({}, {"sinks": None}))
            others = [0, *range(2, 8)]
            assert torch.equal(found[:, others], without[:, others]) and bool((found[:, 1] == 0).all())


@settings(max_examples=12, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 90)), min_size=1, max_size=4), st.sampled_from([(1, 1), (3, 1), (4, 2)]),
       st.sampled_from([0, 1, 33]), st.integers(0, 99))
def test_any_mix(batch: list[tuple[int, int]], heads: tuple[int, int], window: int, seed: int) -> None:
    if any(new for new, _ in batch): check(step(Kind(*heads, 16, window=window), batch, BF16, seed))


def test_what_stands_before_every_window_is_not_read() -> None:
    arguments = step(Kind(window=40), [(1, 200), (2, 150)], BF16)
    kept = run("infc::paged_attention", **arguments)
    for n, low in ((0, 200 - 39), (1, 150 - 39)):
        at = torch.arange(low)
        arguments["k_cache"][arguments["block_table"][n, at // 32].long(), :, at % 32] = torch.nan
        arguments["v_cache"][arguments["block_table"][n, at // 32].long(), :, at % 32] = torch.nan
    assert torch.equal(run("infc::paged_attention", **arguments), kept)


def test_a_view_of_the_merged_projection() -> None:
    """q as the first heads of a wider row: strides, not a copy."""
    arguments = step(KINDS["three to one"], BATCHES["decodes"], BF16)
    wide = torch.full((len(arguments["q"]), 6, 64), torch.nan, dtype=BF16)
    wide[:, 1:4] = arguments["q"]
    assert torch.equal(check(arguments | {"q": wide[:, 1:4]}), check(arguments))


def test_results_of_another_dtype() -> None:
    arguments = step(KINDS["window"], BATCHES["decodes"], BF16) | {"out_dtype": F32}
    assert run("infc::paged_attention", **arguments).dtype == F32
    found, wide = run("infc::paged_attention", **arguments)[:-PADDING], exact("infc::paged_attention", **arguments)[:-PADDING]
    own = plain("infc::paged_attention", **arguments | {"out_dtype": BF16})[:-PADDING]
    assert bool(((found - wide).abs() <= (own - wide).abs().amax(-1, keepdim=True) + ulp(wide.abs().amax(-1, keepdim=True), BF16)).all())


def test_the_grid_is_the_buckets() -> None:
    """Two mixes of one bucket are the same launches: a captured graph replays them."""
    def launches(batch: list[tuple[int, int]]) -> list:
        emit, arguments = Emit(), step(KINDS["three to one"], batch, BF16, table=16)
        kernels()["infc::paged_attention"].lower(emit, torch.empty(len(arguments["q"]), 192, dtype=BF16), **arguments)
        return [(launch.grid, launch.constants, launch.warps, launch.stages) for launch in emit.launches]

    assert launches([(9, 0), (1, 40), (0, 0)]) == launches([(1, 3), (1, 500), (8, 300)])


def test_every_cut_is_taken() -> None:
    sizes = {"group": 4, "kv_heads": 8, "head": 128, "dtype": BF16}
    assert tiles(1, 1, 8192, **sizes).split == 32                       # one sequence fills the card
    assert tiles(1, 1, 64, **sizes).split == 1                          # nothing to share out
    assert tiles(64, 64, 8192, **sizes).split == 1 and tiles(64, 64, 8192, **sizes).rows == 16
    assert tiles(2048, 8, 8192, **sizes).rows == 128 and tiles(2048, 8, 8192, **sizes).split == 1
    assert tiles(8, 8, 8192, **sizes | {"group": 71}).rows == 128       # all query heads of a kv head fit one tile


@pytest.mark.parametrize(("kind", "batch"), [
    ("three to one", BATCHES["decode"]), ("three to one", BATCHES["mixed"]), ("sinks", BATCHES["decode"]),
    pytest.param("three to one", [(250, 0)], marks=pytest.mark.slow)], ids=str)
def test_every_cut_gives_what_attention_means(kind: str, batch: list[tuple[int, int]]) -> None:
    arguments = step(KINDS[kind], batch, BF16)
    several = picks("infc::paged_attention", **arguments)
    assert 2 <= len(several) <= 4
    for pick in several: check(arguments, pick)


def test_cuts_of_real_sizes() -> None:
    """The rule's first, no two alike, at most four; of fp32 one."""
    sizes = {"group": 4, "kv_heads": 8, "head": 128}
    for tokens, sequences in ((1, 1), (64, 64), (512, 64), (2048, 64)):
        several = cuts(tokens, sequences, 8192, dtype=BF16, **sizes)
        assert several[0] == tiles(tokens, sequences, 8192, dtype=BF16, **sizes)
        assert 2 <= len({*several}) == len({*map(str, several)}) <= 4 and all(cut.split <= 32 for cut in several)
    assert len(cuts(8, 8, 8192, dtype=F32, **sizes)) == 1


@pytest.mark.parametrize(("change", "reason"), [
    ({"k_cache": torch.zeros(9, 1, 32, 32)}, "q is torch.bfloat16, the caches are torch.float32 and torch.bfloat16"),
    ({"q": torch.zeros(4, 3, 32, dtype=BF16), "k_cache": torch.zeros(9, 2, 32, 32, dtype=BF16)}, "3 query heads do not share 2 kv heads"),
    ({"q": torch.zeros(4, 2, 64, dtype=BF16)[..., ::2]}, "a head of q is not contiguous"),
    ({"block_table": torch.zeros(1, 2, dtype=torch.int64)}, "is not i32"),
    ({"q": torch.zeros(4, 200, 32, dtype=BF16)}, "200 query heads share a kv head: up to 128"),
    ({"sinks": torch.zeros(3)}, "sinks [3] are not one row of 2"),
    ({"sinks": torch.zeros(4)[::2]}, "sinks [2] are not one row of 2"),
    ({"sinks": torch.zeros(2, dtype=torch.float64)}, "sinks are torch.float64: bf16, fp16 and fp32 are known"),
])
def test_refuses(change: dict[str, Tensor], reason: str) -> None:
    arguments = step(Kind(), [(1, 3)], BF16) | change
    found = kernels()["infc::paged_attention"].refuse(**arguments)
    assert found is not None and reason in found


def test_refuses_wide_heads_and_unknown_codes() -> None:
    refuse, quantized = kernels()["infc::paged_attention"].refuse, kernels()["infc::paged_attention_quantized"].refuse
    assert refuse(**step(Kind(head=264), [(1, 3)], BF16)) == "heads of 264 channels are not supported on this target: up to 256 are"
    held = step(Kind(), [(1, 3)], BF16, codes="int8")
    assert quantized(**held) is None
    assert "caches of torch.bfloat16" in str(quantized(**held | {"k_cache": torch.zeros(1, dtype=BF16)}))
    assert all(refuse(**step(Kind(), [(1, 3)], dtype)) is None for dtype in FLOATS)
