"""The CUDA device over a fake driver: what it asks of the driver, in which order, and what it says where the driver refuses."""
import ctypes
import gc
import json
import mmap
import os
import re
import struct
import subprocess
import sys
import threading
from enum import IntEnum
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from infc.runtime import cuda
from infc.runtime.cuda import CudaDevice
from infc.runtime.device import ALIGN, Copy, Launch, OutOfMemory, arch_fits
from infc.runtime.errors import RuntimeFault
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


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver()


@pytest.fixture
def device(driver: FakeDriver):
    device = CudaDevice(driver=driver)
    yield device
    device.close()
    assert driver.left() == 0 and driver.stack == [None]


def nodes(driver: FakeDriver) -> list[SimpleNamespace]:
    """Of the graph made last."""
    return [handle for handle in driver.handles if handle.kind == "graph"][-1].nodes


def test_says_what_it_is(device):
    assert device.torch_stream == int(device.stream)
    assert (device.name, device.arch, device.torch_device) == ("NVIDIA H200", "sm_90", "cuda:0")
    assert (device.multiprocessors, device.total_memory, device.driver_version) == (132, 1 << 30, "13.1")


@pytest.mark.parametrize("built, arch, fits", [
    ("sm_90a", "sm_90", True), ("sm_90a", "sm_100", False), ("sm_80", "sm_80", True), ("sm_80", "sm_86", True), ("sm_80", "sm_89", True),
    ("sm_89", "sm_89", True), ("sm_89", "sm_86", False), ("sm_80", "sm_90", False), ("sm_89", "sm_90", False), ("sm_100a", "sm_100", True),
    ("sm_100a", "sm_103", False), ("sm_100", "sm_103", True), ("sm_100a", "sm_120", False), ("sm_90", "sm_90", True),
    ("x86-64-v4", "sm_90", False),
])
def test_which_code_runs_where(built, arch, fits):
    assert arch_fits(built, arch) is fits


# parameters

@pytest.mark.parametrize("kind, value, found", [
    ("u32", 7, 7), ("u32", -5, 2**32 - 5), ("u32", 2**32 - 1, 2**32 - 1), ("s32", -5, -5), ("u64", 2**40, 2**40), ("u64", -3, 2**64 - 3),
    ("s64", -2**63, -2**63), ("u64", 0x7F0000000200, 0x7F0000000200), ("f32", 0.1, struct.unpack("f", struct.pack("f", 0.1))[0]),
    ("f32", float("-inf"), float("-inf")), ("f32", 3, 3.0), ("u8", True, 1), ("s8", -1, -1), ("b16", 65535, 65535),
])
def test_parameters_reach_the_kernel(device, driver, kind, value, found):
    one = kernel(params=("u64", "u32", kind, "f32", "u64", "u64"))
    device.load(one, code(one))
    device.record([Launch(one, (4, 2, 1), (4096, 9, value, -0.5))])
    node, = nodes(driver)
    assert node.values == [4096, 9, found, -0.5, 0, 0]
    assert (node.gridDimX, node.gridDimY, node.gridDimZ, node.blockDimX, node.blockDimY, node.blockDimZ) == (4, 2, 1, 128, 1, 1)


@pytest.mark.parametrize("kind, value", [
    ("u32", 2**32), ("u32", -2**31 - 1), ("u64", 2**64), ("u8", 256), ("u32", 1.0), ("f32", 1e300), ("f16", 1.0), ("pred", 1),
])
def test_a_value_that_does_not_fit_is_refused(device, kind, value):
    one = kernel(params=(kind, "u64", "u64"))
    device.load(one, code(one))
    with pytest.raises(RuntimeFault, match=f"kernel poly_u8: parameter 0 is {kind}, and is given {re.escape(repr(value))}; compile"):
        device.record([Launch(one, (1, 1, 1), (value,))])


def test_a_wrong_count_of_values_is_refused(device):
    device.load(POLY, code(POLY))
    with pytest.raises(RuntimeFault, match="kernel poly_u8 takes 2 values, and is launched with 3"):
        device.record([Launch(POLY, (1, 1, 1), (1, 2, 3))])


# code

