"""The delta rule with decay: DeltaNet, Gated DeltaNet, Kimi Delta Attention.

    S[t] = decay[t] S[t-1],   S[t] += beta[t] k[t] (v[t] - k[t] . S[t]),   y[t] = q[t] . S[t]

Given q, k, beta and the decays this is linear in v; the matrix is
(Q K^T . E) (I + tril(beta K K^T . E, -1))^-1 diag(beta), E the products of decays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..base import Operator, Role, Shape
from ..kernels.arithmetic import with_graphs
from ..kernels.bands import shift_tokens
from ..kernels.chunks import Chunk, Steps, in_chunks
from ..kernels.ut_transform import Corrected, CorrectedSteps, corrected
from .base import ChunkedHeads
from .scalar_decay import ScalarDecayHeads
from .vector_decay import VectorDecayHeads


class DeltaRule(ChunkedHeads):
    """A state that is corrected towards each new value along its key.

    S[t] = decay[t] S[t-1], then S[t] += beta[t] k[t] (v[t] - k[t] . S[t]), and y[t] = q[t] . S[t].
    Its matrix is (Q K^T . E) (I + tril(beta K K^T . E, -1))^-1 diag(beta), where E holds the
    products of decays.

    Args:
        query: (B, L, H, N).
        key: (B, L, H, N).
        beta: step sizes (B, L, H).
        log_decay: logarithms of the decays, per head (B, L, H) or per key channel (B, L, H, N);
            None for no decay.
        per_head: value channels of a head, P.
        component: name of the part it stands for. Default: ``"scan"``.

    Example:
        >>> import torch
        >>> from captum_ssm.operators import DeltaRule
        >>> key = torch.ones(1, 3, 1, 1)  # one key for all: each value replaces the one before
        >>> memory = DeltaRule(key, key, torch.ones(1, 3, 1), None, per_head=1)
        >>> torch.allclose(memory.dense(), torch.eye(3))
        True
    """

    roles: Mapping[str, Role] = {
        "query": "query",
        "key": "key",
        "beta": "step",
        "log_decay": "step",
    }

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
        coefficients = {"query": query, "key": key, "beta": beta, "log_decay": log_decay}
        self.live = with_graphs(coefficients)
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

    def at(self, coefficients: Mapping[str, Tensor]) -> DeltaRule:
        named = {**self.tensors(), **coefficients}
        rows = named["query"], named["key"], named["beta"], named.get("log_decay")
        return DeltaRule(*rows, self.shape.per_head, self.component)

    def backward(self, values: Tensor, gradient: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        key, beta = self.key, self.beta[..., None]
        # what is found of each key before it is corrected, as the token before would read it
        decayed = key if self.log_decay is None else key * self._decays()
        late = self.at({"query": shift_tokens(decayed, -1)})
        missing = values - shift_tokens(late.apply(values), 1)
        # linear attention of corrected values, which lack what linear attention among keys finds
        corrected, asked = beta * missing, self.transpose(gradient)
        read, of_read = self._attention(self.query).backward(corrected, gradient)
        lack, of_lack = self._attention(key).backward(corrected, -asked)
        own = key.square().sum(-1, keepdim=True)
        found = {
            "query": of_read["query"],
            "key": of_read["key"] + of_lack["query"] + of_lack["key"],
            "beta": ((read + lack + own * asked) * missing).sum(-1),
        }
        found["key"] += 2 * key * (asked * corrected).sum(-1, keepdim=True)
        if self.log_decay is not None:
            found["log_decay"] = of_read["log_decay"] + of_lack["log_decay"]
        return asked, found

    def _decays(self) -> Tensor:
        """(B, L, H, 1), or by key channel (B, L, H, N)."""
        assert self.log_decay is not None
        logs = self.log_decay
        return (logs if logs.dim() == 4 else logs[..., None]).exp()

    def _attention(self, query: Tensor) -> ScalarDecayHeads | VectorDecayHeads:
        """Linear attention to the keys, with the same decays."""
        logs = self.log_decay
        if logs is not None and logs.dim() == 4:
            return VectorDecayHeads(query, self.key, logs, self.shape.per_head)
        logs = torch.zeros_like(self.beta) if logs is None else logs
        return ScalarDecayHeads(query, self.key, logs, None, self.shape.per_head)

    # --- reads, writes, carry --------------------------------------------------------------

    def chunk(self, part: slice, length: int) -> Chunk:
        return self._corrected(part, length).chunk(part)

    def _corrected(self, part: slice, length: int) -> Corrected:
        logs = self.log_decay
        if logs is not None:
            logs = in_chunks((logs if logs.dim() == 4 else logs[..., None])[:, part], length)
        query, key, beta = (
            in_chunks(x[:, part], length) for x in (self.query, self.key, self.beta[..., None])
        )
        return corrected(query, key, beta, logs)

    # --- the map and its adjoint -----------------------------------------------------------

    def _steps(self, length: int, transposed: bool) -> Steps:
        """By the corrected values: chunks' own matrices would cost more."""
        return CorrectedSteps(self._corrected, length, transposed)
