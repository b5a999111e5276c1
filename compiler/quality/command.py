"""`infc quality`: an artifact on a text, beside the model it was made of or another artifact; and two such measurements side by side."""
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ... import models
from ...runtime.artifact import Artifact, read
from ...runtime.manifest import MANIFEST
from ...runtime.session import Model, load
from ..errors import UserError
from . import gate
from .evaluate import ArtifactEvaluator, CapturedEvaluator, Evaluator

SCHEMA = 1
MUST_AGREE = ("model", "against", "data_sha256", "windows", "length", "tokens")
FIGURES = {"ppl": False, "ppl_change": False, "kl": False, "kl_p99": False, "top1": True, "bits_per_weight": False,
           "retrieval.share": True, "json.share": True}
"""What is compared, and whether more is better."""

Note = Callable[[str], object]


def measure(
    path: Path, *, data: Path | None, against: str | None, windows: int | None = None, threads: int | None = None,
    note: Note = lambda line: None,
) -> dict[str, Any]:
    """The report of one artifact, plain data.

    data: a text or a JSON file of token ids; None: the text that travels with infc. against: a model or an artifact; "none" measures
    perplexity alone; None takes the model that the manifest names, where infc knows it. UserError where these do not fit each other.
    """
    size = gate.FULL if windows is None else replace(gate.FULL, windows=windows)
    with load(path, threads=threads) as loaded:
        manifest = loaded.manifest
        model = gate.Model(manifest.model.name, manifest.model.vocab, loaded.limits.positions)
        held = gate.read_data(data, _tokenizer(loaded.artifact), model, size)
        reference, name, close = _reference(loaded, against, threads, note)
        try:
            ours = ArtifactEvaluator(loaded)
            found = gate.measure(ours, reference, held, size, model.max_positions, generate=ours.generate, note=note)
        finally:
            close()
    recorded = manifest.quality
    return {"schema": SCHEMA, "artifact": str(path), "model": model.name, "version": manifest.version, "dtype": manifest.dtype,
            "bits_per_weight": None if recorded is None else recorded.bits_per_weight, "against": name, **found}


def _tokenizer(artifact: Artifact) -> str | None:
    return artifact.tokenizer().decode() if artifact.manifest.tokenizer else None


def _reference(
    loaded: Model, against: str | None, threads: int | None, note: Note,
) -> tuple[Evaluator | None, str | None, Callable[[], None]]:
    """(what to compare with, its name, how to let go of it)."""
    if against == "none": return None, None, lambda: None
    manifest = loaded.manifest
    if against is not None and _is_artifact(Path(against)):
        other = load(against, threads=threads)
        if _tokenizer(other.artifact) != _tokenizer(loaded.artifact) or other.manifest.model.vocab != manifest.model.vocab:
            other.close()
            raise UserError(f"{against} has another vocabulary than {loaded.artifact.path}: only models of one tokenizer can be compared")
        return ArtifactEvaluator(other), f"{other.manifest.model.name} {other.manifest.version[:12]}", other.close
    spec = against or _known(manifest.model.name)
    if spec is None:
        note(f"{manifest.model.name} is no model that infc knows: perplexity alone; name its source with --against")
        return None, None, lambda: None
    from ..frontends import capture

    note(f"capturing {spec}")
    captured = capture(spec)
    source = ":".join(str(v) for v in (captured.meta.get("source") or {}).values())
    if int(captured.meta["vocab_size"]) != manifest.model.vocab:
        raise UserError(f"{spec} has {captured.meta['vocab_size']} tokens in its vocabulary, {loaded.artifact.path} has "
                        f"{manifest.model.vocab}: it was compiled from another model; name that one with --against")
    if against is None and source != manifest.model.source:
        raise UserError(f"{loaded.artifact.path} is called {manifest.model.name}, but was compiled from another source than the model infc "
                        "knows by that name: name its source with --against, or --against none")
    return CapturedEvaluator(captured), str(captured.meta["name"]), lambda: None


def _is_artifact(path: Path) -> bool:
    return path.suffix == ".infc" or (path / MANIFEST).is_file()


def _known(name: str) -> str | None:
    try:
        return name if models.find(name) is not None else None
    except models.ModelError:
        return None


def load_report(path: Path) -> dict[str, Any]:
    """What `infc quality -o` saved, or what a compile measured and put into its artifact. UserError for anything else."""
    if _is_artifact(path):
        with read(path) as artifact:
            manifest, recorded = artifact.manifest, artifact.report().get("quality")
        if not recorded or not recorded.get("verified"):
            raise UserError(f"{path}: nothing was measured when it was compiled; measure it: infc quality {path} -o {path.stem}.json")
        name = manifest.model.name
        return {"artifact": str(path), "model": name, "version": manifest.version, "against": name, **recorded}
    try:
        report = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({(error.strerror or str(error)).lower()}); give an artifact, or what "
                        "`infc quality ARTIFACT -o FILE` wrote") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: is no JSON ({error}); give an artifact, or what `infc quality ARTIFACT -o FILE` wrote") from error
    missing = next((name for name in (*MUST_AGREE, "ppl") if not isinstance(report, dict) or name not in report), None)
    if missing:
        raise UserError(f"{path}: is no measurement of quality, it has no {missing!r}; give what `infc quality ARTIFACT -o FILE` wrote")
    return report


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """{"figures": {name: {"before", "after", "better"}}}; better is None where nothing moved.

    UserError, which names the field, where they measured another model, text, or amount of it.
    """
    for name in MUST_AGREE:
        if before[name] != after[name]:
            raise UserError(f"these cannot be compared: {name} is {before[name]} in the first and {after[name]} in the second")
    figures = {}
    for name, more in FIGURES.items():
        a, b = (_figure(report, name) for report in (before, after))
        if a is None or b is None: continue
        figures[name] = {"before": a, "after": b, "better": None if a == b else (b > a) == more}
    return {"before": before["artifact"], "after": after["artifact"], "figures": figures}


def _figure(report: Mapping[str, Any], name: str) -> float | None:
    found: Any = report
    for part in name.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found
