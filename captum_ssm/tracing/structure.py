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
from .hooks import first_floating, observing
from .layer import Layer
from .replays import UNITS, Replays, changed

#: Up to this number of tokens, each token is identified by the sets that contain it. Beyond it,
#: random halves detect orders that move many tokens, and rolls detect orders that move few.
_FEW = 32
#: The most tokens at which a replay tests whether layers read one earlier output.
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
_arrangements: WeakKeyDictionary[nn.Module, _Arrangement] = WeakKeyDictionary()


def arrange(
    replays: Replays, output: Tensor, mask: Tensor | None, *, is_model: bool = False
) -> TokenOrder:
    """Find each layer's stage (layers on the same residual stream) and token order, and set both.

    For a model that runs without user code the result is cached, for inputs of the same kind,
    until a weight, a hook or an attribute of a module changes.

    Args:
        replays, output: the replays and the output of the run.
        mask: True for the real tokens of the first layer (B, L); None if all are.
        is_model: whether the model runs without user code around it. Default: False.

    Raises:
        NotAChain: naming the first layer that does not fit.
        InputError: if something other than a mixer has mixed tokens.
        TrainingModeError: if a run cannot be repeated.
    """
    model = replays.beginning.model
    state = (*state_of(model), *_kind_of_run(replays, output)) if is_model else None
    arrangement = _arrangements.get(model)
    if arrangement is None or arrangement.state != state or not _same_mask(arrangement.mask, mask):
        try:
            arrangement = _search(replays, output, mask, state or ())
        except NotAChain as error:
            if _repeats([layer.mixer for layer in replays.layers]):
                runs = "The model runs several times in one call, side by side."
                raise NotAChain(f"{runs} {INSTEAD}") from error
            raise
        if state is not None:
            _arrangements[model] = arrangement
    for layer, (stage, order, has_stream) in zip(replays.layers, arrangement.layers, strict=True):
        layer.arrange(stage, order)
        layer.has_stream = has_stream
    return arrangement.chain


def _search(
    replays: Replays, output: Tensor, mask: Tensor | None, state: tuple[Any, ...]
) -> _Arrangement:
    """Search a run for its structure. Arguments: see :func:`arrange` and :class:`_Arrangement`."""
    search = _OrderSearch(replays, output, mask)
    given = search.find_places()
    stages = _group_into_stages(replays.layers, search.links())
    layers = [
        (stage_index, search.order(k), has_stream)
        for stage_index, (stage, has_stream) in enumerate(stages)
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
                for tensor in value.values():
                    if tensor is not None:  # an inference tensor has no version: never equal
                        yield _Same(tensor), object() if tensor.is_inference() else tensor._version
            elif type(value) in _PLAIN:
                yield value
            elif not isinstance(value, dict):
                yield _Same(value)
            elif value and name != "_modules":  # such as a dictionary of hooks
                yield from map(_Same, list(value.values()))


#: Types of attributes that are compared by value.
_PLAIN = (bool, int, float, str, type(None))


class _Same:
    """Wraps an object for comparison by identity, if possible without keeping it in memory."""

    def __init__(self, value: Any) -> None:
        self._find: Callable[[], Any]  # returns the object, or its id as an int
        try:
            self._find = weakref.ref(value)
        except TypeError:  # a collection has no weak references
            object_id = id(value)
            self._find = lambda: object_id

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Same):
            return False
        x, y = self._find(), other._find()
        # None: the object no longer exists
        return x is not None and (x is y or (type(x) is int and x == y))

    __hash__ = None  # type: ignore[assignment]


def _kind_of_run(replays: Replays, output: Tensor) -> Iterator[Any]:
    """Yield the shapes, types and mixers of a run; a cached structure applies if all are equal."""
    for x in (replays.start, output, *(layer.call.hidden_states for layer in replays.layers)):
        yield x.shape, x.dtype, x.device
    yield from (_Same(layer.mixer.module) for layer in replays.layers)


