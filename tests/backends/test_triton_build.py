"""Kernels to cubins on a machine without a GPU: unique by content, kept, judged, and the same wherever they are made."""
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import triton_models as models
import triton_planted as planted
import triton_planted_helper as helper
from infc.backends.triton import build as building
from infc.backends.triton import request as asking
from infc.backends.triton import worker
from infc.backends.triton.build import Code, build, occupancy, programs_at_once
from infc.backends.triton.registry import Launch
from infc.compiler.errors import CheckFailed, UserError
from triton import language as tl
from triton_env import randn

X = torch.empty(4096, device="meta")
SCALE = Launch(planted.scale, (1,), (X, X, 4096, 0.5), {"BLOCK": 64})


def ask(*args: object, function: object = planted.scale, **constants: object) -> worker.Request:
    return asking.request(Launch(function, (1,), args, constants or {"BLOCK": 64}), "sm_90a")   # type: ignore[arg-type]


# ---- requests and keys: no process is started

def test_a_request_pins_types_and_alignment() -> None:
    asked = ask(X, X.to(torch.bfloat16), 4096, 0.5)
    assert asked.signature == {"x_ptr": "*fp32", "y_ptr": "*bf16", "n": "i32", "by": "fp32", "BLOCK": "constexpr"}
    assert asked.constants == {"BLOCK": 64} and asked.aligned == (0, 1, 2)
    assert ask(X[1:], X[4:], 1, 0.5).aligned == (1,)                    # 4 bytes and 16 bytes into the buffer; 1 is not folded in
    assert ask(X, X, 2**31, 1.0).signature["n"] == "i64" and ask(X, X, -(2**31), 1.0).signature["n"] == "i32"
    assert ask(X, X, 2**31 - 1, 1.0).signature["n"] == "i32"


def test_constants_may_be_none_a_dtype_or_a_function_and_have_defaults() -> None:
    asked = ask(X, X, function=planted.apply, F=helper.shift, TYPE=tl.bfloat16, WHAT=None)
    shift = worker.Function("triton_planted_helper", "shift")
    assert asked.constants == {"F": shift, "TYPE": worker.Dtype("bf16"), "WHAT": None, "BLOCK": 64}


@pytest.mark.parametrize(("args", "constants", "words"), [
    ((X, X, 1), {"BLOCK": 4}, "without its argument 'by'"),
    ((X, X, 1, 0.5, 7), {"BLOCK": 4}, "1 arguments too many"),
    ((X, X, 1, 0.5), {"BLOK": 4}, "has no constant 'BLOK'"),
    ((X.to(torch.float64), X, 1, 0.5), {"BLOCK": 4}, "argument x_ptr of kernel scale is a torch.float64"),
    ((X, X, "1", 0.5), {"BLOCK": 4}, "argument n of kernel scale is a str"),
    ((X, X, 1, 0.5), {"BLOCK": [4]}, "constant BLOCK of kernel scale is a list"),
])
def test_arguments_that_do_not_fit_are_said(args: tuple, constants: dict, words: str) -> None:
    with pytest.raises(CheckFailed, match=words): ask(*args, **constants)


def test_an_unknown_arch_is_an_error() -> None:
    with pytest.raises(UserError, match="unknown architecture 'sm_90': did you mean 'sm_90a'"): build([SCALE], "sm_90")


def key(launch: Launch = SCALE, arch: str = "sm_90a", ptxas: str = "12.9") -> str:
    return asking.key(launch, asking.request(launch, arch), ptxas)


def test_keys_hold_all_that_decides_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    others = [replace(SCALE, warps=8), replace(SCALE, stages=4), replace(SCALE, constants={"BLOCK": 128}),
              replace(SCALE, args=(X, X, 4095, 0.5)), replace(SCALE, args=(X, X.half(), 4096, 0.5))]
    keys = {key(), key(arch="sm_80"), key(ptxas="13.0"), *map(key, others)}
    assert len(keys) == 3 + len(others)
    assert key(replace(SCALE, grid=(9,), args=(X, X, 16, 2.0))) == key()             # what is passed at run time
    assert key(replace(SCALE, constants={"BLOCK": True}, args=SCALE.args)) != key(replace(SCALE, constants={"BLOCK": 1}))
    for module, name in ((helper, "STEP"), (planted, "STEP"), (planted, "FACTOR")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, tl.constexpr(5))
            asking._read.cache_clear()
            assert (key() not in keys) == (module is planted), (module, name)        # the name `scale` reads is its own module's
    asking._read.cache_clear()
    import triton
    monkeypatch.setattr(triton, "__version__", "9.9")
    assert key() not in keys


