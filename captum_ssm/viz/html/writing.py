"""Write explanations to files: reports, pictures, JSON or CSV."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..._files import replacing, write_whole
from ...errors import OptionError
from ..labels import SUBSCRIPTS
from ..overlay import plot_image
from ..roles import plot_roles
from ..text import plot_text
from .example import ShownExample, Subject
from .explanation import Explanation
from .page import page
from .parts import is_negligible

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: File endings of pictures.
PICTURES = (".png", ".svg")
#: A description of the content for each file ending.
FORMATS = {
    ".html": "a report",
    **dict.fromkeys(PICTURES, "pictures of each example"),
    ".json": "numbers",
    ".csv": "relevance, a row for each token",
}
#: A description of the content for each file ending, in reports with ``generate=``.
ANSWERS = {".html": "a report"}


def check_format(
    out: Path, formats: Mapping[str, str] = MappingProxyType(FORMATS), option: str = "--out"
) -> None:
    """Raise OptionError unless ``formats`` has the file's ending."""
    if out.suffix.lower() not in formats:
        accepted = ", ".join(f"{end} ({content})" for end, content in formats.items())
        raise OptionError(f"{option} {out} has an ending that is not accepted. Use {accepted}.")


def is_page(out: Path) -> bool:
    """Return True if a file's ending is ``.html``."""
    return out.suffix.lower() == ".html"


def write(
    subject: Subject,
    examples: Sequence[ShownExample],
    explanations: Sequence[Explanation],
    model: str,
    title: str,
    out: Path,
) -> list[Path]:
    """Write explanations in the format that the file's ending selects; return all paths."""
    if is_page(out):
        write_whole(out, _page_of(subject, explanations, title))
    elif out.suffix.lower() == ".csv":
        write_csv(explanations, out)
    elif out.suffix.lower() == ".json":
        write_whole(out, json_of(explanations, model))
    else:
        images = [example.inputs[0] for example in examples] if examples[0].is_image else None
        return write_pictures(explanations, images, title, out)
    return [out]


def _page_of(subject: Subject, explanations: Sequence[Explanation], title: str) -> str:
    """Return the HTML of a report."""
    facts = {
        "model": type(subject.module).__name__,
        "layers": len(explanations[0].layers),
        "families": list(dict.fromkeys(layer.architecture for layer in explanations[0].layers)),
        "examples": [explanation.page_facts for explanation in explanations],
    }
    blocks = {name: data for x in explanations for name, data in x.blocks.items()}
    return page(title, facts, blocks)


def json_of(explanations: Sequence[Explanation], model: str) -> str:
    """Return each example's tokens, predictions and relevance as JSON, in full precision.

    ``accounts`` has the output, ``bias`` (constants) and ``delta`` (missing) for methods that
    decompose the output. ``references`` and ``baselines`` are parts of ``bias``. ``sums`` has the
    expected number, the sum and the delta for methods whose relevance should have this sum.
    ``roles`` has relevance by role. ``contrast`` is the alternative to the target.
    """
    examples = []
    for explanation in explanations:
        methods = explanation.facts["methods"]
        facts = {
            "explained": explanation.facts["explained"],
            "predictions": explanation.facts["predictions"],
            "tokens": list(explanation.tokens),
            "ids": explanation.ids,
            "relevance": {m["name"]: m["values"] for m in methods},
            "sums": {m["name"]: m["sum"] for m in methods if m["sum"]},
            "roles": {m["name"]: m["roles"] for m in methods if m["roles"]},
            "contrast": {m["name"]: m["contrast"] for m in methods if m["contrast"] is not None},
            "accounts": {name: account._asdict() for name, account in explanation.accounts.items()},
        }
        examples.append(facts)
    return json.dumps({"model": model, "examples": examples}, indent=1, allow_nan=False) + "\n"


