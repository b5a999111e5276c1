"""The models a card is tried with: their sizes, how they are made with random weights, and how they are compiled."""
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infc.models import table

TRIED = (2, 6)
"""Layers of a model too large to compile in minutes: two measurements of it give what a layer costs, and what the rest does."""


@dataclass(frozen=True)
class Sizes:
    """A decoder's sizes. `known`: its name among infc's models; `family`: of transformers."""

    family: str
    layers: int
    vocab: int
    hidden: int
    ffn: int
    q_heads: int
    kv_heads: int
    head: int
    positions: int
    tied: bool
    theta: float
    eps: float
    known: str = ""
    tried: tuple[int, ...] = TRIED

    @property
    def layer(self) -> int:
        """Weights of the products of one layer."""
        return (2 * self.q_heads + 2 * self.kv_heads) * self.head * self.hidden + 3 * self.hidden * self.ffn

    def parameters(self, layers: int) -> int:
        """Of the matrices."""
        return layers * self.layer + (1 if self.tied else 2) * self.vocab * self.hidden

    def prefill_flops(self, layers: int, tokens: int) -> int:
        """A prompt's products and attention, and the head for its last token."""
        attention = 2 * tokens * tokens * self.q_heads * self.head         # two products over the half of the pairs that is seen
        return layers * (2 * tokens * self.layer + attention) + 2 * self.vocab * self.hidden

    def spec(self, layers: int) -> str:
        """What `infc compile` calls it."""
        return f"random:{self.known}" + (f"?layers={layers}" if layers != self.layers else "")

    def transformers(self, layers: int) -> Any:
        """transformers' own module, random weights, on torch's current device and in its current dtype."""
        import transformers

        kind = {"llama": "Llama", "qwen2": "Qwen2"}[self.family]
        config = getattr(transformers, f"{kind}Config")(
            vocab_size=self.vocab, hidden_size=self.hidden, intermediate_size=self.ffn, num_hidden_layers=layers,
            num_attention_heads=self.q_heads, num_key_value_heads=self.kv_heads, head_dim=self.head, rms_norm_eps=self.eps,
            max_position_embeddings=self.positions, tie_word_embeddings=self.tied, bos_token_id=1, eos_token_id=2,
            rope_parameters={"rope_type": "default", "rope_theta": self.theta}, attn_implementation="sdpa")
        return getattr(transformers, f"{kind}ForCausalLM")(config).eval().requires_grad_(False)


def _known(name: str, tried: tuple[int, ...] = TRIED) -> Sizes:
    c = table()[name].config
    return Sizes("llama", c["layers"], c["vocab_size"], c["hidden_size"], c["intermediate_size"], c["q_heads"], c["kv_heads"],
                 c["head_dim"], c["max_positions"], c["tied"], c["rope_theta"], c["rms_eps"], name, tried)


MODELS = {
    "Llama-3.1-8B": _known("llama-8b"),
    "Llama-3.2-1B": _known("llama-1b", (16,)),                            # whole
    # huggingface.co/Qwen/Qwen2.5-7B config.json
    "Qwen2.5-7B": Sizes("qwen2", 28, 152_064, 3584, 18_944, 28, 4, 128, 131_072, False, 1e6, 1e-6),
    "tiny": _known("tiny", (1,)),
}
"""What speed is measured on; `tiny` where there is no card."""


def compiled(request: Mapping[str, Any], begin: Callable[[str], None], tell: Callable[[dict[str, Any]], None]) -> None:
    """Compile a model for a card; tell one row: seconds of each phase, memory at the peak, what was verified.

    request: model (a name `infc compile` knows, or a key of MODELS), layers (of the latter), target, path, quant, kv, buckets (none: the
    target's), check; brief: two golden prompts instead of five, for on two cores those of a head of 128,256 rows take minutes; host: the
    programs are tried on this CPU with reference operators, else nothing is, for the card will say.
    """
    os.nice(10)                                                           # what is measured beside it goes first
    import resource

    from infc import passes
    from infc.compiler import driver, verification
    from infc.compiler.options import Options, pass_options
    from infc.compiler.pipeline import run_pipeline

    begin(request["name"])
    start = time.perf_counter()
    if request["brief"]: verification.SHORT = (9,)
    quant, kv = request["quant"], request["kv"]
    options = Options(
        target=request["target"], quant=quant, kv_quant=kv, unverified=(quant, kv) != ("none", "none"),
        quant_method="auto" if quant == "none" else "rtn", buckets=tuple(request["buckets"]) or None,
        check=request["check"], reuse=False, force=True)

    def rewrite(graph: Any) -> Any:
        return run_pipeline(
            graph, passes.pipeline(options.dtype, options.quant != "none", options.kv_quant != "none"), allow=options.allow,  # type: ignore
            check=options.check, options=pass_options(options) | {"pays": None}, needed=passes.NEEDED)                        # type: ignore

    def verified(folder: Path, bounds: Any) -> dict[str, Any]:
        if not request["host"]: return {"replayed": False}
        from gpu_program import on_host

        return on_host(folder, bounds, request["times"])

    model, layers = request["model"], request["layers"]
    if layers: model = MODELS[model].spec(layers) if MODELS[model].known else MODELS[model].transformers(layers)
    result = driver.compile(model, request["path"], options=options, hooks=driver.Hooks(rewrite, verified),
                            on_event=lambda event: begin(f"{request['name']}: {event.name}") if event.kind == "phase" else None)
    tell({"name": request["name"], "path": str(result.artifact), "phases": result.seconds, "seconds": round(time.perf_counter() - start, 2),
          "verify": result.verify, "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
          "aten_steps": max(p["aten_steps"] for p in result.program.values())})
