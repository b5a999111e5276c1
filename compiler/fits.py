"""Would an artifact run on a machine? Read off its manifest and what is known of the target; no code of it is run."""
import platform

from ..runtime.device import arch_fits
from ..runtime.manifest import BLOCK, GPU, Manifest
from .targets import ARCHS, Gpu, Target


def reasons(manifest: Manifest, target: Target) -> list[str]:
    """Why it does not run there, each with what to do about it; empty where it does. For a CPU, `target.flags` are all it has."""
    on_gpu, again = manifest.machine == GPU, f"compile it with --target {target.name}"
    if target.gpu is None:
        if on_gpu: return [f"compiled for NVIDIA GPUs ({', '.join(_archs(manifest))}), {target.name} is a CPU; {again}"]
        cpu = machine_of(target)
        if manifest.machine != cpu: return [f"compiled for {manifest.machine} CPUs, {target.name} is an {cpu} CPU here; {again} on one"]
        lacking = missing_flags(manifest, target)
        return [f"needs {', '.join(lacking)}, which {target.name} lacks; {again}"] if lacking else []
    if not on_gpu: return [f"compiled for {manifest.machine} CPUs, {target.name} is an NVIDIA GPU; {again}"]
    code = _other_archs(manifest, target, target.gpu) or _too_large(manifest, target.gpu)
    return [*([f"{code}; {again}"] if code else []), *_no_room(manifest, target.name, target.gpu)]


def machine_of(target: Target) -> str:
    """What a manifest calls the machine that code for the target runs on: of one without flags, the one it is compiled on."""
    if target.kind == "cuda": return GPU
    return "x86_64" if target.flags else platform.machine()


def notes(manifest: Manifest, target: Target) -> list[str]:
    """What is worth knowing of an artifact that runs on a GPU; empty for a CPU."""
    if target.gpu is None: return []
    found = [] if manifest.target == target.name else [f"compiled for {manifest.target}: tiles were chosen for it"]
    per_token = _block_bytes(manifest) / BLOCK
    room = target.gpu.memory_bytes - _fixed_bytes(manifest)
    if per_token * manifest.model.max_positions > room:
        found.append(f"its memory has room for the KV cache of {int(room / per_token)} tokens, "
                     f"the model takes {manifest.model.max_positions} in one sequence")
    return found


def missing_flags(manifest: Manifest, target: Target) -> list[str]:
    """The CPU flags its code uses and the target lacks; a GPU artifact uses none."""
    return sorted(set(manifest.isa) - set(target.flags))


def _archs(manifest: Manifest) -> list[str]:
    """Of its own kernels: a step that calls ATen has no code."""
    return sorted({kernel.arch for kernel in manifest.kernels if not kernel.symbol.startswith("aten::")})


def _other_archs(manifest: Manifest, target: Target, gpu: Gpu) -> str:
    """The first architecture of its code that this GPU does not run, in words."""
    for name in _archs(manifest):
        if arch_fits(name, f"sm_{gpu.arch.capability.replace('.', '')}"): continue
        arch = ARCHS.get(name)
        where = f"runs on compute capability {' and '.join(arch.runs_on)} alone" if arch else "no GPU this infc knows runs"
        return f"its kernels are {name} code, which {where}; {target.name} has {gpu.arch.capability} ({target.isa})"
    return ""


def _too_large(manifest: Manifest, gpu: Gpu) -> str:
    """The kernel that takes most of the shared memory, where that is more than one program gets."""
    limit = gpu.arch.shared_per_program
    large = [(kernel.shared_bytes or 0, kernel.name) for kernel in manifest.kernels if (kernel.shared_bytes or 0) > limit]
    if not large: return ""
    most, name = max(large)
    others = f" (so do {len(large) - 1} more)" if len(large) > 1 else ""
    return f"kernel {name} needs {most} bytes of shared memory, a program has {limit} there{others}"


def _no_room(manifest: Manifest, name: str, gpu: Gpu) -> list[str]:
    """One block of KV cache is the least it runs with."""
    needed = _fixed_bytes(manifest) + _block_bytes(manifest)
    if needed <= gpu.memory_bytes: return []
    return [f"its weights, arena and one KV block take {needed / 1e9:.1f} GB, {name} has {gpu.memory_bytes / 1e9:.0f}; "
            "quantize its weights (--quant w8) or take a GPU with more memory"]


def _fixed_bytes(manifest: Manifest) -> int:
    """Weights, and the arena, which all buckets share."""
    weights = manifest.weights.data_bytes if manifest.weights else 0
    return weights + max((bucket.arena_bytes for bucket in manifest.buckets), default=0)


def _block_bytes(manifest: Manifest) -> int:
    return sum(buffer.block_bytes for buffer in manifest.kv)
