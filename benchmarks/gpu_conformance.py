"""Every kernel of the registry, built for a card and launched on it, against its operator in fp64.

A call goes the way a program's steps go: cubins of backends/triton/build, memory of a runtime device, a recording, a replay. All memory
it may write holds NaN before, and what stands around each buffer must hold it after.
"""
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import isfinite
from time import monotonic
from typing import Any

import torch
from gpu_cases import Arguments, Case, Dice, cases, missing
from gpu_judges import written
from infc.backends.triton import build as builder
from infc.backends.triton.build import Code
from infc.backends.triton.judge import several
from infc.backends.triton.registry import Emit, kernels
from infc.runtime.device import ALIGN, Device, Launch
from infc.runtime.program import Kernel
from torch import Tensor

MARGIN = 4096
"""Bytes before and after each buffer that nothing may write."""

ROOM = {"cuda": 6 << 30, "cpu": 64 << 20}
"""Bytes of the device that one call's buffers share: a head of 152,064 rows takes 1.1 GB."""

TOGETHER = 64
"""Cases whose kernels are built while those of the cases before them run; of the first so many a quarter."""

ON_GPU = ("infc::linear", "infc::attention", "infc::paged_attention")
"""Operators, by the beginning of their names, whose reference is worth a GPU. The others' is computed on the CPU, where an index out of
range is an error and not a lost context."""


@dataclass
class Call:
    """A case's launches, still to be built."""

    case: Case
    given: Arguments
    results: list[Tensor]                            # on "meta"
    emit: Emit = field(default_factory=Emit)


def lowered(case: Case, device: str, seed: int) -> Call:
    """ValueError with the reason where the kernel refuses the call."""
    found, given = kernels()[case.op], case.arguments(Dice(device, seed))
    if reason := found.refuse(**given): raise ValueError(f"{case.op} refuses it: {reason}")
    call = Call(case, given, several(found.call(**moved(given, "meta"))))
    found.lower(call.emit, *call.results, **given)
    return call


def moved(value: Any, device: Any) -> Any:
    """The same, tensors on another device."""
    if isinstance(value, dict): return {name: moved(v, device) for name, v in value.items()}
    if isinstance(value, list): return [moved(v, device) for v in value]
    return value.to(device) if isinstance(value, Tensor) else value


