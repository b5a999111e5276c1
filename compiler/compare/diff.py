"""What differs between two dump stages or two artifacts. Reads data, runs nothing, needs no torch.

A change is one of: appeared, vanished, dtype (of a value), kernel or backend (of a step). Changes that differ only in the number of
their layer are one, with a count.
"""
import json
import re
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...runtime.artifact import Artifact, read
from ...runtime.manifest import GPU, MANIFEST
from ...runtime.program import Kernel, Step
from ..errors import UserError, nearest
from .metrics import Metrics, PeaksOf, is_aten, of_artifact, of_stage

_NUMBER = re.compile(r"(?<![A-Za-z0-9])\d+(?![A-Za-z0-9])")
_IDENTITY = ("name", "dtype", "target", "contract", "isa", "machine", "created_with")


@dataclass(frozen=True)
class Change:
    """One difference. `where`: module paths or a placeholder's name; `detail`: what became what."""

    kind: str                      # "appeared" | "vanished" | "dtype" | "backend" | "kernel"
    what: str
    where: str
    detail: str = ""

    def folded(self) -> "Change":
        """The same for any layer."""
        return Change(self.kind, self.what, fold(self.where), self.detail)


def fold(path: str) -> str:
    """`model.layers.7.mlp` as `model.layers.*.mlp`, `k_cache_7` as `k_cache_*`."""
    return _NUMBER.sub("*", path.replace("_", "\0")).replace("\0", "_")


def compare(a: Path | str, b: Path | str, *, bench: Sequence[Mapping[str, Any]] = (), peaks: PeaksOf = lambda isa: None) -> dict[str, Any]:
    """Both sides' difference as plain data.

    {"kind": "stages" | "artifacts", "a", "b", "differ": {field: [in A, in B]}, "changes": [{"kind", "what", "where", "detail", "count"}],
     "metrics": {name: {"before", "after"}}, "notes": [...]}; a metric known of one side only is None on the other.
    bench: what `infc bench -o` wrote of A and of B. peaks: see `of_artifact`. Raises UserError and RuntimeFault, one line each, for
    what cannot be read or compared.
    """
    paths = Path(a), Path(b)
    kinds = [is_artifact(path) for path in paths]
    if kinds[0] != kinds[1]:
        stage, artifact = (a, b) if kinds[1] else (b, a)
        raise UserError(f"{stage} is a dump stage and {artifact} an artifact: compare two of a kind")
    if kinds[0]:
        return _artifacts(*paths, bench, peaks)
    if bench:
        raise UserError("--bench is about artifacts; these are dump stages")
    return _stages(*paths)


def _result(kind: str, paths: Sequence[Path], differ: Mapping[str, Any], changes: Iterator[Change] | list[Change],
            metrics: tuple[Metrics, Metrics], notes: Sequence[str]) -> dict[str, Any]:
    alike: dict[Change, list[Change]] = {}
    for change in changes: alike.setdefault(change.folded(), []).append(change)
    before, after = metrics
    return {
        "kind": kind, "a": str(paths[0]), "b": str(paths[1]), "differ": dict(differ),
        "changes": [{**vars(folded if len(all_) > 1 else all_[0]), "count": len(all_)} for folded, all_ in alike.items()],
        "metrics": {name: {"before": before.get(name), "after": after.get(name)} for name in dict.fromkeys([*before, *after])},
        "notes": list(notes),
    }


# ---------------------------------------------------------------------------------------------------------------- stages

def is_artifact(path: Path) -> bool:
    """Is the path an artifact's, rather than a dump stage's?"""
    return (path / MANIFEST).exists() or path.suffix == ".infc" or (path.is_file() and path.suffix not in (".json", ".txt", ".py"))


