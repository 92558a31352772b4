"""A process that forks, and what another of its threads is in the middle of meanwhile."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Empty
from typing import Any

import pytest
import torch
from torch import nn

#: Marks of tests that fork.
FORKS = [
    pytest.mark.slow,
    pytest.mark.skipif(
        "fork" not in multiprocessing.get_all_start_methods(), reason="the system has no fork"
    ),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]


@contextmanager
def in_another_thread(model: nn.Module, work: Callable[[], Any]) -> Iterator[list[Any]]:
    """A thread that stands still in the model's last part; what it finds, once the block ends."""
    inside, go_on, found = threading.Event(), threading.Event(), []

    def stop(module: nn.Module, args: Any) -> None:
        if threading.current_thread() is thread:
            inside.set()
            go_on.wait(100)

    thread = threading.Thread(target=lambda: found.append(work()))
    *_, last = (module for module in model.modules() if not list(module.children()))
    with last.register_forward_pre_hook(stop):
        thread.start()
        assert inside.wait(60), "the thread never ran the model's last part"
        try:
            yield found
        finally:
            go_on.set()
            thread.join(60)


def in_a_fork(work: Callable[[], Any]) -> Any:
    """What the function returns in a forked process."""
    context = multiprocessing.get_context("fork")
    queue = context.Queue()

    def child() -> None:
        torch.set_num_threads(1)
        try:
            queue.put((work(), None))
        except BaseException as error:
            queue.put((None, repr(error)))

    process = context.Process(target=child)
    process.start()
    try:
        found, error = queue.get(timeout=60)
    except Empty:
        process.kill()
        pytest.fail("the forked process waits for ever")
    process.join(20)
    assert error is None, error
    return found
