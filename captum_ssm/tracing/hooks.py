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
    """Wrap a hook so that it does nothing in other threads, which may run the same model."""
    owner_thread = threading.get_ident()

    @functools.wraps(hook)
    def guarded_hook(*args: Any) -> Any:
        return hook(*args) if threading.get_ident() == owner_thread else None

    return guarded_hook


def hooked(
    register: Callable[..., Any], hook: Hook, **options: bool
) -> AbstractContextManager[None]:
    """Return a context that registers a hook for the calling thread, and removes it at exit."""
    guarded_hook = in_this_thread(hook)
    return lasting(lambda: register(guarded_hook, **options).remove)


@contextmanager
def at_both_ends(module: nn.Module, first: Hook, last: Hook) -> Iterator[None]:
    """Run one forward hook before and one after all other hooks of a module, in the ``with``.

    This order also holds if other hooks are registered while the model runs. Both hooks also take
    keyword arguments. If the module raises an exception, ``first`` is called with the output None.
    """
    first_hook, last_hook = in_this_thread(first), in_this_thread(last)
    hooks = module._forward_hooks

    def restore_order(*_: Any) -> None:
        """Move the two hooks back to both ends if other hooks were registered there."""
        keys = list(hooks)
        if hooks[keys[0]] is first_hook and hooks[keys[-1]] is last_hook:
            return
        key_of = {id(hook): key for key, hook in hooks.items()}
        first_key, last_key = key_of[id(first_hook)], key_of[id(last_hook)]
        for key in [key for key in keys if key not in (first_key, last_key)] + [last_key]:
            hooks[key] = hooks.pop(key)  # move to the end, in order, and the last hook at last

    register = functools.partial(module.register_forward_hook, with_kwargs=True)
    with (
        lasting(lambda: register(first_hook, prepend=True, always_call=True).remove),
        lasting(lambda: register(last_hook).remove),
        hooked(module.register_forward_pre_hook, restore_order),
    ):
        yield


def swap_first(value: Any, swap: Callable[[Tensor], Tensor]) -> tuple[Any, Tensor | None]:
    """Replace the first floating tensor x by ``swap(x)``; return new value and tensor (or None)."""
    if isinstance(value, Tensor):
        new_tensor = swap(value) if value.is_floating_point() else None
        return (value, None) if new_tensor is None else (new_tensor, new_tensor)
    is_mapping, is_sequence = type(value) is dict, type(value) in (tuple, list)  # no subclasses
    keys: Sequence[Any] = list(value) if is_mapping else range(len(value) if is_sequence else 0)
    for key in keys:
        item, new_tensor = swap_first(value[key], swap)
        if new_tensor is not None:
            items = dict(value) if is_mapping else list(value)
            items[key] = item
            return type(value)(items), new_tensor
    return value, None


def first_floating(value: Any) -> Tensor | None:
    """Return the first floating tensor in nested tuples, lists and dicts, or None."""
    return swap_first(value, lambda x: x)[1]


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
    if isinstance(value, tuple | list):  # called for every function of a run, so no generator
        return [x for item in value for x in tensors_in(item)]
    return tensors_in(list(value.values())) if isinstance(value, Mapping) else []


def swapped(value: Any, replacements: Mapping[int, Tensor]) -> Any:
    """Replace each tensor in nested ``value`` whose Python id is a key of ``replacements``."""
    if isinstance(value, Tensor):
        return replacements.get(id(value), value)
    if isinstance(value, dict):
        out = copy(value)  # keeps the class: transformers' outputs are dicts with attributes
        for key, item in value.items():
            out[key] = swapped(item, replacements)
        return out
    if isinstance(value, tuple | list):
        items = (swapped(item, replacements) for item in value)
        is_named = hasattr(value, "_fields")  # a NamedTuple
        return type(value)(*items) if is_named else type(value)(items)
    return value


def name_of_running(names: Mapping[nn.Module, str], otherwise: str) -> str:
    """Return the name of the innermost running module of this thread, or ``otherwise``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is nn.Module._call_impl.__code__:  # every module's call runs this method
            name = names.get(frame.f_locals["self"])
            if name is not None:
                return name
        frame = frame.f_back
    return otherwise


@contextmanager
def observing(
    modules: Iterable[nn.Module], receive: Callable[[nn.Module, int, bool, Any], None]
) -> Iterator[None]:
    """Pass inputs and outputs of modules to ``receive`` during the ``with``.

    ``receive`` is called with the module, the call's number (from 1), True at entry or False at
    exit, and the arguments or the output. Outputs are passed before other hooks change them.
    """
    calls = Counter[nn.Module]()
    running_calls: list[int] = []

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        calls[module] += 1
        running_calls.append(calls[module])
        receive(module, calls[module], True, (args, kwargs))

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        call = running_calls.pop()  # calls nest: the latest one ends
        if output is not None:  # else it has failed
            receive(module, call, False, output)

    with ExitStack() as stack:
        for module in modules:
            before, after = module.register_forward_pre_hook, module.register_forward_hook
            stack.enter_context(hooked(before, enter, with_kwargs=True))
            stack.enter_context(hooked(after, leave, always_call=True, prepend=True))
        yield


def sequences_in(value: Any) -> Iterator[Tensor]:
    """Yield the nonempty floating tensors (B, E), (B, L, E) or (B, h, w, E) in nested values."""
    if isinstance(value, Tensor):
        if value.is_floating_point() and value.dim() in (2, 3, 4) and value.numel():
            yield value
        return
    items = value.values() if isinstance(value, Mapping) else value
    for item in items if isinstance(value, tuple | list | Mapping) else ():
        yield from sequences_in(item)
