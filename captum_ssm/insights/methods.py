"""The methods on the page, and their arguments.

The tables have the same names as in ``captum.insights.attr_vis.config``. To add a method, add its
class to :data:`ATTRIBUTION_NAMES_TO_METHODS`, and its arguments to
:data:`ATTRIBUTION_METHOD_CONFIG`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from captum.attr import Attribution, FeatureAblation, IntegratedGradients, Occlusion, Saliency
from torch import Tensor

from ..attr import LatimFlow
from ..attr.catalogue import METHODS, OFFERED, QUESTIONS, Entry, Option
from .config import (
    BaselinesConfig,
    BoolConfig,
    Config,
    ConfigParameters,
    ContrastConfig,
    NumberConfig,
    StrEnumConfig,
    TupleConfig,
)

#: The methods in the order of the page's list. The page starts with :data:`RECOMMENDED`, or with
#: the first method that fits the model.
SUPPORTED_ATTRIBUTION_METHODS: list[type[Attribution]] = list(OFFERED)

ATTRIBUTION_NAMES_TO_METHODS: dict[str, type[Attribution]] = {
    method.get_name(): method for method in SUPPORTED_ATTRIBUTION_METHODS
}

_APPROXIMATIONS = (
    "gausslegendre",
    "riemann_left",
    "riemann_right",
    "riemann_middle",
    "riemann_trapezoid",
)
_AT_A_TIME = NumberConfig(1, (1, 100))

#: The types of arguments of Captum's methods.
_OF_CAPTUM: dict[type[Attribution], dict[str, Config]] = {
    IntegratedGradients: {
        "n_steps": NumberConfig(25, (2, None)),
        "method": StrEnumConfig("gausslegendre", _APPROXIMATIONS),
    },
    Saliency: {"abs": BoolConfig(True)},
    FeatureAblation: {"perturbations_per_eval": _AT_A_TIME},
    Occlusion: {
        "sliding_window_shapes": TupleConfig(),
        "strides": TupleConfig(),
        "perturbations_per_eval": _AT_A_TIME,
    },
}


def _argument_type(option: Option) -> Config:
    """Return the argument type for a method's option, such as a choice or a number."""
    if option.name == "baselines":
        return BaselinesConfig(option.default)
    if option.name == "contrast":
        return ContrastConfig(option.default, option.words)
    if option.words:
        return StrEnumConfig(option.default, option.words)
    if option.limits is not None:
        return NumberConfig(option.default, option.limits)
    return BoolConfig(option.default) if isinstance(option.default, bool) else TupleConfig()


#: Help text of the option ``rule``.
_RULES = "Rule balanced shows which tokens mattered, rule frozen which token was copied."


def _method_parameters(entry: Entry) -> ConfigParameters:
    """Return the argument types and the description of a method of this package."""
    types = {option.name: _argument_type(option) for option in entry.options}
    says = entry.says[0].upper() + entry.says[1:] + "."
    return ConfigParameters(types, f"{says} {_RULES}" if "rule" in types else says)


ATTRIBUTION_METHOD_CONFIG: dict[str, ConfigParameters] = {
    **{method.get_name(): ConfigParameters(kinds) for method, kinds in _OF_CAPTUM.items()},
    **{entry.method.get_name(): _method_parameters(entry) for entry in METHODS},
}

#: The methods and arguments that a page starts with: one for each question, as in a report.
RECOMMENDED = [(LatimFlow.get_name(), {"rule": str(rule)}) for rule in QUESTIONS]

#: The ratio of an image's side to the side of an occluding window, which moves by half its side.
_WINDOW = 8


def _occlusion_windows(inputs: tuple[Tensor, ...]) -> dict[str, object]:
    """Return Occlusion's default windows: single tokens or features, or rectangles of an image."""
    shapes = [_occlusion_window(tensor) for tensor in inputs]
    strides = [
        tuple(
            size if i == 0 or len(shape) < 3 else max(1, size // 2) for i, size in enumerate(shape)
        )
        for shape in shapes
    ]
    if len(inputs) == 1:
        return {"sliding_window_shapes": shapes[0], "strides": strides[0]}
    return {"sliding_window_shapes": tuple(shapes), "strides": tuple(strides)}


def _occlusion_window(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape of an occluding window for one input (1, ...), without the batch."""
    sizes = tuple(tensor.shape[1:])
    if len(sizes) < 3:
        return (1, *sizes[1:])  # a number or a token, with all its features
    return (sizes[0], *(max(1, size // _WINDOW) for size in sizes[1:]))


#: Functions from inputs to default arguments, by name of the method.
DEFAULTS_FROM_INPUTS: dict[str, Callable[[tuple[Tensor, ...]], dict[str, object]]] = {
    Occlusion.get_name(): _occlusion_windows,
}


def parameters_of(name: str) -> ConfigParameters:
    """Return the argument types of a method, or no arguments if the tables lack the method."""
    return ATTRIBUTION_METHOD_CONFIG.get(name, ConfigParameters({}))


def titled(name: str, arguments: Mapping[str, Any]) -> str:
    """Return a title: the method's question, its name, and arguments that are not the defaults.

    Example:
        >>> from captum_ssm.insights.methods import titled
        >>> titled("LatimFlow", {"rule": "balanced", "contrast": None, "zero_bias": False})
        'What mattered? LatimFlow, rule balanced'
    """
    types = parameters_of(name).params
    changed = {
        key: value
        for key, value in arguments.items()
        if value is not None and value != "" and not (key in types and types[key].value == value)
    }
    title = ", ".join([name, *(f"{key} {value}" for key, value in changed.items())])
    question = QUESTIONS.get(changed.get("rule", "")) if name == LatimFlow.get_name() else None
    return f"{question} {title}" if question else title
