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
from ..parts.common import as_heads, run, unit_vectors, zeroed
from .common import project, to_mixer, value_path, zeroed_input_and_mask

#: Constant added to the denominators of the solver.
_EPS = 1e-5


def fla_mesa_net(module: Any, call: Call) -> LinearMixer:
    """Linearize fla's MesaNet: linear attention with queries (A[t] + diag(lambda))^-1 q[t]."""
    hidden, mask = zeroed_input_and_mask(module, call, skips="short convolution")
    heads = module.num_heads
    q, k = (unit_vectors(as_heads(project(module, name, hidden), heads)) for name in "qk")
    beta = zeroed(torch.sigmoid(run(module.b_proj, hidden)), mask)
    log_decay = zeroed(F.logsigmoid(run(module.a_proj, hidden)), mask)
    key_attention = ScalarDecayHeads(q, k, log_decay, beta, k.shape[-1])
    ridge = F.softplus(module.lambda_params.to(q)) + module.lambda_lower_bound
    solution = _solve(q, key_attention, ridge.detach().view(heads, -1), module.max_cg_step_training)
    path = value_path(module, hidden, mask, module.head_v_dim)
    path.scan(ScalarDecayHeads(solution, k, log_decay, beta, module.head_v_dim))
    return to_mixer(module, hidden, path, module.o_norm, F.silu if module.use_output_gate else None)


def _solve(q: Tensor, key_attention: ScalarDecayHeads, ridge: Tensor, iterations: int) -> Tensor:
    """Solve (A[t] + diag(ridge)) q* = q for q* (B, L, H, N), by steps of conjugate gradients.

    The result is linear in q: the step sizes, which also depend on q, are frozen.

    Args:
        q: queries (B, L, H, N).
        key_attention: linear attention with the layer's keys as values; its queries are replaced.
        ridge: lambda (H, N).
        iterations: number of steps.
    """

    def gram(x: Tensor) -> Tensor:
        """Return A[t] x[t] for every token; A is symmetric."""
        return key_attention.at({"query": x}).apply(key_attention.key)

    solution, residual = torch.zeros_like(q), q
    direction, residual_size = q, _squared_length(q)
    for _ in range(iterations):
        # differentiable in the direction only, because A is frozen
        product = linear_map(direction, gram, gram) + ridge * direction
        with torch.no_grad(), unseen():
            step = residual_size / ((direction * product).sum(-1, keepdim=True) + _EPS)
        solution = solution + step * direction
        residual = residual - step * product
        with torch.no_grad(), unseen():
            new_residual_size = _squared_length(residual)
            ratio = new_residual_size / (residual_size + _EPS)
        direction, residual_size = residual + ratio * direction, new_residual_size
    return solution


def _squared_length(x: Tensor) -> Tensor:
    return x.detach().square().sum(-1, keepdim=True)
