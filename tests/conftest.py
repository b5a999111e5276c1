"""For all tests: Ctrl-C reaches the processes they start, also where the run itself is in the background and ignores it.

Triton's kernels are interpreted in the process of the tests: it decides that once, when it is imported, whoever imports it first.
What was compiled before must not answer for the code under test: each run keeps its finished artifacts apart from the user's, and
shares only what is named by the hash of its own content or source (native code, fetched models) or is a measurement of the machine.
"""
import os
import shutil
import signal
import tempfile

import pytest
from infc.compiler.reuse import cache_folder

os.environ["TRITON_INTERPRET"] = "1"
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN: signal.signal(signal.SIGINT, signal.default_int_handler)

SHARED = ("code", "triton", "models", "peaks")
_OWN = pytest.StashKey[str]()


def pytest_configure(config: pytest.Config) -> None:
    """One cache for the run: its workers are started later and inherit XDG_CACHE_HOME."""
    if hasattr(config, "workerinput"): return
    users = cache_folder()
    config.stash[_OWN] = own = tempfile.mkdtemp(prefix="infc-tests-cache-")
    os.environ["XDG_CACHE_HOME"] = own
    cache_folder().mkdir()
    for name in SHARED:
        (users / name).mkdir(parents=True, exist_ok=True)
        (cache_folder() / name).symlink_to(users / name, target_is_directory=True)


def pytest_unconfigure(config: pytest.Config) -> None:
    """The artifacts of the run go; what the links point to stays."""
    if _OWN in config.stash: shutil.rmtree(config.stash[_OWN], ignore_errors=True)
