"""The examples of a dataset that pass a filter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from .dataset import Example, Stream

#: At most so many examples are run at a time, so that neither a dataset without end nor a filter
#: that nothing passes keeps a search going for ever.
MOST_SEARCHED = 256

Seen = TypeVar("Seen")


@dataclass(frozen=True)
class Found(Generic[Seen]):
    """The examples that passed the filter.

    Attributes:
        examples: each with what the models that it passed for made of it.
        searched: how many examples were run.
        ended: whether the end of the dataset was met.
    """

    examples: list[tuple[Example, list[Seen]]]
    searched: int
    ended: bool


def search(
    stream: Stream,
    count: int,
    models: int,
    view: Callable[[Example, int], Seen | None],
    again: bool = False,
) -> Found[Seen]:
    """Goes on through a stream until enough examples passed, or the dataset ends.

    Args:
        stream: the examples.
        count: how many are enough.
        models: how many models there are.
        view: what the model of an index makes of an example; None if it does not pass.
        again: begin where the last search began. Default: False, where it ended.
    """
    found: list[tuple[Example, list[Seen]]] = []
    searched = 0
    for example in stream.page(again):
        searched += 1
        seen = [view(example, index) for index in range(models)]
        if passed := [one for one in seen if one is not None]:
            found.append((example, passed))
        if len(found) == count or searched == MOST_SEARCHED:
            break
    return Found(found, searched, stream.ended)
