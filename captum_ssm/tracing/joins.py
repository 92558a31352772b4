"""The residual stream, and the way of each mixer's output into it, read off replays by value.

In a replay a mixer's output has noise at some tokens.  The first tensor that changes by a constant
times that noise, and holds more than the output, is the stream behind the mixer; without the
output, it is the stream before.  Norms and projections on the way are modules.  One that the noise
enters is read off its own values, and the search goes on behind it.  A last replay puts back the
stream where it was found, and nothing may differ from there on: nothing else reads the output.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .hooks import hooked, swap_first
from .layer import Layer
from .replays import Replays, changed
from .way import Step, Way, along

#: A module, the number of its call, whether the tensor enters it, and which of several it is.
_Key = tuple[nn.Module, int, bool, int]
#: How a tensor is laid out by the tokens of a layer's operator, (B, L, E).
_Reading = Callable[[Tensor], Tensor]

#: Noise is so many times the largest number around, so that a small branch is not lost in a large
#: stream.
_LOUD = 4
#: So many bytes of tensors are kept of a replay; with more, fewer layers share one.
_BYTES = 2**28
#: So many tensors of the stream's size pass the modules between two mixers, as a rule.
_AROUND = 12
_SEED = 2_718_281


class _Seen(NamedTuple):
    """A tensor that entered or left a module, and how many mixers had run."""

    ran: int
    value: Tensor


class _Branch(NamedTuple):
    """A tensor between a mixer and the stream: the steps to it, and its change by the noise."""

    steps: Way
    change: Tensor


class _Found(NamedTuple):
    """Where layers join a stream.

    Attributes:
        ways: of each of them.
        stream: before them.
        at: where the stream behind them was seen; None if only a norm of it was.
        reading: how that is laid out.
    """

    ways: Mapping[int, Way]
    stream: Tensor
    at: _Key | None
    reading: _Reading


@dataclass(eq=False)
class _Join:
    """Layers that write to the stream together.

    Attributes:
        members: their numbers.
        branches: of each of them what its output became so far, the output itself first.
        until: how many mixers have run when the stream has been read.
        apart: ways into what is no stream, where they were found.
        found: where they join, once that was seen.
    """

    members: Sequence[int]
    branches: dict[int, list[_Branch]]
    until: int
    apart: dict[int, Way] = field(default_factory=dict)
    found: _Found | None = None


def join(replays: Replays, stages: Sequence[Sequence[Layer]], order: Tensor | None) -> None:
    """Tell the layers of a run what their outputs are added to, and what is done to them before.

    A layer of which that is not seen refuses to tell, once it is asked.

    Args:
        replays: of the run, whose layers are arranged where they can be.
        stages: the layers that act on one residual stream together.
        order: which of the first layer's tokens each of the output's is (L,); None if they are the
            same.
    """
    replays.settle_every_hook()  # vectors have what a hook makes of them, or are refused
    with torch.no_grad():
        _Search(replays, stages, order).find()


class _Search:
    """The tensors of replays of one run."""

    def __init__(
        self, replays: Replays, stages: Sequence[Sequence[Layer]], order: Tensor | None
    ) -> None:
        self.replays, self.layers = replays, replays.layers
        number = {layer: k for k, layer in enumerate(self.layers)}
        self.stages = [[number[layer] for layer in stage] for stage in stages]
        self.leaves = [x.in_order(replays.leaf(k)) for k, x in enumerate(self.layers)]
        mixing = {part for layer in self.layers for part in layer.mixer.module.modules()}
        model = replays.beginning.model
        self.modules = [part for part in model.modules() if part not in mixing]
        #: Whether tokens keep apart, so that layers can have noise at tokens of their own.
        self.is_chain = all(x.stage is not None and x.map is None for x in self.layers)
        self.orders: list[Tensor] = []
        for each in (*(layer.order for layer in self.layers), order):
            if each is not None and not any(torch.equal(each, one) for one in self.orders):
                self.orders.append(each)
        #: How many mixers have run in the replay that runs.
        self.ran = 0
        #: What layers and the output read without noise.
        self.unchanged: list[Tensor] = []
        self.real: dict[_Key, _Seen] = {}
        self.noisy: dict[_Key, _Seen] = {}
        self.slots: dict[int, Tensor] = {}

    def find(self) -> None:
        for some in self._groups():
            wanted = range(min(some[0]), max(some[-1]) + 2 + self._after(some[-1]))
            self.slots = {}
            self.real = self._tensors(wanted)
            self.slots = self._slots([k for stage in some for k in stage])
            self.noisy = self._tensors(wanted)
            joins = [each for stage in some for each in self._joins(stage)]
            for each in joins:
                self._find(each)
            lost = self._lost(joins)
            for each in joins:
                if each.found is not None and each not in lost:
                    for k, way in each.found.ways.items():
                        self.layers[k].join(each.found.stream, way)
                elif each.apart and not self.layers[max(each.members)].has_stream:
                    for k, way in each.apart.items():
                        self.layers[k].join(None, way)
                else:
                    for k in each.members:
                        self.layers[k].join(None, None)
        self.real, self.noisy = {}, {}

    def _after(self, stage: Sequence[int]) -> int:
        """How many layers the stage behind one has."""
        later = [other for other in self.stages if other[0] > stage[-1]]
        return len(later[0]) if later else 1

    def _groups(self) -> Iterator[list[list[int]]]:
        """Yield stages that share replays."""
        size = self.leaves[0].shape[1]
        if not self.is_chain:
            yield from ([stage] for stage in self.stages)
            return
        largest = max(map(len, self.stages))
        most = min(size // largest // 2, _BYTES // (self.leaves[0].nbytes * _AROUND * largest))
        for start in range(0, len(self.stages), max(1, most)):
            yield self.stages[start : start + max(1, most)]

    def _slots(self, numbers: Sequence[int]) -> dict[int, Tensor]:
        """The tokens of its operator at which each layer has noise (B, L)."""
        if len(numbers) == 1:
            return {k: self.leaves[k].new_ones(self.leaves[k].shape[:2]).bool() for k in numbers}
        batch, tokens = self.leaves[numbers[0]].shape[:2]
        generator = torch.Generator("cpu").manual_seed(_SEED)
        drawn = torch.rand((batch, tokens), generator=generator, device="cpu").argsort(1)
        return {
            k: (drawn % len(numbers) == i).to(self.leaves[k].device) for i, k in enumerate(numbers)
        }

    def _joins(self, stage: Sequence[int]) -> list[_Join]:
        """What of a stage joins a stream by itself."""
        feeders = [k for k in stage if self.layers[k].joins == "feeds"]
        writers = [k for k in stage if k not in feeders] or list(stage)
        found = [[k] for k in feeders if k not in writers]
        if self.layers[writers[-1]].has_stream or len(writers) > 1:
            found.append(writers)
        out = []
        for members in found:
            branches = {}
            for k in members:
                own = self.layers[k].in_order(self._loud(k))
                branches[k] = [_Branch((), _change(own, self.leaves[k], self.slots[k]))]
            until = members[0] + 1 if members is not writers else stage[-1] + 1
            out.append(_Join(members, branches, until + self._after(stage)))
        return out

    # --- replays ---------------------------------------------------------------------------

    def _loud(self, k: int) -> Tensor:
        """A layer's leaf with noise, laid out as its module returns it."""
        leaf = self.replays.leaf(k)
        around = [seen.value for seen in self.real.values() if seen.ran == k]
        sizes = [x.abs().max() for x in around if x.numel() == leaf.numel()]
        loud = _LOUD * max([leaf.abs().max(), *(size.to(leaf.device) for size in sizes)])
        generator = torch.Generator("cpu").manual_seed(_SEED + k)
        noise = torch.randn(leaf.shape[1:], generator=generator, device="cpu").to(leaf)
        return leaf + noise * (loud + (loud == 0))

    def _leaf(self, k: int) -> Tensor:
        """The leaf of a layer in a replay."""
        own, on = self.replays.leaf(k), self.slots.get(k)
        if on is None:
            return own.clone()
        loud, order = self._loud(k), self.layers[k].order
        if bool(on.all()):
            return loud
        on = on if order is None else on.index_select(1, order.to(on.device))
        return torch.where(on[..., None], loud, own)

    def _tensors(self, wanted: range) -> dict[_Key, _Seen]:
        """The floating tensors that enter and leave modules in a replay.

        Args:
            wanted: while so many mixers have run.
        """
        found: dict[_Key, _Seen] = {}

        def keep(key: _Key, x: Tensor) -> None:
            if self.ran in wanted:
                found[key] = _Seen(self.ran, x.detach().clone())

        entering, output = self._replayed(keep)
        if not self.slots:
            self.unchanged = [*entering, output]
        return found

    def _replayed(self, meet: Callable[[_Key, Tensor], None]) -> tuple[list[Tensor], Tensor]:
        """Run once more, with noise in the slots.

        Args:
            meet: is given every floating tensor that enters or leaves a module.
        """
        calls = Counter[nn.Module]()
        running: list[int] = []
        self.ran = 0

        def note(module: nn.Module, call: int, enters: bool, value: Any) -> None:
            for i, x in enumerate(_floating(value)):
                meet((module, call, enters, i), x)

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            calls[module] += 1
            running.append(calls[module])
            note(module, calls[module], True, (args, kwargs))

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            call = running.pop()
            if output is not None:
                note(module, call, False, output)

        def leaf(k: int, _: Tensor) -> Tensor:
            self.ran = k + 1
            return self._leaf(k)

        with ExitStack() as stack:
            for module in self.modules:
                register = module.register_forward_pre_hook
                stack.enter_context(hooked(register, enter, with_kwargs=True))
                after = module.register_forward_hook
                stack.enter_context(hooked(after, leave, always_call=True))
            return self.replays.run(leaf)

    def _lost(self, joins: Sequence[_Join]) -> set[_Join]:
        """Those whose outputs reach something else than the stream that was found."""
        known = [each for each in joins if each.found is not None and each.found.at is not None]
        if not known or not self._is_read_beside(known):
            return set()
        return {each for each in known if self._is_read_beside([each])}

    def _is_read_beside(self, joins: Sequence[_Join]) -> bool:
        """Whether anything differs behind the streams of layers once they are put back."""
        slots, before = self.slots, self.unchanged
        self.slots = {k: slots[k] for each in joins for k in each.members}
        there = {each.found.at: each for each in joins if each.found is not None}
        # with the stream a fused kernel returns a norm of it
        calls = {key[:3] for key in there if key is not None and not key[2]}
        beside: list[Tensor] = []

        def put_back(key: _Key, x: Tensor) -> None:
            if key in there or key[:3] in calls:
                real, each = self.real[key].value, there.get(key)
                if each is not None and each.found is not None:
                    mine = torch.stack([self.slots[k] for k in each.members]).any(0).to(x.device)
                    now, then = each.found.reading(x), each.found.reading(real)
                    beside.append((changed(now, then) & ~mine).any())
                x.detach().copy_(real)

        entering, output = self._replayed(put_back)
        self.slots = slots
        pairs = zip([*entering, output], before, strict=True)
        beside += [changed(x, y).any() for x, y in pairs]
        return any(map(bool, beside))

    # --- one join --------------------------------------------------------------------------

    def _find(self, each: _Join) -> None:
        """Find where layers join the stream together."""
        first, last = min(each.members), max(each.members)
        for key, (ran, value) in self.real.items():
            if not first < ran <= each.until or key not in self.noisy:
                continue
            for reading in self._readings(value, last):
                x, now = reading(value), reading(self.noisy[key].value)
                if now.shape != x.shape:
                    continue
                known = self._fits(each, x, now)
                if not known and key[2] and self._passes_gate(each, key, x, now, reading):
                    known = self._fits(each, x, now)
                if not known:
                    self._hop_together(each, key, x, now, reading)
                    continue
                if len(known) == len(each.members):
                    rest = x - _added(known, self.leaves, x)
                    if not _is_constant(rest, x):
                        stream = self._entered(rest, each.members, ran, reading)
                        if stream is not None:
                            each.found = _Found(known, stream, key, reading)
                            return
                        continue
                    each.apart = each.apart or known
                self._hop(each, key, x, reading, known)
                break
        if each.found is None:
            self._find_by_value(each)

    def _fits(self, each: _Join, x: Tensor, now: Tensor) -> dict[int, Way]:
        """The ways of those members of whose noise a tensor's change is a multiple."""
        found = {}
        for k in each.members:
            on = self.slots[k].to(x.device)
            if on.shape == x.shape[:2]:
                way = _fit(each.branches[k], _change(now, x, on), x)
                if way is not None:
                    found[k] = way
        return found

    def _entered(
        self, rest: Tensor, members: Sequence[int], ran: int, reading: _Reading
    ) -> Tensor | None:
        """The stream before layers, where it was seen entering a module, times a constant.

        Else it is the sum of two that were, or one without what another part of the block, beside
        the layers, adds to the sum.  None if it is none of these.
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
        for x in before:
            scale = (x * rest).sum() / x.square().sum()
            if _is_same(rest, x) or _is_same(rest, scale * x):
                return rest
            if _is_constant(rest - x, rest):  # a bias belongs to no token
                return x
        for x in before:
            if any(_is_same(rest - x, other) for other in before):
                return rest
            if any(_is_same(rest - x, part) for part in left):
                return x
        return None

    def _passes_gate(
        self, each: _Join, key: _Key, x: Tensor, now: Tensor, reading: _Reading
    ) -> bool:
        """Go on behind a product of a branch with what a module returned, which is frozen."""
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
                ways.append(_summed([one.steps, other.steps], [1, 1]) or ())
        for steps in ways:
            z = along(steps, self.leaves[k].to(x))
            if z.shape[-1] not in (width, 2 * width):
                continue
            for start in range(0, z.shape[-1] - width + 1, width):
                part = z[..., start : start + width]
                for gate in gates:
                    if bool((part * gate - x).abs().max() <= _limit(x)):
                        pick = torch.eye(z.shape[-1]).to(x)[:, start : start + width]
                        some = [] if z.shape[-1] == width else [Step(matrix=pick)]
                        change = _change(now, x, self.slots[k])
                        each.branches[k].append(_Branch([*steps, *some, Step(gate)], change))
                        return True
        return False

    def _hop(
        self, each: _Join, key: _Key, x: Tensor, reading: _Reading, known: Mapping[int, Way]
    ) -> None:
        """Go on behind a module that a branch enters, where that is a norm or linear."""
        module, call, enters, _ = key
        left = module, call, False, 0
        if not enters or left not in self.real or left not in self.noisy:
            return
        out, now = self.real[left].value, self.noisy[left].value
        is_small = next(module.children(), None) is None
        if out.shape[:-1] != self.real[key].value.shape[:-1] or not is_small:
            return
        out, now = reading(out), reading(now)
        if _is_same(out, x):  # dropout, identity
            return
        steps = _steps_of(module, x, out)
        if steps is None:
            return
        for i, (k, way) in enumerate(known.items()):  # a constant counts once
            mine = steps if i == 0 else [step._replace(bias=None) for step in steps]
            change = _change(now, out, self.slots[k])
            each.branches[k].append(_Branch([*way, *mine], change))

    def _hop_together(
        self, each: _Join, key: _Key, x: Tensor, now: Tensor, reading: _Reading
    ) -> None:
        """Go on behind a projection of what several layers became, side by side."""
        left, start, parts = (*key[:2], False, 0), 0, {}
        if not key[2] or len(each.members) < 2 or left not in self.noisy:
            return
        for k in each.members:
            width = self.leaves[k].shape[-1]
            part = slice(start, start + width)
            change = _change(now, x, self.slots[k])[..., part]
            way = _fit(each.branches[k], change, x[..., part])
            if way is None:
                return
            parts[k], start = (part, way), start + width
        out, after = reading(self.real[left].value), reading(self.noisy[left].value)
        steps = _steps_of(key[0], x, out) if start == x.shape[-1] else None
        if steps is None or steps[0].matrix is None or len(steps) > 1:
            return
        for i, (k, (part, way)) in enumerate(parts.items()):
            step = Step(matrix=steps[0].matrix[part], bias=None if i else steps[0].bias)
            change = _change(after, out, self.slots[k])
            each.branches[k].append(_Branch([*way, step], change))

    def _find_by_value(self, each: _Join) -> None:
        """Find a stream that no module was seen to enter, or of which only a norm was seen."""
        k, *others = each.members
        if not others and self._factored(each, k):
            return
        if not each.apart or self.layers[max(each.members)].has_stream:
            self._normed(each)

    def _factored(self, each: _Join, k: int) -> bool:
        """Find a sum of a tensor seen before and of the output behind a gate or norm."""
        y, change, on = self.leaves[k], each.branches[k][0].change, self.slots[k]
        for key, (ran, value) in self.real.items():
            if ran != k + 1 or key not in self.noisy:
                continue
            for reading in self._readings(value, k):
                x = reading(value)
                if x.shape != y.shape:
                    continue
                moved = _change(reading(self.noisy[key].value), x, on)
                for place, seen in self.real.items():
                    if seen.ran != k or not place[2] or seen.value.shape != value.shape:
                        continue
                    rest = reading(seen.value).to(x.device)
                    gate = (x - rest) / y.to(x.device)
                    held = (moved - gate[on.to(x.device)] * change).abs().max() <= _limit(moved, 64)
                    way: Way | None = [Step(gate)] if bool(held) else _norm_of(y.to(x.device), x - rest, None)
                    if way is not None and not _is_constant(x - rest, x):
                        each.found = _Found({k: way}, rest, key, reading)
                        return True
        return False

    def _normed(self, each: _Join) -> None:
        """Find a norm of a stream and of what layers add to it, as fused kernels leave it."""
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
            if not key[2] or _is_same(x, added):
                continue
            for _, rest in near:
                if rest is x or _is_constant(rest, rest):
                    continue
                if _norm_of(rest + added, x, None) is not None:
                    each.found = _Found(ways, rest, None, reading)
                    return

    def _readings(self, value: Tensor, k: int) -> Iterator[_Reading]:
        """Yield how a tensor may be laid out: by the operator's tokens, or as an output."""
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


