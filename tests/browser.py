"""A headless Chromium to open pages in: driven over DevTools' pipe, so with nothing but the browser itself."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import hygiene

_TIMEOUT_S = hygiene.patience(60.0)
_OPTIONS = [
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",  # tests may run as root, and the pages are our own
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--no-first-run",
]


class Browser:
    """One process; `open` gives a page in it."""

    def __init__(self, profile: Path) -> None:
        program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
        if program is None:
            pytest.skip("needs Chromium to open the page in: sudo apt-get install chromium")
        # The browser reads commands from descriptor 3 and answers on 4; ours stay clear of those numbers.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for pipe in (_pipe(), _pipe()) for end in pipe]
        theirs_in, self._out, self._in, theirs_out = ends
        log = os.open(profile / "chromium.log", os.O_CREAT | os.O_WRONLY)
        moves = [(0, 3), (0, 4), (0, 1), (0, 2)]
        sources = [theirs_in, theirs_out, log, log]
        actions = [(os.POSIX_SPAWN_DUP2, source, target) for source, (_, target) in zip(sources, moves, strict=True)]
        command = [program, *_OPTIONS, f"--user-data-dir={profile}"]
        self._process = os.posix_spawn(program, command, os.environ, file_actions=actions, setpgroup=0)
        for end in (theirs_in, theirs_out, log):
            os.close(end)
        self._left, self._number, self.events = b"", 0, []  # type: tuple[bytes, int, list[dict[str, Any]]]

    def close(self) -> None:
        """End it with all its children."""
        os.close(self._out)
        os.close(self._in)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """One command of the DevTools protocol, and its result; what happens meanwhile goes into `events`."""
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        os.write(self._out, json.dumps(message).encode() + b"\0")
        return self._until(lambda answer: answer.get("id") == number).get("result", {})

    def wait_for(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Such an event, once it has come, now or before."""
        before = next(filter(wanted, self.events), None)
        return self._until(wanted) if before is None else before

    def _until(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        deadline = time.monotonic() + _TIMEOUT_S
        while True:
            while b"\0" in self._left:
                text, _, self._left = self._left.partition(b"\0")
                message = json.loads(text)
                if "method" in message:
                    self.events.append(message)
                if "error" in message:
                    pytest.fail(f"Chromium: {message['error']}")
                if wanted(message):
                    return dict(message)
            if not select.select([self._in], [], [], max(0, deadline - time.monotonic()))[0]:
                pytest.fail(f"Chromium gave no answer within {_TIMEOUT_S:.0f} s")
            read = os.read(self._in, 1 << 20)
            if not read:
                pytest.fail("Chromium has ended")
            self._left += read

    def open(self, path: Path, width: int = 1200, height: int = 900, scheme: str = "light") -> Page:
        """Load a file, on a screen of so many CSS pixels, under a light or dark scheme."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session, path.absolute().as_uri())
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        page.call("Page.setLifecycleEventsEnabled", enabled=True)
        page.show(width, height, scheme)
        loader = page.call("Page.navigate", url=page.url)["loaderId"]
        page.wait_until_loaded(lambda loaded: loaded == loader)  # and not the empty page before it
        return page


class Page:
    """One page, loaded."""

    def __init__(self, browser: Browser, session: str, url: str) -> None:
        self._browser, self._session, self.url = browser, session, url

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """A DevTools command to this page."""
        return self._browser.call(method, self._session, **params)

    def show(self, width: int, height: int, scheme: str) -> None:
        """On another screen or under another scheme."""
        mobile = width < 600
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression, as JSON has it."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            pytest.fail(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def leave(self, script: str) -> None:
        """Run a script that leads to another page, and wait until that one is loaded."""
        known = {event["params"]["loaderId"] for event in self._mine() if event["method"] == "Page.lifecycleEvent"}
        self.run(f"setTimeout(() => {{{script}}})")  # later, so that the answer does not die with this page
        self.wait_until_loaded(lambda loader: loader not in known)

    def wait_until_loaded(self, wanted: Callable[[str], bool]) -> None:
        """Until a document is loaded whose loader's name is wanted."""

        def loaded(event: dict[str, Any]) -> bool:
            facts = event.get("params", {})
            of_mine = (event.get("method"), event.get("sessionId")) == ("Page.lifecycleEvent", self._session)
            return of_mine and facts["name"] == "load" and wanted(facts["loaderId"])

        self._browser.wait_for(loaded)

    def run_until(self, script: str) -> Any:
        """The value of an expression once it is no empty one; the last one where that does not come."""
        until = time.monotonic() + _TIMEOUT_S
        while not (value := self.run(script)) and time.monotonic() < until:
            self.settle()
        return value

    def settle(self) -> None:
        """Until what an event has set off is on the screen: two frames on, and a moment."""
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 100))))")

    def press(self, key: str) -> None:
        """A key goes down and up on what has the focus."""
        code = {"Enter": 13, "ArrowRight": 39, "Escape": 27}[key]
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **text)

    def faults(self) -> list[str]:
        """What the console has against the page: errors, warnings, exceptions, what its own policy forbids."""
        self.run("new Promise(done => setTimeout(done, 200))")  # the console hears of things a moment later
        found = []
        for event in self._mine():
            method, params = event["method"], event["params"]
            if method == "Runtime.exceptionThrown":
                found.append(str(params["exceptionDetails"]))
            elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
                found.append(str(params["args"]))
            elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                found.append(params["entry"]["text"])
        return found

    def requests(self) -> list[str]:
        """All that was asked for beside the page's own file and what lies inside it."""
        asked = [e["params"]["request"]["url"] for e in self._mine() if e["method"] == "Network.requestWillBeSent"]
        return [url for url in asked if url != self.url and not url.startswith("data:")]

    def picture(self, path: Path, whole: bool = True) -> None:
        """A screenshot as PNG."""
        data = self.call("Page.captureScreenshot", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))

    def _mine(self) -> list[dict[str, Any]]:
        return [event for event in self._browser.events if event.get("sessionId") == self._session]


def _pipe() -> tuple[int, int]:
    return os.pipe()


@contextlib.contextmanager
def chromium(profile: Path) -> Iterator[Browser]:
    """A browser with an empty profile, ended at the end."""
    browser = Browser(profile)
    try:
        yield browser
    finally:
        browser.close()
