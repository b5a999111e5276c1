"""The CUDA device over a fake driver: what a kernel is given, what code it takes, what a recording replays."""
import ctypes
import re
import struct

import pytest
from fake_cuda import POLY, Result, code, kernel, nodes
from infc.runtime.cuda import CudaDevice
from infc.runtime.device import Copy, Launch, OutOfMemory, arch_fits
from infc.runtime.errors import RuntimeFault


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
