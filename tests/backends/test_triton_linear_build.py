"""Products and attention compiled for real chips at the sizes of Llama-3.1-8B: no spills (the build refuses them), tensor cores."""
from triton_env import kernels, several  # isort: skip  # before anything of Triton

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from infc.backends.triton.build import build, programs_at_once
from infc.backends.triton.registry import Emit, Launch
from infc.compiler.ops.codes import E4M3, groups
from torch import Tensor

BF16, F16, F32, I32, U8 = torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.uint8


def meta(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def launches(op: str, **arguments: Any) -> list[Launch]:
    found, emit = kernels()[op], Emit()
    assert found.refuse(**arguments) is None
    found.lower(emit, *several(found.call(**arguments)), **arguments)
    return emit.launches


def linear(rows: int, n: int, k: int, dtype: torch.dtype = BF16) -> list[Launch]:
    return launches("infc::linear", x=meta(rows, k, dtype=dtype), w=meta(n, k, dtype=dtype))


def swiglu(rows: int, f: int, k: int, dtype: torch.dtype = BF16) -> list[Launch]:
    return launches("infc::linear_swiglu", x=meta(rows, k, dtype=dtype), w=meta(2 * f, k, dtype=dtype), act="silu")


def codes(rows: int, n: int, k: int, bits: int, group: int, offset: bool = False, act: str = "", act_bits: int = 0, act_group: int = 0,
          dtype: torch.dtype = BF16) -> list[Launch]:
    height, scales = n * (2 if act else 1), groups(k, group)
    held = {"x": meta(rows, k, dtype=dtype), "codes": meta(height, k * bits // 8, dtype=U8), "scale": meta(height, scales, dtype=F16),
            "offset": meta(height, scales, dtype=F16) if offset else None, "bits": bits, "group": group, "act_bits": act_bits,
            "act_group": act_group}
    if act: return launches("infc::linear_swiglu_quantized", act=act, **held)
    return launches("infc::linear_quantized", bias=None, residual=None, **held)


def floats(rows: int, n: int, k: int, act: str = "", act_bits: int = 0, group: int = 0, tensor: bool = False,
           dtype: torch.dtype = BF16) -> list[Launch]:
    height = n * (2 if act else 1)
    held = {"x": meta(rows, k, dtype=dtype), "codes": meta(height, k, dtype=E4M3), "bits": 8, "group": group, "act_bits": act_bits,
            "scale": meta(*(1, 1) if tensor else (height, groups(k, group)), dtype=F16), "offset": None, "act_group": 0}
    if act: return launches("infc::linear_swiglu_quantized", act=act, **held)
    return launches("infc::linear_quantized", bias=None, residual=None, **held)


def attention(tokens: int, sequences: int, q_heads: int = 32, kv_heads: int = 8, head: int = 128, dtype: torch.dtype = BF16,
              cache: torch.dtype | None = None, window: int = 0, softcap: float = 0.0, blocks: int = 256,
              sinks: bool = False) -> list[Launch]:
    pool, held = sequences * blocks, dict[str, Tensor]()
    for name in ("k", "v"):
        held[f"{name}_cache"] = meta(pool, kv_heads, 32, head, dtype=cache or dtype)
        if cache: held[f"{name}_scale"] = meta(pool, kv_heads, 32, 1, dtype=F32)
    return launches("infc::paged_attention" + ("_quantized" if cache else ""), q=meta(tokens, q_heads, head, dtype=dtype), **held,
                    query_start=meta(sequences + 1, dtype=I32), context_len=meta(sequences, dtype=I32),
                    block_table=meta(sequences, blocks, dtype=I32), scale=head**-0.5, window=window, softcap=softcap,
                    sinks=meta(q_heads, dtype=F32) if sinks else None)


def dense(batch: int, heads: int, kv_heads: int, length: int, head: int, dtype: torch.dtype = BF16, bias: torch.dtype | None = None,
          mask: str = "none", window: int = 0, softcap: float = 0.0, sinks: bool = False) -> list[Launch]:
    return launches("infc::attention", q=meta(batch, heads, length, head, dtype=dtype), k=meta(batch, kv_heads, length, head, dtype=dtype),
                    v=meta(batch, kv_heads, length, head, dtype=dtype), scale=head**-0.5, mask=mask, window=window, softcap=softcap,
                    bias=None if bias is None else meta(batch, 1, length, length, dtype=bias),
                    sinks=meta(heads, dtype=F32) if sinks else None)


HOT = {                                   # what decode and prefill of an 8B model spend their time in, and what it runs on in sm_90a
    "one row": (linear(1, 4096, 4096), ""),
    "16 rows": (linear(16, 4096, 4096), "wgmma"),
    "gate and up": (swiglu(2048, 14_336, 4096), "wgmma"),
    "many rows": (linear(2048, 4096, 14_336), "wgmma"),
    "4 bits, one row": (codes(1, 28_672, 4096, 4, 32), "wgmma"),
    "8 bits, many rows": (codes(2048, 4096, 4096, 8, 32), "wgmma"),
    "8 bits, rounded rows": (codes(16, 4096, 4096, 8, 32, act_bits=8, act_group=32)[1:], "wgmma"),
    "e4m3, one row": (floats(1, 4096, 4096), "wgmma"),
    "e4m3, gate and up": (floats(16, 14_336, 4096, act="silu"), "wgmma"),
    "e4m3, many rows": (floats(2048, 4096, 4096), "wgmma"),
    "e4m3 rows": (floats(2048, 4096, 4096, act_bits=8)[1:], "wgmma"),
    "decode": (attention(8, 8), "mma"),
    "prefill": (attention(2048, 8), "wgmma"),
}


def every(arch: str) -> list[Launch]:
    """Each kernel in each of its cuts. Triton reads e4m3 from sm_89 on."""
    found = [launch for name, (hot, _) in HOT.items() if arch != "sm_80" or "e4m3" not in name for launch in hot]
    if arch != "sm_80": found += every_e4m3()
    for rows in (1, 8, 32, 64, 256, 2048):
        found += [*linear(rows, 4096, 4096), *swiglu(rows, 14_336, 4096)]
        for bits, group, offset in ((8, 32, False), (4, 32, True), (4, 128, False), (8, 0, True)):
            found += [*codes(rows, 4096, 4096, bits, group, offset), *codes(rows, 14_336, 4096, bits, group, offset, act="silu")]
        found += [*codes(rows, 4096, 4096, 4, 128, act_bits=8), *codes(rows, 4096, 4096, 8, 32, True, act_bits=8, act_group=32)]
    for rows in (1, 8, 2048):
        found += [*linear(rows, 4096, 4096, F32), *swiglu(rows, 14_336, 4096, F32), *linear(rows, 4096, 4096, F16)]
        found += [*codes(rows, 4096, 4096, 4, 32, True, act="silu", dtype=F32), *codes(rows, 4096, 4096, 8, 32, dtype=F16)]
    for tokens, sequences in ((1, 1), (64, 64), (64, 4), (2048, 8)):
        for head in (64, 80, 128, 256): found += attention(tokens, sequences, head=head, window=100, softcap=30.0)
        for cache in (torch.int8, *([] if arch == "sm_80" else [torch.float8_e4m3fn])): found += attention(tokens, sequences, cache=cache)
        found += [*attention(tokens, sequences, q_heads=28, kv_heads=4), *attention(tokens, sequences, dtype=F32, head=256),
                  *attention(tokens, sequences, dtype=F32)]
        for window in (0, 128): found += attention(tokens, sequences, q_heads=64, head=64, window=window, sinks=True)         # gpt-oss
        found += [*attention(tokens, sequences, sinks=True), *attention(tokens, sequences, cache=torch.int8, sinks=True)]
    for head in (64, 128, 256):
        found += dense(4, 8, 2, 512, head, mask="causal", sinks=True)
        for bias in (None, torch.bool, F32):
            found += dense(4, 8, 2, 512, head, bias=bias, mask="causal", window=100 if bias else 0, softcap=30.0 if bias else 0.0)
    found += dense(1, 8, 8, 2048, 128, dtype=F32)
    return found


def every_e4m3() -> list[Launch]:
    """Products of e4m3 codes in each of their cuts."""
    found = [*floats(8, 4096, 4096, dtype=F16), *floats(8, 4096, 4096, dtype=F32), *floats(64, 4096, 4096, group=32)]
    for rows in (1, 8, 32, 64, 256, 2048):
        found += [*floats(rows, 4096, 4096), *floats(rows, 14_336, 4096, act="silu"), *floats(rows, 4096, 4096, act_bits=8, tensor=True),
                  *floats(rows, 14_336, 4096, act="silu", act_bits=8), *floats(rows, 4096, 4096, group=128, act_bits=8)]
    return found


def test_hot_kernels(tmp_path: Path) -> None:
    flat = [launch for hot, _ in HOT.values() for launch in hot]
    made = iter(build(flat, "sm_90a", cache=tmp_path))
    for name, (hot, cores) in HOT.items():
        first, *others = (next(made) for _ in hot)
        assert first.made.tensor_cores == cores and not first.made.spill_stores, f"{name}: {first.title} runs on {first.made.tensor_cores}"
        assert programs_at_once(first) >= (2 if hot[0].warps == 4 else 1), f"{name}: {first.title} hides no latency"
        assert all(other.made.tensor_cores == "" for other in others)


@pytest.mark.slow
def test_every_cut_of_e4m3_on_ada(tmp_path: Path) -> None:
    """Where a program has 99 KB of shared memory."""
    made = build(every_e4m3(), "sm_89", cache=tmp_path)
    assert all(code.made.tensor_cores in ("mma", "") and code.made.spill_stores <= 160 for code in made)


def test_rows_of_e4m3_are_multiplied_as_e4m3(tmp_path: Path) -> None:
    """Not made wide first: the code has the tensor core's own instruction, 32 columns deep."""
    for arch, instruction in (("sm_89", "QMMA.16832.F32.E4M3.E4M3"), ("sm_90a", "QGMMA.64x64x32.F32.E4M3.E4M3")):
        (code,) = build(floats(64, 4096, 4096, act_bits=8)[1:2], arch, cache=tmp_path)
        (tmp_path / "code.cubin").write_bytes(code.made.cubin)
        disassembler = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
        shown = subprocess.run([disassembler, "-c", tmp_path / "code.cubin"], capture_output=True, text=True, check=True).stdout
        assert set(re.findall(r"\b[A-Z]*MMA[.\w]*", shown)) == {instruction}


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a"])
def test_every_cut(arch: str, tmp_path: Path) -> None:
    """No spills on Hopper, the first target; elsewhere little enough that the tiles need no rule of their own."""
    for code in build(every(arch), arch, cache=tmp_path):
        assert code.made.registers and code.made.spill_stores <= (0 if arch == "sm_90a" else 160), code.title


def test_the_number_of_kernels_does_not_grow_with_layers_or_buckets() -> None:
    """Rows are an argument: buckets of one cut share a kernel."""
    def unique(rows: int) -> set:
        return {(launch.function, str(launch.constants)) for launch in linear(rows, 4096, 4096)}

    assert unique(2) == unique(16) and unique(130) == unique(256)
