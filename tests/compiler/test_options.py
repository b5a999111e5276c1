"""A compile's options as Python callers write them."""
from pathlib import Path
from typing import Any

import pytest
from infc.compiler.errors import UserError
from infc.compiler.options import Options


def test_paths_may_be_strings_and_lists_tuples() -> None:
    given = Options(calib="a.txt", data="b.json", dump="c", quant=Path("r.yaml"), buckets=[1, 16])    # type: ignore[arg-type]
    assert given == Options(calib=Path("a.txt"), data=Path("b.json"), dump=Path("c"), quant="r.yaml", buckets=(1, 16))


@pytest.mark.parametrize(("name", "value"), [("quant", None), ("kv_quant", None), ("dtype", 16), ("target", Path("cpu")), ("check", True)])
def test_what_is_no_string_is_told_by_name(name: str, value: Any) -> None:
    with pytest.raises(UserError, match=rf"^{name} is .*: give a string, as {name}='.*', or leave it out$"): Options(**{name: value})
