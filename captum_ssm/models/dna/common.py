"""Base classes of the DNA models."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...attr.call.checks import choice
from ...errors import InputError
from ..checkpoints import check_sizes


class Backbone(nn.Module):
    """The embedding layer, blocks and last norm, with the names of published checkpoints.

    Args:
        word_embeddings: the embedding layer.
        layers: the blocks.
        norm: a dict of one entry, the last norm by its module name.
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
        """Return the head's input for embeddings; both are (B, L, E), or (B, L, 2 E)."""
        for layer in self.layers:
            x = layer(x)
        norm: nn.Module = getattr(self, self._norm)
        out: Tensor = on_both(norm, x) if self.by_strand else norm(x)
        return out


class DNAModel(nn.Module):
    """Base class of the DNA models, whose input is token ids or embeddings."""

    #: The pooling of tokens in a classifier.
    pool = "mean"

    def get_input_embeddings(self) -> nn.Module:
        """Return the layer that embeds the tokens."""
        raise NotImplementedError

    def _set_pool(self, pools: Sequence[str], pool: str, **sizes: int) -> None:
        """Set the pooling; raise if it is unknown, or if one of ``sizes`` is below 1."""
        self.pool = choice("pool", pool, pools)
        check_sizes(**sizes)

    def _pooled(self, x: Tensor) -> Tensor:
        """Pool hidden states (B, L, E) over the tokens to (B, E)."""
        if self.pool == "mean":
            return x.mean(1)
        if self.pool == "max":
            return x.amax(1)
        return x[:, 0 if self.pool == "first" else -1]

    def forward(
        self, input_ids: Tensor | None = None, inputs_embeds: Tensor | None = None
    ) -> Tensor:
        """Return logits of tokens (B, L, V), or of classes (B, classes).

        Args:
            input_ids: token ids (B, L). Default: None, use ``inputs_embeds``.
            inputs_embeds: embeddings (B, L, ...) from :meth:`get_input_embeddings`. Default: None,
                use ``input_ids``.

        Raises:
            InputError: unless exactly one of both arguments is passed.
        """
        if (input_ids is None) == (inputs_embeds is None):
            passed = "neither" if input_ids is None else "both"
            raise InputError(f"Pass either input_ids or inputs_embeds; got {passed} of them.")
        embedded = (
            self.get_input_embeddings()(input_ids) if inputs_embeds is None else inputs_embeds
        )
        return self._logits(embedded)

    def _logits(self, x: Tensor) -> Tensor:
        """Return logits of tokens (B, L, V), or of classes (B, classes), for embeddings."""
        raise NotImplementedError


def on_both(module: nn.Module, x: Tensor) -> Tensor:
    """Apply a module to both halves of the channels, the second in reverse order of both dims."""
    strand, complement = x.chunk(2, -1)
    return torch.cat([module(strand), module(complement.flip(1, 2)).flip(1, 2)], -1)
