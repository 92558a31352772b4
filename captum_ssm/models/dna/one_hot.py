"""Wrap a model of DNA tokens, so that it accepts one-hot DNA as genomics packages use it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ...errors import InputError, OptionError

#: The ids of A, C, G and T in the tokenizers of Caduceus and HyenaDNA.
BASE_IDS = (7, 8, 9, 10)


class OneHot(nn.Module):
    """A model of one-hot DNA: each position is embedded as the weighted sum of bases' embeddings.

    Embeddings are linear in the input, so each base at each position has relevance, and
    ``LatimFlow(OneHot(model)).attribute(x, target=...)`` has the shape of x. A position with zeros
    has no base.

    Args:
        model: a model with ``get_input_embeddings()`` that accepts this layer's output as
            ``inputs_embeds``, such as DNA models of this package and most transformers models.
        base_ids: the token ids of A, C, G and T. Default: ``(7, 8, 9, 10)``, as in Caduceus and
            HyenaDNA.
        bases_first: True for inputs (B, 4, L), as in tangermeme; False for (B, L, 4).
            Default: True.
        before: ids of tokens to insert before the sequence. Default: none.
        after: ids of tokens to append, such as the tokenizers' ``[SEP]``. Default: none.

    Raises:
        OptionError: when the model has no ``get_input_embeddings``, or there are not four base ids.

    Example:
        >>> import torch
        >>> from captum_ssm import LatimFlow
        >>> from captum_ssm.models import Caduceus, OneHot
        >>> model = OneHot(Caduceus(d_model=16, n_layer=2, num_classes=3).eval())
        >>> x = torch.nn.functional.one_hot(torch.randint(4, (2, 10)), 4).mT.float()  # (B, 4, L)
        >>> LatimFlow(model).attribute(x, target=1).shape
        torch.Size([2, 4, 10])
    """

    def __init__(
        self,
        model: nn.Module,
        base_ids: Sequence[int] = BASE_IDS,
        *,
        bases_first: bool = True,
        before: Sequence[int] = (),
        after: Sequence[int] = (),
    ) -> None:
        super().__init__()
        if not hasattr(model, "get_input_embeddings"):
            raise OptionError(
                f"model is a {type(model).__name__} without get_input_embeddings(), so the "
                "embeddings of the bases are not known. Pass a model with this method, or explain "
                "embeddings instead of one-hot DNA."
            )
        if len(base_ids) != 4:
            raise OptionError(f"base_ids={tuple(base_ids)}: pass the four ids of A, C, G and T.")
        self.model = model
        self.base_ids = tuple(base_ids)
        self.bases_first = bases_first
        self.before, self.after = tuple(before), tuple(after)

    def forward(self, one_hot: Tensor) -> Tensor:
        """Return the model's output for one-hot DNA (B, 4, L), or (B, L, 4) unless ``bases_first``.

        Raises:
            InputError: for a different shape.
        """
        bases = one_hot.mT if self.bases_first and one_hot.dim() == 3 else one_hot  # (B, L, 4)
        if bases.dim() != 3 or bases.shape[-1] != 4:
            accepted = "(B, 4, L)" if self.bases_first else "(B, L, 4)"
            raise InputError(
                f"inputs of shape {tuple(one_hot.shape)} are not one-hot DNA {accepted}. Pass this "
                "shape, or set bases_first=True for (B, 4, L), False for (B, L, 4)."
            )
        table = self._embed(self.base_ids, one_hot.device)  # (4, E)
        parts = []
        for vectors in (self._repeat(self.before, bases), bases.to(table) @ table,
                        self._repeat(self.after, bases)):  # fmt: skip
            parts += [] if vectors is None else [vectors]
        embedded = torch.cat(parts, 1) if len(parts) > 1 else parts[0]
        out: Tensor = self.model(inputs_embeds=embedded)
        return out

    def _repeat(self, ids: Sequence[int], like: Tensor) -> Tensor | None:
        """Embed n ids once for each example of ``like``, (B, n, E); None without ids."""
        if not ids:
            return None
        vectors = self._embed(ids, like.device)
        return vectors.expand(len(like), *vectors.shape)

    def _embed(self, ids: Sequence[int], device: torch.device) -> Tensor:
        """Return the embeddings (n, E) of token ids, each embedded as a sequence of one token."""
        layer = self.model.get_input_embeddings()  # type: ignore[operator]
        vectors: Tensor = layer(torch.tensor(ids, device=device)[:, None])
        return vectors[:, 0]