def _floating(value: Any) -> Iterator[Tensor]:
    """Yield the floating sequences and maps in a nest of values."""
    if isinstance(value, Tensor):
        if value.is_floating_point() and value.dim() in (2, 3, 4) and value.numel():
            yield value
        return
    parts = value.values() if isinstance(value, Mapping) else value
    for part in parts if isinstance(value, tuple | list | Mapping) else ():
        yield from _floating(part)


# --- by value ------------------------------------------------------------------------------------


def _limit(x: Tensor, times: int = 1) -> Tensor:
    """What of a tensor is rounding; of norms and products so many times that, but of half numbers.

    Models in float64 have parts that round to float32.

    Args:
        x: the tensor.
        times: how many times.
    """
    units = 64 * times if x.dtype.itemsize > 2 else 4
    return units * _eps(x) * x.abs().max()


def _eps(x: Tensor) -> float:
    return max(torch.finfo(x.dtype).eps, torch.finfo(torch.float32).eps)


def _fit(branches: Sequence[_Branch], change: Tensor, x: Tensor) -> Way | None:
    """Steps to a tensor that changes by a number, or one per feature, times a branch's change.

    Args:
        branches: what an output became, the latest last.
        change: of the tensor, at the tokens with noise.
        x: the tensor.
    """
    if not change.numel():
        return None
    limit = torch.maximum(_limit(x), _limit(change)) / (4 if x.dtype.itemsize > 2 else 1)
    if not bool(change.abs().max() > 8 * limit):
        return None
    for steps, own in reversed(branches):
        if own.shape != change.shape:
            continue
        own = own.to(change)
        scale = float((own * change).sum() / own.square().sum())
        if math.isclose(scale, 1, abs_tol=max(1e-5, _eps(x))):
            scale = 1.0
        if bool((change - scale * own).abs().max() <= limit):
            return [*steps, *([] if scale == 1 else [Step(scale)])]
        gain = (own * change).sum(0) / own.square().sum(0)
        if len(own) > 1 and bool((change - gain * own).abs().max() <= limit):
            return [*steps, Step(gain)]
    return _sum_of(branches, change, limit)


