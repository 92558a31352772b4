"""The gated delta rule of transformers' models, written again in float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from oracles import causal_taps, diagonal_matrices, keep_of, linear, times


def formula(module: Any, hidden: Tensor, kwargs: Mapping[str, Any]) -> Tensor:
    """The matrices of every channel (B, C, L, L)."""
    hidden = hidden.detach().double()
    batch, tokens, _ = hidden.shape
    keep = keep_of(kwargs.get("attention_mask"), hidden)
    hidden = hidden * keep[..., None]
    q, k, v, z, beta, log_decay = _PARTS[type(module).__name__](module, hidden)
    heads, per_head = v.shape[-2:]
    key_heads, state = k.shape[-2:]

    mixed = torch.cat([x.flatten(2) for x in (q, k, v)], -1)
    conv = causal_taps(module.conv1d, tokens)
    u = torch.einsum("xcij,bjc->bic", conv, mixed)
    s = {"silu": F.silu, "gelu": F.gelu}[module.activation](u)
    q, k = (
        x.reshape(batch, tokens, key_heads, state) for x in s[..., : -v[0, 0].numel()].chunk(2, -1)
    )
    q, k = (x / (x.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(heads // key_heads, 2) for x in (q / state**0.5, k))
    core = _delta_matrices(q, k, beta, log_decay)

    core = core.repeat_interleave(per_head, 1)
    width = heads * per_head
    ratio = torch.where(u == 0, 0.5, s / torch.where(u == 0, 1.0, u))[..., -width:].view(v.shape)
    inner = diagonal_matrices(ratio, v.shape) @ conv[:, -width:]
    inner = inner @ diagonal_matrices(keep[..., None, None], v.shape)
    mixing = core @ inner
    y = times(mixing, v)
    norm = getattr(module, "norm", None) or module.o_norm
    sigmoid = 1 / (1 + torch.exp(-z))
    gate = sigmoid if getattr(norm, "activation", "silu") == "sigmoid" else z * sigmoid
    rms = (y.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon).sqrt()
    return diagonal_matrices(gate * norm.weight.detach().double() / rms, v.shape) @ mixing


def _delta_matrices(q: Tensor, k: Tensor, beta: Tensor, log_decay: Tensor) -> Tensor:
    """(Q K^T . E) (I + tril(beta K K^T . E, -1))^-1 diag(beta), entry by entry."""
    batch, tokens, heads, _ = q.shape
    log_decay = log_decay if log_decay.dim() == 4 else log_decay[..., None].expand_as(q)
    reads, writes = (torch.zeros(batch, heads, tokens, tokens).double() for _ in range(2))
    for i in range(tokens):
        for j in range(i + 1):
            kept = torch.exp(log_decay[:, j + 1 : i + 1].sum(1)) * k[:, j]
            reads[:, :, i, j] = (q[:, i] * kept).sum(-1)
            if j < i:
                writes[:, :, i, j] = beta[:, i] * (k[:, i] * kept).sum(-1)
    inverse = torch.linalg.inv(torch.eye(tokens).double() + writes)
    return reads @ inverse * beta.transpose(1, 2)[:, :, None]


def _qwen3_next_parts(module: Any, hidden: Tensor) -> tuple[Tensor, ...]:
    """The projections are laid out key head by key head."""
    batch, tokens, _ = hidden.shape
    groups, state, per_head = module.num_k_heads, module.head_k_dim, module.head_v_dim
    each = module.num_v_heads // groups
    wide = linear(module.in_proj_qkvz, hidden).view(batch, tokens, groups, -1)
    q, k, v, z = wide.split([state, state, each * per_head, each * per_head], -1)
    b, a = linear(module.in_proj_ba, hidden).view(batch, tokens, groups, -1).chunk(2, -1)
    v, z = (x.reshape(batch, tokens, -1, per_head) for x in (v, z))
    return q, k, v, z, torch.sigmoid(b.flatten(2)), _log_decay(module, a.flatten(2))


def _qwen3_5_parts(module: Any, hidden: Tensor) -> tuple[Tensor, ...]:
    groups, state, per_head = module.num_k_heads, module.head_k_dim, module.head_v_dim
    wide = linear(module.in_proj_qkv, hidden)
    q, k, v = wide.split([groups * state, groups * state, module.num_v_heads * per_head], -1)
    q, k, v, z = (
        x.unflatten(-1, (-1, width))
        for x, width in (
            (q, state),
            (k, state),
            (v, per_head),
            (linear(module.in_proj_z, hidden), per_head),
        )
    )
    beta = torch.sigmoid(linear(module.in_proj_b, hidden))
    return q, k, v, z, beta, _log_decay(module, linear(module.in_proj_a, hidden))


def _olmo_parts(module: Any, hidden: Tensor) -> tuple[Tensor, ...]:
    q, k = (
        linear(p, hidden).unflatten(-1, (module.num_k_heads, -1))
        for p in (module.q_proj, module.k_proj)
    )
    v, z = (
        linear(p, hidden).unflatten(-1, (module.num_v_heads, -1))
        for p in (module.v_proj, module.g_proj)
    )
    beta = torch.sigmoid(linear(module.b_proj, hidden))
    beta = 2 * beta if module.allow_neg_eigval else beta
    return q, k, v, z, beta, _log_decay(module, linear(module.a_proj, hidden))


def _kimi_parts(module: Any, hidden: Tensor) -> tuple[Tensor, ...]:
    forget, heads = module.forget_gate, module.num_heads
    q, k, v, a, z = (
        x.unflatten(-1, (heads, -1))
        for x in (
            linear(module.q_proj, hidden),
            linear(module.k_proj, hidden),
            linear(module.v_proj, hidden),
            _low_rank(forget, "f", hidden) + forget.dt_bias.detach().double(),
            _low_rank(module, "g", hidden),
        )
    )
    rate = forget.A_log.detach().double().exp().view(heads, 1)
    bound = _BOUNDS[type(module).__name__](forget)
    log_decay = -rate * F.softplus(a) if bound is None else bound / (1 + torch.exp(-rate * a))
    return q, k, v, z, torch.sigmoid(linear(module.b_proj, hidden)), log_decay


def _low_rank(module: Any, name: str, hidden: Tensor) -> Tensor:
    """One projection, or two in a row."""
    parts = [p for end in ("", "_a", "_b") if (p := getattr(module, f"{name}{end}_proj", None))]
    for part in parts:
        hidden = linear(part, hidden)
    return hidden


def _log_decay(module: Any, a: Tensor) -> Tensor:
    steps = F.softplus(a + module.dt_bias.detach().double())
    return -module.A_log.detach().double().exp() * steps


_PARTS = {
    "Qwen3NextGatedDeltaNet": _qwen3_next_parts,
    "Qwen3_5GatedDeltaNet": _qwen3_5_parts,
    "Qwen3_5MoeGatedDeltaNet": _qwen3_5_parts,
    "Qwen4ExpTextGatedDeltaNet": _qwen3_5_parts,
    "OlmoHybridGatedDeltaNet": _olmo_parts,
    "KimiLinearDeltaAttention": _kimi_parts,
    "BailingHybridDeltaAttention": _kimi_parts,
    "Glm5NextTextLinearAttention": _kimi_parts,
}

#: The least that a logarithm of a decay can be, of a forget gate.
_BOUNDS = {
    "KimiLinearDeltaAttention": lambda _: None,
    "BailingHybridDeltaAttention": lambda gate: gate.lower_bound if gate.safe_gate else None,
    "Glm5NextTextLinearAttention": lambda gate: gate.safe_gate_lower_bound,
}
