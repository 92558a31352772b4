"""Make the pictures of the gallery anew: its code is run, and each figure goes where it is shown.

Usage: python tools/gallery_pictures.py [FOLDER], by default docs, in place of those that are there.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[1] / "docs"
#: A picture, and below it the code that makes it.
_PAIR = re.compile(r"^!\[[^\]]*\]\(([^)]+)\)\n\n```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_CODE = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
#: Twice as many pixels as a page has for it.
_DPI = 160


def pairs(page: str) -> Iterator[tuple[str, str]]:
    """The pictures of a page, and the code of each."""
    yield from _PAIR.findall(page)


def first(page: str) -> str:
    """What all of them begin with."""
    found = _CODE.search(page)
    assert found is not None
    return found[1]


def draw(page: Path, folder: Path) -> None:
    """Run the page's code and write its figures.

    Args:
        page: the page.
        folder: where the links of its pictures begin.
    """
    text = page.read_text("utf-8")
    names: dict[str, Any] = {"__name__": "gallery"}
    exec(first(text), names)
    for picture, code in pairs(text):
        exec(code, names)
        (folder / picture).parent.mkdir(parents=True, exist_ok=True)
        names["figure"].savefig(folder / picture, dpi=_DPI)
        print(folder / picture)


if __name__ == "__main__":
    draw(DOCS / "gallery.md", Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS)
