"""What `infc report` computes before anything is drawn: the module tree, sources, memory, timeline, roofline, and the file itself."""

import json
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from infc.backends.cpu import peaks
from infc.compiler.costs.cost import decode, prefill
from infc.compiler.costs.peaks import Peaks
from infc.compiler.report import collect, page, phases
from infc.compiler.report.families import FAMILIES, family
from infc.compiler.report.graphs import GONE, graphs
from infc.compiler.report.memory import memory_map
from infc.compiler.report.page import embedded
from infc.compiler.report.pipeline import timeline
from infc.compiler.report.roofline import roofline
from infc.compiler.report.sources import sources
from infc.compiler.report.tables import choice_table
from infc.compiler.report.tree import home_of, module_tree
from infc.runtime.artifact import read
from infc.runtime.program import Buffer, Call, Candidate, Choice, Kernel, Program, Step
from tiny_artifact import infc, tiny

PEAKS = Peaks(
    cpu="a test", isa="", threads=2, read_gb_s=10.0, kv_read_gb_s={"bf16": 10.0}, cache_gb_s=50.0, thread_cache_gb_s=50.0,
    weight_cache_gb_s=50.0, key_cache_gb_s={"bf16": 50.0}, scan_gb_s=50.0, product_gflop_s={"bf16": 100.0, "f32": 50.0},
    attention_gflop_s={"bf16": 100.0, "f32": 50.0},
    exposed=0.0, barrier_s=0.0, aten_call_s=0.0, llc_bytes=1 << 20)


def node(target: str, *origin: str, kind: str = "call", line: str = "", type: str = "f32[T]") -> dict[str, Any]:
    return {"name": target, "kind": kind, "target": target if kind == "call" else "", "args": "", "inputs": [], "type": type,
            "origin": list(origin), "line": line, "passes": []}


def tree(nodes: list[dict[str, Any]]) -> list[Any]:
    return module_tree(nodes, [family(n["target"]) for n in nodes])


def leaves(entries: list[Any]) -> Iterator[int]:
    for entry in entries:
        if isinstance(entry, int):
            yield entry
        else:
            yield from leaves(entry["e"])


def layer(number: int, kind: str = "f32[T]") -> list[dict[str, Any]]:
    return [node("infc.rms_norm", f"m.layers.{number}.norm", type=kind), node("infc.linear", f"m.layers.{number}.proj", type=kind)]


def test_equal_layers_are_one_entry():
    nodes = [n for i in range(30) for n in layer(i)]
    [model] = tree(nodes)
    [layers] = model["e"]
    [fold] = layers["e"]
    assert (fold["l"], fold["a"], fold["t"], len(fold["e"])) == ("0..29", 30, 60, 30)
    assert fold["f"] == {str(FAMILIES.index("norm")): 30, str(FAMILIES.index("linear")): 30}
    assert list(leaves([fold])) == list(range(60))


def test_a_layer_that_differs_is_not_folded():
    nodes = [n for i in range(6) for n in layer(i, "bf16[T]" if i == 2 else "f32[T]")]
    [layers] = tree(nodes)[0]["e"]
    assert [(e["l"], e.get("a")) for e in layers["e"]] == [("0..1", 2), ("2", None), ("3..5", 3)]


def test_modules_stand_in_the_order_in_which_they_run_weights_first():
    nodes = [node("w", "m.b", kind="weight"), node("aten.add.Tensor", "m.a"), node("aten.mul.Tensor", "m"), node("aten.neg.default", "m.b")]
    [model] = tree(nodes)
    assert [e if isinstance(e, int) else e["l"] for e in model["e"]] == ["a", 2, "b"]
    assert model["e"][2]["e"] == [0, 3]


def test_a_node_of_several_modules_is_shown_where_they_meet():
    assert home_of(node("infc.linear", "m.attn.q", "m.attn.k")) == "m.attn"
    assert home_of(node("infc.linear", "m.attn")) == "m.attn"
    assert home_of(node("infc.linear", "a.x", "b.x")) == home_of(node("aten.sym_size.int")) == "(no module)"
    assert home_of(node("x", "m.attn", kind="input")) == "(inputs and results)"


def test_sources_follow_the_longest_module_path():
    captured = [node("aten.linear", "m.mlp.gate"), node("aten.silu", "m.mlp"), node("aten.linear", "m.mlp.down"), node("aten.add", "m")]
    final = [node("infc.linear_swiglu", "m.mlp"), node("infc.linear", "m.mlp.down")]
    assert sources(captured, final) == [[0, 1], [2]]


