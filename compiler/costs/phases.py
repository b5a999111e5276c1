"""What is asked of a model, in sizes: the live sizes of a step, phases made of them, and formulas over them. Needs no torch.

A formula is plain data (Terms) over the sizes of a Load: the dims T, N, R, M; "pairs:W", the (token, key) pairs attention multiplies;
"keys:W", the cached keys it reads. W is the sliding window, 0 without one.
"""
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

BLOCK = 32
"""Tokens per KV block, as compiler.ops.kv_write says (which needs torch; a test holds them together)."""

Terms = list[list[Any]]
"""[[coefficient, name, name, ...], ...]: a sum of products. As plain data it goes into a report and needs no torch to evaluate."""


@dataclass(frozen=True)
class Load:
    """The live sizes of one step: for each sequence its new tokens and the tokens already in its cache; rows are sampled."""

    new: tuple[int, ...]
    before: tuple[int, ...]
    rows: int

    @property
    def dims(self) -> dict[str, int]:
        """T, N, R and M, as the runtime fills them."""
        longest = max(n + b for n, b in zip(self.new, self.before, strict=True))
        return {"T": sum(self.new), "N": len(self.new), "R": self.rows, "M": -(-longest // BLOCK)}

    def pairs(self, window: int = 0) -> int:
        """(token, key it sees) pairs, over all sequences."""
        return sum(_pairs(n, b, window) for n, b in zip(self.new, self.before, strict=True))

    def keys(self, window: int = 0) -> int:
        """Keys that some token of their sequence sees, over all sequences."""
        return sum(n + (min(b, window - 1) if window else b) for n, b in zip(self.new, self.before, strict=True))


def _pairs(new: int, before: int, window: int) -> int:
    """Sum over the new tokens of min(position + 1, window)."""
    if not window: return new * before + new * (new + 1) // 2
    growing = max(0, min(new, window - before))              # tokens that still see everything
    return growing * before + growing * (growing + 1) // 2 + (new - growing) * window


@dataclass(frozen=True)
class Phase:
    """What is asked of the model: a prefill of so many tokens, or a decode step. Longer prefills than a bucket are several loads."""

    name: str                       # "decode 8 x 448", "prefill 256 at 0"
    kind: str                       # "decode" | "prefill"
    loads: tuple[Load, ...]

    @property
    def tokens(self) -> int:
        return sum(sum(load.new) for load in self.loads)

    @property
    def words(self) -> str:
        """For a sentence: "context 8192, batch 16"."""
        first = self.loads[0]
        if self.kind == "decode": return f"context {first.before[0]}, batch {len(first.new)}"
        return f"a prefill of {self.tokens} tokens after {first.before[0]}"


def decode(batch: int, context: int) -> Phase:
    """One token for each of `batch` sequences with `context` tokens in the cache."""
    return Phase(f"decode {batch} x {context}", "decode", (Load((1,) * batch, (context,) * batch, batch),))


def prefill(tokens: int, context: int, largest: int) -> Phase:
    """`tokens` of one sequence after `context` others, in chunks of at most `largest`; the last one samples."""
    loads = []
    for begin in range(0, tokens, largest):
        size = min(largest, tokens - begin)
        loads.append(Load((size,), (context + begin,), int(begin + size == tokens)))
    return Phase(f"prefill {tokens} at {context}", "prefill", tuple(loads))


def value(terms: Sequence[Sequence[Any]], load: Load | Mapping[str, int]) -> float:
    """A formula's value. Raises KeyError for a size that is not given."""
    dims = load.dims if isinstance(load, Load) else load
    total = 0
    for coefficient, *names in terms:
        for name in names:
            if name in dims: coefficient *= dims[name]
            elif isinstance(load, Load): coefficient *= _counted(load, name)
            else: raise KeyError(name)
        total += coefficient
    return total


def _counted(load: Load, name: str) -> int:
    what, _, window = name.partition(":")
    return {"pairs": load.pairs, "keys": load.keys}[what](int(window))
