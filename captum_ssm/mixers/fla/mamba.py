"""Mamba, Mamba-2, log-linear Mamba-2 and Mamba-3 in fla.

See :mod:`..mamba`, :mod:`..mamba2` and :mod:`..mamba3` for the equations; names and padding differ.
Mamba and Mamba2 mask the input and output of the convolution; Mamba2 without kernels masks its
whole input.  The states of both decay over padded tokens.  Mamba3 removes padded tokens.

In log-linear Mamba-2 the weight of token j in token i also depends on a level l: the position,
from 1, of the highest binary digit in which i and j differ, and 0 for i = j.  Then

    alpha_h[i, j] = lambda_h[i, l] (C[i] . B[j]) (product of the decays of tokens j+1..i) dt[j]

with lambda = softplus(L dl).  The pairs of level l have i in the later half and j in the earlier
half of the same window of 2^l tokens.  So the operator is a sum over levels.  Each term is the
operator of Mamba-2 within windows, with queries lambda C in later halves and keys B in earlier
halves.  Frozen: as in Mamba-2, and lambda.  As in the layer, positions count padded tokens too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import UnsupportedMixerError
from ...operators import Operator, ScalarDecayHeads, Sum
from ...operators.reorder import Windowed, Windows
from .. import mamba, mamba2, mamba3
from ..base import Call, LinearMixer
from ..parts.common import activation_of, as_heads, run, zeroed
from .common import input_and_mask, zeroed_input_and_mask


def fla_mamba(module: Any, call: Call) -> LinearMixer:
    """Linearize fla's Mamba: a selective scan with convolution and gate."""
    hidden, mask = input_and_mask(module, call)
    x, z = run(module.in_proj, hidden).chunk(2, -1)
    path, called = mamba.convolve_and_activate(module, x, mask), mamba.calls_dt_proj(module, x)
    mamba.selective_scan(path, module, called_dt=called)
    return path.gate(z, activation_of(module)).to(module.out_proj)


def fla_mamba2(module: Any, call: Call) -> LinearMixer:
    """Linearize fla's Mamba2; refuse n_groups for which its CPU code differs from its GPU code."""
    hidden, mask = input_and_mask(module, call)
    if not (hidden.is_cuda and sys.modules[type(module).__module__].is_fast_path_available):
        hidden = zeroed(hidden, mask)  # as the code without kernels does
        if module.n_groups not in (1, module.num_heads):
            raise UnsupportedMixerError(
                f"fla's Mamba2 with n_groups={module.n_groups} has no adapter without the kernels "
                "of mamba_ssm on a GPU, because it assigns the groups of B and C to different "
                "heads than these kernels do. Run the model on a GPU with mamba_ssm installed, or "
                "use a model with n_groups=1."
            )
    return _linearize(module, run(module.in_proj, hidden), mask)


def fla_log_linear_mamba2(module: Any, call: Call) -> LinearMixer:
    """Linearize fla's LogLinearMamba2: a sum of Mamba-2 operators within windows."""
    hidden, mask = input_and_mask(module, call)
    count = module.num_heads * module.num_lambda_dims
    projected = run(module.in_proj, zeroed(hidden, mask))
    projected, lambdas = torch.split(projected, [projected.shape[-1] - count, count], -1)
    lambdas = F.softplus(module.L.to(lambdas) * as_heads(lambdas, module.num_heads))
    return _linearize(module, projected, mask, partial(_log_linear_scan, lambdas))


def fla_mamba3(module: Any, call: Call) -> LinearMixer:
    """Linearize fla's Mamba3 with ``is_mimo=False``."""
    mamba3.refuse_mimo(module)
    hidden, mask = zeroed_input_and_mask(module, call, skips="trapezoidal rule")
    sizes = module.num_heads, module.n_groups, module.ssm_state_size
    return mamba3.linearize(module, run(module.in_proj, hidden), mask, *sizes)


def _linearize(
    module: Any,
    projected: Tensor,
    mask: Tensor | None,
    recurrence: Callable[..., Operator] = ScalarDecayHeads,
) -> LinearMixer:
    """Linearize Mamba2 or LogLinearMamba2 from the output of in_proj."""
    width = module.intermediate_size
    z, stream, dt = torch.split(projected, [width, module.conv_dim, module.num_heads], -1)
    # only the convolution's input is masked
    projected, limit = torch.cat([z, zeroed(stream, mask), dt], -1), module.dt_limit
    path, z = mamba2.convolve_and_scan(
        module, projected, mask, module.n_groups, limit, recurrence=recurrence
    )
    norm, groups, norm_first = None, 1, False
    if module.rmsnorm:
        norm = module.norm
        groups, norm_first = width // norm.group_size, norm.norm_before_gate
    return mamba2.gate_and_norm(path, z, norm, groups, norm_first).to(module.out_proj)


def _log_linear_scan(
    lambdas: Tensor,
    query: Tensor,
    key: Tensor,
    log_decay: Tensor,
    scale: Tensor,
    per_head: int,
    rate: Tensor,
) -> Operator:
    """Return the sum over levels; ``lambdas`` are (B, L, H, levels), the rest ScalarDecayHeads'."""
    tokens, heads = log_decay.shape[1:]
    query, key = (x.repeat_interleave(heads // x.shape[2], 2) for x in (query, key))
    positions, terms = torch.arange(tokens, device=query.device), []
    for level in range((tokens - 1).bit_length() + 1):
        queries, keys = query * lambdas[..., level, None], key
        if level > 0:  # queries in the later half of each window, keys in the earlier half
            in_later_half = (positions >> (level - 1) & 1).to(key)[:, None, None]
            queries, keys = in_later_half * queries, (1 - in_later_half) * key
        windows = _windows(tokens, 2**level, query.device)
        log_decays, scales = (windows.cut(x[..., None])[..., 0] for x in (log_decay, scale))
        vectors = windows.cut(queries), windows.cut(keys)
        within = ScalarDecayHeads(*vectors, log_decays, scales, per_head, rate=rate)
        terms.append(Windowed(within, windows))
    return Sum(*terms)


def _windows(tokens: int, size: int, device: torch.device) -> Windows:
    """Split tokens into windows of ``size`` neighbors; the last window may be padded."""
    positions = torch.arange(-(-tokens // size) * size, device=device)  # rounded up to windows
    return Windows(torch.where(positions < tokens, positions, -1).view(-1, size))
