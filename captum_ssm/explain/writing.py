"""What is written: a report, pictures, or numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._files import replacing, write_whole
from ..errors import OptionError
from ..viz import plot_image, plot_text
from ..viz.html.explanation import Explanation

#: What files end in, and what they hold.
FORMATS = {".html": "a report", ".png": "a picture per example", ".json": "numbers"}


def check_format(out: Path) -> None:
    """Raise unless the file's ending says what it is to hold.

    Args:
        out: the file.

    Raises:
        OptionError: when the ending is not one of :data:`FORMATS`.

    Example:
        >>> from pathlib import Path
        >>> from captum_ssm.explain.writing import FORMATS, check_format
        >>> for ending in FORMATS:
        ...     check_format(Path(f"lamp{ending}"))
    """
    if out.suffix.lower() not in FORMATS:
        known = ", ".join(f"{end} ({what})" for end, what in FORMATS.items())
        raise OptionError(f"--out {out}: what to write is said by the ending: {known}.")


def write_json(found: Sequence[Explanation], model: str, out: Path) -> list[Path]:
    """Tokens, predictions and relevances of each example, in full precision.

    Where a method decomposes the output, ``accounts`` says what it is: the sum of all relevance,
    ``bias``, what constants add, and ``delta``, what is missing.

    Args:
        found: the explanations.
        model: its name.
        out: the file.

    Returns:
        The file alone.

    Example:
        >>> import json, tempfile
        >>> from pathlib import Path
        >>> from captum_ssm.explain.writing import write_json
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     (path,) = write_json([], "recall-mamba", Path(folder, "numbers.json"))
        ...     json.loads(path.read_text())
        {'model': 'recall-mamba', 'examples': []}
    """
    examples = [
        {
            "explained": explanation.facts["explained"],
            "predictions": explanation.facts["predictions"],
            "tokens": explanation.tokens,
            "relevance": {m["name"]: m["values"] for m in explanation.facts["methods"]},
            "accounts": {name: sums._asdict() for name, sums in explanation.accounts.items()},
        }
        for explanation in found
    ]
    text = json.dumps({"model": model, "examples": examples}, indent=1, allow_nan=False)
    write_whole(out, text + "\n")
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

    Returns:
        The files, one for each explanation.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from captum_ssm.explain.writing import write_pictures
        >>> from captum_ssm.viz.html.explanation import Explanation
        >>> methods = [{"name": "LatimFlow", "values": [1.0, -0.5], "own": None}]
        >>> facts = {"explained": "lamp", "methods": methods, "image": None}
        >>> found = [Explanation(facts, ["anna", "owns"], [], {})] * 2
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     paths = write_pictures(found, None, "recall-mamba", Path(folder, "owns.png"))
        >>> [path.name for path in paths]
        ['owns.png', 'owns-2.png']
    """
    paths = []
    for number, explanation in enumerate(found):
        facts = explanation.facts
        heading = f"{title}: {facts['explained']} (purple is positive, brown negative)"
        scores = {_caption(m): _scores(m) for m in facts["methods"]}
        grid = None if facts["image"] is None else facts["image"]["grid"]
        if images is None or grid is None:
            figure, _ = plot_text(explanation.tokens, scores, title=heading)
        else:
            cells = torch.tensor(facts["image"]["cells"])
            maps = {name: values[cells].view(*grid) for name, values in scores.items()}
            figure, _ = plot_image(images[number], maps, title=heading)
        paths.append(out if number == 0 else out.with_stem(f"{out.stem}-{number + 1}"))
        with replacing(paths[-1]) as file:
            figure.savefig(file, dpi=150)
    return paths


def largest(facts: Mapping[str, Any], method: Mapping[str, Any], count: int = 5) -> str:
    """A method's most relevant tokens, in one line.

    Args:
        facts: of an example, with its ``tokens``.
        method: of those facts, with its ``name``, its ``values``, one per token or None, and
            ``own``, the token whose own entry is the identity, or None.
        count: how many tokens at most. Default: 5.

    Returns:
        The line; the tokens are sorted by absolute relevance.

    Example:
        >>> from captum_ssm.explain.writing import largest
        >>> method = {"name": "LatimFlow", "values": [0.5, -2.0], "own": None}
        >>> largest({"tokens": ["anna", "owns"]}, method)
        '  LatimFlow: owns (-2, token 1), anna (+0.5, token 0)'
        >>> largest({"tokens": ["anna", "owns"]}, method | {"own": 1})
        '  LatimFlow (without the own entry of token 1, -2): anna (+0.5, token 0)'
    """
    scores = _scores(method)
    best = scores.abs().topk(min(count, len(scores))).indices.tolist()
    best = [i for i in best if i != method["own"]]
    named = ", ".join(f"{facts['tokens'][i]} ({scores[i]:+.3g}, token {i})" for i in best)
    return f"  {_caption(method)}: {named}"


def _caption(method: Mapping[str, Any]) -> str:
    """A method's name, and what :func:`_scores` leaves out."""
    own = method["own"]
    if own is None or method["values"][own] is None:
        return str(method["name"])
    return f"{method['name']} (without the own entry of token {own}, {method['values'][own]:.3g})"


def _scores(method: Mapping[str, Any]) -> Tensor:
    """Relevances (L,); tokens without one have zero, and so has the identity."""
    values = [0.0 if value is None else value for value in method["values"]]
    if method["own"] is not None:
        values[method["own"]] = 0.0
    return torch.tensor(values, dtype=torch.float64)
