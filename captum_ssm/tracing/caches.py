"""Runs without a cache, with the same results as runs with one."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from ..errors import CachedStateError
from ..mixers.base import Call
from .changes import Shared, Undo, lasting
from .hooks import hooked


def without_caches(model: nn.Module, stack: ExitStack) -> None:
    """Let every module that offers a cache run without it, until ``stack`` is closed."""
    stack.enter_context(lasting(_packed.enter))
    stack.callback(_calls.clear)  # an interrupt calls no hooks
    for module in model.modules():
        if "use_cache" in _parameters(type(module).forward):
            before, after = module.register_forward_pre_hook, module.register_forward_hook
            stack.enter_context(hooked(before, _without_cache, with_kwargs=True))
            stack.enter_context(hooked(after, _finished, always_call=True))
        if hasattr(module, "recurrent_states"):
            stack.enter_context(lasting(functools.partial(_set_aside, module)))
            stack.enter_context(hooked(module.register_forward_pre_hook, _forget))


def _set_aside(module: Any) -> Undo:
    """Return a function that restores the state that RecurrentGemma keeps.

    In transformers 4 it keeps a state even without a cache: the next call continues from it.
    """
    kept = module.recurrent_states

    def restore() -> None:
        module.recurrent_states = kept

    return restore


def _forget(module: Any, *_: Any) -> None:
    module.recurrent_states = None


#: Names of modules' arguments for a cache.
_CACHES = ("past_key_values", "past_key_value", "cache_params", "state")


class _CacheCalls(threading.local):
    """This thread's calls of modules that offer a cache.

    Attributes:
        wanted: for each call that runs, the outermost first, whether it would have used a cache.
        dropped: modules that have returned no cache although they should have.
    """

    def __init__(self) -> None:
        self.wanted: list[bool] = []
        self.dropped: set[nn.Module] = set()

    def clear(self) -> None:
        """Forget all calls."""
        self.wanted.clear()
        self.dropped.clear()


_calls = _CacheCalls()


def _without_cache(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Set ``use_cache`` to False in a call's arguments; refuse one that continues from a cache."""
    names = _parameters(type(module).forward)
    if "cache_params" in names:  # Mamba of transformers 4 ignores it if use_cache is False
        Call(args, kwargs, None).refuse_cache("cache_params", names.index("cache_params") - 1)
    position = names.index("use_cache") - 1
    wanted = args[position] if position < len(args) else kwargs.get("use_cache")
    if wanted is None:
        wanted = getattr(getattr(module, "config", None), "use_cache", False)
    if not _calls.wanted:
        _refuse_to_continue(module, args, kwargs)
        _calls.dropped.update([module] if wanted else [])
    # a module inside another gets its argument from that one, which was changed already
    _calls.wanted.append(_calls.wanted[0] if _calls.wanted else bool(wanted))
    if position < len(args):
        args = (*args[:position], False, *args[position + 1 :])
        return args, kwargs
    return args, {**kwargs, "use_cache": False}


def _refuse_to_continue(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise if a call continues from a cache that an earlier call would have returned."""
    names = _parameters(type(module).forward)[1:]
    # None by name is a cache that was not returned; by position it fills a gap
    by_place = {name for name, x in zip(names, args, strict=False) if x is not None}
    named = [name for name in _CACHES if name in {*by_place, *kwargs}]
    if module in _calls.dropped and named:
        raise CachedStateError(
            f"forward_func calls {type(module).__name__} again and passes {named[0]}, so that the "
            "call continues from the cache of an earlier one. Explanations run without a cache, "
            f"use_cache=True or not. Pass the whole sequence in one call, without {named[0]}."
        )


def _finished(*_: Any) -> None:
    if _calls.wanted:  # empty if a hook before ours raised
        _calls.wanted.pop()


def _keep_apart_as_with_a_cache() -> Undo:
    """Let transformers find packed texts only in calls that would not have used a cache.

    Without a mask and a cache it takes restarting positions for several texts.
    """
    code = sys.modules.get("transformers.masking_utils")
    original: Callable[[Tensor], Tensor | None] | None
    original = getattr(code, "find_packed_sequence_indices", None)
    if original is None:
        return lambda: None

    @functools.wraps(original)
    def found(*args: Any, **kwargs: Any) -> Tensor | None:
        return None if _calls.wanted and _calls.wanted[0] else original(*args, **kwargs)

    setattr(code, original.__name__, found)
    return lambda: setattr(code, original.__name__, original)


_packed = Shared(_keep_apart_as_with_a_cache)


@functools.cache
def _parameters(function: Callable[..., Any]) -> list[str]:
    """Return names of a method's parameters, self included."""
    return list(inspect.signature(function).parameters)
