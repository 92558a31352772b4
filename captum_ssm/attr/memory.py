"""Memories of states and caches: each token's share, how long it lasts, and who erased it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import OptionError, QueryError
from ..mixers.base import LinearMixer
from ..operators import Operator
from ..operators.kernels.arithmetic import underflow_flushed
from ..tracing.projection import projection_of
from .call import checks
from .engine.cache import Cache
from .engine.fold import verify_layer
from .engine.memories import Memory, alike, memories_of
from .engine.method import Explainer

#: Elements of a recurrence's written vectors kept at a time (64 MiB in float32).
_ELEMENTS = 2**24


class StateMemory(Explainer):
    """The share of each token in the states of recurrences, and in the caches of attention.

    The state after token t is the sum of the shares of all tokens up to t. A token's share is the
    part it wrote, less the losses by later decays and by corrections of delta rules along a key.
    Shares are computed for one token at a time, in time linear in the length. The cache of causal
    attention keeps each token's value unchanged until its window passes; beside the operator's
    matrix its memory is linear in the length.

    Args:
        forward_func: the model, wrapped or not, its bound method, or a function that runs it.
        model: the module, if forward_func does not reveal it. Default: None.
        layers: names or modules of the mixers to use. Default: None, all of them.

    Raises:
        ModelNotFoundError: when forward_func leads to no module and ``model`` is not given.
        NoMixerError, UnsupportedMixerError: when the model has no mixer, or none with an adapter.

    Example:
        >>> import torch
        >>> from captum_ssm import StateMemory
        >>> from captum_ssm.models import load_bundled
        >>> model, tokenizer = load_bundled()
        >>> ids = torch.tensor([tokenizer.encode("anna owns the lamp . ? anna owns the")])
        >>> layer = StateMemory(model).of(ids)[1]
        >>> held = layer.held(-1)  # how much of each token is in the last state
        >>> tuple(held.shape), tokenizer.tokens(ids[0])[int(held[0].argmax())]
        ((1, 9), 'lamp')
    """

    def of(
        self,
        inputs: Tensor | tuple[Tensor, ...],
        additional_forward_args: Any = None,
        *,
        verify: bool | float = True,
    ) -> list[LayerMemory]:
        """Run the model once, and return the memories of all layers with a state or a cache.

        Args:
            inputs: token ids (B, L), embeddings (B, L, E) or images (B, C, H, W); or a tuple of
                one such tensor.
            additional_forward_args: further positional arguments of forward_func, for example an
                attention mask. Default: None.
            verify: check every operator against its module's output; a number is the tolerance.
                Default: True.

        Returns:
            One for each recurrence or cache, in the order in which they ran; a mixer with two
            directions has two. Tokens are the mixers' tokens.

        Raises:
            OptionError: when no layer has a state or a cache, such as non-causal attention.
            NonFiniteError: when an operator holds NaN or infinity.
            ReconstructionError: when ``verify`` finds an operator that is not its module.
        """
        verify = checks.tolerance("verify", verify)
        found = []
        with self._read(inputs, additional_forward_args, verify) as run:
            for layer in run.layers:
                verify_layer(layer, verify)
                linear = layer.linear
                for heads in alike(linear.operator):
                    one = range(heads.start, heads.start + 1)
                    values = linear.values[:, :, one.start : one.stop]
                    count = len(memories_of(linear.operator.select(one), values))
                    found += [LayerMemory(layer.name, linear, n, heads) for n in range(count)]
            kinds = dict.fromkeys(layer.architecture for layer in run.layers)
        if not found:
            raise OptionError(
                "No layer has a state or a cache with known shares of tokens: the "
                f"model's mixers are {', '.join(kinds)}. Recurrences of one step per token have a "
                "state, and attention a cache where no token reads a later one."
            )
        return found


@dataclass(frozen=True, eq=False)
class LayerMemory:
    """The memory of one recurrence, or the cache of one attention.

    Attributes:
        name: name of the mixer.
        linear: the mixer at the input.
        which: number of the recurrence among the recurrences of its heads.
        heads: the mixer's heads that have this recurrence.
    """

    name: str
    linear: LinearMixer
    which: int
    heads: range

    def __repr__(self) -> str:
        heads = f"heads {self.heads.start} to {self.heads.stop - 1}"
        return f"LayerMemory({self.name!r}, {heads}, {self.linear.values.shape[1]} tokens)"

    @property
    def is_cache(self) -> bool:
        """Return True for the cache of attention, from which only a window drops tokens."""
        return isinstance(self._of_one_head(), Cache)

    @underflow_flushed()
    def held(self, token: int, *, by_head: bool = False) -> Tensor:
        """Return the size of each token's share in the state after a token was read.

        For a cache, the size of a token's value behind the head's output weights.

        Args:
            token: the token; negative ones count from the end.
            by_head: whether heads (of Mamba-1, channels) are separate. Default: False, the norm of
                all heads together.

        Returns:
            (B, L), or (B, H, L); 0 for tokens that are read later.
        """
        at = self._at("token", token)
        sizes = self._by_head(lambda memory: memory.sizes(at))
        return sizes if by_head else sizes.norm(dim=1)

    @underflow_flushed()
    def state(self, token: int) -> Tensor:
        """Return the state after a token was read, (B, H, N, P), the sum of all shares.

        For a cache, N is L: each token's value in its own place.
        """
        return self._states([self._at("token", token)])[:, 0]

    @underflow_flushed()
    def states_at(self, tokens: Sequence[int]) -> Tensor:
        """Return the states after several tokens (negative ones from the end), (B, T, H, N, P)."""
        numbers = checks.integers("tokens", tokens, "tokens")
        return self._states([self._at("tokens", token) for token in numbers])

    def _states(self, at: list[int]) -> Tensor:
        return torch.cat([memory.states(at) for memory in self._memories()], 2)

    def read(self, query: int, until: int | None = None) -> Tensor:
        """Return the share of each token in a later token's read, (B, L).

        Each share projects the vector that the query takes from the token onto the sum of these
        vectors. The shares sum to 1.

        Args:
            query: the token that reads.
            until: return 0 for tokens after this one. Default: None, all.
        """
        at = self._at("query", query)
        operator, values = self._some(self.heads)
        rows = operator.per_channel().unit_rows([at])[0] * values  # (B, L, H, P)
        whole = rows.sum(1, keepdim=True)
        size = whole.square().sum((-1, -2)).clamp_min(torch.finfo(whole.dtype).tiny)
        shares = (rows * whole).sum((-1, -2)) / size
        if until is not None:
            shares = shares.clone()
            shares[:, self._at("until", until) + 1 :] = 0
        return shares

    @underflow_flushed()
    def erased(self, source: int, token: int, *, by_head: bool = False) -> Tensor:
        """Divide the loss of a source's share up to a token among the tokens in between.

        Losses by decay are divided in proportion to the logarithms of the decays. A correction of a
        delta rule, or an output that the state reads, counts for its token. A cache loses nothing;
        a token that leaves its window counts for the first token that does not read it.

        Args:
            source: the token that wrote.
            token: the token after which the state is read.
            by_head: whether heads are separate. Default: False, their sum.

        Returns:
            The loss, (B, L) or (B, H, L); 0 for tokens not in between.
        """
        first, last = self._at("source", source), self._at("token", token)
        found = self._by_head(lambda memory: memory.erased(first, last))
        return found if by_head else found.sum(1)

    @underflow_flushed()
    def held_without(self, source: int, token: int, *, by_head: bool = False) -> Tensor:
        """Return the size of a source's share with one token's step undone, for each token.

        The token's decay and its correction by a delta rule are undone; all other steps stay.
        Subtract :meth:`held` for the size that the token took. In a text without the token, later
        steps may change as well.

        Args:
            source: the token that wrote.
            token: the token after which the state is read.
            by_head: whether heads are separate. Default: False, the norm of all heads together.

        Returns:
            (B, L) or (B, H, L), by the token undone; :meth:`held` for tokens not in between.
        """
        first, last = self._at("source", source), self._at("token", token)
        found = self._by_head(lambda memory: memory.without(first, last))
        return found if by_head else found.norm(dim=1)

    def half_lives(self) -> Tensor:
        """Return the number of tokens after which decays halve a share, (B, H, N).

        N is 1 if heads fade as a whole; for a cache, which does not fade, it is infinite.  Erasing
        by a delta rule, outputs that a state reads, and windows shorten it further.
        """
        return self._by_head(lambda memory: memory.half_lives())

    def reach(self, queries: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the mean and spread of the distance at which tokens read, (B, H, Q) each.

        The moments of the operator's rows by the size of their entries: the effective receptive
        field.

        Args:
            queries: the tokens that read; negative ones count from the end.
        """
        at = [self._at("queries", q) for q in checks.integers("queries", queries, "tokens")]
        operator, _ = self._some(self.heads)
        rows = operator.per_channel().rows(at, "heads").abs()  # (B, H, Q, L)
        distance = torch.tensor(at)[:, None] - torch.arange(rows.shape[-1])
        distance = distance.to(rows)
        total = rows.sum(-1).clamp_min(torch.finfo(rows.dtype).tiny)
        mean = (rows * distance).sum(-1) / total
        spread = (rows * (distance - mean[..., None]).square()).sum(-1) / total
        return mean, spread.sqrt()

    def _by_head(self, of: Callable[[Memory | Cache], Tensor]) -> Tensor:
        """Concatenate the results of a function of a few heads' memory, (B, H, ...)."""
        return torch.cat([of(memory) for memory in self._memories()], 1)

    def _memories(self) -> Iterator[Memory | Cache]:
        """Yield the memories of the heads, a few heads at a time."""
        batch, tokens, heads, per_head = self.linear.operator.shape
        each = batch * tokens * max(self._of_one_head().width, per_head)
        count = max(1, _ELEMENTS // each)
        for start in range(0, len(self.heads), count):
            some = self.heads[start : start + count]
            memory = memories_of(*self._some(some))[self.which]
            if isinstance(memory, Cache):
                weight = torch.unflatten(projection_of(self.linear).weight, 0, (heads, per_head))
                memory = memory._replace(weight=weight[some.start : some.stop])
            yield memory

    def _of_one_head(self) -> Memory | Cache:
        return memories_of(*self._some(self.heads[:1]))[self.which]

    def _some(self, heads: range) -> tuple[Operator, Tensor]:
        """Return the operator and the values of some heads."""
        operator, values = self.linear.operator, self.linear.values
        if len(heads) == operator.shape.heads:
            return operator, values
        return operator.select(heads), values[:, :, heads.start : heads.stop]

    def _at(self, name: str, token: Any) -> int:
        """Return a token counted from 0; raise if it is outside."""
        tokens = self.linear.operator.shape.tokens
        number = checks.integer(name, token)
        if not -tokens <= number < tokens:
            raise QueryError(
                f"{name}={number} is outside the sequence of {tokens} tokens; positions run from "
                f"{-tokens} to {tokens - 1}."
            )
        return number % tokens
