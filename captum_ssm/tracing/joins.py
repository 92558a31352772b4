"""Find the residual stream and each mixer's path into it by comparing values in replays.

A replay runs the model again, with noise added to a mixer's output at some tokens. The first tensor
that changes by a constant times the noise, but is not only the output, is the residual stream after
the mixer. Subtracting the output gives the stream before the mixer. If the noise passes a norm or
projection on its way, an affine map is fitted to that module, and the search continues after the
module. A last replay restores the stream's recorded values. Any remaining difference means that
the model also reads the output elsewhere.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .hooks import observing, sequences_in
from .layer import Layer
from .replays import Replays, changed
from .values import (
    Branch,
    change_at,
    fit,
    is_constant,
    is_same,
    likely,
    norm_of,
    rounding_of,
    rows_at,
    steps_of,
    summed,
)
from .way import AffineStep, Way, along

#: Key of a tensor in a run: module, number of the call, True for an input, index among several.
_Key = tuple[nn.Module, int, bool, int]
#: A function that rearranges a tensor to (B, L, E), in the token order of a layer's operator.
_Reading = Callable[[Tensor], Tensor]

#: Size of the noise relative to the largest value nearby, so that the noise of a small branch
#: exceeds the rounding of a large stream.
_NOISE = 4
#: Bytes of tensors that one replay may keep. If more are needed, fewer layers share a replay.
_BYTES = 2**28
#: Typical number of stream-sized tensors at the modules between two mixers.
_AROUND = 12
_SEED = 2_718_281


class _Seen(NamedTuple):
    """A tensor that entered or left a module, and the number of mixers that ran before."""

    ran: int
    value: Tensor


class _Slot(NamedTuple):
    """The tokens at which a layer gets noise, as a mask (B, L) and as indices into B * L."""

    on: Tensor
    at: Tensor


class _Found(NamedTuple):
    """The sum that adds outputs of layers to the residual stream.

    Attributes:
        ways: the affine steps from each layer's output to the sum, by layer index.
        stream: the residual stream before the sum.
        at: the key of the tensor with the sum; None if only a norm of the sum was seen.
        reading: the function that rearranges the tensor with the sum to (B, L, E).
    """

    ways: Mapping[int, Way]
    stream: Tensor
    at: _Key | None
    reading: _Reading


@dataclass(eq=False)
class _Join:
    """Layers whose outputs are added to the residual stream in the same sum.

    Attributes:
        members: the indices of the layers.
        branches: by layer index, the layer's output and tensors found to be affine in the output.
        until: the number of mixers that have run when the next layer reads the stream.
        apart: the steps from each layer to a sum of only the outputs, without the stream.
        found: the sum with the stream; None until found.
    """

    members: Sequence[int]
    branches: dict[int, list[Branch]]
    until: int
    apart: dict[int, Way] = field(default_factory=dict)
    found: _Found | None = None


def join(replays: Replays, stages: Sequence[Sequence[Layer]], order: Tensor | None) -> None:
    """Find each layer's residual stream and the steps from the layer's output to it, and set both.

    If the steps were not found, :attr:`.Layer.way` raises an error.

    Args:
        replays: the replays of the run.
        stages: groups of layers; the layers of a group read the same residual stream.
        order: for each output token the token's index in the first layer (L,); None if the same.
    """
    replays.settle_every_hook()  # vectors pass the hooks, or are refused
    with torch.no_grad():
        _JoinSearch(replays, stages, order).find()


class _JoinSearch:
    """Searches a run for the sums that add layers' outputs to the residual stream.

    The arguments are those of :func:`join`.
    """

    def __init__(
        self, replays: Replays, stages: Sequence[Sequence[Layer]], order: Tensor | None
    ) -> None:
        self.replays, self.layers = replays, replays.layers
        number = {layer: k for k, layer in enumerate(self.layers)}
        self.stages = [[number[layer] for layer in stage] for stage in stages]
        #: Each layer's recorded output (B, L, E), in its operator's order of tokens.
        self.leaves = [x.in_order(replays.leaf(k)) for k, x in enumerate(self.layers)]
        #: The modules outside mixers, whose inputs and outputs are compared between replays.
        self.modules = list(replays.outside)
        #: Whether tokens stay separate, so that each layer can have noise at its own tokens.
        self.is_chain = all(x.stage is not None and x.map is None for x in self.layers)
        #: The orders of tokens in the run, to match a tensor with a layer.
        self.orders: list[Tensor] = []
        for each in (*(layer.order for layer in self.layers), order):
            if each is not None and not any(torch.equal(each, one) for one in self.orders):
                self.orders.append(each)
        #: The layers' inputs and the model's output in a replay without noise.
        self.unchanged: list[Tensor] = []
        #: Tensors at modules in a replay without and with noise.
        self.real: dict[_Key, _Seen] = {}
        self.noisy: dict[_Key, _Seen] = {}
        #: The tokens at which each layer has noise; without layers there is none.
        self.slots: dict[int, _Slot] = {}
        #: Layers' outputs with noise at all tokens, by layer index.
        self.loud: dict[int, Tensor] = {}

    def find(self) -> None:
        """Find the sums that add outputs to the stream, by replays with and without noise.

        This calls each layer's :meth:`.Layer.join` with the stream and the steps to the stream, or
        with None if they were not found.
        """
        for some in self._groups():
            # from the first mixer of the group until the mixers of the next stage have run
            wanted = range(min(some[0]), max(some[-1]) + 2 + self._after(some[-1]))
            self.slots, self.loud, self.real, self.noisy = {}, {}, {}, {}
            self.real = self._tensors(wanted)  # no slot yet: no noise
            self.slots = self._slots([k for stage in some for k in stage])
            self.noisy = self._tensors(wanted)
            joins = [each for stage in some for each in self._joins(stage)]
            for each in joins:
                self._find(each)
            lost = self._read_elsewhere(joins)
            for each in joins:
                if each.found is not None and each not in lost:
                    for k, way in each.found.ways.items():
                        self.layers[k].join(each.found.stream, way)
                elif each.apart and not self.layers[max(each.members)].has_stream:
                    # no stream is added, but the way was seen
                    for k, way in each.apart.items():
                        self.layers[k].join(None, way)
                else:
                    for k in each.members:
                        self.layers[k].join(None, None)
        self.real, self.noisy = {}, {}

    def _after(self, stage: Sequence[int]) -> int:
        """Return the number of layers in the next stage, or 1 if ``stage`` is the last."""
        later = [other for other in self.stages if other[0] > stage[-1]]
        return len(later[0]) if later else 1

    def _groups(self) -> Iterator[list[list[int]]]:
        """Yield lists of stages small enough, in tokens and memory, to share the same replays."""
        size = self.leaves[0].shape[1]
        if not self.is_chain:
            yield from ([stage] for stage in self.stages)
            return
        largest = max(map(len, self.stages))
        most = min(size // largest // 2, _BYTES // (self.leaves[0].nbytes * _AROUND * largest))
        for start in range(0, len(self.stages), max(1, most)):
            yield self.stages[start : start + max(1, most)]

    def _slots(self, numbers: Sequence[int]) -> dict[int, _Slot]:
        """Assign the tokens to layers at random; each layer gets noise only at these tokens."""
        batch, tokens = self.leaves[numbers[0]].shape[:2]
        generator = torch.Generator("cpu").manual_seed(_SEED)
        drawn = torch.rand((batch, tokens), generator=generator, device="cpu").argsort(1)
        out = {}
        for i, k in enumerate(numbers):
            on, device = drawn % len(numbers) == i, self.leaves[k].device
            out[k] = _Slot(on.to(device), on.flatten().nonzero()[:, 0].to(device))
        return out

    def _joins(self, stage: Sequence[int]) -> list[_Join]:
        """Split a stage into groups of layers whose outputs one sum adds to the residual stream."""
        feeders = [k for k in stage if self.layers[k].joins == "feeds"]
        writers = [k for k in stage if k not in feeders] or list(stage)
        found = [[k] for k in feeders if k not in writers]
        if self.layers[writers[-1]].has_stream or len(writers) > 1:
            found.append(writers)
        out = []
        for members in found:
            branches = {}
            for k in members:
                own = self.layers[k].in_order(self._noisy_output(k))
                branches[k] = [Branch((), change_at(own, self.leaves[k], self.slots[k].at))]
            until = members[0] + 1 if members is not writers else stage[-1] + 1
            out.append(_Join(members, branches, until + self._after(stage)))
        return out

    # --- replays ---------------------------------------------------------------------------

    def _noisy_output(self, k: int) -> Tensor:
        """Return layer k's recorded output with noise at all tokens, in the module's layout."""
        if k not in self.loud:
            leaf = self.replays.leaf(k)
            around = [seen.value for seen in self.real.values() if seen.ran == k]
            sizes = [x.abs().max().to(leaf) for x in around if x.numel() == leaf.numel()]
            loud = _NOISE * torch.stack([leaf.abs().max(), *sizes]).max()
            loud = loud.clamp(max=torch.finfo(leaf.dtype).max / 64)
            generator = torch.Generator("cpu").manual_seed(_SEED + k)
            noise = torch.randn(leaf.shape[1:], generator=generator, device="cpu").to(leaf)
            self.loud[k] = leaf + noise * (loud + (loud == 0))
        return self.loud[k]

    def _leaf(self, k: int) -> Tensor:
        """Return layer k's recorded output with noise at its own tokens, in the module's layout."""
        own, slot = self.replays.leaf(k), self.slots.get(k)
        if slot is None:
            return own.clone()
        (on, at), loud, order = slot, self._noisy_output(k), self.layers[k].order
        if len(at) == on.numel():
            return loud.clone()
        on = on if order is None else on.index_select(1, order.to(on.device))
        return torch.where(on[..., None], loud, own)

    def _tensors(self, wanted: range) -> dict[_Key, _Seen]:
        """Replay the run once, and return the floating tensors that enter and leave modules.

        A tensor is kept only if the number of mixers that have run is in ``wanted``.
        """
        found: dict[_Key, _Seen] = {}
        # a block's output enters the next one and its norm: one copy serves
        latest: tuple[Callable[[], Any], int, Tensor] = (lambda: None), 0, self.leaves[0]

        def keep(key: _Key, x: Tensor) -> None:
            nonlocal latest
            if self.replays.ran in wanted:
                version = -1 if x.is_inference() else x._version
                if latest[0]() is not x or latest[1] != version or version < 0:
                    latest = weakref.ref(x), version, x.detach().clone()
                found[key] = _Seen(self.replays.ran, latest[2])

        read = self._replayed(keep)
        if not self.slots:
            self.unchanged = read
        return found

    def _replayed(self, receive: Callable[[_Key, Tensor], None]) -> list[Tensor]:
        """Replay with noise at each layer's tokens; pass modules' tensors to ``receive``.

        Return the layers' inputs and the output.
        """
        read: list[Tensor] = []

        def note(module: nn.Module, call: int, enters: bool, value: Any) -> None:
            for i, x in enumerate(sequences_in(value)):
                receive((module, call, enters, i), x)

        def leaf(k: int, entering: Tensor) -> Tensor:
            read.append(entering)
            return self._leaf(k)

        with observing(self.modules, note):
            output = self.replays.run(leaf)
        return [*read, output]

    def _read_elsewhere(self, joins: Sequence[_Join]) -> set[_Join]:
        """Return the joins whose outputs the model also reads outside of the residual stream."""
        known = [each for each in joins if each.found is not None and each.found.at is not None]
        if not known or not self._is_read_elsewhere(known):
            return set()
        return {each for each in known if self._is_read_elsewhere([each])}

    def _is_read_elsewhere(self, joins: Sequence[_Join]) -> bool:
        """Return True if noise still changes the run when the residual streams are restored.

        A replay has noise in the outputs of ``joins`` alone, and overwrites each stream that was
        found with its value without noise. Then nothing may change: not the output, not the stream
        at tokens without noise, and no layer's input, except for a norm of the stream that the
        layer read before the stream was seen.
        """
        slots, before = self.slots, self.unchanged
        self.slots = {k: slots[k] for each in joins for k in each.members}
        joined_at = {each.found.at: each for each in joins if each.found is not None}
        # a fused kernel returns the stream and a norm of it: all outputs of its call are restored
        calls = {key[:3] for key in joined_at if key is not None and not key[2]}
        changes: list[Tensor] = []
        early: dict[int, Tensor] = {}  # streams with noise, by the layers that ran before them

        def put_back(key: _Key, x: Tensor) -> None:
            if key in joined_at or key[:3] in calls:
                real, each = self.real[key].value, joined_at.get(key)
                if each is not None and each.found is not None:
                    noisy = torch.stack([self.slots[k].on for k in each.members]).any(0)
                    now, then = each.found.reading(x), each.found.reading(real)
                    changes.append((changed(now, then) & ~noisy.to(x.device)).any())
                    if ran := range(max(each.members) + 1, self.replays.ran):
                        early.update(dict.fromkeys(ran, now.clone()))
                x.detach().copy_(real)

        read = self._replayed(put_back)
        self.slots = slots
        for k, (x, y) in enumerate(zip(read, before, strict=True)):
            stream = early[k].to(x.device) if k in early else None
            if stream is None or stream.shape != x.shape or norm_of(stream, x, None) is None:
                changes.append(changed(x, y).any())
        return bool(torch.stack([x.to(self.leaves[0].device) for x in changes]).any())

    # --- one join --------------------------------------------------------------------------

    def _find(self, each: _Join) -> None:
        """Search the tensors after a join's layers for the sum, and set ``each.found``."""
        first, last = min(each.members), max(each.members)
        for key, (ran, value) in self.real.items():
            if not first < ran <= each.until or key not in self.noisy:
                continue
            for reading in self._readings(value, last):
                x, now = reading(value), reading(self.noisy[key].value)
                if now.shape != x.shape:
                    continue
                known = self._fits(each, x, now)
                if not known and key[2] and self._append_gated(each, key, x, now, reading):
                    known = self._fits(each, x, now)
                if not known:
                    self._follow_concatenated(each, key, x, now, reading)
                    continue
                if len(known) == len(each.members):
                    rest = x - _added(known, self.leaves, x)
                    if not is_constant(rest, x):
                        stream = self._stream_before(rest, each.members, ran, reading)
                        if stream is not None:
                            each.found = _Found(known, stream, key, reading)
                            return
                        continue
                    each.apart = each.apart or known
                self._follow_module(each, key, x, reading, known)
                break
        if each.found is None:
            self._find_by_value(each)

    def _fits(self, each: _Join, x: Tensor, now: Tensor) -> dict[int, Way]:
        """Return the affine steps to ``x`` from each layer whose noise explains ``x``'s change."""
        found = {}
        for k in each.members:
            on, at = self.slots[k]
            if on.shape == x.shape[:2]:
                way = fit(each.branches[k], change_at(now, x, at), x)
                if way is not None:
                    found[k] = way
        return found

    def _stream_before(
        self, rest: Tensor, members: Sequence[int], ran: int, reading: _Reading
    ) -> Tensor | None:
        """Return the residual stream before the layers, if tensors of the run explain ``rest``.

        ``rest``, the sum without the layers' outputs, may be a multiple of a tensor, a tensor plus
        a constant, or a sum of two tensors. In all other cases return None.
        """
        first = self.layers[min(members)]
        block, inside = first.call.block, False
        before = [first.in_order(first.call.hidden_states)]
        before = [x.to(rest.device) for x in before if x.shape == rest.shape]
        left: list[Tensor] = []
        for key, seen in self.real.items():
            if min(members) <= seen.ran <= ran and seen.value.numel() == rest.numel():
                x = reading(seen.value).to(rest.device)
                if x.shape != rest.shape:
                    continue
                if seen.ran == min(members) and key[2]:
                    before.append(x)
                inside = inside or seen.ran > min(members) or (key[2] and key[0] is block)
                if inside and not key[2]:
                    left.append(x)
        for kind, x, other in likely(rest, before, left):
            if kind == "scaled":
                scale = (x * rest).sum() / x.square().sum()
                if is_same(rest, x) or is_same(rest, scale * x):
                    return rest
            elif kind == "shifted":
                if is_constant(rest - x, rest):  # a bias belongs to no token
                    return x
            elif is_same(rest - x, other):
                return rest if kind == "sum" else x
        return None

    def _append_gated(
        self, each: _Join, key: _Key, x: Tensor, now: Tensor, reading: _Reading
    ) -> bool:
        """Add ``x`` to the branches if ``x`` is a branch times a gate, an output of some module."""
        seen = self.real[key]
        if len(each.members) > 1:
            return False
        width, (k,) = x.shape[-1], each.members
        gates = [
            reading(other.value).to(x.device)
            for place, other in self.real.items()
            if not place[2] and other.ran == seen.ran and other.value.shape == seen.value.shape
        ]
        ways = [branch.steps for branch in each.branches[k][:0:-1]]
        for one, other in itertools.combinations(each.branches[k][1:], 2):
            if one.change.shape == other.change.shape:  # a projection and its adapter
                ways.append(summed([one.steps, other.steps], [1, 1]) or ())
        for steps in ways:
            z = along(steps, self.leaves[k].to(x))
            if z.shape[-1] not in (width, 2 * width):
                continue
            for start in range(0, z.shape[-1] - width + 1, width):
                part = z[..., start : start + width]
                for gate in gates:
                    if bool((part * gate - x).abs().max() <= rounding_of(x)):
                        pick = torch.eye(z.shape[-1]).to(x)[:, start : start + width]
                        some = [] if z.shape[-1] == width else [AffineStep(matrix=pick)]
                        change = change_at(now, x, self.slots[k].at)
                        each.branches[k].append(Branch([*steps, *some, AffineStep(gate)], change))
                        return True
        return False

    def _follow_module(
        self, each: _Join, key: _Key, x: Tensor, reading: _Reading, known: Mapping[int, Way]
    ) -> None:
        """If a branch enters a norm or linear module, add the module's output to the branches."""
        module, call, enters, _ = key
        left = module, call, False, 0
        if not enters or left not in self.real or left not in self.noisy:
            return
        out, now = self.real[left].value, self.noisy[left].value
        is_small = next(module.children(), None) is None
        if out.shape[:-1] != self.real[key].value.shape[:-1] or not is_small:
            return
        out, now = reading(out), reading(now)
        if is_same(out, x):  # dropout, identity
            return
        steps = steps_of(module, x, out)
        if steps is None:
            return
        for i, (k, way) in enumerate(known.items()):  # a constant counts once
            mine = steps if i == 0 else [step._replace(bias=None) for step in steps]
            change = change_at(now, out, self.slots[k].at)
            each.branches[k].append(Branch([*way, *mine], change))

    def _follow_concatenated(
        self, each: _Join, key: _Key, x: Tensor, now: Tensor, reading: _Reading
    ) -> None:
        """Add a projection's output to the branches if its input concatenates branches."""
        left, start, parts = (*key[:2], False, 0), 0, {}
        if not key[2] or len(each.members) < 2 or left not in self.noisy:
            return
        for k in each.members:
            width = self.leaves[k].shape[-1]
            part = slice(start, start + width)
            change = change_at(now, x, self.slots[k].at)[..., part]
            way = fit(each.branches[k], change, x[..., part])
            if way is None:
                return
            parts[k], start = (part, way), start + width
        out, after = reading(self.real[left].value), reading(self.noisy[left].value)
        steps = steps_of(key[0], x, out) if start == x.shape[-1] else None
        if steps is None or steps[0].matrix is None or len(steps) > 1:
            return
        for i, (k, (part, way)) in enumerate(parts.items()):
            step = AffineStep(matrix=steps[0].matrix[part], bias=None if i else steps[0].bias)
            change = change_at(after, out, self.slots[k].at)
            each.branches[k].append(Branch([*way, step], change))

    def _find_by_value(self, each: _Join) -> None:
        """Search for a residual stream that enters no module, or that only enters a fused norm."""
        k, *others = each.members
        if not others and self._factored(each, k):
            return
        if not each.apart or self.layers[max(each.members)].has_stream:
            self._normed(each)

    def _factored(self, each: _Join, k: int) -> bool:
        """Search for a sum of an earlier tensor and the gated or normed output; True if found."""
        y, change, at = self.leaves[k], each.branches[k][0].change, self.slots[k].at
        for key, (ran, value) in self.real.items():
            if ran != k + 1 or key not in self.noisy:
                continue
            for reading in self._readings(value, k):
                x = reading(value)
                if x.shape != y.shape:
                    continue
                moved = change_at(reading(self.noisy[key].value), x, at)
                for place, seen in self.real.items():
                    if seen.ran != k or not place[2] or seen.value.shape != value.shape:
                        continue
                    rest = reading(seen.value).to(x.device)
                    gate = (x - rest) / y.to(x.device)
                    off = (moved - rows_at(gate, at) * change).abs().max()
                    is_gate = bool(off <= rounding_of(moved, 64))
                    way = [AffineStep(gate)] if is_gate else norm_of(y.to(x.device), x - rest, None)
                    if way is not None and not is_constant(x - rest, x):
                        each.found = _Found({k: way}, rest, key, reading)
                        return True
        return False

    def _normed(self, each: _Join) -> None:
        """Search for norm(stream + outputs), which add-and-norm kernels return without the sum."""
        ways = {k: each.branches[k][-1].steps for k in each.members}
        some = [along(way, self.leaves[k]) for k, way in ways.items()]
        if any(x.shape != some[0].shape for x in some):
            return
        added = sum(some[1:], some[0])
        reading = next(self._readings(added, max(each.members)))
        near = [
            (key, reading(seen.value))
            for key, seen in self.real.items()
            if seen.ran >= min(each.members) and seen.value.shape == added.shape
        ]
        for key, x in near:
            if not key[2] or is_same(x, added):
                continue
            for _, rest in near:
                if rest is x or is_constant(rest, rest):
                    continue
                if norm_of(rest + added, x, None) is not None:
                    each.found = _Found(ways, rest, None, reading)
                    return

    def _readings(self, value: Tensor, k: int) -> Iterator[_Reading]:
        """Yield functions that may rearrange ``value`` to the token order of layer k's operator."""
        layer = self.layers[k]
        batch, tokens, _ = self.leaves[k].shape
        if value.shape[0] == batch and value.numel() == batch * tokens * value.shape[-1]:
            yield lambda x: x.reshape(batch, tokens, -1)
            if value.shape[:2] == (batch, tokens):
                for order in self.orders:
                    back = order.argsort().to(value.device)
                    yield functools.partial(torch.index_select, dim=1, index=back)
        elif value.dim() == 2 and len(value) == batch * tokens:
            yield lambda x: x.reshape(batch, tokens, -1)
        elif value.dim() == 4 and len(value) == batch and value.shape[2:].numel() == tokens:
            yield lambda x: x.flatten(2).transpose(1, 2)
        if layer.map is not None and value.shape[:-1] == layer.output.shape[:-1]:
            yield layer.in_order


def _added(ways: Mapping[int, Way], leaves: Sequence[Tensor], like: Tensor) -> Tensor:
    some = [along(way, leaves[k].to(like)) for k, way in ways.items()]
    return sum(some[1:], some[0])
