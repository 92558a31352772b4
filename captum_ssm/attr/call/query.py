"""The option ``query``, the tokens whose attention rows are explained, as weights (B, L)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from ...errors import OptionError, QueryError
from ...operators.kernels.truths import holds
from ...tracing import Layer
from .checks import as_integer
from .target_errors import format_list
from .targets import last_real, require_real_target

#: None (found from the model), a name, one position, several positions for all examples, or a
#: tensor (B,) or (B, K) of positions per example.
Query = None | int | Literal["cls", "last", "mean"] | Sequence[int] | Tensor


def check_query(query: Query, batch: int) -> None:
    """Raise if the query has no accepted form; called before the model runs."""
    if isinstance(query, str) and query not in ("cls", "last", "mean"):
        raise OptionError(
            f"query={query!r} is not known. Pass None, 'cls', 'last', 'mean', a position, a list "
            "of positions, or a tensor of positions per example."
        )
    if query is None or isinstance(query, str) or as_integer(query) is not None:
        return
    if not isinstance(query, list | tuple | range | Tensor):
        raise OptionError(f"query={query!r} is not accepted. Pass 'last', a position or a list.")
    if not isinstance(query, Tensor) and not query:
        raise OptionError(f"query={query!r} is empty. Pass at least one position.")
    positions = _positions(query)
    if positions.dim() > 2 or not positions.numel():
        raise OptionError(
            f"query has shape {tuple(positions.shape)}. Pass positions of shape (B,) or (B, K)."
        )
    is_per_example = isinstance(query, Tensor) or positions.dim() == 2
    if is_per_example and len(positions) != batch:
        raise QueryError(
            f"query has positions for {len(positions)} examples, but the batch has {batch}. Pass "
            f"{batch}; if a Captum method repeats the inputs, pass an int, a list or a name."
        )


def _positions(query: int | Sequence[int] | Tensor) -> Tensor:
    """Check that a query has integer positions, and return them as a tensor."""
    try:
        positions = torch.as_tensor(query)
    except (TypeError, ValueError, RuntimeError):
        raise OptionError(f"query={query!r} is not numeric. Pass integer positions.") from None
    if positions.is_floating_point() or positions.is_complex() or positions.dtype == torch.bool:
        raise OptionError(f"query has dtype {positions.dtype}. Pass positions as integers.")
    return positions.long()


def needs_readers(query: Query) -> bool:
    """Return True if the query may have to be found by the backward pass in :func:`tokens_read`."""
    return query is None or query == "cls"


def query_weights(
    query: Query, output: Tensor, index: Tensor | None, tail: Layer, mask: Tensor | None
) -> Tensor:
    """Return the weight of each token as a query (B, L); weights of an example sum to 1.

    Args:
        query: the option ``query``.
        output: the model's output; its graph includes ``tail`` if :func:`needs_readers`.
        index: the target's indices (B, D) or (B, n, D), or None.
        tail: the last layer.
        mask: True for unpadded tokens (B, L), or None.
    """
    device = tail.output.device
    size = tail.in_order(tail.output).shape[:2]  # (B, L)
    real = torch.ones(size, dtype=torch.bool, device=device) if mask is None else mask.to(device)
    counts = _count_in_query(query, output, index, tail, real)
    total = counts.sum(-1, keepdim=True)
    if not holds((total > 0).all()):
        example = int((total == 0).nonzero()[0, 0])
        raise QueryError(f"inputs[{example}] has only padded tokens. Leave this example out.")
    # at least float32, because half precision would round the weights
    return counts.to(torch.promote_types(tail.output.dtype, torch.float32)) / total


def _count_in_query(
    query: Query, output: Tensor, index: Tensor | None, tail: Layer, real: Tensor
) -> Tensor:
    """Count how many times each ``real`` token occurs in the query (B, L); a bool is 0 or 1."""
    batch, tokens = real.shape
    per_token = output.dim() == 3 and output.shape[1] == tokens
    if query is None and per_token:
        require_real_target(index, output, real)
        # the positions at which the target's tokens are predicted; index is None for target=None
        return (
            _is_last(real) if index is None else _counts_at(index[..., 0].reshape(batch, -1), real)
        )
    if isinstance(query, str) and query == "mean":
        return real
    if isinstance(query, str) and query == "last":
        return _is_last(real)
    if needs_readers(query):  # "cls", or None with an output that has no token dimension
        is_read = tokens_read(output, tail) & real
        if query == "cls" and not holds((is_read.sum(-1) == 1).all()):
            raise QueryError(
                "query='cls' needs a class token, but the model's output does not depend on "
                "exactly one token of the last mixer. Pass None, 'last', 'mean' or positions."
            )
        return is_read
    assert query is not None and not isinstance(query, str)
    positions = _positions(query)
    if isinstance(query, Tensor) and query.dim() == 1:
        positions = positions[:, None]
    # (1, K) for all examples, or (B, K); K is 1 for an int
    positions = positions.reshape(-1, positions.shape[-1] if positions.dim() else 1)
    return _counts_at(positions.expand(batch, -1), real)


def asked_tokens(
    query: Query, output: Tensor, index: Tensor | None, tokens: int, mask: Tensor | None
) -> range | None:
    """Return a range that includes all query tokens; None if they are not known in advance.

    To avoid a GPU synchronization, no tensor on a GPU is read.  So the result is None for a class
    token, for the last token before padding, and for positions on a GPU.
    """
    if query == "mean":
        return range(tokens)
    per_token = output.dim() == 3 and output.shape[1] == tokens
    if query == "cls" or (query is None and not per_token):
        return None
    if query == "last" or (query is None and index is None):
        return range(tokens - 1, tokens) if mask is None else None
    if query is None:
        assert index is not None
        positions = index[..., 0]
    else:
        positions = _positions(query)
    if positions.device.type != "cpu":
        return None
    positions = positions % tokens  # negative positions count from the end
    return range(int(positions.min()), int(positions.max()) + 1)


def tokens_read(output: Tensor, tail: Layer) -> Tensor:
    """Return a mask (B, L), True for the last layer's tokens that the model's output depends on.

    One backward pass finds these tokens: a class token, the last token, or all pooled tokens.
    """
    if not output.requires_grad:
        raise QueryError(
            "query=None and 'cls' need gradients, but the forward run records no gradients. "
            "Pass query='last', 'mean' or positions."
        )
    # unequal weights: the plain sum of a softmax's outputs is constant and has no gradient
    weights = torch.linspace(1, 2, output[0].numel(), dtype=output.dtype, device=output.device)
    with torch.enable_grad():
        probe = (output.reshape(len(output), -1) * weights).sum()
    (gradient,) = torch.autograd.grad(probe, tail.output, retain_graph=True, allow_unused=True)
    if gradient is None or not holds(gradient.any()):
        raise QueryError(
            "query=None and 'cls' are found by gradients, but the model's output does not depend "
            "on the last mixer. Pass query='last', 'mean' or positions."
        )
    return tail.in_order(gradient).abs().amax(-1) > 0


def _is_last(real: Tensor) -> Tensor:
    """Return a mask (B, L), True at the last unpadded token of each example, if there is one."""
    position = torch.arange(real.shape[1], device=real.device)
    return (position == last_real(real)[:, None]) & real


def _counts_at(positions: Tensor, real: Tensor) -> Tensor:
    """Check ``positions`` (B, K), and count how many times each token occurs in them, (B, L)."""
    tokens = real.shape[1]
    outside = positions[(positions < -tokens) | (positions >= tokens)]
    if len(outside):
        raise QueryError(
            f"query position {int(outside[0])} is outside the sequence of {tokens} tokens. Pass "
            f"positions from {-tokens} to {tokens - 1}."
        )
    positions = (positions % tokens).to(real.device)
    padded = ~real.gather(1, positions)
    if not holds(~padded.any()):
        example = int(padded.any(-1).nonzero()[0])
        last = last_real(real)
        raise QueryError(
            f"query position {int(positions[padded][0])} is a padded token of example {example}. "
            f"The last unpadded tokens are at {format_list(last)}. Pass query='last', or a tensor "
            "with a position for each example."
        )
    counts = torch.zeros(real.shape, dtype=torch.long, device=real.device)
    return counts.scatter_add(1, positions, torch.ones_like(positions))
