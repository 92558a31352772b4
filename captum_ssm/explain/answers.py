"""Write explained answers, generated or given, as lines of text, pages, JSON or pictures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from .._files import replacing, write_whole
from ..attr import SSMLLMAttributionResult
from ..viz import plot_contributions
from ..viz.html import generated
from ..viz.html.writing import PICTURES, check_format, picture_files

#: Accepted file name endings, and the contents of each kind of file.
FORMATS = {".html": "a page", ".json": "numbers"} | dict.fromkeys(PICTURES, "a picture of a text")
#: The number of prompt spans printed for each span of the answer.
_SHOWN = 3


def answer_lines(result: SSMLLMAttributionResult) -> str:
    """Return a line for each span of an answer, with the most relevant spans of the prompt."""
    parts = result.spans
    assert parts is not None
    last = parts.hops[-1]
    lines = []
    for s, name in enumerate(parts.names):
        relevance = last.prompt[s]
        best = relevance.abs().topk(min(_SHOWN, len(relevance))).indices.tolist()
        named = ", ".join(f"{parts.features[i]!r} ({relevance[i]:+.3g})" for i in best)
        rest = float((last.text[s] + last.unresolved[s]).sum())
        lines.append(
            f"  {name!r} ({parts.outputs[s]:+.3g}): {named}; earlier answer words {rest:+.3g}, "
            f"constants {last.constants[s]:+.3g}"
        )
    return "\n".join(lines)


def write_answers(
    found: Sequence[SSMLLMAttributionResult],
    model: str,
    out: Path,
    *,
    title: str | None = None,
    about: str = "",
    identity: bool = False,
) -> list[Path]:
    """Write all answers to one .html or .json file, or each to a picture; return the paths."""
    check_format(out, FORMATS)
    if out.suffix.lower() == ".html":
        heading = model if title is None else title
        text = generated.answers_page(found, heading, about=about, identity=identity)
        write_whole(out, text)
        return [out]
    parts = [result.spans for result in found if result.spans is not None]
    if out.suffix.lower() == ".json":
        numbers = [json.loads(part.to_json()) for part in parts]
        text = json.dumps({"model": model, "answers": numbers}, indent=1, allow_nan=False)
        write_whole(out, text + "\n")
        return [out]
    paths = []
    for path, part in zip(picture_files(out, len(parts)), parts, strict=True):
        figure, _ = plot_contributions(
            part.hops[-1].prompt.float(), part.features, part.names, title=model
        )
        with replacing(path) as file:
            figure.savefig(file, dpi=150)
        paths.append(path)
    return paths
