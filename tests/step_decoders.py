"""Small decoders with any mask, window, bias or sinks, (input_ids, position_ids) -> logits, captured as Graphs for the step passes."""
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from golden import trace
from infc.compiler.ir import Graph
from infc.compiler.pipeline import run_pipeline
from infc.passes import load
from torch import Tensor, nn

VOCAB, WIDTH, HEADS, KV, HEAD = 61, 24, 4, 2, 8


class Decoder(nn.Module):
    """Embedding, `windows` layers (0: plain causal), tied head. `bias`: an additive mask from positions, say ALiBi. `sinks`: one logit a
    head in each softmax, in every layer, spelled as gpt-oss does."""

    def __init__(self, windows: tuple[int, ...] = (0, 0), bias: Callable[[Tensor, Tensor], Tensor] | None = None, softcap: float = 0.0,
                 causal: bool = True, learned_positions: int = 0, sinks: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.windows, self.bias, self.softcap, self.causal = windows, bias, softcap, causal
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.places = nn.Embedding(learned_positions, WIDTH) if learned_positions else None
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, (HEADS + 2 * KV) * HEAD, bias=False) for _ in windows)
        self.out = nn.ModuleList(nn.Linear(HEADS * HEAD, WIDTH) for _ in windows)
        self.up = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH) for _ in windows)
        self.down = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in windows)
        self.norm = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.sinks = nn.ParameterList(torch.randn(HEADS) for _ in windows) if sinks else None

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        if self.places is not None: x = x + self.places(position_ids)
        cos, sin = self.angles(position_ids)
        for layer, window in enumerate(self.windows): x = self.layer(x, cos, sin, layer, window)
        logits = F.linear(self.normed(x), self.embed.weight)
        return self.softcap * torch.tanh(logits / self.softcap) if self.softcap else logits

    def layer(self, x: Tensor, cos: Tensor, sin: Tensor, layer: int, window: int) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv[layer](self.normed(x)).view(batch, length, -1, HEAD).transpose(1, 2).split((HEADS, KV, KV), 1)
        if self.places is None: q, k = self.turned(q, cos, sin), self.turned(k, cos, sin)
        k, v = (t[:, :, None].expand(-1, -1, HEADS // KV, -1, -1).reshape(batch, HEADS, length, HEAD) for t in (k, v))
        if self.sinks is None: y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask(length, window))
        else: y = self.sunk(q, k, self.mask(length, window), self.sinks[layer]) @ v
        x = x + self.out[layer](y.transpose(1, 2).reshape(batch, length, -1))
        return x + self.down[layer](F.gelu(self.up[layer](self.normed(x))))

    @staticmethod
    def sunk(q: Tensor, k: Tensor, seen: Tensor, sinks: Tensor) -> Tensor:
        scores = (q @ k.transpose(2, 3) * HEAD**-0.5).masked_fill(~seen, -math.inf)
        logits = torch.cat([scores, sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], -1)], -1)
        return F.softmax(logits - logits.max(-1, keepdim=True).values, -1)[..., :-1]

    def mask(self, length: int, window: int) -> Tensor:
        i, j = torch.arange(length)[:, None], torch.arange(length)[None, :]
        seen = (j <= i) if self.causal else (j < length) & (i < length)
        if window: seen = seen & (i - j < window)
        if self.bias is None: return seen
        return torch.zeros(length, length).masked_fill(~seen, -math.inf) + self.bias(i, j)

    def normed(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * self.norm

    @staticmethod
    def angles(position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angle = position_ids[:, None, :, None].float() * (10.0 ** -torch.arange(HEAD // 2))
        angle = torch.cat((angle, angle), -1)
        return angle.cos(), angle.sin()

    @staticmethod
    def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat((-b, a), -1) * sin


def batch(rows: int, length: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Token ids and positions [rows, length]."""
    ids = torch.randint(VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))
    return ids, torch.arange(length).repeat(rows, 1)


def decoder(*passes: str, module: nn.Module | None = None, **settings: object) -> Graph:
    """A captured Decoder after the named passes (canonicalize first)."""
    module = module or Decoder(**settings)  # type: ignore[arg-type]
    graph = trace(module, *batch(2, 7), dynamic=({0: "B", 1: "S"},) * 2, names=("input_ids", "position_ids"))
    graph.outputs, graph.meta = ["logits"], {"vocab_size": VOCAB, "max_positions": 128}
    graph.sample_inputs = lambda: [batch(1, 5), batch(3, 2), batch(1, 1)]
    run_pipeline(graph, [load(name) for name in ("canonicalize", *passes)], check="off")
    return graph
