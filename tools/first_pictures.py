"""Make the pictures of README.md anew: its example's report in a browser, and the demo.

Usage: python tools/first_pictures.py [FOLDER], by default docs/images. It needs Chromium.
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from helpers.browser import Page, chromium, program

from captum_ssm import report
from captum_ssm.cli import main
from captum_ssm.models import load_bundled

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
PROMPT = "anna owns the lamp . bob owns the kite . ? anna owns the"
#: Of the window, and how many pixels of the picture there are for each of it.
_SIZE, _SCALE = (1280, 800), 1.25


def draw(folder: Path) -> None:
    """Write ``report.png``, the first screen of the report, and ``demo.png``, what the demo draws.

    Args:
        folder: where they go.
    """
    model, vocabulary = load_bundled("recall-mamba")
    with TemporaryDirectory() as place:
        made = Path(place)
        page = report(
            model, PROMPT, tokenizer=vocabulary, title="Who owns what?", path=made / "page.html"
        )
        photograph(page, made / "report.png")
        main(["demo", "--out", place])
        for name, picture in (("report", "report.png"), ("demo", "relevance.png")):
            Image.open(made / picture).convert("RGB").save(folder / f"{name}.png", optimize=True)
            print(folder / f"{name}.png")


def photograph(page: Path, picture: Path) -> None:
    """What a browser shows of a page before anybody scrolls.

    Args:
        page: the file.
        picture: where it goes.
    """
    path = program()
    if path is None:
        raise SystemExit("needs Chromium, see CONTRIBUTING.md")
    with chromium(path) as browser:
        shown = Page(browser, *_SIZE, scale=_SCALE)
        shown.goto(page)
        shown.screenshot(picture)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else IMAGES)
