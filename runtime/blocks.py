"""The KV pool: blocks of 32 tokens handed to sequences and taken back, zeroed before anyone else sees them."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from threading import RLock
from weakref import WeakSet

from .errors import RuntimeFault
from .manifest import BLOCK


def blocks_for(tokens: int) -> int:
    """Blocks that hold so many tokens."""
    return -(-tokens // BLOCK)


class BlockPool:
    """`count` blocks. A block is one index, the same in every KV buffer.

    A kernel may read a whole block and mask what lies behind the sequence's end, and 0 * NaN is NaN: so a block is zeros when it
    is handed out. Fresh memory is zeros already; only a block that was used before is cleared.
    """

    def __init__(self, count: int, fill: Callable[[int, int, int], object]) -> None:
        """fill(first, count, byte): sets every byte of `count` blocks from `first` on, in all buffers."""
        self.count = count
        self.peak = 0
        self._fill = fill
        self._fresh = 0  # blocks from here on were never used
        self._used: list[int] = []  # given back; the last one is still warm
        self._owned = 0
        self._reserved = 0
        self._holders: WeakSet[Holder] = WeakSet()
        self._lock = RLock()

    @property
    def free(self) -> int:
        """Blocks nobody owns or has reserved."""
        return self.count - self._owned - self._reserved

    def reserve(self, holder: "Holder", count: int) -> bool:
        """Promise a new holder that its first `count` blocks will be there. False where they are not."""
        with self._lock:
            if count > self.free:
                self.recover()
            if count > self.free:
                return False
            self._holders.add(holder)
            holder.reserved = count
            self._reserved += count
            return True

    def grow(self, holder: "Holder", count: int) -> None:
        """Give a holder `count` more blocks of zeros, all or none."""
        with self._lock:
            self._holders.add(holder)
            promised = min(count, holder.reserved)
            if count - promised > self.free:
                self.recover()
            if count - promised > self.free:
                raise RuntimeFault(
                    f"the KV pool is full: {count} more blocks of {BLOCK} tokens are needed, {self.free + promised} of {self.count} are "
                    "free; close a sequence, or load with a larger kv_tokens="
                )
            again = [self._used.pop() for _ in range(min(count, len(self._used)))]
            fresh = range(self._fresh, self._fresh + count - len(again))
            self._fresh += len(fresh)
            self._owned += count
            self._reserved -= promised
            holder.reserved -= promised
            self.peak = max(self.peak, self._owned)
            self._clear(again)
            holder.blocks += [*again, *fresh]

    def shrink(self, holder: "Holder", keep: int) -> None:
        """Take back all but a holder's first `keep` blocks, and with keep=0 what was reserved for it."""
        with self._lock:
            gone = holder.blocks[keep:]
            del holder.blocks[keep:]
            self._used += reversed(gone)
            self._owned -= len(gone)
            if not keep:
                self._reserved -= holder.reserved
                holder.reserved = 0

    def poison(self) -> None:
        """Set every bit of the used blocks that are free, NaN in any float type: whoever is handed one uncleared will show it."""
        with self._lock:
            for first, count in _runs(sorted(self._used)):
                self._fill(first, count, 0xFF)

    def recover(self) -> None:
        """Count again from the holders alive: what an interrupt cut off, or a caller dropped without closing, comes back."""
        with self._lock:
            held = {block for holder in self._holders for block in holder.blocks}
            self._used = [block for block in range(self._fresh) if block not in held]
            self._owned = len(held)
            self._reserved = sum(holder.reserved for holder in self._holders)

    def _clear(self, blocks: Seq[int]) -> None:
        for first, count in _runs(sorted(blocks)):
            self._fill(first, count, 0)


class Holder:
    """Who owns blocks: `blocks` in order of position, and how many more are promised."""

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.reserved = 0


def _runs(blocks: Seq[int]) -> list[tuple[int, int]]:
    """[4, 5, 6, 9] -> [(4, 3), (9, 1)]"""
    runs: list[tuple[int, int]] = []
    for block in blocks:
        if runs and sum(runs[-1]) == block:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((block, 1))
    return runs
