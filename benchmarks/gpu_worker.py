"""Processes for whatever may die: a lost context, a crash or a kernel that never ends costs the request it is in, and no more.

    python gpu_worker.py KIND        then one JSON request a line on stdin; rows come back, one a line, and {"end": true} behind them
"""
import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

HANDLERS = {"conformance": "gpu_conformance.check", "program": "gpu_program.check", "compile": "gpu_models.compiled",
            "speed": "gpu_speed.measure", "tune": "gpu_speed.tuned", "rates": "gpu_speed.rates", "peers": "gpu_peers.measure"}
"""What answers a request: handler(request, begin, tell), where begin(name) says what comes next and tell(row) what was found."""

SILENT = {"conformance": 90, "program": 90, "speed": 90, "tune": 90, "rates": 60, "peers": 240, "compile": 400}
"""Seconds without a word after which a worker hangs."""


class Died(Exception):
    """A worker ended, or was ended, before its answer did."""

    def __init__(self, reason: str, begun: str) -> None:
        super().__init__(f"{begun or 'its start'}: {reason}")
        self.reason, self.begun = reason, begun


class Worker:
    """A process that answers requests with rows: JSON, one a line. What it prints goes to a file, of which the last line is its reason."""

    def __init__(self, kind: str, scratch: Path, env: dict[str, str] | None = None) -> None:
        self.kind, self.hangs = kind, False
        self.log = tempfile.NamedTemporaryFile(dir=scratch, prefix=f"{kind}-", suffix=".log", delete=False)  # noqa: SIM115   # as long as it
        self.process = subprocess.Popen([sys.executable, __file__, kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=self.log, text=True, start_new_session=True, env=os.environ | (env or {}))
        self.lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout: self.lines.put(line)
        self.lines.put(None)

    def ask(self, request: dict[str, Any], until: float) -> Iterator[dict[str, Any]]:
        """Rows as they come. Died where it ends first, hangs, or `until` (time.monotonic) is past: it is ended then."""
        begun = ""
        assert self.process.stdin
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        except OSError:
            raise Died(self._last(), begun) from None
        while True:
            left = until - time.monotonic()
            try:
                line = self.lines.get(timeout=max(0.01, min(left, SILENT[self.kind])))
            except queue.Empty:
                self.hangs = True
                self.close()
                raise Died("its time is up" if left <= SILENT[self.kind] else f"no word for {SILENT[self.kind]} s", begun) from None
            if line is None: raise Died(self._last(), begun)
            message = json.loads(line)
            if "begin" in message: begun = message["begin"]
            elif "end" in message: return
            elif "failed" in message: raise Died(message["failed"], begun)
            else: yield message

    def _last(self) -> str:
        """Why it ended, in its own last words."""
        with contextlib.suppress(subprocess.TimeoutExpired): self.process.wait(10)
        text = Path(self.log.name).read_text(errors="replace").strip()
        code = self.process.returncode
        return f"{'killed by signal ' + str(-code) if code and code < 0 else 'exit code ' + str(code)}: {text[-2000:] or 'without a word'}"

    def close(self) -> None:
        """End it and what it started."""
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            if self.process.stdin: self.process.stdin.close()             # there is no more to do: it ends by itself
            self.process.wait(0 if self.hangs else 5)
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError): os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.log.close()


def work(kind: str) -> None:
    """Be a worker. A request's exception is its answer, and the end of this process: what it left on the card is not to be trusted."""
    module, _, name = HANDLERS[kind].rpartition(".")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def tell(row: dict[str, Any]) -> None:
        answers.write(json.dumps(row) + "\n")
        answers.flush()

    for line in sys.stdin:
        try:
            handler: Callable[..., None] = getattr(import_module(module), name)
            handler(json.loads(line), lambda name: tell({"begin": name}), tell)
        except Exception:                                                 # noqa: BLE001   # a harness: its text is the row's
            tell({"failed": traceback.format_exc()})
            sys.exit(1)
        tell({"end": True})


if __name__ == "__main__":
    work(sys.argv[1])
