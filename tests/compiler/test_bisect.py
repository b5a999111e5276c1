"""Planted faults are named: which rewrite, which kernel; in about log2 of their number of runs."""
import importlib
import json
import math

import pytest
import torch
from infc.compiler import bisect, driver
from infc.compiler.errors import CheckFailed, UserError
from infc.compiler.ir import argument, target_name
from infc.compiler.ops import infc
from infc.compiler.prefixes import first_bad
from infc.passes import fuse_rms_norm, fuse_swiglu, page_kv_cache, rewrite_attention
from planted import FP32, TAIL, decoder, plant, spoil
from tiny_artifact import infc as command_line

OPTIONS = driver.Options(buckets=(1, 16))


def of(node, place: str) -> bool:
    return any(place in path for path in node.meta.get("origin") or ())


def wrong_eps(graph, node) -> None:
    if node.target is infc.rms_norm.default and of(node, "layers.2.post_attention_layernorm"): node.update_arg(2, 1e-4)


def swapped_gate_and_up(graph, node) -> None:
    if node.target is infc.linear_swiglu.default and of(node, "layers.3."):
        weight = str(node.args[1].target)
        graph.weights[weight] = torch.cat(graph.weights[weight].chunk(2)[::-1])


def not_causal(graph, node) -> None:
    if node.target is infc.attention.default and of(node, "layers.1."):
        node.args = tuple("none" if a == "causal" else a for a in node.args)


def stale_scale(graph, node) -> None:
    if node.target is infc.paged_attention.default: node.args = (*node.args[:6], 0.5 * argument(node, "scale"), *node.args[7:])


@pytest.mark.parametrize(("module", "change", "place"), [
    (fuse_rms_norm, wrong_eps, "model.layers.2.post_attention_layernorm [llama.py:"),
    (fuse_swiglu, swapped_gate_and_up, "model.layers.3.mlp [llama.py:"),
    (rewrite_attention, not_causal, "model.layers.1.self_attn"),
    (page_kv_cache, stale_scale, ""),
], ids=["wrong eps", "gate and up swapped", "mask dropped", "scale halved"])
def test_a_bad_rewrite_is_named(module, change, place, monkeypatch):
    spoil(monkeypatch, module, change)
    told: list[str] = []
    found = bisect.bisect(decoder(), options=OPTIONS, on_event=lambda event: told.append(event.text))
    assert (found.fault, found.name) == ("pass", module.PASS.name)
    assert found.site.startswith(place)
    assert found.runs <= math.log2(found.rewrites) + 3
    assert f"first bad rewrite: {found.rewrite} of {found.rewrites}, {found.name} at {place}" in found.line
    assert sum(f"run {i}: " in text for text in told for i in range(1, found.runs + 1)) == found.runs and any("left" in t for t in told)


def test_a_bad_kernel_is_told_from_a_bad_pass(tmp_path, monkeypatch):
    plant(monkeypatch, tmp_path / "kernels", "norm.h", *TAIL)
    found = bisect.bisect(decoder(), options=FP32)
    assert (found.fault, found.op, found.bucket) == ("kernel", "infc.rms_norm", "step_T16")
    assert found.name.startswith("rms_norm_f32") and found.site.startswith("model.layers.0.input_layernorm [llama.py:")
    assert found.error is not None and found.error > 0.1 and "more steps use it" in found.line
    assert found.runs <= math.log2(found.steps) + 3 + 2                  # two runs say that neither the graph nor every kernel is right


def test_a_bad_memory_plan_is_told_from_a_bad_kernel(monkeypatch):
    program = importlib.import_module("infc.backends.program")

    def overlapping(spots):
        for spot in spots: spot.offset = 0
        return max(spot.bytes for spot in spots)

    monkeypatch.setattr(program, "_pack_arena", overlapping)
    for name in [n for n in vars(program) if n in ("check_arena", "_check_arena")]: monkeypatch.setattr(program, name, lambda *args: None)
    found = bisect.bisect(decoder(), options=FP32)
    assert found.fault == "program" and "buffers overlap" in found.line


