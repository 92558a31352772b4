"""How work is cut into parts: so many tokens at a time, some of the heads, as memory allows.

Causal operators are fed a few tokens at a time, in the order in which their state runs, and their
adjoints in reverse, with no more in hand than that state: a :class:`Stream`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

# --- tokens ------------------------------------------------------------------------------------


class Portion(NamedTuple):
    """How many tokens an operator is best fed at a time.

    Attributes:
        elements: those of all channels of these tokens together.
        most: the most tokens.
        multiple: a number of tokens of which they should be a multiple.
    """

    elements: int
    most: int
    multiple: int = 1


#: Few enough for the states of a selective scan to stay in a processor's second cache.
SMALL = Portion(2**15, 32)
#: The same where there is one number for each channel and token: all steps are larger.
LARGE = Portion(2**19, 1024)


class Stream(Protocol):
    """An operator, or its adjoint, on the next tokens; it keeps what later calls need."""

    def __call__(self, x: Tensor, part: slice) -> Tensor:
        """Values (B, T, H, P) of the tokens ``part`` to the outputs of the same tokens."""


def evenly(tokens: int, most: int, multiple: int = 1) -> int:
    """The size of as few parts as parts of ``most`` tokens make, but alike, a multiple each."""
    each = -(-tokens // -(-tokens // most))
    return -(-each // multiple) * multiple


def parts(tokens: int, size: int, backwards: bool) -> Iterator[slice]:
    """At most so many tokens at a time, the first or the last ones first."""
    starts = range(0, tokens, size)
    for start in reversed(starts) if backwards else starts:
        yield slice(start, min(start + size, tokens))


# --- heads -------------------------------------------------------------------------------------

#: Neighbouring heads, or the indices (h,) of any.
Heads: TypeAlias = slice | Tensor


def some_heads(x: Tensor, heads: Sequence[int]) -> Tensor:
    """Some heads of (B, L, H, ...); a view of neighbours."""
    if isinstance(heads, range) and heads.step == 1:
        return x[:, :, heads.start : heads.stop]
    return x[:, :, list(heads)]


def gather_heads(x: Tensor, heads: Heads, out: Tensor | None = None) -> Tensor:
    """Some heads of (B, T, H), as fast as they can be had."""
    if isinstance(heads, slice):
        return x[:, :, heads] if out is None else out.copy_(x[:, :, heads])
    # several times as fast as an index along the last dimension
    return torch.gather(x, 2, heads.expand(*x.shape[:2], -1), out=out)


def vectors_of_heads(x: Tensor, heads: int, part: Heads = slice(None)) -> Tensor:
    """Vectors of some heads (B, L, h, N), of (B, L, N) common to all or (B, L, G, N) by group.

    Where all heads share them, they are said once: (B, L, 1, N).
    """
    if x.dim() == 3:
        return x[:, :, None]
    each = heads // x.shape[2]
    return x[:, :, torch.arange(heads, device=x.device)[part] // each]


# --- memory ------------------------------------------------------------------------------------

#: Elements that are taken at a time where launches cost more than memory (64 MiB in float32).
LAUNCHED = 2**24


def at_a_time(cached: int, device: torch.device, launched: int = LAUNCHED) -> int:
    """How many elements are best held at a time: more where each part costs launches.

    Args:
        cached: as many as stay in a processor's cache.
        device: what holds them.
        launched: as many as are held on other devices. Default: 2**24.
    """
    return cached if device.type == "cpu" else launched


T = TypeVar("T")


def as_memory_allows(whole: range, size: int, form: Callable[[range], T]) -> Iterator[T]:
    """What ``form`` makes of some neighbours at a time, of half as many once memory runs out.

    Args:
        whole: what is cut into parts.
        size: how many make a part, as long as memory allows it.
        form: makes something of a part.
    """
    start = whole.start
    while start < whole.stop:
        part = range(start, min(start + size, whole.stop))
        try:
            yield form(part)
            start = part.stop
        except RuntimeError as error:
            if len(part) == 1 or not ran_out_of_memory(error):
                raise
            # with the error goes its traceback, and what the failed attempt held
            size = len(part) // 2


def ran_out_of_memory(error: RuntimeError) -> bool:
    """Whether a device or the processor's allocator had no more memory."""
    return isinstance(error, torch.cuda.OutOfMemoryError) or "can't allocate memory" in str(error)
