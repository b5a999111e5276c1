"""Products and lookups of codes on Triton, interpreted, against their meaning in fp64; and the constants of their assembly."""
from triton_env import FLOATS, conform, exact, kernels, picks, plain, randn, run, ulp  # isort: skip  # before anything of Triton

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from infc.backends.triton import primitives
from infc.backends.triton.kernels.linear_quantized import cuts, tiles
from infc.backends.triton.registry import Emit
from infc.compiler.ops.codes import E4M3, groups, pack_codes
from ptx import run_ptx

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
ROWS = [(0, 0), (8, 0), (8, 32)]         # act_bits, act_group


def weight(n: int, k: int, bits: int, group: int, offset: bool, seed: int = 0) -> dict[str, Any]:
    """A weight whose values are about k**-0.5 in every group, each group with a scale of its own."""
    dice = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**bits, (n, k), generator=dice).to(torch.uint8)
    scale = (torch.rand(n, groups(k, group), generator=dice) + 0.5) * k**-0.5 / 2 ** (bits - 2)
    return {"codes": pack_codes(codes, bits), "scale": scale.half(), "bits": bits, "group": group,
            "offset": (-scale * 2 ** (bits - 1) * (0.9 + torch.rand(scale.shape, generator=dice) / 5)).half() if offset else None}


def floats(n: int, k: int, group: int, tensor: bool = False, seed: int = 0) -> dict[str, Any]:
    """The same of e4m3 codes, every finite one of them equally often. tensor: one scale for all."""
    dice = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 254, (n, k), generator=dice).to(torch.uint8)
    codes += codes > 126                                                     # 127 and 255 are NaN
    scale = (torch.rand((1, 1) if tensor else (n, groups(k, group)), generator=dice) + 0.5) * k**-0.5 / 128
    return {"codes": codes.view(E4M3), "scale": scale.half(), "bits": 8, "group": group, "offset": None}


def check(op: str, pick: int = 0, **arguments: Any) -> None:
    """As near to fp64 as the reference, plus one ulp of the row; fp32 sums: plus one ulp of the magnitudes that are added."""
    found, own, wide = run(op, pick, **arguments), plain(op, **arguments), exact(op, **arguments)
    assert found.shape == wide.shape and found.dtype == own.dtype and not found.isnan().any()
    size = wide.abs().amax(-1, keepdim=True)
    if found.dtype == F32:
        x = arguments["x"].abs().amax(-1, keepdim=True).double()
        size = size + x * arguments["x"].shape[-1] ** 0.5 * 2                # of sums of k values of about k**-0.5 times |x|
    assert bool(((found - wide).abs() <= (own - wide).abs().amax(-1, keepdim=True) + ulp(size, found.dtype)).all())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize(("bits", "group"), [(8, 32), (8, 0), (4, 32), (4, 128), (4, 0)])
def test_linear(bits: int, group: int, offset: bool, dtype: torch.dtype) -> None:
    for rows, n, k in ((1, 70, 600), (20, 40, 130)):
        more = {"bias": randn(n, dtype=dtype, seed=2), "residual": randn(rows, n, dtype=dtype, seed=3)} if rows == 1 else {}
        check("infc::linear_quantized", x=randn(rows, k, dtype=dtype), **weight(n, k, bits, group, offset),
              **{"bias": None, "residual": None, "act_bits": 0, "act_group": 0} | more)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("act_bits", [0, 8])
@pytest.mark.parametrize(("group", "tensor"), [(0, False), (0, True), (32, False), (128, False)])
def test_e4m3(group: int, tensor: bool, act_bits: int, dtype: torch.dtype) -> None:
    for rows, n, k in ((1, 70, 600), (7, 33, 257), (20, 40, 130)):
        more = {"bias": randn(n, dtype=dtype, seed=2), "residual": randn(rows, n, dtype=dtype, seed=3)} if rows == 1 else {}
        check("infc::linear_quantized", x=randn(rows, k, dtype=dtype), **floats(n, k, group, tensor),
              **{"bias": None, "residual": None, "act_bits": act_bits, "act_group": 0} | more)


