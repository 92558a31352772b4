"""Arithmetic that torch has only slower, and the contexts in which linear maps run.

All kernels share it: exponentials, products with few columns, sums, memory that is used again,
linear maps with their own adjoint, and one scan of logarithms.
"""

from __future__ import annotations

import math
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
# On a processor torch takes exp of a large tensor from a library that is several times slower than
# its own exp2, and slower by another ten times where results underflow.  On a GPU it is one launch.

#: exp(x) is 2 to the power of this times x.
BINARY = 1 / math.log(2)


def exponential(x: Tensor, out: Tensor | None = None) -> Tensor:
    """exp(x), written to ``out`` if that is given."""
    return torch.exp(x, out=out) if x.is_cuda else torch.mul(x, BINARY, out=out).exp2_()


def exponential_(x: Tensor) -> Tensor:
    """exp(x), in place."""
    return x.exp_() if x.is_cuda else x.mul_(BINARY).exp2_()


#: Kinds of devices that have no float64.
WITHOUT_DOUBLE = frozenset({"mps"})


def where_double_is(x: Tensor) -> Tensor:
    """Move a tensor to a processor if its device has no float64."""
    return x.cpu() if x.device.type in WITHOUT_DOUBLE else x


def doubled(x: Tensor) -> Tensor:
    """Convert a tensor to float64, for sums over tokens whose differences are taken.

    If its device has no float64, it is moved to a processor; the caller moves the result back.
    """
    return where_double_is(x).double()


# --- products and sums -------------------------------------------------------------------------

#: From so many columns on a product takes as long by rows as by columns.
_THIN = 16


def matmul(matrices: Tensor, values: Tensor) -> Tensor:
    """Multiply matrices (..., T, N) and values (..., N, P), taking few columns as rows.

    Libraries for processors multiply a stack of matrices by a few rows at the speed of memory.  A
    few columns take several times longer, up to twenty times where the matrices are transposed.
    """
    # matmul ends in bmm; its preparations take as long as products with few columns
    alike = matrices.dim() == 3 and matrices.shape[:-2] == values.shape[:-2]
    product = torch.bmm if alike else torch.matmul
    if values.shape[-1] < _THIN:
        return product(values.mT, matrices.mT).mT.contiguous()
    return product(matrices, values)


def sum_tensors(terms: Iterable[Tensor]) -> Tensor:
    """Return the sum of at least one tensor."""
    return reduce(torch.add, terms)


# --- memory ------------------------------------------------------------------------------------


class Scratch:
    """Tensors by name that use the same memory again at each call.

    Fresh memory comes from the system page by page, which takes longer than to fill it with the
    results of simple arithmetic.

    Args:
        like: a tensor of the dtype and device wanted.
    """

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._held: dict[Hashable, Tensor] = {}

    def __call__(self, name: Hashable, *size: int) -> Tensor:
        """Return a contiguous tensor of arbitrary content, valid until the next call by this name.

        The same name and size yield the same tensor.
        """
        held = self._held.get(name)
        if held is None or held.shape != size:
            held = self._held[name] = self._like.new_empty(size)
        return held


# --- contexts, and linear maps that run in them ------------------------------------------------


@contextmanager
def underflow_flushed() -> Iterator[None]:
    """Let the calling thread's processor flush denormal numbers to zero.

    States that decay token by token soon underflow, and processors take some hundred cycles for
    each operation on a denormal number: whole scans would be several times slower for the sake of
    numbers below 1e-38.
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
    """Return True if the thread flushes already; torch can set the mode but not read it."""
    tiny = torch.full((), torch.finfo(torch.float32).tiny, dtype=torch.float32, device="cpu")
    return not tiny.mul_(0.5).item()


def unseen() -> Any:
    """A context in which torch calls no ``__torch_function__``, for loops over many small steps.

    Neither modes nor tensor subclasses, such as quantized weights, see the calls.
    """
    return torch._C.DisableTorchFunction()


@contextmanager
def unseen_by(mode: TorchFunctionMode | None) -> Iterator[None]:
    """A context in which one mode of torch sees no calls, wherever it is in the stack of modes.

    A mode that does nothing can take a third of the time of a scan over tokens.

    Args:
        mode: the mode; if it is not on, or None, nothing changes.
    """
    modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    depth = next((i for i, other in enumerate(modes) if other is mode), None)
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
    """Leave the lowest modes of torch's stack where they are, and put others on them."""
    while len(_get_current_function_mode_stack()) > depth:  # type: ignore[no-untyped-call]
        _pop_mode()  # type: ignore[no-untyped-call]
    for mode in modes:
        _push_mode(mode)  # type: ignore[no-untyped-call]