def note_streams(replays: Replays) -> None:
    """Set ``has_stream`` of layers whose token order could not be determined.

    The input has noise, and all mixers return zeros. If noise does not reach layer k, no residual
    connection bypasses layer k - 1. In the next replay the output of layer k - 1 has the noise.
    """
    layers, first = replays.layers, -1  # first: the layer whose output has the noise, -1: the input
    while first < len(layers) - 1:
        calm, noisy = (_replay_with_noise_after(replays, first, noise) for noise in (False, True))
        reached = [bool(changed(x, y).any()) for x, y in zip(noisy, calm, strict=True)]
        # the first layer without noise; len(layers) is the output, len(reached) if all have noise
        end = next((k for k in range(first + 1, len(reached)) if not reached[k]), len(reached))
        for k in range(first + 1, min(end, len(layers))):  # past layer k noise reached layer k + 1
            layers[k].has_stream = k + 1 < end
        first = max(end - 1, first + 1)  # at least one further, so that the loop ends


def _replay_with_noise_after(replays: Replays, first: int, noise: bool) -> list[Tensor]:
    """Replay with noise in the output of layer ``first``; return the layers' inputs and the output.

    Layers up to ``first`` return their recorded outputs, later layers zeros. If ``first`` is -1,
    the model's input has the noise. ``noise=False`` gives values to compare with.
    """
    inputs: list[Tensor] = []

    def leaf(k: int, entering: Tensor) -> Tensor:
        inputs.append(entering)
        own = replays.leaf(k)
        return replays.noisy(own, noise and k == first, k) if k <= first else torch.zeros_like(own)

    # on: True for all tokens, False for none
    root = functools.partial(replays.noisy, on=noise) if first < 0 else None
    output = replays.run(leaf, root)
    return [*inputs, output.reshape(len(output), -1)]  # flat: only "did it change?" is asked