@pytest.mark.parametrize("tensor", [False, True])
@pytest.mark.parametrize(("rows", "act", "act_bits"), [(1, "silu", 0), (6, "gelu", 8), (40, "gelu_tanh", 0), (70, "silu", 8)])
def test_swiglu_of_e4m3(rows: int, act: str, act_bits: int, tensor: bool) -> None:
    check("infc::linear_swiglu_quantized", x=randn(rows, 520, dtype=BF16), **floats(2 * 35, 520, 0, tensor), act=act, act_bits=act_bits,
          act_group=0)


@pytest.mark.parametrize("rows", [2, 70])
@pytest.mark.parametrize(("act_group", "dtype"), [(0, BF16), (32, BF16), (32, F16), (32, F32)], ids=str)
@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("bits", [8, 4])
def test_rounded_rows(bits: int, offset: bool, act_group: int, dtype: torch.dtype, rows: int) -> None:
    check("infc::linear_quantized", x=randn(rows, 200, dtype=dtype), **weight(40, 200, bits, 32, offset), bias=None, residual=None,
          act_bits=8, act_group=act_group)


@pytest.mark.parametrize(("bits", "group", "offset"), [(8, 32, False), (4, 64, True)])
@pytest.mark.parametrize(("rows", "act", "act_bits"), [(1, "silu", 0), (6, "gelu", 8), (40, "gelu_tanh", 0)])
def test_swiglu(rows: int, act: str, act_bits: int, bits: int, group: int, offset: bool) -> None:
    check("infc::linear_swiglu_quantized", x=randn(rows, 520, dtype=BF16), **weight(2 * 35, 520, bits, group, offset), act=act,
          act_bits=act_bits, act_group=group)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 300), st.sampled_from([4, 8]), st.sampled_from([0, 32, 64, 128, 256]),
       st.booleans(), st.sampled_from(ROWS), st.sampled_from(FLOATS))
def test_any_size(rows: int, n: int, k: int, bits: int, group: int, offset: bool, act: tuple[int, int], dtype: torch.dtype) -> None:
    act_bits, act_group = act
    check("infc::linear_quantized", x=randn(rows, k, dtype=dtype), **weight(n, k, bits, group, offset), bias=None, residual=None,
          act_bits=act_bits, act_group=act_group and group)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 300), st.sampled_from([0, 32, 64, 128, 256]), st.booleans(),
       st.sampled_from([0, 8]), st.sampled_from(FLOATS))
def test_e4m3_of_any_size(rows: int, n: int, k: int, group: int, tensor: bool, act_bits: int, dtype: torch.dtype) -> None:
    check("infc::linear_quantized", x=randn(rows, k, dtype=dtype), **floats(n, k, 0 if tensor else group, tensor), bias=None, residual=None,
          act_bits=act_bits, act_group=0)


@pytest.mark.parametrize("e4m3", [False, True])
def test_rows_become_the_codes_of_the_reference(e4m3: bool) -> None:
    """Ties, zeros, tiny and huge values: the first launch's codes and scales are those of infc::quantize_rows, bit for bit."""
    x = randn(80, 300)
    x[0], x[1], x[2, :32] = 0.0, 1e-31, torch.arange(32) / 2 - 8
    x[3] *= 1e30
    x[4, :256] = torch.arange(256) / 256 * 2.0**-4
    x[4, 256] = 448.0                                                        # below 2**-6 e4m3 has steps of 2**-9
    for group in (0, 32):
        emit = Emit()
        held = {"x": x, **(floats(3, 300, group) if e4m3 else weight(3, 300, 8, 32, False)), "bias": None, "residual": None, "act_bits": 8,
                "act_group": group}
        kernels()["infc::linear_quantized"].lower(emit, torch.empty(80, 3), **held)
        first = emit.launches[0]
        first.function[first.grid](*first.args, **first.constants)
        codes, scale = torch.ops.infc.quantize_rows(x, 8, group, e4m3)
        assert first.args[1].dtype == codes.dtype == (E4M3 if e4m3 else torch.int8)
        assert torch.equal(first.args[1].float(), codes.float()) and torch.equal(first.args[2], scale)


