"""Who may import whom: the layers of the house hold, read from the source with `ast`."""

import ast
import subprocess
import sys
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = ("compiler", "passes", "backends", "runtime", "models")
SCHEMA = ("runtime.artifact", "runtime.device", "runtime.errors", "runtime.kv_runs", "runtime.manifest", "runtime.program",
          "runtime.tensors")  # the format

# The first pattern that fits a module decides what it may import of ours; "{folder}" is the module's own backend.
MAY_IMPORT = {
    "": ("*",),  # the public face: lazy, tested below
    "compiler.bisect": ("*",),
    "compiler.cli": ("*",),
    "compiler.commands*": ("*",),
    "compiler.console": ("*",),
    "compiler.driver": ("*",),
    "compiler.lowering": ("*",),  # parts of the driver
    "compiler.replays": ("*",),
    "compiler.result": ("*",),
    "compiler.costs.explain": ("*",),  # it measures peaks and runs artifacts
    "compiler.costs.machine": ("*",),
    "compiler.costs.measure_phase": ("*",),
    "compiler.report_command": ("*",),  # it runs an artifact for `infc report --measured`
    "compiler.quality.command": ("*",),  # it runs artifacts for `infc quality`
    "models*": ("models*",),
    "runtime*": ("runtime*",),
    "compiler.frontends*": ("compiler*", "models*", *SCHEMA),
    "compiler*": ("compiler*", *SCHEMA),
    "passes": ("passes*", "compiler*"),  # __init__.py holds PIPELINE
    "passes.*": ("compiler*",),
    "backends": ("backends*", "compiler*", *SCHEMA),
    "backends.*": ("backends", "backends.{file}", "backends.{folder}*", "compiler*", *SCHEMA),
}
ONLY_FOR_WIRING = (  # no other module imports these
    "compiler.driver", "compiler.lowering", "compiler.replays", "compiler.result", "compiler.cli", "compiler.console", "compiler.bisect",
    "compiler.costs.explain", "compiler.quality.command", "compiler.report_command",
    *(f"compiler.commands.{group}" for group in ("building", "explaining", "listing", "measuring", "running")),
)  # fmt: skip

# Heavy SDKs: who may import them at all. torch is everywhere but in the runtime, the models' table and the CLI's top level.
SDK = {
    "triton": ("backends.triton*",),
    "tensorrt": ("backends.tensorrt*", "runtime.tensorrt*"),
    "onnx": ("compiler.frontends.onnx", "backends.tensorrt*"),
    "onnxruntime": ("compiler.frontends.onnx",),
    "transformers": ("compiler.frontends.huggingface",),
    "cuda": ("runtime.cuda",),
    "gguf": ("compiler.frontends.gguf*",),
    "torch": ("compiler*", "passes*", "backends*", "models*", "runtime.aten_step"),
    "typer": ("compiler.cli", "compiler.commands*"),
    "rich": ("compiler.console",),
}


@dataclass(frozen=True)
class Import:
    """One import statement: `module` imports `target` (ours: without the leading package name)."""

    module: str
    target: str
    line: int
    ours: bool


def modules() -> dict[str, Path]:
    """Dotted name below the package -> file, for every module that is installed."""
    files = [ROOT / "__init__.py", *(f for layer in LAYERS for f in sorted((ROOT / layer).rglob("*.py")))]
    return {".".join(f.relative_to(ROOT).with_suffix("").parts).removesuffix("__init__").removesuffix("."): f for f in files}


MODULES = modules()


def imports(module: str, source: str, is_package: bool) -> list[Import]:
    """Every import of a module, relative ones resolved, `from . import name` as the module it names where there is one."""
    here = module.split(".") if is_package and module else module.split(".")[:-1]
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [Import(module, a.name, node.lineno, False) for a in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.append(Import(module, node.module or "", node.lineno, False))
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] + (node.module.split(".") if node.module else [])
            for alias in node.names:
                whole = ".".join([*base, alias.name])
                found.append(Import(module, whole if whole in MODULES else ".".join(base), node.lineno, True))
    return found


def allowed(module: str, target: str) -> bool:
    """Does the table of layers let `module` import `target`?"""
    if target in ONLY_FOR_WIRING and module not in ("", *ONLY_FOR_WIRING):
        return False
    parts = module.split(".")
    for pattern, targets in MAY_IMPORT.items():
        if module == pattern or (pattern and fnmatch(module, pattern)):
            names = {"folder": parts[1] if len(parts) > 1 else "", "file": shared_file(target)}
            return any(fnmatch(target, t.format(**names)) for t in targets)
    return False


def shared_file(target: str) -> str:
    """The name of a file that lies in backends/ itself and so is shared by all backends, or a name nobody has."""
    parts = target.split(".")
    is_file = len(parts) == 2 and parts[0] == "backends" and (ROOT / "backends" / f"{parts[1]}.py").exists()
    return parts[1] if is_file else "?"


ALL_IMPORTS = [i for name, path in MODULES.items() for i in imports(name, path.read_text(), path.name == "__init__.py")]


def where(i: Import) -> str:
    return f"{MODULES[i.module].relative_to(ROOT)}:{i.line} imports {i.target}"


def test_layers_hold():
    wrong = [where(i) for i in ALL_IMPORTS if i.ours and not allowed(i.module, i.target)]
    assert not wrong, "\n".join(wrong)


def test_imports_inside_the_package_are_relative():
    wrong = [where(i) for i in ALL_IMPORTS if not i.ours and i.target.split(".")[0] == "infc"]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("sdk", SDK)
def test_heavy_sdks_stay_where_they_are_needed(sdk: str):
    wrong = [
        where(i)
        for i in ALL_IMPORTS
        if not i.ours and i.target.split(".")[0] == sdk and not any(fnmatch(i.module, pattern) for pattern in SDK[sdk])
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("module", "source", "wrong"),
    [
        ("runtime.session", "from ..compiler import errors", "compiler.errors"),
        ("runtime.session", "from ..compiler.errors import InfcError", "compiler.errors"),
        ("passes.fold_constants", "from . import merge_common", "passes.merge_common"),
        ("passes.fold_constants", "from ..compiler.driver import compile", "compiler.driver"),
        ("backends.cpu.printer", "from ..triton import build", "backends.triton.build"),
        ("backends.loops", "from .cpu import printer", "backends.cpu.printer"),
        ("compiler.pipeline", "from ..passes import PIPELINE", "passes"),
        ("compiler.pipeline", "from . import driver", "compiler.driver"),
        ("models.llama", "from ..compiler.ir import Graph", "compiler.ir"),
    ],
)
def test_the_rules_see_a_violation(module: str, source: str, wrong: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(MODULES, wrong, ROOT / "__init__.py")
    found = imports(module, source, is_package=False)
    assert [i.target for i in found] == [wrong]
    assert not allowed(module, found[0].target)


@pytest.mark.parametrize("module", ["infc", "infc.compiler.cli", "infc.runtime.session", "infc.runtime.bench"])
def test_serving_and_the_command_line_start_without_the_compiler(module: str):
    code = f"import {module}, sys; print(*sorted({{m.split('.')[0] for m in sys.modules}} & {set(SDK) - {'typer'}!r}))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT.parent)
    assert loaded.stdout.split() == [], f"import {module} loaded {loaded.stdout}"