class _OrderSearch:
    """Searches a run for each layer's token order and for the earlier outputs that it reads."""

    def __init__(self, replays: Replays, output: Tensor, mask: Tensor | None) -> None:
        self.replays, layers = replays, replays.layers
        first = layers[0].output
        self.all_real = mask is None or bool(mask.all())
        real = first.new_ones(first.shape[:2], dtype=torch.bool) if mask is None else mask
        #: A mask of the first layer's tokens that are no padding, and all tokens' indices (B, L).
        self.real = real
        self.inputs = [layer.call.hidden_states.detach() for layer in layers]
        #: The readers of tokens: the layers, and last the model's output. ``orders`` has as many.
        self.names = [f"Layer {layer.name!r}" for layer in layers] + ["The model's output"]
        self.generator = torch.Generator("cpu").manual_seed(0)
        self.indices = torch.arange(real.shape[1], device=real.device).expand_as(real)
        #: For each token of the first layer the token's index in the root (B, L), or -1 for none.
        self.given, root = self.indices, replays.root
        #: Whether each token may have the same index in the root; find_places() tests it.
        self.in_place = root is not None and root.shape[1] == real.shape[1]
        if not self.in_place:
            self.given = torch.full_like(self.indices, -1)  # not known yet
        self.orders: list[Tensor | None] = [None] * len(self.names)
        for name, x in zip(self.names, self.inputs, strict=False):
            if x.shape[:2] != real.shape:
                raise NotAChain(
                    f"{name} does not read all tokens of the layers before it exactly once: it "
                    f"reads {x.shape[1]} tokens of {len(x)} sequences, not {real.shape[1]} of "
                    f"{len(real)}. {INSTEAD}"
                )
        for layer in layers:
            layer.check_unchanged()
        replays.settle_hooks([*self._sets_by_bit(real.shape[1])])  # before leaves are read
        self.leaves = [replays.leaf(k) for k in range(len(layers))]
        # once without noise: the output, as replays have it, and whether runs are repeatable
        with replays.measuring():
            differences, self.output = self._replay_without_noise()
        differs = torch.stack(differences).tolist()
        if any(differs):
            raise TrainingModeError(
                f"{self.names[differs.index(True)]} reads different values when the model runs "
                "again with the same outputs of the mixers. Remove randomness, such as a dropout "
                "called with training=True, and any state that forward_func keeps between calls."
            )
        #: Whether the output has one vector for each token of the layers. A pooled output has not.
        self.per_token = output.dim() == 3 and output.shape[:2] == real.shape

    def order(self, k: int) -> Tensor | None:
        """Return the token order (L,) of layer k (last k: the output); None if it is unchanged."""
        order = self.orders[k]  # (B, L)
        if order is None:
            return None
        if not bool((order == order[:1]).all()):
            raise NotAChain(
                f"{self.names[k]} reads the tokens in a different order in each example. {INSTEAD}"
            )
        return order[0].cpu()

    # --- places ----------------------------------------------------------------------------

    def find_places(self) -> Tensor | None:
        """Find all token orders; return each first-layer token's index in the input, or None.

        Also set ``roots``, one or two: the tensors in which replays begin, with their ``given``.
        """
        replays, indices = self.replays, self.indices
        self.roots = [(replays.root, self.given)]
        must_roll = indices.shape[1] > _FEW and self.all_real
        in_order = self.in_place and all(map(self._changes_exactly, self._subsets()))
        if in_order and (not must_roll or self._follows_a_roll()):
            return self._to_input_indices(indices)
        # else identify each token by the bits of its index
        given, root = indices, replays.root
        if root is not None:
            given = self.given = self._identify_first(root.shape[1])
            unread = ~self._root_mask(torch.ones_like(self.real))  # by the first layer
            if bool(unread.any() and (given >= 0).any()):
                reached = self._spread(unread, torch.zeros_like(self.real))
                if any(bool((x.to(indices.device) & self.real).any()) for x in reached):
                    raise NotAChain(
                        f"{self.names[0]} does not read all tokens of its stream. {INSTEAD}"
                    )
        if bool((given < 0).any()) and replays.entry is not None:
            # the first block's input has all tokens of the layers, also those that the model added
            replays.root, self.given = replays.entry, indices
            self.given = self._identify_first(indices.shape[1])
        orders = self._identify(indices.shape[1], lambda on: self._spread(self._root_mask(on), on))
        for k, places in enumerate(orders):
            places = torch.where(self.real, places, indices)  # padding counts as in order
            if not torch.equal(places.sort(1).values, indices):
                raise NotAChain(
                    f"{self.names[k]} does not read all tokens of the layers before it exactly "
                    f"once. {INSTEAD}"
                )
            self.orders[k] = None if torch.equal(places, indices) else places
        self.roots = [(root, given), (replays.root, self.given)][: 1 + (replays.root is not root)]
        return self._to_input_indices(given)

    def _to_input_indices(self, given: Tensor) -> Tensor | None:
        """Convert token indices in the root to indices in the input; None if both are the same."""
        replays = self.replays
        if replays.start.dim() not in (2, 3):  # such as an image
            return None
        tokens = replays.beginning.ids.shape[1]
        if given is self.indices and given.shape[1] == tokens:
            return None
        given = torch.where(given < tokens, given, -1)  # later tokens were added by forward_func
        same = given.shape[1] == tokens and torch.equal(given, self.indices)
        if not bool((given >= 0).any()):
            raise NotAChain(f"{self.names[0]} reads no token of the inputs. {OF_A_TOWER}")
        return None if same else given.cpu()

    def _subsets(self) -> Iterator[Tensor]:
        """Yield masks (B, L), sets of tokens with noise, that together detect tokens out of order.

        Up to ``_FEW`` tokens, no two tokens are in the same sets. For more tokens the
        sets are a random half and its complement. With padding, for which
        :meth:`_follows_a_roll` is not possible, three such pairs are drawn.
        """
        tokens, device = self.real.shape[1], self.real.device
        if tokens <= _FEW:
            for on in _halves(self.real.numel()).T:
                yield on.view(self.real.shape).to(device)
            return
        for _ in range(1 if self.all_real else 3):
            random_numbers = torch.rand(self.real.shape, generator=self.generator, device="cpu")
            random_half = random_numbers.argsort(1).to(device) < tokens // 2
            yield from (random_half, ~random_half)

    def _sets_by_bit(self, tokens: int) -> Iterator[Tensor]:
        """Yield one mask (B, L) per bit, True if ``token index ^ example index`` has this bit."""
        salted = torch.arange(tokens, device=self.real.device) ^ self._salt()  # (B, L)
        largest = max(tokens, len(self.real)) - 1
        for bit in range(max(1, largest.bit_length())):
            yield (salted >> bit & 1).bool()

    def _salt(self) -> Tensor:
        """Return the example's index (B, 1), so that examples have noise at different tokens."""
        return torch.arange(len(self.real), device=self.real.device)[:, None]

    def _changes_exactly(self, on: Tensor) -> bool:
        """Return True if noise at some tokens changes every layer at exactly these tokens.

        If no noise changes the output, as with a head of zeros, ``per_token`` is set to False.
        """
        *masks, last = (x.to(on.device) for x in self._spread(on, on))
        exact = torch.stack([((x == on) | ~self.real).all() for x in (*masks, last)])
        # the last mask is the output's, or for a pooled output the last layer's
        answers = torch.stack([exact[:-1].all(), exact[-1], last.any() | ~on.any()])  # read once
        are_exact, last_is_exact, last_has_noise = answers.tolist()
        if self.per_token and not last_has_noise:  # a head of zeros, or it does not read ``on``
            everywhere = torch.ones_like(on)
            self.per_token = bool(self._spread(everywhere, everywhere)[-1].any())
            return bool(are_exact) and not self.per_token
        return bool(are_exact and last_is_exact)

    def _follows_a_roll(self) -> bool:
        """Return True if rolling input tokens and mixers' outputs by one rolls all layers' inputs.

        False if a layer swaps only two tokens, which random halves may miss, or if position
        embeddings are added between layers.
        """
        replays, root = self.replays, self.replays.root
        replays.root = root if replays.entry is None else replays.entry
        differences: list[Tensor] = []

        def append_difference(x: Tensor, before: Tensor) -> None:
            differences.append(changed(x, before.roll(1, 1)).any().to(self.real.device))

        def leaf(k: int, entering: Tensor) -> Tensor:
            append_difference(entering, self.inputs[k])
            return self.leaves[k].roll(1, 1)

        output = replays.run(leaf, lambda x: x.roll(1, 1), moved=1)
        replays.root = root
        if self.per_token:
            append_difference(output, self.output)
        return not bool(torch.stack(differences).any())

    def _root_mask(self, on: Tensor) -> Tensor:
        """Convert a mask of first-layer tokens (B, L) to a mask of root tokens (B, L')."""
        root = self.replays.root
        size = self.real.shape[1] if root is None else root.shape[1]
        # one more column, cut off at the end, takes the tokens that are not in the root
        mask = torch.zeros(len(on), size + 1, dtype=torch.bool, device=on.device)
        return mask.scatter_(1, self.given.where(self.given >= 0, size), on)[:, :size]

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
            on = self._changed_tokens(k, entering)
            if k == 0 and virtual.shape == on.shape:
                on = on | ((self.given < 0) & virtual).to(on.device)
            arrived.append(on)
            return self.replays.noisy(self.leaves[k], on, k)

        output = self.replays.run(leaf, lambda x: self.replays.noisy(x, root))
        if self.per_token:
            arrived.append(changed(output, self.output))
        return arrived

    def _changed_tokens(self, k: int, entering: Tensor) -> Tensor:
        """Return a mask (B, L) of the tokens at which the input of layer k differs from the run."""
        if entering.shape != self.inputs[k].shape:
            raise NotAChain(_shape_complaint(self.names[k], entering, self.inputs[k]))
        return changed(entering, self.inputs[k])

    def _identify_first(self, tokens: int) -> Tensor:
        """Return for each token of the first layer the index in the root (B, L), -1 for none."""
        return self._identify(tokens, lambda on: self._spread(on, on)[:1])[0]

    def _identify(self, tokens: int, spread: Callable[[Tensor], list[Tensor]]) -> list[Tensor]:
        """Find by replays the token index that each layer reads at each position, -1 for none.

        ``spread`` is a replay with noise at a mask of tokens, and returns where noise arrived: for
        a mask of one bit of the index, at the positions whose token's index has this bit.
        """
        indices: list[Tensor] = []
        for bit, subset in enumerate(self._sets_by_bit(tokens)):
            set_masks = [x.to(self.real.device) for x in spread(subset)]
            rest_masks = [x.to(self.real.device) for x in spread(~subset)]
            indices = indices or [torch.zeros_like(x, dtype=torch.long) for x in set_masks]
            for k, (in_set, in_rest) in enumerate(zip(set_masks, rest_masks, strict=True)):
                if bool((in_set & in_rest & self.real).any()):
                    raise self._mixing_error(k, spread, subset)
                indices[k] = torch.where(in_set | in_rest, indices[k] | (in_set.long() << bit), -1)
        return [torch.where(places < 0, -1, places ^ self._salt()) for places in indices]

    def _mixing_error(self, k: int, spread: Callable[[Tensor], Any], on: Tensor) -> InputError:
        """Return an error that names the module, if found, that mixed tokens before layer k.

        The module is the first one whose output, but not its input, has an entry that changes both
        with noise at some tokens and with noise at all others.

        Args:
            k: index of the layer, or the number of layers for the output.
            spread: a replay with noise at the tokens of a mask.
            on: about half of the tokens (B, L).
        """
        calm_run = self._modules_before(k, self._replay_without_noise)
        run_on, run_off = (self._modules_before(k, functools.partial(spread, x)) for x in (on, ~on))
        where = f"after {_lower_first(self.names[k - 1])}" if k else "before the first layer"
        runs = zip(calm_run, run_on, run_off, strict=False)
        for (name, *calm), (_, *noise_on), (_, *noise_off) in runs:
            ends = zip(calm, noise_on, noise_off, strict=True)  # the inputs, then the outputs
            input_mixes, output_mixes = (_has_mixed_entry(*values) for values in ends)
            if output_mixes and not input_mixes:
                where = f"in module {name!r}"
                break
        return InputError(
            f"{self.names[k]} reads tokens that an unsupported module or function has mixed "
            f"{where}, so a contribution would be missing. If a module mixes the tokens, register "
            "an adapter for the module (see register_mixer). Else use LatimFlow, or name the "
            "layers to explain with layers=[...]."
        )

    def _replay_without_noise(self) -> tuple[list[Tensor], Tensor]:
        """Replay without noise; return whether each layer's input changed, and the output."""
        has_changed: list[Tensor] = []

        def leaf(k: int, entering: Tensor) -> Tensor:
            has_changed.append(self._changed_tokens(k, entering).any().to(self.real.device))
            return self.leaves[k].clone()

        return has_changed, self.replays.run(leaf)

    def _modules_before(self, k: int, run: Callable[[], Any]) -> list[tuple[str, Tensor, Tensor]]:
        """Return name, input and output of modules between layers k - 1 and k during ``run``."""
        modules, inputs = list[tuple[str, Tensor, Tensor]](), dict[Any, Tensor | None]()
        names = self.replays.outside

        def note(module: nn.Module, call: int, enters: bool, value: Any) -> None:
            x = first_floating(value)
            if enters:
                inputs[module, call] = None if x is None else x.detach().clone()
                return
            entering = inputs.pop((module, call))
            if self.replays.ran == k and entering is not None and x is not None:
                modules.append((names[module], entering, x.detach().clone()))

        with observing(names, note):
            run()
        return modules

    # --- links -----------------------------------------------------------------------------

    def links(self) -> Tensor:
        """Return a mask of the earlier outputs that each layer reads, as found from either root.

        Noise in the input reaches all branches of the residual stream. Noise at the first block
        also reaches tokens that are not in the input. Rows and columns: :meth:`_links_from_root`.
        """
        masks = []
        for root, given in self.roots:
            self.replays.root, self.given = root, given
            masks.append(self._links_from_root())
        return torch.stack(masks).any(0)

    def _links_from_root(self) -> Tensor:
        """Return a mask (n + 1, n + 1), True if row k reads column j by residual connections.

        Rows are the n layers, then the output. Columns are the root, then the layers' outputs.
        """
        n, device = len(self.leaves), self.real.device
        links = torch.zeros(n + 1, n + 1, dtype=torch.bool, device=device)
        if self.all_real and self.given is self.indices:
            tokens = torch.arange(self.indices.numel(), device=device)
        else:
            tokens = (self.real & (self.given >= 0)).flatten().nonzero().flatten()
            tokens = tokens if len(tokens) else self.real.flatten().nonzero().flatten()
        permutation = torch.randperm(len(tokens), generator=self.generator, device="cpu")
        tokens = tokens[permutation[: _TESTS * (n + 1)].to(device)]
        # with few tokens a column is tested at one token only, and perhaps again at another
        for attempt in range(1 + (len(tokens) < 2 * n + 2)):
            if attempt and not bool((links[1:n] == links[: n - 1]).all(1).any()):
                break  # a chain; equal rows are parallel layers, or one was silenced at its token
            tokens = tokens.roll(attempt)
            for start in range(0, n + 1, len(tokens)):
                tested = torch.arange(start, min(start + len(tokens), n + 1), device=device)
                columns = tested[torch.arange(len(tokens), device=device) % len(tested)]
                self._test_links(tokens, columns, links)
        if self.replays.root is None:
            links[:, 0] = True  # the path around the first stage is not known
        if not self.per_token:
            self._test_links_of_pooled(links)
        if not bool(links[-1].any()):  # such as a head of zeros
            raise NotAChain(
                "No layer's output changes the model's output, so it cannot be determined whether "
                f"the model's output reads the layers, and in which token order. {INSTEAD}"
            )
        return links

    def _test_links(self, tokens: Tensor, columns: Tensor, links: Tensor) -> None:
        """Find by two replays the earlier outputs that layers read; set them to True in ``links``.

        Args:
            tokens: tokens of the first layer, numbered over all examples (T,).
            columns: the column of ``links`` that is tested at each of these tokens (T,).
            links: the mask that :meth:`_links_from_root` returns.
        """
        no_column = links.shape[1]  # larger than any column: at such tokens no leaf is zero
        length = self.indices.shape[1]
        column_at = torch.full_like(self.indices, no_column).flatten()
        column_at[tokens] = columns
        column_at = column_at.view_as(self.indices)
        # for each layer and the output, in its own order of tokens: the columns, and ``tokens``
        columns_at = [column_at if x is None else column_at.gather(1, x) for x in self.orders]
        places = [
            tokens if order is None else tokens - tokens % length + _inverse(order)[tokens]
            for order in self.orders
        ]

        def replay(with_noise: bool) -> list[Tensor]:
            """Replay; return the layers' inputs and the output at ``tokens``, (T, E) each."""
            values: list[Tensor] = []

            def record(k: int, x: Tensor) -> None:
                values.append(x.flatten(0, 1).index_select(0, places[k].to(x.device)))

            def leaf(k: int, entering: Tensor) -> Tensor:
                record(k, entering)
                own, column = self.leaves[k], columns_at[k].to(self.leaves[k].device)
                # Column 0 is the root, k + 1 leaf k. Leaves later than a token's column are zero:
                # noise passes them on the stream alone, and through no gate.
                noisy = self.replays.noisy(own, (column == k + 1) & with_noise, k)
                return noisy.mul_((column > k)[..., None])

            on = self._root_mask(column_at == 0) & with_noise
            output = self.replays.run(leaf, lambda x: self.replays.noisy(x, on))
            if self.per_token:
                record(-1, output)
            return values

        for k, (calm, noisy) in enumerate(zip(replay(False), replay(True), strict=True)):
            reads = changed(noisy, calm).to(columns.device) & (columns <= k)  # earlier outputs
            row = links.new_zeros(no_column + 1).scatter_(0, columns.where(reads, no_column), True)
            links[k] |= row[:no_column]  # the last entry took the unread columns

    def _test_links_of_pooled(self, links: Tensor) -> None:
        """Find the outputs that a pooled output reads; set the last row of ``links`` to them.

        A pooled output has no tokens to test several outputs at once. The last layer, and those
        that read the same, are tested one by one: do they change the output, with the others of
        them at zero? All earlier outputs are tested together, with these layers at zero.

        Args:
            links: for each layer and the output, whether it reads the root and each layer.

        Raises:
            NotAChain: if the output reads two of these layers at different tokens.
        """
        last = len(self.leaves) - 1
        stage = [k for k in range(last + 1) if k == last or torch.equal(links[k], links[last])]

        def pooled_output(on: Tensor, noise_elsewhere: bool, only: int | None = None) -> Tensor:
            """Replay; return the output for each example (B, n).

            Args:
                on: tokens (B, L) with noise in the last layers, which are zero elsewhere.
                noise_elsewhere: whether the root and earlier layers have noise.
                only: the only one of the last layers that is not zero. Default: None, all.
            """

            def leaf(k: int, _: Tensor) -> Tensor:
                recorded, order = self.leaves[k], self.orders[k]
                if k not in stage:
                    return self.replays.noisy(recorded, noise_elsewhere, k)
                mask = on & (only in (None, k))
                mask = mask if order is None else mask.gather(1, order)
                return self.replays.noisy(recorded, mask, k) * mask.to(recorded.device)[..., None]

            root = self._root_mask(torch.full_like(self.real, noise_elsewhere))
            pooled = self.replays.run(leaf, lambda x: self.replays.noisy(x, root))
            return pooled.reshape(len(pooled), -1)

        everywhere, given = torch.ones_like(self.real), self.given >= 0
        calm = pooled_output(~everywhere, noise_elsewhere=False)
        for k in stage:
            links[-1, k + 1] = changed(pooled_output(everywhere, False, only=k), calm).any()
        stage = [k for k in stage if links[-1, k + 1]]
        if len(stage) > 1:
            halves = [x for half in self._sets_by_bit(self.real.shape[1]) for x in (half, ~half)]
            # by layer: the halves and examples (sets, B) in which noise changes the output
            answers = [
                torch.stack([changed(pooled_output(mask, False, only=k), calm) for mask in halves])
                for k in stage
            ]
            others = [k for k, x in zip(stage, answers, strict=True) if not x.equal(answers[-1])]
            if others:
                raise NotAChain(
                    f"The model's output reads {_lower_first(self.names[stage[-1]])} and "
                    f"{_lower_first(self.names[others[0]])} at different tokens. {INSTEAD}"
                )
        earlier = links[last].nonzero().flatten()
        links[-1, earlier] = changed(pooled_output(~everywhere, noise_elsewhere=True), calm).any()
        if earlier.tolist() == [0] and not bool(given.all()):
            # an output that reads only tokens added by the model never meets noise in the root;
            # such tokens are taken to pass the layers by
            links[-1, 0] |= not bool(changed(pooled_output(given, False), calm).any())


