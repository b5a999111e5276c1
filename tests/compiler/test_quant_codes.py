"""Codes as they lie in memory: every shape and group against an oracle by hand (FIELD R20), and the rounding of activations."""
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from infc.compiler.ops.codes import (
    E4M3,
    E4M3_MAX,
    ROW_LIMIT,
    TINY,
    groups,
    pack_codes,
    rounded_rows,
    row_codes,
    spread,
    unpack_codes,
    weight,
)
from torch import Tensor

KS = (1, 17, 48, 64, 100, 2048)


def ints(shape: tuple[int, ...], top: int, seed: int) -> Tensor:
    return torch.randint(top + 1, shape, generator=torch.Generator().manual_seed(seed)).to(torch.uint8)


def by_hand(stored: np.ndarray, scale: np.ndarray, offset: np.ndarray | None, bits: int, group: int, k: int) -> np.ndarray:
    """The weight, value by value, from the bytes."""
    found = np.empty((len(stored), k))
    for row in range(len(stored)):
        for column in range(k):
            byte = int(stored[row, column if bits == 8 else column // 2])
            code = byte if bits == 8 else byte >> 4 if column % 2 else byte & 15
            at = row, column // group if group else 0
            found[row, column] = scale[at] * (code - 2 ** (bits - 1)) if offset is None else scale[at] * code + offset[at]
    return found


@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("group", [0, 16, 32, 128, 256, 512])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_a_weight_is_what_the_bytes_say(k, group, bits, symmetric):
    """Groups that do not divide K, groups longer than K, and the half-used byte of an odd K."""
    for n in (1, 3):
        codes = ints((n, k), 2**bits - 1, k + group)
        shape = n, groups(k, group)
        scale, offset = (torch.rand(shape, generator=torch.Generator().manual_seed(i)).half() for i in (1, 2))
        stored = pack_codes(codes, bits)
        assert stored.dtype == torch.uint8 and stored.shape == (n, -(-k * bits // 8))
        found = weight(stored, scale, None if symmetric else offset, bits, group, k, torch.float64)
        expected = by_hand(stored.numpy(), scale.double().numpy(), None if symmetric else offset.double().numpy(), bits, group, k)
        assert np.abs(found.numpy() - expected).max() <= 1e-12


@given(st.integers(1, 5), st.integers(1, 70), st.sampled_from([4, 8]), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_packing_is_undone(n, k, bits, seed):
    codes = ints((n, k), 2**bits - 1, seed)
    assert torch.equal(unpack_codes(pack_codes(codes, bits), bits, k), codes)


def test_an_odd_row_leaves_the_high_half_of_its_last_byte_empty():
    assert pack_codes(torch.tensor([[15, 1, 9]], dtype=torch.uint8), 4).tolist() == [[15 + 16, 9]]


def test_codes_of_three_bits_are_refused():
    with pytest.raises(ValueError, match="codes of 3 bits"): weight(ints((1, 8), 7, 0), torch.ones(1, 1), None, 3, 0, 8, torch.float32)


def e4m3(byte: int) -> float:
    """What a byte says: a sign, 4 bits of exponent (bias 7), 3 of fraction; exponent 0 has no leading one (OCP 8-bit floats, section 5)."""
    exponent, fraction = byte >> 3 & 15, byte & 7
    size = (8 + fraction) * 2.0 ** (exponent - 10) if exponent else fraction * 2.0**-9
    return -size if byte & 128 else size


NUMBERS = [byte for byte in range(256) if byte & 127 != 127]            # the two that are left are NaN


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("group", "scales"), [(0, (2, 1)), (0, (1, 1)), (32, (2, 8)), (128, (2, 2))])
def test_an_e4m3_weight_is_what_the_bytes_say(group, scales, dtype):
    """Every number, a scale a row, a group or the whole weight; the same where the codes are lifted to fp64."""
    codes = torch.tensor([NUMBERS, NUMBERS[::-1]], dtype=torch.uint8).view(E4M3)
    scale = (torch.rand(scales, generator=torch.Generator().manual_seed(0)) / 448).half()
    per_row = scale.expand(2, scales[1]).double()
    expected = [[e4m3(byte) * float(per_row[row, column // group if group else 0]) for column, byte in enumerate(its)]
                for row, its in enumerate((NUMBERS, NUMBERS[::-1]))]
    expected = torch.tensor(expected, dtype=torch.float64).to(dtype)
    assert torch.equal(weight(codes, scale, None, 8, group, 254, dtype), expected)
    assert torch.equal(weight(codes.double(), scale.double(), None, 8, group, 254, dtype), expected)


def test_spread_stops_at_a_short_group():
    assert spread(torch.tensor([[1.0, 2.0]]), 5, 3).tolist() == [[1, 1, 1, 2, 2]]
    assert spread(torch.tensor([[7.0]]), 3, 0).tolist() == [[7, 7, 7]]


# ------------------------------------------------------------------------------------------------------------- activations

@given(st.integers(1, 3), st.integers(1, 70), st.sampled_from([8, 16]), st.sampled_from([0, 4, 32, 128]), st.integers(-20, 20),
       st.integers(0, 99))
@settings(max_examples=80, deadline=None)
def test_rows_are_rounded_to_the_nearest_code(n, k, bits, group, magnitude, seed):
    """By hand in numpy's fp32, with an outlier, ties included: the largest of a group gets the largest code."""
    x = torch.randn((n, k), generator=torch.Generator().manual_seed(seed)) * 10.0**magnitude
    x[0, seed % k] *= 100
    codes, scale = row_codes(x, bits, group)
    size, limit = group or k, np.float32(ROW_LIMIT[bits])
    for row in range(n):
        for g in range(groups(k, group)):
            part = x[row, g * size : (g + 1) * size].numpy()
            largest = np.abs(part).max()
            expected = np.rint(part * (np.float32(1) / largest * limit)) if largest > TINY else np.zeros_like(part)
            assert codes[row, g * size : (g + 1) * size].tolist() == expected.tolist()
            assert float(scale[row, g]) == float(largest / limit)
    step = spread(scale, k, group)
    assert bool(((rounded_rows(x, bits, group) - x).abs() <= step * (0.5 + 1e-2)).all())


@given(st.integers(1, 70), st.sampled_from([0, 4, 32, 128]), st.integers(-20, 20), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_rows_are_rounded_to_the_nearest_e4m3(k, group, magnitude, seed):
    """Among all its numbers, in fp64, ties to the even byte; the largest of a group is 448."""
    x = torch.randn((2, k), generator=torch.Generator().manual_seed(seed)) * 10.0**magnitude
    x[0, seed % k] *= 100
    codes, scale = row_codes(x, 8, group, True)
    values = torch.tensor([e4m3(byte) for byte in NUMBERS], dtype=torch.float64)
    assert codes.dtype == E4M3
    for row in range(2):
        for g in range(groups(k, group)):
            part = x[row, g * (group or k) : (g + 1) * (group or k)]
            inverse = part.abs().max().reciprocal() * E4M3_MAX
            off = ((part * inverse).double()[:, None] - values).abs()
            best = off == off.amin(1, keepdim=True)
            found = codes[row, g * (group or k) : (g + 1) * (group or k)].view(torch.uint8)
            for column, byte in enumerate(found.tolist()):
                near = [b for b, nearest in zip(NUMBERS, best[column].tolist(), strict=True) if nearest]
                assert byte in near and (len({b & 127 for b in near}) == 1 or byte % 2 == 0)
            assert float(found.view(E4M3).float().abs().max()) == E4M3_MAX
            assert float(scale[row, g]) == float(part.abs().max() / E4M3_MAX)


def test_e4m3_codes_have_eight_bits():
    with pytest.raises(ValueError, match="e4m3 codes of 16 bits"): row_codes(torch.ones(1, 8), 16, 0, True)


@pytest.mark.parametrize("bits", [8, 16])
def test_a_zero_row_stays_zero_and_what_is_not_finite_shows(bits):
    x = torch.zeros(4, 40)
    x[1, 3], x[2, 35], x[3, 0] = torch.nan, torch.inf, 1e-38
    found = rounded_rows(x, bits, 32)
    assert torch.equal(found[0], torch.zeros(40))
    assert not bool(found[1, 3].isfinite()) and torch.equal(found[1, 32:], torch.zeros(8))
    assert not bool(found[2, 35].isfinite()) and torch.equal(found[2, :32], torch.zeros(32))
    assert torch.equal(found[3], torch.zeros(40))                              # too small for a code: its inverse scale would overflow


def test_an_e4m3_row_of_zeros_stays_zero_and_what_is_not_finite_shows():
    x = torch.zeros(4, 40)
    x[1, 3], x[2, 35], x[3, 0] = torch.nan, torch.inf, 1e-38
    found = rounded_rows(x, 8, 0, True)
    assert torch.equal(found[0], torch.zeros(40)) and torch.equal(found[3], torch.zeros(40))
    assert not bool(found[1, 3].isfinite()) and not bool(found[2, 35].isfinite())


def test_no_bits_leave_rows_as_they_are():
    x = torch.randn(2, 8, dtype=torch.float64)
    assert torch.equal(rounded_rows(x, 0, 32), x)
    assert rounded_rows(x.bfloat16(), 0, 32).dtype == torch.float32


def test_sixteen_bits_are_finer_than_bf16_and_eight_coarser():
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    error = {bits: float((rounded_rows(x, bits, 32) - x).norm()) for bits in (8, 16)}
    bf16 = float((x.bfloat16().float() - x).norm())
    assert error[16] < bf16 / 20 and bf16 < error[8] < 5 * bf16
