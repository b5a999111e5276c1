"""Tiny decoders for pass tests, captured and brought to any point of the pipeline."""
import torch
import torch.nn.functional as F
from golden import trace
from infc import passes
from infc.compiler.frontends.samples import DecoderSamples
from infc.compiler.ir import Graph
from infc.models.llama import Llama, LlamaConfig
from torch import Tensor, nn

VOCABULARY = 48


def config(**changes) -> LlamaConfig:
    """Two layers, 4 query heads on 2 kv heads."""
    given = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "layers": 2, "q_heads": 4, "kv_heads": 2,
             "head_dim": 8, "max_positions": 64} | changes
    return LlamaConfig(**given)


def llama(**changes) -> Llama:
    """A seeded Llama."""
    torch.manual_seed(0)
    return Llama(config(**changes)).eval()


class OneLayer(nn.Module):
    """Embedding, one attention with rotary positions, head. `heads` says how q, k, v [B,S,H,D] come out of one product."""

    q_heads, kv_heads, head = 4, 2, 8

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        width = (self.q_heads + 2 * self.kv_heads) * self.head
        self.embed, self.qkv = nn.Embedding(VOCABULARY, 32), nn.Linear(32, width)
        self.out = nn.Linear(self.q_heads * self.head, VOCABULARY)
        self.register_buffer("inv_freq", torch.tensor([1.0, 0.3, 0.1, 0.03]))

    def heads(self, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return y.unflatten(-1, (-1, self.head)).split((self.q_heads, self.kv_heads, self.kv_heads), 2)  # type: ignore[return-value]

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        angle = positions[:, None, :, None].float() * self.inv_freq
        angle = torch.cat((angle, angle), -1)
        a, b = x.chunk(2, -1)
        return x * angle.cos() + torch.cat((-b, a), -1) * angle.sin()

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.heads(self.qkv(self.embed(input_ids))))
        q, k = self.rotate(q, position_ids), self.rotate(k, position_ids)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


def captured(model: nn.Module) -> Graph:
    """The decoder's graph as a frontend gives it."""
    ids, positions = torch.randint(VOCABULARY, (2, 7)), torch.arange(7).repeat(2, 1)
    dims = {0: "B", 1: "S"}
    graph = trace(model.eval(), ids, positions, dynamic=(dims, dims), names=("input_ids", "position_ids"))
    graph.outputs, graph.sample_inputs = ["logits"], DecoderSamples(VOCABULARY, 64)
    graph.meta = {"max_positions": 64, "vocab_size": VOCABULARY}
    return graph


def before(graph: Graph, name: str) -> Graph:
    """The graph after every pass that stands before `name` in the pipeline."""
    for one in passes.PIPELINE[: passes.PIPELINE.index(name)]:
        passes.load(one).apply(graph)
    return graph
