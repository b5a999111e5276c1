"""Norms that give codes on Triton, interpreted: those of the norm's own result, bit for bit; products of rows that come so; launches."""
from triton_env import FLOATS, kernels, randn, run, several  # isort: skip  # before anything of Triton

from collections import Counter
from typing import Any

import pytest
import torch
from decoders import captured, llama
from hypothesis import given, settings
from hypothesis import strategies as st
from infc.backends.program import Store
from infc.backends.triton import backend
from infc.backends.triton.build import build
from infc.backends.triton.registry import Emit
from infc.compiler import driver
from infc.compiler.costs.cost_table import CostTable
from infc.compiler.costs.phases import value
from infc.compiler.lowering import build_programs, region_cost
from infc.compiler.ops.codes import E4M3, groups, pack_codes, row_codes
from torch import Tensor

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
SHAPES = [(1, 1), (3, 7), (1, 33), (2, 5, 1023), (2, 576), (2, 4096), (0, 8)]


def norms(shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, dict[str, Any]]:
    """The arguments of each norm by its name."""
    x, w = randn(*shape, dtype=dtype), randn(shape[-1], dtype=dtype, seed=1)
    return {"rms_norm": {"x": x, "w": w, "eps": 1e-5}, "layer_norm": {"x": x + 3, "w": w, "b": w, "eps": 1e-5},
            "add_rms_norm": {"x": x, "residual": randn(*shape, dtype=dtype, seed=3), "w": w, "eps": 1e-6}}


def check(name: str, arguments: dict[str, Any], group: int, e4m3: bool, out: torch.dtype | None = None) -> None:
    """What the norm's kernel gives wide, then infc::quantize_rows: the same bits."""
    wide = several(run(f"infc::{name}", **arguments, out_dtype=out))
    codes, scale, *sums = several(run(f"infc::{name}_quantized", **arguments, out_dtype=out, group=group, e4m3=e4m3))
    same, its = row_codes(wide[0], 8, group, e4m3)
    assert codes.dtype == same.dtype == (E4M3 if e4m3 else torch.int8) and scale.shape == its.shape
    assert torch.equal(codes.float(), same.float()) and torch.equal(scale, its)
    assert len(sums) == len(wide) - 1 and all(map(torch.equal, sums, wide[1:]))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("group", [0, 32, 128])
@pytest.mark.parametrize("e4m3", [False, True])
def test_the_codes_of_the_norms_own_result(e4m3: bool, group: int, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        for name, arguments in norms(shape, dtype).items(): check(name, arguments, group, e4m3)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("out", FLOATS, ids=str)
def test_the_result_is_rounded_to_its_dtype_first(out: torch.dtype, dtype: torch.dtype) -> None:
    for name, arguments in norms((3, 100), dtype).items(): check(name, arguments, 32, False, out)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.integers(1, 4), st.integers(1, 300), st.sampled_from(FLOATS), st.floats(1e-3, 1e3), st.sampled_from([0, 32, 64, 256]),
       st.booleans())
def test_any_width_and_size(rows: int, n: int, dtype: torch.dtype, size: float, group: int, e4m3: bool) -> None:
    x, w = randn(rows, n, dtype=dtype, seed=n, scale=size), randn(n, dtype=dtype, seed=1)
    check("rms_norm", {"x": x, "w": w, "eps": 1e-5}, group, e4m3)
    check("layer_norm", {"x": x, "w": w, "b": None, "eps": 1e-5}, group, e4m3)


def test_zeros_ties_and_huge_rows() -> None:
    x = randn(4, 300)
    x[0], x[1], x[2] = 0.0, x[1] * 1e15, torch.arange(300) / 2 - 75
    for group in (0, 32):
        for e4m3 in (False, True): check("rms_norm", {"x": x, "w": torch.ones(300), "eps": 1e-5}, group, e4m3)


