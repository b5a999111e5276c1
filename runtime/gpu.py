"""Run an artifact on a GPU: weights uploaded once, one recording per bucket, replayed at the bucket's own sizes.

Nothing moves after loading: arena, KV pool, inputs and outputs keep their addresses, which the recordings hold. A step writes its inputs
into pinned memory on the host; the recording copies them in, runs every kernel and copies the tokens out. Logits stay on the device
until they are asked for. Which device it is does not matter here: see device.py.
"""
import hashlib
import mmap
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from .artifact import WEIGHTS, Artifact
from .batch import Work, fill, pad
from .buffers import Layout, view
from .device import Copy, Device, Launch, Recorded, arch_fits
from .errors import RuntimeFault
from .places import FLOATS, LAST_INPUT, Places, Region, step_io
from .program import Kernel, Program, Step
from .table import ATEN, live_view

if TYPE_CHECKING:
    from .aten_step import View

_WINDOW = 64 << 20
"""Bytes of the weights file mapped, hashed and uploaded at a time."""

class GpuExecutor:
    """An artifact's code and memory on a device, ready to run any of its programs."""

    threads = 1                      # of the host
    cache_bytes = 2 << 30            # of the replay cache: a recording of a 30-layer model takes a few MB

    def __init__(self, artifact: Artifact, device: Device, kv_blocks: int) -> None:
        self.artifact = artifact
        self.device = device
        self.kv_blocks = kv_blocks
        self._where = str(artifact.path)
        self._programs = dict[str, Program]()                              # in place of the artifact's
        self._open = True
        try:
            self._require_arch()
            self._allocate()
            self._kernels = {kernel.hash: kernel for kernel in artifact.manifest.kernels}
            for kernel in artifact.manifest.kernels:
                if kernel.file: device.load(kernel, artifact.cubin(kernel.file))
            self.upload(artifact)
        except BaseException:
            self.close()
            raise

    def _require_arch(self) -> None:
        built = next((kernel.arch for kernel in self.artifact.manifest.kernels if kernel.file), self.device.arch)
        if not arch_fits(built, self.device.arch):
            raise RuntimeFault(f"{self._where}: its kernels are built for {built}, {self.device.name} is {self.device.arch}; compile it "
                               "again for this GPU (infc targets lists them)")

    def _allocate(self) -> None:
        manifest, device = self.artifact.manifest, self.device
        io = step_io(manifest)
        staged = io.offsets["token"] + 4 * io.counts["token"]              # logits are fetched when they are asked for
        self._host = device.host(staged)
        self._io = io.at(device.allocate(io.bytes, "inputs and outputs"))
        on_host = io.at(self._host)
        self.views = {name: view(place.address, place.bytes // 4, "f" if name in FLOATS else "i")
                      for name, place in on_host.items() if name != "logits"}
        self._arena = Region(0, max((b.arena_bytes for b in manifest.buckets), default=0))
        if self._arena.bytes: self._arena = Region(device.allocate(self._arena.bytes, "arena"), self._arena.bytes)
        layout = Layout()
        offsets = {b.name: layout.place(b.block_bytes * self.kv_blocks) for b in manifest.kv}
        base = device.allocate(layout.size, "KV pool") if layout.size else 0
        self.kv = {b.name: (base + offsets[b.name], b.block_bytes) for b in manifest.kv}
        size = manifest.weights.data_bytes if manifest.weights else 0
        self._weights = Region(device.allocate(size, "weights") if size else 0, size)

    def upload(self, artifact: Artifact) -> None:
        """Copy an artifact's weights to where this one's lie, hashed on the way. RuntimeFault where a byte differs, too late."""
        info = artifact.manifest.weights
        if info is None: return
        digest = hashlib.sha256()
        with artifact.weights() as span, ThreadPoolExecutor(1) as hasher:
            begin, end = span.offset, span.offset + info.data_offset + info.data_bytes
            for done in range(begin, end, _WINDOW):
                size = min(_WINDOW, end - done)
                page = done // mmap.PAGESIZE * mmap.PAGESIZE
                with mmap.mmap(span.fd, done - page + size, mmap.MAP_PRIVATE, mmap.PROT_READ, offset=page) as window, \
                        memoryview(window) as whole, whole[done - page:] as data:
                    hashed = hasher.submit(digest.update, data)
                    skip = max(0, begin + info.data_offset - done)         # the header is hashed and stays on the host
                    try:
                        if skip < size:
                            with data[skip:] as part:
                                self.device.upload(self._weights.address + done + skip - begin - info.data_offset, part)
                    finally:
                        hashed.result()                                    # the window cannot be closed while it is read
        if digest.hexdigest() != artifact.manifest.files[WEIGHTS].sha256:
            raise RuntimeFault(f"{artifact.path}: {WEIGHTS} was altered: its sha256 differs from the manifest's; copy the artifact again, "
                               "or compile it again")

    @property
    def places(self) -> tuple[int, ...]:
        """Where everything lies: a recording made for other places must not run."""
        return self._host, self._io["input_ids"].address, self._arena.address, self._weights.address, *(at for at, _ in self.kv.values())

    def fill(self, works: Sequence[Work], live: Mapping[str, int], bucket: Mapping[str, int]) -> None:
        """Write the inputs of a step, padded from its live sizes to the bucket's."""
        fill(self.views, works, bucket["M"])
        pad(self.views, live, bucket)

    def take(self, programs: Mapping[str, Program]) -> None:
        """From the next recordings on run these, by bucket, in place of the artifact's: other choices over the same kernels and buffers."""
        self._programs = dict(programs)

    def table(self, bucket: str) -> "GpuTable":
        """Record a bucket. Raises RuntimeFault where the program does not fit the artifact, OutOfMemory where the device is full."""
        program = self._programs.get(bucket) or self.artifact.program(bucket)
        weights = {name: Region(self._weights.address + p.start, p.stop - p.start) for name, p in self.artifact.places.items()}
        places = Places(self._where, self._arena, weights, {name: Region(*place) for name, place in self.kv.items()}, self._io)
        return GpuTable(program, self._kernels, self.device, places, self._copies(program), {"P": self.kv_blocks})

    def _copies(self, program: Program) -> tuple[Copy, Copy]:
        """Inputs in, tokens out: as much of them as the bucket has."""
        base, size = self._io["input_ids"].address, self._io[LAST_INPUT].address - self._io["input_ids"].address
        size += 4 * program.bucket["N"] * program.bucket["M"]
        token = self._io["token"].address
        return (Copy(base, self._host, size, "in"),
                Copy(self._host + token - base, token, 4 * program.bucket["R"], "out"))

    def require_ready(self) -> None:
        """Raise RuntimeFault where the model is closed."""
        if not self._open: raise RuntimeFault(f"{self._where}: the model is closed; load it again")

    def clear(self, first: int, count: int, byte: int) -> None:
        """Set every byte of `count` KV blocks from `first` on; not to zeros, as kernels here load no key behind a sequence's end, and a
        block costs 60 calls.
        """
        if not byte: return
        for address, size in self.kv.values(): self.device.fill(address + first * size, byte, count * size)

    def tokens(self, rows: int) -> list[int]:
        """The first `rows` tokens of the last step."""
        return self.views["token"][:rows].tolist()

    def logits(self, rows: int, copy: bool = True) -> Any:
        """The first `rows` rows of the last step's logits, float32 [rows, vocab]: a copy, which stays what it is; or where they lie on
        the device, until the next step writes there.
        """
        if not copy: return self.device.array(self._io["logits"].address, (rows, self.artifact.manifest.model.vocab))
        import numpy as np

        vocab = self.artifact.manifest.model.vocab
        return np.frombuffer(self.device.download(self._io["logits"].address, 4 * rows * vocab), np.float32).reshape(rows, vocab).copy()

    def read_weights(self) -> int:
        """Nanoseconds that reading every weight byte takes at the rate at which the device copies: the limit of a decode step."""
        return int(self._weights.bytes / self.device.copy_rate() * 1e9)

    def memory(self) -> dict[str, int]:
        """Bytes on the device for each purpose."""
        kv = sum(size * self.kv_blocks for _, size in self.kv.values())
        return {"weights": self._weights.bytes, "arena": self._arena.bytes, "kv": kv}

    def close(self) -> None:
        """Give all memory back."""
        if self._open:
            self._open = False
            self.views = {}
            self.device.close()
            self.artifact.close()


class GpuTable:
    """One bucket, recorded. What runs between two ATen steps, usually all of it, is one recording.

    An ATen step is in none: torch chooses kernels and memory anew each time it is called. It reads and writes the bucket's own buffers,
    at the bucket's sizes, on the stream of the recordings before and after it, and needs torch where the artifact is loaded.
    """

    def __init__(
        self, program: Program, kernels: Mapping[str, Kernel], device: Device, places: Places, copies: tuple[Copy, Copy],
        sizes: Mapping[str, int],
    ) -> None:
        """sizes: of dims that are not the bucket's. Raises RuntimeFault where a buffer is not there."""
        self.program = program
        self._kernels = kernels
        self._device = device
        self._copies = copies
        self._addresses = [places.address(b, program) for b in program.buffers]
        self._dims = {**program.bucket, **sizes}
        self._parts: list[Recorded | tuple[int, str]] = []                 # recordings, and (step, symbol) of ATen steps
        self._launches: dict[int, Launch] = {}
        work: list[Launch | Copy] = [copies[0]]
        for index, step in enumerate(program.steps):
            kernel = kernels[step.kernel]
            if kernel.symbol.startswith(ATEN):
                _aten().require(kernel.symbol, device.torch_device)        # now, as the model is loaded
                self._record(work)
                work = []
                self._parts.append((index, kernel.symbol))
            else:
                work.append(launch := self._launch(step))
                self._launches[index] = launch
        self._record([*work, copies[1]])

    def _launch(self, step: Step) -> Launch:
        params: list[int | float] = [self._addresses[j] for j in step.args]
        for at, value in step.scalars: params.insert(at, value)            # in order of their places
        return Launch(self._kernels[step.kernel], (step.grid[0], step.grid[1], step.grid[2]), tuple(params))

    def record(self, steps: Sequence[Step]) -> Recorded:
        """A recording of other steps over the program's buffers; whoever asks closes it."""
        return self._device.record([self._launch(step) for step in steps])

    def _record(self, work: Sequence[Launch | Copy]) -> None:
        if work: self._parts.append(self._device.record(work))

    @property
    def bytes(self) -> int:
        """Memory of the recordings."""
        return sum(part.bytes for part in self._parts if not isinstance(part, tuple))

    def run(self, dims: Mapping[str, int]) -> None:
        """Run every step once, at the bucket's sizes whatever the live ones are."""
        for part in self._parts:
            if isinstance(part, tuple): self._call_aten(*part)
            else: part.replay()

    def profile(self, dims: Mapping[str, int]) -> list[int]:
        """Run every step once, then each alone a few times; nanoseconds of each, the launch of a recording of one included."""
        self.run(dims)
        return [self._time(index) for index in range(len(self.program.steps))]

    def _time(self, index: int) -> int:
        step = self._launches.get(index)
        if step is None: return self._time_aten(index)
        alone = self._device.record([step])
        try:
            return int(sorted(self._device.timed(alone, 5))[2] * 1e3)
        finally:
            alone.close()

    def _time_aten(self, index: int) -> int:
        """From the host's side, until its result is there."""
        step, times = self.program.steps[index], list[int]()
        for _ in range(5):
            start = perf_counter_ns()
            self.run_step(index, self._dims)
            self._device.download(self._addresses[step.args[-1]], 1)
            times.append(perf_counter_ns() - start)
        return sorted(times)[2]

    def sizes(self, dims: Mapping[str, int]) -> Mapping[str, int]:
        """The sizes kernels see: the bucket's."""
        return self._dims

    def begin(self) -> None:
        """Copy the inputs in, for whoever runs steps one by one."""
        self._once(self._copies[0])

    def end(self) -> None:
        """Copy the tokens out."""
        self._once(self._copies[1])

    def _once(self, work: Launch | Copy) -> None:
        recorded = self._device.record([work])
        recorded.replay()
        recorded.close()

    def run_step(self, index: int, dims: Mapping[str, int]) -> None:
        """Run one step alone, for whoever looks for the one that is wrong."""
        symbol = next((part[1] for part in self._parts if isinstance(part, tuple) and part[0] == index), None)
        self._once(self._launches[index]) if symbol is None else self._call_aten(index, symbol)

    def views(self, index: int, dims: Mapping[str, int]) -> "list[View]":
        """The buffers one step reads and writes, at the bucket's sizes, in its kernel's order."""
        return [live_view(self.program.buffers[j], self._addresses[j], self._dims) for j in self.program.steps[index].args]

    def _call_aten(self, index: int, symbol: str) -> None:
        device = self._device
        _aten().call(symbol, self.views(index, self._dims), self._dims, device.torch_device, device.torch_stream)

    def close(self) -> None:
        """Give the recordings back."""
        for part in self._parts:
            if not isinstance(part, tuple): part.close()
        self._parts = []


def _aten() -> Any:
    from . import aten_step  # imports torch when it runs

    return aten_step
