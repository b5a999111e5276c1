"""crc32c is RFC 3720's, for any length; safetensors files are what the safetensors package writes and reads."""
import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from infc.runtime.checksum import crc32c_chunks
from infc.runtime.errors import RuntimeFault
from infc.runtime.tensors import parse, tensor, write_tensors
from safetensors.numpy import load, save


def crc32c(data: bytes) -> int:
    """Bit by bit, as RFC 3720 defines it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 * (crc & 1))
    return crc ^ 0xFFFFFFFF


@pytest.mark.parametrize(("data", "expected"), [                    # RFC 3720, appendix B.4
    (bytes(32), 0x8A9136AA), (b"\xff" * 32, 0x62A8AB43), (bytes(range(32)), 0x46DD794E), (bytes(range(31, -1, -1)), 0x113FDB5C),
    (b"123456789", 0xE3069283),
])
def test_known_sums(data, expected):
    assert crc32c_chunks(data, 1024) == [expected] == [crc32c(data)]


@settings(deadline=None, max_examples=30)
@given(st.binary(max_size=5000), st.sampled_from([1024, 2048, 4096]))
def test_any_length(data, chunk):
    assert crc32c_chunks(data, chunk) == [crc32c(data[i:i + chunk]) for i in range(0, len(data), chunk)]


def test_a_bad_chunk_is_a_bug():
    with pytest.raises(ValueError, match="chunk 3000 is not a power of two"):
        crc32c_chunks(b"", 3000)


ARRAYS = {
    "a": np.arange(7, dtype=np.float32).reshape(7, 1), "b": np.array([True, False]), "c": np.zeros((0, 3), np.int64),
    "d": np.array(5, np.uint8), "e": np.arange(6, dtype=np.float16).reshape(2, 3), "f": np.arange(-3, 3, dtype=np.int8),
}


def test_the_package_reads_what_we_write():
    file = io.BytesIO()
    offset, size = write_tensors(file, {k: tensor(v) for k, v in ARRAYS.items()})
    data = file.getvalue()
    assert len(data) == offset + size and offset % 64 == 0
    found = load(data)
    assert all(np.array_equal(found[k], v) and found[k].dtype == v.dtype for k, v in ARRAYS.items())


def test_we_read_what_the_package_writes():
    found = parse(save(ARRAYS), "test")
    assert set(found) == set(ARRAYS)
    assert all(np.array_equal(found[k], v) and found[k].dtype == v.dtype for k, v in ARRAYS.items())


def test_e4m3_is_the_packages_too():
    import torch
    from safetensors.torch import load as load_torch

    file, codes = io.BytesIO(), torch.arange(12, dtype=torch.uint8).reshape(3, 4)
    write_tensors(file, {"codes": tensor(codes.numpy(), "f8e4m3")})
    found = load_torch(file.getvalue())["codes"]
    assert found.dtype == torch.float8_e4m3fn and torch.equal(found.view(torch.uint8), codes)
    assert np.array_equal(parse(file.getvalue(), "test")["codes"], codes.numpy())


def test_a_cut_file_is_refused():
    data = save(ARRAYS)
    for cut in (0, 7, 8, 100, len(data) - 1):
        with pytest.raises(RuntimeFault, match="test: "):
            parse(data[:cut], "test")
