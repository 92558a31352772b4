"""No page of the built site is longer than one reads: with everything unfolded, on a wide screen.

Usage: python tools/check_page_heights.py SITE, where SITE is what sphinx-build wrote.  It needs
Chromium.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from helpers.chromium import Chromium, program

#: Pixels, at a width of 1280.
LONGEST, WIDTH = 15_000, 1280
_HEIGHT = """\
document.querySelectorAll("details").forEach((each) => { each.open = true; }),
document.documentElement.scrollHeight"""


def main(site: Path) -> int:
    pages = [
        path for part in ("docs", "tutorials") for path in sorted((site / part).rglob("*.html"))
    ]
    if not pages:
        print(f"{site} holds no pages.")
        return 1
    longer = {str(path): height for path, height in heights(pages).items() if height > LONGEST}
    for path, height in longer.items():
        print(f"{path}: {height} pixels, more than {LONGEST}")
    print(f"pages: {len(pages)}, too long: {len(longer)}")
    return int(bool(longer))


def heights(pages: list[Path]) -> dict[Path, int]:
    """How high each page is."""
    path = program()
    if path is None:
        raise SystemExit("needs Chromium, see CONTRIBUTING.md")
    found = {}
    with tempfile.TemporaryDirectory() as folder, Chromium(path, Path(folder)) as browser:
        for each in pages:
            page = browser.new_page()
            page.resize(WIDTH, 800)
            page.goto(each)
            found[each] = int(page.evaluate(_HEIGHT))
            browser.close_page(page)
    return found


if __name__ == "__main__":
    raise SystemExit(main(*map(Path, sys.argv[1:])))
