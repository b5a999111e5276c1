"""Folders in TMPDIR: removed at the end, and by the next compile where theirs was killed; never while their process lives."""
import fcntl
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from infc.backends.cpu.backend import toolchain
from infc.compiler.driver import compile
from infc.compiler.errors import CheckFailed, UserError
from infc.compiler.options import Options
from infc.compiler.scratch import scratch, sweep


@pytest.fixture(autouse=True)
def temporary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where tempfile makes its files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    return tmp_path / "temporary"


def test_a_compile_sweeps_what_a_killed_one_left_and_not_a_live_ones(temporary: Path, tmp_path: Path) -> None:
    code = ("import tempfile, sys; tempfile.tempdir = sys.argv[1]\nfrom infc.compiler.scratch import scratch\n"
            "with scratch('code') as made: (made / 'x').touch(); print(made, flush=True); sys.stdin.read()")
    other = subprocess.Popen([sys.executable, "-c", code, str(temporary)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    theirs = Path(other.stdout.readline().strip())
    (temporary / "infc-failed-kept").mkdir()
    (temporary / "infc-locked-file").touch()
    (temporary / "infc-locked-link").symlink_to("infc-failed-kept")
    sweep()
    assert (theirs / "x").exists()
    other.kill()
    other.communicate()
    assert theirs.exists()                                               # nobody has removed it yet
    with scratch("code") as ours:
        with pytest.raises(UserError): compile(tmp_path / "absent", tmp_path / "a.infc", options=Options(target="portable"))
        assert ours.exists() and not theirs.exists()
    assert sorted(os.listdir(temporary)) == ["infc-failed-kept", "infc-locked-file", "infc-locked-link"]


def test_a_folder_swept_before_it_is_locked_is_made_again(monkeypatch: pytest.MonkeyPatch, temporary: Path) -> None:
    real, calls = fcntl.flock, list[int]()

    def late(held: int, how: int) -> None:
        calls.append(how)
        if len(calls) == 1: sweep()
        real(held, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with scratch("code") as made: assert os.listdir(temporary) == [made.name]
    assert len(calls) == 3 and os.listdir(temporary) == []


def test_where_there_are_no_locks_nothing_is_swept(monkeypatch: pytest.MonkeyPatch, temporary: Path) -> None:
    def none(held: int, how: int) -> None: raise OSError("No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    with scratch("code") as made:
        sweep()
        assert made.exists()
    assert os.listdir(temporary) == []


def test_the_compiler_s_own_files_lie_within(monkeypatch: pytest.MonkeyPatch, temporary: Path, tmp_path: Path) -> None:
    compiler = tmp_path / "fake-c++"
    compiler.write_text('#!/bin/sh\nif [ "$1" = --version ]; then echo fake 1.0; exit; fi\n'
                        'touch "$TMPDIR/left" || exit 2; echo "error: $PWD" >&2; exit 1\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    for run in (lambda tools: tools.build("", None, print), lambda tools: tools.assembly("")):
        with pytest.raises(CheckFailed, match=rf"error: {temporary}/infc-locked-\w+-"): run(toolchain("portable"))
        assert [left.name for left in temporary.iterdir() if not left.name.startswith("infc-failed-")] == []
