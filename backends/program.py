"""Builds a Program: one buffer per value, a fixed arena offset by liveness, an ordered list of steps over unique kernels."""
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import torch
from torch import fx

from ..compiler.errors import CheckFailed
from ..compiler.ir import Graph
from ..compiler.placement import Unit, Value, source_of
from ..runtime.program import DIMS, ITEM_BYTES, Buffer, Call, Candidate, Choice, Kernel, Program, Step
from .launch import Arg, Context, Launch, Out, Scratch, Weight, candidates_of

ALIGN = 64                                           # one cache line, one AVX-512 vector

DTYPES = {
    torch.float64: "f64", torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16", torch.int64: "i64",
    torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "bool", torch.float8_e4m3fn: "f8e4m3",
}

@dataclass
class Store:
    """What all buckets of a model share: kernels by content, packed weights by (placeholder, layout)."""

    arch: str
    digest: str                                      # of headers, flags and compiler: part of every kernel's identity
    kernels: dict[str, Kernel] = field(default_factory=dict)
    bodies: dict[str, str] = field(default_factory=dict)          # kernel hash -> C++ body
    launches: dict[str, Launch] = field(default_factory=dict)     # kernel hash -> the first launch of it
    headers: dict[str, None] = field(default_factory=dict)        # in order of first use
    weights: dict[str, np.ndarray] = field(default_factory=dict)  # tensor key -> packed, in order of first use
    weight_dtypes: dict[str, str] = field(default_factory=dict)
    needed: set[str] = field(default_factory=set)                 # kernels of calls that can run in one way alone
    refused: dict[str, str] = field(default_factory=dict)         # kernels that were not built, and why; none of them is needed

    def kernel(self, launch: Launch, op: str) -> Kernel:
        """The kernel of this launch; the same body is the same kernel."""
        content = hashlib.sha256(f"{self.digest}\n{launch.body}".encode()).hexdigest()[:16]
        if content not in self.kernels:
            symbol = getattr(launch, "symbol", f"k_{content}")   # an ATen step has no code of ours, only a name
            twins = sum(kernel.name.partition("#")[0] == launch.name for kernel in self.kernels.values())    # over other rows
            name = f"{launch.name}#{twins + 1}" if twins else launch.name
            self.kernels[content] = Kernel(hash=content, name=name, symbol=symbol, op=op, arch=self.arch)
            self.bodies[content] = launch.body
            self.launches[content] = launch
            self.headers.update(dict.fromkeys(launch.headers))
        return self.kernels[content]


@dataclass
class _Place:
    """A buffer in the making: where it is first written and last read, in steps."""

    name: str
    kind: str
    dtype: str
    shape: tuple[int | str, ...]
    bytes: int
    first: int = 0
    last: int = 0
    tensor: str = ""
    offset: int = 0

    def buffer(self) -> Buffer:
        return Buffer(self.name, self.kind, self.dtype, self.shape, self.bytes, self.offset, self.tensor)  # type: ignore[arg-type]


