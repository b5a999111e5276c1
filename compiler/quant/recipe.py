"""A recipe: which scheme each weight gets, as ordered wildcards over module paths, later lines winning.

    format: 1
    layers:
      - "*": w8
      - "model.layers.*.mlp.*": w4:g64
      - "model.layers.0.*": none

`*` stands for anything, dots too, `?` for one character, `[0-3]` for one of a set. A scheme is what `--quant` takes: w8, w4:g64, fp8 ...,
none, or keep (a GGUF's own blocks; keepa8: and 8-bit activations). What no line names stays wide.
"""
import difflib
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path

import yaml
from torch import fx

from ..errors import UserError, nearest
from ..ir import Graph, arguments
from ..ops import aten, infc
from . import recipe_file
from .blocks import note, stored
from .matrices import paths
from .scheme import Scheme, parse, stored_as

FORMAT = 1
KEYS = ("format", "layers")


@dataclass(frozen=True)
class Keep:
    """A GGUF's own blocks, whatever their format; activations are rounded as a Scheme says."""

    act_bits: int = 16

    def __str__(self) -> str:
        return "keep" + {16: "", 8: "a8", 0: "a32"}[self.act_bits]


Choice = Scheme | Keep | None
"""What a line asks for; None leaves the weight wide."""


@dataclass(frozen=True)
class Line:
    """`pattern: choice`."""

    pattern: str
    choice: Choice
    where: str = field(default="", compare=False)     # "recipe.yaml line 4", for messages

    def matches(self, path: str) -> bool:
        return fnmatchcase(path, self.pattern)

    def __str__(self) -> str:
        return f"{json.dumps(self.pattern)}: {self.choice or 'none'}"


def choice(text: str) -> Choice:
    """What a scheme's text asks for. UserError for any that asks for nothing."""
    kept = re.fullmatch(r"keep(a8|a16|a32)?", text)
    if kept: return Keep({"a8": 8, "a32": 0}.get(kept[1] or "", 16))
    return parse(text)


class Unnamed(UserError):
    """A line, counted from 0, that names no weight of the model."""

    def __init__(self, line: int, where: str, why: str) -> None:
        super().__init__(f"{where}: {why}" if where else why)
        self.line, self.why = line, why


@dataclass(frozen=True)
class Recipe:
    """Lines in order. `schemes` applies them to a graph."""

    lines: tuple[Line, ...]

    def __str__(self) -> str:
        return f"format: {FORMAT}\nlayers:\n" + "".join(f"  - {line}\n" for line in self.lines)

    def asked(self, path: str) -> Choice:
        """The last matching line's choice for a module path; None where no line matches."""
        return next((line.choice for line in reversed(self.lines) if line.matches(path)), None)

    def schemes(self, graph: Graph, weights: Sequence[fx.Node]) -> dict[fx.Node, Scheme]:
        """Weight -> its scheme; wide ones are not in it. UserError for a line that names nothing.

        Parts of a merged weight, and names of a shared one, that ask for different schemes all get the widest, and
        the graph's notes say so: nothing is rounded more than a line allows.
        """
        named = {weight: paths(weight) for weight in weights}
        self._check_names(graph, named.values())
        found: dict[fx.Node, Scheme] = {}
        mixed, refused = [], {}
        for weight, its in named.items():
            choices = {path: self._scheme(graph, weight, self.asked(path), refused) for path in its}
            scheme = widest(choices.values(), int(weight.meta["val"].shape[1]))
            if len(set(choices.values())) > 1: mixed.append((choices, scheme))
            if scheme is not None: found[weight] = scheme
        if refused and not found: raise UserError(f"no weight's blocks can be kept: {next(iter(refused.values()))}")
        if refused:
            many = f"{len(refused)} weights stay wide: they have" if len(refused) > 1 else "a weight stays wide: it has"
            note(graph, f"{many} no blocks to keep, {next(iter(refused.values()))}")
        if mixed: note(graph, _mixed_note(mixed[0][0], mixed[0][1], len(mixed)))
        return found

    def _scheme(self, graph: Graph, weight: fx.Node, asked: Choice, refused: dict[fx.Node, str]) -> Scheme | None:
        """keep is the scheme of the file's blocks, and none where they are not to be had."""
        if not isinstance(asked, Keep): return asked
        found = stored(graph, weight)
        if isinstance(found, str):
            refused[weight] = found
            return None
        return replace(found.scheme, act_bits=asked.act_bits)

    def _check_names(self, graph: Graph, named: Iterable[Sequence[str]]) -> None:
        weights = list(dict.fromkeys(path for its in named for path in its))
        modules = {path for node in graph.nodes for path in node.meta.get("origin") or ()}
        for number, line in enumerate(self.lines):
            if any(map(line.matches, weights)): continue
            if any(map(line.matches, modules)):
                if line.choice is None: continue                     # it is wide, as asked
                why = "names only modules without a matrix that can be quantized; leave the line out"
                raise Unnamed(number, line.where, f"{line.pattern!r} {why}")
            near = max(weights, key=lambda path: difflib.SequenceMatcher(None, line.pattern, path).ratio(), default=None)
            why = "names no module of the model" + (f"; the nearest is {near!r}" if near else "")
            raise Unnamed(number, line.where, f"{line.pattern!r} {why}")


