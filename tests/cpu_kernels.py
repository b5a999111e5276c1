"""Run one CPU kernel: an operator call becomes a launch, many launches one library, a launch a call on real tensors.

Sizes that are dims at run time stand as large primes in the meta tensors (T, N, R, M below); `Names` spells them as the
builder would.
"""
import ctypes
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from infc.backends.cpu import claims
from infc.backends.cpu.pack import LAYOUTS
from infc.backends.cpu.toolchain import build
from infc.backends.launch import Context, Launch, Out, Weight
from infc.compiler.targets import TARGETS, missing
from torch import Tensor, fx

T, N, R, M, P = 9973, 9967, 9949, 9941, 9931
LIVE = {T: "r->dims[0]", N: "r->dims[1]", N + 1: "(r->dims[1] + 1)", R: "r->dims[2]", M: "r->dims[3]", P: "r->dims[4]"}
ISAS = [isa for isa in TARGETS if not missing(TARGETS[isa])]
GUARD = 256                    # poisoned bytes around every output


class Names(Context):
    """Spells the prime sizes as live dims."""

    def dim(self, size: object) -> int | str:
        return LIVE.get(int(size), int(size))   # type: ignore[arg-type, call-overload]


CONTEXT = Names("any", {"T": 64, "N": 8, "R": 8, "M": 64})


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def call(op: Callable, **kwargs: Any) -> fx.Node:
    """A node that calls op; tensors among the arguments become placeholders of their names."""
    graph = fx.Graph()
    nodes: dict[str, Any] = {}
    for name, value in kwargs.items():
        if isinstance(value, Tensor):
            nodes[name] = graph.placeholder(name)
            nodes[name].meta["val"] = value
        else:
            nodes[name] = value
    node = graph.call_function(op, (), nodes)
    node.meta["val"] = op(**kwargs)
    return node


@dataclass
class Case:
    """One launch and what its results look like."""

    launch: Launch
    symbol: str
    results: tuple[Tensor, ...]    # meta


class Library:
    """Cases compiled into one shared library for one ISA."""

    def __init__(self, isa: str, nodes: Mapping[str, fx.Node], folder: Path):
        self.cases: dict[str, Case] = {}
        source = ""
        headers: dict[str, None] = {"pool.h": None}
        for i, (name, node) in enumerate(nodes.items()):
            assert claims.refuse(node, CONTEXT) is None, claims.refuse(node, CONTEXT)
            launch = claims.lower(node, CONTEXT)
            value = node.meta["val"]
            results = () if value is None else value if isinstance(value, tuple) else (value,)
            self.cases[name] = Case(launch, f"k_{i}", results)
            headers |= dict.fromkeys(launch.headers)
            source += f'extern "C" void k_{i}(void* const* b, const infc_run* r) {{\n{launch.body}\n}}\n'
        source = "".join(f'#include "{h}"\n' for h in headers) + source
        path = build(source, isa, folder / f"{isa}.so")
        self.lib = ctypes.CDLL(str(path))
        self.lib.infc_pool_create.restype = ctypes.c_void_p
        self.lib.infc_pool_destroy.argtypes = [ctypes.c_void_p]
        self.lib.infc_pool_destroy.restype = None
        self.lib.infc_pool_run.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p]
        self.pools = {n: self.lib.infc_pool_create(n, 50) for n in (1, 2, 3)}

    def close(self) -> None:
        for pool in self.pools.values(): self.lib.infc_pool_destroy(pool)

    def run(self, name: str, tensors: Mapping[str, Tensor], dims: Sequence[int] = (), threads: int = 2) -> tuple[Tensor, ...]:
        """Outputs of a case. dims: live T, N, R, M, P. Outputs start as NaN bytes, with guards that must stay."""
        case = self.cases[name]
        live = [*dims, 0, 0, 0, 0, 0][:5]
        sizes = dict(zip((T, N, R, M, P), live, strict=True))
        keep: list[Any] = []
        outputs: dict[int, np.ndarray] = {}
        pointers = []
        for arg in case.launch.args:
            if isinstance(arg, Out):
                shape = [sizes.get(s, s) for s in case.results[arg.index].shape]
                room = np.full(int(np.prod(shape)) * case.results[arg.index].element_size() + 2 * GUARD, 0xFF, np.uint8)
                outputs[arg.index] = room
                keep.append(room)
                pointers.append(room.ctypes.data + GUARD)
            elif isinstance(arg, Weight):
                packed = LAYOUTS[arg.layout](*(tensors[node.name] for node in arg.nodes))
                keep.append(packed)
                pointers.append(packed.ctypes.data)
            else:
                assert isinstance(arg, fx.Node)
                tensor = tensors[arg.name]
                assert tensor.is_contiguous() and tensor.dtype == arg.meta["val"].dtype, arg.name
                pointers.append(tensor.data_ptr())
        table = (ctypes.c_void_p * len(pointers))(*pointers)
        step = (ctypes.c_void_p * 2)(ctypes.cast(getattr(self.lib, case.symbol), ctypes.c_void_p).value, ctypes.addressof(table))
        assert self.lib.infc_pool_run(self.pools[threads], step, 1, (ctypes.c_int64 * 5)(*live), None) == 0
        found = []
        for i, result in enumerate(case.results):
            room = outputs[i]
            assert (room[:GUARD] == 0xFF).all() and (room[-GUARD:] == 0xFF).all(), f"{name} wrote outside its output"
            shape = [sizes.get(s, s) for s in result.shape]
            found.append(torch.frombuffer(bytearray(room[GUARD:-GUARD]), dtype=result.dtype).view(shape) if 0 not in shape
                         else torch.empty(shape, dtype=result.dtype))
        return tuple(found)