@pytest.mark.parametrize("e4m3", [False, True])
@pytest.mark.parametrize("group", [0, 32])
def test_a_nan_is_told_by_the_scale(group: int, e4m3: bool) -> None:
    """Of a norm, and of rows that a product rounds: what is not a number stays that, as in the reference."""
    x = randn(3, 100)
    x[1, 40], x[2, 40] = torch.nan, torch.inf
    _, scale = run("infc::rms_norm_quantized", x=x, w=torch.ones(100), eps=1e-5, group=group, e4m3=e4m3)
    assert not scale[0].isnan().any() and torch.equal(scale.isnan(), row_codes(run("infc::rms_norm", x=x, w=torch.ones(100), eps=1e-5),
                                                                               8, group, e4m3)[1].isnan())
    held = {"x": x, **weight(3, 100, 8, 0 if e4m3 else 32, e4m3), "bias": None, "residual": None, "act_bits": 8,
            "act_group": 0 if e4m3 else group}
    y = run("infc::linear_quantized", **held)
    assert not y[0].isnan().any() and bool(y[1:].isnan().all())


@pytest.mark.parametrize(("change", "reason"), [
    ({"group": 48}, "groups of 48: 32, 64, 128, 256 and whole rows"), ({"x": randn(2, 20_000), "w": randn(20_000)}, "rows of 20000"),
    ({"out_dtype": torch.float64}, "results in torch.float64"), ({"x": randn(100, 2).T}, "x is not contiguous"),
])
@pytest.mark.parametrize("name", ["rms_norm", "layer_norm", "add_rms_norm"])
def test_refuses(name: str, change: dict[str, Any], reason: str) -> None:
    held: dict[str, Any] = {**norms((2, 100), F32)[name], "group": 0, "e4m3": False} | change
    for other in ("b", "residual"):
        if other in held: held[other] = held["w" if other == "b" else "x"]
    with pytest.raises(ValueError, match=reason): run(f"infc::{name}_quantized", **held)


# ---- products of rows that come as codes

def weight(n: int, k: int, bits: int, group: int, e4m3: bool) -> dict[str, Any]:
    dice = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 2**bits, (n, k), generator=dice).to(torch.uint8)
    scale = (torch.rand(n, groups(k, group), generator=dice) + 0.5) * k**-0.5
    return {"codes": codes.float().sub(128).to(E4M3) if e4m3 else pack_codes(codes, bits), "scale": scale.half(), "offset": None,
            "bits": bits, "group": group}


@pytest.mark.parametrize(("bits", "group", "act_group", "e4m3"),
                         [(8, 32, 32, False), (8, 32, 0, False), (4, 128, 128, False), (8, 0, 0, True)])
@pytest.mark.parametrize(("rows", "act"), [(1, ""), (6, "gelu"), (40, "")])
def test_a_product_gives_what_it_gives_where_it_rounds(rows: int, act: str, bits: int, group: int, act_group: int, e4m3: bool) -> None:
    """Bit for bit, in one launch less."""
    x = randn(rows, 520)
    more: dict[str, Any] = {"act": act} if act else {"bias": randn(70), "residual": randn(rows, 70, seed=1)}
    held = weight(70, 520, bits, group, e4m3) | more | {"act_bits": 8, "act_group": act_group, "out_dtype": F32}
    codes, scale = row_codes(x, 8, act_group, e4m3)
    op = f"infc::linear{'_swiglu' * bool(act)}_quantized"
    assert torch.equal(run(op, **held, x=x), run(op, **held, x=codes, x_scale=scale))
    assert launches(op, **held, x=codes, x_scale=scale) == launches(op, **held, x=x)[1:]


def launches(op: str, **arguments: Any) -> list[str]:
    emit = Emit()
    kernels()[op].lower(emit, *several(kernels()[op].call(**arguments)), **arguments)
    return [launch.function.fn.__name__ for launch in emit.launches]


