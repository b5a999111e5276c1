"""Paged attention and the writes into its cache, against the operators' references: mixed batches, windows, soft-caps, sinks."""
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch
from cpu_kernels import CONTEXT, ISAS, Library, M, N, P, T, call, judge, judge_sums, meta
from infc.backends.cpu import claims
from infc.backends.cpu.pack import pack_k, pack_v, unpack_k, unpack_v
from infc.compiler.ops.attention import visible, weigh
from infc.compiler.ops.registry import by_name
from torch import Tensor, fx

F32, BF16, I32 = torch.float32, torch.bfloat16, torch.int32
OPS = torch.ops.infc

# name: query heads, kv heads, head size, cache dtype, q dtype, output dtype, window, soft-cap, dtype of the sinks
KINDS = {
    "smollm2": (9, 3, 64, BF16, BF16, BF16, 0, 0.0),
    "smollm2-f32": (9, 3, 64, F32, F32, F32, 0, 0.0),
    "one-kv-head": (7, 1, 48, BF16, BF16, F32, 0, 0.0),
    "no-groups-window": (2, 2, 32, F32, F32, F32, 40, 0.0),
    "soft-cap": (4, 1, 80, F32, F32, F32, 0, 20.0),
    "soft-cap-window-bf16": (8, 2, 128, BF16, BF16, BF16, 70, 30.0),
    "wide-heads": (4, 2, 96, BF16, BF16, F32, 0, 0.0),
    "sinks": (8, 1, 64, BF16, BF16, BF16, 0, 0.0, F32),
    "sinks-window-f32": (6, 2, 48, F32, F32, F32, 40, 0.0, F32),
    "sinks-soft-cap": (3, 3, 32, F32, F32, F32, 0, 20.0, BF16),
    "sinks-all-bf16": (9, 3, 64, BF16, BF16, BF16, 70, 30.0, BF16),
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


def attend(hq: int, hkv: int, d: int, kv: torch.dtype, q: torch.dtype, y: torch.dtype, window: int, softcap: float,
           sinks: torch.dtype | None = None) -> fx.Node:
    return call(OPS.paged_attention.default, q=meta(T, hq, d, dtype=q), k_cache=meta(P, hkv, 32, d, dtype=kv),
                v_cache=meta(P, hkv, 32, d, dtype=kv), query_start=meta(N + 1, dtype=I32), context_len=meta(N, dtype=I32),
                block_table=meta(N, M, dtype=I32), scale=d**-0.5, window=window, softcap=softcap, out_dtype=y,
                sinks=None if sinks is None else meta(hq, dtype=sinks))


def write(kv: torch.dtype, interleaved: bool) -> fx.Node:
    return call(OPS.rope_kv_write.default, qkv=meta(T, 8 * 48), cos=meta(T, 20), sin=meta(T, 20), k_cache=meta(P, 2, 32, 48, dtype=kv),
                v_cache=meta(P, 2, 32, 48, dtype=kv), slots=meta(T, dtype=I32), q_heads=4, kv_heads=2, interleaved=interleaved,
                out_dtype=kv)


@pytest.fixture(scope="module", params=ISAS)
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Library]:
    nodes = {name: attend(*kind) for name, kind in KINDS.items()}
    for name, kind in (("sinks-none", "sinks"), ("sinks-none-f32", "sinks-window-f32")): nodes[name] = attend(*KINDS[kind][:8])
    for kv in (F32, BF16):
        for interleaved in (False, True): nodes[f"write-{kv}-{interleaved}"] = write(kv, interleaved)
        nodes[f"plain-write-{kv}"] = call(
            OPS.kv_write.default, k=meta(T, 3, 32), v=meta(T, 3, 32), k_cache=meta(P, 3, 32, 32, dtype=kv),
            v_cache=meta(P, 3, 32, 32, dtype=kv), slots=meta(T, dtype=I32))
    made = Library(request.param, nodes, tmp_path_factory.mktemp("attention"))
    yield made
    made.close()


