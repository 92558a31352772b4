"""Operators with one matrix per head, shared by the head's P value channels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from ..errors import OptionError
from .base import Operator, Role, Shape
from .diagonal import Diagonal
from .kernels.arithmetic import doubled, full_precision, matmul, underflow_flushed, with_graphs
from .kernels.bands import Band
from .kernels.portions import at_a_time, some_heads
from .kernels.rows import Positions, Strip, by_query, slices, sum_of_lags, unit_vectors

#: Largest number of elements of one head's rows that are computed together (1 MiB in float32).
_STRIP_ELEMENTS = 2**18


class HeadOperator(Operator):
    """Base class of operators that map all value channels of a head by the same matrix."""

    def head_matrices(self) -> Tensor:
        """Return the matrix of each head, (B, H, L, L)."""
        raise NotImplementedError

    def entries(self, left: Tensor, band: Band, rows: range, by_head: bool = False) -> Strip:
        strip = self._strip_by_head if by_head else self._strip_over_heads
        with torch.no_grad(), full_precision(self.device), underflow_flushed():
            return sum_of_lags(lambda x: strip(left, x, rows), band, rows, self.shape.tokens)

    def _strip_over_heads(self, left: Tensor, right: Tensor, rows: range) -> Strip:
        """Return rows of the sum of left alpha right over all channels, for factors (B, L, H, P).

        If one of the factors is common to all channels of a head, a sum over heads suffices.
        """
        common = per_head_factors(left, right, self.shape)
        if common is None:
            factors = left.expand(self.shape), right.expand(self.shape)
            entries = self._sum_of_channels(*factors, rows)
        else:
            entries = self._sum_of_heads(*common, rows)
        return Strip(entries, rows, range(entries.shape[-1]))

    def _strip_by_head(self, left: Tensor, right: Tensor, rows: range) -> Strip:
        """Return rows of each head's sum of left alpha right over the head's channels."""
        part = slice(rows.start, rows.stop)
        row, column = (x.expand(self.shape).transpose(1, 2) for x in (left, right))
        products = row[:, :, part] @ column.mT  # (B, H, R, L)
        return Strip(products.mul_(self.head_matrices()[:, :, part]), rows, range(column.shape[2]))

    def unit_rows(self, positions: Positions, weight: Tensor | None = None) -> Tensor:
        rows = self._head_rows(positions)
        return (rows if weight is None else rows * weight).expand(-1, *self.shape)

    def mean_matvec(self, x: Tensor) -> Tensor:
        return self.apply(self._one_channel(x)).mean((-1, -2))

    def mean_rmatvec(self, r: Tensor) -> Tensor:
        return self.transpose(self._one_channel(r)).mean((-1, -2))

    def _sum_of_heads(self, left: Tensor, right: Tensor, rows: range) -> Tensor:
        """Return rows of the sum over heads of left[i, h] alpha_h[i, j] right[j, h].

        Args:
            left: row factors (B, L, H).
            right: column factors (B, L, H).
            rows: indices of the R rows to compute.

        Returns:
            The first W columns (B, R, W); all later columns are zero.
        """
        raise NotImplementedError

    def _sum_of_channels(self, left: Tensor, right: Tensor, rows: range) -> Tensor:
        """Return rows (B, R, W) of a sum over all channels, for factors (B, L, H, P)."""
        raise NotImplementedError

    def _head_rows(self, positions: Positions) -> Tensor:
        """Return rows (Q, B, L, H, 1) of each head's matrix at Q positions, (Q,) or (Q, B)."""
        unit = unit_vectors(positions, self.shape.tokens, self._any_coefficient())
        return self.transpose(unit.expand(-1, *self.shape[:3], 1))

    def _one_channel(self, x: Tensor) -> Tensor:
        """Expand ``x`` (B, L) to one channel per head (B, L, H, 1); channels share the matrix."""
        return x[..., None, None].expand(*self.shape[:3], 1)


