"""The command line does what it says: stable JSON names, one JSON document on stdout, progress on stderr, fast starts."""

import json
import os
import platform
import shutil
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import msgspec
import pytest
from infc.runtime import manifest
from tiny_artifact import INFC, infc, process, tiny


def result(*arguments: object) -> dict:
    """What a command with --json prints; nothing else may be on stdout."""
    done = infc(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("option", ["--version", "-V"])
def test_version_names_what_infc_works_with(option: str):
    done = infc(option)
    torch = metadata.version("torch")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"infc {metadata.version('infc')} (python {platform.python_version()}, torch {torch}")
    assert done.stdout.count("\n") == 1 and "None" not in done.stdout
    assert set(result(option)) == {"infc", "python", "torch", "triton"} and result(option)["torch"] == torch


def test_version_leaves_out_what_is_not_installed(monkeypatch: pytest.MonkeyPatch):
    def version(name: str) -> str:
        if name != "infc": raise metadata.PackageNotFoundError(name)
        return "1.2"

    monkeypatch.setattr(metadata, "version", version)
    assert infc("--version").stdout == f"infc 1.2 (python {platform.python_version()})\n"
    assert result("--version") == {"infc": "1.2", "python": platform.python_version(), "torch": None, "triton": None}


def test_json_alone_says_where_it_belongs():
    done = infc("--json", "targets")
    assert done.returncode == 2 and "--json stands behind a command" in done.stderr and done.stderr.count("\n") == 1


def test_compile_json_has_the_stable_names(tmp_path: Path):
    made = result("compile", "tiny", "--output", tmp_path / "a.infc", "--dtype", "fp32", "--buckets", "1,8", "--check", "off")
    assert {"artifact", "version", "seconds", "passes", "program", "verify"} <= set(made)
    assert made["artifact"] == str(tmp_path / "a.infc")
    assert all({"name", "fired", "refused", "contract", "error", "seconds"} <= set(p) for p in made["passes"])
    assert len(made["program"]) == 2
    assert all({"steps", "unique_kernels", "aten_steps", "arena_bytes"} <= set(p) for p in made["program"].values())
    assert all(p["aten_steps"] == 0 for p in made["program"].values())
    assert made["seconds"] and all(isinstance(s, float) for s in made["seconds"].values())


def test_compile_shows_progress_on_stderr_and_tables_on_stdout(tmp_path: Path):
    done = infc("compile", "tiny", "--output", tmp_path / "a.infc", "--no-reuse")
    assert done.returncode == 0, done.stderr
    assert "capture" in done.stderr and "passes" in done.stderr
    assert "fuse_rms_norm" in done.stdout and "a.infc" in done.stdout and "kernels" in done.stdout


def test_quiet_compile_prints_the_path_alone(tmp_path: Path):
    done = infc("compile", "tiny", "--output", tmp_path / "a.infc", "--quiet", "--check", "off")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{tmp_path / 'a.infc'}\n", "")


def test_dump_holds_the_text_after_each_pass(tmp_path: Path):
    assert infc("compile", "tiny", "-o", tmp_path / "a.infc", "--dump", tmp_path / "dump", "--check", "off").returncode == 0
    names = sorted(p.name for p in (tmp_path / "dump").iterdir())
    assert names[0].startswith("00-") and any("fuse_rms_norm" in name for name in names)
    assert {"passes.txt", "passes.json", "kernels.cpp", "program-step_T16.txt", "program-step_T16.json"} <= set(names)


def test_run_json_has_the_stable_names():
    made = result("run", tiny(), "-p", "one", "-p", "two", "--max-tokens", 5, "--ignore-eos")
    assert [set(o) for o in made["outputs"]] == [{"text", "token_ids", "finish_reason", "prompt_tokens"}] * 2
    assert [len(o["token_ids"]) for o in made["outputs"]] == [5, 5]
    assert all(o["finish_reason"] == "length" for o in made["outputs"])
    assert set(made["timing"]) == {"load_s", "ttft_s", "tpot_s"}


def test_a_single_prompt_streams_the_same_text():
    whole = result("run", tiny(), "-p", "hello", "--max-tokens", 12)["outputs"][0]["text"]
    streamed = infc("run", tiny(), "-p", "hello", "--max-tokens", 12, "--quiet")
    assert (streamed.stdout, streamed.stderr) == (whole + "\n", "")