def stage_file(path: Path) -> Path:
    """The JSON file of a stage named by it, its twins .txt and .py, its bare name, or its number: DIR/07."""
    if path.is_dir():
        stages = sorted(p.stem for p in path.glob("[0-9][0-9]-*.json"))
        if not stages:
            raise UserError(f"{path} is neither an artifact nor a dump: it has no {MANIFEST} and no 00-captured.json")
        raise UserError(f"{path} is a whole dump: name one of its stages, {path / stages[0]} to {path / stages[-1]}")
    file = path.with_suffix(".json") if path.suffix in (".json", ".txt", ".py") else path.with_name(path.name + ".json")
    if file.is_file():
        return file
    numbered = sorted(path.parent.glob(f"{path.name}-*.json")) if path.name.isdigit() else []
    if numbered:
        return numbered[0]
    there = [p.stem for p in path.parent.glob("[0-9][0-9]-*.json")] if path.parent.is_dir() else []
    hint = nearest(path.stem, there) if there else "dumps are made with: infc compile MODEL --dump DIR; artifacts with: infc compile MODEL"
    raise UserError(f"{path}: no such stage; {hint}")


def read_stage(path: Path) -> dict[str, Any]:
    """A stage's JSON. Raises UserError for a file that is none."""
    file = stage_file(path)
    try:
        stage = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read as a stage ({error}): make the dump again") from error
    if not isinstance(stage, dict) or not {"nodes", "weights", "name"} <= stage.keys():
        raise UserError(f"{file} is no dump stage: give NN-PASS.json of a folder that `infc compile --dump` made")
    return stage


def _stages(a: Path, b: Path) -> dict[str, Any]:
    before, after = read_stage(a), read_stage(b)
    differ = {name: [before[name], after[name]] for name in ("dialect", "inputs", "outputs") if before[name] != after[name]}
    return _result("stages", (stage_file(a), stage_file(b)), differ, graph_changes(before, after), (of_stage(before), of_stage(after)), ())


def graph_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Change]:
    """The changes between two graphs as data: calls by module and operator, weights, inputs and caches by name."""
    for kind in ("input", "kv", "weight"):
        old, new = ({n["name"]: n for n in g["nodes"] if n["kind"] == kind} for g in (before, after))
        yield from _values(kind, {name: [n] for name, n in old.items()}, {name: [n] for name, n in new.items()})
    old, new = (_grouped((((", ".join(n["origin"]) or "no module"), n["target"]), n) for n in g["nodes"] if n["kind"] == "call")
                for g in (before, after))
    for key in dict.fromkeys([*old, *new]):
        where, target = key
        yield from _values(target, {where: old.get(key, [])}, {where: new.get(key, [])})


def _values(what: str, old: Mapping[str, Sequence[Mapping[str, Any]]], new: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[Change]:
    """Nodes of one name or place paired in order: what is left over vanished or appeared, what is paired may have another dtype."""
    for where in dict.fromkeys([*old, *new]):
        olds, news = old.get(where, ()), new.get(where, ())
        for left, right in zip(olds, news, strict=False):
            if _dtypes(left["type"]) != _dtypes(right["type"]):
                yield Change("dtype", what, where, f"{_dtypes(left['type'])} -> {_dtypes(right['type'])}")
        for gone in olds[len(news):]: yield Change("vanished", what, where, gone["type"])
        for made in news[len(olds):]: yield Change("appeared", what, where, made["type"])


def _dtypes(type_text: str) -> str:
    """`f32[T,576]` as `f32`: another shape is no other dtype."""
    return re.sub(r"\[[^\]]*\]", "", type_text)


def _grouped(pairs: Any) -> dict[Any, list[Any]]:
    groups: dict[Hashable, list[Any]] = {}
    for key, value in pairs: groups.setdefault(key, []).append(value)
    return groups


# ------------------------------------------------------------------------------------------------------------- artifacts

def _artifacts(a: Path, b: Path, bench: Sequence[Mapping[str, Any]], peaks: PeaksOf) -> dict[str, Any]:
    notes: list[str] = []
    measured = _comparable(bench, notes)
    with read(a) as before, read(b) as after:
        metrics = of_artifact(before, measured[0], peaks), of_artifact(after, measured[1], peaks)
        for name, x, bench_of in zip("AB", (before, after), measured, strict=True):
            if x.manifest.machine == GPU:
                times = "prefill_ms" if bench_of else "decode_ms and prefill_ms"
                notes.append(f"{times} of {name}: predicted from the data sheet of {x.manifest.target}, the least that the card allows")
        fields = {name: [getattr(x.manifest, name) for x in (before, after)] for name in _IDENTITY}
        graphs = [x.report().get("graphs", {}).get("final") for x in (before, after)]
        if not all(graphs): notes.append("an older infc compiled one of them and kept no graph in it: graph changes are not shown")
        changes = [*(graph_changes(*graphs) if all(graphs) else ()), *_program_changes(before, after)]
    return _result("artifacts", (a, b), {name: pair for name, pair in fields.items() if pair[0] != pair[1]}, changes, metrics, notes)


def _comparable(bench: Sequence[Mapping[str, Any]], notes: list[str]) -> tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]:
    """Measurements of A and B. Raises UserError when they are not of the same work; another machine is noted."""
    if not bench: return None, None
    a, b = bench
    for name in ("schema", "workload"):
        if a.get(name) != b.get(name):
            raise UserError(f"the --bench files cannot be compared: {name} is {a.get(name)} in the first and {b.get(name)} in the second")
    cpus = [x.get("environment", {}).get("cpu") for x in bench]
    if cpus[0] != cpus[1]: notes.append(f"measured on different machines: {cpus[0]} and {cpus[1]}")
    notes += [f"--bench of {name}: {line}" for name, x in zip("AB", bench, strict=True) for line in x.get("findings", ())]
    return a, b


