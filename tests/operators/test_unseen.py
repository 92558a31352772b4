"""A mode is taken off torch's stack for a while, and all others stay in their places."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from captum_ssm.operators.kernels.arithmetic import unseen_by


class Named(TorchFunctionMode):
    """Notes its name, and hands on what is asked."""

    def __init__(self, name: str, seen: list[str]) -> None:
        super().__init__()
        self.name, self.seen = name, seen

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.seen.append(self.name)
        return func(*args, **(kwargs or {}))


def asked(seen: list[str]) -> str:
    """Who is asked of a function, the first one first."""
    one = torch.ones(1)
    seen.clear()
    torch.neg(one)
    return "".join(seen)


@pytest.mark.parametrize("which, left", [("a", "cb"), ("b", "ca"), ("c", "ba")])
def test_one_of_several(which: str, left: str) -> None:
    seen: list[str] = []
    a, b, c = (Named(name, seen) for name in "abc")
    with a, b, c:
        with unseen_by({"a": a, "b": b, "c": c}[which]):
            assert asked(seen) == left
        assert asked(seen) == "cba"
    assert asked(seen) == ""


def test_nested_and_repeated() -> None:
    seen: list[str] = []
    a, b, c = (Named(name, seen) for name in "abc")
    with a, b, c:
        with unseen_by(b), unseen_by(b), unseen_by(a):
            assert asked(seen) == "c"
            with unseen_by(c):
                assert asked(seen) == ""
            assert asked(seen) == "c"
        assert asked(seen) == "cba"


def test_a_mode_that_is_not_on() -> None:
    seen: list[str] = []
    a, other = Named("a", seen), Named("other", seen)
    with a:
        with unseen_by(other), unseen_by(None):
            assert asked(seen) == "a"
        assert asked(seen) == "a"


def test_modes_that_are_entered_or_left_meanwhile() -> None:
    seen: list[str] = []
    a, b, c, d = (Named(name, seen) for name in "abcd")
    with a, b:
        c.__enter__()
        away = unseen_by(b)
        with away:
            c.__exit__(None, None, None)
            assert asked(seen) == "a"
            d.__enter__()
        assert asked(seen) == "dba"
        d.__exit__(None, None, None)
        assert asked(seen) == "ba"


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_after_an_error(error: type[BaseException]) -> None:
    seen: list[str] = []
    a, b = Named("a", seen), Named("b", seen)
    with a, b:
        with pytest.raises(error), unseen_by(a):
            assert asked(seen) == "b"
            raise error
        assert asked(seen) == "ba"
    assert not _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
