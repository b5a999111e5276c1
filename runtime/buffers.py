"""Memory that keeps its address: anonymous mappings, aligned to 2 MiB, typed views of them, and a GPU's as other libraries take it."""

import ctypes
import math
import mmap
from typing import Any

from .errors import RuntimeFault

HUGE = 2 << 20
"""Bytes of a large page. Reading weights through them is about 1.1x faster than through 4 KiB pages (two threads, Zen 4)."""

_NO_RESERVE = 0x4000
"""MAP_NORESERVE, asm-generic/mman-common.h: a KV pool may be larger than what is ever written to."""


class Region:
    """`size` zero bytes at a fixed, 2 MiB aligned address until `close`. Pages are real once they are written."""

    def __init__(self, size: int, what: str, huge: bool) -> None:
        self.size = size
        try:
            self._map = mmap.mmap(-1, max(size, 1) + HUGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
        except (OSError, ValueError, OverflowError) as error:
            raise RuntimeFault(
                f"cannot reserve {size >> 20} MiB for the {what}; give it less, or use a larger machine"
            ) from error
        self.huge = huge and self._advise_huge()
        self._anchor: ctypes.c_char | None = ctypes.c_char.from_buffer(self._map)
        self.address = -(-ctypes.addressof(self._anchor) // HUGE) * HUGE

    def _advise_huge(self) -> bool:
        try:
            self._map.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a kernel without large pages: slower, still right
            return False
        return True

    def close(self) -> None:
        """Give the memory back. Nothing may point into it any more."""
        if self._anchor is not None:
            self._anchor = None
            self._map.close()


def view(address: int, count: int, code: str) -> memoryview:
    """`count` items at an address: code "i" (int32), "f" (float32), "B" (bytes). The region must outlive it."""
    size = {"i": 4, "f": 4, "B": 1}[code]
    block = (ctypes.c_char * (count * size)).from_address(address)
    return memoryview(block).cast("B").cast(code)  # type: ignore[arg-type]


class OnGpu:
    """A row-major array in a GPU's memory that lives as long as the memory does: what torch, CuPy and numba take without a copy.

    https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html, version 3. All work on it is done, so no stream is named.
    """

    def __init__(self, address: int, shape: tuple[int, ...], typestr: str) -> None:
        self.address, self.shape, self.typestr = address, shape, typestr

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": self.shape, "typestr": self.typestr, "data": (self.address, False), "version": 3, "strides": None}

    def __getitem__(self, rows: slice) -> "OnGpu":
        """Some rows, one behind the other."""
        first, stop, _ = rows.indices(self.shape[0])
        row = math.prod(self.shape[1:]) * int(self.typestr[2:])
        return OnGpu(self.address + first * row, (max(0, stop - first), *self.shape[1:]), self.typestr)


class Layout:
    """Places in one region, handed out in order at multiples of 64 bytes."""

    def __init__(self) -> None:
        self.size = 0

    def place(self, size: int) -> int:
        """The offset of the next `size` bytes."""
        offset = self.size
        self.size += -(-size // 64) * 64
        return offset