def test_the_text_of_a_kernel_holds_what_it_calls() -> None:
    text = "\n".join(asking.source(planted.scale))
    assert "return x + 1" in text and "FACTOR = 3" in text and "STEP = 2" in text
    rows = models.rows(models.SMOLLM2, 1)
    assert "tl.static_assert" in "".join(asking.source(rows["swiglu-silu"][0].function))      # of activate, in another file


def test_interpreting_does_not_change_the_key() -> None:
    code = ("import torch; from infc.backends.triton import registry, request\n"
            "emit, x = registry.Emit(), torch.empty(2, 64, device='meta')\n"
            "registry.kernels()['infc::swiglu'].lower(emit, x[:, :32], x, 'silu')\n"
            "key = request.key(emit.launches[0], request.request(emit.launches[0], 'sm_90a'), '')\n")
    here: dict[str, str] = {}
    exec(code, here)
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    code += "import triton; print(key, triton.knobs.runtime.interpret)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert done.stdout.split() == [here["key"], "False"]


# ---- what compilers say

LOG = """ptxas info    : 11 bytes gmem
ptxas info    : Compiling entry function '_k' for 'sm_90a'
ptxas info    : Function properties for _k
    512 bytes stack frame, 88 bytes spill stores, 104 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 512 bytes cumulative stack size, 48 bytes smem
"""


def test_reads_what_ptxas_reports() -> None:
    assert worker.resources(LOG) == {"registers": 255, "spill_stores": 88, "spill_loads": 104, "stack": 512, "static_shared": 48}
    for word in ("registers", "spill stores", "spill loads", "stack frame"):
        with pytest.raises(CheckFailed, match="ptxas reports no"): worker.resources(LOG.replace(word, "things"))


def test_reads_parameters_and_tensor_cores_from_ptx() -> None:
    ptx = ".visible .entry _k(\n .param .u64 .ptr .global .align 1 _k_0,\n .param .u32 _k_1,\n .param .f32 _k_2\n)\n{ wgmma.mma_async }"
    assert worker.params(ptx) == ("u64", "u32", "f32")
    assert [worker.tensor_cores(text) for text in (ptx, "mma.sync.aligned", "tcgen05.mma.cta", "fma.rn")] == ["wgmma", "mma", "tcgen05", ""]


# Worked by hand from the Programming Guide's limits of an H100: 64 warps, 65536 registers in units of 256 a warp, 228 KB shared.
@pytest.mark.parametrize(("registers", "shared", "threads", "programs"), [
    (32, 0, 128, 16), (64, 0, 128, 8), (65, 0, 128, 7), (255, 0, 128, 2), (128, 0, 512, 1), (32, 0, 32, 32), (32, 113 << 10, 128, 2),
    (32, 114 << 10, 128, 1), (32, 227 << 10, 128, 1), (32, 228 << 10, 128, 0), (255, 0, 1024, 0), (40, 0, 64, 24),
])
def test_occupancy_of_an_h100(registers: int, shared: int, threads: int, programs: int) -> None:
    assert occupancy(registers, shared, threads, building.LIMITS["sm_90a"]) == programs


# ---- builds, in workers

@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(scope="module")
def scaled(cache: Path) -> Code:
    return build([SCALE], "sm_90a", cache=cache)[0]


def test_equal_launches_are_one_build_and_a_second_call_compiles_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int, str]] = []
    wide = replace(SCALE, constants={"BLOCK": 128})
    first = build([SCALE, wide, replace(SCALE, grid=(7,)), wide], "sm_90a", cache=cache, progress=lambda *a: seen.append(a))
    assert first[0] is first[2] and first[1] is first[3] and first[0].sha256 != first[1].sha256
    assert sorted(done for done, _, _ in seen) in ([1, 2], [2]) and seen[-1][:2] == (2, 2)           # `scaled` may have built one
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: pytest.fail("a process was started"))
    assert build([SCALE, wide], "sm_90a", cache=cache) == first[:2]


def test_code_says_what_it_needs(scaled: Code) -> None:
    made = scaled.made
    assert made.cubin.startswith(b"\x7fELF") and scaled.symbol == "scale" and scaled.symbol.encode() in made.cubin
    assert made.params == ("u64", "u64", "u32", "f32", "u64", "u64")                  # the last two are Triton's own
    assert made.threads == 128 and 0 < made.registers < 64 and made.spill_stores == made.spill_loads == made.shared == 0
    assert made.tensor_cores == "" and programs_at_once(scaled) == 16


