"""Does a program hang together with the manifest it came with? Asked of every program that is read, before anything of it is used.

Hashes say that nobody altered a file by accident; this says that what is written can be run, on whatever machine.
"""
from collections.abc import Mapping

from .manifest import BucketInfo, Manifest
from .program import Candidate, Choice, Kernel, Program, Step, steps_of

_APPENDED = 2
"""Pointers that Triton appends to a kernel's parameters."""
_GRID = (2**31 - 1, 65535, 65535)
"""Most programs of each axis: CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability"."""


def fault(program: Program, bucket: BucketInfo, manifest: Manifest) -> str:
    """What is wrong with a program, or an empty text."""
    if program.bucket != bucket.bucket: return f"is of the bucket {program.bucket}, and its manifest says {bucket.bucket}"
    for b in program.buffers:
        if b.bytes < 0 or (b.kind == "arena" and (b.offset < 0 or b.offset + b.bytes > program.arena_bytes)):
            return f"has the buffer {b.name}, {b.bytes} bytes at {b.offset}, outside an arena of {program.arena_bytes}"
    kernels = {kernel.hash: kernel for kernel in manifest.kernels}
    for index, step in enumerate(program.steps):
        if why := _step_fault(step, kernels, len(program.buffers), manifest): return f"has the step {index} ({step.op}), {why}"
    return _choices_fault(program, kernels, manifest)


def _step_fault(step: Step, kernels: Mapping[str, Kernel], buffers: int, manifest: Manifest) -> str:
    """What is wrong with a step over so many buffers."""
    kernel = kernels.get(step.kernel)
    if kernel is None: return f"whose kernel {step.kernel or '(none)'} is not there"
    strange = next((arg for arg in step.args if not 0 <= arg < buffers), None)
    if strange is not None: return f"which names buffer {strange} of {buffers}"
    if not kernel.file: return ""                            # a CPU kernel, or an ATen step
    if kernel.file not in manifest.files: return f"whose code {kernel.file} is not listed in the manifest"
    if kernel.threads < 1: return f"whose kernel {kernel.name} has {kernel.threads} threads"
    why = _launch_fault(step, kernel.params)
    return why and f"which {why}"


def _choices_fault(program: Program, kernels: Mapping[str, Kernel], manifest: Manifest) -> str:
    """What is wrong with the ways to run its calls: each must be able to take the place of the one that is chosen."""
    taken: set[int] = set()
    for index, choice in enumerate(program.choices):
        here = f"has the choice {index} ({choice.op}), "
        names = [candidate.name for candidate in choice.candidates]
        if not 0 <= choice.chosen < len(names): return f"{here}which takes candidate {choice.chosen} of {len(names)}"
        if len(set(names)) < len(names): return f"{here}two of whose candidates have one name"
        for candidate in choice.candidates:
            if why := _candidate_fault(candidate, choice, kernels, manifest): return f"{here}whose candidate {candidate.name} {why}"
        chosen = choice.candidates[choice.chosen]
        for call in choice.calls:
            span = range(call.step, call.step + len(chosen.steps))
            if not 0 <= call.step < span.stop <= len(program.steps) or taken & set(span):
                return f"{here}which is made for the steps {call.step} to {span.stop - 1} of {len(program.steps)}, or others are too"
            taken |= set(span)
            strange = next((b for b in call.buffers if not 0 <= b < len(program.buffers)), None)
            if strange is not None: return f"{here}which names buffer {strange} of {len(program.buffers)}"
            if [*program.steps[call.step:span.stop]] != steps_of(chosen, call, program.steps[call.step]):
                return f"{here}and runs something else at step {call.step}"
    return ""


def _candidate_fault(candidate: Candidate, choice: Choice, kernels: Mapping[str, Kernel], manifest: Manifest) -> str:
    if not candidate.steps: return "has no step"
    room = min((len(call.buffers) for call in choice.calls), default=0)
    for index, step in enumerate(candidate.steps):
        if why := _step_fault(step, kernels, room, manifest): return f"has the step {index}, {why}"
        if not kernels[step.kernel].file: return f"has the step {index}, which is none of a GPU"
    return ""


def _launch_fault(step: Step, kinds: tuple[str, ...]) -> str:
    """Why a step cannot launch a kernel with parameters of these kinds."""
    if len(step.grid) != 3 or not all(1 <= n <= most for n, most in zip(step.grid, _GRID, strict=True)): return f"has the grid {step.grid}"
    given = len(step.args) + len(step.scalars)
    if given != len(kinds) - _APPENDED: return f"gives its kernel {given} values, and it takes {len(kinds) - _APPENDED}"
    places = [at for at, _ in step.scalars]
    if places != sorted(set(places)) or not all(0 <= at < given for at in places): return f"gives scalars at {places} of {given}"
    for at, value in step.scalars:
        bits = 64 if kinds[at] == "u64" else 32
        if isinstance(value, int) and not -(2 ** (bits - 1)) <= value < 2**bits: return f"gives {value} where {kinds[at]} is taken"
    return ""
