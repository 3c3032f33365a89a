"""A headless Chromium, told what to do by its DevTools protocol over a pair of pipes."""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from queue import Queue
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
)

# The browser reads commands from descriptor 3 and writes to 4; whoever starts it may have others open there.
LAUNCHER = """
import fcntl, os, sys
commands, answers = (fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10) for fd in sys.argv[1:3])
os.dup2(commands, 3)
os.dup2(answers, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""

PATIENCE = 120.0
"""Seconds after which what was waited for is taken to never happen."""

KEYS = {"Enter": (13, "\r"), "Escape": (27, "")}
SHIFT = 8


def find_browser() -> str | None:
    """The browser to test with, or None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page of a browser of its own, with an empty profile.

    Attributes:
        requests: addresses that it asked for, in order.
        complaints: what its console said in anger, and exceptions that nobody caught.
    """

    def __init__(self, executable: str, profile: Path) -> None:
        (commands, self._commands), (self._answers, answers) = os.pipe(), os.pipe()
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                LAUNCHER,
                str(commands),
                str(answers),
                executable,
                *FLAGS,
                f"--user-data-dir={profile}",
            ],
            pass_fds=(commands, answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(answers)
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self._numbers = itertools.count(1)
        self._replies: dict[int, Queue[dict[str, Any]]] = {}
        self._session: str | None = None
        threading.Thread(target=self._listen, daemon=True).start()
        target = self.tell("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.tell("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.tell(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._commands)

    def _listen(self) -> None:
        rest = b""
        while data := os.read(self._answers, 1 << 16):
            *messages, rest = (rest + data).split(b"\0")
            for message in map(json.loads, messages):
                if "id" in message:
                    self._replies.pop(message["id"]).put(message)
                else:
                    self._note(message["method"], message.get("params", {}))
        os.close(self._answers)

    def _note(self, event: str, said: dict[str, Any]) -> None:
        if event == "Network.requestWillBeSent":
            self.requests.append(said["request"]["url"])
        elif event == "Runtime.exceptionThrown":
            self.complaints.append(said["exceptionDetails"].get("exception", {}).get("description", "?"))
        elif event == "Log.entryAdded" and said["entry"]["level"] == "error":
            self.complaints.append(said["entry"]["text"])

    def tell(self, method: str, **params: Any) -> dict[str, Any]:
        """Give a command of the protocol, and return its result."""
        number, reply = next(self._numbers), Queue[dict[str, Any]]()
        self._replies[number] = reply
        session = {"sessionId": self._session} if self._session else {}
        os.write(
            self._commands, json.dumps({"id": number, "method": method, "params": params, **session}).encode() + b"\0"
        )
        message = reply.get(timeout=PATIENCE)
        assert "error" not in message, f"{method}: {message['error']}"
        result: dict[str, Any] = message["result"]
        return result

    def ask(self, expression: str) -> Any:
        """What a JavaScript expression is, promises awaited."""
        said = self.tell("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in said, said["exceptionDetails"]
        return said["result"].get("value")

    def until(self, expression: str) -> Any:
        """Wait for an expression to become true, and return it."""
        end = time.monotonic() + PATIENCE
        while not (value := self.ask(expression)):
            assert time.monotonic() < end, (
                f"never came true: {expression}; the page says: {self.ask('document.body.innerText')}"
            )
            time.sleep(0.02)
        return value

    def open(self, address: str) -> None:
        self.tell("Page.navigate", url=address)
        self.until(f"location.href === {json.dumps(address)} && document.readyState === 'complete'")

    def reload(self) -> None:
        self.ask("window.before = true")
        self.tell("Page.reload")
        self.until("!window.before && document.readyState === 'complete'")

    def click(self, selector: str) -> None:
        """Click into the middle of an element, which must be in sight."""
        x, y = self.ask(
            f"(() => {{ const r = document.querySelector({json.dumps(selector)}).getBoundingClientRect();"
            " return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        for event in ("mousePressed", "mouseReleased"):
            self.tell("Input.dispatchMouseEvent", type=event, x=x, y=y, button="left", clickCount=1)

    def type(self, text: str) -> None:
        """Type into what has the focus."""
        self.tell("Input.insertText", text=text)

    def press(self, key: str, *, shift: bool = False) -> None:
        code, text = KEYS[key]
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": SHIFT * shift}
        self.tell("Input.dispatchKeyEvent", type="keyDown", **common, **({"text": text} if text else {}))
        self.tell("Input.dispatchKeyEvent", type="keyUp", **common)

    def window(self, width: int, height: int, *, dark: bool = False) -> None:
        """Set the window's size in pixels, and which colours are preferred."""
        self.tell("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.tell("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.tell("Page.captureScreenshot")["data"]))
