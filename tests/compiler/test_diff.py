"""`infc diff`: what changed is named once, figures are compared, budgets break loudly and are never passed unseen."""
import functools
import json
import math
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from infc.compiler.compare import diff, metrics
from infc.compiler.compare.budgets import amount, change_text, judge, parse, share
from infc.compiler.compare.metrics import METRICS, is_unfused, of_artifact, of_stage, unit_of
from infc.compiler.errors import UserError
from infc.runtime.artifact import read
from infc.runtime.program import Kernel, Step
from tiny_artifact import infc, tiny


def call(name, target, type_text, *origin):
    return {"name": name, "kind": "call", "target": target, "args": "", "inputs": [], "type": type_text, "origin": list(origin), "line": "",
            "passes": []}


def stage(nodes, weights=()):
    return {"number": 0, "name": "captured", "dialect": "captured", "inputs": ["x"], "outputs": ["y"], "kv": [], "nodes": nodes,
            "weights": {name: {"dtype": dtype, "shape": [4, 8], "sha256": name} for name, dtype in weights},
            "run": None}


def layers(make, count=3):
    return [node for i in range(count) for node in make(i)]


@functools.cache
def fp32() -> Path:
    """`tiny` in fp32, with other buckets."""
    made = Path(tempfile.mkdtemp(prefix="infc-tiny-")) / "fp32.infc"
    done = infc("compile", "tiny", "--output", made, "--dtype", "fp32", "--buckets", "1,8", "--check", "off", "--quiet")
    assert done.returncode == 0, done.stderr
    return made


# --------------------------------------------------------------------------------------------------------------- changes

def found(before, after):
    return {(c.kind, c.what, c.where, c.detail) for c in diff.graph_changes(before, after)}


def test_appeared_vanished_and_another_dtype():
    before = stage([call("a", "aten.add", "f32[B]", "m.0"), call("b", "aten.mul", "f32[B]", "m.0"), call("c", "aten.neg", "f32[B]", "m.0")])
    after = stage([call("a", "aten.add", "bf16[B]", "m.0"), call("n", "infc.new", "f32[B]", "m.0"), call("c", "aten.neg", "f32[T]", "m.0")])
    assert found(before, after) == {("dtype", "aten.add", "m.0", "f32 -> bf16"), ("vanished", "aten.mul", "m.0", "f32[B]"),
                                    ("appeared", "infc.new", "m.0", "f32[B]")}


def test_one_of_two_equal_calls_went():
    before = stage([call("a", "aten.add", "f32[B]", "m"), call("b", "aten.add", "f32[B]", "m")])
    assert found(before, stage([call("a", "aten.add", "f32[B]", "m")])) == {("vanished", "aten.add", "m", "f32[B]")}


def test_placeholders_are_told_by_name():
    def graph(kind, name, type_text):
        return stage([{**call(name, "", type_text), "kind": kind}])

    assert found(graph("weight", "w_0", "f32[2]"), graph("weight", "w_0", "bf16[2]")) == {("dtype", "weight", "w_0", "f32 -> bf16")}
    assert found(graph("input", "x", "f32[2]"), graph("kv", "x", "f32[2]")) == {("vanished", "input", "x", "f32[2]"),
                                                                              ("appeared", "kv", "x", "f32[2]")}


@pytest.mark.parametrize(("path", "folded"), [
    ("model.layers.7.mlp", "model.layers.*.mlp"), ("k_cache_12", "k_cache_*"), ("h.0.attn, h.0.ln_1", "h.*.attn, h.*.ln_*"),
    ("model_layers_3_self_attn_q_proj_weight", "model_layers_*_self_attn_q_proj_weight"),
    ("conv2d.w1", "conv2d.w1"), ("m.step T16", "m.step T16")])
def test_fold(path, folded):
    assert diff.fold(path) == folded


