"""What several commands take, and what is said where it is not right."""
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ..errors import UserError

if TYPE_CHECKING:
    from ...runtime.session import Model

Artifact = Annotated[Path, typer.Argument(metavar="ARTIFACT", help="what `infc compile` wrote: NAME.infc", show_default=False)]
ModelName = Annotated[str, typer.Argument(help="a name from `infc models`, a Hugging Face folder, a GGUF file", show_default=False)]
Dtype = Literal["bf16", "fp16", "fp32"]
Json = Annotated[bool, typer.Option("--json", help="one JSON document on stdout")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="no progress, no tables")]
Threads = Annotated[int | None, typer.Option(min=1, help="threads to use [default: one a core]", show_default=False)]


def existing(artifact: Path) -> Path:
    """The path, if it may be an artifact; else an error that says how to make one of it."""
    from ... import models

    if artifact.exists():
        if artifact.suffix == ".gguf" or (artifact / "config.json").exists():
            raise UserError(f"{artifact} is a model, not an artifact: compile it first, with: infc compile {artifact}")
        return artifact
    if str(artifact) in models.table() or str(artifact).startswith("random:"):
        raise UserError(f"{artifact} is a model, not an artifact: compile it first, with: infc compile {artifact}")
    near = [p.name for p in artifact.parent.glob("*.infc")] if artifact.parent.is_dir() else []
    hint = f"; there {'is' if len(near) == 1 else 'are'} {', '.join(sorted(near)[:5])}" if near else "; `infc compile MODEL` makes one"
    raise UserError(f"{artifact}: no such artifact{hint}")


def load_model(artifact: Path, threads: int | None, *, text: bool = False) -> "Model":
    from ...runtime.session import load

    return load(existing(artifact), threads=threads, text=text)


def counts(name: str, text: str) -> tuple[int, ...]:
    """ "1,16,256" as numbers."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise UserError(f"--{name} is {text!r}: give whole numbers with commas between them, like 1,16,256") from error


def given_counts(name: str, text: str | None) -> tuple[int, ...] | None:
    """As `_counts`; None where the option was not given."""
    return None if text is None else counts(name, text)