def _sum_of(branches: Sequence[_Branch], change: Tensor, limit: Tensor) -> Way | None:
    """The step to a sum of branches that are linear, such as a projection and its adapter."""
    some = [branch for branch in branches if branch.change.shape == change.shape]
    if len(some) < 2:
        return None
    owns = torch.stack([branch.change.flatten() for branch in some], 1).to(change).double()
    flat = change.flatten()[:, None].double()
    weights = torch.linalg.lstsq(owns, flat).solution
    if not bool((owns @ weights - flat).abs().max() <= limit):
        return None
    return _summed([branch.steps for branch in some], weights.flatten().tolist())


def _summed(ways: Sequence[Way], weights: Sequence[float]) -> Way | None:
    """A weighted sum of ways that are linear behind the steps that all of them begin with."""
    shared = 0
    while all(len(way) > shared and way[shared] is ways[0][shared] for way in ways):
        shared += 1
    rests = [way[shared:] for way in ways]
    if not all(step.is_alike for rest in rests for step in rest):
        return None
    found = [step.matrix for rest in rests for step in rest if step.matrix is not None]
    if not found:
        return None
    eye = torch.eye(len(found[0]), dtype=found[0].dtype, device=found[0].device)
    bias = sum(
        w * along(rest, torch.zeros_like(eye[:1])) for w, rest in zip(weights, rests, strict=True)
    )
    matrix = sum(w * along(rest, eye) for w, rest in zip(weights, rests, strict=True))
    assert isinstance(matrix, Tensor) and isinstance(bias, Tensor)
    return [*ways[0][:shared], Step(matrix=matrix - bias, bias=bias[0])]