def test_nothing_wrong_is_said_so():
    found = bisect.bisect(decoder(), options=FP32)
    assert (found.fault, found.runs) == ("none", 2) and found.line.startswith("nothing is wrong")


# ------------------------------------------------------------------------------------------------------------------ commands

def lists_operators(search, prefixes, graph, path, judge) -> None:
    """Stands for a compile: a file with the operators of the graph."""
    path.write_text("".join(f"{target_name(node.target)}\n" for node in graph.nodes if node.op == "call_function"))


def lists_no_three(search, prefixes, graph, path, judge) -> None:
    """The same, but three swiglu are too much for it."""
    if sum(node.target is infc.linear_swiglu.default for node in graph.nodes) == 3: raise CheckFailed("no backend runs it")
    lists_operators(search, prefixes, graph, path, judge)


def test_a_command_judges_artifacts(monkeypatch):
    """An "artifact" with three or more swiglu is bad: the third rewrite of fuse_swiglu makes it."""
    monkeypatch.setattr(bisect, "_compile", lists_operators)
    found = bisect.bisect(decoder(), options=FP32, command='test "$(grep -c swiglu {artifact})" -lt 3')
    assert (found.fault, found.name, found.untestable) == ("pass", "fuse_swiglu", 0)
    assert found.site.startswith("model.layers.2.mlp") and "right on reference operators" in found.line
    assert found.runs <= math.log2(found.rewrites) + 4                   # and one on reference operators


def test_what_makes_no_artifact_is_skipped(monkeypatch):
    monkeypatch.setattr(bisect, "_compile", lists_no_three)
    found = bisect.bisect(decoder(), options=FP32, command='test "$(grep -c swiglu {artifact})" -lt 3')
    assert (found.name, found.untestable) == ("fuse_swiglu", 1) and found.site.startswith("model.layers.3.mlp")
    assert "the 1 before it cannot be told from it" in found.line


def test_a_command_that_fails_before_any_rewrite(monkeypatch):
    monkeypatch.setattr(bisect, "_compile", lists_operators)
    with pytest.raises(UserError, match="before any rewrite: the fault is not in the passes"):
        bisect.bisect(decoder(), options=FP32, command="test ! -e {artifact}")


@pytest.mark.slow
def test_a_command_judges_real_artifacts():
    found = bisect.bisect(decoder(), options=FP32, command="! grep -q swiglu {artifact}/programs/step_T16.json")
    assert (found.fault, found.name, found.untestable) == ("pass", "fuse_swiglu", 0) and found.site.startswith("model.layers.0.mlp")


@pytest.mark.parametrize(("command", "message"), [("true", r"has no \{artifact\}"), ("no-such-program-1 {artifact}", "cannot be run")])
def test_a_command_that_cannot_be_run(command, message, monkeypatch):
    monkeypatch.setattr(bisect, "_compile", lists_operators)
    with pytest.raises(UserError, match=message):
        bisect.bisect(decoder(), options=FP32, command=command)


def test_the_command_line_finds_it(monkeypatch):
    spoil(monkeypatch, fuse_rms_norm, lambda graph, node: node.update_arg(2, 1e-3) if of(node, "model.norm") else None)
    done = command_line("bisect", "random:tiny?layers=1", "--json", "--quiet")
    assert (done.returncode, done.stderr) == (1, "")
    found = json.loads(done.stdout)
    assert (found["fault"], found["name"]) == ("pass", "fuse_rms_norm") and found["line"].startswith("first bad rewrite")


# -------------------------------------------------------------------------------------------------------------------- search

@pytest.mark.parametrize("bad", range(1, 12))
def test_the_first_bad_cut_is_found(bad):
    asked: list[int] = []

    def good(cut, left):
        asked.append(cut)
        return cut < bad

    assert first_bad(range(12), good) == (bad - 1, bad)
    assert len(asked) <= math.ceil(math.log2(11)) and len(set(asked)) == len(asked)


def test_what_cannot_be_tested_is_skipped():
    assert first_bad(range(12), lambda cut, left: None if 3 < cut < 8 else cut < 6) == (3, 8)
    assert first_bad(range(3), lambda cut, left: None) == (0, 2)
