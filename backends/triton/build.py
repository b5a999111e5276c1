"""Launches to code for a GPU that is not there: compiled once per content, two at a time, kept, and judged by the compiler's own report."""
import contextlib
import hashlib
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import BinaryIO, cast

import msgspec

from ...compiler import kept
from ...compiler.errors import CheckFailed
from ...compiler.reuse import cache_folder
from ...compiler.scratch import scratch
from .registry import Launch
from .request import key, request
from .worker import ARCHS, Binary, Request, receive, send

WORKERS = min(8, len(os.sched_getaffinity(0)))
"""Processes that compile; each takes about 300 MB."""


class Code(msgspec.Struct, frozen=True):
    """A kernel for one architecture. Plain data; `params` end with two pointers Triton appends and nothing reads: pass null."""

    arch: str
    title: str                           # kernel, constants, warps and stages, for messages
    sha256: str                          # of the cubin
    made: Binary

    @property
    def symbol(self) -> str:
        return self.made.symbol


class Limits(msgspec.Struct, frozen=True):
    """What one multiprocessor holds at a time. Registers and shared memory in units a program's share is rounded up to."""

    warps: int
    programs: int
    shared: int                          # bytes, of all programs
    shared_of_one: int                   # bytes a single program may have
    registers: int = 65_536
    register_unit: int = 256             # per warp
    shared_reserved: int = 1024          # bytes the driver takes of each program's share


# CUDA C++ Programming Guide, "Compute Capabilities", tables "Technical Specifications" (8.0, 8.9, 9.0, 10.0): resident warps and
# blocks, shared memory per multiprocessor and per block; register and reserved units: the CUDA Occupancy Calculator's tables.
LIMITS = {
    "sm_80": Limits(64, 32, 164 << 10, 163 << 10),
    "sm_89": Limits(48, 24, 100 << 10, 99 << 10),
    "sm_90a": Limits(64, 32, 228 << 10, 227 << 10),
    "sm_100a": Limits(64, 32, 228 << 10, 227 << 10),
}


def programs_at_once(code: Code) -> int:
    """How many programs of this kernel a multiprocessor holds; 0: not even one fits."""
    return occupancy(code.made.registers, code.made.shared, code.made.threads, LIMITS[code.arch])


