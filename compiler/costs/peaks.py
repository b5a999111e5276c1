"""What a machine can do, measured once: read rates, product and attention rates, the barrier. Kept between runs.

The figures are of our own kernels on made-up data (backends/cpu/peaks.py), so that a prediction needs no fitted factor: a step is
predicted from what its kernel reaches when nothing else is in the way.
"""
import hashlib
import json
import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ..reuse import cache_folder


@dataclass(frozen=True)
class Peaks:
    """GB/s, GFLOP/s, seconds and bytes of one CPU with so many threads; rates are of all threads together unless they say so."""

    cpu: str
    isa: str
    threads: int
    read_gb_s: float               # a pure read of memory larger than every cache, in 2 MiB pages
    kv_read_gb_s: dict[str, float]     # what each further KV block costs the attention kernel's decode, a few of them side by side, the
                                       # rest scattered in memory; by dtype of the cache, codes with their scales
    cache_gb_s: float              # a row kernel (RMSNorm), reads and writes together, on what a stream of weights leaves of rows in caches
    thread_cache_gb_s: float       # the same of one row, which stays near, and so one thread
    weight_cache_gb_s: float       # a one-row product whose weights lie in the caches
    key_cache_gb_s: dict[str, float]      # attention's decode whose keys and values lie in the caches; by dtype of the cache
    scan_gb_s: float               # the sampler's argmax over logits, found as rows are
    product_gflop_s: dict[str, float]     # of the product kernel, many rows, operands in the caches; by dtype of the weights
    attention_gflop_s: dict[str, float]   # of the attention kernel, many rows, keys in the caches; by dtype of the cache
    exposed: float                 # where memory and arithmetic take equally long, the part of one that does not hide beneath the other
    barrier_s: float               # from the end of one step to the start of the next
    aten_call_s: float             # a step that calls torch for a small tensor
    llc_bytes: int                 # the last cache before memory
    start_s: float = 0.0           # until a step's first bytes arrive from memory and its threads have met again
    kv_start_s: float = 0.0        # the same for each sequence an attention step decodes: its first blocks, its end
    quiet: bool = True             # nobody else used these CPUs meanwhile; such peaks alone are kept
    kv_write_gb_s: float = 1.0     # keys and values of one token into a block that lies in memory, where they are cache lines apart


def last_level_cache() -> int:
    """Bytes of the largest cache Linux shows for CPU 0; 0 where it shows none, and then everything is read from memory."""
    found = 0
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = file.read_text().strip()
        scale = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:], 1)
        found = max(found, int(text.rstrip("KMG")) * scale)
    return found


def key(cpu: str, isa: str, threads: int, library: str) -> str:
    """What the figures depend on: the CPU, the instruction set, the threads and the kernels that were measured (their digest)."""
    return hashlib.sha256("\n".join((cpu, isa, str(threads), library)).encode()).hexdigest()[:16]


def kept(name: str, note: Callable[[str], object] = lambda line: None) -> Peaks | None:
    """The peaks kept under `name`; None where there are none that can be used. `note` is told why."""
    path = _path(name)
    try:
        known = json.loads(path.read_text())
        if not isinstance(known, dict) or set(known) != {f.name for f in fields(Peaks)}:
            note(f"the peaks kept in {path} are of another version")
        elif wrong := [name for name, value in known.items() if not _possible(name, value)]:
            note(f"the peaks kept in {path} are of no use ({', '.join(wrong)} cannot be)")
        else:
            return Peaks(**known)
    except FileNotFoundError:
        note("this machine's peaks were never measured")
    except (OSError, ValueError, TypeError) as error:
        note(f"the peaks kept in {path} are of no use ({error})")
    return None


def _possible(name: str, value: Any) -> bool:
    """A text, a switch, or figures: finite, not negative, and no rate of 0."""
    if isinstance(value, dict): return bool(value) and all(_possible("gb_s", rate) for rate in value.values())
    if name in ("cpu", "isa", "quiet"): return isinstance(value, bool if name == "quiet" else str)
    return isinstance(value, int | float) and 0 <= value < math.inf and (value > 0 or not name.endswith("gb_s"))


def cached(name: str, measure: Callable[[], Peaks], note: Callable[[str], object] = lambda line: None) -> Peaks:
    """The peaks kept under `name` (a key), else what `measure` finds, kept from now on.

    Peaks of a busy machine are not kept; a cache that fails costs a note, no more.
    """
    known = kept(name, lambda line: note(f"{line}: measuring them now, a few seconds, once"))
    if known is not None: return known
    found, path = measure(), _path(name)
    if not found.quiet:
        note("other processes used these CPUs meanwhile, so the peaks are too low and are not kept: measure again on a quiet machine")
        return found
    sibling = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        sibling.write_text(json.dumps(asdict(found), indent=1))
        os.replace(sibling, path)
    except OSError as error:
        note(f"the peaks are not kept: {path.parent} cannot be written ({error.strerror})")
    return found


def _path(name: str) -> Path:
    return cache_folder() / "peaks" / f"{name}.json"
