"""report.html in a real browser: it draws without an error or a request, and does what a person clicks."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chromium
import pytest
from infc.compiler.report import collect, page
from infc.compiler.report.graphs import graphs
from infc.runtime.artifact import read
from tiny_artifact import tiny

from .test_report import PEAKS, node

BROWSER = chromium.find()
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium here: install chromium, or name one in INFC_TEST_CHROMIUM")


@pytest.fixture(scope="module")
def browser() -> Iterator[chromium.Page]:
    assert BROWSER
    with chromium.page(BROWSER) as opened:
        yield opened


@pytest.fixture(scope="module")
def data() -> dict[str, Any]:
    with read(tiny()) as artifact:
        return collect(artifact, PEAKS)


def shown(browser: chromium.Page, data: dict[str, Any], folder: Path, *, dark: bool = False) -> chromium.Page:
    """The page of `data`, drawn; what it complained about is in `errors`, empty at first."""
    file = folder / "report.html"
    file.write_text(page(data), encoding="utf-8")
    browser.errors.clear()
    browser.open(file, dark=dark)
    assert browser.run("document.documentElement.dataset.drawn") and not browser.errors, browser.errors
    return browser


def texts(browser: chromium.Page, selector: str) -> list[str]:
    return browser.run(f"[...document.querySelectorAll({selector!r})].map((e) => e.textContent)")


def open_all(browser: chromium.Page, side: str) -> None:
    """Open every module of a side, layer by layer."""
    browser.run(f"(() => {{ for (let rows; (rows = document.querySelectorAll('{side} .mod[aria-expanded=false]')).length;) "
                "rows.forEach((row) => row.click()); })()")


CAPTURED, FINAL = "#graph .side:first-child", "#graph .side:last-child"


def test_says_that_its_times_are_of_a_busy_machine(browser: chromium.Page, data: dict[str, Any], tmp_path: Path):
    found = {"golden": {"error": 0.0, "top1": 1.0}, "phases": {s["name"]: 1e-3 for s in data["speed"]}, "findings": ["others ran too"]}
    assert "others ran too" in texts(shown(browser, data | {"measured": found}, tmp_path), ".facts dd")


@pytest.mark.parametrize("dark", [False, True])
def test_draws_everything_in_both_schemes(browser: chromium.Page, data: dict[str, Any], tmp_path: Path, dark: bool):
    at = shown(browser, data, tmp_path, dark=dark)
    assert texts(at, "h2") == ["Pipeline", "Graph", "Roofline", "Memory", "Programs"] and texts(at, "h1") == ["tiny"]
    assert texts(at, ".pass .mono") == [p["name"] for p in data["pipeline"]["passes"]]
    assert len(texts(at, "#memory .rect")) == len(data["memory"]["step_T512"]["buffers"])
    points = [p for phase in data["roofline"]["phases"] for p in phase["points"] if p["intensity"] and p["rate"]]
    assert len(texts(at, "#roofline .dot")) == len(points) > 20
    background = at.run("getComputedStyle(document.body).backgroundColor")
    at.click("#theme")
    assert at.run("getComputedStyle(document.body).backgroundColor") != background
    assert at.run("document.documentElement.dataset.theme") == ("light" if dark else "dark")
    assert at.run("document.documentElement.scrollWidth <= innerWidth") and not at.errors


def test_cuts_are_shown_where_kernels_have_some(browser: chromium.Page, data: dict[str, Any], tmp_path: Path):
    at = shown(browser, data, tmp_path)
    assert not [title for title in texts(at, "#programs h3") if title.startswith("Cuts")]            # of a CPU's kernels there are none
    cut = {"op": "infc.linear", "calls": 2, "name": "64x32", "runs": False, "registers": 90, "programs_per_sm": 2, "waves": 1.5,
           "predicted_us": 12.0, "measured_us": None}
    found = {"kept": [cut, cut | {"name": "16x64", "runs": True, "measured_us": 7.25, "waves": 0.004}],
             "dropped": [{"op": "infc.linear", "candidate": "128x8", "reason": "needs 300 KiB of <shared> memory"}]}
    at = shown(browser, data | {"choices": data["choices"] | {next(iter(data["kernels"])): found}}, tmp_path)
    assert len([title for title in texts(at, "#programs h3") if title.startswith("Cuts")]) == 2
    assert texts(at, "#programs strong.mono") == ["16x64, runs"]
    assert {"64x32", "90", "1.50", "0.0040", "12.00", "7.25", "128x8", "needs 300 KiB of <shared> memory"} <= set(texts(at, "#programs td"))


def test_nothing_overlaps_or_leaves_its_plot(browser: chromium.Page, data: dict[str, Any], tmp_path: Path):
    at = shown(browser, data, tmp_path)
    boxes = at.run("[...document.querySelectorAll('#roofline svg, #memory svg')].flatMap((plot) => { "
                   "const b = plot.getBoundingClientRect(); "
                   "return [...plot.querySelectorAll('text, .rect, .dot')].map((e) => { const r = e.getBoundingClientRect(); "
                   "return [r.left - b.left, r.top - b.top, b.right - r.right, b.bottom - r.bottom]; }); })")
    assert len(boxes) > 60 and min(min(box) for box in boxes) > -8
    heads = at.run("[...document.querySelectorAll('.pass')].map((row) => { "
                   "const cells = [...row.children].map((c) => c.getBoundingClientRect()); "
                   "return cells.slice(1).every((c, i) => c.left >= cells[i].right - 0.5); })")
    assert all(heads)


def test_a_final_node_shows_what_it_stands_for(browser: chromium.Page, data: dict[str, Any], tmp_path: Path):
    at = shown(browser, data, tmp_path)
    open_all(at, FINAL)
    at.run(f"[...document.querySelectorAll('{FINAL} .node')].find((row) => row.textContent.includes('infc.rms_norm')).id = 'norm'")
    at.click("#norm")
    hit = texts(at, f"{CAPTURED} .node.hit .op")
    assert hit == ["aten.pow.Tensor_Scalar", "aten.mean.dim", "aten.add.Tensor", "aten.rsqrt", "aten.mul.Tensor", "aten.mul.Tensor"]
    detail = texts(at, ".detail")[0]
    assert "fuse_rms_norm" in detail and "model.layers.0.input_layernorm" in detail and "stands for6 nodes" in detail
    at.run(f"document.querySelector('{CAPTURED} .node.hit').id = 'pow'")
    at.click("#pow")                                   # and back
    assert texts(at, f"{FINAL} .node.hit .op") == ["infc.rms_norm"] and "went into1 node" in texts(at, ".detail")[0]
    assert not at.errors


def test_a_number_in_a_search_is_a_whole_number(browser: chromium.Page, data: dict[str, Any], tmp_path: Path):
    nodes = [node("aten.mul.Tensor", f"m.layers.{i}") for i in range(13)]
    at = shown(browser, data | {"graph": graphs({"captured": {"nodes": nodes}, "final": {"nodes": nodes}})}, tmp_path)
    at.type("#search", "LAYERS.1")
    assert texts(at, f"{FINAL} .mod .label") == ["m", "layers", "1"]
    at.run("document.getElementById('search').value = ''")
    at.type("#search", "layers.(1")                     # no pattern, just text
    assert len(texts(at, ".tree .none")) == 2 and not at.errors


def test_search_filters_both_sides(browser: chromium.Page, data: dict[str, Any], tmp_path: Path):
    at = shown(browser, data, tmp_path)
    at.type("#search", "layers.1 linear")
    open_all(at, FINAL)
    found = texts(at, f"{FINAL} .node .op")
    assert found and all("linear" in op for op in found if op.startswith("infc"))
    assert texts(at, f"{FINAL} .mod .label")[:3] == ["model", "layers", "1"]
    at.run("document.getElementById('search').value = ''")
    at.type("#search", "no such thing")
    assert len(texts(at, ".tree .none")) == 2 and not at.errors


def test_a_pass_opens_to_its_refusals(browser: chromium.Page, data: dict[str, Any], tmp_path: Path):
    passes = [dict(p) for p in data["pipeline"]["passes"]]
    passes[1] |= {"refused": [{"reason": "weight is fp32", "sites": ["m.7", "m.8"]}]}
    passes[2] |= {"state": "dropped", "why": "it broke its contract"}
    at = shown(browser, data | {"pipeline": data["pipeline"] | {"passes": passes}}, tmp_path)
    at.click("#pass-1")
    assert "weight is fp32, 2 times: m.7, m.8" in texts(at, ".opened")[0]
    assert at.run("document.querySelector('#pass-1').getAttribute('aria-expanded')") == "true"
    at.click("#pass-1")
    assert texts(at, ".opened") == [] and texts(at, "#pass-2 .chip.dropped") == ["dropped"]
    at.click("#pass-2")
    assert "it broke its contract" in texts(at, ".opened")[0] and not at.errors


def test_plots_name_what_is_under_the_pointer(browser: chromium.Page, data: dict[str, Any], tmp_path: Path):
    at = shown(browser, data, tmp_path)
    at.hover("#roofline .dot")
    assert any(name in texts(at, "#tip")[0] for name in {p["name"] for phase in data["roofline"]["phases"] for p in phase["points"]})
    at.run("[...document.querySelectorAll('#memory .choice button')].find((b) => b.textContent === 'step_T1').id = 'first'")
    at.click("#first")
    at.hover("#memory .rect")
    assert "written by step" in texts(at, "#tip")[0] and "step_T1:" in texts(at, "#memory .lead p")[0] and not at.errors


def test_thirty_layers_stay_light(browser: chromium.Page, data: dict[str, Any], tmp_path: Path):
    """1,800 captured nodes: few rows until they are asked for, one layer when one is opened. Rows are what costs a browser time."""
    nodes = [node("aten.mul.Tensor", f"m.layers.{i}.part{j // 10}") for i in range(30) for j in range(60)]
    whole = {"captured": {"nodes": nodes}, "final": {"nodes": nodes}}
    at = shown(browser, data | {"graph": graphs(whole)}, tmp_path)
    rows = "document.querySelectorAll('.tree .row').length"
    assert at.run(rows) < 20 and texts(at, ".tree .alike") == ["30 alike", "30 alike"]
    at.run(f"[...document.querySelectorAll('{FINAL} .mod')].at(-1).click()")          # the fold
    at.run(f"[...document.querySelectorAll('{FINAL} .mod')].at(-1).click()")          # layer 29
    assert at.run(rows) < 70


def test_hostile_names_do_not_run(browser: chromium.Page, data: dict[str, Any], tmp_path: Path):
    bad = "</script><img src=x onerror='window.caught=1'><script>window.caught=1</script>{{data}}"
    graph = data["graph"] | {"strings": [bad if i % 7 == 3 else text for i, text in enumerate(data["graph"]["strings"])]}
    at = shown(browser, data | {"head": data["head"] | {"name": bad, "source": bad}, "graph": graph}, tmp_path)
    open_all(at, FINAL)
    assert at.run("window.caught === undefined") and texts(at, "h1") == [bad] and at.run("document.title").startswith(bad)
    assert at.run("document.querySelectorAll('img').length") == 0 and not at.errors


def test_an_artifact_without_graphs_or_costs_says_so(browser: chromium.Page, data: dict[str, Any], tmp_path: Path):
    bare = data | {"graph": None, "roofline": None, "no_roofline": "No costs.", "speed": []}
    at = shown(browser, bare, tmp_path)
    assert "holds no graphs" in texts(at, "#graph")[0] and "No costs." in texts(at, "#roofline")[0] and not at.errors
