"""What an operator carries along edges."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import OptionError
from ..mixers.base import LinearMixer
from ..operators import Operator
from ..operators.base import COMPONENTS
from ..operators.heads import DenseHeads
from ..operators.kernels.rows import in_stacks
from .pairs import Edges, Pairs


class MessageShare(NamedTuple):
    """Which share of a message is meant.

    Attributes:
        without: what the operator has beyond itself without these components; None for all of it.
        heads: of these alone, or None for all.
        constants: whether what belongs to no token is part of it.
    """

    without: frozenset[str] | None
    heads: tuple[int, ...] | None
    constants: bool

    @property
    def is_whole(self) -> bool:
        """Whether nothing is left of what is written."""
        return self == MessageShare(None, None, True)


def share_of(edges: Edges) -> MessageShare:
    """Which share of their messages edges mean."""
    constants = edges.sources is None and not edges.relations and not edges.selection
    return MessageShare(edges.without, edges.head_numbers, constants)


def is_attention(linear: LinearMixer) -> bool:
    """Whether a mixer is softmax attention."""
    return any(isinstance(leaf, DenseHeads) for leaf in linear.operator.leaves())


def carried(
    linear: LinearMixer,
    pairs: Iterable[Pairs],
    share: MessageShare,
    layer: str,
    values: Tensor | None = None,
) -> Tensor:
    """What reaches the tokens of a mixer along pairs of them, before the projection (B, L, H, P).

    Args:
        linear: the mixer.
        pairs: the pairs; of a share with constants, whole rows.
        share: which share of the messages.
        layer: what to call the mixer in an error.
        values: in place of the mixer's own; then without constants. Default: None.
    """
    own = values is None
    values = linear.values if values is None else values
    operators: list[tuple[int, Operator]] = [(1, linear.operator)]
    if share.without is not None:
        operators.append((-1, _without(linear, share.without, layer)))
    found = torch.zeros_like(values)
    for targets, sources in pairs:
        targets, sources = (x.to(values.device)[..., None, None] for x in (targets, sources))
        for stack in in_stacks(range(len(targets)), values.numel(), values.device):
            part = slice(stack.start, stack.stop)
            for sign, operator in operators:
                if share.constants:
                    made = operator.affine(values) if own else operator.apply(values)
                else:
                    made = operator.apply(values * sources[part])
                found += sign * (made * targets[part]).sum(0)
    return found * of_heads(linear, share.heads, layer)


def _without(linear: LinearMixer, components: frozenset[str], layer: str) -> Operator:
    there = {leaf.component for leaf in linear.operator.leaves()}
    if not components <= there:
        raise OptionError(
            f"Layer {layer!r} has no component {sorted(components - there)}; it has "
            f"{sorted(c for c in there if c)}."
        )
    return linear.restrict(COMPONENTS - components).operator


def of_heads(linear: LinearMixer, heads: Sequence[int] | None, layer: str) -> Tensor:
    """1 for the heads that are meant, (H, 1)."""
    count = linear.operator.shape.heads
    if heads is None:
        return linear.values.new_ones(1, 1)
    outside = next((head for head in heads if not -count <= head < count), None)
    if outside is not None:
        raise OptionError(
            f"heads names {outside}, but layer {layer!r} has {count} heads (for Mamba-1: "
            f"channels), numbered 0 to {count - 1}."
        )
    found = linear.values.new_zeros(count, 1)
    found[[head % count for head in heads]] = 1
    return found
