"""Kernels of a library run by its own pool of threads on made-up data, and timed: what micro-benchmarks stand on."""
import ctypes
import mmap
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ...compiler.errors import UserError
from ...runtime.errors import no_pool


class TimedPool:
    """The library, its threads, and memory that stays until the pool is closed."""

    def __init__(self, library: Path, threads: int):
        self.lib = ctypes.CDLL(str(library), use_errno=True)
        self.lib.infc_pool_create.restype = ctypes.c_void_p
        self.lib.infc_pool_create.argtypes = [ctypes.c_int, ctypes.c_int64]
        self.lib.infc_pool_destroy.argtypes = [ctypes.c_void_p]
        self.lib.infc_pool_read.restype = ctypes.c_uint64
        self.lib.infc_pool_read.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
        self.lib.infc_pool_run.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p]
        self.pool = self.lib.infc_pool_create(threads, 2000)
        if not self.pool: raise UserError(f"kernels cannot be timed on this machine: {no_pool(threads, ctypes.get_errno())}")
        self.keep: list[object] = []

    def close(self) -> None:
        self.lib.infc_pool_destroy(self.pool)

    def memory(self, size: int, dtype: type = np.uint16) -> np.ndarray:
        """Random values near 1 (bf16 as uint16, or float32): a constant would be read faster than real data."""
        room = mmap.mmap(-1, size + (4 << 20), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        room.madvise(mmap.MADV_HUGEPAGE)
        whole = np.frombuffer(room, np.uint8)
        start = -whole.ctypes.data % (2 << 20)
        values = whole[start: start + size].view(dtype)
        noise = np.random.default_rng(0).standard_normal(1 << 18, np.float32) * 0.05
        pattern = (noise.view(np.uint32) >> 16).astype(np.uint16) if dtype == np.uint16 else noise.astype(dtype)
        for i in range(0, len(values), len(pattern)): values[i: i + len(pattern)] = pattern[: len(values) - i]
        self.keep += [room, whole]
        return values

    def ints(self, values: np.ndarray) -> np.ndarray:
        kept = np.ascontiguousarray(values, np.int32)
        self.keep.append(kept)
        return kept

    def steps(self, name: str, tables: list[list[int]], dims: list[int]) -> Callable[[], float]:
        """Runs a table of steps of one kernel; the seconds of one step, barrier included, the median over the table."""
        held = [(ctypes.c_void_p * len(t))(*t) for t in tables]
        function = ctypes.cast(getattr(self.lib, f"{name}_k"), ctypes.c_void_p).value
        table = (ctypes.c_void_p * (2 * len(held)))(*(x for t in held for x in (function, ctypes.addressof(t))))
        live = (ctypes.c_int64 * 5)(*[*dims, 0, 0, 0, 0, 0][:5])
        times = (ctypes.c_uint64 * (len(held) + 1))()

        def run() -> float:
            if self.lib.infc_pool_run(self.pool, table, len(held), live, times): raise UserError("this machine's peaks cannot be measured")
            return statistics.median(times[i + 1] - times[i] for i in range(len(held))) * 1e-9
        return run

    def read(self, array: np.ndarray) -> float:
        """Seconds of a pure read."""
        start = time.perf_counter()
        self.lib.infc_pool_read(self.pool, array.ctypes.data, array.nbytes)
        return time.perf_counter() - start
