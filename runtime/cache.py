"""The replay cache: what was prepared for a (version, dtype, bucket), within a budget of bytes, every event counted.

On the CPU an entry is a table of addresses, a few tens of kilobytes; on a GPU it will be a captured graph. Both hold raw
addresses, so an entry remembers which memory it was made for and is made again when that memory has moved.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, NamedTuple, Protocol, TypeVar


class Key(NamedTuple):
    """What decides an entry: nothing else may."""

    version: str
    dtype: str
    bucket: str


class Entry(Protocol):
    """Anything with a size in bytes."""

    @property
    def bytes(self) -> int: ...


E = TypeVar("E", bound=Entry)


class ReplayCache(Generic[E]):
    """Least recently used entries go first when the budget is exceeded; the newest always stays."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.bytes = 0
        self.hits = self.misses = self.evictions = self.stale = self.padded_tokens = 0
        self._entries: OrderedDict[Key, tuple[object, E]] = OrderedDict()

    def get(self, key: Key, places: object, make: Callable[[], E]) -> E:
        """The entry of `key` made for the memory at `places`, made now if there is none."""
        found = self._entries.get(key)
        if found is not None and found[0] == places:
            self.hits += 1
            self._entries.move_to_end(key)
            return found[1]
        if found is not None:
            self.stale += 1
            self._drop(key)
        self.misses += 1
        entry = make()
        self._entries[key] = (places, entry)
        self.bytes += entry.bytes
        while self.bytes > self.budget and len(self._entries) > 1:
            self.evictions += 1
            self._drop(next(iter(self._entries)))
        return entry

    def _drop(self, key: Key) -> None:
        _, entry = self._entries.pop(key)
        self.bytes -= entry.bytes

    def counters(self) -> dict[str, int]:
        """Events so far. `padded_tokens`: bucket sizes minus live tokens (on the CPU a padded token costs nothing)."""
        return {
            "hits": self.hits,
            "misses": self.misses,
            "stale": self.stale,
            "evictions": self.evictions,
            "padded_tokens": self.padded_tokens,
            "entries": len(self._entries),
            "bytes": self.bytes,
        }
