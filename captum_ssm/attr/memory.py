"""What states remember: of each token what is still there, for how long, and who erased it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import OptionError, QueryError
from ..mixers.base import LinearMixer
from ..operators.kernels.arithmetic import underflow_flushed
from ..operators.readings.memory import Memory, memories_of
from .call import checks
from .engine.fold import verify_layer
from .engine.method import Explainer

#: Elements of what a recurrence's tokens write that are held at a time (64 MiB in float32).
_ELEMENTS = 2**24


class StateMemory(Explainer):
    """What the states of a model's recurrences hold of each token of an input.

    The state after token t is the sum of what each token up to t has written and what the steps
    since have left of it: decays of heads or single states, and of delta rules the corrections
    that erase along a key.  Everything is found for one token at a time, in a time linear in the
    length.

    Args:
        forward_func: the model, wrapped or not, one of its bound methods, or a function that runs
            it.
        model: the module, where forward_func does not reveal it. Default: None.
        layers: names or modules of the mixers to use. Default: None, all of them.

    Raises:
        ModelNotFoundError: when forward_func leads to no module and ``model`` is not given.
        NoMixerError, UnsupportedMixerError: when the model has no mixer, or one without an adapter.

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

    name = "State Memory"

    def of(
        self,
        inputs: Tensor | tuple[Tensor, ...],
        additional_forward_args: Any = None,
        *,
        verify: bool | float = True,
    ) -> list[LayerMemory]:
        """The memories of all layers that have a state.

        Args:
            inputs: token ids (B, L), embeddings (B, L, E) or images (B, C, H, W); or a tuple of
                one such tensor.
            additional_forward_args: further positional arguments of forward_func, for example an
                attention mask. Default: None.
            verify: hold every operator to what its module returned in the run; a number is the
                tolerance. Default: True.

        Returns:
            One for each recurrence, in the order in which they ran; a mixer with two directions has
            two.  Tokens are those that the mixers read.

        Raises:
            OptionError: when no layer has a state, as of attention alone.
            NonFiniteError: when an operator holds NaN or infinity.
            ReconstructionError: when ``verify`` finds an operator that is not its module.
        """
        verify = checks.tolerance("verify", verify)
        found = []
        with self._read(inputs, additional_forward_args, verify) as run:
            for layer in run.layers:
                verify_layer(layer, verify)
                linear = layer.linear
                count = len(memories_of(linear.operator.select([0]), linear.values[:, :, :1]))
                found += [LayerMemory(layer.name, linear, which) for which in range(count)]
            kinds = dict.fromkeys(layer.architecture for layer in run.layers)
        if not found:
            raise OptionError(
                f"No layer has a state: the model's mixers are {', '.join(kinds)}. What attention "
                "holds of a token is its key and value, whole for as long as it is read."
            )
        return found


