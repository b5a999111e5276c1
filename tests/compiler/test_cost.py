"""Costs at live sizes: loads and phases by hand, formulas against a recount, what a prediction is made of, the roofline's points."""
from dataclasses import replace

import pytest
from infc.compiler.costs import cost
from infc.compiler.costs.cost import Change, Load, decode, predict, prefill
from infc.compiler.costs.peaks import Peaks
from infc.compiler.costs.phases import BLOCK as PHASES_BLOCK
from infc.compiler.costs.phases import value
from infc.compiler.errors import UserError
from infc.compiler.ops.kv_write import BLOCK

PEAKS = Peaks(
    cpu="a test", isa="x86-64-v3", threads=2, read_gb_s=10.0, kv_read_gb_s={"bf16": 5.0}, cache_gb_s=40.0, thread_cache_gb_s=20.0,
    weight_cache_gb_s=80.0, key_cache_gb_s={"bf16": 50.0}, scan_gb_s=25.0, product_gflop_s={"bf16": 100.0, "f32": 50.0},
    attention_gflop_s={"bf16": 200.0, "f32": 100.0}, exposed=0.5, barrier_s=1e-6, aten_call_s=7e-6, llc_bytes=1000, start_s=2e-6,
    kv_start_s=3e-6, kv_write_gb_s=1.0)

GB = 10**9


def kernel(op: str, *, flops=(), weights=(), kv=(), activations=(), dtype: str = "bf16", name: str = "k", key: str = "h") -> dict:
    return {"kernel": key, "name": name, "op": op, "kind": cost.kind_of(op), "dtype": dtype, "flops": [*map(list, flops)],
            "weights": [*map(list, weights)], "kv": [*map(list, kv)], "activations": [*map(list, activations)], "exact": True}


LINEAR = kernel("infc.linear", flops=[(8, "T")], weights=[(GB,)], name="linear", key="a")
ATTENTION = kernel("infc.paged_attention", flops=[(GB, "pairs:0")], kv=[(GB, "keys:0")], activations=[(4, "N", "M")],
                   name="attention", key="b")
COSTS = {"kernels": [LINEAR, ATTENTION], "steps": {"step_T1": [0, 1, 0], "step_T16": [0, 1, 0]}, "isa": "x86-64-v3", "dtype": "bf16",
         "buckets": {"step_T16": {"T": 16, "N": 4, "R": 4, "M": 8}, "step_T1": {"T": 1, "N": 1, "R": 1, "M": 8}},
         "kv_bytes_per_token": 100, "weight_bytes": GB, "max_positions": 256}


def test_the_block_is_the_operators():
    assert PHASES_BLOCK == BLOCK


def test_a_load_by_hand():
    load = Load((1, 3), (40, 2), 2)
    assert load.dims == {"T": 4, "N": 2, "R": 2, "M": 2}
    assert load.pairs() == 41 + (3 + 4 + 5) and load.keys() == 41 + 5


@pytest.mark.parametrize("window", [1, 2, 3, 4, 7, 100])
@pytest.mark.parametrize(("new", "before"), [(1, 0), (1, 40), (5, 0), (5, 2), (3, 9)])
def test_windows_count_as_the_mask_does(window: int, new: int, before: int):
    """Against a mask written out: query at position p sees keys max(0, p - window + 1) .. p."""
    seen = [set(range(max(0, p - window + 1), p + 1)) for p in range(before, before + new)]
    load = Load((new,), (before,), 1)
    assert load.pairs(window) == sum(map(len, seen))
    assert load.keys(window) == len(set.union(*seen))
    assert (load.pairs(), load.keys()) == (sum(p + 1 for p in range(before, before + new)), before + new)


def test_phases():
    assert decode(2, 40).loads == (Load((1, 1), (40, 40), 2),) and decode(2, 40).tokens == 2
    long = prefill(10, 5, 4)
    assert [(c.new, c.before, c.rows) for c in long.loads] == [((4,), (5,), 0), ((4,), (9,), 0), ((2,), (13,), 1)] and long.tokens == 10
    assert decode(16, 8192).words == "context 8192, batch 16"


