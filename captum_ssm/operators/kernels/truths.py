"""Checks of tensors whose results are read from a GPU together at the end of a call.

On a CPU a check is evaluated immediately.  Reading a result from a GPU makes the CPU wait for all
of the GPU's work.  A check on a GPU within :func:`read_together` is therefore *noted*: it counts as
true, and its result is read at the end of the call.  If a noted check is false then, the call is
repeated with every check evaluated immediately, as on a CPU.
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
#: How often :func:`nonzero_range` reads from a GPU for one query.
_LOOKS = 2
#: Largest number of elements for which a noted tensor is stored, and not only the tensor's norm.
_SMALL = 2**16


class _Noted(NamedTuple):
    """A check that ``value`` is at most ``limit``, or ``limit * size`` if ``size`` is set."""

    value: Tensor
    limit: float
    size: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors to read from the device to evaluate the check."""
        return (self.value,) if self.size is None else (self.value, self.size)


#: The noted checks; a tensor is a check that it is finite. None outside :func:`read_together`.
_noted: ContextVar[list[_Noted | Tensor] | None] = ContextVar("captum_ssm_truths", default=None)
#: Results that were already read in the same call, by key.
_already_read: ContextVar[dict[Hashable, Any]] = ContextVar("captum_ssm_known")
#: Whether the call is being repeated because a noted check failed.
_doubted: ContextVar[bool] = ContextVar("captum_ssm_doubted", default=False)


def read_together(call: Callable[[], T]) -> T:
    """Return ``call()``; read its noted checks at the end, and repeat the call if one failed."""
    if _noted.get() is not None or _doubted.get():  # part of such a call, or of a repeated one
        return call()
    noted: list[_Noted | Tensor] = []
    noted_token, read_token = _noted.set(noted), _already_read.set({})
    try:
        result = call()
    except Exception:  # if a noted check is false, it may have caused the error
        if _all_hold(noted):
            raise
    else:
        if _all_hold(noted):
            return result
        del result
    finally:
        _noted.reset(noted_token)
        _already_read.reset(read_token)
    noted.clear()
    doubted_token = _doubted.set(True)
    try:
        return call()
    finally:
        _doubted.reset(doubted_token)


def is_doubted() -> bool:
    """Return True if the call is being repeated because a noted check failed."""
    return _doubted.get()


def are_noted(x: Tensor) -> bool:
    """Return True if checks of a tensor are noted, that is, read only at the end of the call."""
    return _noted.get() is not None and x.device.type != "cpu"


def holds(truth: Tensor) -> bool:
    """Return True if ``truth``, a tensor of one boolean, is true; a noted check counts as true."""
    return bool(truth) if not are_noted(truth) else at_most(~truth, 0.0)


def read_once(key: Hashable, read: Callable[[], T], of: Tensor | None = None) -> T:
    """Return ``read()``; within :func:`read_together` call ``read`` only once for each key.

    Args:
        key: key of the result.
        read: function that reads the result from a device.
        of: tensor that the result depends on; its memory address becomes part of the key. Default:
            None, it does not.
    """
    if _noted.get() is None or (of is not None and not are_noted(of)):  # no GPU to wait for
        return read()
    if of is not None:
        # an operation in place raises the version, so the key changes; inference tensors have none
        version = 0 if of.is_inference() else of._version
        key = key, of.data_ptr(), version, of.shape, of.stride()
    results = _already_read.get()
    if key not in results:
        results[key] = read(), of  # ``of`` is stored, so that no new tensor gets its address
    result: T = results[key][0]
    return result


def nonzero_range(weights: Tensor) -> range:
    """Return the range from the first to the last nonzero weight (..., L), or a wider range.

    From a GPU the weights are read twice per query, the second time after mixers have mixed tokens.
    If no later tokens have nonzero weights by then, as in causal models, later calls assume that
    none will (a noted check); otherwise they return all tokens.
    """
    tokens = weights.shape[-1]
    # ends of the ranges already returned for this query; read_once returns the same list each time
    ends: list[int] = read_once(("reached", tokens), list) if are_noted(weights) else []
    known = _already_read.get({}).pop(("queried", tokens), None) if are_noted(weights) else None
    if known is not None:  # the first weights of a query that begin_query stored
        tokens_read: range = known[0]
        ends.append(tokens_read.stop)
        return tokens_read
    nonzero = weights.ne(0).reshape(-1, tokens).any(0)
    if ends and ("later", tokens) in _already_read.get({}):  # read by looks_ahead
        return range(tokens if looks_ahead(nonzero, ends[0]) else ends[0])
    if len(ends) < _LOOKS:  # on a CPU always
        flags = nonzero.tolist()
        tokens_read = (
            range(flags.index(True), tokens - flags[::-1].index(True)) if any(flags) else range(0)
        )
        ends.append(tokens_read.stop)
        return tokens_read
    first, last = ends  # before mixing, and after
    if last > first:
        return range(tokens)
    holds(~nonzero[first:].any())  # noted, and read at the end of the call
    return range(first)


def looks_ahead(is_read: Tensor, stop: int) -> bool:
    """Return True if queries depend on tokens after them; read from a GPU once per call.

    Args:
        is_read: True for tokens that any query depends on (L,).
        stop: index of the token after the last query.
    """
    later = is_read[stop:].any()
    if stop == len(is_read) or read_once(("later", len(is_read)), lambda: bool(later)):
        return True
    holds(~later)
    return False


