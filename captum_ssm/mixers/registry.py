"""Which adapter serves which mixer class, by name: no architecture's package is imported."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import nn

from ..errors import OptionError, UnsupportedMixerError
from .base import Linearize
from .table import BUILT_IN, VERSIONS, Ability, Joins

HOW_TO = "docs/howto/adding_an_architecture.md"


@dataclass(frozen=True)
class Architecture:
    """One supported mixer class.

    Attributes:
        family: the common name of the architecture.
        package: distribution the class comes from.
        class_path: fully qualified name of the mixer class.
        tested_version: version of the package the tests ran against. Default: ``""``, none, as of a
            user's own.
        joins: how its output joins the residual stream: ``"residual"``, ``"parallel"`` or
            ``"feeds"``; see :func:`register_mixer`. Default: ``"residual"``.
        lacks: which of ``"LatimFlow"``, ``"fold methods"`` (ImplicitAttention and the rollouts) and
            ``"generated text"`` its models are refused, and why. Default: nothing.
        alone: whether the tests know the mixer by itself, and no model around it. Default: False.

    Example:
        >>> from captum_ssm.mixers import supported_architectures
        >>> sorted({a.package for a in supported_architectures() if a.family == "Mamba"})
        ['mamba-ssm', 'transformers']
    """

    family: str
    package: str
    class_path: str
    tested_version: str = ""
    joins: Joins = "residual"
    lacks: Mapping[Ability, str] = field(default_factory=dict, hash=False)
    alone: bool = False


_architectures = {
    line.class_path: Architecture(
        line.family,
        line.package,
        line.class_path,
        line.tested or VERSIONS[line.package],
        line.joins,
        line.lacks,
        line.alone,
    )
    for line in BUILT_IN
}
_adapters: dict[str, Linearize | str] = {line.class_path: line.adapter for line in BUILT_IN}

#: Families that an error names at most.
_SHOWN = 12

#: Class names that say "I mix tokens"; used only to refuse what has no adapter.
_MIXER_NAME = re.compile(
    r"(Mixer|Attention|Mamba\d*|SSM|SSD|S[456](Block|Layer)?|S4D|DSS|GSS|Hyena(Operator)?|RecurrentBlock"
    r"|Retention|DeltaNet|LSTM|GRU|RNN|RWKV\w*|GLA|HGRN\w*|WKV\w*|ShortConv|TimeMix\w*)"
    r"(?<!FeedForward)$"
)

#: A package that exports mixers alone, some under names that do not say so (Raven, MoBA).
_MIXERS = "fla.layers"


def register_mixer(
    mixer: type[nn.Module] | str,
    linearize: Linearize,
    *,
    family: str | None = None,
    joins: Joins = "residual",
) -> None:
    """Teach the package a mixer class; every attribution method then works with it.

    Args:
        mixer: the module class, or its fully qualified name (``"package.module.Class"``), which
            keeps the package unimported. Subclasses are served too. Registering a class again
            replaces its adapter.
        linearize: a function of the module and one recorded :class:`~captum_ssm.mixers.Call` that
            returns a :class:`~captum_ssm.mixers.LinearMixer`.
        family: name shown by :func:`supported_architectures`. Default: None, the class name.
        joins: how the mixer's output joins the residual stream: ``"residual"``, added to it;
            ``"parallel"``, added together with the other mixers of its block; ``"feeds"``, added
            only to the input of the mixer that runs next. Default: ``"residual"``.

    Raises:
        OptionError: when ``mixer`` is neither a class nor a full name, or ``linearize`` cannot be
            called.

    Example:
        >>> from captum_ssm import register_mixer, supported_architectures
        >>> register_mixer("my_package.MyMixer", lambda module, call: ...)
        >>> supported_architectures()[-1].family
        'MyMixer'
    """
    path = mixer if isinstance(mixer, str) else class_path(mixer)
    if "." not in path or not callable(linearize):
        raise OptionError(
            f"register_mixer needs a class or its full name and a function, got {mixer!r} and "
            f"{linearize!r}."
        )
    package, name = path.split(".")[0], path.rsplit(".", 1)[-1]
    _architectures[path] = Architecture(family or name, package, path, joins=joins)
    _adapters[path] = linearize


def supported_architectures() -> list[Architecture]:
    """The mixer classes that have an adapter, the user's own included.

    Returns:
        One :class:`Architecture` for each, in order of registration.

    Example:
        >>> from captum_ssm import supported_architectures
        >>> supported_architectures()[0].class_path
        'transformers.models.mamba.modeling_mamba.MambaMixer'
    """
    return list(_architectures.values())


def adapter_for(module: nn.Module) -> tuple[Architecture, Linearize] | None:
    """The architecture and adapter of a module, or None if it is no registered mixer."""
    for cls in type(module).__mro__:
        path = class_path(cls)
        adapter = _adapters.get(path)
        if adapter is not None:
            return _architectures[path], _load(adapter)
    return None


def class_path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def looks_like_a_mixer(module: nn.Module) -> bool:
    """Whether a module's class name, or the package it comes from, says that it mixes tokens."""
    if _MIXER_NAME.search(type(module).__name__) is not None:
        return True
    exported = sys.modules.get(_MIXERS)
    return any(getattr(exported, cls.__name__, None) is cls for cls in type(module).__mro__)


def refusal(name: str, module: nn.Module, *, others: bool = False) -> UnsupportedMixerError:
    """The error for a module that looks like a mixer and has no adapter.

    Args:
        name: its name in the model.
        module: the module.
        others: whether the model has mixers that have one, so that it was refused because it ran.
            Default: False.
    """
    kind = class_path(type(module))
    place = f"The module {name!r} of class {kind}" if name else f"The model itself, a {kind},"
    ran, way_out = "", ""
    if others:
        ran = ", and it ran"
        way_out = " To explain the run without it, name the mixers to use with layers=[...]."
    return UnsupportedMixerError(
        f"{place} mixes tokens and has no adapter{ran}. {what_is_served()}{way_out}"
    )


def what_is_served() -> str:
    """How an adapter is added, and some of the families that have one: two sentences."""
    families = list(dict.fromkeys(a.family for a in supported_architectures()))
    more = len(families) - _SHOWN
    rest = f" and {more} more, which supported_architectures() lists" if more > 0 else ""
    return (
        f"{HOW_TO} shows how to write one and make it known with register_mixer(). Supported are "
        f"{', '.join(families[:_SHOWN])}{rest}."
    )


def _load(adapter: Linearize | str) -> Linearize:
    if not isinstance(adapter, str):
        return adapter
    module, function = adapter.split(":")
    loaded: Callable[..., object] = getattr(
        importlib.import_module(f"{__package__}.{module}"), function
    )
    return loaded  # type: ignore[return-value]
