"""Peaks are kept once measured, under a key of all that decides them; nothing here times anything."""
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from infc.compiler.costs import machine, peaks

from .test_cost import PEAKS


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "infc" / "peaks"


def test_every_input_is_in_the_key():
    parts = ("AMD EPYC", "x86-64-v4", 2, "library")
    keys = {peaks.key(*parts), peaks.key("Xeon", *parts[1:]), peaks.key("AMD EPYC", "x86-64-v3", 2, "library"),
            peaks.key("AMD EPYC", "x86-64-v4", 4, "library"), peaks.key("AMD EPYC", "x86-64-v4", 2, "other")}
    assert len(keys) == 5 and peaks.key(*parts) in keys


def test_the_library_is_what_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(machine, "KERNELS", tmp_path)
    (tmp_path / "kernels").mkdir()
    (tmp_path / "peaks.py").write_text("one")
    (tmp_path / "kernels" / "linear.h").write_text("product")
    seen = set()
    for file, text in (("peaks.py", "one"), ("peaks.py", "two"), ("kernels/linear.h", "faster product")):
        (tmp_path / file).write_text(text)
        machine.library_digest.cache_clear()
        seen.add(machine.library_digest())
    machine.library_digest.cache_clear()
    assert len(seen) == 3


def test_measured_once(cache: Path):
    calls: list[int] = []

    def measure() -> peaks.Peaks:
        calls.append(1)
        return PEAKS

    assert peaks.kept("k") is None
    assert peaks.cached("k", measure) == PEAKS == peaks.cached("k", measure) == peaks.kept("k") and len(calls) == 1
    assert [p.name for p in cache.iterdir()] == ["k.json"]


def test_peaks_of_a_busy_machine_are_used_but_not_kept(cache: Path):
    notes: list[str] = []
    busy = replace(PEAKS, quiet=False)
    assert peaks.cached("k", lambda: busy, notes.append) == busy
    assert "not kept" in notes[-1] and peaks.kept("k") is None and not cache.exists()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"cpu": "x"}', "\x00"])
def test_damaged_or_older_peaks_are_measured_again(cache: Path, text: str):
    notes: list[str] = []
    cache.mkdir(parents=True)
    (cache / "k.json").write_text(text)
    assert peaks.cached("k", lambda: PEAKS, notes.append) == PEAKS
    assert "measuring" in notes[0] and json.loads((cache / "k.json").read_text())["cpu"] == "a test"


@pytest.mark.parametrize("value", [math.nan, 0, -5, "x", math.inf, None])
def test_impossible_figures_are_measured_again(cache: Path, value: object):
    notes: list[str] = []
    peaks.cached("k", lambda: PEAKS)
    kept = json.loads((cache / "k.json").read_text())
    (cache / "k.json").write_text(json.dumps(kept | {"read_gb_s": value}))
    assert peaks.cached("k", lambda: PEAKS, notes.append) == PEAKS and "of no use (read_gb_s cannot be)" in notes[0]


def test_a_cache_that_cannot_be_written_costs_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    notes: list[str] = []
    assert peaks.cached("k", lambda: PEAKS, notes.append) == PEAKS and "not kept" in notes[-1]


def test_the_last_cache_is_the_largest():
    assert peaks.last_level_cache() >= 0
