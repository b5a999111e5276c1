"""Budgets of a pull request: `decode_ms>+2%,memory>+5%,unfused>0` says what must not come true of B beside A.

    budget  = metric op limit         joined by commas
    op      = > >= < <= == !=
    limit   = NUMBER [kB|MB|GB]       of B itself          unfused>0       weights>300MB
            | +NUMBER or -NUMBER      of B minus A         kernels>+2      steps<-10
            | +NUMBER% or -NUMBER%    of (B - A) / A       memory>+5%      fired.fuse_rope<-0%
"""
import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass

from ..errors import UserError, nearest
from .metrics import METRICS, Metrics, unit_of

_OPS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge, "<=": operator.le, "==": operator.eq, "!=": operator.ne, ">": operator.gt, "<": operator.lt}
_PEAKS = "run `infc explain` here once: times are predicted from the peaks it measures"
_HINTS = {"bench": "give --bench A.json B.json", "prefill_ms": _PEAKS,
          "decode_ms": f"measure both with `infc bench -o` and give --bench A.json B.json, or {_PEAKS}"}
_SCALE = {"": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9}
_FORM = re.compile(r"\s*([\w.\-]+)\s*(>=|<=|==|!=|>|<)\s*([+-]?)(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)\s*(%|kB|MB|GB|)\s*")


@dataclass(frozen=True)
class Budget:
    """One condition that must not hold."""

    text: str
    metric: str
    op: str
    limit: float
    kind: str                      # "value" of B | "change", B - A | "share", (B - A) / A

    def broken(self, a: Metrics, b: Metrics) -> bool:
        """Does the condition hold? A share of nothing is 0 where B is nothing too, else infinite."""
        old, new = a.get(self.metric, 0.0), b[self.metric]
        if self.kind == "value": found = new
        elif self.kind == "change": found = new - old
        else: found = share(old, new)
        return _OPS[self.op](found, self.limit)


def share(old: float, new: float) -> float:
    """(new - old) / |old|; 0 where both are nothing, infinite where only the old one is."""
    if old: return (new - old) / abs(old)
    return 0.0 if new == old else float("inf") if new > 0 else float("-inf")


def amount(value: float, unit: str) -> str:
    """`10.3 ms`, `104 MB`, `14`."""
    if unit == "B":
        for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1)):
            if abs(value) >= scale:
                return f"{value / scale:.4g} {unit}"
    return f"{value:.6g} {unit}".rstrip()


def change_text(old: float, new: float) -> str:
    """`+5.0%` for a person; `x9665` where a share says nothing."""
    change = share(old, new)
    return f"x{new / old:.4g}" if old > 0 and change >= 10 else f"{change:+.1%}"


def parse(text: str) -> list[Budget]:
    """The budgets of a --fail-on. Raises UserError that shows the part it cannot read."""
    parts = [part for part in text.split(",") if part.strip()]
    if not parts:
        raise UserError("--fail-on is empty: give budgets like decode_ms>+2%,memory>+5%,unfused>0")
    return [_budget(part) for part in parts]


def _budget(part: str) -> Budget:
    form = _FORM.fullmatch(part)
    if form is None:
        raise UserError(f"cannot read the budget {part.strip()!r}: give METRIC OP LIMIT, like decode_ms>+2%, unfused>0 or weights>300MB "
                        "(quote it, the shell takes > for itself)")
    metric, op, sign, number, unit = form.groups()
    if unit == "%" and not sign:
        raise UserError(f"the budget {part.strip()!r} needs a sign: {metric}{op}+{number}% or {metric}{op}-{number}%")
    if unit in ("kB", "MB", "GB") and unit_of(metric) != "B":
        raise UserError(f"the budget {part.strip()!r} gives bytes, but {metric} is no number of bytes")
    limit = float(sign + number) * (0.01 if unit == "%" else _SCALE[unit])
    if not math.isfinite(limit):
        raise UserError(f"the budget {part.strip()!r} has no finite limit")
    return Budget(part.strip(), metric, op, limit, "share" if unit == "%" else "change" if sign else "value")


def judge(text: str, a: Metrics, b: Metrics, note: Callable[[str], object] = lambda line: None) -> list[dict[str, object]]:
    """The broken budgets: [{"budget", "metric", "before", "after", "text"}].

    An operator that is not called, and a pass that only one side ran, count 0; `note` gets a line about an operator that neither calls.
    Raises UserError for a metric nobody knows, and for one that is not known of these two: a budget is never passed unseen.
    """
    budgets, a, b = parse(text), dict(a), dict(b)
    for budget in budgets:
        _known(budget, a, b, note)
    for one in budgets:
        if any(math.isnan(side.get(one.metric, 0.0)) for side in (a, b)):
            raise UserError(f"the budget {one.text!r} cannot be judged: {one.metric} is not a number")
    return [{"budget": one.text, "metric": one.metric, "before": a.get(one.metric), "after": b[one.metric],
             "text": f"{one.metric} is {_shown(one.metric, a, b)}: breaks {one.text}"} for one in budgets if one.broken(a, b)]


def _known(budget: Budget, a: Metrics, b: Metrics, note: Callable[[str], object]) -> None:
    name, (family, _, op) = budget.metric, budget.metric.partition(".")
    nowhere = name not in a.keys() | b.keys()
    if family == "calls" and op.count(".") and nowhere and "nodes" in a.keys() & b.keys():
        note(f"neither graph calls {op}: the budget {budget.text} counts 0")
        nowhere = False
    if family in ("fired", "refused", "calls") and not nowhere:
        a.setdefault(name, 0.0)
        b.setdefault(name, 0.0)
    needed = [(side, found) for side, found in (("A", a), ("B", b)) if budget.kind != "value" or side == "B"]
    missing = [side for side, found in needed if name not in found]
    if not missing:
        return
    if name not in METRICS and nowhere and family not in ("bench", "calls"):
        close = nearest(name, {m for m in METRICS if "." not in m} | a.keys() | b.keys())
        hint = close if close.startswith("did") else nearest("", METRICS)
        raise UserError(f"unknown metric {name!r} in the budget {budget.text!r}; {hint} (infc diff --metrics says what they are)")
    why = _HINTS.get("bench" if family == "bench" else name, "an older infc compiled it, or it is of the other kind: stage, artifact")
    raise UserError(f"the budget {budget.text!r} cannot be judged: {name} is not known of {' and '.join(missing)}; {why}")


def _shown(name: str, a: Metrics, b: Metrics) -> str:
    new = amount(b[name], unit_of(name))
    return f"{new}, was {amount(a[name], unit_of(name))} ({change_text(a[name], b[name])})" if name in a else new
