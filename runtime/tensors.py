"""The safetensors file format, read and written without a framework: numpy has no bf16, and weights must lie 64-byte aligned."""

import json
import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from .errors import RuntimeFault

if TYPE_CHECKING:
    import numpy as np

ALIGN = 64
"""Bytes: one cache line, one AVX-512 vector."""

_NAMES = {
    "f64": "F64",
    "f32": "F32",
    "bf16": "BF16",
    "f16": "F16",
    "i64": "I64",
    "i32": "I32",
    "i16": "I16",
    "i8": "I8",
    "u64": "U64",
    "u32": "U32",
    "u16": "U16",
    "u8": "U8",
    "f8e4m3": "F8_E4M3",
    "bool": "BOOL",
}
_DTYPES = {theirs: ours for ours, theirs in _NAMES.items()}
_ITEM_BYTES = {
    "f64": 8,
    "i64": 8,
    "u64": 8,
    "f32": 4,
    "i32": 4,
    "u32": 4,
    "bf16": 2,
    "f16": 2,
    "i16": 2,
    "u16": 2,
    "i8": 1,
    "u8": 1,
    "f8e4m3": 1,
    "bool": 1,
}
_MAX_HEADER = 100_000_000
"""The format's own limit."""


class Tensor(NamedTuple):
    """A tensor to write: `data` is any C-contiguous buffer of exactly shape x dtype bytes (bf16: the raw 16-bit words)."""

    dtype: str
    shape: tuple[int, ...]
    data: Any


class Place(NamedTuple):
    """Where a tensor lies: bytes `start` to `stop` of the data region."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def tensor(array: "np.ndarray", dtype: str = "") -> Tensor:
    """Wrap a numpy array; `dtype` says what its words really are where numpy cannot ("bf16" for uint16)."""
    name = dtype or f"{ {'f': 'f', 'i': 'i', 'u': 'u', 'b': 'bool'}[array.dtype.kind] }{array.dtype.itemsize * 8}"
    return Tensor("bool" if name.startswith("bool") else name, tuple(array.shape), array)


def raw(data: Any) -> memoryview:
    """The bytes of a buffer, not copied."""
    view = memoryview(data)
    return view.cast("B") if view.nbytes else memoryview(b"")


def write_tensors(file: BinaryIO, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
    """Write a safetensors file, every tensor at a multiple of 64 bytes. Returns (offset, bytes) of its data region.

    The format allows no holes, so a gap is a small U8 tensor named `.pad.N`.
    """
    header: dict[str, dict[str, object]] = {}
    pieces: list[memoryview] = []
    offset = 0

    def place(name: str, dtype: str, shape: tuple[int, ...], data: memoryview) -> None:
        nonlocal offset
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + len(data)]}
        pieces.append(data)
        offset += len(data)

    for name, value in tensors.items():
        data = raw(value.data)
        expected = _bytes(value.dtype, value.shape)
        if len(data) != expected:
            raise ValueError(f"tensor {name}: {value.dtype}{list(value.shape)} is {expected} bytes, got {len(data)}")
        place(name, _NAMES[value.dtype], value.shape, data)
        if gap := -offset % ALIGN:
            place(f".pad.{len(pieces)}", "U8", (gap,), memoryview(bytes(gap)))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGN)
    file.write(struct.pack("<Q", len(text)) + text)
    for data in pieces:
        file.write(data)
    return 8 + len(text), offset


def header_bytes(head: bytes, size: int, where: str) -> int:
    """Where the data region of a safetensors file of `size` bytes starts, from its first 8 bytes."""
    length = struct.unpack("<Q", head[:8])[0] if len(head) >= 8 else _MAX_HEADER + 1
    if length > _MAX_HEADER or 8 + length > size:
        raise RuntimeFault(f"{where}: not a whole safetensors file")
    return 8 + length


def parse_header(text: bytes, data_bytes: int, where: str) -> dict[str, Place]:
    """The places of all tensors; every one must lie inside the data region and be as long as its shape says."""
    try:
        entries = json.loads(text)
        entries.pop("__metadata__", None)
        places = {
            name: Place(_DTYPES[e["dtype"]], tuple(e["shape"]), e["data_offsets"][0], e["data_offsets"][1])
            for name, e in entries.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise RuntimeFault(f"{where}: damaged safetensors header ({error})") from error
    for name, p in places.items():
        inside = 0 <= p.start <= p.stop <= data_bytes
        if not inside or p.stop - p.start != _bytes(p.dtype, p.shape):
            raise RuntimeFault(f"{where}: tensor {name} {p.dtype}{list(p.shape)} does not fit its place {p.start}..{p.stop}")
    return places


def parse(data: bytes, where: str) -> "dict[str, np.ndarray]":
    """All tensors of a small file in memory, as numpy arrays (bf16 as its raw uint16, e4m3 as its raw uint8)."""
    import numpy as np

    start = header_bytes(data[:8], len(data), where)
    region = memoryview(data)[start:]
    kinds = {"bf16": "u2", "bool": "?", "f8e4m3": "u1"}
    return {
        name: np.frombuffer(region[p.start : p.stop], kinds.get(p.dtype) or f"{p.dtype[0]}{_ITEM_BYTES[p.dtype]}").reshape(
            p.shape
        )
        for name, p in parse_header(data[8:start], len(region), where).items()
        if not name.startswith(".pad.")
    }


def _bytes(dtype: str, shape: tuple[int, ...]) -> int:
    size = _ITEM_BYTES[dtype]
    for n in shape:
        size *= n
    return size
