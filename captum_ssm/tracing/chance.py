"""Models with random output, whose explanations would be random, too."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from ..errors import TrainingModeError
from ..mixers.registry import looks_like_a_mixer
from .hooks import name_of_running

#: Of a function's call, by position and by name.
Arguments = tuple[Any, ...]
Options = dict[str, Any]

#: Parts of names of modules' classes that drop at random.
_DROPS = ("drop", "stochasticdepth")
#: Entry of a configuration in which attention layers may look up their probability.
_IN_CONFIG = "attention_dropout"

_OF_BATCH = "normalises by the mean and variance of the batch, so that examples mix"
_DROPOUT = "drops at random"
_DROPOUTS = """
    dropout dropout1d dropout2d dropout3d alpha_dropout feature_dropout feature_alpha_dropout
"""
#: Functions that are random, or read across the batch, if an argument is true: the argument's name,
#: position and default, and a complaint.
_TOLD: dict[str, tuple[str, int, Any, str]] = {
    "rrelu": ("training", 3, False, "draws its slopes at random"),
    "batch_norm": ("training", 5, False, _OF_BATCH),
    "scaled_dot_product_attention": ("dropout_p", 4, 0.0, _DROPOUT),
    **dict.fromkeys(_DROPOUTS.split(), ("training", 2, True, _DROPOUT)),
}


def refusals(model: nn.Module) -> dict[str, Callable[[str, Arguments, Options], None]]:
    """Return functions, by the name of a torch function, that raise if its call is random."""
    return dict.fromkeys(_TOLD, functools.partial(_refuse, model))


def _refuse(model: nn.Module, name: str, args: Arguments, kwargs: Options) -> None:
    name = name.removesuffix("_")
    argument, position, default, complaint = _TOLD[name]
    value = args[position] if position < len(args) else kwargs.get(argument, default)
    value = kwargs.get("train", value)  # torch's own dropout has another name for it
    chance = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
    if not value or ("dropout" in name and not chance):
        return
    names = {module: _named(name, module) for name, module in model.named_modules()}
    where = name_of_running(names, "forward_func")
    raise TrainingModeError(
        f"{where} calls torch's {name} with {argument}={value} although it is in "
        f"evaluation mode, and {complaint}. Let it be {argument}=self.training, or the like."
    )


def require_deterministic(model: nn.Module) -> None:
    """Raise if a module of the model is random, or reads across the batch.

    Dropout, stochastic depth and the like are known by their probability, which is above 0; batch
    norms by their class. Modules in evaluation mode are neither, except batch norms without
    statistics; the model's own mode is ignored.

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
                    f"{_named(name, module)} keeps no running statistics and {_OF_BATCH}. Make it "
                    "with track_running_stats=True, and let it collect them in training."
                )
            continue
        complaint = next(_complaints(module), None)
        if complaint is not None:
            raise TrainingModeError(
                f"{_named(name, module)} is in training mode and {complaint}. "
                "Call model.eval() before you explain the model."
            )


def _named(name: str, module: nn.Module) -> str:
    kind = type(module).__name__
    return f"The module {name!r} of class {kind}" if name else f"The model itself, a {kind},"


def _complaints(module: nn.Module) -> Iterator[str]:
    """Yield reasons why a module in training mode is random or mixes examples."""
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        yield _OF_BATCH
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
    """Return True if a value is a probability above 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1
