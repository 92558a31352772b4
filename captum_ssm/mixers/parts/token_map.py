"""Layouts of tokens in a 2-D map of patches, for mixers of the whole map or of its windows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_input

from ...operators.reorder import Windows


@dataclass(frozen=True, eq=False)
class Downsampling:
    """A convolution from the tokens of a map to the tokens of a coarser map.

    The convolution mixes channels, so it has no matrix per channel.  Relevance is distributed over
    its receptive field instead.

    Attributes:
        conv: the convolution, or any module with its kernel size, stride, padding and dilation.
        size: height and width of the finer map.
    """

    conv: Any
    size: tuple[int, int]

    @property
    def coarser_size(self) -> tuple[int, int]:
        """Height and width of the coarser map."""
        height, width = self._tokens_read(torch.zeros(1, 1)).shape[-2:]
        return height, width

    def spread(self, row: Tensor) -> Tensor:
        """Distribute relevance of coarser tokens (B, L') to finer tokens (B, L).

        Each coarser token's relevance is divided equally among the finer tokens in the
        convolution's receptive field, so the total is conserved.  This map replaces the residual
        stream's identity, because the convolution replaces the residual stream.
        """
        shares = row.reshape(-1, 1, *self.coarser_size) / self._tokens_read(row)
        size, ones = (len(row), 1, *self.size), self._ones(row)
        relevance: Tensor = conv2d_input(size, ones, shares, **self._geometry())  # type: ignore[no-untyped-call]
        return relevance.flatten(1)

    def _tokens_read(self, like: Tensor) -> Tensor:
        """Return the number of finer tokens that each coarser token depends on, (1, 1, h', w')."""
        # a sum of ones over the receptive field: padding adds nothing
        return F.conv2d(like.new_ones(1, 1, *self.size), self._ones(like), **self._geometry())

    def _ones(self, like: Tensor) -> Tensor:
        return like.new_ones(1, 1, *self.conv.kernel_size)

    def _geometry(self) -> dict[str, Any]:
        conv = self.conv
        return {"stride": conv.stride, "padding": conv.padding, "dilation": conv.dilation}


@dataclass(frozen=True, eq=False)
class TokenMap:
    """The layout of a mixer's tokens in a two-dimensional map; tokens are numbered row by row.

    Attributes:
        size: height and width of the map.
        windows: the windows with which the mixer is called; None if it is called with the map.
        downsampling: convolution to the next, coarser map; None for the last map.
    """

    size: tuple[int, int]
    windows: Windows | None
    downsampling: Downsampling | None = None

    def in_order(self, x: Tensor) -> Tensor:
        """Convert the mixer's layout, such as windows (B W, T, E), to tokens (B, L, E)."""
        if self.windows is not None:
            return self.windows.merge(x.unsqueeze(-1)).squeeze(-1)
        return x if x.dim() == 3 else x.flatten(1, 2)  # some blocks return (B, height, width, E)

    def as_returned(self, x: Tensor) -> Tensor:
        """Convert tokens (B, L, E) to the mixer's layout; the adjoint of :meth:`in_order`."""
        return x if self.windows is None else self.windows.cut(x.unsqueeze(-1)).squeeze(-1)


def square_windows(size: tuple[int, int], side: int, device: torch.device) -> Windows:
    """Split a map into windows of ``side`` x ``side`` tokens, padded below and to the right."""
    height, width = size
    token = torch.arange(height * width, device=device).view(height, width)
    padded = F.pad(token, (0, -width % side, 0, -height % side), value=-1)
    rows = torch.unflatten(padded, 0, (-1, side))  # (rows of windows, side, width)
    windows = torch.unflatten(rows, 2, (-1, side)).transpose(1, 2)  # (rows, columns, side, side)
    return Windows(windows.flatten(2).flatten(0, 1))
