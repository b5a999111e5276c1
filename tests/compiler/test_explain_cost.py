"""infc explain ARTIFACT: the report adds up, needs no torch, measures what it says, and names causes. No time is asserted."""
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from infc.compiler.costs import diagnose, explain
from infc.compiler.costs.explain import explain_artifact, show
from infc.compiler.costs.peaks import Peaks
from infc.compiler.errors import UserError
from infc.runtime.artifact import read
from tiny_artifact import tiny

from .test_cost import PEAKS


@pytest.fixture(autouse=True)
def peaks(monkeypatch: pytest.MonkeyPatch) -> Peaks:
    """Peaks of no machine: nothing is measured for them."""
    monkeypatch.setattr(explain, "machine_peaks", lambda isa, threads, note: PEAKS)
    monkeypatch.setattr(explain, "peaks_now", lambda isa, threads: PEAKS)
    return PEAKS


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(explain, "machine_peaks", lambda isa, threads, note: PEAKS)
        return explain_artifact(tiny(), tokens=(8,), contexts=(4, 40), batches=(1, 3))


def test_the_report_is_plain_data_of_every_phase(report: dict[str, Any]):
    assert json.loads(json.dumps(report)) == report
    assert [p["name"] for p in report["phases"]] == [
        "decode 1 x 4", "decode 1 x 40", "decode 3 x 4", "decode 3 x 40", "prefill 8 at 0", "prefill 8 at 8"]
    assert {"decode 1 x 4", "prefill 8 at 8"} <= {b["phase"] for b in report["levers"]} and report["worth"] == 1.05


@pytest.mark.parametrize(("seconds", "quiet", "again"), [(0.1, True, False), (0.04, True, True), (0.04, False, False), (0.2, True, True)])
def test_peaks_are_taken_again_at_another_read_rate(monkeypatch: pytest.MonkeyPatch, seconds: float, quiet: bool, again: bool):
    """PEAKS reads 10 GB/s; 1 GB in 0.1 s is that rate."""
    fresh, notes = replace(PEAKS, exposed=0.9, quiet=quiet), list[str]()
    monkeypatch.setattr(explain, "peaks_now", lambda isa, threads: fresh)
    model = SimpleNamespace(memory=lambda: {"weights": 10**9}, executor=SimpleNamespace(read_weights=lambda: int(seconds * 1e9)))
    found = explain._of_this_minute(PEAKS, model, {"isa": "x", "weight_bytes": 10**9}, 2, notes.append)
    assert found is (fresh if again else PEAKS) and bool(notes) is (seconds != 0.1)


def test_a_phase_adds_up(report: dict[str, Any]):
    for phase in report["phases"]:
        assert phase["predicted_s"] == pytest.approx(sum(k["predicted_s"] for k in phase["kernels"]))
        assert phase["steps"] == sum(k["calls"] for k in phase["kernels"])
        assert sum(phase["bound_shares"].values()) == pytest.approx(1.0) and phase["bound"] in phase["bound_shares"]
        path = phase["critical_path"]
        assert 0 < path["seconds"] <= path["all_seconds"] * (1 + 1e-9) and path["all_seconds"] == pytest.approx(phase["predicted_s"])
        assert phase["measured"] is None and all(k["measured_s"] is None for k in phase["kernels"])


def test_more_work_is_never_predicted_faster(report: dict[str, Any]):
    took = {p["name"]: p["predicted_s"] for p in report["phases"]}
    assert took["decode 1 x 4"] < took["decode 1 x 40"] < took["decode 3 x 40"] and took["prefill 8 at 0"] < took["prefill 8 at 8"]


def test_a_prefill_longer_than_every_bucket_is_chunks(monkeypatch: pytest.MonkeyPatch):
    """As if the largest bucket were 128: 300 tokens are 128 + 128 + 44."""
    with read(tiny()) as artifact:
        whole, steps = artifact.report(), len(artifact.program("step_T128").steps)
    del whole["costs"]["buckets"]["step_T512"]
    monkeypatch.setattr("infc.runtime.artifact.Artifact.report", lambda self: whole)
    found = explain_artifact(tiny(), tokens=(300,), contexts=(4,), batches=(1,))
    phase = next(p for p in found["phases"] if p["name"] == "prefill 300 at 0")
    assert phase["chunks"] == 3 and phase["steps"] == 3 * steps and phase["tokens"] == 300


def test_tables_fit_a_hundred_columns(report: dict[str, Any], capsys: pytest.CaptureFixture[str]):
    show(report)
    shown = capsys.readouterr().out
    assert max(len(line.rstrip()) for line in shown.splitlines()) <= 100
    assert "decode 3 x 40" in shown and "critical path" in shown and "KV int8 at context" in shown


