"""Does a format pay on the machine that builds? Each quantized product is timed beside the wide one it replaces.

A format that makes a decode step (one row, weights from memory) slower is refused, unless the compile is told to keep it; one that
costs a batch or a prompt is kept, and said.
"""
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from ..ir import Graph
from .scheme import Scheme

ROWS = (1, 8, 256)
"""A decode step, a batch of them, a prompt."""

SMALLEST = 1 << 20
"""Bytes in bf16 below which a product is not timed: its start and the barrier decide, and no format changes those."""

NOISE = 1.05
"""Times the wide kernel's time from which a format is slower: the best of seven rounds repeats to 3 % or so on a quiet machine."""


@dataclass(frozen=True)
class Entry:
    """One product: w [n, k] in a scheme."""

    n: int
    k: int
    scheme: Scheme

    def __str__(self) -> str:
        return f"{self.scheme} of {self.n}x{self.k}"


@dataclass(frozen=True)
class Outcome:
    """Seconds of one product at each number of rows in ROWS, of the quantized kernel and of the wide one."""

    entry: Entry
    kernel: str
    quantized_s: tuple[float, ...]
    wide_s: tuple[float, ...]

    @property
    def slower(self) -> dict[int, float]:
        """Rows -> how many times the wide kernel's time, where it is more."""
        each = zip(ROWS, self.quantized_s, self.wide_s, strict=True)
        return {rows: ours / wide for rows, ours, wide in each if ours > NOISE * wide}

    def json(self) -> dict[str, Any]:
        """Plain data, microseconds."""
        times = {f"rows_{rows}": {"us": 1e6 * ours, "wide_us": 1e6 * wide}
                 for rows, ours, wide in zip(ROWS, self.quantized_s, self.wide_s, strict=True)}
        return {"scheme": str(self.entry.scheme), "n": self.entry.n, "k": self.entry.k, "kernel": self.kernel, **times}


Race = Callable[[Sequence[Entry]], list[Outcome]]


@dataclass
class Pays:
    """What was timed in one compile, and what follows from it."""

    race: Race
    keep_slow: bool = False
    outcomes: dict[Entry, Outcome] = field(default_factory=dict)

    def objections(self, graph: Graph, schemes: Mapping[fx.Node, Scheme]) -> dict[fx.Node, str]:
        """Weights whose format makes a decode step slower, with the figures."""
        shapes = {weight: weight.meta["val"].shape for weight in schemes}
        entries = {weight: Entry(int(shapes[weight][0]), int(shapes[weight][1]), scheme) for weight, scheme in schemes.items()}
        new = [e for e in dict.fromkeys(entries.values()) if e not in self.outcomes and 2 * e.n * e.k >= SMALLEST]
        self.outcomes |= {outcome.entry: outcome for outcome in (self.race(new) if new else [])}
        if self.keep_slow: return {}
        reasons = {entry: _reason(outcome) for entry, outcome in self.outcomes.items() if 1 in outcome.slower}
        return {weight: reasons[entry] for weight, entry in entries.items() if entry in reasons}

    def notes(self) -> list[str]:
        """One line for each scheme that is used and costs something: where, and how much at worst."""
        worst: dict[tuple[Scheme, int], float] = {}
        for outcome in self.outcomes.values():
            if 1 in outcome.slower and not self.keep_slow: continue
            for rows, times in outcome.slower.items():
                key = (outcome.entry.scheme, rows)
                worst[key] = max(worst.get(key, 0.0), times)
        return [f"{scheme} is slower than what it replaces with {rows} row{'s' * (rows > 1)} at once: {times:.2f} times the wide product's "
                "time on this machine" for (scheme, rows), times in worst.items()]

    def json(self) -> list[dict[str, Any]]:
        """Every outcome, plain data."""
        return [outcome.json() for outcome in self.outcomes.values()]


def _reason(outcome: Outcome) -> str:
    return (f"{outcome.entry} makes a decode step slower: {1e6 * outcome.quantized_s[0]:.0f} us, and the wide product takes "
            f"{1e6 * outcome.wide_s[0]:.0f} us on this machine (--keep-slow uses it)")
