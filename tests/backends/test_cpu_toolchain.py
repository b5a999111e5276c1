"""The compiler: found or asked for by name, run once per content, its library reproducible and free of paths."""
import os
import sys
from pathlib import Path

import pytest
from infc.backends.cpu.toolchain import ISA_FLAGS, KERNELS, build, find_compiler, flags, key
from infc.compiler.errors import CheckFailed, UserError

SOURCE = '#include "common.h"\nextern "C" float first(const float* x) { return infc::load16(x)[0]; }\n'
PLAIN = 'extern "C" int answer() { return 42; }\n'


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
