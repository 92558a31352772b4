"""Mixers that run as they are, and return something else in place of what they computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..mixers.base import Call
from ..tracing import Mixer
from ..tracing.hooks import hooked, swap_first
from .mode import Linearising


@contextmanager
def substituted(
    mixer: Mixer,
    form: Callable[[Mixer, Call], Tensor],
    entering: dict[nn.Module, Any],
    mode: Linearising,
) -> Iterator[None]:
    """Let a mixer run unseen, and return ``form`` of its call in place of what it returns.

    Args:
        mixer: the mixer.
        form: returns its new output.
        entering: the blocks that were entered, the latest last.
        mode: the rules, which look away while the mixer runs.
    """
    entered: list[ExitStack] = []

    def before(module: nn.Module, args: tuple[Any, ...]) -> None:
        contexts = ExitStack()
        contexts.enter_context(torch.no_grad())
        contexts.enter_context(mode.looking_away())
        entered.append(contexts)

    def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if entered:  # empty if a hook before ours raised
            entered.pop().close()
        if output is None:  # the call failed, and its exception is on its way
            return None
        block = next((b for b in reversed(entering) if b in mixer.blocks), None)
        call = Call(args, kwargs, output, block)
        out = form(mixer, call)
        return swap_first(output, lambda _: out.to(call.output_tensor.dtype))[0]

    module = mixer.module
    try:
        with (
            hooked(module.register_forward_pre_hook, before),
            hooked(
                module.register_forward_hook,
                after,
                with_kwargs=True,
                always_call=True,
                prepend=True,
            ),
        ):
            yield
    finally:
        while entered:  # an interrupt calls no hooks
            entered.pop().close()
