"""The adapters of mixer classes, by class name: no architecture's package is imported."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from dataclasses import replace

from torch import nn

from ..errors import OptionError, UnsupportedMixerError
from .base import Linearize
from .likeness import nearest, parts_of
from .table import ADAPTERS, BUILT_IN, Architecture, Joins

HOW_TO = "docs/howto/adding_an_architecture.md"


_architectures = {architecture.class_path: architecture for architecture in BUILT_IN}
_adapters: dict[str, Linearize | str] = {**ADAPTERS}

#: Families that an error names at most.
_SHOWN = 12

#: Class names of token mixers; used only to refuse modules that have no adapter.
_MIXER_NAME = re.compile(
    r"(Mixer|Attention|MHA|Mamba\d*|SSM|SSD|SS2D\w*|S[456](Block|Layer)?|S4D|DSS|GSS|Hyena(Operator)?|RecurrentBlock"
    r"|Retention|DeltaNet|LSTM(Layer|Cell)?|GRU|RNN|RWKV\w*|GLA|HGRN\w*|WKV\w*|ShortConv|TimeMix\w*)"
    r"(?<!FeedForward)$"
)

#: A package that exports mixers alone, some under names that do not show it (Raven, MoBA).
_MIXERS = "fla.layers"


def register_mixer(
    mixer: type[nn.Module] | str,
    linearize: Linearize | None = None,
    *,
    like: type[nn.Module] | str | None = None,
    family: str | None = None,
    joins: Joins | None = None,
) -> None:
    """Teach the package a mixer class; every attribution method then works with it.

    Args:
        mixer: the module class, or its fully qualified name (``"package.module.Class"``), which
            keeps the package unimported. Subclasses are served too. Registering a class again
            replaces its adapter.
        linearize: a function of the module and one recorded :class:`~captum_ssm.mixers.Call` that
            returns a :class:`~captum_ssm.mixers.LinearMixer`. Default: None, as for ``like``.
        like: a class that is served already, its full name, or the name of a family of one class.
            ``mixer`` must have the same parts with the same names, and compute the same. This is
            checked as for every adapter, by default in each run. Default: None.
        family: name in :func:`supported_architectures`. Default: ``like``'s, or the class name.
        joins: how the mixer's output joins the residual stream. ``"residual"``: added to it.
            ``"parallel"``: added together with the other mixers of its block. ``"feeds"``: added
            only to the next mixer's input. Default: as for ``like``, or ``"residual"``.

    Raises:
        OptionError: when ``mixer`` is neither a class nor a full name, ``linearize`` cannot be
            called, both or neither of ``linearize`` and ``like`` are given, or ``like`` names none
            or several of the classes that are served.

    Example:
        >>> from captum_ssm import register_mixer, supported_architectures
        >>> register_mixer("my_package.MyMixer", lambda module, call: ...)
        >>> register_mixer("my_package.OtherMixer", like="my_package.MyMixer")
        >>> supported_architectures()[-1].family
        'MyMixer'
    """
    path = mixer if isinstance(mixer, str) else class_path(mixer)
    if "." not in path or (like is None and not callable(linearize)):
        raise OptionError(
            "register_mixer needs a class or its full name and a function, or like= with a class "
            f"that is served, got {mixer!r} and {linearize!r}."
        )
    package, name = path.split(".")[0], _name(path)
    if like is None:
        assert linearize is not None
        own = Architecture(family or name, package, path, joins=joins or "residual")
        _architectures[path], _adapters[path] = own, linearize
        return
    if linearize is not None:
        raise OptionError(
            f"register_mixer got a function, {linearize!r}, and like={like!r}. Leave one out: "
            "like= takes the function of the class that it names."
        )
    served = _served_like(like)
    known = _architectures[served]
    _architectures[path] = Architecture(
        family or known.family, package, path, joins=joins or known.joins, like=served
    )
    _adapters[path] = _adapters[served]


def _served_like(like: type[nn.Module] | str) -> str:
    """Return the path of the registered class that ``like`` names."""
    if not isinstance(like, str):
        found = [path for cls in like.__mro__ if (path := class_path(cls)) in _adapters][:1]
    elif like in _adapters:
        found = [like]
    else:
        found = [path for path, a in _architectures.items() if a.family.lower() == like.lower()]
    if len(found) == 1:
        return found[0]
    if found:
        raise OptionError(
            f"like={like!r} is the family of {len(found)} classes. Name one of them: "
            f"{', '.join(map(repr, found))}."
        )
    raise OptionError(
        f"like={like!r} is neither a served class, nor the full name of one, nor a family. "
        f"{what_is_served()}"
    )


def supported_architectures() -> list[Architecture]:
    """Return the mixer classes that have an adapter, the user's own included.

    Returns:
        One :class:`Architecture` for each, in order of registration.

    Example:
        >>> from captum_ssm import supported_architectures
        >>> supported_architectures()[0].class_path
        'transformers.models.mamba.modeling_mamba.MambaMixer'
    """
    return list(_architectures.values())


def adapter_for(module: nn.Module) -> tuple[Architecture, Linearize] | None:
    """Return the architecture and adapter of a module, or None if its class has none.

    Code that a model of the hub brings along is often a copy of a supported class.  A class of the
    same name and parts is taken for it, and its operator is verified like any other.
    """
    for cls in type(module).__mro__:
        path = class_path(cls)
        adapter = _adapters.get(path)
        if adapter is not None:
            return _architectures[path], _load(adapter)
    for cls in type(module).__mro__:
        path = class_path(cls)
        if path.startswith(_OF_THE_HUB):
            same = [x for x in nearest(cls.__name__, parts_of(module)) if _name(x) == cls.__name__]
            if len(same) == 1 and same[0] in _adapters:
                own = replace(_architectures[same[0]], class_path=path, like=same[0])
                return own, _load(_adapters[same[0]])
    return None


def is_own(cls: type) -> bool:
    """Return True if a class has an adapter of this package, and none of the user's."""
    return isinstance(_adapters.get(class_path(cls)), str)


