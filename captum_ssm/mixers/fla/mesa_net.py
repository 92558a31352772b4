"""fla's MesaNet: linear attention whose queries solve a linear system at every token.

    q, k = SiLU(conv(.)), on the unit sphere       beta = sigmoid(b_proj h)      v = v_proj h
    A[t] = decay[t] A[t-1] + beta[t] k[t] k[t]^T,  S[t] = decay[t] S[t-1] + beta[t] k[t] v[t]^T
    q*[t] = (A[t] + diag(lambda))^-1 q[t],         s[t] = q*[t] . S[t]
    y = RMSNorm_h(s), times SiLU(g) if there is a gate          output = o_proj(y)

There is one decay per head, sigmoid(a_proj h), and lambda = softplus(lambda_params) plus a bound.
A few steps of conjugate gradients solve for q*; each step multiplies by A[t], which is linear
attention with the keys as values.  Frozen: q*, k, beta, the decays, the norm's statistics and the
gate.  Relevance of q* is propagated only to q, not to the keys and decays in A.

On a GPU the layer's kernels store q and k in float16, so even a float32 layer has float16's
rounding errors.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...operators import ScalarDecayHeads
from ...operators.kernels.arithmetic import linear_map, unseen
from ..base import Call, LinearMixer
from ..parts.common import as_heads, run, unit, zeroed
from .common import closing, entering_unpadded, projected, value_path

#: Constant added to the denominators of the solver.
_EPS = 1e-5


def fla_mesa_net(module: Any, call: Call) -> LinearMixer:
    """Linearize fla's MesaNet: linear attention with queries (A[t] + diag(lambda))^-1 q[t]."""
    hidden, mask = entering_unpadded(module, call, skips="short convolution")
    heads = module.num_heads
    q, k = (unit(as_heads(projected(module, name, hidden), heads)) for name in "qk")
    beta = zeroed(torch.sigmoid(run(module.b_proj, hidden)), mask)
    log_decay = zeroed(F.logsigmoid(run(module.a_proj, hidden)), mask)
    keys = ScalarDecayHeads(q, k, log_decay, beta, k.shape[-1])
    ridge = F.softplus(module.lambda_params.to(q)) + module.lambda_lower_bound
    solved = _solved(q, keys, ridge.detach().view(heads, -1), module.max_cg_step_training)
    path = value_path(module, hidden, mask, module.head_v_dim)
    path.scan(ScalarDecayHeads(solved, k, log_decay, beta, module.head_v_dim))
    return closing(module, hidden, path, module.o_norm, F.silu if module.use_output_gate else None)


def _solved(q: Tensor, keys: ScalarDecayHeads, ridge: Tensor, iterations: int) -> Tensor:
    """Solve (A[t] + diag(ridge)) q* = q for q* (B, L, H, N), by steps of conjugate gradients.

    The result is linear in q: the step sizes, which also depend on q, are frozen.

    Args:
        q: queries (B, L, H, N).
        keys: linear attention with the layer's keys; its queries are replaced.
        ridge: lambda (H, N).
        iterations: number of steps.
    """

    def gram(x: Tensor) -> Tensor:
        """Return A[t] x[t] for every token; A is symmetric."""
        return keys.at({"query": x}).apply(keys.key)

    solution, residual = torch.zeros_like(q), q
    direction, size = q, _squared(q)
    for _ in range(iterations):
        product = linear_map(direction, gram, gram) + ridge * direction
        with torch.no_grad(), unseen():
            step = size / ((direction * product).sum(-1, keepdim=True) + _EPS)
        solution = solution + step * direction
        residual = residual - step * product
        with torch.no_grad(), unseen():
            new = _squared(residual)
            share = new / (size + _EPS)
        direction, size = residual + share * direction, new
    return solution


def _squared(x: Tensor) -> Tensor:
    return x.detach().square().sum(-1, keepdim=True)
