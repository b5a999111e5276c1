"""Index arithmetic of loop nests: integer polynomials over loop variables and run-time sizes, with // and %.

An `Expr` is a sum of integer coefficients times products of atoms, kept sorted, so equal expressions compare equal. Every
variable lies in [0, size), which is what lets `(64*i + j) // 64` become `i`.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Dim:
    """A run-time size, >= 0: "T", "N"."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Var:
    """A loop variable: 0 <= name < size."""

    name: str
    size: Expr

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Div:
    """num // den, rounded down."""

    num: Expr
    den: Expr

    def __str__(self) -> str:
        return f"(({self.num})/({self.den}))"


@dataclass(frozen=True)
class Mod:
    """num % den, in [0, den)."""

    num: Expr
    den: Expr

    def __str__(self) -> str:
        return f"(({self.num})%({self.den}))"


Atom = Dim | Var | Div | Mod
Monomial = tuple[Atom, ...]


@dataclass(frozen=True)
class Expr:
    """A polynomial: ((atoms, coefficient), ...) sorted by the atoms' text, no zero coefficient."""

    terms: tuple[tuple[Monomial, int], ...]

    @cached_property
    def _text(self) -> str:
        if not self.terms: return "0"
        out = ""
        for atoms, coef in self.terms:
            factors = [str(a) for a in atoms]
            if abs(coef) != 1 or not atoms: factors.insert(0, str(abs(coef)))
            sign = ("-" if coef < 0 else "") if not out else (" - " if coef < 0 else " + ")
            out += sign + "*".join(factors)
        return out

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: Expr | int) -> Expr:
        return _collect(self.terms + expr(other).terms)

    def __sub__(self, other: Expr | int) -> Expr:
        return self + expr(other) * -1

    def __mul__(self, other: Expr | int) -> Expr:
        return _collect(tuple((_join(a, b), c * d) for a, c in self.terms for b, d in expr(other).terms))

    def __floordiv__(self, den: Expr | int) -> Expr:
        den = expr(den)
        quotient, rest = _split(self, den)
        if _below(rest, den): return quotient
        n, d = rest.constant, den.constant
        if n is not None and d is not None: return quotient + n // d
        inner = _single(rest, Div)                       # (x // m) // n == x // (m * n)
        if isinstance(inner, Div): return quotient + inner.num // (inner.den * den)
        return quotient + expr(Div(rest, den))

    def __mod__(self, den: Expr | int) -> Expr:
        den = expr(den)
        _, rest = _split(self, den)
        if _below(rest, den): return rest
        n, d = rest.constant, den.constant
        if n is not None and d is not None: return expr(n % d)
        inner = _single(rest, Mod)                       # (x % (k * n)) % n == x % n
        if isinstance(inner, Mod) and not _split(inner.den, den)[1].terms: return inner.num % den
        return expr(Mod(rest, den))

    @property
    def constant(self) -> int | None:
        """Its value where it has no atom, else None."""
        if not self.terms: return 0
        return self.terms[0][1] if self.terms == (((), self.terms[0][1]),) else None

    def uses(self, var: Var) -> bool:
        """True if `var` occurs in it, at any depth."""
        return any(var == a or (isinstance(a, Div | Mod) and (a.num.uses(var) or a.den.uses(var)))
                   for atoms, _ in self.terms for a in atoms)

    def divides(self, var: Var) -> bool:
        """True if `var` occurs under a / or %."""
        return any(isinstance(a, Div | Mod) and (a.num.uses(var) or a.den.uses(var)) for atoms, _ in self.terms for a in atoms)

    def replace(self, new: Mapping[Var, Expr]) -> Expr:
        """The same polynomial with variables replaced, simplified again."""
        total = ZERO
        for atoms, coef in self.terms:
            product = expr(coef)
            for a in atoms: product = product * _replace(a, new)
            total = total + product
        return total

    def value(self, names: Callable[[str], object]):
        """Its value, given each Dim's and Var's value by name (ints, or integer arrays that broadcast)."""
        total: object = 0
        for atoms, coef in self.terms:
            product: object = coef
            for a in atoms:
                if isinstance(a, Div): factor = a.num.value(names) // a.den.value(names)
                elif isinstance(a, Mod): factor = a.num.value(names) % a.den.value(names)
                else: factor = names(a.name)
                product = product * factor  # pyright: ignore[reportOperatorIssue]
            total = total + product  # pyright: ignore[reportOperatorIssue]
        return total


