"""What the authors' published scripts compute, where it differs from the papers' equations.

Of each layer only the query's row of every channel is used; it is added to every row of the
identity, so that a layer's matrix is I + 1 r^T with all rows divided by their common sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...errors import OptionError
from ...operators import Operator
from ...tracing import Layer
from ..call.components import PRESETS
from .fold import Options, check_row, shown


def query_positions(weights: Tensor) -> Tensor:
    """The single query of each example, (B, 1)."""
    if bool(((weights > 0).sum(-1) != 1).any()):
        raise OptionError(
            "recipe='published_code' is defined for one query token per example; pass query="
            "'cls', 'last' or one position."
        )
    return weights.argmax(-1, keepdim=True)


def fold(
    layers: Sequence[Layer],
    query: Tensor,
    row_of: Callable[[Layer, Operator], Tensor],
    options: Options,
    description: str,
) -> Tensor:
    """The query's row of the product of (I + 1 r^T) / (1 + sum r), without its own entry.

    Args:
        layers: the recorded layers.
        query: query positions (B, 1).
        row_of: r (B, L) of a layer and its operator.
        options: the user's choices.
        description: label of the progress bar.
    """
    row: Tensor | None = None
    with torch.no_grad():
        for layer in shown(options.used(layers)[::-1], description, options.show_progress):
            check_tokens(layer, layers[-1])
            added = row_of(layer, options.operator(layer))
            if row is None:
                row = torch.zeros_like(added).scatter(-1, query.to(added.device), 1)
            row = row.to(added)
            row = row + row.sum(-1, keepdim=True) * added
            row = check_row(row / (1 + added.sum(-1, keepdim=True)), layer)
    if row is None:
        raise OptionError("There is no layer to fold.")
    return finish(row, query)


def check_tokens(layer: Layer, last: Layer) -> None:
    """Raise unless both layers mix equally many tokens, of which the query is one."""
    if layer.tokens != last.tokens:
        raise OptionError(
            f"recipe='published_code' is defined for one token count, but layer {layer.name!r} "
            f"mixes {layer.tokens} tokens and layer {last.name!r} {last.tokens}. Use "
            "recipe='paper'."
        )


def mean_row(operator: Operator, query: Tensor) -> Tensor:
    """The channel mean of the query's row, (B, L)."""
    return operator.rows(query.to(operator.device), "mean").squeeze(1)


def class_row(
    operator: Operator, query: Tensor, gradient: Tensor, keep: Tensor | None, options: Options
) -> Tensor:
    """The row weighted by the largest positive gradient over the stream's channels, (B, L).

    The script of the hidden-attention paper (components = s6) normalises each channel's row
    before the mean; that of the unified paper normalises the result.

    Args:
        operator: the layer's operator.
        query: query positions (B, 1).
        gradient: gradient of the target with respect to the stream entering the block (B, L, E).
        keep: True for real tokens (B, L), or None.
        options: the user's choices.
    """
    rows = operator.rows(query.to(operator.device), None).squeeze(2).clamp_min(0)  # (B, C, L)
    keep = None if keep is None else keep.to(rows.device)
    strength = min_max(gradient.to(rows).clamp_min(0).amax(-1), keep)
    if options.components == PRESETS["s6"]:
        everywhere = None if keep is None else keep.unsqueeze(1).expand_as(rows)
        return min_max(rows, everywhere).mean(1) * strength
    return min_max(rows.mean(1) * strength, keep)


def finish(row: Tensor, query: Tensor) -> Tensor:
    """Without the query's own entry, and clamped at zero."""
    return row.scatter(-1, query.to(row.device), 0).clamp_min(0)


def min_max(x: Tensor, keep: Tensor | None = None) -> Tensor:
    """Each example scaled to [0, 1] over its kept entries; a constant example becomes 0."""
    dims: Sequence[int] = range(1, x.dim())
    low = x if keep is None else x.masked_fill(~keep, torch.inf)
    high = x if keep is None else x.masked_fill(~keep, -torch.inf)
    least, largest = low.amin(tuple(dims), keepdim=True), high.amax(tuple(dims), keepdim=True)
    span = largest - least
    scaled = torch.where(span > 0, (x - least) / torch.where(span > 0, span, 1), 0)
    return scaled if keep is None else scaled * keep
