"""Operators fed with a few tokens at a time, in the order in which their state runs.

A causal operator maps the tokens in order, and its adjoint maps them in reverse, with no more in
hand than a state.  What all channels of a long sequence make of one vector over tokens then needs
no more memory than a few tokens do, and these stay in the processor's cache.

Parts as large as memory allows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor


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
#: Fewest tokens fed at a time.
_FEWEST = 4


class Stream(Protocol):
    """An operator, or its adjoint, on the next tokens; it keeps what later calls need."""

    def __call__(self, x: Tensor, part: slice) -> Tensor:
        """Values (B, T, H, P) of the tokens ``part`` to the outputs of the same tokens."""


class Streamed(Protocol):
    """What can offer a stream: an operator."""

    @property
    def shape(self) -> tuple[int, int, int, int]: ...

    @property
    def portion(self) -> Portion: ...

    def apply(self, v: Tensor) -> Tensor: ...

    def transpose(self, u: Tensor) -> Tensor: ...

    def stream(self, transposed: bool, longest: int) -> Stream | None: ...


def all_streams(
    operators: Iterable[Streamed], transposed: bool, longest: int
) -> list[Stream] | None:
    """The streams of several operators; None if one has none."""
    found = []
    for operator in operators:
        stream = operator.stream(transposed, longest)
        if stream is None:
            return None
        found.append(stream)
    return found


def channel_mean(operator: Streamed, x: Tensor, transposed: bool) -> Tensor:
    """The mean over channels of alpha x, or of alpha-transposed x, for ``x`` (B, L).

    Computed from a few tokens at a time, or from all at once if the operator has no stream.
    """
    return _reduced(operator, x, transposed, lambda y: y.mean((-1, -2)))


def channel_sums(operator: Streamed, x: Tensor, transposed: bool, weights: Tensor) -> Tensor:
    """As :func:`channel_mean`, but K sums over channels with weights (K, C), as (B, L, K)."""
    return _reduced(operator, x, transposed, lambda y: y.flatten(2) @ weights.to(y.dtype).T)


def _reduced(
    operator: Streamed, x: Tensor, transposed: bool, reduce: Callable[[Tensor], Tensor]
) -> Tensor:
    """What becomes of the outputs (B, T, H, P) for ``x`` (B, L), over all tokens."""
    batch, tokens, heads, per_head = operator.shape
    elements, most, multiple = operator.portion
    size = min(most, max(_FEWEST, elements // (batch * heads * per_head)))
    size = evenly(tokens, max(multiple, size - size % multiple), multiple)
    stream = operator.stream(transposed, size)
    if stream is None:
        mapped = operator.transpose if transposed else operator.apply
        return reduce(mapped(x[..., None, None].expand(operator.shape)))
    found = []
    for part in parts(tokens, size, transposed):
        same = x[:, part, None, None].expand(-1, -1, heads, per_head)
        found.append(reduce(stream(same, part)))
    return torch.cat(found[::-1] if transposed else found, 1)


def evenly(tokens: int, most: int, multiple: int = 1) -> int:
    """The size of as few parts as parts of ``most`` tokens make, but alike, a multiple each."""
    each = -(-tokens // -(-tokens // most))
    return -(-each // multiple) * multiple


def parts(tokens: int, size: int, backwards: bool) -> Iterator[slice]:
    """At most so many tokens at a time, the first or the last ones first."""
    starts = range(0, tokens, size)
    for start in reversed(starts) if backwards else starts:
        yield slice(start, min(start + size, tokens))


T = TypeVar("T")


def fitting(whole: range, size: int, form: Callable[[range], T]) -> Iterator[T]:
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