def test_a_formula_by_hand():
    terms = [[3], [2, "T", "N"], [5, "pairs:0"], [7, "keys:2"]]
    assert value(terms, Load((1, 1), (4, 4), 2)) == 3 + 2 * 4 + 5 * 10 + 7 * 4
    assert value([[2, "T", "T"]], {"T": 3}) == 18
    with pytest.raises(KeyError, match="pairs"): value([[5, "pairs:0"]], {"T": 3})


def test_the_smallest_bucket_that_holds_a_load():
    assert cost.program_of(COSTS, decode(1, 8).loads[0]) == "step_T1" and cost.program_of(COSTS, decode(2, 8).loads[0]) == "step_T16"
    with pytest.raises(UserError, match="fits no bucket"): cost.program_of(COSTS, decode(5, 8).loads[0])


def test_a_product_is_the_longer_of_its_times_and_the_exposed_part_of_the_shorter():
    one = predict(LINEAR, Load((1,), (0,), 1), PEAKS, streams=True)                # 0.1 s of reading, 8e-11 s of products
    assert one.bound == "memory" and one.seconds == pytest.approx(0.1 + 3e-6)
    heavy = predict(kernel("infc.linear", flops=[(100 * GB, "T")], weights=[(GB,)]), Load((2,), (0,), 1), PEAKS, streams=True)
    assert heavy.bound == "compute" and heavy.seconds == pytest.approx(2.0 + 0.5 * 0.1 * 0.1 / 2.0 + 3e-6)
    slow = predict(kernel("infc.linear", flops=[(100 * GB, "T")], dtype="f32"), Load((1,), (0,), 1), PEAKS, streams=True)
    assert slow.compute_s == pytest.approx(2.0)                                   # its own dtype's peak


def test_codes_are_multiplied_as_bf16_from_so_many_rows_on():
    coded = kernel("infc.linear_quantized", flops=[(100 * GB, "T")], dtype="w8a16") | {"bf16_rows": 32}
    slow = replace(PEAKS, product_gflop_s=PEAKS.product_gflop_s | {"w8a16": 25.0})
    for tokens, rate in ((31, 25.0), (32, 100.0)):
        assert predict(coded, Load((tokens,), (0,), 1), slow, streams=True).compute_s == pytest.approx(100 * tokens / rate)


def test_weights_that_fit_the_cache_are_read_from_it():
    assert predict(LINEAR, Load((1,), (0,), 1), PEAKS, streams=False).seconds == pytest.approx(GB / 80e9 + 1e-6)
    small = COSTS | {"weight_bytes": 500}
    assert cost.streams(COSTS, decode(1, 0).loads[0], PEAKS) and not cost.streams(small, decode(1, 1).loads[0], PEAKS)
    assert cost.streams(small, decode(1, 200).loads[0], PEAKS)                    # its keys do not


def test_attention_reads_old_keys_from_memory_and_its_own_from_the_cache():
    step = predict(ATTENTION, Load((1,), (9,), 1), PEAKS, streams=True)            # 10 keys of 1 GB, one of them new
    assert step.memory_s == pytest.approx(9 / 5) and step.compute_s == pytest.approx(10 / 200 + 1 / 50)
    assert step.seconds == pytest.approx(9 / 5 + 1e-6 + 3e-6) and step.bound == "memory"
    assert predict(ATTENTION, Load((9,), (0,), 1), PEAKS, streams=True).memory_s == 0


