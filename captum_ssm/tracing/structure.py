"""Find the structure of a run's layers by replays with noise.

Rollout methods multiply the matrices of layers. This is valid if only mixers move information
between tokens, and if layers follow each other on one residual stream. Replays check both: mixers
return their recorded outputs plus noise at some tokens, and the changed inputs of layers show which
tokens each layer reads.

*Token order.* Noise begins at some tokens of the input, different ones in each example. Each layer
adds noise at the tokens where noise arrives. If every layer changes at exactly these tokens, tokens
are not mixed and keep their order. Otherwise replays for each bit of a token's index, and for the
complement of the bit, identify the token at each position.

*Links.* Each token has noise in one layer's output, and later outputs are zero at this token. A
layer that changes at the token reads that output through residual connections. Outputs of zero also
close gates, so that a gate is not mistaken for a residual stream.
"""

from __future__ import annotations

import functools
import itertools
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..errors import InputError, TrainingModeError
from .hooks import observing, swap_first
from .layer import Layer
from .replays import UNITS, Replays, changed

#: Up to this number of tokens, each token is identified by the sets that contain it. Beyond it,
#: random halves detect orders that move many tokens, and rolls detect orders that move few.
_FEW = 32
#: The number of tokens at which a replay tests whether layers read an earlier output.
_TESTS = 64

#: Advice in errors about layers whose matrices cannot be multiplied.
INSTEAD = (
    "Multiplying the layers' matrices would explain a different network. Use LatimFlow, which "
    "explains the network as it is, or select layers that follow each other with layers=[...]."
)
#: Advice in errors about layers that do not read the explained tokens.
OF_A_TOWER = (
    "If the layer belongs to an image encoder beside the explained text, select the layers of the "
    "text with layers=[...], or use LatimFlow, which explains both."
)


class NotAChain(InputError):
    """Raised for layers whose matrices cannot be multiplied one after the other."""


@dataclass(frozen=True, eq=False)
class TokenOrder:
    """The order of the first layer's tokens relative to the input and the output.

    Attributes:
        given: for each token of the first layer the token's index in the explained input (B, L),
            or -1 for a token that is not in the input; None if all indices are the same.
        output: for each output token the token's index in the first layer (L,); None if all
            indices are the same, or if the output has no tokens.
    """

    given: Tensor | None
    output: Tensor | None


@dataclass(frozen=True, eq=False)
class _Arrangement:
    """The structure found for a run, with the conditions under which it may be reused.

    Attributes:
        state: the state of the model and the kind of input, compared before each reuse.
        mask: True for real tokens (B, L), or None.
        chain: the token order of the run.
        layers: for each layer the number of its stage (layers that read the same residual stream),
            the token order, and whether a residual connection bypasses the layer.
    """

    state: tuple[Any, ...]
    mask: Tensor | None
    chain: TokenOrder
    layers: list[tuple[int, Tensor | None, bool]]


#: The latest structure found for each model.
_found: WeakKeyDictionary[nn.Module, _Arrangement] = WeakKeyDictionary()


def arrange(
    replays: Replays, output: Tensor, mask: Tensor | None, *, is_model: bool = False
) -> TokenOrder:
    """Find each layer's stage (layers on the same residual stream) and token order, and set both.

    For a model that runs without user code the result is cached, for inputs of the same kind,
    until a weight, a hook or an attribute of a module changes.

    Args:
        replays: the replays of the run.
        output: the model's output.
        mask: True for the real tokens of the first layer (B, L); None if all are.
        is_model: whether the model runs without user code around it. Default: False.

    Raises:
        NotAChain: naming the first layer that does not fit.
        InputError: if something other than a mixer has mixed tokens.
        TrainingModeError: if a run cannot be repeated.
    """
    model = replays.beginning.model
    state = (*state_of(model), *_kind(replays, output)) if is_model else None
    found = _found.get(model)
    if found is None or found.state != state or not _same_mask(found.mask, mask):
        try:
            found = _search(replays, output, mask, state or ())
        except NotAChain as error:
            if _repeats([layer.mixer for layer in replays.layers]):
                runs = "The model runs several times in one call, side by side."
                raise NotAChain(f"{runs} {INSTEAD}") from error
            raise
        if state is not None:
            _found[model] = found
    for layer, (stage, order, has_stream) in zip(replays.layers, found.layers, strict=True):
        layer.arrange(stage, order)
        layer.has_stream = has_stream
    return found.chain