def test_prompt_from_stdin():
    piped = subprocess.run([*INFC, "run", tiny(), "-p", "-", "--json", "--max-tokens", "4"], input="hello", capture_output=True, text=True)
    given = result("run", tiny(), "-p", "hello", "--max-tokens", 4)
    assert json.loads(piped.stdout)["outputs"] == given["outputs"]


def test_characters_that_stdout_has_no_bytes_for_are_escaped():
    """As JSON escapes them, so that a document stays one; a path's byte that is no text stays that byte."""
    ascii_only = {"PYTHONIOENCODING": "ascii", "LC_ALL": "C.UTF-8"}
    asked = ("run", tiny(), "-p", "\xe9\U0001f600", "-p", "b", "--max-tokens", 4, "--ignore-eos")
    done = process(*asked, "--quiet", env=ascii_only)
    assert done.returncode == 0 and done.stdout.startswith("--- \\u00e9\\ud83d\\ude00\n"), done.stdout + done.stderr
    done = process(*asked, "--json", env=ascii_only)
    assert done.stdout.isascii() and json.loads(done.stdout)["outputs"] == result(*asked)["outputs"]


def test_a_path_that_is_no_text_is_printed_as_it_is(tmp_path: Path):
    path = os.fsencode(shutil.copytree(tiny(), tmp_path / "a\udcff.infc"))
    done = subprocess.run([*INFC, "check", path], capture_output=True)
    assert done.returncode == 0 and done.stdout.startswith(path + b": "), done.stderr
    assert json.loads(subprocess.run([*INFC, "check", path, "--json"], capture_output=True).stdout)["artifact"].endswith("a\\udcff.infc")


def test_a_seed_repeats_an_answer():
    options = ("--max-tokens", 12, "--temperature", 1.0, "--top-k", 50, "--top-p", 0.95)
    first, again, other = (result("run", tiny(), "-p", "hello", *options, "--seed", seed)["outputs"] for seed in (3, 3, 4))
    assert first == again != other


def test_inspect_json_has_the_stable_names():
    shown = result("inspect", tiny())
    assert shown["manifest"]["name"] and shown["manifest"]["version"]
    assert all({"name", "hash", "arch", "registers", "shared_bytes", "spill_bytes"} <= set(k) for k in shown["kernels"])
    assert shown["kernels"] and shown["buckets"]
    assert "kernels" in infc("inspect", tiny()).stdout


def test_verify_and_check():
    told = result("verify", tiny())
    assert told["passed"] is True and told["hashed"] is True and told["replayed"] is True
    assert result("check", tiny()) == {**result("check", tiny()), "runs": True, "missing": []}
    refused = infc("check", tiny(), "--target", "portable")
    needs = result("inspect", tiny())["manifest"]["isa"]
    assert refused.returncode == (2 if needs else 0)
    assert all(flag in refused.stderr for flag in needs)


def test_check_a_cpu_artifact_against_a_gpu():
    refused = infc("check", tiny(), "--target", "h100")
    assert (refused.returncode, refused.stdout) == (2, "")
    machine = result("inspect", tiny())["manifest"]["machine"]
    assert refused.stderr == f"infc: {tiny()}: compiled for {machine} CPUs, h100 is an NVIDIA GPU; compile it with --target h100\n"


@pytest.fixture
def for_gpu(tmp_path: Path) -> Path:
    """An artifact whose manifest says it was compiled for an H200; its code is a CPU's, and must not be run."""
    copy = shutil.copytree(tiny(), tmp_path / "gpu.infc")
    found = manifest.decode((copy / "manifest.json").read_bytes(), str(copy))
    kernels = tuple(msgspec.structs.replace(k, arch="sm_90a", registers=168, shared_bytes=99_328, spill_bytes=0, threads=256,
                                            tensor_cores="wgmma") for k in found.kernels)
    changed = msgspec.structs.replace(found, target="h200", machine="cuda", isa=(), kernels=kernels)
    (copy / "manifest.json").write_bytes(manifest.encode(changed))
    return copy


