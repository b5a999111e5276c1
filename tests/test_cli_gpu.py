"""The command line about a GPU, on a machine that has none."""
import functools
import json
import re
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from tiny_artifact import infc, process

pytest.importorskip("triton", reason="needs the extra `gpu`")


@functools.cache
def compiled() -> tuple[Path, dict]:
    """`tiny` for an H100, compiled once, by a process that interprets no kernel."""
    made = Path(tempfile.mkdtemp(prefix="infc-gpu-")) / "tiny.infc"
    done = process("compile", "tiny", "--target", "h100", "--buckets", "1,8", "--json", "-o", made, env={"TRITON_INTERPRET": "0"})
    assert done.returncode == 0, done.stderr
    return made, json.loads(done.stdout)


def test_compile_says_what_was_verified() -> None:
    _, told = compiled()
    assert told["verify"]["replayed"] and told["verify"]["reference"] and "no kernel of a GPU runs" in told["verify"]["reason"]
    assert {p: v["aten_steps"] for p, v in told["program"].items()} == {"step_T1": 0, "step_T8": 0}
    assert told["predicted"]["by"] == "the data sheet" and told["predicted"]["read_gb_s"] == 3350


def test_inspect_lists_kernels_with_what_the_compiler_says_of_them() -> None:
    kernels = json.loads(infc("inspect", compiled()[0], "--json").stdout)["kernels"]
    assert all(k["arch"] == "sm_90a" and k["spill_bytes"] == 0 and k["registers"] > 0 and k["shared_bytes"] is not None for k in kernels)
    assert {k["tensor_cores"] for k in kernels if k["op"] == "infc.linear"} >= {"wgmma"}        # full products; one row needs none
    assert "wgmma" in infc("inspect", compiled()[0]).stdout


@pytest.mark.parametrize(("target", "code", "says"), [
    ("h100", 0, "runs on h100"), ("h200", 0, "runs on h200"), ("a100", 2, "sm_90a code.*compute capability 9.0.*a100 has 8.0"),
    ("cpu", 2, "NVIDIA GPU"),
])
def test_check(target: str, code: int, says: str) -> None:
    done = infc("check", compiled()[0], "--target", target)
    assert done.returncode == code and re.search(says, done.stdout + done.stderr), done.stdout + done.stderr


@pytest.mark.parametrize("command", [("run", "--prompt", "hello"), ("verify",), ("bench",)])
def test_what_must_run_says_that_there_is_no_gpu(command: tuple[str, ...]) -> None:
    if torch.cuda.is_available(): pytest.skip("there is one")
    done = infc(command[0], compiled()[0], *command[1:])
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "NVIDIA driver" in done.stderr


def test_verify_says_that_the_files_are_as_hashed_where_nothing_can_run(tmp_path: Path) -> None:
    if torch.cuda.is_available(): pytest.skip("there is one")
    done = infc("verify", compiled()[0])
    assert done.returncode == 2 and f"{compiled()[0]}: every file as hashed; its golden prompts cannot be replayed here: " in done.stderr
    done = infc("verify", compiled()[0], "--json")
    told = json.loads(done.stdout)
    assert done.returncode == 2 and told["hashed"] and not told["replayed"] and "NVIDIA driver" in told["reason"]
    damaged = shutil.copytree(compiled()[0], tmp_path / "damaged.infc")
    cubin = next((damaged / "code").iterdir())
    cubin.write_bytes(cubin.read_bytes()[:-1] + b"?")
    done = infc("verify", damaged)
    assert done.returncode == 2 and "was altered" in done.stderr and "as hashed" not in done.stderr and "driver" not in done.stderr


def test_a_budget_on_time_goes_by_the_data_sheet_and_says_so() -> None:
    done = infc("diff", compiled()[0], compiled()[0], "--fail-on", "decode_ms>+2%,prefill_ms>+2%", "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 0 and found["metrics"]["decode_ms"]["after"] > 0
    assert found["notes"] == [f"decode_ms and prefill_ms of {side}: predicted from the data sheet of h100, the least that the card allows"
                              for side in "AB"]
    done = infc("diff", compiled()[0], compiled()[0], "--fail-on", "decode_ms>0", "--quiet")
    assert done.returncode == 1 and "predicted from the data sheet of h100" in done.stderr and "breaks decode_ms>0" in done.stderr


def test_explain_and_report_go_by_the_data_sheet(tmp_path: Path) -> None:
    done = infc("explain", compiled()[0], "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["peaks"]["read_gb_s"] == 3350
    assert infc("report", compiled()[0], "-o", tmp_path / "page.html").returncode == 0


def test_explain_shows_no_time_as_zero() -> None:
    """Kernels of a millionth of a millisecond: a phase that short is told in microseconds."""
    shown = infc("explain", compiled()[0]).stdout
    rows = [line.split() for line in shown.splitlines() if re.search(r" (memory|compute) +[0-9.]+$", line)]
    assert len(rows) > 50 and all(float(row[-1]) > 0 and float(row[-1].replace(".", "")) >= 10 for row in rows)
    assert all(float(took) > 0 for took in re.findall(r"([0-9.]+) [mu]s", shown)) and "us predicted" in shown


@pytest.mark.parametrize(("arguments", "says"), [
    (("--target", "a100", "--quant", "fp8"),
     "fp8 is e4m3, which the target a100 does not multiply; h100, h100-pcie, h200, l40s, b200 do: choose one of them, or write w8 here"),
    (("--target", "h100", "--quant", "fp8", "--quant-method", "gptq"), "--quant-method gptq is for integer codes, and fp8 has e4m3"),
    (("--target", "a100", "--quality", "kl<=1", "--candidates", "w8,fp8a8"), "write w8a8 here"),
    (("--target", "h1000"), "h100"), (("--target", "cuda"), "h200"), (("--target", "a100", "--kv-quant", "fp8"), "no fp8 KV cache"),
])
def test_bad_options_are_one_line(arguments: tuple[str, ...], says: str, tmp_path: Path) -> None:
    done = infc("compile", "tiny", *arguments, "-o", tmp_path / "x.infc")
    assert done.returncode == 2 and says in done.stderr and done.stderr.strip().count("\n") == 0
    assert not list(tmp_path.iterdir())
