"""Targets: what a machine can do, and where each figure comes from."""
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .errors import UserError, nearest


@dataclass(frozen=True)
class Arch:
    """What GPUs of one architecture share. Code built for it runs on the compute capabilities in `runs_on` alone."""

    capability: str
    runs_on: tuple[str, ...]
    shared_per_sm: int                               # bytes of shared memory: of all programs on a multiprocessor,
    shared_per_program: int                          # and what a single one may have ("thread block" in CUDA)
    source: str


@dataclass(frozen=True)
class Gpu:
    """One model of GPU. Peaks are dense, in 10^12 operations a second; a data sheet's figure "with sparsity" is halved."""

    arch: Arch
    sms: int                                         # streaming multiprocessors
    l2_bytes: int
    memory_bytes: int                                # as data sheets count: a GB is 10^9
    bandwidth_gb_s: float
    bf16_tflops: float                               # tensor cores, as the next two
    fp8_tflops: float | None                         # None: they have no fp8
    int8_tops: float
    fp32_tflops: float                               # outside the tensor cores
    sources: Mapping[str, str] = field(hash=False)   # of each figure above, by its name


@dataclass(frozen=True)
class Target:
    """A machine to compile for.

    isa: the instruction set the C++ is built for, or a GPU's architecture. flags: what /proc/cpuinfo must show, in the kernel's
    own names.
    """

    name: str
    kind: str                                        # "cpu", "cuda"
    isa: str
    flags: tuple[str, ...]
    description: str
    source: str
    kv_formats: tuple[str, ...] = ("int8",)          # of a quantized KV cache that has kernels here
    gpu: Gpu | None = None

    @property
    def bf16_rows(self) -> Mapping[int, int]:
        """Bits of x's codes -> rows from which a bf16 program's products of codes become products of bf16, where they ever do. Measured
        in backends/cpu/kernels/quantized_bf16.h and amx.h."""
        if "amx_bf16" in self.flags: return {16: 32, 8: 48}
        return {16: 192} if "avx512_bf16" in self.flags else {}

    @property
    def e4m3(self) -> bool:
        """Do products here read e4m3?"""
        return self.gpu is not None and self.gpu.fp8_tflops is not None


