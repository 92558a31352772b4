"""The methods that the page offers, and their arguments.

The names of the tables are those of ``captum.insights.attr_vis.config``.  A script may add a method
of its own: its class to :data:`ATTRIBUTION_NAMES_TO_METHODS`, and what may be set to
:data:`ATTRIBUTION_METHOD_CONFIG`.
"""

from __future__ import annotations

from collections.abc import Callable

from captum.attr import (
    Attribution,
    Deconvolution,
    DeepLift,
    FeatureAblation,
    GuidedBackprop,
    InputXGradient,
    IntegratedGradients,
    Occlusion,
    Saliency,
)
from torch import Tensor

from ..attr.catalogue import METHODS, Option
from .config import (
    BaselinesConfig,
    BoolConfig,
    Config,
    ConfigParameters,
    NumberConfig,
    StrEnumConfig,
    TupleConfig,
)

#: In the order in which they are offered; the first that fits a model is the first it is shown by.
SUPPORTED_ATTRIBUTION_METHODS: list[type[Attribution]] = [
    IntegratedGradients,
    Saliency,
    InputXGradient,
    DeepLift,
    GuidedBackprop,
    Deconvolution,
    *(entry.method for entry in METHODS),
    FeatureAblation,
    Occlusion,
]

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

#: Of Captum's methods, what may be set on the page.
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


def _kind(option: Option) -> Config:
    """The kind of argument that an option of a method of this package is."""
    if option.name == "baselines":
        return BaselinesConfig(option.default)
    if option.words:
        return StrEnumConfig(option.default, option.words)
    if option.limits is not None:
        return NumberConfig(option.default, option.limits)
    return BoolConfig(option.default) if isinstance(option.default, bool) else TupleConfig()


ATTRIBUTION_METHOD_CONFIG: dict[str, ConfigParameters] = {
    method.get_name(): ConfigParameters(arguments)
    for method, arguments in (
        *_OF_CAPTUM.items(),
        *((m.method, {option.name: _kind(option) for option in m.options}) for m in METHODS),
    )
}

#: An occluding window covers an eighth of each side of an image, and moves by half of that.
_WINDOW = 8


def _windows(inputs: tuple[Tensor, ...]) -> dict[str, object]:
    """Windows that suit the inputs: tokens, numbers, or squares of an image in all channels."""
    shapes = [_window(tensor) for tensor in inputs]
    strides = [
        tuple(
            size if i == 0 or len(shape) < 3 else max(1, size // 2) for i, size in enumerate(shape)
        )
        for shape in shapes
    ]
    if len(inputs) == 1:
        return {"sliding_window_shapes": shapes[0], "strides": strides[0]}
    return {"sliding_window_shapes": tuple(shapes), "strides": tuple(strides)}


def _window(tensor: Tensor) -> tuple[int, ...]:
    sizes = tuple(tensor.shape[1:])
    if len(sizes) < 3:
        return (1, *sizes[1:])  # a number or a token, with all its features
    return (sizes[0], *(max(1, size // _WINDOW) for size in sizes[1:]))


#: By name of the method, the arguments that the inputs suggest where none are set.
DEFAULTS_FROM_INPUTS: dict[str, Callable[[tuple[Tensor, ...]], dict[str, object]]] = {
    Occlusion.get_name(): _windows,
}


def parameters_of(name: str) -> ConfigParameters:
    """What may be set of a method; nothing where the tables do not say."""
    return ATTRIBUTION_METHOD_CONFIG.get(name, ConfigParameters({}))
