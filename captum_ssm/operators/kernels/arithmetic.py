"""Fast exponentials and products, and the contexts in which linear maps run.

All kernels share these: exponentials, products with few columns, sums, reused memory, linear maps
with an explicit adjoint, and a scan over logarithms of sums.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import reduce
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
)

# --- exponentials as powers of two -------------------------------------------------------------
# On a CPU torch computes exp of a large tensor with a library that is several times slower than
# torch's exp2, and ten times slower again if results underflow.  On a GPU exp is one launch.

#: exp(x) is 2 ** (BINARY * x).
BINARY = 1 / math.log(2)


def exponential(x: Tensor, out: Tensor | None = None) -> Tensor:
    """Return exp(x), written to ``out`` if it is not None."""
    return torch.exp(x, out=out) if x.is_cuda else torch.mul(x, BINARY, out=out).exp2_()


def exponential_(x: Tensor) -> Tensor:
    """Replace ``x`` by exp(x) in place, and return it."""
    return x.exp_() if x.is_cuda else x.mul_(BINARY).exp2_()


#: Types of torch devices that have no float64.
WITHOUT_DOUBLE = frozenset({"mps"})


def where_double_is(x: Tensor) -> Tensor:
    """Move a tensor to the CPU if the tensor's device has no float64."""
    return x.cpu() if x.device.type in WITHOUT_DOUBLE else x


def doubled(x: Tensor) -> Tensor:
    """Convert a tensor to float64, so that differences of cumulative sums stay accurate.

    A tensor whose device has no float64 is moved to the CPU; the caller moves the result back.
    """
    return where_double_is(x).double()


# --- products and sums -------------------------------------------------------------------------

#: Number of columns from which transposing a product saves no time.
_THIN = 16


def matmul(matrices: Tensor, values: Tensor) -> Tensor:
    """Return matrices (..., T, N) @ values (..., N, P), computed transposed if P is small.

    On a CPU, multiplying a few rows by a stack of matrices takes no longer than reading the
    matrices.  Multiplying the matrices by a few columns takes up to twenty times longer.
    """
    # torch.matmul calls bmm; its preparations take as long as products with few columns
    same_stack = matrices.dim() == 3 and matrices.shape[:-2] == values.shape[:-2]
    product = torch.bmm if same_stack else torch.matmul
    if values.shape[-1] < _THIN:
        return product(values.mT, matrices.mT).mT.contiguous()
    return product(matrices, values)


def sum_tensors(terms: Iterable[Tensor]) -> Tensor:
    """Return the sum of one or more tensors."""
    return reduce(torch.add, terms)


class Scratch:
    """Named temporary tensors that reuse the same memory at each call.

    Getting new memory from the system page by page takes longer than filling it with the results of
    simple arithmetic.

    Args:
        like: a tensor with the dtype and device of the temporary tensors.
    """

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._tensors: dict[Hashable, Tensor] = {}

    def __call__(self, name: Hashable, *size: int) -> Tensor:
        """Return an uninitialized contiguous tensor, valid until the next call with this name.

        A call with the same name and size returns the same tensor.
        """
        tensor = self._tensors.get(name)
        if tensor is None or tensor.shape != size:
            tensor = self._tensors[name] = self._like.new_empty(size)
        return tensor


# --- contexts, and linear maps that run in them ------------------------------------------------


@contextmanager
def underflow_flushed() -> Iterator[None]:
    """Return a context in which the calling thread's CPU flushes denormal numbers to zero.

    States that decay token by token soon underflow, and a CPU takes about a hundred cycles for each
    operation on a denormal number.  Values below 1e-38 would make scans several times slower.
    """
    if _is_flushed():
        yield
        return
    try:
        torch.set_flush_denormal(True)
        yield
    finally:
        torch.set_flush_denormal(False)


def _is_flushed() -> bool:
    """Return True if this thread flushes denormals: half of the smallest normal number is zero."""
    return sys.float_info.min * 0.5 == 0.0


def unseen() -> Any:
    """Return a context without calls of ``__torch_function__``, which slow loops of small steps.

    Neither torch's modes nor tensor subclasses, such as quantized weights, intercept calls in it.
    """
    return torch._C.DisableTorchFunction()


