"""Operators: opcheck, one cost by hand each, and the semantics that other tools got wrong (FIELD R01, R02, R04, R07, R08)."""
import math

import pytest
import torch
from infc.compiler.ops import (
    add_rms_norm,
    aten,
    attention,
    by_name,
    infc,
    kv_write,
    layer_norm,
    linear,
    linear_swiglu,
    names,
    paged_attention,
    rms_norm,
    rope,
    rope_kv_write,
    sample,
    swiglu,
)
from infc.compiler.ops.codes import E4M3
from infc.compiler.ops.registry import arguments, cost_of
from infc.compiler.ops.sample import GREEDY_BELOW
from torch import Tensor, fx


def rand(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def ints(*values) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


X, W, CACHE = rand(3, 8), rand(8), torch.zeros(4, 2, 32, 8)
STEP = (ints(0, 2, 3), ints(5, 1), torch.tensor([[1], [2]], dtype=torch.int32))     # query_start, context_len, block_table
ROWS = (torch.tensor([0.0, 1.0, 0.5]), ints(0, 2, 0), torch.tensor([1.0, 1.0, 0.5]), torch.tensor([0.1, 0.9, 0.5]))

CODED = tuple(t + 0 for _ in "kv" for t in (torch.zeros(4, 2, 32, 8, dtype=torch.int8), torch.ones(4, 2, 32, 1)))     # codes, scales
W4 = (torch.arange(20, dtype=torch.uint8).view(5, 4), rand(5, 2).half(), rand(5, 2).half())    # [5, 8] in groups of 4, with offsets
W8 = (torch.arange(80, dtype=torch.uint8).view(10, 8), rand(10, 1).half(), None)              # [10, 8], one group a row

# operator -> (arguments, flops, bytes): counted by hand from the shapes, 4 bytes an element.
CASES = {
    "infc::rms_norm": ((X, W, 1e-6), 4 * 24, 4 * (24 + 8 + 24)),
    "infc::add_rms_norm": ((X, X + 1, W, 1e-6), 5 * 24, 4 * (24 + 24 + 8 + 24 + 24)),
    "infc::layer_norm": ((X, W, W + 1, 1e-6), 7 * 24, 4 * (24 + 8 + 8 + 24)),
    "infc::rms_norm_quantized": ((X, W, 1e-6, 4, False), 7 * 24, 4 * (24 + 8) + 24 + 4 * 6),
    "infc::add_rms_norm_quantized": ((X, X + 1, W, 1e-6, 0, False), 8 * 24, 4 * (24 + 24 + 8 + 24) + 24 + 4 * 3),
    "infc::layer_norm_quantized": ((X, W, W + 1, 1e-6, 0, False), 10 * 24, 4 * (24 + 8 + 8) + 24 + 4 * 3),
    "infc::rope": ((rand(3, 4, 8), rand(3, 2, 8), rand(3, 1, 2), rand(3, 1, 2), False), 3 * 4 * (12 + 6), 4 * (2 * 96 + 2 * 48 + 6 + 6)),
    "infc::attention": ((rand(2, 4, 3, 8), rand(2, 2, 5, 8), rand(2, 2, 5, 6), None, 0.5, "causal"),
                        2 * 4 * 3 * 5 * (16 + 12 + 5), 4 * (192 + 160 + 120 + 144)),
    "infc::linear": ((X, rand(5, 8), rand(5), rand(3, 5)), 2 * 3 * 8 * 5, 4 * (24 + 40 + 5 + 15 + 15)),
    "infc::linear_swiglu": ((X, rand(10, 8), "silu"), 2 * 3 * 8 * 10 + 3 * 3 * 10, 4 * (24 + 80 + 15)),
    "infc::swiglu": ((rand(3, 10), "gelu_tanh"), 3 * 30, 4 * (30 + 15)),
    "infc::kv_write": ((rand(3, 2, 8), rand(3, 2, 8), CACHE, CACHE + 0, ints(0, -1, 40)), 0, 4 * (48 + 48 + 3 + 48 + 48)),
    "infc::rope_kv_write": ((rand(3, 64), rand(3, 2), rand(3, 2), CACHE, CACHE + 0, ints(0, -1, 40), 4, 2, True),
                            3 * 3 * 6 * 4, 4 * (192 + 6 + 6 + 3 + 96 + 48 + 48)),
    "infc::paged_attention": ((rand(3, 4, 8), CACHE, CACHE + 0, *STEP, 0.5), 0, 4 * (96 + 3 + 2 + 2 + 96)),
    "infc::kv_write_quantized": ((rand(3, 2, 8), rand(3, 2, 8), *CODED, ints(0, -1, 40), "int8"), 3 * 96,
                                 4 * (48 + 48 + 3) + 2 * 3 * 2 * (8 + 4)),
    "infc::rope_kv_write_quantized": ((rand(3, 64), rand(3, 2), rand(3, 2), *CODED, ints(0, -1, 40), 4, 2, True, "int8"),
                                      6 * 3 * (6 * 2 + 2 * 8), 4 * (192 + 6 + 6 + 3 + 96) + 2 * 3 * 2 * (8 + 4)),
    "infc::paged_attention_quantized": ((rand(3, 4, 8), *CODED, *STEP, 0.5), 0, 4 * (96 + 3 + 2 + 2 + 96)),
    "infc::dequantize": ((*W4, 4, 4, 8), 2 * 40, 20 + 2 * 10 + 2 * 10 + 4 * 40),
    "infc::quantize_rows": ((X, 16, 4), 3 * 24, 4 * 24 + 2 * 24 + 4 * 6),
    "infc::dequantize_rows": ((torch.ones(3, 8, dtype=torch.int8), rand(3, 2), 4), 24, 24 + 4 * 6 + 4 * 24),
    "infc::linear_quantized": ((X, *W4, rand(5), rand(3, 5), 4, 4, 8, 4), 2 * 3 * 8 * 5, 4 * 24 + 20 + 2 * 10 + 2 * 10 + 4 * (5 + 15 + 15)),
    "infc::linear_swiglu_quantized": ((X, *W8, "silu", 8, 0, 16, 0), 2 * 3 * 8 * 10 + 3 * 3 * 10, 4 * 24 + 80 + 2 * 10 + 4 * 15),
    "infc::embedding_quantized": ((*W4, ints(4, 0), 4, 4, 8), 2 * 2 * 8, 2 * (4 + 2 * 2 + 2 * 2) + 4 * 2 + 4 * 16),
    "infc::sample": ((rand(3, 11), *ROWS), 5 * 33, 4 * (33 + 12) + 12),
}


FLOATS = {                              # the same with codes of e4m3
    "infc::rms_norm_quantized": ((X, W, 1e-6, 4, True, torch.bfloat16), 7 * 24, 4 * (24 + 8) + 24 + 4 * 6),
    "infc::add_rms_norm_quantized": ((X, X + 1, W, 1e-6, 0, True), 8 * 24, 4 * (24 + 24 + 8 + 24) + 24 + 4 * 3),
    "infc::layer_norm_quantized": ((X, W, None, 1e-6, 0, True), 10 * 24, 4 * (24 + 8) + 24 + 4 * 3),
    "infc::dequantize": ((rand(5, 8).to(E4M3), rand(1, 1).half(), None, 8, 0, 8), 2 * 40, 40 + 2 + 4 * 40),
    "infc::quantize_rows": ((X, 8, 4, True), 3 * 24, 4 * 24 + 24 + 4 * 6),
    "infc::dequantize_rows": ((rand(3, 8).to(E4M3), rand(3, 2), 4), 24, 24 + 4 * 6 + 4 * 24),
    "infc::linear_quantized": ((X, rand(5, 8).to(E4M3), rand(5, 1).half(), None, rand(5), rand(3, 5), 8, 0, 8, 0),
                               2 * 3 * 8 * 5, 4 * 24 + 40 + 2 * 5 + 4 * (5 + 15 + 15)),
    "infc::linear_swiglu_quantized": ((X, rand(10, 8).to(E4M3), rand(1, 1).half(), None, "silu", 8, 0, 0, 0),
                                      2 * 3 * 8 * 10 + 3 * 3 * 10, 4 * 24 + 80 + 2 + 4 * 15),
    "infc::embedding_quantized": ((rand(5, 8).to(E4M3), rand(1, 1).half(), None, ints(4, 0), 8, 0, 8),
                                  2 * 2 * 8, 2 * (8 + 2) + 4 * 2 + 4 * 16),
}


def test_every_operator_has_a_case():
    assert names() == sorted(CASES)


EVERY = [*CASES.items(), *FLOATS.items()]


@pytest.mark.parametrize("name", CASES)
def test_opcheck(name):
    torch.library.opcheck(by_name(name).call, CASES[name][0])


@pytest.mark.parametrize("name", FLOATS)
def test_opcheck_of_e4m3(name):
    """Without the parts that compare arguments before and after: PyTorch 2.13 has no allclose of e4m3."""
    torch.library.opcheck(by_name(name).call, FLOATS[name][0], test_utils=("test_autograd_registration", "test_faketensor"))


@pytest.mark.parametrize(("name", "case"), EVERY)
def test_cost_by_hand(name, case):
    given, flops, size = case
    cost = by_name(name).cost(*given)
    assert (cost.flops, cost.bytes) == (flops, size)


def test_cost_of_a_key_by_hand():
    """What attention over a paged cache costs beside its sizes: 4 query heads, 2 kv heads, head size 8, 4 bytes."""
    given, _, _ = CASES["infc::paged_attention"]
    cost = by_name("infc::paged_attention").cost(*given, window=5)
    assert (cost.pair_flops, cost.key_bytes, cost.window) == (4 * (16 + 16 + 5), 2 * (8 + 8) * 4, 5)


def test_bytes_of_the_cache_by_hand():
    for name, kv in (("infc::kv_write", 4 * 96), ("infc::rope_kv_write", 4 * 96), ("infc::rms_norm", 0)):
        assert by_name(name).cost(*CASES[name][0]).kv == kv


def test_cost_and_arguments_of_a_node():
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    node = graph.call_function(infc.rms_norm.default, (x, w), {"eps": 1e-6})
    x.meta["val"], w.meta["val"] = X, W
    assert arguments(node) == {"x": x, "w": w, "eps": 1e-6, "out_dtype": None}
    assert cost_of(node) == by_name("infc::rms_norm").cost(X, W, 1e-6)
    with pytest.raises(KeyError, match="no infc:: operator"): cost_of(graph.call_function(aten.neg.default, (x,)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_norms_are_pytorchs(dtype):
    x, w = rand(5, 16, dtype=dtype), rand(16, dtype=dtype)
    eps = 4 * torch.finfo(dtype).eps
    plain = torch.nn.functional.rms_norm(x.double(), (16,), w.double(), 1e-6)
    torch.testing.assert_close(rms_norm(x, w, 1e-6).double(), plain, rtol=eps, atol=eps * 4)
    y, h = add_rms_norm(x, x, w, 1e-6)
    assert torch.equal(h, x + x) and torch.equal(y, rms_norm(x + x, w, 1e-6))
    assert torch.equal(layer_norm(x, w, None, 1e-5), torch.nn.functional.layer_norm(x, (16,), w, None, 1e-5))
    assert rms_norm(x, w, 1e-6, torch.float32).dtype == torch.float32


# -------------------------------------------------------------------------------------------------------------- products

@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("out", [None, torch.bfloat16])
@pytest.mark.parametrize(("group", "e4m3"), [(0, False), (4, True), (7, False)])
def test_norms_that_give_codes_are_norms_then_quantize_rows(dtype, out, group, e4m3):
    x, w, b = rand(3, 16, dtype=dtype), rand(16, dtype=dtype), rand(16, dtype=dtype, seed=1)
    for name, given in (("rms_norm", (x, w)), ("add_rms_norm", (x, x + 1, w)), ("layer_norm", (x, w, b))):
        wide = by_name(f"infc::{name}").call(*given, 1e-6, out)
        y, *sums = wide if isinstance(wide, tuple) else (wide,)
        found = by_name(f"infc::{name}_quantized").call(*given, 1e-6, group, e4m3, out)
        for one, same in zip(found, (*infc.quantize_rows(y, 8, group, e4m3), *sums), strict=True):
            assert one.dtype == same.dtype and torch.equal(one.double(), same.double())


@pytest.mark.parametrize(("group", "e4m3"), [(4, False), (0, False), (0, True)])
def test_rows_that_come_as_codes_are_rows_that_the_product_rounds(group, e4m3):
    """The same bits; what is read is the codes and their scales, and the result is fp32 unless told otherwise."""
    codes, scale = infc.quantize_rows(X, 8, group, e4m3)
    weight = (rand(10, 8).to(E4M3), rand(10, 1).half(), None) if e4m3 else W8
    for name, more in (("linear", (rand(10), rand(3, 10))), ("linear_swiglu", ("silu",))):
        product = by_name(f"infc::{name}_quantized")
        given = (*weight, *more, 8, 0, 8, group)
        rounded, ready = product.call(X, *given), product.call(codes, *given, None, scale)
        assert ready.dtype == torch.float32 and torch.equal(rounded, ready)
        assert product.call(codes, *given, torch.bfloat16, scale).dtype == torch.bfloat16
        saved = product.cost(X, *given).bytes - product.cost(codes, *given, None, scale).bytes
        assert saved == 4 * 24 - 24 - 4 * scale.numel() and product.cost(X, *given).flops == product.cost(codes, *given, None, scale).flops
        torch.library.opcheck(product.call, (codes, *given, None, scale), test_utils=("test_autograd_registration", "test_faketensor"))


def test_linear_rounds_once():
    """bf16 operands, fp32 sums: residual and bias are added before the one rounding."""
    x, w, b, r = rand(4, 64, dtype=torch.bfloat16), rand(8, 64, dtype=torch.bfloat16), rand(8), rand(4, 8)
    wide = x.float() @ w.float().T + b + r
    torch.testing.assert_close(linear(x, w, b, r, torch.float32), wide)
    assert torch.equal(linear(x, w, b, r), linear(x, w, b, r, torch.float32).bfloat16())
    with pytest.raises(TypeError, match=r"x is torch.bfloat16, w is torch.float32"): linear(x, w.float())


@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_tanh"])
def test_swiglu_takes_the_gate_first(act):
    x, w = rand(4, 8), rand(12, 8)
    fn = {"silu": torch.nn.functional.silu, "gelu": torch.nn.functional.gelu,
          "gelu_tanh": lambda t: torch.nn.functional.gelu(t, approximate="tanh")}[act]
    expected = fn(x @ w[:6].T) * (x @ w[6:].T)
    torch.testing.assert_close(linear_swiglu(x, w, act), expected)
    torch.testing.assert_close(swiglu(x @ w.T, act), expected)
    with pytest.raises(ValueError, match="'relu' is none of silu, gelu, gelu_tanh"): swiglu(x, "relu")


# ------------------------------------------------------------------------------------------------------------------ rope

def test_rope_styles():
    """Half-split pairs channel i with i + R/2, interleaved 2i with 2i + 1; channels past R pass."""
    angle = rand(5, 2)
    cos, sin = angle.cos(), angle.sin()
    q = rand(3, 5, 6)
    half, pairs = rope(q, q[:1], cos, sin, False), rope(q, q[:1], cos, sin, True)
    turn = torch.polar(torch.ones_like(angle), angle)
    expected = torch.complex(q[..., :2], q[..., 2:4]) * turn
    torch.testing.assert_close(half[0], torch.cat((expected.real, expected.imag, q[..., 4:]), -1))
    expected = torch.view_as_complex(q[..., :4].unflatten(-1, (2, 2)).contiguous()) * turn
    torch.testing.assert_close(pairs[0], torch.cat((torch.view_as_real(expected).flatten(-2), q[..., 4:]), -1))
    assert torch.equal(half[1], half[0][:1])
    with pytest.raises(ValueError, match="rotary width 8 > head size 6"): rope(q, q, rand(5, 4), rand(5, 4), False)


def test_rope_kv_write_is_rope_then_kv_write():
    qkv, cos, sin, slots = rand(3, 64), rand(3, 3), rand(3, 3), ints(33, -1, 0)
    mine, theirs = [[torch.zeros(2, 2, 32, 8) for _ in "kv"] for _ in range(2)]
    q = rope_kv_write(qkv, cos, sin, *mine, slots, 4, 2, False)
    parts = qkv.view(3, 8, 8)
    turned = rope(parts[:, :4].contiguous(), parts[:, 4:6].contiguous(), cos[:, None], sin[:, None], False)
    kv_write(turned[1], parts[:, 6:].contiguous(), *theirs, slots)
    assert torch.equal(q, turned[0]) and all(map(torch.equal, mine, theirs))
    assert torch.equal(mine[1][1, :, 1], parts[0, 6:]) and torch.equal(mine[1][0, :, 0], parts[2, 6:])
    assert int((mine[1] != 0).any(-1).sum()) == 4            # 2 tokens x 2 heads: the token at slot -1 went nowhere


# ------------------------------------------------------------------------------------------------------------- attention

def spell(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_r01_a_fully_masked_row_gives_zero(dtype):
    q, k, v = (rand(1, 2, 6, 16, dtype=dtype, seed=i) for i in range(3))
    seen = torch.ones(6, 6, dtype=torch.bool).tril()
    seen[4:] = False
    for bias in (seen, torch.zeros(6, 6, dtype=dtype).masked_fill(~seen, -math.inf)):
        out = attention(q, k, v, bias, 0.25)
        assert torch.equal(out[:, :, 4:], torch.zeros(1, 2, 2, 16, dtype=dtype)) and out.isfinite().all()
    if dtype == torch.float16: return                        # its smallest number does not swallow a score in fp32
    low = torch.zeros(6, 6, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)
    mean = v.float().mean(2, keepdim=True).expand(-1, -1, 2, -1)
    torch.testing.assert_close(attention(q, k, v, low, 0.25)[:, :, 4:].float(), mean, rtol=2e-2, atol=2e-2)    # as SDPA: a third answer


@pytest.mark.parametrize("where", ["k", "v"])
def test_r01_nan_under_the_mask_is_pytorchs(where):
    q, k, v = (rand(1, 2, 6, 16, seed=i) for i in range(3))
    (k if where == "k" else v)[..., 5, :] = math.nan
    seen = torch.ones(6, 6, dtype=torch.bool)
    seen[:, 5] = False
    assert torch.equal(attention(q, k, v, seen, 0.25).isnan(), spell(q, k, v, seen, 0.25).isnan())


@pytest.mark.parametrize(("queries", "keys"), [(2, 5), (1, 5), (5, 2), (4, 4)])
def test_r02_alignment_is_explicit(queries, keys):
    q, k, v = rand(1, 2, queries, 8), rand(1, 2, keys, 8, seed=1), rand(1, 2, keys, 8, seed=2)
    ones = torch.ones(queries, keys, dtype=torch.bool)
    torch.testing.assert_close(attention(q, k, v, None, 0.3, "causal_top_left"), spell(q, k, v, ones.tril(), 0.3))
    torch.testing.assert_close(attention(q, k, v, None, 0.3, "causal"), spell(q, k, v, ones.tril(keys - queries), 0.3))


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (4, 1), (6, 3), (48, 2)])
def test_r04_heads_are_interleaved(heads, kv_heads):
    q, k, v = rand(1, heads, 3, 8), rand(1, kv_heads, 3, 8, seed=1), rand(1, kv_heads, 3, 8, seed=2)
    out = attention(q, k, v, None, 0.3, "causal")
    wide = [t.repeat_interleave(heads // kv_heads, 1) for t in (k, v)]
    torch.testing.assert_close(out, spell(q, *wide, torch.ones(3, 3, dtype=torch.bool).tril(), 0.3))
    tiled = [t.repeat(1, heads // kv_heads, 1, 1) for t in (k, v)]
    assert kv_heads == 1 or not torch.allclose(out, spell(q, *tiled, torch.ones(3, 3).tril().bool(), 0.3))


@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 2), (33, 2), (6, 4)])
def test_r04_uneven_heads_are_refused_with_both_numbers(heads, kv_heads):
    with pytest.raises(ValueError, match=f"{heads} query heads do not share {kv_heads} kv heads"):
        attention(rand(1, heads, 3, 8), rand(1, kv_heads, 3, 8), rand(1, kv_heads, 3, 8), None, 0.3)


@pytest.mark.parametrize("window", [1, 4, 9, 12])
def test_r07_a_window_shows_exactly_w_keys(window):
    length = 9
    seen = attention(torch.zeros(1, 1, length, 4), torch.zeros(1, 1, length, 4), torch.eye(length)[None, None], None, 1.0, "causal", window)
    assert (seen[0, 0] > 0).sum(-1).tolist() == [min(i + 1, window) for i in range(length)]
    assert (seen[0, 0].argmax(-1)).tolist() == [max(0, i + 1 - window) for i in range(length)]     # ties: the first, the oldest seen


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_r08_scores_do_not_overflow(late, masked):
    q = torch.full((1, 1, 2, 128), 40.0, dtype=torch.float16)
    scale = 1 / math.sqrt(128)
    out = attention(q if late else q * scale, q, q, None, scale if late else 1.0, "causal" if masked else "none")
    assert torch.equal(out, q)


def test_soft_cap_comes_before_the_mask():
    q, k, v = (rand(1, 2, 5, 8, seed=i) * 3 for i in range(3))
    scores = 4.0 * torch.tanh(q @ k.mT * 0.5 / 4.0)
    hidden = ~torch.ones(5, 5, dtype=torch.bool).tril()
    expected = torch.softmax(scores.masked_fill(hidden, -math.inf), -1) @ v
    torch.testing.assert_close(attention(q, k, v, None, 0.5, "causal", 0, 4.0), expected)


# ------------------------------------------------------------------------------------------------------- paged attention

class Paged:
    """One or more sequences on a poisoned pool, fed to kv_write and paged_attention in chunks."""

    def __init__(self, q: list[Tensor], k: list[Tensor], v: list[Tensor], blocks: list[list[int]], window: int = 0, dtype=torch.float32):
        self.q, self.k, self.v, self.blocks, self.window = q, k, v, blocks, window
        shape = (1 + max(map(max, blocks)), k[0].shape[1], 32)
        self.caches = [torch.full((*shape, t[0].shape[2]), math.nan, dtype=dtype) for t in (k, v)]
        self.done = [0] * len(q)

    def step(self, counts: dict[int, int], padding: int = 0) -> dict[int, Tensor]:
        starts, slots, context, pieces = [0], [], [], []
        for n, count in counts.items():
            place = range(self.done[n], self.done[n] + count)
            slots += [self.blocks[n][p // 32] * 32 + p % 32 for p in place]
            pieces.append(slice(place.start, place.stop))
            self.done[n] += count
            starts.append(len(slots))
            context.append(self.done[n])
        gather = []
        for t in (self.q, self.k, self.v):
            real = [t[n][piece] for n, piece in zip(counts, pieces, strict=True)]
            gather.append(torch.cat([*real, torch.full((padding, *t[0].shape[1:]), math.nan)]))
        kv_write(*gather[1:], *self.caches, ints(*slots, *[-1] * padding))
        width = max(len(self.blocks[n]) for n in counts)
        table = ints(*[self.blocks[n] + [0] * (width - len(self.blocks[n])) for n in counts])
        out = paged_attention(gather[0], *self.caches, ints(*starts), ints(*context), table, 0.3, self.window)
        assert torch.equal(out[len(slots):], torch.zeros(padding, out.shape[1]))
        return {n: out[a:b].unflatten(1, (gather[0].shape[1], -1)) for n, a, b in zip(counts, starts, starts[1:], strict=False)}


def dense(q: Tensor, k: Tensor, v: Tensor, window: int = 0) -> Tensor:
    return attention(*(t.transpose(0, 1)[None] for t in (q, k, v)), None, 0.3, "causal", window)[0].transpose(0, 1)


PLANS = (
    [{0: 70}, {1: 37}],
    [{0: 70, 1: 37}],
    [{0: 30}, {1: 33, 0: 5}, {0: 34, 1: 3}, {0: 1}, {1: 1}],
    [{0: 1, 1: 1}] * 37 + [{0: 1}] * 33,
)


@pytest.mark.parametrize("window", [0, 4, 33])
def test_paged_attention_is_attention_however_it_is_cut(window):
    """Two sequences over block ends, in chunks, mixed, one token at a time, padded; unwritten slots hold NaN."""
    lengths = (70, 37)
    q, k, v = ([rand(n, heads, 8, seed=i) for n in lengths] for i, heads in enumerate((4, 2, 2)))
    for plan in PLANS:
        paged, rows = Paged(q, k, v, [[3, 1, 5], [2, 4]], window), {0: [], 1: []}
        for counts in plan:
            for n, out in paged.step(counts, padding=2).items(): rows[n].append(out)
        for n in rows: torch.testing.assert_close(torch.cat(rows[n]), dense(q[n], k[n], v[n], window))


def test_r07_windows_hold_over_paged_decode():
    """Prefill 6 then 3 decode steps, W 4: each row sees exactly min(i + 1, 4) keys."""
    length, window = 9, 4
    zero, eye = torch.zeros(length, 1, 4), torch.eye(length)[:, None]
    paged = Paged([zero], [zero], [eye], [[1]], window)
    seen = torch.cat([paged.step({0: count})[0] for count in (6, 1, 1, 1)])[:, 0]
    assert (seen > 0).sum(-1).tolist() == [min(i + 1, window) for i in range(length)]


def test_uneven_heads_are_refused_in_the_cache_too():
    with pytest.raises(ValueError, match="3 query heads do not share 2 kv heads"):
        paged_attention(rand(3, 3, 8), CACHE, CACHE, *STEP, 0.5)


# -------------------------------------------------------------------------------------------------------------- sampling

def draw(logits: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0, uniform: Tensor | float = 0.5) -> Tensor:
    u = torch.as_tensor(uniform, dtype=torch.float32).reshape(-1)
    n = len(u)
    return sample(logits.expand(n, -1).contiguous(), torch.full((n,), temperature), torch.full((n,), top_k, dtype=torch.int32),
                  torch.full((n,), top_p), u)


def test_greedy_ties_go_to_the_lowest_index():
    logits = torch.tensor([1.0, 3.0, 3.0, 2.0])
    assert draw(logits, 0.0).tolist() == [1]
    assert draw(torch.zeros(5), 0.0, uniform=0.99).tolist() == [0]


def test_top_k_and_top_p_keep_what_they_say():
    logits = torch.tensor([0.1, 0.5, 0.3, 0.1]).log()
    every = torch.linspace(0, 0.9999, 200)
    assert set(draw(logits, 1.0, uniform=every).tolist()) == {0, 1, 2, 3}
    assert set(draw(logits, 1.0, top_k=2, uniform=every).tolist()) == {1, 2}
    assert set(draw(logits, 1.0, top_k=3, uniform=every).tolist()) == {0, 1, 2}         # the tie of 0 and 3 goes by index
    assert set(draw(logits, 1.0, top_p=0.45, uniform=every).tolist()) == {1}            # one token at least
    assert set(draw(logits, 1.0, top_p=0.6, uniform=every).tolist()) == {1, 2}
    assert set(draw(logits, 1.0, top_k=2, top_p=0.6, uniform=every).tolist()) == {1}    # of the mass top-k left: 0.5 / 0.8
    assert draw(logits, 1e-8, uniform=every).unique().tolist() == [1]                   # nearly greedy, no overflow
    assert draw(logits, 1.0, top_k=99, uniform=0.99999994).tolist() == [3]


def test_a_tiny_temperature_is_greedy():
    logits = torch.tensor([1.0, 3.0, 2.0, 3.0])
    for temperature in (1e-45, 2.9e-39, 1e-38, 9e-31, math.nan):
        assert draw(logits, temperature, uniform=0.99999994).tolist() == [1]
    assert draw(logits, GREEDY_BELOW, uniform=0.99999994).tolist() == [3]               # of the two that tie


def test_nan_counts_as_minus_infinity_and_no_mass_is_argmax():
    nan, inf = math.nan, math.inf
    for temperature in (0.0, 1.0):
        for values, token in (([nan, 1, nan], 1), ([nan, nan, nan], 0), ([nan, -inf, -inf], 0), ([1, inf, inf], 1)):
            for top_k in (0, 2): assert draw(torch.tensor(values), temperature, top_k, uniform=0.99).tolist() == [token]


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.7, 0, 1.0), (1.0, 5, 1.0), (1.5, 0, 0.8), (0.9, 6, 0.9)])
def test_the_law_of_samples(temperature, top_k, top_p):
    """Chi-square of 20000 draws at a fixed seed against the probabilities, below the 1e-4 quantile."""
    logits, count = rand(12) * 2, 20_000
    probs = torch.softmax(logits.double() / temperature, -1)
    order = probs.argsort(descending=True, stable=True)
    if top_k: probs[order[top_k:]] = 0
    probs /= probs.sum()
    if top_p < 1: probs[order[int((probs[order].cumsum(0) < top_p).sum()) + 1:]] = 0
    probs /= probs.sum()
    tokens = draw(logits, temperature, top_k, top_p, torch.rand(count, generator=torch.Generator().manual_seed(7)))
    seen = torch.bincount(tokens.long(), minlength=12).double()
    live = probs > 0
    assert not seen[~live].any()
    chi = float(((seen - count * probs)[live] ** 2 / (count * probs[live])).sum())
    freedom = max(1, int(live.sum()) - 1)
    assert chi < freedom + 3.72 * math.sqrt(2 * freedom) + 8                            # Wilson-Hilferty, rounded up
