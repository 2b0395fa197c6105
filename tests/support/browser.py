"""A headless Chromium on a pipe: pages opened, scripts evaluated; nothing is installed but the browser.

It speaks the DevTools protocol over two descriptors (`--remote-debugging-pipe`), so that no port is open and no
WebSocket client is needed.
"""

import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from typing import Any, Self

NAMES = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions"),
    *("--hide-scrollbars", "--force-color-profile=srgb", "--remote-debugging-pipe"),
)
ANSWER_TIMEOUT_S = 300.0


def find_browser() -> str | None:
    """The browser's path, `None` where none is installed."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """`with Browser() as browser: browser.open(url)`; one page."""

    def __init__(self) -> None:
        self._number = 0
        self._messages: list[dict[str, Any]] = []
        self._rest = b""
        self.events: list[dict[str, Any]] = []
        """What the page sent by itself, oldest first: `Network.requestWillBeSent`, `Runtime.exceptionThrown` ..."""

    def __enter__(self) -> Self:
        path = find_browser()
        assert path is not None, "find_browser says whether there is one"
        self._profile = tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True)
        read_commands, self._commands = os.pipe()
        self._output, write_answers = os.pipe()
        # the browser reads descriptor 3 and writes 4, wherever our pipe ends are
        shell = f'exec "$@" 3<&{read_commands} 4>&{write_answers}'
        if {read_commands, write_answers} & {3, 4}:
            shell = f'exec 8<&{read_commands} 9>&{write_answers}; exec "$@" 3<&8 4>&9'
        self.process = subprocess.Popen(
            ["bash", "-c", shell, "browser", path, *FLAGS, f"--user-data-dir={self._profile.name}", "about:blank"],
            pass_fds=(read_commands, write_answers),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_commands)
        os.close(write_answers)
        self._session = ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Performance", "Log"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self._commands)
        os.close(self._output)
        self._profile.cleanup()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol; its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._number:
            self.events.append(answer)
        assert "error" not in answer, f"{method}: {answer['error']}"
        result: dict[str, Any] = answer.get("result", {})
        return result

    def open(self, url: str) -> None:
        """Open a page; `wait_for` says when it is ready."""
        self.call("Page.navigate", url=url)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited where it is a promise."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait_for(self, expression: str, timeout_s: float = 180.0) -> Any:
        """Wait until an expression is true; its value."""
        end_s = time.monotonic() + timeout_s
        while not (value := self.evaluate(f"(() => {{ try {{ return {expression} }} catch {{ return null }} }})()")):
            assert time.monotonic() < end_s, f"not true after {timeout_s:g} s: {expression}\n{self.text()[:3000]}"
            time.sleep(0.1)
        return value

    def text(self) -> str:
        """All text of the page."""
        return str(self.evaluate("document.body.innerText"))

    def resize(self, width: int, height: int, *, dark: bool) -> None:
        """Set the viewport in CSS pixels, and the colour scheme."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def press(self, key: str) -> None:
        """Press a key that has a name, as `Tab` or `ArrowLeft`."""
        codes = {"Tab": 9, "Enter": 13, "Escape": 27, " ": 32, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowRight": 39}
        codes |= {"+": 187, "-": 189}
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=codes[key])

    def drag(self, left: float, right: float, top: float) -> None:
        """Press the mouse at one place, move it to the right, and let go; in CSS pixels of the viewport."""
        places = (
            ("mousePressed", left),
            ("mouseMoved", (left + right) / 2),
            ("mouseMoved", right),
            ("mouseReleased", right),
        )
        for kind, x in places:
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=top, button="left", buttons=1, clickCount=1)

    def requests(self) -> list[str]:
        """The URLs that were asked for so far."""
        sent = [event for event in self.events if event["method"] == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]

    def errors(self) -> list[str]:
        """What went wrong in the page: exceptions, refused requests, broken rules of its content policy."""
        found = [event["params"] for event in self.events if event["method"] == "Runtime.exceptionThrown"]
        logged = [event["params"]["entry"] for event in self.events if event["method"] == "Log.entryAdded"]
        thrown = [one["exceptionDetails"].get("exception", {}).get("description", str(one)) for one in found]
        return [*thrown, *(entry["text"] for entry in logged if entry["level"] == "error")]

    def _read(self) -> dict[str, Any]:
        """The next message of the browser."""
        while not self._messages:
            assert select.select([self._output], [], [], ANSWER_TIMEOUT_S)[0], "the browser does not answer"
            *whole, self._rest = (self._rest + os.read(self._output, 1 << 16)).split(b"\0")
            self._messages += map(json.loads, whole)
        return self._messages.pop(0)
