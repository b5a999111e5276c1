"""A dump is what it says: stages that run alone and tell their error, tables of all passes, programs with lifetimes."""
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from golden import trace
from infc import passes
from infc.backends.cpu.toolchain import assembly
from infc.compiler import driver, files
from infc.compiler.dump import stage
from infc.compiler.dump.dump_files import refuse_filled, write_whole
from infc.compiler.dump.dump_programs import program_json, program_text, write_programs
from infc.compiler.errors import UserError
from infc.compiler.frontends import capture
from infc.compiler.ops import aten
from infc.compiler.pipeline import run_pipeline
from infc.compiler.rewrite import APPROXIMATE, Pass, Rule
from infc.runtime.program import Buffer, Kernel, Program, Step
from tiny_artifact import infc

DOUBLE = Rule("double", lambda x: aten.add.Tensor(x, x), lambda x: aten.mul.Tensor(x, 2))
WRONG = Rule("wrong", lambda x: aten.add.Tensor(x, x), lambda x: aten.mul.Tensor(x, 3))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dump of a one-layer decoder through the whole bf16 pipeline."""
    folder = tmp_path_factory.mktemp("dumps") / "tiny"
    graph = capture("random:tiny?layers=1")
    run_pipeline(graph, passes.pipeline("bf16"), allow="approximate", check="off", dump=folder, options={"dtype": "bf16"})
    return folder


def forward_of(file: Path, source: str = ""):
    """`forward` of a stage's file (or of a changed source of it), without running its main."""
    space: dict = {"__name__": "stage"}
    exec(compile(source or file.read_text(), str(file), "exec"), space)
    return space["forward"]


def stages(folder: Path) -> list[Path]:
    return sorted(folder.glob("[0-9][0-9]-*.py"))


def test_every_stage_runs_within_its_bound(tiny):
    names = [file.stem.partition("-")[2] for file in stages(tiny)]
    assert names[0] == "captured" and {"fuse_rms_norm", "page_kv_cache", "sample_tokens", "narrow_dtype"} <= set(names)
    for file in stages(tiny):
        report = stage.judge(forward_of(file), file)
        assert report["passed"], report
        exact = file.stem != "18-narrow_dtype"
        assert (report["fp64"]["bound"] == 1e-9) == exact
        assert (report["fp64"]["error"] > 1e-6) != exact, "bf16 weights are not the captured ones, all others are"


def test_a_stage_is_a_program_that_prints_its_error(tiny):
    file = next(f for f in stages(tiny) if "page_kv_cache" in f.name)
    done = subprocess.run([sys.executable, str(file), "--json"], capture_output=True, text=True, check=False, cwd=os.sep)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["outputs"] == ["logits"] and report["sample"] == "37 random tokens" and 0 < report["own"]["error"] < 1e-5


@pytest.mark.parametrize(("before", "after"), [("1e-05", "0.001"), ("1e-05)", "1e-05) * 1.0001")])
def test_an_altered_stage_fails(tiny, before, after, capsys, monkeypatch):
    file = next(f for f in stages(tiny) if "fuse_rms_norm" in f.name)
    source = file.read_text()
    assert before in source
    monkeypatch.setattr(sys, "argv", [str(file)])
    assert stage.main(forward_of(file, source.replace(before, after)), str(file)) == 1
    assert "BEYOND THE BOUND" in capsys.readouterr().out


def test_a_lost_upcast_shows_in_its_own_dtypes_only(tiny):
    """fp64 lifts every cast, so what a cast throws away must be seen beside it."""
    file = next(f for f in stages(tiny) if "fuse_rms_norm" in f.name)
    cast = r"\1aten._to_copy.default(aten._to_copy.default(\2, dtype=torch.bfloat16), dtype=torch.float32)"
    source, count = re.subn(r"(\w+ = )(infc\.rms_norm\.default\(.*\))(?=  #)", cast, file.read_text(), count=1)
    report = stage.judge(forward_of(file, source), file)
    assert count == 1 and report["fp64"]["passed"] and not report["own"]["passed"]


def test_lines_say_where_they_came_from(tiny):
    lines = next(f for f in stages(tiny) if "narrow_dtype" in f.name).read_text().splitlines()
    norm = next(line for line in lines if "infc.rms_norm" in line)
    assert "w.model_layers_0_input_layernorm_weight" in norm and "| model.layers.0.input_layernorm | by canonicalize, fuse_rms_norm" in norm


def test_tables_list_every_pass(tiny):
    told = json.loads((tiny / "passes.json").read_text())
    rows = told["passes"]
    assert [row["name"] for row in rows] == ["captured", *(p.name for p in passes.pipeline("bf16"))] and all(row["ran"] for row in rows)
    assert [row["number"] for row in rows if "file" in row] == [int(f.name[:2]) for f in stages(tiny)]
    assert all(("file" in row) == (row.get("fired", 1) > 0) for row in rows)
    text = (tiny / "passes.txt").read_text()
    assert all(row["name"] in text for row in rows)
    stored = sum(f.stat().st_size for f in (tiny / "weights").iterdir())
    assert told["weights"] == {"files": len(list((tiny / "weights").iterdir())), "bytes": stored} and f"{stored / 1e6:.1f} MB" in text


