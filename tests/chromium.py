"""A headless Chromium driven through its debugging pipe: open a page, run script in it, click, take a picture, read its errors.

No driver package is needed: the DevTools protocol is JSON with a zero byte between messages, on descriptors 3 and 4.
"""

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome-headless-shell")
LIMIT_S = 30


def find() -> str | None:
    """The browser of this machine, or INFC_TEST_CHROMIUM; None where there is none."""
    return os.environ.get("INFC_TEST_CHROMIUM") or next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One open page. `errors` collects uncaught exceptions, console errors and every request that is not the page itself."""

    def __init__(self, read: int, write: int) -> None:
        self.read, self.write, self.buffer, self.number, self.session = read, write, b"", 0, ""
        self.errors: list[str] = []
        self.events: list[str] = []
        self.url = ""

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the protocol, and its answer."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters} | ({"sessionId": self.session} if self.session else {})
        os.write(self.write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + LIMIT_S
        while True:
            answer = self._next(deadline, method)
            if answer.get("id") == self.number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def _next(self, deadline: float, waiting_for: str) -> dict[str, Any]:
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.read], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"the browser did not answer {waiting_for} in {LIMIT_S} s"
            part = os.read(self.read, 1 << 20)
            assert part, f"the browser ended while waiting for {waiting_for}"
            self.buffer += part
        raw, self.buffer = self.buffer.split(b"\0", 1)
        message = json.loads(raw)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, method: str, found: dict[str, Any]) -> None:
        self.events.append(method)
        if method == "Runtime.exceptionThrown":
            details = found["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Runtime.consoleAPICalled" and found["type"] in ("error", "warning", "assert"):
            self.errors.append(f"console.{found['type']}: {[a.get('value', a.get('description')) for a in found['args']]}")
        elif method == "Log.entryAdded" and found["entry"]["level"] == "error":
            self.errors.append(found["entry"]["text"])
        elif method == "Network.requestWillBeSent" and found["request"]["url"] != self.url:
            self.errors.append(f"asked for {found['request']['url'][:120]}")

    def open(self, file: Path, *, dark: bool = False, width: int = 1440, height: int = 900) -> None:
        """Load a file and wait until it is drawn."""
        self.url = file.resolve().as_uri()
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.call("Page.navigate", url=self.url)
        deadline = time.monotonic() + LIMIT_S
        while "Page.loadEventFired" not in self.events:
            self._next(deadline, "the page")

    def run(self, script: str) -> Any:
        """The value of an expression in the page; promises are awaited."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, f"{script}: {found['exceptionDetails']}"
        return found["result"].get("value")

    def hover(self, selector: str) -> tuple[float, float]:
        """Scroll an element into view and move the pointer over its middle; where that is."""
        x, y = self.run(f"(() => {{ const e = document.querySelector({selector!r}); "
                        "e.scrollIntoView({block: 'center', behavior: 'instant'}); const b = e.getBoundingClientRect(); "
                        "return [b.x + b.width / 2, b.y + b.height / 2]; })()")
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        return x, y

    def click(self, selector: str) -> None:
        """Press the left button on the middle of an element."""
        x, y = self.hover(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def type(self, selector: str, text: str) -> None:
        """Put the text into an input as if it were typed, and wait for the page to react."""
        self.click(selector)
        self.call("Input.insertText", text=text)
        self.run("new Promise((done) => setTimeout(done, 150))")

    def picture(self, file: Path) -> None:
        """What is in the window, as PNG."""
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))


@contextlib.contextmanager
def page(browser: str) -> Iterator[Page]:
    """Start the browser with an empty page; ended with the context."""
    to_browser, commands = os.pipe()
    answers, from_browser = os.pipe()
    with tempfile.TemporaryDirectory(prefix="infc-chromium-", ignore_cleanup_errors=True) as profile:
        # the shell moves the pipes to 3 and 4 whatever numbers they have here
        start = f'exec 8<&{to_browser} 9>&{from_browser} 3<&8 4>&9; exec "$0" "$@"'
        options = ["--headless", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
                   "--disable-background-networking", "--force-color-profile=srgb", f"--user-data-dir={profile}"]
        process = subprocess.Popen(["bash", "-c", start, browser, *options], pass_fds=(to_browser, from_browser),
                                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(to_browser), os.close(from_browser)
        opened = Page(answers, commands)
        try:
            target = opened.call("Target.createTarget", url="about:blank")["targetId"]
            opened.session = opened.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            yield opened
        finally:
            opened.session = ""
            opened.call("Browser.close")              # its children write to the profile until it is gone
            process.wait(10)
            os.close(answers), os.close(commands)
