"""The residual stream that enters the block of every mixer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from ...tracing import Mixer, find_mixers
from ...tracing.hooks import hooked

#: Norms that some models put before the first of their blocks, inside of it (RWKV).
_OPENING_NORMS = ("pre_ln", "pre_norm")
#: Marks blocks that add the mixer's output to what they hand to the mixer (MiniMax).
_ADDS_TO_NORMED = "attn_alpha_factor"


@contextmanager
def residual_streams(
    model: nn.Module, layers: Sequence[str | nn.Module] | None = None
) -> Iterator[list[Tensor | None]]:
    """Keep the stream entering the block of each mixer call of the runs inside the ``with``.

    Args:
        model: the module.
        layers: names or modules of the mixers, as for :func:`~captum_ssm.trace`. Default: None,
            all.

    Yields:
        A list that grows by one (B, L, E) for each mixer call, in the order of the calls; None
        for a mixer that stands alone.
    """
    found: list[Tensor | None] = []
    entered: dict[nn.Module, Tensor] = {}
    mixers = find_mixers(model, layers)
    with ExitStack() as stack:
        for block in {block for mixer in mixers for block in mixer.blocks}:
            before, register = _block_hook(entered), block.register_forward_pre_hook
            stack.enter_context(hooked(register, before, with_kwargs=True))
        for mixer in mixers:
            before = _mixer_hook(mixer, entered, found)
            register = mixer.module.register_forward_pre_hook
            stack.enter_context(hooked(register, before, with_kwargs=True))
        yield found


def _block_hook(entered: dict[nn.Module, Tensor]) -> Callable[..., None]:
    def hook(block: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        entered.pop(block, None)  # the block entered last comes last
        stream = _first_floating((*args, *kwargs.values()))
        if stream is None:
            return
        # mamba_ssm's blocks receive the last mixer's output and the rest of the stream apart
        earlier = _argument(block, "residual", args, kwargs)
        if isinstance(earlier, Tensor):
            stream = stream + earlier
        for name in _OPENING_NORMS:
            norm = getattr(block, name, None)
            if norm is not None:
                stream = norm(stream)
        # a copy: the block may add to its stream in place
        entered[block] = stream.detach().clone()

    return hook


def _mixer_hook(
    mixer: Mixer, entered: dict[nn.Module, Tensor], found: list[Tensor | None]
) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        block = next((b for b in reversed(entered) if b in mixer.blocks), None)
        stream = None if block is None else entered[block]
        if hasattr(block, _ADDS_TO_NORMED):
            stream = _first_floating((*args, *kwargs.values()))
        found.append(stream)

    return hook


def _first_floating(values: Sequence[Any]) -> Tensor | None:
    return next((v for v in values if isinstance(v, Tensor) and v.is_floating_point()), None)


def _argument(
    module: nn.Module, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """The argument called ``name``, however it was passed; None if there is none."""
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    place = names.index(name) if name in names else len(args)
    return args[place] if place < len(args) else kwargs.get(name)
