"""The computations of the authors' published scripts that differ from the papers' equations.

Of each layer only the query's row r of every channel is used. It is added to every row of the
identity, and all rows are divided by their common sum: a layer's matrix is I + 1 r^T.

The row takes its entries up to the query from the forward direction, the entries beyond it from the
backward direction, and neither is halved. The script of the hidden-attention paper (components =
s6) has a slip: the query reads the state before its own step. Its own entry is missing, and every
other one has decayed a step too few. That script also keeps rows in single precision.
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
    """Return the single query of each example, (B, 1)."""
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
) -> Tensor:
    """Return the query's row of the product of (I + 1 r^T) / (1 + sum r), its own entry 0."""
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


def rows(layer: Layer, operator: Operator, query: Tensor, options: Options) -> Tensor:
    """Return the query's row of every channel as the scripts take it, (B, C, L)."""
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
    """Split an operator by direction: tokens in order, and in another order; neither is halved."""
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
            f"recipe='published_code' is defined for mixers of one or two directions, but layer "
            f"{layer.name!r} reads its tokens in {len(chains)} orders. Use recipe='paper'."
        )
    return Sum(*map(_not_halved, forward)), _not_halved(turned[0])


def _is_turned(chain: Chain) -> bool:
    return any(isinstance(part, Permute) for part in chain.parts)


def _not_halved(chain: Chain) -> Chain:
    """Leave out the constant factor with which a sum of directions is halved."""
    return Chain(
        *(
            part
            for part in chain.parts
            if part.mixes_tokens or part.component is not None or part.data_dependent
        )
    )


def _before_the_step(layer: Layer, operator: Operator, query: Tensor) -> Operator:
    """Return the operator with a step of length 0 at the query, which neither decays nor writes."""
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
        "recipe='published_code' with components='s6' is the script of the hidden-attention paper, "
        f"which knows selective scans alone; layer {layer.name!r} has none. Use components="
        "'unified', or recipe='paper'."
    )


def raw_row(rows: Tensor, keep: Tensor | None) -> Tensor:
    """Return the channel mean of rows (B, C, L), all channels of a layer normalized together."""
    everywhere = None if keep is None else keep.unsqueeze(1).expand_as(rows)
    return min_max(rows, everywhere).mean(1)


def class_row(rows: Tensor, gradient: Tensor, keep: Tensor | None, options: Options) -> Tensor:
    """Weight rows (B, C, L) by the largest positive gradient over channels, (B, L).

    The script of the hidden-attention paper (components = s6) normalizes all channels together
    before the mean; the script of the unified paper normalizes the result.

    Args:
        rows: the query's row of every channel.
        gradient: gradient of the target at the stream after the mixer's output was added
            (B, L, E), which is the gradient at the output itself.
        keep: True for real tokens (B, L), or None.
        options: the user's choices.
    """
    rows = rows.clamp_min(0)
    keep = None if keep is None else keep.to(rows.device)
    strength = min_max(gradient.to(rows).clamp_min(0).amax(-1), keep)
    if options.components == PRESETS["s6"]:
        return raw_row(rows, keep) * strength
    return min_max(rows.mean(1) * strength, keep)


def finish(row: Tensor, query: Tensor) -> Tensor:
    """Set the query's own entry to 0, and clamp at zero."""
    return row.scatter(-1, query.to(row.device), 0).clamp_min(0)


def min_max(x: Tensor, keep: Tensor | None = None) -> Tensor:
    """Scale each example to [0, 1] over its kept entries; a constant example becomes 0."""
    dims: Sequence[int] = range(1, x.dim())
    low = x if keep is None else x.masked_fill(~keep, torch.inf)
    high = x if keep is None else x.masked_fill(~keep, -torch.inf)
    least, largest = low.amin(tuple(dims), keepdim=True), high.amax(tuple(dims), keepdim=True)
    span = largest - least
    scaled = torch.where(span > 0, (x - least) / torch.where(span > 0, span, 1), 0)
    return scaled if keep is None else scaled * keep