def test_sources_at_one_path_are_told_apart():
    captured = [node("aten.sdpa", "m", line="2"), node("aten.cat", "m", line="1"), node("aten.neg", "m", line="3"),
                node("aten.mul", "m", line="1")]
    final = [node("infc.rope", "m", line="1"), node("infc.attention", "m", line="2"), node("aten.mul", "m", line="9")]
    assert sources(captured, final) == [[1, 2], [0, 2], [3]]


def test_captured_nodes_take_the_colour_of_what_they_went_into():
    captured = {"nodes": [node("aten.pow", "m.norm"), node("aten.where", "m.mask")]}
    final = {"nodes": [node("infc.rms_norm", "m.norm")]}
    found = graphs({"captured": captured, "final": final})
    assert found is not None
    assert [n[-1] for n in found["captured"]["nodes"]] == [FAMILIES.index("norm"), GONE]


@pytest.mark.parametrize(("op", "name"), [
    ("infc.rms_norm", "norm"), ("infc.add_rms_norm", "norm"), ("infc.linear", "linear"), ("infc.linear_swiglu", "swiglu"),
    ("infc.paged_attention", "attention"), ("infc.rope_kv_write", "rope"), ("infc.sample", "sample"), ("loop.mul.cos", "loop"),
    ("aten.linear", "aten"), ("", "aten")])
def test_families(op: str, name: str):
    assert FAMILIES[family(op)] == name


def test_memory_map_by_hand():
    buffers = (Buffer("x", "input", "f32", ("T",), 64), Buffer("a", "arena", "f32", ("T",), 64, 0),
               Buffer("b", "arena", "f32", ("T",), 128, 64), Buffer("c", "arena", "f32", ("T",), 64, 0))
    steps = (Step("k", (0, 1), "infc.rms_norm", origin=("m.n",)), Step("k", (1, 2), "infc.linear"), Step("k", (2, 3), "infc.linear"))
    found = memory_map(Program("step_T1", {"T": 1}, ("T",), 192, buffers, steps))
    assert found["live"] == [64, 192, 192] and found["peak"] == {"step": 1, "bytes": 192} and found["arena"] == 192
    assert found["buffers"] == [["a", "f32[T]", 0, 64, 0, 1, FAMILIES.index("norm"), "m.n"], ["b", "f32[T]", 64, 128, 1, 2, 0, ""],
                                ["c", "f32[T]", 0, 64, 2, 2, 0, ""]]


def test_no_two_live_buffers_of_an_artifact_share_a_byte():
    with read(tiny()) as artifact:
        maps = [memory_map(artifact.program(b.name)) for b in artifact.manifest.buckets]
    for found in maps:
        assert found["peak"]["bytes"] <= found["arena"] and len(found["buffers"]) > 10
        for i, (_, _, offset, size, first, last, *_) in enumerate(found["buffers"]):
            for _, _, other, width, begin, end, *_ in found["buffers"][:i]:
                assert last < begin or end < first or offset + size <= other or other + width <= offset


def passed(**changes: Any) -> dict[str, Any]:
    found = {"name": "fuse_rope", "fired": 2, "refused": [], "contract": "exact", "error": 1e-12, "seconds": 0.5, "check_seconds": 1.5}
    return found | changes


def cuts(program: str = "step_T8") -> tuple[Program, list[dict[str, str]]]:
    """A program of one product with two cuts, the second runs; and what was dropped of all buckets."""
    first, second = (Step(name, (0,), "infc.linear", grid=(4, 1, 1)) for name in ("h1", "h2"))
    ways = Candidate("64x32", (first, second), 2, 1.5, 12.0), Candidate("16x64", (first,), 4, 0.5, 9.0, 7.25)
    dropped = [{"bucket": bucket, "op": "infc.linear", "candidate": f"128x{n}", "reason": "needs 300 KiB of shared memory"}
               for bucket, n in (("step_T1", 1), ("step_T8", 8))]
    choice = Choice("infc.linear", ways, (Call(0, ()), Call(3, ())), 1)
    return Program(program, {"T": 8, "N": 4, "R": 4, "M": 2}, ("T",), 0, (), (), (choice,)), dropped