@dataclass(frozen=True, eq=False)
class LayerMemory:
    """What one recurrence holds of each token.

    Attributes:
        name: of the mixer.
        linear: the mixer at the input.
        which: number of the recurrence among those of the mixer.
    """

    name: str
    linear: LinearMixer
    which: int

    @underflow_flushed()
    def held(self, token: int, *, by_head: bool = False) -> Tensor:
        """How large the share of each token is in the state after a token was read.

        Args:
            token: the token; negative ones count from the end.
            by_head: whether heads (of Mamba-1, channels) are told apart. Default: False, the norm
                of all heads together.

        Returns:
            (B, L), or (B, H, L); 0 for tokens that are read later.
        """
        at = self._at("token", token)
        sizes = self._by_head(lambda memory: memory.sizes(at))
        return sizes if by_head else sizes.norm(dim=1)

    @underflow_flushed()
    def state(self, token: int) -> Tensor:
        """The state after a token was read, (B, H, N, P); its shares of all tokens add up to it."""
        at = self._at("token", token)
        return self._by_head(lambda memory: memory.state(at))

    def states_at(self, tokens: Sequence[int]) -> Tensor:
        """The states after several tokens, (B, T, H, N, P).

        Args:
            tokens: the tokens; negative ones count from the end.
        """
        numbers = checks.integers("tokens", tokens, "tokens")
        return torch.stack([self.state(token) for token in numbers], 1)

    def read(self, query: int, until: int | None = None) -> Tensor:
        """What a later token reads of each token, as shares of all that it reads, (B, L).

        Each share is the projection of what the query takes from the token on all that it takes,
        so that they sum to 1 over all tokens.

        Args:
            query: the token that reads.
            until: only what the state held after this token; 0 for what came later. Default: None,
                all.
        """
        at = self._at("query", query)
        linear = self.linear
        rows = linear.operator.per_channel().unit_rows([at])[0] * linear.values  # (B, L, H, P)
        whole = rows.sum(1, keepdim=True)
        size = whole.square().sum((-1, -2)).clamp_min(torch.finfo(whole.dtype).tiny)
        shares = (rows * whole).sum((-1, -2)) / size
        if until is not None:
            shares = shares.clone()
            shares[:, self._at("until", until) + 1 :] = 0
        return shares

    @underflow_flushed()
    def erased(self, source: int, token: int, *, by_head: bool = False) -> Tensor:
        """Who took away what the state after a token has lost of a source.

        What fades is divided among the tokens between in proportion to their logarithms of
        decays; the corrections of a delta rule are what each of them took.

        Args:
            source: the token that wrote.
            token: the token after which the state is looked at.
            by_head: whether heads are told apart. Default: False, their sum.

        Returns:
            (B, L), or (B, H, L): the loss, all of it; 0 but for tokens between.
        """
        first, last = self._at("source", source), self._at("token", token)
        found = self._by_head(lambda memory: memory.erased(first, last))
        return found if by_head else found.sum(1)

    def half_lives(self) -> Tensor:
        """After how many tokens half of a share is left, by the decays at this input (B, H, N).

        N is 1 where heads fade as a whole.  What a delta rule erases comes on top.
        """
        return self._by_head(lambda memory: memory.half_lives())

    def reach(self, queries: Sequence[int]) -> tuple[Tensor, Tensor]:
        """How far back tokens read, by head: mean and spread of the distance, (B, H, Q) each.

        The moments of the operator's rows by the size of their entries: the effective receptive
        field.

        Args:
            queries: the tokens that read; negative ones count from the end.
        """
        at = [self._at("queries", q) for q in checks.integers("queries", queries, "tokens")]
        rows = self.linear.operator.per_channel().rows(at, "heads").abs()  # (B, H, Q, L)
        distance = torch.tensor(at)[:, None] - torch.arange(rows.shape[-1])
        distance = distance.to(rows)
        total = rows.sum(-1).clamp_min(torch.finfo(rows.dtype).tiny)
        mean = (rows * distance).sum(-1) / total
        spread = (rows * (distance - mean[..., None]).square()).sum(-1) / total
        return mean, spread.sqrt()

    def _by_head(self, of: Callable[[Memory], Tensor]) -> Tensor:
        """What is found of some heads at a time, together (B, H, ...)."""
        return torch.cat([of(memory) for memory in self._memories()], 1)

    def _memories(self) -> Iterator[Memory]:
        operator, values = self.linear.operator, self.linear.values
        batch, tokens, heads, per_head = operator.shape
        one = memories_of(operator.select([0]), values[:, :, :1])[self.which]
        each = batch * tokens * max(one.key.shape[-1], per_head)
        count = max(1, _ELEMENTS // each)
        for start in range(0, heads, count):
            some = range(start, min(heads, start + count))
            part = operator.select(list(some))
            yield memories_of(part, values[:, :, some.start : some.stop])[self.which]

    def _at(self, name: str, token: Any) -> int:
        tokens = self.linear.operator.shape.tokens
        number = checks.integer(name, token)
        if not -tokens <= number < tokens:
            raise QueryError(
                f"{name}={number} is outside the sequence of {tokens} tokens; positions run from "
                f"{-tokens} to {tokens - 1}."
            )
        return number % tokens
