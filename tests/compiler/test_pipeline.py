"""The pipeline admits, runs, checks, dumps, stops and rolls back."""
import pytest
import torch
from golden import trace
from infc.compiler.errors import CheckFailed, UserError
from infc.compiler.ir import text
from infc.compiler.ops import aten
from infc.compiler.pipeline import run_pipeline
from infc.compiler.rewrite import APPROXIMATE, EXACT, Pass, Rule

X = torch.randn(4, 8)

DOUBLE = Rule("double", lambda x: aten.add.Tensor(x, x), lambda x: aten.mul.Tensor(x, 2))
WRONG = Rule("wrong", lambda x: aten.add.Tensor(x, x), lambda x: aten.mul.Tensor(x, 3))


def graph():
    return trace(lambda x: torch.exp(x + x) + x.exp(), X, dynamic=({0: "B"},))


def test_runs_checks_and_reports():
    seen = []
    report = run_pipeline(graph(), [DOUBLE], check="strict", progress=seen.append)
    assert report.fired("double") == 1 and seen == report.passes
    (entry,) = report.json()
    assert set(entry) == {"name", "fired", "refused", "contract", "error", "seconds", "check_seconds"}
    assert (entry["name"], entry["fired"], entry["refused"], entry["contract"], entry["error"]) == ("double", 1, [], "exact", 0.0)


@pytest.mark.parametrize("check", ["fast", "strict"])
def test_a_broken_contract_is_rolled_back_and_named(check):
    g = graph()
    before = text(g)
    with pytest.raises(CheckFailed, match=r"pass wrong: another function: .* bound 1e-09; first at %exp") as failure:
        run_pipeline(g, [WRONG], check=check)
    assert text(g) == before and failure.value.exit_code == 1


def test_unchecked_means_unchecked():
    assert run_pipeline(graph(), [WRONG], check="off").passes[0].error is None


def test_a_malformed_graph_is_rolled_back():
    def run(g, report):
        g.outputs.append("more")
        return 1

    g = graph()
    with pytest.raises(CheckFailed, match=r"pass bad: .*1 results for outputs"):
        run_pipeline(g, [Pass("bad", run)], check="off")
    assert g.outputs == ["out0"]


def test_any_failure_rolls_back():
    def run(g, report):
        g.module.graph.erase_node(g.output)
        raise ZeroDivisionError

    g = graph()
    before = text(g)
    with pytest.raises(ZeroDivisionError):
        run_pipeline(g, [Pass("bad", run)])
    assert text(g) == before


def test_zero_means_unchanged():
    def run(g, report):
        DOUBLE.apply(g)
        return 0

    with pytest.raises(CheckFailed, match="pass shy: says it did nothing"):
        run_pipeline(graph(), [Pass("shy", run)])


def test_the_ceiling_names_the_pass_and_the_option():
    g = graph()
    loose = Pass("round_weights", lambda g, r: 0, APPROXIMATE, check=lambda a, b: 0.0)
    with pytest.raises(UserError, match="round_weights is approximate, the ceiling is exact: allow it with --allow approximate"):
        run_pipeline(g, [loose])
    assert run_pipeline(g, [loose], allow="approximate").weakest == EXACT          # it did not fire
    with pytest.raises(UserError, match="unknown contract 'aproximate'; did you mean 'approximate'"):
        run_pipeline(g, [loose], allow="aproximate")


def test_an_approximate_pass_needs_a_check():
    with pytest.raises(UserError, match="states no bound"):
        run_pipeline(graph(), [Pass("vague", lambda g, r: 0, APPROXIMATE)], allow=APPROXIMATE)


def test_requirements():
    needs = Pass("needs", lambda g, r: 0, requires=("grouped",))
    gives = Pass("gives", lambda g, r: 0, provides=("grouped",))
    run_pipeline(graph(), [gives, needs])
    with pytest.raises(UserError, match="pass needs requires grouped, which no earlier pass provides"):
        run_pipeline(graph(), [needs, gives])


def test_a_check_of_its_own_sets_a_new_reference():
    def drop_result(g, report):
        g.output.args = ((g.output.args[0][0].args[0],),)
        return 1

    calls = []
    cut = Pass("cut", drop_result, check=lambda before, after: calls.append((before, after)))
    report = run_pipeline(graph(), [cut, DOUBLE])
    assert len(calls) == 1 and report.fired("double") == 1           # judged against the graph after `cut`


def test_dump_writes_the_graphs_that_changed(tmp_path):
    g = graph()
    captured = text(g)
    run_pipeline(g, [Pass("nothing", lambda g, r: 0), DOUBLE], dump=tmp_path / "d")
    assert sorted(p.name for p in (tmp_path / "d").iterdir()) == ["00-captured.txt", "02-double.txt"]
    assert (tmp_path / "d/00-captured.txt").read_text() == captured
    assert (tmp_path / "d/02-double.txt").read_text() == text(g)


def test_switches_of_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("INFC_STOP", "1")
    monkeypatch.setenv("INFC_DUMP", str(tmp_path))
    monkeypatch.setenv("INFC_CHECK", "1")
    g = trace(lambda x: torch.exp(x + x) + (x.sin() + x.sin()), X)
    report = run_pipeline(g, [WRONG, DOUBLE])                        # INFC_CHECK=1: verified, contract not asked
    assert [p.fired for p in report.passes] == [1] and report.skipped == ["double"]
    assert (tmp_path / "01-wrong.txt").exists()
    monkeypatch.setenv("INFC_CHECK", "2")
    with pytest.raises(CheckFailed, match="pass wrong"):
        run_pipeline(graph(), [WRONG], check="off")
    monkeypatch.setenv("INFC_CHECK", "many")
    with pytest.raises(UserError, match="INFC_CHECK='many'"):
        run_pipeline(graph(), [WRONG])


def test_without_samples_there_is_no_judgement():
    g = graph()
    g.sample_inputs = None
    with pytest.raises(CheckFailed, match="no sample inputs"):
        run_pipeline(g, [DOUBLE])


def test_options_reach_the_passes():
    seen = {}
    run_pipeline(graph(), [Pass("asks", lambda g, r: seen.update(r.options) or 0)], options={"dtype": "bf16"})
    assert seen == {"dtype": "bf16"}
