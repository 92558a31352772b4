"""Record the constants of a linear network, and each constant's contribution to the target.

With every coefficient frozen a network is affine in its input: a linear map plus constants, such as
biases, position embeddings and class tokens. The backward pass for the relevance of the input also
computes the gradient of each constant. Gradient times constant is the constant's contribution. The
contributions of the input and of all constants add up to the output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..operators.kernels.arithmetic import unseen
from ..operators.kernels.truths import may_hold_any

#: Receives a constant's gradient, its value, and the name of the module that added it.
Entry = Callable[[Tensor, Tensor, str], None]

#: Constants of this size or more are masks that hide tokens from a softmax, not biases.
_MASK = 1e4


class Ledger:
    """Records the constants that are added in the graph of a network linear in its input.

    A backward pass then passes each constant, its gradient and the name of the module that added
    the constant to the function set by :meth:`entries_to`.

    Args:
        where: a function that returns the name of the running module, or the function's argument
            if no module is running.
        kept: whether constants stay in the network. Masks and Python scalars, such as the epsilon
            added to a variance, always stay. Default: True.

    Attributes:
        leaves: constants that are leaves of the graph. A backward pass must ask for their
            gradients, or these constants are not recorded.
        within: the name of the block that runs again by its ``forward``, which module calls do not
            show. Default: ``""``, none.

    Example:
        >>> import torch
        >>> from captum_ssm.linear import Ledger
        >>> ledger, found = Ledger(where=lambda block: "head"), {}
        >>> x, bias = torch.ones(2, requires_grad=True), torch.tensor(3.0)
        >>> y = ledger.included(2 * x + bias, bias)
        >>> with ledger.entries_to(lambda grad, b, name: found.update({name: grad * b})):
        ...     y.sum().backward()
        >>> found["head"].tolist()
        [3.0, 3.0]
    """

    def __init__(self, where: Callable[[str], str], kept: bool = True) -> None:
        self.kept = kept
        self.leaves: list[Tensor] = []
        self.within = ""
        self._where = where
        self._entry: Entry | None = None

    def where(self) -> str:
        """Return the name of the module that is running."""
        return self._where(self.within)

    def included(self, out: Tensor, constant: Tensor) -> Tensor:
        """Record that ``constant`` is a summand of ``out``, and return ``out``.

        If constants are not kept, return ``out`` without ``constant``.

        Args:
            out: a tensor of the graph.
            constant: the constant, broadcastable to ``out``.
        """
        with unseen():
            constant = shrink_repeats(constant.detach())
            if not self.kept:  # masks stay
                out = out - _without_masks(constant)
                constant = constant - _without_masks(constant)
                if not may_hold_any(constant):
                    return out
            self.record(out, constant)
            return out

    def included_in(self, out: Tensor, constant: Tensor) -> None:
        """Record ``constant`` as a summand of ``out``, changed in place; subtract it if not kept.

        Args:
            out, constant: the arguments of :meth:`included`.
        """
        constant = constant.detach()
        if out._is_view():  # hooks on it miss later gradients of the whole tensor
            out, constant = _place_in_base(out, constant)
        if not self.kept:
            out.sub_(_without_masks(constant))
            constant = constant - _without_masks(constant)
            if not may_hold_any(constant):
                return
        self.record(out, constant)

    def record(self, out: Tensor, constant: Tensor, module_name: str | None = None) -> None:
        """Hook ``out``, so that a backward pass reports ``constant`` with the gradient at ``out``.

        Args:
            out, constant: as in :meth:`included`, but ``constant`` always stays in ``out``.
            module_name: the name to report. Default: None, the name of the running module.
        """
        if not out.requires_grad:  # results under no_grad are coefficients
            return
        reported_name, shape = self.where() if module_name is None else module_name, out.shape
        # if ``out`` is a view that is changed in place later, hooks on it do not run
        _base_if_reshaped(out).register_hook(  # type: ignore[no-untyped-call]
            lambda gradient: self.write(gradient.reshape(shape), constant, reported_name)
        )

    @contextmanager
    def entries_to(self, entry: Entry) -> Iterator[None]:
        """Pass the constants of backward passes inside the ``with`` to ``entry``.

        Args:
            entry: a function of a constant's gradient, value and module name.
        """
        outer_entry, self._entry = self._entry, entry
        try:
            yield
        finally:
            self._entry = outer_entry

    def write_rest(self, rest: Tensor) -> None:
        """Pass reference values' contribution (B,), as a constant with gradient 1, to the entry."""
        if self._entry is not None:
            self._entry(torch.ones_like(rest), rest.detach(), "references")

    def write(self, gradient: Tensor, constant: Tensor, module_name: str) -> None:
        """Pass a constant and its gradient to the function set by :meth:`entries_to`, if any."""
        if self._entry is not None:
            self._entry(gradient.detach(), constant, module_name)


