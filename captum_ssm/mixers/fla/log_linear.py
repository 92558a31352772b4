"""Log-linear Mamba-2: fla's LogLinearMamba2.

Everything is as in :mod:`..mamba2`, but what token i reads of token j is weighed by how far apart
they are: with l the place of the highest binary digit in which i and j differ, counted from 1, and
0 for i = j,

    alpha_h[i, j] = lambda_h[i, l] (C[i] . B[j]) (product of the decays of tokens j+1..i) dt[j]

and lambda = softplus(L dl).  The pairs of level l are those in the later and the earlier half of
the same 2^l tokens.  So the operator is a sum over levels, of Mamba-2's within windows of 2^l
tokens, with lambda C as queries in the later half and B as keys in the earlier.  Frozen: as there,
and lambda.  Positions count padding as well, as in the layer.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...operators import Operator, ScalarDecayHeads, Sum
from ...operators.reorder import Windowed, Windows
from .. import mamba2
from ..base import Call, LinearMixer
from ..parts.common import as_heads, run
from .common import entering, zeroed


def fla_log_linear_mamba2(module: Any, call: Call) -> LinearMixer:
    """fla's LogLinearMamba2."""
    hidden, mask = entering(module, call)
    width, heads = module.intermediate_size, module.num_heads
    z, stream, dt, level = torch.split(
        run(module.in_proj, zeroed(hidden, mask)),
        [width, module.conv_dim, heads, heads * module.num_lambda_dims],
        dim=-1,
    )
    weights = F.softplus(module.L.to(level) * as_heads(level, heads))  # (B, L, H, levels)
    norm = None
    if module.rmsnorm:
        own = module.norm
        norm = mamba2.OutputNorm(own.weight, own.eps, width // own.group_size, own.norm_before_gate)
    return mamba2.linearize(
        module,
        torch.cat([z, zeroed(stream, mask), dt], -1),
        mask,
        groups=module.n_groups,
        dt_limit=module.dt_limit,
        norm=norm,
        project=lambda y: run(module.out_proj, y.flatten(2)),
        recurrence=partial(_levels, weights),
    )


def _levels(
    weights: Tensor,
    query: Tensor,
    key: Tensor,
    log_decay: Tensor,
    scale: Tensor,
    per_head: int,
    rate: Tensor,
) -> Operator:
    """The sum over levels; ``weights`` are lambda (B, L, H, levels), the others Mamba-2's."""
    tokens, heads = log_decay.shape[1:]
    query, key = (x.repeat_interleave(heads // x.shape[2], 2) for x in (query, key))
    at, terms = torch.arange(tokens, device=query.device), []
    for level in range((tokens - 1).bit_length() + 1):
        queries, keys = query * weights[..., level, None], key
        if level > 0:  # the later half of each window reads the earlier
            late = (at >> (level - 1) & 1).to(key)[:, None, None]
            queries, keys = late * queries, (1 - late) * key
        windows = _windows(tokens, 2**level, query.device)
        decays, sizes = (windows.cut(x[..., None])[..., 0] for x in (log_decay, scale))
        vectors = windows.cut(queries), windows.cut(keys)
        within = ScalarDecayHeads(*vectors, decays, sizes, per_head, rate=rate)
        terms.append(Windowed(within, windows))
    return Sum(*terms)


def _windows(tokens: int, size: int, device: torch.device) -> Windows:
    """Cut tokens into windows of ``size`` neighbors, the last of which may be padded."""
    places = torch.arange(-(-tokens // size) * size, device=device)
    return Windows(torch.where(places < tokens, places, -1).view(-1, size))
