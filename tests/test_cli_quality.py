"""`infc quality`, and the gate as a user meets it: one JSON document, one line for what is wrong, nothing half-written."""

import json
import shutil
import subprocess
from pathlib import Path

import msgspec
import pytest
from infc.compiler.quality import command
from infc.compiler.quality.text import HELD_OUT
from infc.runtime import manifest
from tiny_artifact import infc, tiny

COMPILE = ("compile", "tiny", "--buckets", "1,16", "--check", "off", "--quiet", "--no-reuse")


def refused(done: subprocess.CompletedProcess[str], *words: str, code: int = 2) -> None:
    """One line on stderr that holds every word; nothing on stdout, with --json the error alone."""
    assert done.returncode == code, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    lines = [line for line in done.stderr.splitlines() if not line.startswith("  ")]
    assert len(lines) == 1 and lines[0].startswith("infc: "), done.stderr
    assert json.loads(done.stdout).keys() == {"error"} if "--json" in done.args else done.stdout == ""
    for word in words:
        assert word in lines[0], f"{word!r} is not in: {lines[0]}"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved measurement of `tiny`."""
    path = tmp_path_factory.mktemp("quality") / "a.json"
    done = infc("quality", tiny(), "--windows", 2, "-o", path, "--quiet")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    return path


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    """An artifact that was measured when it was compiled, and what the compile said."""
    path = tmp_path_factory.mktemp("quality") / "q.infc"
    done = infc(*COMPILE[:-2], "--no-reuse", "--quant", "w8", "-o", path, "--json")
    assert done.returncode == 0, done.stderr
    return path, json.loads(done.stdout)


def test_a_report_has_the_stable_names(report: Path):
    found = json.loads(report.read_text())
    names = {"schema", "artifact", "model", "version", "dtype", "against", "data", "data_sha256", "windows", "length", "tokens", "ppl",
             "reference_ppl", "ppl_change", "kl", "kl_p99", "top1", "retrieval", "json", "skipped", "seconds"}
    assert names <= found.keys() and found["model"] == found["against"] == "tiny" and found["tokens"] == 2 * 255
    assert 0 < found["kl"] < 1e-3 and found["top1"] > 0.95 and abs(found["ppl_change"]) < 0.01 and found["json"]["asked"] == 24


def test_a_saved_report_is_not_replaced_unasked(report: Path, tmp_path: Path):
    before = report.read_bytes()
    refused(infc("quality", tiny(), "--windows", 2, "-o", report), "exists: add --force to replace it")
    assert report.read_bytes() == before
    refused(infc("quality", tiny(), "--windows", 2, "-o", tmp_path / "none" / "a.json"), "there is no folder")
    copy = Path(shutil.copy(report, tmp_path / "a.json"))
    assert infc("quality", tiny(), "--windows", 2, "--against", "none", "-o", copy, "--force", "--quiet").returncode == 0
    assert json.loads(copy.read_text())["against"] is None


def test_json_is_the_only_thing_on_stdout_and_progress_is_on_stderr():
    done = infc("quality", tiny(), "--windows", 2, "--against", "none", "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 0 and found["ppl"] > 1 and found["against"] is None and found["kl"] is None and "window 1 of 2" in done.stderr


def test_an_artifact_beside_itself_is_equal():
    found = json.loads(infc("quality", tiny(), "--windows", 2, "--against", tiny(), "--json", "--quiet").stdout)
    assert (found["kl"], found["top1"], found["ppl_change"]) == (0.0, 1.0, 0.0) and found["retrieval"]["share"] is None


def test_a_table_is_shown_to_people():
    done = infc("quality", tiny(), "--windows", 2)                     # with --quiet nothing is: `report` asserts it
    assert done.returncode == 0 and "perplexity" in done.stdout and "same likeliest token" in done.stdout and "retrieval" in done.stdout


def test_a_quantized_compile_is_measured_and_says_so(measured: tuple[Path, dict]):
    path, made = measured
    found = made["quality"]
    assert found["verified"] and found["by"] == "the artifact" and 0 < found["kl"] < 0.01
    assert found["data"] == "heldout.txt (travels with infc)"
    assert all(0 < layer["error"] < 0.02 for layer in found["layers"]) and 8.5 <= found["bits_per_weight"] < 8.6
    assert json.loads((path / "report.json").read_text())["quality"] == found
    for layer in found["layers"]:                                                     # groups of 32 of int8 and an f16; padding beside
        assert layer["bytes"] >= layer["values"] * 8.5 / 8 and "_q8_" in layer["kernel"]
        assert layer["wide_predicted_us"] / layer["predicted_us"] == pytest.approx(2 * layer["values"] / layer["bytes"])
    table, held = found["layers"][0], sum(layer["bytes"] for layer in found["layers"])
    assert table["modules"] == ["model.embed_tokens", "lm_head"]
    stored = json.loads((path / "manifest.json").read_text())["weights"]["data_bytes"]
    assert held <= stored < held + table["bytes"]                                     # the tied table once (FIELD R22); norms are small
    shown = json.loads(infc("inspect", path, "--json").stdout)["manifest"]["quality"]
    assert shown["verified"] and shown["kl"] == found["kl"] and shown["limits"] == found["limits"]
    assert infc("verify", path).returncode == 0                                       # hashes hold after what was added
    assert "KL" in infc("inspect", path).stdout


def test_the_same_compile_again_is_copied_with_its_figures(tmp_path: Path):
    first, second = (json.loads(infc("compile", "tiny", "--quant", "w8", "--buckets", "1,4", "--check", "off", "-o", tmp_path / name,
                                     "--json").stdout) for name in ("a.infc", "b.infc"))
    assert not first["reused"] and second["reused"] and second["quality"] == first["quality"]


def test_a_gate_that_fails_writes_nothing_and_exits_1(tmp_path: Path):
    done = infc(*COMPILE, "--quant", "w4", "--quality", "kl<=1e-9", "-o", tmp_path / "a.infc")
    refused(done, "quality: kl ", "kl<=1e-09 allows 1e-09", "no layer stands out: it is the format", "nothing was written", code=1)
    assert [*tmp_path.iterdir()] == []


def test_unverified_goes_on_and_is_recorded(tmp_path: Path):
    made = infc(*COMPILE, "--quant", "w4", "--unverified", "-o", tmp_path / "a.infc")
    assert made.returncode == 0, made.stderr
    shown = json.loads(infc("inspect", tmp_path / "a.infc", "--json").stdout)["manifest"]["quality"]
    rows = json.loads((tmp_path / "a.infc" / "report.json").read_text())["quality"]["layers"]
    assert rows and all("_q4_" in row["kernel"] or "_q8_" in row["kernel"] for row in rows)
    assert shown["verified"] is False and "kl" not in shown and "unverified" in infc("inspect", tmp_path / "a.infc").stdout
    compared = infc("quality", "compare", tmp_path / "a.infc", tmp_path / "a.infc")
    refused(compared, "nothing was measured when it was compiled", "infc quality")


def test_plain_compiles_are_measured_where_data_is_given(tmp_path: Path):
    assert infc(*COMPILE, "--data", HELD_OUT, "-o", tmp_path / "a.infc").returncode == 0
    shown = json.loads(infc("inspect", tmp_path / "a.infc", "--json").stdout)["manifest"]["quality"]
    assert shown["verified"] and shown["data"] == "heldout.txt" and shown["bits_per_weight"] == 16.0
    assert json.loads(infc("inspect", tiny(), "--json").stdout)["manifest"]["quality"] is None


@pytest.mark.parametrize(("options", "words"), [
    (("--quant", "w8", "--data", "none.txt"), ["none.txt: cannot be read"]),
    (("--quant", "w8", "--quality", "ppl<1"), ["--quality", "is written ppl<=NUMBER"]),
    (("--quant", "w8", "--unverified", "--quality", "kl<=1"), ["--unverified measures nothing"]),
    (("--unverified",), ["nothing is quantized"]),
])
def test_bad_compile_options_are_one_line(tmp_path: Path, options: tuple, words: list[str]):
    refused(infc(*COMPILE, *options, "-o", tmp_path / "a.infc"), *words)
    assert [*tmp_path.iterdir()] == []


def test_data_that_is_too_short_is_one_line(tmp_path: Path):
    (tmp_path / "a.txt").write_text("a few words")
    refused(infc(*COMPILE, "--quant", "w8", "--data", tmp_path / "a.txt", "-o", tmp_path / "a.infc"), "has 11 tokens, and 1024 are needed")
    refused(infc("quality", tiny(), "--data", tmp_path / "a.txt", "--quiet"), "has 11 tokens, and 1024 are needed")


@pytest.mark.parametrize(("arguments", "words"), [
    (("none.infc",), ["no such artifact"]), (("{tiny}", "--data", "none.txt"), ["none.txt: cannot be read"]),
    (("{tiny}", "--against", "tinny"), ["unknown model 'tinny'", "did you mean 'tiny'?"]),
    (("{tiny}", "--against", "none.infc"), ["none.infc"]), (("{tiny}", "--windows", "1"), ["--windows"]),
    (("compare", "none.json", "none.json"), ["none.json: cannot be read"]), (("compare", "none.infc", "none.infc"), ["none.infc"]),
])
def test_bad_arguments_are_one_line(arguments: tuple, words: list[str]):
    given = [str(tiny()) if argument == "{tiny}" else argument for argument in arguments]
    refused(infc("quality", *given, "--json" if "compare" in given else "--quiet"), *words)


def test_compare_puts_two_side_by_side_and_refuses_what_differs(report: Path, tmp_path: Path):
    found = json.loads(report.read_text())
    other = tmp_path / "b.json"
    other.write_text(json.dumps(found | {"kl": 2 * found["kl"], "top1": 1.0, "bits_per_weight": 8.5}))
    shown = json.loads(infc("quality", "compare", report, other, "--json").stdout)["figures"]
    assert shown["kl"]["better"] is False and shown["top1"]["better"] is True and shown["ppl"]["better"] is None
    assert "bits_per_weight" not in shown                                             # the first does not know
    assert "worse" in infc("quality", "compare", report, other).stdout
    for name in command.MUST_AGREE:
        other.write_text(json.dumps(found | {name: "another"}))
        refused(infc("quality", "compare", report, other), f"these cannot be compared: {name} is")


@pytest.mark.parametrize(("content", "words"), [("{", "is no JSON"), ("[]", "is no measurement of quality"),
                                               ('{"model": 1}', "it has no 'against'"), ("\xff", "is no JSON")])
def test_what_is_no_measurement_is_refused(report: Path, tmp_path: Path, content: str, words: str):
    (tmp_path / "b.json").write_bytes(content.encode("latin-1"))
    refused(infc("quality", "compare", report, tmp_path / "b.json"), "b.json", words)


def test_two_artifacts_compare_by_what_their_compiles_measured(measured: tuple[Path, dict]):
    shown = json.loads(infc("quality", "compare", measured[0], measured[0], "--json").stdout)["figures"]
    assert shown["kl"]["before"] == measured[1]["quality"]["kl"] and all(figure["better"] is None for figure in shown.values())


def test_a_model_of_another_source_is_no_reference(tmp_path: Path):
    """An artifact that happens to have a known name is not measured beside the known model unasked."""
    copy = Path(shutil.copytree(tiny(), tmp_path / "copy.infc"))
    found = manifest.decode((copy / "manifest.json").read_bytes(), "test")
    changed = msgspec.structs.replace(found, model=msgspec.structs.replace(found.model, source="gguf:another.gguf:0"))
    (copy / "manifest.json").write_bytes(manifest.encode(changed))
    refused(infc("quality", copy, "--windows", 2, "--quiet"), "was compiled from another source", "--against")
    changed = msgspec.structs.replace(found, model=msgspec.structs.replace(found.model, name="somebody's"))
    (copy / "manifest.json").write_bytes(manifest.encode(changed))
    done = infc("quality", copy, "--windows", 2, "--json")
    assert json.loads(done.stdout)["against"] is None and "somebody's is no model that infc knows" in done.stderr
