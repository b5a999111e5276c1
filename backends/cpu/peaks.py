"""What this CPU reaches with our own kernels on made-up data: the rates that the cost model predicts with. A few seconds.

Rounds are interleaved over all cases, because on a shared machine rates change while they are measured. A sample counts if our threads
had their CPUs for all of it; rounds go on until every case has enough of those. What runs in the caches is judged by its best sample,
what reads memory by its median, as a service would find it.
"""
import math
import statistics
import time
from collections.abc import Callable, Mapping

import numpy as np

from ...compiler.costs.peaks import Peaks, last_level_cache
from ...compiler.reuse import cache_folder
from ...compiler.scratch import scratch
from .timing import TimedPool
from .toolchain import build

K, N = 512, 1024                       # of the product: a weight of 1 MiB in bf16, about a layer of a small model
HEADS, GROUP, HEAD = 4, 4, 64          # of the attention: 4 kv heads, 4 query heads each
ROUNDS = 9                             # samples of each case
STEADY = 0.1                           # two reads around a sample agree to this, or it is not taken
UNDISTURBED = 0.95                     # of a sample's wall time, the share in which every thread ran
BUDGET_S = 10.0                        # after this, a busy machine's samples are taken as they are, and said to be that
SEQUENCES, SHORT = 4, 4                # decoded at once over scattered blocks; blocks of the shorter context
FROM_MEMORY = ("read", "kv_short_bf16", "kv_long_bf16", "kv_short_i8", "kv_long_i8", "kv_write", "start", "even", "rows",
               "scan")                 # cases that read memory
KEY_BYTES = {"bf16": 2 * HEAD, "f32": 4 * HEAD, "i8": HEAD + 4}         # of one key of one head: a code has a scale of fp32 a token
RESIDENT = 12 << 20                    # activations: more than the second-level caches, less than the last one
MEMORY = 192 << 20                     # bytes read to see memory, at least 4 times the last cache

_TYPES = {"bf16": "infc::bf16", "f32": "float"}
_CACHES = {**{t: (c, c, "") for t, c in _TYPES.items()}, "i8": ("infc::bf16", "infc::digits8", ", b[7], b[8]")}
"""Of a KV cache: its dtype -> the queries' type, the kernel's name for the cache's, the codes' scales."""

_CODED = tuple((bits, *acts) for bits in (8, 4) for acts in ((16, 0), (8, 32)))         # bits of weights and of rows, these in groups of

KERNELS = {
    **{f"product_{t}": f"infc::linear<{c}, float>(r, r->dims[0], {K}, {N}, b[0], b[1], nullptr, nullptr, b[2]);"
       for t, c in _TYPES.items()},
    **{f"product_w{bits}a{acts}": f"infc::linear_of<infc::Coded<float, {bits}, 32, false, {acts}, {group}>, float>"
       f"(r, r->dims[0], {K}, {N}, b[0], b[1], nullptr, nullptr, b[2]);" for bits, acts, group in _CODED},
    **{f"attention_{t}": f"infc::paged_attention<{q}, {c}, {q}, {HEAD}>(r, r->dims[0], r->dims[1], r->dims[3], {HEADS}, {GROUP}, "
       f"0.125f, 0, 0.0f, b[0], b[1], b[2], b[3], b[4], b[5], b[6]{scales});" for t, (q, c, scales) in _CACHES.items()},
    "rows": f"infc::rms_norm<float, float, infc::bf16>(r, r->dims[0], {N}, 1e-5f, b[0], b[1], b[2]);",
    "kv_write": f"infc::kv_write<float, infc::bf16>(r, r->dims[0], {HEADS}, {HEAD}, b[0], b[1], b[2], b[3], b[4]);",
    "scan": "infc::sample(r, r->dims[2], 32768, b[0], b[1], b[2], b[3], b[4], b[5]);",
    "nothing": "",
}
HEADERS = ("pool.h", "linear.h", "quantized.h", "norm.h", "rope.h", "attention.h", "sample.h")


def source() -> str:
    """The C++ of the micro-benchmarks."""
    bodies = (f'extern "C" void {n}_k(void* const* b, const infc_run* r) {{ {body} }}\n' for n, body in KERNELS.items())
    return "".join(f'#include "{h}"\n' for h in HEADERS) + "".join(bodies)


