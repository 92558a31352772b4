"""Models that answer differently each time they are asked, whose explanation would be chance."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from ..errors import TrainingModeError
from ..mixers.registry import looks_like_a_mixer

#: What the classes of modules that drop at random are called.
_DROPS = ("drop", "stochasticdepth")
#: Where attention layers that keep no probability of their own look theirs up.
_IN_CONFIG = "attention_dropout"


def require_deterministic(model: nn.Module) -> None:
    """Raise if a module of the model is random, or reads across the batch, in training mode.

    Dropout, stochastic depth and the like are known by their probability, which is above 0; batch
    norms by their class.  Modules in evaluation mode are neither, whatever the model's own mode.

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
            continue
        complaint = next(_complaints(module), None)
        if complaint is not None:
            kind = type(module).__name__
            place = (
                f"The module {name!r} of class {kind}" if name else f"The model itself, a {kind},"
            )
            raise TrainingModeError(
                f"{place} is in training mode and {complaint}. "
                "Call model.eval() before you explain the model."
            )


def _complaints(module: nn.Module) -> Iterator[str]:
    """What a module in training mode does that differs from call to call or mixes examples."""
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        yield "normalises by the mean and variance of the batch, so that examples mix"
    if isinstance(module, nn.RReLU):
        yield "draws its slopes at random"
    drops = any(word in type(module).__name__.lower() for word in _DROPS)
    for name, value in vars(module).items():
        if ("drop" in name or (drops and name == "p")) and _is_chance(value):
            yield f"drops at random, with {name}={value}"
    if looks_like_a_mixer(module):
        chance = getattr(getattr(module, "config", None), _IN_CONFIG, None)
        if _is_chance(chance):
            yield f"drops at random, with config.{_IN_CONFIG}={chance}"


def _is_chance(value: Any) -> bool:
    """Whether a value is a probability above 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1
