"""Softmax attention of timm's vision transformers.

    q, k, v = qkv(x)      alpha = softmax(scale norm(q) norm(k)^T + mask)      y = gate alpha v

and output = proj(y).  Fused or not, the module computes the same; the operator is recomputed from
qkv.  Frozen: the probabilities, and the gate where there is one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UnsupportedMixerError
from ..operators import Chain, Diagonal, Shape
from .base import Call, LinearMixer
from .parts.common import as_heads, run, working_dtype
from .parts.softmax import seen_pairs, softmax_attention


def timm_attention(module: Any, call: Call) -> LinearMixer:
    """timm.layers.Attention."""
    if not isinstance(getattr(module, "norm", nn.Identity()), nn.Identity):
        raise UnsupportedMixerError(
            f"{type(module).__name__} with scale_norm=True: a norm of attention's output over all "
            "heads is not supported."
        )
    hidden = call.argument("x", 0)
    hidden = hidden.to(working_dtype(module, hidden))
    batch, tokens, _ = hidden.shape
    qkv = run(module.qkv, hidden).view(batch, tokens, 3, module.num_heads, -1)
    query, key, values = qkv.unbind(2)  # (B, L, H, P)
    query, key = (
        run(norm, x.transpose(1, 2)) for norm, x in ((module.q_norm, query), (module.k_norm, key))
    )
    mask = call.argument("attn_mask", 1)
    if call.argument("is_causal", 2):
        mask = seen_pairs(tokens, hidden.device)
    if mask is not None:
        mask = mask[(None,) * (4 - mask.dim())]
    operator, keep = softmax_attention(query, key, values, module.scale, mask)
    if getattr(module, "gate", None) is not None:
        gate = as_heads(torch.sigmoid(run(module.gate, hidden)), module.num_heads)
        operator = Chain(Diagonal(gate, Shape(*values.shape), "gate", at_rest=0.5), operator)

    def project(y: Tensor) -> Tensor:
        return run(module.proj, y.flatten(2))

    return LinearMixer(values, operator, project, keep)
