"""What a compile tells while it runs, and how long its phases took."""
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Event:
    """What is happening: a phase began, a pass ended, or something worth a line."""

    kind: str                                         # "phase" | "pass" | "note"
    name: str
    text: str = ""
    fraction: float | None = None


Listener = Callable[[Event], None]


class Clock:
    """Times phases and tells the listener."""

    def __init__(self, listen: Listener, phases: int):
        self.listen, self.phases, self.seconds = listen, phases, dict[str, float]()
        self.start = time.perf_counter()

    @contextmanager
    def phase(self, name: str, text: str) -> Iterator[None]:
        self.listen(Event("phase", name, text, len(self.seconds) / self.phases))
        start = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - start, 3)
