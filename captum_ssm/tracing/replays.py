"""Replay a run: the model runs again, but mixers return given sequences instead of computing.

A replay costs only the model's computation outside of mixers. It needs no autograd graph and no
traced functions, so kernels and quantized layers work.
"""

from __future__ import annotations

import functools
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..errors import InputError
from ..mixers.base import Call, first_tensor, in_batch
from ..operators.kernels.arithmetic import unseen
from .changes import lasting
from .find import Mixer
from .hooks import at_both_ends, hooked, sequences_in, swap_first
from .layer import Layer, same_memory
from .observe import observe

#: Classes of modules that also read the previous token. The papers count them, like MLPs, among
#: the modules that act within tokens (unified paper, section 3.3).
WITHIN_TOKENS = ("RwkvFeedForward", "RWKV6FeedForward", "RWKV7FeedForward")
#: A seed that users hardly use: norms would remove noise in the direction of a model's embeddings.
_SEED = 7_340_921_563
#: Number of noise directions, which the layers use in turn.
_DIRECTIONS = 16
#: A projection is a head if it multiplies the number of features by this or more. Heads would take
#: most of a replay's time.
_WIDE = 8
#: A lock for each model: only one thread at a time may replay it, since mixers are replaced in it.
_locks: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()
_making_locks = threading.Lock()

#: Takes a layer's index and input in a replay, and returns the layer's output in the replay.
Leaf = Callable[[int, Tensor], Tensor]


