"""Linear attention with one decay per head: Mamba-2, RetNet, lightning attention, mLSTM."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..base import Operator, Role, Shape
from ..kernels.arithmetic import doubled, exponential, with_graphs
from ..kernels.bands import shift_tokens
from ..kernels.chunks import Chunk, in_chunks
from ..kernels.portions import vectors_of_heads
from ..kernels.rows import slices
from ..kernels.triangle import block_of, decay_matrices, semiseparable_strip, sums_over_groups
from ..kernels.within_chunk import Decays
from .base import ChunkedHeads

#: Number of rows whose products of queries and keys are computed together.
_ROWS = 256


class ScalarDecayHeads(ChunkedHeads):
    """Linear attention with one decay per head and token: Mamba-2, RetNet, mLSTM.

    alpha_h[i, j] = q[i] . k[j] (product of the decays of tokens j+1..i) scale[j] for j <= i.

    Args:
        query: queries (B, L, G, N); G divides H, and H / G neighboring heads share a query.
        key: keys (B, L, G, N).
        log_decay: logarithms of the decays (B, L, H), at most 0.
        scale: factors of the values (B, L, H), or None for no factors.
        per_head: number of value channels of a head, P.
        component: name of the mixer's part that it represents. Default: ``"scan"``.
        rate: continuous-time decay rates (H,), not positive, if ``scale`` contains step sizes and
            log_decay = rate * scale (Mamba-2). Default: None, decays do not depend on ``scale``.

    Example:
        >>> import torch
        >>> from captum_ssm.operators import ScalarDecayHeads
        >>> query = key = torch.ones(1, 3, 1, 2)  # their products are 2
        >>> log_decay = torch.full((1, 3, 1), 0.5).log()
        >>> scan = ScalarDecayHeads(query, key, log_decay, None, per_head=4)
        >>> expected = torch.tensor([[2.0, 0.0, 0.0], [1.0, 2.0, 0.0], [0.5, 1.0, 2.0]])
        >>> torch.allclose(scan.dense(), expected[None])
        True
    """

    few_rows = 3
    roles: Mapping[str, Role] = {
        "query": "query",
        "key": "key",
        "log_decay": "step",
        "scale": "step",
    }
    fixed = ("rate",)

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        log_decay: Tensor,
        scale: Tensor | None,
        per_head: int,
        component: str | None = "scan",
        rate: Tensor | None = None,
    ) -> None:
        self.query, self.key, self.log_decay = query.detach(), key.detach(), log_decay.detach()
        self.scale = None if scale is None else scale.detach()
        self.rate = None if rate is None else rate.detach()
        self.component = component
        coefficients = {"query": query, "key": key, "log_decay": log_decay, "scale": scale}
        self.live = with_graphs(coefficients)
        batch, tokens, heads = log_decay.shape
        self.shape = Shape(batch, tokens, heads, per_head)

    def select(self, heads: Sequence[int]) -> Operator:
        """Restrict the operator to some heads; if they are in several groups, each is a group."""
        groups = [head // self._heads_per_group for head in heads]
        if len(set(groups)) == 1:
            groups = groups[:1]
        return self._selected(heads, query=self.query[:, :, groups], key=self.key[:, :, groups])

    def backward(self, values: Tensor, gradient: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        written = values if self.scale is None else self.scale[..., None] * values
        query, key = self.query, self.key
        if self._are_shared:
            query, key = (vectors_of_heads(x, self.shape.heads) for x in (query, key))
        # Each gradient is linear attention again, with queries, keys and values exchanged.  First
        # for entries j < i, which depend on decays; the diagonal, which does not, is added below.
        decay = exponential(self.log_decay)[..., None]
        next_gradient, next_query = (shift_tokens(decay * x, -1) for x in (gradient, query))
        # attention with gradients as queries, values as keys, and keys or queries as values
        swapped = ScalarDecayHeads(next_gradient, written, self.log_decay, None, key.shape[-1])
        plain = ScalarDecayHeads(next_query, key, self.log_decay, None, self.shape.per_head)
        of_query = shift_tokens(swapped.apply(key), 1)
        of_key = swapped.transpose(shift_tokens(query, -1))
        of_written = plain.transpose(shift_tokens(gradient, -1))
        # decay t is a factor of entry (i, j) if j < t <= i: sums over rows minus sums over columns
        by_row, by_column = (query * of_query).sum(-1), (written * of_written).sum(-1)
        own_weight = (gradient * written).sum(-1, keepdim=True)
        of_written = of_written + (query * key).sum(-1, keepdim=True) * gradient
        gradients = {
            "query": self._by_group(of_query + own_weight * key),
            "key": self._by_group(of_key + own_weight * query),
            "log_decay": doubled(by_row - by_column).flip(1).cumsum(1).flip(1).to(by_row),
        }
        if self.scale is None:
            return of_written, gradients
        gradients["scale"] = (values * of_written).sum(-1)
        return self.scale[..., None] * of_written, gradients

    def _by_group(self, x: Tensor) -> Tensor:
        """Return the sums (B, L, G, N) of ``x`` (B, L, H, N) over the heads of each group."""
        return torch.unflatten(x, 2, (-1, self._heads_per_group)).sum(3) if self._are_shared else x

    def _groups(self) -> Iterator[slice]:
        """Return the slice of heads of each group."""
        size = self._heads_per_group
        return (slice(start, start + size) for start in range(0, self.shape.heads, size))

    @property
    def _heads_per_group(self) -> int:
        """Number of heads in each group."""
        return self.shape.heads // self.query.shape[2]

    @property
    def _are_shared(self) -> bool:
        """Whether heads share queries and keys."""
        return self._heads_per_group > 1

    # --- reads, writes, carry --------------------------------------------------------------

    def chunk(self, part: slice, length: int) -> Chunk:
        """Return the chunks of the tokens ``part``, with queries and keys per group of heads.

        The decays since the chunk's start and until its end, per head, are passed as ``faded``.
        """
        q, k = (in_chunks(x[:, part], length) for x in (self.query, self.key))  # (B, G, C, T, N)
        logs = in_chunks(self.log_decay[:, part, :, None], length).squeeze(-1)
        decay = Decays(exponential(logs))
        scores = (q @ k.mT).tril_()[:, :, None]  # (B, G, 1, C, T, T)
        grouped = torch.unflatten(decay.between, 1, (-1, self._heads_per_group))
        within, until = (grouped * scores).flatten(1, 2), decay.until
        if self.scale is not None:
            scale = in_chunks(self.scale[:, part, :, None], length)
            within, until = within.mul_(scale.mT), until * scale
        return Chunk(part, within, q, k, decay.total, (decay.since, until))

    # --- its matrices ----------------------------------------------------------------------

    def head_matrices(self) -> Tensor:
        out = decay_matrices(exponential(self.log_decay))
        for group, heads in enumerate(self._groups()):
            out[:, heads] *= (self.query[:, :, group] @ self.key[:, :, group].mT)[:, None]
        return out if self.scale is None else out.mul_(self.scale.transpose(1, 2)[:, :, None])

    def _sum_of_heads(self, left: Tensor, right: Tensor, rows: range) -> Tensor:
        """Compute the rows; q . k, which a group's heads share, multiplies the sum of the heads."""
        if rows.start:
            return self._sum_of_late_rows(left, right, rows)
        if not self._are_shared:
            return super()._sum_of_heads(left, right, rows)
        batch, tokens, *_ = self.shape
        right = right if self.scale is None else right * self.scale
        out = self._zeros(batch, len(rows), rows.stop)
        for group, heads in enumerate(self._groups()):
            decay, row, column = (x[..., heads] for x in (exponential(self.log_decay), left, right))
            block = block_of(row[:, rows.start : rows.stop], [column], decay)
            strip = semiseparable_strip([block], batch, tokens, rows)  # without q . k
            q, k = self.query[:, :, group], self.key[:, :, group].mT
            for part in slices(rows, _ROWS):  # entries of columns after these rows are zero
                own, columns = slice(part.start - rows.start, part.stop - rows.start), part.stop
                into, entries = (x[:, own, :columns] for x in (out, strip.entries))
                into.addcmul_(q[:, part] @ k[..., :columns], entries)
        return out

    def _sum_of_late_rows(self, left: Tensor, right: Tensor, rows: range) -> Tensor:
        """Compute :meth:`_sum_of_heads` for rows that begin after the first token.

        Entries of earlier columns are products of two factors, split at the token before the rows:
        the decays since that token for each row, and the decays until that token for each column.
        """
        out = self._zeros(self.shape.batch, len(rows), rows.stop)
        late, early = slice(rows.start, rows.stop), slice(0, rows.start)
        late_part = self._restricted_to(late)
        out[..., late] = late_part._sum_of_heads(left[:, late], right[:, late], range(len(rows)))
        later_decays = exponential(F.pad(self.log_decay[:, 1 : rows.start], (0, 0, 0, 1)))
        column = right[:, early] * later_decays.flip(1).cumprod(1).flip(1)
        column = column if self.scale is None else column * self.scale[:, early]
        row = left[:, late] * exponential(self.log_decay[:, late]).cumprod(1)
        for group, heads in enumerate(self._groups()):
            products = row[..., heads] @ column[..., heads].mT  # (B, R, L')
            scores = self.query[:, late, group] @ self.key[:, early, group].mT
            out[..., early] += products.mul_(scores)
        return out

    def _restricted_to(self, part: slice) -> ScalarDecayHeads:
        """Restrict the operator to neighboring tokens."""
        names = (name for name in self.roles if getattr(self, name) is not None)
        return self.changed(**{name: getattr(self, name)[:, part] for name in names})

    def _sums_of_channels(self, left: Tensor, rights: Sequence[Tensor], rows: range) -> Tensor:
        """Sum left[i, c] alpha[i, j] right[j, c] over c for each of ``rights``, (n, B, R, W).

        Heads of a group share q . k, which multiplies one sum over the group's channels.
        """
        if not self._are_shared:
            return super()._sums_of_channels(left, rights, rows)
        if self.scale is not None:
            rights = [right * self.scale[..., None] for right in rights]
        out = self._zeros(len(rights), self.shape.batch, len(rows), rows.stop)
        decay = exponential(self.log_decay)
        part = slice(rows.start, rows.stop)
        return sums_over_groups(decay, self.query[:, part], self.key, left[:, part], rights, out)