def expr(value: Expr | Atom | int) -> Expr:
    """An Expr from an int or an atom."""
    if isinstance(value, Expr): return value
    if isinstance(value, int): return Expr((((), value),)) if value else ZERO
    return Expr((((value,), 1),))


ZERO = Expr(())
ONE = Expr((((), 1),))


def product(sizes) -> Expr:
    """The product of sizes; 1 for none."""
    total = ONE
    for size in sizes: total = total * size
    return total


def _join(a: Monomial, b: Monomial) -> Monomial:
    return tuple(sorted(a + b, key=str)) if a and b else a or b


def _collect(terms: tuple[tuple[Monomial, int], ...]) -> Expr:
    sums: dict[Monomial, int] = {}
    for atoms, coef in terms: sums[atoms] = sums.get(atoms, 0) + coef
    _recombine(sums)
    kept = [(atoms, coef) for atoms, coef in sums.items() if coef]
    return Expr(tuple(sorted(kept, key=lambda t: (-len(t[0]), [str(a) for a in t[0]]))))


def _recombine(sums: dict[Monomial, int]) -> None:
    """n * (x // n) + x % n == x."""
    for (atoms, coef) in list(sums.items()):
        mod = atoms[0] if len(atoms) == 1 else None
        if not isinstance(mod, Mod) or not coef: continue
        quotient = (expr(Div(mod.num, mod.den)) * mod.den * coef).terms
        if len(quotient) == 1 and sums.get(quotient[0][0]) == quotient[0][1]:
            del sums[atoms], sums[quotient[0][0]]
            for inner, c in mod.num.terms: sums[inner] = sums.get(inner, 0) + c * coef
            return _recombine(sums)
    return None


def _split(e: Expr, den: Expr) -> tuple[Expr, Expr]:
    """(q, r) with e == q * den + r, and no term of r divisible by den (a den of several terms divides itself only)."""
    if len(den.terms) != 1: return (ONE, ZERO) if e == den else (ZERO, e)
    (atoms, coef), = den.terms
    quotient, rest = [], []
    for term_atoms, term_coef in e.terms:
        left = list(term_atoms)
        divides = term_coef % coef == 0 and all(a in left and (left.remove(a) or True) for a in atoms)
        if divides: quotient.append((tuple(left), term_coef // coef))
        else: rest.append((term_atoms, term_coef))
    return _collect(tuple(quotient)), _collect(tuple(rest))


def _single(e: Expr, kind: type) -> Atom | None:
    if len(e.terms) != 1 or e.terms[0][1] != 1 or len(e.terms[0][0]) != 1: return None
    return e.terms[0][0][0] if isinstance(e.terms[0][0][0], kind) else None


def interval(e: Expr) -> tuple[int, int] | None:
    """[low, high], both included, by interval arithmetic, where every size is known."""
    low = high = 0
    for atoms, coef in e.terms:
        top = coef
        for a in atoms:
            if isinstance(a, Var | Mod): size = (a.size if isinstance(a, Var) else a.den).constant
            elif isinstance(a, Div) and (inner := interval(a.num)) and inner[0] >= 0 and a.den.constant:
                size = inner[1] // a.den.constant + 1
            else: return None
            if size is None: return None
            top *= max(size - 1, 0)
        low, high = low + min(top, 0 if atoms else top), high + max(top, 0 if atoms else top)
    return low, high


def _below(e: Expr, limit: Expr) -> bool:
    """True if 0 <= e < limit is certain. With run-time sizes: peel c*v off where v < size and limit == c*size."""
    known, top = interval(e), limit.constant
    if known and top is not None: return known[0] >= 0 and known[1] < top
    for atoms, coef in e.terms:
        for a in atoms:
            if not isinstance(a, Var | Mod): continue
            left = list(atoms)
            left.remove(a)
            unit = Expr(((tuple(left), coef),))
            if (a.size if isinstance(a, Var) else a.den) * unit == limit:
                rest = e - Expr(((atoms, coef),))
                return rest == ZERO or _below(rest, unit)
    return False


def _replace(a: Atom, new: Mapping[Var, Expr]) -> Expr:
    if isinstance(a, Var): return new.get(a, expr(a))
    if isinstance(a, Div): return a.num.replace(new) // a.den.replace(new)
    if isinstance(a, Mod): return a.num.replace(new) % a.den.replace(new)
    return expr(a)
