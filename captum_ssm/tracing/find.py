"""Find the model that the user's forward_func runs, and the model's token mixers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..errors import ModelNotFoundError, NoMixerError
from ..mixers.base import Linearize
from ..mixers.registry import (
    adapter_advice,
    adapter_for,
    class_path,
    looks_like_a_mixer,
    proposal,
    refusal,
)
from ..mixers.table import Architecture
from .reach import reachable


@dataclass(frozen=True, eq=False)
class Mixer:
    """A supported token mixer inside a model.

    Attributes:
        name: the module's qualified name in the model; the first name if blocks share the module.
        module: the module itself.
        architecture: the registry's entry for the module's class.
        linearize: the adapter, which returns the linear form of a call.
        names: all qualified names; a module shared by several blocks has several.
        blocks: the modules that directly contain the mixer, whose inputs are the residual stream;
            empty if the model is the mixer itself.
        around: all modules that contain the mixer, at any depth.

    Example:
        >>> from captum_ssm.models import load_bundled
        >>> from captum_ssm.tracing import find_mixers
        >>> model, _ = load_bundled()
        >>> mixer = find_mixers(model)[0]
        >>> mixer.name, mixer.architecture.family
        ('backbone.layers.0.mixer', 'Mamba')
    """

    name: str
    module: nn.Module
    architecture: Architecture
    linearize: Linearize
    names: tuple[str, ...]
    blocks: tuple[nn.Module, ...]
    around: tuple[nn.Module, ...]

    def __repr__(self) -> str:
        return f"Mixer({self.name!r}, {self.architecture.family!r})"


def unwrap(module: nn.Module) -> nn.Module:
    """Return the module inside torch.compile, DataParallel and DistributedDataParallel wrappers.

    Hooks set after compilation never fire, and a replica's hooks fire in another process or
    thread; the wrapped module computes the same function.

    Args:
        module: any module, wrapped or not.

    Returns:
        The innermost module.

    Example:
        >>> from torch import nn
        >>> from captum_ssm.tracing import unwrap
        >>> inner = nn.Linear(2, 2)
        >>> unwrap(nn.DataParallel(inner)) is inner
        True
    """
    while True:
        if isinstance(getattr(module, "_orig_mod", None), nn.Module):
            module = module._orig_mod  # type: ignore[assignment]
        elif isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
            module = module.module
        else:
            return module


def find_model(forward_func: Callable[..., Any], model: nn.Module | None = None) -> nn.Module:
    """Return the model that ``forward_func`` is or calls.

    Args:
        forward_func: a module; a bound method or a partial; an object that holds a module, such as
            a transformers pipeline; or a function that calls a module.
        model: the module, if it cannot be found from ``forward_func``. Default: None.

    Returns:
        The module, without wrappers (see :func:`unwrap`).

    Raises:
        ModelNotFoundError: when no module, or several, are found from ``forward_func``, and
            ``model`` is None.

    Example:
        >>> from torch import nn
        >>> from captum_ssm.tracing import find_model
        >>> module = nn.Linear(2, 2)
        >>> find_model(module.forward) is find_model(lambda x: module(x)[:, -1]) is module
        True
    """
    if model is not None:
        if not isinstance(model, nn.Module):
            raise ModelNotFoundError(
                f"model must be a torch.nn.Module, got {_describe(model)}."
                + (_ADVICE if _is_class(model) else " Pass the module that forward_func runs.")
            )
        return unwrap(model)
    function: Any = forward_func
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__self__", function)
    if isinstance(function, nn.Module):
        return unwrap(function)
    if _is_class(forward_func):
        raise ModelNotFoundError(f"forward_func is {_describe(forward_func)}.{_ADVICE}")
    models = _outermost(reachable(forward_func))
    if len(models) > 1:
        # a loss or head beside the model is no model, but one that is alone may be
        models = {m: name for m, name in models.items() if _has_mixers(m)} or models
    if len(models) == 1:
        return next(iter(models))
    if models:
        listed = ", ".join(f"{name!r} ({type(m).__name__})" for m, name in models.items())
        raise ModelNotFoundError(
            f"Several modules can be reached from forward_func={forward_func!r}: {listed}. Pass "
            "the one to explain: Method(forward_func, model=module)."
        )
    raise ModelNotFoundError(
        f"No torch.nn.Module can be reached from forward_func={forward_func!r}. Pass a module as "
        "forward_func, or pass the module as well: Method(forward_func, model=module)."
    )


_ADVICE = " Make an instance of the class, and pass the instance."


def _is_class(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, nn.Module)


def _describe(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def _outermost(named: Iterable[tuple[str, nn.Module]]) -> dict[nn.Module, str]:
    """Return the unwrapped modules that no other module contains, with their names."""
    modules: dict[nn.Module, str] = {}
    for name, module in named:
        modules.setdefault(unwrap(module), name)
    parts = {part for module in modules for part in module.modules() if part is not module}
    return {module: name for module, name in modules.items() if module not in parts}


def _has_mixers(model: nn.Module) -> bool:
    """Return True if a module contains mixers, supported or not."""
    return bool(registered_mixers(model)) or any(map(looks_like_a_mixer, model.modules()))


def runnable(forward_func: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function to call on tensors in place of ``forward_func``.

    Args:
        forward_func: the function, module or pipeline that the user passed.

    Returns:
        The unwrapped module, or the model of a transformers pipeline; otherwise ``forward_func``
        itself.

    Example:
        >>> from torch import nn
        >>> from captum_ssm.tracing.find import runnable
        >>> module = nn.Linear(2, 2)
        >>> runnable(nn.DataParallel(module)) is module
        True
    """
    function: Any = forward_func
    if any(class_path(cls) == _PIPELINE for cls in type(function).__mro__):
        function = function.model
    return unwrap(function) if isinstance(function, nn.Module) else function


