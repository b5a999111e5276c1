"""Calls that every kernel of the registry is tried with on a card: sizes of real models, odd ones, each format. Seeded."""
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from gpu_judges import Judge, cached, conform, dense, drawn, made_codes, paged, same, scaled
from infc.backends.triton.registry import kernels
from infc.compiler.ops.codes import E4M3, groups, pack_codes, row_codes
from infc.compiler.ops.kv_quantized import stored
from torch import Tensor

BF16, F16, F32, I32 = torch.bfloat16, torch.float16, torch.float32, torch.int32
Arguments = dict[str, Any]


@dataclass
class Dice:
    """Seeded numbers on torch's device: the same for the same case on the same kind of device."""

    device: str
    seed: int = 0

    def __post_init__(self) -> None:
        self.generator = torch.Generator(self.device).manual_seed(self.seed)

    def normal(self, *shape: int, dtype: torch.dtype = BF16, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=self.generator, device=self.device) * scale).to(dtype)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator, device=self.device)

    def whole(self, high: int, *shape: int, dtype: torch.dtype = I32) -> Tensor:
        return torch.randint(0, high, shape, generator=self.generator, device=self.device).to(dtype)

    def shuffled(self, count: int) -> Tensor:
        return torch.randperm(count, generator=self.generator, device=self.device)


@dataclass(frozen=True)
class Case:
    """A call: make(dice, *of) gives its arguments, `judge` says how far its results are from right, as a share of what is allowed."""

    op: str
    what: str                                        # "16x6144x4096 bf16"
    judge: Judge
    make: Callable[..., Arguments]
    of: tuple[Any, ...]
    times: int = 1                                   # of the reference's own error: infc.backends.triton.judge.strain
    first: bool = False                              # tried before those that are not, for time may run out
    small: bool = False                              # interpreted, it takes a second or two: part of the dry run

    @property
    def name(self) -> str:
        return f"{self.op} {self.what}"

    def arguments(self, dice: Dice) -> Arguments:
        return self.make(dice, *self.of)


def cases(fp8: bool) -> list[Case]:
    """All of them, the first of each operator first. fp8: the card has e4m3."""
    found = [*_norms(), *_activations(), *_ropes(), *_writes(fp8), *_tables(), *_casts(), *_products(), *_pairs(), *_codes(), *_paged(fp8),
             *_dense(), *_samples(), *(_floats() if fp8 else ()), *_coded_rows(fp8)]
    return [case for case in found if case.first] + [case for case in found if not case.first]


def missing(given: Sequence[Case]) -> list[str]:
    """Operators with kernels of which no case is given."""
    return sorted(kernels().keys() - {case.op for case in given})


def _name(dtype: torch.dtype) -> str:
    return {BF16: "bf16", F16: "fp16", F32: "fp32"}.get(dtype) or str(dtype).removeprefix("torch.")


def _times(dtype: torch.dtype) -> int:
    """A long sum in fp32 that gives fp32 may be reordered."""
    return 2 if dtype == F32 else 1


# ---- rows

def norm(d: Dice, shape: Sequence[int], dtype: torch.dtype, extra: str = "") -> Arguments:
    """x and w, and the residual or the bias of those that have one."""
    found = {"x": d.normal(*shape, dtype=dtype), "w": d.normal(shape[-1], dtype=dtype), "eps": 1e-5}
    if extra == "residual": found[extra] = d.normal(*shape, dtype=dtype)
    if extra == "b": found[extra] = d.normal(shape[-1], dtype=dtype)
    return found


def _norms() -> Iterator[Case]:
    for shape in ((1, 4096), (64, 2048), (3, 7), (2, 5, 1023), (8, 3584), (2048, 576), (1, 16384)):
        for dtype in (BF16, F16, F32) if shape[-1] in (2048, 7, 1023) else (BF16,):
            what, first, small = f"{'x'.join(map(str, shape))} {_name(dtype)}", shape == (1, 4096), shape == (3, 7) and dtype == BF16
            yield Case("infc::rms_norm", what, conform, norm, (shape, dtype), first=first, small=small)
            yield Case("infc::add_rms_norm", what, conform, norm, (shape, dtype, "residual"), first=first, small=small)
            yield Case("infc::layer_norm", what, conform, norm, (shape, dtype, "b"), _times(dtype), first, small)


