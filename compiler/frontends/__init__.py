"""Frontends: whatever the user has -> one Graph. `capture` tells them apart."""
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UserError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ..ir import Graph
    from ..kept import Kept
    from .kept_graph import KeptGraph
    from .torch_module import Dynamic

Progress = Callable[[str], None]

DECODER_DIMS = {"input_ids": {0: "B", 1: "S"}, "position_ids": {0: "B", 1: "S"}}
EXAMPLE = (5, 7)
"""(batch, length) decoders are exported at: 2 or more and unequal, since 0, 1 and equal sizes would be baked in."""


def capture(spec: "str | Path | nn.Module", inputs: "Sequence[Tensor] | None" = None, dynamic: "Dynamic | None" = None, *,
            outputs: Sequence[str] | None = None, progress: Progress = lambda line: None, cache: "Kept | None" = None) -> "Graph":
    """A Graph of a model: a name (`infc models`), `random:NAME?layers=N`, a .gguf file, a Hugging Face folder, or a module.

    Decoders become (input_ids [B, S], position_ids [B, S]) -> logits, with batch and length dynamic, in fp32 whatever their weights came
    in. A module of another kind needs example `inputs`, and `dynamic` names its dynamic axes: {"x": {0: "B"}}. cache: graphs that earlier
    compiles captured. Raises UserError (exit 2) with one line for what cannot be captured, CheckFailed when the graph is not the module.
    """
    from torch import nn

    if not isinstance(spec, nn.Module):
        return capture_decoder(*load(spec, progress), progress, _known(spec, cache, progress) if cache else None)
    if inputs is None:
        from .widened import widened

        return capture_decoder(*_decoder_module(widened(spec, progress)), progress)
    from .torch_module import capture_module

    meta = {"name": type(spec).__name__, "source": {"kind": "module"}}
    return capture_module(spec, inputs, dynamic, outputs=outputs, meta=meta)


def load(spec: str | Path, progress: Progress = lambda line: None) -> "tuple[nn.Module, dict[str, Any]]":
    """(the model as a module in eval mode, its Graph.meta) for a name or a path: all of a frontend but the capture."""
    from ...models import ModelError, find

    path = Path(spec)
    try:
        found = find(str(spec))                                   # a known name wins over a folder called the same: write ./tiny
    except ModelError as error:
        if not path.exists():
            raise UserError(str(error)) from error
        found = None
    if found is not None:
        from . import known

        return known.load(found, progress)
    if not path.exists():
        raise UserError(f"{path} does not exist")
    progress(f"reading {path.name}")
    if path.is_dir():
        from . import huggingface

        return huggingface.load(path, progress)
    if path.suffix != ".gguf":
        raise UserError(f"{path.name}: a .gguf file, a Hugging Face folder or the name of a model is expected")
    try:
        from . import gguf
    except ImportError as error:
        raise UserError("a .gguf file needs the gguf package: pip install 'infc[gguf]'") from error
    return gguf.load(path)


def _known(spec: str | Path, cache: "Kept", progress: Progress) -> "KeptGraph | None":
    """Where the graph of a model is kept: by its content, our sources, and the libraries that take part."""
    from .. import kept, keys
    from .identity import identity
    from .kept_graph import KeptGraph

    content = identity(spec)
    return KeptGraph(cache, kept.key("captured", content, EXAMPLE, *keys.libraries()), progress) if content else None


def capture_decoder(
    module: "nn.Module", meta: "dict[str, Any]", progress: Progress = lambda line: None, known: "KeptGraph | None" = None,
) -> "Graph":
    """A stateless decoder, (input_ids, position_ids) -> logits, as a Graph with dims B and S."""
    from .samples import DecoderSamples
    from .torch_module import capture_module

    progress(f"capturing {meta['name']}")
    samples = DecoderSamples(meta["vocab_size"], meta["max_positions"])
    graph = capture_module(module, samples.at(*EXAMPLE), DECODER_DIMS, outputs=["logits"], meta=meta, samples=samples,
                           prefix="hf.", known=known)
    graph.blocks = getattr(module, "blocks", {})                  # of a GGUF: what can be kept as it is
    return graph


def _decoder_module(module: "nn.Module") -> "tuple[nn.Module, dict[str, Any]]":
    from ...models.llama import Llama

    if isinstance(module, Llama):
        from .model_meta import llama_meta

        return module, llama_meta(module.config) | {"name": "llama", "source": {"kind": "module"}}
    if type(module).__module__.startswith("transformers."):
        from . import huggingface

        return huggingface.stateless(module)
    name = type(module).__name__
    raise UserError(f"{name} is no decoder infc knows: give example inputs, capture(module, inputs=(x,), dynamic={{'x': {{0: 'B'}}}})")
