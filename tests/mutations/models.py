"""Small models that between them have every feature a fault can hit; no size is a multiple of a vector, so every tail is run."""
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from golden import trace
from infc.compiler.frontends import capture_decoder
from infc.compiler.frontends.model_meta import UNKNOWN
from infc.compiler.ir import Graph
from torch import Tensor, nn

WIDTH, FFN, VOCAB, HEADS, KV, HEAD, POSITIONS = 73, 83, 77, 4, 2, 16, 320


@dataclass(frozen=True)
class Style:
    """What tells one decoder from another. windows: one entry a layer, 0 sees all; rotary: channels of a head that turn."""

    windows: tuple[int, ...] = (0,)
    softcap: float = 0.0
    final_cap: float = 0.0
    bias: bool = False
    interleaved: bool = False
    rotary: int = HEAD
    act: str = "silu"
    gated: bool = True
    norm: str = "rms"
    post_norm: bool = False                              # norms on what a block adds, as in Gemma 2
    eager: bool = False                                  # softmax(q k) v spelled out
    sinks: bool = False                                  # a learned logit a head in each softmax, as in gpt-oss
    skip: bool = False                                   # the embedding is added again at the end: a value that lives long
    twins: bool = False                                  # every token has a double with the same logits


class Norm(nn.Module):
    def __init__(self, style: Style):
        super().__init__()
        self.style, self.weight, self.shift = style, nn.Parameter(torch.randn(WIDTH) * 0.3 + 0.2), nn.Parameter(torch.randn(WIDTH) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        if self.style.norm == "layer": return F.layer_norm(x, (WIDTH,), self.weight, self.shift, 0.02)
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 0.02) * (1 + self.weight)


