"""Make pages of results: colored tokens or maps, and their sums. Shapes: L tokens, Λ mixers."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from ...attr import Comparison, SSMLLMAttributionResult
from ...attr.catalogue import holds_identity
from ...attr.engine.decompose import Decomposition
from ...attr.engine.result import Names, Result
from ...attr.vectors.logit import LogitContributions
from ...inside import Graph
from ..graphs import plot_graph
from ..labels import as_words, direction_of, visible_text
from .generated import answers_page
from .page import framed, short, whole_page
from .parts import is_negligible

#: Files that are joined, in this order, to one style sheet and one script.
_STYLES = ("common.css", "results.css")
_SCRIPTS = ("common.js", "maps.js", "canvases.js", "tables.js", "panes.js", "results.js")
#: The largest number of modules whose constants are listed.
_LISTED = 12
#: Height of a page in a notebook, in pixels.
_HEIGHT = 560


def frame_of(result: Result) -> str:
    """Return the page of a result in an iframe for notebooks."""
    return framed(page_of(result), type(result).__name__, _HEIGHT)


def page_of(result: Result, title: str | None = None) -> str:
    """Return the HTML page of a result: answers, a graph, a comparison or a decomposition."""
    if isinstance(result, SSMLLMAttributionResult):
        return answers_page([result], title or "Sources of the answer")
    if isinstance(result, Graph):
        return _picture(plot_graph(result)[0], title or repr(result))
    assert isinstance(result, Comparison | Decomposition | LogitContributions)
    if isinstance(result, Comparison):
        heading, found = "Comparison of methods", _of_comparison(result)
    else:
        heading, found = "Decomposition of the output", _of_decomposition(result)
    examples = []
    for number, facts in enumerate(found):
        count = max((len(row["values"]) for row in facts["rows"]), default=0)
        numbered = [str(i) for i in range(count)]
        listed = numbered if result.names is None else result.names[number]
        words = as_words(listed)
        facts |= {"name": f"Example {number + 1}"}
        facts |= {"words": words._asdict() | {"direction": direction_of("".join(listed))}}
        facts["words"]["sentences"] = []
        examples.append(facts)
    facts_of_all = {"examples": examples}
    return whole_page("results.html", _STYLES, _SCRIPTS, title or heading, facts_of_all)


def _picture(figure: Any, title: str) -> str:
    """Return an HTML page with a matplotlib figure as its only picture."""
    file = io.StringIO()
    figure.savefig(file, format="svg", bbox_inches="tight")
    encoded = base64.b64encode(file.getvalue().encode()).decode("ascii")
    heading = html.escape(title)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{heading}</title>'
        f'<h1>{heading}</h1><img alt="{heading}" src="data:image/svg+xml;base64,{encoded}"></html>'
    )


def _of_comparison(found: Comparison) -> Iterator[dict[str, Any]]:
    for number in range(len(next(iter(found.values()), ()))):
        facts = _nothing_yet()
        for name, relevance in found.items():
            _place(facts, visible_text(name), relevance[number], found.names, holds_identity(name))
            if name in found.sums:
                (facts["rows"] or facts["maps"])[-1]["sum"] = found.sums[name][number].facts
        yield facts


def _of_decomposition(found: Decomposition | LogitContributions) -> Iterator[dict[str, Any]]:
    is_image = isinstance(found, Decomposition) and found.inputs.dim() == 4
    relevance = found.inputs if is_image and isinstance(found, Decomposition) else found.tokens
    for number in range(len(found.output)):
        facts = _nothing_yet()
        _place(facts, "relevance", relevance[number], found.names)
        parts = {"tokens": relevance[number].sum(), "constants": found.bias[number]}
        if isinstance(found, Decomposition):
            parts["tokens that the model adds"] = found.virtual[number]
            if found.by_others is not None:
                parts["further inputs"] = found.by_others[number]
            for role, values in (found.roles or {}).items():
                if bool(values[number].any()) and not is_image:
                    _place(facts, f"as {role}", values[number], found.names)
        told = {"tokens", "constants"}
        sums = [[name, short(float(x))] for name, x in parts.items() if name in told or bool(x)]
        facts["sum"] = {"parts": sums, "output": short(float(found.output[number]))}
        ordered = sorted(found.biases.items(), key=lambda item: -abs(float(item[1][number])))
        facts["biases"] = [[visible_text(n), short(float(x[number]))] for n, x in ordered[:_LISTED]]
        facts["layers"] = list(_layers(found, number))
        for row in facts["rows"]:  # of one unit, so that roles compare
            row["scale"] = max(_largest(each["values"]) for each in facts["rows"])
        yield facts


def _layers(found: Decomposition | LogitContributions, number: int) -> Iterator[list[float]]:
    """Yield the relevance of tokens at each layer's input, or in each layer's part of a logit."""
    by_layer = found.streams if isinstance(found, Decomposition) else tuple(found.layers)
    length = found.tokens.shape[1]
    for values in by_layer:
        of_tokens = values[number].reshape(len(values[number]), -1).sum(-1)
        if len(of_tokens) == length:
            yield _short(of_tokens)


def _nothing_yet() -> dict[str, Any]:
    return {"rows": [], "maps": [], "sum": None, "biases": [], "layers": []}


def _place(
    facts: dict[str, Any], name: str, relevance: Tensor, names: Names | None, identity: bool = False
) -> None:
    """Add one example's relevance to ``facts``: a vector as colored tokens, a matrix as a map."""
    values = relevance.detach().cpu().double()
    if values.dim() == 3:  # channels of an image
        values = values.sum(0)
    if values.dim() == 2 and names is not None:  # features of tokens
        values = values.sum(-1)
    if values.dim() == 2:
        size = list(values.shape)
        facts["maps"].append({"name": name, "size": size, "values": _short(values.flatten())})
        return
    found = _short(values)
    own = max(range(len(found)), key=lambda i: abs(found[i])) if identity and found else None
    note = "" if own is None else "The query token's value includes the identity matrix."
    if is_negligible(found, own):
        note += " All other values are negligible." if identity else "All values are zero."
    facts["rows"].append({"name": name, "values": found, "note": note, "scale": _largest(found)})


def _largest(values: Sequence[float]) -> float:
    return max(map(abs, values), default=0.0)


def _short(values: Tensor) -> list[float]:
    return [short(value) for value in values.flatten().tolist()]
