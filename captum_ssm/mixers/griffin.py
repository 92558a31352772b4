"""Griffin: transformers' recurrent_gemma.

    u = conv(W_x h) + b
    i, r = sigmoid(block-diagonal maps of u)      a = exp(-8 r softplus(c))
    s[t] = (1 - reset[t]) a[t] s[t-1] + m[t] i[t] u[t]
    y = gelu(W_y h) s                             output = W_o y

where m = sqrt(1 - a^2), or 1 at a reset.  A reset is a token at position 0: the beginning of the
sequence, or of each packed sequence.  Frozen: a, m, i and the gate.  The recurrent block gets no
padding mask, so it treats padded tokens like real tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import UnsupportedMixerError
from ..operators import ElementwiseRecurrence
from ..operators.kernels.arithmetic import full_precision
from .attention import hf_attention
from .base import Call, LinearMixer
from .parts.common import mixer_input, run
from .path import Path


def recurrent_gemma(module: Any, call: Call) -> LinearMixer:
    """Linearize RecurrentGemmaRecurrentBlock: s[t] = a[t] s[t-1] + m[t] i[t] u[t], then a gate."""
    call.refuse_cache("past_key_values")
    hidden = mixer_input(module, call, "input_states")
    path = Path(run(module.linear_x, hidden)).conv(module.conv_1d)
    reset = call.argument("position_ids", 1)[..., None] == 0  # (1 or B, L, 1)
    decay, input_factor = _coefficients(module.rg_lru, path.now.squeeze(-1), reset)
    path = path.scale(input_factor, "scan").scan(ElementwiseRecurrence(decay))
    return path.scale(module.act_fn(run(module.linear_y, hidden)), "gate").to(module.linear_out)


def sdpa_attention(module: Any, call: Call) -> LinearMixer:
    """Linearize RecurrentGemmaSdpaAttention in transformers 4; refuse inputs beyond its window.

    For such long inputs the module attends to all tokens without a cache, and to wrong tokens with
    a cache.
    """
    mixer = hf_attention(module, call)
    window = module.config.attention_window_size
    if mixer.values.shape[1] > window:
        raise UnsupportedMixerError(
            f"RecurrentGemma in transformers 4 got {mixer.values.shape[1]} tokens. For more "
            f"than attention_window_size={window} tokens its outputs depend on whether there is a "
            f"cache, so it has no adapter. Use transformers 5, or pass at most {window} tokens."
        )
    return mixer


def _coefficients(rg_lru: Any, u: Tensor, reset: Tensor) -> tuple[Tensor, Tensor]:
    """Return the decay a = exp(-8 r softplus(c)) and the factor m i, for ``u`` (B, L, D).

    m is sqrt(1 - a^2); at a reset, a is 0 and m is 1.
    """
    i = _block_gate(u, rg_lru.input_gate_weight, rg_lru.input_gate_bias)
    r = _block_gate(u, rg_lru.recurrent_gate_weight, rg_lru.recurrent_gate_bias)
    log_decay = -8.0 * r * F.softplus(rg_lru.recurrent_param.to(u))
    # not by expm1, to reproduce the model's rounding near a = 1
    m = torch.sqrt(1 - torch.exp(2 * log_decay))
    decay = torch.exp(log_decay).masked_fill(reset, 0.0)
    return decay, i * m.masked_fill(reset, 1.0)


def _block_gate(u: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return sigmoid(u_h weight_h + bias_h) for each head h of ``u`` (B, L, D), concatenated."""
    # examples stay in the first dimension, as recorded constants require
    heads = torch.unflatten(u, -1, weight.shape[:2])
    with full_precision(u.device):
        maps = torch.einsum("blhi,hij->blhj", heads, weight.to(u)) + bias.to(u)
    return torch.sigmoid(maps).flatten(2)
