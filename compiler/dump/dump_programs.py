"""The lowered programs of a dump: buffers with places and lifetimes, steps with where they came from, source and assembly."""
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...runtime.program import Kernel, Program
from .dump_files import write_json, write_whole


def program_json(program: Program, kernels: Mapping[str, Kernel]) -> dict[str, Any]:
    """A bucket's program as plain data.

    buffers: as in the artifact, and `first`, `last`: the steps that touch it first and last (None: no step does); a weight lives
    as long as the model. steps: kernel (its name), symbol, args (buffer indices), buffers (their names), op, flops and bytes at the
    bucket's maxima, origin (module paths), passes (that made it).
    """
    uses: dict[int, list[int]] = {}
    for index, step in enumerate(program.steps):
        for arg in step.args: uses.setdefault(arg, []).append(index)
    buffers = [{"index": i, "name": b.name, "kind": b.kind, "dtype": b.dtype, "shape": list(b.shape), "bytes": b.bytes,
                "offset": b.offset if b.kind == "arena" else None, "tensor": b.tensor, "first": min(uses.get(i, [-1])),
                "last": max(uses.get(i, [-1]))} for i, b in enumerate(program.buffers)]
    for buffer in buffers:
        if buffer["first"] < 0: buffer["first"] = buffer["last"] = None
    steps = [{"index": i, "kernel": kernels[s.kernel].name, "hash": s.kernel, "symbol": kernels[s.kernel].symbol, "args": list(s.args),
              "buffers": [program.buffers[a].name for a in s.args], "op": s.op, "flops": s.flops, "bytes": s.bytes,
              "origin": list(s.origin), "passes": list(s.passes)} for i, s in enumerate(program.steps)]
    return {"name": program.name, "bucket": program.bucket, "dims": list(program.dims), "arena_bytes": program.arena_bytes,
            "buffers": buffers, "steps": steps}


def program_text(data: Mapping[str, Any]) -> str:
    """`program_json` for a person: buffers with places and lifetimes, then steps in order with where they came from."""
    lines = [f"{data['name']}: bucket {data['bucket']}, arena {data['arena_bytes']} bytes", "",
             "buffers (live: first to last step that touches it)"]
    for b in data["buffers"]:
        place = f"arena+{b['offset']}" if b["kind"] == "arena" else b["tensor"] or b["kind"]
        live = "never" if b["first"] is None else f"{b['first']}..{b['last']}"
        kind = f"{b['dtype']}[{','.join(map(str, b['shape']))}]"
        lines.append(f"  {b['index']:4d} {b['name']}: {kind} {b['bytes']} bytes at {place} live {live}")
    lines += ["", "steps (flops and bytes at the bucket's maxima)"]
    for s in data["steps"]:
        arguments = ", ".join(f"{index}:{name}" for index, name in zip(s["args"], s["buffers"], strict=True))
        lines.append(f"  {s['index']:4d} {s['kernel']}({arguments})  {s['op']}  {s['flops']} flops  {s['bytes']} bytes"
                     f"  [{', '.join(s['origin'])}]  by {', '.join(s['passes']) or 'capture'}")
    return "\n".join(lines) + "\n"


def write_programs(folder: Path, programs: Sequence[Program], kernels: Mapping[str, Kernel], name: str, source: str,
                   assembly: Callable[[], str] | None = None) -> None:
    """Each bucket's program as text and data, the kernels' source as file `name`, and its assembly (made by the call) if asked for."""
    for program in programs:
        data = program_json(program, kernels)
        write_json(folder / f"program-{program.name}.json", data)
        write_whole(folder / f"program-{program.name}.txt", program_text(data))
    write_whole(folder / name, source)
    if assembly is not None:
        write_whole(folder / "kernels.s", assembly())
