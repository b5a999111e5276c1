"""Layouts: every packed weight and cache unpacks to what it was, and lies where the kernels look for it."""
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from infc.backends.cpu.pack import LAYOUTS, pack_k, pack_v, unpack, unpack_k, unpack_v

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


@settings(deadline=None, max_examples=40)
@given(layout=st.sampled_from(sorted(LAYOUTS)), rows=st.integers(1, 70), k=st.integers(1, 40), dtype=st.sampled_from(sorted(DTYPES)))
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


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_caches(dtype: torch.dtype) -> None:
    cache = torch.randn(3, 2, 32, 48).to(dtype)
    assert torch.equal(unpack_k(pack_k(cache)), cache) and torch.equal(unpack_v(pack_v(cache)), cache)
    k, v, width = pack_k(cache).view(3, 2, -1), pack_v(cache).view(3, 2, -1), 2 if dtype == torch.bfloat16 else 1
    for t, d in ((0, 0), (31, 47), (5, 2)):
        assert torch.equal(k[:, :, d // width * 32 * width + t * width + d % width], cache[:, :, t, d])
        assert torch.equal(v[:, :, t // width * 48 * width + d * width + t % width], cache[:, :, t, d])


def test_a_layout_refuses_another_dtype() -> None:
    with pytest.raises(TypeError, match="bfloat16"): LAYOUTS["f32_n32"](torch.zeros(2, 2).bfloat16())
