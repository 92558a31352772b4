"""Map each mixer's tokens to the model's input tokens, by running the model again."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..attr.engine.run import same
from ..mixers.base import Call, first_tensor, in_batch
from ..tracing import Layer, Mixer, Trace, require_deterministic
from ..tracing.hooks import detached, swap_first
from ..tracing.observe import Arguments, Watcher, observe
from ..tracing.replays import Beginning, Replays
from ..tracing.structure import tokens_read

#: Types of arguments, besides tensors, with which a call's cached token mapping can be reused.
_PLAIN = (bool, int, float, str, type(None))


class Given(NamedTuple):
    """The mapping from each mixer's tokens to the model's input tokens, in one call.

    Attributes:
        size: the number of examples and of tokens in the model's input (B, L).
        places: for each mixer name and call number, the input position of each of the mixer's
            tokens (B, L'), -1 for a token that is not in the input; None if unknown.
    """

    size: tuple[int, int]
    places: Mapping[tuple[str, int], Tensor | None]

    @property
    def is_of_one(self) -> bool:
        """Return True if the call and each mixer have one example."""
        return self.size[0] == 1 and all(len(x) == 1 for x in self.places.values() if x is not None)

    def repeated(self, count: int) -> Given:
        """Return the mapping for ``count`` copies of the one example."""
        places = {k: x if x is None else x.expand(count, -1) for k, x in self.places.items()}
        return Given((count, self.size[1]), places)


@dataclass(frozen=True, eq=False)
class _CachedTokens:
    """The cached token mapping of a module's latest call, and the arguments of the call.

    Attributes:
        call: names of arguments and mixers, and the model's state.
        values: the arguments.
        given: the token mapping found for this call.
    """

    call: tuple[Any, ...]
    values: list[Any]
    given: Given


#: The token mapping of each module's latest call. Weak keys let unused models be freed.
_latest: WeakKeyDictionary[nn.Module, _CachedTokens] = WeakKeyDictionary()
#: Of :func:`same_for_copies`: the list, an iterator over known mappings, and the number of copies.
_copies: ContextVar[tuple[list[Given], Iterator[Given], int]] = ContextVar("captum_ssm_copies")


@contextmanager
def same_for_copies(mappings: list[Given], count: int) -> Iterator[None]:
    """In the ``with``, each call of a run of ``count`` copies takes the next of ``mappings``.

    An empty list receives the mappings of a run of one example.
    """
    token = _copies.set((mappings, iter([*mappings]), count))
    try:
        yield
    finally:
        _copies.reset(token)
        if not all(mapping.is_of_one for mapping in mappings):
            mappings.clear()


def given_tokens(
    module: nn.Module, arguments: Arguments, mixers: Sequence[Mixer], *, vouched: bool, state: Any
) -> Given:
    """Map each mixer's tokens to the call's input tokens; an equal later call reuses the result.

    Raises:
        TrainingModeError: when a module is random.
    """
    # outside same_for_copies: no known mapping, and a list that nobody reads
    mappings_of_run, known_mappings, copies = _copies.get(([], iter(()), 0))
    for mapping in known_mappings:  # inside same_for_copies: the next one, of this call
        return mapping.repeated(copies)
    args, kwargs = arguments
    values = [*args, *kwargs.values()]
    call = ([*kwargs], [mixer.name for mixer in mixers], vouched, state)
    cached = _latest.get(module)
    if (
        cached is None
        or cached.call != call
        or len(cached.values) != len(values)
        or not all(map(_are_equal, cached.values, values))
    ):
        require_deterministic(module)
        on_gpu = torch.cuda.is_available()  # a simulated GPU has no random state
        devices = {x.device for x in module.parameters() if x.is_cuda and on_gpu}
        with torch.no_grad(), torch.random.fork_rng(devices):
            given = _map_tokens(module, arguments, mixers, vouched)
        cached = _CachedTokens(call, [_comparable(x) for x in values], given)
        _latest[module] = cached
    mappings_of_run.append(cached.given)
    return cached.given


def _comparable(value: Any) -> Any:
    """Copy an argument for comparison with later calls, where mutable objects never are equal."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return value if type(value) in _PLAIN else object()


def _are_equal(cached: Any, value: Any) -> bool:
    if isinstance(cached, Tensor):
        return same(cached, value)
    return type(cached) is type(value) and type(cached) in _PLAIN and cached == value


def _map_tokens(
    module: nn.Module, arguments: Arguments, mixers: Sequence[Mixer], vouched: bool
) -> Given:
    """Record a run, then replay it with noise at input tokens, to map the mixers' tokens.

    If the arguments have no ids or embeddings, positions count the first mixer's tokens.
    """
    sequence = _input_sequence(arguments)
    start = torch.empty(0) if sequence is None else sequence  # empty: no ids equal it

    def call(substitute: Tensor) -> Tensor:
        """Run the module, only for its hooks, with a substitute for the input sequence."""

        def replaced(x: Any) -> Any:
            if hasattr(x, "get_seq_length"):  # a cache, which the run writes to
                return copy.deepcopy(x)
            return substitute if x is sequence else x

        args, kwargs = arguments
        module(*map(replaced, args), **{name: replaced(x) for name, x in kwargs.items()})
        return substitute

    recording, beginning = _Recording(), Beginning(module, mixers, start)
    with ExitStack() as stack:
        observe(module, mixers, (recording,), stack, gradients=False, vouched=vouched)
        stack.enter_context(beginning.seen())
        call(start)
    layers = recording.record.layers
    # without input tokens and with windows of an image nothing is known
    if not layers or (sequence is None and layers[0].map is not None):
        return Given((0, 0), {})
    replays = Replays(layers, beginning, call, start, vouched=vouched)
    replays.settle_every_hook()  # hooks after mixers may mix tokens, too
    root = replays.root
    # if the embeddings have other tokens, too, put noise at the input
    if sequence is not None and root is not None and root.shape[1] != sequence.shape[1]:
        replays.root = start
    positions_by_layer = tokens_read(replays)
    if sequence is None:  # positions count the tokens of the first mixer
        if replays.root is not None and positions_by_layer[0] is None:
            replays.root = None  # the mixer reads no single tokens of it: begin at the mixer
            positions_by_layer = tokens_read(replays)
        if replays.root is not None:
            positions_by_layer = _positions_in_first(positions_by_layer)
        start = layers[0].call.hidden_states
    calls, places = Counter[str](), dict[tuple[str, int], Tensor | None]()
    for layer, positions in zip(layers, positions_by_layer, strict=True):
        places[layer.name, calls[layer.name]] = positions
        calls[layer.name] += 1
    return Given((len(start), start.shape[1]), places)


def _positions_in_first(positions: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Convert input positions (B, L') of each layer to the first layer's tokens, or -1.

    The inverse of the first layer's map is stored in ``index_of``, by example and position.
    """
    of_first = positions[0]
    assert of_first is not None
    absent = max(int(x.max()) for x in positions if x is not None) + 1  # in place of -1
    index = torch.arange(of_first.shape[1], device="cpu").expand_as(of_first)
    index_of = torch.full((len(of_first), absent + 1), -1, device="cpu")
    index_of.scatter_(1, of_first.where(of_first >= 0, absent), index)
    index_of[:, absent] = -1
    return [x if x is None else index_of.gather(1, x.where(x >= 0, absent)) for x in positions]


def _input_sequence(arguments: Arguments) -> Tensor | None:
    """Return the ids (B, L) or embeddings (B, L, E) among a model's arguments."""
    args, kwargs = arguments
    named = [kwargs.get(name) for name in ("input_ids", "inputs_embeds", "hidden_states")]
    for x in (*named, *args, *kwargs.values()):
        if isinstance(x, Tensor) and x.dim() == (3 if x.is_floating_point() else 2):
            return x
    return None


class _Recording(Watcher):
    """Records the inputs and outputs of mixers, copied if the model may overwrite them."""

    def __init__(self) -> None:
        self.record = Trace()
        self._pending: list[Layer] = []  # the mixers returned, but other hooks still run

    def returned(self, mixer: Mixer, call: Call) -> None:
        args, kwargs, output = (detached(x) for x in (call.args, call.kwargs, call.output))
        copied = replace(call, args=args, kwargs=kwargs, output=swap_first(output, torch.clone)[0])
        layer = Layer(self.record.linearize, mixer, copied, None)
        self.record.layers.append(layer)
        self._pending.append(layer)

    def left(self, mixer: Mixer, output: Any) -> None:
        """Store the output after all other hooks, if they changed it."""
        layer, returned = self._pending.pop(), in_batch(first_tensor(output)).detach()
        factor = layer.hook_factor(returned)
        if factor is not None:
            layer.leave(returned.clone(), factor)
