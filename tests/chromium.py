"""A browser without a window, told what to do over two pipes (the Chrome DevTools Protocol)."""

import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
MACOS = "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"
CTRL = 2  # among the modifiers of a key
BECOME = (
    "import os, sys; r, w = map(int, sys.argv[1:3]); os.dup2(r, 3); os.dup2(w, 4); os.execv(sys.argv[3], sys.argv[3:])"
)


def find() -> str | None:
    """The first browser of this machine that says its version; $CHROMIUM names one with an unusual place."""
    asked = os.environ.get("CHROMIUM")
    found = filter(None, map(shutil.which, [asked] if asked else [*NAMES, MACOS]))
    return next(filter(_starts, found), None)


def _starts(binary: str) -> bool:
    """Some are scripts that only say how to install the browser."""
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "timeout": 60}
    return subprocess.run([binary, "--version"], check=False, **quiet).returncode == 0


class Tab:
    """One page; `complaints` holds what it wrote on its console, and every mistake in its scripts."""

    def __init__(self, to: int, answers: int) -> None:
        self._to, self._answers = to, answers
        self._rest, self._id, self._session, self._target = b"", 0, "", ""
        self.complaints: list[str] = []
        self.requests: list[str] = []  # addresses that it asked for
        self._attach()

    def _attach(self) -> None:
        self._session = ""
        self._target = self.command("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.command("Target.attachToTarget", targetId=self._target, flatten=True)["sessionId"]
        for domain in ("Runtime", "Log", "Page", "Network"):
            self.command(f"{domain}.enable")

    def fresh(self, url: str) -> None:
        """Open a page in the place of the one before, of which nothing is left: no event of it comes in between."""
        old = self._target
        self._attach()
        self.command("Target.closeTarget", targetId=old)
        self.complaints.clear()
        self.requests.clear()
        self.command("Page.navigate", url=url)

    def command(self, method: str, **params: Any) -> dict[str, Any]:
        self._id += 1
        message: dict[str, Any] = {"id": self._id, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._id:
            self._note(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            assert select.select([self._answers], [], [], 60)[0], "the browser says nothing"
            part = os.read(self._answers, 1 << 16)
            assert part, "the browser has gone"
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\0")
        return json.loads(line)

    def _note(self, event: dict[str, Any]) -> None:
        if event.get("method") == "Network.requestWillBeSent":
            self.requests.append(event["params"]["request"]["url"])
        if event.get("method") in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
            self.complaints.append(json.dumps(event["params"]))

    def run(self, expression: str) -> Any:
        """What a JavaScript expression comes to."""
        result = self.command("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def until(self, expression: str, seconds: float = 60) -> Any:
        """What an expression comes to as soon as it is true."""
        end = time.monotonic() + seconds
        while not (value := self.run(expression)):
            assert time.monotonic() < end, f"never came: {expression}"
            time.sleep(0.02)
        return value

    def type(self, text: str) -> None:
        self.command("Input.insertText", text=text)

    def press(self, key: str, code: int, modifiers: int = 0) -> None:
        for kind in ("keyDown", "keyUp"):
            self.command(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, modifiers=modifiers
            )

    def point(self, x: float, y: float) -> None:
        self.command("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)


@contextmanager
def browser(binary: str, profile: Path) -> Iterator[Tab]:
    """Start a browser of its own, and end it."""
    (theirs_read, to), (answers, theirs_write) = os.pipe(), os.pipe()
    theirs = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (theirs_read, theirs_write)]  # they become 3 and 4
    flags = [
        "--headless=new", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-extensions",
        "--disable-dev-shm-usage", "--remote-debugging-pipe", f"--user-data-dir={profile}",
    ]  # fmt: skip
    if os.geteuid() == 0:
        flags.append("--no-sandbox")  # which root cannot have
    command = [sys.executable, "-c", BECOME, *map(str, theirs), binary, *flags]
    process = subprocess.Popen(command, pass_fds=theirs, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for end in (theirs_read, theirs_write, *theirs):
        os.close(end)
    try:
        tab = Tab(to, answers)
        yield tab
        tab.command("Browser.close")
    finally:
        os.close(to)
        os.close(answers)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
