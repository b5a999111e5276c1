"""The peaks of the machine we are on: which key they are kept under, and who measures them. Wiring, like the driver."""
import hashlib
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from ...runtime.isa import this_cpu
from . import peaks

KERNELS = Path(__file__).parents[2] / "backends" / "cpu"


@lru_cache(maxsize=1)
def library_digest() -> str:
    """sha256 over what is measured: the micro-benchmarks and every kernel header. Read as files: torch stays out of it."""
    digest = hashlib.sha256()
    for file in (KERNELS / "peaks.py", *sorted((KERNELS / "kernels").glob("*.h"))):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


def key(isa: str, threads: int) -> str:
    """Where this machine's peaks are kept."""
    return peaks.key(this_cpu().name, isa, threads, library_digest())


def known_peaks(isa: str, threads: int) -> peaks.Peaks | None:
    """The peaks if they were measured before; nothing is run."""
    return peaks.kept(key(isa, threads))


def machine_peaks(isa: str, threads: int, note: Callable[[str], object] = lambda line: None) -> peaks.Peaks:
    """The peaks, measured now if they never were. Raises UserError without a C++ compiler."""
    return peaks.cached(key(isa, threads), lambda: peaks_now(isa, threads), note)


def peaks_now(isa: str, threads: int) -> peaks.Peaks:
    """The peaks of this minute; kept ones stay as they are. Raises UserError without a C++ compiler."""
    from ...backends.cpu.peaks import measure  # torch, numpy and a compile: only then

    return measure(this_cpu().name, isa, threads)
