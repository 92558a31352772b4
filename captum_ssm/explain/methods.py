"""The methods that the command offers."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..errors import OptionError


class MethodLine(NamedTuple):
    """A line of the table of methods.

    Attributes:
        name: of its class in captum_ssm.
        cost: beside the forward run.
        says: what it says.
    """

    name: str
    cost: str
    says: str


#: The methods that the command offers, in the order in which it lists them.
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

    Returns:
        The classes, each once, in the order of their names.

    Raises:
        OptionError: when there is no method of a name.

    Example:
        >>> from captum_ssm.explain.methods import method_classes
        >>> [each.__name__ for each in method_classes(["mambalrp", "LatimFlow"])]
        ['MambaLRP', 'LatimFlow']
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
    """The methods, one line each.

    Returns:
        The table as text, a head and a line for each method.

    Example:
        >>> from captum_ssm.explain.methods import methods_table
        >>> [line.split()[0] for line in methods_table().splitlines()[:3]]
        ['method', 'LatimFlow', 'MambaLRP']
    """
    rows = [("method", "cost", "what it says"), *METHODS]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return "\n".join(
        f"{name.ljust(widths[0])}  {cost.ljust(widths[1])}  {says}" for name, cost, says in rows
    )
