"""A graph's nodes as a tree of modules, with runs of equal layers folded to one entry."""
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

NO_MODULE = "(no module)"
INPUTS = "(inputs and results)"

TRACER = "_empty_nn_module_stack_from_metadata_hook"
"""What torch.export writes as the module of nodes that it made itself, sizes above all."""

Node = dict[str, Any]                                 # see graph_json


@dataclass
class Module:
    """One module: its own nodes (indices into the graph) and the modules inside, by label."""

    label: str
    path: str
    nodes: list[int] = field(default_factory=list)
    inside: dict[str, "Module"] = field(default_factory=dict)


def module_tree(nodes: Sequence[Node], families: Sequence[int]) -> list[Any]:
    """Entries of the root, in the order in which they run. `families` gives each node's colour.

    An entry is a node's index, a module {"l": label, "p": path, "e": entries, "t": nodes below, "f": {family: calls below}},
    or a fold of at least two neighbours whose nodes have the same operators and types:
    {"l": "0..29", "p": path of the parent, "a": 30, "e": the modules, "t", "f"}.
    """
    root = Module("", "")
    for index, node in enumerate(nodes):
        _home(root, home_of(node)).nodes.append(index)
    return _entries(root, nodes, families)[0]


def home_of(node: Node) -> str:
    """The module a node is shown in: the innermost one that holds all its origins."""
    if node["kind"] in ("input", "kv", "return"):
        return INPUTS
    parts = [path.split(".") for path in node["origin"] if path and path != TRACER]
    if not parts:
        return NO_MODULE
    common = 0
    while all(len(p) > common and p[common] == parts[0][common] for p in parts):
        common += 1
    return ".".join(parts[0][:common]) or NO_MODULE


def _home(root: Module, path: str) -> Module:
    module, walked = root, ""
    for label in [path] if path.startswith("(") else path.split("."):
        walked = f"{walked}.{label}" if walked else label
        module = module.inside.setdefault(label, Module(label, walked))
    return module


def _entries(module: Module, nodes: Sequence[Node], families: Sequence[int]) -> tuple[list[Any], tuple[Any, ...], float]:
    """The module's entries, its signature (equal for equal modules), and when its first call runs."""
    found: list[tuple[float, Any, tuple[Any, ...]]] = []
    for index in module.nodes:
        node = nodes[index]
        when = index if node["kind"] != "weight" else -1.0    # a module's weights stand before its calls
        found.append((when, index, (node["kind"], node["target"], node["type"])))
    for child in module.inside.values():
        entries, signature, when = _entries(child, nodes, families)
        found.append((when, _counted({"l": child.label, "p": child.path, "e": entries}, nodes, families), (child.label, signature)))
    found.sort(key=lambda entry: entry[0])
    first = next((when for when, _, _ in found if when >= 0), float("inf"))
    return _folded(found, module.path, nodes, families), tuple(signature for _, _, signature in found), first


def _folded(found: list[tuple[float, Any, Any]], path: str, nodes: Sequence[Node], families: Sequence[int]) -> list[Any]:
    entries: list[Any] = []
    start = 0
    while start < len(found):
        end = start + 1
        while end < len(found) and _alike(found[start], found[end]):
            end += 1
        run = [entry for _, entry, _ in found[start:end]]
        if len(run) > 1:
            label = f"{run[0]['l']}..{run[-1]['l']}"
            run = [_counted({"l": label, "p": path, "a": len(run), "e": run}, nodes, families)]
        entries += run
        start = end
    return entries


def _alike(first: tuple[float, Any, Any], other: tuple[float, Any, Any]) -> bool:
    """Two numbered modules that differ in nothing but their number."""
    numbered = all(isinstance(entry, dict) and re.fullmatch(r"\d+", entry["l"]) for entry in (first[1], other[1]))
    return numbered and first[2][1] == other[2][1]


def _counted(entry: dict[str, Any], nodes: Sequence[Node], families: Sequence[int]) -> dict[str, Any]:
    total, counts = 0, dict[str, int]()
    for inner in entry["e"]:
        if isinstance(inner, int):
            total += 1
            if nodes[inner]["kind"] == "call":
                counts[str(families[inner])] = counts.get(str(families[inner]), 0) + 1
        else:
            total += inner["t"]
            for name, count in inner["f"].items():
                counts[name] = counts.get(name, 0) + count
    return entry | {"t": total, "f": counts}