class Layer(nn.Module):
    def __init__(self, style: Style, window: int):
        super().__init__()
        self.style, self.window = style, window
        self.before, self.between, self.after_attention, self.after_ffn = (Norm(style) for _ in range(4))
        self.q, self.k, self.v = (nn.Linear(WIDTH, heads * HEAD, style.bias) for heads in (HEADS, KV, KV))
        self.out = nn.Linear(HEADS * HEAD, WIDTH, style.bias)
        self.sinks = nn.Parameter(torch.randn(HEADS) * 2) if style.sinks else None
        self.gate, self.up, self.down = (nn.Linear(*size, style.bias) for size in ((WIDTH, FFN), (WIDTH, FFN), (FFN, WIDTH)))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        added = self.attend(self.before(x), cos, sin)
        x = x + (self.after_attention(added) if self.style.post_norm else added)
        added = self.feed(self.between(x))
        return x + (self.after_ffn(added) if self.style.post_norm else added)

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (p(x).view(batch, length, -1, HEAD).transpose(1, 2) for p in (self.q, self.k, self.v))
        q, k = self.turn(q, cos, sin), self.turn(k, cos, sin)
        k, v = (t[:, :, None].expand(-1, -1, HEADS // KV, -1, -1).reshape(batch, HEADS, length, HEAD) for t in (k, v))
        i, j = torch.arange(length)[:, None], torch.arange(length)[None, :]
        seen = (j <= i) & (i - j < self.window) if self.window else j <= i
        if self.style.eager:
            scores = q @ k.transpose(-1, -2) / math.sqrt(HEAD)
            if self.style.softcap: scores = self.style.softcap * torch.tanh(scores / self.style.softcap)
            scores = scores.masked_fill(~seen, -math.inf)
            if self.sinks is not None:
                scores = torch.cat((scores, self.sinks.reshape(1, -1, 1, 1).expand(batch, -1, length, -1)), -1)
            y = scores.softmax(-1)[..., :length] @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return self.out(y.transpose(1, 2).reshape(batch, length, -1))

    def turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        turned, rest = x[..., : self.style.rotary], x[..., self.style.rotary :]
        if self.style.interleaved:
            swung = torch.stack((-turned[..., 1::2], turned[..., 0::2]), -1).flatten(-2)
        else:
            a, b = turned.chunk(2, -1)
            swung = torch.cat((-b, a), -1)
        turned = turned * cos + swung * sin
        return torch.cat((turned, rest), -1) if self.style.rotary < HEAD else turned

    def feed(self, x: Tensor) -> Tensor:
        act = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": functools.partial(F.gelu, approximate="tanh")}[self.style.act]
        return self.down(act(self.gate(x)) * self.up(x) if self.style.gated else act(self.gate(x)))


class Decoder(nn.Module):
    """(input_ids, position_ids) [B, S] -> logits [B, S, VOCAB], the head tied to the embedding."""

    frequencies: Tensor

    def __init__(self, style: Style):
        super().__init__()
        torch.manual_seed(0)
        self.style, self.embed, self.norm = style, nn.Embedding(VOCAB, WIDTH), Norm(style)
        self.layers = nn.ModuleList(Layer(style, window) for window in style.windows)
        self.register_buffer("frequencies", 10.0 ** (-torch.arange(style.rotary // 2) / 3))
        with torch.no_grad():
            for name, weight in self.named_parameters():
                if weight.dim() > 1 and "embed" not in name: weight.mul_(3)      # attention that is not the plain average
            if style.twins: self.embed.weight[1::2] = self.embed.weight[0:-1:2]

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = first = self.embed(input_ids)
        angle = position_ids[:, None, :, None].float() * self.frequencies
        angle = torch.stack((angle, angle), -1).flatten(-2) if self.style.interleaved else torch.cat((angle, angle), -1)
        for layer in self.layers: x = layer(x, angle.cos(), angle.sin())
        logits = F.linear(self.norm(x + first if self.style.skip else x), self.embed.weight)
        return self.style.final_cap * torch.tanh(logits / self.style.final_cap) if self.style.final_cap else logits


STYLES = {
    "llama": Style(),
    "deep": Style(windows=(0, 0)),
    "gemma": Style(windows=(20,), softcap=2.0, final_cap=4.0, act="gelu_tanh", post_norm=True, eager=True),
    "mistral": Style(windows=(20,), act="gelu", bias=True),
    "gptj": Style(bias=True, interleaved=True, rotary=8, act="gelu", gated=False, norm="layer"),
    "gptoss": Style(windows=(20, 0), sinks=True, eager=True),
    "skip": Style(skip=True),
    "twins": Style(twins=True),
}


# ---------------------------------------------------------------------------------------- functions, for what decoders lack

def _norm_fp16(x: Tensor) -> Tensor:
    wide = x.float()
    return _WEIGHT.to(x.dtype) * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def _top_left(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _capped_after_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    seen = torch.ones(q.shape[-2], k.shape[-2]).tril().bool()
    return (5 * torch.tanh((q @ k.transpose(-1, -2)).masked_fill(~seen, -math.inf) / 5)).softmax(-1) @ v


def _other_column(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A column beside the scores of which another one is cut off: no sinks."""
    sinks = torch.tensor([0.5, -1.0]).reshape(1, 2, 1, 1).expand(1, -1, q.shape[2], -1)
    return torch.cat((q @ k.transpose(-1, -2), sinks), -1).softmax(-1)[..., 1:] @ v


def _tiled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """kv heads as h0 h1 h0 h1, which is no grouped-query attention."""
    return F.scaled_dot_product_attention(torch.cat((q, -q), 1), k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1))


def _sample_variance(x: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True, unbiased=True) + 1e-5) * _WEIGHT


def _returned_product(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x @ _SQUARE
    return y, y + x


def _near_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(0.7978845608028654 * (x + 0.05 * x.pow(3))))


_WEIGHT = torch.linspace(0.5, 1.5, 24)
_SQUARE = torch.randn(24, 24, generator=torch.Generator().manual_seed(3))
_ROWS = {0: "B", 1: "S"}
_LENGTHS = ({2: "S"}, {2: "L"}, {2: "L"})


def _heads(*lengths: int) -> list[Tensor]:
    return [torch.randn(1, 2, n, 8, generator=torch.Generator().manual_seed(n)) for n in lengths]


def _rows(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(3, 5, 24, generator=torch.Generator().manual_seed(1)).to(dtype)]


FUNCTIONS: dict[str, Callable[[], Graph]] = {
    "norm in fp16": lambda: trace(_norm_fp16, *(300 * x for x in _rows(torch.float16)), dynamic=(_ROWS,)),
    "more keys than queries": lambda: trace(_top_left, *_heads(3, 5, 5), dynamic=_LENGTHS),
    "cap after mask": lambda: trace(_capped_after_mask, *_heads(5, 5, 5)),
    "another column": lambda: trace(_other_column, *_heads(3, 5, 5), dynamic=_LENGTHS),
    "tiled heads": lambda: trace(_tiled, *_heads(3, 5, 5), dynamic=_LENGTHS),
    "sample variance": lambda: trace(_sample_variance, *_rows(), dynamic=(_ROWS,)),
    "returned product": lambda: trace(_returned_product, *_rows(), dynamic=(_ROWS,)),
    "near gelu": lambda: trace(_near_gelu, *_rows()),
    "cube": lambda: trace(lambda x: x.pow(3) + x.pow(2), *_rows()),
    "scaled addmm": lambda: trace(lambda x: torch.addmm(_WEIGHT, x.flatten(0, 1), _SQUARE, beta=2), *_rows()),
    "mean of rows": lambda: trace(lambda x: x.mean(1), torch.randn(4, 8, 8)),
}


@functools.cache
def captured(name: str) -> Graph:
    """The captured graph of a model by name; take a copy before changing it."""
    if name in FUNCTIONS: return FUNCTIONS[name]()
    meta = dict(UNKNOWN) | {"name": name, "vocab_size": VOCAB, "max_positions": POSITIONS, "source": {"kind": "module"}}
    return capture_decoder(Decoder(STYLES[name]).eval(), meta)