def _search(
    replays: Replays, output: Tensor, mask: Tensor | None, state: tuple[Any, ...]
) -> _Arrangement:
    search = _OrderSearch(replays, output, mask)
    given = search.find_places()
    layers = [
        (number, search.order(k), has_stream)
        for number, (stage, has_stream) in enumerate(_stages(replays.layers, search.links()))
        for k in stage
    ]
    return _Arrangement(state, mask, TokenOrder(given, search.order(len(layers))), layers)


def _same_mask(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


def _repeats(parts: Sequence[object]) -> bool:
    """Return True if a sequence is a shorter sequence, repeated two or more times."""
    n = len(parts)
    return any(n % k == 0 and parts[k:] == parts[:-k] for k in range(1, n // 2 + 1))


def state_of(model: nn.Module) -> Iterator[Any]:
    """Yield comparable forms of a model's modules, weights and attributes, to detect changes."""
    for module in model.modules():
        yield _Same(module)
        for name, value in list(vars(module).items()):  # other threads may hang hooks on it
            if name in ("_parameters", "_buffers"):
                for x in value.values():
                    if x is not None:
                        yield _Same(x), object() if x.is_inference() else x._version
            elif type(value) in _PLAIN:
                yield value
            elif not isinstance(value, dict):
                yield _Same(value)
            elif value and name != "_modules":
                yield from map(_Same, list(value.values()))


#: Types of attributes that are compared by value.
_PLAIN = (bool, int, float, str, type(None))


class _Same:
    """Wraps an object for comparison by identity, if possible without keeping it in memory."""

    def __init__(self, value: Any) -> None:
        self._find: Callable[[], Any]
        try:
            self._find = weakref.ref(value)
        except TypeError:  # of a collection
            known = id(value)
            self._find = lambda: known

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Same):
            return False
        own, its = self._find(), other._find()
        return own is not None and (own is its or (type(own) is int and own == its))

    __hash__ = None  # type: ignore[assignment]


def _kind(replays: Replays, output: Tensor) -> Iterator[Any]:
    """Yield the shapes, types and mixers of a run; a cached structure applies if all are equal."""
    for x in (replays.start, output, *(layer.call.hidden_states for layer in replays.layers)):
        yield x.shape, x.dtype, x.device
    yield from (_Same(layer.mixer.module) for layer in replays.layers)


def note_streams(replays: Replays) -> None:
    """Set ``has_stream`` of layers whose token order could not be determined.

    The input has noise, and all mixers return zeros. If noise does not reach layer k, no residual
    connection bypasses layer k - 1. In the next replay the output of layer k - 1 has the noise.
    """
    layers, first = replays.layers, -1
    while first < len(layers) - 1:
        calm, noisy = (_passing(replays, first, noise) for noise in (False, True))
        met = [bool(changed(x, y).any()) for x, y in zip(noisy, calm, strict=True)]
        until = next((k for k in range(first + 1, len(met)) if not met[k]), len(met))
        for k in range(first + 1, min(until, len(layers))):  # layer k is passed by on the way on
            layers[k].has_stream = k + 1 < until
        first = max(until - 1, first + 1)


def _passing(replays: Replays, first: int, noise: bool) -> list[Tensor]:
    """Replay with noise in the output of layer ``first``; return the layers' inputs and the output.

    If ``first`` is -1, the model's input has the noise. Later mixers return zeros. A replay with
    ``noise=False`` returns the values without noise for comparison.
    """
    read: list[Tensor] = []

    def leaf(k: int, entering: Tensor) -> Tensor:
        read.append(entering)
        own = replays.leaf(k)
        return replays.noisy(own, noise and k == first, k) if k <= first else torch.zeros_like(own)

    root = functools.partial(replays.noisy, on=noise) if first < 0 else None
    output = replays.run(leaf, root)
    return [*read, output.reshape(len(output), -1)]


class _OrderSearch:
    """Searches a run for each layer's token order and for the earlier outputs that it reads."""

    def __init__(self, replays: Replays, output: Tensor, mask: Tensor | None) -> None:
        self.replays, layers = replays, replays.layers
        first = layers[0].output
        self.all_real = mask is None or bool(mask.all())
        keep = first.new_ones(first.shape[:2], dtype=torch.bool) if mask is None else mask
        self.keep = keep
        self.entering = [layer.call.hidden_states.detach() for layer in layers]
        self.names = [f"Layer {layer.name!r}" for layer in layers] + ["The model's output"]
        self.generator = torch.Generator("cpu").manual_seed(0)
        self.own = torch.arange(keep.shape[1], device=keep.device).expand_as(keep)
        #: For each token of the first layer the token's index in the root (B, L), or -1 for none.
        self.given, root = self.own, replays.root
        self.in_place = root is not None and root.shape[1] == keep.shape[1]
        if not self.in_place:
            self.given = torch.full_like(self.own, -1)
        self.orders: list[Tensor | None] = [None] * len(self.names)
        for name, x in zip(self.names, self.entering, strict=False):
            if x.shape[:2] != keep.shape:
                raise NotAChain(
                    f"{name} does not read all tokens of the layers before it exactly once: it "
                    f"reads {x.shape[1]} tokens of {len(x)} sequences, not {keep.shape[1]} of "
                    f"{len(keep)}. {INSTEAD}"
                )
        for layer in layers:
            layer.check_unchanged()
        replays.settle_hooks([*self._sets_by_bit(keep.shape[1])])
        self.leaves = [replays.leaf(k) for k in range(len(layers))]
        # once without noise: the output, as replays have it, and whether runs are repeatable
        with replays.measuring():
            again, self.output = self._silent()
        moved = torch.stack(again).tolist()
        if any(moved):
            raise TrainingModeError(
                f"{self.names[moved.index(True)]} reads different values when the model runs "
                "again with the same outputs of the mixers. Remove randomness, such as a dropout "
                "called with training=True, and any state that forward_func keeps between calls."
            )
        #: Whether the output has one vector for each token of the layers. A pooled output has not.
        self.per_token = output.dim() == 3 and output.shape[:2] == keep.shape

    def order(self, k: int) -> Tensor | None:
        """Return the token order (L,) of layer k (last k: the output); None if it is unchanged."""
        order = self.orders[k]
        if order is None:
            return None
        if not bool((order == order[:1]).all()):
            raise NotAChain(
                f"{self.names[k]} reads the tokens in a different order in each example. {INSTEAD}"
            )
        return order[0].cpu()

    # --- places ----------------------------------------------------------------------------

    def find_places(self) -> Tensor | None:
        """Find all token orders; return for each first-layer token the index in the input."""
        replays, own = self.replays, self.own
        self.roots = [(replays.root, self.given)]
        rolled = own.shape[1] > _FEW and self.all_real
        in_order = self.in_place and all(map(self._changes_exactly, self._subsets()))
        if in_order and (not rolled or self._rolls()):
            return self._of_input(own)
        given, root = own, replays.root
        if root is not None:
            given = self.given = self._read(root.shape[1], lambda on: self._spread(on, on)[:1])[0]
            unread = ~self._root_mask(torch.ones_like(self.keep))
            if bool(unread.any() and (given >= 0).any()):
                passing = self._spread(unread, torch.zeros_like(self.keep))
                if any(bool((x.to(own.device) & self.keep).any()) for x in passing):
                    raise NotAChain(
                        f"{self.names[0]} does not read all tokens of its stream. {INSTEAD}"
                    )
        if bool((given < 0).any()) and replays.entry is not None:
            replays.root, self.given = replays.entry, own  # where all tokens are there
            self.given = self._read(own.shape[1], lambda on: self._spread(on, on)[:1])[0]
        found = self._read(own.shape[1], lambda on: self._spread(self._root_mask(on), on))
        for k, places in enumerate(found):
            places = torch.where(self.keep, places, own)
            if not torch.equal(places.sort(1).values, own):
                raise NotAChain(
                    f"{self.names[k]} does not read all tokens of the layers before it exactly "
                    f"once. {INSTEAD}"
                )
            self.orders[k] = None if torch.equal(places, own) else places
        self.roots = [(root, given), (replays.root, self.given)][: 1 + (replays.root is not root)]
        return self._of_input(given)

    def _of_input(self, given: Tensor) -> Tensor | None:
        """Convert token indices in the root to indices in the input; None if both are the same."""
        replays = self.replays
        if replays.start.dim() not in (2, 3):
            return None
        tokens = replays.beginning.ids.shape[1]
        if given is self.own and given.shape[1] == tokens:
            return None
        given = torch.where(given < tokens, given, -1)
        same = given.shape[1] == tokens and torch.equal(given, self.own)
        if not bool((given >= 0).any()):
            raise NotAChain(f"{self.names[0]} reads no token of the inputs. {OF_A_TOWER}")
        return None if same else given.cpu()

    def _subsets(self) -> Iterator[Tensor]:
        """Yield masks (B, L), sets of tokens with noise, that together detect tokens out of order.

        Up to ``_FEW`` tokens, no two tokens are in the same sets. For more tokens the
        sets are a random half and its complement. With padding, for which :meth:`_rolls` is not
        possible, three such pairs are drawn.
        """
        tokens, device = self.keep.shape[1], self.keep.device
        if tokens <= _FEW:
            for on in _halves(self.keep.numel()).T:
                yield on.view(self.keep.shape).to(device)
            return
        for _ in range(1 if self.all_real else 3):
            drawn = torch.rand(self.keep.shape, generator=self.generator, device="cpu")
            on = drawn.argsort(1).to(device) < tokens // 2
            yield from (on, ~on)

    def _sets_by_bit(self, tokens: int) -> Iterator[Tensor]:
        """Yield one mask (B, L) per bit, True if ``token index ^ example index`` has this bit."""
        salted = torch.arange(tokens, device=self.keep.device) ^ self._salt()
        for bit in range(max(1, (max(tokens, len(self.keep)) - 1).bit_length())):
            yield (salted >> bit & 1).bool()

    def _salt(self) -> Tensor:
        return torch.arange(len(self.keep), device=self.keep.device)[:, None]

    def _changes_exactly(self, on: Tensor) -> bool:
        """Return True if noise at some tokens changes every layer at exactly these tokens.

        If no noise changes the output, as with a head of zeros, ``per_token`` is set to False.
        """
        *found, last = (x.to(on.device) for x in self._spread(on, on))
        as_on = torch.stack([((x == on) | ~self.keep).all() for x in (*found, last)])
        answers = torch.stack([as_on[:-1].all(), as_on[-1], last.any() | ~on.any()]).tolist()
        if self.per_token and not answers[2]:  # or nothing reads these tokens
            everywhere = torch.ones_like(on)
            self.per_token = bool(self._spread(everywhere, everywhere)[-1].any())
            return bool(answers[0]) and not self.per_token
        return bool(answers[0] and answers[1])

    def _rolls(self) -> bool:
        """Return True if rolling input tokens and mixers' outputs by one rolls all layers' inputs.

        False if a layer reorders only some tokens, or if position embeddings are added between
        layers.
        """
        replays, root = self.replays, self.replays.root
        replays.root = root if replays.entry is None else replays.entry
        found: list[Tensor] = []

        def compare(x: Tensor, before: Tensor) -> None:
            found.append(changed(x, before.roll(1, 1)).any().to(self.keep.device))

        def leaf(k: int, entering: Tensor) -> Tensor:
            compare(entering, self.entering[k])
            return self.leaves[k].roll(1, 1)

        output = replays.run(leaf, lambda x: x.roll(1, 1), moved=1)
        replays.root = root
        if self.per_token:
            compare(output, self.output)
        return not bool(torch.stack(found).any())

    def _root_mask(self, on: Tensor) -> Tensor:
        """Convert a mask of first-layer tokens (B, L) to a mask of root tokens (B, L')."""
        root = self.replays.root
        size = self.keep.shape[1] if root is None else root.shape[1]
        out = torch.zeros(len(on), size + 1, dtype=torch.bool, device=on.device)
        return out.scatter_(1, self.given.where(self.given >= 0, size), on)[:, :size]

    def _spread(self, root: Tensor, virtual: Tensor) -> list[Tensor]:
        """Replay with noise in the root; each layer adds noise at tokens where its input changed.

        Args:
            root: a mask (B, L) of root tokens with noise.
            virtual: a mask (B, L) of first-layer tokens with noise that are not in the root.

        Returns:
            One mask (B, L) of changed tokens for each layer, and one for an output with tokens.
        """
        arrived: list[Tensor] = []

        def leaf(k: int, entering: Tensor) -> Tensor:
            on = self._changed(k, entering)
            if k == 0 and virtual.shape == on.shape:
                on = on | ((self.given < 0) & virtual).to(on.device)
            arrived.append(on)
            return self.replays.noisy(self.leaves[k], on, k)

        output = self.replays.run(leaf, lambda x: self.replays.noisy(x, root))
        if self.per_token:
            arrived.append(changed(output, self.output))
        return arrived

    def _changed(self, k: int, entering: Tensor) -> Tensor:
        if entering.shape != self.entering[k].shape:
            raise NotAChain(_other_shape(self.names[k], entering, self.entering[k]))
        return changed(entering, self.entering[k])

    def _read(self, tokens: int, spread: Callable[[Tensor], list[Tensor]]) -> list[Tensor]:
        """Find by replays the token index that each layer reads at each position, -1 for none."""
        found: list[Tensor] = []
        for bit, has in enumerate(self._sets_by_bit(tokens)):
            there = [x.to(self.keep.device) for x in spread(has)]
            others = [x.to(self.keep.device) for x in spread(~has)]
            found = found or [torch.zeros_like(x, dtype=torch.long) for x in there]
            for k, (one, other) in enumerate(zip(there, others, strict=True)):
                if bool((one & other & self.keep).any()):
                    raise self._mixed(k, spread, has)
                found[k] = torch.where(one | other, found[k] | (one.long() << bit), -1)
        return [torch.where(places < 0, -1, places ^ self._salt()) for places in found]

    def _mixed(self, k: int, spread: Callable[[Tensor], Any], on: Tensor) -> InputError:
        """Return an error that names the module, if found, that mixed tokens before layer k.

        The module is the first one whose output, but not its input, has an entry that changes both
        with noise at some tokens and with noise at all others.

        Args:
            k: index of the layer, or the number of layers for the output.
            spread: a replay with noise at the tokens of a mask.
            on: about half of the tokens (B, L).
        """
        silent = self._inside(k, self._silent)
        first, second = (self._inside(k, functools.partial(spread, x)) for x in (on, ~on))
        where = f"after {_lower_first(self.names[k - 1])}" if k else "before the first layer"
        for (name, *calm), (_, *one), (_, *other) in zip(silent, first, second, strict=False):
            before, behind = (_both_change(*each) for each in zip(calm, one, other, strict=True))
            if behind and not before:
                where = f"in module {name!r}"
                break
        return InputError(
            f"{self.names[k]} reads tokens that an unsupported module or function has mixed "
            f"{where}, so a contribution would be missing. If a module mixes the tokens, register "
            "an adapter for the module (see register_mixer). Else use LatimFlow, or name the "
            "layers to explain with layers=[...]."
        )

    def _silent(self) -> tuple[list[Tensor], Tensor]:
        """Replay without noise; return whether each layer's input changed, and the output."""
        moved: list[Tensor] = []

        def leaf(k: int, entering: Tensor) -> Tensor:
            moved.append(self._changed(k, entering).any().to(self.keep.device))
            return self.leaves[k].clone()

        return moved, self.replays.run(leaf)

    def _inside(self, k: int, run: Callable[[], Any]) -> list[tuple[str, Tensor, Tensor]]:
        """Return name, input and output of modules between layers k - 1 and k during ``run``."""
        found, entered = list[tuple[str, Tensor, Tensor]](), dict[Any, Tensor | None]()
        names = self.replays.outside

        def meet(module: nn.Module, call: int, enters: bool, value: Any) -> None:
            x = swap_first(value, lambda x: x)[1]
            if enters:
                entered[module, call] = None if x is None else x.detach().clone()
                return
            before = entered.pop((module, call))
            if self.replays.ran == k and before is not None and x is not None:
                found.append((names[module], before, x.detach().clone()))

        with observing(names, meet):
            run()
        return found

    # --- links -----------------------------------------------------------------------------

    def links(self) -> Tensor:
        """Return a mask of the earlier outputs that each layer reads, as found from either root.

        Noise in the input reaches all branches of the residual stream. Noise at the first block
        also reaches tokens that are not in the input. :meth:`_links` defines rows and columns.
        """
        found = []
        for root, given in self.roots:
            self.replays.root, self.given = root, given
            found.append(self._links())
        return torch.stack(found).any(0)

    def _links(self) -> Tensor:
        """Return a mask (n + 1, n + 1), True if row k reads column j by residual connections.

        Rows are the n layers, then the output. Columns are the root, then the layers' outputs.
        """
        n, device = len(self.leaves), self.keep.device
        found = torch.zeros(n + 1, n + 1, dtype=torch.bool, device=device)
        if self.all_real and self.given is self.own:
            free = torch.arange(self.own.numel(), device=device)
        else:
            free = (self.keep & (self.given >= 0)).flatten().nonzero().flatten()
            free = free if len(free) else self.keep.flatten().nonzero().flatten()
        mixed = torch.randperm(len(free), generator=self.generator, device="cpu")
        free = free[mixed[: _TESTS * (n + 1)].to(device)]
        for turn in range(1 + (len(free) < 2 * n + 2)):
            if turn and not bool((found[1:n] == found[: n - 1]).all(1).any()):
                break  # else layers read the same, or something silences one at its only token
            free = free.roll(turn)
            for start in range(0, n + 1, len(free)):
                some = torch.arange(start, min(start + len(free), n + 1), device=device)
                self._link(free, some[torch.arange(len(free), device=device) % len(some)], found)
        if self.replays.root is None:
            found[:, 0] = True  # the path around the first stage is not known
        if not self.per_token:
            self._link_pooled(found)
        if not bool(found[-1].any()):
            raise NotAChain(
                "No layer's output changes the model's output, so it cannot be determined whether "
                f"the model's output reads the layers, and in which token order. {INSTEAD}"
            )
        return found

    def _link(self, tokens: Tensor, columns: Tensor, found: Tensor) -> None:
        """Find by two replays the earlier outputs that layers read; set them to True in ``found``.

        Args:
            tokens: tokens of the first layer, numbered over all examples (T,).
            columns: the column of ``found`` that is tested at each of these tokens (T,).
            found: the mask that :meth:`_links` returns.
        """
        none, length = found.shape[1], self.own.shape[1]
        slots = torch.full_like(self.own, none).flatten()
        slots[tokens] = columns
        slots = slots.view_as(self.own)
        ours = [slots if order is None else slots.gather(1, order) for order in self.orders]
        places = [
            tokens if order is None else tokens - tokens % length + _inverse(order)[tokens]
            for order in self.orders
        ]

        def at(noise: bool) -> list[Tensor]:
            """Replay with or without noise; return what layers and output read at ``tokens``."""
            read: list[Tensor] = []

            def keep(k: int, x: Tensor) -> None:
                read.append(x.flatten(0, 1).index_select(0, places[k].to(x.device)))

            def leaf(k: int, entering: Tensor) -> Tensor:
                keep(k, entering)
                own, slot = self.leaves[k], ours[k].to(self.leaves[k].device)
                # Column 0 is the root, k + 1 leaf k. Leaves later than a token's column are zero:
                # noise passes them on the stream alone, and through no gate.
                return self.replays.noisy(own, (slot == k + 1) & noise, k) * (slot > k)[..., None]

            on = self._root_mask(slots == 0) & noise
            output = self.replays.run(leaf, lambda x: self.replays.noisy(x, on))
            if self.per_token:
                keep(-1, output)
            return read

        for k, (real, noise) in enumerate(zip(at(False), at(True), strict=True)):
            is_read = changed(noise, real).to(columns.device) & (columns <= k)
            read = found.new_zeros(none + 1).scatter_(0, columns.where(is_read, none), True)
            found[k] |= read[:none]

    def _link_pooled(self, found: Tensor) -> None:
        """Find the outputs that a pooled output reads; set the last row of ``found`` to them.

        A pooled output has no tokens to test several outputs at once. The last layer, and those
        that read the same, are tested one by one: do they change the output, with the others of
        them at zero? All earlier outputs are tested together, with these layers at zero.

        Args:
            found: for each layer and the output, whether it reads the root and each layer.

        Raises:
            NotAChain: if the output reads two of these layers at different tokens.
        """
        last = len(self.leaves) - 1
        stage = [k for k in range(last + 1) if k == last or torch.equal(found[k], found[last])]

        def output(of_stage: Tensor, of_others: bool, alone: int | None = None) -> Tensor:
            """Replay; return the output for each example (B, n).

            Args:
                of_stage: tokens (B, L) with noise in the last layers, which are zero elsewhere.
                of_others: whether the root and earlier layers have noise.
                alone: the only one of the last layers that is not zero. Default: None, all.
            """

            def leaf(k: int, _: Tensor) -> Tensor:
                own, order = self.leaves[k], self.orders[k]
                if k not in stage:
                    return self.replays.noisy(own, of_others, k)
                on = of_stage & (alone in (None, k))
                on = on if order is None else on.gather(1, order)
                return self.replays.noisy(own, on, k) * on.to(own.device)[..., None]

            root = self._root_mask(torch.full_like(self.keep, of_others))
            pooled = self.replays.run(leaf, lambda x: self.replays.noisy(x, root))
            return pooled.reshape(len(pooled), -1)

        everywhere, given = torch.ones_like(self.keep), self.given >= 0
        neither = output(~everywhere, False)
        for k in stage:
            found[-1, k + 1] = changed(output(everywhere, False, k), neither).any()
        stage = [k for k in stage if found[-1, k + 1]]
        if len(stage) > 1:
            halves = [x for has in self._sets_by_bit(self.keep.shape[1]) for x in (has, ~has)]
            answers = [
                torch.stack([changed(output(on, False, k), neither) for on in halves])
                for k in stage
            ]
            others = [k for k, x in zip(stage, answers, strict=True) if not x.equal(answers[-1])]
            if others:
                raise NotAChain(
                    f"The model's output reads {_lower_first(self.names[stage[-1]])} and "
                    f"{_lower_first(self.names[others[0]])} at different tokens. {INSTEAD}"
                )
        older = found[last].nonzero().flatten()
        found[-1, older] = changed(output(~everywhere, True), neither).any()
        if older.tolist() == [0] and not bool(given.all()):
            # an output that reads only tokens added by the model never meets noise in the root;
            # such tokens are taken to pass the layers by
            found[-1, 0] |= not bool(changed(output(given, False), neither).any())


def _inverse(order: Tensor) -> Tensor:
    """Return each token's position in an order of tokens (B, L), for all examples (B L,)."""
    return order.argsort(1).flatten()


def _lower_first(name: str) -> str:
    """Return a name with a lower-case first letter, for the middle of a sentence."""
    return name[0].lower() + name[1:]


def _other_shape(name: str, x: Tensor, before: Tensor) -> str:
    shapes = f"shape {tuple(x.shape)} when the model runs again, not {tuple(before.shape)}"
    return f"{name} reads an input of {shapes}. Make forward_func repeatable, or use LatimFlow."


def _both_change(calm: Tensor, one: Tensor, other: Tensor) -> bool:
    """Return True if an entry depends on both token sets: it changes with noise at either one."""
    if calm.shape != one.shape or calm.shape != other.shape:
        return False
    limit = UNITS * torch.finfo(calm.dtype).eps * calm.abs().max()
    return bool((((one - calm).abs() > limit) & ((other - calm).abs() > limit)).any())


def _stages(layers: Sequence[Layer], links: Tensor) -> list[tuple[list[int], bool]]:
    """Group layers by residual stream; return each group, and True if the stream bypasses it.

    Raises:
        NotAChain: when stages do not follow each other.
    """
    reads = [set(row.nonzero().flatten().tolist()) for row in links.cpu()]
    feeds: set[int] = set()
    stages: list[list[int]] = []
    for k, layer in enumerate(layers):
        fed = bool(stages) and stages[-1][-1] in feeds
        if fed or (stages and reads[k] == reads[stages[-1][0]]):
            stages[-1].append(k)
        else:
            stages.append([k])
        if layer.joins == "feeds":
            feeds.add(k)
    fed_by = {k + 1 for k in feeds}
    has_stream = []
    for i, stage in enumerate(stages):
        own, name = {k + 1 for k in stage} - fed_by, f"Layer {layers[stage[0]].name!r}"
        is_last = i + 1 == len(stages)
        here = reads[stage[0]] - fed_by
        behind = reads[-1] if is_last else reads[stages[i + 1][0]]
        behind = behind - fed_by
        follower = "The model's output" if is_last else f"Layer {layers[stages[i + 1][0]].name!r}"
        if not own <= behind:
            raise NotAChain(
                f"{follower} does not read the output of {_lower_first(name)}, which ran before. "
                "A hook may set this output to zero, or the model has branches of layers, or runs "
                f"several times. {INSTEAD}"
            )
        if here & behind and not here <= behind:
            last = max(here - behind)
            lost = f"the output of layer {layers[last - 1].name!r}" if last else "the model's input"
            raise NotAChain(
                f"{follower} reads the output of {_lower_first(name)}, but not all tensors of the "
                f"residual stream that this layer reads: {lost} is missing. {INSTEAD}"
            )
        if behind - here - own:
            raise NotAChain(f"{follower} reads a stream that bypasses several layers. {INSTEAD}")
        has_stream.append(bool(here & behind))
    return list(zip(stages, has_stream, strict=True))


def tokens_read(replays: Replays) -> list[Tensor | None]:
    """Find the first token that each layer reads at each position, independently for each layer.

    Each replay has noise at one set of tokens. Each token is in a different half of the sets, so a
    position that mixes two tokens changes in more than half of the replays.

    Args:
        replays: the replays of the run. The first tokens are the tokens of the root, or of the
            first layer if there is no root.

    Returns:
        For each layer the token number (B, L') at every position, -1 for a token that is no
        first token. None for a layer that reads mixed tokens, other examples, or no first token.

    Raises:
        InputError: when a layer reads a different number of tokens in a replay.
    """
    entering = [layer.call.hidden_states for layer in replays.layers]
    first = entering[0] if replays.root is None else replays.root
    sets = _halves(first.shape[0] * first.shape[1])
    changes = [_arrived(replays, entering, on.view(first.shape[:2])) for on in sets.T]
    return [
        _decoded(torch.stack(found, -1), sets, first.shape[1])
        for found in zip(*changes, strict=True)
    ]


def _halves(tokens: int) -> Tensor:
    """Return a mask (tokens, sets): each token is in half of the sets, no two in the same half."""
    count = next(n for n in itertools.count(2) if math.comb(n, n // 2) >= tokens)
    chosen = itertools.islice(itertools.combinations(range(count), count // 2), tokens)
    index = torch.tensor(list(chosen), device="cpu")
    return torch.zeros(tokens, count, dtype=torch.bool, device="cpu").scatter_(1, index, True)


def _arrived(replays: Replays, entering: Sequence[Tensor], on: Tensor) -> list[Tensor]:
    """Replay with noise at the input tokens ``on`` (B, L); return each layer's changed tokens."""
    found: list[Tensor] = []

    def leaf(k: int, x: Tensor) -> Tensor:
        if x.shape != entering[k].shape:
            raise InputError(_other_shape(f"Layer {replays.layers[k].name!r}", x, entering[k]))
        there = on.to(x.device) if replays.root is None and k == 0 else changed(x, entering[k])
        found.append(there.cpu())
        own = replays.leaf(k)
        return replays.noisy(own, there if there.shape == own.shape[:-1] else bool(there.any()), k)

    replays.run(leaf, lambda x: replays.noisy(x, on))
    return found


def _decoded(changes: Tensor, sets: Tensor, tokens: int) -> Tensor | None:
    """Return the index of the token that each position reads (B, L'); None if it reads several.

    Args:
        changes: a mask of the positions that changed (B, L', sets).
        sets: a mask of the tokens with noise, of all examples (B L, sets).
        tokens: the number of tokens of an example, L.
    """
    values = 2 ** torch.arange(sets.shape[1], device="cpu")
    numbers, place = (sets * values).sum(1).sort()
    here = (changes * values).sum(-1)
    at = torch.searchsorted(numbers, here).clamp_max(len(numbers) - 1)
    found, is_one = place[at], numbers[at] == here
    rows = torch.arange(len(here), device="cpu").view(-1, *[1] * (here.dim() - 1))
    apart = is_one & (found // tokens == rows)
    if bool((~apart & (here > 0)).any()) or not bool(apart.any()):
        return None
    return torch.where(apart, found % tokens, -1)