def _change(now: Tensor, before: Tensor, on: Tensor) -> Tensor:
    """The change of a tensor at some tokens (B, L), as exact as half numbers allow."""
    on = on.to(before.device)
    exact = torch.promote_types(before.dtype, torch.float32)
    return now[on].to(exact) - before[on].to(exact)


def _is_same(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and bool((x - y.to(x)).abs().max() <= _limit(x))


def _is_constant(rest: Tensor, x: Tensor) -> bool:
    """Whether nothing but a constant is left of a tensor."""
    first = rest[:1, :1] if rest.shape[:2].numel() > 1 else 0
    return bool((rest - first).abs().max() <= _limit(x))


def _steps_of(module: nn.Module, x: Tensor, out: Tensor) -> Way | None:
    """What a module did (B, L, E) as an affine map, or as a norm with frozen statistics."""
    width = x.shape[-1]
    try:
        bias = module(torch.zeros_like(x[:1, :1]))
        eye = torch.eye(width, dtype=x.dtype, device=x.device)
        matrix = (module(eye[None]) - bias)[0]
    except Exception:  # it takes something else
        return None
    bias = bias[0, 0]
    if matrix.dim() == 2 and bool((x @ matrix + bias - out).abs().max() <= _limit(out, 16)):
        return [Step(matrix=matrix, bias=bias)]
    return _norm_of(x, out, bias) if out.shape == x.shape else None


def _quotient(x: Tensor, y: Tensor, dim: int) -> Tensor:
    """The factors by which ``y`` is closest to ``x`` along a dimension."""
    return (x * y).sum(dim, keepdim=True) / y.square().sum(dim, keepdim=True).clamp_min(1e-300)


def _norm_of(x: Tensor, out: Tensor, bias: Tensor | None) -> Way | None:
    """Steps from ``x`` (B, L, E) to a norm of it, its statistics frozen; None if it is none."""
    if x.shape[:2].numel() < 2:  # of one token everything is a norm
        return None
    shift = 0.0 if bias is None else bias
    for is_centered in (False, True):
        inner = x - x.mean(-1, keepdim=True) if is_centered else x
        c, d = inner.double().flatten(0, 1), (out - shift).double().flatten(0, 1)
        most = c.abs().amin(-1).argmax()  # the token that tells the gain of every feature
        gain = d[most] / c[most].where(c[most] != 0, 1)
        for _ in range(3):  # of rank one: the statistics' size times the gain
            size = _quotient(d, c * gain, -1)
            gain = _quotient(d, c * size, 0)
        size = size.view(*x.shape[:2], 1)
        gain, size = gain.to(x), size.to(x)
        if bool((inner * gain * size + shift - out).abs().max() <= _limit(out, 16)):
            eye = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
            first = [Step(matrix=eye - 1 / x.shape[-1])] if is_centered else []
            return [*first, Step(size), Step(gain, bias=bias)]
    return None


# --- parts beside the mixers ---------------------------------------------------------------------


class Part(NamedTuple):
    """A tensor of a run: what entered or left a module, or the input itself.

    Attributes:
        module: the module; None of the input.
        call: the number of its call, from 1.
        enters: whether the tensor entered it.
        ran: how many mixers had run.
    """

    module: nn.Module | None
    call: int
    enters: bool
    ran: int


#: The input itself.
INPUT = Part(None, 0, False, 0)


class Place(NamedTuple):
    """How a part belongs to the layers.

    Attributes:
        given: which of its tokens each of the first layer's is (B, L), -1 for none; None if they
            are the same.
        mixers: the number of the last mixer that it reads, from 1; 0 for none.
    """

    given: Tensor | None
    mixers: int


def place(
    replays: Replays,
    stages: Sequence[Sequence[Layer]],
    given: Tensor | None,
    order: Tensor | None,
    parts: Sequence[Part],
    looked_up: Tensor | None,
) -> list[Place | None]:
    """Find the tokens of parts that act within tokens, and the layers that they read.

    Args:
        replays: of the run, whose layers are arranged.
        stages: the layers that act on one residual stream together.
        given: which token of the input each of the first layer's is (B, L); None if they are the
            same.
        order: which of the first layer's tokens each of the output's is (L,); None if they are the
            same.
        parts: the parts.
        looked_up: which of the explained ids each token of the input is (B, L'), -1 for none; None
            if they are the same.

    Returns:
        For each part its place; None for one of which it is not told.
    """
    layers, number = replays.layers, {layer: k for k, layer in enumerate(replays.layers)}
    embeddings, shifted = replays.beginning.looked_up, replays.beginning.shifted
    # one that reads the token before returns in replays what it returned
    parts = [p._replace(enters=True) if p.module in shifted else p for p in parts]
    replays.root = replays.start if embeddings is None else embeddings
    batch, tokens = replays.leaf(0).shape[:2]
    own = torch.arange(tokens, device="cpu").expand(batch, -1)
    known = [None, order, *(layer.order for layer in layers)]
    orders = [own[0] if each is None else each.cpu() for each in known]
    readings = [x.argsort().expand(batch, -1) for x in orders]
    readings += [x.flip(0).argsort().expand(batch, -1) for x in orders]
    if given is not None:
        readings.append(given.cpu())
    kept: list[Tensor] = []
    for each in readings:
        if not any(torch.equal(each, one) for one in kept):
            kept.append(each)
    generator = torch.Generator("cpu").manual_seed(_SEED)

    def run(on: Mapping[int, Tensor], root: bool) -> tuple[Tensor, list[Tensor | None]]:
        """What the first layer and the parts read, with noise at tokens of layers (B, L)."""

        def leaf(k: int, _: Tensor) -> Tensor:
            at, turn = on.get(k), layers[k].order
            if at is None:
                return replays.leaf(k).clone()
            at = at if turn is None else at.index_select(1, turn.to(at.device))
            return replays.noisy(replays.leaf(k), at, k)

        def begin(x: Tensor) -> Tensor:
            begun.append(torch.rand(x.shape[:2], generator=generator, device="cpu") < 0.5)
            return replays.noisy(x, begun[-1])

        with _first_tensors(parts) as found, torch.no_grad():
            entering, _ = replays.run(leaf, begin if root else None)
        return entering[0], [found.get(p[:3]) for p in parts]

    begun: list[Tensor] = []
    first, calm = run({}, False)

    def moved(at: int, x: Tensor | None) -> Tensor | None:
        """Where a part is not what it was (B, L')."""
        if parts[at].module is None:
            if embeddings is not None or looked_up is None:
                return begun[-1]
            own = looked_up.cpu()  # noise is at the ids, of which these are made
            return begun[-1].gather(1, own.clamp_min(0)) & (own >= 0)
        before = calm[at]
        if x is None or before is None or x.shape != before.shape:
            return None
        if x.dim() < 2 or x.shape[:-1].numel() % batch:
            return None
        return changed(*(y.reshape(batch, -1, y.shape[-1]) for y in (x, before))).cpu()

    fitting = [[*kept] for _ in parts]
    for _ in range(_SUBSETS):
        on = torch.rand((batch, tokens), generator=generator, device="cpu") < 0.5
        entered, now = run(dict.fromkeys(range(len(layers)), on), True)
        arrived = changed(entered, first).cpu()
        for at, x in enumerate(now):
            met = moved(at, x)
            fitting[at] = [
                reading
                for reading in fitting[at]
                if met is not None and _agrees(met, reading, (arrived, on, arrived | on))
            ]
    stage_of = {number[layer]: i for i, stage in enumerate(stages) for layer in stage}
    reads = [False] * len(parts)
    for start in range(0, len(stages), tokens):
        some = range(start, min(start + tokens, len(stages)))
        slots = own.clone() % len(some) + start
        on_stages = {k: slots == i for k, i in stage_of.items() if i in some}
        _, now = run(on_stages, False)
        for at, x in enumerate(now):
            ran = parts[at].ran
            met = moved(at, x) if ran else None
            if met is None or not fitting[at] or stage_of[ran - 1] not in some:
                continue
            reading = fitting[at][0]
            mine = met.gather(1, reading.clamp_min(0)) & (reading >= 0)
            reads[at] = bool((mine & (slots == stage_of[ran - 1])).any())
    out: list[Place | None] = []
    for at, (_, _, _, ran) in enumerate(parts):
        if not fitting[at]:
            out.append(None)
            continue
        stage = [number[layer] for layer in stages[stage_of[ran - 1]]] if ran else [0]
        found = fitting[at][0]
        out.append(Place(None if found is kept[0] else found, ran if reads[at] else stage[0]))
    return out


#: So many draws of tokens tell the orders apart in which parts may read them.
_SUBSETS = 3


def _agrees(met: Tensor, reading: Tensor, expected: Sequence[Tensor]) -> bool:
    """Whether a part changed at the tokens that were expected of it, read in some order."""
    if int(reading.max()) >= met.shape[1]:
        return False
    mine, there = met.gather(1, reading.clamp_min(0)), reading >= 0
    return any(bool(((mine == each) | ~there).all()) for each in expected)


@contextmanager
def _first_tensors(parts: Sequence[Part]) -> Iterator[dict[tuple[Any, ...], Tensor]]:
    """Keep what enters and leaves modules in the run inside the ``with``, at each call."""
    found: dict[tuple[Any, ...], Tensor] = {}
    wanted, calls = {part[:3] for part in parts}, Counter[nn.Module]()
    running: dict[nn.Module, list[int]] = {}

    def note(key: tuple[Any, ...], value: Any) -> None:
        if key in wanted:
            x = swap_first(value, lambda x: x)[1]
            if x is not None:
                found[key] = x.detach().clone()

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        calls[module] += 1
        running.setdefault(module, []).append(calls[module])
        note((module, calls[module], True), (args, kwargs))

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        note((module, running[module].pop(), False), output)

    with ExitStack() as stack:
        for module in {part.module for part in parts if part.module is not None}:
            register = module.register_forward_pre_hook
            stack.enter_context(hooked(register, enter, with_kwargs=True))
            stack.enter_context(hooked(module.register_forward_hook, leave, always_call=True))
        yield found
