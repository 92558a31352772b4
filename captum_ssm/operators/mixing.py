"""How an operator mixes tokens, in one word."""

from __future__ import annotations

from enum import Enum


class Mixing(Enum):
    """How an operator mixes tokens: the classes of theorem 1 of the hidden-attention paper.

    The theorem asks of a layer whether the part that mixes its tokens depends on the data.  S4 and
    DSS convolve with a fixed kernel; GSS and Hyena put gates, one factor per token, around such a
    kernel; in S6, as in attention, the data enters the mixing itself.

    The answer follows from the parts an operator is made of, whatever numbers they hold:

    - A product of fixed mixing with gates between, such as two steps of Hyena (gate . conv . gate .
      conv), is data-controlled: what reaches token i from token j depends on the tokens between.
      The theorem, too, speaks of a single step.
    - A recurrence whose decays follow from the data is data-controlled even with a single state.
      Each of its matrices is a constant one between two diagonals, but these hold products of
      decays over the whole past, not factors of single tokens.
    - Which tokens are padding is no data.

    Attributes:
        NONE: no output reads another token.
        FIXED: by one matrix per channel, the same for every input (S4, DSS).
        GATED: by diag(r) . fixed . diag(w), where r and w may follow from the input (GSS, Hyena).
        CONTROLLED: by matrices that follow from the input in any other way (S6, attention).

    Example:
        >>> import torch
        >>> from captum_ssm.operators import Chain, Diagonal, LongConv, Shape
        >>> shape = Shape(batch=1, tokens=3, heads=1, per_head=1)
        >>> conv = LongConv(torch.ones(1, 1, 3), shape)
        >>> gate = Diagonal(torch.arange(3.0).view(1, 3, 1, 1), shape, "gate")
        >>> conv.mixing.value, Chain(gate, conv, gate).mixing.value
        ('fixed', 'gated')
    """

    NONE = "none"
    FIXED = "fixed"
    GATED = "gated"
    CONTROLLED = "controlled"
