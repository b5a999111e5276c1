"""What the runtime asks of a GPU: memory, code, and a list of work that is recorded once and replayed.

Two devices answer: cuda.CudaDevice, and the one of the tests, which runs the same lists in Triton's interpreter. Both give plain
addresses, so a program's steps look alike on either. A device belongs to one thread at a time; a replay returns when its work is done.
"""
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from .errors import RuntimeFault
from .program import Kernel

ALIGN = 256
"""Every allocation starts at a multiple: wide loads and whole cache lines may count on it."""


@dataclass(frozen=True)
class Launch:
    """A kernel over a grid of programs. params: one value for each of the kernel's own, a pointer as its address."""

    kernel: Kernel
    grid: tuple[int, int, int]
    params: tuple[int | float, ...]


@dataclass(frozen=True)
class Copy:
    """Bytes from the host's memory (`Device.host`) to the device's ("in"), or back ("out")."""

    target: int
    source: int
    bytes: int
    way: Literal["in", "out"]


Work = Launch | Copy


class Recorded(Protocol):
    """A list of work, ready to run as often as wanted. Its addresses are fixed: what they point to is not."""

    @property
    def bytes(self) -> int:
        """Memory it holds, for the budget of whoever keeps it."""
        ...

    def replay(self) -> None:
        """Run it, in order, to the end. Raises RuntimeFault where the device fails."""
        ...

    def close(self) -> None:
        """Give its memory back."""
        ...


class Device(Protocol):
    """A GPU, or what stands for one."""

    @property
    def name(self) -> str:
        """"NVIDIA H200", for messages and reports."""
        ...

    @property
    def arch(self) -> str:
        """"sm_90": what its code must be built for."""
        ...

    @property
    def driver_version(self) -> str:
        """Of the driver, "13.1", for reports."""
        ...

    @property
    def l2_bytes(self) -> int:
        """Bytes of its last cache before memory."""
        ...

    @property
    def torch_device(self) -> str:
        """What torch calls it, for ATen steps: "cuda:0"."""
        ...

    @property
    def torch_stream(self) -> int:
        """The stream that recordings are replayed on, as the driver numbers it: ATen steps go by it too. 0 where there is none."""
        ...

    def allocate(self, size: int, what: str) -> int:
        """Address of `size` bytes of zeros, until `close`. Raises RuntimeFault naming `what` and the room there is."""
        ...

    def host(self, size: int) -> int:
        """Address of `size` bytes of zeros in the host's memory that the device reads and writes by itself, until `close`."""
        ...

    def free_memory(self) -> int:
        """Bytes that can still be allocated."""
        ...

    def upload(self, address: int, data: "memoryview | bytes") -> None:
        """Host to device; the data may be given up at once."""
        ...

    def download(self, address: int, size: int) -> bytes:
        """Device to host."""
        ...

    def array(self, address: int, shape: tuple[int, int]) -> Any:
        """The float32 numbers there, where they are: nothing is copied, and nobody may write to it."""
        ...

    def fill(self, address: int, byte: int, size: int) -> None:
        """Set every byte of a range."""
        ...

    def load(self, kernel: Kernel, code: bytes) -> None:
        """Make a kernel known before work names it. Raises RuntimeFault where the device does not take the code."""
        ...

    def record(self, work: Sequence[Work]) -> Recorded:
        """Make a list ready for replays; nothing runs. Raises OutOfMemory where the device has no room for it."""
        ...

    def timed(self, recorded: Recorded, times: int, cold: tuple[int, int] | None = None) -> list[float]:
        """Microseconds of each of some replays. cold: address and bytes of memory that is filled before each, which is not timed."""
        ...

    def copy_rate(self) -> float:
        """Bytes a second that a large copy within its memory moves, read and written."""
        ...

    def close(self) -> None:
        """Give all memory back; what was recorded is of no use after."""
        ...


class OutOfMemory(RuntimeFault):
    """A device has no room for a recording; whoever keeps several can do with fewer. Bytes it takes at least, and that were free."""

    def __init__(self, message: str, wanted: int, free: int) -> None:
        super().__init__(message)
        self.wanted, self.free = wanted, free


def arch_fits(built: str, arch: str) -> bool:
    """Does a cubin for `built` run on `arch` ("sm_90")? On its own and later minor versions of a major; one with "a" on its own alone.

    Source: CUDA C programming guide, "Binary compatibility" and "Architecture-specific features".
    """
    code, device = (re.fullmatch(r"sm_(\d+)(\d)(a?)", name) for name in (built, arch))
    if not code or not device:
        return False
    return code[1] == device[1] and (code[2] == device[2] if code[3] else int(code[2]) <= int(device[2]))
