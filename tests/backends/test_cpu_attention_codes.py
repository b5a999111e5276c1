"""A KV cache of 8-bit codes on the CPU: what is written, and attention over it, against the operators' references."""
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from cpu_kernels import CONTEXT, ISAS, Library, M, N, P, T, call, judge, judge_sums, meta
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from infc.backends.cpu import claims
from infc.backends.cpu.pack import in_runs, out_of_runs, pack_k, pack_v, unpack_k, unpack_v
from infc.compiler.ops.attention import visible, weigh
from infc.compiler.ops.kv_quantized import read, stored
from infc.compiler.ops.registry import by_name
from infc.compiler.placement import Limit
from torch import Tensor, fx

F32, BF16, I32, I8 = torch.float32, torch.bfloat16, torch.int32, torch.int8
OPS = torch.ops.infc

# name: query heads, kv heads, head size, q dtype, output dtype, window, soft-cap, dtype of the sinks
KINDS = {
    "smollm2": (9, 3, 64, BF16, BF16, 0, 0.0),
    "smollm2-f32": (9, 3, 64, F32, F32, 0, 0.0),
    "one-kv-head": (7, 1, 48, BF16, F32, 0, 0.0),
    "no-groups-window": (2, 2, 32, F32, F32, 40, 0.0),
    "no-groups": (2, 2, 16, BF16, BF16, 0, 0.0),
    "soft-cap": (4, 1, 80, F32, F32, 0, 20.0),
    "soft-cap-window-bf16": (8, 2, 128, BF16, BF16, 70, 30.0),
    "sinks": (8, 1, 64, BF16, BF16, 0, 0.0, F32),
    "sinks-window-f32": (6, 2, 48, F32, F32, 40, 0.0, F32),
    "sinks-all-bf16": (9, 3, 64, BF16, BF16, 70, 30.0, BF16),
}

# (new tokens, context before them) of each sequence
BATCHES = {
    "first token": [(1, 0)],
    "decode": [(1, 36)],
    "long decode": [(1, 515)],
    "decodes": [(1, 31), (1, 32), (1, 33), (1, 200), (1, 0)],
    "prefill": [(77, 0)],
    "chunked prefill": [(40, 100)],
    "mixed": [(1, 300), (20, 0), (3, 130), (1, 5), (33, 64)],
    "an empty sequence": [(2, 3), (0, 7), (1, 64)],
}


def caches(heads: int, d: int) -> dict[str, Tensor]:
    """The four caches of one layer, as meta tensors."""
    return {f"{which}_{what}": meta(P, heads, 32, d if what == "cache" else 1, dtype=I8 if what == "cache" else F32)
            for which in "kv" for what in ("cache", "scale")}


def attend(hq: int, hkv: int, d: int, q: torch.dtype, y: torch.dtype, window: int, softcap: float,
           sinks: torch.dtype | None = None) -> fx.Node:
    return call(OPS.paged_attention_quantized.default, q=meta(T, hq, d, dtype=q), **caches(hkv, d), query_start=meta(N + 1, dtype=I32),
                context_len=meta(N, dtype=I32), block_table=meta(N, M, dtype=I32), scale=d**-0.5, window=window, softcap=softcap,
                out_dtype=y, sinks=None if sinks is None else meta(hq, dtype=sinks))


def write(interleaved: bool) -> fx.Node:
    return call(OPS.rope_kv_write_quantized.default, qkv=meta(T, 8 * 48), cos=meta(T, 20), sin=meta(T, 20), **caches(2, 48),
                slots=meta(T, dtype=I32), q_heads=4, kv_heads=2, interleaved=interleaved, format="int8", out_dtype=BF16)


@pytest.fixture(scope="module", params=ISAS)
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Library]:
    nodes = {name: attend(*kind) for name, kind in KINDS.items()} | {f"write-{i}": write(i) for i in (False, True)}
    nodes["plain-write"] = call(OPS.kv_write_quantized.default, k=meta(T, 3, 32), v=meta(T, 3, 32), **caches(3, 32),
                                slots=meta(T, dtype=I32), format="int8")
    made = Library(request.param, nodes, tmp_path_factory.mktemp("codes"))
    yield made
    made.close()


@dataclass
class Step:
    """Inputs of one step; places that nobody wrote hold a scale of NaN and whatever code. `tables` are scattered over the pool."""

    q: Tensor
    caches: list[Tensor]               # k codes, k scale, v codes, v scale
    query_start: Tensor
    context_len: Tensor
    block_table: Tensor
    sinks: Tensor | None