def _inverse(order: Tensor) -> Tensor:
    """Return each token's position in an order of tokens (B, L), for all examples (B L,)."""
    return order.argsort(1).flatten()


def _lower_first(name: str) -> str:
    """Return a name with a lower-case first letter, for the middle of a sentence."""
    return name[0].lower() + name[1:]


def _shape_complaint(name: str, x: Tensor, before: Tensor) -> str:
    """Return the error text for a layer whose input has another shape in a replay."""
    shapes = f"shape {tuple(x.shape)} when the model runs again, not {tuple(before.shape)}"
    return f"{name} reads an input of {shapes}. Make forward_func repeatable, or use LatimFlow."


def _has_mixed_entry(calm: Tensor, one: Tensor, other: Tensor) -> bool:
    """Return True if an entry depends on two token sets: it changes with noise at either set."""
    if calm.shape != one.shape or calm.shape != other.shape:
        return False
    limit = UNITS * torch.finfo(calm.dtype).eps * calm.abs().max()  # of rounding
    return bool((((one - calm).abs() > limit) & ((other - calm).abs() > limit)).any())


def _group_into_stages(layers: Sequence[Layer], links: Tensor) -> list[tuple[list[int], bool]]:
    """Group layers by residual stream; return each group, and True if the stream bypasses it.

    Raises:
        NotAChain: when stages do not follow each other.
    """
    # by layer the columns that it reads: 0 is the root, k + 1 the output of layer k
    reads = [set(row.nonzero().flatten().tolist()) for row in links.cpu()]
    feeds: set[int] = set()  # layers whose output only the next mixers of their stage read
    stages: list[list[int]] = []
    for k, layer in enumerate(layers):
        is_fed = bool(stages) and stages[-1][-1] in feeds
        if is_fed or (stages and reads[k] == reads[stages[-1][0]]):
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
        stream_before = reads[stage[0]] - fed_by
        stream_after = reads[-1] if is_last else reads[stages[i + 1][0]]
        stream_after = stream_after - fed_by
        follower = "The model's output" if is_last else f"Layer {layers[stages[i + 1][0]].name!r}"
        if not own <= stream_after:
            raise NotAChain(
                f"{follower} does not read the output of {_lower_first(name)}, which ran before. "
                "A hook may set this output to zero, or the model has branches of layers, or runs "
                f"several times. {INSTEAD}"
            )
        if stream_before & stream_after and not stream_before <= stream_after:
            last = max(stream_before - stream_after)
            lost = f"the output of layer {layers[last - 1].name!r}" if last else "the model's input"
            raise NotAChain(
                f"{follower} reads the output of {_lower_first(name)}, but not all tensors of the "
                f"residual stream that this layer reads: {lost} is missing. {INSTEAD}"
            )
        if stream_after - stream_before - own:
            raise NotAChain(f"{follower} reads a stream that bypasses several layers. {INSTEAD}")
        has_stream.append(bool(stream_before & stream_after))
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
    sets = _halves(first.shape[0] * first.shape[1])  # (B L, sets)
    changes = [_tokens_changed_by(replays, entering, on.view(first.shape[:2])) for on in sets.T]
    return [
        _decode_tokens(torch.stack(masks_of_layer, -1), sets, first.shape[1])
        for masks_of_layer in zip(*changes, strict=True)
    ]