@contextmanager
def unseen_by(mode: TorchFunctionMode | None) -> Iterator[None]:
    """Return a context in which one of torch's active modes intercepts no calls.

    Even a mode that does nothing can take a third of the time of a scan over tokens.

    Args:
        mode: the mode to switch off; if it is None or not active, nothing changes.
    """
    modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    depth = next((i for i, active in enumerate(modes) if active is mode), None)
    if depth is None:
        yield
        return
    _restack(depth, modes[depth + 1 :])
    try:
        yield
    finally:
        above = _get_current_function_mode_stack()[depth:]  # type: ignore[no-untyped-call]
        _restack(depth, [mode, *above])


def _restack(depth: int, modes: Sequence[TorchFunctionMode | None]) -> None:
    """Keep the lowest ``depth`` modes of torch's mode stack, and push ``modes`` on top of them."""
    while len(_get_current_function_mode_stack()) > depth:  # type: ignore[no-untyped-call]
        _pop_mode()  # type: ignore[no-untyped-call]
    for mode in modes:
        _push_mode(mode)  # type: ignore[no-untyped-call]


def full_precision(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context without autocast, because frozen coefficients are float32."""
    is_on = autocast_dtype(device) is not None
    return torch.autocast(device.type, enabled=False) if is_on else nullcontext()


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype that autocast computes in, or None if autocast is off."""
    kind = device.type
    # torch 2.4 has no autocast for MPS, and refuses even to ask
    is_on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if is_on else None


#: A linear map of values.
Map = Callable[[Tensor], Tensor]


def linear_map(x: Tensor, forward: Map, adjoint: Map) -> Tensor:
    """Return forward(x); autograd then uses ``adjoint`` as the derivative of ``forward``."""
    if x.requires_grad and torch.is_grad_enabled():
        out: Tensor = _LinearMap.apply(x, forward, adjoint)  # type: ignore[no-untyped-call]
        return out
    with torch.no_grad(), full_precision(x.device), unseen(), underflow_flushed():
        return forward(x)


class _LinearMap(torch.autograd.Function):
    """Autograd function of a linear map: backward applies the adjoint, and is differentiable."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Map, adjoint: Map) -> Tensor:
        ctx.maps = adjoint, forward  # backward swaps them
        with full_precision(x.device), unseen(), underflow_flushed():
            return forward(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return linear_map(grads[0], *ctx.maps), None, None


def fading_log_sums(scores: Tensor, log_decay: Tensor) -> Tensor:
    """Return log(sum over j <= t of exp(scores[j] + (t - j) log_decay)) for every token t.

    This normalizer of a softmax with decays is computed by a blocked scan (a prefix computation on
    two levels; Blelloch, Prefix Sums and Their Applications, 1990).  About sqrt(L) runs of tokens
    are summed in parallel, then each run adds the sum of the runs before it.  Every step is a
    logaddexp, so nothing overflows and small terms stay accurate.  The naive version sums the
    exponentials.

    Args:
        scores: scores (B, L, H); -inf for a token that adds nothing.
        log_decay: logarithm of the decay per token, at most zero (H,).

    Returns:
        The logarithms of the sums (B, L, H).
    """
    tokens = scores.shape[1]
    if scores.is_cuda:
        return fading_log_sums_at_once(scores, log_decay)
    length = max(1, math.isqrt(tokens))
    out = F.pad(scores, (0, 0, 0, -tokens % length), value=-torch.inf)  # a copy
    runs = torch.unflatten(out, 1, (-1, length))  # (B, runs, T, H), a view: results are in ``out``
    for before, sums in pairwise(runs.unbind(2)):  # token by token in all runs
        torch.logaddexp(before + log_decay, sums, out=sums)
    log_decays = torch.arange(1, length + 1, device=scores.device)[:, None] * log_decay  # (T, H)
    for before, sums in pairwise(runs.unbind(1)):  # run by run: add the last sum of the run before
        torch.logaddexp(before[:, -1:] + log_decays, sums, out=sums)
    return out[:, :tokens]


def fading_log_sums_at_once(scores: Tensor, log_decay: Tensor) -> Tensor:
    """Return :func:`fading_log_sums` from one cumulative logsumexp, in a few launches on a GPU.

    The function subtracts t log_decay from the score of token t.  The results grow with the number
    of tokens and would lose precision in float32, so callers pass float64.
    """
    log_decays = torch.arange(scores.shape[1], device=scores.device)[:, None] * log_decay  # (L, H)
    return torch.logcumsumexp(scores - log_decays, 1).add_(log_decays)


def with_graphs(coefficients: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """Return the coefficients that require a gradient, by name."""
    return {n: x for n, x in coefficients.items() if x is not None and x.requires_grad}
