"""The built site as its readers have it: no page is too long, and none keeps anyone out.

Every page is at most so high, with all unfolded. The main pages break no rule of axe-core, wide in
the light theme and narrow in the dark one, and what is too wide on them is scrolled by keyboard.
The search finds the page that a question is about, the page on speed begins with its picture, and
no figure is shown as a text.

Usage: python tools/check_site.py SITE, where SITE is what sphinx-build wrote.  It needs Chromium
and axe-core, see CONTRIBUTING.md.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import product
from pathlib import Path
from threading import Thread
from urllib.parse import quote_plus

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from helpers import axe
from helpers.browser import Page, chromium, program

#: Pixels, at the greater of the widths.
LONGEST = 15_000
VIEWS, HEIGHT = ((1280, "light"), (390, "dark")), 800
MAIN = ("index", "quickstart", "methods/index", "results", "gallery", "speed", "api/extend")
#: What is asked of the search, and the page that it is to find first.
ASKED = {
    "which method to trust": "docs/methods/index.html",
    "which method should I use": "docs/faq.html",
    "how to install": "docs/index.html",
    "supported versions": "docs/install.html",
    "explain my own model": "docs/faq.html",
    "my model was refused": "docs/howto/refused.html",
    "falcon-h1": "docs/architectures.html",
    "supported models": "docs/architectures.html",
    "out of memory": "docs/howto/long_contexts.html",
    "bfloat16": "docs/howto/gpus_and_sharded_models.html",
    "padding attention mask": "docs/reading_scores.html",
    "baseline": "docs/reading_scores.html",
    "negative scores": "docs/reading_scores.html",
    "limitations": "docs/faq.html",
    "coming from captum": "docs/faq.html",
    "shap": "docs/faq.html",
    "NoiseTunnel": "docs/howto/captum_workflow.html",
    "segmentation": "docs/howto/vision_models.html",
    "add a mixer": "docs/howto/adding_an_architecture.html",
    "DNA": "docs/howto/dna.html",
    "glossary": "docs/words.html",
    "command line": "docs/api/cli.html",
}

_UNFOLDED_HEIGHT = """\
document.querySelectorAll("details").forEach((each) => { each.open = true; }),
document.documentElement.scrollHeight"""
_WIDE = """\
[...document.querySelectorAll(".content pre, .content table")]
  .map((each) => each.closest(".table-wrapper") ?? each)
  .filter((each) => each.scrollWidth > each.clientWidth)"""
#: Whether a picture is the first thing below the title, is there, and is seen without scrolling.
_PICTURE_FIRST = """\
(() => {
  const picture = document.querySelector("article h1 + p > img:first-child");
  return picture !== null && picture.naturalWidth > 0 &&
    picture.getBoundingClientRect().bottom <= innerHeight;
})()"""


class Quiet(SimpleHTTPRequestHandler):
    """Serves files, and says nothing of it."""

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@contextmanager
def served(site: Path) -> Iterator[str]:
    """The address of the site: read from the disk, its pages may not fetch what they search."""
    handler = partial(Quiet, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def faults_of_heights(page: Page, address: str, pages: list[str]) -> Iterator[str]:
    page.resize(VIEWS[0][0], HEIGHT)
    # names of the reference are searched for, and not read from top to bottom
    for name in (name for name in pages if not name.startswith("docs/api/")):
        page.goto(f"{address}/{name}")
        height = int(page.evaluate(_UNFOLDED_HEIGHT))
        if height > LONGEST:
            yield f"{name}: {height} pixels, more than {LONGEST}"


def faults_of_pictures(site: Path, pages: list[str]) -> Iterator[str]:
    """Figures that a notebook shows as texts."""
    for name in pages:
        if "&lt;Figure size" in (site / name).read_text(encoding="utf-8"):
            yield f"{name}: a text in the place of a figure"


def faults_of_access(page: Page, address: str) -> Iterator[str]:
    """What axe-core holds against the main pages, and what a keyboard does not reach there."""
    for name, (width, theme) in product(MAIN, VIEWS):
        page.resize(width, HEIGHT)
        page.prefer(theme)
        page.goto(f"{address}/docs/{name}.html")
        where = f"docs/{name}.html, {width} pixels, {theme}: "
        yield from (where + fault for fault in axe.violations(page))
        if page.overflow() > 0:
            yield f"{where}{page.overflow()} pixels wider than the window"
        for index in range(int(page.evaluate(f"{_WIDE}.length"))):
            page.evaluate(f"{_WIDE}[{index}].focus()")
            page.keys("ArrowRight")
            try:
                page.wait_for(f"{_WIDE}[{index}].scrollLeft > 0")
            except TimeoutError:
                yield f"{where}arrow keys do not scroll what is wide, number {index}"


def faults_of_search(page: Page, address: str) -> Iterator[str]:
    page.resize(VIEWS[0][0], HEIGHT)
    for question, wanted in ASKED.items():
        page.goto(f"{address}/search.html?q={quote_plus(question)}")
        page.wait_for("document.querySelector('#search-results .search li a') !== null")
        found = str(page.evaluate("document.querySelector('#search-results .search li a').href"))
        if found.partition("#")[0] != f"{address}/{wanted}":
            yield f"the search for {question!r} finds {found} first, not {wanted}"


def faults_of_speed(page: Page, address: str) -> Iterator[str]:
    page.resize(VIEWS[0][0], HEIGHT)
    page.goto(f"{address}/docs/speed.html")
    if not page.evaluate(_PICTURE_FIRST):
        yield "docs/speed.html does not begin with its picture"


def main(site: Path) -> int:
    paths = [path for part in ("docs", "tutorials") for path in (site / part).rglob("*.html")]
    pages = sorted(str(path.relative_to(site)) for path in paths)
    if not pages:
        print(f"{site} holds no pages.")
        return 1
    path = program()
    if path is None or axe.script() is None:
        raise SystemExit(f"needs Chromium and {axe.PACKAGE}, see CONTRIBUTING.md")
    with served(site) as address, chromium(path) as browser:
        page = Page(browser)
        faults = [
            *faults_of_heights(page, address, pages),
            *faults_of_pictures(site, pages),
            *faults_of_access(page, address),
            *faults_of_search(page, address),
            *faults_of_speed(page, address),
        ]
    print(*faults, f"pages: {len(pages)}, faults: {len(faults)}", sep="\n")
    return int(bool(faults))


if __name__ == "__main__":
    raise SystemExit(main(*map(Path, sys.argv[1:])))
