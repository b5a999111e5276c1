"""Launches of the row kernels at the sizes of real models, on meta tensors: what a build has to make."""
from dataclasses import dataclass
from typing import Any

import torch
from infc.backends.triton.registry import Emit, Launch
from torch import Tensor
from triton_env import kernels, several


@dataclass(frozen=True)
class Sizes:
    """A decoder's sizes."""

    hidden: int
    q_heads: int
    kv_heads: int
    head: int
    ffn: int
    vocab: int


SMOLLM2 = Sizes(576, 9, 3, 64, 1536, 49_152)                 # SmolLM2-135M
LLAMA_8B = Sizes(4096, 32, 8, 128, 14_336, 128_256)


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def launches(op: str, **arguments: Any) -> list[Launch]:
    found, emit = kernels()[op], Emit()
    assert found.refuse(**arguments) is None
    found.lower(emit, *several(found.call(**arguments)), **arguments)
    return emit.launches


def rows(size: Sizes, tokens: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, list[Launch]]:
    """Every row kernel of a step over `tokens` tokens, by what it is."""
    x, w = meta(tokens, size.hidden, dtype=dtype), meta(size.hidden, dtype=dtype)
    angle = meta(tokens, size.head // 2, dtype=torch.float32)
    slots = meta(tokens, dtype=torch.int32)
    cache = {f"{name}_cache": meta(64, size.kv_heads, 32, size.head, dtype=dtype) for name in "kv"}
    q, kv = meta(1, size.q_heads, tokens, size.head, dtype=dtype), meta(1, size.kv_heads, tokens, size.head, dtype=dtype)
    heads = {"q_heads": size.q_heads, "kv_heads": size.kv_heads}
    table, four = meta(size.vocab, size.hidden, dtype=dtype), meta(4, dtype=torch.float32)
    found = {
        "rms_norm": launches("infc::rms_norm", x=x, w=w, eps=1e-5),
        "add_rms_norm": launches("infc::add_rms_norm", x=x, residual=x, w=w, eps=1e-5),
        "layer_norm": launches("infc::layer_norm", x=x, w=w, b=w, eps=1e-5),
        "rms_norm_quantized": launches("infc::rms_norm_quantized", x=x, w=w, eps=1e-5, group=0, e4m3=False),
        "add_rms_norm_quantized": launches("infc::add_rms_norm_quantized", x=x, residual=x, w=w, eps=1e-5, group=32, e4m3=False),
        "layer_norm_quantized": launches("infc::layer_norm_quantized", x=x, w=w, b=w, eps=1e-5, group=32, e4m3=False),
        "kv_write": launches("infc::kv_write", k=meta(tokens, size.kv_heads, size.head, dtype=dtype),
                             v=meta(tokens, size.kv_heads, size.head, dtype=dtype), slots=slots, **cache),
        "embedding": launches("aten::embedding", weight=table, indices=meta(1, tokens, dtype=torch.int64)),
        "index_select": launches("aten::index_select", self=x, dim=0, index=meta(4, dtype=torch.int32)),
        "cast": launches("aten::_to_copy", self=x, dtype=torch.float32 if dtype != torch.float32 else torch.bfloat16),
        "sample": launches("infc::sample", logits=meta(4, size.vocab, dtype=torch.float32), temperature=four,
                           top_k=meta(4, dtype=torch.int32), top_p=four, uniform=four),
    }
    for act in ("silu", "gelu", "gelu_tanh"):
        found[f"swiglu-{act}"] = launches("infc::swiglu", gate_up=meta(tokens, 2 * size.ffn, dtype=dtype), act=act)
    for interleaved in (False, True):
        kind = "interleaved" if interleaved else "halves"
        found[f"rope-{kind}"] = launches("infc::rope", q=q, k=kv, cos=angle, sin=angle, interleaved=interleaved)
        qkv = meta(tokens, (size.q_heads + 2 * size.kv_heads) * size.head, dtype=dtype)
        found[f"rope_kv_write-{kind}"] = launches("infc::rope_kv_write", qkv=qkv, cos=angle, sin=angle, slots=slots,
                                                  interleaved=interleaved, **heads, **cache)
    return found
