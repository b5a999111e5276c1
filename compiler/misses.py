"""Why did it not fuse? What passes fired, refused and nearly matched, from a compile's list of passes; and counts that are pinned.

A pass here is the JSON of `pipeline.PassResult`: {"name", "fired", "refused": [{"site", "reason"}], "misses": [...], ...}. A pass
that stands twice in the pipeline is one entry, its runs added up.
"""
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .compare.diff import fold
from .errors import CheckFailed, UserError, nearest

PassJson = Mapping[str, Any]


def total(passes: Iterable[PassJson], name: str) -> dict[str, Any]:
    """{"name", "fired", "refused", "misses"} of one pass over all its runs. Raises UserError for a name that is not there."""
    listed = list(passes)
    check_name(name, [one["name"] for one in listed])
    runs = [one for one in listed if one["name"] == name]
    return {"name": name, "fired": sum(one["fired"] for one in runs), **{key: [entry for one in runs for entry in one.get(key) or ()]
                                                                         for key in ("refused", "misses")}}


ASKED_FOR = {"narrow_dtype": "--dtype bf16 or fp16", "quantize_kv": "--kv-quant"} | dict.fromkeys(
    ("smooth_channels", "quantize_weights", "quantize_activations", "fuse_quantized_linear", "fuse_norm_quantized"), "--quant")
"""Passes that run only where an option of a compile asks for them."""


def check_name(name: str, known: Iterable[str]) -> None:
    """Raises UserError where no pass that runs has this name: with the option that asks for it, or the nearest of `known`."""
    if name in (names := set(known)): return
    if name in ASKED_FOR: raise UserError(f"{name} does not run here: it is for {ASKED_FOR[name]}; ask of an artifact that was compiled so")
    raise UserError(f"no pass is called {name!r}: {nearest(name, names)}")


def places(nodes: Iterable[Mapping[str, Any]], name: str) -> list[dict[str, Any]]:
    """Where the pass left its mark in a graph (`graph_json`'s nodes), layers folded: [{"where": "model.layers.*.mlp", "nodes": 30}]."""
    found: dict[str, int] = {}
    for node in nodes:
        if name in node["passes"]:
            where = fold((node["origin"] or [node["name"]])[0])
            found[where] = found.get(where, 0) + 1
    return [{"where": where, "nodes": count} for where, count in found.items()]


def of_artifact(report: Mapping[str, Any], name: str, where: str) -> dict[str, Any]:
    """One pass of an artifact, from its report.json. Raises UserError where the artifact does not hold near misses."""
    found = total(report["passes"], name)
    if any("misses" not in one for one in report["passes"] if one["name"] == name):
        raise UserError(f"{where}: an older infc made it and kept no near misses; ask of the model itself, or compile it again")
    return found | {"places": places(report["graphs"]["final"]["nodes"], name)}


def check_expected(passes: Sequence[PassJson], expected: Iterable[tuple[str, int]], model: str = "MODEL") -> None:
    """Raises CheckFailed, naming pass, expected and found count and the nearest miss; UserError for an unknown pass."""
    for name, count in expected:
        found = total(passes, name)
        if found["fired"] != count:
            raise CheckFailed(f"{name} was expected to fire {count} times and fired {found['fired']} times; {_nearest_miss(found, model)}")


def _nearest_miss(found: Mapping[str, Any], model: str) -> str:
    if found["misses"]:
        miss = max(found["misses"], key=lambda m: m["matched"] / m["of"])
        return f"it came nearest at {miss['site']}, {miss['matched']} of {miss['of']} operators: {miss['reason']}"
    if found["refused"]:
        return f"it refused {found['refused'][0]['site']}: {found['refused'][0]['reason']}"
    return f"nothing else looked like one (all of it: infc explain {model} --pass {found['name']})"


def counts(text: Sequence[str], known: Iterable[str]) -> tuple[tuple[str, int], ...]:
    """["fuse_rms_norm=61"] as (("fuse_rms_norm", 61),). Raises UserError for another form or an unknown pass."""
    known, found = set(known), []
    for one in text:
        name, equals, count = one.partition("=")
        if not equals or not count.isdecimal():
            raise UserError(f"--expect is {one!r}: give a pass and how often it fires, like fuse_rms_norm=61")
        check_name(name, known)
        found.append((name, int(count)))
    return tuple(found)
