"""mambapy's MambaBlock, VMambaBlock, Mamba2Block and AttentionSDPA, and deeptab's MambaBlock.

Mamba-1 has the equations of :mod:`.mamba`, Mamba-2 those of :mod:`.mamba2`.  Of one direction f is
convolution, activation and scan, and P is the flip of tokens:

MambaBlock    y = SiLU(z) f(x)
VMambaBlock   y = SiLU(z) (f(x) + P f_b P x), halved if the model says so
deeptab       y = act(z) (f(x) + P scan_b P act(conv_b(x_b))) / 2

In deeptab x_b has a projection of its own, one direction alone is not halved, and the activation is
the model's choice.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import UnsupportedMixerError
from ..operators import (
    Chain,
    Diagonal,
    DirectSum,
    Operator,
    SelectiveScan,
    Shape,
    ShortConv,
    Sum,
)
from ..operators.reorder import flip
from .base import Call, LinearMixer
from .mamba2 import OutputNorm, linearize
from .parts.common import (
    activation_ratio,
    as_heads,
    causal_conv,
    frozen,
    linear,
    output_gate,
    refuse_packed,
    run,
    working_dtype,
)
from .parts.softmax import seen_pairs, softmax_attention


def mambapy_block(module: Any, call: Call) -> LinearMixer:
    """mambapy's MambaBlock, which its Mamba and its Jamba hold."""
    x, z = _entering(module.in_proj, module, call)
    shape = Shape(*x.shape)
    gate = Diagonal(F.silu(z), shape, "gate")
    operator = Chain(gate, *_direction(module, _names(), x))
    return LinearMixer(x, operator, lambda y: run(module.out_proj, y.flatten(2)))


def mambapy_vision_block(module: Any, call: Call) -> LinearMixer:
    """mambapy's VMambaBlock, in one direction or both."""
    x, z = _entering(module.in_proj, module, call)
    shape = Shape(*x.shape)
    parts = _direction(module, _names(), x)
    if module.config.bidirectional:
        turn = flip(shape, x.device)
        back = _direction(module, _names("{}_b"), x.flip(1))
        share = Diagonal(x.new_full((1, 1, 1, 1), 0.5 if module.config.divide_output else 1), shape)
        parts = (share, Sum(Chain(*parts), Chain(turn, *back, turn)))
    operator = Chain(Diagonal(F.silu(z), shape, "gate"), *parts)
    return LinearMixer(x, operator, lambda y: run(module.out_proj, y.flatten(2)))


def mambapy_mamba2_block(module: Any, call: Call) -> LinearMixer:
    """mambapy's Mamba2Block, which computes by mamba_ssm; its norm has groups on one path only."""
    refuse_packed(call, seq_idx=1)
    config, hidden = module.config, call.hidden_states
    fused, out_proj = config.use_mem_eff_path, module.out_proj
    names = ("conv1d", "act", "dt_bias", "A_log", "D")
    parts = {name: getattr(module, name) for name in names}

    def project(y: Tensor) -> Tensor:
        return (
            linear(y.flatten(2), out_proj.weight, out_proj.bias)
            if fused
            else run(out_proj, y.flatten(2))
        )

    return linearize(
        SimpleNamespace(**parts, activation=config.activation),
        run(module.in_proj, hidden.to(working_dtype(module, hidden))),
        None,
        groups=config.n_groups,
        dt_limit=config.dt_limit,
        norm=OutputNorm(module.norm.weight, module.norm.eps, config.n_groups if fused else 1),
        project=project,
        initial=module.init_states if config.learnable_init_states else None,
    )


