"""Make the picture of README.md anew: what a small trained Mamba reads, in all and by layer.

Usage: python tools/readme_picture.py [PICTURE], by default docs/images/who_owns_what.png.
"""

from __future__ import annotations

import sys
from io import BytesIO
from pathlib import Path

import torch
from matplotlib.figure import Figure
from PIL import Image

from captum_ssm import LatimFlow, LatimNorm
from captum_ssm.models import load_bundled
from captum_ssm.viz import plot_matrices, plot_text

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "images" / "who_owns_what.png"
PROMPT = "anna owns the lamp . bob owns the kite . ? anna owns the"
#: Of each part, and of the white around them and between, in pixels: two for each of the page's.
WIDTH, MARGIN = 1600, 24


def draw(path: Path) -> None:
    """Draw relevance through all layers above what each layer moves from word to word."""
    model, vocabulary = load_bundled("recall-mamba")
    ids = torch.tensor([vocabulary.encode(PROMPT)])
    answer = model(ids).logits[0, -1].argmax().item()
    words = PROMPT.split()
    relevance = LatimFlow(model).attribute(ids, target=(-1, answer))
    text, _ = plot_text(
        words,
        relevance[0],
        title=f"LatimFlow: what each word adds to the logit of '{vocabulary.decode([answer])}'",
    )
    maps, _ = plot_matrices(
        LatimNorm(model).maps(ids),
        words,
        title="LatimNorm: how much each layer moves from word to word",
    )
    stacked([pixels(text), pixels(maps)]).save(path, optimize=True)


def pixels(figure: Figure) -> Image.Image:
    drawn = BytesIO()
    figure.savefig(drawn, dpi=WIDTH / figure.get_figwidth())
    return Image.open(drawn)


def stacked(parts: list[Image.Image]) -> Image.Image:
    height = MARGIN + sum(part.height + MARGIN for part in parts)
    picture = Image.new("RGB", (WIDTH + 2 * MARGIN, height), "white")
    top = MARGIN
    for part in parts:
        picture.paste(part, (MARGIN, top))
        top += part.height + MARGIN
    return picture


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURE)
