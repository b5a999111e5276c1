"""The CUDA device over a fake driver: how it ends, and what it says on a machine that has no GPU, or other bindings."""
import ctypes
import gc
import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from fake_cuda import POLY, FakeDriver, Result, code
from infc.runtime import cuda
from infc.runtime.cuda import CudaDevice
from infc.runtime.device import Copy, Launch
from infc.runtime.errors import RuntimeFault

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