def _program_changes(before: Artifact, after: Artifact) -> Iterator[Change]:
    """Buckets that came or went; then, of the buckets both have, steps with another kernel. A change in all buckets is told once."""
    old, new = ({bucket.name for bucket in x.manifest.buckets} for x in (before, after))
    for name in sorted(old - new): yield Change("vanished", "bucket", "program", name)
    for name in sorted(new - old): yield Change("appeared", "bucket", "program", name)
    shared = [bucket.name for bucket in before.manifest.buckets if bucket.name in new]
    per_bucket = [list(_step_changes(before, after, name, name)) for name in shared]
    if not shared:
        if not (before.manifest.buckets and after.manifest.buckets): return
        smallest = [min(x.manifest.buckets, key=lambda bucket: bucket.bucket["T"]).name for x in (before, after)]
        per_bucket = [list(_step_changes(before, after, *smallest))]
    common = sum((Counter(changes) for changes in per_bucket[:1]), Counter())
    for changes in per_bucket[1:]: common &= Counter(changes)
    yield from common.elements()
    for name, changes in zip(shared, per_bucket, strict=False):
        for change in (Counter(changes) - common).elements():
            yield Change(change.kind, change.what, f"{change.where} in {name.replace('_', ' ')}", change.detail)


def _step_changes(before: Artifact, after: Artifact, old_name: str, new_name: str) -> Iterator[Change]:
    old, new = (_steps(x, name) for x, name in ((before, old_name), (after, new_name)))
    for key in dict.fromkeys([*old, *new]):
        where, op = key
        olds, news = old.get(key, []), new.get(key, [])
        for left, right in zip(olds, news, strict=False):
            if left[0] != right[0]: yield Change("backend", f"step {op}", where, f"{left[0]} -> {right[0]}")
            if left[1] != right[1]: yield Change("kernel", f"step {op}", where, f"{left[1]} -> {right[1]}")
        for gone in olds[len(news):]: yield Change("vanished", f"step {op}", where, gone[1])
        for made in news[len(olds):]: yield Change("appeared", f"step {op}", where, made[1])


def _steps(artifact: Artifact, name: str) -> dict[tuple[str, str], list[tuple[str, str]]]:
    """(module paths, operator) -> [(backend, kernel's name), ...] in order."""
    kernels = {kernel.hash: kernel for kernel in artifact.manifest.kernels}
    pairs = []
    for step in artifact.program(name).steps:
        kernel = kernels[step.kernel]
        backend = "aten" if is_aten(kernel) else "loops" if step.op.startswith("loop.") else artifact.manifest.target
        pairs.append(((", ".join(step.origin) or "no module", step.op), (backend, _label(kernel, step))))
    return _grouped(pairs)


def _label(kernel: Kernel, step: Step) -> str:
    """A kernel's name; on a GPU with what its code takes, and where it is launched."""
    if not kernel.file: return kernel.name
    return (f"{kernel.name} ({kernel.arch}, {kernel.registers} registers, {kernel.shared_bytes} bytes shared, {kernel.threads} threads, "
            f"grid {'x'.join(map(str, step.grid))})")