#: Where transformers keeps the code that models of the hub bring along.
_OF_THE_HUB = "transformers_modules."


def _name(path: str) -> str:
    return path.rsplit(".", 1)[-1]


def class_path(cls: type) -> str:
    """Return the qualified name of a class, with its module."""
    return f"{cls.__module__}.{cls.__qualname__}"


def looks_like_a_mixer(module: nn.Module) -> bool:
    """Return True if a module's class name or package suggests that it mixes tokens."""
    if _MIXER_NAME.search(type(module).__name__) is not None:
        return True
    exported = sys.modules.get(_MIXERS)
    return any(getattr(exported, cls.__name__, None) is cls for cls in type(module).__mro__)


def refusal(name: str, module: nn.Module, *, others: bool = False) -> UnsupportedMixerError:
    """Make the error for a module that looks like a mixer and has no adapter."""
    kind = class_path(type(module))
    place = f"The module {name!r} of class {kind}" if name else f"The model itself, a {kind},"
    ran, way_out = "", ""
    if others:
        ran = ", and it ran"
        way_out = " To explain the run without it, name the mixers to use with layers=[...]."
    return UnsupportedMixerError(
        f"{place} mixes tokens and has no adapter{ran}. {proposal(module)}{what_is_served()}"
        f"{way_out}"
    )


def proposal(module: nn.Module) -> str:
    """A sentence with the line that registers a module, or one in it, like a known mixer, or ""."""
    for part in module.modules():
        known = nearest(type(part).__name__, parts_of(part))
        if known and adapter_for(part) is None:
            path = class_path(type(part))
            return (
                f"{path} has the parts of {known[0]}; if it is a copy of that, this serves it: "
                f"register_mixer({path!r}, like={known[0]!r}). That it computes the same is "
                "checked when it is used. "
            )
    return ""


def what_is_served() -> str:
    """Two sentences for errors: how to add an adapter, and some of the families that have one."""
    families = list(dict.fromkeys(a.family for a in supported_architectures()))
    more = len(families) - _SHOWN
    rest = f" and {more} more, which supported_architectures() lists" if more > 0 else ""
    return (
        f"{HOW_TO} shows how to write one and make it known with register_mixer(). Supported are "
        f"{', '.join(families[:_SHOWN])}{rest}."
    )


def _load(adapter: Linearize | str) -> Linearize:
    """Import an adapter that is named as ``"module:function"``."""
    if not isinstance(adapter, str):
        return adapter
    module, function = adapter.split(":")
    loaded: Callable[..., object] = getattr(
        importlib.import_module(f"{__package__}.{module}"), function
    )
    return loaded  # type: ignore[return-value]