def test_stages_share_their_weights(tiny):
    named = [json.loads(f.with_suffix(".json").read_text())["weights"] for f in stages(tiny)]
    uses = [w["sha256"] for weights in named for w in weights.values()]
    files = {f.name for f in (tiny / "weights").iterdir()}
    assert files == {stage.file_name(sha256) for sha256 in uses} and len(files) < len(uses) / 3


def test_a_graph_that_is_no_decoder(tmp_path):
    graph = trace(lambda x: torch.exp(x + x) / float("inf") + x[:, 1:3].sum(), torch.randn(4, 8), dynamic=({0: "B"},))
    run_pipeline(graph, [DOUBLE], dump=tmp_path)
    report = stage.judge(forward_of(tmp_path / "01-double.py"), tmp_path / "01-double.py")
    assert report["passed"] and report["sample"] == "x [4, 8]"


def test_weights_made_at_compile_time_are_exact_in_fp64(tmp_path):
    w = torch.randn(8)
    run_pipeline(trace(lambda x: x * (w.exp() + 1), torch.randn(4, 8)), [passes.load("fold_constants")], dump=tmp_path)
    file = tmp_path / "01-fold_constants.py"
    assert any("exact_sha256" in entry for entry in stage.load(file)["weights"].values())
    assert stage.judge(forward_of(file), file)["passed"]


def test_a_broken_pass_is_seen_when_its_stage_runs(tmp_path):
    graph = trace(lambda x: torch.exp(x + x), torch.randn(4, 8))
    run_pipeline(graph, [WRONG], check="off", dump=tmp_path)
    report = stage.judge(forward_of(tmp_path / "01-wrong.py"), tmp_path / "01-wrong.py")
    assert not report["fp64"]["passed"] and not report["own"]["passed"]


def test_a_stage_that_cannot_run_says_why(tmp_path):
    def cut(graph, report):
        graph.output.args = ((graph.output.args[0][0],),)
        graph.outputs = ["other"]
        return 1

    graph = trace(lambda x: torch.exp(x), torch.randn(4, 8))
    run_pipeline(graph, [Pass("cut", cut, APPROXIMATE, check=lambda a, b: 0.0)], allow="approximate", dump=tmp_path)
    row = json.loads((tmp_path / "passes.json").read_text())["passes"][1]
    assert row["file"] == "01-cut" and row["program"].startswith("no program: none of its outputs (other)")
    assert not (tmp_path / "01-cut.py").exists() and (tmp_path / "01-cut.txt").exists()


@pytest.mark.parametrize("harm", ["missing", "damaged", "altered"])
def test_a_damaged_dump_is_one_line(tiny, tmp_path, harm, capsys, monkeypatch):
    folder = shutil.copytree(tiny, tmp_path / "copy")
    file = stages(folder)[0]
    victim = folder / "weights" / stage.file_name(stage.load(file)["weights"]["model_embed_tokens_weight"]["sha256"])
    harms = {"missing": lambda: victim.unlink(), "damaged": lambda: victim.write_bytes(b"no tensor"),
             "altered": lambda: victim.write_bytes(victim.read_bytes()[:-1] + b"\x7f")}
    harms[harm]()
    monkeypatch.setattr(sys, "argv", [str(file)])
    assert stage.main(forward_of(file), str(file)) == 2
    out, said = capsys.readouterr()
    assert str(victim) in said and said.count("\n") == 1 and not out
    monkeypatch.setattr(sys, "argv", [str(file), "--json"])
    assert stage.main(forward_of(file), str(file)) == 2
    assert json.loads(capsys.readouterr().out) == {"error": {"message": said.removeprefix("infc: ").rstrip("\n"), "exit_code": 2}}


def test_no_half_file(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, os.strerror(28))

    write_whole(tmp_path / "a.txt", "whole")
    monkeypatch.setattr(files.os, "replace", full)
    with pytest.raises(UserError, match=r"a\.txt: the dump cannot be written \(no space left on the disk\)"):
        write_whole(tmp_path / "a.txt", "half")
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"] and (tmp_path / "a.txt").read_text() == "whole"


def test_an_interrupted_dump_has_no_stage_without_its_weights(tmp_path, monkeypatch):
    def interrupt(graph, report):
        raise KeyboardInterrupt

    graph = trace(lambda x: torch.exp(x + x), torch.randn(4, 8))
    with pytest.raises(KeyboardInterrupt):
        run_pipeline(graph, [DOUBLE, Pass("slow", interrupt)], dump=tmp_path)
    rows = json.loads((tmp_path / "passes.json").read_text())["passes"]
    assert [row["ran"] for row in rows] == [True, True, False] and (tmp_path / "passes.txt").read_text().count("not run") == 1


