"""A kept compile: used when whole, removed with a note when not; a cache that cannot be used never stops a compile."""
import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from infc.compiler import reuse
from infc.compiler.errors import CheckFailed, UserError
from infc.compiler.reuse import Entry, cache_folder
from infc.runtime.artifact import Parts, read, write
from infc.runtime.errors import RuntimeFault
from infc.runtime.manifest import Manifest, ModelInfo
from infc.runtime.tensors import tensor


def artifact(path: Path, version: str = "v1") -> Path:
    manifest = Manifest(name="m", version=version, target="cpu", machine="x86_64", isa=(), dtype="fp32", contract="exact",
                        model=ModelInfo("m", 8, 32, (), layers=1))
    write(path, Parts(manifest, [], b"", {"w": tensor(np.arange(1000, dtype=np.int32))}, {}, b"{}", {}))
    return path


def passes(folder: Path) -> None: read(folder).close()


def bit_flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def entry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, notes: list[str]) -> Entry:
    """An entry with a good artifact in it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    entry = Entry("k", notes.append)
    entry.keep(artifact(tmp_path / "made.infc"))
    assert notes == [] and entry.path.is_dir()
    return entry


@pytest.fixture
def output(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "a.infc"


def of_no_use(entry: Entry, notes: list[str], output: Path, *words: str) -> None:
    """The entry was removed with one note that holds every word, and nothing was written."""
    assert not os.path.lexists(entry.path) and os.listdir(output.parent) == []
    [line] = notes
    for word in ("of no use, compiling again", *words): assert word in line


def test_nothing_kept_is_no_note(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, notes: list[str], output: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert not Entry("k", notes.append).take(output, False, passes) and notes == []


def test_a_whole_entry_is_taken_and_grows_young(entry: Entry, notes: list[str], output: Path) -> None:
    os.utime(entry.path, (0, 0))
    assert entry.take(output, False, passes) and notes == []
    assert read(output).manifest.version == "v1" and entry.path.stat().st_mtime > 0


@pytest.mark.parametrize("name", ["manifest.json", "weights.safetensors", "tokenizer.json", "report.json"])
def test_an_altered_file_is_found(entry: Entry, notes: list[str], output: Path, name: str) -> None:
    bit_flip(entry.path / name)
    assert not entry.take(output, False, passes)
    of_no_use(entry, notes, output, str(entry.path))
    assert "partial" not in notes[0]


def test_a_missing_file_is_found(entry: Entry, notes: list[str], output: Path) -> None:
    (entry.path / "report.json").unlink()
    assert not entry.take(output, False, passes)
    of_no_use(entry, notes, output, "report.json")


@pytest.mark.parametrize("kind", ["file", "dangling link"])
def test_what_is_no_folder_is_removed(entry: Entry, notes: list[str], output: Path, kind: str) -> None:
    shutil.rmtree(entry.path)
    if kind == "file": entry.path.write_text("")
    else: entry.path.symlink_to("nowhere")
    assert not entry.take(output, False, passes)
    of_no_use(entry, notes, output, "no folder")


@pytest.mark.parametrize("fault", [CheckFailed("logits differ"), UserError("logits differ"), RuntimeFault("logits differ"),
                                   OSError(errno.ENOSPC, "logits differ")], ids=lambda fault: type(fault).__name__)
def test_an_entry_that_fails_its_check_is_removed(entry: Entry, notes: list[str], output: Path, fault: Exception) -> None:
    def check(folder: Path) -> None: raise fault

    assert not entry.take(output, False, check)
    of_no_use(entry, notes, output, "logits differ")


def test_a_bug_in_the_check_is_not_hidden(entry: Entry, output: Path) -> None:
    def check(folder: Path) -> None: raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError): entry.take(output, False, check)
    assert entry.path.is_dir() and os.listdir(output.parent) == []


@pytest.mark.parametrize("moment", ["listed", "first file", "second file"])
def test_an_entry_that_vanishes_while_it_is_copied(
    entry: Entry, notes: list[str], output: Path, monkeypatch: pytest.MonkeyPatch, moment: str,
) -> None:
    real, copied = shutil.copyfile, list[object]()

    def copyfile(source: Path, target: Path) -> object:
        copied.append(source)
        if len(copied) == (1 if moment == "first file" else 2): shutil.rmtree(entry.path)
        return real(source, target)

    if moment == "listed":
        monkeypatch.setattr(Path, "rglob", lambda self, pattern: [self / "gone"] if self == entry.path else [])
        monkeypatch.setattr(Path, "is_file", lambda self: True)
    else:
        monkeypatch.setattr(shutil, "copyfile", copyfile)
    assert not entry.take(output, False, passes)
    monkeypatch.undo()
    [line] = notes
    assert "of no use, compiling again" in line and os.listdir(output.parent) == []


def test_an_output_that_exists_is_said(entry: Entry, notes: list[str], output: Path) -> None:
    output.mkdir()
    with pytest.raises(RuntimeFault, match="exists already"): entry.take(output, False, passes)
    with pytest.raises(RuntimeFault, match="no infc artifact"): entry.take(output, True, passes)
    assert entry.path.is_dir() and notes == []


def test_an_output_without_a_folder_is_said(entry: Entry, notes: list[str], output: Path) -> None:
    with pytest.raises(RuntimeFault, match="does not exist"): entry.take(output.parent / "none" / "a.infc", False, passes)
    assert entry.path.is_dir() and notes == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.EROFS])
def test_an_output_that_cannot_be_written_is_said(
    entry: Entry, notes: list[str], output: Path, monkeypatch: pytest.MonkeyPatch, code: int,
) -> None:
    def copyfile(source: Path, target: Path) -> None:
        raise OSError(code, os.strerror(code), str(source if code == errno.ENOSPC else target))    # as shutil names them

    monkeypatch.setattr(shutil, "copyfile", copyfile)
    with pytest.raises(RuntimeFault, match="no space left" if code == errno.ENOSPC else "cannot be written"):
        entry.take(output, False, passes)
    assert entry.path.is_dir() and notes == [] and os.listdir(output.parent) == []


def test_an_entry_that_cannot_be_read_is_of_no_use(entry: Entry, notes: list[str], output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def copyfile(source: Path, target: Path) -> None: raise PermissionError(errno.EACCES, "Permission denied", str(source))

    monkeypatch.setattr(shutil, "copyfile", copyfile)
    assert not entry.take(output, False, passes)
    of_no_use(entry, notes, output, "cannot be read (Permission denied)")


def test_a_read_only_cache_is_taken_from(entry: Entry, notes: list[str], output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def utime(path: Path) -> None: raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(os, "utime", utime)
    assert entry.take(output, False, passes) and read(output).manifest.version == "v1"


@pytest.mark.parametrize("cache", ["/proc/nope", "/dev/null"])
def test_a_cache_that_cannot_be_made_is_a_note(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, notes: list[str], output: Path, cache: str,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", cache)
    entry = Entry("k", notes.append)
    assert not entry.take(output, False, passes) and notes == []
    entry.keep(artifact(tmp_path / "made.infc"))
    assert len(notes) == 1 and "not kept for the next compile" in notes[0] and cache in notes[0]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_cache_that_cannot_be_written_is_a_note(
    entry: Entry, notes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int,
) -> None:
    def copyfile(source: Path, target: Path) -> None: raise OSError(code, os.strerror(code), str(target))

    monkeypatch.setattr(shutil, "copyfile", copyfile)
    Entry("other", notes.append).keep(tmp_path / "made.infc")
    assert len(notes) == 1 and "not kept" in notes[0]
    assert os.listdir(cache_folder() / "artifacts") == ["k.infc"], "nothing half-written"


def test_what_killed_compiles_left_half_kept_goes_and_a_live_ones_stays(entry: Entry, notes: list[str], output: Path) -> None:
    folder = entry.path.parent
    code = ("import pathlib, sys\nfrom infc.runtime.writer import _partial\n"
            "with _partial(pathlib.Path(sys.argv[1])) as made: (made / 'x').touch(); print(made, flush=True); sys.stdin.read()")
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(folder / "other.infc")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    theirs = Path(other.stdout.readline().strip())
    (folder / ".third.infc.partial-1-00000000").mkdir()
    assert not Entry("absent", notes.append).take(output, False, passes)
    assert sorted(os.listdir(folder)) == [theirs.name, "k.infc"] and (theirs / "x").exists()
    other.kill()
    other.communicate()
    assert entry.take(output, False, passes) and notes == []
    assert os.listdir(folder) == ["k.infc"]


def test_the_oldest_entries_go(entry: Entry, notes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = sum(file.stat().st_size for file in entry.path.rglob("*") if file.is_file())
    monkeypatch.setattr(reuse, "BUDGET_BYTES", 2 * size)
    os.utime(entry.path, (0, 0))
    (entry.path.parent / "dangling.infc").symlink_to("nowhere")
    for name in ("b", "c"): Entry(name, notes.append).keep(tmp_path / "made.infc")
    assert notes == [] and {path.name for path in entry.path.parent.iterdir()} >= {"b.infc", "c.infc"} and not entry.path.exists()
