"""Mixing matrices P: the share of each input token j in each output token i of a layer.

ALTI's shares (LATIM, eq. 6) are

    P[i, j] proportional to relu(sum over features of |y_i| - |y_i - T_i(x_j)|),

scaled so that each row sums to 1, where y_i = sum over j of T_i(x_j).  With the residual stream,
x_i is added to y_i and to T_i(x_i) (LATIM, eq. 4).  Constants belong to no token and are left out,
as in the paper (footnotes 1 and 4).

Projections on y_i give shares in time linear in the number of tokens:

    P[i, j] = <T_i(x_j), y_i> / |y_i|^2,      y_i = sum over j of T_i(x_j)

with the residual stream among the sources.  Each row sums to 1 without scaling.  Entries are
signed, and large if sources cancel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ...errors import InputError
from ...operators.kernels.arithmetic import underflow_flushed
from ...operators.kernels.rows import tokens_at
from ...tracing import Layer
from .contributions import Contributions, tiles
from .latim import weighted_rows

#: The residual stream (B, L, E) entering each layer's block; None for a mixer without one.
Streams = Mapping[Layer, Tensor | None]


class AltiShares:
    """ALTI's mixing matrix of one layer, or of parallel layers (:func:`.fold.stages`).

    The outputs of parallel mixers are added. If a layer F passes its output to the next layer, and
    not to the residual stream, the next layer's sources are the residual stream plus F's output.
    The matrix is then diag(r) + C P, with the stream's shares r, the sources' shares C, and F's
    matrix P. A row of zeros, such as a padded token's, becomes a row of the identity.

    Args:
        stage: the layers of one stage, in the order of the run.
        streams: the residual stream entering each layer's block.
        residual: whether the residual stream is a source. Default: True.
        activation: as in :class:`.Contributions`. Default: ``"linearized"``.
        mask: True for unpadded tokens (B, L); other tokens have no shares. Default: None, all.
    """

    def __init__(
        self,
        stage: Sequence[Layer],
        streams: Streams,
        *,
        residual: bool = True,
        activation: str = "linearized",
        mask: Tensor | None = None,
    ) -> None:
        writers, feeders = stage_parts(stage)
        # bare: no residual stream is added, so steps after the mixer's output are not needed
        is_bare = len(writers) == 1 and not (residual and writers[0].has_stream)
        self._mixers = [Contributions(w, activation, () if is_bare else w.way) for w in writers]
        self._output = torch.stack([mixer.total() for mixer in self._mixers]).sum(0)  # (B, L, E)
        self._stream: Tensor | None = None
        if residual and writers[-1].has_stream:
            self._stream = stream_of(writers[-1], streams, self._output)
            self._output = self._output + self._stream
        self._fed_by: Tensor | None = None  # P, the product of the feeders' matrices (B, L, L)
        for feeder in feeders:
            matrix = AltiShares([feeder], streams, activation=activation, mask=mask).matrix()
            self._fed_by = matrix if self._fed_by is None else matrix @ self._fed_by
        self._mask = None if mask is None else mask.to(self._output.device)

    @underflow_flushed()
    def rows(self, index: Tensor) -> Tensor:
        """Return the matrix rows (B, Q, L) for queries ``index`` (B, Q); each row sums to 1."""
        # ALTI's shares relu(|y| - |y - T|) by tile, padding, feeders, and the scaling of each row
        tokens = self._output.shape[1]
        shares = self._output.new_zeros(*index.shape, tokens)
        # a feeder's matrix must not multiply the stream, which is then added below
        added_stream, index_on_host = self._stream if self._fed_by is None else None, index
        index = index.to(self._output.device)
        output = tokens_at(self._output, index)[:, :, None]  # (B, Q, 1, E)
        for tile in tiles(self._mixers, index_on_host, added_stream):
            shares[:, tile.queries, tile.sources] = _share(output[:, tile.queries], tile.vectors)
        if self._mask is not None:
            is_real = self._mask.to(shares)
            shares *= is_real[:, None] * is_real.gather(1, index)[..., None]
        is_own = index[..., None] == torch.arange(tokens, device=index.device)
        if self._fed_by is not None:  # diag(r) + C P
            shares = shares @ self._fed_by
            if self._stream is not None:
                stream = tokens_at(self._stream, index)[:, :, None]
                shares = shares + _share(output, stream) * is_own
        sums = shares.sum(-1, keepdim=True)
        return torch.where(sums > 0, shares / sums.where(sums > 0, 1), is_own.to(shares))

    def matrix(self) -> Tensor:
        """Return the whole mixing matrix, (B, L, L)."""
        batch, tokens = self._output.shape[:2]
        return self.rows(torch.arange(tokens, device="cpu").expand(batch, -1))

    def rmatvec(self, row: Tensor, within: range | None = None) -> Tensor:
        """Return rows (..., B, L) times the matrix, computing a few matrix rows at a time."""
        return weighted_rows(row, self.rows, within)


def _share(output: Tensor, vectors: Tensor) -> Tensor:
    """Return unscaled shares relu(sum |y| - |y - T|) of ``vectors`` T in ``output`` y."""
    return (output.abs() - (output - vectors).abs()).sum(-1).relu()


def stage_parts(stage: Sequence[Layer]) -> tuple[Sequence[Layer], Sequence[Layer]]:
    """Split layers into writers, which add to the residual stream, and feeders of the writers."""
    # a stage of only feeders, such as a feeder that is explained alone, has no other writers
    writers = [layer for layer in stage if layer.joins != "feeds"] or list(stage)
    return writers, [layer for layer in stage if layer not in writers]


def stream_of(layer: Layer, streams: Streams, like: Tensor) -> Tensor:
    """Return the residual stream to which the layer's output ``like`` is added."""
    stream = streams.get(layer)
    if stream is None or stream.shape != like.shape:
        problem = "is not known" if stream is None else f"has shape {tuple(stream.shape)}"
        raise InputError(
            f"Layer {layer.name!r} returns {tuple(like.shape)}, but the residual stream {problem}. "
            "Pass residual=False to LatimALTI for maps without residual streams, or use LatimFlow."
        )
    return stream.to(like)


