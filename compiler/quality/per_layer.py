"""What each weight's format costs and gains in the program: its kernel, its bytes, its time beside the wide product's."""
from collections.abc import Mapping, Sequence
from typing import Any

from ...runtime.program import Buffer, Kernel, Program
from ..quant.pays import Outcome


def with_kernels(
    rows: Sequence[Mapping[str, Any]], program: Program, kernels: Sequence[Kernel], outcomes: Sequence[Outcome], *, wide_bytes: int,
    read_gb_s: float | None,
) -> list[dict[str, Any]]:
    """rows (layers.Layer.json()) with what the program does about each weight.

    kernel: the one that reads it (its product's, where a table is also looked up in), or None. bytes: as packed. predicted_us: of
    reading these bytes once, which is what a decode step does; wide_predicted_us: of wide_bytes a value instead; both None where the
    target is another machine (read_gb_s None). measured: microseconds of this shape and format as the race timed them at each
    number of rows, beside the wide kernel's; None of what was not raced: a small product, a wide weight, another machine.
    """
    named = {kernel.hash: kernel.name for kernel in kernels}
    raced = {(str(o.entry.scheme), o.entry.n, o.entry.k): o.json() for o in outcomes}
    buffers = {buffer.name: (index, buffer) for index, buffer in enumerate(program.buffers) if buffer.kind == "weight"}
    found = []
    for row in rows:
        index, buffer = buffers.get(f"{row['weight']}_codes") or buffers.get(row["weight"]) or (-1, None)
        steps = [step for step in program.steps if index in step.args]
        step = next((step for step in steps if "embedding" not in step.op), steps[0] if steps else None)
        time = raced.get((row["scheme"], *_shape(row, buffer))) if buffer else None
        stored = buffer.bytes if buffer else 0
        found.append({
            **row, "kernel": named[step.kernel] if step else None, "bytes": stored,
            "predicted_us": _us(stored, read_gb_s), "wide_predicted_us": _us(row["values"] * wide_bytes, read_gb_s),
            "measured": time and {key: value for key, value in time.items() if key.startswith("rows_")},
        })
    return found


def _shape(row: Mapping[str, Any], buffer: Buffer) -> tuple[int, int]:
    """(N, K) of a matrix; four-bit codes are two to a byte, so K is not what the buffer says."""
    n = int(buffer.shape[0])
    return n, row["values"] // n


def _us(size: int, gb_s: float | None) -> float | None:
    return None if gb_s is None else size / gb_s / 1e3
