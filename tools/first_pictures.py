"""Draw the pictures of README.md and of the notebook on Insights again.

Usage: python tools/first_pictures.py [FOLDER], by default docs/images. It needs Chromium.
"""

from __future__ import annotations

import json
import re
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from helpers.browser import Page, chromium, program

from captum_ssm import report
from captum_ssm.cli import main
from captum_ssm.models import load_bundled

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
PROMPT = "anna owns the lamp . bob owns the kite . ? anna owns the"
#: Of the window, and how many pixels of the picture there are for each of it.
_SIZE, _SCALE = (1280, 800), 1.25
#: Of the animation: the window, frames in a second, and seconds.
_CARD, _RATE, _SECONDS = (960, 690), 10, 8
#: At which second the pointer has come to a message, or what else is clicked.
_CLICKS = [
    (1.5, "“lamp” (token 3) to “the” (token 13), layer 1"),
    (4.2, "“kite” (token 8) to “the” (token 13), layer 1"),
    (6.8, ""),
]
#: A pointer, which pictures of a browser lack; and a step in time of all that moves.
_POINTER = """(() => {
  const draw = (tag) => document.createElementNS('http://www.w3.org/2000/svg', tag);
  const [made, path] = [draw('svg'), draw('path')];
  path.setAttribute('d', 'M1 1v18l5-4 3 7 3-1-3-7h6z');
  path.style.cssText = 'fill: black; stroke: white; stroke-width: 1.5px';
  made.style.cssText = 'position: fixed; width: 24px; pointer-events: none; z-index: 9';
  made.id = 'pointer';
  made.append(path);
  document.body.append(made);
})()"""
_STEP = "document.getAnimations().forEach((a) => { a.pause(); a.currentTime += %d; })"


def draw(folder: Path) -> None:
    """Write ``report.png``, ``demo.png``, ``scissors.gif`` and ``insights_page.png``.

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
        animate(page, folder)
        main(["demo", "--out", place])
        for name, picture in (("report", "report.png"), ("demo", "relevance.png")):
            Image.open(made / picture).convert("RGB").save(folder / f"{name}.png", optimize=True)
            print(folder / f"{name}.png")
    insights(folder / "insights_page.png")


def insights(picture: Path) -> None:
    """Take a picture of the page that the notebook on Insights serves.

    Args:
        picture: where it goes.
    """
    notebook = json.loads((ROOT / "tutorials" / "05_insights.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    last = next(i for i, cell in enumerate(cells) if cell.endswith("\nsentences"))
    names: dict[str, Any] = {"__name__": "__main__"}
    exec("\n".join(cells[: last + 1]), names)
    with names["sentences"] as sentences, redirect_stdout(StringIO()) as printed:
        sentences.serve()
        photograph(re.findall(r"http://\S+", printed.getvalue())[0], picture)


def photograph(page: Path | str, picture: Path) -> None:
    """Take a picture of a page before anybody scrolls.

    Args:
        page: the file or the address.
        picture: where it goes.
    """
    path = program()
    if path is None:
        raise SystemExit("needs Chromium, see CONTRIBUTING.md")
    with chromium(path) as browser:
        shown = Page(browser, *_SIZE, scale=_SCALE)
        shown.goto(page)
        if isinstance(page, str):
            shown.settle()
        shown.screenshot(picture)


def animate(page: Path, folder: Path) -> None:
    """Messages of a report that are cut and healed by a pointer.

    Args:
        page: the file.
        folder: where ``scissors.gif`` goes.
    """
    path = program()
    if path is None:
        raise SystemExit("needs Chromium, see CONTRIBUTING.md")
    frames = []
    with chromium(path) as browser, TemporaryDirectory() as place:
        shown = Page(browser, *_CARD)
        shown.goto(page)
        shown.evaluate("document.querySelector('.card').scrollIntoView({block: 'center'})")
        shown.evaluate(_POINTER)
        x, y, before, clicks = 60.0, 420.0, 0.0, list(_CLICKS)
        for number in range(_RATE * _SECONDS):
            now = number / _RATE
            if clicks:
                until, arc = clicks[0]
                to_x, to_y = shown.evaluate(_place(arc))
                share = min(
                    1.0,
                    max(0.0, (now - max(before, until - 1.1)) / (until - max(before, until - 1.1))),
                )
                at = x + (to_x - x) * share, y + (to_y - y) * share
                shown.move_to(*at)
                shown.evaluate(f"pointer.style.left = '{at[0]}px', pointer.style.top = '{at[1]}px'")
                if share == 1.0:
                    shown.click_at(*at)
                    (x, y), before = at, now
                    clicks.pop(0)
            shown.evaluate(_STEP % (1000 // _RATE))
            frames.append(
                Image.open(shown.screenshot(Path(place) / f"{number}.png")).convert("RGB")
            )
    colors = frames[round(_RATE * (_CLICKS[1][0] - 1.2))].quantize(255)
    first, *rest = (frame.quantize(palette=colors, dither=Image.Dither.NONE) for frame in frames)
    first.save(
        folder / "scissors.gif", save_all=True, append_images=rest, duration=1000 // _RATE, loop=0
    )
    print(folder / "scissors.gif")


def _place(arc: str) -> str:
    """Where an arc, or the button that heals, is clicked."""
    if not arc:
        found = "document.querySelector('.heal').getBoundingClientRect()"
        return f"(({{x, y, width, height}}) => [x + width / 2, y + height / 2])({found})"
    ink = f"document.querySelector('.arc[aria-label*=\"{arc}\"] .ink')"
    return (
        f"((ink) => {{ const point = ink.getPointAtLength(ink.getTotalLength() / 3);"
        f"const box = document.querySelector('.arcs').getBoundingClientRect();"
        f"return [box.x + point.x, box.y + point.y]; }})({ink})"
    )


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else IMAGES)
