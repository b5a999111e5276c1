"""Quantized products on this CPU, each kernel beside the wide one it replaces: same shape, weights from memory.

Both run in turns by one pool, each over copies of its weights that exceed the last cache several times, so that one row reads
memory as a decode step does. The best of the rounds counts: a neighbour can only make a kernel slower. What would be refused for a
decode step runs many rounds more.
"""
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import fx

from ...compiler.costs.peaks import last_level_cache
from ...compiler.ops import infc
from ...compiler.ops.codes import groups
from ...compiler.ops.linear_quantized import bf16_rows_of
from ...compiler.quant.pays import NOISE, ROWS, Entry, Outcome
from ...compiler.quant.rounding import round_to_nearest
from ...compiler.reuse import cache_folder
from ...compiler.scratch import scratch
from ..launch import Context, Launch, Weight
from . import claims
from .pack import LAYOUTS
from .timing import TimedPool
from .toolchain import build

ROUNDS = 7
CONFIRMING = 60                    # more rounds of one row before a format is refused: other work may slow one kernel in all of seven
LIVE = 9973                        # stands for the live number of rows, as no weight has this size


class _Context(Context):
    def dim(self, size: object) -> int | str:
        return "r->dims[0]" if size == LIVE else int(size)   # type: ignore[call-overload]


@dataclass(frozen=True)
class _Kernels:
    """launches: of codes with few rows, of codes with `many` rows or more where these have another, and the wide one."""

    launches: Mapping[str, Launch]
    many: int

    def side(self, rows: int) -> str:
        return "many" if 0 < self.many <= rows else "few"


def race(
    entries: Sequence[Entry], isa: str, threads: int, wide: torch.dtype = torch.bfloat16, bf16_rows: Mapping[int, int] | None = None,
) -> list[Outcome]:
    """Compile both kernels of each entry for this machine and time them; an entry that no kernel takes is left out.

    wide: the dtype of what is replaced. bf16_rows: what narrow_dtype is offered (Target.bf16_rows). Raises UserError without
    a compiler.
    """
    context = _Context(isa, {"T": max(ROWS)})
    raced: list[tuple[Entry, _Kernels]] = []
    for entry in entries:
        many = bf16_rows_of(bf16_rows or {}, entry.scheme.act_bits, entry.k)
        calls = {"few": _coded(entry, False), **({"many": _coded(entry, True)} if many else {}), "wide": _wide(entry, wide)}
        if all(claims.refuse(call, context) is None for call in calls.values()):
            raced.append((entry, _Kernels({side: claims.lower(call, context) for side, call in calls.items()}, many)))
    if not raced: return []
    source, headers = "", dict.fromkeys(["pool.h"])
    for i, (_, kernels) in enumerate(raced):
        for side, launch in kernels.launches.items():
            headers.update(dict.fromkeys(launch.headers))
            source += f'extern "C" void {side}{i}_k(void* const* b, const infc_run* r) {{ {launch.body} }}\n'
    with scratch("race") as folder:
        text = "".join(f'#include "{h}"\n' for h in headers) + source
        pool = TimedPool(build(text, isa, folder / "race.so", cache_folder() / "code"), threads)
        try:
            return [_time(pool, i, entry, kernels, wide) for i, (entry, kernels) in enumerate(raced)]
        finally:
            pool.close()


def _given(graph: fx.Graph, name: str, *shape: int, dtype: torch.dtype) -> fx.Node:
    node = graph.placeholder(name)
    node.meta["val"] = torch.empty(shape, dtype=dtype, device="meta")
    return node


def _coded(entry: Entry, many: bool) -> fx.Node:
    """The call of the quantized product, x as the graphs of buckets give it: compiler.bucket_graph."""
    graph, s, n, k = fx.Graph(), entry.scheme, entry.n, entry.k
    x = _given(graph, "x", LIVE, k, dtype=torch.bfloat16 if many else torch.float32)
    codes = _given(graph, "codes", n, -(-k * s.bits // 8), dtype=torch.uint8)
    scale = _given(graph, "scale", n, groups(k, s.group), dtype=torch.float16)
    offset = None if s.symmetric else _given(graph, "offset", n, groups(k, s.group), dtype=torch.float16)
    args = (x, codes, scale, offset, None, None, s.bits, s.group, s.act_bits, s.row_group, torch.float32)
    return _call(graph.call_function(infc.linear_quantized.default, args, {"bf16_rows": int(many)}), n)


def _wide(entry: Entry, dtype: torch.dtype) -> fx.Node:
    graph = fx.Graph()
    x, w = _given(graph, "x", LIVE, entry.k, dtype=dtype), _given(graph, "w", entry.n, entry.k, dtype=dtype)
    return _call(graph.call_function(infc.linear.default, (x, w, None, None, torch.float32)), entry.n)


def _call(node: fx.Node, n: int) -> fx.Node:
    node.meta["val"] = torch.empty((LIVE, n), dtype=torch.float32, device="meta")
    return node


def _time(pool: TimedPool, index: int, entry: Entry, kernels: _Kernels, dtype: torch.dtype) -> Outcome:
    w = torch.randn((entry.n, entry.k), generator=torch.Generator().manual_seed(0)) * entry.k**-0.5
    found = round_to_nearest(w, entry.scheme)
    parts = [part for part in (found.codes, found.scale, found.offset) if part is not None]
    y = pool.memory(max(ROWS) * entry.n * 4, np.float32)
    x = pool.memory(max(ROWS) * entry.k * 4, np.float32)                # zeros in any type
    tables = {side: _tables(pool, kernels.launches[side], tensors, x, y) for side, tensors in (("few", parts), ("wide", [w.to(dtype)]))}
    tables["many"] = tables["few"]

    def run_of(side: str, rows: int) -> Callable[[], float]:
        return pool.steps(f"{side}{index}", tables[side] if rows < 256 else tables[side][:4], [rows])

    runs = [[run_of(kernels.side(rows), rows) for rows in ROWS], [run_of("wide", rows) for rows in ROWS]]
    best = [[math.inf] * len(ROWS) for _ in runs]
    for round_ in range(-1, ROUNDS):
        for mine, steps in zip(best, runs, strict=True):
            for i, run in enumerate(steps):
                took = run()
                if round_ >= 0: mine[i] = min(mine[i], took)
    for _ in range(CONFIRMING):
        if best[0][0] <= NOISE * best[1][0]: break
        for mine, steps in zip(best, runs, strict=True): mine[0] = min(mine[0], steps[0]())
    return Outcome(entry, kernels.launches["few"].name, tuple(best[0]), tuple(best[1]))


def _tables(pool: TimedPool, launch: Launch, weight: Sequence[torch.Tensor], x: np.ndarray, y: np.ndarray) -> list[list[int]]:
    """The arguments of a launch, for each of several copies of the weight."""
    layout = next(arg.layout for arg in launch.args if isinstance(arg, Weight))
    packed = np.ascontiguousarray(LAYOUTS[layout](*weight)).view(np.uint8).reshape(-1)
    size = -(-packed.nbytes // 64) * 64
    copies = max(4, math.ceil(3 * last_level_cache() / size))
    room = pool.memory(copies * size, np.uint16).view(np.uint8)
    for i in range(copies): room[i * size : i * size + packed.nbytes] = packed
    return [[x.ctypes.data, room.ctypes.data + i * size, y.ctypes.data] for i in range(copies)]
