"""Run models without caches, with unchanged results, and copy the caches that calls receive."""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from ..errors import CachedStateError
from ..mixers.base import refused_cache
from .changes import Shared, Undo, lasting
from .hooks import hooked

#: Takes the name and the value of a cache argument, and returns the cache to run with.
Continued = Callable[[str, Any], Any]
#: The positional and the keyword arguments of a call.
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def without_caches(model: nn.Module, stack: ExitStack, continued: Continued) -> None:
    """Run every module with a ``use_cache`` argument without a cache until ``stack`` closes.

    If a call receives a cache, ``continued`` returns the cache that replaces it.
    """
    stack.enter_context(lasting(_packed.enter))
    stack.callback(_calls.clear)  # an interrupt calls no hooks
    run = functools.partial(_without_cache, continued)
    for module in model.modules():
        if "use_cache" in parameters(type(module).forward):
            before, after = module.register_forward_pre_hook, module.register_forward_hook
            stack.enter_context(hooked(before, run, with_kwargs=True))
            stack.enter_context(hooked(after, _end_call, always_call=True))
        if hasattr(module, "recurrent_states"):
            stack.enter_context(lasting(functools.partial(_restorer_of_state, module)))
            stack.enter_context(hooked(module.register_forward_pre_hook, _delete_state))


@contextmanager
def sparing_caches(model: nn.Module) -> Iterator[None]:
    """Copy each cache that a call receives inside the ``with``; the user's cache is unchanged."""
    copies: dict[int, tuple[Any, Any]] = {}
    running: list[nn.Module] = []

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Pre-hook: return arguments with the cache's copy in the outermost call, else None."""
        running.append(module)
        name, cache = cache_of(module, args, kwargs)
        if cache is None or len(running) > 1:  # the outermost module's call has copied or made it
            return None
        if id(cache) not in copies:  # the cache is stored, too, so that no other gets its id
            copies[id(cache)] = cache, copied(cache, lambda x: x.detach().clone())
        return _with_argument(module, args, kwargs, name, copies[id(cache)][1])

    def leave(*_: Any) -> None:
        if running:
            running.pop()

    with ExitStack() as stack:
        for module in model.modules():
            if "use_cache" in parameters(type(module).forward):
                before, after = module.register_forward_pre_hook, module.register_forward_hook
                stack.enter_context(hooked(before, enter, with_kwargs=True))
                stack.enter_context(hooked(after, leave, always_call=True))
        yield


def copied(cache: Any, anew: Callable[[Tensor], Tensor]) -> Any:
    """Copy a cache, replacing each tensor ``x`` in the cache by ``anew(x)``.

    Raises:
        CachedStateError: if the cache contains an object that cannot be copied.
    """
    try:  # deepcopy takes objects from its memo, by their ids
        return copy.deepcopy(cache, memo={id(x): anew(x) for x in tensors_of(cache)})
    except (TypeError, RuntimeError) as error:  # such as a stream of a GPU in the cache
        raise CachedStateError(
            f"The call continues from a {type(cache).__name__}, which cannot be copied: {error}. "
            "Pass the whole sequence in one call, without a cache."
        ) from error


def tensors_of(cache: Any) -> Iterator[Tensor]:
    """Yield the tensors of a cache, in the order in which :func:`copied` replaces them."""
    return _tensors_of(cache, set())


