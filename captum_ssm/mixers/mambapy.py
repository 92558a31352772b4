"""mambapy's MambaBlock, VMambaBlock and AttentionSDPA, and deeptab's MambaBlock.

See :mod:`.mamba` for the equations.  f is convolution, activation and scan in one direction, and P
reverses the tokens:

MambaBlock    y = SiLU(z) f(x)
VMambaBlock   y = SiLU(z) (f(x) + P f_b P x), halved by an option
deeptab       y = act(z) (f(x) + P scan_b P act(conv_b(x_b))) / 2

In deeptab x_b has a separate projection, a model with one direction does not halve it, and the
activation is an option.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import UnsupportedMixerError
from ..operators import Chain, DirectSum
from ..operators.reorder import flip
from .base import Call, LinearMixer
from .mamba import Selected, selective_scan
from .parts.common import as_heads, mixer_input, run
from .parts.softmax import seen_pairs
from .path import Path


def mambapy_block(module: Any, call: Call) -> LinearMixer:
    """Linearize mambapy's MambaBlock, which mambapy's Mamba and Jamba contain."""
    x, z = run(module.in_proj, mixer_input(module, call)).chunk(2, -1)
    return _direction(Path(x), module).gate(z).to(module.out_proj)


def mambapy_vision_block(module: Any, call: Call) -> LinearMixer:
    """Linearize mambapy's VMambaBlock, in one direction or both."""
    x, z = run(module.in_proj, mixer_input(module, call)).chunk(2, -1)
    path, ahead = Path(x), partial(_direction, module=module)
    if module.config.bidirectional:
        share = 0.5 if module.config.divide_output else 1.0
        path.both_ways(ahead, partial(ahead, names="{}_b"), share)
    else:
        ahead(path)
    return path.gate(z).to(module.out_proj)


def mambapy_attention(module: Any, call: Call) -> LinearMixer:
    """Linearize AttentionSDPA in mambapy's Jamba: causal softmax attention."""
    call.refuse_cache("cache", position=1)
    hidden = mixer_input(module, call)
    heads, kv_heads = module.num_heads, module.num_key_value_heads
    query = as_heads(run(module.q_proj, hidden), heads)
    key, values = (
        as_heads(run(p, hidden), kv_heads).repeat_interleave(heads // kv_heads, 2)
        for p in (module.k_proj, module.v_proj)
    )
    causal = seen_pairs(hidden.shape[1], hidden.device)
    return Path(values).attend(query, key, module.head_dim**-0.5, causal).to(module.o_proj)


def deeptab_block(module: Any, call: Call) -> LinearMixer:
    """Linearize deeptab's MambaBlock, in one direction or both."""
    if module.use_learnable_interaction:
        raise UnsupportedMixerError(
            "MambaBlock with use_learnable_interaction=True mixes channels between convolution and "
            "scan, which has no adapter. Use a model with use_learnable_interaction=False."
        )
    act, hidden = module.activation, mixer_input(module, call)
    x, z = run(module.in_proj_fwd, hidden).chunk(2, -1)
    ahead = _direction(Path(x), module, "{}_fwd", act)
    if not module.bidirectional:
        return ahead.gate(z, act).to(module.out_proj)
    x_b, _ = run(module.in_proj_bwd, hidden).chunk(2, -1)  # this direction's z is not used
    back = Path(x_b).conv(module.conv1d_bwd).act(act)
    reversal = flip(back.shape, x.device)
    scan_back = _scan(Path(back.now.flip(1)), module, "{}_bwd")
    back.then(reversal, *scan_back.parts, reversal)
    # separate values for each direction, on separate heads; project() adds the directions
    path = Path(torch.cat([x, x_b], -1)).then(DirectSum(Chain(*ahead.parts), Chain(*back.parts)))
    path.scale(x.new_full((1, 1, 1, 1), 0.5)).gate(torch.cat([z, z], -1), act)

    def project(y: Tensor) -> Tensor:
        forward, backward = y.chunk(2, -1)
        return run(module.out_proj, forward + backward)

    return path.to(project)


def _direction(
    path: Path, module: Any, names: str = "{}", act: Callable[[Tensor], Tensor] = F.silu
) -> Path:
    """Apply one direction; ``names`` is the format of its parameters' names, such as "{}_fwd"."""
    return _scan(path.conv(getattr(module, names.format("conv1d"))).act(act), module, names)


def _scan(path: Path, module: Any, names: str) -> Path:
    """Apply the scan and the skip; ``names`` is as in :func:`_direction`."""
    # mambapy, whose blocks have a configuration, uses the raw weight of dt_proj
    is_deeptab = not hasattr(module, "config")
    return selective_scan(path, module, names, called_dt=is_deeptab, norm=_normalize)


def _normalize(module: Any, selected: Selected) -> Selected:
    """Return t, B and C after the module's norms, if it has norms."""
    norms = (module.dt_layernorm, module.B_layernorm, module.C_layernorm)
    pairs = zip(selected, norms, strict=True)
    return tuple(x if norm is None else run(norm, x) for x, norm in pairs)
