"""CudaDevice: an NVIDIA GPU through the vendor's own bindings to the CUDA driver; a list of work is one CUDA graph.

All goes by one stream of the device's own, which orders copies, fills and replays. The driver's plain cuMemcpy and cuMemset go by the
default stream, which this one does not wait for, and may return before the last byte is there. The context is the primary one, so torch
in the same process lives in it too; it is the current one of a thread that called the device.
"""
import ctypes
import importlib
import os
import struct
import weakref
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from .buffers import OnGpu, view
from .device import ALIGN, Copy, Launch, OutOfMemory, Recorded, Work, arch_fits
from .errors import RuntimeFault
from .program import Kernel

_DIRECT = 64 << 10
"""Up to here the driver copies pageable memory aside by itself, and pins none of it (CUDA driver API, "API synchronization behavior")."""

_STAGE = 8 << 20
"""Bytes of each of the two pinned buffers that larger data goes through, one filled while the other is read: small beside one upload."""

_FREE_SHARED = 48 << 10
"""Shared memory a program gets without asking (CUDA C programming guide, "Compute capabilities")."""

_COPIED = 1 << 30
"""Bytes `copy_rate` moves: 20 times the L2 cache of an H200."""

_APPENDED = 2
"""Pointers Triton appends to a kernel's own parameters (scratch memory and a profiler's, of which no kernel has any): null."""

_BITS = {f"{sign}{bits}": bits for sign in "usb" for bits in (8, 16, 32, 64)}

# cuda.h of 13.0, of most of them: "any further CUDA work will return the same error [...] the process must be terminated and relaunched".
_LOST = {f"CUDA_ERROR_{name}" for name in (
    "CONTAINED", "ILLEGAL_ADDRESS", "LAUNCH_TIMEOUT", "HARDWARE_STACK_ERROR", "ILLEGAL_INSTRUCTION", "MISALIGNED_ADDRESS",
    "INVALID_ADDRESS_SPACE", "INVALID_PC", "LAUNCH_FAILED", "EXTERNAL_DEVICE", "ASSERT", "ECC_UNCORRECTABLE", "NVLINK_UNCORRECTABLE")}

_OUT_OF_MEMORY = "CUDA_ERROR_OUT_OF_MEMORY"
_NEWER_CODE = "the driver is older than the code, or the code is damaged: update the driver, or compile the model again"
_HINTS = {
    "CUDA_ERROR_NO_DEVICE": "load the artifact where there is a GPU (or is CUDA_VISIBLE_DEVICES empty, the container without GPUs?)",
    "CUDA_ERROR_NOT_INITIALIZED": "CUDA does not live on in a forked child; load in a process that was started anew (\"spawn\")",
    "CUDA_ERROR_DEVICE_UNAVAILABLE": "another process holds it alone (nvidia-smi shows which)",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "the driver was updated under a running system; restart it",
    _OUT_OF_MEMORY: "give it less, or use a larger GPU",
    **dict.fromkeys((f"CUDA_ERROR_{name}" for name in (
        "INVALID_IMAGE", "NO_BINARY_FOR_GPU", "UNSUPPORTED_PTX_VERSION", "INVALID_PTX", "CALL_REQUIRES_NEWER_DRIVER")), _NEWER_CODE),
    "CUDA_ERROR_NOT_FOUND": "compile the model again",
    **dict.fromkeys(_LOST, "the GPU's context is lost, with all that was in it: load the model again in a new process"),
}


class _NoRoom(RuntimeFault):
    """The driver is out of memory."""