@pytest.mark.parametrize(("change", "reason"), [
    ({"x": torch.zeros(2, 200).to(E4M3)}, "x is torch.float8_e4m3fn with scales, of a weight whose rows are torch.int8"),
    ({"act_bits": 0}, "x comes with scales, and act_bits is 0"),
    ({"x_scale": torch.ones(2, 7).half()}, r"x_scale is torch.float16 \(2, 7\): fp32 \(2, 7\) fits"),
    ({"x_scale": torch.ones(2, 1)}, r"x_scale is torch.float32 \(2, 1\): fp32 \(2, 7\) fits"),
    ({"x": torch.zeros(200, 2, dtype=torch.int8).T}, "x or x_scale is not contiguous"),
])
def test_a_product_refuses(change: dict[str, Any], reason: str) -> None:
    held = weight(3, 200, 8, 32, False) | {"act_bits": 8, "act_group": 32, "bias": None, "residual": None}
    codes, scale = row_codes(randn(2, 200), 8, 32)
    with pytest.raises(ValueError, match=reason): run("infc::linear_quantized", **held | {"x": codes, "x_scale": scale} | change)


# ---- programs

def step(quant: str, monkeypatch: pytest.MonkeyPatch, fused: bool = True) -> tuple[Counter[str], list[dict[str, Any]]]:
    """Launches of a step of one token, by kernel, and what the cost table says of its calls; a decoder of two layers."""
    real = driver.pass_options
    if not fused: monkeypatch.setattr(driver, "pass_options", lambda options: real(options) | {"norm_codes": False})
    options = driver.Options(target="h100", quant=quant, quant_method="rtn", buckets=(1,), max_sequences=1, unverified=True, check="off")
    graph = captured(llama())
    driver._run_passes(graph, options, lambda event: None)
    store, table = Store("sm_90a", ""), CostTable(graph.weights, region_cost)
    (program,), _, bounds = build_programs(graph, options, backend, "sm_90a", store, table.maxima)
    bound, names = bounds[program.name], {key: kernel.name for key, kernel in store.kernels.items()}
    table.add(program, bound.units, bound.context, names)
    entries = [table.kernels[i] for i in table.steps[program.name]]
    return Counter(names[one.kernel].partition("#")[0].rstrip("_0123456789x") for one in program.steps), entries


@pytest.mark.parametrize("quant", ["w8a8", "fp8a8", *(pytest.param(q, marks=pytest.mark.slow) for q in ("w8a8:channel:token", "w4a8"))])
def test_a_decode_step_launches_less(quant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No rounding of its own before qkv, gate and up, and the head: two launches a layer less, and one."""
    now, _ = step(quant, monkeypatch)
    then, _ = step(quant, monkeypatch, fused=False)
    assert (then["round_rows"], then["rms_norm"], then["rms_norm_quantized"]) == (9, 5, 0)
    assert (now["round_rows"], now["rms_norm"], now["rms_norm_quantized"]) == (4, 0, 5)
    assert now.total() == then.total() - 5
    for count in (now, then):
        for name in ("round_rows", "rms_norm", "rms_norm_quantized"): del count[name]
    assert now == then


def test_calls_that_begin_alike_have_costs_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of rows of one length begin with the same launch, the one that rounds them."""
    _, entries = step("w8a8", monkeypatch, fused=False)
    products = [entry for entry in entries if entry["kind"] == "product"]
    sizes = [(64, 32), (32, 32), (2 * 48, 32), (32, 48)]                     # qkv, o, gate and up, down
    wanted = [n * k + 2 * n * groups(k, 32) for n, k in [*sizes, *sizes, (48, 32)]]
    assert [value(entry["weights"], {}) for entry in products] == wanted


@pytest.mark.parametrize("arch", ["sm_89", pytest.param("sm_90a", marks=pytest.mark.slow), pytest.param("sm_100a", marks=pytest.mark.slow)])
def test_norms_that_give_e4m3_build(arch: str, tmp_path: Any) -> None:
    """At the sizes of real models; a spill fails the build."""
    emit = Emit()
    for n in (4096, 16_384):
        for name, arguments in norms((1, n), F32).items():
            given = {key: v.to("meta") if isinstance(v, Tensor) else v for key, v in arguments.items()} | {"group": 0, "e4m3": True}
            found = kernels()[f"infc::{name}_quantized"]
            found.lower(emit, *several(found.call(**given)), **given)
    assert all(code.made.registers <= 128 for code in build(emit.launches, arch, cache=tmp_path))
