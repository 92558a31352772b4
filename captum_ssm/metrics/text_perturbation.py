"""Text perturbation: tokens are masked, deleted or revealed in the order of their relevance.

The activation task of HA appendix A (table 3, UN table 2) starts from a text of ``<UNK>`` alone and
reveals its tokens, most relevant first. AUAC is the area under the class's probability; higher is
better. The pruning task replaces tokens by ``<UNK>``, least relevant first. AU-MSE is the area
under the mean squared change of the logits; lower is better.

Every changed text reaches the model without padding, together with others of its length.

Shapes: B texts, L tokens of the longest, F shares, K classes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError, OptionError
from ..operators.kernels.arithmetic import where_double_is
from .checks import as_fractions, as_mask, check_positive, masked_scores
from .classes import Classifier, Perturbed, class_logits, class_targets, curves
from .curve import TENTHS, WHOLE, Curve, change_order, changed
from .tokens import Filling, fill_for, is_sequence, replace_tokens

#: ``"mask"`` puts the fill in a token's place, ``"delete"`` closes the gap.
MANNERS = ("mask", "delete")


@dataclass(frozen=True, eq=False)
class Texts:
    """Texts to change, and their replacements.

    Attributes:
        forward_func: ids (R, L) or embeddings (R, L, E) in, logits out: (R, K), or (R, L, K), read
            at the last token. It is called on texts without padding.
        inputs: token ids (B, L) or embeddings (B, L, E).
        fill: the replacement of masked tokens: the id of ``<UNK>``, or for embeddings a number or a
            vector (E,).
        attention_mask: 1 for tokens, 0 for padding on either side, (B, L). Default: None, no
            padding.
        fixed: tokens that never change, such as a prompt's, (B, L). Default: None, none.
        internal_batch_size: run at most so many changed texts at a time. Default: 64.

    Raises:
        InputError: when the shapes of inputs, fill and masks do not fit, or a text has no token.
        OptionError: when inputs are ids and ``fill`` is not an id.

    Example:
        >>> import torch
        >>> from captum_ssm.metrics import Texts
        >>> model = lambda ids: torch.stack([(ids == 1).sum(1).float(), torch.zeros(len(ids))], 1)
        >>> texts = Texts(model, torch.tensor([[1, 1, 2, 2]]), fill=0)
        >>> texts.unchanged().tolist()  # how often the text has token 1; nothing
        [[2.0, 0.0]]
    """

    forward_func: Classifier
    inputs: Tensor
    fill: Filling
    attention_mask: Tensor | None = None
    fixed: Tensor | None = None
    internal_batch_size: int = 64

    def __post_init__(self) -> None:
        inputs = self.inputs
        if not isinstance(inputs, Tensor):
            raise InputError(f"inputs must be a tensor, got {type(inputs).__name__}.")
        if not is_sequence(inputs):
            raise InputError(
                f"inputs has shape {tuple(inputs.shape)} and dtype {inputs.dtype}; token ids "
                "(B, L) or floating embeddings (B, L, E) are needed."
            )
        check_positive(self.internal_batch_size, "internal_batch_size")
        if not bool(self.real.any(-1).all()):
            raise InputError("attention_mask leaves a text without any token.")
        fill_for(self.fill, inputs)

    @property
    def real(self) -> Tensor:
        """Tokens that are not padding, (B, L)."""
        return as_mask(self.attention_mask, self._tokens, "attention_mask")

    @property
    def changeable(self) -> Tensor:
        """Tokens that may be changed, (B, L)."""
        if self.fixed is None:
            return self.real
        return self.real & ~as_mask(self.fixed, self._tokens, "fixed")

    @property
    def _tokens(self) -> Tensor:
        """Return a tensor of shape (B, L), one entry per token."""
        return self.inputs if self.inputs.dim() == 2 else self.inputs[..., 0]

    def logits(self, altered: Tensor, how: str = "mask") -> Tensor:
        """Return the logits (B, F, K) of texts with ``altered`` tokens (B, F, L).

        ``how`` is ``"mask"`` or ``"delete"``.
        """
        if how not in MANNERS:
            raise OptionError(f"how={how!r}: use one of {MANNERS}.")
        kept = self.real[:, None] & ~altered if how == "delete" else self.real[:, None]
        lengths = where_double_is(kept.sum(-1)).expand(altered.shape[:2])  # (B, F)
        if int(lengths.min()) == 0:
            raise OptionError(
                "fractions: a share deletes every token of a text. Use smaller shares, name tokens "
                "to keep by fixed=, or use how='mask'."
            )
        found: Tensor | None = None
        for example, step in _alike(lengths, self.internal_batch_size):
            rows = self.inputs[example]
            if how == "mask":
                rows = replace_tokens(rows, altered[example, step], self.fill)
            left = kept.expand_as(altered)[example, step]
            texts = rows[left].view(len(rows), -1, *rows.shape[2:])
            logits = class_logits(self.forward_func, texts).to(lengths.device)
            if found is None:
                found = logits.new_empty(*lengths.shape, logits.shape[-1])
            found[example, step] = logits
        assert found is not None  # there is at least one text
        return found

    def unchanged(self) -> Tensor:
        """Return the logits of the texts as they are, (B, K)."""
        return self.logits(torch.zeros_like(self.real)[:, None])[:, 0]


def text_perturbation(
    texts: Texts,
    relevance: Tensor,
    target: Any = None,
    *,
    most_first: bool = True,
    fractions: Sequence[float] = TENTHS,
    how: str = "mask",
    generator: torch.Generator | None = None,
) -> Perturbed:
    """Measure a class while tokens are masked or deleted in the order of their relevance.

    Args:
        texts: the texts and the model.
        relevance: (B, L), or (B, L, E), summed over features; padding is ignored.
        target: the class, or one per text. Default: None, the model's prediction for each.
        most_first: the most relevant tokens first (positive), or the least (negative). Default:
            True.
        fractions: shares of the tokens that may be changed. Default: 10 % to 90 %.
        how: ``"mask"`` or ``"delete"``. Default: ``"mask"``.
        generator: breaks ties of relevance at random. Default: None, earlier tokens come first.

    Returns:
        Curves over ``fractions``, one row per text: of n tokens that may be changed, the share f
        changes the first floor(f n).

    Raises:
        InputError: when relevance is not (B, L) or (B, L, E).
        OptionError: when fractions do not rise within 0 to 1, how is unknown, or a share deletes
            every token of a text.
        TargetError: when target is not a class of the model.

    Example:
        >>> import torch
        >>> from captum_ssm.metrics import Texts, text_perturbation
        >>> model = lambda ids: torch.stack([(ids == 1).sum(1).float(), torch.zeros(len(ids))], 1)
        >>> texts = Texts(model, torch.tensor([[1, 1, 2, 2]]), fill=0)
        >>> relevance = torch.tensor([[0.5, 0.4, 0.1, 0.0]])
        >>> text_perturbation(texts, relevance, fractions=[0.25, 0.5]).logit.values.tolist()
        [[1.0, 0.0]]
    """
    shares = as_fractions(fractions)
    gone = _first(texts, relevance, shares, most_first, generator)
    classes = class_targets(target, texts.unchanged())
    return curves(texts.logits(gone, how), classes, shares)


def text_activation(
    texts: Texts,
    relevance: Tensor,
    target: Any = None,
    *,
    fractions: Sequence[float] = WHOLE,
    generator: torch.Generator | None = None,
) -> Curve:
    """Return the class's probability as tokens are revealed, most relevant first; its area is AUAC.

    Args:
        texts, relevance, target, generator: as in :func:`text_perturbation`, with the same
            defaults; the paper's class is the true one.
        fractions: shares of the tokens that are revealed. Default: 0 % to 100 %.

    Returns:
        The curve, one row per text.

    Raises:
        InputError, OptionError, TargetError: as :func:`text_perturbation`.

    Example:
        >>> import torch
        >>> from captum_ssm.metrics import Texts, text_activation
        >>> model = lambda ids: torch.stack([(ids == 1).sum(1).float(), torch.zeros(len(ids))], 1)
        >>> texts = Texts(model, torch.tensor([[1, 1, 2, 2]]), fill=0)
        >>> curve = text_activation(texts, torch.tensor([[0.5, 0.4, 0.1, 0.0]]))
        >>> curve.values[0, [0, 3, 10]].round(decimals=2).tolist()  # sigmoid of 0, 1 and 2
        [0.5, 0.73, 0.88]
    """
    shares = as_fractions(fractions)
    hidden = texts.changeable[:, None] & ~_first(texts, relevance, shares, True, generator)
    classes = class_targets(target, texts.unchanged())
    return curves(texts.logits(hidden), classes, shares).probability


def text_pruning(
    texts: Texts,
    relevance: Tensor,
    *,
    fractions: Sequence[float] = WHOLE,
    how: str = "mask",
    generator: torch.Generator | None = None,
) -> Curve:
    """Return the logits' mean squared change as the least relevant tokens go; its area is AU-MSE.

    Args:
        texts, relevance, how, generator: as in :func:`text_perturbation`, with the same defaults.
        fractions: shares of the tokens that are removed. Default: 0 % to 100 %, the last of which
            ``how="delete"`` allows only where some tokens are fixed.

    Returns:
        The curve, one row per text: at each share the mean over classes of the squared change.

    Raises:
        InputError, OptionError: as :func:`text_perturbation`.

    Example:
        >>> import torch
        >>> from captum_ssm.metrics import Texts, text_pruning
        >>> model = lambda ids: torch.stack([(ids == 1).sum(1).float(), torch.zeros(len(ids))], 1)
        >>> texts = Texts(model, torch.tensor([[1, 1, 2, 2]]), fill=0)
        >>> relevance = torch.tensor([[0.5, 0.4, 0.1, 0.0]])
        >>> text_pruning(texts, relevance, fractions=[0.5, 1.0]).values.tolist()
        [[0.0, 2.0]]
    """
    shares = as_fractions(fractions)
    gone = _first(texts, relevance, shares, False, generator)
    change = texts.logits(gone, how).double() - texts.unchanged().double()[:, None]
    return Curve(shares, change.square().mean(-1))


def _first(
    texts: Texts,
    relevance: Tensor,
    fractions: Tensor,
    most_first: bool,
    generator: torch.Generator | None,
) -> Tensor:
    """Return True for the first tokens in the order of relevance, at each share, (B, F, L)."""
    real = texts.real
    scores = (
        relevance.sum(-1) if isinstance(relevance, Tensor) and relevance.dim() == 3 else relevance
    )
    if not isinstance(scores, Tensor) or scores.shape != real.shape:
        found = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        raise InputError(
            f"relevance must be a tensor of shape {tuple(real.shape)}, one number per token, or "
            f"have features behind it; got {found}."
        )
    scores, _ = masked_scores(scores, real, "relevance")
    allowed = texts.changeable
    order = change_order(scores, most_first=most_first, mask=allowed, generator=generator)
    return changed(order, fractions, allowed).to(real.device)


def _alike(lengths: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pairs of indices (R,) into ``lengths``: at most ``size`` texts of one length."""
    for length in torch.unique(lengths):
        for places in (lengths == length).nonzero().split(size):
            example, step = places.unbind(-1)
            yield example, step
