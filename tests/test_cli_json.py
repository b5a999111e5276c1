"""With --json, what goes wrong is one document on stdout too: the line of stderr and the exit code, beside what was found all the same."""
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
from infc.compiler import cli
from infc.runtime import golden
from tiny_artifact import INFC, infc, process, tiny


def told(done: subprocess.CompletedProcess[str], code: int) -> dict[str, Any]:
    """The document of a command that failed; its error is the last line of stderr."""
    found = json.loads(done.stdout)
    assert done.returncode == code and done.stderr.splitlines()[-1] == f"infc: {found['error']['message']}", done.stderr
    assert found["error"] == {"message": found["error"]["message"], "exit_code": code} and found["error"]["message"]
    return found


def commands() -> list[tuple[str, ...]]:
    """Every command by the words that name it."""
    named = cli.typer.main.get_command(cli.app).commands          # type: ignore[attr-defined]
    return [(name, *inner) for name, one in named.items() for inner in ([(word,) for word in getattr(one, "commands", ())] or [()])]


def test_commands_are_those_there_are():
    assert {("compile",), ("models",), ("bench", "measure"), ("quality", "compare")} <= set(commands())


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_a_wrong_option_of_every_command(command: tuple[str, ...]):
    """Told before anything is parsed: --json may stand behind the mistake."""
    assert "--frobnicate" in told(infc(*command, "--frobnicate", "--json"), 2)["error"]["message"]


@pytest.mark.parametrize(("arguments", "said"), [
    (("compile", "smolm2"), "did you mean"), (("run", "none.infc", "-p", "x"), "no such artifact"), (("run", "x.infc"), "--prompt"),
    (("inspect",), "Missing argument 'ARTIFACT'"), (("bench",), "Missing argument 'ARTIFACT'"),
    (("verify", "none.infc"), "no such artifact"),
    (("bench", "compare", "none.json", "none.json"), "none.json"), (("quality", "none.infc"), "none.infc"), (("nothing",), "nothing"),
    (("diff", "a.infc"), "give two artifacts"), (("bisect", "smolm2"), "did you mean"), (("explain", "none.infc"), "no such artifact"),
    (("compile", "tiny", "--dtype", "int3"), "--dtype"), (("targets", "x"), "x"), (("--json",), "stands behind a command"),
])
def test_a_mistake(arguments: tuple[str, ...], said: str):
    found = told(infc(*arguments, *["--json"] * (arguments != ("--json",))), 2)
    assert set(found) == {"error"} and said in found["error"]["message"]


def test_a_path_that_is_no_text_is_spelled_as_on_stderr():
    assert "a\\udcff.infc: no such artifact" in told(process("run", "a\udcff.infc", "-p", "x", "--json"), 2)["error"]["message"]


def test_a_json_that_is_misspelt_is_still_asked_for():
    assert "does not take a value" in told(infc("models", "--json=1"), 2)["error"]["message"]


def test_a_closed_stdout_changes_no_exit_code():
    for arguments, code in ((("inspect", str(tiny()), "--json"), 0), (("inspect", "none.infc", "--json"), 2)):
        done = subprocess.run(["sh", "-c", '"$@" >&-', "sh", *INFC, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == code and "Traceback" not in done.stderr, done.stderr


def test_nothing_on_stdout_where_json_was_not_asked_for():
    """A --json behind -- is no option."""
    for arguments in (("models", "--frobnicate"), ("models", "--frobnicate", "--", "--json")):
        done = infc(*arguments)
        assert (done.returncode, done.stdout) == (2, "") and "--frobnicate" in done.stderr


def test_a_failed_check_has_its_findings_beside_the_error(monkeypatch: pytest.MonkeyPatch):
    real = golden.replay
    monkeypatch.setattr(golden, "replay", lambda model: msgspec.structs.replace(real(model), passed=False))
    found = told(infc("verify", tiny(), "--json"), 1)
    assert 0 <= found["largest_error"] <= found["bound"]
    assert found["hashed"] and found["replayed"] and not found["passed"] and "its answers differ" in found["error"]["message"]
    found = told(infc("check", tiny(), "--target", "h100", "--json"), 2)
    assert not found["runs"] and found["reasons"] == [found["error"]["message"].removeprefix(f"{tiny()}: ")]


def test_broken_budgets_are_one_error():
    found = told(infc("diff", tiny(), tiny(), "--fail-on", "kernels>0,weights>0", "--json"), 1)
    assert found["error"]["message"] == "; ".join(broken["text"] for broken in found["broken"]) and len(found["broken"]) == 2


def test_a_damaged_file(tmp_path: Path):
    copy = shutil.copytree(tiny(), tmp_path / "copy.infc")
    (copy / "manifest.json").write_text("{")
    assert set(told(infc("inspect", copy, "--json"), 2)) == {"error"}


@pytest.mark.parametrize("arguments", [("models", "--json"), ("models", "--json", "--frobnicate")])
def test_a_full_disk_under_stdout(arguments: tuple[str, ...]):
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([*INFC, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, env={**os.environ})
    assert done.returncode == 2 and done.stderr.splitlines()[-1] == "infc: no space left on the disk" and "Traceback" not in done.stderr
