"""Real mixers at one input, frozen: one matrix of every channel, written from the formulas.

Nothing here calls the package.  What relevance goes back along keeps its graph; all else is a
number.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oracles import Parts, alpha, conv_matrices, diagonal_matrices, mamba1_parts
from oracles.mamba2_formula import Form, mamba2_parts


@dataclass
class Frozen:
    """A mixer; C = H P channels.

    Attributes:
        values: (B, L, C), with the graph to what entered the mixer.
        unified: matrices without the skip connection (B, C, L, L).
        exact: matrices with it.
        before: what enters the output projection (B, L, C), linear in what entered the mixer.
        weight: of the output projection (C, E).
        bias: of the output projection (E,).
        heads: H.
    """

    values: Tensor
    unified: Tensor
    exact: Tensor
    before: Tensor
    weight: Tensor
    bias: Tensor
    heads: int

    @property
    def output(self) -> Tensor:
        """What the mixer returns, (B, L, E)."""
        return self.before @ self.weight + self.bias


def frozen(mixer: nn.Module, hidden: Tensor, *, half: bool) -> Frozen:
    """The mixer at ``hidden`` (B, L, E).

    With ``half`` a gated product shares its relevance between its factors.
    """
    return _FORMULAS[type(mixer).__name__](mixer, hidden, half)


def shared(product: Tensor, half: bool = True) -> Tensor:
    """A product of two factors with graphs, of whose relevance each then gets half."""
    return product.detach() + 0.5 * (product - product.detach()) if half else product


def gated(stream: Tensor, gate: Tensor, half: bool) -> Tensor:
    """The stream times its gate, which shares its relevance, or is a coefficient."""
    return shared(stream * gate) if half else stream * gate.detach()


def straight(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """SiLU or GELU of x as its frozen ratio times x; both grow by a half at 0."""
    fixed = x.detach()
    return x * torch.where(fixed == 0, 0.5, function(fixed) / fixed)


def _affine(projection: Any, x: Tensor) -> Tensor:
    out = x @ projection.weight.detach().T
    return out if projection.bias is None else out + projection.bias.detach()


def _output(projection: Any) -> tuple[Tensor, Tensor]:
    weight = projection.weight.detach().T
    bias = projection.bias
    return weight, weight.new_zeros(weight.shape[1]) if bias is None else bias.detach()


def _applied(matrices: Tensor, x: Tensor) -> Tensor:
    return torch.einsum("bcij,bjc->bic", matrices.expand(len(x), -1, -1, -1), x)


def _taps(conv: nn.Conv1d, tokens: int, channels: int) -> tuple[Tensor, Tensor]:
    """Matrices (1, C, L, L) of a causal convolution on its first channels, and its bias (C,)."""
    taps = conv.weight.detach()[:channels, 0]
    lags = range(taps.shape[1] - 1, -1, -1)
    bias = taps.new_zeros(channels) if conv.bias is None else conv.bias.detach()[:channels]
    return conv_matrices(taps[:, None], list(lags), (1, tokens, channels, 1)), bias


def _diagonal(weight: Tensor) -> Tensor:
    """(B, L, C) to (B, C, L, L)."""
    return diagonal_matrices(weight.detach()[..., None], (*weight.shape, 1))


def _scanned(mixer: Any, parts: Parts, x: Tensor, z: Tensor, half: bool, heads: int) -> Frozen:
    """A Mamba or a Mamba-2 with its parts, of a stream and of what the gate is made of."""
    constant = _applied(alpha(parts, {"scan", "skip"}), parts.ratio * parts.conv_bias)
    y = _applied(alpha(parts, "exact-gate-norm"), x) + constant
    before = gated(y, straight(F.silu, z), half) * parts.norm
    matrices = alpha(parts, "unified"), alpha(parts, "exact")
    return Frozen(x, *matrices, before, *_output(mixer.out_proj), heads)


def _mamba(mixer: Any, hidden: Tensor, half: bool) -> Frozen:
    x, z = _affine(mixer.in_proj, hidden).chunk(2, -1)
    return _scanned(mixer, mamba1_parts(mixer, hidden), x, z, half, x.shape[-1])


def _mamba2(mixer: Any, hidden: Tensor, half: bool) -> Frozen:
    heads, groups, width = mixer.num_heads, mixer.n_groups, mixer.num_heads * mixer.head_dim
    limit, eps = mixer.time_step_limit, mixer.norm.variance_epsilon
    form = Form(groups, mixer.ssm_state_size, limit, groups, eps)
    z, x, _ = _affine(mixer.in_proj, hidden).tensor_split([width, 2 * width], -1)
    return _scanned(mixer, mamba2_parts(mixer, hidden, form), x, z, half, heads)


def _rwkv(mixer: Any, hidden: Tensor, half: bool) -> Frozen:
    before = F.pad(hidden, (0, 0, 1, -1))
    key, values, receptance = (
        _affine(getattr(mixer, name), hidden * mix + before * (1 - mix))
        for name in ("key", "value", "receptance")
        for mix in [getattr(mixer, f"time_mix_{name}").detach()]
    )
    key, decay, first = key.detach(), -mixer.time_decay.detach().exp(), mixer.time_first.detach()
    tokens = key.shape[1]
    scores = key.new_full((len(key), key.shape[-1], tokens, tokens), -torch.inf)
    for i in range(tokens):
        for j in range(i):
            scores[:, :, i, j] = (i - 1 - j) * decay + key[:, j]
        scores[:, :, i, i] = first + key[:, i]
    matrices = _diagonal(torch.sigmoid(receptance)) @ scores.softmax(-1)
    y = _applied(matrices, values)
    return Frozen(values, matrices, matrices, y, *_output(mixer.output), values.shape[-1])


def griffin_scan(unit: Any, u: Tensor, reset: Tensor) -> Tensor:
    """Matrices (B, C, L, L) of an RG-LRU that reads u (B, L, C), with resets (B, L)."""
    gates = []
    for name in ("input_gate", "recurrent_gate"):
        weight = getattr(unit, f"{name}_weight").detach().to(u)
        shift = getattr(unit, f"{name}_bias").detach().to(u)
        maps = [part @ weight[h] + shift[h] for h, part in enumerate(u.chunk(len(weight), -1))]
        gates.append(torch.sigmoid(torch.cat(maps, -1)))
    log_decay = -8 * gates[1] * F.softplus(unit.recurrent_param.detach().to(u))
    written = torch.where(reset[..., None], 1.0, (1 - torch.exp(2 * log_decay)).sqrt()) * gates[0]
    scan = u.new_zeros(len(u), u.shape[-1], u.shape[1], u.shape[1])
    for i in range(u.shape[1]):
        for j in range(i + 1):
            kept = ~reset[:, j + 1 : i + 1].any(1)
            decay = torch.exp(log_decay[:, j + 1 : i + 1].sum(1))
            scan[:, :, i, j] = kept[:, None] * decay * written[:, j]
    return scan


def _griffin(mixer: Any, hidden: Tensor, half: bool) -> Frozen:
    x, z = _affine(mixer.linear_x, hidden), _affine(mixer.linear_y, hidden)
    channels, tokens = x.shape[-1], x.shape[1]
    conv, conv_bias = _taps(mixer.conv_1d, tokens, channels)
    u = (_applied(conv, x) + conv_bias).detach()
    scan = griffin_scan(mixer.rg_lru, u, torch.arange(tokens).expand(len(u), -1) == 0)
    gate = straight(lambda v: F.gelu(v, approximate="tanh"), z)
    y = _applied(scan @ conv, x) + _applied(scan, conv_bias.expand_as(u))
    matrices = _diagonal(gate) @ scan @ conv
    before = gated(y, gate, half)
    return Frozen(x, matrices, matrices, before, *_output(mixer.linear_out), channels)


def _lfm2(mixer: Any, hidden: Tensor, half: bool) -> Frozen:
    write, read, x = _affine(mixer.in_proj, hidden).chunk(3, -1)
    conv, conv_bias = _taps(mixer.conv, x.shape[1], x.shape[-1])
    y = _applied(conv, gated(x, write, half)) + conv_bias
    matrices = _diagonal(read) @ conv @ _diagonal(write)
    before = gated(y, read, half)
    return Frozen(x, matrices, matrices, before, *_output(mixer.out_proj), x.shape[-1])


def _attention(
    query: Tensor, key: Tensor, values: Tensor, scaling: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Values (B, L, C), matrices and what they make of the values; arguments are (B, H, L, P)."""
    tokens, per_head = values.shape[2:]
    scores = query.detach() @ key.detach().mT * scaling
    later = torch.ones(tokens, tokens).triu(1).bool()
    matrices = scores.masked_fill(later, -torch.inf).softmax(-1)
    matrices = matrices.repeat_interleave(per_head, 1)
    flat = values.transpose(1, 2).flatten(2)
    return flat, matrices, _applied(matrices, flat)