# The psABI's micro-architecture levels: gitlab.com/x86-psABIs/x86-64-ABI, table 3.1 ("x86-64-v3", "x86-64-v4").
_V3 = ("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe")
_V4 = (*_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
_PSABI = "x86-64 psABI, micro-architecture levels"

# Code runs on its own compute capability and later ones of the same major number; with architecture-specific features, the
# "a", on their own alone: CUDA C++ Programming Guide, "Binary Compatibility" and "Feature Set Compiler Targets".
_GUIDE = 'CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability"'

ARCHS = {
    "sm_80": Arch("8.0", ("8.0", "8.6", "8.9"), 164 << 10, 163 << 10, _GUIDE),
    "sm_89": Arch("8.9", ("8.9",), 100 << 10, 99 << 10, _GUIDE),
    "sm_90a": Arch("9.0", ("9.0",), 228 << 10, 227 << 10, _GUIDE),
    "sm_100a": Arch("10.0", ("10.0",), 228 << 10, 227 << 10, _GUIDE),
}

# An fp8 KV cache is e4m3, which compute capability 8.9 and later convert: PTX ISA, "cvt", target notes.
_NO_E4M3 = ("sm_80",)

_A100 = 'NVIDIA A100 whitepaper, table "Comparison of NVIDIA Data Center GPUs"'
_A100_SHEET = "NVIDIA A100 data sheet, specifications, A100 80GB SXM"
_H100 = 'NVIDIA H100 whitepaper, table "Comparison of NVIDIA A100 and H100 Data Center GPUs"'
_H100_SHEET = "NVIDIA H100 data sheet, specifications, H100 SXM"
_PCIE_SHEET = "NVIDIA H100 data sheet, specifications, H100 PCIe"
_H200_ASKED = "CUDA device properties of an H200; its data sheet has none"
_H200_SHEET = "NVIDIA H200 data sheet, specifications, H200 SXM"
_L40S_SHEET = "NVIDIA L40S data sheet, specifications"
_DGX_SHEET = "NVIDIA DGX B200 data sheet, specifications, an eighth"
_HALF = ", half of the figure with sparsity"


def _sources(sms: str, l2: str, sheet: str, peaks: str, fp32: str = "") -> dict[str, str]:
    return {"sms": sms, "l2_bytes": l2, "memory_bytes": sheet, "bandwidth_gb_s": sheet, "bf16_tflops": peaks, "fp8_tflops": peaks,
            "int8_tops": peaks, "fp32_tflops": fp32 or sheet}


def _cuda(name: str, isa: str, description: str, gpu: Gpu) -> Target:
    return Target(name, "cuda", isa, (), description, "NVIDIA's documents: gpu.sources names one for each figure",
                  ("int8",) if isa in _NO_E4M3 else ("int8", "fp8"), gpu)


TARGETS = {target.name: target for target in (
    Target("x86-64-v4-amx", "cpu", "x86-64-v4-amx", (*_V4, "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16"),
           "AVX-512 with matrix registers for bf16 products of many rows (Sapphire Rapids and later)",
           _PSABI + "; AMX: Intel SDM volume 1, chapter 18"),
    Target("x86-64-v4-bf16", "cpu", "x86-64-v4-bf16", (*_V4, "avx512_bf16", "avx512_vnni"),
           "AVX-512 with bf16 and int8 dot products (Zen 4, Cooper Lake, Sapphire Rapids and later)",
           _PSABI + "; AVX512_BF16 and AVX512_VNNI: Intel SDM volume 1, chapter 5"),
    Target("x86-64-v4", "cpu", "x86-64-v4", _V4, "AVX-512 (Skylake-SP and later)", _PSABI),
    Target("x86-64-v3", "cpu", "x86-64-v3", _V3, "AVX2 and FMA (Haswell, Zen and later)", _PSABI),
    Target("portable", "cpu", "portable", (), "any CPU g++ compiles for, aarch64 among them; no ISA extension", "none needed"),
    _cuda("h100", "sm_90a", "NVIDIA H100 SXM, 80 GB (Hopper)", Gpu(
        ARCHS["sm_90a"], sms=132, l2_bytes=50 << 20, memory_bytes=80 * 10**9, bandwidth_gb_s=3350,
        bf16_tflops=989.5, fp8_tflops=1979, int8_tops=1979, fp32_tflops=67,
        sources=_sources(_H100, _H100, _H100_SHEET, _H100_SHEET + _HALF))),
    _cuda("h100-pcie", "sm_90a", "NVIDIA H100 PCIe, 80 GB (Hopper)", Gpu(
        ARCHS["sm_90a"], sms=114, l2_bytes=50 << 20, memory_bytes=80 * 10**9, bandwidth_gb_s=2000,
        bf16_tflops=756.5, fp8_tflops=1513, int8_tops=1513, fp32_tflops=51,
        sources=_sources(_H100, _H100, _PCIE_SHEET, _PCIE_SHEET + _HALF))),
    _cuda("h200", "sm_90a", "NVIDIA H200 SXM, 141 GB (Hopper)", Gpu(
        ARCHS["sm_90a"], sms=132, l2_bytes=60 << 20, memory_bytes=141 * 10**9, bandwidth_gb_s=4800,
        bf16_tflops=989.5, fp8_tflops=1979, int8_tops=1979, fp32_tflops=67,
        sources=_sources(_H200_ASKED, _H200_ASKED, _H200_SHEET, _H200_SHEET + _HALF))),
    _cuda("a100", "sm_80", "NVIDIA A100 SXM, 80 GB (Ampere)", Gpu(
        ARCHS["sm_80"], sms=108, l2_bytes=40 << 20, memory_bytes=80 * 10**9, bandwidth_gb_s=2039,
        bf16_tflops=312, fp8_tflops=None, int8_tops=624, fp32_tflops=19.5,
        sources=_sources(_A100, _A100, _A100_SHEET, _A100_SHEET))),
    # 142 multiprocessors of 128 CUDA cores are its data sheet's 18176.
    _cuda("l40s", "sm_89", "NVIDIA L40S, 48 GB (Ada)", Gpu(
        ARCHS["sm_89"], sms=142, l2_bytes=96 << 20, memory_bytes=48 * 10**9, bandwidth_gb_s=864,
        bf16_tflops=362.05, fp8_tflops=733, int8_tops=733, fp32_tflops=91.6,
        sources=_sources(_L40S_SHEET + ", CUDA cores / 128", 'NVIDIA Ada Tuning Guide, "Increased L2 capacity", AD102',
                         _L40S_SHEET, _L40S_SHEET + ", without sparsity"))),
    # The brief has 80 for fp32; 148 multiprocessors do 75 at 1.98 GHz, as the newer HGX table says.
    _cuda("b200", "sm_100a", "NVIDIA B200, 180 GB (Blackwell)", Gpu(
        ARCHS["sm_100a"], sms=148, l2_bytes=126 << 20, memory_bytes=180 * 10**9, bandwidth_gb_s=8000,
        bf16_tflops=2250, fp8_tflops=4500, int8_tops=4500, fp32_tflops=75,
        sources=_sources("CUDA device properties of a B200; its data sheet has none",
                         'NVIDIA Blackwell Tuning Guide, "Increased L2 Capacity"', _DGX_SHEET,
                         'NVIDIA Blackwell Architecture Technical Brief, specifications, HGX B200, per GPU, dense',
                         "NVIDIA HGX platform, specifications, HGX B200, an eighth"))),
)}


def host_flags() -> frozenset[str]:
    """The feature flags Linux shows for this CPU; empty where /proc/cpuinfo lists none."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    line = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return frozenset(line.partition(":")[2].split())


def host() -> Target:
    """The best target this machine can run."""
    if platform.machine() != "x86_64":
        return TARGETS["portable"]
    here = host_flags()
    return next(target for target in TARGETS.values() if target.kind == "cpu" and here.issuperset(target.flags))


def find(name: str) -> Target:
    """The target of this name; "cpu" is the machine we are on. Raises UserError naming the nearest one."""
    if name == "cpu":
        return host()
    if name in ("cuda", "gpu"):
        models = ", ".join(target.name for target in TARGETS.values() if target.gpu)
        raise UserError(f"target {name!r}: kernels are chosen for one model of GPU, name it: {models}")
    if name not in TARGETS:
        raise UserError(f"unknown target {name!r}: {nearest(name, ('cpu', *TARGETS))}")
    return TARGETS[name]


def missing(target: Target) -> tuple[str, ...]:
    """What this machine lacks to run `target`, CPU flags or a GPU; empty when it runs here.

    A GPU is always lacking: the compiler asks no driver, and the runtime that loads an artifact finds out.
    """
    if target.gpu: return (f"an NVIDIA GPU of {target.isa}",)
    here = host_flags()
    return tuple(flag for flag in target.flags if flag not in here)
