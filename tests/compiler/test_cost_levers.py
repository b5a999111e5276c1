"""Amdahl's bounds and the critical path, on a made-up report and a made-up program."""
import pytest
from infc.compiler.costs.cost import decode, phase_seconds, prefill
from infc.compiler.costs.critical_path import critical_path, edges
from infc.compiler.costs.levers import bounds, phases_for
from infc.runtime.program import Buffer, Program, Step

from .test_cost import COSTS, GB, PEAKS, kernel

ROWS = kernel("infc.rms_norm", activations=[(GB, "T")], name="norm", key="c")
MADE_UP = COSTS | {"kernels": [*COSTS["kernels"], ROWS], "steps": {"step_T1": [0, 1, 2], "step_T16": [0, 1, 2]}}


def found(lever: str, phase) -> dict:
    return next(b for b in bounds(MADE_UP, [phase], PEAKS) if b["lever"] == lever)


def test_each_bound_is_the_time_without_what_it_saves():
    """Decode at context 9 takes 0.1 s of weights, 1.8 s of old keys and 0.05 s of rows, and 8 us of starts and barriers."""
    phase = decode(1, 9)
    now = phase_seconds(MADE_UP, phase, PEAKS)
    assert now == pytest.approx(0.1 + 1.8 + 0.05, rel=1e-3)
    assert found("weight int8", phase)["ratio"] == pytest.approx(now / (now - 0.05), rel=1e-4)
    assert found("weight int4", phase)["ratio"] == pytest.approx(now / (now - 0.075), rel=1e-4)
    assert found("KV int8", phase)["ratio"] == pytest.approx(now / (now - 0.9), rel=1e-4)
    assert found("fusion left", phase)["ratio"] == pytest.approx(now / (now - 0.05), rel=1e-4)
    assert found("graph replay", phase)["ratio"] == pytest.approx(now / (now - 3e-6))


def test_a_larger_batch_is_judged_by_tokens_a_second():
    small, large = decode(1, 9), decode(4, 9)
    ratio = (4 / phase_seconds(MADE_UP, large, PEAKS)) / (1 / phase_seconds(MADE_UP, small, PEAKS))
    bound = found("batch 4", small)
    assert bound["ratio"] == pytest.approx(ratio) and bound["sentence"].startswith("batch 4 at context 9, batch 1: tokens/s at most")
    assert not [b for b in bounds(MADE_UP, [large, prefill(8, 0, 16)], PEAKS) if b["lever"].startswith("batch")]


def test_sentences_say_when_it_is_not_worth_it():
    assert found("KV int8", decode(1, 9))["sentence"] == "KV int8 at context 9, batch 1: at most 1.86x"
    small = found("graph replay", decode(1, 9))
    assert small["sentence"] == "graph replay at context 9, batch 1: at most 1.00x, not worth it" and not small["worth"]


def test_an_fp32_model_has_more_to_gain():
    wide = MADE_UP | {"kernels": [k | {"dtype": "f32"} for k in MADE_UP["kernels"]]}
    four = next(b for b in bounds(wide, [decode(1, 9)], PEAKS) if b["lever"] == "weight int8")
    assert four["ratio"] > found("weight int8", decode(1, 9))["ratio"]


def test_what_is_quantized_already_is_no_lever():
    """Int8 weights can become int4; with a wide product beside them, int8 saves what that one has; an int8 cache is as small as it gets."""
    phase, (linear, attention, rows) = decode(1, 9), MADE_UP["kernels"]
    coded = MADE_UP | {"kernels": [linear | {"dtype": "w8a16"}, attention | {"dtype": "u8"}, rows]}
    found = {b["lever"]: b["ratio"] for b in bounds(coded, [phase], PEAKS)}
    now = phase_seconds(coded, phase, PEAKS)
    assert "weight int8" not in found and "KV int8" not in found
    assert found["weight int4"] == pytest.approx(now / (now - 0.05), rel=1e-4)
    floats = MADE_UP | {"kernels": [linear | {"dtype": "fp8a8"}, attention, rows]}
    assert "weight int8" not in {b["lever"] for b in bounds(floats, [phase], PEAKS)}
    both = coded | {"kernels": [*coded["kernels"], linear], "steps": {name: [*steps, 3] for name, steps in coded["steps"].items()}}
    found, now = {b["lever"]: b["ratio"] for b in bounds(both, [phase], PEAKS)}, phase_seconds(both, phase, PEAKS)
    assert found["weight int8"] == pytest.approx(now / (now - 0.05), rel=1e-4)
    assert found["weight int4"] == pytest.approx(now / (now - 0.05 - 0.075), rel=1e-4)


def test_levers_are_tried_at_the_ends_of_what_the_model_takes():
    assert [p.name for p in phases_for(MADE_UP)] == ["decode 1 x 255", "decode 4 x 255"]


def program(*steps: tuple[tuple[int, ...], str], kinds: str) -> Program:
    """kinds: one letter a buffer: i input, a arena, o output, k kv, w weight."""
    names = {"i": "input", "a": "arena", "o": "output", "k": "kv", "w": "weight"}
    buffers = tuple(Buffer(f"b{i}", names[k], "f32", (1,), 4) for i, k in enumerate(kinds))  # type: ignore[arg-type]
    return Program("p", {"T": 1}, ("T",), 0, buffers, tuple(Step(op, args, op) for args, op in steps))


def test_the_path_is_the_longest_chain_of_values():
    """x -> a -> c, x -> b -> c: b is longer than a, so a is not on the path."""
    p = program(((0, 1), "a"), ((0, 2), "b"), ((1, 2, 3), "c"), kinds="iaao")
    assert edges(p) == {(0, 2), (1, 2)}
    path = critical_path(p, [1.0, 2.0, 4.0])
    assert (path["steps"], path["seconds"], path["all_seconds"]) == ([1, 2], 6.0, 7.0) and path["share"] == pytest.approx(6 / 7)


def test_the_cache_is_used_in_order_and_writes_wait_for_readers():
    """Write keys, attend, write in place what was read before: each waits, though no value says so."""
    assert edges(program(((0, 1), "write"), ((0, 1, 2), "attend"), kinds="iko")) == {(0, 1)}
    in_place = program(((0, 1), "make"), ((1, 2), "read"), ((1, 1), "change"), ((1, 3), "use"), kinds="iaaa")
    assert edges(in_place) == {(0, 1), (0, 2), (1, 2), (2, 3)}
