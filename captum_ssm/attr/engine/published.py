"""The computations of the authors' published scripts that differ from the papers' equations.

From each layer the scripts use only r, the matrix row of the query in every channel. They add r to
every row of the identity, and divide all rows by their common sum: a layer's matrix is I + 1 r^T.

In r, the entries up to the query come from the forward direction and later entries from the
backward direction. Neither is multiplied by 1/2. The script of the hidden-attention paper
(components="s6") has an error: the query reads the state before the query's step. So r lacks the
query's entry, and every other entry has one decay step too few. That script also stores rows in
single precision.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...errors import OptionError
from ...operators import Chain, Operator, Permute, SelectiveScan, Sum
from ...tracing import Layer
from ..call.checks import PRESETS
from ..call.progress import shown
from .fold import Options, check_row


def query_positions(weights: Tensor) -> Tensor:
    """Return the position of the single query token of each example, (B, 1)."""
    if bool(((weights > 0).sum(-1) != 1).any()):
        raise OptionError(
            "recipe='published_code' needs one query token per example, but query selects several "
            "tokens. Pass query='cls', 'last' or one position, or recipe='paper'."
        )
    return weights.argmax(-1, keepdim=True)


def fold(
    layers: Sequence[Layer],
    query: Tensor,
    row_of: Callable[[Layer, Operator], Tensor],
    options: Options,
) -> Tensor:
    """Return the query's row of the product over layers of (I + 1 r^T) / (1 + sum r), see above."""
    row: Tensor | None = None
    with torch.no_grad():
        for layer in shown(options.used(layers)[::-1]):
            check_tokens(layer, layers[-1])
            query_row = row_of(layer, options.operator(layer))
            if row is None:
                row = torch.zeros_like(query_row).scatter(-1, query.to(query_row.device), 1)
            row = row.to(query_row)
            row = row + row.sum(-1, keepdim=True) * query_row  # times I + 1 r^T
            row = check_row(row / (1 + query_row.sum(-1, keepdim=True)), layer)
    if row is None:
        raise OptionError("layers selects no mixer. Pass at least one mixer, or None for all.")
    return finish(row, query)


def check_tokens(layer: Layer, last: Layer) -> None:
    """Raise unless both layers have the same number of tokens, so that the query is in both."""
    if layer.tokens != last.tokens:
        raise OptionError(
            f"recipe='published_code' needs layers of one token count, but layer {layer.name!r} "
            f"mixes {layer.tokens} tokens and layer {last.name!r} mixes {last.tokens}. Pass "
            "recipe='paper'."
        )


def rows(layer: Layer, operator: Operator, query: Tensor, options: Options) -> Tensor:
    """Return the query's matrix row r (B, C, L) in every channel, as in the published scripts."""
    query = query.to(operator.device)
    forward, backward = _directions(layer, operator)
    directions = [forward] if backward is None else [forward, backward]
    if options.components == PRESETS["s6"]:
        directions = [_before_the_step(layer, direction, query) for direction in directions]
    row, *backward_row = (direction.rows(query, None).squeeze(2) for direction in directions)
    if backward_row:
        is_later = torch.arange(row.shape[-1], device=row.device) > query
        row = torch.where(is_later.unsqueeze(1), backward_row[0], row)
    # rounded, because the script for "s6" stores single precision
    return row.float().to(row) if options.components == PRESETS["s6"] else row


def _directions(layer: Layer, operator: Operator) -> tuple[Operator, Operator | None]:
    """Split an operator into its forward and backward direction, without factors of 1/2."""
    parts = operator.parts if isinstance(operator, Chain) else (operator,)
    sums = [(i, part.parts) for i, part in enumerate(parts) if isinstance(part, Sum)]
    if not sums:
        return operator, None
    index, terms = sums[0]  # the directions of a mixer are the first sum
    chains = [Chain(*parts[:index], term, *parts[index + 1 :]) for term in terms]
    backward = [chain for chain in chains if _is_backward(chain)]
    forward = [chain for chain in chains if not _is_backward(chain)]
    if not backward:
        return operator, None
    if len(backward) > 1 or not forward:
        raise OptionError(
            f"recipe='published_code' needs mixers of one or two directions, but layer "
            f"{layer.name!r} reads its tokens in {len(chains)} orders. Pass recipe='paper'."
        )
    return Sum(*map(_not_halved, forward)), _not_halved(backward[0])


