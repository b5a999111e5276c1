"""bf16 or fp16 where the bytes are: weights, what products read, and the KV cache; fp32 where sums live: the residual stream.

A weight is stored once, in 16 bits, also where embedding and head share it; one held as codes stays so, and is bf16 for a moment
where many rows meet it (option `bf16_rows`, of CPUs that multiply bf16). What feeds a product is rounded by the operator
that makes it (its out_dtype) where nobody needs it wide, else by a cast; products give fp32 again.
APPROXIMATE: next-token distributions may not be further (KL) from the fp32 graph's than those of eager PyTorch in the same
16 bits; and no value of fp16, which ends at 65504, may overflow.
"""
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ..compiler.casts import Casts
from ..compiler.divergence import LARGEST, NARROW, WIDE, converted, divergences, input_dtypes, narrow, overflow
from ..compiler.errors import CheckFailed
from ..compiler.ir import Graph, argument, fake_mode, fake_propagate
from ..compiler.ops import aten, infc
from ..compiler.ops.linear_quantized import PRODUCTS as CODED_PRODUCTS
from ..compiler.ops.linear_quantized import bf16_rows_of
from ..compiler.rewrite import APPROXIMATE, Measured, Pass, Report, emit, set_arguments

PRODUCTS = {infc.linear.default, infc.linear_swiglu.default}
CACHE_OPS = {infc.kv_write.default, infc.rope_kv_write.default, infc.paged_attention.default}

def run(graph: Graph, report: Report) -> int:
    """Counts the weights and the attentions (with their caches) that became narrow, and the products that will be with many rows."""
    dtype = NARROW.get(report.options.get("dtype", "bf16"))
    if dtype is None:
        return 0
    fired, casts = 0, Casts(graph, dtype)
    for weight in _weights(graph, report, dtype):
        if not report.may_fire(): break
        _narrow_weight(graph, weight, casts)
        fired += 1
    for node in [n for n in graph.nodes if n.target is infc.paged_attention.default and n.args[1].meta["val"].dtype == WIDE]:
        caches = node.args[1:3]
        other = next((u for c in caches for u in c.users if u.target not in CACHE_OPS), None)
        if other is not None:
            report.refuse(node, f"its cache is also used by %{other.name}")
            continue
        if not report.may_fire(): break
        for cache in caches: _retype(graph, cache, dtype)
        set_arguments(node, q=casts.of(node.args[0], node), out_dtype=WIDE)
        fired += 1
    for node in [n for n in graph.nodes if n.target is infc.paged_attention_quantized.default and n.args[0].meta["val"].dtype == WIDE]:
        if not report.may_fire(): break
        set_arguments(node, q=casts.of(node.args[0], node), out_dtype=WIDE)                      # its caches are narrower than this already
        fired += 1
    offered = report.options.get("bf16_rows", {}) if dtype == torch.bfloat16 else {}
    for node in [n for n in graph.nodes if n.target in CODED_PRODUCTS]:
        rows = bf16_rows_of(offered, argument(node, "act_bits"), node.args[0].meta["val"].shape[-1])
        if rows == argument(node, "bf16_rows"): continue
        if not report.may_fire(): break
        set_arguments(node, bf16_rows=rows)
        fired += 1
    if fired:
        casts.absorb()
        if graph.sample_inputs is not None: graph.sample_inputs = SamplesAs(graph.sample_inputs, input_dtypes(graph))
        fake_propagate(graph, accept_changes=True)
    return fired


def _weights(graph: Graph, report: Report, dtype: torch.dtype) -> list[fx.Node]:
    """Weights that products and lookups alone read; the others, if some product reads them, are refused."""
    found = []
    for node in graph.module.graph.find_nodes(op="placeholder"):
        weight = graph.weight(node)
        if weight is None or weight.dtype != WIDE: continue
        reads = [(u, (u.target in PRODUCTS and u.args[1] is node and node not in (u.args[0], *u.args[2:]))
                  or (u.target is aten.embedding.default and u.args[0] is node)) for u in node.users]
        other = next((user for user, known in reads if not known), None)
        if reads and other is None and dtype == torch.float16 and (size := float(weight.abs().max())) > LARGEST:
            report.refuse(node, f"it holds {size:.4g}, and fp16 ends at {LARGEST:.0f}")
        elif reads and other is None:
            found.append(node)
        elif any(known for _, known in reads):
            report.refuse(node, f"also used by {'the output' if other.op == 'output' else f'%{other.name}'}")  # type: ignore[union-attr]
    return found


def _narrow_weight(graph: Graph, weight: fx.Node, casts: Casts) -> None:
    graph.weights[str(weight.target)] = graph.weights[str(weight.target)].to(casts.dtype)
    _retype(graph, weight, casts.dtype)
    for user in list(weight.users):
        if user.target in PRODUCTS:
            set_arguments(user, x=casts.of(user.args[0], user), out_dtype=argument(user, "out_dtype") or WIDE)
        else:                                               # the residual stream starts here, and stays wide
            users = list(user.users)
            user.meta["val"] = user.meta["val"].to(casts.dtype)
            wide = emit(graph, aten._to_copy.default, (user,), {"dtype": WIDE}, like=user.next)
            wide.meta["origin"] = list(user.meta.get("origin") or ())
            for reader in users: reader.replace_input_with(user, wide)


def _retype(graph: Graph, placeholder: fx.Node, dtype: torch.dtype) -> None:
    with fake_mode(graph):
        placeholder.meta["val"] = placeholder.meta["val"].to(dtype)


@dataclass(frozen=True)
class SamplesAs:
    """Another graph's samples, each tensor in the dtype it has here: caches became narrow."""

    samples: Callable[..., Any]
    dtypes: tuple[torch.dtype, ...]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        found = self.samples(*args, **kwargs)
        return [converted(s, self.dtypes) for s in found] if isinstance(found, list) else converted(found, self.dtypes)

    def thorough(self) -> list[tuple[Tensor, ...]]:
        """All of them, for strict checks."""
        return [converted(s, self.dtypes) for s in getattr(self.samples, "thorough", self.samples)()]


# ------------------------------------------------------------------------------------------------------------ the bound

def check(before: Graph, after: Graph) -> Measured:
    """Mean KL(fp32 || ours); CheckFailed where eager PyTorch in the same 16 bits is closer, or where a value overflows.

    Where eager fp16 overflows and this graph, whose sums stay wide, does not, eager bf16 is the bound.
    """
    dtype = narrow(after) or torch.bfloat16
    if dtype == torch.float16 and (where := overflow(before, after)): raise CheckFailed(f"{where}; use --dtype bf16")
    ours, eager = divergences(before, after, yardstick=dtype)
    if not math.isfinite(eager): dtype, (ours, eager) = torch.bfloat16, divergences(before, after)
    name = next(name for name, kind in NARROW.items() if kind == dtype)
    if not ours <= eager:
        raise CheckFailed(f"KL to fp32 is {ours:.3g}, of eager {name} it is {eager:.3g}")
    return Measured(ours, eager, f"nats, mean KL(fp32 || ours) of next-token distributions: what eager {name} PyTorch has")


PASS = Pass("narrow_dtype", run, APPROXIMATE, check=check)
