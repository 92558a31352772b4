"""The residual stream that enters a block that holds a mixer."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

#: Norms that some models put before the first of their blocks, inside of it (RWKV).
_OPENING_NORMS = ("pre_ln", "pre_norm")
#: Marks blocks that add the mixer's output to what they hand to the mixer (MiniMax).
ADDS_TO_NORMED = "attn_alpha_factor"


def residual_stream(
    block: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Tensor | None:
    """The stream that a call of a block goes on from, (B, L, E); None if it is given no tensor.

    Args:
        block: the block.
        args, kwargs: of its call.
    """
    stream = first_floating((*args, *kwargs.values()))
    if stream is None:
        return None
    # mamba_ssm's blocks receive the last mixer's output and the rest of the stream apart
    earlier = _argument(block, "residual", args, kwargs)
    if isinstance(earlier, Tensor):
        stream = stream + earlier
    for name in _OPENING_NORMS:
        norm = getattr(block, name, None)
        if norm is not None:
            stream = norm(stream)
    return stream


def first_floating(values: Iterable[Any]) -> Tensor | None:
    """The first floating tensor among values, or None."""
    return next((v for v in values if isinstance(v, Tensor) and v.is_floating_point()), None)


def _argument(
    module: nn.Module, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """The argument called ``name``, however it was passed; None if there is none."""
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    place = names.index(name) if name in names else len(args)
    return args[place] if place < len(args) else kwargs.get(name)