def test_repeated_layers_are_one_change_and_a_single_one_keeps_its_number(tmp_path):
    def old(i): return [call(f"a{i}", "aten.mul", "f32[B]", f"layers.{i}.norm")]

    def new(i): return [call(f"a{i}", "infc.rms_norm" if i != 1 else "aten.mul", "f32[B]", f"layers.{i}.norm")]

    for name, make, extra in (("00-captured", old, []), ("01-fuse", new, [call("z", "aten.exp", "f32[B]", "layers.2.mlp")])):
        (tmp_path / f"{name}.json").write_text(json.dumps(stage(layers(make) + extra, [("w", "f32"), ("v", "bf16")])))
    told = diff.compare(tmp_path / "00-captured.txt", tmp_path / "01")
    assert told["changes"] == [
        {"kind": "vanished", "what": "aten.mul", "where": "layers.*.norm", "detail": "f32[B]", "count": 2},
        {"kind": "appeared", "what": "infc.rms_norm", "where": "layers.*.norm", "detail": "f32[B]", "count": 2},
        {"kind": "appeared", "what": "aten.exp", "where": "layers.2.mlp", "detail": "f32[B]", "count": 1}]
    assert told["metrics"]["weights"] == {"before": 32 * 4 + 32 * 2, "after": 32 * 4 + 32 * 2}
    assert told["metrics"]["nodes"] == {"before": 3, "after": 4} and told["metrics"]["calls.aten.mul"] == {"before": 3, "after": 1}


def test_two_artifacts():
    told = diff.compare(fp32(), tiny())
    assert told["differ"]["dtype"] == ["fp32", "bf16"] and told["differ"]["contract"] == ["exact", "approximate"]
    rows = {(c["kind"], c["what"], c["where"]): c for c in told["changes"]}
    kernel = rows["kernel", "step infc.rms_norm", "model.layers.*.input_layernorm"]
    assert kernel["count"] == 2 and kernel["detail"] == "rms_norm_f32_f32_192 -> rms_norm_f32_bf16_192"
    assert rows["dtype", "kv", "k_cache_*"]["detail"] == "f32 -> bf16" and rows["dtype", "kv", "k_cache_*"]["count"] == 2
    assert {(c["kind"], c["detail"]) for c in told["changes"] if c["what"] == "bucket"} == {
        ("vanished", "step_T8"), ("appeared", "step_T16"), ("appeared", "step_T128"), ("appeared", "step_T512")}
    metrics = told["metrics"]
    assert metrics["kv_per_token"]["before"] == 2 * metrics["kv_per_token"]["after"]
    assert metrics["buckets"] == {"before": 2, "after": 4} and metrics["fired.narrow_dtype"]["before"] is None


def test_an_artifact_is_equal_to_itself():
    told = diff.compare(tiny(), tiny())
    assert told["changes"] == [] and told["differ"] == {} and all(m["before"] == m["after"] for m in told["metrics"].values())


# --------------------------------------------------------------------------------------------------------------- metrics

def test_metrics_of_an_artifact():
    with read(tiny()) as artifact:
        known = of_artifact(artifact)
        manifest, program = artifact.manifest, artifact.program("step_T16")
    assert manifest.weights is not None and known["memory"] == manifest.weights.data_bytes + known["arena.step_T512"]
    assert known["size"] == sum(info.bytes for info in manifest.files.values())
    assert known["steps.step_T16"] == len(program.steps) and known["flops.step_T16"] == sum(s.flops for s in program.steps)
    assert known["kv_per_token"] == 2 * 2 * 2 * 32 * 2                     # layers, k and v, kv heads, head size, bf16
    assert (known["unfused"], known["aten_steps"], known["fired.fuse_rms_norm"]) == (0, 0, 5)
    assert {name for name in known if "." not in name} <= METRICS.keys()


def test_times_are_predicted_where_the_machine_is_known(monkeypatch):
    monkeypatch.setattr(metrics, "phase_seconds", lambda costs, phase, peaks: peaks * phase.tokens)
    with read(tiny()) as artifact:
        known, unknown = of_artifact(artifact, peaks=lambda isa: 0.5), of_artifact(artifact)        # type: ignore[arg-type, return-value]
    assert (known["decode_ms"], known["prefill_ms"]) == (500.0, 500.0 * metrics.CONTEXT)
    assert "decode_ms" not in unknown and unknown["decode_bytes"] > unknown["weights"] / 2
    assert unknown["prefill_flops"] > unknown["decode_flops"]


@pytest.mark.parametrize(("op", "symbol", "origin", "unfused"), [
    ("infc.linear", "k_1", "model.layers.0.mlp", False), ("aten.bmm", "aten::bmm", "lm_head", True),
    ("loop.mul", "k_1", "model.layers.3", True),
    ("loop.cos.sin", "k_1", "model.rotary", False), ("aten._to_copy", "k_1", "model.embed_tokens", False),
    ("aten._to_copy", "k_1", "h.0", True),
    ("aten.index_select", "k_1", "model.layers.3", False), ("infc.linear", "aten::linear", "model.layers.0", True)])
