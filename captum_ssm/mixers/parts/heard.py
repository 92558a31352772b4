"""Recorded outputs of a mixer's submodules, so that an adapter need not run them again.

Hooks around a submodule fill a record; :func:`recorded_output` returns the recorded output.
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


class SubmoduleRecord:
    """The record of one submodule call, filled by hooks before and after the submodule.

    Args:
        given: input of the module, before any other hook.
        verified: whether operators are checked against the mixer's output. Default: False.

    Attributes:
        given: input of the module, detached.
        output: output of the module after all other hooks, or None if it must not be reused. On a
            GPU, kernels can change a tensor without changing its version, so outputs are reused
            only if operators are checked, and not when a call is repeated after a failed check.
            Under autocast outputs are not reused, because the dtype differs. Default: None.
        is_its_own: whether no other hook changed the input or the output. Default: False.
    """

    def __init__(self, given: Tensor, verified: bool = False) -> None:
        self._verified = verified
        self.given = given.detach()
        self.output: Tensor | None = None
        self.is_its_own = False
        #: Version counters of input and output; a later write to a tensor changes its counter.
        self._versions = _version(given), 0
        #: During the call: the input, and the output with its counter, both before other hooks.
        self._entered: Any = given
        self._left: tuple[Any, int] = None, 0

    def ran(self, entered: Any, left: Any) -> None:
        """Record the forward method's input and output, before other forward hooks run.

        Args:
            entered: input of the forward method, after all pre-hooks.
            left: output of the forward method, before other forward hooks.
        """
        untouched = entered is self._entered and _version(self.given) == self._versions[0]
        reusable = untouched and self._is_reusable(left)
        self._left = (left, _version(left)) if reusable else (None, 0)

    def returned(self, output: Any) -> None:
        """Record the output of the call, after all hooks."""
        reusable = self._is_reusable(self.given) and self._is_reusable(output)
        if reusable and autocast_dtype(self.given.device) is None:
            self.output = output.detach()
            self._versions = self._versions[0], _version(output)
            self.is_its_own = output is self._left[0] and _version(output) == self._left[1]
        self._entered, self._left = None, (None, 0)

    @property
    def unchanged(self) -> Tensor | None:
        """The output, or None if the output or the input was written to after the call."""
        output = self.output
        if output is None or (_version(self.given), _version(output)) != self._versions:
            return None
        return output

    def _is_reusable(self, x: Any) -> bool:
        """Return True if a later write to ``x`` is detectable, or if operators are checked."""
        if type(x) not in (Tensor, nn.Parameter) or x.is_inference():
            return False
        return x.device.type == "cpu" or (self._verified and are_noted(x))


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version


#: Recorded calls of submodules, in the context of :func:`reusing_outputs`.
_heard: ContextVar[dict[nn.Module, SubmoduleRecord] | None] = ContextVar("heard", default=None)


@contextmanager
def reusing_outputs(heard: dict[nn.Module, SubmoduleRecord]) -> Iterator[None]:
    """Return a context in which adapters reuse recorded outputs of submodules.

    Args:
        heard: records of submodules that were called once; :func:`forget` clears them.
    """
    token = _heard.set(heard)
    try:
        yield
    finally:
        _heard.reset(token)


def forget() -> None:
    """Release the recorded outputs, which take much memory, after the adapter has run."""
    heard = _heard.get()
    if heard is not None:
        heard.clear()


def recorded_output(module: nn.Module, x: Tensor) -> Tensor | None:
    """Return the recorded ``module(x)``, with a graph if ``x`` has one; None without a record."""
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
        found: Tensor = _RecordedProduct.apply(x, module.weight, [output])  # type: ignore[no-untyped-call]
        return found


def _are_equal(x: Tensor, given: Tensor) -> bool:
    """Return True if tensors with equal shapes are equal; on a GPU, only if they share memory."""
    if x.data_ptr() == given.data_ptr() and x.stride() == given.stride():
        return True
    return x.device.type == "cpu" and torch.equal(x, given)


def _is_product(module: nn.Module) -> bool:
    """Return True if a module is a plain linear layer without a bias and without backward hooks."""
    return (
        type(module) is nn.Linear
        and module._parameters["bias"] is None
        and type(module.weight) in (Tensor, nn.Parameter)
        and not module._backward_hooks
        and not module._backward_pre_hooks
    )


class _RecordedProduct(torch.autograd.Function):
    """Autograd function of x @ weight.T: forward returns the recorded result, backward computes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, known: list[Tensor]) -> Tensor:
        ctx.save_for_backward(weight.detach())
        return known[0].detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        with unseen():
            return grads[0] @ weight, None, None
