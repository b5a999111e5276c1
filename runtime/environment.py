"""The machine a measurement was taken on, as plain data, and whether others used it meanwhile: a number without it says nothing."""

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from . import isa
from .cpu import default_threads

OURS = 0.9
"""Below this share of their CPUs' time for our threads, a measurement says that the machine was busy, and blames no kernel."""


def environment() -> dict[str, Any]:
    """CPU, ISA, cores, governor, page settings, memory, load, and the versions that took part."""
    cpu = isa.this_cpu()
    return {
        "cpu": cpu.name,
        "machine": cpu.machine,
        "isa": cpu.level(),
        "cores": os.cpu_count(),
        "usable_cores": default_threads(),
        "governor": _read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor") or "not shown by this kernel",
        "huge_pages": _chosen("/sys/kernel/mm/transparent_hugepage/enabled"),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load": round(os.getloadavg()[0], 2),
        "kernel": f"{platform.system()} {platform.release()}",
        "versions": {
            "python": platform.python_version(),
            **{name: _version(name) for name in ("infc", "numpy", "msgspec", "tokenizers")},
        },
    }


def cpu_share(used: float, wall: float, threads: int) -> float:
    """Of `wall` seconds, the share in which `threads` threads that spin had their CPUs: 1 on a machine of one's own. used: the process's
    CPU seconds meanwhile."""
    return min(1.0, used / (wall * min(threads, default_threads())))


def busy(share: float) -> list[str]:
    """The line that says so where a measurement with that `cpu_share` was not alone on the machine."""
    return [f"other processes had these CPUs {1 - share:.0%} of the time: measure again on a quiet machine"] if share < OURS else []


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _chosen(path: str) -> str:
    """The word in brackets: "madvise" of "always [madvise] never"."""
    text = _read(path)
    return text.partition("[")[2].partition("]")[0] or text
