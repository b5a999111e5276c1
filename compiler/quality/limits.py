"""Limits of quality: `ppl<=+1%`, `kl<=0.02`, several with commas between them."""
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..errors import UserError, nearest

METRICS = {
    "ppl": ("<=", "perplexity on held-out text: +1% is about the captured model's, a plain number is the perplexity itself"),
    "kl": ("<=", "mean KL(captured || compiled) of next-token distributions, in nats"),
    "kl_p99": ("<=", "the KL that 99 of 100 tokens stay below, in nats"),
    "top1": (">=", "share of tokens where both have the same likeliest one, 0..1 or in %"),
    "retrieval": (">=", "of the facts that the captured model finds far back in a prompt, the share that ours finds too"),
    "json": (">=", "of the prompts that the captured model answers with JSON that parses, the share that ours does too"),
    "layer": ("<=", "largest relative error of any quantized weight's product, ||x(W - W')|| / ||xW||"),
}
"""Metric -> the way its limit points, and what it is."""

DEFAULT = "ppl<=+5%,kl<=0.1"
"""What a compile must hold without --quality. SmolLM2-135M on the held-out text: bf16 costs 0.0002 nats, w8 0.001 and 0.04 % of perplexity;
one layer with doubled scales 0.03 to 0.11 nats; w4 rounded to nearest, which is another model, 0.36 nats and 28 %."""

BROKEN_LAYER = 0.5
"""What `layer` must hold whatever else is asked, unless it is limited otherwise: half of a product is error. Rounding to nearest costs
0.005 in 8 bits and about 0.1 in 4, doubled scales 1; one such layer near the end of a model costs less perplexity than DEFAULT allows."""

_LIMIT = re.compile(
    r"\s*(?P<metric>\w+)\s*(?P<op><=|>=|<|>|==|=)\s*(?P<sign>[+-]?)(?P<number>\d+(?:\.\d*)?(?:e-?\d+)?|\.\d+)\s*(?P<unit>%?)\s*", re.ASCII)


@dataclass(frozen=True)
class Limit:
    """One limit. relative: `limit` is a share of the captured model's own figure that may be added (0.01 for +1%)."""

    metric: str
    limit: float
    relative: bool = False

    def __str__(self) -> str:
        return f"{self.metric}{METRICS[self.metric][0]}" + (f"{100 * self.limit:+.6g}%" if self.relative else f"{self.limit:.6g}")

    def most(self, reference: float) -> float:
        """The figure at which the limit lies, for the captured model's own figure (of perplexity)."""
        return reference * (1 + self.limit) if self.relative else self.limit

    def holds(self, value: float, reference: float) -> bool:
        """Does the figure keep the limit? NaN never does."""
        most = self.most(reference)
        return value <= most if METRICS[self.metric][0] == "<=" else value >= most


def parse(text: str) -> list[Limit]:
    """The limits of their text. UserError, naming the part, for what is none."""
    limits = [_one(part, text) for part in text.split(",")]
    names = [limit.metric for limit in limits]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice: raise UserError(f"--quality {text!r} limits {twice} twice: keep one of them")
    return limits


def _one(part: str, text: str) -> Limit:
    found = _LIMIT.fullmatch(part)
    if not found or not math.isfinite(float(found["number"])):
        raise UserError(f"--quality {text!r}: {part.strip()!r} is no limit; write METRIC<=NUMBER, a finite one, like ppl<=+1% or kl<=0.02")
    metric = found["metric"]
    if metric not in METRICS:
        raise UserError(f"--quality {text!r}: unknown metric {metric!r}; {nearest(metric, METRICS)}")
    direction = METRICS[metric][0]
    if found["op"] != direction:
        raise UserError(f"--quality {text!r}: a limit of {metric} is written {metric}{direction}NUMBER")
    number = float(found["number"]) / (100 if found["unit"] else 1)
    relative = metric == "ppl" and bool(found["unit"])
    if relative != bool(found["sign"]) or found["sign"] == "-":
        raise UserError(f"--quality {text!r}: {part.strip()!r} is no limit; " + (
            "a perplexity is limited as ppl<=+1%, a share more than the captured model's, or as ppl<=25" if metric == "ppl"
            else f"a limit of {metric} has no sign, like {metric}{direction}{0.98 if direction == '>=' else 0.02}"))
    if found["unit"] and metric.startswith("kl"):
        raise UserError(f"--quality {text!r}: {metric} is in nats, not in %, like {metric}<=0.02")
    if direction == ">=" and not number <= 1:
        raise UserError(f"--quality {text!r}: {metric} is a share, 0..1 or 0%..100%, like {metric}>=0.98")
    return Limit(metric, number, relative)


def broken(limits: Sequence[Limit], figures: Mapping[str, float], reference: float) -> list[str]:
    """One text for each limit that does not hold: `ppl 31.2 (+12.4%), ppl<=+5% allows 29.2`. reference: the captured model's perplexity."""
    found = []
    for limit in limits:
        value = figures[limit.metric]
        if limit.holds(value, reference): continue
        change = f" ({100 * (value / reference - 1):+.3g}%)" if limit.metric == "ppl" else ""
        found.append(f"{limit.metric} {value:.4g}{change}, {limit} allows {limit.most(reference):.4g}")
    return found