@dataclass
class Step:
    """Inputs of one step over a cache whose unwritten places are NaN; `tables` are scattered over the pool."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    query_start: Tensor
    context_len: Tensor
    block_table: Tensor
    sinks: Tensor | None


def step(kind: str, batch: str, seed: int, padding: int = 2) -> Step:
    hq, hkv, d, kv, dtype, _, _, _, *sunk = KINDS[kind]
    make = torch.Generator().manual_seed(seed)
    new, before = zip(*BATCHES[batch], strict=True)
    lens = [a + b for a, b in zip(new, before, strict=True)]
    blocks = [(n + 31) // 32 for n in lens]
    width, pool = max(blocks) + 1, sum(blocks) + 3
    order = torch.randperm(pool, generator=make)
    table = torch.full((len(lens), width), 2**30, dtype=I32)           # what lies beyond a sequence's blocks is never followed
    k_cache, v_cache = (torch.full((pool, hkv, 32, d), torch.nan, dtype=kv) for _ in "kv")
    for n, count in enumerate(blocks):
        mine, order = order[:count], order[count:]
        table[n, :count] = mine.to(I32)
        for p in range(lens[n]):
            for cache in (k_cache, v_cache):
                cache[mine[p // 32], :, p % 32] = torch.randn(hkv, d, generator=make).to(kv)
    starts = torch.tensor([0, *torch.tensor(new).cumsum(0).tolist()], dtype=I32)
    q = torch.randn(int(starts[-1]) + padding, hq, d, generator=make).to(dtype)
    q[int(starts[-1]):] = torch.nan                                    # padding rows: of no sequence
    sinks = (torch.randn(hq, generator=make) * 2 + 2).to(sunk[0]) if sunk else None
    return Step(q, k_cache, v_cache, starts, torch.tensor(lens, dtype=I32), table, sinks)


def run(library: Library, kind: str, s: Step, threads: int) -> Tensor:
    given = {"q": s.q, "k_cache": pack_k(s.k_cache), "v_cache": pack_v(s.v_cache), "query_start": s.query_start,
             "context_len": s.context_len, "block_table": s.block_table}
    if s.sinks is not None: given["sinks"] = s.sinks
    (found,) = library.run(kind, given, [len(s.q), len(s.context_len), 0, s.block_table.shape[1], len(s.k_cache)], threads)
    return found


def rounded(s: Step, window: int, softcap: float) -> Tensor:
    """The reference with its probabilities rounded to the cache's dtype before they meet v, as bf16 attention is computed."""
    out = torch.zeros(s.q.shape)
    group = s.q.shape[1] // s.k_cache.shape[1]
    for n, context in enumerate(s.context_len.tolist()):
        first, last = s.query_start[n: n + 2].tolist()
        position = torch.arange(context)
        blocks = s.block_table[n, position // 32].long()
        keys, values = (c[blocks, :, position % 32].float().transpose(0, 1).repeat_interleave(group, 0) for c in (s.k_cache, s.v_cache))
        scores = s.q[first:last].float().transpose(0, 1) @ keys.transpose(-1, -2) * s.q.shape[2]**-0.5
        p = weigh(scores, visible("causal", window, last - first, context), softcap, sinks=s.sinks)
        out[first:last] = (p.to(s.k_cache.dtype).float() @ values).transpose(0, 1)
    return out.flatten(1)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("kind", KINDS)
def test_paged_attention(library: Library, kind: str, batch: str) -> None:
    _, _, d, _, _, y, window, softcap, *_ = KINDS[kind]
    results = []
    for threads in (1, 2, 3):
        s = step(kind, batch, seed=threads)
        found = run(library, kind, s, threads)
        assert bool((found[int(s.query_start[-1]):] == 0).all()), "padding rows are not 0"
        exact = by_name("infc::paged_attention").reference(
            s.q.double(), s.k_cache.double(), s.v_cache.double(), s.query_start, s.context_len, s.block_table, d**-0.5, window, softcap,
            sinks=s.sinks)
        results.append((found, rounded(s, window, softcap).to(y), exact))
    judge_sums(*(torch.cat(part) for part in zip(*results, strict=True)))


@pytest.mark.parametrize("kind", ["sinks", "sinks-window-f32"])
def test_sinks_of_no_weight_and_of_all_of_it(library: Library, kind: str) -> None:
    """-inf changes nothing, a huge one leaves 0: of that head alone, however the threads share the keys."""
    plain = {"sinks": "sinks-none", "sinks-window-f32": "sinks-none-f32"}[kind]
    for batch, threads in product(("long decode", "mixed"), (1, 2, 3)):
        s = step(kind, batch, seed=threads)
        assert s.sinks is not None
        s.sinks[:], s.sinks[1] = -torch.inf, 1e6
        found, without = (x.view(len(s.q), len(s.sinks), -1) for x in (run(library, kind, s, threads),
                                                                       run(library, plain, replace(s, sinks=None), threads)))
        others = [h for h in range(len(s.sinks)) if h != 1]
        assert torch.equal(found[:, others], without[:, others]) and bool((found[:, 1] == 0).all())


def test_a_program_without_sinks_has_the_body_it_had() -> None:
    """No sinks, no argument, no template parameter: compiled code of old models stays what it was."""
    dims = "r->dims[0], r->dims[1], r->dims[3]"
    launch = claims.lower(attend(*KINDS["smollm2"]), CONTEXT)
    assert launch.body == (f"infc::paged_attention<infc::bf16, infc::bf16, infc::bf16, 64>(r, {dims}, 3, 3, 0.125f, 0, 0.0f, "
                           "b[0], b[1], b[2], b[3], b[4], b[5], b[6]);")
    assert claims.lower(attend(*KINDS["sinks"]), CONTEXT).name == launch.name.replace("9x3", "8x1") + "_sinks"


def test_sinks_of_another_dtype_are_refused() -> None:
    reason = claims.refuse(attend(8, 1, 64, BF16, BF16, BF16, 0, 0.0, torch.float16), CONTEXT)
    assert reason == "sinks is torch.float16, the kernel reads f32 and bf16"


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("kv", [F32, BF16], ids=str)
def test_rope_kv_write(library: Library, kv: torch.dtype, interleaved: bool) -> None:
    make = torch.Generator().manual_seed(1)
    for tokens in (1, 2, 37):
        qkv, cos, sin = (torch.randn(tokens, n, generator=make) for n in (8 * 48, 20, 20))
        slots = torch.randperm(4 * 32, generator=make)[:tokens].to(I32)
        slots[tokens // 2 + 1:: 3] = -1
        for threads in (1, 2, 3):
            before = torch.randn(4, 2, 32, 48, generator=make).to(kv)
            k, v, k64, v64 = before.clone(), before.clone(), before.double(), before.double()
            reference = by_name("infc::rope_kv_write").reference
            plain = reference(qkv, cos, sin, k, v, slots, 4, 2, interleaved, kv)
            exact = reference(qkv.double(), cos.double(), sin.double(), k64, v64, slots, 4, 2, interleaved)
            k_found, v_found = pack_k(before), pack_v(before)
            given = {"qkv": qkv, "cos": cos, "sin": sin, "k_cache": k_found, "v_cache": v_found, "slots": slots}
            (q,) = library.run(f"write-{kv}-{interleaved}", given, [tokens], threads)
            judge(q.view(-1, 48), plain.view(-1, 48), exact.view(-1, 48))
            judge(unpack_k(k_found, len(before)), k, k64)
            assert torch.equal(unpack_v(v_found, len(before)), v)


@pytest.mark.parametrize("kv", [F32, BF16], ids=str)
def test_kv_write(library: Library, kv: torch.dtype) -> None:
    make = torch.Generator().manual_seed(2)
    k, v = torch.randn(20, 3, 32, generator=make), torch.randn(20, 3, 32, generator=make)
    slots = torch.randperm(64, generator=make)[:20].to(I32)
    slots[5] = -1
    k_cache, v_cache = torch.zeros(2, 3, 32, 32, dtype=kv), torch.zeros(2, 3, 32, 32, dtype=kv)
    found_k, found_v = pack_k(k_cache), pack_v(v_cache)
    given = {"k": k, "v": v, "k_cache": found_k, "v_cache": found_v, "slots": slots}
    assert library.run(f"plain-write-{kv}", given, [20], 3) == ()
    by_name("infc::kv_write").reference(k, v, k_cache, v_cache, slots)
    assert torch.equal(unpack_k(found_k, len(k_cache)), k_cache) and torch.equal(unpack_v(found_v, len(v_cache)), v_cache)
