"""Several steps of the delta rule at every token: Gated DeltaProduct."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from ..base import Operator, Role, Shape
from ..kernels.arithmetic import with_graphs
from ..kernels.bands import Band
from ..kernels.rows import Strip, sum_of_lags
from .base import Coefficients
from .delta_rule import DeltaRule


class DeltaProduct(Coefficients):
    """A delta rule that corrects the state M times at every token before reading it.

    The state S of a head first decays.  Then each step m corrects it along a separate key,
    S += beta[t, m] k[t, m] (v[t, m] - k[t, m] . S), and y[t] = q[t] . S.  A head of this operator
    has the values of only one step; the values of the other steps are in other heads.  The sum of
    all these heads' outputs is y.  This operator is a :class:`DeltaRule` over all L M steps.

    Args:
        query: queries (B, L, H, N).
        key: keys of each step (B, L, M, H, N).
        beta: step sizes (B, L, M, H).
        log_decay: logarithms of the decays (B, L, H); None for no decay.
        writes: for each head, the index (from 0) of the step that adds the head's values.
        per_head: number of value channels of a head, P.
        component: name of the mixer's part that it represents. Default: ``"scan"``.

    Example:
        >>> import torch
        >>> from captum_ssm.operators import DeltaProduct
        >>> key = torch.eye(2).view(1, 1, 2, 1, 2).expand(1, 3, 2, 2, 2)  # one key per step
        >>> query, beta = torch.ones(1, 3, 2, 2), torch.ones(1, 3, 2, 2)
        >>> memory = DeltaProduct(query, key, beta, None, writes=[0, 1], per_head=1)
        >>> torch.allclose(memory.dense("heads"), torch.eye(3))  # each value replaces one
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
        writes: Sequence[int],
        per_head: int,
        component: str | None = "scan",
    ) -> None:
        self.query, self.key, self.beta = query.detach(), key.detach(), beta.detach()
        self.log_decay = None if log_decay is None else log_decay.detach()
        self.writes = tuple(writes)
        self.component = component
        coefficients = {"query": query, "key": key, "beta": beta, "log_decay": log_decay}
        self.live = with_graphs(coefficients)
        batch, tokens, heads, _ = query.shape
        self.shape = Shape(batch, tokens, heads, per_head)

    def select(self, heads: Sequence[int]) -> Operator:
        """Restrict the operator to some heads, which here are not always the third dimension."""
        head_list = list(heads)
        key, beta = self.key[..., head_list, :], self.beta[..., head_list]
        return self._selected(heads, key=key, beta=beta, writes=[self.writes[h] for h in head_list])

    def backward(self, values: Tensor, gradient: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Differentiate the delta rule over all steps, and map its gradients to tokens."""
        steps, of_outputs = self._to_steps(values), self._at_last_step(gradient)
        of_values, of_steps = self._unrolled.backward(steps, of_outputs)
        by_token = {name: self._by_token(x, 1) for name, x in of_steps.items()}
        by_token["query"] = by_token["query"][:, :, -1]  # read at the last step
        if "log_decay" in by_token:
            by_token["log_decay"] = by_token["log_decay"][:, :, 0]  # decays at the first
        return self._from_steps(of_values), by_token

    # --- the sequence of all steps ---------------------------------------------------------

    @property
    def steps(self) -> int:
        """Number of steps per token, M."""
        return self.key.shape[2]

    @cached_property
    def _unrolled(self) -> DeltaRule:
        """The delta rule over L M steps; a token's first step decays, the last has the query."""
        logs = self.log_decay
        if logs is not None:
            logs = self._place_at_step(logs, step=0, dim=2)
        key, beta = self.key.flatten(1, 2), self.beta.flatten(1, 2)
        return DeltaRule(self._at_last_step(self.query), key, beta, logs, self.shape.per_head)

    def _by_token(self, x: Tensor, dim: int) -> Tensor:
        """Reshape dimension ``dim`` of ``x`` from steps (..., L M, ...) to (..., L, M, ...)."""
        return torch.unflatten(x, dim, (self.shape.tokens, self.steps))

    def _place_at_step(self, x: Tensor, step: int, dim: int) -> Tensor:
        """Place ``x`` (B, L, ...) at one step of each token, (B, L M, ...), with zeros elsewhere.

        ``dim`` is the dimension of ``x`` after the dimension of the tokens.
        """
        out = x.new_zeros(*x.shape[:dim], self.steps, *x.shape[dim:])
        out.select(dim, step).copy_(x)
        return out.flatten(dim - 1, dim)

    def _at_last_step(self, u: Tensor) -> Tensor:
        """Place ``u`` (..., B, L, H, P) at last steps, (..., B, L M, H, P); zero elsewhere."""
        return self._place_at_step(u, step=self.steps - 1, dim=u.dim() - 2)

    @cached_property
    def _is_writing_step(self) -> Tensor:
        """True for the step that adds the values of each head, (M, H, 1)."""
        writes = torch.tensor(self.writes, device=self.device)
        return (torch.arange(self.steps, device=self.device)[:, None] == writes)[..., None]

    def _to_steps(self, v: Tensor) -> Tensor:
        """Place ``v`` (..., B, L, H, P) at the heads' steps ``writes``, (..., B, L M, H, P)."""
        return (v.unsqueeze(-3) * self._is_writing_step).flatten(-4, -3)

    def _from_steps(self, x: Tensor) -> Tensor:
        """Return ``x`` (..., B, L M, H, P) at the heads' steps ``writes``, (..., B, L, H, P)."""
        return (self._by_token(x, -3) * self._is_writing_step).sum(-3)

    # --- the map and its matrices ----------------------------------------------------------

    def apply(self, v: Tensor) -> Tensor:
        return self._by_token(self._unrolled.apply(self._to_steps(v)), -3)[..., -1, :, :]

    def transpose(self, u: Tensor) -> Tensor:
        return self._from_steps(self._unrolled.transpose(self._at_last_step(u)))

    def entries(self, left: Tensor, band: Band, rows: range, by_head: bool = False) -> Strip:
        """Compute the rows of all steps, and reduce them to rows and columns of tokens."""
        tokens, left = self.shape.tokens, self._at_last_step(left.expand(self.shape))
        steps = range(rows.start * self.steps, rows.stop * self.steps)

        def strip_for(right: Tensor) -> Strip:  # rows of diag(left) . self . diag(right)
            written = {0: self._to_steps(right.expand(self.shape))}
            strip = self._unrolled.entries(left, written, steps, by_head)
            entries = self._reduce_to_tokens(strip.full(tokens * self.steps), len(rows))
            return Strip(entries, rows, range(tokens))

        return sum_of_lags(strip_for, band, rows, tokens)

    def _reduce_to_tokens(self, matrices: Tensor, rows: int) -> Tensor:
        """Reduce matrices over steps (..., R M, L M) to matrices over tokens (..., R, L).

        A token's output is read at its last step; its value enters at any one step.
        """
        last_steps = torch.unflatten(matrices, -2, (rows, self.steps))[..., -1, :]
        return self._by_token(last_steps, -1).sum(-1)
