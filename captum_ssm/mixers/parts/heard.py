"""Outputs of the submodules of a mixer in its call, so that an adapter need not run them again.

Hooks at both ends of a submodule fill a :class:`Heard`, which :func:`known_output` reads.
"""

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
    """A submodule's call, as hooks at both its ends record it.

    Args:
        given: the module's input, before any other hook.
        verified: whether operators are checked against the mixer's output. Default: False.

    Attributes:
        given: the input.
        output: the module's output, after all other hooks; None if it must not be used. On a GPU
            kernels may write to tensors without a change of their version. There it is used only
            where operators are verified, and not when a call is repeated because one was wrong.
            Under autocast the module computes in another dtype than adapters. Default: None.
        is_its_own: whether no other hook changed the input or the output. Default: False.
    """

    def __init__(self, given: Tensor, verified: bool = False) -> None:
        self._verified = verified
        self.given = given.detach()
        self.output: Tensor | None = None
        self.is_its_own = False
        #: Versions of the input and the output, by which later writes to them are noticed.
        self._versions = _version(given), 0
        #: The input before other hooks, and the output before other hooks with its version; only
        #: during the call.
        self._entered: Any = given
        self._left: tuple[Any, int] = None, 0

    def ran(self, entered: Any, left: Any) -> None:
        """Record that the module has run; other hooks follow.

        Args:
            entered: the module's input, after hooks before it.
            left: the module's output, before hooks after it.
        """
        untouched = entered is self._entered and _version(self.given) == self._versions[0]
        reusable = untouched and self._is_reusable(left)
        self._left = (left, _version(left)) if reusable else (None, 0)

    def returned(self, output: Any) -> None:
        """Record the end of the call, after all hooks."""
        reusable = self._is_reusable(self.given) and self._is_reusable(output)
        if reusable and autocast_dtype(self.given.device) is None:
            self.output = output.detach()
            self._versions = self._versions[0], _version(output)
            self.is_its_own = output is self._left[0] and _version(output) == self._left[1]
        self._entered, self._left = None, (None, 0)

    @property
    def unchanged(self) -> Tensor | None:
        """The output; None if it, or the input, has been written to since."""
        output = self.output
        if output is None or (_version(self.given), _version(output)) != self._versions:
            return None
        return output

    def _is_reusable(self, x: Any) -> bool:
        """Return True if a tensor's later change would be noticed, or operators are verified."""
        if type(x) not in (Tensor, nn.Parameter) or x.is_inference():
            return False
        return x.device.type == "cpu" or (self._verified and are_noted(x))


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version


_heard: ContextVar[dict[nn.Module, Heard] | None] = ContextVar("heard", default=None)


@contextmanager
def telling(heard: dict[nn.Module, Heard]) -> Iterator[None]:
    """Let adapters use the outputs of submodules.

    Args:
        heard: the calls of submodules that ran once, until :func:`forget`.
    """
    token = _heard.set(heard)
    try:
        yield
    finally:
        _heard.reset(token)


def forget() -> None:
    """Release the outputs of submodules, which take much memory, when no adapter needs them."""
    heard = _heard.get()
    if heard is not None:
        heard.clear()


def known_output(module: nn.Module, x: Tensor) -> Tensor | None:
    """Return ``module(x)`` from the run, with a graph if ``x`` has one; None if unknown."""
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
    """Return True if tensors of one shape are equal; on a GPU, if they share memory."""
    if x.data_ptr() == given.data_ptr() and x.stride() == given.stride():
        return True
    return x.device.type == "cpu" and torch.equal(x, given)


def _is_product(module: nn.Module) -> bool:
    """Return True if a module's graph is one product with its weight: no bias, and no hooks."""
    return (
        type(module) is nn.Linear
        and module._parameters["bias"] is None
        and type(module.weight) in (Tensor, nn.Parameter)
        and not module._backward_hooks
        and not module._backward_pre_hooks
    )


class _KnownProduct(torch.autograd.Function):
    """The product of x and a transposed weight, whose result is known; only its backward runs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, known: list[Tensor]) -> Tensor:
        ctx.save_for_backward(weight.detach())
        return known[0].detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        with unseen():
            return grads[0] @ weight, None, None