def test_unfused(op, symbol, origin, unfused):
    assert is_unfused(Step("k", (), op, origin=(origin,)), Kernel("k", "k", symbol, op, "x")) is unfused


def bench(version, ms=2.0, rounds=5):
    return {"schema": 1, "model": "tiny", "artifact": {"version": version}, "contract": "exact", "workload": {"rounds": rounds},
            "environment": {"cpu": "A"}, "read_gb_s": 30.0, "decode": {"8": {"ms": 9.0}, "1": {"ms": ms, "tok_s": 1000 / ms}},
            "prefill": {"128": 1000.0}, "cold": {}, "warm": {}, "memory": {}}


def test_measurements_join_the_figures():
    versions = []
    for path in (fp32(), tiny()):
        with read(path) as artifact: versions.append(artifact.manifest.version)
    told = diff.compare(fp32(), tiny(), bench=[bench(versions[0]), bench(versions[1], 1.0)])["metrics"]
    assert told["decode_ms"] == {"before": 2.0, "after": 1.0} and told["bench.decode.1.tok_s"] == {"before": 500.0, "after": 1000.0}
    with pytest.raises(UserError, match="measured tiny of version other"):
        diff.compare(fp32(), tiny(), bench=[bench("other"), bench(versions[1])])
    with pytest.raises(UserError, match=r"workload is .*5.* in the first and .*9"):
        diff.compare(fp32(), tiny(), bench=[bench(versions[0]), bench(versions[1], rounds=9)])
    other = bench(versions[1]) | {"environment": {"cpu": "B"}}
    assert diff.compare(fp32(), tiny(), bench=[bench(versions[0]), other])["notes"] == ["measured on different machines: A and B"]


# --------------------------------------------------------------------------------------------------------------- budgets

A = {"decode_ms": 10.0, "memory": 100e6, "unfused": 0.0, "kernels": 14.0, "fired.fuse_rope": 30.0, "nodes": 5.0, "aten_steps": 0.0}
B = {"decode_ms": 10.3, "memory": 104e6, "unfused": 1.0, "kernels": 12.0, "nodes": 5.0, "aten_steps": 0.0}


@pytest.mark.parametrize(("budget", "broken"), [
    ("decode_ms>+2%", True), ("decode_ms>+3.1%", False), ("memory>+5%", False), ("memory>=+4%", True), ("unfused>0", True),
    ("unfused>1", False),
    ("unfused>+0", True), ("unfused>+900%", True), ("kernels<-1", True), ("kernels<-2", False), ("kernels<=-2", True),
    ("kernels==12", True),
    ("kernels!=12", False), ("kernels<-10%", True), ("memory>103MB", True), ("memory>1GB", False), ("memory>+3900kB", True),
    ("fired.fuse_rope<30", True), ("fired.fuse_rope<-0", True), ("calls.aten.add.Tensor>0", False),
    (" decode_ms > +2% ", True),
    ("decode_ms>1e1", True), ("aten_steps>+0%", False)])
def test_budgets(budget, broken):
    assert bool(judge(budget, A, B)) is broken


def test_several_budgets_and_their_lines():
    told = judge("decode_ms>+2%,memory>+5%,unfused>0", A, B)
    assert [t["text"] for t in told] == [
        "decode_ms is 10.3 ms, was 10 ms (+3.0%): breaks decode_ms>+2%", "unfused is 1, was 0 (+inf%): breaks unfused>0"]


@pytest.mark.parametrize(("budget", "line"), [
    ("memry>+5%", "unknown metric 'memry'.* did you mean 'memory'"), ("memory>5%", "needs a sign"),
    ("memory", "cannot read the budget 'memory'"),
    ("memory>+5%;unfused>0", "cannot read"), ("", "--fail-on is empty"), (" , ", "--fail-on is empty"),
    ("kernels>3MB", "no number of bytes"),
    ("weights>1MB", "not known of B"), ("weights>+1MB", "not known of A and B"), ("bench.decode.1.ms>1", "give --bench A.json B.json"),
    ("fired.fuse_rop<3", "did you mean 'fired.fuse_rope'"), ("memory>1e400", "no finite limit"),
    ("memory=>3", "cannot read"), ("memory>five", "cannot read")])
