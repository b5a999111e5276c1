"""Plant a fault, run its model up to the gate that stops it."""
import tempfile
from pathlib import Path

from mutations import gates
from mutations.faults import Fault
from mutations.gates import Caught
from mutations.plant import planted


def verdict(fault: Fault) -> Caught | None:
    """The gate that stopped the fault; None where it escaped.

    A model without a fault passes every gate (test_mutations proves it), so whatever is caught was planted, and did run.
    """
    if fault.kind == "pass": gates.prepare(fault.model, fault.index, fault.dtype)
    elif fault.kind == "runtime": gates.artifact(fault.model)
    else: gates.prepare_compile(fault.model, fault.dtype)
    with tempfile.TemporaryDirectory(prefix="infc-mutation-") as folder, planted(fault.edits, Path(folder)):
        if fault.kind == "pass": return gates.run_graph(fault.model, fault.index, fault.dtype)
        if fault.kind == "runtime": return gates.run_verify(fault.model)
        return gates.run_compile(fault.model, fault.dtype)