@pytest.mark.parametrize("shared, static, launched, asked", [
    (None, 0, 0, {}), (48 << 10, 0, 48 << 10, {}), (1000, 1000, 0, {}),
    (100 << 10, 0, 100 << 10, 100 << 10), (227 << 10, 1 << 10, 226 << 10, 226 << 10),
])
def test_shared_memory(device, driver, shared, static, launched, asked):
    one = kernel(shared_bytes=shared)
    device.load(one, code(one, static))
    device.record([Launch(one, (1, 1, 1), (0, 0))])
    node, = nodes(driver)
    assert node.sharedMemBytes == launched
    wanted = {"cache": "CU_FUNC_CACHE_PREFER_SHARED", "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES": asked} if asked else {}
    assert node.func.set == wanted


def test_more_shared_memory_than_there_is(device):
    with pytest.raises(RuntimeFault, match="poly_u8 needs 232449 bytes of shared memory, and a program on NVIDIA H200 gets 232448"):
        device.load(one := kernel(shared_bytes=(227 << 10) + 1), code(one))


def test_a_kernel_is_loaded_once(device, driver):
    device.load(POLY, code(POLY))
    device.load(POLY, code(POLY))
    assert [name for name, _ in driver.calls].count("cuModuleLoadData") == 1


def test_code_for_another_gpu(device):
    with pytest.raises(RuntimeFault, match="poly_u8 is built for sm_100a, and this machine's NVIDIA H200 is sm_90; compile the model for"):
        device.load(one := kernel(arch="sm_100a"), code(one))


@pytest.mark.parametrize("error", ["INVALID_IMAGE", "NO_BINARY_FOR_GPU", "UNSUPPORTED_PTX_VERSION"])
def test_code_the_driver_refuses(device, driver, error):
    driver.fails["cuModuleLoadData"] = Result[f"CUDA_ERROR_{error}"]
    with pytest.raises(RuntimeFault) as caught:
        device.load(POLY, code(POLY))
    assert str(caught.value) == (
        f"NVIDIA H200: loading kernel poly_u8, built for sm_90a, with driver 13.1 fails: CUDA_ERROR_{error} "
        f"({error.lower().replace('_', ' ')}); the driver is older than the code, or the code is damaged: update the driver, or compile "
        "the model again")


def test_code_without_its_symbol(device):
    with pytest.raises(RuntimeFault, match=r"symbol k_other fails: CUDA_ERROR_NOT_FOUND \(not found\); compile the model again"):
        device.load(kernel(symbol="k_other"), code(POLY))


def test_a_kernel_that_was_not_loaded(device, driver):
    with pytest.raises(RuntimeFault, match="step 1 of 2 runs kernel poly_u8, which was not loaded"):
        device.record([Copy(device.allocate(4, "x"), device.host(4), 4, "in"), Launch(POLY, (1, 1, 1), (1, 2))])
    assert not [h for h in driver.handles if h.kind == "graph" and h.alive]


# recordings

def test_work_runs_in_its_order_as_often_as_wanted(device, driver):
    device.load(POLY, code(POLY))
    host, place = device.host(16), device.allocate(8, "x")
    work = [Copy(place, host, 1, "in"), *(Launch(POLY, (1, 1, 1), (place, a)) for a in (1, 0, 7, 2)), Copy(0, 0, 0, "in"),
            Copy(host + 8, place, 1, "out")]
    recorded = device.record(work)
    assert len(nodes(driver)) == 6 and recorded.bytes >= 4 * 16       # the empty copy is no node
    for start in (0, 5, 200):
        ctypes.memset(host, start, 1)
        recorded.replay()
        wanted = start
        for a in (1, 0, 7, 2): wanted = (3 * wanted + a) % 256
        assert ctypes.string_at(host + 8, 1)[0] == wanted
    recorded.close()
    recorded.close()
    with pytest.raises(RuntimeFault, match="the recording is closed"):
        recorded.replay()


def test_a_replay_asks_little_of_the_driver(device, driver):
    device.load(POLY, code(POLY))
    recorded = device.record([Launch(POLY, (1, 1, 1), (device.allocate(8, "x"), 1))] * 50)
    driver.calls.clear()
    recorded.replay()
    assert [name for name, _ in driver.calls] == ["cuCtxSetCurrent", "cuGraphLaunch", "cuStreamSynchronize"]


def test_a_refused_step_is_named(device):
    device.load(POLY, code(POLY))
    with pytest.raises(RuntimeFault, match=r"step 1 of 2, kernel poly_u8 over \(0, 1, 1\) fails: CUDA_ERROR_INVALID_VALUE"):
        device.record([Launch(POLY, (1, 1, 1), (0, 0)), Launch(POLY, (0, 1, 1), (0, 0))])


