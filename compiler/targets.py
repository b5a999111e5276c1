"""Targets: what a machine can do, and where each figure comes from."""
import platform
from dataclasses import dataclass
from pathlib import Path

from .errors import UserError, nearest


@dataclass(frozen=True)
class Target:
    """A machine to compile for.

    isa: the instruction set the C++ is built for. flags: what /proc/cpuinfo must show, in the kernel's own names.
    """

    name: str
    kind: str                                        # "cpu"
    isa: str
    flags: tuple[str, ...]
    description: str
    source: str
    kv_formats: tuple[str, ...] = ("int8",)          # of a quantized KV cache that has kernels here


# The psABI's micro-architecture levels: gitlab.com/x86-psABIs/x86-64-ABI, table 3.1 ("x86-64-v3", "x86-64-v4").
_V3 = ("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe")
_V4 = (*_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
_PSABI = "x86-64 psABI, micro-architecture levels"

TARGETS = {target.name: target for target in (
    Target("x86-64-v4-bf16", "cpu", "x86-64-v4-bf16", (*_V4, "avx512_bf16", "avx512_vnni"),
           "AVX-512 with bf16 and int8 dot products (Zen 4, Cooper Lake, Sapphire Rapids and later)",
           _PSABI + "; AVX512_BF16 and AVX512_VNNI: Intel SDM volume 1, chapter 5"),
    Target("x86-64-v4", "cpu", "x86-64-v4", _V4, "AVX-512 (Skylake-SP and later)", _PSABI),
    Target("x86-64-v3", "cpu", "x86-64-v3", _V3, "AVX2 and FMA (Haswell, Zen and later)", _PSABI),
    Target("portable", "cpu", "portable", (), "any CPU g++ compiles for, aarch64 among them; no ISA extension", "none needed"),
)}

GPU_NAMES = ("cuda", "gpu", "a100", "h100", "h100-pcie", "h200", "b200", "l40s")
"""What people ask for and this version does not have: told so, rather than shown the nearest CPU."""


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
    return next(target for target in TARGETS.values() if here.issuperset(target.flags))


def find(name: str) -> Target:
    """The target of this name; "cpu" is the machine we are on. Raises UserError naming the nearest one."""
    if name == "cpu":
        return host()
    if name in GPU_NAMES:
        raise UserError(f"target {name!r}: this version compiles for CPUs only ({', '.join(('cpu', *TARGETS))})")
    if name not in TARGETS:
        raise UserError(f"unknown target {name!r}: {nearest(name, ('cpu', *TARGETS))}")
    return TARGETS[name]


def missing(target: Target) -> tuple[str, ...]:
    """The flags this machine lacks to run `target`; empty when it runs here."""
    here = host_flags()
    return tuple(flag for flag in target.flags if flag not in here)
