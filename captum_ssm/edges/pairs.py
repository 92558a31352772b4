"""Select messages by layers, target tokens and source tokens."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..attr.call import checks
from ..attr.call.given import bind_arguments
from ..errors import NoMixerError, OptionError, QueryError
from ..operators.base import COMPONENTS
from ..operators.kernels.rows import slices
from ..tracing import Mixer

#: A function of target and source positions, as broadcastable tensors; True if there is an edge.
Relation = Callable[[Tensor, Tensor], Tensor]
#: Tokens of a sequence: None for all of them, one position, several, a slice of them, a boolean
#: mask (L,) or (B, L), a tensor of positions for each example (B, K), or a relation to the tokens
#: at the other end.
Tokens = None | int | slice | range | Sequence[int] | Tensor | str | Relation
#: One layer: its number among the model's mixers, its name, the mixer itself, or the family or kind
#: (``"attention"``, ``"ssm"``) of several.
OneLayer = int | str | nn.Module

#: Functions of both tokens' positions that return True if the edge exists, by relation name.
RELATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "later": torch.gt,
    "earlier": torch.lt,
    "same": torch.eq,
    "other": torch.ne,
}
#: Kinds of mixers that ``layers`` may name: softmax attention, and all others.
KINDS = ("attention", "ssm")

#: The number of pairs for which a relation is evaluated at once.
_PAIRS = 2**24


def _with_names_in_errors(cls: type[Edges]) -> type[Edges]:
    """Decorate Edges to raise ArgumentError, with the accepted names, for a wrong argument."""
    signature, init = inspect.signature(cls), cls.__init__

    @functools.wraps(init)
    def checked(self: Edges, *args: Any, **kwargs: Any) -> None:
        bind_arguments(signature, cls.__name__, args, kwargs, advice={})
        init(self, *args, **kwargs)

    cls.__init__ = checked  # type: ignore[method-assign]
    return cls


@_with_names_in_errors
@dataclass(frozen=True, eq=False)
class Edges:
    """Messages from tokens to tokens within mixers, to be cut by :func:`~captum_ssm.knock_out`.

    The message from token j to token i is the operator's alpha[i, j] x[j] after the output
    projection. Token j may also change the coefficients at i, through a short convolution before
    B, C and the step. This is not part of the message; see ``selection``.

    Attributes:
        layers: the mixers: a number in the model's order, a name, a module, a range or slice, a
            list of these, or a family such as ``"Mamba-2"``. ``"attention"`` selects all softmax
            attention, and ``"ssm"`` all other mixers. Default: None, all.
        sources: the tokens that send: a position, a list or slice of them, a boolean mask (L,) or
            (B, L), or a tensor of positions (B, K). Or a relation to the target: ``"earlier"``,
            ``"later"``, ``"same"``, ``"other"`` or a boolean function of positions (target,
            source). Default: None, the mixer's whole output with constants such as biases; if
            targets are a relation, all tokens.
        targets: the tokens that receive, in the same forms; names are relations to the source.
            Default: None, all.
        heads: the indices of heads; for Mamba-1, of channels. Default: None, all.
        component: one or several of ``conv``, ``activation``, ``scan``, ``skip``, ``gate`` and
            ``norm``. Cut only this part of the message: the operator minus the operator without the
            component. Default: None, the whole message.
        selection: whether the mixer recomputes the targets without the sources (zeros, or
            ``replace``), which also removes the sources' effects on B, C, steps and gates. Default:
            False, only the message.

    Raises:
        OptionError: for a value in none of these forms.
        ArgumentError: for an argument with a different name.

    Example:
        >>> from captum_ssm.edges import Edges
        >>> Edges(layers=range(2, 5), sources=3, targets="later").targets
        'later'
    """

    layers: OneLayer | slice | range | Sequence[OneLayer] | None = None
    sources: Tokens = None
    targets: Tokens = None
    heads: int | Sequence[int] | None = None
    component: str | Collection[str] | None = None
    selection: bool = False

    def __post_init__(self) -> None:
        for name in ("sources", "targets"):
            _check_tokens(name, getattr(self, name))
        checks.flags(selection=self.selection)
        if self.heads is not None:
            checks.no_repeats("heads", self.head_numbers or ())
        for component in self.without or ():
            checks.choice("component", component, sorted(COMPONENTS))
        if self.selection and self.component is not None:
            raise OptionError(
                "selection=True removes the sources from the mixer's whole computation. Leave "
                f"component={self.component!r} out, or pass selection=False."
            )

    @property
    def head_numbers(self) -> tuple[int, ...] | None:
        """The indices of the selected heads; None for all heads."""
        if self.heads is None:
            return None
        head = checks.as_integer(self.heads)
        noun = "heads (for Mamba-1: channels)"
        return (head,) if head is not None else checks.integers("heads", self.heads, noun)

    @property
    def without(self) -> frozenset[str] | None:
        """The components whose part of a message is cut; None for the whole message."""
        if self.component is None:
            return None
        return frozenset([self.component] if isinstance(self.component, str) else self.component)

    @property
    def relations(self) -> list[Relation]:
        """The relations that ``targets`` and ``sources`` name, as functions of both positions."""
        relations: list[Relation] = []
        if isinstance(self.targets, str):
            relations.append(RELATIONS[self.targets])
        if isinstance(self.sources, str):
            named = RELATIONS[self.sources]  # a relation of the source to the target
            relations.append(lambda target, source: named(source, target))
        functions = (x for x in (self.targets, self.sources) if callable(x))
        return [*relations, *functions]

    def chosen(self, mixers: Sequence[Mixer]) -> list[Mixer]:
        """Return the mixers that ``layers`` selects; all for a kind, which is checked in a run."""
        layers = self.layers
        if layers is None or layers in KINDS:
            return list(mixers)
        if isinstance(layers, slice):
            return list(mixers[layers])
        single = isinstance(layers, str | nn.Module) or checks.as_integer(layers) is not None
        if not single and not isinstance(layers, Iterable):
            raise OptionError(
                f"layers={layers!r} is not accepted. Pass a number, a name, a mixer, a range, a "
                "list of these, or None for all."
            )
        entries: Any = [layers] if single else layers
        selected = [mixer for entry in entries for mixer in _mixers_named(entry, mixers)]
        return list(dict.fromkeys(selected))

    def is_of_kind(self, is_attention: bool) -> bool:
        """Return True unless ``layers`` is ``"attention"`` or ``"ssm"`` and excludes the mixer."""
        wanted = self.layers if isinstance(self.layers, str) else None
        return wanted not in KINDS or (wanted == "attention") == is_attention


def _mixers_named(entry: Any, mixers: Sequence[Mixer]) -> list[Mixer]:
    """Return the mixers that one entry of ``layers`` names: several only for a family."""
    index = checks.as_integer(entry)
    if index is not None:
        if not -len(mixers) <= index < len(mixers):
            raise OptionError(
                f"layers contains {index}, but the model has {len(mixers)} mixers. Pass numbers "
                f"from 0 to {len(mixers) - 1}."
            )
        return [mixers[index]]
    named = [m for m in mixers if entry is m.module or entry in m.names]
    if isinstance(entry, str):
        named = named or [m for m in mixers if m.architecture.family.lower() == entry.lower()]
    if not named:
        families = dict.fromkeys(m.architecture.family for m in mixers)
        shown = entry if isinstance(entry, str) else type(entry).__name__
        raise NoMixerError(
            f"layers contains {shown!r}, which is not a mixer of this model. Pass a mixer: "
            f"{', '.join(m.name for m in mixers)}; or a family: {', '.join(families)}."
        )
    return named


def _check_tokens(name: str, tokens: Any) -> None:
    """Raise OptionError unless the option ``name`` has one of the forms of :data:`Tokens`."""
    if tokens is None or isinstance(tokens, slice):
        return
    if isinstance(tokens, str):
        checks.choice(name, tokens, tuple(RELATIONS))
    elif isinstance(tokens, Tensor):
        if tokens.is_floating_point() or tokens.is_complex() or tokens.dim() > 2:
            raise OptionError(
                f"{name} is a tensor of {tokens.dtype} and shape {tuple(tokens.shape)}. Pass "
                "booleans (L,) or (B, L), or positions (K,) or (B, K)."
            )
    elif not callable(tokens) and checks.as_integer(tokens) is None:
        checks.integers(name, tokens, "positions")


class Pairs(NamedTuple):
    """Pairs of tokens, stored as R disjoint products (set of targets) x (set of sources).

    Attributes:
        targets: the tokens that receive (R, B, L).
        sources: the tokens that send (R, B, L).
    """

    targets: Tensor
    sources: Tensor


def pairs_of(
    edges: Sequence[Edges],
    size: tuple[int, int],
    given: Tensor | None = None,
    *,
    by_target: bool = False,
) -> Iterator[Pairs]:
    """Yield the union of the pairs that edges name, in chunks to limit memory.

    Args:
        edges: the edges; a pair in several of them occurs once.
        size: the batch size and number of tokens (B, L) that positions refer to.
        given: the input position of each of a layer's tokens (B, L'), -1 for none; pairs then
            consist of the layer's tokens. Default: None, the input's tokens.
        by_target: whether each target must be in only one product. Default: False.

    Raises:
        QueryError: for positions outside the tokens.
        OptionError: for a relation that does not return booleans.
    """
    at = torch.arange(size[1]).expand(size) if given is None else given  # input positions
    batch, tokens = at.shape
    masks = [
        (_mask("targets", e.targets, size, at), _mask("sources", e.sources, size, at), e.relations)
        for e in edges
    ]
    if len(masks) == 1 and not masks[0][2]:
        targets, sources, _ = masks[0]
        yield Pairs(targets[None], sources[None])
        return
    # along the end with fewer tokens there are fewer products
    columns = sum(int(s.sum(1).max()) for _, s, _ in masks)
    rows = sum(int(t.sum(1).max()) for t, _, _ in masks)
    along_sources = columns <= rows and not by_target
    for part in slices(range(tokens), max(1, _PAIRS // max(1, tokens * batch))):
        products = [_products(masks, b, part, at[b], along_sources) for b in range(batch)]
        count = max(map(len, products))  # examples with fewer products get empty ones
        if count == 0:
            continue
        targets, sources = (torch.zeros(count, batch, tokens, dtype=torch.bool) for _ in range(2))
        for b, of_example in enumerate(products):
            for r, (target, source) in enumerate(of_example):
                targets[r, b], sources[r, b] = target, source
        yield Pairs(targets, sources)


def _products(
    masks: Sequence[tuple[Tensor, Tensor, Sequence[Relation]]],
    example: int,
    part: slice,
    positions: Tensor,
    along_sources: bool,
) -> list[tuple[Tensor, Tensor]]:
    """Return one example's pairs as products of a target mask and a source mask, (L',).

    Own tokens are those in the slice ``part``: sources if ``along_sources``, else targets. All own
    tokens with the same partners (tokens at the other end) are in one product.
    """
    token_index = torch.arange(len(positions))
    ends = [(t[example], s[example]) for t, s, _ in masks]
    involved = torch.stack([s if along_sources else t for t, s in ends]).any(0)
    own_tokens = token_index[part][involved[part]]
    partners = torch.stack([t if along_sources else s for t, s in ends]).any(0).nonzero().flatten()
    if not len(own_tokens) or not len(partners):
        return []
    target_index, source_index = (partners, own_tokens) if along_sources else (own_tokens, partners)
    is_pair = torch.zeros(len(target_index), len(source_index), dtype=torch.bool)
    for (targets, sources), (_, _, relations) in zip(ends, masks, strict=True):
        by_edges = targets[target_index][:, None] & sources[source_index]
        for relation in relations:  # of positions in the input, so not for -1
            by_edges &= _relation_mask(
                relation, positions[target_index][:, None], positions[source_index][None]
            )
            by_edges &= (positions[target_index] >= 0)[:, None] & (positions[source_index] >= 0)
        is_pair |= by_edges
    # a pattern is a mask of partners, with own tokens as rows
    patterns, pattern_of = torch.unique(
        is_pair.T if along_sources else is_pair, dim=0, return_inverse=True
    )
    products = []
    for k, pattern in enumerate(patterns):
        if not bool(pattern.any()):
            continue
        own_mask, partner_mask = torch.zeros(2, len(positions), dtype=torch.bool)
        own_mask[own_tokens[pattern_of == k]] = True
        partner_mask[partners[pattern]] = True
        products.append((partner_mask, own_mask) if along_sources else (own_mask, partner_mask))
    return products


def _relation_mask(relation: Relation, target: Tensor, source: Tensor) -> Tensor:
    """Apply a relation to all pairs of positions (T, 1) and (1, S); return booleans (T, S)."""
    mask: Any = relation(target, source)
    size = len(target), source.shape[1]
    if isinstance(mask, Tensor) and mask.dtype == torch.bool:
        try:
            return mask.expand(size)
        except RuntimeError:  # a wrong shape
            pass
    got = f"{mask.dtype} {tuple(mask.shape)}" if isinstance(mask, Tensor) else repr(mask)
    raise OptionError(
        f"The function passed as sources or targets returned {got} for positions ({size[0]}, 1) "
        f"and (1, {size[1]}). Return booleans for every pair, as in lambda target, source: target "
        "- source > 4."
    )


def _mask(name: str, tokens: Tokens, size: tuple[int, int], positions: Tensor) -> Tensor:
    """Return a CPU mask (B, L'), True for the selected ones of the tokens at ``positions``.

    For a relation all tokens are True, because the relation is applied to pairs later.
    """
    if tokens is None or isinstance(tokens, str) or callable(tokens):
        return torch.ones(positions.shape, dtype=torch.bool)
    selected = _positions_mask(name, tokens, size).gather(1, positions.clamp_min(0))
    return selected & (positions >= 0)  # tokens at -1 are not in the input


def _positions_mask(name: str, selected: Any, size: tuple[int, int]) -> Tensor:
    """Return a mask (B, L), True at the input positions that the option ``name`` selects."""
    batch, tokens = size
    if isinstance(selected, slice):
        mask = torch.zeros(size, dtype=torch.bool)
        mask[:, selected] = True
        return mask
    if isinstance(selected, Tensor) and selected.dtype == torch.bool:
        if selected.shape[-1] != tokens or (
            selected.dim() == 2 and len(selected) not in (1, batch)
        ):
            raise QueryError(
                f"{name} is a mask {tuple(selected.shape)}, but the run has (B, L) = {size}. "
                f"Pass a mask ({tokens},) or ({batch}, {tokens})."
            )
        return selected.cpu().expand(size)
    position = checks.as_integer(selected)
    positions: Any = [position] if position is not None else selected
    index = torch.as_tensor(positions).cpu().long()
    if index.dim() == 2 and len(index) not in (1, batch):
        raise QueryError(
            f"{name} has positions for {len(index)} examples, but the batch has {batch}. Pass "
            f"positions (K,) or ({batch}, K)."
        )
    outside = index[(index < -tokens) | (index >= tokens)]
    if len(outside):
        raise QueryError(
            f"{name} contains position {int(outside[0])}, outside the sequence of {tokens} tokens. "
            f"Pass positions from {-tokens} to {tokens - 1}."
        )
    index = (index % tokens).expand(batch, -1)
    return torch.zeros(size, dtype=torch.bool).scatter_(1, index, True)
