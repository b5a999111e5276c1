"""Each CPU kernel on SmolLM2's shapes: GB/s and GFLOP/s, as shares of the limits measured in the same run.

    python benchmarks/kernels.py [--threads 2] [--rounds 7] [--only linear] [--json FILE]

Weights and KV are many copies in 2 MiB pages, so that decode really streams from memory; the limit is infc_pool_read over
the same bytes, taken before and after each timing. Products of many rows are held against the register tile alone, run on
data in L1 (`peak`). Rounds are interleaved over all cases; medians of single calls (`--best`: the
lower decile, for a machine that others use too).
"""
import argparse
import ctypes
import json
import mmap
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from infc.backends.cpu.toolchain import build
from infc.compiler.targets import host

LAYERS = 30
HIDDEN, FFN, QKV, VOCAB, HQ, HKV, D = 576, 1536, 960, 49152, 9, 3, 64

KERNELS = {
    "qkv": f"infc::linear<infc::bf16, float>(r, r->dims[0], {HIDDEN}, {QKV}, b[0], b[1], nullptr, nullptr, b[2]);",
    "out": f"infc::linear<infc::bf16, float>(r, r->dims[0], {HIDDEN}, {HIDDEN}, b[0], b[1], nullptr, b[3], b[2]);",
    "gate_up": f"infc::linear_swiglu<infc::bf16, infc::bf16, infc::SILU>(r, r->dims[0], {HIDDEN}, {FFN}, b[0], b[1], b[2]);",
    "down": f"infc::linear<infc::bf16, float>(r, r->dims[0], {FFN}, {HIDDEN}, b[0], b[1], nullptr, b[3], b[2]);",
    "head": f"infc::linear<infc::bf16, float>(r, r->dims[0], {HIDDEN}, {VOCAB}, b[0], b[1], nullptr, nullptr, b[2]);",
    "qkv_f32": f"infc::linear<float, float>(r, r->dims[0], {HIDDEN}, {QKV}, b[0], b[1], nullptr, nullptr, b[2]);",
    "rms_norm": f"infc::rms_norm<float, float, infc::bf16>(r, r->dims[0], {HIDDEN}, 1e-5f, b[0], b[1], b[2]);",
    "rope": f"infc::rope_kv_write<float, infc::bf16, infc::bf16, false>(r, r->dims[0], {HQ}, {HKV}, {D}, {D // 2}, "
            "b[0], b[1], b[2], b[3], b[4], b[5], b[6]);",
    "attention": f"infc::paged_attention<infc::bf16, infc::bf16, infc::bf16, {D}>(r, r->dims[0], r->dims[1], r->dims[3], {HKV}, "
                 f"{HQ // HKV}, 0.125f, 0, 0.0f, b[0], b[1], b[2], b[3], b[4], b[5], b[6]);",
    "sample": f"infc::sample(r, r->dims[2], {VOCAB}, b[0], b[1], b[2], b[3], b[4], b[5]);",
    "embedding": f"infc::embedding_packed<infc::bf16, int32_t, infc::bf16>(r, r->dims[0], {VOCAB}, {HIDDEN}, b[0], b[1], b[2]);",
    "nothing": "",
    "peak": """
    using namespace infc;
    constexpr int ROWS = Shape<bf16>::ROWS, V = Shape<bf16>::VECS, LDA = 64 * Dot<bf16>::A;
    auto* panel = reinterpret_cast<Dot<bf16>::Lhs*>(r->scratch);
    const char* w = static_cast<const char*>(r->scratch) + 16384;
    f32x16 sum = splat(0.0f);
#if INFC_AMX
    using F = InTiles<Wide<bf16>>;
    const Tiles tiles;
    Nothing beside;
    alignas(64) float out[F::ROWS * COLS];
    for (int i = 0; i < 1000; i++) F::multiply<F>(F::ROWS, panel, w, 256, Ahead{w, 0}, End{}, beside, out);
    sum = load16(out);
#else
    for (int i = 0; i < 2000; i++) {
        Tile<bf16, ROWS, V, LDA> tile;
        tile.zero();
        tile.steps(panel, w, 128, 64, w);
        for (int k = 0; k < ROWS; k++) for (int v = 0; v < V; v++) sum = sum + tile.total(k, v);
    }
#endif
    store16(static_cast<float*>(b[0]) + r->thread * 64, sum);""",
}
HEADERS = ("pool.h", "linear.h", "swiglu.h", "norm.h", "rope.h", "attention.h", "sample.h", "embedding.h")


