"""Physical layouts of weights and of the KV cache: what the kernels read, front to back.

A panel is 32 columns (rows of w). bf16 keeps pairs of k together, so one 64-byte vector is 16 columns x 2 k; fp32 is
16 columns x 1 k. Both are one transpose of 4-byte words: [N/32, 32, words] -> [N/32, words, 32].
"""
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

COLUMNS = 32
BLOCK = 32                     # tokens per KV block


def _bits(tensor: Tensor) -> np.ndarray:
    """A contiguous tensor as numpy; bf16, which numpy lacks, as its 16 bits."""
    tensor = tensor.detach().contiguous()
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _padded(tensor: Tensor, multiple: int) -> Tensor:
    """Zero rows up to a multiple."""
    missing = -tensor.shape[0] % multiple
    return torch.cat((tensor, tensor.new_zeros(missing, *tensor.shape[1:]))) if missing else tensor


def _words(w: Tensor, dtype: torch.dtype) -> Tensor:
    """w [N, K] as 4-byte words [N, words]: one fp32, or two bf16 (an odd K gets a zero)."""
    if w.dtype != dtype: raise TypeError(f"the layout is of {dtype}, the weight is {w.dtype}")
    if dtype == torch.bfloat16 and w.shape[1] % 2: w = torch.cat((w, w.new_zeros(w.shape[0], 1)), 1)
    return w.detach().contiguous().view(torch.int32)


def _panels(w: Tensor, dtype: torch.dtype) -> np.ndarray:
    words = _padded(_words(w, dtype), COLUMNS)
    panels = words.view(-1, COLUMNS, words.shape[1]).transpose(1, 2).contiguous().numpy()
    return panels.view(np.float32 if dtype == torch.float32 else np.uint16)


def _interleaved(w: Tensor) -> Tensor:
    """[2F, K] (gate rows, then up rows) -> 16 gate rows, the matching 16 up rows, and so on; F padded to 16."""
    gate, up = (_padded(half, COLUMNS // 2) for half in w.chunk(2))
    return torch.stack((gate.view(-1, COLUMNS // 2, w.shape[1]), up.view(-1, COLUMNS // 2, w.shape[1])), 1).flatten(0, 2)


LAYOUTS: dict[str, Callable[..., np.ndarray]] = {
    "plain": _bits,
    "f32_n32": lambda w: _panels(w, torch.float32),                              # [N/32][K][32]
    "bf16_n32k2": lambda w: _panels(w, torch.bfloat16),                          # [N/32][K/2][32][2]
    "f32_n32_swiglu": lambda w: _panels(_interleaved(w), torch.float32),
    "bf16_n32k2_swiglu": lambda w: _panels(_interleaved(w), torch.bfloat16),
}
"""Layout name -> the function that packs a weight, or codes, scales and perhaps offsets, into it."""


def unpack(packed: np.ndarray, layout: str, shape: tuple[int, ...]) -> Tensor:
    """The weight of this shape back from its layout."""
    dtype = torch.bfloat16 if layout.startswith("bf16") or packed.dtype in (np.int16, np.uint16) else torch.float32
    if layout == "plain":
        flat = torch.from_numpy(packed)
        return (flat.view(torch.bfloat16) if dtype == torch.bfloat16 else flat).reshape(shape)
    rows, k = shape
    words = torch.from_numpy(packed.view(np.int32).reshape(packed.shape[0], -1, COLUMNS)).transpose(1, 2)
    full = words.reshape(-1, words.shape[2]).clone(memory_format=torch.contiguous_format).view(dtype)
    if layout.endswith("_swiglu"):
        pairs = full.view(-1, 2, COLUMNS // 2, full.shape[1])
        full = torch.cat([pairs[:, half].flatten(0, 1)[: rows // 2] for half in (0, 1)])
    return full[:rows, :k].contiguous()


def pack_k(cache: Tensor) -> Tensor:
    """K [P, Hkv, 32, D] as the kernels lay it out, same shape and bytes: bf16 [D/2][32][2], fp32 [D][32] per block and head."""
    p, heads, block, d = cache.shape
    width = 2 if cache.dtype == torch.bfloat16 else 1
    return cache.view(p, heads, block, d // width, width).transpose(2, 3).reshape(cache.shape).contiguous()


def unpack_k(cache: Tensor) -> Tensor:
    """The inverse of pack_k."""
    p, heads, block, d = cache.shape
    width = 2 if cache.dtype == torch.bfloat16 else 1
    return cache.view(p, heads, d // width, block, width).transpose(2, 3).reshape(cache.shape).contiguous()


def pack_v(cache: Tensor) -> Tensor:
    """V [P, Hkv, 32, D] as the kernels lay it out: bf16 [16][D][2] (pairs of tokens), fp32 as it is."""
    p, heads, block, d = cache.shape
    width = 2 if cache.dtype == torch.bfloat16 else 1
    return cache.view(p, heads, block // width, width, d).transpose(3, 4).reshape(cache.shape).contiguous()


def unpack_v(cache: Tensor) -> Tensor:
    """The inverse of pack_v."""
    p, heads, block, d = cache.shape
    width = 2 if cache.dtype == torch.bfloat16 else 1
    return cache.view(p, heads, block // width, d, width).transpose(3, 4).reshape(cache.shape).contiguous()
