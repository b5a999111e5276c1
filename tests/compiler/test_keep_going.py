"""A compile whose pass is broken fails and names it, or keeps going without it and says so in everything it writes."""
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from infc import passes
from infc.compiler.cli import main
from infc.compiler.driver import Event, Options, compile
from infc.compiler.errors import CheckFailed
from infc.compiler.ir import Graph
from infc.compiler.ops import infc
from infc.compiler.ops.registry import arguments
from infc.compiler.pipeline import PassFailed
from infc.compiler.rewrite import Pass, Report
from infc.runtime.artifact import read

MODEL = "random:tiny?layers=1"


def setting(target: Any, **changes: object) -> Callable[[Graph], None]:
    """Other arguments for the last call of an operator."""
    def spoil(graph: Graph) -> None:
        node = [n for n in graph.nodes if n.target is target][-1]
        node.args = tuple((arguments(node) | changes).values())

    return spoil


def coarser(graph: Graph) -> None:
    graph.weights = {n: (w * 16).round() / 16 if w.dtype == torch.bfloat16 else w for n, w in graph.weights.items()}


FAULTS = {
    "fuse_rms_norm": setting(infc.rms_norm.default, eps=1e-3),
    "rewrite_attention": setting(infc.attention.default, mask="none"),
    "page_kv_cache": setting(infc.paged_attention.default, window=8),
    "narrow_dtype": coarser,
}


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Breaks one pass: what it does, then its fault."""
    def plant(name: str) -> None:
        right = passes.load(name)

        def run(graph: Graph, report: Report) -> int:
            count = right.apply(graph, report)
            if count: FAULTS[name](graph)
            return count

        wrong = Pass(name, run, right.contract, right.requires, right.provides, right.check)
        monkeypatch.setattr(f"infc.passes.{name}.PASS", wrong)

    return plant


def options(**given: Any) -> Options:
    return Options(buckets=(1, 16), reuse=False, **given)


def test_the_compile_fails_and_names_the_pass(broken, tmp_path: Path, capsys: pytest.CaptureFixture):
    broken("fuse_rms_norm")
    code = main(["compile", MODEL, "-o", str(tmp_path / "x.infc"), "--no-reuse", "--quiet"])
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert code == 1
    assert line.startswith("infc: pass fuse_rms_norm: another function: fp64 results differ in logits on sample 0 (input_ids [2, 9]): ")
    assert "bound 1e-09; first at %" in line and "; by rewrite 1 of 3, %rms_norm in model.layers.0." in line and "[llama.py:" in line
    assert not list(tmp_path.iterdir())


def test_a_check_of_its_own_fails_the_compile_too(broken, tmp_path: Path):
    broken("page_kv_cache")
    with pytest.raises(PassFailed, match="pass page_kv_cache: sequence whole: steps give other logits"):
        compile(MODEL, tmp_path / "x.infc", options=options())


def test_keep_going_writes_an_artifact_that_says_what_is_missing(broken, tmp_path: Path):
    broken("fuse_rms_norm")
    events: list[Event] = []
    result = compile(MODEL, tmp_path / "x.infc", options=options(keep_going=True), on_event=events.append)
    (note,) = [n for n in result.notes if "fuse_rms_norm" in n]
    assert note.startswith("pass fuse_rms_norm was dropped: another function") and note in [e.text for e in events if e.kind == "note"]
    with read(tmp_path / "x.infc") as artifact:
        report, manifest = artifact.report(), artifact.manifest
    (dropped,) = [p for p in report["passes"] if p["dropped"]]
    assert (dropped["name"], dropped["fired"], dropped["bound"]) == ("fuse_rms_norm", 0, 1e-9) and dropped["error"] > 1e-9
    assert len(report["passes"]) == len(passes.pipeline("bf16")) and "fuse_rms_norm" not in [p.name for p in manifest.passes]
    bounds = {p.name: p.bound for p in manifest.passes}
    assert bounds["rewrite_attention"].startswith("1e-09 of each row's largest value, in fp64") and "KL" in bounds["narrow_dtype"]
    assert manifest.contract == "approximate" and result.verify["replayed"]


def test_without_the_narrow_pass_the_artifact_is_fp32_and_exact(broken, tmp_path: Path):
    broken("narrow_dtype")
    result = compile(MODEL, tmp_path / "x.infc", options=options(keep_going=True))
    with read(tmp_path / "x.infc") as artifact:
        manifest = artifact.manifest
    assert (manifest.dtype, manifest.contract, {kv.dtype for kv in manifest.kv}) == ("fp32", "exact", {"f32"})
    assert "KL to fp32" in next(p["dropped"] for p in result.passes if p["name"] == "narrow_dtype")


def test_what_a_decoder_needs_cannot_be_left_out(broken, tmp_path: Path):
    broken("rewrite_attention")
    with pytest.raises(CheckFailed, match="the compile cannot go on without page_kv_cache: pass page_kv_cache was skipped: it requires "
                                          "rewrite_attention, which was dropped; pass rewrite_attention was dropped: another function"):
        compile(MODEL, tmp_path / "x.infc", options=options(keep_going=True))
    assert not list(tmp_path.iterdir())
