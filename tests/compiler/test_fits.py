"""What an artifact lacks to run on a machine, from a manifest alone."""
import platform

import msgspec
import pytest
from infc.compiler.fits import missing_flags, notes, reasons
from infc.compiler.targets import ARCHS, TARGETS
from infc.runtime.manifest import BLOCK, BucketInfo, KvBuffer, Manifest, ModelInfo, WeightsInfo
from infc.runtime.program import Kernel

LINEAR = Kernel("h1", "linear", "_linear", "infc.linear", "sm_90a", registers=168, shared_bytes=100_000, spill_bytes=0)
NORM = Kernel("h2", "rms_norm", "_rms_norm", "infc.rms_norm", "sm_90a", registers=32, shared_bytes=0, spill_bytes=0)
GPUS = [name for name, target in TARGETS.items() if target.gpu]


def on_gpu(arch: str = "sm_90a", target: str = "h200", shared: int = 0, weights: int = 10**9, **others: object) -> Manifest:
    """A GPU artifact: a dense GB of weights, 64 KiB of KV cache a token, 4096 positions."""
    kernels = tuple(msgspec.structs.replace(kernel, arch=arch, shared_bytes=shared) for kernel in (LINEAR, NORM))
    made = Manifest(
        name="m", version="v", target=target, machine="cuda", isa=(), dtype="bf16", contract="exact",
        model=ModelInfo("m", vocab=512, max_positions=4096), kernels=kernels,
        kv=tuple(KvBuffer(name, "bf16", 32_768 * BLOCK, 8) for name in ("k", "v")),
        buckets=(BucketInfo("step_T1", "p", {"T": 1}, 10**6, 2), BucketInfo("step_T16", "p", {"T": 16}, 10**7, 2)),
        weights=WeightsInfo("weights.safetensors", 0, weights, 1 << 20, (), ""))
    return msgspec.structs.replace(made, **others)


def on_cpu(*isa: str) -> Manifest:
    return on_gpu(target="cpu", machine="x86_64", isa=isa, kernels=())


# ---- a CPU's artifact

def test_a_cpu_artifact_needs_its_flags() -> None:
    made = on_cpu("avx2", "avx512f", "amx_fp64")
    assert missing_flags(made, TARGETS["x86-64-v4"]) == ["amx_fp64"]
    assert reasons(made, TARGETS["x86-64-v3"]) == ["needs amx_fp64, avx512f, which x86-64-v3 lacks; compile it with --target x86-64-v3"]
    assert reasons(on_cpu("avx2"), TARGETS["x86-64-v3"]) == [] == notes(on_cpu("avx2"), TARGETS["x86-64-v3"])


