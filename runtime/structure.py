"""Does a program hang together with the manifest it came with? Asked of every program that is read, before anything of it is used.

Hashes say that nobody altered a file by accident; this says that what is written can be run, on whatever machine.
"""
from .manifest import BucketInfo, Manifest
from .program import Program, Step

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
        kernel = kernels.get(step.kernel)
        if kernel is None: return f"has the step {index} ({step.op}), whose kernel {step.kernel or '(none)'} is not there"
        strange = next((arg for arg in step.args if not 0 <= arg < len(program.buffers)), None)
        if strange is not None: return f"has the step {index} ({step.op}), which names buffer {strange} of {len(program.buffers)}"
        if not kernel.file: continue                         # a CPU kernel, or an ATen step
        here = f"has the step {index} ({step.op}), "
        if kernel.file not in manifest.files: return f"{here}whose code {kernel.file} is not listed in the manifest"
        if kernel.threads < 1: return f"{here}whose kernel {kernel.name} has {kernel.threads} threads"
        if why := _launch_fault(step, kernel.params): return f"{here}which {why}"
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
