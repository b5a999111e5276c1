"""smooth_channels: factors move between a weight's columns and what makes their inputs, and not a bit of the answers changes."""
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from decoders import VOCABULARY, before, captured, llama
from golden import trace
from hypothesis import given, settings
from hypothesis import strategies as st
from infc.compiler.contracts import Reference, check_exact
from infc.compiler.ir import Graph, text, verify
from infc.compiler.quant.plan import Plan
from infc.compiler.quant.scheme import parse
from infc.compiler.rewrite import Report
from infc.passes import fuse_layer_norm, fuse_linear_epilogue, smooth_channels
from torch import nn

PASS = smooth_channels.PASS
WINDOWS = torch.randint(VOCABULARY, (4, 60), generator=torch.Generator().manual_seed(0)).tolist()


@cache
def made() -> Graph:
    """A decoder whose norms make a few columns large, as those of trained models do, and the up halves of its gates too."""
    graph = before(captured(llama()), "smooth_channels")
    for name in [n for n in graph.weights if "norm" in n]: graph.weights[name] = graph.weights[name].clone()
    for name in [n for n in graph.weights if "layernorm" in n]: graph.weights[name][[3, 17]] *= 24
    for name in [n for n in graph.weights if "gate_up" in n]:
        graph.weights[name] = graph.weights[name].clone()
        graph.weights[name][[48 + 5, 48 + 40]] *= 24
    return graph


def smoothed(graph: Graph, scheme: str = "w8a8:token", method: str = "smooth", budget: int | None = None, windows=WINDOWS):
    """(the changed graph, the report, how often the pass fired)."""
    after = graph.copy()
    report = Report(PASS.name, options={"quantization": Plan(parse(scheme), method, windows)}, budget=budget)
    return after, report, PASS.apply(after, report)


def factors(was: Graph, after: Graph, name: str) -> torch.Tensor:
    """What the columns of a weight were multiplied with."""
    ratio = after.weights[name] / was.weights[name]
    return ratio.nanmedian(0).values


@pytest.mark.parametrize(("scheme", "method"), [("w8a8:token", "smooth"), ("w4", "awq")])
def test_moves_factors_and_keeps_every_bit(scheme, method):
    was = made()
    after, report, fired = smoothed(was, scheme, method)
    assert fired >= 3 and text(after) == text(was)
    verify(after)
    check_exact(Reference(was, was.sample_inputs()), was, after)
    for sample in was.sample_inputs.thorough():
        for ours, theirs in zip(after.run(*map(torch.clone, sample)), was.run(*map(torch.clone, sample)), strict=True):
            assert torch.equal(ours, theirs)
    changed = {name for name in was.weights if not torch.equal(was.weights[name], after.weights[name])}
    assert len(changed) >= 2 * fired - 2                                        # a gate_up weight may take factors on both sides
    qkv = next(name for name in changed if "qkv" in name)
    norm = next(name for name in changed if "input_layernorm" in name and name.split("layers_")[1][0] == qkv.split("layers_")[1][0])
    s = was.weights[norm] / after.weights[norm]
    assert torch.equal(after.weights[qkv], was.weights[qkv] * s) and float(s[3]) > 1 and float(s[17]) > 1
    assert "a cache holds them unscaled" in " ".join(report.refused.values())


def test_the_up_half_of_a_gate_takes_the_factors_of_what_reads_it():
    was = made()
    after, _, _ = smoothed(was)
    name = next(n for n in was.weights if "layers_0_mlp_gate_up" in n)
    down = next(n for n in was.weights if "layers_0_mlp_down" in n)
    s, columns = factors(was, after, down), factors(was, after, name)
    assert float(s[5]) > 1 and torch.equal(after.weights[down], was.weights[down] * s)
    expected = was.weights[name] * columns
    assert torch.equal(after.weights[name][:48], expected[:48]) and torch.equal(after.weights[name][48:], expected[48:] / s[:, None])