@pytest.mark.parametrize("name", [name for name, target in TARGETS.items() if not target.gpu])
def test_code_of_another_machine(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags say nothing of it: the code of aarch64 needs none of x86_64's. What is portable is so to where it is compiled."""
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert reasons(msgspec.structs.replace(on_cpu(), machine="aarch64"), TARGETS[name]) == [
        f"compiled for aarch64 CPUs, {name} is an x86_64 CPU here; compile it with --target {name} on one"]
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert (reasons(msgspec.structs.replace(on_cpu(), machine="aarch64"), TARGETS[name]) == []) == (name == "portable")


@pytest.mark.parametrize("name", GPUS)
def test_a_cpu_artifact_on_a_gpu(name: str) -> None:
    assert reasons(on_cpu("avx2"), TARGETS[name]) == [
        f"compiled for x86_64 CPUs, {name} is an NVIDIA GPU; compile it with --target {name}"]


# ---- a GPU's

@pytest.mark.parametrize("name", ["portable", "x86-64-v4"])
def test_a_gpu_artifact_on_a_cpu(name: str) -> None:
    assert reasons(on_gpu(), TARGETS[name]) == [
        f"compiled for NVIDIA GPUs (sm_90a), {name} is a CPU; compile it with --target {name}"]


RUNS = {"sm_80": {"a100", "l40s"}, "sm_89": {"l40s"}, "sm_90a": {"h100", "h100-pcie", "h200"}, "sm_100a": {"b200"}}


@pytest.mark.parametrize("name", GPUS)
@pytest.mark.parametrize("arch", RUNS)
def test_which_code_runs_on_which_gpu(arch: str, name: str) -> None:
    found = reasons(on_gpu(arch), TARGETS[name])
    assert (found == []) == (name in RUNS[arch])
    for reason in found:
        assert f"{arch} code" in reason and TARGETS[name].isa in reason and reason.endswith(f"compile it with --target {name}")


def test_the_wrong_code_is_said_in_one_line() -> None:
    assert reasons(on_gpu(), TARGETS["b200"]) == [
        "its kernels are sm_90a code, which runs on compute capability 9.0 alone; b200 has 10.0 (sm_100a); compile it with --target b200"]
    assert "8.0 and 8.6 and 8.9 alone" in reasons(on_gpu("sm_80"), TARGETS["h100"])[0]


def test_code_of_an_unknown_arch() -> None:
    assert "sm_120a code, which no GPU this infc knows runs" in reasons(on_gpu("sm_120a"), TARGETS["b200"])[0]


def test_one_kernel_of_another_arch_is_found() -> None:
    mixed = on_gpu(kernels=(LINEAR, msgspec.structs.replace(NORM, arch="sm_100a")))
    assert ["sm_100a code" in reason for reason in reasons(mixed, TARGETS["h200"])] == [True]


def test_an_aten_step_is_no_reason() -> None:
    aten = Kernel("h3", "aten_topk", 'aten::topk.default [{"in":0},5]', "aten.topk.default", "portable")
    assert reasons(on_gpu(kernels=(LINEAR, aten)), TARGETS["h200"]) == []


def test_the_same_arch_on_another_model_is_noted() -> None:
    assert notes(on_gpu(), TARGETS["h200"]) == []
    for name in ("h100", "h100-pcie"):
        assert reasons(on_gpu(), TARGETS[name]) == [] and notes(on_gpu(), TARGETS[name]) == ["compiled for h200: tiles were chosen for it"]


@pytest.mark.parametrize(("arch", "name"), [(arch, name) for arch, runs in RUNS.items() for name in sorted(runs)])
def test_shared_memory_to_the_byte(arch: str, name: str) -> None:
    limit = ARCHS[TARGETS[name].isa].shared_per_program
    assert reasons(on_gpu(arch, shared=limit), TARGETS[name]) == []
    assert reasons(on_gpu(arch, shared=limit + 1), TARGETS[name]) == [
        f"kernel rms_norm needs {limit + 1} bytes of shared memory, a program has {limit} there (so do 1 more); "
        f"compile it with --target {name}"]
    assert "so do" not in reasons(on_gpu(kernels=(msgspec.structs.replace(LINEAR, shared_bytes=300_000), NORM)), TARGETS["h100"])[0]


def test_memory_to_the_byte() -> None:
    """Weights, the largest arena and one KV block."""
    room = 80 * 10**9 - 10**7 - 2 * 32_768 * BLOCK
    assert reasons(on_gpu(target="h100", weights=room), TARGETS["h100"]) == []
    assert reasons(on_gpu(target="h100", weights=room + 1), TARGETS["h100"]) == [
        "its weights, arena and one KV block take 80.0 GB, h100 has 80; "
        "quantize its weights (--quant w8) or take a GPU with more memory"]
    assert reasons(on_gpu(weights=room + 1), TARGETS["h200"]) == []
    assert len(reasons(on_gpu(weights=room + 1), TARGETS["a100"])) == 2              # wrong code as well


def test_a_kv_cache_shorter_than_the_model_is_noted() -> None:
    fixed, per_token = 80 * 10**9 - 10**7, 2 * 32_768
    assert notes(on_gpu(target="h100", weights=fixed - 4096 * per_token), TARGETS["h100"]) == []
    assert notes(on_gpu(target="h100", weights=fixed - 100 * per_token), TARGETS["h100"]) == [
        "its memory has room for the KV cache of 100 tokens, the model takes 4096 in one sequence"]


def test_an_artifact_without_weights_or_cache() -> None:
    assert reasons(msgspec.structs.replace(on_gpu(), weights=None, kv=(), buckets=()), TARGETS["h200"]) == []
