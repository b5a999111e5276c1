"""The interpreter of the oldest Triton that is taken, beside a NumPy of today."""
from triton_env import conform, randn, run  # isort: skip  # before anything of Triton

from typing import Any

import pytest
import triton
from infc.backends.triton import interpret
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError


@pytest.fixture
def old(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.6, as far as an index goes: int() of an array with an axis, which NumPy refuses from 2.4 on."""
    interpret.check_interpreting()
    today = interpreter._patch_lang_tensor

    def as_it_was(tensor: Any, scope: Any) -> None:
        def index(self: Any) -> int:
            if self.handle.data.ndim: raise TypeError("only 0-dimensional arrays can be converted to Python scalars")
            return int(self.handle.data)

        today(tensor, scope)
        scope.set_attr(tensor, "__index__", index)

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", as_it_was)


def test_a_loop_with_computed_bounds_runs(old: None, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"x": randn(2, 40), "w": randn(3, 40, seed=1)}
    with pytest.raises(InterpreterError, match="0-dimensional"): run("infc::linear", **given)
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    interpret._mend_indices.__wrapped__()                                    # what it sets goes with the fixture
    conform("infc::linear", times=2, **given)
