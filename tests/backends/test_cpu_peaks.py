"""The micro-benchmarks: seconds become rates as by hand, a disturbed sample does not count, and all of it runs. No time is asserted."""
import dataclasses
import math
from collections.abc import Callable

import pytest
from infc.backends.cpu import peaks
from infc.compiler.targets import host


def test_seconds_become_rates():
    took = dict.fromkeys(("product_bf16", "attention_bf16", "attention_f32", "attention_i8"), 1e-3) | {
        "product_f32": 2e-3, "keys_bf16": 5e-4, "keys_f32": 5e-4, "keys_i8": 2e-4, "read": 0.01, "barrier": 1e-6,
        "kv_long_bf16": 3.3e-5, "kv_short_bf16": 5e-6, "kv_long_i8": 1.9e-5, "kv_short_i8": 5e-6,
        "kv_write": 1e-6, "start": 2e-6, "even": 0.5, "even_warm": 1e-5, "rows": 2e-6, "row": 1.5e-6, "scan": 1e-6, "weights": 1e-5}
    found = peaks._peaks(took, 10**9, "cpu", "isa", 2, 1 << 20, True)
    assert found.read_gb_s == pytest.approx(100.0)
    product = 2 * 256 * peaks.K * peaks.N / 1e9
    assert found.product_gflop_s == {"bf16": pytest.approx(product / 1e-3), "f32": pytest.approx(product / 2e-3)}
    assert found.cache_gb_s == pytest.approx(64 * peaks.N * 6 / 1e9 / 1e-6)
    assert found.thread_cache_gb_s == pytest.approx(peaks.N * 6 / 1e9 / 5e-7)
    block = peaks.SEQUENCES * 32 * peaks.HEADS * peaks.HEAD * 4 / 1e9
    codes = block / (peaks.HEAD * 4) * (peaks.HEAD + 4) * 2                    # a code a value, and of each key and value a scale
    assert found.kv_read_gb_s == {"bf16": pytest.approx(block / 1e-6), "i8": pytest.approx(codes / 5e-7)}
    keys = 512 * peaks.HEADS * 2 / 1e9
    assert found.key_cache_gb_s == {"bf16": pytest.approx(keys * 128 / 5e-4), "i8": pytest.approx(keys * 68 / 2e-4)}
    assert found.kv_start_s == pytest.approx(1e-6 / peaks.SEQUENCES)
    assert found.start_s == 2e-6 and found.exposed == pytest.approx(0.5 - 2e-6 * 1e11 / (peaks.K * peaks.N * 2))
    pairs = 256 * 256 + 256 * 257 // 2
    assert found.attention_gflop_s["bf16"] == pytest.approx(peaks.HEADS * peaks.GROUP * (4 * peaks.HEAD + 5) * pairs / 1e9 / 5e-4)
    assert found.attention_gflop_s["i8"] == pytest.approx(found.attention_gflop_s["bf16"] * 5 / 8)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float, float], None]:
    """A wall clock and a CPU clock that move only when told to."""
    now = {"wall": 0.0, "cpu": 0.0}
    monkeypatch.setattr(peaks.time, "perf_counter", lambda: now["wall"])
    monkeypatch.setattr(peaks.time, "process_time", lambda: now["cpu"])

    def pass_time(wall: float, cpu: float) -> None:
        now["wall"] += wall
        now["cpu"] += cpu

    return pass_time


def test_samples_in_which_a_thread_lost_its_cpu_do_not_count(clock: Callable[[float, float], None]):
    runs: list[int] = []

    def run() -> float:
        runs.append(1)
        slow = len(runs) % 3 == 0
        clock(0.01, 0.012 if slow else 0.02)
        return 9.0 if slow else 1.0

    samples, quiet = peaks._sample({"a": run}, 2)
    assert quiet and samples == {"a": [1.0] * peaks.ROUNDS}


def test_a_busy_machine_is_said_to_be_one(clock: Callable[[float, float], None]):
    def run() -> float:
        clock(0.5, 0.5)
        return 2.0

    samples, quiet = peaks._sample({"a": run}, 2)
    assert not quiet and set(samples["a"]) == {2.0}


def test_a_rate_that_moved_is_no_sample(clock: Callable[[float, float], None]):
    values = iter([math.nan, math.nan, 1.0] * 100)

    def run() -> float:
        clock(0.01, 0.02)
        return next(values)

    assert peaks._sample({"a": run}, 2)[0] == {"a": [1.0] * peaks.ROUNDS}


@pytest.mark.slow
def test_every_figure_is_one(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(peaks, "BUDGET_S", 2.0)
    found = peaks.measure("cpu", host().isa, 1)
    for name, value in dataclasses.asdict(found).items():
        for figure in value.values() if isinstance(value, dict) else (value,):
            if isinstance(figure, float): assert math.isfinite(figure) and figure >= 0, name
    assert min(found.read_gb_s, found.cache_gb_s, *found.kv_read_gb_s.values(), *found.product_gflop_s.values()) > 0
