"""The memory map of a bucket: which arena buffer lies where, from the step that writes it to the last that reads it."""
from typing import Any

from ...runtime.program import Program
from .families import family


def memory_map(program: Program) -> dict[str, Any]:
    """{"arena" bytes, "live": bytes in use at each step, "peak": {"step", "bytes"}, "buffers"}.

    A buffer: [name, type, offset, bytes, first step, last step, family and module path of the step that writes it].
    """
    spans: dict[int, tuple[int, int]] = {}
    for number, step in enumerate(program.steps):
        for index in step.args:
            if program.buffers[index].kind == "arena":
                spans[index] = (spans.get(index, (number, number))[0], number)
    live = [0] * len(program.steps)
    buffers = []
    for index, (first, last) in spans.items():
        buffer, writer = program.buffers[index], program.steps[first]
        for number in range(first, last + 1):
            live[number] += buffer.bytes
        kind = f"{buffer.dtype}[{','.join(map(str, buffer.shape))}]"
        buffers.append([buffer.name, kind, buffer.offset, buffer.bytes, first, last, family(writer.op), " ".join(writer.origin)])
    peak = max(range(len(live)), key=live.__getitem__, default=0)
    return {"arena": program.arena_bytes, "live": live, "peak": {"step": peak, "bytes": live[peak] if live else 0}, "buffers": buffers,
            "steps": [[step.op, " ".join(step.origin)] for step in program.steps]}
