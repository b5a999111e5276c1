"""A small decoder that kernels take, a copy of the kernels' headers with a fault in it, and passes with one.

Tests that compile it share its two libraries, good and bad: compiled code is kept between compiles.
"""
import functools
import importlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from decoders import llama
from infc.compiler import driver
from infc.compiler.frontends import capture
from infc.compiler.ir import Graph
from infc.compiler.rewrite import Pass, Report

TAIL = tuple(f"    for (int64_t c = 0; {end}; c += 16)\n        store_some(y + c, scale" for end in ("c < n", "c + 16 < n"))
"""RMSNorm in norm.h, right and without the last 16 columns of each row."""


FP32 = driver.Options(dtype="fp32", check="off", buckets=(16,))


@functools.cache
def decoder() -> Graph:
    """Four layers of captured Llama."""
    return capture(llama(layers=4, hidden_size=48, head_dim=16))


def spoil(monkeypatch: pytest.MonkeyPatch, module: Any, change: Callable[[Graph, Any], object]) -> None:
    """Let the pass of a module call change(graph, node) on each node that it makes."""
    real = module.PASS

    def run(graph: Graph, report: Report) -> int:
        old = set(graph.nodes)
        fired = real.apply(graph, report)
        for node in [n for n in graph.nodes if n not in old]: change(graph, node)
        return fired

    monkeypatch.setattr(module, "PASS", Pass(real.name, run, real.contract, real.requires, real.provides, real.check))


def plant(monkeypatch: pytest.MonkeyPatch, folder: Path, header: str, old: str, new: str) -> None:
    """Compile with a copy of the kernels' headers in which `old` is `new`."""
    modules = [importlib.import_module(f"infc.backends.cpu.{name}") for name in ("toolchain", "backend")]
    shutil.copytree(modules[0].KERNELS, folder)
    text = (folder / header).read_text()
    assert text.count(old) == 1, f"{header} changed: plant the fault anew"
    (folder / header).write_text(text.replace(old, new))
    for module in modules: monkeypatch.setattr(module, "KERNELS", folder)
