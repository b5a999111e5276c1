"""Does a quantized product pay on this CPU? Its kernel beside the bf16 one it replaces, same shape, weights from memory.

Both run in turns by one pool, each over copies of its weights that exceed the last cache several times, so that one row reads
memory as a decode step does. The best of the rounds counts: a neighbour can only make a kernel slower.
"""
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import fx

from ...compiler.costs.peaks import last_level_cache
from ...compiler.ops import infc
from ...compiler.quant.rounding import round_to_nearest
from ...compiler.quant.scheme import Scheme
from ...compiler.reuse import cache_folder
from ..launch import Context, Launch, Weight
from . import claims
from .pack import LAYOUTS
from .timing import TimedPool
from .toolchain import build

ROWS = (1, 8, 256)                 # a decode step, a batch of them, a prompt
ROUNDS = 7
LIVE = 9973                        # stands for the live number of rows, as no weight has this size


@dataclass(frozen=True)
class Entry:
    """One product: w [n, k] in a scheme."""

    n: int
    k: int
    scheme: Scheme


@dataclass(frozen=True)
class Outcome:
    """Seconds of one product at each number of rows in ROWS, of the quantized kernel and of the bf16 one."""

    entry: Entry
    kernel: str
    quantized_s: tuple[float, ...]
    bf16_s: tuple[float, ...]


class _Context(Context):
    def dim(self, size: object) -> int | str:
        return "r->dims[0]" if size == LIVE else int(size)   # type: ignore[call-overload]


def race(entries: Sequence[Entry], isa: str, threads: int) -> list[Outcome]:
    """Compile both kernels of each entry for this machine and time them. Raises UserError without a compiler."""
    context = _Context(isa, {"T": max(ROWS)})
    pairs = [(entry, *(_launch(entry, coded, context) for coded in (True, False))) for entry in entries]
    source, headers = "", dict.fromkeys(["pool.h"])
    for i, (_, quantized, wide) in enumerate(pairs):
        for side, launch in (("q", quantized), ("w", wide)):
            headers.update(dict.fromkeys(launch.headers))
            source += f'extern "C" void {side}{i}_k(void* const* b, const infc_run* r) {{ {launch.body} }}\n'
    with tempfile.TemporaryDirectory(prefix="infc-race-") as folder:
        text = "".join(f'#include "{h}"\n' for h in headers) + source
        pool = TimedPool(build(text, isa, Path(folder) / "race.so", cache_folder() / "code"), threads)
        try:
            return [_time(pool, i, entry, quantized, wide) for i, (entry, quantized, wide) in enumerate(pairs)]
        finally:
            pool.close()


def _launch(entry: Entry, coded: bool, context: Context) -> Launch:
    """The call of the product, x as the step graph gives it: f32 for codes, bf16 for bf16."""
    graph, s = fx.Graph(), entry.scheme
    def given(name: str, *shape: int, dtype: torch.dtype) -> fx.Node:
        node = graph.placeholder(name)
        node.meta["val"] = torch.empty(shape, dtype=dtype, device="meta")
        return node

    if coded:
        x = given("x", LIVE, entry.k, dtype=torch.float32)
        groups = -(-entry.k // s.group) if s.group else 1
        codes = given("codes", entry.n, -(-entry.k * s.bits // 8), dtype=torch.uint8)
        scale = given("scale", entry.n, groups, dtype=torch.float16)
        offset = None if s.symmetric else given("offset", entry.n, groups, dtype=torch.float16)
        args = (x, codes, scale, offset, None, None, s.bits, s.group, s.act_bits, s.act_group, torch.float32)
        node = graph.call_function(infc.linear_quantized.default, args)
    else:
        x, w = given("x", LIVE, entry.k, dtype=torch.bfloat16), given("w", entry.n, entry.k, dtype=torch.bfloat16)
        node = graph.call_function(infc.linear.default, (x, w, None, None, torch.float32))
    node.meta["val"] = torch.empty((LIVE, entry.n), dtype=torch.float32, device="meta")
    if reason := claims.refuse(node, context): raise ValueError(reason)
    return claims.lower(node, context)


def _time(pool: TimedPool, index: int, entry: Entry, quantized: Launch, wide: Launch) -> Outcome:
    w = torch.randn((entry.n, entry.k), generator=torch.Generator().manual_seed(0)) * entry.k**-0.5
    found = round_to_nearest(w, entry.scheme)
    parts = [part for part in (found.codes, found.scale, found.offset) if part is not None]
    x = pool.memory(max(ROWS) * entry.k * 4, np.float32)
    x_bf16, y = pool.memory(max(ROWS) * entry.k * 2), pool.memory(max(ROWS) * entry.n * 4, np.float32)
    runs = []
    for side, launch, tensors, lhs in (("q", quantized, parts, x), ("w", wide, [w.bfloat16()], x_bf16)):
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
    return Outcome(entry, quantized.name, tuple(best[0]), tuple(best[1]))
