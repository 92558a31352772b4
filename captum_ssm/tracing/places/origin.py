"""Where the elements of a tensor come from."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ...operators.kernels.arithmetic import unseen
from .rules.groups import GATES, Group, Groups, TokensMeet, plain_number, same, settled, united

#: Sources from this number on are neither the explained input nor what a mixer returned: tokens
#: that come from elsewhere, each tensor of which is a source.
OTHERS = 2**20


@dataclass(frozen=True)
class Mixed:
    """What first brought several tokens together.

    Attributes:
        function: torch's name of it.
        module: the module that was running.
        pooled: whether it pooled all tokens by a sum, a mean or a maximum. Default: False.
        joined: whether the result was added to, or written into, a tensor whose tokens were apart,
            as a mixer adds its output to the residual stream. Default: False.
        sources: what the tokens came from that were brought together. Default: nothing.

    Example:
        >>> from captum_ssm.tracing.places import Mixed
        >>> Mixed("softmax", "blocks.0.attention").joined
        False
    """

    function: str
    module: str
    pooled: bool = False
    joined: bool = False
    sources: frozenset[int] = field(default=frozenset(), repr=False)


@dataclass(frozen=True, eq=False)
class Entry:
    """One way in which a source enters a tensor.

    Attributes:
        places: with as many dimensions as the tensor, and size 1 along those that do not tell
            tokens apart: the flat index b * L + t of the source's token, or -1 for none. They are
            on the host.
        skip: the weight with which the source itself is a term of the tensor, unchanged but for the
            order of what it holds; 0 if the tensor is only a function of it.

    Example:
        >>> import torch
        >>> from captum_ssm.tracing.places import Entry
        >>> Entry(torch.arange(4).view(1, 4, 1), skip=1.0).places.shape
        torch.Size([1, 4, 1])
    """

    places: Tensor
    skip: float


@dataclass(frozen=True, eq=False)
class Origin:
    """Where the elements of a tensor come from, as :meth:`Places.origin` returns it.

    Attributes:
        shape: the tensor's.
        groups: the places, and the sources that share them.
        sizes: batch and tokens (B, L) of every source.
        unseen: by negative number, the modules in which memory was filled out of torch's sight.
        blend: what mixed tokens in torch's sight, or None.
        is_bent: whether the tensor is what an activation returned, or the like, which in a product
            is a gate to what is not. Default: False.

    Example:
        >>> import torch
        >>> from captum_ssm.tracing.places import Places
        >>> x = torch.randn(1, 3, 2)
        >>> with Places(lambda: "model") as places:
        ...     places.begin(x)
        ...     y, z = x + torch.relu(x.flip(1)), x.softmax(1)
        >>> [(e.places.flatten().tolist(), e.skip) for e in places.origin(y).sources[0]]
        [([0, 1, 2], 1.0), ([2, 1, 0], 0.0)]
        >>> places.origin(z).mixed
        Mixed(function='softmax', module='model', pooled=False, joined=False)
    """

    shape: torch.Size
    groups: Groups
    sizes: dict[int, tuple[int, int]]
    unseen: dict[int, str]
    blend: Mixed | None = None
    is_bent: bool = False

    @property
    def mixed(self) -> Mixed | None:
        """What brought several tokens together, or may have; None if nothing did."""
        hidden = [s for g in self.groups for s in g.skips if s < 0 and bool((g.places >= 0).any())]
        if self.blend is None and hidden:
            return Mixed("empty", self.unseen[hidden[0]], joined=bool(self.sources))
        return self.blend

    @functools.cached_property
    def sources(self) -> dict[int, list[Entry]]:
        """How each source enters; nothing where tokens are mixed."""
        out: dict[int, list[Entry]] = {}
        gates: list[tuple[int, Entry]] = []
        with unseen():
            for places, skips in self.groups:
                if bool((places >= 0).any()):
                    for source, skip in skips.items():
                        if source >= GATES:
                            gates.append((source - GATES, Entry(places, skip)))
                        elif source >= 0:
                            out.setdefault(source, []).append(Entry(places, skip))
            for source, entry in gates:
                _add_gate(out.setdefault(source, []), entry)
        return dict(sorted(out.items()))

    @property
    def numbers(self) -> frozenset[int]:
        """The sources with the marks of factors, also those of what was mixed."""
        mixed = frozenset[int]() if self.blend is None else self.blend.sources
        return mixed.union(*(group.skips for group in self.groups))

    @functools.cached_property
    def live(self) -> frozenset[int]:
        """The sources that are more than factors, such as gates, of something else."""
        with unseen():
            groups = [skips for places, skips in self.groups if bool((places >= 0).any())]
        mixed = frozenset[int]() if self.blend is None else self.blend.sources
        return frozenset(s for s in mixed.union(*groups) if 0 <= s < GATES)

    def tokens(self, source: int) -> list[Tensor] | None:
        """Places of a source over the tensor's first two dimensions (B, L), one for each entry.

        None if they differ along others.
        """
        with unseen():
            found = [token_places(self.shape, e.places) for e in self.sources.get(source, [])]
        return None if any(p is None for p in found) else [p for p in found if p is not None]

    def is_identity(self, source: int) -> bool:
        """Whether every token comes from the source's own, and all of these are there."""
        order = self.permutation(source)
        with unseen():
            return order is not None and bool(
                (order == torch.arange(order.shape[1], device="cpu")).all()
            )

    def permutation(self, source: int) -> Tensor | None:
        """Which of the source's tokens each token comes from (B, L).

        None if that is not each of them once, within its own example.
        """
        entries, size = self.sources.get(source, []), self.sizes.get(source, (0, 0))
        if len(entries) != 1:
            return None
        key = id(entries[0].places), size  # most sources share theirs
        if key not in self._permutations:
            with unseen():
                self._permutations[key] = self._permutation(entries[0].places, size)
        return self._permutations[key]

    def _permutation(self, places: Tensor, size: tuple[int, int]) -> Tensor | None:
        tokens = token_places(self.shape, places)
        if tokens is None or tokens.shape != size:
            return None
        steps = torch.arange(math.prod(size), device="cpu").view(size)
        if not torch.equal(tokens.long().sort(1).values, steps):
            return None
        return tokens.long() - steps[:, :1]

    @functools.cached_property
    def _permutations(self) -> dict[tuple[int, tuple[int, int]], Tensor | None]:
        return {}


