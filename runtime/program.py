"""The Program: buffers with fixed places and an ordered list of steps over shared kernels; one schema for every target."""
from collections.abc import Sequence
from typing import Literal

import msgspec

DIMS = ("T", "N", "R", "M", "P")
"""Run-time sizes, in the order kernels read them: tokens, sequences, sampled rows, blocks per sequence, blocks in the pool."""

BufferKind = Literal["weight", "arena", "kv", "input", "output"]

ITEM_BYTES = {"f64": 8, "f32": 4, "bf16": 2, "f16": 2, "i64": 8, "i32": 4, "i16": 2, "i8": 1, "u8": 1, "f8e4m3": 1, "bool": 1}


class Buffer(msgspec.Struct, frozen=True, omit_defaults=True):
    """One place in memory.

    shape entries are ints, or a dim of the bucket ("T", "N", "N+1", ...). `bytes` is the size at the bucket's maxima; for
    a KV buffer the size of ONE block (the pool decides how many there are).
    """

    name: str
    kind: BufferKind
    dtype: str
    shape: tuple[int | str, ...]
    bytes: int
    offset: int = 0          # arena: fixed by liveness, 64-byte aligned
    tensor: str = ""         # weight: key in weights.safetensors


class Step(msgspec.Struct, frozen=True, omit_defaults=True):
    """One kernel launch: args are buffer indices in the kernel's own order.

    On a GPU it says where its programs run: `grid`, and `scalars` (place among the kernel's parameters, value), which args leave free.
    """

    kernel: str              # Kernel.hash
    args: tuple[int, ...]
    op: str                  # "infc.linear.default"
    flops: int = 0           # at the bucket's maxima
    bytes: int = 0
    origin: tuple[str, ...] = ()     # module paths
    passes: tuple[str, ...] = ()     # passes that made it
    grid: tuple[int, ...] = ()
    scalars: tuple[tuple[int, int | float], ...] = ()
    part: int = 0                    # of a call that takes several launches, which one


class Candidate(msgspec.Struct, frozen=True, omit_defaults=True):
    """One way to run a call. args of its steps are places in the call's own list of buffers; the other figures are those of its program.

    Of the launch that takes longest: programs a multiprocessor holds, and how many rounds of all multiprocessors its grid takes. Of all
    launches: microseconds as the compiler predicts them, and as `infc tune` measured them (0: it did not).
    """

    name: str                # "16x64x128, split 4, 4 warps, 4 stages"
    steps: tuple[Step, ...]
    programs_per_sm: int = 0
    waves: float = 0.0
    predicted_us: float = 0.0
    measured_us: float = 0.0


class Call(msgspec.Struct, frozen=True):
    """Where a choice is made: the first of the call's steps in the program, and the buffers its candidates name."""

    step: int
    buffers: tuple[int, ...]


class Choice(msgspec.Struct, frozen=True, omit_defaults=True):
    """Ways to run equal calls, each of which gives the same; the program's steps are those of the chosen one."""

    op: str
    candidates: tuple[Candidate, ...]
    calls: tuple[Call, ...]
    chosen: int = 0


class Kernel(msgspec.Struct, frozen=True, omit_defaults=True):
    """A unique code object, shared by every step that runs it."""

    hash: str
    name: str                # readable: linear_bf16_576x960
    symbol: str              # in the shared library, or in its own file
    op: str
    arch: str                # "x86-64-v4", "sm_90a"
    registers: int | None = None
    shared_bytes: int | None = None
    spill_bytes: int | None = None
    file: str = ""           # GPU: "code/<sha256>.cubin"
    threads: int = 0         # of one program
    params: tuple[str, ...] = ()     # "u64" a pointer or i64, "u32", "f32", as PTX names them; two unused pointers come last
    tensor_cores: str = ""   # "wgmma", "tcgen05", "mma", or "" where it has no product


class Program(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the runtime replays for one bucket."""

    name: str                          # "step_T16"
    bucket: dict[str, int]             # maxima: {"T": 16, "N": 16, "R": 16, "M": 256}
    dims: tuple[str, ...]
    arena_bytes: int
    buffers: tuple[Buffer, ...]
    steps: tuple[Step, ...]
    choices: tuple[Choice, ...] = ()

    def inputs(self) -> list[Buffer]:
        """Input buffers in the order the graph declares them."""
        return [b for b in self.buffers if b.kind == "input"]

    def outputs(self) -> list[Buffer]:
        """Output buffers in the order the graph declares them."""
        return [b for b in self.buffers if b.kind == "output"]

    def chosen(self) -> dict[int, str]:
        """The name of the candidate that runs, by the first step of its call."""
        return {call.step: choice.candidates[choice.chosen].name for choice in self.choices for call in choice.calls}

    def with_choices(self, choices: Sequence[Choice]) -> "Program":
        """The program with the calls of these choices, one for each of its own, run as they say.

        Where a candidate has more or fewer launches, what is behind it moves.
        """
        wanted = {old.step: (now, len(choice.candidates[choice.chosen].steps), new.candidates[new.chosen])
                  for choice, new in zip(self.choices, choices, strict=True) for old, now in zip(choice.calls, new.calls, strict=True)}
        steps, moved, at = list[Step](), dict[int, int](), 0
        while at < len(self.steps):
            if at not in wanted:
                steps.append(self.steps[at])
                at += 1
                continue
            call, count, candidate = wanted[at]
            moved[at] = len(steps)
            steps += steps_of(candidate, call, self.steps[at])
            at += count
        kept = (msgspec.structs.replace(c, calls=tuple(msgspec.structs.replace(call, step=moved[call.step]) for call in c.calls))
                for c in choices)
        return msgspec.structs.replace(self, steps=tuple(steps), choices=tuple(kept))

    def untuned(self) -> "Program":
        """The program as it was compiled, whatever `infc tune` found since."""
        return self.with_choices([msgspec.structs.replace(
            choice, chosen=0, candidates=tuple(msgspec.structs.replace(c, measured_us=0.0) for c in choice.candidates))
            for choice in self.choices])


def steps_of(candidate: Candidate, call: Call, first: Step) -> list[Step]:
    """A candidate's steps for one call, of which `first` is a program's first: what it counts and where it comes from stay."""
    return [msgspec.structs.replace(
        first, kernel=step.kernel, args=tuple(call.buffers[arg] for arg in step.args), grid=step.grid, scalars=step.scalars, part=part,
        **({"flops": 0, "bytes": 0} if part else {})) for part, step in enumerate(candidate.steps)]