def test_check_a_gpu_artifact(for_gpu: Path):
    assert result("check", for_gpu, "--target", "h200")["notes"] == []
    note = "compiled for h200: tiles were chosen for it"
    for name in ("h100", "h100-pcie"):
        assert result("check", for_gpu, "--target", name) == {
            **result("check", for_gpu, "--target", name), "runs": True, "reasons": [], "missing": [], "notes": [note]}
    assert f"runs on h100\nnote: {note}\n" in infc("check", for_gpu, "--target", "h100").stdout
    for name, words in (("cpu", "is a CPU"), ("a100", "a100 has 8.0 (sm_80)")):
        refused = infc("check", for_gpu, "--target", name)
        assert refused.returncode == 2 and "sm_90a" in refused.stderr and words in refused.stderr and "--target" in refused.stderr
    told = infc("check", for_gpu, "--target", "l40s", "--json")
    assert told.returncode == 2 and json.loads(told.stdout)["runs"] is False and len(json.loads(told.stdout)["reasons"]) == 1


def test_inspect_a_gpu_artifact(for_gpu: Path):
    shown = infc("inspect", for_gpu).stdout
    assert "an NVIDIA GPU of sm_90a" in shown and "tensor cores" in shown
    name = result("inspect", for_gpu)["kernels"][0]["name"]
    row = next(line.split() for line in shown.splitlines() if line.startswith(f"{name} "))
    assert row[-5:] == ["256", "168", "99328", "0", "wgmma"]
    assert "tensor cores" not in infc("inspect", tiny()).stdout


def test_bench_leaves_out_usual_lengths_that_do_not_fit():
    """`tiny` has 512 positions: the prompt of 1024 is not asked of it, and that is said; one that was asked for is refused."""
    small = ("--batches", "1", "--new-tokens", "3", "--rounds", "1", "--json")
    done = infc("bench", tiny(), *small)
    made = json.loads(done.stdout)
    assert set(made["prefill"]) == {"128", "256"} and made["left_out"] == {"prefill": [1024]}
    assert "prefill of 1024 tokens left out: this model has 512 positions; measured: 128, 256" in done.stderr
    refused = infc("bench", tiny(), *small, "--prefill", "128,1024")
    assert refused.returncode == 2 and "1024 tokens are more than this model's 512" in refused.stderr


@pytest.mark.parametrize(("positions", "contexts", "prefill", "left_out"), [
    (2048, (128, 448), (128, 256, 1024), {}), (512, (128, 448), (128, 256), {"prefill": [1024]}),
    (192, (128,), (128,), {"contexts": [448], "prefill": [256, 1024]}),
    (100, (36,), (100,), {"contexts": [128, 448], "prefill": [128, 256, 1024]}),
    (64, (128, 448), (64,), {"prefill": [128, 256, 1024]}),                    # no context leaves room for the new tokens: refused
])
def test_bench_takes_usual_lengths_that_fit_or_the_longest_that_does(
    positions: int, contexts: tuple[int, ...], prefill: tuple[int, ...], left_out: dict[str, list[int]],
):
    from infc.runtime.bench import Workload, _fitting

    work, left = _fitting(Workload(), ("contexts", "prefill"), positions)
    assert (work.contexts, work.prefill, left) == (contexts, prefill, left_out)
    assert _fitting(Workload(), (), positions) == (Workload(), {})             # what was asked for is not changed