def full_precision(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which autocast leaves float32 alone: frozen coefficients are float32."""
    # torch 2.4 has no autocast for MPS, and refuses even to turn it off
    has_any = torch.amp.is_autocast_available(device.type)
    return torch.autocast(device.type, enabled=False) if has_any else nullcontext()


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype that autocast computes in, None if it is off."""
    kind = device.type
    is_on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if is_on else None


#: A linear map of values.
Map = Callable[[Tensor], Tensor]


def linear_map(x: Tensor, forward: Map, adjoint: Map) -> Tensor:
    """Return forward(x), differentiable through the adjoint; neither needs to record a graph."""
    if x.requires_grad and torch.is_grad_enabled():
        out: Tensor = _LinearMap.apply(x, forward, adjoint)  # type: ignore[no-untyped-call]
        return out
    with torch.no_grad(), full_precision(x.device), unseen(), underflow_flushed():
        return forward(x)


class _LinearMap(torch.autograd.Function):
    """A linear map whose backward is its adjoint, and the other way round."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Map, adjoint: Map) -> Tensor:
        ctx.maps = adjoint, forward
        with full_precision(x.device), unseen(), underflow_flushed():
            return forward(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return linear_map(grads[0], *ctx.maps), None, None


# --- a scan of logarithms ----------------------------------------------------------------------


def fading_log_sums(scores: Tensor, log_decay: Tensor) -> Tensor:
    """log of the sum over j <= t of exp(scores[j] + (t - j) log_decay), for every token t.

    The normalizer of a softmax with decays, by a blocked scan (a prefix computation on two levels;
    Blelloch, Prefix Sums and Their Applications, 1990).  Tokens are cut into as many runs as a run
    has tokens.  Runs take their steps side by side, then each receives the sum before it.  Every
    step adds two logarithms, so that no exponential can overflow and the rest of a distant past
    keeps its size, however small.  The naive version sums the exponentials.

    Args:
        scores: (B, L, H); -inf for a token that adds nothing.
        log_decay: at most zero (H,).

    Returns:
        (B, L, H).
    """
    tokens = scores.shape[1]
    if scores.is_cuda:
        return fading_log_sums_at_once(scores, log_decay)
    length = max(1, math.isqrt(tokens))
    out = F.pad(scores, (0, 0, 0, -tokens % length), value=-torch.inf)  # a copy
    runs = torch.unflatten(out, 1, (-1, length))  # (B, R, T, H)
    for before, sums in pairwise(runs.unbind(2)):
        torch.logaddexp(before + log_decay, sums, out=sums)
    faded = torch.arange(1, length + 1, device=scores.device)[:, None] * log_decay  # (T, H)
    for before, sums in pairwise(runs.unbind(1)):
        torch.logaddexp(before[:, -1:] + faded, sums, out=sums)
    return out[:, :tokens]


def fading_log_sums_at_once(scores: Tensor, log_decay: Tensor) -> Tensor:
    """:func:`fading_log_sums` in a few launches: scores less their decay since the first token.

    These reach the size of all decays together, too large for float32: callers pass float64.
    """
    faded = torch.arange(scores.shape[1], device=scores.device)[:, None] * log_decay  # (L, H)
    return torch.logcumsumexp(scores - faded, 1).add_(faded)


def with_graphs(coefficients: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """Return the coefficients that have an autograd graph."""
    return {n: x for n, x in coefficients.items() if x is not None and x.requires_grad}
