"""Chromium as the suites drive it: over a pipe, by the DevTools protocol.

Debian's package is `chromium`; HOSTLER_CHROMIUM names another program. Without one, tests are left out.
"""

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path

# How long Chromium may take to answer one call on a busy machine, in seconds.
CALL_SECONDS = 60
# Chromium itself ended at its start once in some 600 starts on a busy machine.
START_ATTEMPTS = 3
# How long a page may take to come to a state, in seconds.
WAIT_SECONDS = 30


def chromium() -> str | None:
    """The program, if there is one."""
    return os.environ.get("HOSTLER_CHROMIUM") or shutil.which("chromium")


class Browser:
    """One headless Chromium with one page."""

    def __init__(self, folder: Path):
        """Starts it with a profile in `folder`."""
        self._session = None
        self._number = 0
        self.complaints: list[str] = []
        """What its console has said that is an error, and what its policies have refused."""
        for attempt in range(START_ATTEMPTS):
            self._start(folder, attempt)
            try:
                targets = self.call("Target.getTargets")["targetInfos"]
                break
            except (AssertionError, BrokenPipeError) as error:
                self.close()
                if attempt + 1 == START_ATTEMPTS:
                    raise AssertionError((folder / "chromium.log").read_text(errors="replace")[-2000:]) from error
        page = next(one for one in targets if one["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def _start(self, folder: Path, attempt: int) -> None:
        (self._from, theirs_out), (theirs_in, self._to) = os.pipe(), os.pipe()
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
        flags += [
            "--no-first-run",
            "--disable-extensions",
            "--remote-debugging-pipe",
            f"--user-data-dir={folder / f'profile-{attempt}'}",
        ]
        # The protocol has the descriptors 3 and 4.
        shell = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'
        command = ["bash", "-c", shell, chromium(), *flags, "about:blank"]
        with (folder / "chromium.log").open("ab") as log:
            self.child = subprocess.Popen(command, stdout=log, stderr=log, pass_fds=(theirs_in, theirs_out))
        os.close(theirs_in)
        os.close(theirs_out)
        self._unread = b""

    def call(self, method: str, **parameters) -> dict:
        """One call of the protocol; what happens meanwhile is noted."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + CALL_SECONDS
        while (answer := self._receive(deadline)).get("id") != self._number:
            self._note(answer)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def _receive(self, deadline: float) -> dict:
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._from], [], [], max(0, deadline - time.monotonic()))
            assert ready, "Chromium does not answer"
            piece = os.read(self._from, 1 << 20)
            assert piece, "Chromium has ended"
            self._unread += piece
        message, _, self._unread = self._unread.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict) -> None:
        told = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(told["exceptionDetails"])[:2000])
            case "Runtime.consoleAPICalled" if told["type"] in ("error", "warning", "assert"):
                self.complaints.append(json.dumps(told["args"])[:2000])
            case "Log.entryAdded" if told["entry"]["level"] == "error":
                self.complaints.append(f"{told['entry']['text']} {told['entry'].get('url', '')}")

    def open(self, address: str) -> None:
        """Goes to an address."""
        self.call("Page.navigate", url=address)

    def evaluate(self, expression: str):
        """The value of a JavaScript expression in the page, which may be a promise."""
        told = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in told, f"{expression}: {told['exceptionDetails']}"
        return told["result"].get("value")

    def wait(self, expression: str, seconds: float = WAIT_SECONDS):
        """Asks until the value is true, and returns it."""
        deadline = time.monotonic() + seconds
        # While a page is being left there is nothing to ask.
        value = None
        while time.monotonic() < deadline:
            with contextlib.suppress(AssertionError):
                if value := self.evaluate(expression):
                    return value
            time.sleep(0.05)
        text = self.evaluate("document.body.innerText")
        raise AssertionError(f"{expression} is still {value!r} after {seconds} s; the page says: {text}")

    def click(self, selector: str) -> None:
        """Waits for the first element that is meant, and clicks on its middle as a mouse does."""
        element = f"document.querySelector({json.dumps(selector)})"
        self.wait(f"!!{element}")
        self.evaluate(f"({element}).scrollIntoView({{ block: 'nearest' }})")
        middle = "(box) => [box.x + box.width / 2, box.y + box.height / 2]"
        x, y = self.evaluate(f"({middle})(({element}).getBoundingClientRect())")
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str) -> None:
        """One key, as by a keyboard: `Tab`, `Enter`, `Escape`, `ArrowDown`."""
        codes = {"Tab": 9, "Enter": 13, "Escape": 27, "ArrowRight": 39, "ArrowDown": 40}
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=codes[key],
                **(text if kind == "keyDown" else {}),
            )

    def look(self, width: int, height: int, scheme: str) -> None:
        """A window of this size, and `light` or `dark`."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def screenshot(self, file: Path, whole: bool = False) -> None:
        """A picture of the window, or of the whole page."""
        taken = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        file.write_bytes(base64.b64decode(taken["data"]))

    def close(self) -> None:
        """Ends it."""
        with contextlib.suppress(AssertionError, OSError):
            self._session = None
            self.call("Browser.close")
        try:
            self.child.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait(timeout=10)
        for end in (self._from, self._to):
            os.close(end)
