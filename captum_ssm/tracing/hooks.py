"""Hooks for one thread, and functions that find and replace tensors in nested arguments."""

from __future__ import annotations

import functools
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from copy import copy
from types import FrameType
from typing import Any

from torch import Tensor, nn

from .changes import lasting

#: A forward hook or pre-hook.
Hook = Callable[..., Any]


def in_this_thread(hook: Hook) -> Hook:
    """Wrap a hook so that it does nothing in threads other than the calling thread."""
    owner = threading.get_ident()

    @functools.wraps(hook)
    def own(*args: Any) -> Any:
        return hook(*args) if threading.get_ident() == owner else None

    return own


def hooked(
    register: Callable[..., Any], hook: Hook, **options: bool
) -> AbstractContextManager[None]:
    """Return a context that registers a hook for the calling thread, and removes it at exit."""
    own = in_this_thread(hook)
    return lasting(lambda: register(own, **options).remove)


@contextmanager
def at_both_ends(module: nn.Module, first: Hook, last: Hook) -> Iterator[None]:
    """Run one forward hook before and one after all other hooks of a module, in the ``with``.

    This order also holds if other hooks are registered while the model runs.

    Args:
        module: the module.
        first, last: the forward hooks, which also take keyword arguments. If the module raises an
            exception, ``first`` is called with the output None.
    """
    own = in_this_thread(first), in_this_thread(last)
    hooks = module._forward_hooks

    def order(*_: Any) -> None:
        """Move the two hooks back to both ends if other hooks were registered there."""
        keys = list(hooks)
        if hooks[keys[0]] is own[0] and hooks[keys[-1]] is own[1]:
            return
        place = {id(hook): key for key, hook in hooks.items()}
        ends = place[id(own[0])], place[id(own[1])]
        for key in [key for key in keys if key not in ends] + [ends[1]]:
            hooks[key] = hooks.pop(key)

    register = functools.partial(module.register_forward_hook, with_kwargs=True)
    with (
        lasting(lambda: register(own[0], prepend=True, always_call=True).remove),
        lasting(lambda: register(own[1]).remove),
        hooked(module.register_forward_pre_hook, order),
    ):
        yield


def swap_first(value: Any, swap: Callable[[Tensor], Tensor]) -> tuple[Any, Tensor | None]:
    """Replace the first floating tensor in ``value``; return result and new tensor (or None)."""
    if isinstance(value, Tensor):
        new = swap(value) if value.is_floating_point() else None
        return (value, None) if new is None else (new, new)
    is_mapping, is_sequence = type(value) is dict, type(value) in (tuple, list)
    keys: Sequence[Any] = list(value) if is_mapping else range(len(value) if is_sequence else 0)
    for key in keys:
        item, new = swap_first(value[key], swap)
        if new is not None:
            items = dict(value) if is_mapping else list(value)
            items[key] = item
            return type(value)(items), new
    return value, None


def detached(value: Any) -> Any:
    """Detach every tensor in nested tuples, lists and dicts."""
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, dict):
        return {key: detached(v) for key, v in value.items()}
    if isinstance(value, tuple | list) and type(value) in (tuple, list):
        return type(value)(detached(v) for v in value)
    return value


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in nested tuples, lists and mappings."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, tuple | list):  # called for every function of a run
        return [x for item in value for x in tensors_in(item)]
    return tensors_in(list(value.values())) if isinstance(value, Mapping) else []


def swapped(value: Any, new: Mapping[int, Tensor]) -> Any:
    """Replace each tensor in nested ``value`` whose Python id is a key of ``new``."""
    if isinstance(value, Tensor):
        return new.get(id(value), value)
    if isinstance(value, dict):
        out = copy(value)  # outputs of transformers are dictionaries with attributes
        for key, item in value.items():
            out[key] = swapped(item, new)
        return out
    if isinstance(value, tuple | list):
        items = (swapped(item, new) for item in value)
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def name_of_running(names: Mapping[nn.Module, str], otherwise: str) -> str:
    """Return the name of the innermost running module of this thread, or ``otherwise``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is nn.Module._call_impl.__code__:
            name = names.get(frame.f_locals["self"])
            if name is not None:
                return name
        frame = frame.f_back
    return otherwise


@contextmanager
def observing(
    modules: Iterable[nn.Module], receive: Callable[[nn.Module, int, bool, Any], None]
) -> Iterator[None]:
    """Pass inputs and outputs of modules to a function during the ``with``.

    Args:
        modules: the modules.
        receive: called with the module, the call's number (from 1), True at entry or False at exit,
            and the arguments or the output. Outputs are passed before other hooks change them.
    """
    calls = Counter[nn.Module]()
    running: list[int] = []

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        calls[module] += 1
        running.append(calls[module])
        receive(module, calls[module], True, (args, kwargs))

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        call = running.pop()
        if output is not None:  # else it has failed
            receive(module, call, False, output)

    with ExitStack() as stack:
        for module in modules:
            before, after = module.register_forward_pre_hook, module.register_forward_hook
            stack.enter_context(hooked(before, enter, with_kwargs=True))
            stack.enter_context(hooked(after, leave, always_call=True, prepend=True))
        yield


def sequences_in(value: Any) -> Iterator[Tensor]:
    """Yield the floating tensors with 2 to 4 dimensions in nested tuples, lists and mappings."""
    if isinstance(value, Tensor):
        if value.is_floating_point() and value.dim() in (2, 3, 4) and value.numel():
            yield value
        return
    parts = value.values() if isinstance(value, Mapping) else value
    for part in parts if isinstance(value, tuple | list | Mapping) else ():
        yield from sequences_in(part)
