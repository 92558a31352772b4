"""Which of the tokens that a model is given each mixer reads, asked of the model itself."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
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

#: Arguments that cannot change while they are kept, beside tensors.
_PLAIN = (bool, int, float, str, type(None))


class Given(NamedTuple):
    """The tokens of one call of a model.

    Attributes:
        size: how many examples and tokens it was given (B, L).
        places: which token of its example each is (B, L'), -1 for one from elsewhere, by the name
            of the mixer that reads it and the number of its call; None where nothing tells.
    """

    size: tuple[int, int]
    places: Mapping[tuple[str, int], Tensor | None]


@dataclass(frozen=True, eq=False)
class _Known:
    """What was found last, and in which call.

    Attributes:
        call: what calls have in common that are asked once.
        values: the arguments.
        given: what was found.
    """

    call: tuple[Any, ...]
    values: list[Any]
    given: Given


#: Weak in what it holds, so that models are let go of.
_latest: WeakKeyDictionary[nn.Module, _Known] = WeakKeyDictionary()


def given_tokens(
    module: nn.Module, given: Arguments, mixers: Sequence[Mixer], *, vouched: bool, state: Any
) -> Given:
    """Find which tokens the mixers read in a call, running it again where that is not known.

    Raises:
        TrainingModeError: when a module is random.
    """
    values = [*given[0], *given[1].values()]
    call = ([*given[1]], [mixer.name for mixer in mixers], vouched, state)
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
            found = _found(module, given, mixers, vouched)
        known = _Known(call, [_kept(x) for x in values], found)
        _latest[module] = known
    return known.given


def _kept(value: Any) -> Any:
    """An argument as it is now; one that may change meanwhile is like none."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return value if type(value) in _PLAIN else object()


def _alike(known: Any, value: Any) -> bool:
    if isinstance(known, Tensor):
        return same(known, value)
    return type(known) is type(value) and type(known) in _PLAIN and known == value


def _found(module: nn.Module, given: Arguments, mixers: Sequence[Mixer], vouched: bool) -> Given:
    first = _sequence(given)
    start = torch.empty(0) if first is None else first

    def call(start: Tensor) -> Tensor:
        def other(x: Any) -> Any:
            if hasattr(x, "get_seq_length"):  # a cache, which the run writes to
                return copy.deepcopy(x)
            return start if x is first else x

        args, kwargs = given
        module(*map(other, args), **{name: other(x) for name, x in kwargs.items()})
        return start

    recording, beginning = _Recording(), Beginning(module, mixers, start)
    with ExitStack() as stack:
        observe(module, mixers, (recording,), stack, gradients=False, vouched=vouched)
        stack.enter_context(beginning.seen())
        call(start)
    layers = recording.record.layers
    if not layers or (first is None and layers[0].map is not None):
        return Given((0, 0), {})
    replays = Replays(layers, beginning, call, start, vouched=vouched)
    replays.settle_every_hook()  # a mixer may mix, and so may a hook in its place
    if first is not None and replays.root is not None and replays.root.shape[1] != first.shape[1]:
        replays.root = start  # others were looked up behind the text, or some of it again
    found = tokens_read(replays)
    if first is None:  # those of the first mixer
        if replays.root is not None and found[0] is None:
            replays.root = None
            found = tokens_read(replays)
        if replays.root is not None:
            found = _in_the_first(found)
        start = layers[0].call.hidden_states
    calls, places = Counter[str](), dict[tuple[str, int], Tensor | None]()
    for layer, own in zip(layers, found, strict=True):
        places[layer.name, calls[layer.name]] = own
        calls[layer.name] += 1
    return Given((len(start), start.shape[1]), places)


def _in_the_first(found: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Tokens of another sequence as those of the first mixer's, -1 for others."""
    own = found[0]
    assert own is not None
    others = max(int(x.max()) for x in found if x is not None) + 1
    number = torch.arange(own.shape[1], device="cpu").expand_as(own)
    where = torch.full((len(own), others + 1), -1, device="cpu")
    where.scatter_(1, own.where(own >= 0, others), number)
    where[:, others] = -1
    return [x if x is None else where.gather(1, x.where(x >= 0, others)) for x in found]


def _sequence(given: Arguments) -> Tensor | None:
    """The ids (B, L) or embeddings (B, L, E) among a model's arguments."""
    args, kwargs = given
    named = [kwargs.get(name) for name in ("input_ids", "inputs_embeds", "hidden_states")]
    for x in (*named, *args, *kwargs.values()):
        if isinstance(x, Tensor) and x.dim() == (3 if x.is_floating_point() else 2):
            return x
    return None


class _Recording(Watcher):
    """Keeps what mixers read and return, also where the model writes to it later."""

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
