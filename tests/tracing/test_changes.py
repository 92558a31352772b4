"""Changes that last for a ``with``, and what becomes of them when the process forks."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from helpers.forks import FORKS, in_a_fork

from captum_ssm.tracing.changes import Undo, lasting

pytestmark = FORKS


class Shared:
    """Something that threads have in common: the names of those that have changed it."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def changed_by(self, name: str, seconds: float = 0) -> Any:
        def change() -> Undo:
            self.names.append(f"{name}, half done")
            time.sleep(seconds)
            self.names[-1] = name
            return lambda: self.names.remove(name)

        return lasting(change)


def test_a_change_lasts_for_the_block() -> None:
    shared = Shared()
    with shared.changed_by("a"), shared.changed_by("b"):
        assert shared.names == ["a", "b"]
    assert shared.names == []
    with pytest.raises(KeyError), shared.changed_by("a"):
        raise KeyError
    assert shared.names == []


def test_one_change_at_a_time() -> None:
    shared = Shared()

    def work(name: str) -> None:
        with shared.changed_by(name, seconds=0.05):
            assert not any("half" in each for each in shared.names)

    threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    time.sleep(0.02)
    with shared.changed_by("mine"):
        assert "mine" in shared.names and not any("half" in each for each in shared.names)
    for thread in threads:
        thread.join(20)
    assert shared.names == []


def test_a_change_that_fails_is_not_undone() -> None:
    def fail() -> Undo:
        raise KeyError

    with pytest.raises(KeyError), lasting(fail):
        pytest.fail("the block ran")
    with Shared().changed_by("a"):  # and the lock is open
        pass


@pytest.mark.parametrize("seconds", [0, 0.5], ids=["made", "being made"])
def test_a_forked_process_has_no_changes_of_other_threads(seconds: float) -> None:
    shared, leave = Shared(), threading.Event()

    def work() -> None:
        with shared.changed_by("the other's", seconds):
            leave.wait(60)

    def child() -> bool:
        mine = shared.names == ["mine"]
        with shared.changed_by("the child's"):
            return mine and shared.names == ["mine", "the child's"]

    thread = threading.Thread(target=work, daemon=True)
    with shared.changed_by("mine"):
        thread.start()
        while len(shared.names) < 2:
            time.sleep(0.001)
        assert in_a_fork(child)
        assert shared.names == ["mine", "the other's"]
        leave.set()
        thread.join(20)
    assert shared.names == []


def test_a_forked_process_goes_on_with_its_own() -> None:
    shared = Shared()
    first, second = shared.changed_by("a"), shared.changed_by("b")

    def child() -> list[list[str]]:
        found = [list(shared.names)]
        for change in (second, first):
            change.__exit__(None, None, None)
            found.append(list(shared.names))
        return found

    with first, second:
        assert in_a_fork(child) == [["a", "b"], ["a"], []]
        assert shared.names == ["a", "b"]
    assert shared.names == []
