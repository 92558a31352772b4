"""The methods that the command offers."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..errors import OptionError


class MethodLine(NamedTuple):
    """A method: its class in captum_ssm, what it costs beside the forward run, what it says."""

    name: str
    cost: str
    says: str


METHODS = (
    MethodLine("LatimFlow", "1 backward, linear", "what each token adds to an output, exactly"),
    MethodLine("MambaLRP", "1 backward, linear", "layer-wise relevance propagation"),
    MethodLine("ImplicitAttentionRollout", "1 row, linear", "the query's row through all layers"),
    MethodLine("ImplicitAttention", "1 row, linear", "the query's row, mean over layers"),
    MethodLine(
        "MambaAttribution", "1 L x L map per layer, 1 backward", "rollout weighted by the gradient"
    ),
    MethodLine(
        "TransformerAttribution",
        "1 L x L map per head, 2 backward",
        "rollout weighted by relevance and gradient",
    ),
    MethodLine("LatimNorm", "1 row of vectors per layer", "how long contribution vectors are"),
    MethodLine(
        "LatimLogit", "all rows of vectors of earlier layers", "additions to an output, by layer"
    ),
    MethodLine(
        "LatimALTI", "all rows of vectors of every layer", "which tokens a token is made of"
    ),
)

#: What is used if none is named: exact, by gradient, and class-agnostic.
DEFAULT = ("LatimFlow", "MambaAttribution", "ImplicitAttentionRollout")


def method_classes(names: list[str] | None) -> list[type[Any]]:
    """The classes of methods; upper and lower case are the same.

    Args:
        names: of the methods; None for :data:`DEFAULT`.
    """
    from .. import attr

    known = {line.name.lower(): line.name for line in METHODS}
    for name in names or ():
        if name.lower() not in known:
            raise OptionError(
                f"--method {name}: no such method. Use some of {', '.join(known.values())}; "
                "captum-ssm methods says what they are."
            )
    chosen = dict.fromkeys(known[name.lower()] for name in names or DEFAULT)
    return [getattr(attr, name) for name in chosen]


def methods_table() -> str:
    """The methods, one line each."""
    rows = [("method", "cost", "what it says"), *METHODS]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return "\n".join(
        f"{name.ljust(widths[0])}  {cost.ljust(widths[1])}  {says}" for name, cost, says in rows
    )
