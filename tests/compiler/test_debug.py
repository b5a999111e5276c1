"""The INFC_* switches: what they admit, and what a compile shows for them."""
import re

import pytest
from infc.compiler import debug, driver
from infc.compiler.errors import CheckFailed, UserError
from planted import FP32, TAIL, decoder, plant


@pytest.mark.parametrize(("name", "value", "read"), [("DEBUG", "5", debug.level), ("EAGER", "yes", debug.eager), ("STOP", "-1", debug.stop),
                                                     ("CHECK", "3", debug.check)])
def test_a_wrong_value_is_named(name, value, read, monkeypatch):
    monkeypatch.setenv(f"INFC_{name}", value)
    with pytest.raises(UserError, match=rf"INFC_{name}='{value}': expected {'0 or 1' if name == 'EAGER' else 'a whole number'}"):
        read()


def test_there_are_five_and_each_keeps_a_compile_from_being_reused(monkeypatch):
    assert len(debug.SWITCHES) == 5
    for name in debug.SWITCHES: monkeypatch.delenv(f"INFC_{name}", raising=False)
    assert not debug.any_set()
    for name in debug.SWITCHES:
        with monkeypatch.context() as one:
            one.setenv(f"INFC_{name}", "1")
            assert debug.any_set()


def test_the_levels_of_debug(tmp_path, monkeypatch):
    """Each level shows what the lower ones do: times per kernel (2), what a pass changed (3), the source (4)."""
    monkeypatch.setenv("INFC_DEBUG", "4")
    notes: list[str] = []
    driver.compile(decoder(), tmp_path / "a.infc", options=FP32, on_event=lambda event: notes.append(event.text))
    told = "\n".join(notes)
    assert re.search(r"step_T16, one token a step: .*GB/s", told) and re.search(r"linear_f32\S+ +\d+ +[\d.]+ +[\d.]+ +\d+ %", told)
    assert "--- before fuse_rms_norm" in told and re.search(r"\+%rms_norm\S*: f32\[B,S,48\] = infc.rms_norm", told)
    assert 'extern "C" void' in told


def test_eager_tells_a_bad_kernel_from_a_bad_pass(tmp_path, monkeypatch):
    """A kernel that is wrong fails a compile, but not one that runs reference operators in its place."""
    plant(monkeypatch, tmp_path / "kernels", "norm.h", *TAIL)
    with pytest.raises(CheckFailed, match="the program is not the graph"):
        driver.compile(decoder(), tmp_path / "a.infc", options=FP32)
    monkeypatch.setenv("INFC_EAGER", "1")
    verified = driver.compile(decoder(), tmp_path / "a.infc", options=FP32).verify
    assert verified["passed"] and verified["reference"]
