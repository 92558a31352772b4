"""What a chunk of a sequence gets from the chunks before it, and passes to the next chunk.

A model of transformers computes a long sequence in chunks if each chunk continues from the cache of
the chunk before. Relevance then moves backward from chunk to chunk, as gradients at the cache's
tensors. The package adds what a cache does not store: a state that the model's own code would
ignore, and the sums over tokens from which means of keys and queries are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..operators.base import Role

if TYPE_CHECKING:
    from .shares import Labels

#: The sum of a factor over the tokens before a chunk (B, 1, ...), and the number of these tokens.
Before = tuple[Tensor, int]


@dataclass(eq=False)
class Carried:
    """The data that one chunk of a sequence receives and passes on.

    Attributes:
        tokens: the number of tokens before the chunk.
        sums: for each call of softmax attention the sums of keys and queries over these tokens, by
            name. Default: empty, for the first chunk.
        cache: the cache of the run, which the run changes. Default: None, until the model is run.
        after: the ``sums`` for the next chunk, appended as attention is called. Default: empty.
        leaves: the floating tensors of the cache, as leaves of the graph. A backward pass must ask
            for their gradients. Default: empty, until the model is run.
        gradients: the gradients that backward passes have brought to the floating tensors of the
            cache: by the label of the pass (see :class:`.Labels`), and by the tensor's place in the
            cache. Default: empty.
    """

    tokens: int
    sums: Sequence[dict[str, Tensor]] = ()
    cache: Any = None
    after: list[dict[str, Tensor]] = field(default_factory=list)
    gradients: dict[Role | None, dict[int, Tensor]] = field(default_factory=dict)
    leaves: list[Tensor] = field(default_factory=list)

    def receives(self, leaf: Tensor, labels: Labels) -> None:
        """Record the gradients that will arrive at the next floating tensor of the cache."""

        def arrives(gradient: Tensor, place: int = len(self.leaves)) -> None:
            self.gradients.setdefault(labels.label, {})[place] = gradient

        leaf.register_hook(arrives)  # type: ignore[no-untyped-call]
        self.leaves.append(leaf)

    def state_of(self, mixer: Any, scan: int) -> Tensor | None:
        """Return a copy of a mixer's recurrent state (B, D, N) in the cache; None for 0.

        Args:
            mixer: the mixer.
            scan: the number of the scan in the mixer's call, if a state has several scans.
        """
        state: Tensor | None = self.cache.get_recurrent_state(mixer.layer_idx)
        if state is not None and state.dim() == 4:
            state = state[:, scan]
        return None if state is None else state.clone()  # the cache is written to later

    def attended(self, query: Tensor, key: Tensor) -> dict[str, Before]:
        """Add the sums of an attention call; return the sums over tokens before its arguments.

        Args:
            query: the chunk's queries (B, H, T, P).
            key: keys of the chunk, and before them of all earlier tokens or of the latest ones.
        """
        new = query.shape[2]
        sums = {"query": query.detach().sum(2)}
        sums["key"] = key[:, :, -new:].detach().sum(2)
        earlier, place = key.shape[2] - new, len(self.after)
        if self.tokens == 0:
            self.after.append(sums)
            return {}
        known = self.sums[place]
        # keys may have been repeated for the queries of a group, or not
        known = {name: _in_heads(known[name], x.shape[1]) for name, x in sums.items()}
        self.after.append({name: known[name] + x for name, x in sums.items()})
        before: dict[str, Before] = {"query": (known["query"], self.tokens)}
        if earlier < self.tokens:  # attention in a window, whose cache is cut
            gone = known["key"] - key[:, :, :earlier].detach().sum(2)
            before["key"] = gone, self.tokens - earlier
        return before


def _in_heads(x: Tensor, heads: int) -> Tensor:
    """Return sums (B, H, P) for a number of heads that is a multiple of H, or divides H."""
    if x.shape[1] < heads:
        return x.repeat_interleave(heads // x.shape[1], 1)
    return x[:, :: x.shape[1] // heads]
