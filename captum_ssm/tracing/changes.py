"""Changes to what all threads share, each undone by the thread that made it, or by a fork.

A forked process goes on with one thread alone.  What the others were in the middle of would stay
with it for good: hooks, replaced functions, locks that nobody opens any more.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

Undo: TypeAlias = Callable[[], None]

#: Held while something changes, and while the process forks.
_lock = threading.RLock()
#: What undoes the changes that last, the latest last, and the threads that made them.
_lasting: dict[object, tuple[int, Undo]] = {}


@contextmanager
def lasting(change: Callable[[], Undo]) -> Iterator[None]:
    """Change something for the time of a ``with``.

    If another thread forks the process meanwhile, the change is undone in the child.

    Args:
        change: makes the change and returns what undoes it; no other change happens meanwhile.
    """
    key = object()
    with _lock:
        _lasting[key] = threading.get_ident(), change()
    try:
        yield
    finally:
        with _lock:
            _, undo = _lasting.pop(key)
            undo()


class Shared:
    """A change that the first of its users makes and the last one undoes.

    Its :meth:`enter` is what :func:`lasting` wants, so that users may be nested and of any thread.
    """

    def __init__(self, change: Callable[[], Undo]) -> None:
        self._change = change
        self._users = 0
        self._undo: Undo | None = None

    def enter(self) -> Undo:
        """One user more; what is returned makes it one less."""
        if self._undo is None:
            self._undo = self._change()
        self._users += 1
        return self._leave

    def _leave(self) -> None:
        self._users -= 1
        if not self._users and self._undo is not None:
            undo, self._undo = self._undo, None
            undo()


def _undo_those_of_others() -> None:
    """Undo, in a forked process, what threads have changed that did not come along."""
    try:
        for key, (thread, undo) in reversed(list(_lasting.items())):
            if thread != threading.get_ident():
                del _lasting[key]
                undo()
    finally:
        _lock.release()


if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(
        before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_undo_those_of_others
    )
