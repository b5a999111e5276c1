"""The CUDA device over a fake driver: memory is zeros, uploads arrive, and what is timed is what ran."""
import ctypes
import mmap
import os
import threading
from itertools import pairwise

import pytest
from fake_cuda import POLY, FakeDriver, Result, code
from infc.runtime import cuda
from infc.runtime.cuda import CudaDevice
from infc.runtime.device import ALIGN, Launch
from infc.runtime.errors import RuntimeFault

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



def test_memory_is_handed_out_where_it_lies() -> None:
    """As the CUDA array interface has it; rows of it are further on in the same memory."""
    whole = CudaDevice(driver=FakeDriver()).array(4096, (6, 5))
    assert whole.__cuda_array_interface__ == {"shape": (6, 5), "typestr": "<f4", "data": (4096, False), "version": 3, "strides": None}
    part = whole[2:4]
    assert (part.shape, part.address) == ((2, 5), 4096 + 2 * 5 * 4) and part[1:].address == 4096 + 3 * 5 * 4
    assert whole[4:2].shape == (0, 5)
