"""C++ source to a shared library: find the compiler, choose the flags of an instruction set, compile once per content.

The library depends on libc and libm alone, holds no path, and is written to a temporary sibling and renamed. A kept library is
followed by its sha256, in one file, and checked before it is used; the cache may fail in any way and the compile goes on.
"""
import contextlib
import errno
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ...compiler.errors import CheckFailed, UserError, nearest
from ...compiler.reuse import remove, sweep_halves
from ...compiler.scratch import scratch

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
    "x86-64-v4-amx": ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni", "-mamx-tile", "-mamx-bf16", "-mprefer-vector-width=512"),
    "x86-64-v4-bf16": ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni", "-mprefer-vector-width=512"),
    "x86-64-v4": ("-march=x86-64-v4", "-mprefer-vector-width=512"),
    "x86-64-v3": ("-march=x86-64-v3",),
    "portable": (),
}
"""Compiler flags of each instruction set."""

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FULL_WORDS = (*map(os.strerror, _FULL), "File size limit exceeded")      # the last: what g++ says of a SIGXFSZ
_DIGEST_BYTES = 32                                                        # sha256, behind a kept library


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler of this machine: its path, its kind, and its version line, which is part of every cache key."""

    path: str
    gnu: bool
    version: str


@lru_cache(maxsize=4)
def _probe(path: str) -> Compiler:
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, errors="replace", check=False, stdin=subprocess.DEVNULL)
    except OSError as error:
        raise UserError(f"the C++ compiler {path} cannot be started ({error.strerror}): set $CXX to one that works") from error
    version = done.stdout.partition("\n")[0].strip()
    if done.returncode or not version:
        said = done.stderr.strip().partition("\n")[0] or version or "nothing"
        raise UserError(f"the C++ compiler {path} fails: `{path} --version` gave exit code {done.returncode} and said: {said}; "
                        "set $CXX to one that works")
    return Compiler(path, "clang" not in version.lower(), version)


def find_compiler() -> Compiler:
    """$CXX, else the first of g++, clang++ on the PATH. Raises UserError: $CXX is no program, none is there, it does not run."""
    asked = os.environ.get("CXX", "")
    for name in (asked,) if asked else ("g++", "clang++"):
        path = shutil.which(name)
        if path: return _probe(os.path.abspath(path))         # it will run in another folder
    if asked:
        raise UserError(f"$CXX is {asked!r}, which is no program on the PATH: name one C++ compiler, without flags, or unset it")
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


def build(
    source: str, isa: str, out_path: Path, cache_dir: Path | None = None, note: Callable[[str], None] = lambda line: None,
) -> Path:
    """Compile `source` (it may include kernels/*.h) for `isa` into out_path; a library built before is copied.

    `note` gets a line when the cache is not as it should be. Raises UserError without a compiler or without room to write, CheckFailed
    with the compiler's first error when the source does not compile.
    """
    compiler = find_compiler()
    cached = None if cache_dir is None else cache_dir / f"{key(source, isa, compiler)}.so"
    try:
        out_path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".build-", dir=out_path.parent) as folder:
            made = Path(folder) / "kernels.so"
            library = _kept(cached, note) if cached else None
            if library is not None:
                made.write_bytes(library)
            else:
                _compile(compiler, source, isa, Path(folder), made)
                if cached: _keep(made.read_bytes(), cached, note)
            made.chmod(0o644)
            os.replace(made, out_path)
    except OSError as error:
        if error.errno in _FULL: raise _no_space(out_path.parent, str(error)) from error
        raise UserError(f"{out_path}: the library cannot be built there ({error})") from error
    return out_path


def assembly(source: str, isa: str) -> str:
    """The assembly of `source` as `build` compiles it: same compiler, same flags. Raises as `build` does."""
    try:
        with scratch("assembly") as folder:
            made = folder / "kernels.s"
            _compile(find_compiler(), source, isa, folder, made, ("-S",))
            return made.read_text()
    except OSError as error:
        if error.errno in _FULL: raise _no_space(Path(tempfile.gettempdir()), str(error)) from error
        raise UserError(f"cannot compile in the temporary folder {tempfile.gettempdir()}: {error.strerror} (set TMPDIR)") from error


def _compile(compiler: Compiler, source: str, isa: str, folder: Path, made: Path, last: tuple[str, ...] = LINK) -> None:
    text = folder / "kernels.cpp"
    text.write_text(source)
    # run inside the folder with a relative name: no path of this machine can reach the library; its own files go there too, so that
    # nothing of them is left where it is killed
    command = [compiler.path, *flags(isa, compiler), "-I", str(KERNELS), text.name, "-o", made.name, *last]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace", check=False,
                          env={**os.environ, "LC_ALL": "C", "TMPDIR": "."})            # its messages are read below
    lines = done.stderr.splitlines()
    full = [line for line in lines if any(words in line for words in _FULL_WORDS)]
    if done.returncode and full: raise _no_space(folder.parent, full[0])
    if done.returncode:
        errors = [line for line in lines if "error" in line] or lines[-3:] or [f"exit code {done.returncode}"]
        raise CheckFailed(f"{compiler.version} failed on the generated source ({_keep_source(source)}): {'; '.join(errors[:3])}")
    if not made.is_file():
        raise UserError(f"{compiler.path} ({compiler.version}) wrote no library: it is no C++ compiler; set $CXX to one")


def _no_space(folder: Path, said: str) -> UserError:
    places = " or ".join(dict.fromkeys((str(folder), os.environ.get("TMPDIR") or "/tmp")))
    return UserError(f"no space left on the device to compile in {places}: free some, or set TMPDIR to a roomier folder ({said.strip()})")


def _keep_source(source: str) -> str:
    """The path of a copy to look at, or why there is none."""
    folder = None
    try:
        folder = Path(tempfile.mkdtemp(prefix="infc-failed-"))
        (folder / "kernels.cpp").write_text(source)
        return str(folder / "kernels.cpp")
    except OSError as error:
        if folder: remove(folder)
        return f"which could not be kept: {error.strerror}"


def _kept(cached: Path, note: Callable[[str], None]) -> bytes | None:
    """The library kept at that place; None where there is none, or no longer what was written: such an entry is removed."""
    try:
        entry = cached.read_bytes()
        library, digest = entry[:-_DIGEST_BYTES], entry[-_DIGEST_BYTES:]
        if _digest(library, cached) == digest: return library
        why = "it was altered (its sha256 differs)"
    except (FileNotFoundError, NotADirectoryError):                       # nothing there; _keep says so of a folder it cannot make
        return None
    except OSError as error:
        why = f"it cannot be read ({error.strerror})"
    note(f"the kept library {cached} is of no use, compiling it again: {why}")
    remove(cached)
    return None


def _keep(library: bytes, cached: Path, note: Callable[[str], None]) -> None:
    """Into the cache, atomically (another process may be doing the same); where that fails, the compile is no worse for it."""
    sibling = cached.with_name(f".{cached.name}.{os.getpid()}-{os.urandom(4).hex()}")
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        with sibling.open("xb") as file:
            file.write(library + _digest(library, cached))
            file.flush()
            os.fsync(file.fileno())
        os.replace(sibling, cached)
    except OSError as error:
        note(f"the library is not kept for the next compile: {cached.parent} cannot be written ({error.strerror})")
    finally:
        with contextlib.suppress(OSError): sibling.unlink()
    sweep_halves(cached.parent)


def _digest(library: bytes, cached: Path) -> bytes:
    return hashlib.sha256(cached.name.encode() + library).digest()       # with its name: an entry under another key is no use
