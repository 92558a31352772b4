"""RWKV-4 in transformers, and functions that the adapters of RWKV-7 share.

    k, v, r = maps of h mixed with the previous token's h (the token shift)
    y = sigmoid(r) alpha v          output = W_o y

Here alpha[i, j] is the softmax over j of (i - 1 - j) w + k[j] for j < i and u + k[i] for j = i,
with w = -exp(time_decay) and u = time_first.  Frozen: k and the gate.

The values are the inputs v of alpha, so a token's value contains a part of the token before it.
The shift acts on the channels of h, and the value projection then mixes these channels, so no
convolution per value channel equals it.

In evaluation the model halves its residual stream every few blocks, and at its first run scales the
output projections of later blocks in place to match.  h is normalized, so this changes only W_o.
The model takes no padding mask.

RWKV-7:

    r, k, v and the inputs of w, a, g and s: maps of h mixed with the previous token's h
    e_h = (k xi)_h / |(k xi)_h|                     k' = k (1 + (a - 1) kappa)
    v' = v + s (v_first - v)                        v_first: the values of the first layer
    S[t] = exp(w[t]) S[t-1] - a[t] e[t] (e[t] . S[t-1]) + k'[t] v'[t],   o[t] = r[t] . S[t]
    y = g (GroupNorm(o) + (r_h . (rho_h k'_h)) v')                       output = W_o y

Here a and s are sigmoids, and w = -exp(-1/2) sigmoid(.), so no decay is below exp(-0.61).  The norm
is per head and subtracts the head's mean; its bias is a constant term of the output.  The weight
r . (rho k') of a token's value in the token's own output, without the state, is part of the scan.

Frozen: r, k', e, a, w, s, the norm's statistics and the gate.  The values are v'.  Relevance of
v_first goes directly to the values of the first layer.  As in RWKV-6 a token's value contains a
part of the token before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..operators import WKV, Chain, DeltaRule, Diagonal
from .base import Call, LinearMixer
from .parts.common import as_heads, frozen, linear, mixer_input, run
from .path import Path

#: The logarithm of a decay is this constant times a sigmoid.
_LOG_DECAY = -math.exp(-0.5)


def delta_to_previous(hidden: Tensor) -> Tensor:
    """Return hidden[t-1] - hidden[t] for every token t, (B, L, E)."""
    return F.pad(hidden, (0, 0, 1, -1)) - hidden


def mix_with_previous(module: Any, hidden: Tensor) -> list[Tensor]:
    """Return the inputs of r, w, k, v, a and g: tokens mixed with the previous token, (B, L, E).

    Args:
        module: the layer, with the weights of the previous token, ``x_r`` and so on.
        hidden: input of the layer (B, L, E).
    """
    delta = delta_to_previous(hidden)
    return [hidden + delta * getattr(module, f"x_{name}").to(hidden) for name in "rwkvag"]


def log_decay(x: Tensor) -> Tensor:
    """Return w = -exp(-1/2) sigmoid(x), the logarithm of the decay."""
    return _LOG_DECAY * torch.sigmoid(x)


def mix_in_first_values(v: Tensor, first: Tensor, logit: Tensor) -> Tensor:
    """Return v' = v + s (v_first - v), with s = sigmoid(logit)."""
    return v + torch.sigmoid(logit).detach() * (first.to(v) - v)


