"""RWKV-7: fla's RWKV7Attention, by the equations of :mod:`..rwkv7`.

A layer returns the values of the first layer beside its output, and the model hands them on.
Padded tokens write nothing, but the state decays and is erased over them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..base import Call, LinearMixer
from ..parts.common import as_heads, run
from ..rwkv7 import Streams, entering, log_decay, time_mixing, unit, with_first
from . import common

#: Added to the squared length of keys by fused norms.
_FUSED_EPS = 1e-6
#: Where the layer takes and returns the values of the first one.
_TAKEN, _RETURNED = 5, 3


def fla_rwkv7(module: Any, call: Call) -> LinearMixer:
    """fla's RWKV7Attention."""
    hidden, mask = common.entering(module, call)
    hidden = common.zeroed(hidden, mask)
    r, w, k, v, a, g = entering(module, hidden)
    keys = run(module.k_proj, k)
    values = run(module.v_proj, v)
    is_first = module.layer_idx == 0
    if not is_first:
        first = call.argument("v_first", _TAKEN)
        values = with_first(values, first, run(module.v_lora, v))
    streams = Streams(
        run(module.r_proj, r),
        log_decay(run(module.w_lora, w)),
        keys,
        values,
        torch.sigmoid(run(module.a_lora, a)),
        run(module.g_lora, g),
        run(module.g_lora, torch.zeros_like(g[:1, :1])),
        _erase(module, keys),
    )
    linear = time_mixing(module, module.g_norm, module.o_proj, streams, mask)
    return replace(linear, passed_on={_RETURNED: values}) if is_first else linear


def _erase(module: Any, keys: Tensor) -> Tensor:
    """The keys to erase by, (B, L, H, N); a kernel with fused norms adds to their square."""
    x = keys * module.k_k.to(keys)
    if not module.fuse_norm:
        return unit(x, module.num_heads)
    x = as_heads(x, module.num_heads)
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _FUSED_EPS)
