"""The CPU's memory behind a GPU's interface: a GPU program's buffers, copies and steps where there is no GPU.

It runs no kernel. With reference operators in their place (reference.py) it checks a program's memory plan, its padding and its inputs;
backends/triton/device.py runs the kernels as well, in Triton's interpreter. Each region has a margin on either side that nobody may
write, and the arena is filled with NaN before a replay: what a step reads without any other having written it shows.
"""
import ctypes
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..compiler.errors import CheckFailed
from ..runtime.device import ALIGN, Copy, Launch, Recorded, Work
from ..runtime.program import Kernel

_MARGIN, _MARK = 4096, 0xA5


@dataclass(frozen=True)
class _Memory:
    """A region with margins, and what it is for."""

    block: ctypes.Array
    address: int
    size: int
    what: str


class HostDevice:
    """Memory of the CPU for GPU programs of one architecture."""

    name = "no GPU"
    driver_version = "none"
    l2_bytes = 1 << 20
    torch_device, torch_stream = "cpu", 0

    def __init__(self, arch: str) -> None:
        self.arch = arch
        self._memory: list[_Memory] = []
        self._kernels: set[str] = set()

    def allocate(self, size: int, what: str) -> int:
        """Zeros with margins around them."""
        block = (ctypes.c_uint8 * (size + 2 * _MARGIN + ALIGN))()
        address = -(-(ctypes.addressof(block) + _MARGIN) // ALIGN) * ALIGN
        self._memory.append(_Memory(block, address, size, what))
        ctypes.memset(ctypes.addressof(block), _MARK, address - ctypes.addressof(block))
        ctypes.memset(address + size, _MARK, ctypes.addressof(block) + len(block) - address - size)
        return address

    def host(self, size: int) -> int:
        """As `allocate`: there is no other memory."""
        return self.allocate(size, "staging")

    def free_memory(self) -> int:
        """A quarter of the machine's memory."""
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4

    def upload(self, address: int, data: memoryview | bytes) -> None:
        """Copy into a region."""
        self.room(address, len(data))
        ctypes.memmove(address, bytes(data), len(data))

    def download(self, address: int, size: int) -> bytes:
        """Copy out of a region."""
        self.room(address, size)
        return ctypes.string_at(address, size)

    def array(self, address: int, shape: tuple[int, int]) -> np.ndarray:
        """The float32 numbers there, where they are."""
        self.room(address, 4 * math.prod(shape))
        found = np.ctypeslib.as_array((ctypes.c_float * math.prod(shape)).from_address(address)).reshape(shape)
        found.flags.writeable = False
        return found

    def fill(self, address: int, byte: int, size: int) -> None:
        """Set bytes of a region."""
        self.room(address, size)
        ctypes.memset(address, byte, size)

    def load(self, kernel: Kernel, code: bytes) -> None:
        """Note that the kernel is known."""
        if not code.startswith(b"\x7fELF"): raise CheckFailed(f"the code of kernel {kernel.name} is no cubin")
        self._kernels.add(kernel.hash)

    def record(self, work: Sequence[Work]) -> "Recording":
        """Keep the list; what it names must be there."""
        for item in work:
            if isinstance(item, Copy):
                self.room(item.target, item.bytes)
                self.room(item.source, item.bytes)
            elif item.kernel.hash not in self._kernels: raise CheckFailed(f"kernel {item.kernel.name} is launched and was never loaded")
        return Recording(self, tuple(work))

    def launch(self, launch: Launch) -> None:
        """Never: there is nothing that runs it."""
        raise CheckFailed(f"kernel {launch.kernel.name} cannot run on the CPU")

    def timed(self, recorded: Recorded, times: int, cold: tuple[int, int] | None = None) -> list[float]:
        """Of this machine, so of no use for any GPU."""
        found = []
        for _ in range(times):
            if cold: self.fill(cold[0], 0, cold[1])
            start = time.perf_counter()
            recorded.replay()
            found.append((time.perf_counter() - start) * 1e6)
        return found

    def copy_rate(self) -> float:
        """Of this machine: one large copy."""
        size = 64 << 20
        source, target = (ctypes.c_uint8 * size)(), (ctypes.c_uint8 * size)()
        start = time.perf_counter()
        ctypes.memmove(target, source, size)
        return 2 * size / (time.perf_counter() - start)

    def close(self) -> None:
        """Give the memory back."""
        self._memory.clear()

    def room(self, address: int, size: int) -> int:
        """Bytes from an address to the end of its region. CheckFailed where `size` bytes do not lie in one."""
        for memory in self._memory:
            left = memory.address + memory.size - address
            if memory.address <= address and 0 <= size <= left: return left
        raise CheckFailed(f"{size} bytes at {address:#x} lie in no region of the device")

    def poison_arena(self) -> None:
        """NaN in every float, the least number in every signed one: nothing of the last replay is left."""
        for memory in self._memory:
            if memory.what == "arena": ctypes.memset(memory.address, 0xFF, memory.size)

    def check_margins(self) -> None:
        """CheckFailed where something was written outside every region."""
        for memory in self._memory:
            start = ctypes.addressof(memory.block)
            for first, size in ((start, memory.address - start),
                                (memory.address + memory.size, start + len(memory.block) - memory.address - memory.size)):
                if ctypes.string_at(first, size) != bytes([_MARK]) * size: raise CheckFailed(f"a step wrote outside the {memory.what}")


@dataclass
class Recording:
    """A list of work for one device."""

    device: HostDevice
    work: tuple[Work, ...]

    @property
    def bytes(self) -> int:
        """What a pointer to each item takes."""
        return 8 * len(self.work)

    def replay(self) -> None:
        """Run the list and look at the margins. Inputs begin a step: the arena is poisoned then."""
        for item in self.work:
            if isinstance(item, Copy):
                if item.way == "in": self.device.poison_arena()
                ctypes.memmove(item.target, item.source, item.bytes)
            else: self.device.launch(item)
        self.device.check_margins()

    def close(self) -> None:
        """Forget the list."""
        self.work = ()
