"""The compiler: found or asked for by name, run once per content, its library reproducible and free of paths."""
import errno
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from infc.backends.cpu.toolchain import ISA_FLAGS, KERNELS, build, find_compiler, flags, key
from infc.compiler.errors import CheckFailed, UserError

SOURCE = '#include "common.h"\nextern "C" float first(const float* x) { return infc::load16(x)[0]; }\n'
PLAIN = 'extern "C" int answer() { return 42; }\n'


@pytest.fixture
def compiler_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Path]:
    """A $CXX in shell: what it does to compile ($out is the library), and for --version."""
    def make(compiles: str = 'echo library > "$out"', version: str = "echo fake 1.0") -> Path:
        path = tmp_path / "bin" / "fake-c++"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f'#!/bin/sh\nif [ "$1" = --version ]; then {version}; exit; fi\necho run >> {tmp_path}/runs\n'
                        f'while [ $# -gt 0 ]; do [ "$1" = -o ] && out=$2; shift; done\n{compiles}\n')
        path.chmod(0o755)
        monkeypatch.setenv("CXX", str(path))
        return path
    return make


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where tempfile makes its files: a folder to look into."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_no_compiler_names_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(UserError, match="apt-get install g"): build(PLAIN, "portable", tmp_path / "x.so")


def test_an_unknown_instruction_set_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="x86-64-v4"): build(PLAIN, "x86-64-v5", tmp_path / "x.so")


def test_a_source_that_does_not_compile_says_where(tmp_path: Path) -> None:
    with pytest.raises(CheckFailed, match="not_declared"): build("int f() { return not_declared; }", "portable", tmp_path / "x.so")
    assert list(tmp_path.iterdir()) == [], "nothing half-written"


@pytest.mark.parametrize("isa", ["x86-64-v3", "portable"])
def test_the_same_source_gives_the_same_bytes_anywhere(tmp_path: Path, isa: str) -> None:
    a, b = (build('#include "pool.h"\n' + PLAIN, isa, tmp_path / name / "kernels.so").read_bytes() for name in ("here", "elsewhere"))
    assert a == b
    for path in (str(KERNELS), str(tmp_path), str(Path.home())): assert path.encode() not in a