class Room:
    """A region of a device that calls use one after the other."""

    def __init__(self, device: Device, size: int) -> None:
        self.device, self.size = device, size
        self.start = device.allocate(size, "conformance")

    def run(self, call: Call, codes: Sequence[Code]) -> list[Tensor]:
        """Results, then what was written in place, on the CPU. ValueError where a launch wrote between the buffers."""
        changed = [call.given[name] for name in written(call.case.op)]
        used = [v for launch in call.emit.launches for v in launch.args if isinstance(v, Tensor)]
        places, end = self._placed(used, call.results, changed)
        self.device.fill(self.start, 0xFF, end - self.start)
        fresh = {_memory(tensor) for tensor in (*call.results, *call.emit.scratch)}
        for memory, (address, tensor) in places.items():
            if memory not in fresh: self.device.upload(address, _bytes(tensor))
        work = []
        for launch, code in zip(call.emit.launches, codes, strict=True):
            kernel = _kernel(code, call.case.op)
            self.device.load(kernel, code.made.cubin)
            params = tuple(places[_memory(v)][0] + v.storage_offset() * v.element_size() if isinstance(v, Tensor) else v
                           for v in launch.args if v is not None)
            work.append(Launch(kernel, (*launch.grid, 1, 1)[:3], params))
        recorded = self.device.record(work)
        try:
            recorded.replay()
        finally:
            recorded.close()
        for address, tensor in places.values():
            for at in (address - MARGIN, address + _size(tensor)):
                if self.device.download(at, MARGIN) != b"\xff" * MARGIN:
                    raise ValueError(f"a launch wrote {'before' if at < address else 'behind'} a buffer of {_size(tensor)} bytes")
        return [self._read(places[_memory(tensor)][0], tensor) for tensor in (*call.results, *changed)]

    def _placed(self, *groups: Sequence[Tensor]) -> tuple[dict[int, tuple[int, Tensor]], int]:
        """Where the memory of each tensor lies, by its identity, and the end of it all."""
        places, end = dict[int, tuple[int, Tensor]](), self.start
        for tensor in (tensor for group in groups for tensor in group):
            if _memory(tensor) in places: continue
            address = -(-(end + MARGIN) // ALIGN) * ALIGN
            places[_memory(tensor)] = address, tensor
            end = address + _size(tensor) + MARGIN
        if end > self.start + self.size: raise ValueError(f"its buffers take {end - self.start} bytes, there are {self.size}")
        return places, end

    def _read(self, address: int, like: Tensor) -> Tensor:
        if not like.numel(): return torch.empty(like.shape, dtype=like.dtype)
        data = bytearray(self.device.download(address, like.numel() * like.element_size()))
        return torch.frombuffer(data, dtype=like.dtype).reshape(like.shape)


def _kernel(code: Code, op: str) -> Kernel:
    """A build as the runtime knows it."""
    made = code.made
    return Kernel(code.sha256, code.title, made.symbol, op, code.arch, registers=made.registers, shared_bytes=made.shared,
                  threads=made.threads, params=made.params, tensor_cores=made.tensor_cores)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _size(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def _bytes(tensor: Tensor) -> bytes | memoryview:
    """All bytes of the memory a tensor looks at."""
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage()).cpu()    # type: ignore[call-overload]
    return memoryview(whole.numpy()) if whole.numel() else b""


def judged(call: Call, found: list[Tensor]) -> float:
    """How far results are from right, as a share of what is allowed."""
    tensors = [value for value in call.given.values() if isinstance(value, Tensor)]
    narrow = any(t.dtype == torch.float8_e4m3fn for t in tensors)         # of which not every operator is there on a GPU
    device = tensors[0].device if call.case.op.startswith(ON_GPU) and not narrow else "cpu"
    return call.case.judge(call.case.op, moved(call.given, device), moved(found, device), call.case.times)


# ---- all cases, as a worker runs them

Built = tuple[Call | None, list[Code], str]
"""A call with its code, or why there is none."""


def built(chosen: Sequence[tuple[int, Case]], device: str, arch: str, workers: int) -> list[Built]:
    """Calls with their code. One build for all; where that fails, one for each, so that the others go on."""
    found: list[Built] = []
    for seed, case in chosen:
        try:
            found.append((lowered(case, device, seed), [], ""))
        except Exception as error:                   # noqa: BLE001   # of a case, whatever it is: the others go on
            found.append((None, [], _told(error)))
    calls = [call for call, _, _ in found if call]
    try:
        codes = iter(builder.build([launch for call in calls for launch in call.emit.launches], arch, workers=workers))
        return [(call, [next(codes) for _ in call.emit.launches], "") if call else (None, [], why) for call, _, why in found]
    except Exception:                                # noqa: BLE001   # which of them, the builds one by one say
        return [_alone(call, arch, workers) if call else (None, [], why) for call, _, why in found]


def _alone(call: Call, arch: str, workers: int) -> Built:
    try:
        return call, builder.build(call.emit.launches, arch, workers=workers), ""
    except Exception as error:                       # noqa: BLE001   # as above
        return None, [], _told(error)


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def ahead(chosen: Sequence[tuple[int, Case]], make: Callable[[Sequence[tuple[int, Case]]], list[Built]]) -> Iterator[tuple[Case, Built]]:
    """Each case with its code, the next ones built meanwhile."""
    waiting: queue.Queue[list[tuple[Case, Built]] | None] = queue.Queue(1)

    def feed() -> None:
        cuts = [0, *range(TOGETHER // 4, len(chosen), TOGETHER), len(chosen)]
        for start, stop in pairwise(cuts):
            part = chosen[start:stop]
            waiting.put([(case, one) for (_, case), one in zip(part, make(part), strict=True)])
        waiting.put(None)

    threading.Thread(target=feed, daemon=True).start()
    while (part := waiting.get()) is not None:
        yield from part


def check(request: dict[str, Any], begin: Callable[[str], None], tell: Callable[[dict[str, Any]], None]) -> None:
    """Tell a row of each case. request: arch the code is built for, dry, done (names that were tried), seconds, workers."""
    dry = request["dry"]
    device = "cpu" if dry else "cuda"
    chosen = [(seed, case) for seed, case in enumerate(cases(request["arch"] != "sm_80")) if case.small or not dry]
    for op in missing([case for _, case in chosen]):
        if op not in request["done"]: tell({"name": op, "op": op, "error": "has a kernel and no case"})
    if not dry:
        torch.backends.cuda.matmul.allow_tf32 = False                     # what judges is as exact as it says
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    chosen = [(seed, case) for seed, case in chosen if case.name not in request["done"]]
    room = None if dry else _room()
    end = monotonic() + request["seconds"]
    each = ahead(chosen, lambda part: built(part, device, request["arch"], request["workers"]))
    for tried, (case, (call, codes, why)) in enumerate(each):
        if monotonic() > end:
            left = Counter(case.op for _, case in chosen[tried:])
            tell({"left_out": "cases of " + ", ".join(f"{op} {count}" for op, count in left.items())})
            return
        begin(case.name)
        row: dict[str, Any] = {"name": case.name, "op": case.op}
        try:
            if call is None: raise ValueError(why)
            found = (room or _interpreted(call, codes, request["arch"])).run(call, codes)
            if not isfinite(share := judged(call, found)):
                raise ValueError("nan or inf where there must be none, other bits than the reference's, or padding that is not zeros")
            row["share"] = share
            row["spills"] = sum(code.made.spill_stores + code.made.spill_loads for code in codes)
        except Exception as error:                   # noqa: BLE001   # a harness: what one case dies of is its row, and the others go on
            row["error"] = why or _told(error)
        tell(row)
        if room and "error" in row: room.device.download(room.start, MARGIN)   # raises where the context is lost: a new process goes on


def _room() -> Room:
    from infc.runtime.cuda import CudaDevice

    return Room(CudaDevice(), ROOM["cuda"])


def _interpreted(call: Call, codes: Sequence[Code], arch: str) -> Room:
    """The same way on a CPU: Triton's interpreter runs what the cubins stand for."""
    from infc.backends.triton.device import InterpreterDevice

    made = {code.sha256: launch for code, launch in zip(codes, call.emit.launches, strict=True)}
    return Room(InterpreterDevice(arch, made), ROOM["cpu"])
