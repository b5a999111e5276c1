"""`make gpu-check`: what it says where it cannot run, its table and JSON from made-up results; slow: all of it that needs no GPU."""
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from infc.backends.triton.judge import strain
from infc.runtime.errors import RuntimeFault

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu_check

    yield gpu_check


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    out, err = capsys.readouterr()
    assert not out and err.startswith("gpu-check: ") and err.count("\n") == 1
    return err


@pytest.mark.parametrize(("arguments", "message"), [
    (["--parts", "A,D"], "--parts D: A, B and C are known"), (["--parts", ""], "--parts nothing"), (["--seconds", "5"], "10 to 3600"),
    (["--seconds", "soon"], "invalid float value"), (["--worker", "x"], "unrecognized arguments"),
])
def test_argument_errors(check: ModuleType, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended: check.main(arguments)
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_no_gpu_is_one_line(check: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def none() -> dict[str, Any]:
        raise RuntimeFault("this machine has no NVIDIA driver")

    monkeypatch.setattr(check, "card", none)
    monkeypatch.setattr(check, "NEEDED", {"torch": "torch"})
    assert check.main([]) == 2 and "no NVIDIA driver (--dry-run goes the same way" in one_line(capsys)


def test_a_card_infc_builds_nothing_for_is_one_line(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(check, "card", lambda: {"name": "NVIDIA T4", "arch": "sm_75", "memory": 16 * 10**9})
    monkeypatch.setattr(check, "NEEDED", {"torch": "torch"})
    assert check.main([]) == 2 and "no code for NVIDIA T4 (sm_75); `infc targets`" in one_line(capsys)


def test_missing_packages_are_one_line(check: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(check, "NEEDED", {"torch": "torch", "no_such_module": "no-such-package", "no_such.part": "another", "infc": "infc"})
    assert check.main([]) == 2 and "missing here: no-such-package, another; pip install them" in one_line(capsys)


@pytest.mark.parametrize(("arch", "gigabytes", "target"), [
    ("sm_90", 150, "h200"), ("sm_90", 85, "h100"), ("sm_80", 42, "a100"), ("sm_86", 24, "a100"), ("sm_89", 48, "l40s"),
    ("sm_100", 190, "b200"), ("sm_75", 16, None),
])
def test_the_target_of_a_card(check: ModuleType, arch: str, gigabytes: int, target: str | None) -> None:
    assert check.card_target(arch, gigabytes * 10**9) == target


def step(engine: str, layers: int, ms: float, **more: Any) -> dict[str, Any]:
    return {"model": "Llama-3.1-8B", "layers": layers, "quant": "none", "engine": engine, "what": "decode", "batch": 1, "context": 512,
            "ms": ms, "samples": [ms]} | more


def report() -> dict[str, Any]:
    """Every kind of row: right, wrong and died of; measured, and of two numbers of layers."""
    a = [{"name": "infc::linear 1x2x3 bf16", "op": "infc::linear", "share": 0.5},
         {"name": "infc::linear 9x9x9 bf16", "op": "infc::linear", "share": 1.5},
         {"name": "infc::rope odd", "op": "infc::rope", "error": 'Traceback:\n  File "x.py", line 1\n    y\nRuntimeFault: CUDA\nsays no'}]
    b = [{"name": "tiny", "share": 0.25, "buckets": 6, "replays": 200},
         {"name": "tiny w4a32", "error": "3 of 200 replays of 1 sequences differ"}]
    c = [step("infc", 2, 1.0, bytes=10**9, host_us=20.0), step("infc", 6, 2.0, bytes=2 * 10**9, host_us=21.0), step("compile", 2, 1.5),
         step("compile", 6, 3.0), step("eager", 2, 9.0),
         step("infc", 16, 4.0, model="Llama-3.2-1B", what="prefill", context=2048, flops=8 * 10**11, host_us=30.0),
         {"model": "Qwen2.5-7B", "engine": "compile", "what": "peer", "name": "Qwen2.5-7B, compile", "peer_error": "out of memory"},
         {"model": "Llama-3.2-1B", "layers": 16, "quant": "none", "engine": "infc", "what": "tune", "name": "Llama-3.2-1B 16 layers tune",
          "choices": 20, "changed": 3, "before_us": {"step_T1": 110.0, "step_T8": 50.0}, "after_us": {"step_T1": 100.0, "step_T8": 50.0}}]
    return {"card": {"name": "NVIDIA H200"}, "environment": {"driver": "driver 580"},
            "rates": {"copy_bytes_s": 2e12, "matmul_flops_s": 800e12},
            "parts": {part: {"done": True, "seconds": 1.0, "rows": rows, "left_out": ["what took too long"] * (part == "C")}
                      for part, rows in (("A", a), ("B", b), ("C", c))}}


def test_steps_of_whole_models(check: ModuleType) -> None:
    from gpu_table import whole_models

    large, small = whole_models(report()["parts"]["C"]["rows"])
    assert large["ms"] == {"infc": 1 + 30 * 0.25, "compile": 1.5 + 30 * 0.375}                # eager was measured once: no line through it
    assert (large["layer_ms"]["infc"], large["rest_ms"]["infc"], large["bytes"]) == (0.25, 0.5, 8.5e9)
    assert small["ms"] == {"infc": 4.0} and small["flops"] == 8 * 10**11 and small["layers"] == (16,)


def test_the_table(check: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    from gpu_table import failures, show

    show(report())
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) < 120 and "NVIDIA H200, driver 580, copies 2.00 TB/s, products 800 TFLOP/s" in lines[0]
    text = [" ".join(line.split()) for line in lines]
    assert "A infc::linear 1 of 2 1.50 FAILS" in text and "B tiny 6 buckets 0.25 200 equal replays" in text
    assert any(line.startswith("C Llama-3.1-8B decode 1 at 512 8.500 ms 1.00 TB/s, 50% 12.75 ms 1.50x") for line in text)
    assert any(line.startswith("C Llama-3.2-1B prefill 1 at 2048 4.000 ms 200 TFLOP/s, 25%") for line in text)
    assert "C Llama-3.2-1B infc tune 3 of 20 T1 1.10x, T8 1.00x" in text
    assert "A: infc::rope odd: RuntimeFault: CUDA" in text and "C: Qwen2.5-7B, compile: out of memory" in text
    assert "C: no time for what took too long" in text
    assert [(part, name) for part, name, _ in failures(report())] == [
        ("A", "infc::linear 9x9x9 bf16"), ("A", "infc::rope odd"), ("B", "tiny w4a32")]


def test_a_part_that_tried_nothing_fails(check: ModuleType) -> None:
    from gpu_table import failures

    empty = {"done": True, "seconds": 1.0, "rows": [], "left_out": ["tiny: not compiled in time"]}
    assert failures({"parts": {"B": empty}}) == [("B", "nothing", "was tried: tiny: not compiled in time")]
    assert failures({"parts": {"B": empty | {"done": False}}}) == []


def test_each_row_is_in_the_json_at_once(check: ModuleType, tmp_path: Path) -> None:
    found = report()
    run = check.Run(tmp_path, tmp_path / "made" / "gpu.json", False, ["A", "B", "C"], "h200", "sm_90a", 540, found)
    run.add("B", {"name": "smollm2's shape", "share": 0.5, "buckets": 6, "replays": 200})
    kept = json.loads((tmp_path / "made/gpu.json").read_text())
    assert kept["parts"]["B"]["rows"][-1]["name"] == "smollm2's shape" and kept["passed"] is False and kept["seconds"] >= 0
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["gpu.json"]
    assert [round(run.until(part) - run.began) for part in "ABC"] == [130, 220, 540]


def test_a_worker_that_fails_says_why(check: ModuleType, tmp_path: Path) -> None:
    from gpu_worker import Died, Worker

    worker = Worker("peers", tmp_path)
    with pytest.raises(Died, match="KeyError: 'dry'"): list(worker.ask({}, time.monotonic() + 60))
    with pytest.raises(Died, match="exit code 1"): list(worker.ask({}, time.monotonic() + 60))
    worker.close()
    slow = Worker("peers", tmp_path)
    with pytest.raises(Died, match="its time is up"): list(slow.ask({"dry": True, "model": "tiny", "layers": 1}, time.monotonic()))
    assert slow.process.poll() is not None


def test_a_crash_costs_its_own_case(check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import gpu_parts

    asked: list[list[str]] = []

    class Crashing:
        def __init__(self, *_: Any) -> None: ...
        def close(self) -> None: ...

        def ask(self, request: dict[str, Any], until: float) -> Iterator[dict[str, Any]]:
            asked.append(list(request["done"]))
            if "infc::rope odd" not in request["done"]:
                yield {"name": "infc::linear 1x2x3", "op": "infc::linear", "share": 0.5}
                raise gpu_parts.Died("RuntimeFault: the GPU's context is lost", "infc::rope odd")
            yield {"name": "infc::sample 8", "op": "infc::sample", "share": 0.0}
            yield {"left_out": "cases of infc::attention 3"}

    monkeypatch.setattr(gpu_parts, "Worker", Crashing)
    found = {"parts": {"A": {"done": False, "rows": [], "left_out": []}}}
    gpu_parts.part_a(check.Run(tmp_path, None, False, ["A"], "h200", "sm_90a", 100, found))
    part = found["parts"]["A"]
    assert asked == [[], ["infc::linear 1x2x3", "infc::rope odd"]] and part["left_out"] == ["cases of infc::attention 3"]
    assert [row["name"] for row in part["rows"]] == ["infc::linear 1x2x3", "infc::rope odd", "infc::sample 8"]
    assert part["rows"][1] == {"name": "infc::rope odd", "op": "infc::rope", "error": "RuntimeFault: the GPU's context is lost"}


def test_every_kernel_has_cases_and_no_two_are_called_alike() -> None:
    pytest.importorskip("triton", reason="needs the extra `gpu`")
    code = """if True:
        from gpu_cases import cases, missing
        for fp8 in (False, True):
            found = cases(fp8)
            assert not missing(found) and len({case.name for case in found}) == len(found)
            assert {case.op for case in found} == {case.op for case in found if case.first} == {case.op for case in found if case.small}
        assert [case.first for case in found] == sorted((case.first for case in found), reverse=True)"""
    subprocess.run([sys.executable, "-c", code], cwd=BENCHMARKS, check=True)


ROW = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.float64)


@pytest.mark.parametrize(("found", "share"), [
    (ROW, 0.0), (ROW + 2.0**-6, 1.0), (ROW + 2.0**-5, 2.0), (ROW * torch.nan, torch.inf), (ROW.T, torch.inf),
    (torch.tensor([[1.0, torch.inf, 3.0]]), torch.inf),
])
def test_strain(found: torch.Tensor, share: float) -> None:
    """bf16 has 8 bits: an ulp of a row whose largest is 3 is 2**-6, and all of the error that is allowed beside a reference without any."""
    assert strain(found.bfloat16(), ROW.bfloat16(), ROW) == share


def test_strain_takes_the_reference_as_it_is() -> None:
    odd = torch.tensor([[torch.nan, torch.inf, 3.0]])
    assert strain(odd.bfloat16(), odd.bfloat16(), odd.double()) == 0
    assert strain((ROW + 0.5).bfloat16(), (ROW + 0.25).bfloat16(), ROW) == 0.5 / (0.25 + 2.0**-6)
    assert strain((ROW + 0.5).bfloat16(), (ROW + 0.25).bfloat16(), ROW, times=2, more=torch.tensor([5.0])) == 0.5 / (0.5 + 2.0**-4)


def test_strain_of_other_orders_stays_small() -> None:
    """A long sum may have another row's error, and no more than 32 ulps of its own: what is wrong in one row is told."""
    exact = torch.tensor([[1.0, 1e-3], [1.0, 2.0]], dtype=torch.float64)
    plain = (exact + torch.tensor([[1e-3], [0.0]])).float()                 # a row of which little is left, and one without an error
    for off, right in ((2.0**-20, True), (2.0**-15, False)):
        assert (strain((exact + torch.tensor([[0.0], [off]])).float(), plain, exact, times=2) <= 1) == right
    assert strain((exact + torch.tensor([[0.0], [2.0**-20]])).float(), plain, exact, times=1) > 1


@pytest.mark.slow
def test_dry_run(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="needs the extra `gpu`")
    pytest.importorskip("transformers", reason="needs the extra `hf`")
    command = [sys.executable, BENCHMARKS / "gpu_check.py", "--dry-run", "--output", tmp_path / "gpu.json"]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stdout + made.stderr
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["passed"] and found["target"] == "h100" and not any(part["left_out"] for part in found["parts"].values())
    assert len({row["op"] for row in found["parts"]["A"]["rows"]}) >= 21 and all(row["share"] <= 1 for row in found["parts"]["A"]["rows"])
    (tiny,) = found["parts"]["B"]["rows"]
    assert tiny["share"] <= 1 and tiny["golden"]["passed"] and tiny["compile"]["aten_steps"] == 0
    assert {row["engine"] for row in found["parts"]["C"]["rows"]} == {"infc", "eager", "compile"}
    assert next(row for row in found["parts"]["C"]["rows"] if row.get("what") == "tune")["choices"] > 5
    assert all(step["ms"]["infc"] > 0 for step in found["whole_models"] if "infc" in step["ms"])
