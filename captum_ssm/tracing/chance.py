"""Refuse models whose output is random or depends on other examples of the batch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from ..errors import TrainingModeError
from ..mixers.registry import looks_like_a_mixer
from .hooks import name_of_running

#: The positional and the keyword arguments of a function call.
Arguments = tuple[Any, ...]
Options = dict[str, Any]

#: Lower-case parts of class names that identify dropout modules.
_DROPS = ("drop", "stochasticdepth")
#: Configuration entry from which attention layers may read their dropout probability.
_IN_CONFIG = "attention_dropout"

_OF_BATCH = "normalizes by the mean and variance of the batch, so that examples mix"
_DROPOUT = "drops at random"
_DROPOUTS = """
    dropout dropout1d dropout2d dropout3d alpha_dropout feature_dropout feature_alpha_dropout
"""
#: Torch functions that are random, or mix examples, if one argument is true: the argument's name,
#: position and default, and the reason that the error gives.
_RANDOM_IF: dict[str, tuple[str, int, Any, str]] = {
    "rrelu": ("training", 3, False, "draws its slopes at random"),
    "batch_norm": ("training", 5, False, _OF_BATCH),
    "scaled_dot_product_attention": ("dropout_p", 4, 0.0, _DROPOUT),
    **dict.fromkeys(_DROPOUTS.split(), ("training", 2, True, _DROPOUT)),
}


def refusals(model: nn.Module) -> dict[str, Callable[[str, Arguments, Options], None]]:
    """Return checks by the name of a torch function; each check raises if a call is random."""
    return dict.fromkeys(_RANDOM_IF, functools.partial(_refuse_if_random, model))


def _refuse_if_random(model: nn.Module, name: str, args: Arguments, kwargs: Options) -> None:
    """Raise if this call of the torch function ``name`` is random or mixes examples."""
    name = name.removesuffix("_")  # in-place forms have the same arguments
    argument, position, default, complaint = _RANDOM_IF[name]
    value = args[position] if position < len(args) else kwargs.get(argument, default)
    value = kwargs.get("train", value)  # torch's own dropout has another name for it
    probability = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
    if not value or ("dropout" in name and not probability):  # not random
        return
    names = {module: _describe(name, module) for name, module in model.named_modules()}
    caller = name_of_running(names, "forward_func")
    raise TrainingModeError(
        f"{caller} calls torch's {name} with {argument}={value} although it is in "
        f"evaluation mode, and {complaint}. Make {argument} depend on self.training, so that it "
        "is False or 0 in evaluation mode."
    )


def require_deterministic(model: nn.Module) -> None:
    """Raise if a module of the model is random, or mixes the examples of a batch.

    Dropout and stochastic depth are recognized by a probability above 0, batch norms by their
    class. A module in evaluation mode is accepted, unless it is a batch norm without running
    statistics. Each module's own mode counts, not the mode of the whole model.

    Args:
        model: the model that is to be run.

    Raises:
        TrainingModeError: naming the first such module.

    Example:
        >>> from torch import nn
        >>> from captum_ssm.tracing import require_deterministic
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))
        >>> require_deterministic(model.eval())
        >>> require_deterministic(model.train())  # doctest: +ELLIPSIS
        Traceback (most recent call last):
            ...
        captum_ssm.errors.TrainingModeError: The module '1' of class Dropout is in training mode ...
    """
    for name, module in model.named_modules():
        if not module.training:
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is None:
                raise TrainingModeError(
                    f"{_describe(name, module)} keeps no running statistics and {_OF_BATCH}. Train "
                    "it with track_running_stats=True, which collects running statistics."
                )
            continue
        complaint = next(_complaints(module), None)
        if complaint is not None:
            raise TrainingModeError(
                f"{_describe(name, module)} is in training mode and {complaint}. "
                "Call model.eval() before you explain the model."
            )


def _describe(name: str, module: nn.Module) -> str:
    kind = type(module).__name__
    return f"The module {name!r} of class {kind}" if name else f"The model itself, a {kind},"


def _complaints(module: nn.Module) -> Iterator[str]:
    """Yield reasons why a module in training mode is random or mixes examples."""
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        yield _OF_BATCH
    if isinstance(module, nn.RReLU):
        yield "draws its slopes at random"
    is_dropout = any(word in type(module).__name__.lower() for word in _DROPS)
    for name, value in vars(module).items():
        if ("drop" in name or (is_dropout and name == "p")) and _is_chance(value):
            yield f"drops at random, with {name}={value}"
    if looks_like_a_mixer(module):
        probability = getattr(getattr(module, "config", None), _IN_CONFIG, None)
        if _is_chance(probability):
            yield f"drops at random, with config.{_IN_CONFIG}={probability}"


def _is_chance(value: Any) -> bool:
    """Return True if a value is a probability above 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1