def test_cuts_that_were_kept_and_dropped():
    with read(tiny()) as artifact:
        kernels = tuple(Kernel(name, name, f"k_{name}", "infc.linear", "sm_90a", registers=many) for name, many in (("h1", 64), ("h2", 90)))
        manifest = msgspec.structs.replace(artifact.manifest, kernels=kernels)
    found = choice_table(manifest, *cuts())
    names = ("name", "runs", "registers", "programs_per_sm", "waves", "predicted_us", "measured_us")
    assert [tuple(row[name] for name in names) for row in found["kept"]] == [
        ("64x32", False, 90, 2, 1.5, 12.0, None), ("16x64", True, 64, 4, 0.5, 9.0, 7.25)]
    assert {(row["op"], row["calls"]) for row in found["kept"]} == {("infc.linear", 2)}
    assert found["dropped"] == [{"op": "infc.linear", "candidate": "128x8", "reason": "needs 300 KiB of shared memory"}]


def test_timeline():
    refused = [{"site": f"m.{i}", "reason": "too wide"} for i in range(3)]
    found = timeline({"seconds": {"passes": 4.0, "total": 5.0}, "passes": [
        passed(bound=1e-9), passed(fired=0, error=None, refused=refused), passed(fired=0, error=None, dropped="it broke"),
        passed(fired=0, error=None, skipped="INFC_STOP was reached")]})
    assert [p["start"] for p in found["passes"]] == [0, 2, 4, 6] and found["seconds"] == 8
    assert [p["state"] for p in found["passes"]] == ["fired", "idle", "dropped", "skipped"]
    assert found["passes"][0]["used"] == pytest.approx(1e-3) and found["passes"][1]["used"] is None
    assert found["passes"][1]["refused"] == [{"reason": "too wide", "sites": ["m.0", "m.1", "m.2"]}]
    assert [p["why"] for p in found["passes"][2:]] == ["it broke", "INFC_STOP was reached"]
    assert found["phases"] == [["passes", 4.0]]


def test_roofline_of_one_product():
    """1000 x 1000 weights in bf16, 2 MB read at 10 GB/s: 200 us for 2 Mflop, which is 10 Gflop/s at 1 flop a byte."""
    kernel = {"kernel": "k", "name": "product", "op": "infc.linear", "kind": "product", "dtype": "bf16", "flops": [[2_000_000, "T"]],
              "weights": [[2_000_000]], "kv": [], "activations": []}
    costs = {"kernels": [kernel], "steps": {"step_T1": [0, 0]}, "buckets": {"step_T1": {"T": 1, "N": 1, "R": 1, "M": 16}},
             "dtype": "bf16", "kv_bytes_per_token": 0, "weight_bytes": 4_000_000, "max_positions": 512}
    [phase] = roofline(costs, PEAKS, [decode(1, 100)])["phases"]
    [point] = phase["points"]
    assert point["calls"] == 2 and point["share"] == 1 and point["intensity"] == 1
    assert phase["seconds"] == pytest.approx(400e-6) and point["rate"] == pytest.approx(10e9) and not phase["measured"]
    [phase] = roofline(costs, PEAKS, [decode(1, 100)], {"decode 1 x 100": {"k": 1e-3}})["phases"]
    assert phase["measured"] and phase["seconds"] == pytest.approx(2e-3) and phase["points"][0]["rate"] == pytest.approx(2e9)


def test_phases_fit_the_artifact():
    costs = {"max_positions": 64, "buckets": {"a": {"T": 4, "N": 4, "R": 4, "M": 2}}}
    assert phases(costs) == [decode(1, 63), decode(4, 63), prefill(4, 0, 4)]


def test_collect_of_an_artifact():
    with read(tiny()) as artifact:
        found, manifest, report = collect(artifact, PEAKS), artifact.manifest, artifact.report()
    assert found["head"]["name"] == "tiny" and found["head"]["version"] == manifest.version
    assert [b["name"] for b in found["buckets"]] == [b.name for b in manifest.buckets]
    for bucket, kernels in zip(found["buckets"], found["kernels"].values(), strict=True):
        assert sum(k["steps"] for k in kernels) == bucket["steps"] and sum(k["bytes"] for k in kernels) == bucket["bytes"]
    for side in ("captured", "final"):
        assert sorted(leaves(found["graph"][side]["tree"])) == list(range(len(report["graphs"][side]["nodes"])))
    assert [p["name"] for p in found["pipeline"]["passes"]] == [p["name"] for p in report["passes"]]
    assert len(found["speed"]) == len(found["roofline"]["phases"]) == 3
    fused = [i for i, n in enumerate(report["graphs"]["final"]["nodes"]) if n["target"] == "infc.rms_norm"]
    assert fused and all(len(found["graph"]["sources"][i]) == 6 for i in fused)   # pow, mean, add, rsqrt, mul, mul