def test_bench_json_has_the_stable_names_and_compares(tmp_path: Path):
    small = ("--batches", "1,2", "--contexts", "16", "--new-tokens", 4, "--prefill", "8,32", "--rounds", 2)
    made = result("bench", tiny(), *small, "-o", tmp_path / "a.json")
    assert made == json.loads((tmp_path / "a.json").read_text())
    assert {"environment", "read_gb_s", "decode", "prefill", "cold", "memory"} <= set(made)
    assert set(made["decode"]) == {"1", "2"} and {"tok_s", "ms", "share_of_read"} <= set(made["decode"]["1"])
    assert set(made["prefill"]) == {"8", "32"} and made["read_gb_s"] > 0
    assert {"cpu", "isa", "cores", "governor", "versions"} <= set(made["environment"])
    assert made["cold"]["total_s"] >= made["cold"]["load_s"] and made["memory"]["peak_bytes"] > 0
    assert {"p50", "p90", "p99"} == set(made["decode"]["2"]["ttft_s"]) == set(made["decode"]["2"]["tpot_s"])

    same = result("bench", "compare", tmp_path / "a.json", tmp_path / "a.json")
    assert same["machine"] == {} and all(r["ratio"] == 1 for r in same["ratios"].values())


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_bench_says_that_others_used_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float):
    """In the words of `infc explain --measured`; what is made of the file says it too."""
    from infc.runtime import bench

    monkeypatch.setattr(bench, "process_time", lambda: share * time.perf_counter())
    small = ("--batches", "1", "--contexts", "8", "--new-tokens", 4, "--prefill", "8", "--rounds", 1, "--threads", 1)
    saved, line = tmp_path / "a.json", "other processes had these CPUs 50% of the time: measure again on a quiet machine"
    shown = infc("bench", tiny(), *small, "-o", saved).stdout
    made = json.loads(saved.read_text())
    assert made["cpu_share"] == pytest.approx(share, abs=0.01) and made["findings"] == ([line] if share < 1 else [])
    assert (line in shown) is (share < 1)
    both = infc("bench", "compare", saved, saved).stdout
    assert (f"note: first: {line}\nnote: second: {line}\n" in both) is (share < 1) and ("note:" in both) is (share < 1)
    notes = result("diff", tiny(), tiny(), "--bench", saved, saved)["notes"]
    assert notes == ([f"--bench of A: {line}", f"--bench of B: {line}"] if share < 1 else [])


@pytest.mark.parametrize(("value", "places", "shown"), [
    (0.0, 2, "0.00"), (1.234, 2, "1.23"), (0.1, 2, "0.10"), (0.0449, 2, "0.045"), (0.0999, 2, "0.100"), (1.2e-7, 3, "0.00000012"),
    (-0.00123, 2, "-0.0012"), (1879981.3, 0, "1879981"), (0.4, 0, "0.40"), (9.96, 0, "10.0"), (float("inf"), 1, "inf"),
])
def test_a_number_that_is_not_zero_is_not_shown_as_zero(value: float, places: int, shown: str):
    from infc.compiler.console import number

    assert number(value, places) == shown


def test_threads_beyond_the_cpus_are_no_other_process():
    from infc.runtime import cpu
    from infc.runtime.environment import busy, cpu_share

    cpus = cpu.default_threads()
    assert cpu_share(3.0 * cpus, 3.0, 4 * cpus) == 1.0 and busy(1.0) == []
    assert cpu_share(1.5 * cpus, 3.0, 4 * cpus) == 0.5 and busy(0.86)[0].startswith("other processes had these CPUs 14% of the time")


@pytest.mark.parametrize(("field", "value"), [("contract", "distribution"), ("workload.contexts", [17]), ("model", "another")])
def test_bench_compare_refuses_what_differs(tmp_path: Path, field: str, value: object):
    report: dict = {
        "schema": 1,
        "model": "m",
        "contract": "exact",
        "workload": {"contexts": [16], "rounds": 5},
        "environment": {},
        "read_gb_s": 30.0,
        "decode": {},
        "prefill": {"8": 1.0},
        "cold": {},
        "warm": {},
        "memory": {},
    }
    (tmp_path / "a.json").write_text(json.dumps(report))
    inner = report
    *path, last = field.split(".")
    for name in path:
        inner = inner[name]
    inner[last] = value
    (tmp_path / "b.json").write_text(json.dumps(report))
    refused = infc("bench", "compare", tmp_path / "a.json", tmp_path / "b.json")
    assert refused.returncode == 2 and refused.stdout == ""
    assert refused.stderr.startswith(f"infc: these cannot be compared: {field} is ") and refused.stderr.count("\n") == 1
    (tmp_path / "b.json").write_text(json.dumps(report | {"findings": None}))
    refused = infc("bench", "compare", tmp_path / "a.json", tmp_path / "b.json")
    assert refused.returncode == 2 and "b.json: is no measurement, its findings are None" in refused.stderr