def widest(choices: Iterable[Scheme | None], k: int) -> Scheme | None:
    """The scheme with the most bits a weight of rows of k, its activations as fine as the finest; None if one is to stay wide."""
    schemes = list(choices)
    given = [scheme for scheme in schemes if scheme is not None]
    if len(given) < len(schemes): return None
    finest = min(given, key=lambda s: (-(s.act_bits or 32), s.act_group or k, s.act_group))
    most = max(given, key=lambda s: (s.bits, not s.e4m3, s.stored_bits(k), -(s.group or k), -s.group))
    if most.e4m3: return replace(most, act_bits=8 if finest.act_bits == 8 else 0)          # rows of e4m3 have one scale, or are wide
    return replace(most, act_bits=finest.act_bits, act_group=finest.act_group)


def _mixed_note(choices: dict[str, Scheme | None], scheme: Scheme | None, count: int) -> str:
    asked = ", ".join(f"{path} {one or 'none'}" for path, one in choices.items())
    many = "a stored weight has" if count == 1 else f"{count} stored weights have"
    return f"{many} parts or names that ask for different schemes: the widest counts for all, {asked} -> {scheme or 'none'}"


# ------------------------------------------------------------------------------------------------------------ text and files

def read(quant: str) -> Scheme | Recipe | None:
    """What `--quant` asks for: a scheme for all, `keep`, a recipe's file, or a recipe's text. UserError, one line, for anything else."""
    if quant.startswith("format:"): return from_text(quant, "the recipe")
    if (written := recipe_file.text(quant)) is not None: return from_text(written, Path(quant).name)
    try:
        found = choice(quant)
    except UserError as error:
        raise UserError(f"{error.message}, none, keep (a GGUF's own blocks), or name a recipe (.yaml)") from error
    return Recipe((Line("*", found),)) if isinstance(found, Keep) else found


def text_of(quant: str) -> str:
    """`--quant` as it reaches a key: a recipe's content in place of its file's name."""
    return str(read(quant)) if quant.endswith(recipe_file.SUFFIXES) else quant


def beside(artifact: Path, force: bool) -> Path:
    """NAME.recipe.yaml next to NAME.infc. UserError where something is there already that is not to be replaced."""
    path = artifact.with_suffix(".recipe.yaml")
    if path.exists() and not (force and path.is_file()):
        raise UserError(f"{path}: exists already; " + ("add --force to replace it, or -o for another place" if path.is_file() else
                                                       "it is no recipe: remove it yourself, or give -o for another place"))
    return path


def from_text(text: str, name: str) -> Recipe:
    """A recipe of its YAML text. name: the file, for messages. UserError names the line of whatever is wrong."""
    try:
        root = yaml.compose(text, yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}" if mark else ""
        reason = getattr(error, "problem", None) or str(error)
        line = text.splitlines()[mark.line].strip() if mark and mark.line < len(text.splitlines()) else ""
        hint = "; a pattern with * needs quotes around it" if line.lstrip("- ").startswith("*") else ""
        raise UserError(f"{name}{where}: is no YAML ({' '.join(str(reason).split())}){hint}") from error
    if root is None: raise UserError(f"{name}: is empty; a recipe begins with format: {FORMAT}, then layers:")
    top = dict(_pairs(root, name, "a recipe"))
    for key, value in top.items():
        if key not in KEYS: raise UserError(f"{_at(name, value)}: unknown key {key!r}; {nearest(key, KEYS)}; a recipe begins with "
                                            f'format: {FORMAT}, then layers: and a list of lines like - "model.layers.*.mlp.*": w4')
    missing = next((key for key in KEYS if key not in top), None)
    if missing: raise UserError(f"{name}: has no {missing}:; a recipe begins with format: {FORMAT}, then layers:")
    version = _scalar(top["format"], name, "format")
    if version != str(FORMAT): raise UserError(f"{_at(name, top['format'])}: format {version!r}; this infc reads format {FORMAT}")
    layers = top["layers"]
    if not isinstance(layers, yaml.SequenceNode):
        raise UserError(f"{_at(name, layers)}: layers is a list, each line like  - \"model.layers.*\": w8")
    if not layers.value: raise UserError(f"{_at(name, layers)}: layers is empty; --quant none leaves every weight wide")
    return Recipe(tuple(_line(node, name) for node in layers.value))


