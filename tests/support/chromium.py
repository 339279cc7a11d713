"""A headless Chromium for tests, driven over its DevTools protocol by two pipes: no package, no driver, no network.

Mouse and keys go through the browser's own input events, so a test clicks what a reader would click.
Protocol: https://chromedevtools.github.io/devtools-protocol/
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
CODES = {"Enter": 13, "Escape": 27, "End": 35, "Home": 36, "ArrowUp": 38, "ArrowDown": 40, "PageUp": 33, "PageDown": 34}


def find() -> str | None:
    """Where Chromium is: ``$CHROMIUM``, or what the path has."""
    return os.environ.get("CHROMIUM") or next((path for name in NAMES if (path := shutil.which(name))), None)


class Chromium:
    """One browser with one page. A context manager.

    ``errors`` collects uncaught exceptions, ``dialogs`` the texts of alerts (which are closed), ``requests`` every URL
    that was asked for.
    """

    def __init__(self, executable: str) -> None:
        self._profile = tempfile.mkdtemp(prefix="chromium-test-")
        down, self._write = os.pipe()
        self._read, up = os.pipe()
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        flags += ["--remote-debugging-pipe", f"--user-data-dir={self._profile}", "--force-prefers-reduced-motion"]
        # the browser reads commands from its descriptor 3 and answers on 4, which only a shell can promise portably
        command = f'exec "$0" "$@" 3<&{down} 4>&{up}'
        self._process = subprocess.Popen(
            ["bash", "-c", command, executable, *flags, "about:blank"],
            pass_fds=(down, up),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(down)
        os.close(up)
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.errors: list[str] = []
        self.dialogs: list[str] = []
        self.requests: list[str] = []
        targets = self.send("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        self._session = self.send("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network"):
            self.send(f"{domain}.enable")

    def __enter__(self) -> Chromium:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._write)
        os.close(self._read)
        shutil.rmtree(self._profile, ignore_errors=True)

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command and its result; events that come before it are kept.

        Raises:
            RuntimeError: the browser refused.
            TimeoutError: no answer within 30 seconds.
        """
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + 30
        while True:
            answer = self._receive(deadline - time.monotonic())
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return dict(answer["result"])
            self._event(answer)

    def _receive(self, seconds: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready = select.select([self._read], [], [], max(seconds, 0))[0]
            if not ready:
                raise TimeoutError("Chromium does not answer")
            self._buffer += os.read(self._read, 1 << 20)
        line, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(line))

    def _event(self, event: dict[str, Any]) -> None:
        parameters = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description", details["text"]))
        elif event.get("method") == "Page.javascriptDialogOpening":
            self.dialogs.append(parameters["message"])
            self._number += 1  # not send(), which would wait for its own answer behind the one awaited now
            close = {"id": self._number, "method": "Page.handleJavaScriptDialog", "params": {"accept": True}}
            os.write(self._write, json.dumps({**close, "sessionId": self._session}).encode() + b"\0")
            self._number -= 1
        elif event.get("method") == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])

    def open(self, page: Path, fragment: str = "") -> float:
        """Loads a file afresh; seconds until it had run its script."""
        self.send("Page.navigate", url="about:blank")
        start = time.monotonic()
        self.send("Page.navigate", url=page.resolve().as_uri() + fragment)
        self.wait("document.readyState === 'complete' && location.protocol === 'file:'")
        return time.monotonic() - start

    def reload(self) -> None:
        self.run("window.before = true")
        self.send("Page.reload")
        self.wait("document.readyState === 'complete' && !window.before")

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression. The page's own policy forbids ``eval``, but not this."""
        result = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(result["exceptionDetails"].get("exception", {}).get("description", expression))
        return result["result"].get("value")

    def wait(self, condition: str, seconds: float = 20) -> None:
        """Until the condition holds.

        Raises:
            TimeoutError: it never did.
        """
        deadline = time.monotonic() + seconds
        while not self._holds(condition):
            if time.monotonic() > deadline:
                raise TimeoutError(f"never: {condition}")
            time.sleep(0.02)

    def _holds(self, condition: str) -> bool:
        try:
            return bool(self.run(condition))
        except RuntimeError as error:
            if "context" in str(error) or "navigated" in str(error):  # the page is being replaced
                return False
            raise

    def text(self, selector: str) -> str:
        """The visible text of the first match."""
        return str(self.run(f"document.querySelector({json.dumps(selector)}).innerText"))

    def click(self, selector: str) -> None:
        """The left button in the middle of the first match, which is scrolled into view."""
        place = self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'center'});"
            "const r = e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        # scrolling makes the page draw in the next frames, perhaps other elements at the same places
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")
        for kind in ("mousePressed", "mouseReleased"):
            self.send(
                "Input.dispatchMouseEvent", type=kind, x=place[0], y=place[1], button="left", buttons=1, clickCount=1
            )

    def key(self, name: str) -> None:
        """Presses a key: a character, or a name of ``CODES``."""
        text = {"text": name} if len(name) == 1 else {}
        code = CODES.get(name, ord(name[0].upper()))
        self.send("Input.dispatchKeyEvent", type="keyDown", key=name, windowsVirtualKeyCode=code, **text)
        self.send("Input.dispatchKeyEvent", type="keyUp", key=name, windowsVirtualKeyCode=code)

    def type(self, text: str) -> None:
        self.send("Input.insertText", text=text)

    def select(self, name: str, value: str) -> None:
        """Chooses an option; a native menu cannot be clicked without a screen."""
        element = f"document.querySelector('[name={name}]')"
        self.run(f"{element}.value = {json.dumps(value)}")
        self.run(f"{element}.dispatchEvent(new Event('input', {{bubbles: true}}))")

    def screen(self, width: int, height: int, dark: bool = False) -> None:
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.send("Emulation.setEmulatedMedia", features=scheme)
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def screenshot(self, path: Path) -> None:
        image = self.send("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(image))
