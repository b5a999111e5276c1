"""Two measurements side by side: refused where they did not measure the same thing."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .errors import RuntimeFault
from .manifest import MANIFEST

MUST_AGREE = ("schema", "model", "contract", "workload")
SMALLER_IS_BETTER = ("_s", ".ms", "_bytes")  # how such a figure's name ends; tok_s, gb_s and prefill are rates
RATES = ("tok_s", "gb_s")
SHOWN = ("read_gb_s", "decode", "prefill", "cold", "warm", "memory")


def load(path: Path) -> dict[str, Any]:
    """A report that `infc bench -o` wrote. Raises RuntimeFault for anything else."""
    if path.exists() and (path.suffix == ".infc" or (path / MANIFEST).exists()):
        raise RuntimeFault(f"{path}: is an artifact, not a measurement; measure it first, with: infc bench {path} -o {path.stem}.json")
    try:
        report = json.loads(path.read_text())
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise RuntimeFault(f"{path}: cannot be read ({why}); give a file that `infc bench ARTIFACT -o FILE` wrote") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise RuntimeFault(f"{path}: is no JSON ({error}); give a file that `infc bench ARTIFACT -o FILE` wrote") from error
    missing = [name for name in (*MUST_AGREE, *SHOWN) if not isinstance(report, dict) or name not in report]
    if missing:
        raise RuntimeFault(f"{path}: is no measurement, it has no {missing[0]!r}; give a file that `infc bench ARTIFACT -o FILE` wrote")
    findings = report.get("findings", [])                # files of before have none
    if not (isinstance(findings, list) and all(isinstance(line, str) for line in findings)):
        raise RuntimeFault(f"{path}: is no measurement, its findings are {findings!r}; "
                           "give a file that `infc bench ARTIFACT -o FILE` wrote")
    return report


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """{"ratios": {name: {"before", "after", "ratio", "better"}}, "machine": fields of the environment that differ, "findings": what either
    says of itself}.

    ratio is after / before. Raises RuntimeFault, which names the field, where workload or contract differ.
    """
    for name, a, b in _differences({k: before[k] for k in MUST_AGREE}, {k: after[k] for k in MUST_AGREE}):
        raise RuntimeFault(f"these cannot be compared: {name} is {a} in the first and {b} in the second")
    ratios: dict[str, dict[str, Any]] = {}
    figures = dict(_numbers({k: after[k] for k in SHOWN}))
    for name, old in _numbers({k: before[k] for k in SHOWN}):
        new = figures.get(name)
        if new is None or not old:
            continue
        ratio = new / old
        better = ratio < 1 if smaller_is_better(name) else ratio > 1
        ratios[name] = {"before": old, "after": new, "ratio": ratio, "better": better}
    machine = {name: [a, b] for name, a, b in _differences(before.get("environment", {}), after.get("environment", {})) if name != "load"}
    findings = [f"{which}: {line}" for which, report in (("first", before), ("second", after)) for line in report.get("findings", ())]
    return {"ratios": ratios, "machine": machine, "findings": findings}


def smaller_is_better(name: str) -> bool:
    """Of times and sizes less is better; of rates and shares more."""
    last = name.rpartition(".")[2]
    if last in ("p50", "p90", "p99"):
        last = name.split(".")[-2]
    return not last.endswith(RATES) and f".{last}".endswith(SMALLER_IS_BETTER)


def _numbers(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, entry in value.items():
        if isinstance(entry, Mapping):
            yield from _numbers(entry, f"{prefix}{name}.")
        elif isinstance(entry, (int, float)):
            yield prefix + name, entry


def _differences(a: Any, b: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted name, value in a, value in b) wherever the two differ."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in dict.fromkeys([*a, *b]):
            yield from _differences(a.get(key, "missing"), b.get(key, "missing"), f"{name}.{key}".lstrip("."))
    elif a != b:
        yield name, a, b
