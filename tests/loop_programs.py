"""Random small tensor programs whose every operation is exact, so that two right executions agree bit for bit."""
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SIZES = (1, 2, 3, 5, 16, 33)
FLOATS, INTS = (torch.float32, torch.bfloat16, torch.float16), (torch.int32, torch.int64)
SPECIAL = (0.0, -0.0, float("inf"), -float("inf"), float("nan"), 3.4e38, 1e-40, 1.0, -1.5)


@dataclass
class Program:
    """A function of `inputs`; their first axis is "T" where `dynamic` says so. `lines` tells a person what it does."""

    fn: Callable[..., tuple[Tensor, ...]]
    inputs: tuple[Tensor, ...]
    dynamic: tuple[dict[int, str] | None, ...]
    lines: list[str]


def program(choose: Callable[[int], int], *, length: int = 6) -> Program:
    """choose(n) picks 0..n-1: a hypothesis draw, or a seeded generator."""
    def pick(options: Any) -> Any: return options[choose(len(options))]

    shape = [pick(SIZES) for _ in range(1 + choose(3))]
    live = choose(2) == 1 and len(shape) > 1
    if live: shape[0] = 4
    inputs = [_input(choose, pick, shape, keep_first=live) for _ in range(2)] + [_input(choose, pick, shape, full=True)]
    dynamic = tuple({0: "T"} if live and t.dim() == len(shape) else None for t in inputs)
    steps: list[tuple[str, Callable[[list[Tensor]], Tensor]]] = []
    pool = list(inputs)
    for _ in range(2 + choose(length)):
        text, step = _step(choose, pick, pool, live)
        steps.append((text, step))
        pool.append(step(pool))
    kept = {len(pool) - 1, len(inputs) + choose(len(steps))}

    def fn(*given: Tensor) -> tuple[Tensor, ...]:
        values = list(given)
        for _, step in steps: values.append(step(values))
        return tuple(values[k] for k in sorted(kept))

    lines = [f"v{i} = {list(t.shape)} {t.dtype}" for i, t in enumerate(inputs)]
    lines += [f"v{len(inputs) + i} = {text}" for i, (text, _) in enumerate(steps)] + [f"return {sorted(kept)}, dynamic {dynamic}"]
    return Program(fn, tuple(inputs), dynamic, lines)


def _input(choose, pick, shape: list[int], *, keep_first: bool = False, full: bool = False) -> Tensor:
    sizes = list(shape) if full else [s if (k == 0 and keep_first) or choose(3) else 1 for k, s in enumerate(shape)]
    if not full and not keep_first and choose(4) == 0: sizes = sizes[1:]
    return fill(sizes, pick((torch.float32, *FLOATS, *INTS, torch.bool)), choose(1000))


def fill(shape: Any, dtype: torch.dtype, seed: int) -> Tensor:
    """Values of all kinds: integers around 0, floats with infinities, NaN, signed zeros and values below the normal range."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool: return torch.rand(shape, generator=generator) < 0.5
    if dtype in INTS: return torch.randint(-9, 9, shape, generator=generator, dtype=dtype)
    x = torch.randn(shape, generator=generator) * 3
    special = torch.tensor(SPECIAL)[torch.randint(len(SPECIAL), x.shape, generator=generator)]
    return torch.where(torch.rand(x.shape, generator=generator) < 0.2, special, x).to(dtype)


def _step(choose, pick, pool: list[Tensor], live: bool) -> tuple[str, Callable[[list[Tensor]], Tensor]]:
    a, b = choose(len(pool)), choose(len(pool))
    x, y = pool[a], pool[b]
    options: list[tuple[str, Callable[[list[Tensor]], Tensor]]] = []

    def add(text: str, step: Callable[[Tensor], Tensor]) -> None: options.append((f"{text}(v{a})", lambda v: step(v[a])))

    def both(text: str, step: Callable[[Tensor, Tensor], Tensor]) -> None:
        options.append((f"{text}(v{a}, v{b})", lambda v: step(v[a], v[b])))

    if _broadcasts(x.shape, y.shape):
        both("add", torch.add)
        both("mul", torch.mul)
        both("lt", torch.lt)
        both("ne", torch.ne)
        both("where_ge", lambda p, q: torch.where(p >= q, p, q * 2))
        both("and", torch.logical_and)
        if torch.bool not in (x.dtype, y.dtype): both("sub", torch.sub)
        both("maximum", torch.maximum)
    if x.dtype != torch.bool:
        add("neg", torch.neg)
        add("abs", torch.abs)
        add("relu", torch.relu)
        add("clamp", lambda t: t.clamp(-2, 3))
        add("mul_2.5", lambda t: t * 2.5)
        add("square", lambda t: t**2)
        add("lt_0.3", lambda t: t < 0.3)
    if x.dtype in FLOATS:
        add("div_3", lambda t: t / 3)
        add("floor", torch.floor)
        add("isnan", torch.isnan)
        add("masked_fill", lambda t: t.masked_fill(t > 0, -1.0))
    if x.dtype in INTS:
        add("floor_div", lambda t: torch.div(t, 3, rounding_mode="floor"))
        add("remainder", lambda t: torch.remainder(t, 4))
    to = pick((torch.float32, torch.bfloat16, torch.float16, torch.int64) if x.dtype not in FLOATS else (*FLOATS, torch.bool))
    add(f"to_{to}", lambda t: t.to(to))
    if x.dim() >= 1:
        last, n = x.dim() - 1, x.shape[-1]
        add("clone_flat", lambda t: t.flatten(0, 0).clone())
        if not live or last > 0:
            cut, at = 1 + choose(n), choose(n)
            add(f"slice_{cut}", lambda t: t[..., n - cut:])
            add("stride_2", lambda t: t[..., ::2])
            add("flip", lambda t: t.flip(-1))
            add(f"select_{at}", lambda t: t[..., at:at + 1])
            add("rotate", lambda t: torch.cat([t[..., cut:], t[..., :cut], t[..., :1]], -1))
            add("pad", lambda t: torch.nn.functional.pad(t, (1, 2), value=0))
            add("fold", lambda t: t.unsqueeze(-1).expand(*t.shape, 2).flatten(-2))
    if x.dim() >= 2: add("transpose", lambda t: t.transpose(-1, -2).contiguous())
    if x.dim() == 3 and not live: add("merge", lambda t: t.reshape(t.shape[0] * t.shape[1], -1))
    if x.dim() == 3: add("merge_last", lambda t: t.permute(0, 2, 1).flatten(1))
    return pick(options)


def _broadcasts(a: torch.Size, b: torch.Size) -> bool:
    return all(p == q or 1 in (p, q) for p, q in zip(reversed(a), reversed(b), strict=False))


def same(found: Tensor, expected: Tensor) -> bool:
    """Equal shape, dtype and values; NaN equals NaN, and 0 equals -0 (PyTorch's own maximum does not tell them apart)."""
    return found.shape == expected.shape and found.dtype == expected.dtype and torch.equal(*(
        t.double().nan_to_num(123.0, 1e300, -1e300) if t.is_floating_point() else t for t in (found, expected)))
