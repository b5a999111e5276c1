"""The command line as a user runs it, and one compiled `tiny` artifact shared by the tests that need one."""

import contextlib
import functools
import io
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from infc.compiler.cli import main

INFC = (sys.executable, "-c", "import sys; from infc.compiler.cli import main; sys.exit(main())")
"""The command in a process of its own, for what a process can do: signals, pipes, its environment, fresh imports."""


def infc(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run one command in this process: torch is imported once for all tests. A bug in infc raises here."""
    command = [str(argument) for argument in arguments]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(command)
    return subprocess.CompletedProcess(command, code, out.getvalue(), err.getvalue())


def process(*arguments: object, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run one command in a process of its own, with additions to the environment."""
    command = [*INFC, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env={**os.environ, **(env or {})})


def tiny() -> Path:
    """`infc compile tiny`, once for all tests; copy it before changing it."""
    made, done = _compiled()
    assert done.returncode == 0, f"no artifact to test with; by hand: infc compile tiny -o tiny.infc\n{done.stderr}"
    return made


@functools.cache
def _compiled() -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A failure is kept as well: one compile that fails is enough."""
    made = Path(tempfile.mkdtemp(prefix="infc-tiny-")) / "tiny.infc"
    return made, process("compile", "tiny", "--output", made)
