"""Where a decode step spends its time, kernel by kernel: what INFC_DEBUG=2 prints."""
import statistics
from typing import Any

ROUNDS = 9


def step_times(model: Any, read_gb_s: float) -> list[str]:
    """One line a kernel, the slowest first: steps, microseconds (median of 9 one-token steps), GB/s, share of `read_gb_s`.

    model: a loaded runtime Model. Kernels that read the KV cache have no GB/s: what they read grows with the context.
    """
    with model.sequence() as sequence:
        profiles = [[ns for _, ns in model.profile(sequence, [0])] for _ in range(ROUNDS)]
    smallest = min(model.manifest.buckets, key=lambda b: b.bucket["T"])
    program, names = model.artifact.program(smallest.name), {k.hash: k.name for k in model.manifest.kernels}
    rows: dict[str, list[float]] = {}
    for step, times in zip(program.steps, zip(*profiles, strict=True), strict=True):
        row = rows.setdefault(names[step.kernel], [0, 0.0, 0])
        row[0] += 1
        row[1] += statistics.median(times) / 1e3
        row[2] += float("nan") if any(program.buffers[a].kind == "kv" for a in step.args) else step.bytes
    lines = [f"{program.name}, one token a step: steps, microseconds in all, GB/s, share of the {read_gb_s:.1f} GB/s just measured"]
    for name, (count, micros, moved) in sorted(rows.items(), key=lambda item: -item[1][1]):
        rate = moved / micros / 1e3 if micros else 0.0
        speed = f"{rate:8.2f} {100 * rate / read_gb_s:5.0f} %" if moved == moved else ""
        lines.append(f"  {name:<44} {count:4.0f} {micros:10.1f} {speed}".rstrip())
    return lines
