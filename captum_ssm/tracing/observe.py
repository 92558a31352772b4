"""Hooks that report the block inputs and mixer calls of a run to watchers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from ..mixers.base import Call, refused_cache
from ..mixers.registry import refusal
from .caches import without_caches
from .eager import eagerly
from .find import Mixer, strangers
from .gradients import recordable
from .hooks import at_both_ends, first_floating, hooked, swap_first
from .repair.fused import unfused
from .repair.loops import repaired_scans
from .split import require_gathered

#: The positional and the keyword arguments of a call.
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Watcher:
    """Base class of objects that observe a run; hooks call the methods, which do nothing here."""

    @property
    def looks_away(self) -> bool:
        """Return True while the watcher wants no reports of mixer calls."""
        return False

    def enters(self, module: nn.Module, arguments: Arguments, is_block: bool) -> Arguments | None:
        """Receive the arguments of a module that contains a mixer; return new ones, or None.

        ``is_block`` is True if the module's input is the residual stream.
        """

    def continued(self, name: str, cache: Any) -> Any:
        """Return a copy of ``cache`` for a call that received the cache as argument ``name``.

        Raises:
            CachedStateError: if tokens in the cache cannot be part of the explanation.
        """
        raise refused_cache(name, cache)

    def while_mixing(
        self, module: nn.Module, sequence: Tensor | None
    ) -> Sequence[AbstractContextManager[Any]]:
        """Return contexts to enter while a mixer runs on a sequence."""
        return ()

    def returned(self, mixer: Mixer, call: Call) -> Tensor | None:
        """Receive a mixer's call directly after it returns; return a new output, or None."""

    def left(self, mixer: Mixer, output: Any) -> Any:
        """Receive a mixer's output after all other hooks; return a new output, or None."""


def observe(
    model: nn.Module,
    mixers: Sequence[Mixer],
    watchers: Sequence[Watcher],
    stack: ExitStack,
    *,
    gradients: bool,
    vouched: bool,
) -> Callable[..., Arguments | None]:
    """Report a model's runs to watchers until ``stack`` closes.

    Until then the model uses no cache, runs uncompiled, and computes fused norms and CPU scans by
    torch functions. A run that calls a mixer without an adapter raises
    :class:`~captum_ssm.errors.UnsupportedMixerError`.

    Args:
        model, mixers: the model and its watched mixers.
        watchers: the watchers, called in this order.
        stack: the exit stack that removes all hooks when it closes.
        gradients: whether autograd is to record the runs.
        vouched: whether the user named the mixers, so that other modules are not checked.

    Returns:
        A function to call with a module and the module's arguments wherever ``module.forward`` is
        called directly, without hooks.
    """
    require_gathered(model, (part for mixer in mixers for part in mixer.module.modules()))
    # the first watcher records operators, and so decides on caches; without one they are refused
    without_caches(model, stack, (*watchers, Watcher())[0].continued)
    for name, stranger in () if vouched else strangers(model):
        refuse = functools.partial(_refuse_call, name)
        stack.enter_context(hooked(stranger.register_forward_pre_hook, refuse))
    hooks = _RunHooks(watchers)
    blocks = {block for mixer in mixers for block in mixer.blocks}
    for outer in {outer for mixer in mixers for outer in mixer.around}:
        enter = functools.partial(hooks.enter, is_block=outer in blocks)
        stack.enter_context(hooked(outer.register_forward_pre_hook, enter, with_kwargs=True))
    for mixer in mixers:
        module = mixer.module
        register = module.register_forward_pre_hook
        stack.enter_context(hooked(register, hooks.on_start, with_kwargs=True))
        first, last = (functools.partial(f, mixer) for f in (hooks.on_end, hooks.on_left))
        stack.enter_context(at_both_ends(module, first, last))
    stack.callback(hooks.close)
    stack.enter_context(repaired_scans())  # the same values, in less memory and time
    stack.enter_context(unfused())
    if gradients:
        stack.enter_context(recordable(model))
    stack.enter_context(eagerly(model))

    def report_entry(module: nn.Module, args: Any, kwargs: Any) -> Arguments | None:
        return hooks.enter(module, args, kwargs, is_block=module in blocks)

    return report_entry


def _batched_like(changed: Tensor, returned: Tensor) -> Tensor:
    """Return ``changed``, without the batch dimension if ``returned`` has none."""
    return changed[0] if changed.dim() > returned.dim() else changed


def _refuse_call(name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
    """Pre-hook of a mixer without an adapter: raise UnsupportedMixerError."""
    raise refusal(name, module, others=True)


class _RunHooks:
    """The hooks of a run, with the state that they share."""

    def __init__(self, watchers: Sequence[Watcher]) -> None:
        self.watchers = watchers
        #: The latest input shape of each module that contains a mixer, in the order of entry.
        #: Modules stay after they return, but of those around a mixer the latest is running.
        self.latest_shapes: dict[nn.Module, torch.Size] = {}
        #: The contexts of each running mixer.
        self.contexts: list[ExitStack] = []

    def enter(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_block: bool
    ) -> Arguments | None:
        """Report a containing module's arguments to watchers; return new arguments, or None."""
        arguments: Arguments = args, kwargs
        for watcher in self.watchers:
            arguments = watcher.enters(module, arguments, is_block) or arguments
        self.latest_shapes.pop(module, None)  # so that the module becomes the latest
        stream = first_floating(arguments)
        if stream is not None:
            self.latest_shapes[module] = stream.shape
        return None if arguments[0] is args and arguments[1] is kwargs else arguments

    def on_start(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Enter the watchers' contexts for a mixer's call; :meth:`on_end` leaves them."""
        stack = ExitStack()
        self.contexts.append(stack)
        if all(watcher.looks_away for watcher in self.watchers):
            return
        sequence = first_floating((args, kwargs))
        for watcher in self.watchers:
            for context in watcher.while_mixing(module, sequence):
                stack.enter_context(context)

    def on_end(self, mixer: Mixer, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Report a mixer's call to watchers before other hooks; return a new output, or None."""
        if self.contexts:  # empty if a hook before ours raised
            self.contexts.pop().close()
        if output is None:  # the call failed, and its exception is on its way
            return None
        # the block entered last is the one that runs, also for a mixer shared by several
        block = next((b for b in reversed(self.latest_shapes) if b in mixer.blocks), None)
        innermost_first = reversed(self.latest_shapes.items())
        around = {m: shape for m, shape in innermost_first if m in mixer.around}
        call, changed = Call(args, kwargs, output, block, around), None
        for watcher in self.watchers:  # the last one that returns an output decides
            new_output = watcher.returned(mixer, call)
            changed = changed if new_output is None else new_output
        if changed is None:
            return None
        return swap_first(output, functools.partial(_batched_like, changed))[0]

    def on_left(self, mixer: Mixer, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Report a mixer's output to watchers after other hooks; return a new output, or None."""
        changed = None
        for watcher in self.watchers:
            new_output = watcher.left(mixer, output if changed is None else changed)
            changed = changed if new_output is None else new_output
        return changed

    def close(self) -> None:
        """Close the contexts of mixer calls whose exit hooks did not run after an interrupt."""
        while self.contexts:
            self.contexts.pop().close()