def step(kind: str, work: Sequence[tuple[int, int]], seed: int, padding: int = 2) -> Step:
    hq, hkv, d, dtype, _, _, _, *sunk = KINDS[kind]
    make = torch.Generator().manual_seed(seed)
    new, before = zip(*work, strict=True)
    lens = [a + b for a, b in zip(new, before, strict=True)]
    blocks = [(n + 31) // 32 for n in lens]
    width, pool = max(blocks) + 1, sum(blocks) + 3
    order = torch.randperm(pool, generator=make)
    table = torch.full((len(lens), width), 2**30, dtype=I32)           # what lies beyond a sequence's blocks is never followed
    wide = [torch.randn(pool, hkv, 32, d, generator=make) * torch.rand(pool, hkv, 32, 1, generator=make) for _ in "kv"]
    written = torch.zeros(pool, 32, dtype=torch.bool)
    for n, count in enumerate(blocks):
        mine, order = order[:count], order[count:]
        table[n, :count] = mine.to(I32)
        for p in range(lens[n]): written[mine[p // 32], p % 32] = True
    parts = []
    for x in wide:
        codes, scale = stored(x, "int8")
        scale[~written[:, None].expand(pool, hkv, 32)] = torch.nan
        parts += [codes, scale]
    starts = torch.tensor([0, *torch.tensor(new).cumsum(0).tolist()], dtype=I32)
    q = torch.randn(int(starts[-1]) + padding, hq, d, generator=make).to(dtype)
    q[int(starts[-1]):] = torch.nan                                    # padding rows: of no sequence
    sinks = (torch.randn(hq, generator=make) * 2 + 2).to(sunk[0]) if sunk else None
    return Step(q, parts, starts, torch.tensor(lens, dtype=I32), table, sinks)


def run(library: Library, kind: str, s: Step, threads: int) -> Tensor:
    given = {"q": s.q, **physical(s.caches), "query_start": s.query_start, "context_len": s.context_len, "block_table": s.block_table}
    if s.sinks is not None: given["sinks"] = s.sinks
    (found,) = library.run(kind, given, [len(s.q), len(s.context_len), 0, s.block_table.shape[1], len(s.caches[0])], threads)
    return found


def reference(kind: str, s: Step) -> Tensor:
    """In fp64."""
    _, _, d, _, _, window, softcap, *_ = KINDS[kind]
    return by_name("infc::paged_attention_quantized").reference(
        s.q.double(), *s.caches, s.query_start, s.context_len, s.block_table, d**-0.5, window, softcap, sinks=s.sinks)


def rounded(kind: str, s: Step, order: int = 0) -> Tensor:
    """The reference in fp32; with queries in bf16, its probabilities are rounded to bf16 before they meet v, as wide caches have it.

    order: its sums over columns and tokens in another order, one for each number.
    """
    _, _, d, dtype, _, window, softcap, *_ = KINDS[kind]
    out = torch.zeros(s.q.shape)
    group = s.q.shape[1] // s.caches[0].shape[1]
    k_cache, v_cache = read(*s.caches[:2], F32), read(*s.caches[2:], F32)
    pick = torch.Generator().manual_seed(order)
    columns = torch.randperm(d, generator=pick) if order else torch.arange(d)
    for n, context in enumerate(s.context_len.tolist()):
        first, last = s.query_start[n: n + 2].tolist()
        position = torch.arange(context)
        blocks = s.block_table[n, position // 32].long()
        keys, values = (c[blocks, :, position % 32].transpose(0, 1).repeat_interleave(group, 0) for c in (k_cache, v_cache))
        scores = s.q[first:last, :, columns].float().transpose(0, 1) @ keys[..., columns].transpose(-1, -2) * d**-0.5
        p = weigh(scores, visible("causal", window, last - first, context), softcap, sinks=s.sinks)
        tokens = torch.randperm(context, generator=pick) if order else position
        out[first:last] = (p.to(dtype).float()[..., tokens] @ values[:, tokens]).transpose(0, 1)
    return out.flatten(1)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("kind", KINDS)
def test_paged_attention(library: Library, kind: str, batch: str) -> None:
    y, results = KINDS[kind][4], []
    for threads in (1, 2, 3):
        s = step(kind, BATCHES[batch], seed=threads)
        found = run(library, kind, s, threads)
        assert bool((found[int(s.query_start[-1]):] == 0).all()), "padding rows are not 0"
        results.append((found, rounded(kind, s).to(y), reference(kind, s)))
    judge_sums(*(torch.cat(part) for part in zip(*results, strict=True)))


ORDERS = 4                                                             # the worst of a sum is luck: that of one order is not another's


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@example([(26, 103), (62, 67), (0, 97), (0, 129)], 0, 1, "soft-cap", 8)        # fp32 scores were one chain of 80 products
@example([(45, 120)], 0, 1, "no-groups-window", 65)                            # and values one of 128
@example([(66, 159), (48, 215), (39, 186), (41, 184), (41, 184), (65, 160)], 0, 1, "no-groups-window", 2)    # 7.6 ulps in one of 20,000
@given(work=st.lists(st.tuples(st.integers(0, 70), st.integers(0, 260)).filter(sum), min_size=1, max_size=6), padding=st.integers(0, 3),
       threads=st.integers(1, 3), kind=st.sampled_from(sorted(KINDS)), seed=st.integers(0, 99))
def test_any_mix_of_lengths(library: Library, work: list[tuple[int, int]], padding: int, threads: int, kind: str, seed: int) -> None:
    """Lengths around block and chunk ends, empty sequences, padding: finite, near the reference, 0 where nobody is."""
    s = step(kind, work, seed, padding)
    if not len(s.q): return
    found, exact = run(library, kind, s, threads), reference(kind, s)
    assert bool((found[int(s.query_start[-1]):] == 0).all())
    error = (found.double() - exact).abs()
    own = torch.stack([(rounded(kind, s, order).to(found.dtype).double() - exact).abs() for order in range(ORDERS)])
    allowed = 2 * own.max() + torch.finfo(BF16 if KINDS[kind][3] == BF16 else F32).eps * exact.abs().max()
    assert bool((error <= allowed).all()), f"{error.max():.3g} off, {allowed:.3g} allowed"
    mean, usual = (float(e.square().mean().sqrt()) for e in (error, own[0]))                     # that one is no luck
    assert mean <= 2 * usual + torch.finfo(found.dtype).eps * float(exact.square().mean().sqrt()), f"{mean:.3g}, PyTorch {usual:.3g}"


def test_what_is_not_finite_shows(library: Library) -> None:
    """A scale of NaN or inf that a token sees is NaN in its result: products of bytes must not hide it. Other heads stay as they are."""
    for kind in ("smollm2", "smollm2-f32"):
        for which in (1, 3):
            s = step(kind, [(1, 40)], seed=7, padding=0)
            clean = run(library, kind, s, 2)
            s.caches[which][s.block_table[0, 0], 1, 9] = torch.nan
            found = run(library, kind, s, 2).view(9, 64)
            assert bool(found[3:6].isnan().all()) and torch.equal(found[[0, 1, 2, 6, 7, 8]], clean.view(9, 64)[[0, 1, 2, 6, 7, 8]])


def test_r19_zero_rows_and_channels_are_exact_zeros(library: Library) -> None:
    for kind in ("smollm2", "smollm2-f32"):
        s = step(kind, [(5, 90)], seed=3, padding=0)
        k, k_scale, v, v_scale = s.caches
        v[..., 11] = 0                                                 # a channel over all tokens
        mine = s.block_table[0, :3].long()
        for part in (k, k_scale, v, v_scale): part[mine[0], :, :7] = 0  # whole rows: scale 0
        found = run(library, kind, s, 2).view(5, 9, 64)
        assert bool(found.isfinite().all()) and bool((found[..., 11] == 0).all())
        v[:], v_scale[mine] = 0, 0
        assert bool((run(library, kind, s, 2) == 0).all())


# --------------------------------------------------------------------------------------------------------------- writes

def zeros(pool: int, heads: int, d: int) -> list[Tensor]:
    """Codes and scales of k and v that hold what a step must not touch."""
    return [part for _ in "kv" for part in (torch.full((pool, heads, 32, d), 77, dtype=I8), torch.full((pool, heads, 32, 1), 0.5))]


def physical(parts: Sequence[Tensor]) -> dict[str, Tensor]:
    return {"k_cache": pack_k(parts[0]), "k_scale": in_runs(parts[1]), "v_cache": pack_v(parts[2]), "v_scale": in_runs(parts[3])}


def logical(found: dict[str, Tensor], pool: int) -> list[Tensor]:
    return [unpack_k(found["k_cache"], pool), out_of_runs(found["k_scale"], pool),
            unpack_v(found["v_cache"], pool), out_of_runs(found["v_scale"], pool)]


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_kv_write_gives_the_reference_codes(library: Library, threads: int) -> None:
    make = torch.Generator().manual_seed(2)
    k, v = (torch.randn(20, 3, 32, generator=make) * 10.0 ** torch.randint(-6, 6, (20, 3, 1), generator=make) for _ in "kv")
    k[3, 1], v[4, 2], k[6], v[7, 0] = 0, 0, 1e-38, 2.5                  # zero rows, a scale near nothing, one constant
    slots = torch.randperm(64, generator=make)[:20].to(I32)
    slots[5] = -1
    expected = zeros(2, 3, 32)
    given = physical(expected)
    assert library.run("plain-write", {"k": k, "v": v, "slots": slots, **given}, [20], threads) == ()
    by_name("infc::kv_write_quantized").reference(k, v, *expected, slots, "int8")
    for found, wanted in zip(logical(given, 2), expected, strict=True): assert torch.equal(found, wanted)


def test_what_cannot_be_held_is_nan_where_it_is_read(library: Library) -> None:
    k, v = torch.randn(3, 3, 32), torch.randn(3, 3, 32)
    k[0, 1, 5], v[1, 2, 31], v[2, 0, 0] = torch.nan, torch.inf, -torch.inf
    given = physical(zeros(1, 3, 32))
    library.run("plain-write", {"k": k, "v": v, "slots": torch.arange(3, dtype=I32), **given}, [3], 2)
    codes_k, k_scale, codes_v, v_scale = logical(given, 1)
    for codes, scale, wide in ((codes_k, k_scale, k), (codes_v, v_scale, v)):
        meant = read(codes, scale, F32)[0, :, :3].transpose(0, 1)
        assert torch.equal(meant.isnan().all(-1), ~wide.isfinite().all(-1)) and torch.equal(meant.isnan().any(-1), ~wide.isfinite().all(-1))


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_kv_write(library: Library, interleaved: bool) -> None:
    make = torch.Generator().manual_seed(1)
    reference, wide = by_name("infc::rope_kv_write_quantized").reference, by_name("infc::rope_kv_write").reference
    for tokens in (1, 2, 37):
        qkv, cos, sin = (torch.randn(tokens, n, generator=make) for n in (8 * 48, 20, 20))
        slots = torch.randperm(4 * 32, generator=make)[:tokens].to(I32)
        slots[tokens // 2 + 1:: 3] = -1
        for threads in (1, 2, 3):
            parts = zeros(4, 2, 48)
            given = physical(parts)
            (q,) = library.run(f"write-{interleaved}", {"qkv": qkv, "cos": cos, "sin": sin, "slots": slots, **given}, [tokens], threads)
            plain = reference(qkv, cos, sin, *parts, slots, 4, 2, interleaved, "int8", BF16)
            k64, v64 = (torch.full((4, 2, 32, 48), torch.nan, dtype=torch.float64) for _ in "kv")
            exact = wide(qkv.double(), cos.double(), sin.double(), k64, v64, slots, 4, 2, interleaved)
            judge(q.view(-1, 48), plain.view(-1, 48), exact.view(-1, 48))
            found = logical(given, 4)
            for codes, scale, meant in ((found[0], found[1], k64), (found[2], found[3], v64)):
                there = ~meant.isnan()
                off = ((read(codes, scale, torch.float64) - meant).abs() / scale)[there]
                assert off.max() <= 0.5 + 2.0**-12, "more than half a step off"
                assert bool((codes[~there] == 77).all()) and bool((scale[~there[..., :1]] == 0.5).all()), "wrote where no slot is"
            assert torch.equal(found[2], parts[2]) and torch.equal(found[3], parts[3])


# -------------------------------------------------------------------------------------------------------------- refusals

def test_refuses_head_sizes_and_formats_it_has_no_kernel_for() -> None:
    odd = claims.refuse(attend(4, 2, 40, BF16, BF16, 0, 0.0), CONTEXT)
    assert isinstance(odd, Limit) and odd == "head size 40 is not supported with --kv-quant on this target: multiples of 16 up to 256"
    node = attend(4, 2, 64, BF16, BF16, 0, 0.0)
    node.kwargs["k_cache"].meta["val"] = meta(P, 2, 32, 64, dtype=torch.float8_e4m3fn)
    reason = claims.refuse(node, CONTEXT)
    assert isinstance(reason, Limit) and "float8_e4m3fn has no kernel on this target: use --kv-quant int8" in reason