class Beginning:
    """Finds the tensor in which a run's tokens first appear. Run the model inside :meth:`seen`.

    Args:
        model, mixers: the model and its mixers.
        ids: the explained token ids, or the floating input.

    Attributes:
        looked_up: the first embeddings of the ids (B, L, E); None until found.
        is_ambiguous: whether the ids that were looked up are a different tensor with equal
            values. The reversed ids of a palindrome would be equal, too.
        entered: zeros in the shape of the first sequence of each length that entered a module with
            a mixer.
        shifted: the outputs of modules of the classes :data:`WITHIN_TOKENS`, by module.
    """

    def __init__(self, model: nn.Module, mixers: Sequence[Mixer], ids: Tensor) -> None:
        self.model, self.ids = model, ids
        self.around = list(dict.fromkeys(outer for mixer in mixers for outer in mixer.around))
        self.looked_up: Tensor | None = None
        self.is_ambiguous = False
        #: The embedding module that computed ``looked_up``, and the number of its earlier calls.
        self._table: tuple[nn.Module, int] | None = None
        self.entered: dict[int, Tensor] = {}
        self.shifted: dict[nn.Module, list[Any]] = {}

    @contextmanager
    def seen(self) -> Iterator[None]:
        """Fill this object's attributes from the run of the model inside the ``with``."""

        def on_look_up(x: Tensor) -> Tensor:
            with unseen():
                self.looked_up = x.detach()
            return x  # unchanged: this run is only observed

        def on_entry(x: Tensor) -> Tensor:
            with unseen():
                self.entered.setdefault(x.shape[1], x.new_zeros(()).expand(x.shape))
            return x

        def record(module: nn.Module, args: Any, output: Any) -> None:
            self.shifted.setdefault(module, []).append(output)

        with self.at_look_up(on_look_up), self.at_entry(None, on_entry), ExitStack() as stack:
            for module in self.model.modules():
                if type(module).__name__ in WITHIN_TOKENS:
                    stack.enter_context(hooked(module.register_forward_hook, record, prepend=True))
            yield

    @contextmanager
    def at_look_up(self, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """Apply ``change`` to the first embeddings of the explained ids, inside the ``with``.

        The first run finds the embedding module's call that has these ids. Later runs, in which
        ids may be replaced, find this call by the module and the number of its earlier calls.
        """
        ids, is_found = self.ids, False
        calls: Counter[nn.Module] = Counter()

        def change_ours(module: nn.Module, args: tuple[Any, ...], output: Any) -> Tensor | None:
            """Hook of embedding modules: return changed embeddings at the call, else None."""
            nonlocal is_found
            table_call = module, calls[module]
            calls[module] += 1
            is_first_run = self._table is None
            is_ours = self._are_explained(args) if is_first_run else self._table == table_call
            if is_found or not is_ours:
                return None
            if is_first_run:
                self.is_ambiguous = not same_memory(args[0][:, : ids.shape[1]], ids)
            is_found, self._table = True, table_call
            return change(output)

        with ExitStack() as stack:
            if ids.dim() == 2 and not ids.is_floating_point():
                for module in [self._table[0]] if self._table else self.model.modules():
                    if isinstance(module, nn.Embedding):
                        stack.enter_context(hooked(module.register_forward_hook, change_ours))
            yield

    def _are_explained(self, args: tuple[Any, ...]) -> bool:
        """Return True if the input of an embedding module begins with the explained ids."""
        return bool(args) and isinstance(args[0], Tensor) and begins_with(args[0], self.ids)

    @contextmanager
    def at_entry(
        self, shape: torch.Size | None, change: Callable[[Tensor], Tensor]
    ) -> Iterator[None]:
        """Apply ``change`` to the first sequence of a shape that enters a module with a mixer.

        If ``shape`` is None, every sequence is changed.
        """
        is_done = False

        def change_first(x: Tensor) -> Tensor:
            nonlocal is_done
            if is_done or x.dim() != 3 or shape not in (None, x.shape):
                return x
            is_done = shape is not None
            return change(x)

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return swap_first((args, kwargs), change_first)[0]

        with ExitStack() as stack:
            for module in self.around:
                register = module.register_forward_pre_hook
                stack.enter_context(hooked(register, enter, with_kwargs=True))
            yield


def begins_with(ids: Tensor, begin: Tensor) -> bool:
    """Return True if ``ids`` begin with the ids ``begin`` (B, L) in every example."""
    if ids.dim() != 2 or len(ids) != len(begin):
        return False
    own = ids[:, : begin.shape[1]]  # perhaps fewer; a view in the same memory needs no comparison
    return same_memory(own, begin) or (own.shape == begin.shape and torch.equal(own, begin.to(own)))


class Replays:
    """Runs the model again with chosen outputs in place of the mixers' computations.

    Args:
        layers: the layers of the run, in the order in which they ran.
        beginning: the tensor in which the run's tokens first appear.
        call: a function that runs the model on an input.
        start: the input of the run.
        vouched: whether the user named the mixers, so that other modules are not checked.

    Attributes:
        root: the tensor in which tokens first appear: the floating input, the embeddings of the
            explained ids, the ids if other ids are looked up as well, or :attr:`entry`.
        ran: the number of layers that have run in the current replay.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        beginning: Beginning,
        call: Callable[[Tensor], Tensor],
        start: Tensor,
        *,
        vouched: bool,
    ) -> None:
        self.layers, self.beginning, self.start = layers, beginning, start
        self._call, self._vouched = call, vouched
        self._cached_random: dict[Any, Tensor] = {}
        self.ran = 0
        self.root: Tensor | None = start
        #: The largest inputs of modules with mixers, by number of features, once measured. Noise
        #: must be visible in a residual stream that is a thousand times larger than an output.
        self._largest: dict[int, Tensor] = {}
        #: Mixers whose replayed outputs include the changes by other forward hooks.
        self._settled: set[nn.Module] = set()
        if beginning.is_ambiguous and self._must_begin_at_ids():
            beginning.looked_up = None
        if beginning.looked_up is not None:
            self.root = beginning.looked_up
        elif start.dim() not in (2, 3):
            self.root = self.entry

    def leaf(self, k: int) -> Tensor:
        """Return the output (B, L, E) that layer k returns in a replay without noise."""
        layer = self.layers[k]
        settled = layer.mixer.module in self._settled
        return (layer.output if settled else layer.call.output_tensor).detach()

    def settle_hooks(self, subsets: Sequence[Tensor]) -> None:
        """Use the outputs after other forward hooks in replays, if the hooks do not mix tokens.

        A hook that sets a mixer's output to zero would otherwise also remove the noise.

        Args:
            subsets: masks (B, L) of tokens with noise, one for each replay. A hook that changes
                the output at a different token mixes tokens.
        """
        hooked_ones = {layer.mixer.module for layer in self.layers if layer.is_hooked}
        if not hooked_ones:
            return
        calm = self._outputs(hooked_ones, None)
        mixing = set[nn.Module]()
        for on in subsets:
            for (module, x), (_, before) in zip(self._outputs(hooked_ones, on), calm, strict=True):
                if bool((changed(x, before) & ~on.to(x.device)).any()):
                    mixing.add(module)
        self._settled = hooked_ones - mixing

    def settle_every_hook(self) -> None:
        """Use the outputs after other forward hooks in replays, for all hooked mixers."""
        self._settled = {layer.mixer.module for layer in self.layers if layer.is_hooked}

    def _outputs(self, modules: Iterable[nn.Module], on: Tensor | None) -> list[tuple[Any, Tensor]]:
        """Replay with noise at tokens ``on``; return pairs of mixer and output after all hooks."""
        outputs = list[tuple[Any, Tensor]]()

        def append(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            outputs.append((module, in_batch(first_tensor(output)).detach().clone()))

        with ExitStack() as stack:
            for module in modules:
                stack.enter_context(at_both_ends(module, _do_nothing, append))
            self.run(lambda k, _: self.noisy(self.leaf(k), False if on is None else on, k))
        return outputs

    def _must_begin_at_ids(self) -> bool:
        """Return True if the ids that are looked up first may not be the explained ids.

        Called if they are equal but a copy, such as the reversed ids of a palindrome. The model
        runs once with other ids. The result is False if each token's embedding changes and no id
        occurs twice, since then the copy has their order. It is also False if the first layer's
        input does not change, since then replays could not begin at the ids.
        """
        embeddings, ids = self.beginning.looked_up, self.beginning.ids
        has_changed = torch.zeros(ids.shape, dtype=torch.bool, device="cpu")

        def compare(x: Tensor) -> Tensor:
            """Note in ``has_changed`` which tokens have other embeddings; return ``x``."""
            if embeddings is not None and x.shape == embeddings.shape:
                has_changed[:] = changed(x, embeddings)[:, : ids.shape[1]]
            return x

        first_inputs: list[Tensor] = []

        def leaf(k: int, entering: Tensor) -> Tensor:
            if k == 0:
                first_inputs.append(entering)
            return self.leaf(k).clone()

        with self.beginning.at_look_up(compare):
            self.run(leaf, functools.partial(self.noisy, on=True))  # replaces the ids by others
        if bool(has_changed.all() and ids.sort(1).values.diff(dim=1).all()):
            return False
        return bool(changed(first_inputs[0], self.layers[0].call.hidden_states).any())

    @functools.cached_property
    def outside(self) -> dict[nn.Module, str]:
        """The names of the model's modules outside mixers, by module."""
        mixing = {part for layer in self.layers for part in layer.mixer.module.modules()}
        named_modules = self.beginning.model.named_modules()
        return {part: name for name, part in named_modules if part not in mixing}

    @property
    def entry(self) -> Tensor | None:
        """The first sequence (B, L, E) with as many tokens as the first layer reads, or None."""
        return self.beginning.entered.get(self.layers[0].call.hidden_states.shape[1])

    def noisy(self, x: Tensor, on: Tensor | bool, k: int = -1) -> Tensor:
        """Add noise to a sequence (B, L, E) at some tokens, scaled to each token's largest value.

        Ids are replaced by other ids of the same input, if it has at least three different ids.

        Args:
            x: the sequence, or ids (B, L).
            on: a mask (B, L) of the tokens, True for all tokens, or False for none.
            k: the number of the layer whose output ``x`` is. Default: -1, ``x`` is the root.
        """
        if on is False:
            return x.clone()  # the model may write to it
        if not x.is_floating_point():
            ids = torch.unique(x)
            few = len(ids) < 3  # exchanging two ids may keep a mean over tokens: use 0 and 1
            other = (x == 0).to(x) if few else torch.where(x == ids[0], ids[1], ids[0])
        else:
            size = x.abs().amax(-1, keepdim=True) if x.dim() > 2 else x.abs()
            if k >= 0 and x.shape[-1] in self._largest:
                size = torch.maximum(size, self._largest[x.shape[-1]].to(size))
            mean = size.mean()
            other = torch.addcmul(x, self._noise(x, k), torch.maximum(size, mean + (mean == 0)))
        if on is True:
            return other
        on = on.to(x.device)
        return torch.where(on.view(*on.shape, *[1] * (x.dim() - on.dim())), other, x, out=other)

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Measure the largest inputs of blocks in a replay in the ``with``, to scale the noise."""

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            for x in sequences_in((args, kwargs)):
                if x.dim() == 3:
                    limit = torch.finfo(x.dtype).max / 64  # noise is larger, and stays finite
                    size, largest = x.abs().max().clamp(max=limit), self._largest.get(x.shape[-1])
                    largest = size if largest is None else torch.maximum(size, largest.to(size))
                    self._largest[x.shape[-1]] = largest

        with ExitStack() as stack:
            for module in self.beginning.around:
                register = module.register_forward_pre_hook
                stack.enter_context(hooked(register, enter, with_kwargs=True))
            yield

    def _noise(self, x: Tensor, k: int) -> Tensor:
        """Return noise: a direction of features for layer k, times a random size for each token."""
        features = x.shape[-1] if x.dim() > 2 else 1
        directions = self._random((_DIRECTIONS, features), x)[k % _DIRECTIONS]
        sizes = self._random(x.shape[:2], x).roll(k + 1, 1)  # other sizes for each layer
        sizes = sizes + sizes.sign()  # at least 1, so that no token has almost no noise
        if x.dim() == 2:
            return sizes * directions
        return sizes.view(*sizes.shape, *[1] * (x.dim() - 2)) * directions

    def _random(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Return a random tensor of a shape; each call with this shape returns the same values."""
        key = (*shape, like.dtype, like.device)
        if key not in self._cached_random:
            generator = torch.Generator("cpu").manual_seed(_SEED)
            noise = torch.randn(tuple(shape), generator=generator, device="cpu")
            self._cached_random[key] = noise.to(like)
        return self._cached_random[key]

    def run(
        self, leaf: Leaf, root: Callable[[Tensor], Tensor] | None = None, moved: int = 0
    ) -> Tensor:
        """Run the model once more, with outputs of the mixers from ``leaf``; return the output.

        Args:
            leaf: a function that takes each layer's number and input, and returns its output.
            root: a function that takes the root and returns the new root. Default: None, the root
                stays.
            moved: number of tokens by which recorded outputs of the classes :data:`WITHIN_TOKENS`
                are shifted. Default: 0.

        Raises:
            InputError: when the model calls its mixers in a different order.
        """
        start, beginning, self.ran = self.start, self.beginning, 0
        with _lock_of(beginning.model), torch.no_grad(), ExitStack() as stack:
            if root is not None and self.root is start:
                start = root(start)
            elif root is not None and self.root is not None:
                if self.root is beginning.looked_up:
                    stack.enter_context(beginning.at_look_up(root))
                else:
                    stack.enter_context(beginning.at_entry(self.root.shape, root))
            # no mixers are watched: this turns off caches and compilation, and refuses strangers
            observe(beginning.model, [], (), stack, gradients=False, vouched=self._vouched)
            stack.enter_context(self._replay_shifts(moved))
            stack.enter_context(self._replace_outputs(leaf))
            stack.enter_context(self._shrink_heads())
            output = self._call(start).nan_to_num(0, 0, 0)  # -inf bans a token
        if self.ran != len(self.layers):
            raise _order_error()
        return output

    @contextmanager
    def _replace_outputs(self, leaf: Leaf) -> Iterator[None]:
        """Make mixers return outputs from ``leaf``; undo other hooks' changes of settled mixers."""
        left: list[Any] = []  # the latest mixer's output

        def return_leaf(mixer: Mixer, *args: Any, **kwargs: Any) -> Any:
            """Stand in for a mixer's ``forward``: return the leaf in the form of its output."""
            k = self.ran
            if k == len(self.layers) or self.layers[k].mixer is not mixer:
                raise _order_error()
            self.ran += 1
            new = leaf(k, Call(args, kwargs, None).hidden_states.detach())

            def swap(old: Tensor) -> Tensor:
                return (new if new.dim() == old.dim() else new[0]).to(old.dtype)

            left[:] = [swap_first(self.layers[k].call.output, swap)[0]]
            if mixer.module in self._settled:  # hooks may write to it
                return swap_first(left[0], torch.clone)[0]
            return left[0]

        def return_latest(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            """Last hook of a settled mixer, whose leaf includes the other hooks' changes."""
            return left[0]

        with ExitStack() as stack:
            for mixer in dict.fromkeys(layer.mixer for layer in self.layers):
                forward = functools.partial(return_leaf, mixer)
                stack.enter_context(forward_replaced(mixer.module, forward))
                # torch's encoders pass a module by that has no hook
                stack.enter_context(hooked(mixer.module.register_forward_pre_hook, _do_nothing))
                if mixer.module in self._settled:
                    stack.enter_context(at_both_ends(mixer.module, _do_nothing, return_latest))
            yield

    @contextmanager
    def _replay_shifts(self, moved: int) -> Iterator[None]:
        """Make ``WITHIN_TOKENS`` modules return recorded outputs, shifted by ``moved`` tokens."""

        def forward_recorded(outputs: Iterator[Any], *args: Any, **kwargs: Any) -> Any:
            """Stand in for ``forward``: return the output of the module's next recorded call."""
            return swap_first(next(outputs), lambda x: x.roll(moved, 1))[0]

        with ExitStack() as stack:
            for module, outputs in self.beginning.shifted.items():
                forward = functools.partial(forward_recorded, iter(outputs))
                stack.enter_context(forward_replaced(module, forward))
            yield

    @contextmanager
    def _shrink_heads(self) -> Iterator[None]:
        """Replace vocabulary heads after the last layer by copies of their input, to save time."""

        def repeat_x(module: nn.Linear, forward: Callable[..., Any], x: Tensor, *args: Any) -> Any:
            if self.ran < len(self.layers):  # layers are still to come: not a head
                return forward(x, *args)
            # replays only ask at which tokens the output changed; it keeps the head's shape
            copies = -(-module.out_features // x.shape[-1])  # rounded up
            return torch.cat([x] * copies, -1)[..., : module.out_features]

        with ExitStack() as stack:
            for module in self.outside:
                if type(module) is not nn.Linear:
                    continue
                if module.out_features >= _WIDE * module.in_features:
                    forward = functools.partial(repeat_x, module, module.forward)
                    stack.enter_context(forward_replaced(module, forward))
            yield


#: Changes up to this many units in the last place of a token's largest value are rounding.
#: Experts, for example, sum in blocks whose size depends on the number of routed tokens.
UNITS = 32


def changed(x: Tensor, before: Tensor) -> Tensor:
    """Return a mask (B, L), True where ``x`` (B, L, E) differs by more than rounding.

    The limit is relative to each token's largest absolute value, also beside larger tokens.
    """
    x = x.to(before.device)
    limit = (UNITS if x.dtype.itemsize > 2 else 4) * torch.finfo(x.dtype).eps
    return (x - before).abs_().amax(-1) > limit * before.abs().amax(-1)


def _do_nothing(*_: Any) -> None:
    """Do nothing: a hook that keeps torch from skipping a module, or a first hook as a filler."""


def _lock_of(model: nn.Module) -> threading.RLock:
    """Return the model's lock; it is made under another lock, so that each model has one."""
    with _making_locks:
        return _locks.setdefault(model, threading.RLock())


if hasattr(os, "register_at_fork"):  # a thread that holds one does not come along
    os.register_at_fork(after_in_child=_locks.clear)


def _order_error() -> InputError:
    return InputError(
        "When the model runs again, it calls its mixers in a different order. Make forward_func "
        "repeatable, without randomness or a kept state, or use LatimFlow, which runs it once."
    )


@contextmanager
def forward_replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace ``forward`` for the calling thread, in a ``with``; the module's hooks still run."""
    original, owner_thread = module.forward, threading.get_ident()

    @functools.wraps(original)
    def by_thread(*args: Any, **kwargs: Any) -> Any:
        return (forward if threading.get_ident() == owner_thread else original)(*args, **kwargs)

    def replace() -> Callable[[], None]:
        own_forward = vars(module).get("forward")  # None if only the class has it
        module.forward = by_thread
        return lambda: _restore_forward(module, own_forward)

    with lasting(replace):
        yield


def _restore_forward(module: nn.Module, forward: Callable[..., Any] | None) -> None:
    if forward is None:
        del module.forward
    else:
        module.forward = forward
