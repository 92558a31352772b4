"""Compute the messages between tokens along edges from a mixer's linear form."""

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
    """The components and heads of each message that edges select.

    Attributes:
        without: the components whose part of a message is cut; None for the whole message.
        heads: the heads, or None for all.
        constants: whether biases, which belong to no token, are also cut.
    """

    without: frozenset[str] | None
    heads: tuple[int, ...] | None
    constants: bool

    @property
    def is_whole(self) -> bool:
        """Return True if the share is the mixer's whole output."""
        return self == MessageShare(None, None, True)


def share_of(edges: Edges) -> MessageShare:
    """Return the components and heads that edges select, as a :class:`MessageShare`."""
    # without sources the whole output is cut; with selection the mixer is computed again
    constants = edges.sources is None and not edges.relations and not edges.selection
    return MessageShare(edges.without, edges.head_numbers, constants)


def is_attention(linear: LinearMixer) -> bool:
    """Return True if a mixer is softmax attention."""
    return any(isinstance(leaf, DenseHeads) for leaf in linear.operator.leaves())


def sum_messages(
    linear: LinearMixer,
    pairs: Iterable[Pairs],
    share: MessageShare,
    layer: str,
    values: Tensor | None = None,
) -> Tensor:
    """Sum the messages to each token along pairs of tokens, before the projection, (B, L, H, P).

    Args:
        linear: the mixer.
        pairs: masks of targets and of sources, (R, B, L) each: in row r all sources send to all
            targets. If the share includes constants, sources are ignored.
        share: the selected components and heads of each message.
        layer: the mixer's name, for error messages.
        values: replacements of the mixer's values; constants are then omitted. Default: None, the
            mixer's values.
    """
    of_mixer = values is None
    values = linear.values if values is None else values
    operators: list[tuple[int, Operator]] = [(1, linear.operator)]
    if share.without is not None:  # the cut components: the whole minus the operator without them
        operators.append((-1, _operator_without(linear, share.without, layer)))
    total = torch.zeros_like(values)
    for targets, sources in pairs:
        targets, sources = (x.to(values.device)[..., None, None] for x in (targets, sources))
        for rows in in_stacks(range(len(targets)), values.numel(), values.device):
            chunk = slice(rows.start, rows.stop)  # r rows in one call: (r, B, L, H, P)
            for sign, operator in operators:
                if share.constants:  # each target, in one row only, loses all that it receives
                    received = operator.affine(values) if of_mixer else operator.apply(values)
                else:
                    received = operator.apply(values * sources[chunk])
                total += sign * (received * targets[chunk]).sum(0)
    return total * head_mask(linear, share.heads, layer)


def _operator_without(linear: LinearMixer, components: frozenset[str], layer: str) -> Operator:
    """Return the mixer's operator with a factor 1, or a summand 0, in place of some components."""
    present = {leaf.component for leaf in linear.operator.leaves()}
    if not components <= present:
        raise OptionError(
            f"component contains {sorted(components - present)}, which are not in layer {layer!r}. "
            f"Pass some of {sorted(c for c in present if c)}."
        )
    return linear.restrict(COMPONENTS - components).operator


def head_mask(linear: LinearMixer, heads: Sequence[int] | None, layer: str) -> Tensor:
    """Return a mask (H, 1) with 1 for the selected heads, or (1, 1) for all heads."""
    count = linear.operator.shape.heads
    if heads is None:
        return linear.values.new_ones(1, 1)
    outside = next((head for head in heads if not -count <= head < count), None)
    if outside is not None:
        raise OptionError(
            f"heads contains {outside}, but layer {layer!r} has {count} heads (for Mamba-1: "
            f"channels). Pass numbers from {-count} to {count - 1}."
        )
    mask = linear.values.new_zeros(count, 1)
    mask[[head % count for head in heads]] = 1
    return mask
