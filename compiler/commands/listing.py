"""`infc targets` and `infc models`; and what is installed, for `infc --version`."""
import contextlib

from .arguments import Json
from .output import plain, print_json


def list_targets(as_json: Json = False) -> None:
    """List the machines infc compiles for."""
    from .. import console, targets

    here = targets.host().name
    rows = [
        {
            "name": t.name,
            "kind": t.kind,
            "isa": t.isa,
            "description": t.description,
            "source": t.source,
            "kv_formats": t.kv_formats,
            "runs_here": None if t.gpu else not targets.missing(t),    # of a GPU the compiler cannot say
            "gpu": t.gpu,
        }
        for t in targets.TARGETS.values()
    ]
    if as_json:
        print_json({"host": here, "targets": rows})
    else:
        console.listed_targets(here, plain(rows))


def list_models(as_json: Json = False) -> None:
    """List the known models."""
    from ...models import table as known

    rows = [
        {"name": m.name, "about": m.about, "license": m.license, "config": m.config, "weights": "real" if m.source else "random"}
        for m in known().values()
    ]
    if as_json:
        print_json({"models": rows})
        return
    from ..console import table

    table(
        "models; a Hugging Face folder or a GGUF file works too",
        ("name", "weights", "license", "what it is"),
        [(r["name"], r["weights"], r["license"], r["about"]) for r in rows],
    )


def versions() -> dict[str, str | None]:
    """Of infc, Python, torch and Triton as they are installed, None of what is not; nothing is imported for it."""
    import platform
    from importlib import metadata

    found: dict[str, str | None] = {"infc": None, "python": platform.python_version(), "torch": None, "triton": None}
    for name in ("infc", "torch", "triton"):
        with contextlib.suppress(metadata.PackageNotFoundError): found[name] = metadata.version(name)
    return found
