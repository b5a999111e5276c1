"""Physical layouts of weights and of the KV cache: what the kernels read, front to back.

A panel is 32 columns (rows of w). bf16 keeps pairs of k together, so one 64-byte vector is 16 columns x 2 k; fp32 is
16 columns x 1 k. Both are one transpose of 4-byte words: [N/32, 32, words] -> [N/32, words, 32].

A panel of codes (compiler.ops.codes) is, group after group, the scales f16 [32], the offsets f16 [32] if it has them, and the
codes of each 32 k: 8 bits [8][32][4] for 4 k at a time, 4 bits [4][32][4] with k 0..15 in the low halves, k 16..31 in the high.
"""
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...compiler.ops.codes import groups, pack_codes, unpack_codes
from ...runtime.kv_runs import RUN

COLUMNS = 32
CODES_K = 32                   # k of a block of codes
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


@dataclass(frozen=True)
class Coded:
    """The layout of a weight held as codes: bits a code, k to a scale (0: the whole row), an offset beside each scale or not."""

    bits: int
    group: int
    offset: bool
    swiglu: bool

    @property
    def name(self) -> str:
        return (f"q{self.bits}_{f'g{self.group}' if self.group else 'row'}_n32{'_offset' if self.offset else ''}"
                f"{'_swiglu' if self.swiglu else ''}")

    def pack(self, codes: Tensor, *scales: Tensor) -> np.ndarray:
        """codes u8 [N, ceil(K * bits / 8)], scale f16 [N, G] and perhaps offset f16 [N, G] -> u8 [N/32, bytes of a panel]."""
        if len(scales) != 1 + self.offset: raise TypeError(f"{self.name}: {1 + self.offset} tensors go beside the codes, not {len(scales)}")
        k = codes.shape[1] * 8 // self.bits                      # 4 bits: an odd K is one more, which is in the same block
        blocks = -(-k // CODES_K)
        parts = [_padded(_interleaved(part) if self.swiglu else part, COLUMNS) for part in (codes, *scales)]
        full = torch.nn.functional.pad(unpack_codes(parts[0], self.bits, k), (0, blocks * CODES_K - k))
        steps = full.view(-1, COLUMNS, blocks, CODES_K // 4, 4).permute(0, 2, 3, 1, 4)
        if self.bits == 4: steps = steps[:, :, :4] | steps[:, :, 4:] << 4
        panels, in_group = steps.shape[0], self.group // CODES_K or blocks
        heads = torch.stack([part.view(panels, COLUMNS, -1).transpose(1, 2) for part in parts[1:]], 2)        # [panels, G, 1 or 2, 32]
        body = steps.reshape(panels, blocks, -1)
        body = torch.nn.functional.pad(body, (0, 0, 0, heads.shape[1] * in_group - blocks)).view(panels, heads.shape[1], -1)
        whole = torch.cat((heads.contiguous().view(torch.uint8).flatten(2), body), 2).flatten(1)
        return whole[:, : self._panel_bytes(blocks)].contiguous().numpy()

    def unpack(self, packed: np.ndarray, n: int, k: int) -> tuple[Tensor, ...]:
        """What `pack` was given, for a weight of n rows of k."""
        blocks, count = -(-k // CODES_K), groups(k, self.group)
        in_group, head = self.group // CODES_K or blocks, COLUMNS * 2 * (1 + self.offset)
        whole = torch.from_numpy(packed)
        whole = torch.nn.functional.pad(whole, (0, count * in_group * self._block_bytes - blocks * self._block_bytes))
        whole = whole.view(whole.shape[0], count, -1)
        heads = whole[:, :, :head].contiguous().view(torch.float16).view(-1, count, 1 + self.offset, COLUMNS)
        steps = whole[:, :, head:].reshape(whole.shape[0], count * in_group, -1, COLUMNS, 4)[:, :blocks]
        if self.bits == 4: steps = torch.cat((steps & 15, steps >> 4), 2)
        codes = steps.permute(0, 3, 1, 2, 4).reshape(-1, blocks * CODES_K)[:, :k]
        parts = [codes, *(heads[:, :, i].transpose(1, 2).reshape(-1, count) for i in range(1 + self.offset))]
        if self.swiglu: parts = [_parted(part, n) for part in parts]
        parts = [part[:n].contiguous() for part in parts]
        return (pack_codes(parts[0], self.bits), *parts[1:])

    @property
    def _block_bytes(self) -> int:
        return COLUMNS * CODES_K * self.bits // 8

    def _panel_bytes(self, blocks: int) -> int:
        return groups(blocks * CODES_K, self.group) * COLUMNS * 2 * (1 + self.offset) + blocks * self._block_bytes


CODED = [Coded(bits, group, offset, swiglu) for bits in (4, 8) for group in (0, 32, 64, 128) for offset in (False, True)
         for swiglu in (False, True)]

LAYOUTS: dict[str, Callable[..., np.ndarray]] = {
    "plain": _bits,
    "f32_n32": lambda w: _panels(w, torch.float32),                              # [N/32][K][32]
    "bf16_n32k2": lambda w: _panels(w, torch.bfloat16),                          # [N/32][K/2][32][2]
    "f32_n32_swiglu": lambda w: _panels(_interleaved(w), torch.float32),
    "bf16_n32k2_swiglu": lambda w: _panels(_interleaved(w), torch.bfloat16),
    **{layout.name: layout.pack for layout in CODED},
}
"""Layout name -> the function that packs a weight, or codes, scales and perhaps offsets, into it."""


def _parted(full: Tensor, rows: int) -> Tensor:
    """The inverse of _interleaved: gate rows, then up rows, `rows` in all."""
    pairs = full.view(-1, 2, COLUMNS // 2, full.shape[1])
    return torch.cat([pairs[:, half].flatten(0, 1)[: rows // 2] for half in (0, 1)])


def unpack(packed: np.ndarray, layout: str, shape: tuple[int, ...]) -> Tensor:
    """The weight of this shape back from its layout."""
    dtype = torch.bfloat16 if layout.startswith("bf16") or packed.dtype in (np.int16, np.uint16) else torch.float32
    if layout == "plain":
        flat = torch.from_numpy(packed)
        return (flat.view(torch.bfloat16) if dtype == torch.bfloat16 else flat).reshape(shape)
    rows, k = shape
    words = torch.from_numpy(packed.view(np.int32).reshape(packed.shape[0], -1, COLUMNS)).transpose(1, 2)
    full = words.reshape(-1, words.shape[2]).clone(memory_format=torch.contiguous_format).view(dtype)
    if layout.endswith("_swiglu"): full = _parted(full, rows)
    return full[:rows, :k].contiguous()


TOGETHER = {torch.float32: 1, torch.bfloat16: 2, torch.int8: 4}
"""Values of a cache that are multiplied together, by its dtype."""

_K_BIAS = -128                 # a K code lies as code + 128: its top bit is flipped


def in_runs(cache: Tensor) -> Tensor:
    """[P, Hkv, ...] as it lies: [runs, Hkv, RUN, ...], the last run filled up with zeros."""
    full = torch.cat((cache, cache.new_zeros((-cache.shape[0] % RUN, *cache.shape[1:]))))
    return full.view(-1, RUN, *cache.shape[1:]).transpose(1, 2).contiguous()


def out_of_runs(runs: Tensor, blocks: int) -> Tensor:
    """The inverse of in_runs."""
    return runs.transpose(1, 2).flatten(0, 1)[:blocks].contiguous()


def pack_k(cache: Tensor) -> Tensor:
    """K [P, Hkv, 32, D] as the kernels lay it out, in runs: bf16 [D/2][32][2], fp32 [D][32], codes [D/4][32][4] of code + 128 per block
    and head."""
    p, heads, block, d = cache.shape
    width = TOGETHER[cache.dtype]
    if cache.dtype == torch.int8: cache = cache ^ _K_BIAS
    return in_runs(cache.view(p, heads, block, d // width, width).transpose(2, 3).reshape(cache.shape))


def unpack_k(runs: Tensor, blocks: int) -> Tensor:
    """The inverse of pack_k."""
    cache = out_of_runs(runs, blocks)
    p, heads, block, d = cache.shape
    width = TOGETHER[cache.dtype]
    if cache.dtype == torch.int8: cache = cache ^ _K_BIAS
    return cache.view(p, heads, d // width, block, width).transpose(2, 3).reshape(cache.shape).contiguous()


def pack_v(cache: Tensor) -> Tensor:
    """V [P, Hkv, 32, D] as the kernels lay it out, in runs: bf16 [16][D][2] (pairs of tokens), fp32 as it is, codes [8][D][4]."""
    p, heads, block, d = cache.shape
    width = TOGETHER[cache.dtype]
    return in_runs(cache.view(p, heads, block // width, width, d).transpose(3, 4).reshape(cache.shape))


def unpack_v(runs: Tensor, blocks: int) -> Tensor:
    """The inverse of pack_v."""
    cache = out_of_runs(runs, blocks)
    p, heads, block, d = cache.shape
    width = TOGETHER[cache.dtype]
    return cache.view(p, heads, block // width, d, width).transpose(3, 4).reshape(cache.shape).contiguous()