def test_no_torch_is_needed():
    code = ("import sys; from pathlib import Path; from infc.compiler.costs import explain; from infc.compiler.costs.peaks import Peaks\n"
            f"explain.machine_peaks = lambda *a: Peaks(**{PEAKS.__dict__!r})\n"
            f"explain.explain_artifact(Path({str(tiny())!r})); print('torch' in sys.modules)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_measured_beside_predicted():
    found = explain_artifact(tiny(), measured=True, tokens=(8,), contexts=(4,), batches=(1, 2), threads=1)
    assert found["threads"] == 1 and set(found["ratios"]) == {k["kind"] for p in found["phases"] for k in p["kernels"]}
    for phase in found["phases"]:
        measured = phase["measured"]
        assert measured["steps_s"] == pytest.approx(sum(k["measured_s"] for k in phase["kernels"]))
        assert measured["ratio"] == pytest.approx(measured["wall_s"] / phase["predicted_s"]) and measured["gap_s"] > 0
        for kernel in phase["kernels"]:
            assert kernel["ratio"] == pytest.approx(kernel["measured_s"] / kernel["predicted_s"])
            assert ("cause" in kernel) == diagnose.far_off(kernel, measured["steps_s"])
    show(found)


@pytest.mark.parametrize(("options", "said"), [
    ({"batches": (99,)}, "batch 99 is more than the 16 sequences"), ({"contexts": (10**6,)}, "more than this model's"),
    ({"tokens": (0,)}, "1 or more")])
def test_what_the_artifact_cannot_run_is_one_clear_line(options: dict[str, Any], said: str):
    with pytest.raises(UserError, match=said): explain_artifact(tiny(), **options)


def test_an_artifact_without_costs_says_what_to_do(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("infc.runtime.artifact.Artifact.report", lambda self: {})
    with pytest.raises(UserError, match="compile the model again"): explain_artifact(tiny())


def test_another_machines_artifact_is_not_predicted(monkeypatch: pytest.MonkeyPatch):
    class Old:
        flags = frozenset[str]()

    monkeypatch.setattr(explain, "this_cpu", Old)
    with read(Path(tiny())) as artifact:
        if not artifact.manifest.isa: pytest.skip("the portable target needs no flags")
    with pytest.raises(UserError, match="explain it on its target"): explain_artifact(tiny())


def row(**changes: Any) -> dict[str, Any]:
    return {"name": "k", "op": "infc.linear", "kind": "product", "dtype": "bf16", "calls": 10, "measured_s": 1.0, "ratio": 2.0,
            "bound": "memory", "weights": 2e9, "kv": 0.0, "activations": 1e3} | changes


@pytest.mark.parametrize(("changes", "said"), [
    ({"kind": "aten"}, "no kernel"), ({"ratio": 0.5}, "faster than predicted"), ({"op": "infc.dequantize"}, "dequantized"),
    ({"measured_s": 1e-5}, "imbalance"), ({"kind": "attention"}, "KV-bound"), ({"kind": "gather"}, "scattered"),
    ({}, "it reads at 2.0 of 10.0 GB/s"),
    ({"kind": "rows", "activations": 3e9}, "pushed out of the caches: they come at 3.0"),
    ({"bound": "compute"}, "arithmetic below the peak")])
def test_causes(changes: dict[str, Any], said: str):
    assert said in diagnose.cause(row(**changes), 10.0)


def test_far_off_is_a_ratio_and_a_share():
    assert diagnose.far_off(row(), 2.0) and diagnose.far_off(row(ratio=0.6), 2.0)
    assert not diagnose.far_off(row(ratio=1.4), 2.0) and not diagnose.far_off(row(measured_s=0.01), 1.0)


def test_findings():
    phase = {"measured": {"wall_s": 1.0, "steps_s": 0.8, "gap_s": 0.2, "read_gb_s": 10.0}, "chunks": 3, "tokens": 1500, "bound": "memory",
             "weights": 2e9, "kv": 2e9, "kernels": [row(kind="attention", measured_s=0.5), row(measured_s=0.3)]}
    said = " | ".join(diagnose.findings(phase))
    assert all(word in said for word in ("20 % of the time no step runs", "KV-bound", "3 chunks", "4.0 of 10.0 GB/s"))
    calm = phase | {"measured": phase["measured"] | {"gap_s": 0.01}, "chunks": 1, "bound": "compute", "kernels": [row(measured_s=0.8)]}
    assert diagnose.findings(calm) == []


def test_a_compile_predicts_by_reads_alone_until_peaks_are_known(monkeypatch: pytest.MonkeyPatch):
    from infc.compiler import result

    with read(tiny()) as artifact:
        costs, manifest = artifact.report()["costs"], artifact.manifest
    monkeypatch.setattr(result.machine, "known_peaks", lambda isa, threads: None)
    plain = result.predict(costs, manifest, {"read_gb_s": 2.0, "cpu_share": 1.0})
    busy = result.predict(costs, manifest, {"read_gb_s": 2.0, "cpu_share": 0.5})
    assert plain["findings"] == [] and busy["findings"][0].startswith("other processes had these CPUs 50% of the time")
    assert plain["by"] == "reads alone" and plain["decode_ms"] == pytest.approx(plain["bytes"] / 2e9 * 1e3) and plain["bound"] == "memory"
    monkeypatch.setattr(result.machine, "known_peaks", lambda isa, threads: PEAKS)
    known = result.predict(costs, manifest, {"read_gb_s": 2.0, "cpu_share": 1.0})
    assert known["by"] == "measured peaks" and known["decode_ms"] > plain["decode_ms"]
    assert sum(known["shares"].values()) == pytest.approx(1.0)
    assert known["decode_tok_s"] == pytest.approx(1e3 / known["decode_ms"]) and result.predict(costs, manifest, {}) == {}
