"""A page of a browser, used by real input events."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

#: Seconds to wait for a reply, a page or a condition.
PATIENCE = 30.0

#: Keys by name: code, virtual key code, and the text they type.
_KEYS = {
    "Enter": ("Enter", 13, "\r"),
    "Escape": ("Escape", 27, ""),
    "Tab": ("Tab", 9, ""),
    " ": ("Space", 32, " "),
    "End": ("End", 35, ""),
    "Home": ("Home", 36, ""),
    "ArrowLeft": ("ArrowLeft", 37, ""),
    "ArrowUp": ("ArrowUp", 38, ""),
    "ArrowRight": ("ArrowRight", 39, ""),
    "ArrowDown": ("ArrowDown", 40, ""),
    "PageUp": ("PageUp", 33, ""),
    "PageDown": ("PageDown", 34, ""),
}
_SHIFT = 8


class BrowserError(RuntimeError):
    """Chromium answered with an error, or not in time, or a script of a test threw."""


class Browser(Protocol):
    """What a page asks of its browser: commands, with and without waiting for the reply."""

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]: ...

    def post(self, method: str, session: str | None = None, **params: Any) -> int: ...


class Page:
    """One tab.

    Attributes:
        requests: the addresses asked for since the last :meth:`goto`, the page's own first;
            addresses that are data themselves do not count.
        errors: what the console holds that a careful author would not let stand: errors, warnings,
            uncaught exceptions, refusals of the content security policy.
        dialogs: the texts of alerts, which a page that runs foreign scripts would open.
    """

    def __init__(self, browser: Browser, session: str, context: str) -> None:
        self._browser, self.session, self.context = browser, session, context
        self.requests: list[str] = []
        self.errors: list[str] = []
        self.dialogs: list[str] = []
        self._loaded = False

    def prepare(self, width: int, height: int) -> None:
        """Listen, and set the size."""
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        # without it a tab that is not the front one may lose the keyboard
        self.call("Emulation.setFocusEmulationEnabled", enabled=True)
        self.resize(width, height)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """A command of the DevTools protocol."""
        return self._browser.call(method, self.session, **params)

    def notice(self, event: str, params: dict[str, Any]) -> None:
        """Take note of an event."""
        if event == "Page.loadEventFired":
            self._loaded = True
        elif event == "Network.requestWillBeSent":
            url = params["request"]["url"]
            if not url.startswith("data:"):
                self.requests.append(url)
        elif event == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            thrown = details.get("exception", {}).get("description", "")
            self.errors.append(f"{details['text']} {thrown}")
        elif event == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            said = [str(a.get("value", a.get("description"))) for a in params["args"]]
            self.errors.append(" ".join(said))
        elif event == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(params["entry"]["text"])
        elif event == "Page.javascriptDialogOpening":
            self.dialogs.append(params["message"])
            # scripts stand still until it is closed
            self._browser.post("Page.handleJavaScriptDialog", self.session, accept=True)

    def goto(self, address: str | Path) -> None:
        """Open an address or a file, and wait until it is loaded."""
        url = address.resolve().as_uri() if isinstance(address, Path) else address
        self.requests.clear()
        self.errors.clear()
        self._loaded = False
        self.leave()  # where the mouse is, it would point at something of the new page
        found = self.call("Page.navigate", url=url)
        if "errorText" in found:
            raise BrowserError(f"{url}: {found['errorText']}")
        self.wait_until(lambda: self._loaded, f"{url} to load")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression; a promise's once it is kept."""
        found = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in found:
            details = found["exceptionDetails"]
            thrown = details.get("exception", {}).get("description", details["text"])
            raise BrowserError(f"{expression}: {thrown}")
        return found["result"].get("value")

    def wait_for(self, expression: str) -> None:
        """Wait until a JavaScript expression is true."""
        self.wait_until(lambda: bool(self.evaluate(expression)), expression)

    def wait_until(self, done: Callable[[], bool], what: str) -> None:
        """Wait until ``done()``, letting events come in."""
        until = time.monotonic() + PATIENCE
        while not done():
            if time.monotonic() > until:
                raise BrowserError(f"waited {PATIENCE} s for {what}")
            self.call("Runtime.evaluate", expression="0")
            time.sleep(0.01)

    def text(self, selector: str) -> str:
        """The visible text of the first element that a CSS selector finds."""
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText"))

    def count(self, selector: str) -> int:
        """How many elements a CSS selector finds."""
        return int(self.evaluate(f"document.querySelectorAll({json.dumps(selector)}).length"))

    def style(self, selector: str, name: str) -> str:
        """A computed style, such as ``background-color``, of the first element found."""
        element = f"document.querySelector({json.dumps(selector)})"
        return str(self.evaluate(f"getComputedStyle({element}).getPropertyValue({name!r})"))

    def centre(self, selector: str) -> tuple[float, float]:
        """Where the middle of the first element found is, once it is scrolled into view."""
        place = self.evaluate(
            f"""(() => {{
              const element = document.querySelector({json.dumps(selector)});
              if (!element) throw new Error('no element');
              element.scrollIntoView({{block: 'center', behavior: 'instant'}});
              const box = element.getClientRects()[0];
              if (!box) throw new Error('the element is not shown');
              return [box.left + box.width / 2, box.top + box.height / 2];
            }})()"""
        )
        return place[0], place[1]

    def hover(self, selector: str) -> None:
        """Move the mouse onto the first element found."""
        x, y = self.centre(selector)
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        self.drawn()  # what the pointing changed: it may have moved things

    def drawn(self) -> None:
        """Wait until the page was drawn as it is now: input events hit what was drawn last."""
        frame = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
        self.evaluate(f"{frame}.then(() => null)")

    def leave(self) -> None:
        """Move the mouse to the page's corner."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=0, y=0)

    def click(self, selector: str) -> None:
        """Press and release the mouse's left button on the first element found."""
        self.hover(selector)
        x, y = self.centre(selector)
        self.drawn()
        hit = (
            f"document.querySelector({json.dumps(selector)})"
            f".contains(document.elementFromPoint({x}, {y}))"
        )
        self.wait_for(hit)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def key(self, name: str, *, shift: bool = False) -> None:
        """Press and release a key: a single character or a name such as ``"ArrowRight"``."""
        code, number, text = _KEYS.get(name, ("", ord(name[0].upper()), name))
        shared = {
            "key": name,
            "code": code,
            "windowsVirtualKeyCode": number,
            "modifiers": _SHIFT if shift else 0,
        }
        down = {"type": "keyDown" if text else "rawKeyDown", **({"text": text} if text else {})}
        self.call("Input.dispatchKeyEvent", **shared, **down)
        self.call("Input.dispatchKeyEvent", **shared, type="keyUp")

    def type(self, text: str) -> None:
        """Put text where the focus is, as an input method does."""
        self.call("Input.insertText", text=text)

    def focused(self) -> str:
        """The selector-like name of what has the focus: tag, then #id or else .class."""
        return str(
            self.evaluate(
                """(() => {
                  const element = document.activeElement;
                  const name = element.id ? '#' + element.id
                    : element.className ? '.' + String(element.className).split(' ')[0] : '';
                  return element.tagName.toLowerCase() + name;
                })()"""
            )
        )

    def resize(self, width: int, height: int = 900, *, scale: float = 1) -> None:
        """Make the page this large, in CSS pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=False,
        )
        self.drawn()

    def prefer(self, scheme: str) -> None:
        """Say that the user's system is ``"dark"`` or ``"light"``."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def overflow(self) -> int:
        """By how many pixels the page is wider than its window."""
        return int(
            self.evaluate(
                "document.documentElement.scrollWidth - document.documentElement.clientWidth"
            )
        )

    def screenshot(self, path: Path, *, whole: bool = False) -> Path:
        """Write what is seen, or the whole page, as a PNG.

        Args:
            path: the file to write.
            whole: all of the page, however long. Default: False, the window.
        """
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))
        return path
