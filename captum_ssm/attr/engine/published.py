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
            added = row_of(layer, options.operator(layer))
            if row is None:
                row = torch.zeros_like(added).scatter(-1, query.to(added.device), 1)
            row = row.to(added)
            row = row + row.sum(-1, keepdim=True) * added
            row = check_row(row / (1 + added.sum(-1, keepdim=True)), layer)
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
    terms = [forward] if backward is None else [forward, backward]
    if options.components == PRESETS["s6"]:
        terms = [_before_the_step(layer, term, query) for term in terms]
    row, *beyond = (term.rows(query, None).squeeze(2) for term in terms)
    if beyond:
        later = torch.arange(row.shape[-1], device=row.device) > query
        row = torch.where(later.unsqueeze(1), beyond[0], row)
    return row.float().to(row) if options.components == PRESETS["s6"] else row


def _directions(layer: Layer, operator: Operator) -> tuple[Operator, Operator | None]:
    """Split an operator into its forward and backward direction, without factors of 1/2."""
    parts = operator.parts if isinstance(operator, Chain) else (operator,)
    sums = [(i, part.parts) for i, part in enumerate(parts) if isinstance(part, Sum)]
    if not sums:
        return operator, None
    place, terms = sums[0]
    chains = [Chain(*parts[:place], term, *parts[place + 1 :]) for term in terms]
    turned = [chain for chain in chains if _is_turned(chain)]
    forward = [chain for chain in chains if not _is_turned(chain)]
    if not turned:
        return operator, None
    if len(turned) > 1 or not forward:
        raise OptionError(
            f"recipe='published_code' needs mixers of one or two directions, but layer "
            f"{layer.name!r} reads its tokens in {len(chains)} orders. Pass recipe='paper'."
        )
    return Sum(*map(_not_halved, forward)), _not_halved(turned[0])


def _is_turned(chain: Chain) -> bool:
    return any(isinstance(part, Permute) for part in chain.parts)


def _not_halved(chain: Chain) -> Chain:
    """Remove constant factors, such as the 1/2 in the mean of two directions."""
    return Chain(
        *(
            part
            for part in chain.parts
            if part.mixes_tokens or part.component is not None or part.data_dependent
        )
    )


def _before_the_step(layer: Layer, operator: Operator, query: Tensor) -> Operator:
    """Set dt = 0 at the query, to reproduce the error of the hidden-attention paper's script."""
    if isinstance(operator, Sum):
        return Sum(*(_before_the_step(layer, part, query) for part in operator.parts))
    parts = list(operator.parts) if isinstance(operator, Chain) else [operator]
    for i, part in enumerate(parts):
        if isinstance(part, Permute):
            query = part.order[query]
        elif isinstance(part, SelectiveScan):
            at = query.unsqueeze(-1).expand(*query.shape, part.dt.shape[-1])
            parts[i] = part.at({"dt": part.dt.expand(len(query), -1, -1).scatter(1, at, 0)})
            return Chain(*parts)
        elif part.mixes_tokens:
            break
    raise OptionError(
        "recipe='published_code' with components='s6' needs selective scans, as in the script of "
        f"the hidden-attention paper, but layer {layer.name!r} has none. Pass "
        "components='unified', or recipe='paper'."
    )


def raw_row(rows: Tensor, keep: Tensor | None) -> Tensor:
    """Scale rows (B, C, L) to [0, 1] over all channels; return the mean over channels (B, L)."""
    everywhere = None if keep is None else keep.unsqueeze(1).expand_as(rows)
    return min_max(rows, everywhere).mean(1)


def class_row(rows: Tensor, gradient: Tensor, keep: Tensor | None, options: Options) -> Tensor:
    """Return the channel mean of rows, weighted by the largest positive gradient, (B, L).

    The script of the hidden-attention paper (components = s6) normalizes all channels together
    before the mean; the script of the unified paper normalizes the result.

    Args:
        rows: the query's row in every channel (B, C, L).
        gradient: gradient of the target at the mixer's output (B, L, E), which is also the
            gradient at the residual stream behind it.
        keep: True for unpadded tokens (B, L), or None.
        options: the options of the method.
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
    least, largest = low.amin(tuple(dims), keepdim=True), high.amax(tuple(dims), keepdim=True)
    span = largest - least
    scaled = torch.where(span > 0, (x - least) / torch.where(span > 0, span, 1), 0)
    return scaled if keep is None else scaled * keep
