"""The replay cache: what was prepared for a (version, dtype, bucket), within a budget of bytes, every event counted.

On the CPU an entry is a table of addresses, a few tens of kilobytes; on a GPU it is a captured graph. Both hold raw
addresses, so an entry remembers which memory it was made for and is made again when that memory has moved.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, NamedTuple, Protocol, TypeVar

from .device import OutOfMemory


class Key(NamedTuple):
    """What decides an entry: nothing else may."""

    version: str
    dtype: str
    bucket: str


class Entry(Protocol):
    """Anything with a size in bytes, which it gives back."""

    @property
    def bytes(self) -> int: ...

    def close(self) -> None: ...


E = TypeVar("E", bound=Entry)


class ReplayCache(Generic[E]):
    """Least recently used entries go first when the budget is exceeded; the newest always stays."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.bytes = 0
        self.hits = self.misses = self.evictions = self.crowded = self.stale = self.padded_tokens = 0
        self._entries: OrderedDict[Key, tuple[object, E]] = OrderedDict()
        self._warned: set[str] = set()                       # buckets that found the device full

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
        entry = self._made(key.bucket, make)
        self._entries[key] = (places, entry)
        self.bytes += entry.bytes
        while self.bytes > self.budget and len(self._entries) > 1:
            self.evictions += 1
            self._drop(next(iter(self._entries)))
        return entry

    def _made(self, bucket: str, make: Callable[[], E]) -> E:
        """A new entry. Where the device has no room for it, others go first; OutOfMemory where none is left to go."""
        while True:
            try:
                return make()
            except OutOfMemory as fault:
                if not self._entries: raise
                oldest = next(iter(self._entries))
                self._warn(bucket, fault, oldest.bucket)
                self.crowded += 1
                self._drop(oldest)

    def _warn(self, bucket: str, fault: OutOfMemory, oldest: str) -> None:
        """Once a bucket, to whoever listens to the logger `infc`."""
        if bucket in self._warned: return
        import logging  # 8 ms that a start without this does not pay

        self._warned.add(bucket)
        logging.getLogger("infc").warning(
            "no room to prepare bucket %s: it takes at least %d bytes, %d are free; %s goes, and is prepared again when a step needs it: "
            "give the KV pool less (kv_tokens=), or compile fewer buckets", bucket, fault.wanted, fault.free, oldest)

    def clear(self) -> None:
        """Give every entry back."""
        while self._entries: self._drop(next(iter(self._entries)))

    def _drop(self, key: Key) -> None:
        _, entry = self._entries.pop(key)
        self.bytes -= entry.bytes
        entry.close()

    def counters(self) -> dict[str, int]:
        """Events so far. `padded_tokens`: bucket sizes minus live tokens (on the CPU a padded token costs nothing).

        `evictions`: entries that went for the budget's sake, `crowded`: because the device was full.
        """
        return {
            "hits": self.hits,
            "misses": self.misses,
            "stale": self.stale,
            "evictions": self.evictions,
            "crowded": self.crowded,
            "padded_tokens": self.padded_tokens,
            "entries": len(self._entries),
            "bytes": self.bytes,
        }
