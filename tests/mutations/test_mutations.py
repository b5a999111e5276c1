"""A gate that a user meets stops every planted fault; by hand: PYTHONPATH=tests python -m mutations."""
from collections.abc import Sequence

import pytest
from infc.compiler.targets import TARGETS, missing
from mutations import gates
from mutations.faults import FAULTS, Fault
from mutations.plant import ROOT, Edit, planted
from mutations.verdict import verdict

FAST = {fault.where: fault.name for fault in reversed(FAULTS) if fault.kind == "pass"}
"""The first fault of each pass; the others, and all that need a C++ compiler, are for `make test-slow`."""


def needs(dtype: str, edits: Sequence[Edit] = ()) -> None:
    """Skips what this CPU cannot run."""
    if any("amx" in edit.file for edit in edits) and missing(TARGETS["x86-64-v4-amx"]): pytest.skip("this CPU has no AMX")
    if dtype.startswith("many ") and missing(TARGETS["x86-64-v4-bf16"]): pytest.skip("this CPU does not multiply bf16")


@pytest.mark.parametrize("fault", [
    pytest.param(f, id=f"{f.kind}: {f.name}", marks=() if FAST.get(f.where) == f.name else pytest.mark.slow) for f in FAULTS])
def test_a_fault_is_stopped_by_the_gate_of_its_kind(fault: Fault) -> None:
    needs(fault.dtype, fault.edits)
    found = verdict(fault)
    assert found is not None, f"{fault.name} in {fault.where} escaped"
    assert found.gate == fault.gate, found.message


@pytest.mark.slow
@pytest.mark.parametrize(("model", "dtype"), sorted({(f.model, f.dtype) for f in FAULTS if f.kind != "pass"}))
def test_a_model_without_a_fault_passes_every_gate(model: str, dtype: str) -> None:
    needs(dtype)
    gates.prepare_compile(model, dtype)
    assert gates.run_compile(model, dtype) is None


@pytest.mark.slow
@pytest.mark.parametrize(("model", "dtype"), sorted({(f.model, f.dtype) for f in FAULTS if f.kind == "pass"}))
def test_passes_without_a_fault_keep_their_contracts(model: str, dtype: str) -> None:
    assert gates.run_graph(model, 0, dtype) is None


def test_every_edit_still_applies() -> None:
    for fault in FAULTS:
        text = {edit.file: (ROOT / edit.file).read_text() for edit in fault.edits}
        for edit in fault.edits: text[edit.file] = edit.apply(text[edit.file])
    assert len({(f.kind, f.name) for f in FAULTS}) == len(FAULTS) >= 45


def test_a_fault_ends_with_its_block(tmp_path) -> None:
    from infc.passes import load

    before = load("fuse_rms_norm")
    edit = Edit("compiler/masks.py", "beyond = max(constants(node), default=0) + 3", "beyond = 9")
    with planted((edit, Edit("passes/fuse_rms_norm.py", "PASS = RuleSet", "PASS = RuleSet")), tmp_path):
        assert load("fuse_rms_norm") is not before
    assert load("fuse_rms_norm") is before
    with pytest.raises(ValueError, match="0 times, not once"), planted((Edit("compiler/masks.py", "nothing of the kind", ""),), tmp_path):
        pass