def _place_in_base(view: Tensor, constant: Tensor) -> tuple[Tensor, Tensor]:
    """Return the base of a view, and zeros of the base's shape with ``constant`` in the view."""
    base = view._base
    assert base is not None
    placed = torch.zeros_like(base)
    offset = view.storage_offset() - base.storage_offset()
    placed.as_strided(view.size(), view.stride(), offset).copy_(constant)
    return base, placed


def _base_if_reshaped(out: Tensor) -> Tensor:
    """Return the tensor to hook for ``out``: its base if ``out`` only reshapes the base.

    If a view is changed in place later, its gradient arrives at the base, and hooks on the view do
    not run.
    """
    base = out._base
    if base is None or not base.requires_grad or base.numel() != out.numel():
        return out
    return base if base.is_contiguous() and out.is_contiguous() else out


def _without_masks(constant: Tensor) -> Tensor:
    """Replace the masks in a constant by zeros; the other entries can be dropped."""
    return torch.where(constant.abs() < _MASK, constant, torch.zeros_like(constant))


def divide_gradient(product: Tensor, factors: int) -> Tensor:
    """Return ``product``; backward divides the gradient by ``factors``, to share it equally."""
    if not product.requires_grad:
        return product
    product.register_hook(  # type: ignore[no-untyped-call]
        lambda gradient: gradient / factors
    )
    # a view, so that a gradient taken at the returned tensor itself is not divided
    return product.view_as(product)


def shrink_repeats(constant: Any) -> Any:
    """Shrink an expanded tensor to size 1 along the dimensions in which its values repeat.

    Args:
        constant: the tensor. Anything else is returned unchanged.
    """
    if isinstance(constant, Tensor):
        for dim, stride in enumerate(constant.stride()):
            if stride == 0 and constant.shape[dim] > 1:
                constant = constant.narrow(dim, 0, 1)
    return constant


def contribution(gradient: Tensor, constant: Tensor) -> Tensor:
    """Return gradient times constant for each example, summed where the constant repeats.

    If the gradient is 0 the contribution is 0, even for an infinite constant.

    Args:
        gradient: the gradient (B, ...) at the tensor to which the constant was added.
        constant: the constant, broadcastable to the gradient.

    Returns:
        The product, summed over all dimensions after the first along which the constant repeats.

    Example:
        >>> import torch
        >>> from captum_ssm.linear import contribution
        >>> bias = torch.tensor([1.0, 2.0, 3.0])  # of all 4 tokens
        >>> contribution(torch.ones(1, 4, 3), bias).tolist()
        [[[4.0, 8.0, 12.0]]]
    """
    missing = gradient.dim() - constant.dim()
    repeated = [
        dim
        for dim in range(1, gradient.dim())
        if dim < missing or (constant.shape[dim - missing] == 1 and gradient.shape[dim] > 1)
    ]
    # sum first, for one contribution of a bias that all tokens share
    summed = gradient.sum(repeated, keepdim=True) if repeated else gradient
    # for an infinite constant; without a branch, which would wait for the device
    return (summed * constant).masked_fill_(summed == 0, 0)
