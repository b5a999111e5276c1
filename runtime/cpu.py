"""Run an artifact on the CPU: its weights copied once into 2 MiB pages, every chunk's crc32c checked on the way.

Arena, KV pool, inputs and outputs are allocated once and never move; a step is then one call, with no Python and no allocation
inside it.
"""
import ctypes
import mmap
from collections.abc import Mapping, Sequence
from time import perf_counter_ns
from typing import Any

from .artifact import Artifact
from .batch import Work, fill
from .buffers import Region as Memory
from .buffers import view
from .errors import RuntimeFault
from .kv_runs import KvRuns
from .library import Library, default_threads
from .manifest import BLOCK
from .places import FLOATS, Places, Region, step_io
from .table import StepTable

__all__ = ["Executor", "default_threads", "free_memory", "kv_bytes_per_token"]

_WINDOW = 32 << 20
"""Bytes of the weights file mapped at a time, so that loading never holds the weights twice."""


class Executor:
    """An artifact's code and memory, ready to run any of its programs."""

    cache_bytes = 64 << 20           # of the replay cache: the table of a 30-layer model is about 30 kB

    def __init__(self, artifact: Artifact, threads: int, kv_blocks: int) -> None:
        self.artifact = artifact
        self.threads = threads
        self.kv_blocks = kv_blocks
        self._where = str(artifact.path)
        self._regions: list[Memory] = []
        self.library = Library(artifact, threads)
        try:
            self._allocate_inputs_and_outputs()
            manifest = artifact.manifest
            self._arena_bytes = max((b.arena_bytes for b in manifest.buckets), default=0)
            self._arena = self._region(self._arena_bytes, "arena", huge=True)
            self.kv_runs = KvRuns(manifest.kv, kv_blocks)
            self.kv_pool = self._region(self.kv_runs.bytes, "KV pool", huge=True)
            self.library.kv_run(self.kv_runs.run_bytes)
            self._weights = self._region(manifest.weights.data_bytes if manifest.weights else 0, "weights", huge=True)
            self.upload(artifact)
        except BaseException:
            self.close()
            raise

    def _allocate_inputs_and_outputs(self) -> None:
        io = step_io(self.artifact.manifest)
        base = self._region(io.bytes, "inputs and outputs", huge=False).address
        self._io = io.at(base)
        self.views = {name: view(place.address, place.bytes // 4, "f" if name in FLOATS else "i") for name, place in self._io.items()}

    def _region(self, size: int, what: str, huge: bool) -> Memory:
        region = Memory(size, what, huge)
        self._regions.append(region)
        return region

    def upload(self, artifact: Artifact) -> None:
        """Copy an artifact's weights to where this one's lie. RuntimeFault where a byte differs from what was recorded."""
        info = artifact.manifest.weights
        if info is None:
            return
        sums = (ctypes.c_uint32 * max(1, len(info.crc32c)))()
        if len(info.crc32c) != -(-info.data_bytes // info.chunk) or _WINDOW % info.chunk:
            raise RuntimeFault(f"{self._where}: its manifest has {len(info.crc32c)} sums for {info.data_bytes} bytes of weights; "
                               "compile it again")
        with artifact.weights() as span:
            for done in range(0, info.data_bytes, _WINDOW):
                size, at = min(_WINDOW, info.data_bytes - done), span.offset + info.data_offset + done
                page = at // mmap.PAGESIZE * mmap.PAGESIZE
                with mmap.mmap(span.fd, at - page + size, mmap.MAP_PRIVATE, offset=page) as window:
                    source = ctypes.c_char.from_buffer(window)
                    self.library.copy(self._weights.address + done, ctypes.addressof(source) + at - page, size, info.chunk,
                                      ctypes.addressof(sums) + 4 * (done // info.chunk))
                    del source                            # the window cannot be closed while it is pointed into
        for chunk, (found, expected) in enumerate(zip(sums, info.crc32c, strict=True)):
            if found != expected:
                raise artifact.weight_fault(chunk)

    @property
    def places(self) -> tuple[int, ...]:
        """Where everything lies: a table made for other places must not run."""
        return tuple(region.address for region in self._regions)

    def table(self, bucket: str) -> StepTable:
        """Build the step table of a bucket. Raises RuntimeFault where the program does not fit the artifact."""
        program = self.artifact.program(bucket)
        symbols = {k.hash: k.symbol for k in self.artifact.manifest.kernels}
        places = Places(self._where, Region(self._arena.address, self._arena_bytes), self._weight_places(), self._kv_places(), self._io)
        return StepTable(program, symbols, self.library, lambda b: places.address(b, program))

    def _weight_places(self) -> dict[str, Region]:
        return {name: Region(self._weights.address + p.start, p.stop - p.start) for name, p in self.artifact.places.items()}

    def _kv_places(self) -> dict[str, Region]:
        base, offsets = self.kv_pool.address, self.kv_runs.offsets
        return {b.name: Region(base + offsets[b.name], b.block_bytes) for b in self.artifact.manifest.kv}

    def clear(self, first: int, count: int, byte: int) -> None:
        """Set every byte of `count` KV blocks from `first` on."""
        for offset, size in self.kv_runs.ranges(first, count):
            ctypes.memset(self.kv_pool.address + offset, byte, size)

    def fill(self, works: Sequence[Work], live: Mapping[str, int], bucket: Mapping[str, int]) -> None:
        """Write the inputs of a step. Kernels take live sizes, whatever the bucket."""
        fill(self.views, works, live["M"])

    def require_ready(self) -> None:
        """Raise RuntimeFault where the model is closed, or this process was forked since."""
        self.library.require_ready()

    def tokens(self, rows: int) -> list[int]:
        """The first `rows` tokens of the last step."""
        return self.views["token"][:rows].tolist()

    def logits(self, rows: int, copy: bool = True) -> Any:
        """The first `rows` rows of the last step's logits, float32 [rows, vocab]: a copy, which stays what it is; or where they lie,
        until the next step writes there.
        """
        import numpy as np

        vocab = self.artifact.manifest.model.vocab
        found = np.frombuffer(self.views["logits"][:rows * vocab], np.float32).reshape(rows, vocab)
        if copy: return found.copy()
        found.flags.writeable = False
        return found

    def read_weights(self) -> int:
        """Only read every weight byte, with all threads; nanoseconds: the limit of a decode step."""
        start = perf_counter_ns()
        self.library.read(self._weights.address, self._weights.size)
        return perf_counter_ns() - start

    def memory(self) -> dict[str, int]:
        """Bytes reserved for each purpose. KV pages become real when they are first written."""
        return {"weights": self._weights.size, "arena": self._arena_bytes, "kv": self.kv_runs.bytes, "huge_pages": int(self._weights.huge)}

    def close(self) -> None:
        """Stop the threads and give all memory back."""
        self.library.close()
        for region in self._regions:
            region.close()
        self._regions.clear()
        self.artifact.close()


def kv_bytes_per_token(artifact: Artifact) -> int:
    """Bytes one token takes in all KV buffers."""
    return sum(b.block_bytes for b in artifact.manifest.kv) // BLOCK


def free_memory() -> int:
    """Bytes the system can still give (MemAvailable)."""
    with open("/proc/meminfo", "rb", buffering=0) as file:
        fields: Mapping[bytes, bytes] = dict(line.split(b":", 1) for line in file.read().splitlines())
    return int(fields[b"MemAvailable"].split()[0]) * 1024
