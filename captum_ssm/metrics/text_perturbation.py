"""Measure a model while tokens are masked, deleted or revealed in the order of relevance.

The activation task of HA appendix A (table 3, UN table 2) starts from a text in which all tokens
are ``<UNK>``, and reveals the tokens, the most relevant tokens first. AUAC is the area under the
curve of the class's probability; higher is better. The pruning task replaces tokens with ``<UNK>``,
the least relevant tokens first. AU-MSE is the area under the curve of the mean squared change of
the logits; lower is better.

The model runs on changed texts without padding, in batches of texts of equal length.

Shapes: B texts, L tokens of the longest text, F shares, K classes.
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
from .curve import TENTHS, WHOLE, Curve, change_order, changed_at_shares
from .tokens import Filling, fill_for, is_sequence, replace_tokens

#: ``"mask"`` replaces a token with the fill, ``"delete"`` removes the token from the text.
MANNERS = ("mask", "delete")


@dataclass(frozen=True, eq=False)
class Texts:
    """Texts to change, with the replacement of tokens and the model.

    Attributes:
        forward_func: a function from ids (R, L) or embeddings (R, L, E) to logits (R, K), or (R, L,
            K), of which the last token is used. The function is called with texts without padding.
        inputs: token ids (B, L) or embeddings (B, L, E).
        fill: the replacement of masked tokens: the id of ``<UNK>``, or for embeddings a number or a
            vector (E,).
        attention_mask: 1 for tokens, 0 for padding on either side, (B, L). Default: None, no
            padding.
        fixed: True for tokens that are never changed, such as the tokens of a prompt, (B, L).
            Default: None, no token.
        internal_batch_size: the largest number of changed texts to run at a time. Default: 64.

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
            raise InputError(
                f"inputs is of type {type(inputs).__name__}. Pass token ids (B, L) or embeddings "
                "(B, L, E)."
            )
        if not is_sequence(inputs):
            raise InputError(
                f"inputs has shape {tuple(inputs.shape)} and dtype {inputs.dtype}; pass token "
                "ids (B, L) or floating-point embeddings (B, L, E)."
            )
        check_positive(self.internal_batch_size, "internal_batch_size")
        if not bool(self.real.any(-1).all()):
            empty = int((~self.real.any(-1)).long().argmax())
            raise InputError(
                f"attention_mask is 0 for every token of the text at index {empty}. Leave the "
                "text out, or correct the mask."
            )
        fill_for(self.fill, inputs)

    @property
    def real(self) -> Tensor:
        """True for tokens that are not padding, (B, L)."""
        return as_mask(self.attention_mask, self._tokens, "attention_mask")

    @property
    def changeable(self) -> Tensor:
        """True for tokens that may be changed, (B, L)."""
        if self.fixed is None:
            return self.real
        return self.real & ~as_mask(self.fixed, self._tokens, "fixed")

    @property
    def _tokens(self) -> Tensor:
        """A tensor with one entry per token, (B, L)."""
        return self.inputs if self.inputs.dim() == 2 else self.inputs[..., 0]

    def logits(self, altered: Tensor, how: str = "mask") -> Tensor:
        """Return the logits (B, F, K) of texts whose ``altered`` tokens (B, F, L) are changed.

        ``how`` is ``"mask"`` to replace these tokens or ``"delete"`` to remove them.
        """
        if how not in MANNERS:
            raise OptionError(f"how={how!r}: pass one of {MANNERS}.")
        remaining = self.real[:, None] & ~altered if how == "delete" else self.real[:, None]
        lengths = where_double_is(remaining.sum(-1)).expand(altered.shape[:2])  # (B, F)
        if int(lengths.min()) == 0:
            raise OptionError(
                "fractions has a share that deletes every token of a text. Pass smaller shares, "
                "tokens to keep in fixed=, or how='mask'."
            )
        all_logits: Tensor | None = None
        for example, step in _groups_of_equal_length(lengths, self.internal_batch_size):
            rows = self.inputs[example]
            if how == "mask":
                rows = replace_tokens(rows, altered[example, step], self.fill)
            # the rows of a group have equal lengths, so their remaining tokens form a tensor
            row_tokens = remaining.expand_as(altered)[example, step]
            texts = rows[row_tokens].view(len(rows), -1, *rows.shape[2:])
            logits = class_logits(self.forward_func, texts).to(lengths.device)
            if all_logits is None:
                all_logits = logits.new_empty(*lengths.shape, logits.shape[-1])
            all_logits[example, step] = logits
        assert all_logits is not None  # there is at least one text
        return all_logits

    def unchanged(self) -> Tensor:
        """Return the logits of the unchanged texts, (B, K)."""
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
    """Measure a class's scores while tokens are masked or deleted in the order of relevance.

    Args:
        texts: the texts and the model.
        relevance: relevance of tokens (B, L), or of features (B, L, E), which is summed over
            features. Padding is ignored.
        target: the class, or one class per text. Default: None, the model's predictions.
        most_first: True to change the most relevant tokens first (positive test), False to change
            the least relevant first (negative test). Default: True.
        fractions: the shares of the changeable tokens to change. Default: 10 % to 90 %.
        how: ``"mask"`` to replace tokens, ``"delete"`` to remove them. Default: ``"mask"``.
        generator: a generator for a random order of tokens with equal relevance. Default: None,
            earlier tokens come first.

    Returns:
        Curves, one row per text. Share f changes the first floor(f n) of n changeable tokens.

    Raises:
        InputError: when relevance is not (B, L) or (B, L, E).
        OptionError: when fractions do not increase from 0 to 1, how is unknown, or a share deletes
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
    changed = _changed_tokens(texts, relevance, shares, most_first, generator)
    classes = class_targets(target, texts.unchanged())
    return curves(texts.logits(changed, how), classes, shares)


def text_activation(
    texts: Texts,
    relevance: Tensor,
    target: Any = None,
    *,
    fractions: Sequence[float] = WHOLE,
    generator: torch.Generator | None = None,
) -> Curve:
    """Return the class's probability while tokens are revealed; the area under it is AUAC.

    Args:
        texts, relevance, target, generator: see :func:`text_perturbation`, with the same
            defaults. The paper uses the true class as target.
        fractions: the shares of tokens to reveal, the most relevant first. Default: 0 % to 100 %.

    Returns:
        The curve, one row per text.

    Raises:
        InputError, OptionError, TargetError: see :func:`text_perturbation`.

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
    masked = texts.changeable[:, None] & ~_changed_tokens(texts, relevance, shares, True, generator)
    classes = class_targets(target, texts.unchanged())
    return curves(texts.logits(masked), classes, shares).probability


