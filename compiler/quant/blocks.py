"""Weights as their file stored them: a GGUF's low-bit blocks become codes and scales bit for bit, with nothing rounded again.

Kept are Q4_0, Q4_1 and Q8_0: groups of 32 with an f16 scale, and an f16 offset in Q4_1 (https://github.com/ggml-org/ggml,
src/ggml-common.h). K-quants have scales of scales, Q5 has 5 bits: those are no codes of ours, and stay dequantized.
"""
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from ..ir import Graph
from ..ops.codes import pack_codes
from .rounding import Quantized
from .scheme import Scheme

GROUP = 32
KINDS = {"Q4_0": Scheme(4, GROUP, True), "Q4_1": Scheme(4, GROUP, False), "Q8_0": Scheme(8, GROUP, True)}
"""What of a file can be kept, and which scheme that is."""


@dataclass(frozen=True)
class Stored:
    """One matrix as it lies in the file, its rows in the order of the module's weight."""

    rows: np.ndarray               # u8 [N, bytes per row]
    kind: str                      # Q4_1, F16, ...

    @cached_property
    def sha256(self) -> str:
        """Of the rows."""
        return hashlib.sha256(np.ascontiguousarray(self.rows).data).hexdigest()


@dataclass(frozen=True)
class _Codes:
    """A matrix before its codes are packed."""

    codes: Tensor                  # u8 [N, K]
    scale: Tensor                  # f16 [N, G]
    offset: Tensor | None          # f16 [N, G]
    bits: int

    def widened(self, scheme: Scheme) -> "_Codes":
        """The same values in a scheme with as many bits or more, symmetric or not."""
        codes, offset = self.codes, self.offset
        if offset is None and scheme.bits > self.bits: codes = codes + (2 ** (scheme.bits - 1) - 2 ** (self.bits - 1))
        if offset is None and not scheme.symmetric: offset = self.scale * -(2 ** (scheme.bits - 1))
        return _Codes(codes, self.scale, offset, scheme.bits)

    def packed(self) -> Tensor:
        """As codes are stored."""
        return pack_codes(self.codes, self.bits)


def format_of(graph: Graph, weight: fx.Node) -> Scheme | str:
    """The scheme that holds what the file has for all parts of a weight; or why its blocks cannot be kept."""
    if not graph.blocks: return "the model was not read from a GGUF file"
    kinds = []
    for path in weight.meta.get("origin") or [str(weight.target)]:
        found = graph.blocks.get(path)
        if found is None: return f"{path} is no matrix of the file"
        if found.kind not in KINDS: return f"{path} is {found.kind} in the file; {', '.join(KINDS)} can be kept"
        kinds.append(KINDS[found.kind])
    return Scheme(max(kind.bits for kind in kinds), GROUP, all(kind.symmetric for kind in kinds))


def stored(graph: Graph, weight: fx.Node) -> Quantized | str:
    """The file's own codes of a weight; or why they are not to be had. Their values are the weight's, every bit."""
    scheme = format_of(graph, weight)
    if isinstance(scheme, str): return scheme
    parts = [_read(graph.blocks[path]).widened(scheme) for path in weight.meta["origin"]]
    if len({part.codes.shape[1] for part in parts}) > 1: return "its parts have rows of different lengths in the file"
    offsets = [part.offset for part in parts if part.offset is not None]
    found = Quantized(torch.cat([part.packed() for part in parts]), torch.cat([part.scale for part in parts]),
                      torch.cat(offsets) if offsets else None, scheme, parts[0].codes.shape[1])
    if not torch.equal(found.dequantized(), graph.weights[str(weight.target)].float()):
        return "a pass changed its values or their order"
    return found


def kept(graph: Graph, weight: fx.Node, scheme: Scheme) -> Quantized | None:
    """The file's own codes, where the file has the weight in just this format: rounding it anew could only lose."""
    found = format_of(graph, weight)
    if isinstance(found, str) or _layout(found) != _layout(scheme): return None
    quantized = stored(graph, weight)
    return None if isinstance(quantized, str) else Quantized(quantized.codes, quantized.scale, quantized.offset, scheme, quantized.k)


def note_better(graph: Graph, schemes: Mapping[fx.Node, Scheme]) -> None:
    """Say in the graph's notes which weights the file holds in another format with no more bits than they were asked to have."""
    finer = []
    for weight, scheme in schemes.items():
        found, k = format_of(graph, weight), int(weight.meta["val"].shape[1])
        if not isinstance(found, str) and _layout(found) != _layout(scheme) and found.stored_bits(k) <= scheme.stored_bits(k):
            bits, asked = (f"{one.stored_bits(k):.3g}" for one in (found, scheme))
            finer.append(f"{found} ({bits} bits a weight), which became {scheme} ({asked}) as asked")
    if finer: note(graph, f"the file holds {len(finer)} of {len(schemes)} weights as {finer[0]}; --quant keep keeps the file's own codes")


def note(graph: Graph, line: str) -> None:
    """Add a line to the graph's notes, once."""
    known = graph.meta.get("notes", [])
    if line not in known: graph.meta["notes"] = [*known, line]


def _layout(scheme: Scheme) -> tuple[Any, ...]:
    return scheme.bits, scheme.group, scheme.symmetric, scheme.e4m3


def _read(found: Stored) -> _Codes:
    scheme, rows = KINDS[found.kind], np.array(found.rows)          # a copy: the file is mapped read-only
    head = 2 if scheme.symmetric else 4
    blocks = rows.reshape(len(rows), -1, head + GROUP * scheme.bits // 8)
    heads = torch.from_numpy(np.ascontiguousarray(blocks[..., :head]).view(np.float16))
    body = torch.from_numpy(np.ascontiguousarray(blocks[..., head:]))
    # a 4-bit block has its first half in the low nibbles, its second in the high ones; 8-bit codes are signed
    codes = torch.cat((body & 15, body >> 4), -1) if scheme.bits == 4 else body ^ 128
    return _Codes(codes.flatten(1), heads[..., 0].contiguous(), None if scheme.symmetric else heads[..., 1].contiguous(), scheme.bits)