class CudaDevice:
    """A GPU of this machine: a runtime.device.Device. `index` counts what CUDA_VISIBLE_DEVICES leaves.

    `driver` is cuda.bindings.driver, which nothing imports before. Raises RuntimeFault where there is no such package, driver or GPU.
    """

    def __init__(self, index: int = 0, driver: Any = None) -> None:
        self._cu = cu = driver or _bindings()
        self.name, self.torch_device, self.driver_version, self._lost = "CUDA", f"cuda:{index}", "?", ""
        self._functions: dict[str, tuple[Any, int]] = {}              # Kernel.hash -> function, bytes of dynamic shared memory
        self._stages: list[tuple[memoryview, int, Any]] = []          # pinned memory, its address, the event after its last copy
        self.call("starting the driver", cu.cuInit, 0)
        version = self.call("asking for its version", cu.cuDriverGetVersion)
        self.driver_version = f"{version // 1000}.{version % 1000 // 10}"
        count = self.call("counting GPUs", cu.cuDeviceGetCount)
        if not 0 <= index < count:
            raise RuntimeFault(f"GPU {index} is asked for, and CUDA sees {count} here, counted from 0; see CUDA_VISIBLE_DEVICES")
        self._device = device = self.call(f"opening GPU {index}", cu.cuDeviceGet, index)
        self.name = self.call("asking for its name", cu.cuDeviceGetName, 256, device).split(b"\0")[0].decode()
        self.capability = (self._attribute("COMPUTE_CAPABILITY_MAJOR"), self._attribute("COMPUTE_CAPABILITY_MINOR"))
        self.arch = "sm_{}{}".format(*self.capability)
        self.multiprocessors: int = self._attribute("MULTIPROCESSOR_COUNT")
        self.l2_bytes: int = self._attribute("L2_CACHE_SIZE")
        self.total_memory: int = self.call("asking for its memory", cu.cuDeviceTotalMem, device)
        self._held = _Held(cu, device, self.call("opening its primary context", cu.cuDevicePrimaryCtxRetain, device))
        # a device dropped without close() frees its memory too. Not at exit: the driver does that, and may be gone before us.
        self._close = weakref.finalize(self, self._held.close)
        self._close.atexit = False
        try:
            self.enter()
            self.stream = self.call("making a stream", cu.cuStreamCreate, cu.CUstream_flags.CU_STREAM_NON_BLOCKING.value)
            self._held.keep(cu.cuStreamDestroy, self.stream)
        except BaseException:
            self.close()
            raise

    @property
    def torch_stream(self) -> int:
        """Its own stream, which torch may send work to: both live in the primary context."""
        return int(self.stream)

    def _attribute(self, name: str) -> int:
        kind = getattr(self._cu.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return self.call(f"asking for {name}", self._cu.cuDeviceGetAttribute, kind, self._device)

    def call(self, what: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """The (first) value a function of the driver gives. RuntimeFault says what it was called for, what it said, and what to do."""
        try:
            code, *values = function(*arguments)
        except RuntimeError as error:                                 # how the bindings say that the driver has no such function
            raise RuntimeFault(f"{self.name}: {what} fails with driver {self.driver_version} ({error}); update the driver, or use "
                               "cuda-bindings of its version") from error
        if code:
            raise self._fault(what, code)
        return values[0] if values else None

    def _fault(self, what: str, code: Any) -> RuntimeFault:
        text = self._cu.cuGetErrorString(code)[1] or b"no description"
        message = f"{self.name}: {what} fails: {code.name} ({text.decode()})" + (f"; {_HINTS[code.name]}" if code.name in _HINTS else "")
        if code.name in _LOST:
            self._lost = message
        return _NoRoom(message) if code.name == _OUT_OF_MEMORY else RuntimeFault(message)

    def enter(self) -> None:
        """Make the context this thread's. Raises RuntimeFault where the device is of no use any more."""
        if os.getpid() != self._held.pid:
            raise RuntimeFault(f"{self.name}: opened before this process was forked, and CUDA does not live on in a child; load the model "
                               "in a process that was started anew (\"spawn\")")
        if self._held.closed:
            raise RuntimeFault(f"{self.name}: the device is closed; load the model again")
        if self._lost:
            raise RuntimeFault(self._lost)
        self.call("making its context current", self._cu.cuCtxSetCurrent, self._held.context)

    def _settle(self, what: str) -> None:
        self.call(what, self._cu.cuStreamSynchronize, self.stream)

    def allocate(self, size: int, what: str) -> int:
        """Address of `size` zeros; a multiple of 256, as all cuMemAlloc gives (CUDA C programming guide, "Device memory accesses")."""
        self.enter()
        try:
            address = int(self.call(f"allocating the {what}", self._cu.cuMemAlloc, max(size, 1)))
        except _NoRoom as fault:
            raise RuntimeFault(f"{self.name}: no room for the {what}: it takes {_mib(size)}, and {_mib(self.free_memory())} of "
                               f"{_mib(self.total_memory)} are free; give it less, or use a larger GPU") from fault
        self._held.keep(self._cu.cuMemFree, address)
        self.fill(address, 0, size)
        return address

    def host(self, size: int) -> int:
        """Address of `size` zeros in pinned memory; the device knows it by the same address."""
        self.enter()
        address = self.call(f"pinning {_mib(size)} of the host's memory", self._cu.cuMemHostAlloc, max(size, 1), 0)
        self._held.keep(self._cu.cuMemFreeHost, address)
        ctypes.memset(address, 0, size)
        return address

    def free_memory(self) -> int:
        """Bytes that can still be allocated, by whoever asks first."""
        self.enter()
        return self.call("asking for free memory", self._cu.cuMemGetInfo)

    def upload(self, address: int, data: memoryview | bytes) -> None:
        """Host to device. Large data goes through pinned buffers: a mapped file is read once, in order, and never pinned itself."""
        self.enter()
        cu, source, what = self._cu, memoryview(data).cast("B"), "copying to the device"
        if 0 < source.nbytes <= _DIRECT:
            self.call(what, cu.cuMemcpyHtoDAsync, address, source, source.nbytes, self.stream)
        elif source.nbytes:
            while len(self._stages) < 2:
                place = self.host(_STAGE)
                event = self.call("making an event", cu.cuEventCreate, cu.CUevent_flags.CU_EVENT_DISABLE_TIMING.value)
                self._held.keep(cu.cuEventDestroy, event)
                self._stages.append((view(place, _STAGE, "B"), place, event))
            for start in range(0, source.nbytes, _STAGE):
                room, place, event = self._stages[start // _STAGE % 2]
                piece = source[start:start + _STAGE]
                self.call(what, cu.cuEventSynchronize, event)         # until what it held before has left it
                room[:piece.nbytes] = piece
                self.call(what, cu.cuMemcpyHtoDAsync, address + start, place, piece.nbytes, self.stream)
                self.call(what, cu.cuEventRecord, event, self.stream)
        self._settle(what)

    def download(self, address: int, size: int) -> bytes:
        """Device to host."""
        self.enter()
        found = bytearray(size)
        if size:
            self.call("copying from the device", self._cu.cuMemcpyDtoHAsync, found, address, size, self.stream)
            self._settle("copying from the device")
        return bytes(found)

    def array(self, address: int, shape: tuple[int, int]) -> OnGpu:
        """The float32 numbers there, where they are."""
        return OnGpu(address, shape, "<f4")

    def fill(self, address: int, byte: int, size: int) -> None:
        """Set every byte of a range."""
        self.enter()
        if size:
            self.call("filling memory", self._cu.cuMemsetD8Async, address, byte, size, self.stream)
            self._settle("filling memory")

    def load(self, kernel: Kernel, code: bytes) -> None:
        """Make a kernel known by its hash. Raises RuntimeFault where the code is not for this GPU, its driver, or too large for it."""
        self.enter()
        if kernel.hash in self._functions:
            return
        cu, what = self._cu, f"loading kernel {kernel.name}, built for {kernel.arch}, with driver {self.driver_version}"
        if not arch_fits(kernel.arch, self.arch):
            raise RuntimeFault(f"kernel {kernel.name} is built for {kernel.arch}, and this machine's {self.name} is {self.arch}; compile "
                               "the model for it, or load it where there is such a GPU")
        module = self.call(what, cu.cuModuleLoadData, code)
        self._held.keep(cu.cuModuleUnload, module)
        function = self.call(f"{what}, symbol {kernel.symbol}", cu.cuModuleGetFunction, module, kernel.symbol.encode())
        shared = kernel.shared_bytes or 0
        static = self.call(what, cu.cuFuncGetAttribute, cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function)
        if shared > _FREE_SHARED:                                     # as Triton's own launcher does it
            if shared > (most := self._attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")):
                raise RuntimeFault(f"kernel {kernel.name} needs {shared} bytes of shared memory, and a program on {self.name} gets {most}; "
                                   "compile the model for this GPU")
            self.call(what, cu.cuFuncSetCacheConfig, function, cu.CUfunc_cache.CU_FUNC_CACHE_PREFER_SHARED)
            self.call(what, cu.cuFuncSetAttribute, function,
                      cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared - static)
        self._functions[kernel.hash] = function, max(0, shared - static)

    def record(self, work: Sequence[Work]) -> "CudaRecording":
        """One CUDA graph, a chain in the order of the list, its code and tables already on the device. OutOfMemory as Device says.

        Its nodes are added one by one, not captured from a stream. A capture is a state of a thread, and is broken by what it knows
        nothing of: Python's collector freeing somebody's tensor, a library that allocates. A graph is data until it is instantiated,
        an error names the step it is at, and there is nothing to unwind but the graph.
        """
        cu, before = self._cu, self.free_memory()
        given = sum(8 * len(item.params) for item in work if isinstance(item, Launch))
        graph, made, node = self.call("making a graph", cu.cuGraphCreate, 0), None, None
        try:
            for place, item in enumerate(work):
                if isinstance(item, Launch) or item.bytes:
                    node = self._add(graph, [node] if node else [], item, f"step {place} of {len(work)}")
            made = self.call("instantiating a graph", cu.cuGraphInstantiate, graph, 0)
            self._held.keep(cu.cuGraphExecDestroy, made)
            self.call("uploading a graph", cu.cuGraphUpload, made, self.stream)
            self._settle("uploading a graph")
        except BaseException as error:
            if made is not None:
                self._held.free(cu.cuGraphExecDestroy, made)
            if isinstance(error, _NoRoom):
                raise OutOfMemory(f"no room for a graph of {len(work)} steps: {error}", given, before) from error
            raise
        finally:
            cu.cuGraphDestroy(graph)
        return CudaRecording(self, made, max(before - self.free_memory(), given))

    def _add(self, graph: Any, after: list[Any], item: Work, where: str) -> Any:
        cu = self._cu
        if isinstance(item, Copy):
            return self.call(f"{where}, a copy of {item.bytes} bytes", cu.cuGraphAddMemcpyNode, graph, after, len(after),
                             copy_node(cu, item), self._held.context)
        if item.kernel.hash not in self._functions:
            raise RuntimeFault(f"{self.name}: {where} runs kernel {item.kernel.name}, which was not loaded; compile the model again")
        kept = pack(item.kernel, item.params)                         # until the call has copied them
        node = kernel_node(cu, item, *self._functions[item.kernel.hash], ctypes.addressof(kept[1]))
        return self.call(f"{where}, kernel {item.kernel.name} over {item.grid}", cu.cuGraphAddKernelNode, graph, after, len(after), node)

    def timed(self, recorded: Recorded, times: int, cold: tuple[int, int] | None = None) -> list[float]:
        """Microseconds of each of `times` replays sent one behind the other, so that the device waits for no host; one more goes before.

        cold: of each from its own start, behind a fill of that memory, which takes the place of all else in the L2.
        """
        self.enter()
        assert isinstance(recorded, CudaRecording)
        return self._spans(recorded.launch, times, cold and (
            lambda: self.call("filling memory", self._cu.cuMemsetD8Async, cold[0], 0, cold[1], self.stream)))

    def copy_rate(self) -> float:
        """Bytes/s its memory moves for the driver's own copy of 1 GiB, reads and writes counted; the best of ten."""
        size = min(_COPIED, self.free_memory() // 4) // ALIGN * ALIGN
        both = self.allocate(2 * size, "copy that is timed")
        try:
            return 2e6 * size / min(self._spans(
                lambda: self.call("copying", self._cu.cuMemcpyDtoDAsync, both + size, both, size, self.stream), 10))
        finally:
            self._held.free(self._cu.cuMemFree, both)

    def _spans(self, run: Callable[[], object], times: int, before: Callable[[], object] | None = None) -> list[float]:
        """Microseconds between the ends of `times + 1` runs on the stream; or of each run alone, with something `before` it."""
        cu, each = self._cu, 2 if before else 1
        count, kind = each * (times + 1), cu.CUevent_flags.CU_EVENT_DEFAULT.value
        events = [self.call("making an event", cu.cuEventCreate, kind) for _ in range(count)]
        try:
            for at in range(0, len(events), each):
                if before:
                    before()
                    self.call("timing", cu.cuEventRecord, events[at], self.stream)
                run()
                self.call("timing", cu.cuEventRecord, events[at + each - 1], self.stream)
            self._settle("timing")
            pairs = [*pairwise(events)][2 * (each - 1)::each]              # of neighbours; or starts and ends, the first aside
            return [1000 * self.call("timing", cu.cuEventElapsedTime, *pair) for pair in pairs]
        finally:
            for event in events:
                cu.cuEventDestroy(event)

    def close(self) -> None:
        """Give all memory back."""
        self._functions.clear()
        self._stages.clear()
        self._close()                                                 # once: it does nothing when called again


class CudaRecording:
    """A graph on the device: a replay is one launch and one wait. `bytes` is what free memory fell by as it was made, or its parameters."""

    def __init__(self, device: CudaDevice, graph: Any, size: int) -> None:
        self.bytes = size
        self._device, self._graph = device, graph
        cu, held = device._cu, device._held
        self._launch, self._wait = cu.cuGraphLaunch, cu.cuStreamSynchronize
        self._free = weakref.finalize(self, held.free, cu.cuGraphExecDestroy, graph)
        self._free.atexit = False

    def launch(self) -> None:
        """Send it to the device's stream, in a context that was entered."""
        if self._graph is None:
            raise RuntimeFault(f"{self._device.name}: the recording is closed; record it again")
        self._device.call("launching a graph", self._launch, self._graph, self._device.stream)

    def replay(self) -> None:
        """Run it to its end."""
        self._device.enter()
        self.launch()
        self._device.call("replaying a graph", self._wait, self._device.stream)

    def close(self) -> None:
        """Give its memory back."""
        self._graph = None
        self._free()


class _Held:
    """What is to be given back, the latest first. It outlives the device, as the device's finalizer must."""

    def __init__(self, cu: Any, device: Any, context: Any) -> None:
        self.cu, self.device, self.context = cu, device, context
        self.pid, self.closed = os.getpid(), False
        self._handles: dict[tuple[Callable[[Any], Any], int], Any] = {}

    def keep(self, free: Callable[[Any], Any], handle: Any) -> None:
        """Remember to call free(handle)."""
        self._handles[free, int(handle)] = handle

    def free(self, free: Callable[[Any], Any], handle: Any) -> None:
        """Do it now, if it was not done. What the driver answers does not matter: a lost context has nothing left to free."""
        if os.getpid() == self.pid and self._handles.pop((free, int(handle)), None) is not None:
            self.cu.cuCtxPushCurrent(self.context)                    # a finalizer runs in any thread, and leaves it as it was
            free(handle)
            self.cu.cuCtxPopCurrent()

    def close(self) -> None:
        """Free all, and the context where nobody else in the process uses it."""
        if os.getpid() != self.pid or self.closed:                    # a forked child has the handles, but not what they stand for
            return
        self.closed = True
        for (free, _), handle in reversed(list(self._handles.items())):
            self.free(free, handle)
        self.cu.cuDevicePrimaryCtxRelease(self.device)
        _, current = self.cu.cuCtxGetCurrent()
        _, _, active = self.cu.cuDevicePrimaryCtxGetState(self.device)
        if current is not None and int(current) == int(self.context) and not active:
            self.cu.cuCtxSetCurrent(None)                             # it is gone: whoever comes next must not find it


def pack(kernel: Kernel, params: Sequence[int | float]) -> "tuple[ctypes.Array[ctypes.c_uint64], ctypes.Array[ctypes.c_void_p]]":
    """The values of a launch, each in the low end of 8 bytes, and their addresses; the two appended ones are null."""
    kinds = kernel.params[:-_APPENDED]
    if len(kinds) != len(params):
        raise RuntimeFault(f"kernel {kernel.name} takes {len(kinds)} values, and is launched with {len(params)}; compile the model again")
    values = (ctypes.c_uint64 * len(kernel.params))()
    for place, (kind, value) in enumerate(zip(kinds, params, strict=True)):
        try:
            values[place] = _bits(kind, value)
        except (ValueError, OverflowError) as error:
            raise RuntimeFault(f"kernel {kernel.name}: parameter {place} is {kind}, and is given {value!r}; compile the model again"
                               ) from error
    start = ctypes.addressof(values)
    return values, (ctypes.c_void_p * len(values))(*range(start, start + 8 * len(values), 8))


def _bits(kind: str, value: int | float) -> int:
    if kind == "f32":
        return struct.unpack("<I", struct.pack("<f", value))[0]
    bits = _BITS.get(kind, 0)
    if not isinstance(value, int) or not -(1 << bits >> 1) <= value < 1 << bits:
        raise ValueError
    return value


def kernel_node(cu: Any, launch: Launch, function: Any, shared: int, params: int) -> Any:
    """CUDA_KERNEL_NODE_PARAMS of a launch; `params` is the address of its values' addresses."""
    node = cu.CUDA_KERNEL_NODE_PARAMS()
    node.func, node.kernelParams, node.sharedMemBytes = function, params, shared
    node.gridDimX, node.gridDimY, node.gridDimZ = launch.grid
    node.blockDimX, node.blockDimY, node.blockDimZ = launch.kernel.threads, 1, 1
    return node


def copy_node(cu: Any, copy: Copy) -> Any:
    """CUDA_MEMCPY3D of a copy: one row; its pitches stay 0, which is not specified."""
    node, kinds = cu.CUDA_MEMCPY3D(), cu.CUmemorytype
    node.WidthInBytes, node.Height, node.Depth = copy.bytes, 1, 1
    if copy.way == "in":
        node.srcMemoryType, node.srcHost = kinds.CU_MEMORYTYPE_HOST, copy.source
        node.dstMemoryType, node.dstDevice = kinds.CU_MEMORYTYPE_DEVICE, copy.target
    else:
        node.srcMemoryType, node.srcDevice = kinds.CU_MEMORYTYPE_DEVICE, copy.source
        node.dstMemoryType, node.dstHost = kinds.CU_MEMORYTYPE_HOST, copy.target
    return node


def _bindings() -> Any:
    try:
        ctypes.CDLL("libcuda.so.1")                                   # first: where there is no GPU, no package is missed
        return importlib.import_module("cuda.bindings.driver")
    except OSError as error:
        raise RuntimeFault(f"this machine has no NVIDIA driver ({error}): load the artifact where there is a GPU") from error
    except ImportError as error:
        raise RuntimeFault(f"a GPU needs NVIDIA's bindings to its driver, which are not installed ({error}): pip install cuda-bindings"
                           ) from error


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
