"""The costs an artifact carries: its unique steps with their formulas, as plain data for compiler.cost."""
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...runtime.program import Program, Step
from ..errors import CheckFailed
from ..ops.codes import E4M3
from ..ops.registry import arguments, operator_of
from ..placement import Unit
from .cost import kind_of
from .count import Count, RegionCost, count, formulas, totals

PACKED_SPREAD = 16
"""A row of a table in panels of 32 (both layouts) has 4 bytes in each cache line of 64: picking it moves 16 times what it holds."""


class CostTable:
    """Collects the unique steps of an artifact's programs with their formulas: report.json["costs"], see compiler.cost."""

    def __init__(self, weights: Collection[str], region: RegionCost):
        self.weights, self.region = weights, region
        self.kernels: list[dict[str, Any]] = []
        self.steps: dict[str, list[int]] = {}
        self.buckets: dict[str, dict[str, int]] = {}
        self._index: dict[tuple[Any, ...], int] = {}
        self._weight_bytes: dict[str, int] = {}

    def maxima(self, unit: Unit, context: Any) -> tuple[int, int]:
        """flops and bytes of a unit at its bucket's maxima: what a Step carries."""
        return totals(count(unit, context, self.weights, self.region), context.bucket)

    def add(self, program: Program, units: Sequence[Unit], context: Any, names: Mapping[str, str]) -> None:
        """Take in a program, whose steps are these units. names: of each kernel hash."""
        calls = list[list[Step]]()                                           # launches; the first of a call's stands for them all
        for step in program.steps:
            if step.part: calls[-1].append(step)
            else: calls.append([step])
        if len(units) != len(calls):
            raise CheckFailed(f"{program.name} has steps of {len(calls)} calls for {len(units)} units")
        self.buckets[program.name] = dict(program.bucket)
        self._weight_bytes.update({b.tensor: b.bytes for b in program.buffers if b.kind == "weight"})
        self.steps[program.name] = [self._kernel(program, steps, unit, context, names[steps[0].kernel])
                                    for steps, unit in zip(calls, units, strict=True)]

    def _kernel(self, program: Program, steps: Sequence[Step], unit: Unit, context: Any, name: str) -> int:
        """The entry of a call. An ATen step's kernel says nothing of its sizes, so its buffers count as well; and calls of other sizes may
        begin with the same launch."""
        step, buffers = steps[0], [program.buffers[i] for i in steps[0].args]
        signature = tuple((one.kernel, *((b.kind, b.dtype, b.shape) for b in map(program.buffers.__getitem__, one.args))) for one in steps)
        if signature not in self._index:
            dims = sorted({d for b in buffers for s in b.shape if isinstance(s, str) and (d := s.partition("+")[0]) in context.bucket})

            def at(sizes: Mapping[str, int]) -> Count:
                return count(unit, replace(context, bucket={**context.bucket, **sizes}), self.weights, self.region)

            kind = kind_of(unit.op)
            decides = [b.dtype for b in buffers if b.kind == ("kv" if kind == "attention" else "weight")] or [b.dtype for b in buffers]
            found = formulas(at, dims, context.bucket)
            if kind == "gather" and any(b.kind == "weight" and not b.tensor.endswith(":plain") for b in buffers):
                found["weights"] = [[term[0] * PACKED_SPREAD, *term[1:]] for term in found["weights"]]
            self._index[signature] = len(self.kernels)
            dtype = _codes(unit) or (decides or [""])[0]
            many = {"bf16_rows": rows} if (rows := _given(unit).get("bf16_rows")) else {}
            self.kernels.append({"kernel": step.kernel, "name": name, "op": unit.op, "kind": kind, "dtype": dtype, **many, **found})
        return self._index[signature]

    def json(self, isa: str, dtype: str, kv_bytes_per_token: int, max_positions: int) -> dict[str, Any]:
        """The plain data of report.json["costs"]."""
        return {"kernels": self.kernels, "steps": self.steps, "buckets": self.buckets, "isa": isa, "dtype": dtype,
                "kv_bytes_per_token": kv_bytes_per_token, "weight_bytes": sum(self._weight_bytes.values()),
                "max_positions": max_positions}


def _given(unit: Unit) -> Mapping[str, Any]:
    """The arguments of a unit's operator, by name; empty where it is none of infc's."""
    return arguments(unit.nodes[0]) if len(unit.nodes) == 1 and operator_of(unit.nodes[0]) is not None else {}


def _codes(unit: Unit) -> str:
    """"w4a16" of a product of codes ("fp8a8" of e4m3): bits of the weight, bits of the rows; empty for any other unit."""
    given = _given(unit)
    if "act_bits" not in given: return ""
    return f"{'fp' if given['codes'].meta['val'].dtype == E4M3 else 'w'}{given['bits']}a{given['act_bits']}"