def test_a_folder_with_something_in_it_is_refused(tmp_path):
    refuse_filled(None), refuse_filled(tmp_path / "new" / "inner"), refuse_filled(tmp_path)
    (tmp_path / "x").write_text("")
    with pytest.raises(UserError, match="is not empty: name a new one"): refuse_filled(tmp_path)


def test_a_dump_does_not_stand_where_the_artifact_is_to_be(tmp_path):
    artifact = tmp_path / "a.infc"
    for dump in (artifact, artifact / "dump" / "x"):
        with pytest.raises(UserError, match=r"is where the artifact .*a\.infc is to be"):
            driver.compile("no such model", artifact, options=driver.Options(dump=dump))
    assert not artifact.exists()


def test_a_file_where_the_folder_would_be_is_told_before_the_model_is_read(tmp_path):
    """It, or one above it; a link to nothing is in the way too."""
    file, link = tmp_path / "x", tmp_path / "link"
    file.write_text("")
    link.symlink_to(tmp_path / "nothing")
    for dump, told in ((file, f"{file} is a file"), (file / "a" / "b", f"{file} is a file"), (link, f"{link} is a link to nothing")):
        done = infc("compile", "tiny", "--dump", dump, "-o", tmp_path / "a.infc")
        assert (done.returncode, done.stderr) == (
            2, f"infc: the dump folder {dump} cannot be made: {told}; name a new folder\n")
    assert sorted(tmp_path.iterdir()) == [link, file]


PROGRAM = Program(
    "step_T4", {"T": 4}, ("T",), 192,
    (Buffer("x", "input", "f32", ("T", 8), 128), Buffer("w", "weight", "f32", (8, 8), 256, tensor="w:plain"),
     Buffer("h", "arena", "f32", ("T", 8), 128, 0), Buffer("left", "arena", "f32", ("T", 8), 64, 128),
     Buffer("y", "output", "f32", ("T", 8), 128)),
    (Step("k1", (0, 1, 2), "infc.linear", 512, 512, ("model.layers.0",), ("merge",)),
     Step("k2", (2, 4), "aten.silu", 32, 256, ("model.layers.0",))))
KERNELS = {"k1": Kernel("k1", "linear_8x8", "k_k1", "infc.linear", "x"), "k2": Kernel("k2", "silu", "aten::silu", "aten.silu", "x")}


def test_programs_tell_lifetimes_and_where_steps_came_from():
    data = program_json(PROGRAM, KERNELS)
    assert [(b["name"], b["first"], b["last"], b["offset"]) for b in data["buffers"]] == [
        ("x", 0, 0, None), ("w", 0, 0, None), ("h", 0, 1, 0), ("left", None, None, 128), ("y", 1, 1, None)]
    assert data["steps"][0] | {"hash": 0} == {
        "index": 0, "kernel": "linear_8x8", "hash": 0, "symbol": "k_k1", "args": [0, 1, 2], "buffers": ["x", "w", "h"], "op": "infc.linear",
        "flops": 512, "bytes": 512, "origin": ["model.layers.0"], "passes": ["merge"]}
    text = program_text(data)
    assert "h: f32[T,8] 128 bytes at arena+0 live 0..1" in text and "left: f32[T,8] 64 bytes at arena+128 live never" in text
    assert "linear_8x8(0:x, 1:w, 2:h)  infc.linear  512 flops  512 bytes  [model.layers.0]  by merge" in text and "by capture" in text


def test_assembly_only_if_asked(tmp_path):
    write_programs(tmp_path, [PROGRAM], KERNELS, "kernels.cpp", "source")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["kernels.cpp", "program-step_T4.json", "program-step_T4.txt"]
    write_programs(tmp_path, [], KERNELS, "kernels.cpp", "source", lambda: "mov")
    assert (tmp_path / "kernels.s").read_text() == "mov"


def test_assembly_is_the_sources():
    text = assembly('extern "C" int answer(int x) { return x * 42; }', "portable")
    assert "answer:" in text and "42" in text


@pytest.mark.parametrize(("value", "truth", "error"), [
    ([1.0, 2.0], [1.0, 4.0], 0.5), ([math.nan, math.inf], [math.nan, math.inf], 0.0), ([1.0, math.inf], [1.0, 2.0], math.inf),
    ([1.0], [1.0, 2.0], math.inf), ([], [], 0.0), ([0.0, 1.0], [0.0, 1.0], 0.0), ([-1.0, 1.0], [0.0, 1.0], 1.0)])
def test_error(value, truth, error):
    assert stage.error_of(torch.tensor(value), torch.tensor(truth)) == error
