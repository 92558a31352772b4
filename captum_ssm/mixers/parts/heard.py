"""What the modules of a mixer returned in its call, so that an adapter need not run them again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from ...operators.kernels.arithmetic import autocast_dtype, unseen
from ...operators.kernels.truths import are_noted


class Heard:
    """A module's call, as hooks at both its ends tell it.

    Args:
        given: what the module is given, before any other hook.
        verified: whether operators are held to what the mixer returns. Default: False.

    Attributes:
        given: that.
        output: what it returned, after all other hooks. None where that is not to be told: on other
            devices than the CPU kernels write to tensors without a word, so that it is told only
            where operators are verified, and not when all is done once more because one was wrong;
            and under autocast something else is computed than adapters ask for. Default: None.
        is_its_own: whether no other hook changed either of them. Default: False.
    """

    def __init__(self, given: Tensor, verified: bool = False) -> None:
        self._verified = verified
        self.given = given.detach()
        self.output: Tensor | None = None
        self.is_its_own = False
        self._versions = _version(given), 0
        self._entered: Any = given
        self._left: tuple[Any, int] = None, 0

    def ran(self, entered: Any, left: Any) -> None:
        """The module has run; other hooks follow.

        Args:
            entered: what hooks before it have made of what it was given.
            left: what it returned.
        """
        untouched = entered is self._entered and _version(self.given) == self._versions[0]
        told = untouched and self._is_told(left)
        self._left = (left, _version(left)) if told else (None, 0)

    def returned(self, output: Any) -> None:
        """The call ends."""
        own = self._is_told(self.given) and self._is_told(output)
        if own and autocast_dtype(self.given.device) is None:
            self.output = output.detach()
            self._versions = self._versions[0], _version(output)
            self.is_its_own = output is self._left[0] and _version(output) == self._left[1]
        self._entered, self._left = None, (None, 0)

    @property
    def unchanged(self) -> Tensor | None:
        """What was returned; None if somebody has written to it since, or to what was given."""
        output = self.output
        if output is None or (_version(self.given), _version(output)) != self._versions:
            return None
        return output

    def _is_told(self, x: Any) -> bool:
        if type(x) not in (Tensor, nn.Parameter) or x.is_inference():
            return False
        return x.device.type == "cpu" or (self._verified and are_noted(x))


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version


_heard: ContextVar[dict[nn.Module, Heard] | None] = ContextVar("heard", default=None)


@contextmanager
def telling(heard: dict[nn.Module, Heard]) -> Iterator[None]:
    """Let adapters be told what modules returned.

    Args:
        heard: the calls of those that ran once, until they are forgotten.
    """
    token = _heard.set(heard)
    try:
        yield
    finally:
        _heard.reset(token)


def forget() -> None:
    """Let go of what modules returned: of long inputs it takes much, and nobody asks any more."""
    heard = _heard.get()
    if heard is not None:
        heard.clear()


def told(module: nn.Module, x: Tensor) -> Tensor | None:
    """``module(x)`` as it was in the run; None where that has to be computed."""
    heard = (_heard.get() or {}).get(module)
    output = None if heard is None else heard.unchanged
    if heard is None or output is None or type(x) is not Tensor:
        return None
    if (x.shape, x.dtype) != (heard.given.shape, heard.given.dtype) or output.dtype != x.dtype:
        return None
    live = torch.is_grad_enabled() and x.requires_grad
    if live and not (heard.is_its_own and _is_product(module)):
        return None
    with unseen():
        if not _are_equal(x.detach(), heard.given):
            return None
        if not live:
            return output.detach()
        found: Tensor = _KnownProduct.apply(x, module.weight, [output])  # type: ignore[no-untyped-call]
        return found


def _are_equal(x: Tensor, given: Tensor) -> bool:
    """Whether two tensors of a shape hold the same; on a device, which is not asked, by memory."""
    if x.data_ptr() == given.data_ptr() and x.stride() == given.stride():
        return True
    return x.device.type == "cpu" and torch.equal(x, given)


def _is_product(module: nn.Module) -> bool:
    """Whether a module multiplies with its weight and adds nothing, which is all of its graph."""
    return (
        type(module) is nn.Linear
        and module._parameters["bias"] is None
        and type(module.weight) in (Tensor, nn.Parameter)
        and not module._backward_hooks
        and not module._backward_pre_hooks
    )


class _KnownProduct(torch.autograd.Function):
    """x times a transposed weight, where the result is known."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, known: list[Tensor]) -> Tensor:
        ctx.save_for_backward(weight.detach())
        return known[0].detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        with unseen():
            return grads[0] @ weight, None, None
