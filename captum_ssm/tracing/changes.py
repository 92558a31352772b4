"""Change state that all threads share, and undo each change in its own thread or after a fork.

A forked process has only one thread, so the other threads cannot undo their changes there, such as
hooks and replaced functions. The forked process undoes these changes itself.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeAlias

Undo: TypeAlias = Callable[[], None]

#: Acquired while a change is made or undone, and while the process forks.
_lock = threading.RLock()
#: The changes in effect, latest last: the thread that made the change, and the undo function.
_lasting: dict[object, tuple[int, Undo]] = {}


@contextmanager
def lasting(change: Callable[[], Undo]) -> Iterator[None]:
    """Make a change for the duration of a ``with``.

    If another thread forks the process meanwhile, the change is undone in the child.

    Args:
        change: a function that makes the change and returns an undo function. Called under a lock.
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
    """A change that is made when the first user enters and undone when the last user leaves.

    Pass :meth:`enter` to :func:`lasting`. Users may be nested, and may be in different threads.
    """

    def __init__(self, change: Callable[[], Undo]) -> None:
        self._change = change
        self._users = 0
        self._undo: Undo | None = None

    def enter(self) -> Undo:
        """Register one more user, and return the function that unregisters this user."""
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
    """A function, stored as an attribute, that calls a replacement in some threads.

    Attributes:
        original: the function for all threads without a replacement.
        was_instance_attribute: whether the object itself, not only its class, had the attribute.
        replacements: the replacement functions of each thread, latest last.
    """

    def __init__(self, original: Callable[..., Any], was_instance_attribute: bool) -> None:
        functools.update_wrapper(self, original, updated=())
        self.original = original
        self.was_instance_attribute = was_instance_attribute
        self.replacements: dict[int, list[Callable[..., Any]]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.current()(*args, **kwargs)

    def current(self) -> Callable[..., Any]:
        """Return the function of the calling thread."""
        return self.replacements.get(threading.get_ident(), [self.original])[-1]


def value_in_thread(holder: Any, name: str) -> Any:
    """Return the attribute's value for the calling thread; None if there is no such attribute."""
    value = getattr(holder, name, None)
    return value.current() if isinstance(value, _ByThread) else value


def replaced_in_thread(
    holder: Any, name: str, function: Callable[..., Any]
) -> AbstractContextManager[None]:
    """Replace the attribute ``name`` by a function, for the calling thread only, in a ``with``."""
    thread, own_attributes = threading.get_ident(), vars(holder)

    def replace() -> Undo:
        """Add the function to the attribute's dispatcher; the first user makes the dispatcher."""
        if not isinstance(own_attributes.get(name), _ByThread):  # which is not the original
            own_attributes[name] = _ByThread(getattr(holder, name), name in own_attributes)
        dispatcher = own_attributes[name]
        dispatcher.replacements.setdefault(thread, []).append(function)

        def restore() -> None:  # with ``thread``, as a forked process may call it in another
            dispatcher.replacements[thread].pop()  # a thread's contexts nest: the latest is ours
            if not dispatcher.replacements[thread]:
                del dispatcher.replacements[thread]
            if not dispatcher.replacements and dispatcher.was_instance_attribute:
                own_attributes[name] = dispatcher.original
            elif not dispatcher.replacements:
                del own_attributes[name]

        return restore

    return lasting(replace)


def _undo_other_threads() -> None:
    """In a forked process, undo the changes of all threads that do not exist there."""
    try:
        for key, (thread, undo) in reversed(list(_lasting.items())):
            if thread != threading.get_ident():
                del _lasting[key]
                undo()
    finally:
        _lock.release()  # acquired before the fork


if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(
        before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_undo_other_threads
    )
