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
from .page import Facts, framed, short, whole_page
from .parts import is_negligible

#: Files that are joined, in this order, to one style sheet and one script.
_STYLES = ("common.css", "results.css")
_SCRIPTS = ("common.js", "maps.js", "canvases.js", "tables.js", "panes.js", "results.js")
#: The largest number of modules whose constants are listed.
_MAX_CONSTANTS = 12
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
        heading, facts_by_example = "Comparison of methods", _comparison_facts(result)
    else:
        heading, facts_by_example = "Decomposition of the output", _decomposition_facts(result)
    examples = []
    for number, facts in enumerate(facts_by_example):
        count = max((len(row["values"]) for row in facts["rows"]), default=0)
        indices = [str(i) for i in range(count)]
        names = indices if result.names is None else result.names[number]
        words = as_words(names)
        layout = {"direction": direction_of("".join(names)), "sentences": []}
        facts |= {"name": f"Example {number + 1}", "words": words._asdict() | layout}
        examples.append(facts)
    return whole_page("results.html", _STYLES, _SCRIPTS, title or heading, {"examples": examples})


def _picture(figure: Any, title: str) -> str:
    """Return an HTML page with a matplotlib figure as its only content."""
    file = io.StringIO()
    figure.savefig(file, format="svg", bbox_inches="tight")
    encoded = base64.b64encode(file.getvalue().encode()).decode("ascii")
    heading = html.escape(title)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{heading}</title>'
        f'<h1>{heading}</h1><img alt="{heading}" src="data:image/svg+xml;base64,{encoded}"></html>'
    )


def _comparison_facts(comparison: Comparison) -> Iterator[Facts]:
    """Yield each example's relevance by all methods, as JSON values."""
    for example in range(len(next(iter(comparison.values()), ()))):
        facts = _empty_facts()
        for name, relevance in comparison.items():
            label, identity = visible_text(name), holds_identity(name)
            _add_relevance(facts, label, relevance[example], comparison.names, identity)
            if name in comparison.sums:
                added = (facts["rows"] or facts["maps"])[-1]
                added["sum"] = comparison.sums[name][example].facts
        yield facts


def _decomposition_facts(result: Decomposition | LogitContributions) -> Iterator[Facts]:
    """Yield each example's relevance, roles, constants and layers, as JSON values."""
    is_image = isinstance(result, Decomposition) and result.inputs.dim() == 4
    relevance = result.inputs if is_image and isinstance(result, Decomposition) else result.tokens
    for example in range(len(result.output)):
        facts = _empty_facts()
        _add_relevance(facts, "relevance", relevance[example], result.names)
        parts = {"tokens": relevance[example].sum(), "constants": result.bias[example]}
        if isinstance(result, Decomposition):
            parts["tokens that the model adds"] = result.virtual[example]
            if result.by_others is not None:
                parts["further inputs"] = result.by_others[example]
            for role, values in (result.roles or {}).items():
                if bool(values[example].any()) and not is_image:
                    _add_relevance(facts, f"as {role}", values[example], result.names)
        always = {"tokens", "constants"}  # other parts are listed unless they are 0
        listed = [[name, short(float(x))] for name, x in parts.items() if name in always or bool(x)]
        facts["sum"] = {"parts": listed, "output": short(float(result.output[example]))}
        constants = sorted(result.biases.items(), key=lambda item: -abs(float(item[1][example])))
        largest = constants[:_MAX_CONSTANTS]
        facts["biases"] = [[visible_text(k), short(float(x[example]))] for k, x in largest]
        facts["layers"] = list(_layer_rows(result, example))
        for row in facts["rows"]:  # one color scale, so that roles can be compared
            row["scale"] = max(_largest(other["values"]) for other in facts["rows"])
        yield facts


def _layer_rows(result: Decomposition | LogitContributions, example: int) -> Iterator[list[float]]:
    """Yield relevance of tokens at each layer's input, or in its part of a logit, if L is equal."""
    by_layer = result.streams if isinstance(result, Decomposition) else tuple(result.layers)
    length = result.tokens.shape[1]
    for values in by_layer:
        token_sums = values[example].reshape(len(values[example]), -1).sum(-1)
        if len(token_sums) == length:
            yield _rounded(token_sums)


def _empty_facts() -> Facts:
    """Return the JSON values of an example to which nothing is added yet."""
    return {"rows": [], "maps": [], "sum": None, "biases": [], "layers": []}


def _add_relevance(
    facts: Facts, name: str, relevance: Tensor, names: Names | None, identity: bool = False
) -> None:
    """Add an example's relevance to ``facts``: a vector as a row of tokens, a matrix as a map."""
    values = relevance.detach().cpu().double()
    if values.dim() == 3:  # channels of an image
        values = values.sum(0)
    if values.dim() == 2 and names is not None:  # features of tokens
        values = values.sum(-1)
    if values.dim() == 2:
        size = list(values.shape)
        facts["maps"].append({"name": name, "size": size, "values": _rounded(values.flatten())})
        return
    scores = _rounded(values)
    # with the identity, the query token has the largest entry
    query = max(range(len(scores)), key=lambda i: abs(scores[i])) if identity and scores else None
    note = "" if query is None else "The query token's value includes the identity matrix."
    if is_negligible(scores, query):
        note += " All other values are negligible." if identity else "All values are zero."
    facts["rows"].append({"name": name, "values": scores, "note": note, "scale": _largest(scores)})


def _largest(values: Sequence[float]) -> float:
    return max(map(abs, values), default=0.0)


def _rounded(values: Tensor) -> list[float]:
    return [short(value) for value in values.flatten().tolist()]
