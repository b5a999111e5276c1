"""The executor: every kernel on all threads, in order; sleep and wake; timestamps; checked copies and pure reads."""
import ctypes
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from cpu_kernels import ISAS
from infc.backends.cpu.toolchain import build
from infc.runtime.checksum import crc32c_chunks

SOURCE = """
#include "pool.h"
// b[0]: i64[threads][8]. Each thread adds one to its own line if all lines showed the same count when the step began.
extern "C" void in_step(void* const* b, const infc_run* r) {
    auto* lines = static_cast<volatile int64_t*>(b[0]);
    int64_t mine = lines[r->thread * 8];
    infc::sync(r);
    bool equal = true;
    for (int64_t t = 0; t < r->threads; t++) equal = equal && lines[t * 8] == mine;
    infc::sync(r);
    if (equal) lines[r->thread * 8] = mine + r->dims[0];
}
// b[0]: i64[threads]. Scratch is the thread's own and aligned.
extern "C" void scratch(void* const* b, const infc_run* r) {
    auto* mine = static_cast<char*>(r->scratch);
    for (int64_t i = 0; i < infc::SCRATCH_BYTES; i++) mine[i] = char(r->thread);
    infc::sync(r);
    int64_t wrong = reinterpret_cast<uintptr_t>(mine) % 64;
    for (int64_t t = 0; t < r->threads; t++)
        for (int64_t i = 0; i < infc::SCRATCH_BYTES; i += 4096) wrong += infc::scratch_of(r, t)[i] != char(t);
    static_cast<int64_t*>(b[0])[r->thread] = wrong;
}
// b[0]: i64[2]: the distance that is quick here, and where this run's is put. Others take a millisecond more.
extern "C" void quick_at(void* const* b, const infc_run* r) {
    auto* at = static_cast<int64_t*>(b[0]);
    if (r->thread == 0) at[1] = r->ahead;
    const uint64_t end = infc::now_ns() + (r->ahead == at[0] ? 0 : 1000000);
    while (infc::now_ns() < end) infc::pause();
}
extern "C" void slow(void* const*, const infc_run*) { usleep(200000); }
"""


def load(isa: str, folder: Path) -> ctypes.CDLL:
    lib = ctypes.CDLL(str(build(SOURCE, isa, folder / f"{isa}.so")))
    lib.infc_pool_create.restype = ctypes.c_void_p
    lib.infc_pool_create.argtypes = [ctypes.c_int, ctypes.c_int64]
    lib.infc_pool_destroy.argtypes = [ctypes.c_void_p]
    lib.infc_pool_destroy.restype = None
    lib.infc_pool_run.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p]
    lib.infc_pool_read.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    lib.infc_pool_read.restype = ctypes.c_uint64
    lib.infc_pool_copy.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_int64] * 2 + [ctypes.c_void_p]
    lib.infc_pool_copy.restype = ctypes.c_uint32
    return lib


