"""A compile's options as Python callers write them."""
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from infc.compiler import driver
from infc.compiler.errors import UserError
from infc.compiler.files import named_artifact
from infc.compiler.options import Options
from tiny_artifact import infc


def test_paths_may_be_strings_and_lists_tuples() -> None:
    given = Options(calib="a.txt", data="b.json", dump="c", quant=Path("r.yaml"), buckets=[1, 16])    # type: ignore[arg-type]
    assert given == Options(calib=Path("a.txt"), data=Path("b.json"), dump=Path("c"), quant="r.yaml", buckets=(1, 16))


def test_numbers_may_be_numpys_and_expectations_a_dict() -> None:
    given = Options(buckets=np.array([1, 16]), max_sequences=np.int64(2), expect={"fuse_rope": 2})    # type: ignore[arg-type]
    assert given == Options(buckets=(1, 16), max_sequences=2, expect=(("fuse_rope", 2),)) and type(given.buckets[0]) is int     # type: ignore


@pytest.mark.parametrize(("given", "line"), [
    ({"force": "no"}, "force is 'no': give True or False, or leave it out"),
    ({"unverified": 0}, "unverified is 0: give True or False, or leave it out"),
    ({"buckets": "1,16"}, r"buckets is '1,16': give whole numbers, as buckets=\(1, 16\), or leave it out"),
    ({"buckets": [True]}, r"buckets is \[True\]: give whole numbers"), ({"buckets": 16}, "buckets is 16: give whole numbers"),
    ({"buckets": [1.5]}, r"buckets is \[1.5\]: give whole numbers"), ({"max_sequences": 2.0}, "max_sequences is 2.0: give whole numbers"),
    ({"quality": 0.01}, "quality is 0.01: give limits"), ({"data": 5}, "data is 5: give a path, or leave it out"),
    ({"expect": ["fuse_rope=2"]}, "expect is .*: give a dict"),
])
def test_values_of_other_types_are_told(given: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError, match=f"^{line}"): Options(**given)


@pytest.mark.parametrize(("options", "line"), [
    (Options(check="fastt"), "unknown check 'fastt': choose one of off, fast, strict"),
    ({"dtype": "bf16"}, "options is {'dtype': 'bf16'}: give an infc.Options"),
    (Options(buckets=(4, 2), max_sequences=8), "max_sequences is 8, and the largest bucket has 4 tokens"),
])
def test_a_compile_refuses_what_no_option_is(tmp_path: Path, options: Any, line: str) -> None:
    with pytest.raises(UserError, match=line): driver.compile("tiny", tmp_path / "a", options=options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("place", "line"), [
    (".", "is a folder: name the artifact in it"), ("/", "is a folder"), ("..", "is a folder"),
    ("whole.infc/inner", "would lie inside the artifact"),
])
def test_an_artifact_has_a_name_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, line: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "whole.infc").mkdir()
    (tmp_path / "whole.infc" / "manifest.json").write_text("{}")
    done = infc("compile", "tiny", "-o", place, "--quiet")
    assert done.returncode == 2 and line in done.stderr and done.stderr.count("\n") == 1
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*")) == ["whole.infc", "whole.infc/manifest.json"]


@pytest.mark.parametrize(("place", "line"), [
    ("pipe", "^pipe is no regular file and no folder: name another place"), ("pipe.infc", "is no regular file and no folder"),
    ("/dev/null", "^/dev/null is no regular file and no folder"), ("x\0.infc", r"^'x\\x00.infc' holds a zero byte"),
    (5, "^output is 5: give a path, as 'model.infc', or leave it out$"), (b"a", "^output is b'a': give a path"),
])
def test_a_place_where_no_artifact_can_be_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: Any, line: str) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("pipe", "pipe.infc"): os.mkfifo(name)
    with pytest.raises(UserError, match=line): driver.compile("tiny", place, options=Options(force=True))
    assert sorted(os.listdir()) == ["pipe", "pipe.infc"] and not Path("/dev/null.infc").exists()


def test_a_manifest_of_another_kind_makes_no_artifact_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    assert named_artifact(tmp_path / "model") == tmp_path / "model.infc"


@pytest.mark.parametrize(("name", "value"), [("quant", None), ("kv_quant", None), ("dtype", 16), ("target", Path("cpu"))])
def test_what_is_no_string_is_told_by_name(name: str, value: Any) -> None:
    with pytest.raises(UserError, match=rf"^{name} is .*: give a string, as {name}='.*', or leave it out$"): Options(**{name: value})
