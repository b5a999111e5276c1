"""The passes as a timeline: when each ran, what it did and refused, and how much of its error budget it used."""
from collections.abc import Mapping
from typing import Any


def timeline(report: Mapping[str, Any]) -> dict[str, Any]:
    """{"passes", "seconds" of them all, "phases": [[name, seconds]], "notes"} of an artifact's report.json.

    A pass has report.json's fields, and "start" (seconds after the first pass began), "used" (error / bound, None where either is
    not recorded), "state" ("fired", "idle", "dropped" or "skipped") and its refusals counted by reason.
    """
    passes, clock = [], 0.0
    for found in report["passes"]:
        passes.append(_pass(found, clock))
        clock += found["seconds"] + found["check_seconds"]
    phases = [[name, seconds] for name, seconds in report["seconds"].items() if name != "total"]
    return {"passes": passes, "seconds": clock, "phases": phases, "notes": report.get("notes", [])}


def _pass(found: Mapping[str, Any], start: float) -> dict[str, Any]:
    error, bound = found["error"], found.get("bound")
    used = error / bound if error is not None and isinstance(bound, (int, float)) and bound > 0 else None
    return {
        "name": found["name"], "contract": found["contract"], "fired": found["fired"], "error": error, "bound": bound, "used": used,
        "seconds": found["seconds"], "check_seconds": found["check_seconds"], "start": start, "state": _state(found),
        "promise": found.get("promise", ""), "why": found.get("dropped") or found.get("skipped") or "",
        "refused": _by_reason(found["refused"]), "misses": _by_reason(found.get("misses", [])),
    }


def _state(found: Mapping[str, Any]) -> str:
    for state in ("dropped", "skipped"):
        if found.get(state):
            return state
    return "fired" if found["fired"] else "idle"


def _by_reason(found: list[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Equal reasons once, with every site: thirty layers refuse for one reason."""
    sites: dict[str, list[str]] = {}
    for one in found:
        sites.setdefault(one["reason"], []).append(one["site"])
    return [{"reason": reason, "sites": where} for reason, where in sites.items()]
