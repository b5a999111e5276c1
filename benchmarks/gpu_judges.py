"""How the results of a call on a card are judged, each kind of operator as its tests do: share of what is allowed, at most 1 where right.

A judge gets the operator, the arguments as they were before the call, the results with what was written in place behind them, and how
many times the reference's own error is allowed.
"""
from collections.abc import Callable
from typing import Any

import torch
from infc.backends.triton.judge import exact, plain, several, strain, ulp
from infc.backends.triton.registry import kernels
from infc.compiler.ops.codes import E4M3_MAX, row_codes, spread
from torch import Tensor

Judge = Callable[[str, dict[str, Any], list[Tensor], int], float]
WRONG = float("inf")


def conform(op: str, given: dict[str, Any], found: list[Tensor], times: int) -> float:
    """Results against PyTorch's own in the same dtypes, both against fp64."""
    return max(strain(f, p, e, times) for f, p, e in zip(found, *references(op, given), strict=True))


def same(op: str, given: dict[str, Any], found: list[Tensor], times: int) -> float:
    """Bit for bit what PyTorch makes of it; nan equals nan."""
    return 0.0 if all(map(_equal, found, _plain(op, given))) else WRONG


def scaled(op: str, given: dict[str, Any], found: list[Tensor], times: int) -> float:
    """A product of codes: of fp32 results an ulp of the magnitudes that are added is allowed besides."""
    (result,), ((own,), (wide,)), x = found, references(op, given), given["x"]
    more = x.abs().double().amax(-1).flatten() * x.shape[-1] ** 0.5 * 2 if result.dtype == torch.float32 else 0.0
    return strain(result, own, wide, times, more)


def dense(op: str, given: dict[str, Any], found: list[Tensor], times: int) -> float:
    """fp32: an ulp of the values that are weighed and added is allowed besides."""
    (result,), ((own,), (wide,)) = found, references(op, given)
    return strain(result, own, wide, times, float(given["v"].abs().max()) if result.dtype == torch.float32 else 0.0)


def paged(op: str, given: dict[str, Any], found: list[Tensor], times: int) -> float:
    """Tokens of no sequence give zeros; the others are as near to fp64 as the reference is."""
    (result,), tokens = found, int(given["query_start"][-1])
    if bool((result[tokens:] != 0).any()): return WRONG
    (own,), (wide,) = references(op, given | {"q": given["q"][:tokens]})
    return strain(result[:tokens], own, wide, times)


def cached(op: str, given: dict[str, Any], found: list[Tensor], times: int) -> float:
    """Turned, then put away as codes: q as it must be; of each head the largest value, so the scale, to an ulp of qkv's dtype, and each
    value to half a step of its code besides; where no token was written, all as it was."""
    own = _plain(op, given)
    wide = {name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value for name, value in given.items()
            if name not in ("k_scale", "v_scale", "format")}
    wide |= {name: given[name].double() for name in ("k_cache", "v_cache")}
    (q, *_) = several(exact(op, **_copied(op, given)))
    kernels()["infc::rope_kv_write"].call(**wide)                         # into wide's caches: what was turned, not yet codes
    worst = [strain(found[0], own[0], q, times)]
    slots, most = given["slots"][given["slots"] >= 0].long(), 127.0 if given["format"] == "int8" else E4M3_MAX
    for at, cache in ((1, wide["k_cache"]), (3, wide["v_cache"])):
        def rows(held: Tensor) -> Tensor:
            return held[slots // held.shape[2], :, slots % held.shape[2]].double()

        untouched = torch.ones(found[at + 1].shape[0] * found[at + 1].shape[2], dtype=torch.bool)
        untouched[slots] = False
        for f, o in zip(found[at:at + 2], own[at:at + 2], strict=True):
            if not _equal(f.transpose(1, 2).flatten(0, 1)[untouched], o.transpose(1, 2).flatten(0, 1)[untouched]): return WRONG
        codes, scale, right = rows(found[at]), rows(found[at + 1]), rows(cache)
        step = scale if most == 127 else scale * 2.0 ** (torch.frexp(codes).exponent.clamp(min=-5) - 4)     # e4m3: 3 bits behind the first
        largest = right.abs().amax(-1, keepdim=True)
        one = ulp(largest, given["qkv"].dtype)
        worst += [float(((scale * most - largest).abs() / one).max()),
                  float(((codes * scale - right).abs() / (step / 2 * 1.001 + one)).max())]
    return max(worst)


def made_codes(op: str, given: dict[str, Any], found: list[Tensor], times: int) -> float:
    """A norm that gives codes: what they mean is as near to fp64 as the norm itself may be, and half a step of a code besides."""
    wide = op.removesuffix("_quantized")
    (own, *_), (right, *sums) = references(wide, {name: value for name, value in given.items() if name not in ("group", "e4m3")})
    codes, scale, most = found[0].double(), found[1], E4M3_MAX if given["e4m3"] else 127.0
    spread_scale = spread(scale.double(), codes.shape[-1], given["group"])
    half = (2.0 ** (torch.frexp(codes).exponent.clamp(min=-5) - 4) if given["e4m3"] else torch.ones_like(codes)) * spread_scale / 2
    size = right.abs().amax(-1, keepdim=True)
    allowed = times * (own.double() - right).abs().amax(-1, keepdim=True) + ulp(size, own.dtype)
    rounding = ulp(spread_scale, torch.float32) / 2 * most                   # of the scale itself
    worst = [float(((codes * spread_scale - right).abs() / (half * 1.001 + allowed + rounding)).max())]
    largest = row_codes(right, 8, given["group"], given["e4m3"])[1].double() * most
    worst.append(float(((scale.double() * most - largest).abs() / (allowed + ulp(scale.double(), torch.float32) * most)).max()))
    for h, sum_ in zip(found[2:], sums, strict=True): worst.append(strain(h, given["x"] + given["residual"], sum_))
    return max(worst)


def drawn(op: str, given: dict[str, Any], found: list[Tensor], times: int) -> float:
    """The reference's token, or where a sum ends on a border to 1e-6 of the mass, the one on its other side."""
    right = found[0] == plain(op, **given)
    for name, by in ((n, b) for n in ("uniform", "top_p") for b in (-2e-6, 2e-6)):
        if bool(right.all()): break
        right |= found[0] == plain(op, **given | {name: (given[name].double() + by).clamp(0, 1)})
    return 0.0 if bool(right.all()) else WRONG


def references(op: str, given: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Results and what was written in place, by PyTorch in the call's dtypes and in fp64."""
    wide = {name: given[name].double() for name in written(op)}
    return _plain(op, given), [*several(exact(op, **given | wide)), *wide.values()]


def written(op: str) -> list[str]:
    """The arguments that an operator writes."""
    return [a.name for a in kernels()[op].call._schema.arguments if a.alias_info is not None and a.alias_info.is_write]


def _plain(op: str, given: dict[str, Any]) -> list[Tensor]:
    own = _copied(op, given)
    return [*several(plain(op, **own)), *(own[name] for name in written(op))]


def _copied(op: str, given: dict[str, Any]) -> dict[str, Any]:
    return given | {name: given[name].clone() for name in written(op)}


def _equal(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape: return False
    if not a.is_floating_point(): return torch.equal(a, b)
    a, b = a.double(), b.double()
    return torch.equal(a.nan_to_num(1.5), b.nan_to_num(1.5)) and torch.equal(a.isnan(), b.isnan())
