"""The methods as the command names and lists them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..attr import LatimFlow
from ..attr.catalogue import DEFAULT, METHODS
from ..attr.engine.method import SSMAttribution
from ..errors import OptionError
from ..linear import Rule


def method_classes(names: list[str] | None) -> list[type[SSMAttribution]]:
    """The classes of methods; upper and lower case are the same.

    Args:
        names: of the methods; None for those of a report.

    Returns:
        The classes, each once, in the order of their names.

    Raises:
        OptionError: when there is no method of a name.

    Example:
        >>> from captum_ssm.explain.methods import method_classes
        >>> [each.__name__ for each in method_classes(["mambalrp", "LatimFlow"])]
        ['MambaLRP', 'LatimFlow']
    """
    if not names:
        return list(DEFAULT)
    known = {entry.name.lower(): entry.method for entry in METHODS}
    for name in names:
        if name.lower() not in known:
            raise OptionError(
                f"--method {name}: no such method. Use some of "
                f"{', '.join(entry.name for entry in METHODS)}; captum-ssm methods says what they "
                "are."
            )
    return list(dict.fromkeys(known[name.lower()] for name in names))


def under_rules(
    methods: Sequence[type[SSMAttribution]],
    rules: Sequence[Rule] | None,
    baselines: str | None,
) -> tuple[dict[str, type[SSMAttribution]], dict[str, dict[str, Any]]]:
    """The methods by name, LatimFlow under each of several rules, and their options.

    Args:
        methods: the classes.
        rules: the rules of LatimFlow; None for its own.
        baselines: what methods that take baselines are given: ``"mean"`` or a number as text; None
            for nothing.

    Returns:
        The classes and their options, as :func:`captum_ssm.compare` takes them.

    Raises:
        OptionError: when none of the methods takes what was given.

    Example:
        >>> from captum_ssm import LatimFlow
        >>> from captum_ssm.explain.methods import under_rules
        >>> named, options = under_rules([LatimFlow], ["frozen", "centred"], None)
        >>> options
        {'LATIM Flow, frozen': {'rule': 'frozen'}, 'LATIM Flow, centred': {'rule': 'centred'}}
    """
    named: dict[str, type[SSMAttribution]] = {}
    options: dict[str, dict[str, Any]] = {}
    for method in methods:
        for rule in (rules or ()) if method is LatimFlow else ():
            named[f"{method.get_name()}, {rule}"] = method
            options[f"{method.get_name()}, {rule}"] = {"rule": rule}
        if method is not LatimFlow or not rules:
            named[method.get_name()] = method
    if rules and LatimFlow not in methods:
        raise OptionError("--rule is LatimFlow's. Name LatimFlow by --method, or leave it out.")
    if baselines is not None:
        taking = [name for name, method in named.items() if issubclass(method, LatimFlow)]
        if not taking:
            raise OptionError(
                "--baselines is for LatimFlow and MambaLRP. Name one by --method, or leave it out."
            )
        for name in taking:
            options.setdefault(name, {})["baselines"] = _baselines(baselines)
    return named, options


def _baselines(text: str) -> float | str:
    if text == "mean":
        return text
    try:
        return float(text)
    except ValueError:
        raise OptionError(f"--baselines {text}: use mean, or a number such as 0.") from None


def methods_table(markdown: bool = False) -> str:
    """The methods, one line each.

    Args:
        markdown: as a markdown table, with what they need. Default: False, aligned columns.

    Returns:
        The table as text, a head and a line for each method.

    Example:
        >>> from captum_ssm.explain.methods import methods_table
        >>> [line.split()[0] for line in methods_table().splitlines()[:3]]
        ['method', 'LatimFlow', 'MambaLRP']
    """
    if markdown:
        lines = [
            ("method", "what it says", "needs", "cost beside the forward run"),
            ("---",) * 4,
            *((f"`{m.name}`", m.says, "; ".join(m.needs), str(m.cost)) for m in METHODS),
        ]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)
    rows = [
        ("method", "cost", "what it says"),
        *((entry.name, str(entry.cost), entry.says) for entry in METHODS),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return "\n".join(
        f"{name.ljust(widths[0])}  {cost.ljust(widths[1])}  {says}" for name, cost, says in rows
    )
