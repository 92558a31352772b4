"""Truths that hold unless something is wrong, read from a device together.

A processor is asked at once.  A GPU makes the host wait until it has done all that it was told
before it answers, so that what is asked within :func:`read_together` is noted, taken to hold, and
read at the end.  Where something does not hold, all is done once more with every question answered
at once: what is raised, or done instead, is the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from .arithmetic import unseen

T = TypeVar("T")
#: How often it is looked for which tokens are reached.
_LOOKS = 2
#: Most elements of a tensor that is kept until it is looked at with all others of its kind.
_SMALL = 2**16


class _Noted(NamedTuple):
    """A number that may not exceed a limit, or where a size is given the limit times that."""

    number: Tensor
    limit: float
    size: Tensor | None = None

    @property
    def read(self) -> tuple[Tensor, ...]:
        """What has to be read to know."""
        return (self.number,) if self.size is None else (self.number, self.size)


#: What was noted, tensors among it that are to be finite; None where every question is answered at
#: once.
_noted: ContextVar[list[_Noted | Tensor] | None] = ContextVar("captum_ssm_truths", default=None)
#: What was read before in the same call, by what it is about.
_known: ContextVar[dict[Hashable, Any]] = ContextVar("captum_ssm_known")
#: Whether something that was noted did not hold.
_doubted: ContextVar[bool] = ContextVar("captum_ssm_doubted", default=False)


def read_together(call: Callable[[], T]) -> T:
    """What a call returns, of which what it takes to hold is read at its end."""
    if _noted.get() is not None or _doubted.get():
        return call()
    noted: list[_Noted | Tensor] = []
    before, known = _noted.set(noted), _known.set({})
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
        _known.reset(known)
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
    """Whether truths of a tensor are noted, and read later."""
    return _noted.get() is not None and x.device.type != "cpu"


def holds(truth: Tensor) -> bool:
    """Whether something holds, or is taken to."""
    return bool(truth) if not are_noted(truth) else at_most(~truth, 0.0)


def read_once(about: Hashable, read: Callable[[], T], of: Tensor | None = None) -> T:
    """What was read from a device, or is read now and known until the end of the call.

    Only where truths are noted: elsewhere it is read each time.

    Args:
        about: what it is about.
        read: reads it.
        of: the tensor that it follows from, which is kept and known by where it lies. Default:
            None, it is known by ``about`` alone.
    """
    if _noted.get() is None or (of is not None and not are_noted(of)):
        return read()
    if of is not None:
        version = 0 if of.is_inference() else of._version
        about = about, of.data_ptr(), version, of.shape, of.stride()
    known = _known.get()
    if about not in known:
        known[about] = read(), of
    found: T = known[about][0]
    return found


def reached(weights: Tensor) -> range:
    """From the first to the last token of weights (..., L) other than 0, or a range around them.

    On a device tokens are looked for twice for a question, the second time after mixers have mixed
    what was asked.  If none later than at first were reached then, as where tokens look back alone,
    none are taken to be reached any more; else all may be.
    """
    tokens = weights.shape[-1]
    ends: list[int] = read_once(("reached", tokens), list) if are_noted(weights) else []
    asked = _known.get({}).pop(("asked", tokens), None) if are_noted(weights) else None
    if asked is not None:  # the first question of a call, which the host has put together
        some: range = asked[0]
        ends.append(some.stop)
        return some
    given = weights.ne(0).reshape(-1, tokens).any(0)
    if ends and ("later", tokens) in _known.get({}):
        return range(tokens if looks_ahead(given, ends[0]) else ends[0])
    if len(ends) < _LOOKS:
        found = given.tolist()
        some = (
            range(found.index(True), tokens - found[::-1].index(True)) if any(found) else range(0)
        )
        ends.append(some.stop)
        return some
    first, last = ends
    if last > first:
        return range(tokens)
    holds(~given[first:].any())
    return range(first)


def looks_ahead(is_read: Tensor, until: int) -> bool:
    """Whether tokens read any later than themselves, which a device is asked once in a call.

    Args:
        is_read: which tokens (L,) some queries read.
        until: the token behind the last of the queries.
    """
    later = is_read[until:].any()
    if until == len(is_read) or read_once(("later", len(is_read)), lambda: bool(later)):
        return True
    holds(~later)
    return False


def ask_anew(tokens: int, asked: range | None) -> None:
    """Let tokens that are reached be looked for again, for another question of the same call.

    Args:
        tokens: how many there are.
        asked: from the first to the last token asked for, where the host knows; else None.
    """
    known = _known.get({})
    for about in [x for x in known if isinstance(x, tuple) and x[0] in ("reached", "asked")]:
        del known[about]
    if asked is not None and _noted.get() is not None:
        known[("asked", tokens)] = asked, None


def at_most(number: Tensor, limit: float) -> bool:
    """Whether a number is no larger than a limit, or is taken to be; NaN is larger than any."""
    noted = _noted.get()
    if noted is None or number.device.type == "cpu":
        return bool(number <= limit)
    noted.append(_Noted(number.detach(), limit))
    return True


class Ratio(NamedTuple):
    """A number per size, of a device on which truths are noted, so that it is read later.

    Attributes:
        number: it.
        size: at least 0.
        factor: what the ratio is multiplied with. Default: 1.0.
    """

    number: Tensor
    size: Tensor
    factor: float = 1.0

    def at_most(self, limit: float) -> bool:
        """Taken to hold; NaN is larger than any."""
        noted = _noted.get()
        assert noted is not None
        noted.append(_Noted(self.number.detach(), limit / self.factor, self.size.detach()))
        return True


def may_hold_any(x: Tensor) -> bool:
    """Whether anything but 0 may be in a tensor: of one on a device, which is not read, it may."""
    return x.device.type != "cpu" or bool(x.any())


def all_finite(x: Tensor) -> bool:
    """Whether no entry is NaN or infinite, or that is taken to hold.

    On a processor the least and the greatest entry tell, which takes a tenth of the time of asking
    them all.
    """
    if are_noted(x):
        return finite_together([x]) if x.numel() > _SMALL else _finite_later(x)
    with unseen():
        return not x.numel() or bool(torch.stack(torch.aminmax(x)).isfinite().all())


def _finite_later(x: Tensor) -> bool:
    noted = _noted.get()
    assert noted is not None
    noted.append(x.detach())
    return True


def finite_together(tensors: Iterable[Tensor]) -> bool:
    """Whether no entry of several tensors of one device is NaN or infinite, or is taken to be.

    Args:
        tensors: them; integers are passed over.
    """
    chosen = [x for x in tensors if x.numel() and x.is_floating_point()]
    return all(at_most(size, torch.finfo(size.dtype).max) for size in largest(chosen))


def largest(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The largest absolute entry of each of several tensors, by one launch for each dtype.

    Args:
        tensors: floating tensors of one device, none of them empty.
    """
    by_dtype: dict[torch.dtype, dict[int, Tensor]] = {}
    for place, x in enumerate(tensors):
        by_dtype.setdefault(x.dtype, {})[place] = x.detach()
    found: dict[int, Tensor] = {}
    with unseen():
        for alike in by_dtype.values():
            norms = torch._foreach_norm(list(alike.values()), math.inf)
            found.update(zip(alike, norms, strict=True))
    return [found[place] for place in sorted(found)]