@pytest.fixture(scope="module", params=ISAS)
def lib(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return load(request.param, tmp_path_factory.mktemp("pool"))


@pytest.fixture(params=[1, 2, 3, 5])
def pool(lib: ctypes.CDLL, request: pytest.FixtureRequest) -> Iterator[tuple[ctypes.CDLL, int, int]]:
    made = lib.infc_pool_create(request.param, 100)
    assert made
    yield lib, made, request.param
    lib.infc_pool_destroy(made)


def run(lib: ctypes.CDLL, pool: int, name: str, buffer: np.ndarray, steps: int = 1, times: np.ndarray | None = None) -> int:
    table = (ctypes.c_void_p * 1)(buffer.ctypes.data)
    function = ctypes.cast(getattr(lib, name), ctypes.c_void_p).value
    step = (ctypes.c_void_p * (2 * steps))(*([function, ctypes.addressof(table)] * steps))
    return lib.infc_pool_run(pool, step, steps, (ctypes.c_int64 * 5)(1), None if times is None else times.ctypes.data)


def test_every_step_runs_once_on_every_thread_and_none_overtakes(pool: tuple[ctypes.CDLL, int, int]) -> None:
    lib, made, threads = pool
    lines, total = np.zeros((threads, 8), np.int64), 0
    for steps in (1, 2, 100, 1, 300):
        assert run(lib, made, "in_step", lines, steps) == 0
        total += steps
        assert (lines[:, 0] == total).all()


def test_each_table_finds_its_own_prefetch_distance_and_asks_again(lib: ctypes.CDLL) -> None:
    made = lib.infc_pool_create(2, 100)
    function = ctypes.cast(lib.quick_at, ctypes.c_void_p).value
    steps, kept = np.zeros((2, 8), np.uintp), []                     # 64 bytes apart: two places among the pool's trials, never one
    for which, quick in enumerate((512, 8192)):
        buffer = np.array([quick, 0], np.int64)
        table = (ctypes.c_void_p * 1)(buffer.ctypes.data)
        steps[which, :2] = function, ctypes.addressof(table)
        kept.append((buffer, table))

    def distances(which: int, runs: int) -> list[int]:
        seen = []
        for _ in range(runs):
            lib.infc_pool_run(made, steps[which].ctypes.data, 1, (ctypes.c_int64 * 5)(1), None)
            seen.append(int(kept[which][0][1]))
        return seen

    assert distances(0, 15) == [4096, 512, 8192] * 5 and distances(1, 15) == [4096, 512, 8192] * 5
    assert set(distances(0, 20)) == {512} and set(distances(1, 20)) == {8192}, "the quickest of each, whatever the other's"
    kept[0][0][0] = 4096                                             # the memory's load has changed
    distances(0, 512 - 35)
    assert distances(0, 15) == [4096, 512, 8192] * 5 and set(distances(0, 20)) == {4096}
    lib.infc_pool_destroy(made)


def test_timestamps_bracket_every_step(pool: tuple[ctypes.CDLL, int, int]) -> None:
    lib, made, threads = pool
    times, before = np.zeros(51, np.uint64), time.monotonic_ns()
    run(lib, made, "in_step", np.zeros((threads, 8), np.int64), 50, times)
    assert before <= times[0] and times[-1] <= time.monotonic_ns() and (np.diff(times.astype(np.int64)) >= 0).all()


def test_threads_sleep_and_wake(lib: ctypes.CDLL) -> None:
    made, lines = lib.infc_pool_create(2, 0), np.zeros((2, 8), np.int64)     # spin 0: asleep right after each run
    for i in range(20):
        run(lib, made, "in_step", lines)
        if i % 5 == 0: time.sleep(0.01)
    time.sleep(0.05)
    idle = time.process_time()
    time.sleep(0.2)
    assert time.process_time() - idle < 0.05, "a sleeping pool uses the CPU"
    run(lib, made, "in_step", lines)
    assert (lines[:, 0] == 21).all()
    lib.infc_pool_destroy(made)


def test_a_second_caller_is_told(lib: ctypes.CDLL) -> None:
    made = lib.infc_pool_create(2, 100)
    other = threading.Thread(target=run, args=(lib, made, "slow", np.zeros(1)))
    other.start()
    time.sleep(0.05)
    assert run(lib, made, "slow", np.zeros(1)) == 1
    other.join()
    assert run(lib, made, "slow", np.zeros(1)) == 0
    lib.infc_pool_destroy(made)


def test_scratch_is_each_threads_own(pool: tuple[ctypes.CDLL, int, int]) -> None:
    lib, made, threads = pool
    wrong = np.full(threads, -1, np.int64)
    run(lib, made, "scratch", wrong)
    assert (wrong == 0).all()


def test_no_pool_of_no_threads(lib: ctypes.CDLL) -> None:
    assert lib.infc_pool_create(0, 0) is None
    assert lib.infc_pool_create(1, -1) is None


@pytest.mark.parametrize("size", [1, 7, 8, 23, 24, 25, 1023, 4096, 100_003, 1_000_000])
def test_checked_copy(pool: tuple[ctypes.CDLL, int, int], size: int) -> None:
    lib, made, _ = pool
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    for chunk in (1024, 65536, 1 << 20):
        sums, copy = np.zeros((size + chunk - 1) // chunk, np.uint32), np.full(size + 16, 7, np.uint8)
        whole = lib.infc_pool_copy(made, copy.ctypes.data, data.ctypes.data, size, chunk, sums.ctypes.data)
        assert (copy[:size] == data).all() and (copy[size:] == 7).all()
        assert sums.tolist() == crc32c_chunks(data, chunk) and [whole] == crc32c_chunks(data, 1 << 20)
        assert lib.infc_pool_copy(made, None, data.ctypes.data, size, chunk, sums.ctypes.data) == whole      # only checks
        copy[:] = 0
        assert lib.infc_pool_copy(made, copy.ctypes.data, data.ctypes.data, size, chunk, None) == 0          # only copies
        assert (copy[:size] == data).all()


def test_crc_is_castagnolis(lib: ctypes.CDLL) -> None:
    made, sums = lib.infc_pool_create(1, 0), np.zeros(1, np.uint32)
    assert lib.infc_pool_copy(made, None, b"123456789", 9, 1024, sums.ctypes.data) == sums[0] == 0xE3069283   # RFC 3720's check
    lib.infc_pool_destroy(made)


@pytest.mark.parametrize("size", [1, 63, 64, 1000, 1_000_003])
def test_read_sees_every_byte(pool: tuple[ctypes.CDLL, int, int], size: int) -> None:
    lib, made, _ = pool
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    lines = size // 64 * 64
    expected = (int(data[:lines].view(np.uint64).sum(dtype=np.uint64)) + int(data[lines:].sum())) % 2**64
    assert lib.infc_pool_read(made, data.ctypes.data, size) == expected


REFUSED = """
import ctypes, sys
from pathlib import Path
from infc.backends.cpu.timing import TimedPool
from infc.compiler.errors import UserError

class Stack(ctypes.Structure):
    _fields_ = [("sp", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]

room = ctypes.create_string_buffer(8192)
assert ctypes.CDLL(None).sigaltstack(ctypes.byref(Stack(ctypes.addressof(room), 0, 8192)), None) == 0
try: TimedPool(Path(sys.argv[1]), 2)
except UserError as error: print(error)
"""


def test_a_process_without_amx_registers_is_told(tmp_path: Path) -> None:
    """Linux refuses them where a thread's signal stack has no room for them."""
    if "x86-64-v4-amx" not in ISAS: pytest.skip("this CPU has no AMX")
    library = build(SOURCE, "x86-64-v4-amx", tmp_path / "amx.so")
    done = subprocess.run([sys.executable, "-c", REFUSED, str(library)], capture_output=True, text=True, check=True)
    assert "Linux refuses this process the registers of AMX; compile with --target x86-64-v4-bf16" in done.stdout
