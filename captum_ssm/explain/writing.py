"""What is written: a report, pictures, or numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import OptionError
from ..viz import plot_image, plot_text
from ..viz.html.explanation import Explanation

#: What files end in, and what they hold.
FORMATS = {".html": "a report", ".png": "a picture per example", ".json": "numbers"}


def check_format(out: Path) -> None:
    """Raise unless the file's ending says what it is to hold."""
    if out.suffix.lower() not in FORMATS:
        known = ", ".join(f"{end} ({what})" for end, what in FORMATS.items())
        raise OptionError(f"--out {out}: what to write is said by the ending: {known}.")


def write_json(found: Sequence[Explanation], model: str, out: Path) -> list[Path]:
    """Tokens, predictions and relevances of each example."""
    examples = [
        {
            "explained": explanation.facts["explained"],
            "predictions": explanation.facts["predictions"],
            "tokens": explanation.tokens,
            "relevance": {m["name"]: m["values"] for m in explanation.facts["methods"]},
        }
        for explanation in found
    ]
    text = json.dumps({"model": model, "examples": examples}, indent=1, allow_nan=False)
    out.write_text(text + "\n", encoding="utf-8")
    return [out]


def write_pictures(
    found: Sequence[Explanation], images: Tensor | None, title: str, out: Path
) -> list[Path]:
    """A picture of each example; from the second on, files are numbered.

    Args:
        found: the explanations.
        images: the images (B, C, H, W) that were explained; None for texts.
        title: a heading.
        out: the first file.
    """
    paths = []
    for number, explanation in enumerate(found):
        facts = explanation.facts
        heading = f"{title}: {facts['explained']}"
        scores = {m["name"]: _scores(m["values"]) for m in facts["methods"]}
        grid = None if facts["image"] is None else facts["image"]["grid"]
        if images is None or grid is None:
            figure, _ = plot_text(explanation.tokens, scores, title=heading)
        else:
            cells = torch.tensor(facts["image"]["cells"])
            maps = {name: values[cells].view(*grid) for name, values in scores.items()}
            figure, _ = plot_image(images[number], maps, title=heading)
        paths.append(out if number == 0 else out.with_stem(f"{out.stem}-{number + 1}"))
        figure.savefig(paths[-1], dpi=150)
    return paths


def largest(facts: Mapping[str, Any], method: Mapping[str, Any], count: int = 5) -> str:
    """A method's most relevant tokens, in one line."""
    scores = _scores(method["values"])
    best = scores.abs().topk(min(count, len(scores))).indices.tolist()
    named = ", ".join(f"{facts['tokens'][i]} ({scores[i]:+.3g}, token {i})" for i in best)
    return f"  {method['name']}: {named}"


def _scores(values: Sequence[float | None]) -> Tensor:
    """Relevances (L,); tokens without one have zero."""
    return torch.tensor([0.0 if value is None else value for value in values])