def _tensors_of(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """Yield the tensors in an object, also in containers and in attributes of objects."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors_of(item, seen)
    elif hasattr(value, "__dict__"):
        yield from _tensors_of(value.__dict__, seen)


def _restorer_of_state(module: Any) -> Undo:
    """Return a function that restores the present recurrent state of a RecurrentGemma module.

    transformers 4 stores this state even without a cache, and the next call would start from it.
    """
    state = module.recurrent_states

    def restore() -> None:
        module.recurrent_states = state

    return restore


def _delete_state(module: Any, *_: Any) -> None:
    """Pre-hook of a RecurrentGemma module: start from no state of an earlier call."""
    module.recurrent_states = None


#: Names of arguments by which modules receive a cache.
CACHES = ("past_key_values", "past_key_value", "cache_params", "state")


class _CacheCalls(threading.local):
    """The running calls, in one thread, of modules with a ``use_cache`` argument.

    Attributes:
        wanted: one entry per running call, outermost first: True if the call would have used a
            cache, False if not, None if the call continues from a given cache.
        dropped: modules whose call would have returned a cache but returned none.
        known: caches that calls received, and the replacements of these caches, by id.
    """

    def __init__(self) -> None:
        self.wanted: list[bool | None] = []
        self.dropped: set[nn.Module] = set()
        self.known: dict[int, Any] = {}

    def clear(self) -> None:
        """Delete all records of calls, which an interrupt may have left."""
        for records in (self.wanted, self.dropped, self.known):
            records.clear()


_calls = _CacheCalls()


def _without_cache(
    continued: Continued, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Arguments | None:
    """Pre-hook: return arguments with ``use_cache=False``, or the given cache's replacement."""
    if _calls.wanted[:1] == [None]:  # inside a module that continues from a cache
        _calls.wanted.append(None)
        return None
    name, cache = cache_of(module, args, kwargs)
    if _calls.wanted and cache is not None:  # made by a module around, inside the run
        raise refused_cache(name, cache)
    if not _calls.wanted:
        _refuse_to_continue(module, args, kwargs)
    if cache is not None:
        replacement = continued(name, cache)
        _calls.known |= {id(x): x for x in (cache, replacement)}
        _calls.wanted.append(None)
        return _with_argument(module, args, kwargs, name, replacement)
    wanted = _by_name(module, args, kwargs).get("use_cache")
    if wanted is None:
        wanted = getattr(getattr(module, "config", None), "use_cache", False)
    if not _calls.wanted:  # the outermost call
        _calls.dropped.update([module] if wanted else [])
    # a module inside another gets its argument from that one, which was changed already
    _calls.wanted.append(_calls.wanted[0] if _calls.wanted else bool(wanted))
    return _with_argument(module, args, kwargs, "use_cache", False)


def _by_name(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return a call's positional and keyword arguments in one dictionary, by name."""
    return {**dict(zip(parameters(type(module).forward)[1:], args, strict=False)), **kwargs}


def cache_of(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, Any]:
    """Return the argument name and the value of a call's cache; ("", None) without a cache."""
    arguments = _by_name(module, args, kwargs)
    return next(((x, arguments[x]) for x in CACHES if arguments.get(x) is not None), ("", None))


def _with_argument(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], name: str, value: Any
) -> Arguments:
    """Return a call's arguments with the argument called ``name`` set to ``value``."""
    names = parameters(type(module).forward)[1:]
    if name in names[: len(args)]:  # it was passed by position
        place = names.index(name)
        return (*args[:place], value, *args[place + 1 :]), kwargs
    return args, {**kwargs, name: value}


def _refuse_to_continue(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise if a call continues from a cache of an earlier call of the same run."""
    names = parameters(type(module).forward)[1:]
    # name=None may pass on a cache that an earlier call did not return; None by position is a gap
    positional = {name for name, x in zip(names, args, strict=False) if x is not None}
    passed = [name for name in CACHES if name in {*positional, *kwargs}]
    if passed and (
        module in _calls.dropped or id(cache_of(module, args, kwargs)[1]) in _calls.known
    ):
        raise CachedStateError(
            f"forward_func calls {type(module).__name__} again and passes {passed[0]}, so that the "
            "call continues from the cache of an earlier call. An explained run returns no cache, "
            "even with use_cache=True, and reads a given cache only once. Pass the whole sequence "
            f"in one call, without {passed[0]}."
        )


def _end_call(*_: Any) -> None:
    """Hook: remove the module's call from the running calls."""
    if _calls.wanted:  # empty if a hook before ours raised
        _calls.wanted.pop()


def _disable_packing() -> Undo:
    """Switch off transformers' detection of packed texts in calls that would have used a cache.

    Without a mask and a cache, transformers reads restarting positions as several packed texts.
    """
    masking_utils = sys.modules.get("transformers.masking_utils")
    original: Callable[[Tensor], Tensor | None] | None
    original = getattr(masking_utils, "find_packed_sequence_indices", None)
    if original is None:
        return lambda: None

    @functools.wraps(original)
    def find_unless_cached(*args: Any, **kwargs: Any) -> Tensor | None:
        return None if _calls.wanted and _calls.wanted[0] else original(*args, **kwargs)

    setattr(masking_utils, original.__name__, find_unless_cached)
    return lambda: setattr(masking_utils, original.__name__, original)


_packed = Shared(_disable_packing)


@functools.cache
def parameters(function: Callable[..., Any]) -> list[str]:
    """Return the parameter names of a method, including ``self``."""
    return list(inspect.signature(function).parameters)
