"""Everything the page shows, as plain data: read from an artifact, none of whose code is run."""
from collections.abc import Mapping
from typing import Any

from ...runtime.artifact import Artifact
from ...runtime.manifest import BLOCK
from ..costs import levers
from ..costs.peaks import Peaks
from .families import FAMILIES
from .graphs import graphs
from .memory import memory_map
from .pipeline import timeline
from .roofline import phases, roofline, speeds
from .tables import bucket_table, choice_table, head, kernel_table


def collect(artifact: Artifact, peaks: Peaks | None = None, measured: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The data behind the page.

    peaks: of the machine that predictions are for; without them there are none. measured: what was found by running the artifact:
    {"golden": runtime.golden.GoldenReport as data, "kernels": roofline.Measured, "phases": {phase name: seconds},
    "findings": what is to be said of it}.
    Raises RuntimeFault when a file of the artifact is damaged.
    """
    manifest, report = artifact.manifest, artifact.report("passes", "coverage", "graph_error", "seconds")
    programs = [artifact.program(bucket.name) for bucket in manifest.buckets]
    size = sum(info.bytes for info in manifest.files.values())
    dropped = (report.get("candidates") or {}).get("dropped", ())
    return {
        "head": head(manifest, report, size) | {"kv_token": sum(kv.block_bytes for kv in manifest.kv) // BLOCK},
        "families": FAMILIES, "pipeline": timeline(report), "graph": graphs(report.get("graphs", {})),
        "memory": {program.name: memory_map(program) for program in programs},
        "buckets": bucket_table(manifest, programs),
        "kernels": {program.name: kernel_table(manifest, program) for program in programs},
        "choices": {program.name: choice_table(manifest, program, dropped) for program in programs},
        **_speed(report.get("costs"), peaks, measured), "measured": measured,
    }


def _speed(costs: Mapping[str, Any] | None, peaks: Peaks | None, measured: Mapping[str, Any] | None) -> dict[str, Any]:
    if not costs or not peaks:
        missing = "This artifact holds no costs: compile the model again" if not costs else "No peaks of the target machine are known here"
        return {"roofline": None, "no_roofline": f"{missing}, so no speed is predicted.", "speed": [], "levers": []}
    plotted = phases(costs)
    changed = dict.fromkeys((*(p for p in plotted if p.kind == "prefill"), *levers.phases_for(costs)))
    return {"roofline": roofline(costs, peaks, plotted, measured["kernels"] if measured else None),
            "speed": speeds(costs, peaks, plotted), "levers": levers.bounds(costs, changed, peaks), "worth": levers.WORTH}