def text_pruning(
    texts: Texts,
    relevance: Tensor,
    *,
    fractions: Sequence[float] = WHOLE,
    how: str = "mask",
    generator: torch.Generator | None = None,
) -> Curve:
    """Return the squared change of logits while tokens are removed; the area under it is AU-MSE.

    Args:
        texts, relevance, how, generator: see :func:`text_perturbation`, with the same defaults.
        fractions: the shares of tokens to remove, the least relevant first. Default: 0 % to 100 %.
            With ``how="delete"``, 100 % is only possible if some tokens are fixed.

    Returns:
        The curve of the squared change, which is averaged over classes, with one row per text.

    Raises:
        InputError, OptionError: see :func:`text_perturbation`.

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
    changed = _changed_tokens(texts, relevance, shares, False, generator)
    difference = texts.logits(changed, how).double() - texts.unchanged().double()[:, None]
    return Curve(shares, difference.square().mean(-1))


def _changed_tokens(
    texts: Texts,
    relevance: Tensor,
    fractions: Tensor,
    most_first: bool,
    generator: torch.Generator | None,
) -> Tensor:
    """Return a mask (B, F, L) of the tokens that are changed at each share."""
    real = texts.real
    scores = (
        relevance.sum(-1) if isinstance(relevance, Tensor) and relevance.dim() == 3 else relevance
    )
    if not isinstance(scores, Tensor) or scores.shape != real.shape:
        actual = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        raise InputError(
            f"relevance is {actual}. Pass a tensor {tuple(real.shape)} with one number per token, "
            "or one with features as a third dimension."
        )
    scores, _ = masked_scores(scores, real, "relevance")
    allowed = texts.changeable
    order = change_order(scores, most_first=most_first, mask=allowed, generator=generator)
    return changed_at_shares(order, fractions, allowed).to(real.device)


def _groups_of_equal_length(lengths: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield groups of at most ``size`` index pairs into ``lengths`` (B, F) with equal lengths."""
    for length in torch.unique(lengths):
        for indices in (lengths == length).nonzero().split(size):
            example, step = indices.unbind(-1)
            yield example, step