@pytest.mark.parametrize("e4m3", [False, True])
@pytest.mark.parametrize(("rows", "act_bits"), [(3, 0), (3, 8), (40, 0), (40, 8)])
def test_rows_of_zeros_give_zeros_and_what_is_not_finite_stays_in_its_row(rows: int, act_bits: int, e4m3: bool) -> None:
    """FIELD R19: a padding row has no largest value and so no scale; a NaN in one row is nobody else's."""
    x, w = randn(rows, 200, dtype=BF16), floats(40, 200, 0) if e4m3 else weight(40, 200, 4, 32, True)
    clean = run("infc::linear_quantized", x=x, **w, bias=None, residual=None, act_bits=act_bits, act_group=0)
    x[0], x[1, 7] = 0, torch.nan
    found = run("infc::linear_quantized", x=x, **w, bias=None, residual=None, act_bits=act_bits, act_group=0)
    assert bool((found[0] == 0).all()) and bool(found[1].isnan().all()) and torch.equal(found[2:], clean[2:])
    x[1, 7] = -torch.inf
    found = run("infc::linear_quantized", x=x, **w, bias=None, residual=None, act_bits=act_bits, act_group=0)
    assert not bool(found[1].isfinite().any()) and torch.equal(found[2:], clean[2:])


@pytest.mark.parametrize(("rows", "act_bits", "bits", "offset"), [(3, 8, 4, True), (3, 0, 8, False), (40, 0, 4, True)])
def test_every_cut_gives_what_the_product_means(rows: int, act_bits: int, bits: int, offset: bool) -> None:
    given = {"x": randn(rows, 520, dtype=BF16), "act_bits": act_bits, "act_group": 0}
    plain, pair = weight(100, 520, bits, 32, offset), weight(2 * 50, 520, bits, 32, offset)
    for op, arguments in (("infc::linear_quantized", given | plain | {"bias": None, "residual": None}),
                          ("infc::linear_swiglu_quantized", given | pair | {"act": "gelu"})):
        several = picks(op, **arguments)
        assert 2 <= len(several) <= 4
        for pick in several: check(op, pick, **arguments)


def test_cuts_of_real_sizes() -> None:
    """The rule's first, no two alike, at most four; of fp32 one."""
    for rows, bits, more in ((1, 4, False), (16, 8, True), (64, 4, True), (2048, 4, False)):
        several = cuts(rows, 4096, 4096, bits, 32, more, False)
        assert several[0] == tiles(rows, 4096, 4096, bits, 32, more, False) and 2 <= len({*several}) == len({*map(str, several)}) <= 4
        assert all(cut.split * cut.block_k * 2 <= 4096 for cut in several)
    assert len(cuts(8, 4096, 4096, 4, 32, False, True)) == 1