def _all_hold(noted: list[_Noted | Tensor]) -> bool:
    """Whether no number exceeds its limit, and all is finite; each device is waited for once."""
    together: list[_Noted] = []
    small: dict[torch.device, list[Tensor]] = {}
    for each in noted:
        if isinstance(each, Tensor):
            small.setdefault(each.device, []).append(each)
        else:
            together.append(each)
    for tensors in small.values():
        sizes = largest(x for x in tensors if x.numel() and x.is_floating_point())
        together += [_Noted(size, torch.finfo(size.dtype).max) for size in sizes]
    alike: dict[torch.device, dict[torch.dtype, dict[int, Tensor]]] = {}
    for x in (x for each in together for x in each.read):
        alike.setdefault(x.device, {}).setdefault(x.dtype, {})[id(x)] = x
    known: dict[int, float] = {}
    with unseen():
        for by_dtype in alike.values():
            parts = [torch.stack(list(same.values())) for same in by_dtype.values()]
            numbers = torch.cat([part.float() for part in parts]).tolist()
            keys = (key for same in by_dtype.values() for key in same)
            known.update(zip(keys, numbers, strict=True))

    def holds_now(each: _Noted) -> bool:
        number, *size = (known[id(x)] for x in each.read)
        return number <= (each.limit * size[0] if size else each.limit)

    return all(map(holds_now, together))
