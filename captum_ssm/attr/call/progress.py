"""One progress bar per call of a method.

A nested step fills its fraction of the outer step, so the bar shows the time left for the call.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from captum._utils.progress import progress
from torch import Tensor, nn

from . import checks

T = TypeVar("T")

_FORMAT = "{l_bar}{bar:10}| {elapsed}<{remaining}{postfix}"
#: Seconds between two refreshes of the bar.
_TICK = 1.0


class _Bar:
    """A bar of length 1, the start and size of the current step, and labels of all open steps."""

    def __init__(self, description: str) -> None:
        self.tqdm: Any = progress(
            desc=description, total=1.0, bar_format=_FORMAT, mininterval=0.1, dynamic_ncols=True
        )
        self.start, self.size, self.labels = 0.0, 1.0, list[str]()
        self._ended = threading.Event()
        threading.Thread(target=self._tick, daemon=True).start()

    def _tick(self) -> None:
        """Redraw the bar every second, until it ends; runs in a thread."""
        while not self._ended.wait(_TICK):
            self.tqdm.refresh()

    def show(self, *labels: str, done: float = 0.0) -> None:
        """Move the bar to the fraction ``done`` of the current step, and show the labels."""
        self.tqdm.set_postfix_str(", ".join(filter(None, [*self.labels, *labels])), refresh=False)
        self.tqdm.update(max(0.0, self.start + done * self.size - self.tqdm.n))  # never back

    def end(self, *, is_complete: bool) -> None:
        """Close the bar; fill it first if the call is complete."""
        self._ended.set()
        if is_complete:
            self.tqdm.set_postfix_str("", refresh=False)
            self.tqdm.update(1.0 - self.tqdm.n)
        self.tqdm.close()


_current: ContextVar[_Bar | None] = ContextVar("bar", default=None)


@contextmanager
def bar(description: str, show: bool) -> Iterator[None]:
    """Show a bar inside the ``with``, unless an outer call shows one or ``show`` is False."""
    checks.flags(show_progress=show)
    if not show or _current.get() is not None:
        yield
        return
    new_bar = _Bar(description)
    token, is_complete = _current.set(new_bar), False
    try:
        yield
        is_complete = True
    finally:
        _current.reset(token)
        new_bar.end(is_complete=is_complete)


@contextmanager
def step(number: int, count: int, label: str = "") -> Iterator[None]:
    """Mark the ``with`` as step ``number`` of ``count`` equal parts of the current outer step."""
    active = _current.get()
    if active is None:
        yield
        return
    outer_start, outer_size = active.start, active.size
    active.start, active.size = outer_start + outer_size * number / count, outer_size / count
    active.labels.append(label)
    active.show()
    try:
        yield
        active.start += active.size  # the step is complete; not reached after an error
    finally:
        active.labels.pop()
        if active.start > outer_start + outer_size * number / count:  # the step is complete
            active.show()
        active.start, active.size = outer_start, outer_size


def shown(items: Sequence[T], labels: Sequence[str] | None = None) -> Iterator[T]:
    """Yield items as steps of the bar; the default labels are like ``step 3 of 24``."""
    for number, item in enumerate(items):
        default = f"step {number + 1} of {len(items)}" if len(items) > 1 else ""
        with step(number, len(items), default if labels is None else labels[number]):
            yield item


@contextmanager
def counting_runs(model: nn.Module, expected: int | None) -> Iterator[None]:
    """Show the number of model runs in the bar, for methods that make their own steps.

    Args:
        model: the model.
        expected: the number of examples in all runs together, by which the bar moves. None if it is
            unknown.
    """
    active, runs, examples = _current.get(), 0, 0  # runs of the model, and their examples, so far
    if active is None:
        yield
        return

    def count_run(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Forward hook: count the run, and its examples by the first tensor with dimensions."""
        nonlocal runs, examples
        runs, tensors = runs + 1, (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        examples += len(next((x for x in tensors if x.dim()), ()))
        active.show(f"run {runs}", done=min(1.0, examples / expected) if expected else 0.0)
        active.tqdm.refresh()

    handle = model.register_forward_hook(count_run, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