@pytest.mark.parametrize("function", ["cuGraphAddKernelNode", "cuGraphInstantiate", "cuGraphUpload"])
def test_no_room_for_a_recording(device, driver, function):
    device.load(POLY, code(POLY))
    before = driver.left()
    driver.fails[function] = Result.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(OutOfMemory, match=r"no room for a graph of 1 steps: NVIDIA H200: .*CUDA_ERROR_OUT_OF_MEMORY") as full:
        device.record([Launch(POLY, (1, 1, 1), (0, 0))])
    assert (full.value.wanted, full.value.free) == (16, device.free_memory())
    assert driver.left() == before
    driver.fails.clear()
    device.record([Launch(POLY, (1, 1, 1), (0, 0))])


def test_a_lost_context_is_final(driver):
    device = CudaDevice(driver=driver)
    device.load(POLY, code(POLY))
    recorded = device.record([Launch(POLY, (1, 1, 1), (device.allocate(8, "x"), 1))])
    driver.fails["replay"] = Result.CUDA_ERROR_ILLEGAL_ADDRESS
    text = (r"replaying a graph fails: CUDA_ERROR_ILLEGAL_ADDRESS \(illegal address\); the GPU's context is lost, with all that was in it: "
            "load the model again in a new process")
    with pytest.raises(RuntimeFault, match=text): recorded.replay()
    driver.fails.clear()
    for use in (recorded.replay, lambda: device.allocate(1, "x"), lambda: device.download(0, 1)):
        with pytest.raises(RuntimeFault, match=text): use()
    device.close()
    assert driver.left() == 0


# memory

def test_memory_is_zeros_at_aligned_addresses(device, driver):
    places = [device.allocate(size, "x") for size in (1, 300, 4096, 0, 1000)]
    assert all(place % ALIGN == 0 for place in places) and len(set(places)) == 5
    assert device.download(places[1], 300) == bytes(300)
    assert ctypes.string_at(device.host(100), 100) == bytes(100)
    device.fill(places[2] + 10, 0xCD, 20)
    assert device.download(places[2], 40) == bytes(10) + b"\xcd" * 20 + bytes(10)
    assert device.download(places[2], 0) == b""
    device.fill(places[2], 1, 0)
    assert device.free_memory() == (1 << 30) - 1 - 300 - 4096 - 1 - 1000