def occupancy(registers: int, shared: int, threads: int, limits: Limits) -> int:
    """Programs a multiprocessor holds, each with `threads` threads of `registers` registers and `shared` bytes."""
    if shared > limits.shared_of_one: return 0
    warps = -(-threads // 32)
    registers_of_warp = _up(registers * 32, limits.register_unit)
    by_registers = limits.registers // registers_of_warp // 4 * 4 // warps if registers else limits.programs     # warps come in fours
    return min(limits.warps // warps, limits.programs, by_registers, limits.shared // (_up(shared, 128) + limits.shared_reserved))


def _up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def build(
    launches: Sequence[Launch], arch: str, *, workers: int = WORKERS, cache: Path | None = None,
    progress: Callable[[int, int, str], None] = lambda done, of, title: None, note: Callable[[str], None] = lambda line: None,
) -> list[Code]:
    """The code of each launch, in their order; equal ones are one object, built once. Tensors may be on "meta".

    cache: a folder of builds, the user's when None. progress(done, of, title) counts unique builds. UserError for an unknown arch;
    CheckFailed for a kernel that does not compile, spills without saying so, or does not fit the arch.
    """
    return [one for one in attempt(launches, arch, (), workers=workers, cache=cache, progress=progress, note=note) if isinstance(one, Code)]


def attempt(
    launches: Sequence[Launch], arch: str, optional: Collection[int], *, workers: int = WORKERS, cache: Path | None = None,
    progress: Callable[[int, int, str], None] = lambda done, of, title: None, note: Callable[[str], None] = lambda line: None,
) -> list[Code | CheckFailed]:
    """As `build`; of launches whose places are `optional`, what `build` would raise in place of their code."""
    asked = [request(launch, arch) for launch in launches]
    ptxas = assembler(arch)
    keys = [key(launch, one, ptxas) for launch, one in zip(launches, asked, strict=True)]
    unique = dict(zip(keys, asked, strict=True))
    needed = {name for at, name in enumerate(keys) if at not in optional}
    folder = cache or cache_folder() / "triton"
    kept: dict[str, Code | CheckFailed] = {
        name: code for name, one in unique.items() if (code := _kept(folder / name, arch, one.title, note)) is not None}
    missing = [name for name in unique if name not in kept]
    unkept: list[str] = []
    for done, (name, made) in enumerate(_compile({name: unique[name] for name in missing}, needed, workers), len(kept) + 1):
        if isinstance(made, CheckFailed): kept[name] = made
        else:
            kept[name] = code = Code(arch, unique[name].title, hashlib.sha256(made.cubin).hexdigest(), made)
            if why := _keep(code, folder / name): unkept.append(why)
        progress(done, len(unique), unique[name].title)
    if unkept:
        note(f"{len(unkept)} kernel{'s are' if len(unkept) > 1 else ' is'} not kept for the next compile: {folder} cannot be written "
             f"({unkept[0]})")
    found = [_judged(kept[name], launch) for name, launch in zip(keys, launches, strict=True)]
    for at, one in enumerate(found):
        if isinstance(one, CheckFailed) and at not in optional: raise one
    return found


def _judged(code: Code | CheckFailed, launch: Launch) -> Code | CheckFailed:
    """The code, or why it is not to be launched."""
    if isinstance(code, CheckFailed): return code
    made, limits = code.made, LIMITS[code.arch]
    if (made.spill_stores or made.spill_loads) and not launch.spills_ok:
        return CheckFailed(f"kernel {code.title} spills {made.spill_stores} bytes of registers to memory ({made.registers} registers, "
                           f"{made.threads} threads): give it smaller tiles or more warps, or launch it with spills_ok")
    if made.shared > limits.shared_of_one:
        return CheckFailed(f"kernel {code.title} needs {made.shared} bytes of shared memory; {code.arch} gives a program "
                           f"{limits.shared_of_one}: give it smaller tiles or fewer stages")
    return code


@cache
def assembler(arch: str) -> str:
    """The version of the assembler Triton would call."""
    from triton import knobs

    tool = knobs.nvidia.ptxas_blackwell if ARCHS[arch] >= 100 else knobs.nvidia.ptxas
    return tool.version


# ---- compiling

def _compile(asked: dict[str, Request], needed: Collection[str], workers: int) -> Iterable[tuple[str, Binary | CheckFailed]]:
    """Each request's result as it comes. The first failure of one that is needed, or Ctrl-C, ends every worker, and nothing is left."""
    if not asked: return
    waiting: queue.SimpleQueue[tuple[str, Request]] = queue.SimpleQueue()
    for item in asked.items(): waiting.put(item)
    results: queue.SimpleQueue[tuple[str, Binary | CheckFailed]] = queue.SimpleQueue()
    with scratch("triton") as folder, contextlib.ExitStack() as stack:
        for index in range(min(workers, len(asked))):
            worker = _Worker(folder / str(index))
            stack.callback(worker.close)
            worker.start(waiting, results)
        for _ in asked:
            name, result = results.get()
            if isinstance(result, CheckFailed) and (name in needed or name not in asked): raise result
            yield name, result


@dataclass
class _Worker:
    """A process that compiles, and the thread that feeds it; another process where one ended with a kernel."""

    folder: Path

    def __post_init__(self) -> None:
        self.folder.mkdir()
        self.errors: BinaryIO = (self.folder / "errors").open("w+b")
        self.closed, self.lock = False, threading.Lock()
        self.process = self._started()
        self.thread: threading.Thread | None = None

    def _started(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-c", f"from {__package__}.worker import main; main()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self.errors, env=self.environment(), start_new_session=True)      # Ctrl-C is the parent's to handle

    def _restart(self) -> bool:
        with self.lock:
            if self.closed: return False
            self._end()
            self.errors.seek(0)
            self.errors.truncate()
            self.process = self._started()
        return True

    def environment(self) -> dict[str, str]:
        """Ours without the switches that change what Triton makes; no line table, so no path, in the code."""
        plain = {name: value for name, value in os.environ.items() if not name.startswith(("TRITON_", "MLIR_", "LLVM_", "NVPTX_"))
                 or name in ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH")}
        for name in ("DISABLE_PTXAS_OPT", "PTXAS_OPTIONS", "USE_IR_LOC"): plain.pop(name, None)
        return {**plain, "TRITON_DISABLE_LINE_INFO": "1", "TRITON_DUMP_PTXAS_LOG": "1", "TRITON_CACHE_DIR": str(self.folder / "cache"),
                "TMPDIR": str(self.folder)}

    def start(self, waiting: queue.SimpleQueue, results: queue.SimpleQueue) -> None:
        def feed() -> None:
            fresh = True
            while True:
                if fresh and not self._send(list(sys.path)): return results.put(("", CheckFailed(self._said("the compiler of kernels"))))
                try:
                    name, asked = waiting.get_nowait()
                except queue.Empty:
                    return None
                answer = receive(cast(BinaryIO, self.process.stdout)) if self._send(asked) else None
                if fresh := answer is None:
                    results.put((name, CheckFailed(self._said(f"kernel {asked.title}"))))
                    if not self._restart(): return None
                else: results.put((name, msgspec.msgpack.decode(answer, type=Binary)))

        self.thread = threading.Thread(target=feed, daemon=True)
        self.thread.start()

    def _send(self, message: object) -> bool:
        try:
            send(cast(BinaryIO, self.process.stdin), message)
        except OSError:
            return False                                     # it ended
        return True

    def _said(self, what: str) -> str:
        """One line on why the process ended, from what it wrote last."""
        with contextlib.suppress(subprocess.TimeoutExpired): self.process.wait(10)
        self.errors.seek(0)
        lines = [line.strip() for line in self.errors.read().decode(errors="replace").splitlines() if line.strip()]
        code = self.process.returncode
        if code is not None and code < 0: return f"{what}: the compiler crashed with signal {-code}"
        last = lines[-1] if lines else f"exit code {code}"
        if "Repro command" in last or "PassManager" in last:                 # says nothing: the assembler or MLIR said it before
            last = next((line for line in reversed(lines) if "error" in line.lower() and line != last), last)
        return f"{what} does not compile: {last}"

    def close(self) -> None:
        with self.lock:
            self.closed = True
            self.process.kill()
        if self.thread: self.thread.join()
        self._end()
        self.errors.close()

    def _end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):               # what was not sent cannot be
                if pipe: pipe.close()


# ---- the cache: one file a build, its sha256 behind it

def _kept(path: Path, arch: str, title: str, note: Callable[[str], None]) -> Code | None:
    """The build kept at that place; None where there is none, or no longer what was written: such an entry is removed."""
    try:
        raw = kept.read(path)
    except (kept.Altered, OSError) as error:
        why = f"it cannot be read ({error.strerror})" if isinstance(error, OSError) else str(error)
        note(f"the kept kernel {path} is of no use, compiling {title} again: {why}")
        return None
    if raw is None: return None
    binary = msgspec.msgpack.decode(raw, type=Binary)
    return Code(arch, title, hashlib.sha256(binary.cubin).hexdigest(), binary)


def _keep(code: Code, path: Path) -> str:
    """Atomically: another process may be writing the same. Where it fails, the reason; the compile is no worse for it."""
    try:
        kept.write(path, msgspec.msgpack.encode(code.made))
    except OSError as error:
        return error.strerror or str(error)
    return ""