def test_a_budget_that_cannot_be_judged_is_an_error(budget, line):
    with pytest.raises(UserError, match=line): judge(budget, A, B)


def test_a_budget_on_what_is_not_a_number_is_an_error():
    with pytest.raises(UserError, match="memory is not a number"): judge("memory>+5%", A, {**B, "memory": math.nan})


def test_an_operator_nobody_calls_is_noted():
    notes: list[str] = []
    assert judge("calls.infc.rmsnorm>0", A, B, notes.append) == []
    assert notes == ["neither graph calls infc.rmsnorm: the budget calls.infc.rmsnorm>0 counts 0"]


def test_shares_of_nothing():
    assert (share(0, 0), share(0, 2), share(-2, -1)) == (0.0, math.inf, 0.5)
    assert (change_text(1, 30), change_text(100, 105)) == ("x30", "+5.0%")
    assert [b.kind for b in parse("a>1,a>+1,a>+1%")] == ["value", "change", "share"]


def test_amounts():
    assert [amount(v, "B") for v in (0, 12, 46080, 543695936, 2.5e9)] == ["0 B", "12 B", "46.08 kB", "543.7 MB", "2.5 GB"]
    assert (amount(10.3, "ms"), amount(14, "")) == ("10.3 ms", "14")


def test_units():
    assert (unit_of("memory"), unit_of("arena.step_T16"), unit_of("fired.x"), unit_of("nobody.x")) == ("B", "B", "", "")
    assert of_stage(stage([call("a", "aten.add", "f32[B]")], [("w", "f32")])) == {"weights": 128, "nodes": 1, "calls.aten.add": 1}


# ---------------------------------------------------------------------------------------------------------- the command

def test_the_command_fails_on_a_budget():
    done = infc("diff", tiny(), fp32(), "--fail-on", "memory>+5%,unfused>0,buckets<2")
    assert done.returncode == 1 and "x2: model.layers.*.mlp" in done.stdout and "figures are equal" in done.stdout
    (line,) = done.stderr.splitlines()
    assert line.startswith("infc: memory is ") and line.endswith("breaks memory>+5%")


def test_json_is_one_document():
    done = infc("diff", tiny(), fp32(), "--json", "--fail-on", "unfused>0")
    report = json.loads(done.stdout)
    assert (done.returncode, done.stderr, report["broken"]) == (0, "", [])
    assert set(report) == {"kind", "a", "b", "differ", "changes", "metrics", "notes", "broken"} and report["kind"] == "artifacts"


def test_quiet_and_metrics():
    assert infc("diff", tiny(), tiny(), "--quiet").stdout == ""
    listed = json.loads(infc("diff", "--metrics", "--json").stdout)["metrics"]
    assert [m["name"] for m in listed] == list(METRICS)
    shown = infc("diff", "--metrics").stdout
    assert all(name in shown for name in METRICS)


def test_it_needs_no_torch():
    code = "import infc.compiler.compare.diff, infc.compiler.compare.budgets, sys; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_bad_input_is_one_line(tmp_path):
    (tmp_path / "00-captured.json").write_text(json.dumps(stage([])))
    (tmp_path / "note.json").write_text("{}")
    (tmp_path / "broken.json").write_text("{")
    other = shutil.copytree(tiny(), tmp_path / "other.infc")
    manifest = other / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"schema": 2', '"schema": 99'))
    cases = [
        ((tiny(), other), "has schema 99, this infc reads schema 2"),
        ((tiny(), tmp_path / "00-captured.json"), "is a dump stage and"),
        ((tmp_path, tmp_path / "00-captured"), "is a whole dump: name one of its stages"),
        ((tmp_path / "00-captred", tmp_path / "00-captured"), "no such stage; did you mean '00-captured'?"),
        ((tmp_path / "07", tmp_path / "00"), "no such stage"),
        ((tmp_path / "note.json", tmp_path / "00"), "is no dump stage"),
        ((tmp_path / "broken.json", tmp_path / "00"), "cannot be read as a stage"),
        ((tmp_path / "none.infc", tiny()), "no such artifact"),
        ((tiny(),), "give two artifacts, or two stages"),
    ]
    for arguments, line in cases:
        done = infc("diff", *arguments)
        assert done.returncode == 2 and line in done.stderr and done.stderr.count("\n") == 1 and not done.stdout, done.stderr
