"""The shared library of an artifact: its kernels by symbol, and the pool of threads that runs them (kernels/pool.h)."""
import ctypes
import itertools
import os
import weakref
from ctypes import c_int, c_int64, c_uint32, c_uint64, c_void_p
from pathlib import Path

from . import isa
from .artifact import Artifact
from .errors import RuntimeFault, no_pool

SPIN_US = 2000
"""How long workers spin after a step before they sleep: longer than Python needs between two steps."""

_ABI: dict[str, tuple[type | None, list[type]]] = {
    "infc_pool_create": (c_void_p, [c_int, c_int64]),
    "infc_pool_destroy": (None, [c_void_p]),
    "infc_pool_kv": (None, [c_void_p, c_int64]),
    "infc_pool_run": (c_int, [c_void_p, c_void_p, c_int64, c_void_p, c_void_p]),
    "infc_pool_read": (c_uint64, [c_void_p, c_void_p, c_int64]),
    "infc_pool_copy": (c_uint32, [c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_void_p]),
}

_LOADED: dict[str, ctypes.CDLL] = {}
"""By sha256 of the file: code stays in the process once it is loaded, so none is loaded twice."""

_NUMBERS = itertools.count()


class Library:
    """The code of an artifact, loaded into this process, with `threads` threads of its own (the caller is one of them)."""

    def __init__(self, artifact: Artifact, threads: int) -> None:
        self.where = str(artifact.path)
        isa.require(artifact.manifest.isa, artifact.manifest.machine, self.where)     # before any of it is loaded
        self._code = self._load(artifact)
        self._pid = os.getpid()
        self._pool = self._code.infc_pool_create(threads, SPIN_US)
        if not self._pool: raise RuntimeFault(f"{self.where}: {no_pool(threads, ctypes.get_errno())}")
        # a model dropped without close() stops them too. Not at exit: the process ends them, and one may be amid a step.
        self._stop = weakref.finalize(self, _stop, self._code, self._pool, self._pid)
        self._stop.atexit = False

    def _load(self, artifact: Artifact) -> ctypes.CDLL:
        data, name = artifact.code(), artifact.manifest.code
        sha256 = artifact.manifest.files[name].sha256
        try:
            code = _LOADED.get(sha256) or _from_memory(data, Path(name).name)
            for function_name, (result, arguments) in _ABI.items():
                function = getattr(code, function_name)
                function.restype, function.argtypes = result, arguments
        except (OSError, AttributeError) as error:
            raise RuntimeFault(f"{self.where}: its code cannot be loaded ({error}); compile it again on this system") from error
        _LOADED[sha256] = code
        return code

    def symbol(self, name: str) -> int | None:
        """The address of a kernel, or None where there is none."""
        try:
            return ctypes.cast(getattr(self._code, name), c_void_p).value
        except AttributeError:
            return None

    def require_ready(self) -> None:
        """Raise RuntimeFault where memory or threads are gone: using them would kill the process."""
        if self._pool is None:
            raise RuntimeFault(f"{self.where}: the model is closed; load it again")
        if os.getpid() != self._pid:
            raise RuntimeFault(f"{self.where}: loaded before this process was forked, so it has no threads; load it here")

    def kv_run(self, run_bytes: int) -> None:
        """Say how far apart the runs of KV blocks lie, before a step reads one."""
        self._code.infc_pool_kv(self._pool, run_bytes)

    def run(self, steps: int, count: int, dims: "ctypes.Array[c_int64]", stamps: "ctypes.Array[c_uint64] | None") -> None:
        """Run `count` steps of the table at address `steps`."""
        self.require_ready()
        if code := self._code.infc_pool_run(self._pool, steps, count, dims, stamps):
            raise RuntimeFault(f"{self.where}: a step was refused with code {code}; is the model used by two threads?")

    def read(self, address: int, size: int) -> int:
        """Read memory with all threads; a checksum."""
        self.require_ready()
        return self._code.infc_pool_read(self._pool, address, size)

    def copy(self, target: int, source: int, size: int, chunk: int, sums: int) -> None:
        """Copy memory with all threads; one crc32c a chunk is written to address `sums`."""
        self._code.infc_pool_copy(self._pool, target, source, size, chunk, sums)

    def close(self) -> None:
        """Stop the threads."""
        self._pool = None
        self._stop()                                      # once: it does nothing when called again


def _from_memory(data: bytes, name: str) -> ctypes.CDLL:
    """Load just these bytes; `name` is what /proc/self/maps shows.

    dlopen answers a path it knows with what it loaded from there, whatever lies there by now, and a descriptor's number recurs. So
    no path is given twice: each has a number of its own, spelled in parts that lead nowhere, `./` a 1 and `/` a 0.
    """
    with open(os.memfd_create(name), "wb", buffering=0) as file:
        file.write(data)
        number = f"{next(_NUMBERS):b}".replace("1", "./").replace("0", "/")
        return ctypes.CDLL(f"/proc/self/fd/{number}{file.fileno()}", use_errno=True)


def _stop(code: ctypes.CDLL, pool: int, pid: int) -> None:
    if os.getpid() == pid:                                # a forked child has the pool's memory, but none of its threads
        code.infc_pool_destroy(pool)


def default_threads() -> int:
    """CPUs this process may use: its affinity mask, and no more than a container's quota pays for."""
    cpus = len(os.sched_getaffinity(0))
    try:
        with open("/sys/fs/cgroup/cpu.max", "rb", buffering=0) as file:
            quota, period = file.read().split()
    except (OSError, ValueError):
        return cpus
    return cpus if quota == b"max" else max(1, min(cpus, -(-int(quota) // int(period))))