def rwkv7(module: Any, call: Call) -> LinearMixer:
    """Linearize RWKV7TimeMix in captum_ssm.models.rwkv7: a delta rule with norm and gate."""
    r, w, k, v, a, g = mix_with_previous(module, mixer_input(module, call))
    keys, values = run(module.key, k), run(module.value, v)
    if not module.is_first:
        logit = _low_rank(module, "v", v)
        values = mix_in_first_values(values, call.argument("v_first", 1), logit)
    gate = linear(torch.sigmoid(linear(g, module.g1.T)), module.g2.T)
    w, a = log_decay(_low_rank(module, "w", w, torch.tanh)), _low_rank(module, "a", a).sigmoid()
    erase = unit_vectors_by_head(keys * module.k_k.to(keys), module.r_k.shape[0])
    r = run(module.receptance, r)
    path = scan_and_norm(module, module.ln_x, None, r=r, w=w, k=keys, v=values, a=a, erase=erase)
    at_rest = frozen(module.g2, gate).sum(0) / 2  # sigmoid(0) = 1/2
    mixer = gate_and_project(path, gate, at_rest, module.output)
    return replace(mixer, passed_on={1: values}) if module.is_first else mixer


def _low_rank(
    module: Any, name: str, x: Tensor, act: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Return act(x M1) M2 + bias, with the low-rank matrices and bias of ``name``."""
    down, up, bias = (getattr(module, f"{name}{suffix}") for suffix in (1, 2, 0))
    inner = linear(x, down.T)
    return linear(inner if act is None else act(inner), up.T, bias.flatten())


def scan_and_norm(
    module: Any,
    norm: Any,
    mask: Tensor | None,
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    erase: Tensor,
) -> Path:
    """Return the :class:`.Path` of GroupNorm(o) + (r . (rho k')) v', with o the scan's outputs.

    Args:
        module: the layer, with kappa and rho as ``k_a`` and ``r_k``.
        norm: the layer's GroupNorm.
        mask: True for real tokens (B, L), or None.
        r, w, k, v, a: tensors (B, L, H N) of the module's docstring; w is the log decay, v is v'.
        erase: erasing keys e (B, L, H, N).
    """
    heads = module.r_k.shape[0]
    r, w, k, a = (as_heads(x, heads) for x in (r, w, k, a))
    key = k + k * (a - 1) * frozen(module.k_a, k).view(heads, -1)
    own_weight = (r * key * frozen(module.r_k, r)).sum(-1, keepdim=True)
    path, ones = Path(v, mask, heads).silence(), torch.ones_like(r[..., 0])
    scan = DeltaRule(r, key, ones, w, path.shape.per_head, erase=erase, erase_step=a)
    by_state = Path(path.now).scan(scan).layer_norm(norm.weight, norm.bias, norm.eps)
    # the norm applies only to the part of the output that passes through the state
    return path.scan(Chain(*by_state.parts), Diagonal(own_weight, path.shape, "scan"))


def gate_and_project(path: Path, gate: Tensor, at_rest: Tensor, output: Any) -> LinearMixer:
    """Apply the gate (B, L, H P), which is ``at_rest`` for zero input, and project the output."""
    by_head = as_heads(at_rest.view(1, 1, -1), path.shape.heads)
    return path.scale(gate, "gate", at_rest=by_head).to(output)


def unit_vectors_by_head(x: Tensor, heads: int) -> Tensor:
    """Normalize the vector of each head of ``x`` (B, L, H N) to length one, (B, L, H, N)."""
    return F.normalize(as_heads(x, heads), dim=-1)


def rwkv4(module: Any, call: Call) -> LinearMixer:
    """Linearize transformers' RwkvSelfAttention: WKV with a gate."""
    call.refuse_cache("state", position=1)
    hidden = mixer_input(module, call, "hidden")
    previous = F.pad(hidden, (0, 0, 1, -1))
    weights = module.time_mix_key, module.time_mix_value, module.time_mix_receptance
    mixes = (x.to(hidden) for x in weights)
    inputs = (hidden * mix + previous * (1 - mix) for mix in mixes)
    projections = module.key, module.value, module.receptance
    key, values, gate = (run(p, x) for p, x in zip(projections, inputs, strict=True))
    scan = WKV(key, -torch.exp(module.time_decay.to(key)), module.time_first.to(key))
    return Path(values).scan(scan).gate(gate, torch.sigmoid).to(module.output)
