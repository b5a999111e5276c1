"""What earlier compiles found out: taken whole and by name, never where one input differs, and a fault behind a warm cache is caught."""
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from decoders import llama
from infc import passes
from infc.compiler import judge, kept, keys, verification
from infc.compiler.contracts import Broken
from infc.compiler.errors import CheckFailed
from infc.compiler.frontends import capture, kept_graph, torch_module
from infc.compiler.frontends.kept_graph import KeptGraph
from infc.compiler.ir import Graph, text
from infc.compiler.kept import Kept
from infc.compiler.ops import infc
from infc.compiler.pipeline import PassFailed, PipelineReport, run_pipeline
from infc.compiler.quant.blocks import Stored
from infc.compiler.reuse import cache_folder
from infc.compiler.rewrite import Pass, Report


class Note(kept.Entry, frozen=True):
    """Something to keep."""

    text: str


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, notes: list[str]) -> Kept:
    """An empty one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Kept(notes.append)


def entries() -> list[Path]:
    return sorted((cache_folder() / "kept").iterdir())


# ------------------------------------------------------------------------------------------------------------ the entries

def test_what_is_kept_is_taken_with_the_time_it_was_made(cache: Kept, notes: list[str]) -> None:
    assert cache.take("k", Note, "notes") is None
    made = Note(text="x")
    cache.keep("k", made, "notes")
    assert cache.take("k", Note, "notes") == made and made.made.endswith("+00:00") and notes == []


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "a bit": lambda raw: bytes([raw[0] ^ 1]) + raw[1:], "cut": lambda raw: raw[:-1], "empty": lambda raw: b"",
    "longer": lambda raw: raw + b"x"}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_entry_is_removed_with_a_note(cache: Kept, notes: list[str], how: str) -> None:
    cache.keep("k", Note(text="x"), "notes")
    [path] = entries()
    path.write_bytes(DAMAGE[how](path.read_bytes()))
    assert cache.take("k", Note, "notes") is None and not path.exists()
    assert len(notes) == 1 and f"notes kept in {path} are of no use" in notes[0]
    cache.keep("k", Note(text="y"), "notes")
    assert (found := cache.take("k", Note, "notes")) and found.text == "y" and len(notes) == 1


def _use(start: Any, rounds: int, clear: bool) -> None:
    """One process: every entry it takes is whole, whoever writes, removes or is killed meanwhile."""
    start.wait()
    for turn in range(rounds):
        notes: list[str] = []
        mine = Kept(notes.append)
        for name in ("same", f"own-{turn % 8}"):
            found = mine.take(name, Note, "notes")
            assert found is None or found.text == name * 10_000
            mine.keep(name, Note(text=name * 10_000), "notes")
        if clear: shutil.rmtree(cache_folder(), ignore_errors=True)
        assert all("are not kept for the next compile" in line for line in notes), notes


@pytest.mark.parametrize("clear", [False, True])
def test_processes_that_share_a_cache_see_whole_entries_or_none(cache: Kept, notes: list[str], clear: bool) -> None:
    """FIELD R28: the same keys at once from an empty cache, one process clearing it, one killed anywhere."""
    fork = multiprocessing.get_context("fork")
    start = fork.Barrier(5)
    processes = [fork.Process(target=_use, args=(start, 50 if n < 3 else 10**9, clear and n == 0)) for n in range(4)]
    for process in processes: process.start()
    start.wait()
    time.sleep(0.05)
    processes[3].kill()
    for process in processes: process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0, -signal.SIGKILL]
    cache.keep("same", Note(text="after"), "notes")
    assert (found := cache.take("same", Note, "notes")) and found.text == "after" and notes == []


def test_an_entry_under_another_key_is_not_taken(cache: Kept, notes: list[str]) -> None:
    cache.keep("k", Note(text="x"), "notes")
    [path] = entries()
    path.rename(path.with_name("other"))
    assert cache.take("other", Note, "notes") is None and len(notes) == 1


def test_a_cache_that_cannot_be_used_costs_one_note(cache: Kept, notes: list[str]) -> None:
    cache_folder().parent.mkdir(parents=True)
    cache_folder().write_text("")                                      # where its folder should be
    for name in ("a", "b"):
        assert cache.take(name, Note, "notes") is None
        cache.keep(name, Note(text="x"), "notes")
    assert len(notes) == 1 and "not kept for the next compile" in notes[0]


def test_an_entry_that_cannot_be_read_costs_one_note(cache: Kept, notes: list[str]) -> None:
    for name in ("a", "b"): (cache_folder() / "kept" / name / "inside").mkdir(parents=True)
    assert cache.take("a", Note, "notes") is None and cache.take("b", Note, "notes") is None
    assert len(notes) == 1 and "cannot be read" in notes[0]


def test_the_oldest_go_first(cache: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    for age, name in enumerate("abc"):
        cache.keep(name, Note(text="x" * 100), "notes")
        os.utime(cache_folder() / "kept" / name, (1000 + age, 1000 + age))
    monkeypatch.setattr(kept, "BUDGET_BYTES", 500)
    assert cache.take("a", Note, "notes")                              # used now
    cache.keep("d", Note(text="x" * 100), "notes")
    assert [path.name for path in entries()] == ["a", "d"]


def test_what_a_killed_compile_left_half_written_goes(cache: Kept) -> None:
    cache.keep("a", Note(text="x"), "notes")
    old, new = (cache_folder() / "kept" / name for name in (".b.1-00", ".c.1-00"))
    for half in (old, new): half.write_bytes(b"half")
    os.utime(old, (time.time() - 7200,) * 2)
    cache.keep("d", Note(text="x"), "notes")
    assert [path.name for path in entries()] == [new.name, "a", "d"]


# --------------------------------------------------------------------------------------------------------------- the keys

def test_a_key_holds_our_sources_and_how_pytorch_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [kept.key("a"), kept.key("b"), kept.key("a", "b"), kept.key("ab")]
    for owner, name, value in (
        (keys, "sources", lambda: "other"), (torch, "__version__", "2.11.0"), (torch, "get_num_threads", lambda: 99),
        (torch.backends.cpu, "get_cpu_capability", lambda: "AVX"), (kept.targets, "host_flags", lambda: frozenset({"sse"})),
        (torch, "get_float32_matmul_precision", lambda: "medium"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            found.append(kept.key("a"))
    with monkeypatch.context() as patch:
        patch.setenv("ONEDNN_DEFAULT_FPMATH_MODE", "BF16")
        found.append(kept.key("a"))
    assert len(set(found)) == len(found) and kept.key("a") == found[0]


def test_a_byte_of_any_source_is_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before, real = keys.sources(), Path.read_bytes
    for name in ("golden.py", "host_device.py", "linear.py", "canonicalize.py"):
        keys.sources.cache_clear()
        with monkeypatch.context() as patch:
            patch.setattr(Path, "read_bytes", lambda path, name=name: real(path) + (b"#" if path.name == name else b""))
            assert keys.sources() != before, name
    keys.sources.cache_clear()
    assert keys.sources() == before


def weight_byte(graph: Graph) -> None:
    name = next(iter(graph.weights))
    graph.weights[name] = graph.weights[name].clone()
    graph.weights[name].view(torch.uint8).reshape(-1)[0] ^= 1


def argument(graph: Graph) -> None:
    node = next(n for n in graph.nodes if n.target is torch.ops.aten.add.Tensor and isinstance(n.args[1], float))
    node.args = (node.args[0], node.args[1] * 2)


def weight_dtype(graph: Graph) -> None:
    name = next(name for name, w in graph.weights.items() if not w.any() or w.dim() == 1)
    graph.weights[name] = torch.ones_like(graph.weights[name]).bfloat16()


def node_type(graph: Graph) -> None:
    node = next(n for n in graph.nodes if n.op == "call_function" and isinstance(n.meta["val"], torch.Tensor))
    node.meta["val"] = node.meta["val"].bfloat16()


CHANGES: dict[str, Callable[[Graph], object]] = {
    "a weight's byte": weight_byte, "a weight's dtype": weight_dtype, "an argument": argument, "a value's dtype": node_type,
    "an output's name": lambda g: g.outputs.__setitem__(0, "other"), "meta": lambda g: g.meta.update(max_positions=63),
    "an exact value": lambda g: g.exact.update({next(iter(g.weights)): torch.ones(2, dtype=torch.float64)}),
    "samples": lambda g: setattr(g, "sample_inputs", replace(g.sample_inputs, vocab_size=47)),
    "what a GGUF stored": lambda g: setattr(g, "blocks", {"layer": Stored(np.zeros((2, 18), np.uint8), "Q4_0")}),
}


@pytest.fixture(scope="module")
def captured() -> Graph:
    return capture(llama())


@pytest.mark.parametrize("what", CHANGES)
def test_a_graphs_content_is_all_of_it(captured: Graph, what: str) -> None:
    twin = captured.copy()
    assert kept.content(twin) == kept.content(captured)
    CHANGES[what](twin)
    assert kept.content(twin) != kept.content(captured)


# ----------------------------------------------------------------------------------------------------------- golden answers

def test_golden_answers_are_computed_once(captured: Graph, cache: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    step = captured.copy()
    run_pipeline(step, passes.pipeline("fp32"), allow="exact", check="off", options={"dtype": "fp32"})
    first = verification.golden(captured, step, (1, 16), cache)
    assert first.kept_from == "" and len(entries()) == 1

    def computed(*_: object) -> None: raise AssertionError("computed again")

    monkeypatch.setattr(verification, "_computed", computed)
    again = verification.golden(captured, step, (1, 16), cache)
    assert again.kept_from and (again.bound, again.graph_error) == (first.bound, first.graph_error)
    for a, b in zip(first.cases, again.cases, strict=True):
        assert (a.tokens, a.rows) == (b.tokens, b.rows) and torch.equal(a.logits, b.logits)
    model, other = captured.copy(), step.copy()
    weight_byte(model)
    weight_byte(other)
    for graphs in ((captured, other), (model, step)):
        with pytest.raises(AssertionError, match="computed again"): verification.golden(*graphs, (1, 16), cache)
    with pytest.raises(AssertionError, match="computed again"): verification.golden(captured, step, (1, 16), None)
    monkeypatch.setattr(verification, "SHORT", (1, 10))
    with pytest.raises(AssertionError, match="computed again"): verification.golden(captured, step, (1, 16), cache)


# ------------------------------------------------------------------------------------------------------------------ passes

def compiled(captured: Graph, cache: Kept, spoil: Callable[[Graph], None] | None = None, **options: Any) -> PipelineReport:
    """The passes of a bf16 compile. spoil: what fuse_swiglu does to the graph besides."""
    def run(one: Pass, graph: Graph, report: Report) -> int:
        count = one.apply(graph, report)
        assert spoil
        spoil(graph)
        return count

    chosen = passes.pipeline("bf16")
    if spoil:
        chosen = [Pass(one.name, lambda g, r, one=one: run(one, g, r), requires=one.requires, provides=one.provides)
                  if one.name == "fuse_swiglu" else one for one in chosen]
    return run_pipeline(captured.copy(), chosen, allow="approximate", options={"dtype": "bf16"}, cache=cache, **options)


def test_passes_are_checked_once_and_say_when(captured: Graph, cache: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    first = compiled(captured, cache)
    with monkeypatch.context() as patch:
        patch.setattr(judge.Judge, "contract", lambda *_: pytest.fail("checked again"))
        again = compiled(captured, cache)
    for a, b in zip(first.passes, again.passes, strict=True):
        assert not a.kept_from and bool(b.kept_from) == bool(b.fired) == bool(b.json()["kept_from"])
        assert (a.name, a.fired, a.error, a.bound, a.promise) == (b.name, b.fired, b.error, b.bound, b.promise)
    assert sum(1 for p in again.passes if p.kept_from) >= 8
    assert not any(p.kept_from for p in compiled(captured, cache, check="strict").passes)


def test_another_weight_is_checked_anew(captured: Graph, cache: Kept) -> None:
    compiled(captured, cache)
    other = captured.copy()
    weight_byte(other)
    assert not any(p.kept_from for p in compiled(other, cache).passes)


def test_a_broken_pass_is_caught_though_all_others_are_known(captured: Graph, cache: Kept) -> None:
    def spoil(graph: Graph) -> None:
        node = [n for n in graph.nodes if n.target is infc.rms_norm.default][-1]
        node.args = (*node.args[:2], 1e-3)

    compiled(captured, cache)
    before = len(entries())
    for _ in range(2):                                                 # what failed is not kept
        with pytest.raises(PassFailed) as caught: compiled(captured, cache, spoil)
        assert caught.value.pass_name == "fuse_swiglu" and isinstance(caught.value.__cause__, Broken)
    assert len(entries()) == before


# --------------------------------------------------------------------------------------------------------- captured graphs

def module_and_place(cache: Kept, key: str = "k", told: list[str] | None = None) -> tuple[Any, KeptGraph]:
    return llama(), KeptGraph(cache, key, ([] if told is None else told).append)


def captured_by(module: Any, known: KeptGraph) -> Graph:
    from infc.compiler.frontends import capture_decoder
    from infc.compiler.frontends.model_meta import llama_meta

    return capture_decoder(module, llama_meta(module.config) | {"name": "llama"}, known=known)


def test_a_graph_is_captured_once_and_has_the_modules_own_weights(cache: Kept, notes: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    told = list[str]()
    module, known = module_and_place(cache, told=told)
    first = captured_by(module, known)
    monkeypatch.setattr(torch_module, "_export", lambda *_: pytest.fail("traced again"))
    again = captured_by(other := llama(), known)
    assert text(again) == text(first) and kept.content(again) == kept.content(first) and notes == [] and len(told) == 1
    assert [(n.meta["origin"], n.meta["line"]) for n in again.nodes] == [(n.meta["origin"], n.meta["line"]) for n in first.nodes]
    mine = {w.data_ptr() for w in [*other.parameters(), *other.buffers()]}
    assert all(w.data_ptr() in mine for w in again.weights.values())
    with pytest.raises(pytest.fail.Exception, match="traced again"): captured_by(module, module_and_place(cache, "other")[1])


def altered(change: Callable[[Any], Any]) -> None:
    """Another graph in the one entry, whole."""
    [path] = entries()
    raw = kept.read(path)
    assert raw
    entry = msgspec.msgpack.decode(raw, type=kept_graph._Captured)
    kept.write(path, msgspec.msgpack.encode(change(entry)))


def test_a_kept_graph_that_is_inferred_otherwise_is_captured_again(cache: Kept, notes: list[str]) -> None:
    module, known = module_and_place(cache)
    first = captured_by(module, known)
    altered(lambda entry: msgspec.structs.replace(entry, text=entry.text.replace("f32[B,S,32]", "f32[B,S,33]", 1)))
    assert text(captured_by(module, known)) == text(first)
    assert len(notes) == 1 and "capturing again" in notes[0]


def test_a_kept_graph_is_compared_with_the_module(cache: Kept) -> None:
    module, known = module_and_place(cache)
    captured_by(module, known)
    altered(lambda entry: msgspec.structs.replace(
        entry, text=entry.text.replace("1e-05", "0.001"), lines=[
            msgspec.structs.replace(line, args=[1e-3 if arg == 1e-5 else arg for arg in line.args]) for line in entry.lines]))
    with pytest.raises(CheckFailed, match=r"differs from the module.*--no-cache captures it again"): captured_by(module, known)
