"""Where the KV blocks of a model lie on the CPU: in runs, which all its caches share (kernels/paged.h has the other half of this).

In a run each cache has its own range, in it each head, in it sixteen blocks one behind the other. What attention reads of a head is then
one stream, and the first tokens of a sequence make few 2 MiB pages real: a run of SmolLM2 is 12 MB, where a range a layer would make
120 MB real. Attention of SmolLM2 in bf16, us a layer, 2 threads of Zen 4, caches cold, pure reads at 38 GB/s; blocks: of all heads, in
ranges a layer, in 4 KiB pages:

    sequences x context    1 x 128    8 x 128    8 x 448    1 x 2000
    blocks                 5.5        44.6       116        59
    runs                   5.9        38.3       97         51
"""
from collections.abc import Iterator, Sequence

from .buffers import Layout
from .manifest import KvBuffer

RUN = 16
"""Blocks in a run."""


class KvRuns:
    """Places in the region of the KV pool."""

    def __init__(self, buffers: Sequence[KvBuffer], blocks: int) -> None:
        layout = Layout()
        self.offsets = {b.name: layout.place(RUN * b.block_bytes) for b in buffers}
        self.run_bytes = layout.size
        self.bytes = -(-blocks // RUN) * layout.size
        self._heads = [(self.offsets[b.name] + RUN * head * (b.block_bytes // b.heads), b.block_bytes // b.heads)
                       for b in buffers for head in range(b.heads)]

    def ranges(self, first: int, count: int) -> Iterator[tuple[int, int]]:
        """(offset, bytes) of everything that `count` blocks from `first` on hold."""
        for run in range(first // RUN, -(-(first + count) // RUN)):
            start, stop = max(first, run * RUN), min(first + count, (run + 1) * RUN)
            for offset, size in self._heads:
                yield run * self.run_bytes + offset + start % RUN * size, (stop - start) * size
