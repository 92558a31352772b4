"""The parts that models of DNA have in common."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import InputError, OptionError
from ..checkpoints import check_sizes

#: Standard deviation of weights before training.
SMALL = 0.02


class Backbone(nn.Module):
    """Embeddings, blocks and the last norm, by their published names.

    Args:
        word_embeddings: embeds the tokens.
        layers: the blocks.
        norm: the last norm, by its name.
        by_strand: whether the last norm normalizes both strands separately. Default: False.
    """

    def __init__(
        self,
        word_embeddings: nn.Module,
        layers: Iterable[nn.Module],
        norm: dict[str, nn.Module],
        by_strand: bool = False,
    ) -> None:
        super().__init__()
        self.embeddings: Any = nn.ModuleDict({"word_embeddings": word_embeddings})
        self.layers = nn.ModuleList(layers)
        ((self._norm, last),) = norm.items()
        self.add_module(self._norm, last)
        self.by_strand = by_strand

    def forward(self, x: Tensor) -> Tensor:
        """Return the head's input from embeddings, (B, L, E) or (B, L, 2 E)."""
        for layer in self.layers:
            x = layer(x)
        norm: nn.Module = getattr(self, self._norm)
        out: Tensor = on_both(norm, x) if self.by_strand else norm(x)
        return out


class DNAModel(nn.Module):
    """Base of the models of DNA: they read tokens or their embeddings."""

    #: The classifier's pooling of tokens.
    pool = "mean"

    def get_input_embeddings(self) -> nn.Module:
        """Return the layer that embeds the tokens."""
        raise NotImplementedError

    def _check(self, pools: Sequence[str], pool: str, **sizes: int) -> None:
        """Raise unless the pooling of a classifier is known and sizes are 1 or more."""
        if pool not in pools:
            raise OptionError(f"pool={pool!r} is not known. Use one of {tuple(pools)}.")
        check_sizes(**sizes)
        self.pool = pool

    def _pooled(self, x: Tensor) -> Tensor:
        """Pool (B, L, E) to (B, E)."""
        if self.pool == "mean":
            return x.mean(1)
        if self.pool == "max":
            return x.amax(1)
        return x[:, 0 if self.pool == "first" else -1]

    def forward(
        self, input_ids: Tensor | None = None, inputs_embeds: Tensor | None = None
    ) -> Tensor:
        """Return logits of tokens.

        Args:
            input_ids: (B, L). Default: None, if embeddings are given.
            inputs_embeds: output of :meth:`get_input_embeddings` for tokens, (B, L, ...). Default:
                None.

        Returns:
            (B, L, V), or (B, classes) from a classifier.

        Raises:
            InputError: unless exactly one of the two is given.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise InputError("Give either input_ids or inputs_embeds, not both and not neither.")
        embedded = (
            self.get_input_embeddings()(input_ids) if inputs_embeds is None else inputs_embeds
        )
        return self._logits(embedded)

    def _logits(self, x: Tensor) -> Tensor:
        raise NotImplementedError


def on_both(module: nn.Module, x: Tensor) -> Tensor:
    """Apply a module to each half of the channels, the second as its reverse complement."""
    one, other = x.chunk(2, -1)
    return torch.cat([module(one), module(other.flip(1, 2)).flip(1, 2)], -1)