def build(
    graph: Graph,
    units: Sequence[Unit],
    context: Context,
    store: Store,
    pack: Callable[..., np.ndarray],
    cost: Callable[[Unit, Context], tuple[int, int]],
) -> Program:
    """The program of one bucket.

    units: in the order they run, each with a backend that lowers it. pack: (layout, *tensors) -> packed array.
    cost: (unit, context) -> flops and bytes at the bucket's maxima.
    """
    places: list[_Place] = []
    where: dict[Value, int] = {}
    packed: dict[tuple[str, str], int] = {}
    steps: list[Step] = []

    def place(spot: _Place) -> int:
        places.append(spot)
        return len(places) - 1

    def new(value: Value, kind: str, name: str, step: int) -> int:
        fake = _fake(value)
        shape = context.shape(fake.shape)
        dtype = DTYPES[fake.dtype]
        size = ITEM_BYTES[dtype] * int(np.prod([context.maximum(s) for s in shape], dtype=np.int64))
        where[value] = place(_Place(name, kind, dtype, shape, size, step, step))
        return where[value]

    for node in graph.module.graph.find_nodes(op="placeholder"):
        if node.name in graph.inputs or node.name in graph.kv:
            new((node, 0), "kv" if node.name in graph.kv else "input", node.name, 0)

    results = {source_of(node): name for name, node in zip(graph.outputs, _outputs(graph), strict=True)}
    if len(results) != len(graph.outputs):
        raise CheckFailed(f"{len(graph.outputs)} outputs share {len(results)} values; a program needs one buffer for each")

    def put(arg: Arg, unit: Unit, access: _Access, own: dict[Arg, int], last: int) -> int:
        """The buffer of a unit's argument. own: of its results and scratch, which several of its launches may use."""
        if isinstance(arg, Out | Scratch):
            if arg not in own:
                value = unit.results[arg.index] if isinstance(arg, Out) else None
                if isinstance(arg, Scratch):
                    name = f"scratch_{access.step}" + (f"_{arg.number}" if arg.number else "")
                    own[arg] = place(_Place(name, "arena", "u8", (arg.bytes,), arg.bytes, access.step))
                else:
                    assert value is not None
                    kind, name = ("output", results[value]) if value in results else ("arena", value[0].name)
                    own[arg] = new(value, kind, name, access.step)
                places[own[arg]].last = last
                access.writes.append((own[arg], value))
            return own[arg]
        if isinstance(arg, Weight): return _weight(graph, arg, store, packed, place, pack)
        if (value := source_of(arg))[0].name in graph.weights:
            return _weight(graph, Weight(value[0], "plain"), store, packed, place, pack)
        spot = where[value]
        places[spot].last = last
        access.reads.append((spot, value))
        return spot

    accesses: list[_Access] = []
    choices = dict[Any, Choice]()
    for unit in units:
        candidates = candidates_of(unit, context)
        last = len(steps) + len(next(iter(candidates.values()))) - 1   # what a unit uses lives through all its steps
        accesses.append(access := _Access(unit.op, len(steps)))
        flops, moved = cost(unit, context)
        own: dict[Arg, int] = {}
        room = dict[int, int]()                                        # any candidate's scratch fits where another's lies
        for arg in (arg for launches in candidates.values() for launch in launches for arg in launch.args if isinstance(arg, Scratch)):
            room[arg.number] = max(room.get(arg.number, 0), arg.bytes)
        ways = dict[str, list[Step]]()
        for name, launches in candidates.items():
            ways[name] = []
            for part, launch in enumerate(launches):
                kernel = store.kernel(launch, unit.op)
                if len(candidates) == 1: store.needed.add(kernel.hash)
                args = tuple(put(Scratch(room[arg.number], arg.number) if isinstance(arg, Scratch) else arg, unit, access, own, last)
                             for arg in launch.args)
                counted = (0, 0) if part else (flops, moved)
                ways[name].append(Step(kernel.hash, args, unit.op, *counted, unit.origin, unit.passes, launch.grid, launch.scalars, part))
        if len(ways) > 1: _offer(choices, unit.op, len(steps), ways)
        steps += next(iter(ways.values()))

    for value, name in results.items():
        if value not in where or places[where[value]].kind != "output":
            raise CheckFailed(f"output {name} is not the result of any step (it is {value[0].format_node()})")
    arena = _pack_arena([spot for spot in places if spot.kind == "arena"])
    _check_arena(places, accesses, arena)
    order = {name: i for i, name in enumerate([*graph.inputs, *graph.outputs])}
    return _in_order(Program(
        name="step_" + "_".join(f"{k}{v}" for k, v in context.bucket.items() if k == "T"),
        bucket=dict(context.bucket), dims=DIMS, arena_bytes=arena,
        buffers=tuple(spot.buffer() for spot in places), steps=tuple(steps), choices=tuple(choices.values()),
    ), order)


def _offer(choices: dict[Any, Choice], op: str, first: int, ways: Mapping[str, Sequence[Step]]) -> None:
    """Note that a call may run in several ways; calls that differ in nothing but their buffers are one choice."""
    buffers = {spot: at for at, spot in enumerate(dict.fromkeys(arg for steps in ways.values() for step in steps for arg in step.args))}
    candidates = tuple(Candidate(name, tuple(
        Step(step.kernel, tuple(buffers[arg] for arg in step.args), op, grid=step.grid, scalars=step.scalars, part=step.part)
        for step in steps)) for name, steps in ways.items())
    call = Call(first, tuple(buffers))
    known = choices.get((op, candidates))
    choices[op, candidates] = Choice(op, candidates, (*known.calls, call) if known else (call,))