def _line(node: yaml.Node, name: str) -> Line:
    pairs = _pairs(node, name, "a line of layers")
    if len(pairs) != 1: raise UserError(f"{_at(name, node)}: a line of layers has one pattern, not {len(pairs)}; begin each with -")
    pattern, value = pairs[0]
    scheme = _scalar(value, name, f"the scheme of {pattern!r}")
    try:
        return Line(pattern, choice(scheme), _at(name, value))
    except UserError as error:
        raise UserError(f"{_at(name, value)}: {error.message}, none or keep") from error


def _pairs(node: yaml.Node, name: str, what: str) -> list[tuple[str, yaml.Node]]:
    """A mapping's keys and values; a key that stands there twice is no mapping, whatever YAML says."""
    if not isinstance(node, yaml.MappingNode): raise UserError(f"{_at(name, node)}: {what} is KEY: VALUE, found {_kind(node)}")
    pairs = [(_scalar(key, name, "a key"), value) for key, value in node.value]
    twice = next((key for key, count in Counter(key for key, _ in pairs).items() if count > 1), None)
    if twice is not None: raise UserError(f"{_at(name, node)}: {twice!r} stands there twice")
    return pairs


def _scalar(node: yaml.Node, name: str, what: str) -> str:
    if not isinstance(node, yaml.ScalarNode): raise UserError(f"{_at(name, node)}: {what} is one word, found {_kind(node)}")
    return node.value


def _kind(node: yaml.Node) -> str:
    if isinstance(node, yaml.ScalarNode): return repr(node.value)
    return "a list" if isinstance(node, yaml.SequenceNode) else "a mapping"


def _at(name: str, node: yaml.Node) -> str:
    return f"{name} line {node.start_mark.line + 1}"


# --------------------------------------------------------------------------------------------------------- of a finished compile

_QUANTIZED = {infc.linear_quantized.default, infc.linear_swiglu_quantized.default, infc.embedding_quantized.default}
_WIDE = {infc.linear.default: 1, infc.linear_swiglu.default: 1, aten.embedding.default: 0}
"""Operator -> which argument is the matrix."""


def of(graph: Graph) -> Recipe | None:
    """The recipe that gives an optimized graph's formats again; None where no weight is quantized."""
    found: dict[str, Scheme | None] = {}
    for node in graph.module.graph.find_nodes(op="placeholder"):
        formats = sorted(filter(None, (_format(user, node) for user in node.users)), key=lambda f: f[0])
        if formats: found |= dict.fromkeys(paths(node), formats[0][1])
    return written(found) if any(found.values()) else None


def _format(user: fx.Node, weight: fx.Node) -> tuple[bool, Scheme | None] | None:
    """(whether a user of a weight is a lookup, the scheme it reads it in); None where it reads no matrix.

    A lookup has no activations, so where a product shares its table the product's scheme is the whole truth.
    """
    if user.target in _QUANTIZED:
        given = dict(zip((a.name for a in user.target._schema.arguments), arguments(user), strict=True))     # type: ignore[union-attr]
        if given["codes"] is not weight: return None
        plain = stored_as(weight.meta["val"], given["scale"].meta["val"], given["offset"], given["bits"], given["group"])
        if user.target is infc.embedding_quantized.default: return True, plain
        return False, replace(plain, act_bits=given["act_bits"], act_group=given["act_group"])
    place = _WIDE.get(user.target)                                    # type: ignore[arg-type]
    return None if place is None or user.args[place] is not weight else (place == 0, None)


def written(found: dict[str, Scheme | None]) -> Recipe:
    """The shortest recipe that says the same of each path: the commonest scheme for all, then what differs, path by path."""
    common = Counter(found.values()).most_common(1)[0][0]
    return Recipe((Line("*", common), *(Line(path, scheme) for path, scheme in found.items() if scheme != common)))
