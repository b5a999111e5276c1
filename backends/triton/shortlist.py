"""Which candidates of each call stay: those that were built, the likeliest few, and the rule's; the likeliest runs."""
from collections.abc import Sequence
from typing import Any

import msgspec

from ...compiler.errors import CheckFailed
from ...compiler.targets import Gpu
from ...runtime.program import Candidate, Choice, Program
from ..program import Store
from .backend import GpuLaunch
from .ranking import candidate_of
from .registry import Work

SHORTLIST = 3
"""Candidates that stay, the rule's beside them: what `infc tune` measures."""


def choose(store: Store, programs: Sequence[Program], gpu: Gpu) -> tuple[list[Program], dict[str, Any]]:
    """The programs with shortlists, each call in its likeliest cut, and what became of the candidates; of the store's kernels only those
    that some step or candidate runs are left.

    CheckFailed where none of a call's candidates can run.
    """
    works = {hashed: launch.made.work for hashed, launch in store.launches.items()
             if isinstance(launch, GpuLaunch) and launch.made and launch.made.work}
    built, dropped, chosen = len(store.kernels), list[dict[str, str]](), list[Program]()
    for program in programs:
        choices = [_shortlist(choice, program, store, works, gpu, dropped) for choice in program.choices]
        chosen.append(program.with_choices(choices))
    used = {step.kernel for program in chosen for steps in (program.steps, *(c.steps for o in program.choices for c in o.candidates))
            for step in steps}
    store.kernels = {hashed: kernel for hashed, kernel in store.kernels.items() if hashed in used}
    return chosen, {"kernels_tried": built, "kernels_kept": len(used), "dropped": dropped}


def _shortlist(
    choice: Choice, program: Program, store: Store, works: dict[str, Work], gpu: Gpu, dropped: list[dict[str, str]],
) -> Choice:
    unique = program.steps[choice.calls[0].step].bytes
    found, reasons = list[Candidate](), list[str]()
    for candidate in choice.candidates:
        if why := next((store.refused[step.kernel] for step in candidate.steps if step.kernel in store.refused), ""):
            dropped.append({"bucket": program.name, "op": choice.op, "candidate": candidate.name, "reason": why})
            reasons.append(why)
        else: found.append(candidate_of(candidate, store.kernels, works, unique, gpu))
    if not found: raise CheckFailed(reasons[0])
    ranked = sorted(found, key=lambda candidate: candidate.predicted_us)          # stable: of equals the rule's, which is the first
    rule = choice.candidates[0].name
    kept = [one for at, one in enumerate(ranked) if at < SHORTLIST or one.name == rule]
    return msgspec.structs.replace(choice, candidates=tuple(kept), chosen=0)