def mambapy_attention(module: Any, call: Call) -> LinearMixer:
    """mambapy's AttentionSDPA, of its Jamba."""
    call.refuse_cache("cache", position=1)
    hidden = call.hidden_states
    hidden = hidden.to(working_dtype(module, hidden))
    heads, fewer = module.num_heads, module.num_key_value_heads
    query = as_heads(run(module.q_proj, hidden), heads)
    key, values = (
        as_heads(run(projection, hidden), fewer).repeat_interleave(heads // fewer, 2)
        for projection in (module.k_proj, module.v_proj)
    )
    causal = seen_pairs(hidden.shape[1], hidden.device)
    scaling = module.head_dim**-0.5
    query, key = query.transpose(1, 2), key.transpose(1, 2)
    core, mask = softmax_attention(query, key, values, scaling, causal)
    return LinearMixer(values, core, lambda y: run(module.o_proj, y.flatten(2)), mask)


def deeptab_block(module: Any, call: Call) -> LinearMixer:
    """deeptab's MambaBlock, in one direction or both."""
    if module.use_learnable_interaction:
        raise UnsupportedMixerError(
            "MambaBlock with use_learnable_interaction=True mixes the channels between convolution "
            "and scan, which has no adapter. Use a model without it."
        )
    x, z = _entering(module.in_proj_fwd, module, call)
    ahead = _direction(module, _names("{}_fwd"), x, module.activation)
    if not module.bidirectional:
        operator = Chain(output_gate(module.activation, z), *ahead)
        return LinearMixer(x, operator, lambda y: run(module.out_proj, y.flatten(2)))
    channels = x.shape[2]
    x_b, _ = _entering(module.in_proj_bwd, module, call)
    turn, names = flip(Shape(*x.shape), x.device), _names("{}_bwd")
    conv, ratio, activated = _activated(module, names, x_b, module.activation)
    back = Chain(turn, _scan(module, names, activated.flip(1)), turn, ratio, conv)
    both = DirectSum(Chain(*ahead), back)
    share = Diagonal(x.new_full((1, 1, 1, 1), 0.5), both.shape)
    gate = output_gate(module.activation, torch.cat([z, z], 2))

    def project(y: Tensor) -> Tensor:
        return run(module.out_proj, (y[:, :, :channels] + y[:, :, channels:]).flatten(2))

    return LinearMixer(torch.cat([x, x_b], 2), Chain(gate, share, both), project)


class _Names(NamedTuple):
    """Names of the parts of one direction."""

    conv: str
    x_proj: str
    dt_proj: str
    a_log: str
    skip: str


def _names(form: str = "{}") -> _Names:
    parts = ("conv1d", "x_proj", "dt_proj", "A_log", "D")
    return _Names(*(form.format(part) for part in parts))


def _entering(in_proj: Any, module: Any, call: Call) -> tuple[Tensor, Tensor]:
    """Run in_proj; return x and the gate's input z, (B, L, D, 1) each."""
    hidden = call.hidden_states
    x, z = run(in_proj, hidden.to(working_dtype(module, hidden))).chunk(2, -1)
    return as_heads(x), as_heads(z)


def _direction(
    module: Any, names: _Names, x: Tensor, act: Callable[[Tensor], Tensor] = F.silu
) -> tuple[Operator, ...]:
    """The operators of one direction, outermost first, for x (B, L, D, 1) in its order."""
    conv, ratio, activated = _activated(module, names, x, act)
    return _scan(module, names, activated), ratio, conv


def _activated(
    module: Any, names: _Names, x: Tensor, act: Callable[[Tensor], Tensor]
) -> tuple[ShortConv, Diagonal, Tensor]:
    """The convolution, the activation's ratio, and their output for x, (B, L, D)."""
    own, shape = getattr(module, names.conv), Shape(*x.shape)
    conv, u = causal_conv(own, x, None, shape)
    if own.dilation != (1,):
        lags = [lag * own.dilation[0] for lag in conv.lags]
        conv = ShortConv(conv.weight, shape, conv.bias, lags)
        u = conv.affine(x)
    is_silu = act is F.silu or isinstance(act, torch.nn.SiLU)
    ratio = activation_ratio(act, "silu" if is_silu else repr(act), u)
    return conv, Diagonal(ratio, shape, "activation"), (u * ratio).squeeze(-1)


def _scan(module: Any, names: _Names, activated: Tensor) -> Operator:
    """The sum of scan and skip, from the activation's output (B, L, D)."""
    dt_proj, a_log = getattr(module, names.dt_proj), getattr(module, names.a_log)
    rank, state = dt_proj.weight.shape[1], a_log.shape[1]
    selected = run(getattr(module, names.x_proj), activated)
    parts = torch.split(selected, [rank, state, state], -1)
    norms = (module.dt_layernorm, module.B_layernorm, module.C_layernorm)
    t, b, c = (s if norm is None else run(norm, s) for s, norm in zip(parts, norms, strict=True))
    # mambapy, whose blocks have a configuration, reads the weight, past an adapter around it
    raw = hasattr(module, "config")
    dt = linear(t, dt_proj.weight, dt_proj.bias) if raw else run(dt_proj, t)
    scan = SelectiveScan(F.softplus(dt), -torch.exp(a_log.to(t)), b, c)
    skip = frozen(getattr(module, names.skip), t).view(1, 1, -1, 1)
    return Sum(scan, Diagonal(skip, Shape(*activated[..., None].shape), "skip"))
