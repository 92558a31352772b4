"""States and caches as memories: each token's share, half-life, and the tokens that erase it."""

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
from ..tracing import Layer, Trace
from ..tracing.projection import projection_of
from ..tracing.quantized import is_quantized
from .call import checks
from .engine.cache import Cache
from .engine.fold import verify_layer
from .engine.memories import Memory, head_ranges, memories_of
from .engine.method import Explainer

#: Largest number of elements of keys or values computed at a time (64 MiB in float32).
_ELEMENTS = 2**24


class StateMemory(Explainer):
    """The share of each token in the states of recurrences, and in the caches of attention.

    The state after token t is the sum of the shares of all tokens up to t. A token's share is its
    write to the state, minus losses from later decay and from corrections by delta rules. The
    shares after one token take time linear in the length. The cache of causal attention keeps each
    token's value unchanged until the token leaves the attention window.

    Args:
        forward_func: the model, wrapped or not, its bound method, or a function that runs it.
        model: the module, if it cannot be found from forward_func. Default: None.
        layers: names or modules of the mixers to use. Default: None, all of them.

    Raises:
        ModelNotFoundError: if no module is found from forward_func and ``model`` is None.
        NoMixerError, UnsupportedMixerError: if the model has no mixer, or none with an adapter.

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
            One memory per recurrence or cache, in the order in which they ran; a mixer with two
            directions has two. Token numbers are those of the mixer, not of the input.

        Raises:
            OptionError: if no layer has a state or a cache, as with non-causal attention.
            NonFiniteError: if an operator contains NaN or infinity.
            ReconstructionError: if ``verify`` finds an operator that differs from its module.
        """
        verify = checks.tolerance("verify", verify)
        out = []
        with self._read(inputs, additional_forward_args, verify) as run:
            for layer in run.layers:
                verify_layer(layer, verify)
                linear = layer.linear
                # rebuilt after this `with`, a quantized layer would compute different numbers
                is_kept = layer.is_kept or any(map(is_quantized, layer.mixer.module.modules()))
                kept = linear if is_kept else None
                for heads in head_ranges(linear.operator):
                    # one head shows how many recurrences these heads have
                    head = range(heads.start, heads.start + 1)
                    values = linear.values[:, :, head.start : head.stop]
                    count = len(memories_of(linear.operator.select(head), values))
                    out += [LayerMemory(layer, n, heads, run.record, kept) for n in range(count)]
            kinds = dict.fromkeys(layer.architecture for layer in run.layers)
        if not out:
            raise OptionError(
                f"The model's mixers ({', '.join(kinds)}) have no state or cache with known shares "
                "of tokens. Pass a model with recurrences or causal attention, or use "
                "ImplicitAttention."
            )
        return out


