"""Recurrences with one decay per token and channel: RG-LRU and HGRN, and WKV built from these."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

from ..base import Operator, Role, Shape
from ..chain import Chain
from ..combine import Sum
from ..conv import ShortConv
from ..diagonal import Diagonal
from ..kernels.arithmetic import (
    doubled,
    exponential_,
    fading_log_sums,
    underflow_flushed,
    unseen,
    with_graphs,
)
from ..kernels.bands import Band, lags_of, shift_tokens
from ..kernels.odd_even import FadingSteps
from ..kernels.portions import parts
from ..kernels.rows import Strip, sum_of_lags
from ..kernels.triangle import Block, block_of, block_width, decay_matrices
from .base import FadingRecurrence

#: Largest number of tokens mapped together on a CPU.
_TOKENS = 512


class ElementwiseRecurrence(FadingRecurrence):
    """A recurrence with a state of one scalar per channel, y[t] = decay[t] y[t-1] + x[t].

    alpha[i, j] = product of decay[j+1..i] for j <= i (unified paper, eq. 16).  After a decay of
    exactly zero, the state no longer depends on earlier tokens.

    Args:
        decay: factors (B, L, H) between 0 and 1; every channel is a head (P = 1).
        component: name of the mixer's part that it represents. Default: ``"scan"``.

    Example:
        >>> import torch
        >>> from captum_ssm.operators import ElementwiseRecurrence
        >>> scan = ElementwiseRecurrence(torch.full((1, 3, 1), 0.5))
        >>> scan.apply(torch.ones(1, 3, 1, 1)).flatten().tolist()
        [1.0, 1.5, 1.75]
    """

    roles: Mapping[str, Role] = {"decay": "step"}

    def __init__(self, decay: Tensor, component: str | None = "scan") -> None:
        self.decay = decay.detach()
        self.live = with_graphs({"decay": decay})
        self.component = component
        self.shape = Shape(decay.shape[0], decay.shape[1], decay.shape[2], 1)

    def backward(self, values: Tensor, gradient: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        of_values, states = self.transpose(gradient), self.apply(values)
        previous_states = shift_tokens(states, 1)
        return of_values, {"decay": (of_values * previous_states).squeeze(-1)}

    # --- the map and its adjoint -----------------------------------------------------------

    def _run(self, x: Tensor, transposed: bool) -> Tensor:
        """Return alpha x, or alpha-transposed x, for ``x`` (..., B, L, H, 1), part by part."""
        out = x.new_empty(x.shape[:-4].numel(), *self.shape[:3])
        steps = FadingSteps(lambda part: self.decay[:, part], self.decay, transposed)
        size = self.shape.tokens if x.is_cuda else _TOKENS  # fewer launches
        for part in parts(self.shape.tokens, size, transposed):
            steps(x.squeeze(-1).reshape(out.shape)[:, :, part], part, out[:, :, part])
        return out.view(x.shape)

    # --- its matrices ----------------------------------------------------------------------

    def _strip_by_head(self, left: Tensor, band: Band, rows: range) -> Strip:
        """Return rows of each head's matrix, times row factors and each lag's column factors."""
        part, tokens = slice(rows.start, rows.stop), self.shape.tokens
        row = left.expand(self.shape)[:, part].transpose(1, 2)
        matrices = decay_matrices(self.decay)[:, :, part].mul_(row)  # (B, H, R, L)

        def strip_for(right: Tensor) -> Strip:  # rows of diag(left) . self . diag(right)
            column = right.expand(self.shape).transpose(1, 2).mT
            # the last use of the matrices may overwrite them
            out = matrices if len(band) == 1 else torch.empty_like(matrices)
            return Strip(torch.mul(matrices, column, out=out), rows, range(tokens))

        return sum_of_lags(strip_for, band, rows, tokens)

    def _blocks(self, left: Tensor, band: Band, rows: range) -> Iterator[Block]:
        """Yield blocks of channels; lags between the band's lags get zeros as factors."""
        row_factors = left.expand(self.shape)[:, rows.start : rows.stop, :, 0]
        zero = self._zeros(1, 1, 1, 1)
        factors = [band.get(lag, zero).expand(self.shape)[..., 0] for lag in lags_of(band)]
        width = block_width(self.shape.batch, rows, self.device)
        for start in range(0, self.shape.heads, width):
            heads = slice(start, start + width)
            row, decay, *columns = (x[..., heads] for x in (row_factors, self.decay, *factors))
            yield block_of(row, columns, decay)