def _in_order(program: Program, order: dict[str, int]) -> Program:
    """Inputs and outputs in the graph's order; every other buffer keeps its place."""
    def key(item: tuple[int, Buffer]) -> tuple[int, int]:
        index, buffer = item
        public = buffer.kind in ("input", "output")
        return (0 if buffer.kind == "input" else 2 if public else 1, order[buffer.name] if public else index)

    ranked = sorted(enumerate(program.buffers), key=key)
    moved = {old: new for new, (old, _) in enumerate(ranked)}
    return Program(
        program.name, program.bucket, program.dims, program.arena_bytes, tuple(buffer for _, buffer in ranked),
        tuple(msgspec.structs.replace(s, args=tuple(moved[a] for a in s.args)) for s in program.steps),
        tuple(msgspec.structs.replace(c, calls=tuple(Call(call.step, tuple(moved[b] for b in call.buffers)) for call in c.calls))
              for c in program.choices),
    )


def _fake(value: Value) -> torch.Tensor:
    node, index = value
    fake = node.meta["val"]
    return fake[index] if isinstance(fake, (tuple, list)) else fake


def _outputs(graph: Graph) -> Iterable[fx.Node]:
    return graph.module.graph.output_node().args[0]   # type: ignore[return-value]


def _weight(
    graph: Graph, weight: Weight, store: Store, packed: dict[tuple[str, str], int],
    place: Callable[[_Place], int], pack: Callable[..., np.ndarray],
) -> int:
    name, layout = weight.node.name, weight.layout
    if (name, layout) in packed:
        return packed[name, layout]
    key = f"{name}:{layout}"
    tensor = graph.weights[name]
    if key not in store.weights:
        store.weights[key] = pack(layout, *(graph.weights[node.name] for node in weight.nodes))
        store.weight_dtypes[key] = DTYPES[tensor.dtype]
    shape = tuple(int(size) for size in tensor.shape)
    spot = place(_Place(name, "weight", DTYPES[tensor.dtype], shape, store.weights[key].nbytes, tensor=key))
    packed[name, layout] = spot
    return spot


def _pack_arena(spots: list[_Place]) -> int:
    """Greedy by size: the largest first, each at the lowest offset free during its life. Returns the bytes needed.

    Within a few per cent of the lower bound on step graphs, and simple (Pisarchyk and Lee, 2020, "greedy by size").
    """
    done: list[_Place] = []
    for spot in sorted(spots, key=lambda s: (-s.bytes, s.first)):
        offset = 0
        for other in sorted((d for d in done if d.first <= spot.last and spot.first <= d.last), key=lambda d: d.offset):
            if offset + spot.bytes <= other.offset:
                break
            offset = max(offset, _align(other.offset + other.bytes))
        spot.offset = offset
        done.append(spot)
    return max((_align(spot.offset + spot.bytes) for spot in spots), default=0)


@dataclass
class _Access:
    """What a unit's steps read and write: buffers, each with the value that the graph says is in it (None: scratch)."""

    op: str
    step: int                                        # its first
    reads: list[tuple[int, Value]] = field(default_factory=list)
    writes: list[tuple[int, Value | None]] = field(default_factory=list)


def _check_arena(places: Sequence[_Place], accesses: Sequence[_Access], size: int) -> None:
    """Run the steps on names alone: each finds the values it reads where it reads them, whatever was written since.

    It knows nothing of how the places were chosen. CheckFailed names the step, the value and what is wrong with its place.
    """
    holds: dict[int, Value | None] = {}
    for access in accesses:
        step = f"memory plan: step {access.step} ({access.op})"
        for spot, value in access.reads:
            if places[spot].kind == "arena" and holds.get(spot) != value:
                raise CheckFailed(f"{step} reads %{value[0].name}, which was not written to its place or was written over")
        used = {spot for spot, _ in (*access.reads, *access.writes) if places[spot].kind == "arena"}
        for spot, value in access.writes:
            mine = places[spot]
            if mine.kind != "arena": continue
            if mine.offset % ALIGN: raise CheckFailed(f"{step} writes {mine.name} at {mine.offset}, which is no multiple of {ALIGN}")
            if mine.offset + mine.bytes > size: raise CheckFailed(f"{step} writes {mine.name} past the arena's {size} bytes")
            for other in [o for o in {*holds, *used} if o != spot and _overlap(places[o], mine)]:
                if other in used: raise CheckFailed(f"{step} writes {mine.name} over {places[other].name}, which it uses as well")
                del holds[other]
            holds[spot] = value


def _overlap(a: _Place, b: _Place) -> bool:
    return a.offset < b.offset + b.bytes and b.offset < a.offset + a.bytes


def _align(size: int) -> int:
    return (size + ALIGN - 1) // ALIGN * ALIGN
