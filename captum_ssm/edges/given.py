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
def same_for_copies(found: list[Given], count: int) -> Iterator[None]:
    """In the ``with``, take the mapping of each call of a run of ``count`` copies from ``found``.

    An empty list receives the mappings of a run of one example.
    """
    token = _copies.set((found, iter([*found]), count))
    try:
        yield
    finally:
        _copies.reset(token)
        if not all(one.is_of_one for one in found):
            found.clear()


def given_tokens(
    module: nn.Module, arguments: Arguments, mixers: Sequence[Mixer], *, vouched: bool, state: Any
) -> Given:
    """Map each mixer's tokens to the call's input tokens; an equal later call reuses the result.

    Raises:
        TrainingModeError: when a module is random.
    """
    found_once, calls, copies = _copies.get(([], iter(()), 0))
    for one in calls:
        return one.repeated(copies)
    args, kwargs = arguments
    values = [*args, *kwargs.values()]
    call = ([*kwargs], [mixer.name for mixer in mixers], vouched, state)
    known = _latest.get(module)
    if (
        known is None
        or known.call != call
        or len(known.values) != len(values)
        or not all(map(_alike, known.values, values))
    ):
        require_deterministic(module)
        on_gpu = torch.cuda.is_available()
        devices = {x.device for x in module.parameters() if x.is_cuda and on_gpu}
        with torch.no_grad(), torch.random.fork_rng(devices):
            found = _found(module, arguments, mixers, vouched)
        known = _CachedTokens(call, [_kept(x) for x in values], found)
        _latest[module] = known
    found_once.append(known.given)
    return known.given


def _kept(value: Any) -> Any:
    """Copy an argument for comparison with later calls; mutable objects never compare equal."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return value if type(value) in _PLAIN else object()


def _alike(known: Any, value: Any) -> bool:
    if isinstance(known, Tensor):
        return same(known, value)
    return type(known) is type(value) and type(known) in _PLAIN and known == value


def _found(
    module: nn.Module, arguments: Arguments, mixers: Sequence[Mixer], vouched: bool
) -> Given:
    """Record a run, then replay it with noise at input tokens, to map the mixers' tokens.

    If the arguments have no ids or embeddings, positions count the first mixer's tokens.
    """
    first = _sequence(arguments)
    start = torch.empty(0) if first is None else first

    def call(start: Tensor) -> Tensor:
        """Call the module on ``start`` in place of the input sequence, to trigger its hooks."""

        def other(x: Any) -> Any:
            if hasattr(x, "get_seq_length"):  # a cache, which the run writes to
                return copy.deepcopy(x)
            return start if x is first else x

        args, kwargs = arguments
        module(*map(other, args), **{name: other(x) for name, x in kwargs.items()})
        return start

    recording, beginning = _Recording(), Beginning(module, mixers, start)
    with ExitStack() as stack:
        observe(module, mixers, (recording,), stack, gradients=False, vouched=vouched)
        stack.enter_context(beginning.seen())
        call(start)
    layers = recording.record.layers
    # nothing is known then: a module of a map may have been called on windows of it
    if not layers or (first is None and layers[0].map is not None):
        return Given((0, 0), {})
    replays = Replays(layers, beginning, call, start, vouched=vouched)
    replays.settle_every_hook()  # a mixer may mix, and so may a hook in its place
    if first is not None and replays.root is not None and replays.root.shape[1] != first.shape[1]:
        replays.root = start  # others were looked up behind the text, or some of it again
    found = tokens_read(replays)
    if first is None:  # positions count the tokens of the first mixer
        if replays.root is not None and found[0] is None:
            replays.root = None  # the mixer reads mixed tokens of it, or none: begin at the mixer
            found = tokens_read(replays)
        if replays.root is not None:
            found = _in_the_first(found)
        start = layers[0].call.hidden_states
    calls, places = Counter[str](), dict[tuple[str, int], Tensor | None]()
    for layer, tokens in zip(layers, found, strict=True):
        places[layer.name, calls[layer.name]] = tokens
        calls[layer.name] += 1
    return Given((len(start), start.shape[1]), places)


def _in_the_first(found: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Convert input positions (B, L') to positions among the first mixer's tokens, or -1."""
    of_first = found[0]
    assert of_first is not None
    none = max(int(x.max()) for x in found if x is not None) + 1
    number = torch.arange(of_first.shape[1], device="cpu").expand_as(of_first)
    where = torch.full((len(of_first), none + 1), -1, device="cpu")
    where.scatter_(1, of_first.where(of_first >= 0, none), number)
    where[:, none] = -1
    return [x if x is None else where.gather(1, x.where(x >= 0, none)) for x in found]


def _sequence(arguments: Arguments) -> Tensor | None:
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
        self._pending: list[Layer] = []

    def returned(self, mixer: Mixer, call: Call) -> None:
        args, kwargs, output = (detached(x) for x in (call.args, call.kwargs, call.output))
        kept = replace(call, args=args, kwargs=kwargs, output=swap_first(output, torch.clone)[0])
        layer = Layer(self.record.linearize, mixer, kept, None)
        self.record.layers.append(layer)
        self._pending.append(layer)

    def left(self, mixer: Mixer, output: Any) -> None:
        layer, left = self._pending.pop(), in_batch(first_tensor(output)).detach()
        factor = layer.hook_factor(left)
        if factor is not None:
            layer.leave(left.clone(), factor)
