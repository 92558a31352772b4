"""Find adapters by the names of mixer classes, so that no model package has to be imported."""

from __future__ import annotations

import functools
import importlib
import re
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, metadata

from torch import nn

from ..errors import OptionError, UnsupportedMixerError
from .base import Linearize
from .likeness import classes_with_parts, parts_of
from .table import ADAPTERS, BUILT_IN, Architecture, Joins

#: Entry points of installed packages: functions without arguments that call register_mixer().
ENTRY_POINTS = "captum_ssm.mixers"

_architectures = {architecture.class_path: architecture for architecture in BUILT_IN}
_adapters: dict[str, Linearize | str] = {**ADAPTERS}

#: Largest number of families to name in an error.
_FAMILIES_SHOWN = 12

#: Class names of token mixers; used only to refuse modules that have no adapter.
_MIXER_NAME = re.compile(
    r"(Mixer|Attention|MHA|Mamba\d*|SSM|SSD|SS2D\w*|S[456](Block|Layer)?|S4D|DSS|GSS|Hyena(Operator)?|RecurrentBlock"
    r"|Retention|DeltaNet|LSTM(Layer|Cell)?|GRU|RNN|RWKV\w*|GLA|HGRN\w*|WKV\w*|ShortConv|TimeMix\w*)"
    r"(?<!FeedForward)$"
)

#: A package that exports only mixers, also with names that do not match the pattern (Raven, MoBA).
_MIXER_PACKAGE = "fla.layers"


def register_mixer(
    mixer: type[nn.Module] | str,
    linearize: Linearize | None = None,
    *,
    like: type[nn.Module] | str | None = None,
    family: str | None = None,
    joins: Joins | None = None,
) -> None:
    """Register an adapter for a mixer class, so that every attribution method supports the class.

    Args:
        mixer: the module class, or its fully qualified name ``"package.module.Class"``, for which
            the package need not be imported. Subclasses use the same adapter. Registering a class
            again replaces its adapter.
        linearize: function of the module and one recorded :class:`~captum_ssm.mixers.Call` that
            returns a :class:`~captum_ssm.mixers.LinearMixer`. Default: None, as for ``like``.
        like: a supported class, its full name, or the name of a family with one class. ``mixer``
            must have the same parts with the same names, and compute the same function. This is
            checked as for every adapter, by default in each run. Default: None.
        family: name in :func:`supported_architectures`. Default: as ``like``, or the class name.
        joins: how the mixer's output is added to the residual stream. ``"residual"``: by itself.
            ``"parallel"``: together with the other mixers of the block. ``"feeds"``: only to the
            next mixer's input. Default: the value of ``like``, or ``"residual"``.

    Raises:
        OptionError: if ``mixer`` is neither a class nor a full name, ``linearize`` is not callable,
            both or neither of ``linearize`` and ``like`` are passed, or ``like`` does not name
            exactly one supported class.

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
            f"register_mixer got mixer={mixer!r}, linearize={linearize!r}. Pass a class or its "
            "full name 'package.module.Class', and a function, or like= with a supported class."
        )
    package, name = path.split(".")[0], _class_name(path)
    if like is None:
        assert linearize is not None
        architecture = Architecture(family or name, package, path, joins=joins or "residual")
        _architectures[path], _adapters[path] = architecture, linearize
        return
    if linearize is not None:
        raise OptionError(
            f"register_mixer got both linearize={linearize!r} and like={like!r}. Pass only one of "
            "them; like= uses the adapter of the class that it names."
        )
    like_path = _registered_path(like)
    original = _architectures[like_path]
    _architectures[path] = Architecture(
        family or original.family, package, path, joins=joins or original.joins, like=like_path
    )
    _adapters[path] = _adapters[like_path]


def _registered_path(like: type[nn.Module] | str) -> str:
    """Return the full name of the registered class that ``like`` names, or raise OptionError."""
    if not isinstance(like, str):
        # the class itself, or its nearest base class that has an adapter
        paths = [path for cls in like.__mro__ if (path := class_path(cls)) in _adapters][:1]
    elif like in _adapters:
        paths = [like]
    else:
        paths = [path for path, a in _architectures.items() if a.family.lower() == like.lower()]
    if len(paths) == 1:
        return paths[0]
    if paths:
        raise OptionError(
            f"like={like!r} is a family with {len(paths)} classes. Pass one of these names: "
            f"{', '.join(map(repr, paths))}."
        )
    raise OptionError(
        f"like={like!r} is neither a supported class, nor the full name of one, nor a family. Pass "
        f"one of these. {adapter_advice()}"
    )


def supported_architectures() -> list[Architecture]:
    """Return all mixer classes that have an adapter, including those of :func:`register_mixer`.

    Returns:
        One :class:`Architecture` for each class, in the order of registration.

    Example:
        >>> from captum_ssm import supported_architectures
        >>> supported_architectures()[0].class_path
        'transformers.models.mamba.modeling_mamba.MambaMixer'
    """
    _call_entry_points()
    return list(_architectures.values())


def adapter_for(module: nn.Module) -> tuple[Architecture, Linearize] | None:
    """Return the architecture and adapter of a module, or None if its class has none.

    Remote code of a model on the Hugging Face Hub is often a copy of a supported class.  A class
    there with the same name and parts uses the same adapter, and its operator is checked as usual.
    """
    _call_entry_points()
    for cls in type(module).__mro__:
        path = class_path(cls)
        adapter = _adapters.get(path)
        if adapter is not None:
            return _architectures[path], _import_adapter(adapter)
    for cls in type(module).__mro__:
        path = class_path(cls)
        if path.startswith(_HUB_CODE):
            similar = classes_with_parts(cls.__name__, parts_of(module))
            originals = [x for x in similar if _class_name(x) == cls.__name__]
            if len(originals) == 1 and originals[0] in _adapters:
                original = originals[0]
                architecture = replace(_architectures[original], class_path=path, like=original)
                return architecture, _import_adapter(_adapters[original])
    return None


@functools.cache
def _uncalled_entry_points() -> list[EntryPoint]:
    """Return the list of entry points; :func:`_call_entry_points` removes those that it calls."""
    return list(entry_points(group=ENTRY_POINTS))


def _call_entry_points() -> None:
    """Call the functions that installed packages name for :data:`ENTRY_POINTS`, once each."""
    while _uncalled_entry_points():
        entry = _uncalled_entry_points().pop()  # first, because the call may come back here
        try:
            entry.load()()
        except Exception as error:
            warnings.warn(
                f"The entry point {entry.name} = {entry.value} of {ENTRY_POINTS} registered no "
                f"mixer: {error!r}. Update or uninstall the package that declares it.",
                stacklevel=2,
            )


def is_built_in(cls: type) -> bool:
    """Return True if the adapter of a class is built in, False if a user registered it."""
    path = class_path(cls)
    return path in ADAPTERS and _adapters[path] == ADAPTERS[path]


#: Package in which transformers imports remote code of models on the Hugging Face Hub.
_HUB_CODE = "transformers_modules."


def _class_name(path: str) -> str:
    return path.rsplit(".", 1)[-1]


def class_path(cls: type) -> str:
    """Return the full name of a class, ``"package.module.Class"``."""
    return f"{cls.__module__}.{cls.__qualname__}"


def looks_like_a_mixer(module: nn.Module) -> bool:
    """Return True if a module's class name or package suggests that it mixes tokens."""
    if _MIXER_NAME.search(type(module).__name__) is not None:
        return True
    package = sys.modules.get(_MIXER_PACKAGE)  # None, without attributes, if not imported
    return any(getattr(package, cls.__name__, None) is cls for cls in type(module).__mro__)