@pytest.mark.parametrize(("scheme", "method"), [("w8a8:token", "smooth"), ("w4:asym", "awq"), ("w4", "awq")])
def test_channels_of_zeros_move_nothing_and_stay_zeros(scheme, method):
    """FIELD R19: a norm that switches channels off, columns that no row reads, and a product that gives nothing at all."""
    was = made().copy()
    for name in [n for n in was.weights if "layernorm" in n or "gate_up" in n or "down" in n]: was.weights[name] = was.weights[name].clone()
    norm, columns, nothing = (next(n for n in was.weights if part in n) for part in ("0_input_layernorm", "0_mlp_gate_up", "1_mlp_down"))
    was.weights[norm][[5, 9]], was.weights[columns][:, [2, 7]], was.weights[nothing][:] = 0, 0, 0
    after, _, fired = smoothed(was, scheme, method)
    assert fired >= 1 and all(bool(w.isfinite().all()) for w in after.weights.values())
    assert bool((after.weights[norm][[5, 9]] == 0).all() and (after.weights[columns][:, [2, 7]] == 0).all())
    assert bool((after.weights[nothing] == 0).all())
    for sample in was.sample_inputs.thorough():
        for ours, theirs in zip(after.run(*map(torch.clone, sample)), was.run(*map(torch.clone, sample)), strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("method", ["rtn", "mse", "gptq"])
def test_other_methods_move_nothing(method):
    graph = made()
    after, report, fired = smoothed(graph, "w4", method)
    assert fired == 0 and not report.refused and all(torch.equal(graph.weights[n], after.weights[n]) for n in graph.weights)
    assert PASS.apply(graph.copy()) == 0


def test_a_shared_head_is_refused():
    _, report, _ = smoothed(made())
    assert any("is also read by %embedding" in reason for reason in report.refused.values())


def test_stops_where_it_is_told_to():
    was = made()
    after, _, fired = smoothed(was, budget=1)
    assert fired == 1
    assert sum(not torch.equal(was.weights[n], after.weights[n]) for n in was.weights) == 2


# ------------------------------------------------------------------------------------------------------ norms of other kinds

class Normed(nn.Module):
    """A LayerNorm with large columns, and what reads it; `kind` says who else does."""

    def __init__(self, width: int, kind: str):
        super().__init__()
        torch.manual_seed(width)
        self.norm, self.kind = nn.LayerNorm(width), kind
        self.a, self.b = nn.Linear(width, 6), nn.Linear(width, 6, bias=False)
        with torch.no_grad():
            self.norm.bias.normal_()
            self.norm.weight[:2] *= 40
            self.norm.bias[:2] *= 40

    def forward(self, x):
        y = self.norm(x)
        if self.kind == "twice": return self.a(y) + self.b(y).exp()
        if self.kind == "residual": return self.a(y), y
        if self.kind == "shared": return self.a(y) + self.b(self.norm(x + 1)).exp()
        if self.kind == "gelu": return self.a(F.gelu(y))
        return self.a(y) * self.a(x)                                            # "other x": one weight, two inputs


def normed(width: int, kind: str) -> Graph:
    graph = trace(Normed(width, kind), torch.randn(2, 3, width), dynamic=({0: "B", 1: "S"},))
    for one in (fuse_layer_norm.PASS, fuse_linear_epilogue.PASS): one.apply(graph)
    return graph


def batches(width: int):
    return [(torch.randn(4, 9, width, generator=torch.Generator().manual_seed(i)),) for i in range(3)]


@given(st.integers(8, 70), st.integers(0, 3))
@settings(max_examples=8, deadline=None)
def test_a_norm_with_a_bias_and_two_readers(width, seed):
    was = normed(width, "twice")
    after, _, fired = smoothed(was, windows=batches(width))
    assert fired == 1
    x = torch.randn(5, 4, width, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(after.run(x)[0], was.run(x)[0])
    name = next(n for n in was.weights if n.endswith("norm_bias"))
    assert float(after.weights[name].abs().max()) < float(was.weights[name].abs().max())


@pytest.mark.parametrize(("kind", "reason"), [
    ("residual", "is also used by %output"), ("shared", "is shared"), ("gelu", "aten.gelu has no weight that its columns are multiples of"),
    ("other x", "is also read by %linear")])  # fmt: skip
def test_refuses_what_would_change_the_function(kind, reason):
    was = normed(16, kind)
    after, report, fired = smoothed(was, windows=batches(16))
    assert fired == 0 and any(reason in found for found in report.refused.values()), report.refused
    assert all(torch.equal(was.weights[n], after.weights[n]) for n in was.weights)