def write_csv(explanations: Sequence[Explanation], out: Path) -> None:
    """Write relevance with one row for each example and token, and one column per method."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = [method["name"] for method in explanations[0].facts["methods"]]
    writer.writerow(["example", "position", "token", *names])
    for example, explanation in enumerate(explanations):
        columns = [method["values"] for method in explanation.facts["methods"]]
        for position, row in enumerate(zip(explanation.tokens, *columns, strict=True)):
            writer.writerow([example, position, *row])
    write_whole(out, text.getvalue())


def write_pictures(
    explanations: Sequence[Explanation], images: Sequence[Tensor] | None, title: str, out: Path
) -> list[Path]:
    """Write pictures of each example, and of each method's roles in texts, to numbered files."""
    paths = []

    def write(figure: Figure, path: Path) -> None:
        with replacing(path) as file:
            figure.savefig(file, dpi=150)
        paths.append(path)

    for number, explanation in enumerate(explanations):
        facts = explanation.facts
        heading = f"{title}: {facts['explained']}"
        scores = {_caption(method): _scores(method) for method in facts["methods"]}
        grid = None if facts["image"] is None else facts["image"]["grid"]
        if images is None or grid is None:
            figure, _ = plot_text(explanation.tokens, scores, title=heading)
        else:
            cells = torch.tensor(facts["image"]["cells"])
            maps = {name: values[cells].view(*grid) for name, values in scores.items()}
            figure, _ = plot_image(images[number], maps, title=heading)
        with_roles = [method for method in facts["methods"] if method["roles"]]
        path, *role_paths = _example_files(out, number, len(with_roles))
        write(figure, path)
        for role_path, method in zip(role_paths, with_roles, strict=True):
            roles = {role: _without_none(values) for role, values in method["roles"].items()}
            heading = f"{method['name']}: {facts['explained']}"
            figure, _ = plot_roles(explanation.tokens, roles, title=heading)
            write(figure, role_path)
    return paths


def picture_files(out: Path, examples: int, roles: int = 0) -> list[Path]:
    """Return paths of the pictures of examples, each with the roles of ``roles`` methods."""
    return [path for number in range(examples) for path in _example_files(out, number, roles)]


def _example_files(out: Path, number: int, roles: int) -> list[Path]:
    """Return paths of an example's picture, and of the pictures of roles by ``roles`` methods."""
    path = _numbered(out, number)
    first_of_roles = path.with_stem(f"{path.stem}-roles")
    return [path, *(_numbered(first_of_roles, i) for i in range(roles))]


def _numbered(path: Path, number: int) -> Path:
    """Return a path with a number before its ending, such as "a-2.png" for number 1."""
    return path if number == 0 else path.with_stem(f"{path.stem}-{number + 1}")


def summary_lines(facts: Mapping[str, Any], method: Mapping[str, Any], count: int = 5) -> str:
    """Return text lines: a method's most relevant words, each role's best word, and the sum."""

    def strongest_words(scores: Tensor, count: int) -> str:
        # from the last token on, add a token that continues a word to the token before
        names, sums = list(facts["tokens"]), scores.clone()
        for i in reversed(facts["shards"]):
            names[i - 1] += names[i].lstrip(SUBSCRIPTS)
            sums[i - 1 : i + 1] = torch.tensor([sums[i - 1] + sums[i], 0.0])
        indices = sums.abs().topk(min(count, len(sums))).indices.tolist()
        indices = [i for i in indices if i != method["own"] and sums[i]]
        return ", ".join(f"{names[i]} ({sums[i]:+.3g}, token {i})" for i in indices)

    question = f"{method['question']} " if method.get("question") else ""
    lines = [f"  {question}{_caption(method)}: {strongest_words(_scores(method), count)}"]
    for role, values in method["roles"].items():
        lines.append(f"    {role}: {strongest_words(_without_none(values), 1)}")
    if method.get("sum") is not None:
        lines.append(f"    {method['sum']['told']}")
    return "\n".join(lines)


def _caption(method: Mapping[str, Any]) -> str:
    """Return a method's name, with notes on an omitted query entry and on relevance near 0."""
    own, name = method["own"], str(method["name"])
    if own is not None and method["values"][own] is not None:
        name += f" (without query token {own}, {method['values'][own]:.3g})"
    return name + ", negligible" * is_negligible(method["values"], own)


def _scores(method: Mapping[str, Any]) -> Tensor:
    """Return relevance (L,), with 0 for tokens without a number and for the query's own entry."""
    scores = _without_none(method["values"])
    if method["own"] is not None:
        scores[method["own"]] = 0.0
    return scores


def _without_none(values: Sequence[float | None]) -> Tensor:
    """Return values as a tensor (L,), with 0 for None."""
    return torch.tensor([0.0 if value is None else value for value in values], dtype=torch.float64)
