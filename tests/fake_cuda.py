"""cuda.bindings.driver without a GPU: memory in bytearrays, a stream whose work runs when it is waited for, kernels one can read."""
import ctypes
import json
import re
import struct
import threading
from enum import IntEnum
from types import SimpleNamespace

from infc.runtime.program import Kernel

SIZES = {"u64": "Q", "s64": "q", "u32": "I", "s32": "i", "f32": "f", "u8": "B", "s8": "b", "b16": "H"}
Result = IntEnum("Result", {"CUDA_SUCCESS": 0, **{f"CUDA_ERROR_{name}": number for name, number in {
    "INVALID_VALUE": 1, "OUT_OF_MEMORY": 2, "NOT_INITIALIZED": 3, "NO_DEVICE": 100, "INVALID_IMAGE": 200, "NO_BINARY_FOR_GPU": 209,
    "UNSUPPORTED_PTX_VERSION": 222, "NOT_FOUND": 500, "ILLEGAL_ADDRESS": 700, "LAUNCH_FAILED": 719}.items()}})


class Handle:
    """What the bindings give for a thing of the driver's: it has a number, and knows its kind."""

    def __init__(self, kind: str, number: int, **more: object) -> None:
        self.kind, self.number, self.alive = kind, number, True
        self.__dict__.update(more)

    def __int__(self) -> int: return self.number


