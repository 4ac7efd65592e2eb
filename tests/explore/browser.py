"""A headless Chromium, driven by its own protocol through a pipe, so that no package is needed for it."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
PATIENCE = 30.0
"""Seconds until an answer counts as missing."""


def find() -> str | None:
    """The path of a browser, which ``SPECGRAPH_BROWSER`` may name."""
    named = os.environ.get("SPECGRAPH_BROWSER")
    return named or next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page of a browser.

    Attributes:
        errors: what its scripts threw or logged as errors.
        requests: the addresses that it asked for.
    """

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write, self._number, self._buffer = read, write, 0, b""
        self.errors: list[str] = []
        self.requests: list[str] = []
        target = self._send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, /, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol for the page."""
        return self._send(method, self._session, **parameters)

    def open(self, address: str, *, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        """Show a page and wait until its scripts have run."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.resize(width, height)
        self.call("Page.navigate", url="about:blank")  # so that another #fragment of the same page loads it anew
        self.call("Page.navigate", url=address)
        self.wait(
            f"location.href.startsWith({json.dumps(address.partition('#')[0])}) && document.readyState === 'complete'"
        )

    def resize(self, width: int, height: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise AssertionError(found["exceptionDetails"])
        return found["result"].get("value")

    def wait(self, condition: str) -> None:
        """Wait until a JavaScript expression is true."""
        end = time.monotonic() + PATIENCE
        while not self.run(condition):
            assert time.monotonic() < end, f"{condition} does not come true"
            time.sleep(0.02)

    def text(self, selector: str) -> str:
        """The text of the first element that a selector matches."""
        return str(self.run(f"document.querySelector({json.dumps(selector)}).innerText"))

    def texts(self, selector: str) -> list[str]:
        """The texts of all of them."""
        return list(self.run(f"[...document.querySelectorAll({json.dumps(selector)})].map((e) => e.textContent)"))

    def point(self, selector: str, *, click: bool = False) -> None:
        """Move the mouse to the middle of the first line of an element, and click if asked for."""
        element = f"document.querySelector({json.dumps(selector)})"
        self.run(f"{element}.scrollIntoView({{block: 'center'}})")
        x, y = self.run(
            f"(() => {{ const r = {element}.getClientRects()[0]; return [r.x + r.width / 2, r.y + r.height / 2] }})()"
        )
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        if click:
            self.click(x, y)

    def click(self, x: float, y: float) -> None:
        """Click at a place of the window."""
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def key(self, name: str, code: int, text: str = "") -> None:
        """Press a key."""
        common = {"key": name, "code": name, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def write(self, text: str) -> None:
        """Type a text where the focus is."""
        self.call("Input.insertText", text=text)

    def picture(self, path: Path, selector: str | None = None) -> None:
        """A PNG of what is shown, or of one element."""
        clip: dict[str, Any] = {}
        if selector is not None:
            rectangle = f"document.querySelector({json.dumps(selector)}).getBoundingClientRect()"
            box = self.run(
                f"(() => {{ const r = {rectangle}; return [r.x + scrollX, r.y + scrollY, r.width, r.height] }})()"
            )
            clip = {
                "clip": dict(zip(("x", "y", "width", "height"), box, strict=True), scale=1),
                "captureBeyondViewport": True,
            }
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png", **clip)["data"]))

    def _send(self, method: str, session: str | None = None, /, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise AssertionError(f"{method}: {answer['error']}")
                return dict(answer["result"])
            self._note(answer)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            found = os.read(self._read, 2**16)
            if not found:
                raise AssertionError("the browser has ended")
            self._buffer += found
        line, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(line))

    def _note(self, event: dict[str, Any]) -> None:
        parameters = event.get("params", {})
        if event.get("method") == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(str(parameters["exceptionDetails"]))
        elif event.get("method") == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.errors.append(parameters["entry"]["text"])


@contextlib.contextmanager
def browser(program: str) -> Iterator[Browser]:
    """A running browser, which ends with the context."""
    # The browser reads commands from its descriptor 3 and writes to 4.
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--remote-debugging-pipe",
        "--no-first-run",
    ]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = f'exec 3<&{theirs_in} 4>&{theirs_out}; exec "$0" "$@"'
        process = subprocess.Popen(
            ["bash", "-c", command, program, *flags, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(theirs_in, theirs_out), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)
        try:
            yield Browser(ours_in, ours_out)
        finally:
            process.terminate()
            process.wait(timeout=PATIENCE)
            os.close(ours_in)
            os.close(ours_out)