def swiglu(d: Dice, rows: int, width: int, act: str, dtype: torch.dtype) -> Arguments:
    return {"gate_up": d.normal(rows, 2 * width, dtype=dtype, scale=3), "act": act}


def _activations() -> Iterator[Case]:
    for rows, width, act, dtype in ((1, 14_336, "silu", BF16), (64, 8192, "silu", F16), (3, 7, "gelu", BF16), (2, 1023, "gelu_tanh", F32),
                                    (5, 1023, "silu", F32), (2048, 1536, "gelu_tanh", BF16), (3, 33, "gelu", F32)):
        yield Case("infc::swiglu", f"{rows}x{width} {act} {_name(dtype)}", conform, swiglu, (rows, width, act, dtype),
                   first=width == 14_336, small=width == 7)


# ---- positions and caches

HEADS = {"8b": (32, 8, 128, 64), "qwen": (28, 4, 128, 64), "smollm2": (9, 3, 64, 32), "1b": (32, 8, 64, 32), "80": (4, 4, 80, 40),
         "80 partial": (8, 2, 80, 16), "96": (8, 8, 96, 48), "256": (8, 1, 256, 128), "odd": (3, 1, 40, 17)}
"""q heads, kv heads, size of a head, half the rotary width."""


def _turned(d: Dice, tokens: int, half: int) -> Arguments:
    angle = d.normal(tokens, half, dtype=F32, scale=3)
    return {"cos": angle.cos(), "sin": angle.sin()}


def rope(d: Dice, heads: Sequence[int], interleaved: bool, dtype: torch.dtype) -> Arguments:
    q_heads, kv_heads, width, half = heads
    return {"q": d.normal(1, q_heads, 17, width, dtype=dtype), "k": d.normal(1, kv_heads, 17, width, dtype=dtype), **_turned(d, 17, half),
            "interleaved": interleaved}


def _ropes() -> Iterator[Case]:
    for (name, heads), (interleaved, dtype) in product(HEADS.items(), ((False, BF16), (True, BF16), (False, F16), (True, F32))):
        yield Case("infc::rope", f"{name}{' interleaved' * interleaved} {_name(dtype)}", conform, rope, (heads, interleaved, dtype),
                   first=name == "8b" and not interleaved and dtype == BF16, small=name == "odd" and dtype == BF16)


