"""The diagonal blocks of operators that mix channels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..base import Operator
from ..kernels.arithmetic import Map
from ..kernels.rows import in_stacks


class OwnShares(Operator):
    """The diagonal blocks of an operator that mixes channels: one matrix (L, L) per channel.

    Entry (i, j) of channel c is the weight of channel c at token j in channel c at token i.  This
    weight includes paths through other channels at the tokens between.

    Args:
        mixed: the operator, which may mix the channels of a head, but not different heads.

    Example:
        >>> import torch
        >>> from captum_ssm.operators import FeedbackRecurrence
        >>> none, one = torch.zeros(1, 3, 1, 2), torch.ones(1, 3, 1, 2)
        >>> swap = torch.tensor([[[0.0, 1.0], [1.0, 0.0]]])  # from c to c in two tokens
        >>> FeedbackRecurrence(none, one, one, swap).per_channel().dense().int()
        tensor([[[1, 0, 0],
                 [0, 1, 0],
                 [1, 0, 1]]], dtype=torch.int32)
    """

    def __init__(self, mixed: Operator) -> None:
        self.mixed = mixed
        self.shape, self.component = mixed.shape, mixed.component

    @property
    def mixes_tokens(self) -> bool:
        return self.mixed.mixes_tokens

    def tensors(self) -> dict[str, Tensor]:
        return self.mixed.tensors()

    def select(self, heads: Sequence[int]) -> Operator:
        return OwnShares(self.mixed.select(heads))

    def apply(self, v: Tensor) -> Tensor:
        return self._by_channel(v, self.mixed.apply)

    def transpose(self, u: Tensor) -> Tensor:
        return self._by_channel(u, self.mixed.transpose)

    def _by_channel(self, x: Tensor, apply_mixed: Map) -> Tensor:
        """Map each channel of ``x`` separately, and keep only the outputs of the same channel."""
        units = torch.eye(self.shape.per_head, dtype=x.dtype, device=x.device)
        out = torch.zeros_like(x)
        for block in in_stacks(range(len(units)), x.numel(), x.device):
            indicator = units[block.start : block.stop].view(-1, *(1,) * (x.dim() - 1), len(units))
            out = out + (apply_mixed(indicator * x) * indicator).sum(0)
        return out
