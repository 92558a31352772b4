"""What a chunk of a sequence gets from the chunks before it, and passes to the next chunk.

A model of transformers computes a long sequence in chunks if each chunk continues from the cache of
the chunk before. Relevance then moves backward from chunk to chunk, as gradients at the cache's
tensors. The package adds what a cache does not store: a state that the model's own code would
ignore, and the sums over tokens from which means of keys and queries are computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..operators.base import Role

if TYPE_CHECKING:
    from .shares import Labels

#: The sum of a factor over the tokens before a chunk (B, ...), and the number of these tokens.
Before = tuple[Tensor, int]


@dataclass(eq=False)
class Carried:
    """The data that one chunk of a sequence receives and passes on.

    Attributes:
        tokens: the number of tokens before the chunk.
        sums: for each mixer's call that compares keys and queries with their mean, the sums of
            both over these tokens, by name. Default: empty, for the first chunk.
        states: for each mixer's call with a state, the state before the chunk at each point
            between references and factors where derivatives are taken; see :func:`.nodes_of`.
            Default: empty.
        cache: the cache of the run, which the run changes. Default: None, until the model is run.
        sums_for_next, states_for_next: ``sums`` and ``states`` for the next chunk, appended as
            mixers are called. Default: empty.
        leaves: the floating tensors of the cache and then ``states``, as leaves of the graph. A
            backward pass must ask for their gradients. Default: empty, until the model is run.
        gradients: the gradients that backward passes have brought to ``leaves``: by the label of
            the pass (see :class:`.Labels`), and by the leaf's place. Default: empty.
    """

    tokens: int
    sums: Sequence[dict[str, Tensor]] = ()
    cache: Any = None
    states: Sequence[Sequence[Tensor]] = ()
    sums_for_next: list[dict[str, Tensor]] = field(default_factory=list)
    states_for_next: list[Sequence[Tensor]] = field(default_factory=list)
    gradients: dict[Role | None, dict[int, Tensor]] = field(default_factory=dict)
    leaves: list[Tensor] = field(default_factory=list)

    def watch_leaf(self, leaf: Tensor, labels: Labels) -> None:
        """Append a leaf, and store the gradient of each later backward pass in ``gradients``."""

        # the place is bound now, and the label read when a gradient arrives
        def store(gradient: Tensor, place: int = len(self.leaves)) -> None:
            self.gradients.setdefault(labels.label, {})[place] = gradient

        leaf.register_hook(store)  # type: ignore[no-untyped-call]
        self.leaves.append(leaf)

    def state_of(self, mixer: Any, scan: int) -> Tensor | None:
        """Return a copy of a mixer's recurrent state (B, D, N) in the cache; None for 0.

        Args:
            mixer: the mixer.
            scan: the index of the scan in the mixer's call, if it has several (B, scans, D, N).
        """
        state: Tensor | None = self.cache.get_recurrent_state(mixer.layer_idx)
        if state is not None and state.dim() == 4:
            state = state[:, scan]
        return None if state is None else state.clone()  # the cache is written to later

    def add_sums(self, factors: Mapping[str, Tensor]) -> dict[str, Before]:
        """Append a call's sums for the next chunk; return sums over the tokens that factors lack.

        Args:
            factors: keys and queries (B, T, ...) by name, which end with the chunk's tokens. Keys
                of attention begin with earlier tokens: all, or the latest ones.
        """
        # the query has only the chunk's tokens; the earlier calls have appended their sums
        length, call_number = min(x.shape[1] for x in factors.values()), len(self.sums_for_next)
        sums = {name: _sum_over_tokens(x[:, -length:]) for name, x in factors.items()}
        if self.tokens == 0:
            self.sums_for_next.append(sums)
            return {}
        # keys may have been repeated for the queries of a group, or not
        earlier_sums = self.sums[call_number]
        sums_before = {name: _match_heads(earlier_sums[name], x) for name, x in sums.items()}
        self.sums_for_next.append({name: sums_before[name] + x for name, x in sums.items()})
        before: dict[str, Before] = {}
        for name, x in factors.items():
            earlier = x.shape[1] - length  # tokens of earlier chunks in the factor
            if earlier < self.tokens:  # else the factor has all tokens
                outside = sums_before[name] - _sum_over_tokens(x[:, :earlier])
                before[name] = outside, self.tokens - earlier
        return before


def _sum_over_tokens(x: Tensor) -> Tensor:
    return x.detach().sum(1, dtype=torch.promote_types(x.dtype, torch.float32))


def _match_heads(x: Tensor, like: Tensor) -> Tensor:
    """Repeat or thin out sums (B, H, ...) to the number of heads of ``like`` (B, H', ...)."""
    heads = like.shape[1]
    if x.shape[1] < heads:
        return x.repeat_interleave(heads // x.shape[1], 1)
    return x[:, :: x.shape[1] // heads]
