"""The gate: refuses what is broken and names the layer, measures what was written, says what it could not measure."""
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from infc.compiler import driver, keys
from infc.compiler.errors import CheckFailed, UserError
from infc.compiler.frontends import capture
from infc.compiler.quality import gate, limits
from infc.compiler.quality.compile_gate import Gate, check_options, info, unverified
from infc.compiler.quant.plan import Plan

MODEL = "random:tiny?layers=3"
BLAMED, MODULE = "model_layers_1_mlp_down_proj_weight", "model.layers.1.mlp.down_proj"
OPTIONS = driver.Options(quant="w8", check="off", buckets=(1, 16), reuse=False)


@pytest.fixture(scope="module")
def captured():
    return capture(MODEL)


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two windows rather than eight, where what is told does not hang on how many there are."""
    monkeypatch.setattr(gate, "GATE", replace(gate.GATE, windows=2, lengths=(384,), depths=(0.5,)))


def judged(captured, options: driver.Options, **changes):
    """The gate's report of the graph that a compile makes, in eager PyTorch."""
    one = Gate(captured, options.data, options.quality, lambda line: None)
    graph = captured.copy()
    driver._run_passes(graph, options, lambda event: None, one)
    return one.judge(graph, None, "a test")


def plant(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    """One layer's scales are `factor` times what they should be."""
    honest = Plan.quantize

    def quantize(self, w, scheme, name, statistics):
        found = honest(self, w, scheme, name, statistics)
        return replace(found, scale=found.scale * factor) if name == f"{BLAMED} ({MODULE})" else found

    monkeypatch.setattr(Plan, "quantize", quantize)


def test_an_honest_quantization_passes_and_is_described(captured):
    found = judged(captured, OPTIONS)
    assert found["verified"] and found["by"] == "its graph in eager PyTorch: a test" and found["limits"] == f"{limits.DEFAULT},layer<=0.5"
    assert 0 < found["kl"] < 0.01 and found["kl_p99"] < 0.1 and found["tokens"] == 8 * 255
    assert found["ppl_change"] == pytest.approx(found["ppl"] / found["reference_ppl"] - 1) and abs(found["ppl_change"]) < 0.05
    assert len(found["layers"]) == 13 and all(0 < layer["error"] < 0.02 and layer["bits"] == 8.5 for layer in found["layers"])
    assert found["bits_per_weight"] == 8.5 and found["retrieval"]["asked"] == 2
    assert found["json"] is None and found["skipped"] == {"json": "nothing generates here: the artifact was not run"}
    json.dumps(found, allow_nan=False)
    told = info(found)
    assert told.verified and (told.ppl, told.kl, told.tokens, told.data) == (found["ppl"], found["kl"], 2040, found["data"])


@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize("quality", [None, "kl<=1e9", "kl<=1e-3,layer<=0.9"])
@pytest.mark.parametrize("quant", ["w8", "w4"])
def test_doubled_scales_of_one_layer_are_refused_by_name(captured, monkeypatch: pytest.MonkeyPatch, quant: str, quality: str | None):
    """Whatever perplexity makes of it: a layer may be wrong and the model nearly right."""
    plant(monkeypatch, 2.0)
    with pytest.raises(CheckFailed) as refused:
        judged(captured, replace(OPTIONS, quant=quant, quant_method="rtn", quality=quality))
    assert refused.value.exit_code == 1
    blamed = rf"most to blame is {BLAMED} \({MODULE}, {quant}\): the error of its product is"
    assert re.search(rf"layer \S+, layer<=0.[59] allows 0.[59] .*{blamed}", refused.value.message)


@pytest.mark.usefixtures("brief")
def test_a_layer_may_be_allowed_to_be_wrong(captured, monkeypatch: pytest.MonkeyPatch):
    plant(monkeypatch, 2.0)
    found = judged(captured, replace(OPTIONS, quality="layer<=2"))
    assert found["limits"] == "layer<=2" and max(layer["error"] for layer in found["layers"]) == pytest.approx(1, rel=0.1)


@pytest.mark.usefixtures("brief")
def test_the_same_limits_hold_without_the_fault(captured):
    judged(captured, replace(OPTIONS, quality="kl<=1e-3"))


def test_what_the_captured_model_cannot_do_certifies_nothing():
    """Of no right answers there is no share to keep, and a limit on it is refused."""
    found = {"ppl": 2.0, "reference_ppl": 2.0, "kl": 0.0, "json": {"asked": 4, "right": 0, "reference_right": 0, "kept": 0, "share": None}}
    with pytest.raises(UserError, match="limits json, which cannot be measured here: the captured model gets none of 4 right"):
        gate.judge(found, limits.parse("json>=1"), [])


@pytest.mark.usefixtures("brief")
def test_a_limit_that_the_format_misses_blames_the_format(captured):
    with pytest.raises(CheckFailed, match="no layer stands out: it is the format"):
        judged(captured, replace(OPTIONS, quant="w4:channel", quality="kl<=1e-5"))


def test_token_ids_stand_for_a_text_where_there_is_no_tokenizer(captured, tmp_path: Path):
    bare = captured.copy()
    bare.meta["tokenizer_json"] = None
    with pytest.raises(UserError, match=re.escape("has no tokenizer to read a text with: pass token ids, --data FILE.json")):
        judged(bare, OPTIONS)
    data = tmp_path / "ids.json"
    data.write_text(json.dumps([(7 * i + i // 11) % 300 for i in range(1100)]))
    found = judged(bare, replace(OPTIONS, data=data))
    assert found["data"] == "ids.json" and found["windows"] == 2 and found["data_tokens"] == 1100
    assert found["retrieval"] is found["json"] is None and found["skipped"]["retrieval"] == "it needs the model's tokenizer"
    with pytest.raises(UserError, match="--quality limits retrieval, which cannot be measured here: it needs the model's tokenizer"):
        judged(bare, replace(OPTIONS, data=data, quality="retrieval>=0.9"))


@pytest.mark.parametrize(("content", "words"), [
    ("[1, 2", "is no JSON"), ('{"a": 1}', "is no list of token ids"), ("[1, 2.5]", "is no list of token ids"),
    ("[1, -1]", "is no list of token ids"),
    ("[1, true]", "is no list of token ids"), ("[1, 320]", "320 is no token of tiny, whose vocabulary has ids 0..319"),
    ("[1, 2]", "has 2 tokens, and 1024 are needed"), (" ", "is empty"),
])
def test_ids_that_are_none_are_refused(tmp_path: Path, content: str, words: str):
    (tmp_path / "ids.json").write_text(content)
    with pytest.raises(UserError, match=re.escape(words)):
        gate.read_data(tmp_path / "ids.json", None, gate.Model("tiny", 320, 512), gate.GATE)


@pytest.mark.parametrize(("asked", "words"), [
    ((True, Path("a.txt"), None, True), "--unverified measures nothing, and --data asks to"),
    ((True, None, "kl<=1", True), "--unverified measures nothing, and --quality asks to"),
    ((False, None, None, True), "nothing is quantized: leave it out"),
    ((True, Path("no-such.txt"), None, False), "no-such.txt: cannot be read"),
    ((True, None, "kl<=x", False), "is no limit"),
])
def test_what_contradicts_itself_is_refused_before_anything_is_captured(asked: tuple, words: str):
    with pytest.raises(UserError, match=re.escape(words)):
        check_options(*asked)


def test_the_key_of_a_compile_knows_its_data_by_content(tmp_path: Path):
    a, b, c = (tmp_path / name for name in "abc")
    a.write_text("one text")
    b.write_text("one text")
    c.write_text("another")

    def key(**changes) -> str:
        return keys.request("model", replace(OPTIONS, **changes), "isa", "toolchain")

    assert key(data=a) == key(data=b)
    assert len({key(), key(data=a), key(data=c), key(quality="kl<=1"), key(unverified=True)}) == 5


def test_what_nobody_measured_says_so(captured):
    graph = captured.copy()
    driver._run_passes(graph, OPTIONS, lambda event: None)
    found = unverified(graph)
    assert found["verified"] is False and found["bits_per_weight"] == 8.5 and all(layer["error"] is None for layer in found["layers"])
    assert info(found).verified is False and info(found).kl is None


def test_a_text_other_than_the_reference_read_is_seen(captured):
    """The figures are of the data that is named: a text of one repeated letter has another perplexity."""
    one = Gate(captured, None, None, lambda line: None)
    other = replace(one.data, windows=[[40] * 512] * 2)
    size = gate.Size(2, (9999,), (0.5,), 1)
    from infc.compiler.quality.evaluate import CapturedEvaluator

    reference = CapturedEvaluator(captured)
    a, b = (gate.measure(reference, reference, data, size, 512) for data in (replace(one.data, windows=one.data.windows[:2]), other))
    assert a["kl"] == b["kl"] == 0.0 and a["top1"] == 1.0 and a["ppl"] == a["reference_ppl"] != b["ppl"]
    assert a["skipped"]["retrieval"] == "the model has 512 positions, and 9999 are needed"


def test_logits_that_are_not_finite_fail(captured):
    class Broken:
        def logits(self, ids, *, first=0):
            return torch.full((len(ids) - first, 320), torch.nan)

    data = Gate(captured, None, None, lambda line: None).data
    with pytest.raises(CheckFailed, match="the compiled model gives logits that are no distribution"):
        gate.measure(Broken(), None, data, gate.GATE, 512)
