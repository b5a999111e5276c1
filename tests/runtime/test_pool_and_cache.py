"""Blocks: all or none, clean, found again after an interrupt. Cache: the budget, the order of eviction, moved memory."""
import ctypes

import pytest
from infc.runtime.blocks import BlockPool, Holder
from infc.runtime.cache import Key, ReplayCache
from infc.runtime.device import OutOfMemory
from infc.runtime.errors import RuntimeFault


class Memory:
    """Two KV buffers of `count` blocks of 16 bytes."""

    def __init__(self, count: int) -> None:
        self.buffers = [(ctypes.c_char * (16 * count))() for _ in range(2)]
        self.pool = BlockPool(count, self.fill)

    def fill(self, first: int, count: int, byte: int) -> None:
        for buffer in self.buffers: ctypes.memset(ctypes.addressof(buffer) + 16 * first, byte, 16 * count)

    def dirty(self) -> None:
        for buffer in self.buffers:
            ctypes.memset(buffer, 0xFF, len(buffer))

    def block(self, index: int) -> bytes:
        return b"".join(bytes(b)[16 * index:16 * index + 16] for b in self.buffers)


def test_a_used_block_comes_back_as_zeros():
    memory, a, b = Memory(4), Holder(), Holder()
    memory.pool.grow(a, 3)
    memory.dirty()
    memory.pool.shrink(a, 1)
    memory.pool.grow(b, 2)
    assert sorted([*a.blocks, *b.blocks]) == [0, 1, 2]
    assert all(memory.block(i) == bytes(32) for i in b.blocks) and memory.block(a.blocks[0]) == b"\xff" * 32


def test_poison_fills_free_blocks_and_no_others():
    memory, a = Memory(4), Holder()
    memory.pool.grow(a, 3)
    freed = a.blocks[1:]
    memory.pool.shrink(a, 1)
    memory.pool.poison()
    assert all(memory.block(i) == b"\xff" * 32 for i in freed) and memory.block(a.blocks[0]) == memory.block(3) == bytes(32)
    memory.pool.grow(a, 2)
    assert all(memory.block(i) == bytes(32) for i in a.blocks)


def test_all_or_none():
    memory, a, b = Memory(4), Holder(), Holder()
    memory.pool.grow(a, 3)
    with pytest.raises(RuntimeFault, match=r"2 more blocks of 32 tokens are needed, 1 of 4 are free.*kv_tokens="):
        memory.pool.grow(b, 2)
    assert memory.pool.free == 1 and b.blocks == []


def test_what_is_reserved_is_there():
    memory, a, b = Memory(4), Holder(), Holder()
    assert memory.pool.reserve(a, 3) and not memory.pool.reserve(b, 2)
    memory.pool.grow(b, 1)
    with pytest.raises(RuntimeFault):
        memory.pool.grow(b, 1)
    memory.pool.grow(a, 3)
    memory.pool.shrink(a, 0)
    memory.pool.shrink(a, 0)                              # twice is once
    assert memory.pool.free == 3


def test_an_interrupt_loses_nothing(monkeypatch):
    memory, a, b = Memory(4), Holder(), Holder()
    memory.pool.grow(a, 4)
    memory.pool.shrink(a, 0)

    def interrupt(blocks):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(memory.pool, "_clear", interrupt)
        with pytest.raises(KeyboardInterrupt):
            memory.pool.grow(a, 3)
    memory.pool.grow(b, 4)                                # needs them all
    assert sorted(b.blocks) == [0, 1, 2, 3]


class Entry:
    def __init__(self, size: int) -> None:
        self.bytes = size
        self.closed = False

    def close(self) -> None:
        self.closed = True


def key(bucket: str, version: str = "v", dtype: str = "bf16") -> Key:
    return Key(version, dtype, bucket)


def test_the_least_recently_used_goes_first():
    cache: ReplayCache[Entry] = ReplayCache(100)
    made: list[str] = []

    def get(name: str) -> None:
        cache.get(key(name), 0, lambda: made.append(name) or Entry(40))

    for name in ("a", "b", "a", "c", "a", "b"):
        get(name)
    assert made == ["a", "b", "c", "b"]
    assert {k: cache.counters()[k] for k in ("hits", "misses", "evictions", "bytes", "entries")} == {
        "hits": 2, "misses": 4, "evictions": 2, "bytes": 80, "entries": 2,
    }


def test_one_entry_larger_than_the_budget_stays():
    cache: ReplayCache[Entry] = ReplayCache(10)
    entry = cache.get(key("a"), 0, lambda: Entry(50))
    assert cache.get(key("a"), 0, lambda: Entry(50)) is entry


@pytest.mark.parametrize("other", [key("b"), key("a", version="w"), key("a", dtype="fp32")])
def test_every_part_of_the_key_counts(other):
    cache: ReplayCache[Entry] = ReplayCache(100)
    assert cache.get(key("a"), 0, lambda: Entry(1)) is not cache.get(other, 0, lambda: Entry(1))


def test_a_device_that_is_full_makes_room(caplog: pytest.LogCaptureFixture) -> None:
    cache: ReplayCache[Entry] = ReplayCache(1000)
    kept = [cache.get(key(name), 0, lambda: Entry(1)) for name in "ab"]
    room = [False, False, True]

    def make() -> Entry:
        if not room.pop(0): raise OutOfMemory("no room for the recording", 700, 500)
        return Entry(1)

    with caplog.at_level("WARNING", "infc"): cache.get(key("c"), 0, make)
    assert [r.name for r in caplog.records] == ["infc"]                  # once a bucket, though two had to go
    assert "bucket c: it takes at least 700 bytes, 500 are free; a goes" in caplog.text
    assert all(entry.closed for entry in kept)
    assert {k: cache.counters()[k] for k in ("crowded", "evictions", "entries")} == {"crowded": 2, "evictions": 0, "entries": 1}
    room[:] = [False] * 3
    with pytest.raises(OutOfMemory, match="no room"): cache.get(key("d"), 0, make)
    assert cache.counters()["entries"] == 0


def test_memory_that_moved_is_noticed():
    cache: ReplayCache[Entry] = ReplayCache(100)
    old = cache.get(key("a"), (1, 2), lambda: Entry(1))
    assert cache.get(key("a"), (1, 3), lambda: Entry(1)) is not old
    assert cache.counters()["stale"] == 1 and cache.bytes == 1
