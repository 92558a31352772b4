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
    spans = result.spans
    assert spans is not None
    hop = spans.hops[-1]
    lines = []
    for i, span in enumerate(spans.names):
        relevance = hop.prompt[i]
        best = relevance.abs().topk(min(_SHOWN, len(relevance))).indices.tolist()
        sources = ", ".join(f"{spans.features[k]!r} ({relevance[k]:+.3g})" for k in best)
        rest = float((hop.text[i] + hop.unresolved[i]).sum())
        lines.append(
            f"  {span!r} ({spans.outputs[i]:+.3g}): {sources}; earlier answer words {rest:+.3g}, "
            f"constants {hop.constants[i]:+.3g}"
        )
    return "\n".join(lines)


def write_answers(
    results: Sequence[SSMLLMAttributionResult],
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
        content = generated.answers_page(results, heading, about=about, identity=identity)
        write_whole(out, content)
        return [out]
    spans = [result.spans for result in results if result.spans is not None]
    if out.suffix.lower() == ".json":
        answers = [json.loads(answer.to_json()) for answer in spans]
        content = json.dumps({"model": model, "answers": answers}, indent=1, allow_nan=False)
        write_whole(out, content + "\n")
        return [out]
    paths = []
    for path, answer in zip(picture_files(out, len(spans)), spans, strict=True):
        figure, _ = plot_contributions(
            answer.hops[-1].prompt.float(), answer.features, answer.names, title=model
        )
        with replacing(path) as file:
            figure.savefig(file, dpi=150)
        paths.append(path)
    return paths
