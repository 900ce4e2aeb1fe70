"""A page in a headless Chromium, driven by the DevTools protocol over pipes (no port, no WebSocket library)."""

from __future__ import annotations

import base64
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SECONDS = 60.0  # timeout of one command or event
# errors and refusals that a page reports
COMPLAINTS = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded", "Audits.issueAdded")
# The browser reads commands from file descriptor 3 and writes answers to 4.
LAUNCH = """
import fcntl, os, sys
numbers = [fcntl.fcntl(int(word), fcntl.F_DUPFD, 10) for word in sys.argv[1:3]]
os.dup2(numbers[0], 3)
os.dup2(numbers[1], 4)
os.execvp(sys.argv[3], sys.argv[3:])
"""


class Page:
    """The only page of a browser; the end of the block kills the browser.

    requests: URLs that the page requested. complaints: exceptions, console messages, violations of the page's
    Content-Security-Policy and other issues, as the browser reports them.
    """

    def __init__(self, browser: Sequence[str], profile: Path, environment: Mapping[str, str] | None = None) -> None:
        to_browser, self._send = os.pipe()
        self._receive, from_browser = os.pipe()
        self._number, self._content, self._session = 0, b"", ""
        self._events: list[dict[str, Any]] = []
        command = [
            "--headless=shell",
            "--no-sandbox",
            "--no-first-run",
            "--disable-dev-shm-usage",
            "--remote-debugging-pipe",
            "about:blank",
        ]
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                LAUNCH,
                str(to_browser),
                str(from_browser),
                *browser,
                f"--user-data-dir={profile}",
                *command,
            ],
            pass_fds=(to_browser, from_browser),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
        os.close(to_browser)
        os.close(from_browser)

    def __enter__(self) -> Page:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "Audits"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        os.killpg(self.process.pid, 9)
        self.process.wait()
        os.close(self._send)
        os.close(self._receive)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a DevTools method and return its result. Raises AssertionError for an error of the browser."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._number:
            self._events.append(answer)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def open(
        self, path: Path, width: int = 1200, dark: bool = False, media: str = "screen", settle: bool = True
    ) -> None:
        """Open a file in a window of this width in CSS pixels, and wait until the page is complete.

        settle: also wait until the page is painted, by a script.
        """
        self.resize(width)
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media=media, features=[feature])
        self._events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self._events):
            self._events.append(self._read())
        if settle:
            self.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(0))))")

    def resize(self, width: int, height: int = 900) -> None:
        """Set the width of the window in CSS pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def evaluate(self, script: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def save_screenshot(self, path: Path) -> None:
        """Write a PNG file of the complete page."""
        picture = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(picture))

    @property
    def requests(self) -> list[str]:
        events = [event for event in self._events if event.get("method") == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in events]

    @property
    def complaints(self) -> list[dict[str, Any]]:
        return [event for event in self._events if event.get("method") in COMPLAINTS]

    def _read(self) -> dict[str, Any]:
        """Return the next message of the browser."""
        deadline = time.monotonic() + SECONDS
        while b"\0" not in self._content:
            ready, _, _ = select.select([self._receive], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the browser does not answer"
            content = os.read(self._receive, 1 << 20)
            assert content, "the browser has ended"
            self._content += content
        message, _, self._content = self._content.partition(b"\0")
        return json.loads(message)