def test_a_cache_of_codes_is_read_and_multiplied_at_its_own_rates():
    """10 keys of 1 GB of codes, one of them new: and the lever that a wide cache has is half its bytes at those rates."""
    own = replace(PEAKS, kv_read_gb_s={"bf16": 5.0, "i8": 2.0}, key_cache_gb_s={"bf16": 50.0, "i8": 20.0},
                  attention_gflop_s={"bf16": 200.0, "f32": 100.0, "i8": 40.0})
    coded, load = {**ATTENTION, "op": "infc.paged_attention_quantized", "dtype": "i8"}, Load((1,), (9,), 1)
    step = predict(coded, load, own, streams=True)
    assert step.memory_s == pytest.approx(9 / 2) and step.compute_s == pytest.approx(10 / 40 + 1 / 20)
    assert predict(ATTENTION, load, own, streams=True) == predict(ATTENTION, load, PEAKS, streams=True)
    lever = predict(ATTENTION, load, own, streams=True, change=Change(kv_bits=8))
    assert lever.memory_s == pytest.approx(4.5 / 2) and lever.compute_s == pytest.approx(10 / 40 + 0.5 / 20)
    assert predict(coded, load, own, streams=True, change=Change(kv_bits=8)) == step       # it is as small as it gets


def test_rows_scatter_their_first_key_in_each_block():
    write = kernel("infc.rope_kv_write", kv=[(GB, "T")], activations=[(GB, "T")])
    assert predict(write, Load((1,), (0,), 1), PEAKS, streams=True).memory_s == pytest.approx(1.0 + 1 / 20)
    assert predict(write, Load((64,), (0,), 1), PEAKS, streams=True).memory_s == pytest.approx(3.0 + (61 + 64) / 40)


def test_kinds_and_fixed_times():
    kinds = {"infc.linear_swiglu": "product", "infc.rms_norm": "rows", "aten._to_copy": "rows", "aten.topk.default": "aten",
             "loop.cos": "loop", "infc.sample": "sample"}
    assert {op: cost.kind_of(op) for op in kinds} == kinds
    call = predict(kernel("aten.topk.default"), Load((1,), (0,), 1), PEAKS, streams=True)
    assert call.seconds == pytest.approx(8e-6) and call.bound == "barrier"


def test_changes_take_bytes_barriers_and_steps_away():
    load = Load((1,), (9,), 1)
    assert predict(LINEAR, load, PEAKS, streams=True, change=Change(weight_bits=8)).memory_s == pytest.approx(0.05)
    assert predict(ATTENTION, load, PEAKS, streams=True, change=Change(kv_bits=8)).memory_s == pytest.approx(0.9)
    assert predict(LINEAR, load, PEAKS, streams=True, change=Change(barrier=0)).barrier_s == pytest.approx(2e-6)
    assert predict(LINEAR, load, PEAKS, streams=True, change=Change(free=frozenset({"product"}))).seconds == 0


def test_a_phase_is_the_sum_of_its_steps():
    phase = decode(1, 9)
    steps = [predict(k, phase.loads[0], PEAKS, streams=True).seconds for k in (LINEAR, ATTENTION, LINEAR)]
    assert cost.phase_seconds(COSTS, phase, PEAKS) == pytest.approx(sum(steps))


def test_roofline_points():
    phases = [decode(1, 9), prefill(16, 0, 16)]
    points = cost.roofline_points(COSTS, PEAKS, phases, {("decode 1 x 9", "a"): 0.25, ("decode 1 x 9", "attention"): 2.0})
    assert [(p["kernel"], p["phase"], p["calls"], p["measured_s"]) for p in points] == [
        ("a", "decode 1 x 9", 2, 0.25), ("b", "decode 1 x 9", 1, 2.0), ("a", "prefill 16 at 0", 2, None), ("b", "prefill 16 at 0", 1, None)]
    first, wide = points[0], points[3]
    assert (first["flops"], first["bytes"], first["bound"]) == (8, GB, "memory") and first["intensity"] == pytest.approx(8 / GB)
    assert wide["flops"] == GB * 136 and wide["bytes"] == 16 * GB + 4
    faster = cost.roofline_points(COSTS, replace(PEAKS, read_gb_s=20.0), phases)
    assert faster[0]["predicted_s"] < first["predicted_s"]