def _add_gate(known: list[Entry], gate: Entry) -> None:
    """Add the way of a source that is a factor to its others, or to one that it does not deny."""
    for i, one in enumerate(known):
        union = united(one.places, gate.places, True)
        if union is not None:
            known[i] = one if same(union, one.places) else Entry(union, 0.0)
            return
    known.append(gate)


def within_examples(places: Tensor, size: tuple[int, int]) -> Tensor:
    """Places b * L + t (B, L') as tokens t of their own examples, -1 for none.

    Args:
        places: of a tensor's tokens.
        size: batch and tokens (B, L) of the source.

    Example:
        >>> import torch
        >>> from captum_ssm.tracing.places.origin import within_examples
        >>> within_examples(torch.tensor([[-1, 0], [4, 5]]), (2, 3)).tolist()
        [[-1, 0], [1, 2]]
    """
    batch, tokens = size
    first = torch.arange(batch, device="cpu")[:, None] * tokens
    return torch.where(places < 0, -1, places.long() - first)


def token_places(shape: Sequence[int], places: Tensor) -> Tensor | None:
    """Places over the first two dimensions of a tensor (B, L, ...).

    Features that come from no token count for nothing.  None if others come from different tokens.

    Features that come from no token of the source do not count.

    Example:
        >>> import torch
        >>> from captum_ssm.tracing.places import token_places
        >>> token_places((1, 3, 8), torch.tensor([[[0], [1], [2]]]))
        tensor([[0, 1, 2]])
    """
    if len(shape) < 2:
        return None
    try:
        places = settled(places, range(2, len(shape)))
    except TokensMeet:
        return None
    return places.reshape(places.shape[:2]).expand(*shape[:2])


def without_others(
    known: dict[int, tuple[Tensor, Origin]],
) -> dict[int, tuple[Tensor, Origin]] | None:
    """Followed tensors, less the sources that hold no token of the input; None if there are none.

    Args:
        known: tensors and their origins, by any key.
    """
    found, dropped = {}, False
    for key, (x, origin) in known.items():
        kept = [
            Group(places, {s: skip for s, skip in skips.items() if plain_number(s) < OTHERS})
            for places, skips in origin.groups
        ]
        numbers = (plain_number(s) for _, skips in origin.groups for s in skips)
        dropped = dropped or any(number >= OTHERS for number in numbers)
        groups = tuple(group for group in kept if group.skips)
        if groups or origin.blend is not None:
            found[key] = x, replace(origin, groups=groups)
    return found if dropped else None