def test_code_holds_no_path_and_is_the_same_wherever_it_is_made(scaled: Code, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRITON_DISABLE_LINE_INFO", "0")                                # switches of the user's do not reach the code
    monkeypatch.setenv("DISABLE_PTXAS_OPT", "1")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "other"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    again = build([SCALE], "sm_90a")[0]
    assert again == scaled and [p.name for p in (tmp_path / "infc").iterdir()] == ["triton"] and not (tmp_path / "other").exists()
    for word in (b".py", str(Path(__file__).parent.parent).encode(), b"/tmp", os.path.expanduser("~").encode(), b"site-packages"):
        assert word not in scaled.made.cubin


DAMAGE = {"cut": lambda raw: raw[: len(raw) // 2], "empty": lambda raw: b"",
          "flipped": lambda raw: raw[:99] + bytes([raw[99] ^ 1]) + raw[100:]}


@pytest.mark.parametrize("how", [*DAMAGE, "folder"])
def test_a_damaged_entry_is_noted_and_made_again(
    how: str, scaled: Code, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = key(ptxas=building.assembler("sm_90a"))
    entry, good = tmp_path / name, (cache / name).read_bytes()
    if how == "folder": (entry / "inside").mkdir(parents=True)
    else: entry.write_bytes(DAMAGE[how](good))
    monkeypatch.setattr(building, "_compile", lambda asked, needed, workers: [(name, scaled.made) for name in asked])
    notes: list[str] = []
    assert build([SCALE], "sm_90a", cache=tmp_path, note=notes.append) == [scaled]
    assert len(notes) == 1 and f"the kept kernel {entry} is of no use" in notes[0]
    assert entry.read_bytes() == good and sorted(tmp_path.iterdir()) == [entry]


def test_an_entry_under_another_key_is_not_used(scaled: Code, cache: Path, tmp_path: Path) -> None:
    name = key(ptxas=building.assembler("sm_90a"))
    (tmp_path / "other").write_bytes((cache / name).read_bytes())
    notes: list[str] = []
    assert building._kept(tmp_path / "other", "sm_90a", "", notes.append) is None and len(notes) == 1


def test_a_cache_that_cannot_be_written_costs_a_note(scaled: Code, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(building, "_compile", lambda asked, needed, workers: [(name, scaled.made) for name in asked])
    notes: list[str] = []
    assert build([SCALE], "sm_90a", cache=tmp_path / "file", note=notes.append) == [scaled]
    assert len(notes) == 1 and notes[0].startswith("1 kernel is not kept for the next compile: ") and str(tmp_path / "file") in notes[0]
    notes.clear()
    build([SCALE, replace(SCALE, warps=8), replace(SCALE, warps=2)], "sm_90a", cache=tmp_path / "file", note=notes.append)
    assert len(notes) == 1 and notes[0].startswith("3 kernels are not kept")


def fails(launch: Launch, tmp_path: Path) -> str:
    with pytest.raises(CheckFailed) as caught: build([launch], "sm_90a", cache=tmp_path, workers=1)
    assert "\n" not in caught.value.message and "Traceback" not in caught.value.message
    return caught.value.message


def test_a_spill_fails_unless_it_is_declared(tmp_path: Path) -> None:
    launch = Launch(planted.spill, (1,), (X, X), {"N": 8192}, warps=1)
    said = fails(launch, tmp_path)
    assert said.startswith("kernel spill[N=8192, 1 warps, 3 stages] for sm_90a spills ") and "bytes of registers to memory" in said
    assert build([replace(launch, spills_ok=True)], "sm_90a", cache=tmp_path)[0].made.spill_stores > 0     # kept, and judged each time
    assert fails(launch, tmp_path) == said


def test_what_does_not_compile_is_one_line(tmp_path: Path) -> None:
    said = fails(Launch(planted.wrong_name, (1,), (X,), {"BLOCK": 64}), tmp_path)
    assert "kernel wrong_name[BLOCK=64, 4 warps, 3 stages] for sm_90a does not compile" in said and "no_such_thing is not defined" in said
    said = fails(Launch(planted.wrong_size, (1,), (X,), {"BLOCK": 8}), tmp_path)
    assert "kernel wrong_size[BLOCK=8" in said and "BLOCK is no multiple of 16" in said
    assert not list(tmp_path.iterdir())


def test_what_is_optional_fails_alone(tmp_path: Path) -> None:
    """A kernel that ends its compiler, one that spills, and one behind them that is needed: the first two are reasons."""
    x = torch.empty(128, 4096, device="meta", dtype=torch.bfloat16)
    launches = [Launch(planted.wrong_name, (1,), (X,), {"BLOCK": 64}), Launch(planted.spill, (1,), (X, X), {"N": 8192}, warps=1),
                Launch(planted.greedy_of_shared, (1,), (x, x, X), {"BLOCK": 128, "K": 128}, warps=8, stages=6), SCALE]
    *refused, made = building.attempt(launches, "sm_90a", {0, 1, 2}, cache=tmp_path, workers=1)
    assert [str(one).partition("for sm_90a ")[2].split()[0] for one in refused] == ["does", "spills", "needs"]
    assert isinstance(made, Code)
    with pytest.raises(CheckFailed, match="wrong_name"): building.attempt(launches, "sm_90a", {1, 2}, cache=tmp_path, workers=1)


def test_too_much_shared_memory_fails(tmp_path: Path) -> None:
    x = torch.empty(128, 4096, device="meta", dtype=torch.bfloat16)
    launch = Launch(planted.greedy_of_shared, (1,), (x, x, X), {"BLOCK": 128, "K": 128}, warps=8, stages=6)
    assert "bytes of shared memory; sm_90a gives a program 232448: give it smaller tiles or fewer stages" in fails(launch, tmp_path)
    code = build([replace(launch, stages=3)], "sm_90a", cache=tmp_path)[0]
    assert code.made.tensor_cores == "wgmma" and code.made.shared == 3 * 2 * 128 * 128 * 2


def test_functions_and_dtypes_as_constants_compile(tmp_path: Path) -> None:
    launch = Launch(planted.apply, (1,), (X, X.bfloat16()), {"F": helper.shift, "TYPE": tl.bfloat16, "WHAT": None})
    assert build([launch], "sm_80", cache=tmp_path)[0].made.params == ("u64",) * 4


def test_two_processes_at_once(tmp_path: Path) -> None:
    found: list[list[Code]] = []
    notes: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(build([SCALE], "sm_89", cache=tmp_path, note=notes.append))) for _ in range(2)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    assert len(found) == 2 and found[0] == found[1] and not notes and len(list(tmp_path.iterdir())) == 1


def test_ctrl_c_leaves_no_process_and_no_file(tmp_path: Path) -> None:
    code = ("import sys; sys.path[:0] = sys.argv[2:]; import triton_env, triton_planted as p, torch, pathlib\n"
            "from infc.backends.triton.registry import Launch; from infc.backends.triton.build import build\n"
            "x = torch.empty(4096, device='meta')\n"
            "many = [Launch(p.scale, (1,), (x, x, 1, .5), {'BLOCK': 64 * 2 ** (i % 8)}, warps=2 ** (i // 8)) for i in range(32)]\n"
            "print('started', flush=True)\n"
            "build(many, 'sm_90a', cache=pathlib.Path(sys.argv[1]), progress=lambda *a: print(*a, flush=True))")
    (tmp_path / "scratch").mkdir()
    env = {**os.environ, "TMPDIR": str(tmp_path / "scratch")}
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "cache"), str(Path(models.__file__).parent)],
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    assert child.stdout
    assert child.stdout.readline() == "started\n" and child.stdout.readline().startswith("1 32 ")
    workers = workers_of(child.pid)
    assert workers
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=60)
    assert "KeyboardInterrupt" in errors and not list((tmp_path / "scratch").iterdir())
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and any(Path(f"/proc/{pid}").exists() for pid in workers): time.sleep(0.1)
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]
    assert all(len(entry.name) == 64 for entry in (tmp_path / "cache").iterdir())