def ulp(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance from |x| to the next larger number of dtype, in fp64."""
    exponent = torch.frexp(x.abs().double().clamp(min=2.0**-126)).exponent.double()
    return 2.0 ** (exponent - {torch.float32: 24, torch.bfloat16: 8}[dtype])


def judge(found: Tensor, plain: Tensor, exact: Tensor) -> None:
    """Per row: the kernel's worst error is at most the plain reference's plus one ulp of the row's largest output."""
    error, own, rows = _errors(found, plain, exact)
    allowed = own.amax(-1) + ulp(rows.amax(-1), found.dtype)
    worst = int((error.amax(-1) - allowed).argmax())
    assert bool((error.amax(-1) <= allowed).all()), f"row {worst}: error {error[worst].max():.3g}, allowed {allowed[worst]:.3g}"


def judge_sums(found: Tensor, plain: Tensor, exact: Tensor) -> None:
    """For long sums, whose order is free: over all outputs, mean and worst error are at most twice the plain reference's own
    plus one ulp, as DESIGN says of work that is only reordered. torch's own order changes with the number of rows and with the CPU, and
    its worst of n errors may be a lucky one: it counts as the sqrt(2 ln n) times the mean that it would be of n normal ones, if less.
    """
    error, own, rows = _errors(found, plain, exact)
    mean = own.square().mean().sqrt()
    allowed = 2 * mean + ulp(rows.square().mean().sqrt(), found.dtype)
    assert mean_error(found, exact) <= allowed, f"mean error {mean_error(found, exact):.3g}, allowed {allowed:.3g}"
    allowed = 2 * torch.maximum(own.amax(), mean * math.sqrt(2 * math.log(own.numel()))) + ulp(rows.amax(), found.dtype)
    assert error.amax() <= allowed, f"worst error {error.amax():.3g}, allowed {allowed:.3g}"


def mean_error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).square().mean().sqrt())


def _errors(found: Tensor, plain: Tensor, exact: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """|found - exact|, |plain - exact| and |exact|, in rows, in fp64."""
    assert found.shape == plain.shape == exact.shape and found.dtype == plain.dtype and found.numel()
    rows = exact.double().reshape(-1, exact.shape[-1])
    error, own = ((x.double().reshape(rows.shape) - rows).abs() for x in (found, plain))
    assert not error.isnan().any(), "NaN where the reference has none"
    return error, own, rows.abs()
