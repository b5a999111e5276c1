"""Where the buffers of a program lie, on whatever machine: inputs and outputs by name, everything else within its region."""
from collections.abc import Mapping
from typing import NamedTuple

from .buffers import Layout
from .errors import RuntimeFault
from .manifest import Manifest
from .program import DIMS, Buffer, Program

FLOATS = frozenset({"temperature", "top_p", "uniform", "logits"})
"""Inputs and outputs of f32; the others are i32."""

LAST_INPUT = "block_table"
"""It lies behind all other inputs: what a bucket needs of them is one range of bytes."""


class Region(NamedTuple):
    """A range of memory."""

    address: int
    bytes: int


class StepIO(NamedTuple):
    """The inputs and outputs of every bucket, as one region: byte offset and count of 4-byte items of each."""

    offsets: Mapping[str, int]
    counts: Mapping[str, int]
    bytes: int

    def at(self, base: int) -> dict[str, Region]:
        """Where each lies when the region starts at `base`."""
        return {name: Region(base + self.offsets[name], 4 * count) for name, count in self.counts.items()}


def step_io(manifest: Manifest) -> StepIO:
    """Room for the largest of every bucket's inputs and outputs."""
    t, n, r, m, _ = (max((b.bucket.get(dim, 0) for b in manifest.buckets), default=0) for dim in DIMS)
    counts = {
        "input_ids": t, "positions": t, "slots": t, "query_start": n + 1, "context_len": n, "sample_rows": r, "temperature": r,
        "top_k": r, "top_p": r, "uniform": r, LAST_INPUT: n * m, "token": r, "logits": r * manifest.model.vocab,
    }
    layout = Layout()
    return StepIO({name: layout.place(4 * count) for name, count in counts.items()}, counts, layout.size)


class Places(NamedTuple):
    """The memory of an artifact's programs. weights: each tensor's own range."""

    where: str                       # the artifact, for messages
    arena: Region
    weights: Mapping[str, Region]
    kv: Mapping[str, Region]         # one block of each: the pool has more behind it
    io: Mapping[str, Region]

    def address(self, b: Buffer, program: Program) -> int:
        """Where a buffer lies. Raises RuntimeFault where it does not fit what was allocated."""
        nothing, offset = Region(0, 0), 0
        if b.kind == "arena": region, offset = self.arena, b.offset
        elif b.kind == "weight": region = self.weights.get(b.tensor, nothing)
        else: region = (self.kv if b.kind == "kv" else self.io).get(b.name, nothing)
        name = b.tensor or b.name
        if not region.address:
            raise RuntimeFault(f"{self.where}: {program.name}: the {b.kind} {name} is not there; compile it again")
        if offset < 0 or offset + b.bytes > region.bytes:
            raise RuntimeFault(f"{self.where}: {program.name}: the {b.kind} {name} takes {b.bytes} bytes at {offset}, which is "
                               f"outside its {region.bytes} bytes; compile it again")
        return region.address + offset