class Machine:
    """The library, a pool, and memory in 2 MiB pages."""

    def __init__(self, threads: int, folder: Path):
        source = "".join(f'#include "{h}"\n' for h in HEADERS)
        source += "".join(f'extern "C" void {n}_k(void* const* b, const infc_run* r) {{ {body} }}\n' for n, body in KERNELS.items())
        started = time.perf_counter()
        self.lib = ctypes.CDLL(str(build(source, host().isa, folder / "kernels.so")))
        self.compile_s = time.perf_counter() - started
        self.lib.infc_pool_create.restype = ctypes.c_void_p
        self.lib.infc_pool_read.restype = ctypes.c_uint64
        self.lib.infc_pool_read.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
        self.lib.infc_pool_run.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p]
        self.threads, self.pool = threads, self.lib.infc_pool_create(threads, 2000)
        self.rng = np.random.default_rng(0)
        self.keep: list = []

    def memory(self, size: int, dtype: type = np.uint16) -> np.ndarray:
        """Random bf16 (or f32) values near 1 in huge pages; a constant would be read faster than real data."""
        room = mmap.mmap(-1, (size + (2 << 20)) // 4096 * 4096 + 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        room.madvise(mmap.MADV_HUGEPAGE)
        whole = np.frombuffer(room, np.uint8)
        start = -whole.ctypes.data % (2 << 20) if size >= 2 << 20 else -whole.ctypes.data % 64
        values = whole[start: start + size].view(dtype)
        noise = self.rng.standard_normal(min(len(values), 1 << 20), np.float32) * 0.05
        pattern = (noise.view(np.uint32) >> 16).astype(np.uint16) if dtype == np.uint16 else noise.astype(dtype)
        for i in range(0, len(values), len(pattern)): values[i: i + len(pattern)] = pattern[: len(values) - i]
        self.keep.append((room, whole))
        return values

    def steps(self, name: str, tables: list[list[int]]) -> Callable[[list[int]], list[float]]:
        """A step table, as a function of the live dims that runs it once and returns the seconds of each step."""
        held = [(ctypes.c_void_p * len(t))(*t) for t in tables]
        function = ctypes.cast(getattr(self.lib, f"{name}_k"), ctypes.c_void_p).value
        table = (ctypes.c_void_p * (2 * len(held)))(*(x for t in held for x in (function, ctypes.addressof(t))))
        self.keep.append((held, table))

        def run(dims: list[int]) -> list[float]:
            live = (ctypes.c_int64 * 5)(*[*dims, 0, 0, 0, 0, 0][:5])
            times = (ctypes.c_uint64 * (len(held) + 1))()
            assert self.lib.infc_pool_run(self.pool, table, len(held), live, times) == 0
            return [(times[i + 1] - times[i]) * 1e-9 for i in range(len(held))]
        return run

    def read(self, array: np.ndarray) -> float:
        """GB/s of a pure read."""
        started = time.perf_counter()
        self.lib.infc_pool_read(self.pool, array.ctypes.data, array.nbytes)
        return array.nbytes / (time.perf_counter() - started) / 1e9


@dataclass
class Case:
    name: str
    run: Callable[[], list[float]]         # seconds of each call
    bytes: int                             # read per call
    flops: int
    memory: np.ndarray | None              # what a pure read of the same bytes would read


@dataclass
class Result:
    name: str
    us: float
    gb_s: float
    share_of_read: float | None
    gflop_s: float
    share_of_peak: float


def products(m: Machine) -> list[Case]:
    out = []
    shapes = {"qkv": (HIDDEN, QKV, 2), "out": (HIDDEN, HIDDEN, 2), "gate_up": (HIDDEN, 2 * FFN, 2), "down": (FFN, HIDDEN, 2),
              "head": (HIDDEN, VOCAB, 2), "qkv_f32": (HIDDEN, QKV, 4)}
    x, y = m.memory(1024 * FFN * 4), m.memory(1024 * 2 * FFN * 4)
    for name, (k, n, item) in shapes.items():
        layers = 2 if name == "head" else LAYERS
        w = m.memory(k * n * item * layers, np.uint16 if item == 2 else np.float32)
        tables = [[x.ctypes.data, w.ctypes.data + i * k * n * item, y.ctypes.data, x.ctypes.data] for i in range(layers)]
        steps = m.steps(name, tables)
        for rows in (1, 4, 8, 16, 32, 64, 256, 512, 1024):
            if name == "head" and rows > 16: continue
            out.append(Case(f"{name} {rows}x{k}x{n}", lambda s=steps, r=rows: s([r]), k * n * item, 2 * rows * k * n, w))
    return out


def attentions(m: Machine) -> list[Case]:
    out = []
    for sequences, new, context in ((1, 1, 128), (1, 1, 512), (1, 1, 2048), (8, 1, 192), (1, 256, 256), (1, 1024, 1024), (1, 128, 1024)):
        pages = (context + 31) // 32
        size = HKV * 32 * D * 2 * pages * sequences
        kv = m.memory(size * 2 * LAYERS)
        q, y = m.memory(sequences * new * HQ * D * 2), m.memory(sequences * new * HQ * D * 2)
        start = np.arange(sequences + 1, dtype=np.int32) * new
        lens = np.full(sequences, context, np.int32)
        table = m.rng.permutation(pages * sequences).astype(np.int32)
        m.keep.append((start, lens, table))
        tables = [[q.ctypes.data, kv.ctypes.data + i * 2 * size, kv.ctypes.data + (2 * i + 1) * size, start.ctypes.data, lens.ctypes.data,
                   table.ctypes.data, y.ctypes.data] for i in range(LAYERS)]
        steps = m.steps("attention", tables)
        dims = [sequences * new, sequences, 0, pages]
        seen = sequences * sum(range(context - new + 1, context + 1))
        out.append(Case(f"attention {sequences}x{new} of {context}", lambda s=steps, d=dims: s(d), 2 * size, 4 * HQ * D * seen,
                        kv if new == 1 else None))
    return out


def small(m: Machine) -> list[Case]:
    out = []
    x, w, y = m.memory(1024 * QKV * 4, np.float32), m.memory(HIDDEN * 4, np.float32), m.memory(1024 * QKV * 4)
    cache, slots = m.memory(2 * HKV * 1024 * D * 2), np.arange(1024, dtype=np.int32)
    m.keep.append(slots)
    for rows in (1, 8, 256, 1024):
        run = m.steps("rms_norm", [[x.ctypes.data, w.ctypes.data, y.ctypes.data]] * LAYERS)
        out.append(Case(f"rms_norm {rows}", lambda s=run, r=rows: s([r]), rows * HIDDEN * 6, 4 * rows * HIDDEN, None))
        half = cache.ctypes.data + HKV * 1024 * D * 2
        table = [a.ctypes.data for a in (x, x, x, cache)] + [half, slots.ctypes.data, y.ctypes.data]
        run = m.steps("rope", [table] * LAYERS)
        out.append(Case(f"rope_kv_write {rows}", lambda s=run, r=rows: s([r]), rows * QKV * 6, 0, None))
    table, ids = m.memory(VOCAB * HIDDEN * 2), m.rng.integers(0, VOCAB, 1024).astype(np.int32)
    run = m.steps("embedding", [[table.ctypes.data, ids.ctypes.data, y.ctypes.data]])
    out += [Case(f"embedding {rows}", lambda s=run, r=rows: s([r]), rows * HIDDEN * 4, 0, None) for rows in (1, 1024)]
    logits, zeros, ones = m.memory(8 * VOCAB * 4, np.float32), np.zeros(8, np.int32), np.ones(8, np.float32)
    logits *= 60
    token, greedy = np.zeros(8, np.int32), np.zeros(8, np.float32)
    m.keep.append((zeros, ones, token, greedy, ids))
    for kind, heat in (("greedy", greedy), ("drawn", ones)):
        run = m.steps("sample", [[a.ctypes.data for a in (logits, heat, zeros, ones, greedy, token)]])
        out += [Case(f"sample {kind} {rows}", lambda s=run, r=rows: s([0, 0, r]), rows * VOCAB * 4, 0, None) for rows in (1, 8)]
    run = m.steps("nothing", [[0]] * 100)
    out.append(Case("barrier", lambda s=run: s([1]), 0, 0, None))
    return out


def measure(m: Machine, cases: list[Case], rounds: int, quantile: float) -> tuple[list[Result], float, float]:
    room = m.memory(m.threads * 64 * 4 + 64)
    peak_run = m.steps("peak", [[room.ctypes.data]])
    peak_flops = m.threads * 2000 * 64 * 2 * 2 * 32 * _tile_rows()
    times: dict[str, list[float]] = {c.name: [] for c in cases}
    shares: dict[str, list[float]] = {c.name: [] for c in cases}
    peaks, reads = [], []
    for _ in range(rounds):
        for case in cases:
            before = m.read(case.memory) if case.memory is not None else None
            took = case.run()
            times[case.name] += took
            if before is not None and case.memory is not None:
                limit = (before + m.read(case.memory)) / 2
                reads.append(limit)
                shares[case.name].append(case.bytes * len(took) / sum(took) / 1e9 / limit)
        peaks.append(peak_flops / peak_run([1])[0] / 1e9)
    peak = max(peaks) if quantile < 0.5 else statistics.median(peaks)
    results = []
    for case in cases:
        took = sorted(times[case.name])[int(quantile * len(times[case.name]))]
        share = statistics.median(shares[case.name]) if shares[case.name] else None
        flops = case.flops / took / 1e9
        results.append(Result(case.name, took * 1e6, case.bytes / took / 1e9, share, flops, flops / peak))
    return results, peak, statistics.median(reads) if reads else 0.0


def _tile_rows() -> int:
    return {"x86-64-v4-amx": 32, "x86-64-v4-bf16": 14, "x86-64-v4": 12, "x86-64-v3": 4, "portable": 2}[host().isa]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="")
    parser.add_argument("--best", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        machine = Machine(options.threads, Path(folder))
        cases = [c for make in (products, attentions, small) for c in make(machine) if options.only in c.name]
        results, peak, read = measure(machine, cases, options.rounds, 0.1 if options.best else 0.5)
    print(f"{host().isa}, {options.threads} threads: read {read:.1f} GB/s, peak {peak:.0f} GFLOP/s bf16, "
          f"compiled in {machine.compile_s:.1f} s")
    print(f"{'kernel':28}{'us':>10}{'GB/s':>8}{'of read':>9}{'GFLOP/s':>9}{'of peak':>9}")
    for r in results:
        share = "" if r.share_of_read is None else f"{r.share_of_read:.2f}"
        print(f"{r.name:28}{r.us:10.2f}{r.gb_s:8.1f}{share:>9}{r.gflop_s:9.0f}{r.share_of_peak:9.2f}")
    if options.json:
        options.json.write_text(json.dumps({"isa": host().isa, "threads": options.threads, "read_gb_s": read, "peak_gflop_s": peak,
                                            "kernels": [asdict(r) for r in results]}, indent=1))


if __name__ == "__main__":
    main()
