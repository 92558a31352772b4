"""Cutting a batch into parts, with everything that has one entry per example."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from ..errors import OptionError, PaddedExampleError
from .targets import Against


class Cut:
    """Takes the same examples out of everything that has one entry per example."""

    def __init__(self, part: slice, batch: int) -> None:
        self.part, self.batch = part, batch

    def __call__(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.dim() > 0 and len(value) == self.batch:
            value = value[self.part]
            return value.clone() if value.is_inference() else value
        return value

    def target(self, target: Any) -> Any:
        if isinstance(target, Against):
            return Against(self.target(target.target), self.target(target.contrast))
        per_example = isinstance(target, list) or getattr(target, "ndim", 0) > 0
        if per_example and not isinstance(target, Tensor) and len(target) == self.batch:
            return target[self.part]
        return self(target)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Let an error that names an example of the part name it by its number in the batch."""
        try:
            yield
        except PaddedExampleError as error:
            raise PaddedExampleError(self.part.start + error.example) from None


def cuts(batch: int, internal_batch_size: int | None) -> Iterator[Cut]:
    """The parts of a batch, of at most ``internal_batch_size`` examples each; None: one part."""
    size = batch if internal_batch_size is None else internal_batch_size
    if size < 1:
        raise OptionError(f"internal_batch_size={internal_batch_size} must be at least 1.")
    for start in range(0, batch, size):
        yield Cut(slice(0, batch) if size >= batch else slice(start, start + size), batch)
