"""Changes to state that all threads share, each undone by the thread that made it, or by a fork.

A forked process continues with one thread only. Changes by other threads would never be undone in
it: hooks, replaced functions, locks.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeAlias

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


class _ByThread:
    """A function in an attribute, which others replace in some threads.

    Attributes:
        original: the function itself.
        is_own: whether the holder had it, and not its class.
        others: the functions that replace it, by thread, the latest last.
    """

    def __init__(self, original: Callable[..., Any], is_own: bool) -> None:
        functools.update_wrapper(self, original, updated=())
        self.original = original
        self.is_own = is_own
        self.others: dict[int, list[Callable[..., Any]]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.current()(*args, **kwargs)

    def current(self) -> Callable[..., Any]:
        """Return the function of the calling thread."""
        return self.others.get(threading.get_ident(), [self.original])[-1]


def of_this_thread(holder: Any, name: str) -> Any:
    """Return the attribute that an object has in the calling thread; None if it has none."""
    held = getattr(holder, name, None)
    return held.current() if isinstance(held, _ByThread) else held


def instead(holder: Any, name: str, function: Callable[..., Any]) -> AbstractContextManager[None]:
    """Let the calling thread find a function in place of an object's attribute.

    Args:
        holder: the object.
        name: the attribute, a function.
        function: the other function.
    """
    thread, attributes = threading.get_ident(), vars(holder)

    def replace() -> Undo:
        if not isinstance(attributes.get(name), _ByThread):
            attributes[name] = _ByThread(getattr(holder, name), name in attributes)
        held = attributes[name]
        held.others.setdefault(thread, []).append(function)

        def restore() -> None:
            held.others[thread].pop()
            if not held.others[thread]:
                del held.others[thread]
            if not held.others and held.is_own:
                attributes[name] = held.original
            elif not held.others:
                del attributes[name]

        return restore

    return lasting(replace)


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