def test_comparison_knows_which_way_is_better():
    from infc.runtime.comparison import compare, smaller_is_better

    assert all(map(smaller_is_better, ("cold.total_s", "decode.1.ms", "decode.1.tpot_s.p99", "memory.peak_bytes")))
    assert not any(map(smaller_is_better, ("read_gb_s", "decode.1.tok_s", "prefill.256", "decode.8.share_of_read")))
    base = {
        "schema": 1,
        "model": "m",
        "contract": "exact",
        "workload": {},
        "environment": {"cpu": "a", "load": 1},
        "read_gb_s": 30.0,
        "decode": {"1": {"tok_s": 100.0, "ms": 10.0}},
        "prefill": {},
        "cold": {},
        "warm": {},
        "memory": {},
    }
    faster = {**base, "decode": {"1": {"tok_s": 200.0, "ms": 5.0}}, "environment": {"cpu": "b", "load": 2}}
    report = compare(base, faster)
    assert report["ratios"]["decode.1.tok_s"] == {"before": 100.0, "after": 200.0, "ratio": 2.0, "better": True}
    assert report["ratios"]["decode.1.ms"]["better"] and report["machine"] == {"cpu": ["a", "b"]}


def test_bench_counts_only_steps_of_the_whole_batch():
    from infc.runtime.bench import _full_steps, percentiles

    # step 1 feeds prompt 0; step 2 decodes 0 and ends prompt 1 (not a pure decode); 3 and 4 decode both; in 5 one is done
    events = [(1, 0, 1.0), (2, 0, 2.0), (2, 1, 2.5), (3, 0, 3.0), (3, 1, 3.5), (4, 0, 5.0), (4, 1, 5.5), (5, 1, 6.0)]
    assert _full_steps(events, 2) == [1.0, 2.0]
    assert percentiles([5, 1, 4, 2, 3]) == {"p50": 3, "p90": 5, "p99": 5}


def test_targets_and_models_list_what_there_is():
    assert {"smollm2", "tiny", "llama-1b", "llama-8b"} <= {m["name"] for m in result("models")["models"]}
    targets = result("targets")
    assert targets["host"] in {t["name"] for t in targets["targets"] if t["runs_here"]}
    assert "smollm2" in infc("models").stdout and "x86-64-v3" in infc("targets").stdout


def test_targets_shows_gpus_with_their_figures():
    rows = {t["name"]: t for t in result("targets")["targets"]}
    h200 = rows["h200"]
    assert (h200["kind"], h200["isa"], h200["runs_here"], rows["x86-64-v3"]["gpu"]) == ("cuda", "sm_90a", None, None)
    assert h200["gpu"]["bandwidth_gb_s"] == 4800 and h200["gpu"]["arch"]["shared_per_program"] == 232448
    assert "data sheet" in h200["gpu"]["sources"]["bandwidth_gb_s"]
    shown = infc("targets").stdout.partition("NVIDIA GPUs")[2].splitlines()
    row = next(line.split() for line in shown if line.startswith("h200 "))
    assert row == ["h200", "sm_90a", "132", "228/227", "60", "141", "4800", "989.5", "1979", "1979", "67"]
    assert max(len(line.rstrip()) for line in shown[1:]) <= 80


def test_run_imports_neither_torch_nor_rich():
    code = (
        "import sys; from infc.compiler.cli import main; code = main(); "
        "print(*sorted({m.split('.')[0] for m in sys.modules} & {'torch', 'transformers', 'triton', 'rich', 'gguf'}), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "run", tiny(), "-p", "hi", "--max-tokens", "2", "--quiet"], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "\n")


def test_a_reader_that_leaves_ends_the_command_quietly():
    reader = subprocess.Popen(["head", "-c", "1"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    done = subprocess.run(
        [*INFC, "run", tiny(), "-p", "hello", "--max-tokens", "400", "--ignore-eos", "--quiet"],
        stdout=reader.stdin,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
    )
    reader.communicate()
    assert done.returncode in (0, 141) and done.stderr == ""


def test_installed_command_is_the_same():
    command = Path(sys.executable).with_name("infc")
    assert os.access(command, os.X_OK), f"{command} is missing: pip install -e ."
    assert "compile" in subprocess.run([command, "--help"], capture_output=True, text=True, check=True).stdout