class DenseHeads(HeadOperator):
    """One explicit matrix per head, such as the probabilities of softmax attention.

    Args:
        matrices: the matrices alpha_h = matrices[:, h], (B, H, L, L).
        per_head: number of value channels of a head, P.
        component: name of the mixer's part that it represents. Default: ``"scan"``.

    Example:
        >>> import torch
        >>> from captum_ssm.operators import DenseHeads
        >>> probabilities = torch.arange(18.0).view(1, 2, 3, 3).softmax(-1)
        >>> attention = DenseHeads(probabilities, per_head=4)
        >>> ones = torch.ones(1, 3, 2, 4)  # (B, L, H, P)
        >>> torch.allclose(attention.apply(ones), ones)
        True
    """

    def __init__(self, matrices: Tensor, per_head: int, component: str | None = "scan") -> None:
        self.matrices = matrices.detach()
        self.component = component
        self.shape = Shape(matrices.shape[0], matrices.shape[-1], matrices.shape[1], per_head)

    def apply(self, v: Tensor) -> Tensor:
        with full_precision(v.device):
            return matmul(self.matrices, v.transpose(-3, -2)).transpose(-3, -2)

    def transpose(self, u: Tensor) -> Tensor:
        with full_precision(u.device):
            return matmul(self.matrices.mT, u.transpose(-3, -2)).transpose(-3, -2)

    def _head_rows(self, positions: Positions) -> Tensor:
        example = torch.arange(self.shape.batch, device=self.device)
        rows = self.matrices[example, :, by_query(positions, self.device)]  # (Q, B, H, L)
        return rows.mT[..., None]

    def tensors(self) -> dict[str, Tensor]:
        return {"matrices": self.matrices}

    def select(self, heads: Sequence[int]) -> Operator:
        matrices = some_heads(self.matrices.transpose(1, 2), heads).transpose(1, 2)
        return DenseHeads(matrices, self.shape.per_head, self.component)

    def head_matrices(self) -> Tensor:
        return self.matrices

    def _sum_of_heads(self, left: Tensor, right: Tensor, rows: range) -> Tensor:
        """Compute the rows; factors that all tokens share need only a mean of matrices."""
        row, column = _unexpanded(left), _unexpanded(right)
        if row.shape[1] == column.shape[1] == 1:  # one product
            weight = (row * column).expand(self.shape.batch, 1, self.shape.heads)
            matrices = self.matrices[..., rows.start : rows.stop, :].flatten(2)
            return (weight @ matrices).view(-1, len(rows), self.shape.tokens)
        return self._sum_of_channels(left[..., None], right[..., None], rows)

    def _sum_of_channels(self, left: Tensor, right: Tensor, rows: range) -> Tensor:
        """Sum (left right^T) * matrix over heads; left right^T is a sum over a head's channels."""
        batch, tokens, _, _ = self.shape
        out = self._zeros(batch, len(rows), tokens)
        columns = right.permute(2, 0, 3, 1)  # (H, B, P, L)
        height = max(1, at_a_time(_STRIP_ELEMENTS, self.device) // (batch * tokens))
        # head by head and a few rows at a time, which stay in the cache
        for into, part in zip(torch.split(out, height, 1), slices(rows, height), strict=True):
            row_factors = left[:, part].permute(2, 0, 1, 3)
            matrices = self.matrices[..., part, :].unbind(1)
            for row, column, matrix in zip(row_factors, columns, matrices, strict=True):
                into.addcmul_(row @ column, matrix)
        return out


class SoftmaxHeads(DenseHeads):
    """Softmax attention with queries and keys, alpha_h = softmax(scaling q k^T + mask).

    Args:
        query: queries (B, L, H, N).
        key: keys (B, L, H, N).
        probabilities: function that computes the matrices (B, H, L, L) from queries and keys
            (B, H, L, N); rows may be zero.
        scaling: factor of the scores.
        per_head: number of value channels of a head, P.
        matrices: the result of ``probabilities``, if it is known. Default: None, it is computed.

    Example:
        >>> import torch
        >>> from captum_ssm.operators.heads import SoftmaxHeads
        >>> query, key = torch.randn(2, 1, 3, 2, 4)  # (B, L, H, N)
        >>> def probabilities(query, key):
        ...     return (0.5 * query @ key.mT).softmax(-1)
        >>> attention = SoftmaxHeads(query, key, probabilities, scaling=0.5, per_head=5)
        >>> ones = torch.ones(1, 3, 2, 5)  # (B, L, H, P)
        >>> torch.allclose(attention.apply(ones), ones)
        True
    """

    roles: Mapping[str, Role] = MappingProxyType({"query": "query", "key": "key"})

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        probabilities: Callable[[Tensor, Tensor], Tensor],
        scaling: float,
        per_head: int,
        matrices: Tensor | None = None,
    ) -> None:
        self.query, self.key = query.detach(), key.detach()
        self.live = with_graphs({"query": query, "key": key})
        self._probabilities, self._scaling = probabilities, scaling
        if matrices is None:
            matrices = probabilities(*(x.transpose(1, 2) for x in (self.query, self.key)))
        super().__init__(matrices, per_head)

    def tensors(self) -> dict[str, Tensor]:
        return {**super().tensors(), "query": self.query, "key": self.key}

    def at(self, coefficients: Mapping[str, Tensor]) -> SoftmaxHeads:
        named = {**self.tensors(), **coefficients}
        options = self._probabilities, self._scaling, self.shape.per_head
        return SoftmaxHeads(named["query"], named["key"], *options)

    def backward(self, values: Tensor, gradient: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Differentiate softmax(scaling q k^T + mask) v, with the mask constant."""
        with full_precision(values.device):
            of_scores = _score_gradient(self.matrices, values, gradient)
            of_scores *= self._scaling  # now of the products q k^T
            query, key = (x.transpose(1, 2) for x in (self.query, self.key))
            gradients = {"query": of_scores @ key, "key": of_scores.mT @ query}
        of_values = self.transpose(gradient)
        return of_values, {name: x.transpose(1, 2) for name, x in gradients.items()}


class ScoredHeads(DenseHeads):
    """Causal softmax attention whose scores are the matrices of another operator.

    alpha_h = softmax over j <= i of reads_h[i, j] + (the sum of forget over j+1..i).  The decays
    between two tokens lower the later token's attention to the earlier one (Forgetting Attention).
    In PaTH the operator transforms each key by the tokens between the key and the query.

    Args:
        reads: the operator; its matrices are the scores.
        forget: logarithms of decays (B, L, H), at most 0; None for no decays.
        per_head: number of value channels of a head, P.
        mask: True for real tokens (B, L); all rows and columns of other tokens are zero. Default:
            None, all tokens are real.

    Example:
        >>> import torch
        >>> from captum_ssm.operators import ScalarDecayHeads
        >>> from captum_ssm.operators.heads import ScoredHeads
        >>> none = torch.zeros(1, 3, 1, 1)  # with zero queries and keys all scores are equal
        >>> reads = ScalarDecayHeads(none, none, none[..., 0], None, per_head=4)
        >>> forget = torch.full((1, 3, 1), 0.5).log()
        >>> ScoredHeads(reads, forget, per_head=4).dense()[0, 1]  # an older token weighs half
        tensor([0.3333, 0.6667, 0.0000])
    """

    def __init__(
        self, reads: HeadOperator, forget: Tensor | None, per_head: int, mask: Tensor | None = None
    ) -> None:
        self.reads, self.mask = reads, mask
        self.forget = None if forget is None else forget.detach()
        self.roles = {**reads.roles, "forget": "step"}
        self.live = {**reads.live, **with_graphs({"forget": forget})}
        super().__init__(self._probabilities(), per_head)

    def _probabilities(self) -> Tensor:
        """Return the softmax of the scores, (B, H, L, L)."""
        scores = self.reads.head_matrices()  # new memory, changed in place below
        if self.forget is not None:
            sums = doubled(self.forget).cumsum(1).transpose(1, 2)  # (B, H, L)
            scores += (sums[..., None] - sums[:, :, None]).to(scores)
        is_read = torch.ones_like(scores[0, 0], dtype=torch.bool).tril()
        if self.mask is not None:  # columns, then rows
            is_read = is_read & self.mask[:, None, None] & self.mask[:, None, :, None]
        scores.masked_fill_(~is_read, -torch.inf)
        return scores.softmax(-1).nan_to_num_(0)  # NaN: a row of nothing but -inf

    def tensors(self) -> dict[str, Tensor]:
        named = {**super().tensors(), **self.reads.tensors()}
        return named if self.forget is None else {**named, "forget": self.forget}

    def at(self, coefficients: Mapping[str, Tensor]) -> ScoredHeads:
        of_reads = dict(coefficients)  # without ``forget``, below
        forget = of_reads.pop("forget", self.forget)
        reads = self.reads.at(of_reads) if of_reads else self.reads
        assert isinstance(reads, HeadOperator)
        return ScoredHeads(reads, forget, self.shape.per_head, self.mask)

    def backward(self, values: Tensor, gradient: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        with full_precision(values.device):
            of_scores = _score_gradient(self.matrices, values, gradient)
        # the scores are the operator's outputs for the identity, a channel for each token
        eye = torch.eye(self.shape.tokens, dtype=of_scores.dtype, device=of_scores.device)
        identity = eye[:, None].expand(*self.shape[:3], -1)
        _, gradients = self.reads.backward(identity, of_scores.transpose(1, 2).contiguous())
        if self.forget is not None:
            # score (i, j) contains sums[i] - sums[j]; sums are the cumulative sums of forget
            of_sums = (of_scores.sum(-1) - of_scores.sum(-2)).transpose(1, 2)  # (B, L, H)
            gradients = {**gradients, "forget": of_sums.flip(1).cumsum(1).flip(1)}
        return self.transpose(gradient), gradients


def _score_gradient(matrices: Tensor, values: Tensor, gradient: Tensor) -> Tensor:
    """Return the gradient of softmax attention's scores, A (dA - row sums of A dA).

    A are the ``matrices``, and dA = gradient values^T is their gradient, all (B, H, L, L).

    Args:
        matrices: the probabilities (B, H, L, L).
        values: the values that attention maps (B, L, H, P).
        gradient: gradient of attention's output (B, L, H, P).
    """
    products = gradient.transpose(1, 2) @ values.permute(0, 2, 3, 1)  # gradient of probabilities
    products *= matrices
    return products - matrices * products.sum(-1, keepdim=True)


class HeadCentering(Operator):
    """y = x - mean of x over the value channels of a head: the centering of a frozen LayerNorm.

    The operator mixes channels; the weight of each channel in the same channel is 1 - 1/P.

    Args:
        shape: sizes of the values to map.
        like: a tensor with the dtype and device to use.
        component: name of the mixer's part that it represents. Default: ``"norm"``.
        across: whether the mean is over all heads; the weight is then 1 - 1/C. Default: False.
        centered: 1 for heads to center, 0 for heads to leave unchanged (H,). Default: None, all
            heads are centered.

    Example:
        >>> import torch
        >>> from captum_ssm.operators import HeadCentering, Shape
        >>> x = torch.tensor([1.0, 2.0, 6.0]).view(1, 1, 1, 3)  # (B, L, H, P)
        >>> HeadCentering(Shape(1, 1, 1, 3), like=x).apply(x).flatten().tolist()
        [-2.0, -1.0, 3.0]
    """

    mixes_tokens = False
    data_dependent = False

    def __init__(
        self,
        shape: Shape,
        like: Tensor,
        component: str | None = "norm",
        across: bool = False,
        centered: Tensor | None = None,
    ) -> None:
        self.shape = shape
        self.component = component
        self.across = across
        self._mean_dims = (-1, -2) if across else (-1,)
        is_centered = like.new_ones(shape.heads) if centered is None else centered
        self._centered = is_centered.detach().to(like)[:, None]  # (H, 1)

    def apply(self, v: Tensor) -> Tensor:
        return v - self._centered * v.mean(self._mean_dims, keepdim=True)

    def transpose(self, u: Tensor) -> Tensor:
        return u - (self._centered * u).mean(self._mean_dims, keepdim=True)

    def tensors(self) -> dict[str, Tensor]:
        return {"centered": self._centered}

    def select(self, heads: Sequence[int]) -> Operator:
        if self.across:
            raise OptionError(
                f"heads={list(heads)} cannot be selected from a norm whose mean is over all heads. "
                "Call per_channel() first, which drops the mixing between channels, then select "
                "heads of the result."
            )
        shape, centered = self.shape._replace(heads=len(heads)), self._centered[list(heads), 0]
        return HeadCentering(shape, centered, self.component, centered=centered)

    def per_channel(self) -> Operator:
        channels = self.shape.per_head * (self.shape.heads if self.across else 1)
        own_weight = 1 - self._centered / channels
        return Diagonal(own_weight[None, None], self.shape, self.component)


def per_head_factors(left: Tensor, right: Tensor, shape: Shape) -> tuple[Tensor, Tensor] | None:
    """Return factors (B, L, H) that replace ``left`` and ``right`` in sums over a head's channels.

    Their products at any two tokens are the sums over the P channels of left * right.  Returns None
    if ``left`` and ``right`` both differ between the channels of a head.
    """
    left, right = _unexpanded(left), _unexpanded(right)
    if left.shape[-1] > 1 and right.shape[-1] > 1:
        return None
    # one of them has size 1, a constant in the sum: the sum of products is a product of sums; if
    # both have size 1, the sum has P equal terms
    count = shape.per_head if left.shape[-1] == right.shape[-1] else 1
    return (count * left.sum(-1)).expand(shape[:3]), right.sum(-1).expand(shape[:3])


def _unexpanded(x: Tensor) -> Tensor:
    """Return a view of ``x`` with size 1 along the dimensions that ``expand`` repeated."""
    return x[tuple(slice(1) if stride == 0 else slice(None) for stride in x.stride())]