class ProjectionShares:
    """The mixing matrix of one layer or of parallel layers, from projections on y_i.

    Args:
        stage: the layers of one stage, as for :class:`AltiShares`.
        streams: the residual stream entering each layer's block.
        activation: as in :class:`.Contributions`. Default: ``"linearized"``.
    """

    def __init__(
        self, stage: Sequence[Layer], streams: Streams, *, activation: str = "linearized"
    ) -> None:
        writers, feeders = stage_parts(stage)
        last = writers[-1]
        is_bare = len(writers) == 1 and not last.has_stream
        self._mixers = [Contributions(w, activation, () if is_bare else w.way) for w in writers]
        self._feeders = [
            ProjectionShares([feeder], streams, activation=activation) for feeder in feeders
        ]
        mixed = torch.stack([mixer.total() for mixer in self._mixers]).sum(0)  # (B, L, E)
        stream = stream_of(last, streams, mixed) if last.has_stream else torch.zeros_like(mixed)
        output = mixed + stream
        squared_norm = output.square().sum(-1, keepdim=True)
        # a token whose vector is 0, such as a padded token, gets a row of the identity
        self._direction = output / squared_norm.where(squared_norm > 0, 1)
        own_share = (stream * self._direction).sum(-1)
        self._stream_share = torch.where(squared_norm.squeeze(-1) > 0, own_share, 1)

    def rmatvec(self, row: Tensor, within: range | None = None) -> Tensor:
        """Return rows (..., B, L) times the matrix; all rows are 0 outside the range ``within``."""
        # sum over i of row_i <T_i(x_j), y_i> / |y_i|^2
        direction = row[..., None] * self._direction
        mixed = torch.stack([mixer.toward(direction, within) for mixer in self._mixers]).sum(0)
        for feeder in reversed(self._feeders):
            mixed = feeder.rmatvec(mixed)
        return mixed + row * self._stream_share