@pytest.mark.parametrize("size", [0, 1, 64 << 10, (64 << 10) + 1, cuda._STAGE, cuda._STAGE + 1, 3 * cuda._STAGE + 17, 4 * cuda._STAGE])
def test_uploads_arrive(device, driver, size):
    data = (b"infc" + bytes(range(251))) * (size // 255 + 1)
    place = device.allocate(size + 8, "weights")
    device.upload(place, memoryview(data)[:size])
    assert not driver.queue                                           # it has arrived
    assert device.download(place, size + 8) == data[:size] + bytes(8)
    assert len(driver.pinned) == (2 if size > 64 << 10 else 0)        # buffers, not the data
    sources = [arguments[1] for name, arguments in driver.calls if name == "cuMemcpyHtoDAsync"]
    assert all(one != other for one, other in pairwise(sources))      # one is filled while the other is read


def test_an_upload_of_a_mapped_file_gives_it_up(device, tmp_path):
    (tmp_path / "w").write_bytes(os.urandom(200_000))
    with (tmp_path / "w").open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        place = device.allocate(200_000, "weights")
        with memoryview(mapped) as whole: device.upload(place, whole)
    assert device.download(place, 200_000) == (tmp_path / "w").read_bytes()
    halves = memoryview((ctypes.c_uint16 * 3)(1, 2, 3))               # items of any size are bytes
    device.upload(place, halves)
    assert device.download(place, 6) == b"\1\0\2\0\3\0"


def test_no_room_for_memory(device, driver):
    device.allocate(1 << 29, "arena")
    with pytest.raises(RuntimeFault) as caught:
        device.allocate(800 << 20, "weights")
    assert str(caught.value) == ("NVIDIA H200: no room for the weights: it takes 800.0 MiB, and 512.0 MiB of 1,024.0 MiB are free; "
                                 "give it less, or use a larger GPU")
    driver.fails["cuMemHostAlloc"] = Result.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(RuntimeFault, match=r"pinning 3\.0 MiB of the host's memory fails: CUDA_ERROR_OUT_OF_MEMORY"):
        device.host(3 << 20)


def test_another_thread_may_use_it(device):
    found = []
    place = device.allocate(4, "x")
    caller = threading.Thread(target=lambda: (device.upload(place, b"abcd"), found.append(device.download(place, 4))))
    caller.start(), caller.join()
    assert found == [b"abcd"]


# measuring

def test_timing(device, driver):
    device.load(POLY, code(POLY))
    recorded = device.record([Launch(POLY, (1, 1, 1), (device.allocate(8, "x"), 1))] * 2)
    before = driver.left()
    assert device.timed(recorded, 3) == pytest.approx([500.0] * 3)
    assert driver.left() == before


def test_timing_behind_a_fill_of_the_l2(device, driver):
    """Each replay from its own start: the fill before it takes time that does not count, and leaves nothing of what was there."""
    device.load(POLY, code(POLY))
    recorded = device.record([Launch(POLY, (1, 1, 1), (device.allocate(8, "x"), 1))] * 2)
    scrub, before = device.allocate(64, "L2"), driver.left()
    device.upload(scrub, b"x" * 64)
    fills = sum(name == "cuMemsetD8Async" for name, _ in driver.calls)
    assert device.timed(recorded, 3, (scrub, 64)) == pytest.approx([500.0] * 3)
    assert sum(name == "cuMemsetD8Async" for name, _ in driver.calls) == fills + 4
    assert device.download(scrub, 64) == bytes(64) and driver.left() == before and device.l2_bytes == 60 << 20


def test_the_rate_of_a_copy(device, driver):
    before = driver.left()
    assert device.copy_rate() == pytest.approx(2 * (driver.total // 4) / 0.0005)
    assert driver.left() == before


# the end

def test_closing(driver):
    device = CudaDevice(driver=driver)
    device.load(POLY, code(POLY))
    place = device.allocate(1 << 20, "x")
    device.upload(place, bytes(1 << 20))
    recorded = device.record([Launch(POLY, (1, 1, 1), (place, 1))])
    assert driver.left() > 6
    device.close()
    assert driver.left() == 0
    device.close()
    recorded.close()
    assert driver.left() == 0
    for use in (lambda: device.allocate(1, "x"), recorded.replay, lambda: device.upload(place, b"1"), device.free_memory):
        with pytest.raises(RuntimeFault, match=r"the device is closed; load the model again|the recording is closed"): use()


def test_what_is_dropped_gives_its_memory_back(driver):
    device = CudaDevice(driver=driver)
    device.load(POLY, code(POLY))
    before = driver.left()
    recorded = device.record([Launch(POLY, (1, 1, 1), (0, 0))])
    assert driver.left() == before + 1
    del recorded
    gc.collect()
    assert driver.left() == before
    del device
    gc.collect()
    assert driver.left() == 0


def test_the_context_stays_with_others_who_use_it(driver):
    torch_like, device = CudaDevice(driver=driver), CudaDevice(driver=driver)
    device.allocate(4, "x")
    device.close()
    assert driver.retained == 1 and driver.stack == [77]
    torch_like.allocate(4, "x")
    torch_like.close()
    assert driver.stack == [None]


def test_a_failed_start_leaves_nothing(driver):
    driver.fails["cuStreamCreate"] = Result.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(RuntimeFault, match="making a stream fails") as caught: CudaDevice(driver=driver)
    assert driver.left() == 0 and caught                              # which keeps the device from being dropped


def test_a_forked_child_is_told(device, driver):
    device.load(POLY, code(POLY))
    recorded = device.record([Launch(POLY, (1, 1, 1), (device.allocate(8, "x"), 1))])
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        told = []
        for use in (recorded.replay, lambda: device.allocate(1, "x")):
            try: use()
            except RuntimeFault as fault: told.append(str(fault))
        held = driver.left()
        recorded.close()
        device.close()
        os.write(write, json.dumps([told, held == driver.left()]).encode())
        os._exit(0)
    os.waitpid(child, 0)
    told, untouched = json.loads(os.read(read, 10_000))
    os.close(read), os.close(write)
    assert untouched and len(told) == 2 and all("opened before this process was forked" in text for text in told)
    recorded.replay()


# machines without a GPU

def test_no_package(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: None)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(RuntimeFault, match=r"bindings to its driver, which are not installed .*: pip install cuda-bindings"): CudaDevice()


def test_no_driver(monkeypatch):
    def missing(name): raise OSError(f"{name}: cannot open shared object file: No such file or directory")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(RuntimeFault) as caught: CudaDevice()
    assert str(caught.value) == ("this machine has no NVIDIA driver (libcuda.so.1: cannot open shared object file: No such file or "
                                 "directory): load the artifact where there is a GPU")


def test_a_driver_without_a_function(driver):
    def missing(): raise RuntimeError('Function "cuDriverGetVersion" not found')

    driver.cuDriverGetVersion = missing
    with pytest.raises(RuntimeFault, match=r"cuDriverGetVersion.*update the driver, or use cuda-bindings of its version"):
        CudaDevice(driver=driver)


@pytest.mark.parametrize("error, text", [
    ("NO_DEVICE", "load the artifact where there is a GPU (or is CUDA_VISIBLE_DEVICES empty"), ("NOT_INITIALIZED", "forked child"),
])
def test_no_gpu(driver, error, text):
    driver.fails["cuInit"] = Result[f"CUDA_ERROR_{error}"]
    with pytest.raises(RuntimeFault, match=re.escape(text)): CudaDevice(driver=driver)


@pytest.mark.parametrize("index", [1, -1])
def test_a_gpu_that_is_not_there(driver, index):
    with pytest.raises(RuntimeFault, match=f"GPU {index} is asked for, and CUDA sees 1 here, counted from 0; see CUDA_VISIBLE_DEVICES"):
        CudaDevice(index, driver)


def test_nothing_of_cuda_is_imported_before_a_device_is_made():
    script = ("import infc, infc.runtime.session, infc.runtime.cuda, sys; "
              "print(sorted({m.split('.')[0] for m in sys.modules} & {'cuda', 'torch'}))")
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60).stdout == "[]\n"


# the real bindings, where they are installed; they need no GPU to be asked what they have

SOURCE = Path(cuda.__file__).read_text()


def test_the_bindings_have_what_is_asked_of_them():
    real = pytest.importorskip("cuda.bindings.driver")
    functions = set(re.findall(r"\.(cu[A-Z]\w+)", SOURCE))
    assert len(functions) > 40
    assert not [name for name in functions if not hasattr(real, name)]
    members = set(re.findall(r"\.(CU\w+)\.(CU_\w+)", SOURCE)) | set(re.findall(r"kinds\.()(CU_\w+)", SOURCE))
    members |= {("CUdevice_attribute", f"CU_DEVICE_ATTRIBUTE_{name}") for name in re.findall(r'_attribute\("(\w+)"\)', SOURCE)}
    assert not [(kind, name) for kind, name in members if not hasattr(getattr(real, kind or "CUmemorytype"), name)]
    new_in_13 = {"CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER"}             # compared by name, so that 12 may lack it
    assert {name for name in cuda._HINTS if not hasattr(real.CUresult, name)} <= new_in_13
    assert not functions - set(dir(FakeDriver))


def test_the_bindings_take_our_nodes():
    real = pytest.importorskip("cuda.bindings.driver")
    values, pointers = cuda.pack(POLY, (4096, -2))
    node = cuda.kernel_node(real, Launch(POLY, (4, 2, 1), (4096, -2)), real.CUfunction(99), 512, ctypes.addressof(pointers))
    raw = struct.unpack("Q7IxxxxQQ", ctypes.string_at(node.getPtr(), 56))      # CUDA_KERNEL_NODE_PARAMS of cuda.h
    assert raw == (99, 4, 2, 1, 128, 1, 1, 512, ctypes.addressof(pointers), 0)
    assert ctypes.c_int32.from_address((ctypes.c_void_p * 4).from_address(raw[8])[1]).value == -2 and values[2] == values[3] == 0
    into, out = (cuda.copy_node(real, Copy(11, 22, 33, way)) for way in ("in", "out"))
    assert (int(into.dstDevice), into.srcHost, int(into.srcMemoryType), int(into.dstMemoryType)) == (11, 22, 1, 2)
    assert (out.dstHost, int(out.srcDevice), int(out.srcMemoryType), int(out.dstMemoryType)) == (11, 22, 2, 1)
    assert {(node.WidthInBytes, node.Height, node.Depth) for node in (into, out)} == {(33, 1, 1)}


def test_memory_is_handed_out_where_it_lies() -> None:
    """As the CUDA array interface has it; rows of it are further on in the same memory."""
    whole = CudaDevice(driver=FakeDriver()).array(4096, (6, 5))
    assert whole.__cuda_array_interface__ == {"shape": (6, 5), "typestr": "<f4", "data": (4096, False), "version": 3, "strides": None}
    part = whole[2:4]
    assert (part.shape, part.address) == ((2, 5), 4096 + 2 * 5 * 4) and part[1:].address == 4096 + 3 * 5 * 4
    assert whole[4:2].shape == (0, 5)