@dataclass(frozen=True, eq=False)
class LayerMemory:
    """The memory of one recurrence, or the cache of one attention.

    Attributes:
        layer: the recorded layer.
        which: index of the recurrence, if these heads have several, such as two directions.
        heads: the heads of the mixer that have this recurrence.
        record: the record of the layer's run, which caches the latest operator built again.
        kept: the linearized mixer; None if memory was too small to keep it.
    """

    layer: Layer
    which: int
    heads: range
    record: Trace
    kept: LinearMixer | None

    @property
    def name(self) -> str:
        """The name of the mixer."""
        return self.layer.name

    @property
    def linear(self) -> LinearMixer:
        """The linearized mixer at this input; built again if it was not kept."""
        return self.layer.linear if self.kept is None else self.kept

    def __repr__(self) -> str:
        heads = f"heads {self.heads.start} to {self.heads.stop - 1}"
        return f"LayerMemory({self.name!r}, {heads}, {self.layer.tokens} tokens)"

    @property
    def is_cache(self) -> bool:
        """Return True for the cache of attention, and False for the state of a recurrence."""
        return isinstance(self._first_head_memory(), Cache)

    @underflow_flushed()
    def held(self, token: int, *, by_head: bool = False) -> Tensor:
        """Return the norm of each token's share in the state after ``token``.

        For a cache, the norm of each token's value times the head's output weights.

        Args:
            token: a position; negative ones count from the end.
            by_head: whether to return one norm per head (for Mamba-1, channel). Default: False, the
                norm over all heads.

        Returns:
            Norms (B, L) or (B, H, L); 0 for tokens that are read after ``token``.
        """
        position = self._position("token", token)
        sizes = self._by_head(lambda memory: memory.sizes(position))
        return sizes if by_head else sizes.norm(dim=1)

    @underflow_flushed()
    def state(self, token: int) -> Tensor:
        """Return the state after ``token`` (B, H, N, P), the sum of all shares.

        For a cache, N is L, with one value per token.
        """
        return self._states([self._position("token", token)])[:, 0]

    @underflow_flushed()
    def states_at(self, tokens: Sequence[int]) -> Tensor:
        """Return the states (B, T, H, N, P) after T tokens; negative tokens count from the end."""
        numbers = checks.integers("tokens", tokens, "tokens")
        return self._states([self._position("tokens", token) for token in numbers])

    def _states(self, positions: list[int]) -> Tensor:
        """Return the states (B, T, H, N, P) after T nonnegative positions."""
        return torch.cat([memory.states(positions) for memory in self._memories()], 2)

    def read(self, query: int, until: int | None = None) -> Tensor:
        """Return the share of each token in the recurrence's output at a later token, (B, L).

        The output at ``query`` is a sum of one vector per token. Each share is the projection of
        one vector onto the sum, so shares sum to 1.

        Args:
            query: position of the output; negative ones count from the end.
            until: the last token with a share; later ones are 0. Default: None, all.
        """
        position = self._position("query", query)
        operator, values = self._select_heads(self.heads)
        # one vector per source token, (B, L, H, P)
        vectors = operator.per_channel().unit_rows([position])[0] * values
        output = vectors.sum(1, keepdim=True)
        squared_norm = output.square().sum((-1, -2)).clamp_min(torch.finfo(output.dtype).tiny)
        shares = (vectors * output).sum((-1, -2)) / squared_norm
        if until is not None:
            shares = shares.clone()
            shares[:, self._position("until", until) + 1 :] = 0
        return shares

    @underflow_flushed()
    def erased(self, source: int, token: int, *, by_head: bool = False) -> Tensor:
        """Return the loss of the source's share at each token between ``source`` and ``token``.

        Losses from decay are divided in proportion to the logarithms of the decays. Losses from
        delta rules or feedback of outputs are assigned to the token of the step. In a cache, the
        whole value is lost at the first token that no longer attends to the source.

        Args:
            source: position of the token whose share is lost.
            token: position after which the state is considered.
            by_head: whether to return one loss per head. Default: False, the sum over heads.

        Returns:
            The loss at each token, (B, L) or (B, H, L); 0 for tokens not in between.
        """
        first, last = self._position("source", source), self._position("token", token)
        losses = self._by_head(lambda memory: memory.erased(first, last))
        return losses if by_head else losses.sum(1)

    @underflow_flushed()
    def held_without(self, source: int, token: int, *, by_head: bool = False) -> Tensor:
        """Return the norm of the source's share if one token's step is undone, for each token.

        Undoing a step removes its decay and its correction by a delta rule, but changes no later
        step. Subtract :meth:`held` for the loss at each token.

        Args:
            source: position of the token whose share is measured.
            token: position after which the state is considered.
            by_head: whether to return one norm per head. Default: False, the norm over all heads.

        Returns:
            Norms (B, L) or (B, H, L), one per undone token; others equal :meth:`held`.
        """
        first, last = self._position("source", source), self._position("token", token)
        norms = self._by_head(lambda memory: memory.without(first, last))
        return norms if by_head else norms.norm(dim=1)

    def half_lives(self) -> Tensor:
        """Return the number of tokens after which decay halves a share, (B, H, N).

        N is 1 if each head has one decay. For a cache the half-life is infinite. It ignores delta
        rules, feedback of outputs and attention windows, which shorten it.
        """
        return self._by_head(lambda memory: memory.half_lives())

    def reach(self, queries: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the mean and standard deviation of the reading distance, (B, H, Q) each.

        The distance from each query to its sources is weighted by the absolute values of the
        operator's entries, as in an effective receptive field.

        Args:
            queries: positions of the queries; negative ones count from the end.
        """
        numbers = checks.integers("queries", queries, "tokens")
        positions = [self._position("queries", number) for number in numbers]
        operator, _ = self._select_heads(self.heads)
        rows = operator.per_channel().rows(positions, "heads").abs()  # (B, H, Q, L)
        distance = torch.tensor(positions)[:, None] - torch.arange(rows.shape[-1])
        distance = distance.to(rows)
        total = rows.sum(-1).clamp_min(torch.finfo(rows.dtype).tiny)
        mean = (rows * distance).sum(-1) / total
        variance = (rows * (distance - mean[..., None]).square()).sum(-1) / total
        return mean, variance.sqrt()

    def _by_head(self, function: Callable[[Memory | Cache], Tensor]) -> Tensor:
        """Apply a function to a few heads' memories at a time; concatenate results (B, H, ...)."""
        return torch.cat([function(memory) for memory in self._memories()], 1)

    def _memories(self) -> Iterator[Memory | Cache]:
        """Yield this recurrence's memory for a few heads at a time, to limit memory use."""
        batch, tokens, heads, per_head = self.linear.operator.shape
        elements_per_head = batch * tokens * max(self._first_head_memory().width, per_head)
        heads_at_once = max(1, _ELEMENTS // elements_per_head)
        for start in range(0, len(self.heads), heads_at_once):
            part = self.heads[start : start + heads_at_once]
            memory = memories_of(*self._select_heads(part))[self.which]
            if isinstance(memory, Cache):  # norms of values are taken after the output projection
                weight = torch.unflatten(projection_of(self.linear).weight, 0, (heads, per_head))
                memory = memory._replace(weight=weight[part.start : part.stop])
            yield memory

    def _first_head_memory(self) -> Memory | Cache:
        """Return the memory of the first head, to learn the memory's kind or size cheaply."""
        return memories_of(*self._select_heads(self.heads[:1]))[self.which]

    def _select_heads(self, heads: range) -> tuple[Operator, Tensor]:
        """Return the operator and the values (B, L, h, P) of the given heads."""
        operator, values = self.linear.operator, self.linear.values
        if len(heads) == operator.shape.heads:
            return operator, values
        return operator.select(heads), values[:, :, heads.start : heads.stop]

    def _position(self, name: str, token: Any) -> int:
        """Return a nonnegative token position; raise if it is outside the sequence."""
        tokens = self.linear.operator.shape.tokens
        number = checks.integer(name, token)
        if not -tokens <= number < tokens:
            raise QueryError(
                f"{name}={number} is outside the sequence of {tokens} tokens. Pass a position from "
                f"{-tokens} to {tokens - 1}."
            )
        return number % tokens