def workers_of(parent: int) -> list[int]:
    return [int(pid) for task in Path(f"/proc/{parent}/task").iterdir() for pid in (task / "children").read_text().split()]


def built(launches: list[Launch], arch: str, cache: Path) -> None:
    codes = build(launches, arch, cache=cache)                              # raises on a spill
    assert all(code.made.registers <= 128 and programs_at_once(code) for code in codes)
    assert build([*launches, *launches], arch, cache=cache) == [*codes, *codes]


def test_every_row_kernel_builds_at_a_real_size(cache: Path) -> None:
    built([launch for found in models.rows(models.LLAMA_8B, 512).values() for launch in found], "sm_90a", cache)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a", "sm_100a"])
def test_every_row_kernel_builds_at_every_real_size(arch: str, cache: Path) -> None:
    launches = [launch for size in (models.SMOLLM2, models.LLAMA_8B) for tokens in (1, 16, 512) for dtype in (torch.bfloat16, torch.float32)
                for found in models.rows(size, tokens, dtype).values() for launch in found]
    built(launches, arch, cache)


def test_deeper_models_need_no_more_kernels() -> None:
    keys = {key(launch) for found in models.rows(models.LLAMA_8B, 16).values() for launch in found}
    assert {key(launch) for _ in range(32) for found in models.rows(models.LLAMA_8B, 16).values() for launch in found} == keys


def test_meta_tensors_and_real_ones_ask_for_the_same() -> None:
    assert ask(randn(64), randn(64), 64, 1.0) == ask(X[:64], X[:64], 64, 1.0)
