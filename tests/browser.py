"""Drives a Chromium without a window over a pipe: chromedevtools.github.io/devtools-protocol."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SECONDS = 60.0
_KEYS = {"Tab": 9, "Enter": 13, "Escape": 27, " ": 32}
_FIRST_FREE = 16
"""Least number of our file descriptors: above those at which Chromium expects its pipes."""


class Browser:
    """A browser with one page. `complaints`: all messages of its console, its network and its content policy."""

    def __init__(self, pid: int, orders: int, answers: int) -> None:
        self.complaints: list[str] = []
        self._pid, self._orders, self._answers = pid, orders, answers
        self._said, self._number, self._session = b"", 0, ""
        self._events: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Performance"):
            self._call(f"{domain}.enable")
        self.size(1100, 900)

    def size(self, width: int, height: int) -> None:
        """Set the window's size, in pixels."""
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def seen_with(self, *, scheme: str = "light", deficiency: str = "none") -> None:
        """Show it light or dark, and as seen with `deuteranopia`, `protanopia`, `tritanopia` or `achromatopsia`."""
        self._call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self._call("Emulation.setEmulatedVisionDeficiency", type=deficiency)

    def go(self, url: str) -> None:
        """Load an address, and wait for its load event."""
        self._events.clear()
        self._call("Page.navigate", url=url)
        while "Page.loadEventFired" not in self._events:
            self._read()

    def asked(self, expression: str) -> Any:
        """Return the value of an expression of the page, waiting for a promise."""
        found = self._call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, condition: str) -> Any:
        """Wait until a condition is truthy, asked at each frame; return its value. A failure shows the page's text."""
        return self.asked(f"""new Promise((done, failed) => {{
            const began = performance.now();
            const look = () => {{
                const found = {condition};
                if (found) done(found);
                else if (performance.now() - began > {SECONDS * 500}) failed(document.body.innerText.slice(0, 2000));
                else requestAnimationFrame(look);
            }};
            look();
        }})""")

    def click(self, selector: str) -> None:
        """Click as a mouse does, on whatever is at the middle of the first element that the selector finds."""
        place = self.asked(f"""(() => {{
            const found = document.querySelector({json.dumps(selector)});
            if (!found) return null;
            found.scrollIntoView({{block: 'center'}});
            const box = found.getBoundingClientRect();
            return [box.x + box.width / 2, box.y + box.height / 2];
        }})()""")
        assert place, f"nothing is at {selector}"
        for kind in ("mousePressed", "mouseReleased"):
            self._call("Input.dispatchMouseEvent", type=kind, x=place[0], y=place[1], button="left", clickCount=1)

    def point(self, x: float, y: float) -> None:
        """Move the mouse to a place, in pixels."""
        self._call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def drag(self, start: tuple[float, float], end: tuple[float, float], *, shift: bool = False) -> None:
        """Press the mouse at one place, and release it at another."""
        held = {"button": "left", "clickCount": 1, "modifiers": 8 * shift}
        self.point(*start)
        for kind, (x, y) in (("mousePressed", start), ("mouseMoved", end), ("mouseReleased", end)):
            self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **held)

    def choose(self, selector: str, value: str) -> None:
        """Choose an option of a list, as a user does."""
        self.asked(f"""(() => {{
            const found = document.querySelector({json.dumps(selector)});
            found.value = {json.dumps(value)};
            found.dispatchEvent(new Event('change'));
        }})()""")

    def busy_seconds(self) -> float:
        """Return the seconds that the page's main thread has worked so far."""
        metrics = self._call("Performance.getMetrics")["metrics"]
        return next(float(metric["value"]) for metric in metrics if metric["name"] == "TaskDuration")

    def press(self, key: str) -> None:
        """Press a key: `Tab`, `Enter`, `Escape`, or a character."""
        text = "\r" if key == "Enter" else key if len(key) == 1 else ""
        code = _KEYS[key] if key in _KEYS else ord(key.upper())
        for kind in ("keyDown", "keyUp"):
            self._call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, text=text)

    def focused(self) -> str:
        """Return the text of the focused element, on which a key would act."""
        return str(self.asked("(document.activeElement.textContent || '').trim()"))

    def picture(self, path: Path) -> None:
        """Write the window's picture as PNG."""
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"]))

    def close(self) -> None:
        os.close(self._orders)
        os.close(self._answers)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)

    def _call(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        order = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            order["sessionId"] = self._session
        os.write(self._orders, json.dumps(order).encode() + b"\0")
        while True:
            message = self._read()
            if message.get("id") == self._number:
                assert "error" not in message, f"{method}: {message['error']}"
                return message["result"]

    def _read(self) -> dict[str, Any]:
        deadline = time.monotonic() + SECONDS
        while b"\0" not in self._said:
            ready, _, _ = select.select([self._answers], [], [], deadline - time.monotonic())
            assert ready, "Chromium does not answer"
            chunk = os.read(self._answers, 1 << 20)
            assert chunk, "Chromium has ended"
            self._said += chunk
        text, _, self._said = self._said.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        self._heard(message.get("method", ""), message.get("params", {}))
        return message

    def _heard(self, event: str, about: dict[str, Any]) -> None:
        self._events.append(event)
        if event == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(about["exceptionDetails"])[:500])
        elif event == "Runtime.consoleAPICalled":
            self.complaints.append(f"console.{about['type']}: {json.dumps(about['args'])[:500]}")
        elif event == "Log.entryAdded":
            self.complaints.append(f"{about['entry']['level']}: {about['entry']['text']}")


@contextlib.contextmanager
def browser(chromium: str, profile: Path) -> Iterator[Browser]:
    """Run a browser, and at the end kill it with all its processes."""
    theirs_in, orders = map(_high, os.pipe())
    answers, theirs_out = map(_high, os.pipe())
    arguments = [
        chromium, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
        "--disable-background-networking", "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank",
    ]  # fmt: skip
    null = os.open(os.devnull, os.O_RDWR)
    pid = os.posix_spawn(
        chromium,
        arguments,
        os.environ,
        file_actions=[
            (os.POSIX_SPAWN_DUP2, here, there)
            for here, there in ((null, 0), (null, 1), (null, 2), (theirs_in, 3), (theirs_out, 4))
        ],
        setsid=True,
    )
    for descriptor in (theirs_in, theirs_out, null):
        os.close(descriptor)
    page = Browser(pid, orders, answers)
    try:
        yield page
    finally:
        page.close()


def _high(descriptor: int) -> int:
    """Move a descriptor above those that Chromium uses itself; it is closed on exec."""
    found = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE)
    os.close(descriptor)
    return found
