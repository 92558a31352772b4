"""Changes to state that all threads share, each undone by the thread that made it, or by a fork.

A forked process goes on with one thread alone.  Changes by other threads would never be undone in
it: hooks, replaced functions, locks.
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
#: The changes that last, the latest last: the thread that made each, and the function to undo it.
_lasting: dict[object, tuple[int, Undo]] = {}


@contextmanager
def lasting(change: Callable[[], Undo]) -> Iterator[None]:
    """Change something for the time of a ``with``.

    If another thread forks the process meanwhile, the change is undone in the child.

    Args:
        change: makes the change and returns a function that undoes it; runs alone, under a lock.
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

    Pass its :meth:`enter` to :func:`lasting`; users may be nested and of any thread.
    """

    def __init__(self, change: Callable[[], Undo]) -> None:
        self._change = change
        self._users = 0
        self._undo: Undo | None = None

    def enter(self) -> Undo:
        """Count one user more, and return a function that counts one less."""
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
    """Undo, in a forked process, the changes of threads that do not exist there."""
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
