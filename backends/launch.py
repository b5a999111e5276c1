"""What a backend says of one unit of work: the code of its kernel, and what each argument is."""
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import fx

from ..compiler.errors import UserError
from ..compiler.placement import Unit
from ..runtime.program import DIMS


@dataclass(frozen=True)
class Weight:
    """A weight in a physical layout; packed once per (placeholder, layout), whatever the number of buckets.

    parts: more weights that lie in the same layout, in its order: the scales of codes.
    """

    node: fx.Node
    layout: str
    parts: tuple[fx.Node, ...] = ()

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        """Every weight that is packed into it."""
        return self.node, *self.parts


@dataclass(frozen=True)
class Scratch:
    """Bytes in the arena that live during this unit's steps only, shared by all threads. number: of several, which one."""

    bytes: int
    number: int = 0


@dataclass(frozen=True)
class Out:
    """The i-th result of the unit (0 for a single one)."""

    index: int


Arg = fx.Node | Weight | Scratch | Out


@dataclass(frozen=True)
class Launch:
    """One step: `body` is the text of the kernel, which finds args[i] at b[i] and the live sizes in r->dims.

    On a GPU `body` is the key of its code, and the step says where its programs run: see runtime.program.Step.
    """

    name: str
    body: str
    args: tuple[Arg, ...]
    headers: tuple[str, ...]
    grid: tuple[int, ...] = ()
    scalars: tuple[tuple[int, int | float], ...] = ()


@dataclass(frozen=True)
class Context:
    """What a backend may know while it lowers: the target's instruction set, the bucket, and how sizes are spelled."""

    target: str                                       # "x86-64-v4-bf16", "x86-64-v3", ...
    bucket: Mapping[str, int]                         # maxima of T, N, R, M
    symbols: Mapping[str, str] = field(default_factory=dict)   # sympy symbol -> public dim name

    def name(self, size: object) -> int | str:
        """An int, or the public name of a symbolic size ("T", "N+1"). Raises ValueError for any other expression."""
        if isinstance(size, int):
            return size
        expression = size.node.expr                   # type: ignore[attr-defined]   # a torch.SymInt
        if expression.is_Integer:
            return int(expression)
        if expression.is_Symbol:
            return self.symbols[str(expression)]
        free = list(expression.free_symbols)
        if len(free) == 1 and expression - free[0] == 1:
            return f"{self.symbols[str(free[0])]}+1"
        raise ValueError(f"the size {expression} is neither a number nor one of the dims {', '.join(DIMS)}")

    def shape(self, shape: object) -> tuple[int | str, ...]:
        return tuple(self.name(size) for size in shape)   # type: ignore[attr-defined]

    def maximum(self, size: object) -> int:
        """The size at the bucket's maximum. P, the number of blocks, is the runtime's choice and counts as one."""
        named = self.name(size) if not isinstance(size, str) else size
        if isinstance(named, int):
            return named
        base, plus, _ = named.partition("+")
        if base != "P" and base not in self.bucket:
            raise UserError(f"a value of the step graph depends on the size {base}, which a step does not have: this architecture's "
                            "positions or masks are not supported yet")
        return (1 if base == "P" else self.bucket[base]) + (1 if plus else 0)

    def dim(self, size: object) -> int | str:
        """An int, or the C++ expression of the live size."""
        named = self.name(size)
        if isinstance(named, int):
            return named
        base, plus, _ = named.partition("+")
        live = f"r->dims[{DIMS.index(base)}]"
        return f"({live} + 1)" if plus else live

    def rows(self, node: fx.Node) -> str:
        """The C++ expression of the number of rows: the product of all dims but the last."""
        factors = [str(self.dim(size)) for size in node.meta["val"].shape[:-1]]
        return " * ".join(factor for factor in factors if factor != "1") or "1"


def candidates_of(unit: Unit, context: Context) -> Mapping[str, tuple[Launch, ...]]:
    """The ways to run a unit by their names, the rule's first: each its steps, one after the other. On a CPU always one step, unnamed."""
    found = unit.lower(context)
    if isinstance(found, Mapping): return found
    return {"": found if isinstance(found, tuple) else (found,)}


def launches_of(unit: Unit, context: Context, name: str | None = None) -> tuple[Launch, ...]:
    """The steps of a unit, as the rule has them, or as one of its candidates does."""
    found = candidates_of(unit, context)
    return next(iter(found.values())) if name is None else found[name]
