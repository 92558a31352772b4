"""Truths that hold unless something is wrong, read from a device together.

A processor is asked at once.  A GPU makes the host wait until it has done all that it was told
before it answers, so that what is asked within :func:`read_together` is noted, taken to hold, and
read at the end.  Where something does not hold, all is done once more with every question answered
at once: what is raised, or done instead, is the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import TypeVar

import torch
from torch import Tensor

from .arithmetic import unseen

T = TypeVar("T")
_Noted = tuple[Tensor, float]

#: Numbers that were noted, and what each may not exceed; None where every question is answered at
#: once.
_noted: ContextVar[list[_Noted] | None] = ContextVar("captum_ssm_truths", default=None)
#: Whether something that was noted did not hold.
_doubted: ContextVar[bool] = ContextVar("captum_ssm_doubted", default=False)


def read_together(call: Callable[[], T]) -> T:
    """What a call returns, of which what it takes to hold is read at its end.

    Args:
        call: may be made twice.
    """
    if _noted.get() is not None or _doubted.get():
        return call()
    noted: list[_Noted] = []
    before = _noted.set(noted)
    try:
        found = call()
    except Exception:
        if _all_hold(noted):
            raise
    else:
        if _all_hold(noted):
            return found
        del found
    finally:
        _noted.reset(before)
    noted.clear()
    again = _doubted.set(True)
    try:
        return call()
    finally:
        _doubted.reset(again)


def is_doubted() -> bool:
    """Whether what was made before may rest on something that does not hold."""
    return _doubted.get()


def are_noted(x: Tensor) -> bool:
    """Whether truths of a tensor are noted, and read later.

    Args:
        x: any tensor.
    """
    return _noted.get() is not None and x.device.type != "cpu"


def holds(truth: Tensor) -> bool:
    """Whether something holds, or is taken to.

    Args:
        truth: one truth value.
    """
    return bool(truth) if not are_noted(truth) else at_most(~truth, 0.0)


def at_most(number: Tensor, limit: float) -> bool:
    """Whether a number is no larger than a limit, or is taken to be; NaN is larger than any.

    Args:
        number: it.
        limit: the limit.
    """
    noted = _noted.get()
    if noted is None or number.device.type == "cpu":
        return bool(number <= limit)
    noted.append((number.detach(), limit))
    return True


def may_hold_any(x: Tensor) -> bool:
    """Whether anything but 0 may be in a tensor: of one on a device, which is not read, it may.

    Args:
        x: the tensor.
    """
    return x.device.type != "cpu" or bool(x.any())


def all_finite(x: Tensor) -> bool:
    """Whether no entry is NaN or infinite, or that is taken to hold.

    On a processor the least and the greatest entry tell, which takes a tenth of the time of asking
    them all.
    """
    if are_noted(x):
        return finite_together([x])
    with unseen():
        return not x.numel() or bool(torch.stack(torch.aminmax(x)).isfinite().all())


def finite_together(tensors: Iterable[Tensor]) -> bool:
    """Whether no entry of several tensors of one device is NaN or infinite, or is taken to be.

    Args:
        tensors: them; integers are passed over.
    """
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for x in tensors:
        if x.numel() and x.is_floating_point():
            by_dtype.setdefault(x.dtype, []).append(x.detach())
    with unseen():
        # the largest entries, all of them in one launch
        norms = [n for xs in by_dtype.values() for n in torch._foreach_norm(xs, math.inf)]
        return all(at_most(norm, torch.finfo(norm.dtype).max) for norm in norms)


def _all_hold(noted: list[_Noted]) -> bool:
    """Whether no number exceeds its limit; each device is waited for once."""
    alike: dict[torch.device, dict[torch.dtype, list[_Noted]]] = {}
    for number, limit in noted:
        alike.setdefault(number.device, {}).setdefault(number.dtype, []).append((number, limit))
    with unseen():
        for by_dtype in alike.values():
            parts = [torch.stack([x for x, _ in of_one]) for of_one in by_dtype.values()]
            numbers = torch.cat([part.float() for part in parts]).tolist()
            limits = [limit for of_one in by_dtype.values() for _, limit in of_one]
            if not all(x <= limit for x, limit in zip(numbers, limits, strict=True)):
                return False
    return True
