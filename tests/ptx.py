"""Runs straight-line PTX on arrays of 32-bit registers: the few instructions our inline assembly uses, as the PTX ISA says."""
import re
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

Word = NDArray[np.uint32]
_PAIR = {"bf16x2": torch.bfloat16, "f16x2": torch.float16}


def run_ptx(text: str, outputs: int, *inputs: Word) -> list[Word]:
    """Registers $0 .. $outputs-1 after the text; those from $outputs on hold the inputs. ValueError for an instruction not known here."""
    regs: dict[str, Word] = {f"${outputs + i}": word for i, word in enumerate(inputs)}
    shape = inputs[0].shape
    for statement in text.strip().strip("{}").replace("\n", " ").split(";"):
        name, _, rest = statement.strip().partition(" ")
        if not name or name == ".reg": continue
        into, *names = (part.strip() for part in rest.split(","))
        regs[into] = _instruction(name, [regs[n] if n in regs else np.full(shape, _constant(n), np.uint32) for n in names])
    return [regs[f"${i}"] for i in range(outputs)]


def _constant(text: str) -> int:
    if not re.fullmatch(r"(0[xf][0-9A-Fa-f]+|\d+)", text): raise ValueError(f"{text!r} is no register and no constant")
    return int(text.replace("0f", "0x"), 0)


def _instruction(name: str, given: Sequence[Word]) -> Word:
    if name == "mov.b32": return given[0]
    if name == "shr.u32": return given[0] >> given[1]
    if name == "xor.b32": return given[0] ^ given[1]
    if name == "sub.u32": return given[0] - given[1]
    if name == "lop3.b32": return _lop3(*given)
    if name == "prmt.b32": return _prmt(*given)
    if name == "add.rn.f32": return (given[0].view(np.float32) + given[1].view(np.float32)).view(np.uint32)
    if name == "cvt.rn.bf16x2.f32": return _joined(*(torch.from_numpy(x.view(np.float32)).bfloat16() for x in given))
    kind, _, dtype = name.rpartition(".")
    if kind == "fma.rn" and dtype in _PAIR:
        (a0, a1), (b0, b1), (c0, c1) = (_halves(x, _PAIR[dtype]) for x in given)      # products and sums are exact in fp64
        return _joined((a1 * b1 + c1).to(_PAIR[dtype]), (a0 * b0 + c0).to(_PAIR[dtype]))
    raise ValueError(f"instruction {name!r}")


def _lop3(a: Word, b: Word, c: Word, table: Word) -> Word:
    out = np.zeros_like(a)
    for bit in range(32):
        index = ((a >> bit & 1) << 2) | ((b >> bit & 1) << 1) | (c >> bit & 1)
        out |= (table >> index & 1) << bit
    return out


def _prmt(a: Word, b: Word, selector: Word) -> Word:
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    out = np.zeros(a.shape, np.uint64)
    for byte in range(4):
        chosen = (selector >> (4 * byte) & 7).astype(np.uint64) * np.uint64(8)
        out |= (both >> chosen & np.uint64(255)) << np.uint64(8 * byte)
    return out.astype(np.uint32)


def _halves(word: Word, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(low, high), in fp64."""
    pairs = torch.from_numpy(np.ascontiguousarray(word).view(np.int16).copy()).view(dtype).double()
    return pairs[0::2], pairs[1::2]


def _joined(high: torch.Tensor, low: torch.Tensor) -> Word:
    """Two tensors of 16 bits as one register: the first in the high half."""
    return torch.stack((low, high), -1).flatten().view(torch.int16).numpy().view(np.uint32)
