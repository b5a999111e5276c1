"""Quantized products on this CPU, each kernel beside the wide one it replaces: same shape, weights from memory.

Both run in turns by one pool, each over copies of its weights that exceed the last cache several times, so that one row reads
memory as a decode step does. The best of the rounds counts: a neighbour can only make a kernel slower. What would be refused for a
decode step runs many rounds more.
"""
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

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


def race(
    entries: Sequence[Entry], isa: str, threads: int, wide: torch.dtype = torch.bfloat16, bf16_rows: Mapping[int, int] | None = None,
) -> list[Outcome]:
    """Compile both kernels of each entry for this machine and time them; an entry that no kernel takes is left out.

    wide: the dtype of what is replaced. bf16_rows: what narrow_dtype is offered (Target.bf16_rows). Raises UserError without
    a compiler.
    """
    context = _Context(isa, {"T": max(ROWS)})
    pairs: list[tuple[Entry, Launch, Launch]] = []
    for entry in entries:
        coded, plain = _coded(entry, bf16_rows or {}), _wide(entry, wide)
        if claims.refuse(coded, context) is None and claims.refuse(plain, context) is None:
            pairs.append((entry, claims.lower(coded, context), claims.lower(plain, context)))
    if not pairs: return []
    source, headers = "", dict.fromkeys(["pool.h"])
    for i, (_, coded, plain) in enumerate(pairs):
        for side, launch in (("q", coded), ("w", plain)):
            headers.update(dict.fromkeys(launch.headers))
            source += f'extern "C" void {side}{i}_k(void* const* b, const infc_run* r) {{ {launch.body} }}\n'
    with tempfile.TemporaryDirectory(prefix="infc-race-") as folder:
        text = "".join(f'#include "{h}"\n' for h in headers) + source
        pool = TimedPool(build(text, isa, Path(folder) / "race.so", cache_folder() / "code"), threads)
        try:
            return [_time(pool, i, entry, coded, plain, wide) for i, (entry, coded, plain) in enumerate(pairs)]
        finally:
            pool.close()


def _given(graph: fx.Graph, name: str, *shape: int, dtype: torch.dtype) -> fx.Node:
    node = graph.placeholder(name)
    node.meta["val"] = torch.empty(shape, dtype=dtype, device="meta")
    return node


def _coded(entry: Entry, bf16_rows: Mapping[int, int]) -> fx.Node:
    """The call of the quantized product, x in f32 as the step graph gives it."""
    graph, s, n, k = fx.Graph(), entry.scheme, entry.n, entry.k
    x = _given(graph, "x", LIVE, k, dtype=torch.float32)
    codes = _given(graph, "codes", n, -(-k * s.bits // 8), dtype=torch.uint8)
    scale = _given(graph, "scale", n, groups(k, s.group), dtype=torch.float16)
    offset = None if s.symmetric else _given(graph, "offset", n, groups(k, s.group), dtype=torch.float16)
    args = (x, codes, scale, offset, None, None, s.bits, s.group, s.act_bits, s.row_group, torch.float32)
    rows = bf16_rows_of(bf16_rows, s.act_bits, k)
    return _call(graph.call_function(infc.linear_quantized.default, args, {"bf16_rows": rows}), n)


def _wide(entry: Entry, dtype: torch.dtype) -> fx.Node:
    graph = fx.Graph()
    x, w = _given(graph, "x", LIVE, entry.k, dtype=dtype), _given(graph, "w", entry.n, entry.k, dtype=dtype)
    return _call(graph.call_function(infc.linear.default, (x, w, None, None, torch.float32)), entry.n)


def _call(node: fx.Node, n: int) -> fx.Node:
    node.meta["val"] = torch.empty((LIVE, n), dtype=torch.float32, device="meta")
    return node


def _time(pool: TimedPool, index: int, entry: Entry, quantized: Launch, wide: Launch, dtype: torch.dtype) -> Outcome:
    w = torch.randn((entry.n, entry.k), generator=torch.Generator().manual_seed(0)) * entry.k**-0.5
    found = round_to_nearest(w, entry.scheme)
    parts = [part for part in (found.codes, found.scale, found.offset) if part is not None]
    x = pool.memory(max(ROWS) * entry.k * 4, np.float32)
    y = pool.memory(max(ROWS) * entry.n * 4, np.float32)
    x_wide = pool.memory(max(ROWS) * entry.k * dtype.itemsize, np.uint16 if dtype == torch.bfloat16 else np.float32)
    runs = []
    for side, launch, tensors, lhs in (("q", quantized, parts, x), ("w", wide, [w.to(dtype)], x_wide)):
        layout = next(arg.layout for arg in launch.args if isinstance(arg, Weight))
        packed = np.ascontiguousarray(LAYOUTS[layout](*tensors)).view(np.uint8).reshape(-1)
        size = -(-packed.nbytes // 64) * 64
        copies = max(4, math.ceil(3 * last_level_cache() / size))
        room = pool.memory(copies * size, np.uint16).view(np.uint8)
        for i in range(copies): room[i * size : i * size + packed.nbytes] = packed
        tables = [[lhs.ctypes.data, room.ctypes.data + i * size, y.ctypes.data] for i in range(copies)]
        runs.append([pool.steps(f"{side}{index}", tables if rows < 256 else tables[:4], [rows]) for rows in ROWS])
    best = [[math.inf] * len(ROWS) for _ in runs]
    for round_ in range(-1, ROUNDS):
        for mine, steps in zip(best, runs, strict=True):
            for i, run in enumerate(steps):
                took = run()
                if round_ >= 0: mine[i] = min(mine[i], took)
    for _ in range(CONFIRMING):
        if best[0][0] <= NOISE * best[1][0]: break
        for mine, steps in zip(best, runs, strict=True): mine[0] = min(mine[0], steps[0]())
    return Outcome(entry, quantized.name, tuple(best[0]), tuple(best[1]))