_PIPELINE = "transformers.pipelines.base.Pipeline"


def find_mixers(model: nn.Module, layers: Sequence[str | nn.Module] | None = None) -> list[Mixer]:
    """Return the supported mixers of a model in module order.

    The model may also contain mixers without an adapter, such as a vision tower's attention. A run
    that calls one of these raises an error; see :func:`strangers`.

    Args:
        model: the model to search.
        layers: names or modules of the mixers to use; other modules are then not checked for
            unsupported mixers. Default: None, all supported mixers.

    Returns:
        One :class:`Mixer` for each module; with ``layers``, in the order of ``layers``.

    Raises:
        NoMixerError: when no supported mixer is found, or ``layers`` names something else.
        UnsupportedMixerError: when modules look like mixers, but none has an adapter.

    Example:
        >>> from captum_ssm.models import load_bundled
        >>> from captum_ssm.tracing import find_mixers
        >>> model, _ = load_bundled()
        >>> [mixer.name for mixer in find_mixers(model)]
        ['backbone.layers.0.mixer', 'backbone.layers.1.mixer']
    """
    mixers = registered_mixers(model)
    if layers is not None:
        if isinstance(layers, str) or not isinstance(layers, Iterable) or not list(layers):
            raise NoMixerError(
                f"layers={layers!r} must be a non-empty list of names or modules. Pass mixers "
                f"from: {', '.join(mixer.name for mixer in mixers) or 'none'}."
            )
        selected = [_mixer_of(mixers, layer) for layer in layers]
        duplicate = next((x.name for i, x in enumerate(selected) if x in selected[:i]), None)
        if duplicate is not None:
            raise NoMixerError(f"layers names {duplicate!r} twice. Name each mixer once.")
        return selected
    modules = {mixer.module for mixer in mixers}
    # the operator of an outer mixer includes a mixer inside it
    mixers = [mixer for mixer in mixers if modules.isdisjoint(mixer.around)]
    if not mixers:
        for name, module in strangers(model):  # name the first, if any
            raise refusal(name, module)
        raise NoMixerError(
            f"No token mixer was found in {class_path(type(model))}, or none that has an adapter. "
            f"{proposal(model)}{adapter_advice()}"
        )
    return mixers


def registered_mixers(model: nn.Module) -> list[Mixer]:
    """Return the mixers of a model that have an adapter, in module order."""
    named = dict(model.named_modules(remove_duplicate=False))
    names: dict[nn.Module, list[str]] = {}
    for name, module in named.items():
        names.setdefault(module, []).append(name)
    mixers = []
    for module, aliases in names.items():
        entry = adapter_for(module)  # the architecture and the adapter
        if entry is not None:
            parents = [parent for name in aliases if (parent := _parent(named, name)) is not None]
            blocks = tuple(dict.fromkeys(parents))  # each once
            around = dict.fromkeys(named[outer] for name in aliases for outer in _prefixes(name))
            mixers.append(Mixer(aliases[0], module, *entry, tuple(aliases), blocks, tuple(around)))
    return mixers


def _parent(named: dict[str, nn.Module], name: str) -> nn.Module | None:
    """Return the module that directly contains ``name``, ignoring wrappers of torch.compile.

    Return None for a container such as ModuleList, whose input is not the input of each mixer.
    """
    while name:
        name = name.rpartition(".")[0]
        if "_orig_mod" not in named[name]._modules:
            containers = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
            return None if isinstance(named[name], containers) else named[name]
    return None


def _prefixes(name: str) -> Iterator[str]:
    """Yield the names of the modules that contain the module ``name``, innermost first."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def _mixer_of(mixers: list[Mixer], layer: str | nn.Module) -> Mixer:
    """Return the mixer that ``layer`` names or is, or raise NoMixerError."""
    for mixer in mixers:
        if layer in mixer.names or layer is mixer.module:
            return mixer
    name = f"a {class_path(type(layer))}" if isinstance(layer, nn.Module) else repr(layer)
    raise NoMixerError(
        f"layers names {name}, which is not a supported mixer of this model. Use mixers from: "
        f"{', '.join(mixer.name for mixer in mixers) or 'none'}."
    )


def strangers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules that look like mixers but have no adapter.

    Modules inside a supported mixer, or containing one, are left out. Ignoring a call of a yielded
    module would make an explanation silently wrong.
    """
    names: list[str] | None = None  # of mixers; searched only if a module looks like one
    for name, module in model.named_modules():
        if not looks_like_a_mixer(module) or adapter_for(module) is not None:
            continue
        if names is None:
            names = [name for mixer in registered_mixers(model) for name in mixer.names]
        inside = any(_contains(outer, name) for outer in names)
        around = any(_contains(name, inner) for inner in names)
        if not inside and not around:
            yield name, module


def _contains(outer: str, inner: str) -> bool:
    return outer == "" or inner.startswith(outer + ".")