def begin_query(tokens: int, query: range | None) -> None:
    """Make :func:`nonzero_range` read weights again, for a new query of the same call.

    Args:
        tokens: number of tokens, L.
        query: range from the query's first to its last token, or None if it is only on a GPU.
    """
    results = _already_read.get({})
    for key in [x for x in results if isinstance(x, tuple) and x[0] in ("reached", "queried")]:
        del results[key]
    if query is not None and _noted.get() is not None:
        results[("queried", tokens)] = query, None  # a result and no tensor, as read_once stores


def at_most(value: Tensor, limit: float) -> bool:
    """Return True if value <= limit (False for NaN), or if the check is noted to be read later."""
    noted = _noted.get()
    if noted is None or value.device.type == "cpu":
        return bool(value <= limit)
    noted.append(_Noted(value.detach(), limit))
    return True


class Ratio(NamedTuple):
    """The ratio factor * number / size on a GPU, where checks are noted and read later.

    Attributes:
        number: the numerator.
        size: the denominator, at least 0.
        factor: scalar that multiplies the ratio. Default: 1.0.
    """

    number: Tensor
    size: Tensor
    factor: float = 1.0

    def at_most(self, limit: float) -> bool:
        """Note the check that the ratio is at most a limit, to be read later, and return True."""
        noted = _noted.get()
        assert noted is not None
        noted.append(_Noted(self.number.detach(), limit / self.factor, self.size.detach()))
        return True


def may_hold_any(x: Tensor) -> bool:
    """Return False only if all entries are zero; True on a GPU, to avoid waiting for it."""
    return x.device.type != "cpu" or bool(x.any())


def all_finite(x: Tensor) -> bool:
    """Return True if no entry is NaN or infinite, or if the check is noted to be read later.

    On a CPU only the minimum and the maximum are checked, which takes a tenth of the time.
    """
    if are_noted(x):
        return finite_together([x]) if x.numel() > _SMALL else _finite_later(x)
    with unseen():
        return not x.numel() or all(math.isfinite(limit.item()) for limit in torch.aminmax(x))


def _finite_later(x: Tensor) -> bool:
    """Note the check that a small tensor is finite, to be read later, and return True."""
    noted = _noted.get()
    assert noted is not None
    noted.append(x.detach())
    return True


def finite_together(tensors: Iterable[Tensor]) -> bool:
    """Return True if tensors are finite, or if the check is noted to be read later.

    Args:
        tensors: tensors on one device; integer tensors are skipped.
    """
    floating = [x for x in tensors if x.numel() and x.is_floating_point()]
    return all(at_most(size, torch.finfo(size.dtype).max) for size in largest(floating))


def largest(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the largest absolute entry of each tensor, with one launch for each dtype.

    Args:
        tensors: floating-point tensors on one device, none of them empty.
    """
    by_dtype: dict[torch.dtype, dict[int, Tensor]] = {}
    for index, x in enumerate(tensors):
        by_dtype.setdefault(x.dtype, {})[index] = x.detach()
    norm_by_index: dict[int, Tensor] = {}
    with unseen():
        for same_dtype in by_dtype.values():
            norms = torch._foreach_norm(list(same_dtype.values()), math.inf)
            norm_by_index.update(zip(same_dtype, norms, strict=True))
    return [norm_by_index[index] for index in sorted(norm_by_index)]


def _all_hold(noted: list[_Noted | Tensor]) -> bool:
    """Return True if all noted checks hold, after waiting for each GPU once."""
    checks: list[_Noted] = []
    small_tensors: dict[torch.device, list[Tensor]] = {}  # to be checked for finite entries
    for check in noted:
        if isinstance(check, Tensor):
            small_tensors.setdefault(check.device, []).append(check)
        else:
            checks.append(check)
    for tensors in small_tensors.values():
        sizes = largest(x for x in tensors if x.numel() and x.is_floating_point())
        # false for infinite sizes and NaN
        checks += [_Noted(size, torch.finfo(size.dtype).max) for size in sizes]
    value_by_id = _read_values(x for check in checks for x in check.tensors)

    def holds_now(check: _Noted) -> bool:
        """Compare the check's value, now on the CPU, with its limit."""
        value, *size = (value_by_id[id(x)] for x in check.tensors)
        return value <= (check.limit * size[0] if size else check.limit)

    return all(map(holds_now, checks))


def _read_values(scalars: Iterable[Tensor]) -> dict[int, float]:
    """Return the values of tensors of one element, by ``id``, with one copy for each device."""
    # keyed by id, so that a tensor that several checks share is read once; one stack per dtype
    by_device: dict[torch.device, dict[torch.dtype, dict[int, Tensor]]] = {}
    for x in scalars:
        by_device.setdefault(x.device, {}).setdefault(x.dtype, {})[id(x)] = x
    value_by_id: dict[int, float] = {}
    with unseen():
        for by_dtype in by_device.values():
            stacks = [torch.stack(list(same_dtype.values())) for same_dtype in by_dtype.values()]
            values = torch.cat([stack.float() for stack in stacks]).tolist()
            ids = (key for same_dtype in by_dtype.values() for key in same_dtype)
            value_by_id.update(zip(ids, values, strict=True))
    return value_by_id
