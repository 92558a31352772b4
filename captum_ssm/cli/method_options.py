"""Parse options of methods, typed as NAME=VALUE on the command line."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import OptionError

if TYPE_CHECKING:
    from captum.attr import Attribution
    from torch import Tensor, nn


def set_options(
    methods: Mapping[str, type[Attribution]],
    options: dict[str, dict[str, Any]],
    typed: Sequence[str],
    model: nn.Module,
    inputs: Tensor,
) -> None:
    """Add options from the command line, and defaults that depend on the inputs, to ``options``.

    Args:
        methods: the methods by name.
        options: the options of each method, by name; changed in place.
        typed: options as typed, such as ``"n_steps=50"``.
        model: the explained model.
        inputs: the inputs of one example.

    Raises:
        OptionError: when an option is not NAME=VALUE, a name or value is not accepted, or a method
            does not fit the model.

    Example:
        >>> import torch
        >>> from captum.attr import IntegratedGradients
        >>> from captum_ssm.cli.method_options import set_options
        >>> methods, options, model = {"path": IntegratedGradients}, {}, torch.nn.Linear(2, 1)
        >>> set_options(methods, options, ["n_steps=50"], model, torch.ones(1, 2))
        >>> options
        {'path': {'n_steps': 50}}
    """
    from ..attr.engine.method import SSMAttribution
    from ..explain.methods import add_option
    from ..insights.applicability import obstacle
    from ..insights.methods import DEFAULTS_FROM_INPUTS, parameters_of

    for option in typed:
        name, equals, text = option.partition("=")
        if not equals or not name:
            raise OptionError(f"--option {option}: write NAME=VALUE, such as n_steps=50.")
        add_option(methods, options, name, _parse_value(text), f"--option {option}")
        for key, method in methods.items():
            kind = parameters_of(method.get_name()).params.get(name)
            if kind is not None:
                options[key][name] = kind.parse(f"--option {name}", options[key][name])
    for key, method in methods.items():
        if not issubclass(method, SSMAttribution):
            reason = obstacle(method, model, (inputs.float(),))  # ids are looked up for them
            if reason is not None:
                raise OptionError(f"--method {method.__name__}: {reason}. Leave it out.")
        suggest = DEFAULTS_FROM_INPUTS.get(method.get_name())
        if suggest is not None:
            options[key] = suggest((inputs,)) | options.get(key, {})


def _parse_value(text: str) -> Any:
    """Return the value of a typed number, true, false or null; any other text unchanged."""
    try:
        return json.loads(text)
    except ValueError:
        return text