def test_a_second_build_comes_from_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls, real = tmp_path / "calls", find_compiler().path
    wrapper = tmp_path / "counting-g++"
    wrapper.write_text(f'#!/bin/sh\ncase "$1" in --version) ;; *) echo run >> {calls} ;; esac\nexec {real} "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("CXX", str(wrapper))
    first = build(PLAIN, "portable", tmp_path / "a.so", tmp_path / "cache").read_bytes()
    second = build(PLAIN, "portable", tmp_path / "b.so", tmp_path / "cache").read_bytes()
    assert first == second and calls.read_text() == "run\n"
    build(PLAIN.replace("42", "43"), "portable", tmp_path / "a.so", tmp_path / "cache")
    assert calls.read_text() == "run\nrun\n"
    assert sorted(os.listdir(tmp_path)) == ["a.so", "b.so", "cache", "calls", "counting-g++"]


def test_the_key_holds_source_flags_and_headers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = find_compiler()
    keys = {key(PLAIN, isa, compiler) for isa in ISA_FLAGS} | {key(SOURCE, "portable", compiler)}
    assert len(keys) == len(ISA_FLAGS) + 1
    before = key(PLAIN, "portable", compiler)
    (tmp_path / "new.h").write_text("// a header")
    for header in KERNELS.glob("*.h"): (tmp_path / header.name).write_bytes(header.read_bytes())
    monkeypatch.setattr(sys.modules[build.__module__], "KERNELS", tmp_path)      # the package has a function of the module's name
    assert key(PLAIN, "portable", compiler) != before


def test_flags_never_allow_fast_math() -> None:
    for isa in ISA_FLAGS:
        assert not {"-ffast-math", "-Ofast", "-march=native", "-ffinite-math-only"} & set(flags(isa, find_compiler()))


@pytest.mark.parametrize("name", ["no-such-c++", "g++ -O2", "/nowhere/g++"])
def test_a_cxx_that_is_no_program_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("CXX", name)
    with pytest.raises(UserError) as caught: find_compiler()
    assert f"$CXX is {name!r}, which is no program on the PATH" in str(caught.value)


@pytest.mark.parametrize("version", ["echo broken >&2; exit 7", "exit 7", "kill -9 $$", "true"])
def test_a_cxx_that_fails_is_named_with_its_exit_code(compiler_says: Callable[..., Path], version: str) -> None:
    path = compiler_says(version=version)
    code = {"kill -9 $$": -9, "true": 0}.get(version, 7)
    with pytest.raises(UserError) as caught: find_compiler()
    assert str(path) in str(caught.value) and f"exit code {code} " in str(caught.value)


def test_a_cxx_that_cannot_start_is_named(compiler_says: Callable[..., Path]) -> None:
    path = compiler_says()
    path.write_text("#!/nowhere/sh\n")
    with pytest.raises(UserError, match=r"fake-c.. cannot be started"): find_compiler()


def test_a_cxx_that_writes_nothing_is_named(compiler_says: Callable[..., Path], tmp_path: Path) -> None:
    path = compiler_says("true")
    with pytest.raises(UserError, match="wrote no library") as caught: build(PLAIN, "portable", tmp_path / "out" / "x.so")
    assert str(path) in str(caught.value) and os.listdir(tmp_path / "out") == []


def test_a_cxx_given_as_a_relative_path_is_found(
    compiler_says: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:
    compiler_says()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CXX", "bin/fake-c++")
    assert build(PLAIN, "portable", tmp_path / "x.so").read_text() == "library\n"


def _flip(entry: Path) -> None: entry.write_bytes(bytes([entry.read_bytes()[0] ^ 1]) + entry.read_bytes()[1:])
def _cut(entry: Path) -> None: entry.write_bytes(entry.read_bytes()[:-1])
def _empty(entry: Path) -> None: entry.write_bytes(b"")
def _bare(entry: Path) -> None: entry.write_bytes(entry.read_bytes()[:-32])      # what an earlier infc kept


def _folder(entry: Path) -> None:
    entry.unlink()
    (entry / "inner").mkdir(parents=True)


@pytest.mark.parametrize("damage", [_flip, _cut, _empty, _bare, _folder])
def test_a_damaged_entry_is_built_again(compiler_says: Callable[..., Path], tmp_path: Path, damage: Callable[[Path], None]) -> None:
    compiler_says()
    notes: list[str] = []
    want = build(PLAIN, "portable", tmp_path / "a.so", tmp_path / "cache", notes.append).read_bytes()
    [entry] = (tmp_path / "cache").iterdir()
    assert notes == []
    damage(entry)
    assert build(PLAIN, "portable", tmp_path / "b.so", tmp_path / "cache", notes.append).read_bytes() == want
    assert len(notes) == 1 and str(entry) in notes[0]
    assert build(PLAIN, "portable", tmp_path / "c.so", tmp_path / "cache", notes.append).read_bytes() == want
    assert len(notes) == 1 and (tmp_path / "runs").read_text() == "run\n" * 2, "the third is a copy again"


def test_an_entry_of_another_key_is_of_no_use(compiler_says: Callable[..., Path], tmp_path: Path) -> None:
    compiler_says()
    notes: list[str] = []
    build(PLAIN, "portable", tmp_path / "a.so", tmp_path / "cache")
    [entry] = (tmp_path / "cache").iterdir()
    entry.rename(entry.with_name(f"{key(SOURCE, 'portable', find_compiler())}.so"))
    build(SOURCE, "portable", tmp_path / "b.so", tmp_path / "cache", notes.append)
    assert len(notes) == 1 and (tmp_path / "runs").read_text() == "run\n" * 2


@pytest.mark.parametrize("cache", ["/proc/nope/code", "/dev/null/code"])
def test_a_cache_that_cannot_be_made_is_a_note(compiler_says: Callable[..., Path], tmp_path: Path, cache: str) -> None:
    compiler_says()
    notes: list[str] = []
    build(PLAIN, "portable", tmp_path / "a.so", Path(cache), notes.append)
    assert (tmp_path / "a.so").read_text() == "library\n"
    assert len(notes) == 1 and cache in notes[0]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_cache_is_a_note_and_leaves_nothing(
    compiler_says: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, call: str,
) -> None:
    compiler_says()
    notes: list[str] = []
    real = getattr(os, call)

    def full(*paths: object) -> None:
        if call == "replace" and Path(str(paths[1])).parent.name != "cache": return real(*paths)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, call, full)
    build(PLAIN, "portable", tmp_path / "a.so", tmp_path / "cache", notes.append)
    assert (tmp_path / "a.so").read_text() == "library\n" and os.listdir(tmp_path / "cache") == []
    assert len(notes) == 1 and "No space left on device" in notes[0]


def test_what_a_killed_compile_left_half_kept_goes(compiler_says: Callable[..., Path], tmp_path: Path) -> None:
    compiler_says()
    (tmp_path / "cache").mkdir()
    old, new = (tmp_path / "cache" / name for name in (".b.so.1-00", ".c.so.1-00"))
    for half in (old, new): half.write_bytes(b"half")
    os.utime(old, (time.time() - 7200,) * 2)
    build(PLAIN, "portable", tmp_path / "a.so", tmp_path / "cache")
    assert sorted(os.listdir(tmp_path / "cache")) == [new.name, f"{key(PLAIN, 'portable', find_compiler())}.so"]


def test_an_entry_is_on_the_disk_before_it_gets_its_name(
    compiler_says: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:
    compiler_says()
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append("fsync"), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda a, b: (calls.append(Path(b).parent.name), replace(a, b)))
    build(PLAIN, "portable", tmp_path / "out" / "a.so", tmp_path / "cache")
    assert calls == ["fsync", "cache", "out"]


@pytest.mark.parametrize("says", ["/tmp/cc1.s: No space left on device", "fatal error: File size limit exceeded signal terminated cc1plus"])
def test_a_full_disk_is_said_first(compiler_says: Callable[..., Path], temporary: Path, tmp_path: Path, says: str) -> None:
    compiler_says(f"echo 'x.h:1: error: something else' >&2; echo '{says}' >&2; exit 1")
    with pytest.raises(UserError) as caught: build(PLAIN, "portable", tmp_path / "out" / "x.so")
    assert str(caught.value).startswith("no space left") and says in str(caught.value)
    assert list(temporary.iterdir()) == [] and list((tmp_path / "out").iterdir()) == []


def test_a_disk_that_fills_before_the_compiler_runs(
    compiler_says: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:
    compiler_says()

    def full(self: Path, text: str) -> int: raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self))

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(UserError, match=r"^no space left"): build(PLAIN, "portable", tmp_path / "out" / "x.so")
    assert list((tmp_path / "out").iterdir()) == []


def test_the_failed_source_is_kept_where_there_is_room(
    compiler_says: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, temporary: Path, tmp_path: Path,
) -> None:
    compiler_says("echo 'error: no such thing' >&2; exit 1")
    with pytest.raises(CheckFailed, match="no such thing"): build(PLAIN, "portable", tmp_path / "x.so")
    [kept] = temporary.glob("infc-failed-*/kernels.cpp")
    assert kept.read_text() == PLAIN
    real = Path.write_text

    def full(self: Path, text: str) -> int:
        if not self.is_relative_to(temporary): return real(self, text)
        real(self, "")                                                   # open worked, write did not
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(CheckFailed, match=r"kept: No space left.*no such thing"): build(PLAIN, "portable", tmp_path / "x.so")
    assert len(list(temporary.iterdir())) == 1, "the first one alone"