def refusal(name: str, module: nn.Module, *, others: bool = False) -> UnsupportedMixerError:
    """Return the error for a module that looks like a mixer and has no adapter.

    ``name`` is empty for the model itself; ``others`` tells whether other mixers have adapters.
    """
    path = class_path(type(module))
    place = f"The module {name!r} of class {path}" if name else f"The model itself, a {path},"
    and_ran, without_it = "", ""
    if others:
        and_ran = ", and it ran"
        without_it = " To explain the run without it, name the mixers to use with layers=[...]."
    return UnsupportedMixerError(
        f"{place} mixes tokens and has no adapter{and_ran}. {proposal(module)}{adapter_advice()}"
        f"{without_it}"
    )


def proposal(module: nn.Module) -> str:
    """Return a sentence that proposes register_mixer() for a copy of a known mixer, or ""."""
    for submodule in module.modules():
        classes = classes_with_parts(type(submodule).__name__, parts_of(submodule))
        if classes and adapter_for(submodule) is None:
            path = class_path(type(submodule))
            return (
                f"{path} has the parts of {classes[0]}. If it is a copy of that class, call "
                f"register_mixer({path!r}, like={classes[0]!r}); whether it computes the same is "
                "checked when it is used. "
            )
    return ""


def how_to() -> str:
    """Return the address of the page on writing adapters; its path if no address is known."""
    page = "docs/howto/adding_an_architecture.md"
    try:
        address = metadata("captum_ssm")["Home-page"]
    except PackageNotFoundError:
        address = None
    return f"{address}/blob/main/{page}" if address else page


def adapter_advice() -> str:
    """Return two sentences for errors: how to add an adapter, and which families have one."""
    families = list(dict.fromkeys(a.family for a in supported_architectures()))
    hidden = len(families) - _FAMILIES_SHOWN
    ending = f" and {hidden} more, which supported_architectures() lists" if hidden > 0 else ""
    return (
        f"{how_to()} shows how to write an adapter and register it with register_mixer(). "
        f"Supported families are {', '.join(families[:_FAMILIES_SHOWN])}{ending}."
    )


def _import_adapter(adapter: Linearize | str) -> Linearize:
    """Return the adapter function, imported if ``adapter`` is a name ``"module:function"``."""
    if not isinstance(adapter, str):
        return adapter
    module, function = adapter.split(":")
    linearize: Callable[..., object] = getattr(
        importlib.import_module(f"{__package__}.{module}"), function
    )
    return linearize  # type: ignore[return-value]
