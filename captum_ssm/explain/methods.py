"""Select methods and their options for the command line, and print a table of all methods."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from captum.attr import Attribution

from ..attr import LatimFlow
from ..attr.catalogue import METHODS, OF_CAPTUM, OFFERED, method_named
from ..errors import OptionError
from ..linear import Rule


def method_classes(names: list[str] | None) -> list[type[Attribution]]:
    """Return the classes of named methods of this package and of Captum, without repetitions.

    Args:
        names: names of methods, in which case and dashes are ignored; None for LatimFlow.

    Raises:
        OptionError: if a name is not the name of a method.

    Example:
        >>> from captum_ssm.explain.methods import method_classes
        >>> [each.__name__ for each in method_classes(["mambalrp", "LatimFlow"])]
        ['MambaLRP', 'LatimFlow']
    """
    if not names:
        return [LatimFlow]
    return list(dict.fromkeys(method_named(name, "--method") for name in names))


def methods_and_options(
    methods: Sequence[type[Attribution]], rules: Sequence[Rule] | None, baselines: str | None
) -> tuple[dict[str, type[Attribution]], dict[str, dict[str, Any]]]:
    """Return the arguments ``methods`` and ``options`` of :func:`captum_ssm.compare`.

    Args:
        methods: classes of methods.
        rules: rules of LatimFlow, which is listed once per rule; None for the default rule.
        baselines: the baseline for methods with this option: ``"mean"``, or a number as text; None
            for the default.

    Raises:
        OptionError: if none of the methods accepts rules or baselines.

    Example:
        >>> from captum_ssm import LatimFlow
        >>> from captum_ssm.explain.methods import methods_and_options
        >>> named, options = methods_and_options([LatimFlow], ["frozen", "balanced"], None)
        >>> options
        {'LatimFlow, frozen': {'rule': 'frozen'}, 'LatimFlow, balanced': {'rule': 'balanced'}}
    """
    by_name: dict[str, type[Attribution]] = {}
    options: dict[str, dict[str, Any]] = {}
    for method in methods:
        for rule in (rules or ()) if method is LatimFlow else ():
            by_name[f"{method.get_name()}, {rule}"] = method
            options[f"{method.get_name()}, {rule}"] = {"rule": rule}
        if method is not LatimFlow or not rules:
            by_name[method.get_name()] = method
    if rules and LatimFlow not in methods:
        raise OptionError(
            f"--rule {rules[0]} is an option of LatimFlow. Add --method LatimFlow, or leave it out."
        )
    if baselines is not None:
        accepting = [name for name, method in by_name.items() if issubclass(method, LatimFlow)]
        if not accepting:
            raise OptionError(
                f"--baselines {baselines} is an option of LatimFlow and MambaLRP. Add --method "
                "LatimFlow, or leave it out."
            )
        for name in accepting:
            options.setdefault(name, {})["baselines"] = _parse_baselines(baselines)
    return by_name, options


def add_option(
    by_name: Mapping[str, type[Attribution]],
    options: dict[str, dict[str, Any]],
    name: str,
    value: Any,
    flag: str,
) -> None:
    """Add an option, in place, to each method that accepts it; ``flag`` is its name in errors.

    Example:
        >>> from captum_ssm import ImplicitAttention, LatimFlow
        >>> from captum_ssm.explain.methods import methods_and_options, add_option
        >>> named, options = methods_and_options([LatimFlow, ImplicitAttention], None, None)
        >>> add_option(named, options, "contrast", "all", "--contrast")
        >>> options
        {'LatimFlow': {'contrast': 'all'}}
    """
    accepting = [key for key, method in by_name.items() if name in _argument_names(method)]
    if not accepting:
        methods = ", ".join(m.__name__ for m in OFFERED if name in _argument_names(m))
        raise OptionError(
            f"{flag} is accepted by {methods or 'no method'}, but none of these is selected. Add "
            f"one with --method, or leave {flag} out."
        )
    for key in accepting:
        options.setdefault(key, {})[name] = value


def name_contrasts(
    by_name: Mapping[str, type[Attribution]], options: Mapping[str, dict[str, Any]], contrast: str
) -> tuple[dict[str, type[Attribution]], dict[str, dict[str, Any]]]:
    """Return methods and options by new names: methods with a contrast are named with its text.

    Example:
        >>> from captum_ssm import LatimFlow, LatimNorm
        >>> from captum_ssm.explain.methods import name_contrasts
        >>> methods = {"LatimFlow": LatimFlow, "LatimNorm": LatimNorm}
        >>> list(name_contrasts(methods, {"LatimFlow": {"contrast": (-1, 5)}}, "kite")[0])
        ['LatimFlow, against kite', 'LatimNorm']
    """

    def new_name(name: str) -> str:
        has_contrast = "contrast" in options.get(name, {})
        return f"{name}, against {contrast.strip()}" if has_contrast else name

    return (
        {new_name(name): method for name, method in by_name.items()},
        {new_name(name): method_options for name, method_options in options.items()},
    )


def _argument_names(method: type[Attribution]) -> Collection[str]:
    """Return the names of the arguments of a method's ``attribute``."""
    return inspect.signature(method.attribute).parameters


def _parse_baselines(text: str) -> float | str:
    if text == "mean":
        return text
    try:
        return float(text)
    except ValueError:
        raise OptionError(f"--baselines {text}: pass mean, or a number such as 0.") from None


def methods_table(markdown: bool = False) -> str:
    """Return a table of the methods, as aligned text or Markdown.

    Example:
        >>> from captum_ssm.explain.methods import methods_table
        >>> [line.split()[0] for line in methods_table().splitlines()[:3]]
        ['method', 'LatimFlow', 'MambaLRP']
    """
    if markdown:
        lines = [
            ("method", "returns", "needs", "cost beside the forward run"),
            ("---",) * 4,
            *((f"`{m.name}`", m.says, "; ".join(m.needs), str(m.cost)) for m in METHODS),
        ]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)
    rows = [
        ("method", "cost", "returns"),
        *((entry.name, str(entry.cost), entry.says) for entry in METHODS),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    aligned = [
        f"{name.ljust(widths[0])}  {cost.ljust(widths[1])}  {says}" for name, cost, says in rows
    ]
    return "\n".join([*aligned, "", f"Of Captum: {', '.join(m.__name__ for m in OF_CAPTUM)}"])
