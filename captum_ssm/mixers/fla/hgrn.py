"""HGRN and HGRN2: fla's HGRNAttention and HGRN2Attention.

    f = sigmoid(f_proj h), above the layer's lower bound
    HGRN     s[t] = f[t] s[t-1] + (1 - f[t]) SiLU(i_proj h)[t]        y = SiLU(g) RMSNorm(s)
    HGRN2    gated linear attention with decay f and key 1 - f        y = RMSNorm(s)

with the norms over all channels, and output = o_proj(y).  In HGRN2 q passes SiLU; f, i and q each
pass a short convolution if the layer has them.  Frozen: f, q, the ratio SiLU(i) / i, the norm's
statistics and the gate.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...operators import ElementwiseRecurrence, VectorDecayHeads
from ..base import Call, LinearMixer
from ..parts.common import as_heads, projection, run, zeroed
from .common import entering, entering_unpadded, projected, value_path

#: HGRN2's norm runs as a function that does not get the module's eps.
_HGRN2_EPS = 1e-5


def fla_hgrn(module: Any, call: Call) -> LinearMixer:
    """fla's HGRNAttention; padded tokens write nothing, but the state decays over them."""
    hidden, mask = entering(module, call)
    decay = log_forget(module, projected(module, "f", hidden, mask=mask), call).exp()
    path = value_path(module, hidden, mask, 1, name="i", silu=True)
    path.scale(1 - decay, "scan").scan(ElementwiseRecurrence(decay))
    path.rms_norm(module.g_norm.weight, module.g_norm.eps, groups=1)
    return path.gate(run(module.g_proj, hidden)).to(module.o_proj)


def fla_hgrn2(module: Any, call: Call) -> LinearMixer:
    """fla's HGRN2Attention."""
    hidden, mask = entering_unpadded(module, call)
    q = F.silu(projected(module, "q", hidden)) * module.head_f_dim**-0.5
    log_decay = log_forget(module, projected(module, "f", hidden), call)
    q, k, log_decay = (as_heads(x, module.num_heads) for x in (q, 1 - log_decay.exp(), log_decay))
    path = value_path(module, hidden, mask, module.head_i_dim, name="i")
    path.scan(VectorDecayHeads(q, k, zeroed(log_decay, mask), module.head_i_dim))
    path.rms_norm(module.g_norm.weight, _HGRN2_EPS, groups=1)
    # the layer reads o_proj by its weight, so an adapter around it would change nothing
    return path.silence().to(projection(module.o_proj, called=False))


def log_forget(module: Any, f: Tensor, call: Call) -> Tensor:
    """log of the forget gate; the model passes the lower bound to each layer but the first."""
    log_f = F.logsigmoid(f)
    bound = call.argument("lower_bound", 5)
    if bound is None or not module.layer_idx > 0:
        return log_f
    bound = bound.to(f)
    return torch.logaddexp(bound.log(), torch.log1p(-bound) + log_f)
