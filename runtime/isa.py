"""What a CPU can do, asked before any code of an artifact is loaded: an unknown instruction kills the process without a word."""

from collections.abc import Iterable
from functools import lru_cache

from .errors import RuntimeFault

_V3 = ("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "abm")
_V4 = (*_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")

LEVELS: dict[str, tuple[str, ...]] = {
    "portable": (),
    "x86-64-v3": _V3,
    "x86-64-v4": _V4,
    "x86-64-v4-bf16": (*_V4, "avx512_bf16", "avx512_vnni"),
    "x86-64-v4-amx": (*_V4, "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16"),
}
"""The flags of each level, lowest first, as /proc/cpuinfo spells them. Source: the x86-64 psABI, section 3.1.1."""

FRIENDLY = {
    "avx512f": "AVX-512",
    "avx512bw": "AVX-512 BW",
    "avx512cd": "AVX-512 CD",
    "avx512dq": "AVX-512 DQ",
    "avx512vl": "AVX-512 VL",
    "avx512_bf16": "AVX-512 BF16",
    "avx512_vnni": "AVX-512 VNNI",
    "avx512_fp16": "AVX-512 FP16",
    "avx": "AVX",
    "avx2": "AVX2",
    "fma": "FMA",
    "f16c": "F16C",
    "bmi1": "BMI1",
    "bmi2": "BMI2",
    "movbe": "MOVBE",
    "abm": "LZCNT",
    "amx_bf16": "AMX BF16",
    "amx_int8": "AMX INT8",
    "amx_tile": "AMX",
}


class Cpu:
    """The CPU as the kernel describes it."""

    def __init__(self, name: str, machine: str, flags: frozenset[str]) -> None:
        self.name, self.machine, self.flags = name, machine, flags

    def level(self) -> str:
        """The highest of LEVELS this CPU has."""
        return [name for name, flags in LEVELS.items() if self.flags.issuperset(flags)][-1]


@lru_cache(1)
def this_cpu() -> Cpu:
    """Read /proc/cpuinfo: the first processor's entry says all (a machine with 256 takes 10 ms to print them all)."""
    import os

    name, flags = "unknown CPU", frozenset[str]()
    try:
        with open("/proc/cpuinfo", "rb", buffering=0) as file:
            text = file.read(16384).decode("ascii", "replace")
    except OSError:
        text = ""
    for line in text.split("\n\n")[0].splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            name = value.strip()
        elif key.strip() in ("flags", "Features"):
            flags = frozenset(value.split())
    return Cpu(name, os.uname().machine, flags)


def require(needed: Iterable[str], machine: str, where: str, cpu: Cpu | None = None) -> None:
    """Raise RuntimeFault where this CPU lacks something the artifact's kernels use."""
    cpu = cpu or this_cpu()
    if machine != cpu.machine:
        raise RuntimeFault(
            f"{where}: compiled for {machine}, this machine is {cpu.machine}; compile it again with --target cpu on such a machine"
        )
    lacking = sorted(set(needed) - cpu.flags)
    if lacking:
        names = ", ".join(FRIENDLY.get(flag, flag) for flag in lacking)
        target = cpu.level()
        raise RuntimeFault(
            f"{where}: needs {names}, which this CPU ({cpu.name}) lacks; compile it again with: infc compile --target {target}"
        )