def test_without_peaks_no_speed_is_made_up():
    with read(tiny()) as artifact:
        found = collect(artifact)
    assert found["speed"] == [] and found["roofline"] is None and "no speed is predicted" in found["no_roofline"]


def test_hostile_names_stay_text():
    name = "</script><script>alert(1)</script><!-- {{data}} \u2028 &"
    text = embedded({"name": name, "nan": float("nan")})
    assert not re.search("[<>&\u2028]", text)
    assert json.loads(text) == {"name": name, "nan": None}
    with read(tiny()) as artifact:
        found = collect(artifact)
    found["head"]["name"] = name
    html = page(found)
    assert html.count("</script>") == 2 and "<script>alert" not in html and "&lt;script&gt;alert" in html.partition("<style>")[0]


def test_the_page_needs_nothing_beside_it():
    with read(tiny()) as artifact:
        html = page(collect(artifact, PEAKS))
    assert set(re.findall(r"https?://[^\s\"']+", html)) == {"http://www.w3.org/2000/svg"}       # a name, not an address
    assert not re.search(r"<link|<img|@import|url\(|src=|innerHTML|eval\(", html)
    assert "{{" not in html.partition('type="application/json"')[0]


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(peaks, "BUDGET_S", 1.0)                      # what the peaks are is not looked at
    monkeypatch.setattr(peaks, "last_level_cache", lambda: 1 << 20)
    out = tmp_path / "report.html"
    done = infc("report", tiny(), "-o", out, "--json")
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    assert made["model"] == "tiny" and made["bytes"] == out.stat().st_size < 5e6 and made["measured"] is None
    before = out.read_bytes()
    done = infc("report", tiny(), "-o", out)
    assert done.returncode == 2 and done.stderr == f"infc: {out} exists: add --force to replace it, or name another with -o\n"
    assert out.read_bytes() == before
    done = infc("report", tiny(), "-o", out, "--force", "--measured", "--quiet")
    assert done.returncode == 0 and done.stdout == f"{out}\n" and done.stderr == ""
    found = json.loads(re.search(r'type="application/json">(.*?)</script>', out.read_text())[1])   # type: ignore[index]
    assert found["measured"]["golden"]["passed"] and set(found["measured"]["phases"]) == {s["name"] for s in found["speed"]}
    assert all(p["measured_s"] > 0 for phase in found["roofline"]["phases"] for p in phase["points"])
    assert [f.name for f in tmp_path.iterdir()] == ["report.html"]


def test_times_of_a_busy_machine_are_said_to_be_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from infc.compiler.costs import measure_phase

    monkeypatch.setattr(measure_phase, "process_time", lambda: 0.5 * time.perf_counter())
    out, line = tmp_path / "report.html", "other processes had these CPUs 50% of the time: measure again on a quiet machine"
    done = infc("report", tiny(), "-o", out, "--measured", "--threads", 1)
    assert done.returncode == 0 and f"  {line}\n" in done.stderr
    assert json.loads(re.search(r'type="application/json">(.*?)</script>', out.read_text())[1])["measured"]["findings"] == [line]  # type: ignore[index]


def test_bad_input_is_one_line(tmp_path: Path):
    other = tmp_path / "other.infc"
    shutil.copytree(tiny(), other)
    manifest = other / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"schema": 2', '"schema": 99', 1))
    cases = [
        (("report", tmp_path / "none.infc"), "no such artifact"), (("report", other, "-o", tmp_path / "x.html"), "schema"),
        (("report", tiny(), "-o", tmp_path), "is a folder"), (("report", tiny(), "-o", tmp_path / "no" / "x.html"), "there is no folder"),
        (("report", tiny(), "-o", "/dev/null", "--force"), "is no regular file"), (("report", "tiny"), "infc compile tiny")]
    for command, said in cases:
        done = infc(*command)
        assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1, (command, done.stderr)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["other.infc"]
