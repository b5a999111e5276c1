"""One run of the GPU check: what is known of the card and the time, and what was found, kept as it comes."""
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BUDGET = {"A": 130, "B": 90, "C": 320}
"""Seconds of each part; what one does not need the next ones have."""

BATCHES, CONTEXTS, PREFILL = (1, 8, 64), (512, 8192), 2048


@dataclass
class Run:
    """What is known of the card and the time, and what was found."""

    scratch: Path
    output: Path | None
    dry: bool
    parts: Sequence[str]
    target: str
    arch: str                                        # that code is built for
    seconds: float
    report: dict[str, Any]
    began: float = field(default_factory=time.monotonic)
    cores: int = os.cpu_count() or 2

    @property
    def end(self) -> float:
        return self.began + self.seconds

    def until(self, part: str) -> float:
        """When a part must be done: its own time and what those before it left."""
        whole = sum(BUDGET[p] for p in self.parts)
        return self.began + self.seconds * sum(BUDGET[p] for p in self.parts[:self.parts.index(part) + 1]) / whole

    def add(self, part: str, row: dict[str, Any]) -> None:
        """A row of a part; kept at once, for what comes next may end us."""
        self.report["parts"][part]["rows"].append(row)
        self.save()

    def leave_out(self, part: str, what: str) -> None:
        self.report["parts"][part]["left_out"].append(what)

    def save(self) -> None:
        """Write what was found so far."""
        from gpu_table import failures

        if self.output is None: return
        self.report["seconds"] = round(time.monotonic() - self.began, 1)
        self.report["passed"] = not failures(self.report)
        self.output.parent.mkdir(parents=True, exist_ok=True)
        partial = self.output.with_suffix(".partial")
        partial.write_text(json.dumps(self.report, indent=1) + "\n")
        partial.replace(self.output)