class FakeDriver:
    """cuda.bindings.driver with one GPU: memory in bytearrays, and a stream whose work runs when it is waited for, and no sooner.

    A kernel's code is JSON: the symbols it has, with their parameters' types, and its static shared memory. It runs as
    x = (3 * x + a) % 256 over the byte at its first parameter, where a is its second: an order one can read from the result.
    """

    CUresult = Result
    CUdevice_attribute = IntEnum("attribute", {f"CU_DEVICE_ATTRIBUTE_{name}": i for i, name in enumerate((
        "COMPUTE_CAPABILITY_MAJOR", "COMPUTE_CAPABILITY_MINOR", "MULTIPROCESSOR_COUNT", "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN",
        "L2_CACHE_SIZE"))})
    CUfunction_attribute = IntEnum("fattribute", {f"CU_FUNC_ATTRIBUTE_{name}": i for i, name in enumerate((
        "SHARED_SIZE_BYTES", "MAX_DYNAMIC_SHARED_SIZE_BYTES"))})
    CUfunc_cache = IntEnum("cache", {"CU_FUNC_CACHE_PREFER_SHARED": 1})
    CUmemorytype = IntEnum("memory", {"CU_MEMORYTYPE_HOST": 1, "CU_MEMORYTYPE_DEVICE": 2})
    CUstream_flags = IntEnum("sflags", {"CU_STREAM_NON_BLOCKING": 1})
    CUevent_flags = IntEnum("eflags", {"CU_EVENT_DEFAULT": 0, "CU_EVENT_DISABLE_TIMING": 2})
    CUDA_KERNEL_NODE_PARAMS = CUDA_MEMCPY3D = SimpleNamespace

    def __init__(self, total: int = 1 << 30) -> None:
        self.total, self.fails, self.calls = total, {}, []
        self.memory: dict[int, bytearray] = {}                        # by address
        self.pinned: dict[int, object] = {}
        self.handles: list[Handle] = []
        self.queue: list[object] = []
        self.here = threading.local()
        self.attributes = (9, 0, 132, 227 << 10, 60 << 20)
        self.devices, self.retained, self.clock = 1, 0, 0.0

    def __getattribute__(self, name: str):
        found = object.__getattribute__(self, name)
        if not re.match("cu[A-Z]", name): return found

        def counted(*arguments):
            self.calls.append((name, arguments))
            return (self.fails[name], None, None) if self.fails.get(name) else found(*arguments)

        return self.__dict__.setdefault(f"once {name}", counted)      # one function a name, as in the bindings

    def make(self, kind: str, **more: object) -> Handle:
        self.handles.append(Handle(kind, 1000 + len(self.handles), **more))
        return self.handles[-1]

    def drop(self, handle: Handle, kind: str):
        assert handle.kind == kind and handle.alive and self.current
        handle.alive = False
        return (Result.CUDA_SUCCESS,)

    @property
    def stack(self) -> list[object]: return self.here.__dict__.setdefault("stack", [None])

    @property
    def current(self) -> bool: return self.stack[-1] is not None and self.retained > 0

    def left(self) -> int: return len(self.memory) + len(self.pinned) + sum(h.alive for h in self.handles) + self.retained

    def at(self, address: int, size: int) -> memoryview:
        for base, held in self.memory.items():
            if base <= address and address + size <= base + len(held): return memoryview(held)[address - base:address - base + size]
        raise AssertionError(f"{size} bytes at {address:#x} are not allocated")

    # the device and its context
    def cuInit(self, flags): return (Result.CUDA_SUCCESS,)
    def cuGetErrorString(self, code): return 0, code.name.removeprefix("CUDA_ERROR_").replace("_", " ").lower().encode()
    def cuDriverGetVersion(self): return 0, 13010
    def cuDeviceGetCount(self): return 0, self.devices
    def cuDeviceGet(self, index): return 0, 40 + index
    def cuDeviceGetName(self, length, device): return 0, b"NVIDIA H200\0" + b" " * (length - 12)
    def cuDeviceTotalMem(self, device): return 0, self.total
    def cuDeviceGetAttribute(self, kind, device): return 0, self.attributes[self.CUdevice_attribute(kind)]
    def cuDevicePrimaryCtxGetState(self, device): return 0, 0, int(self.retained > 0)

    def cuDevicePrimaryCtxRetain(self, device):
        self.retained += 1
        return 0, 77

    def cuDevicePrimaryCtxRelease(self, device):
        assert device == 40 and self.retained
        self.retained -= 1
        return (0,)

    def cuCtxSetCurrent(self, context):
        self.stack[-1] = context
        return (0,)

    def cuCtxGetCurrent(self): return 0, self.stack[-1]
    def cuCtxPushCurrent(self, context): return (self.stack.append(context) or 0,)
    def cuCtxPopCurrent(self): return 0, self.stack.pop()

    # memory
    def cuMemGetInfo(self): return 0, self.total - sum(map(len, self.memory.values())), self.total

    def cuMemAlloc(self, size):
        assert self.current
        if size > self.total - sum(map(len, self.memory.values())): return Result.CUDA_ERROR_OUT_OF_MEMORY, None
        address = max((base + len(held) for base, held in self.memory.items()), default=0x7F0000000000)
        self.memory[address := -(-address // 512) * 512] = bytearray(b"\xa5" * size)
        return Result.CUDA_SUCCESS, Handle("pointer", address)

    def cuMemFree(self, address): return (0 if self.memory.pop(int(address)) else 1,)

    def cuMemHostAlloc(self, size, flags):
        assert self.current
        block = (ctypes.c_char * size).from_buffer(bytearray(b"\xa5" * size))
        self.pinned[ctypes.addressof(block)] = block
        return Result.CUDA_SUCCESS, ctypes.addressof(block)

    def cuMemFreeHost(self, address): return (0 if self.pinned.pop(address) else 1,)

    # the stream
    def cuStreamCreate(self, flags):
        assert flags == 1 and self.current
        return 0, self.make("stream")

    def cuStreamDestroy(self, stream):
        assert {handle.kind for handle in self.handles if handle.alive} == {"stream"}       # what came after it went before it
        return self.drop(stream, "stream")

    def cuEventCreate(self, flags): return 0, self.make("event", mark=0, time=0.0)
    def cuEventDestroy(self, event): return self.drop(event, "event")

    def send(self, stream: Handle, work):
        assert stream.kind == "stream" and stream.alive and self.current
        self.queue.append(work)
        return (Result.CUDA_SUCCESS,)

    def run(self, until: int | None = None):
        while self.queue and (until is None or until in self.queue):
            if callable(work := self.queue.pop(0)): work()

    def cuStreamSynchronize(self, stream):
        self.run()
        return (self.fails.get("replay", Result.CUDA_SUCCESS),)

    def cuEventRecord(self, event, stream):
        event.mark = mark = len(self.calls)
        self.send(stream, lambda: setattr(event, "time", self.clock))
        return self.send(stream, mark)

    def cuEventSynchronize(self, event):
        self.run(event.mark)
        return (Result.CUDA_SUCCESS,)

    def cuEventElapsedTime(self, first, last): return 0, last.time - first.time

    def copy_in(self, target, source, size):
        self.clock += 0.001
        self.at(target, size)[:] = ctypes.string_at(source, size)

    def copy_out(self, target, source, size): ctypes.memmove(target, bytes(self.at(source, size)), size)

    def cuMemcpyHtoDAsync(self, target, source, size, stream):
        if isinstance(source, int):                                   # pinned memory: read when its turn comes
            assert any(a <= source and source + size <= a + len(block) for a, block in self.pinned.items())
            return self.send(stream, lambda: self.copy_in(target, source, size))
        assert size <= 64 << 10 and source.nbytes == size
        kept = bytes(source)
        return self.send(stream, lambda: self.at(target, size).__setitem__(slice(None), kept))

    def cuMemcpyDtoHAsync(self, target, source, size, stream):
        return self.send(stream, lambda: target.__setitem__(slice(None), self.at(source, size)))

    def cuMemcpyDtoDAsync(self, target, source, size, stream):
        def work():
            self.clock += 0.5
            self.at(target, size)[:] = self.at(source, size)
        return self.send(stream, work)

    def cuMemsetD8Async(self, target, byte, size, stream): return self.send(stream, lambda: self.set(target, byte, size))

    def set(self, target, byte, size):
        self.clock += 0.002
        self.at(target, size)[:] = bytes([byte]) * size

    # code
    def cuModuleLoadData(self, code): return Result.CUDA_SUCCESS, self.make("module", code=json.loads(code))
    def cuModuleUnload(self, module): return self.drop(module, "module")

    def cuModuleGetFunction(self, module, symbol):
        if (kinds := module.code["symbols"].get(symbol.decode())) is None: return Result.CUDA_ERROR_NOT_FOUND, None
        return 0, Handle("function", 5, kinds=kinds, static=module.code["static"], set={})

    def cuFuncGetAttribute(self, kind, function): return 0, function.static
    def cuFuncSetCacheConfig(self, function, kind): return (function.set.update(cache=kind.name) or 0,)
    def cuFuncSetAttribute(self, function, kind, value): return (function.set.update({kind.name: value}) or 0,)

    # graphs
    def cuGraphCreate(self, flags): return 0, self.make("graph", nodes=[])
    def cuGraphDestroy(self, graph): return self.drop(graph, "graph")
    def cuGraphExecDestroy(self, graph): return self.drop(graph, "exec")
    def cuGraphUpload(self, graph, stream): return self.send(stream, None)

    def add(self, graph, after, count, node):
        assert after == graph.nodes[-1:] and count == len(after)      # a chain
        graph.nodes.append(node)
        return Result.CUDA_SUCCESS, node

    def cuGraphAddKernelNode(self, graph, after, count, node):
        if 0 in (node.gridDimX, node.blockDimX): return Result.CUDA_ERROR_INVALID_VALUE, None
        addresses = (ctypes.c_void_p * len(node.func.kinds)).from_address(node.kernelParams)
        node.values = [struct.unpack(SIZES[kind], ctypes.string_at(address, struct.calcsize(SIZES[kind])))[0]
                       for kind, address in zip(node.func.kinds, addresses, strict=True)]
        return self.add(graph, after, count, node)

    def cuGraphAddMemcpyNode(self, graph, after, count, node, context):
        assert context == 77 and (node.Height, node.Depth) == (1, 1)
        return self.add(graph, after, count, node)

    def cuGraphInstantiate(self, graph, flags):
        assert flags == 0
        return Result.CUDA_SUCCESS, self.make("exec", nodes=list(graph.nodes))

    def cuGraphLaunch(self, graph, stream):
        assert graph.alive
        return self.send(stream, lambda: [self.execute(node) for node in graph.nodes])

    def execute(self, node):
        self.clock += 0.25                                            # milliseconds
        if hasattr(node, "func"):
            at = self.at(node.values[0], 1)
            at[0] = (3 * at[0] + node.values[1]) % 256
        elif node.srcMemoryType.name == "CU_MEMORYTYPE_HOST": self.copy_in(node.dstDevice, node.srcHost, node.WidthInBytes)
        else: self.copy_out(node.dstHost, node.srcDevice, node.WidthInBytes)


POLY = Kernel("h1", "poly_u8", "k_poly", "infc.poly.default", "sm_90a", threads=128, params=("u64", "u32", "u64", "u64"))


def code(kernel: Kernel, static: int = 0) -> bytes:
    return json.dumps({"symbols": {kernel.symbol: kernel.params}, "static": static}).encode()


def kernel(**changes: object) -> Kernel:
    return Kernel(**{**{name: getattr(POLY, name) for name in POLY.__struct_fields__}, **changes})


def nodes(driver: FakeDriver) -> list[SimpleNamespace]:
    """Of the graph made last."""
    return [handle for handle in driver.handles if handle.kind == "graph"][-1].nodes
