"""The delta rule with decay: DeltaNet, Gated DeltaNet, Kimi Delta Attention.

    S[t] = decay[t] S[t-1],   S[t] += beta[t] k[t] (v[t] - k[t] . S[t]),   y[t] = q[t] . S[t]

Given q, k, beta and the decays this is linear in v; the matrix is
(Q K^T . E) (I + tril(beta K K^T . E, -1))^-1 diag(beta), E the products of decays.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .base import Operator, Recurrent, Shape
from .heads import HeadOperator, no_state


class DeltaRule(Recurrent, HeadOperator):
    """A state that is corrected towards each new value along its key.

    Args:
        query: (B, L, H, N).
        key: (B, L, H, N).
        beta: step sizes (B, L, H).
        log_decay: logarithms of the decays, per head (B, L, H) or per key channel (B, L, H, N);
            None for no decay.
        per_head: value channels of a head, P.
        component: name of the part it stands for.
    """

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        beta: Tensor,
        log_decay: Tensor | None,
        per_head: int,
        component: str | None = "scan",
    ) -> None:
        self.query, self.key, self.beta = query.detach(), key.detach(), beta.detach()
        self.log_decay = None if log_decay is None else log_decay.detach()
        self.component = component
        self.shape = Shape(beta.shape[0], beta.shape[1], beta.shape[2], per_head)

    def tensors(self) -> dict[str, Tensor]:
        named = {"query": self.query, "key": self.key, "beta": self.beta}
        return named if self.log_decay is None else {**named, "log_decay": self.log_decay}

    def select(self, heads: Sequence[int]) -> Operator:
        chosen = list(heads)
        return DeltaRule(
            self.query[:, :, chosen],
            self.key[:, :, chosen],
            self.beta[:, :, chosen],
            None if self.log_decay is None else self.log_decay[:, :, chosen],
            self.shape.per_head,
            self.component,
        )

    def _forward(self, v: Tensor) -> Tensor:
        out = torch.empty_like(v)
        state = no_state(v, self.key.shape[-1])
        for t in range(self.shape.tokens):
            q, k, beta, decay = self._step(t)
            state = state if decay is None else decay * state
            error = v[..., t, :, None, :] - k.mT @ state  # (..., B, H, 1, P)
            state = state + beta * k * error
            out[..., t, :, :] = (q.mT @ state).squeeze(-2)
        return out

    def _adjoint(self, u: Tensor) -> Tensor:
        out = torch.empty_like(u)
        state = no_state(u, self.key.shape[-1])
        for t in reversed(range(self.shape.tokens)):
            q, k, beta, decay = self._step(t)
            state = state + q * u[..., t, :, None, :]
            along = beta * (k.mT @ state)  # (..., B, H, 1, P)
            out[..., t, :, :] = along.squeeze(-2)
            state = state - k * along
            state = state if decay is None else decay * state
        return out

    def _step(self, t: int) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Query and key (B, H, N, 1), beta (B, H, 1, 1) and decay (B, H, N or 1, 1)."""
        decay: Tensor | None = None
        if self.log_decay is not None:
            decay = self.log_decay[:, t].exp()
            decay = decay[..., None, None] if decay.dim() == 2 else decay[..., None]
        q, k = self.query[:, t, :, :, None], self.key[:, t, :, :, None]
        return q, k, self.beta[:, t, :, None, None], decay