def _llama(mixer: Any, hidden: Tensor, half: bool) -> Frozen:
    config, tokens = mixer.config, hidden.shape[1]
    heads, per_head = config.num_attention_heads, mixer.head_dim
    query, key, values = (
        _affine(projection, hidden).unflatten(-1, (-1, per_head)).transpose(1, 2)
        for projection in (mixer.q_proj, mixer.k_proj, mixer.v_proj)
    )
    frequency = 10_000 ** (-torch.arange(0, per_head, 2).double() / per_head)
    angle = torch.arange(tokens)[:, None] * frequency  # (L, P / 2)

    def rotated(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        cos, sin = angle.cos(), angle.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    each = heads // key.shape[1]
    key, values = (x.repeat_interleave(each, 1) for x in (rotated(key), values))
    flat, matrices, y = _attention(rotated(query), key, values, 1 / math.sqrt(per_head))
    return Frozen(flat, matrices, matrices, y, *_output(mixer.o_proj), heads)


def _gpt2(mixer: Any, hidden: Tensor, half: bool) -> Frozen:
    wide = hidden @ mixer.c_attn.weight.detach() + mixer.c_attn.bias.detach()
    parts = (x.unflatten(-1, (mixer.num_heads, -1)).transpose(1, 2) for x in wide.chunk(3, -1))
    flat, matrices, y = _attention(*parts, scaling=1 / math.sqrt(mixer.head_dim))
    weight, bias = mixer.c_proj.weight.detach(), mixer.c_proj.bias.detach()
    return Frozen(flat, matrices, matrices, y, weight, bias, mixer.num_heads)


_FORMULAS: dict[str, Callable[[Any, Tensor, bool], Frozen]] = {
    "MambaMixer": _mamba, "Mamba2Mixer": _mamba2, "BambaMixer": _mamba2, "RwkvSelfAttention": _rwkv,
    "RecurrentGemmaRecurrentBlock": _griffin, "Lfm2ShortConv": _lfm2, "LlamaAttention": _llama,
    "GPT2Attention": _gpt2,
}  # fmt: skip
