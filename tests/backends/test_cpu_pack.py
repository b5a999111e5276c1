"""Layouts: every packed weight and cache unpacks to what it was, and lies where the kernels look for it."""
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from infc.backends.cpu.pack import CODED, LAYOUTS, in_runs, out_of_runs, pack_k, pack_v, unpack, unpack_k, unpack_v
from infc.compiler.ops.codes import groups, pack_codes

WIDE = sorted(set(LAYOUTS) - {layout.name for layout in CODED})
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


@settings(deadline=None, max_examples=40)
@given(layout=st.sampled_from(WIDE), rows=st.integers(1, 70), k=st.integers(1, 40), dtype=st.sampled_from(sorted(DTYPES)))
def test_round_trip(layout: str, rows: int, k: int, dtype: str) -> None:
    if layout.endswith("swiglu"): rows *= 2
    if layout != "plain": dtype = layout.partition("_")[0]
    w = torch.randn(rows, k).to(DTYPES[dtype])
    packed = LAYOUTS[layout](w)
    assert packed.flags.c_contiguous and torch.equal(unpack(packed, layout, (rows, k)), w)


def test_bf16_panels() -> None:
    w = torch.arange(40 * 6).view(40, 6).bfloat16()
    packed = torch.from_numpy(LAYOUTS["bf16_n32k2"](w).view(np.int16)).view(torch.bfloat16).view(2, 3, 2, 16, 2)
    for row, k in ((0, 0), (17, 5), (39, 4)):
        assert packed[row // 32, k // 2, row % 32 // 16, row % 16, k % 2] == w[row, k]
    assert bool((packed[1, :, 0, 8:] == 0).all()) and bool((packed[1, :, 1] == 0).all())


def test_swiglu_panels_pair_gate_with_up() -> None:
    w = torch.randn(2 * 20, 3)
    packed = torch.from_numpy(LAYOUTS["f32_n32_swiglu"](w)).view(2, 3, 2, 16)
    for f, k in ((0, 0), (15, 2), (19, 1)):
        assert packed[f // 16, k, 0, f % 16] == w[f, k] and packed[f // 16, k, 1, f % 16] == w[20 + f, k]


@pytest.mark.parametrize("dtype", [*DTYPES.values(), torch.int8], ids=str)
def test_caches(dtype: torch.dtype) -> None:
    shape = (19, 2, 32, 48)
    cache = torch.arange(-128, 128).repeat(228).view(shape).to(dtype) if dtype == torch.int8 else torch.randn(shape).to(dtype)
    assert torch.equal(unpack_k(pack_k(cache), 19), cache) and torch.equal(unpack_v(pack_v(cache), 19), cache)
    k, v = (out_of_runs(pack(cache), 19).view(19, 2, -1) for pack in (pack_k, pack_v))
    width = {torch.bfloat16: 2, torch.int8: 4}.get(dtype, 1)
    if dtype == torch.int8: k = (k.view(torch.uint8).short() - 128).to(torch.int8)                  # of code + 128
    for t, d in ((0, 0), (31, 47), (5, 2), (6, 7)):
        assert torch.equal(k[:, :, d // width * 32 * width + t * width + d % width], cache[:, :, t, d])
        assert torch.equal(v[:, :, t // width * 48 * width + d * width + t % width], cache[:, :, t, d])


def test_runs_keep_the_blocks_of_a_head_together() -> None:
    cache = torch.arange(35 * 3 * 2).view(35, 3, 2)
    runs = in_runs(cache)
    assert runs.shape == (3, 3, 16, 2) and torch.equal(out_of_runs(runs, 35), cache)
    for block, head in ((0, 0), (15, 2), (16, 0), (34, 1)):
        assert torch.equal(runs.view(-1, 2)[(block // 16 * 3 + head) * 16 + block % 16], cache[block, head])


def test_a_layout_refuses_another_dtype() -> None:
    with pytest.raises(TypeError, match="bfloat16"): LAYOUTS["f32_n32"](torch.zeros(2, 2).bfloat16())


@pytest.mark.parametrize("layout", CODED, ids=[layout.name for layout in CODED])
@settings(deadline=None, max_examples=15)
@given(rows=st.integers(1, 70), k=st.integers(1, 300), seed=st.integers(0, 99))
def test_coded_round_trip(layout, rows: int, k: int, seed: int) -> None:
    """Codes, scales and offsets come back, whatever the rest of a group, a block, a byte or a panel."""
    if layout.swiglu: rows *= 2
    pick = torch.Generator().manual_seed(seed)
    codes = pack_codes(torch.randint(0, 2**layout.bits, (rows, k), generator=pick, dtype=torch.uint8), layout.bits)
    scales = [torch.randn(rows, groups(k, layout.group), generator=pick).half() for _ in range(1 + layout.offset)]
    packed = LAYOUTS[layout.name](codes, *scales)
    assert packed.flags.c_contiguous and packed.dtype == np.uint8
    for found, was in zip(layout.unpack(packed, rows, k), (codes, *scales), strict=True): assert torch.equal(found, was)


def test_coded_panels() -> None:
    """Byte by byte as quantized.h reads it: a group's scales and offsets, then four k of a column side by side."""
    pick = torch.Generator().manual_seed(0)
    each = torch.randint(0, 16, (40, 150), generator=pick, dtype=torch.uint8)
    scale, offset = (torch.randn(40, 3, generator=pick).half() for _ in range(2))
    panel_bytes = 3 * 128 + 5 * 512                    # three groups of 64, five blocks of 32
    packed = torch.from_numpy(LAYOUTS["q4_g64_n32_offset"](pack_codes(each, 4), scale, offset))
    assert packed.shape == (2, panel_bytes)
    for row, k in ((0, 0), (17, 5), (39, 63), (31, 64), (38, 149)):
        panel, block, inside = packed[row // 32], k // 32, k % 32
        group = k // 64 * (128 + 2 * 512)
        heads = panel[group : group + 128].view(torch.float16)
        assert heads[row % 32] == scale[row, k // 64] and heads[32 + row % 32] == offset[row, k // 64]
        byte = int(panel[group + 128 + block % 2 * 512 + inside // 4 % 4 * 128 + row % 32 * 4 + inside % 4])
        assert (byte >> 4 if inside >= 16 else byte & 15) == each[row, k]


def test_a_coded_layout_wants_all_its_parts() -> None:
    with pytest.raises(TypeError, match="2 tensors go beside the codes"):
        LAYOUTS["q8_g32_n32_offset"](torch.zeros(2, 32, dtype=torch.uint8), torch.ones(2, 1).half())
