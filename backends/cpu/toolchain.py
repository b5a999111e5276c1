"""C++ source to a shared library: find the compiler, choose the flags of an instruction set, compile once per content.

The library depends on libc and libm alone, holds no path, and is written to a temporary sibling and renamed.
"""
import hashlib
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ...compiler.errors import CheckFailed, UserError, nearest

KERNELS = Path(__file__).parent / "kernels"

# -fno-trapping-math and -fno-math-errno let comparisons and sqrt vectorise; neither changes a value. Not -ffast-math:
# inf and NaN keep their meaning. -fno-gnu-unique: two artifacts in one process must not share a symbol.
# maybe-uninitialized: GCC 12 warns about its own intrinsics headers.
COMMON = ("-std=c++17", "-O3", "-shared", "-fPIC", "-fno-exceptions", "-fno-rtti", "-fno-math-errno", "-fno-trapping-math",
          "-ffp-contract=fast", "-fno-plt", "-fvisibility-inlines-hidden", "-fno-stack-protector", "-Wno-psabi",
          "-Wno-maybe-uninitialized", "-Wno-ignored-attributes")
GNU_ONLY = ("-fno-gnu-unique",)
LINK = ("-Wl,--as-needed", "-Wl,-O1", "-Wl,--build-id=none", "-s", "-lm", "-pthread")

ISA_FLAGS = {
    "x86-64-v4-bf16": ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni", "-mprefer-vector-width=512"),
    "x86-64-v4": ("-march=x86-64-v4", "-mprefer-vector-width=512"),
    "x86-64-v3": ("-march=x86-64-v3",),
    "portable": (),
}
"""Compiler flags of each instruction set."""


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler of this machine: its path, its kind, and its version line, which is part of every cache key."""

    path: str
    gnu: bool
    version: str


@lru_cache(maxsize=4)
def _probe(path: str) -> Compiler:
    done = subprocess.run([path, "--version"], capture_output=True, text=True, check=True)
    version = done.stdout.partition("\n")[0].strip()
    return Compiler(path, "clang" not in version.lower(), version)


def find_compiler() -> Compiler:
    """The first of $CXX, g++, clang++ on the PATH. Raises UserError that names the package to install."""
    for name in (os.environ.get("CXX", ""), "g++", "clang++"):
        path = shutil.which(name) if name else None
        if path: return _probe(path)
    raise UserError("no C++ compiler found (tried $CXX, g++, clang++): install one, e.g. `apt-get install g++`, and try again")


def flags(isa: str, compiler: Compiler) -> tuple[str, ...]:
    """Everything between the compiler and the source. Raises UserError for an unknown instruction set."""
    if isa not in ISA_FLAGS: raise UserError(f"unknown instruction set {isa!r}: {nearest(isa, ISA_FLAGS)}")
    return (*COMMON, *(GNU_ONLY if compiler.gnu else ()), *ISA_FLAGS[isa])


def key(source: str, isa: str, compiler: Compiler) -> str:
    """sha256 of all that decides the library: source, every kernel header, flags, compiler version."""
    digest = hashlib.sha256()
    for part in (source, *flags(isa, compiler), *LINK, compiler.version):
        digest.update(part.encode() + b"\0")
    for header in sorted(KERNELS.glob("*.h")):
        digest.update(header.name.encode() + b"\0" + header.read_bytes() + b"\0")
    return digest.hexdigest()


def build(source: str, isa: str, out_path: Path, cache_dir: Path | None = None) -> Path:
    """Compile `source` (it may include kernels/*.h) for `isa` into out_path; a library built before is copied.

    Raises UserError without a compiler, CheckFailed with the compiler's first error when the source does not compile.
    """
    compiler = find_compiler()
    cached = None if cache_dir is None else cache_dir / f"{key(source, isa, compiler)}.so"
    out_path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".build-", dir=out_path.parent) as folder:
        made = Path(folder) / "kernels.so"
        if cached is not None and cached.exists():
            shutil.copyfile(cached, made)
        else:
            _compile(compiler, source, isa, Path(folder), made)
            if cached is not None: _keep(made, cached)
        made.chmod(0o644)
        os.replace(made, out_path)
    return out_path


def _compile(compiler: Compiler, source: str, isa: str, folder: Path, made: Path) -> None:
    text = folder / "kernels.cpp"
    text.write_text(source)
    # run inside the folder with a relative name: no path of this machine can reach the library
    command = [compiler.path, *flags(isa, compiler), "-I", str(KERNELS), text.name, "-o", made.name, *LINK]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode == 0: return
    errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()[-3:]
    kept = Path(tempfile.mkdtemp(prefix="infc-failed-")) / text.name
    kept.write_text(source)
    raise CheckFailed(f"{compiler.version} failed on the generated source ({kept}): {'; '.join(errors[:3])}")


def _keep(made: Path, cached: Path) -> None:
    """Into the cache, atomically; another process may be doing the same."""
    cached.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=cached.parent, prefix=".", suffix=".so", delete=False) as sibling:
        shutil.copyfileobj(made.open("rb"), sibling)
    os.replace(sibling.name, cached)