class WKV(Sum):
    """RWKV-4's time mixing (unified paper, eqs. 19-20), whose rows are a softmax.

    alpha[i, j] is the softmax over j <= i of (i - 1 - j) log_decay + key[j] for j < i and
    bonus + key[i] for j = i.  The state is stored relative to the running log-sum-exp of earlier
    tokens, so every exponent is at most zero.  WKV is the sum of a diagonal, for the token itself,
    and a recurrence over the tokens before it.

    Args:
        key: keys k (B, L, H).
        log_decay: logarithm w of the decay, negative (H,).
        bonus: bonus u of the token itself (H,).

    Example:
        >>> import torch
        >>> from captum_ssm.operators import WKV
        >>> key, bonus = torch.arange(10.0).view(1, 5, 2), torch.zeros(2)
        >>> log_decay = torch.tensor([-1.0, -0.1])
        >>> rows = WKV(key, log_decay, bonus).dense().sum(-1)
        >>> torch.allclose(rows, torch.ones(1, 5))
        True
    """

    roles: Mapping[str, Role] = MappingProxyType({"key": "key"})

    def __init__(self, key: Tensor, log_decay: Tensor, bonus: Tensor) -> None:
        self._fixed = log_decay.detach(), bonus.detach()
        self.live = with_graphs({"key": key})
        super().__init__(*_wkv_terms(key.detach(), *self._fixed))

    def at(self, coefficients: Mapping[str, Tensor]) -> WKV:
        return WKV(coefficients["key"], *self._fixed)

    def backward(self, values: Tensor, gradient: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        of_values = self.transpose(gradient)
        # rows sum to one: a larger key raises its token's weight and lowers the row's other weights
        of_key = of_values * values - self.transpose(gradient * self.apply(values))
        return of_values, {"key": of_key.squeeze(-1)}


def _wkv_terms(key: Tensor, log_decay: Tensor, bonus: Tensor) -> tuple[Operator, Chain]:
    """Return the two terms of WKV: a diagonal for j = i, and a recurrence for tokens j < i.

    Let z[t] = log(sum over j <= t of exp(key[j] + (t - j) log_decay)).  The recurrence's state is
    exp(-z[t]) times the sum of exp(key[j] + (t - j) log_decay) v[j]: a mean of values.
    """
    like = key
    # in float32, differences of sums over all tokens so far would lose too many digits
    key, log_decay, bonus = (doubled(x) for x in (key, log_decay, bonus))
    shape = Shape(key.shape[0], key.shape[1], key.shape[2], 1)
    with unseen(), underflow_flushed():
        sums = fading_log_sums(key, log_decay)  # z[t]
        earlier = F.pad(sums[:, :-1], (0, 0, 1, 0), value=-torch.inf)
        # a token reads the state before its own step: decays count from the step before
        decay = exponential_((earlier + log_decay).sub_(sums))
        decay = F.pad(decay[:, :-1], (0, 0, 1, 0)).to(like)
        own = bonus + key
        total = torch.logaddexp(earlier, own)
        exponents = earlier.sub_(total), key - sums, own.sub_(total)
        read, write, own_weight = (exponential_(x).to(like) for x in exponents)
    of_earlier = Chain(
        Diagonal(read[..., None], shape, "scan"),
        ElementwiseRecurrence(decay),
        ShortConv(read.new_ones(shape.heads, 1, 1), shape, lags=(1,), component="scan"),
        Diagonal(write[..., None], shape, "scan"),
    )
    return Diagonal(own_weight[..., None], shape, "scan"), of_earlier
