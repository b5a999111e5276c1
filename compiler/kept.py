"""What an earlier compile found out, kept by the hash of all that it follows from: golden answers, and verdicts of checks that passed.

An entry is one file under $XDG_CACHE_HOME/infc/kept, its name the hash of everything it depends on, its sha256 behind it. What was
altered is removed with a note and found out anew; a cache that cannot be read or written costs one note, no more. Whoever takes an
entry says so, and of which day it is. The oldest entries go when all together pass the budget.
"""
import contextlib
import hashlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import msgspec
import torch
from torch import Tensor

from . import keys, targets
from .ir import Graph, tensor_hashes, text
from .reuse import cache_folder, evict, remove, sweep_halves

BUDGET_BYTES = 1 << 30

_DIGEST_BYTES = 32                       # sha256, behind an entry

Note = Callable[[str], None]
E = TypeVar("E", bound="Entry")


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept. made: when it was found out, UTC."""

    made: str = msgspec.field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))


@dataclass
class Kept:
    """The entries of one compile. `note` gets a line where something is not as it should be."""

    note: Note
    failed: bool = field(default=False, init=False)
    """The cache cannot be used, which was said."""

    def take(self, key: str, form: type[E], what: str) -> E | None:
        """The entry of that key, whole; None where there is none to use. what: for the note, "the golden answers"."""
        path = self._path(key)
        try:
            raw = None if self.failed else read(path)
        except Altered as why:
            self.note(f"{what} kept in {path} are of no use, finding them out again: {why}")
            return None
        except OSError as error:
            self._fail(f"{what} kept in {path} cannot be read ({error.strerror})")
            return None
        if raw is None: return None
        with contextlib.suppress(OSError): os.utime(path)                # a cache may be read-only
        return msgspec.msgpack.decode(raw, type=form)

    def keep(self, key: str, entry: Entry, what: str) -> None:
        """Keep what was found out; where that fails (a full disk) the compile is no worse for it."""
        if self.failed: return
        path = self._path(key)
        try:
            write(path, msgspec.msgpack.encode(entry))
            evict(path.parent, "[!.]*", BUDGET_BYTES, path)
        except OSError as error:
            self._fail(f"{what} are not kept for the next compile: {path.parent} cannot be written ({error.strerror})")

    def _fail(self, line: str) -> None:
        self.failed = True
        self.note(line)

    def _path(self, key: str) -> Path:
        return cache_folder() / "kept" / key


def key(*parts: object) -> str:
    """The key of what follows from these parts, from our sources, and from PyTorch as it runs here."""
    return keys.digest([*parts, keys.sources(), *_arithmetic()])


def content(graph: Graph) -> str:
    """Of a graph, all that its checks read: the text with its nodes' names, meta, samples' form, weights, and what a GGUF stored."""
    hashes = tensor_hashes(graph.weights.values())
    strides = [tuple(w.stride()) for w in graph.weights.values()]
    blocks = [(path, graph.blocks[path].kind, graph.blocks[path].sha256) for path in sorted(graph.blocks)]
    return keys.digest([
        text(graph), list(graph.placeholders), [*graph.weights], hashes, strides, [*graph.exact], tensor_hashes(graph.exact.values()),
        blocks, graph.dialect, graph.inputs, graph.outputs, graph.kv, sorted(graph.symbols.values()),
        sorted(graph.meta.items(), key=lambda kv: kv[0]), graph.sample_inputs,
    ])


def content_of(samples: Iterable[Iterable[Tensor]]) -> list[list[str]]:
    """Of sample inputs, each tensor's hash."""
    return [tensor_hashes(sample) for sample in samples]


def _arithmetic() -> Iterable[str]:
    """What decides how PyTorch rounds on this machine."""
    switches = sorted(f"{name}={value}" for name, value in os.environ.items()
                      if name.startswith(("ATEN_", "DNNL_", "KMP_", "MKL_", "OMP_", "ONEDNN_", "OPENBLAS_", "TORCH_")))
    return (torch.__version__, torch.backends.cpu.get_cpu_capability(), torch.__config__.show(), str(torch.get_num_threads()),
            torch.get_float32_matmul_precision(), str(torch.are_deterministic_algorithms_enabled()), *sorted(targets.host_flags()),
            *switches)


# ---- one file an entry

class Altered(Exception):
    """What is kept is no longer what was written."""


def read(path: Path) -> bytes | None:
    """The bytes kept at that place; None where there are none. Altered, and the entry removed, where they are not what was written;
    OSError where it cannot be read."""
    try:
        entry = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError:
        remove(path)
        raise
    raw, digest = entry[:-_DIGEST_BYTES], entry[-_DIGEST_BYTES:]
    if _digest(raw, path) == digest: return raw
    remove(path)
    raise Altered("it was altered (its sha256 differs)")


def write(path: Path, raw: bytes) -> None:
    """Atomically: another process may be writing the same. What killed ones left half written beside it goes."""
    sibling = path.with_name(f".{path.name}.{os.getpid()}-{os.urandom(4).hex()}")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with sibling.open("xb") as file: file.write(raw + _digest(raw, path))
        os.replace(sibling, path)
    finally:
        with contextlib.suppress(OSError): sibling.unlink()
    sweep_halves(path.parent)


def _digest(raw: bytes, path: Path) -> bytes:
    return hashlib.sha256(path.name.encode() + raw).digest()
