"""Targets: each GPU's figures make sense beside each other, and names are found or told what there is."""
import pytest
from infc.compiler import targets
from infc.compiler.errors import UserError
from infc.compiler.targets import ARCHS, TARGETS, Gpu, Target
from infc.runtime.device import arch_fits

GPUS = {name: target for name, target in TARGETS.items() if target.gpu}


def gpu(name: str) -> Gpu:
    found = TARGETS[name].gpu
    assert found
    return found


def test_the_gpus_there_are() -> None:
    assert {name: target.isa for name, target in GPUS.items()} == {
        "h100": "sm_90a", "h100-pcie": "sm_90a", "h200": "sm_90a", "a100": "sm_80", "l40s": "sm_89", "b200": "sm_100a"}


@pytest.mark.parametrize("name", GPUS)
def test_a_gpu_is_whole(name: str) -> None:
    target, one = TARGETS[name], gpu(name)
    assert target.kind == "cuda" and target.flags == () and one.arch is ARCHS[target.isa] and hash(target)
    figures = [field for field in vars(one) if field not in ("arch", "sources")]
    assert set(one.sources) == set(figures) and all(one.sources.values())
    assert ("fp8" in target.kv_formats) == (one.fp8_tflops is not None) == (target.isa != "sm_80")


@pytest.mark.parametrize("name", GPUS)
def test_peaks_are_dense(name: str) -> None:
    """A figure with sparsity, twice the dense one, would ask for a clock no such chip has.

    bf16 products a clock and multiprocessor: 1024 on GA100, 512 on AD102, 2048 on GH100 (their whitepapers' tensor core figures);
    GB100 does 4096, as its dense peak over 148 multiprocessors at below 2 GHz asks for.
    """
    one = gpu(name)
    products = {"sm_80": 1024, "sm_89": 512, "sm_90a": 2048, "sm_100a": 4096}[TARGETS[name].isa]
    clock = one.bf16_tflops * 1e12 / (2 * products * one.sms)
    assert 1.0e9 < clock < 2.6e9
    assert one.int8_tops == pytest.approx(2 * one.bf16_tflops, rel=0.02)
    assert one.fp8_tflops is None or one.fp8_tflops == one.int8_tops
    assert 1.0e9 < one.fp32_tflops * 1e12 / (2 * (64 if TARGETS[name].isa == "sm_80" else 128) * one.sms) < 2.6e9


def test_who_multiplies_e4m3() -> None:
    """What has fp8 in its tensor cores has it in its KV cache, and no CPU has either."""
    assert [name for name, target in TARGETS.items() if target.e4m3] == ["h100", "h100-pcie", "h200", "l40s", "b200"]
    assert all(target.e4m3 == ("fp8" in target.kv_formats) for target in TARGETS.values())


def test_what_runs_where() -> None:
    assert {name: arch.runs_on for name, arch in ARCHS.items()} == {
        "sm_80": ("8.0", "8.6", "8.9"), "sm_89": ("8.9",), "sm_90a": ("9.0",), "sm_100a": ("10.0",)}
    capabilities = {arch.capability for arch in ARCHS.values()} | {"8.6", "9.1", "10.3"}
    for name, arch in ARCHS.items():
        assert {c for c in capabilities if arch_fits(name, f"sm_{c.replace('.', '')}")} == set(arch.runs_on)
    assert all(arch.capability in arch.runs_on and arch.shared_per_program < arch.shared_per_sm for arch in ARCHS.values())


@pytest.mark.parametrize("name", TARGETS)
def test_find_every_target(name: str) -> None:
    assert targets.find(name) is TARGETS[name]


@pytest.mark.parametrize("name", ["cuda", "gpu"])
def test_a_gpu_without_a_model_lists_them(name: str) -> None:
    with pytest.raises(UserError, match=f"'{name}'.*h100, h100-pcie, h200, a100, l40s, b200"):
        targets.find(name)


@pytest.mark.parametrize(("name", "near"), [("h10", "h100"), ("l40", "l40s"), ("H200", "h200"), ("x86-64-v5", "x86-64-v4")])
def test_an_unknown_name_suggests_the_nearest(name: str, near: str) -> None:
    with pytest.raises(UserError, match=f"did you mean '{near}'"):
        targets.find(name)


def test_what_this_machine_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "host_flags", lambda: frozenset(TARGETS["x86-64-v3"].flags))
    assert targets.missing(TARGETS["x86-64-v3"]) == () and "avx512f" in targets.missing(TARGETS["x86-64-v4"])
    assert targets.missing(TARGETS["h200"]) == ("an NVIDIA GPU of sm_90a",)


@pytest.mark.parametrize(("flags", "best"), [((), "portable"), (TARGETS["x86-64-v3"].flags, "x86-64-v3")])
def test_the_host_is_a_cpu(monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], best: str) -> None:
    """Although a GPU asks for no CPU flags."""
    monkeypatch.setattr(targets, "host_flags", lambda: frozenset(flags))
    monkeypatch.setattr(targets.platform, "machine", lambda: "x86_64")
    found: Target = targets.find("cpu")
    assert found.name == best and found.gpu is None
