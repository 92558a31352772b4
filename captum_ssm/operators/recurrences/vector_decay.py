"""Linear attention with one decay per head and key channel: GLA, HGRN2, RWKV-6."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from ..base import Role, Shape
from ..chain import Chain
from ..conv import ShortConv
from ..diagonal import Diagonal
from ..kernels.arithmetic import Scratch, exponential, with_graphs
from ..kernels.attention_backward import gradients
from ..kernels.bands import shift_tokens
from ..kernels.chunks import Chunk, few_vectors, in_chunks
from ..kernels.odd_even import FadingSteps
from ..kernels.portions import at_a_time, even_size, parts
from ..kernels.within_chunk import decayed_by_logs
from .base import ChunkedHeads
from .elementwise import ElementwiseRecurrence

#: Largest number of elements of states in memory together (1 MiB in float32).
_STATE_ELEMENTS = 2**18


class VectorDecayHeads(ChunkedHeads):
    """Linear attention with one decay per head, key channel and token: GLA, HGRN2, RWKV-6.

    alpha_h[i, j] = sum over n of q[i, n] (product of decay[j+1..i, n]) k[j, n] for j <= i.

    Args:
        query: queries (B, L, H, N).
        key: keys (B, L, H, N).
        log_decay: logarithms of the decays (B, L, H, N), at most 0.
        per_head: number of value channels of a head, P.
        bonus: factors (H, N) of a token's own value, as in RWKV-6: token i reads its own value with
            weight q[i] . (bonus k[i]), and the state before its decay and value. Default: None.
        component: name of the mixer's part that it represents. Default: ``"scan"``.

    Example:
        >>> import torch
        >>> from captum_ssm.operators import VectorDecayHeads
        >>> query = key = torch.ones(1, 3, 1, 2)
        >>> log_decay = torch.tensor([0.5, 1.0]).log().expand(1, 3, 1, 2)
        >>> scan = VectorDecayHeads(query, key, log_decay, per_head=4)
        >>> torch.allclose(scan.dense()[0, -1], torch.tensor([0.25 + 1, 0.5 + 1, 1 + 1]))
        True
    """

    roles: Mapping[str, Role] = {"query": "query", "key": "key", "log_decay": "step"}
    fixed = ("bonus",)

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        log_decay: Tensor,
        per_head: int,
        bonus: Tensor | None = None,
        component: str | None = "scan",
    ) -> None:
        self.query, self.key, self.log_decay = query.detach(), key.detach(), log_decay.detach()
        self.bonus = None if bonus is None else bonus.detach()
        self.component = component
        self.live = with_graphs({"query": query, "key": key, "log_decay": log_decay})
        batch, tokens, heads, _ = log_decay.shape
        self.shape = Shape(batch, tokens, heads, per_head)

    def backward(self, values: Tensor, gradient: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the gradients of linear attention with one query and one key per token."""
        factors = [self.query], [self.key], self.log_decay
        result = gradients(*factors, [values], [gradient], self.bonus)
        of_factors = *result.queries, *result.keys, result.log_decay
        return result.values[0], dict(zip(self.roles, of_factors, strict=True))

    # --- reads, writes, carry --------------------------------------------------------------

    def chunk(self, part: slice, length: int) -> Chunk:
        """Return the chunks of the tokens ``part``; with a bonus, diagonals are separate."""
        q, k, logs = (in_chunks(x[:, part], length) for x in (self.query, self.key, self.log_decay))
        if self.bonus is None:
            (within,), (reads,), writes, total = decayed_by_logs(logs, [q], k)
            return Chunk(part, within, reads, writes, total.mT)
        # a token reads the state before its step: compute with the next token's query, then move
        # the rows on by one token
        next_q = F.pad(q, (0, 0, -1, 1))
        (from_earlier,), (next_reads,), writes, total = decayed_by_logs(logs, [next_q], k)
        diagonal = torch.diag_embed((q * self.bonus[:, None, None] * k).sum(-1))
        reads = torch.cat([q[..., :1, :], next_reads[..., :-1, :]], -2)
        return Chunk(part, F.pad(from_earlier, (0, 0, 1, -1)) + diagonal, reads, writes, total.mT)

    def _keys(self, part: slice) -> Tensor:
        """Return the keys, which the adjoint exchanges with :meth:`_state_queries`."""
        return self.key[:, part]

    def _state_queries(self, part: slice) -> Tensor:
        """Return the query that reads the state after each token.

        With a bonus a token reads the state before its step, so it is the next token's query.
        """
        if self.bonus is None:
            return self.query[:, part]
        next_queries = self.query[:, part.start + 1 : part.stop + 1]
        if part.stop < self.shape.tokens:
            return next_queries
        none = torch.zeros_like(self.query[:, :1])  # after the last token there is no query
        return torch.cat([next_queries, none], 1)

    def _own_weights(self, bonus: Tensor) -> Tensor:
        """Return the weight of each token's value in the token's own output, (B, L, H, 1)."""
        weights, scratch = [], Scratch(self.key)
        for part in self._parts(1):
            query = self.query[:, part]
            products = torch.mul(query, bonus, out=scratch("products", *query.shape))
            weights.append(products.mul_(self.key[:, part]).sum(-1, keepdim=True))
        return torch.cat(weights, 1)

    # --- the map and its adjoint, where few vectors are mapped -----------------------------

    def _run(self, x: Tensor, transposed: bool) -> Tensor:
        """Run by chunks, or for few vectors by the states of all tokens."""
        if not few_vectors(x):
            return super()._run(x, transposed)
        if self.bonus is None:
            return self._run_by_states(x, transposed)
        # with a bonus a token reads the state before its own step: _run_by_states reads each state
        # with the next token's query, and the result moves on by one token
        if transposed:
            from_earlier = self._run_by_states(shift_tokens(x, -1), transposed)
        else:
            from_earlier = shift_tokens(self._run_by_states(x, transposed), 1)
        return torch.addcmul(from_earlier, self._own_weights(self.bonus), x)

    def _run_by_states(self, v: Tensor, transposed: bool) -> Tensor:
        """Return alpha v, or alpha-transposed v, without the bonus, from the states of all tokens.

        S[t] = decay[t] S[t-1] + k[t] v[t], y[t] = q[t] . S[t]; each channel of v has separate
        states.  For few vectors this costs less than the matrices within chunks.
        """
        x = v.reshape(-1, *v.shape[-4:]).movedim(-1, 1).flatten(0, 1)  # (S P, B, L, H)
        out = torch.empty_like(x)
        scratch = Scratch(v)

        def decays(part: slice) -> Tensor:
            """Return the decays (B, T, H N) of the tokens ``part``, in reused memory."""
            logs = self.log_decay[:, part]
            return exponential(logs, scratch(("decays", logs.shape[1]), *logs.shape)).flatten(2)

        steps = FadingSteps(decays, self.key, transposed)
        keys_of, queries_of = self._keys, self._state_queries
        if transposed:
            keys_of, queries_of = queries_of, keys_of
        for part in self._parts(len(x), backwards=transposed):
            keys = keys_of(part)
            states = scratch("states", len(x), *keys.shape[:2], keys[0, 0].numel())
            states_by_head = torch.unflatten(states, -1, keys.shape[2:])
            torch.mul(x[:, :, part, :, None], keys, out=states_by_head)
            steps(states, part, states)
            out[:, :, part] = states_by_head.mul_(queries_of(part)).sum(-1)
        out = torch.unflatten(out, 0, (-1, v.shape[-1])).movedim(1, -1)
        return out.reshape(v.shape).contiguous()

    def _parts(self, stack: int, backwards: bool = False) -> Iterator[slice]:
        """Yield slices of tokens so that their states, of ``stack`` vectors, fit into the cache."""
        batch, tokens, heads, state = self.key.shape
        most = at_a_time(_STATE_ELEMENTS, self.device) // (stack * batch * heads * state)
        return parts(tokens, even_size(tokens, max(1, most)), backwards)

    # --- its matrices ----------------------------------------------------------------------

    def _sum_of_heads(self, left: Tensor, right: Tensor, rows: range) -> Tensor:
        """Compute the rows with an :class:`ElementwiseRecurrence` of H N channels."""
        row = (left[..., None] * self.query).flatten(2)[..., None]  # (B, L, H N, 1)
        column = (right[..., None] * self.key).flatten(2)[..., None]
        states = ElementwiseRecurrence(exponential(self.log_decay).flatten(2))
        if self.bonus is None:
            return states.entries(row, {0: column}, rows).full(rows.stop)
        # a query reads the state of the token before, and the token's own value with the bonus
        one = self._ones(states.shape.heads, 1, 1)
        shifted = Chain(ShortConv(one, states.shape, lags=(1,)), states)
        diagonal = Diagonal(self._own_weights(self.bonus), self.shape._replace(per_head=1))
        strip = shifted.entries(row, {0: column}, rows)
        return diagonal.added_to(strip, left[..., None], {0: right[..., None]}).full(rows.stop)
