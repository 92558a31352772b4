"""A headless Chromium, driven over the pipe of its DevTools protocol.

The pipe (``--remote-debugging-pipe``) needs no websocket and no port: messages are JSON, each
ended by a zero byte, written to Chromium's file descriptor 3 and read from its descriptor 4.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from helpers.chromium_page import PATIENCE, BrowserError, Page

_PROGRAMS = ("chromium", "chromium-browser", "chromium-headless-shell", "google-chrome")

_OPTIONS = (
    "--headless",
    "--remote-debugging-pipe",
    "--no-sandbox",  # as root there is none
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--force-color-profile=srgb",
    "--hide-scrollbars",
    # nothing but this machine has an address
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost",
)


def program() -> str | None:
    """Where Chromium is: ``CHROMIUM``, or one of its names on the path; None if nowhere."""
    named = os.environ.get("CHROMIUM")
    return named or next(filter(None, map(shutil.which, _PROGRAMS)), None)


class Chromium:
    """One running browser; use it in a ``with``.

    Args:
        path: the program.
        profile: an empty folder for its profile.
    """

    def __init__(self, path: str, profile: Path) -> None:
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        # the child gets its ends under whatever numbers they have; the shell makes them 3 and 4
        script = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'
        self._process = subprocess.Popen(
            ["bash", "-c", script, "bash", path, *_OPTIONS, f"--user-data-dir={profile}"],
            pass_fds=(to_browser, from_browser),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._buffer = b""
        self._number = 0
        self._pages: dict[str, Page] = {}

    def __enter__(self) -> Chromium:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.call("Browser.close")
        except (BrowserError, OSError):
            self._process.kill()
        self._process.wait(PATIENCE)
        os.close(self._write)
        os.close(self._read)

    def new_page(self, width: int = 1280, height: int = 900) -> Page:
        """An empty page of this size in a context of its own: no storage is shared."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        made = self.call("Target.createTarget", url="about:blank", browserContextId=context)
        attached = self.call("Target.attachToTarget", targetId=made["targetId"], flatten=True)
        page = Page(self, attached["sessionId"], context)
        self._pages[attached["sessionId"]] = page
        page.prepare(width, height)
        return page

    def close_page(self, page: Page) -> None:
        """Close a page and forget what it stored."""
        self._pages.pop(page.session, None)
        self.call("Target.disposeBrowserContext", browserContextId=page.context)

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Send a command and wait for its reply."""
        number, until = self.post(method, session, **params), time.monotonic() + PATIENCE
        while True:
            reply = self._receive(until, method)
            if reply.get("id") != number:
                continue
            if "error" in reply:
                raise BrowserError(f"{method}: {reply['error']['message']}")
            result: dict[str, Any] = reply["result"]
            return result

    def post(self, method: str, session: str | None = None, **params: Any) -> int:
        """Send a command without waiting; returns its number."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._write, data) :]
        return self._number

    def _receive(self, until: float, waiting_for: str) -> dict[str, Any]:
        """The next message; events are handed to their page on the way."""
        while b"\0" not in self._buffer:
            if not select.select([self._read], [], [], max(0, until - time.monotonic()))[0]:
                raise BrowserError(f"no answer to {waiting_for} in {PATIENCE} s")
            data = os.read(self._read, 1 << 20)
            if not data:
                raise BrowserError(f"Chromium ended during {waiting_for}")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        page = self._pages.get(message.get("sessionId", ""))
        if page is not None and "method" in message:
            page.notice(message["method"], message["params"])
        return message