def measure(cpu: str, isa: str, threads: int) -> Peaks:
    """Compile the micro-benchmarks for `isa` and run them with so many threads. Raises UserError without a compiler."""
    with scratch("peaks") as folder:
        library = build(source(), isa, folder / "peaks.so", cache_folder() / "code")
        pool = TimedPool(library, threads)
        try:
            return _measure(pool, cpu, isa, threads)
        finally:
            pool.close()


def _measure(m: TimedPool, cpu: str, isa: str, threads: int) -> Peaks:
    llc = last_level_cache()
    big = m.memory(max(MEMORY, 4 * llc))
    cases: dict[str, Callable[[], float]] = {"read": lambda: m.read(big), "barrier": m.steps("nothing", [[0]] * 200, [1])}
    _products(m, big, cases)
    _attentions(m, cases, max(64 << 20, 2 * llc))
    _rows(m, big, min(RESIDENT, max(llc // 2, 1 << 20)), cases)
    samples, quiet = _sample(cases, threads)
    judged = {name: statistics.median(s) if name in FROM_MEMORY else min(s) for name, s in samples.items()}
    return _peaks(judged, len(big) * 2, cpu, isa, threads, llc, quiet)


def _sample(cases: Mapping[str, Callable[[], float]], threads: int) -> tuple[dict[str, list[float]], bool]:
    """Samples of each case, and whether they are undisturbed: a step waits for its slowest thread, so one that lost its CPU decides."""
    good: dict[str, list[float]] = {name: [] for name in cases}
    every: dict[str, list[float]] = {name: [] for name in cases}
    for run in cases.values(): run()                          # to warm up
    end = time.perf_counter() + BUDGET_S
    while time.perf_counter() < end:
        for name, run in cases.items():
            if len(good[name]) >= ROUNDS: continue
            wall, cpu = time.perf_counter(), time.process_time()
            took = run()
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            steady = not math.isnan(took)                     # else the machine's read rate moved meanwhile
            every[name].append(took if steady else 0.0)
            if steady and cpu >= UNDISTURBED * wall * threads: good[name].append(took)
        if all(len(g) >= ROUNDS for g in good.values()): return good, True
    return {name: good[name] or every[name] for name in cases}, all(len(g) >= ROUNDS // 2 for g in good.values())


def _rows(m: TimedPool, big: np.ndarray, size: int, cases: dict[str, Callable[[], float]]) -> None:
    """Row kernels over many rows, one row, and the sampler's scan. Many rows and logits are found as a step finds them, after a stream of
    weights larger than the last cache has gone through; one row is small enough to stay near."""
    rows, vocab = 64, 32768
    x, w, y = m.memory(size, np.float32), m.memory(N * 4, np.float32), m.memory(size // 2)
    at = range(0, size // 4 - rows * N + 1, rows * N)
    tables = [[x.ctypes.data + 4 * i, w.ctypes.data, y.ctypes.data + 2 * i] for i in at]

    def after_a_stream(run: Callable[[], float]) -> float:
        m.read(big)
        return run()

    many, scan = m.steps("rows", tables, [rows]), [[x.ctypes.data + 4 * i] for i in range(0, size // 4 - vocab + 1, vocab)]
    cases["rows"], cases["row"] = lambda: after_a_stream(many), m.steps("rows", tables, [1])
    zeros, ones, token = m.memory(64, np.float32), m.memory(64, np.float32), m.memory(64)
    zeros[:], ones[:] = 0, 1
    small = [a.ctypes.data for a in (zeros, zeros, ones, zeros, token)]
    argmax = m.steps("scan", [[*row, *small] for row in scan], [1, 1, 1, 1])
    cases["scan"] = lambda: after_a_stream(argmax)


def _products(m: TimedPool, big: np.ndarray, cases: dict[str, Callable[[], float]]) -> None:
    """Many rows of cached weights; one row of cached weights, and of weights from memory beyond what reading them takes; as many rows as
    make arithmetic take as long as reading: what of the two does not overlap."""
    x, y = m.memory(256 * K * 4, np.float32), m.memory(256 * N * 4, np.float32)
    for dtype, item in (("bf16", 2), ("f32", 4)):
        w = m.memory(K * N * item, np.uint16 if item == 2 else np.float32)
        cases[f"product_{dtype}"] = m.steps(f"product_{dtype}", [[x.ctypes.data, w.ctypes.data, y.ctypes.data]] * 4, [256])
    for bits, acts, _ in _CODED:                                 # a scale of two bytes for each 32 codes; any bits are codes
        w = m.memory(K * N * (2 * bits + 1) // 16, np.uint16)
        cases[f"product_w{bits}a{acts}"] = m.steps(f"product_w{bits}a{acts}", [[x.ctypes.data, w.ctypes.data, y.ctypes.data]] * 4, [256])
    size, copies = K * N * 2, 4
    warm = m.memory(copies * size)
    tables = [[x.ctypes.data, warm.ctypes.data + i * size, y.ctypes.data] for i in range(copies)]
    cases["weights"] = m.steps("product_bf16", tables * 4, [1])
    cold = [[x.ctypes.data, big.ctypes.data + i * size, y.ctypes.data] for i in range(big.nbytes // size)]
    from_memory = {rows: m.steps("product_bf16", cold, [rows]) for rows in range(1, 15)}
    from_cache = {rows: m.steps("product_bf16", tables * 4, [rows]) for rows in range(1, 15)}

    def beyond_a_read(even: bool) -> float:
        """One row's seconds beyond reading its weights at that moment's rate; even: of as many rows as take as long in arithmetic, the
        seconds beyond the longer of the two, as a share of the shorter."""
        before = m.read(big)
        memory = before * size / big.nbytes
        rows = min(14, max(2, round(8 * memory / from_cache[8]()))) if even else 1
        took, arithmetic = from_memory[rows](), from_cache[rows]() if even else 0.0
        after = m.read(big)
        if abs(before - after) > STEADY * before: return math.nan
        memory = (before + after) / 2 * size / big.nbytes
        return (took - max(memory, arithmetic)) / (min(memory, arithmetic) if even else 1.0)

    cases["start"], cases["even"] = lambda: beyond_a_read(False), lambda: beyond_a_read(True)


def _attentions(m: TimedPool, cases: dict[str, Callable[[], float]], cold_bytes: int) -> None:
    """Prefill and decode over cached keys, and decode over blocks of which SHORT at a time lie together, the rest scattered in memory."""
    block = HEADS * 32 * HEAD                                 # elements of one block of keys
    for dtype, item, wide in (("bf16", 2, 2), ("f32", 4, 4), ("i8", 1, 2)):       # wide: of a query's value
        pages, new = 16, 256
        kv = m.memory(2 * pages * block * item, np.float32 if item == 4 else np.uint16)       # any bits are codes
        scales = m.memory(pages * HEADS * 32 * 4, np.float32)                     # the same for keys and values, and read by codes alone
        q, y = (m.memory(new * HEADS * GROUP * HEAD * wide, np.float32 if wide == 4 else np.uint16) for _ in range(2))
        table = m.ints(np.arange(pages))
        for name, tokens in (("attention", new), ("keys", 1)):
            start, lens = m.ints(np.array([0, tokens])), m.ints(np.array([pages * 32]))
            values = kv.ctypes.data + pages * block * item
            row = [q.ctypes.data, kv.ctypes.data, values, *(a.ctypes.data for a in (start, lens, table, y, scales, scales))]
            cases[f"{name}_{dtype}"] = m.steps(f"attention_{dtype}", [row] * 4, [tokens, 1, 0, pages])
    pages = 32                                                # of the longer context; both read the same scattered blocks
    kv = m.memory(cold_bytes // (2 * block * 2) * 2 * block * 2)
    half, start, q, y = kv.nbytes // 2, m.ints(np.arange(SEQUENCES + 1)), m.memory(1 << 16), m.memory(1 << 16)
    for dtype, item in (("i8", 1), ("bf16", 2)):              # codes fill it with twice as many blocks; bf16's are written below
        blocks = half // (block * item) // (SEQUENCES * pages) * SEQUENCES * pages       # whole runs (runtime/kv_runs.py)
        order = np.random.default_rng(1).permutation(blocks // SHORT)[:, None] * SHORT + np.arange(SHORT)
        scales = [m.memory(blocks * HEADS * 32 * 4, np.float32) for _ in range(2)] if item == 1 else []
        for name, used in (("kv_short", SHORT), ("kv_long", pages)):
            lens, tables = m.ints(np.full(SEQUENCES, used * 32)), []
            for row in order.reshape(-1, SEQUENCES * used):
                table = m.ints(row)
                tables.append([q.ctypes.data, kv.ctypes.data, kv.ctypes.data + half,
                               *(a.ctypes.data for a in (start, lens, table, y, *scales))])
            cases[f"{name}_{dtype}"] = m.steps(f"attention_{dtype}", tables, [SEQUENCES, SEQUENCES, 0, used])
    x, tables = m.memory(SEQUENCES * HEADS * HEAD * 4, np.float32), []
    for row in order[:, 0].reshape(-1, SEQUENCES):            # one token to each of so many scattered blocks
        slots = m.ints(row * 32)
        tables.append([x.ctypes.data, x.ctypes.data, kv.ctypes.data, kv.ctypes.data + half, slots.ctypes.data])
    cases["kv_write"] = m.steps("kv_write", tables, [SEQUENCES])


def _peaks(took: Mapping[str, float], big: int, cpu: str, isa: str, threads: int, llc: int, quiet: bool) -> Peaks:
    """Seconds of each case to rates."""
    product = 2 * 256 * K * N / 1e9
    read = big / took["read"] / 1e9
    flops = HEADS * GROUP * (4 * HEAD + 5)
    pairs, cached = 256 * 256 + 256 * 257 // 2, 512 * HEADS * 2                   # cached: keys and values of all heads
    start = max(0.0, took["start"])
    exposed = took["even"] - start * read * 1e9 / (K * N * 2)  # the start is there as well
    cold = {dtype: SEQUENCES * 32 * HEADS * size * 2 / 1e9 for dtype, size in KEY_BYTES.items()}      # of one block each
    per_block = {dtype: max((took[f"kv_long_{dtype}"] - took[f"kv_short_{dtype}"]) / (32 - SHORT), 1e-9) for dtype in ("bf16", "i8")}
    keys = {dtype: took[f"keys_{dtype}"] for dtype in KEY_BYTES}
    row = N * 6 / 1e9                                         # reads fp32, writes bf16
    barrier = took["barrier"]
    return Peaks(
        cpu=cpu, isa=isa, threads=threads, read_gb_s=read,
        kv_read_gb_s={dtype: cold[dtype] / seconds for dtype, seconds in per_block.items()},
        kv_start_s=max(0.0, took["kv_short_bf16"] - SHORT * per_block["bf16"]) / SEQUENCES,
        kv_write_gb_s=cold["bf16"] / 32 / took["kv_write"], start_s=start,
        cache_gb_s=64 * row / (took["rows"] - barrier), thread_cache_gb_s=row / max(took["row"] - barrier, 1e-9),
        weight_cache_gb_s=K * N * 2 / 1e9 / took["weights"],
        key_cache_gb_s={dtype: cached * KEY_BYTES[dtype] / 1e9 / keys[dtype] for dtype in ("bf16", "i8")},
        scan_gb_s=32768 * 4 / 1e9 / took["scan"],
        product_gflop_s={name.removeprefix("product_"): product / s for name, s in took.items() if name.startswith("product_")},
        attention_gflop_s={dtype: flops * pairs / 1e9 / max(took[f"attention_{dtype}"] - keys[dtype], 1e-9) for dtype in KEY_BYTES},
        exposed=min(1.0, max(0.0, exposed)), barrier_s=barrier, aten_call_s=_aten_call(), llc_bytes=llc,
        quiet=quiet)


def _aten_call() -> float:
    """Seconds of one ATen step on a small tensor: the call by name, the views, the copy of its result."""
    import torch

    x, out = torch.ones(16), torch.empty(16)
    times = []
    for _ in range(200):
        start = time.perf_counter()
        out.copy_(torch.ops.aten.add.Tensor(x, 1))
        times.append(time.perf_counter() - start)
    return statistics.median(times)
