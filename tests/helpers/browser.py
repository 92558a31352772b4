"""A headless Chromium, driven by Playwright, and pages that note what goes wrong in them."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Browser

#: Seconds to wait for a condition.
PATIENCE = 30.0
_PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
_OPTIONS = (
    "--no-sandbox",  # root has none
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    # no name but this machine's is resolved
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost",
)


def program() -> str | None:
    """Return the path of Chromium: ``CHROMIUM``, or one of its names; None if there is none."""
    named = os.environ.get("CHROMIUM")
    return named or next(filter(None, map(shutil.which, _PROGRAMS)), None)


@contextmanager
def chromium(path: str) -> Iterator[Browser]:
    """Start the program with a fresh profile, and end it."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=_OPTIONS)
        yield browser
        browser.close()


class Page:
    """One tab in a context of its own: no storage is shared.

    Attributes:
        requests: the addresses asked for since the last :meth:`goto`, the page's own first;
            addresses that are data themselves do not count.
        errors: errors and warnings of the console, uncaught exceptions, and refusals of the content
            security policy.
        dialogs: the texts of alerts, which foreign scripts would open.
    """

    def __init__(
        self, browser: Browser, width: int = 1280, height: int = 900, scale: float = 1
    ) -> None:
        size: Any = {"width": width, "height": height}
        self._context = browser.new_context(
            viewport=size, device_scale_factor=scale, color_scheme="null"
        )
        self._tab = self._context.new_page()
        self._devtools = self._context.new_cdp_session(self._tab)
        self.requests: list[str] = []
        self.errors: list[str] = []
        self.dialogs: list[str] = []
        self._tab.on("request", lambda request: self._note_request(request.url))
        self._tab.on("pageerror", lambda error: self.errors.append(str(error)))
        self._tab.on("console", self._note_console)
        self._tab.on("dialog", self._note_dialog)

    def close(self) -> None:
        """Close the tab and forget what it stored."""
        self._context.close()

    def _note_request(self, url: str) -> None:
        if not url.startswith("data:"):
            self.requests.append(url)

    def _note_console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(message.text)

    def _note_dialog(self, dialog: Any) -> None:
        self.dialogs.append(dialog.message)
        dialog.accept()

    def goto(self, address: str | Path) -> None:
        """Open an address or a file, and wait until it is loaded."""
        self.leave()  # the mouse would point at something of the new page
        self.requests.clear()
        self.errors.clear()
        self._tab.goto(address.resolve().as_uri() if isinstance(address, Path) else address)
        self.wait_for("!document.querySelector('main[aria-busy]')")  # of reports: data unpacked

    def at_start(self, script: str) -> None:
        """Run a script at the start of every page, before the page's own."""
        self._tab.add_init_script(script)

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression; of a promise, once it is kept."""
        return self._tab.evaluate(expression)

    def wait_for(self, expression: str) -> None:
        """Wait until a JavaScript expression is true.

        Playwright's own waiting evaluates strings in the page, whose policy forbids that.
        """
        until = time.monotonic() + PATIENCE
        while not self.evaluate(expression):
            if time.monotonic() > until:
                raise TimeoutError(f"waited {PATIENCE} s for {expression}")
            self._tab.wait_for_timeout(20)

    def settle(self) -> None:
        """Wait until a page of Insights has shown what it was asked for."""
        busy = "document.querySelector('main').hasAttribute('aria-busy')"
        self.wait_for(f"!{busy} && document.querySelector('#status').textContent !== ''")

    def is_hidden(self, selector: str) -> bool:
        """Return whether the first element found has the property ``hidden``."""
        return bool(self.evaluate(f"document.querySelector({json.dumps(selector)}).hidden"))

    def text(self, selector: str) -> str:
        """Return the visible text of the first element found."""
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText"))

    def texts(self, selector: str, name: str = "textContent") -> list[str]:
        """Return the texts, or another property, of all elements found."""
        return self.each(selector, f"e.{name}")

    def each(self, selector: str, what: str) -> list[Any]:
        """Return a JavaScript expression's values for every element ``e`` found."""
        found = f"[...document.querySelectorAll({json.dumps(selector)})].map((e) => {what})"
        return list(self.evaluate(found))

    def box(self, selector: str) -> dict[str, float]:
        """Return where the first element found is in the window."""
        element = f"document.querySelector({json.dumps(selector)})"
        return dict(self.evaluate(f"{element}.getBoundingClientRect().toJSON()"))

    def count(self, selector: str) -> int:
        """Return how many elements a CSS selector finds."""
        return int(self.evaluate(f"document.querySelectorAll({json.dumps(selector)}).length"))

    def opacities(self, selector: str) -> list[float]:
        """Return how opaque the backgrounds of all elements found are."""
        color = "getComputedStyle(e).backgroundColor.match(/[0-9.]+/g)"
        return self.each(selector, f"Number({color}[3] ?? 1)")

    def choose(self, selector: str, value: object) -> None:
        """Choose in a list as its own popup would."""
        self._tab.select_option(selector, str(value))

    def focus(self, selector: str) -> None:
        """Give the focus to the first element found."""
        self._tab.focus(selector)

    def scroll_to(self, selector: str) -> None:
        """Move the first element found into the middle of the window."""
        element = f"document.querySelector({json.dumps(selector)})"
        self.evaluate(f"{element}.scrollIntoView({{block: 'center', behavior: 'instant'}})")

    def hover(self, selector: str) -> None:
        """Move the mouse onto the first element found."""
        self._tab.hover(selector)
        self.drawn()

    def leave(self) -> None:
        """Move the mouse to the page's corner."""
        self._tab.mouse.move(0, 0)

    def click(self, selector: str) -> None:
        """Click on the first element found."""
        self._tab.click(selector)

    def move_to(self, x: float, y: float) -> None:
        """Move the mouse to a point of the window."""
        self._tab.mouse.move(x, y)

    def click_at(self, x: float, y: float) -> None:
        """Click on a point of the window."""
        self._tab.mouse.click(x, y)

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Press the mouse at a point of the window, and let go at another."""
        self._tab.mouse.move(*start)
        self._tab.mouse.down()
        self._tab.mouse.move(*end, steps=4)
        self._tab.mouse.up()

    def keys(self, *names: str) -> None:
        """Press keys one after another: characters, or names such as ``"ArrowRight"``."""
        for name in names:
            self._tab.keyboard.press(name)

    def type(self, text: str) -> None:
        """Put text where the focus is, as an input method does."""
        self._tab.keyboard.insert_text(text)

    def drawn(self) -> None:
        """Wait until the page was drawn as it is now."""
        frame = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
        self.evaluate(f"{frame}.then(() => null)")

    def focused(self) -> str:
        """Return the name of what has the focus: tag, then #id or else .class."""
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

    def resize(self, width: int, height: int = 900) -> None:
        """Make the page this large, in CSS pixels."""
        self._tab.set_viewport_size({"width": width, "height": height})
        self.drawn()

    def prefer(self, scheme: str) -> None:
        """Let the user's system be ``"dark"`` or ``"light"``."""
        # Playwright's own emulation would hide from frames which scheme their page has.
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._devtools.send("Emulation.setEmulatedMedia", {"features": features})

    def overflow(self) -> int:
        """Return by how many pixels the page is wider than its window."""
        root = "document.documentElement"
        return int(self.evaluate(f"{root}.scrollWidth - {root}.clientWidth"))

    def screenshot(self, path: Path) -> Path:
        """Write what is seen as a PNG."""
        self._tab.screenshot(path=path)
        return path