def test_every_cut_is_taken() -> None:
    few = [tiles(rows, 4096, 4096, bits, 32, more=False, wide=False) for rows in (1, 4, 8, 16) for bits in (4, 8)]
    assert {cut.block_g for cut in few} >= {2, 4, 8} and all(16 <= cut.block_g * cut.block_m <= 32 and cut.split > 1 for cut in few)
    assert all(cut.block_k == 32 * cut.block_g for cut in few)
    many = tiles(2048, 4096, 4096, 4, 32, more=False, wide=False)
    assert (many.block_m, many.block_n, many.block_k, many.block_g) == (128, 128, 32, 1)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("index_type", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(("bits", "group", "offset", "k"), [(8, 32, False, 100), (4, 32, True, 101), (4, 0, False, 2050), (8, 0, True, 1)])
def test_embedding(bits: int, group: int, offset: bool, k: int, index_type: torch.dtype, dtype: torch.dtype) -> None:
    indices = torch.tensor([[0, 49], [7, 7]], dtype=index_type)
    conform("infc::embedding_quantized", **weight(50, k, bits, group, offset), indices=indices, k=k, out_dtype=dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("group", "tensor", "k"), [(0, False, 100), (0, True, 2050), (32, False, 101)])
def test_embedding_of_e4m3(group: int, tensor: bool, k: int, dtype: torch.dtype) -> None:
    conform("infc::embedding_quantized", **floats(50, k, group, tensor), indices=torch.tensor([[0, 49], [7, 7]]), k=k, out_dtype=dtype)


def test_a_row_that_is_not_there_is_zeros() -> None:
    found = run("infc::embedding_quantized", **weight(5, 64, 8, 32, True), indices=torch.tensor([-1, 5, 2]), k=64, out_dtype=BF16)
    assert bool((found[:2] == 0).all()) and bool((found[2] != 0).any())


@pytest.mark.parametrize(("change", "reason"), [
    ({"bits": 3}, "codes of 3 bits: 4 and 8 are known"),
    ({"group": 48}, "groups of 48: 32, 64, 128, 256 and whole rows"),
    ({"act_bits": 16}, "rows rounded to 16 bits: 8 is known"),
    ({"bf16_rows": 128}, "rounded to bf16 from some number of rows on"),
    ({"act_bits": 8, "act_group": 64}, "rows in groups of 64, the weight in groups of 32"),
    ({"codes": torch.zeros(3, 200, dtype=torch.int8)}, "codes are torch.int8: u8 and e4m3 are known"),
    ({"codes": torch.zeros(3, 200).to(E4M3), "offset": torch.ones(3, 7).half()}, "e4m3 codes have 8 bits and no offset"),
    ({"scale": torch.ones(3, 7)}, "scale is torch.float32: fp16 is known"),
    ({"x": randn(400, 2).T}, "x is not contiguous"),
    ({"out_dtype": torch.float64}, "results in torch.float64"),
])
def test_refuses(change: dict, reason: str) -> None:
    held: dict[str, Any] = {"x": randn(2, 200), **weight(3, 200, 8, 32, False), "act_bits": 0, "act_group": 0}
    held |= {"bias": None, "residual": None}
    with pytest.raises(ValueError, match=reason): run("infc::linear_quantized", **held | change)


# ---- the assembly that makes numbers of codes, of which the interpreter sees only what it stands for

ASSEMBLY = [(name, dtype) for name in ("BYTES_8", "SIGNED_8", "PARTS_8", "PARTS_4", "HALVES_4", "BYTES_E4M3", "PARTS_E4M3")
            for dtype in (BF16, F16)]


@pytest.mark.parametrize(("name", "dtype"), [*ASSEMBLY, ("HALVES_4", torch.int8)], ids=str)
def test_assembly(name: str, dtype: torch.dtype) -> None:
    """Every byte (of e4m3 no NaN) at every place of a register. Parts of an input come out in the order `pack` hands registers over."""
    text = getattr(primitives, f"_{ {BF16: 'BF16', F16: 'FP16', torch.int8: 'INT8'}[dtype]}_{name}").value
    raw = torch.randint(0, 256, (4096, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    raw[:256] = torch.arange(256, dtype=torch.uint8)[:, None]
    if name.endswith("E4M3"): raw[raw & 127 == 127] ^= 1
    numbers = raw.view(E4M3).float()
    low, high, words = raw.int() & 15, raw.int() >> 4, raw.flatten().view(torch.int16).int().reshape(-1, 2) & 0xFFFF
    parts = {
        "BYTES_8": [raw.int() - 128], "SIGNED_8": [raw.view(torch.int8).int()], "HALVES_4": [low - 8, high - 8],
        "BYTES_E4M3": [numbers], "PARTS_E4M3": [numbers[:, 0::2], numbers[:, 1::2]],
        "PARTS_8": [(words & 255) - 128, (words >> 8) - 128], "PARTS_4": [(words >> 4 * i & 15) - 8 for i in range(4)],
    }[name]
    registers = sum(part.shape[1] * dtype.itemsize // 4 for part in parts)
    found = iter(run_ptx(text, registers, raw.numpy().view("uint32")[:, 0]))
    for part in parts:
        held = [torch.from_numpy(next(found).view("int32").copy()) for _ in range(part.shape[1] * dtype.itemsize // 4)]
        assert torch.equal(torch.stack(held, -1).view(dtype).to(part.dtype), part)