def caches(d: Dice, tokens: int, heads: Sequence[int], dtype: torch.dtype, format: str) -> Arguments:
    """Filled caches, wide or of codes, and distinct places in them; every fourth token is padding."""
    blocks = 2 + -(-tokens // 32)
    slots = torch.where(torch.arange(tokens, device=d.device) % 4 == 2, -1, d.shuffled(blocks * 32)[:tokens])
    found: Arguments = {"slots": slots.to(I32)} | ({"format": format} if format else {})
    for x in "kv":
        wide = torch.full((blocks, heads[1], 32, heads[2]), 7.0, dtype=dtype, device=d.device)
        if format: found[f"{x}_cache"], found[f"{x}_scale"] = stored(wide, format)
        else: found[f"{x}_cache"] = wide
    return found


def kv_write(d: Dice, tokens: int, heads: Sequence[int], dtype: torch.dtype, format: str) -> Arguments:
    return {x: d.normal(tokens, heads[1], heads[2], dtype=dtype) for x in "kv"} | caches(d, tokens, heads, dtype, format)


def rope_kv_write(d: Dice, tokens: int, heads: Sequence[int], dtype: torch.dtype, format: str) -> Arguments:
    q_heads, kv_heads, width, half = heads
    return {"qkv": d.normal(tokens, (q_heads + 2 * kv_heads) * width, dtype=dtype), **_turned(d, tokens, half), "q_heads": q_heads,
            "kv_heads": kv_heads, "interleaved": tokens == 64, **caches(d, tokens, heads, dtype, format)}


def _writes(fp8: bool) -> Iterator[Case]:
    for name, heads in HEADS.items():
        for tokens, dtype in ((7, BF16), (64, F16)) if name in ("8b", "smollm2", "odd") else ((7, BF16),):
            first, small = name == "8b" and tokens == 7, name == "odd" and tokens == 7
            for format in ("", "int8", *(["fp8"] if fp8 else [])):
                what, of = f"{tokens} tokens, {name} {_name(dtype)} {format}".strip(), (tokens, heads, dtype, format)
                kind = "_quantized" * bool(format)
                yield Case(f"infc::kv_write{kind}", what, same if format else conform, kv_write, of, first=first, small=small)
                yield Case(f"infc::rope_kv_write{kind}", what, cached if format else conform, rope_kv_write, of, first=first, small=small)


# ---- tables

def embedding(d: Dice, rows: int, width: int, dtype: torch.dtype) -> Arguments:
    return {"weight": d.normal(rows, width, dtype=F32, scale=9).to(dtype), "indices": d.whole(rows, 1, 33, dtype=torch.int64)}


def index_select(d: Dice, rows: int, width: int, dtype: torch.dtype) -> Arguments:
    return {"self": d.normal(rows, width, dtype=F32, scale=9).to(dtype), "dim": 0, "index": d.whole(rows, 8)}


def index(d: Dice, rows: int, width: int, dtype: torch.dtype) -> Arguments:
    """Negative ones count from the end."""
    return {"self": d.normal(rows, width, dtype=F32, scale=9).to(dtype), "indices": [d.whole(rows, 2, 7, dtype=torch.int64) - rows // 2]}


def embedding_quantized(d: Dice, k: int, bits: int, group: int, offset: bool, dtype: torch.dtype) -> Arguments:
    return {**codes(d, 1000, k, bits, group, offset), "indices": d.whole(1000, 2, 5), "k": k, "out_dtype": dtype}


def _tables() -> Iterator[Case]:
    for rows, width, dtype in ((128_256, 4096, BF16), (49_152, 576, F16), (50, 7, F32), (1000, 1025, torch.int8)):
        what, first, small = f"{rows}x{width} {_name(dtype)}", width == 4096, width == 7
        yield Case("aten::embedding", what, same, embedding, (rows, width, dtype), first=first, small=small)
        yield Case("aten::index_select", what, same, index_select, (rows, width, dtype), first=first, small=small)
        yield Case("aten::index.Tensor", what, same, index, (rows, width, dtype), first=first, small=small)
    for k, bits, group, offset in ((4096, 8, 32, False), (4096, 4, 32, True), (2048, 4, 128, False), (101, 8, 0, True),
                                   (2050, 4, 0, False)):
        for dtype in (BF16, F32):
            yield Case("infc::embedding_quantized", f"{k} w{bits} group {group}{' offset' * offset} {_name(dtype)}", conform,
                       embedding_quantized, (k, bits, group, offset, dtype), first=(k, bits, dtype) == (4096, 8, BF16),
                       small=k == 101 and dtype == BF16)


def cast(d: Dice, source: torch.dtype, target: torch.dtype) -> Arguments:
    return {"self": d.normal(64, 4097, dtype=F32, scale=300).to(source), "dtype": target}


def _casts() -> Iterator[Case]:
    for source, target in ((F32, BF16), (BF16, F32), (F32, F16), (F16, BF16), (BF16, F16), (I32, BF16), (I32, F32)):
        yield Case("aten::_to_copy", f"64x4097 {_name(source)} to {_name(target)}", same, cast, (source, target),
                   first=(source, target) == (F32, BF16), small=(source, target) == (F32, BF16))


# ---- products

def linear(d: Dice, rows: int, n: int, k: int, dtype: torch.dtype, extras: bool, out: torch.dtype | None = None) -> Arguments:
    found = {"x": d.normal(rows, k, dtype=dtype), "w": d.normal(n, k, dtype=dtype, scale=k**-0.5), "out_dtype": out}
    return found | ({"bias": d.normal(n, dtype=dtype), "residual": d.normal(rows, n, dtype=dtype)} if extras else {})


def _products() -> Iterator[Case]:
    real = [(rows, n, k) for (n, k), rows in product(((6144, 4096), (4096, 14_336), (4608, 3584), (960, 576)), (1, 2, 8, 16, 17, 64, 512))]
    large = [(2048, 6144, 4096), (2048, 4096, 14_336), (1, 128_256, 4096), (16, 128_256, 2048), (64, 152_064, 3584)]
    odd = [(1, 7, 3), (1, 65, 1030), (2, 1, 1), (5, 70, 600), (17, 33, 513), (70, 200, 300), (130, 40, 96)]
    for rows, n, k in (*real, *large, *odd):
        several = (rows, n, k) in odd or (n == 960 and rows in (8, 64)) or (n == 6144 and rows in (1, 16, 512))
        for dtype in (BF16, F16, F32) if several and rows < 512 else (BF16, F16) if several else (BF16,):
            extras = rows in (1, 8, 17, 64)                # as a projection back into the residual stream has them
            yield Case("infc::linear", f"{rows}x{n}x{k}{' bias residual' * extras} {_name(dtype)}", conform, linear,
                       (rows, n, k, dtype, extras), _times(dtype), (n, dtype) == (6144, BF16) and rows in (1, 16, 64, 512),
                       (rows, n, k) in odd[:4] and dtype == BF16)
    for source, target in ((BF16, F32), (F16, F32), (F32, BF16)):
        yield Case("infc::linear", f"6x960x576 {_name(source)} to {_name(target)}", conform, linear,
                   (6, 960, 576, source, False, target), 2)


def linear_swiglu(d: Dice, rows: int, width: int, k: int, act: str, dtype: torch.dtype) -> Arguments:
    return {"x": d.normal(rows, k, dtype=dtype, scale=2), "w": d.normal(2 * width, k, dtype=dtype, scale=k**-0.5), "act": act}


def _pairs() -> Iterator[Case]:
    for rows, width, k, act, dtype in ((1, 14_336, 4096, "silu", BF16), (8, 14_336, 4096, "silu", BF16), (16, 18_944, 3584, "silu", BF16),
                                       (64, 14_336, 4096, "silu", BF16), (512, 8192, 2048, "silu", BF16),
                                       (2048, 14_336, 4096, "silu", BF16), (4, 8192, 2048, "gelu_tanh", F16), (1, 65, 1030, "gelu", BF16),
                                       (5, 33, 600, "silu", F32), (18, 70, 96, "gelu_tanh", BF16), (1, 1536, 576, "silu", BF16),
                                       (130, 1536, 576, "silu", F16)):
        yield Case("infc::linear_swiglu", f"{rows}x{width}x{k} {act} {_name(dtype)}", conform, linear_swiglu, (rows, width, k, act, dtype),
                   _times(dtype), width == 14_336 and rows in (1, 64), k == 96)


def codes(d: Dice, n: int, k: int, bits: int, group: int, offset: bool) -> Arguments:
    """A weight of codes whose values are about k**-0.5 in every group, each group with a scale of its own."""
    whole = d.whole(2**bits, n, k, dtype=torch.uint8)
    scale = (d.uniform(n, groups(k, group)) + 0.5) * k**-0.5 / 2 ** (bits - 2)
    shift = (-scale * 2 ** (bits - 1) * (0.9 + d.uniform(*scale.shape) / 5)).half() if offset else None
    return {"codes": pack_codes(whole, bits), "scale": scale.half(), "offset": shift, "bits": bits, "group": group}


def linear_quantized(d: Dice, rows: int, n: int, k: int, weight: Sequence[Any], dtype: torch.dtype, act_bits: int, act_group: int,
                     ) -> Arguments:
    extras: Arguments = {"bias": None, "residual": None}
    if rows in (1, 8): extras = {"bias": d.normal(n, dtype=dtype), "residual": d.normal(rows, n, dtype=dtype)}
    return {"x": d.normal(rows, k, dtype=dtype), **codes(d, n, k, *weight), **extras, "act_bits": act_bits, "act_group": act_group}


def floats(d: Dice, n: int, k: int, group: int, tensor: bool) -> Arguments:
    """A weight of e4m3 codes, every finite one of them equally often. tensor: one scale for all."""
    whole = d.whole(254, n, k, dtype=torch.uint8)
    whole += whole > 126                                   # 127 and 255 are NaN
    scale = (d.uniform(*(1, 1) if tensor else (n, groups(k, group))) + 0.5) * k**-0.5 / 128
    return {"codes": whole.view(E4M3), "scale": scale.half(), "offset": None, "bits": 8, "group": group}


def linear_floats(d: Dice, rows: int, n: int, k: int, group: int, tensor: bool, dtype: torch.dtype, act_bits: int) -> Arguments:
    extras: Arguments = {"bias": None, "residual": None}
    if rows in (1, 8): extras = {"bias": d.normal(n, dtype=dtype), "residual": d.normal(rows, n, dtype=dtype)}
    return {"x": d.normal(rows, k, dtype=dtype), **floats(d, n, k, group, tensor), **extras, "act_bits": act_bits, "act_group": 0}


def swiglu_floats(d: Dice, rows: int, width: int, k: int, act_bits: int) -> Arguments:
    return {"x": d.normal(rows, k), **floats(d, 2 * width, k, 0, False), "act": "silu", "act_bits": act_bits, "act_group": 0}


def embedding_floats(d: Dice, k: int, group: int, tensor: bool, dtype: torch.dtype) -> Arguments:
    return {**floats(d, 1000, k, group, tensor), "indices": d.whole(1000, 2, 5), "k": k, "out_dtype": dtype}


def _floats() -> Iterator[Case]:
    """What the other codes are tried with, in e4m3; rows in e4m3 give bf16, of which the tensor core's sums are far inside an ulp."""
    kinds = ((0, False, "a scale a row"), (0, True, "one scale"), (128, False, "group 128"))
    for group, tensor, kind in kinds:
        for rows, n, k, dtype, acts in (*((rows, 6144, 4096, BF16, acts) for rows in (1, 8, 64, 512) for acts in (0, 8)),
                                        (16, 4096, 14_336, BF16, 0), (1, 4608, 3584, F16, 0), (1, 960, 576, F32, 0),
                                        (7, 70, 601, BF16, 0), (20, 40, 130, F16, 0), (20, 40, 130, BF16, 8)):
            yield Case("infc::linear_quantized", f"{rows}x{n}x{k} fp8{'a8' * bool(acts)} {kind} {_name(dtype)}", scaled, linear_floats,
                       (rows, n, k, group, tensor, dtype, acts), first=n == 6144 and kind == "a scale a row", small=n == 40 and not tensor)
        for k, dtype in ((4096, BF16), (101, F32)):
            yield Case("infc::embedding_quantized", f"{k} fp8 {kind} {_name(dtype)}", conform, embedding_floats, (k, group, tensor, dtype),
                       first=k == 4096, small=k == 101 and tensor)
    for rows, width, k in ((1, 14_336, 4096), (64, 8192, 2048), (512, 1536, 576), (6, 35, 520)):
        for acts in (0, 8):
            yield Case("infc::linear_swiglu_quantized", f"{rows}x{width}x{k} fp8{'a8' * bool(acts)} silu bf16", scaled, swiglu_floats,
                       (rows, width, k, acts), first=rows in (1, 64), small=width == 35)


def linear_swiglu_quantized(d: Dice, rows: int, width: int, k: int, weight: Sequence[Any], act: str) -> Arguments:
    return {"x": d.normal(rows, k), **codes(d, 2 * width, k, *weight), "act": act, "act_bits": 0, "act_group": 0}


FORMATS = ((8, 32, False), (8, 128, False), (4, 32, False), (4, 128, False), (4, 64, True), (8, 32, True), (8, 0, False), (4, 0, False))
"""Bits, group (0: the whole row), offsets."""


def _codes() -> Iterator[Case]:
    plain = [*((rows, 6144, 4096, BF16) for rows in (1, 8, 64, 512)), (16, 4096, 14_336, BF16), (1, 4608, 3584, F16), (1, 960, 576, F32),
             (1, 70, 600, BF16), (20, 40, 130, F16)]
    rounded = [(8, 6144, 4096, 32), (64, 6144, 4096, 0), (2, 40, 200, 32)]
    for bits, group, offset in FORMATS:
        weight, kind = (bits, group, offset), f"group {group}{' offset' * offset}"
        for rows, n, k, dtype in plain:
            yield Case("infc::linear_quantized", f"{rows}x{n}x{k} w{bits} {kind} {_name(dtype)}", scaled, linear_quantized,
                       (rows, n, k, weight, dtype, 0, 0), first=n == 6144 and weight[1:] == (32, False),
                       small=n in (40, 70) and group in (32, 64))
        for rows, n, k, act_group in rounded:
            if group and offset == (group == 64):          # rows in groups take the weight's own; of whole rows and offsets one is enough
                yield Case("infc::linear_quantized", f"{rows}x{n}x{k} w{bits}a8 {kind} bf16", scaled, linear_quantized,
                           (rows, n, k, weight, BF16, 8, act_group and group), small=n == 40 and group == 32)
        for rows, width, k, act in ((1, 14_336, 4096, "silu"), (8, 8192, 2048, "silu"), (64, 8192, 2048, "silu"), (512, 1536, 576, "silu"),
                                    (6, 35, 520, "gelu")):
            yield Case("infc::linear_swiglu_quantized", f"{rows}x{width}x{k} w{bits} {kind} {act} bf16", scaled, linear_swiglu_quantized,
                       (rows, width, k, weight, act), first=rows in (1, 64) and weight[1:] == (32, False),
                       small=width == 35 and group == 32)


# ---- attention

@dataclass(frozen=True)
class Kind:
    """Heads and mask of an attention."""

    q_heads: int
    kv_heads: int
    head: int
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False


KINDS = {"8b": Kind(32, 8, 128), "smollm2": Kind(9, 3, 64), "1b": Kind(32, 8, 64), "qwen": Kind(28, 4, 128),
         "80": Kind(4, 4, 80, softcap=20.0), "96": Kind(7, 1, 96, window=70, softcap=30.0), "256": Kind(8, 2, 256),
         "window": Kind(4, 2, 128, window=1024), "32": Kind(6, 2, 32), "gpt-oss": Kind(64, 8, 64, sinks=True),
         "gpt-oss window": Kind(64, 8, 64, window=128, sinks=True)}
BATCHES = {                                                # (new tokens, context before them) of each sequence
    "decode 8k": [(1, 8191)], "prefill 2k": [(2048, 0)], "chunk": [(512, 1500)],
    "decodes": [(1, 31), (1, 32), (1, 4095), (1, 0), (1, 700), (1, 2000), (1, 513), (1, 129)],
    "mixed": [(1, 150), (20, 0), (3, 130), (0, 7), (33, 64), (0, 0)],
}
PADDING = 3                                                # tokens of no sequence at the end of every batch


def paged_attention(d: Dice, kind: Kind, batch: Sequence[tuple[int, int]], dtype: torch.dtype, format: str) -> Arguments:
    """Blocks scattered over the pool, NaN wherever no key is, block numbers past a context out of the pool."""
    lens = [new + before for new, before in batch]
    width = max(-(-length // 32) for length in lens) + 1
    pool = len(batch) * width + 2
    blocks = d.shuffled(pool)[:len(batch) * width].reshape(len(batch), width).to(I32)
    shape = (pool, kind.kv_heads, 32, kind.head)
    held: Arguments = {f"{x}_cache": torch.full(shape, torch.nan, dtype=dtype, device=d.device) for x in "kv"}
    for x, (n, length) in product("kv", enumerate(lens)):
        at = torch.arange(length, device=d.device)
        held[f"{x}_cache"][blocks[n, at // 32].long(), :, at % 32] = d.normal(length, kind.kv_heads, kind.head, dtype=dtype)
    for n, length in enumerate(lens): blocks[n, -(-length // 32):] = 2**30
    starts = torch.tensor([0, *(new for new, _ in batch)], device=d.device).cumsum(0).to(I32)
    q = d.normal(int(starts[-1]) + PADDING, kind.q_heads, kind.head, dtype=dtype)
    q[-PADDING:] = torch.nan
    if format:
        for x in "kv": held[f"{x}_cache"], held[f"{x}_scale"] = stored(held[f"{x}_cache"], format)
    return {"q": q, **held, "query_start": starts, "context_len": torch.tensor(lens, dtype=I32, device=d.device), "block_table": blocks,
            "scale": kind.head**-0.5, "window": kind.window, "softcap": kind.softcap,
            "sinks": d.normal(kind.q_heads, dtype=F32, scale=2) if kind.sinks else None}


def _paged(fp8: bool) -> Iterator[Case]:
    every = [(kind, batch, BF16) for kind in ("8b", "smollm2") for batch in BATCHES]
    every += [(kind, batch, BF16) for kind in KINDS for batch in ("decodes", "mixed") if kind not in ("8b", "smollm2")]
    every += [("1b", "decode 8k", BF16), ("qwen", "prefill 2k", BF16), ("256", "chunk", BF16), ("window", "prefill 2k", BF16),
              ("8b", "decodes", F16), ("80", "mixed", F16), ("96", "decodes", F16), ("32", "mixed", F32), ("smollm2", "decodes", F32),
              ("gpt-oss", "decode 8k", BF16), ("gpt-oss window", "chunk", BF16)]
    for (kind, batch, dtype), format in product(every, ("", "int8", *(["fp8"] if fp8 else []))):
        yield Case(f"infc::paged_attention{'_quantized' * bool(format)}", f"{kind} {batch} {_name(dtype)} {format}".strip(), paged,
                   paged_attention, (KINDS[kind], BATCHES[batch], dtype, format), 1 if dtype == BF16 else 2,
                   kind == "8b" and batch in ("decodes", "prefill 2k") and dtype == BF16, (kind, batch, dtype) == ("32", "mixed", BF16))


def attention(d: Dice, heads: Sequence[int], queries: int, keys: int, head: int, mask: str, window: int, bias: bool, dtype: torch.dtype,
              sinks: bool = False) -> Arguments:
    found: Arguments = {"q": d.normal(2, heads[0], queries, head, dtype=dtype)}
    found |= {x: d.normal(2, heads[1], keys, head, dtype=dtype) for x in "kv"}
    return found | {"scale": head**-0.5, "mask": mask, "window": window, "bias": d.normal(2, 1, queries, keys, dtype=F32) if bias else None,
                    "sinks": d.normal(heads[0], dtype=F32, scale=2) if sinks else None}


def _dense() -> Iterator[Case]:
    for heads, queries, keys, head, mask, window, bias, dtype in (
            ((32, 8), 512, 512, 128, "causal", 0, False, BF16), ((12, 12), 128, 128, 64, "none", 0, True, BF16),
            ((12, 12), 128, 128, 64, "none", 0, False, BF16), ((4, 2), 40, 70, 80, "causal", 20, False, F16),
            ((3, 1), 40, 70, 96, "causal_top_left", 0, False, BF16), ((4, 1), 33, 257, 256, "causal", 0, False, BF16),
            ((3, 1), 40, 70, 32, "causal", 0, False, F32), ((4, 2), 7, 9, 16, "none", 0, True, BF16)):
        what = f"{heads[0]}/{heads[1]} heads of {head}, {queries} of {keys}, {mask}{' bias' * bias} {_name(dtype)}"
        yield Case("infc::attention", what, dense, attention, (heads, queries, keys, head, mask, window, bias, dtype), _times(dtype),
                   queries == 512, queries == 7)
    yield Case("infc::attention", "64/8 heads of 64, 512 of 512, causal sinks bf16", dense, attention,
               ((64, 8), 512, 512, 64, "causal", 0, False, BF16, True))


# ---- sampling

def sample(d: Dice, vocab: int, rows: int, dtype: torch.dtype) -> Arguments:
    """Settings of every kind, one row greedy, and in the first the lowest index of many equals wins."""
    def repeated(*values: float) -> Tensor:
        return torch.tensor(values, device=d.device).repeat(rows)[:rows].contiguous()

    logits = d.normal(rows, vocab, dtype=dtype, scale=3)
    logits[0, 1:vocab:300] = 50.0
    return {"logits": logits, "temperature": repeated(0.0, 0.7, 1.0, 1.6), "top_k": repeated(0, 1, 5, 50, 3, vocab).to(I32),
            "top_p": repeated(1.0, 0.9, 0.5, 0.01, 0.3), "uniform": d.uniform(rows)}


def _samples() -> Iterator[Case]:
    for vocab, rows, dtype in ((128_256, 8, F32), (152_064, 64, F32), (49_152, 4, BF16), (1000, 8, F32), (5, 5, F16)):
        yield Case("infc::sample", f"{rows} of {vocab} {_name(dtype)}", drawn, sample, (vocab, rows, dtype), first=vocab == 128_256,
                   small=vocab == 5)


# ---- rows that are codes from the norm on

def norm_quantized(d: Dice, shape: Sequence[int], dtype: torch.dtype, extra: str, group: int, e4m3: bool) -> Arguments:
    return {**norm(d, shape, dtype, extra), "group": group, "e4m3": e4m3}


def of_coded_rows(d: Dice, rows: int, n: int, k: int, act: str, group: int, e4m3: bool) -> Arguments:
    """A product, with `act` of gate and up, of rows that come as codes."""
    height = n * (2 if act else 1)
    given = floats(d, height, k, 0, False) if e4m3 else codes(d, height, k, 8, 32, False)
    x, x_scale = row_codes(d.normal(rows, k), 8, group, e4m3)
    more: Arguments = {"act": act} if act else {"bias": None, "residual": d.normal(rows, n)}
    return {"x": x, **given, **more, "act_bits": 8, "act_group": group, "out_dtype": BF16, "x_scale": x_scale}


def _coded_rows(fp8: bool) -> Iterator[Case]:
    norms = (("rms_norm", ""), ("add_rms_norm", "residual"), ("layer_norm", "b"))
    shapes = (((1, 4096), F32), ((64, 2048), BF16), ((2, 5, 1023), F16), ((3, 7), F32), ((2048, 576), F32), ((1, 16384), F32))
    products = ((1, 4096, 4096, ""), (64, 6144, 4096, ""), (512, 1536, 576, "silu"), (8, 14_336, 4096, "silu"), (6, 35, 520, ""),
                (6, 35, 520, "gelu"))
    for e4m3 in (False, True)[: 1 + fp8]:
        kind = "e4m3" if e4m3 else "int8"
        for (shape, dtype), (op, extra) in product(shapes, norms):
            for group in (0, 32) if shape[-1] in (4096, 1023) else (0,):
                what = f"{'x'.join(map(str, shape))} {_name(dtype)} {kind} group {group}"
                yield Case(f"infc::{op}_quantized", what, made_codes, norm_quantized, (shape, dtype, extra, group, e4m3), _times(dtype),
                           first=shape == (1, 4096), small=shape == (3, 7))
        for (rows, n, k, act), group in product(products, (0,) if e4m3 else (0, 32)):
            op, what = "linear_swiglu" if act else "linear", f"{rows}x{n}x{k} {kind} rows of group {group} {act}".rstrip()
            yield Case(f"infc::{op}_quantized", what, scaled, of_coded_rows, (rows, n, k, act, group, e4m3), first=rows == 1,
                       small=n == 35 and not group)