def _is_backward(chain: Chain) -> bool:
    """Return True if a direction reads its tokens in a changed order, as the backward one does."""
    return any(isinstance(part, Permute) for part in chain.parts)


def _not_halved(chain: Chain) -> Chain:
    """Remove constant factors, such as the 1/2 in the mean of two directions."""
    kept = (p for p in chain.parts if p.mixes_tokens or p.component is not None or p.data_dependent)
    return Chain(*kept)


def _before_the_step(layer: Layer, operator: Operator, query: Tensor) -> Operator:
    """Set dt = 0 at the query, which then reads the state before its step, as the script does."""
    if isinstance(operator, Sum):
        return Sum(*(_before_the_step(layer, part, query) for part in operator.parts))
    parts = list(operator.parts) if isinstance(operator, Chain) else [operator]
    for i, part in enumerate(parts):
        if isinstance(part, Permute):
            query = part.order[query]
        elif isinstance(part, SelectiveScan):
            index = query.unsqueeze(-1).expand(*query.shape, part.dt.shape[-1])
            parts[i] = part.at({"dt": part.dt.expand(len(query), -1, -1).scatter(1, index, 0)})
            return Chain(*parts)
        elif part.mixes_tokens:  # the script has no operator between scan and output
            break
    raise OptionError(
        "recipe='published_code' with components='s6' needs selective scans, as in the script of "
        f"the hidden-attention paper, but layer {layer.name!r} has none. Pass "
        "components='unified', or recipe='paper'."
    )


def raw_row(rows: Tensor, keep: Tensor | None) -> Tensor:
    """Scale rows (B, C, L) to [0, 1] over all channels; return the mean over channels (B, L)."""
    mask = None if keep is None else keep.unsqueeze(1).expand_as(rows)
    return min_max(rows, mask).mean(1)


def class_row(rows: Tensor, gradient: Tensor, keep: Tensor | None, options: Options) -> Tensor:
    """Return the channel mean of rows, weighted by the largest positive gradient, (B, L).

    The script of the hidden-attention paper (components = s6) normalizes all channels together
    before the mean; the script of the unified paper normalizes the result.

    ``rows`` has the query's row in every channel (B, C, L). ``gradient`` (B, L, E) is the target's
    gradient at the mixer's output, and so also at the residual stream behind it. ``keep`` is True
    for unpadded tokens (B, L).
    """
    rows = rows.clamp_min(0)
    keep = None if keep is None else keep.to(rows.device)
    strength = min_max(gradient.to(rows).clamp_min(0).amax(-1), keep)
    if options.components == PRESETS["s6"]:
        return raw_row(rows, keep) * strength
    return min_max(rows.mean(1) * strength, keep)


def finish(row: Tensor, query: Tensor) -> Tensor:
    """Set the query's entry and all negative entries of relevance ``row`` (B, L) to 0."""
    return row.scatter(-1, query.to(row.device), 0).clamp_min(0)


def min_max(x: Tensor, keep: Tensor | None = None) -> Tensor:
    """Scale each example to [0, 1] over entries where ``keep`` is True; equal entries become 0."""
    dims: Sequence[int] = range(1, x.dim())
    low = x if keep is None else x.masked_fill(~keep, torch.inf)
    high = x if keep is None else x.masked_fill(~keep, -torch.inf)
    smallest, largest = low.amin(tuple(dims), keepdim=True), high.amax(tuple(dims), keepdim=True)
    span = largest - smallest
    scaled = torch.where(span > 0, (x - smallest) / torch.where(span > 0, span, 1), 0)
    return scaled if keep is None else scaled * keep