def _halves(tokens: int) -> Tensor:
    """Return a mask (tokens, sets): each token is in half of the sets, no two in the same half."""
    # the smallest number of sets that has enough different halves
    count = next(n for n in itertools.count(2) if math.comb(n, n // 2) >= tokens)
    sets_of_tokens = itertools.islice(itertools.combinations(range(count), count // 2), tokens)
    index = torch.tensor(list(sets_of_tokens), device="cpu")
    return torch.zeros(tokens, count, dtype=torch.bool, device="cpu").scatter_(1, index, True)


def _tokens_changed_by(replays: Replays, entering: Sequence[Tensor], on: Tensor) -> list[Tensor]:
    """Replay with noise at the input tokens ``on`` (B, L); return each layer's changed tokens."""
    arrived: list[Tensor] = []

    def leaf(k: int, x: Tensor) -> Tensor:
        if x.shape != entering[k].shape:
            raise InputError(_shape_complaint(f"Layer {replays.layers[k].name!r}", x, entering[k]))
        here = on.to(x.device) if replays.root is None and k == 0 else changed(x, entering[k])
        arrived.append(here.cpu())
        own = replays.leaf(k)
        # an output with other tokens than the input has noise everywhere
        return replays.noisy(own, here if here.shape == own.shape[:-1] else bool(here.any()), k)

    replays.run(leaf, lambda x: replays.noisy(x, on))
    return arrived


def _decode_tokens(changes: Tensor, sets: Tensor, tokens: int) -> Tensor | None:
    """Return the index of the token that each position reads (B, L'); None if it reads several.

    Args:
        changes: a mask of the positions that changed (B, L', sets).
        sets: a mask of the tokens with noise, of all examples (B L, sets).
        tokens: the number of tokens of an example, L.
    """
    powers = 2 ** torch.arange(sets.shape[1], device="cpu")
    codes, token_of_code = (sets * powers).sum(1).sort()  # a code: a token's sets as binary digits
    code = (changes * powers).sum(-1)  # of each position, 0 if it never changed
    nearest = torch.searchsorted(codes, code).clamp_max(len(codes) - 1)
    token, is_known = token_of_code[nearest], codes[nearest] == code
    rows = torch.arange(len(code), device="cpu").view(-1, *[1] * (code.dim() - 1))
    is_read = is_known & (token // tokens == rows)  # not a token of another example
    # a position that changed, but not like one token of its example, reads several
    if bool((~is_read & (code > 0)).any()) or not bool(is_read.any()):
        return None
    return torch.where(is_read, token % tokens, -1)
