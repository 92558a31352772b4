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
    likely_relations,
    norm_of,
    rounding_of,
    rows_at,
    steps_of,
    weighted_sum,
)
from .way import AffineStep, Way, along

#: A function that rearranges a tensor to (B, L, E), in the token order of a layer's operator.
_Reading = Callable[[Tensor], Tensor]

#: Size of the noise relative to the largest value nearby, so that the noise of a small branch
#: exceeds the rounding of a large stream.
_NOISE = 4
#: Bytes of tensors that one replay may keep. If more are needed, fewer layers share a replay.
_REPLAY_BYTES = 2**28
#: Typical number of stream-sized tensors at the modules between two mixers.
_TENSORS_PER_LAYER = 12
_SEED = 2_718_281


class _Key(NamedTuple):
    """Key of a tensor in a run: a module's input or output, and its index among several tensors."""

    module: nn.Module
    call: int
    enters: bool
    nth: int


class _SeenTensor(NamedTuple):
    """A tensor that entered or left a module, and the number of mixers that ran before."""

    ran: int
    value: Tensor


class _Slot(NamedTuple):
    """The tokens with noise in a layer's output, as a mask (B, L) and as indices into B * L."""

    on: Tensor
    at: Tensor


class _StreamSum(NamedTuple):
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
        bare_ways: the steps from each layer to a sum of only the outputs, without the stream.
        sum: the sum with the stream; None until found.
    """

    members: Sequence[int]
    branches: dict[int, list[Branch]]
    until: int
    bare_ways: dict[int, Way] = field(default_factory=dict)
    sum: _StreamSum | None = None


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
        self, replays: Replays, stages: Sequence[Sequence[Layer]], output_order: Tensor | None
    ) -> None:
        self.replays, self.layers = replays, replays.layers
        index_of = {layer: k for k, layer in enumerate(self.layers)}
        self.stages = [[index_of[layer] for layer in stage] for stage in stages]
        #: Each layer's recorded output (B, L, E), in its operator's order of tokens.
        self.leaves = [x.in_order(replays.leaf(k)) for k, x in enumerate(self.layers)]
        #: The modules outside mixers, whose inputs and outputs are compared between replays.
        self.modules = list(replays.outside)
        #: Whether tokens stay separate, so that each layer can have noise at its own tokens.
        self.is_chain = all(x.stage is not None and x.map is None for x in self.layers)
        #: The orders of tokens in the run, to match a tensor with a layer.
        self.orders: list[Tensor] = []
        for order in (*(layer.order for layer in self.layers), output_order):
            if order is not None and not any(torch.equal(order, x) for x in self.orders):
                self.orders.append(order)
        #: The layers' inputs and the model's output in a replay without noise.
        self.calm_inputs: list[Tensor] = []
        #: Tensors at modules in a replay without and with noise.
        self.calm: dict[_Key, _SeenTensor] = {}
        self.noisy: dict[_Key, _SeenTensor] = {}
        #: The tokens at which each layer has noise; without layers there is none.
        self.slots: dict[int, _Slot] = {}
        #: Layers' outputs with noise at all tokens, by layer index.
        self.loud: dict[int, Tensor] = {}

    def find(self) -> None:
        """Find the sums that add outputs to the stream, by replays with and without noise.

        This calls each layer's :meth:`.Layer.join` with the stream and the steps to the stream, or
        with None if they were not found.
        """
        for group in self._groups_of_stages():
            # from the first mixer of the group until the mixers of the next stage have run
            wanted = range(min(group[0]), max(group[-1]) + 2 + self._next_stage_size(group[-1]))
            self.slots, self.loud, self.calm, self.noisy = {}, {}, {}, {}
            self.calm = self._record_tensors(wanted)  # no slot yet: no noise
            self.slots = self._assign_slots([k for stage in group for k in stage])
            # without tensors of another size: with noise, an expert may be given more tokens
            self.noisy = {
                key: seen
                for key, seen in self._record_tensors(wanted).items()
                if key in self.calm and seen.value.shape == self.calm[key].value.shape
            }
            joins = [join for stage in group for join in self._split_into_joins(stage)]
            for join in joins:
                self._find_sum(join)
            lost = self._joins_read_elsewhere(joins)
            for join in joins:
                if join.sum is not None and join not in lost:
                    for k, way in join.sum.ways.items():
                        self.layers[k].join(join.sum.stream, way)
                elif join.bare_ways and not self.layers[max(join.members)].has_stream:
                    # no stream is added, but the way was seen
                    for k, way in join.bare_ways.items():
                        self.layers[k].join(None, way)
                else:
                    for k in join.members:
                        self.layers[k].join(None, None)
        self.calm, self.noisy = {}, {}

    def _next_stage_size(self, stage: Sequence[int]) -> int:
        """Return the number of layers in the next stage, or 1 if ``stage`` is the last."""
        later_stages = [other for other in self.stages if other[0] > stage[-1]]
        return len(later_stages[0]) if later_stages else 1

    def _groups_of_stages(self) -> Iterator[list[list[int]]]:
        """Yield lists of stages small enough, in tokens and memory, to share the same replays."""
        tokens = self.leaves[0].shape[1]
        if not self.is_chain:
            yield from ([stage] for stage in self.stages)
            return
        largest = max(map(len, self.stages))
        # each layer of a group needs tokens of its own: two, to fit a factor for each feature
        bytes_per_stage = self.leaves[0].nbytes * _TENSORS_PER_LAYER * largest
        count = min(tokens // largest // 2, _REPLAY_BYTES // bytes_per_stage)
        for start in range(0, len(self.stages), max(1, count)):  # a stage too large runs alone
            yield self.stages[start : start + max(1, count)]

    def _assign_slots(self, layers: Sequence[int]) -> dict[int, _Slot]:
        """Assign the tokens to layers at random; each layer gets noise only at these tokens."""
        batch, tokens = self.leaves[layers[0]].shape[:2]
        generator = torch.Generator("cpu").manual_seed(_SEED)
        random_ranks = torch.rand((batch, tokens), generator=generator, device="cpu").argsort(1)
        slots = {}
        for i, k in enumerate(layers):
            on, device = random_ranks % len(layers) == i, self.leaves[k].device
            slots[k] = _Slot(on.to(device), on.flatten().nonzero()[:, 0].to(device))
        return slots

    def _split_into_joins(self, stage: Sequence[int]) -> list[_Join]:
        """Split a stage into groups of layers whose outputs one sum adds to the residual stream.

        A layer that feeds later mixers of its stage has a sum of its own before them.
        """
        feeders = [k for k in stage if self.layers[k].joins == "feeds"]
        writers = [k for k in stage if k not in feeders] or list(stage)
        groups = [[k] for k in feeders if k not in writers]
        # nothing is added to the output of a single layer without a residual connection
        if self.layers[writers[-1]].has_stream or len(writers) > 1:
            groups.append(writers)
        joins = []
        for members in groups:
            branches = {}
            for k in members:
                own = self.layers[k].in_order(self._noisy_output(k))
                branches[k] = [Branch((), change_at(own, self.leaves[k], self.slots[k].at))]
            until = members[0] + 1 if members is not writers else stage[-1] + 1
            joins.append(_Join(members, branches, until + self._next_stage_size(stage)))
        return joins

    # --- replays ---------------------------------------------------------------------------

    def _noisy_output(self, k: int) -> Tensor:
        """Return layer k's recorded output with noise at all tokens, in the module's layout."""
        if k not in self.loud:
            leaf = self.replays.leaf(k)
            nearby = [seen.value for seen in self.calm.values() if seen.ran == k]
            nearby_sizes = [x.abs().max().to(leaf) for x in nearby if x.numel() == leaf.numel()]
            noise_size = _NOISE * torch.stack([leaf.abs().max(), *nearby_sizes]).max()
            noise_size = noise_size.clamp(max=torch.finfo(leaf.dtype).max / 64)  # stays finite
            generator = torch.Generator("cpu").manual_seed(_SEED + k)
            noise = torch.randn(leaf.shape[1:], generator=generator, device="cpu").to(leaf)
            self.loud[k] = leaf + noise * (noise_size + (noise_size == 0))  # 1 for zeros
        return self.loud[k]

    def _leaf(self, k: int) -> Tensor:
        """Return layer k's recorded output with noise at its own tokens, in the module's layout."""
        recorded, slot = self.replays.leaf(k), self.slots.get(k)
        if slot is None:
            return recorded.clone()  # the model may write to it
        (on, at), loud, order = slot, self._noisy_output(k), self.layers[k].order
        if len(at) == on.numel():  # the only layer of its group
            return loud.clone()
        on = on if order is None else on.index_select(1, order.to(on.device))
        return torch.where(on[..., None], loud, recorded)

    def _record_tensors(self, wanted: range) -> dict[_Key, _SeenTensor]:
        """Replay the run once, and return the floating tensors that enter and leave modules.

        A tensor is kept only if the number of mixers that have run is in ``wanted``. The replay
        has noise at :attr:`slots`; without slots it sets :attr:`calm_inputs`.
        """
        seen_tensors: dict[_Key, _SeenTensor] = {}
        # the latest tensor and its copy: a block's output enters the next one and its norm
        latest: tuple[Callable[[], Any], int, Tensor] = (lambda: None), 0, self.leaves[0]

        def record(key: _Key, x: Tensor) -> None:
            """Store a copy of ``x``; several keys share one copy of the same unchanged tensor."""
            nonlocal latest
            if self.replays.ran in wanted:
                version = -1 if x.is_inference() else x._version  # -1: changes are not counted
                find, copied_version, _ = latest
                if find() is not x or copied_version != version or version < 0:
                    latest = weakref.ref(x), version, x.detach().clone()
                seen_tensors[key] = _SeenTensor(self.replays.ran, latest[2])

        inputs = self._replay(record)
        if not self.slots:
            self.calm_inputs = inputs
        return seen_tensors

    def _replay(self, receive: Callable[[_Key, Tensor], None]) -> list[Tensor]:
        """Replay with noise at each layer's tokens; pass modules' tensors to ``receive``.

        Return the layers' inputs and the output.
        """
        inputs: list[Tensor] = []

        def note(module: nn.Module, call: int, enters: bool, value: Any) -> None:
            for i, x in enumerate(sequences_in(value)):
                receive(_Key(module, call, enters, i), x)

        def leaf(k: int, entering: Tensor) -> Tensor:
            inputs.append(entering)
            return self._leaf(k)

        with observing(self.modules, note):
            output = self.replays.run(leaf)
        return [*inputs, output]

    def _joins_read_elsewhere(self, joins: Sequence[_Join]) -> set[_Join]:
        """Return the joins whose outputs the model also reads outside of the residual stream."""
        with_sum = [join for join in joins if join.sum is not None and join.sum.at is not None]
        if not with_sum or not self._is_read_elsewhere(with_sum):  # usually one replay for all
            return set()
        return {join for join in with_sum if self._is_read_elsewhere([join])}

    def _is_read_elsewhere(self, joins: Sequence[_Join]) -> bool:
        """Return True if noise still changes the run when the residual streams are restored.

        A replay has noise in the outputs of ``joins`` alone, and overwrites each stream that was
        found with its value without noise. Then nothing may change: not the output, not the stream
        at tokens without noise, and no layer's input, except for a norm of the stream that the
        layer read before the stream was seen.
        """
        slots, calm_inputs = self.slots, self.calm_inputs
        self.slots = {k: slots[k] for join in joins for k in join.members}
        joined_at = {join.sum.at: join for join in joins if join.sum is not None}
        # a fused kernel returns the stream and a norm of it: all outputs of its call are restored
        calls = {key[:3] for key in joined_at if key is not None and not key.enters}
        changes: list[Tensor] = []  # one boolean for each comparison, read together at the end
        # streams with noise, by the later layers that ran before the stream was seen
        noisy_streams: dict[int, Tensor] = {}

        def restore(key: _Key, x: Tensor) -> None:
            """Overwrite a found stream ``x`` by its value without noise; note other changes."""
            if key in joined_at or key[:3] in calls:
                calm, join = self.calm[key].value, joined_at.get(key)
                if join is not None and join.sum is not None:
                    noisy = torch.stack([self.slots[k].on for k in join.members]).any(0)
                    stream, calm_stream = join.sum.reading(x), join.sum.reading(calm)
                    changes.append((changed(stream, calm_stream) & ~noisy.to(x.device)).any())
                    if ran := range(max(join.members) + 1, self.replays.ran):
                        noisy_streams.update(dict.fromkeys(ran, stream.clone()))
                x.detach().copy_(calm)

        inputs = self._replay(restore)
        self.slots = slots
        for k, (x, y) in enumerate(zip(inputs, calm_inputs, strict=True)):
            stream = noisy_streams[k].to(x.device) if k in noisy_streams else None
            if stream is None or stream.shape != x.shape or norm_of(stream, x, None) is None:
                changes.append(changed(x, y).any())
        return bool(torch.stack([x.to(self.leaves[0].device) for x in changes]).any())

    # --- one join --------------------------------------------------------------------------

    def _find_sum(self, join: _Join) -> None:
        """Search the tensors after a join's layers for the sum, and set ``join.sum``.

        A tensor x that changes like the outputs is the sum if ``rest``, x without the outputs, is
        the stream. Else x is a branch, and the module that it enters may give a further branch.
        """
        first, last = min(join.members), max(join.members)
        for key, (ran, value) in self.calm.items():
            if not first < ran <= join.until or key not in self.noisy:
                continue
            for reading in self._readings(value, last):
                x, noisy = reading(value), reading(self.noisy[key].value)
                ways = self._ways_to(join, x, noisy)
                if not ways and key.enters and self._append_gated(join, key, x, noisy, reading):
                    ways = self._ways_to(join, x, noisy)
                if not ways:  # unless x concatenates branches, try the next reading
                    self._follow_concatenated(join, key, x, noisy, reading)
                    continue
                if len(ways) == len(join.members):
                    rest = x - _sum_of_outputs(ways, self.leaves, x)
                    if not is_constant(rest, x):
                        stream = self._stream_before(rest, join.members, ran, reading)
                        if stream is not None:
                            join.sum = _StreamSum(ways, stream, key, reading)
                            return
                        continue
                    join.bare_ways = join.bare_ways or ways  # x sums the outputs alone
                self._follow_module(join, key, x, reading, ways)
                break
        if join.sum is None:
            self._find_by_value(join)

    def _ways_to(self, join: _Join, x: Tensor, noisy: Tensor) -> dict[int, Way]:
        """Return steps to ``x`` from each layer whose noise explains the change in ``noisy``."""
        ways = {}
        for k in join.members:
            on, at = self.slots[k]
            if on.shape == x.shape[:2]:
                way = fit(join.branches[k], change_at(noisy, x, at), x)
                if way is not None:
                    ways[k] = way
        return ways

    def _stream_before(
        self, rest: Tensor, members: Sequence[int], ran: int, reading: _Reading
    ) -> Tensor | None:
        """Return the residual stream before the layers, if tensors of the run explain ``rest``.

        ``rest``, the sum without the layers' outputs, may be a multiple of a tensor, a tensor plus
        a constant, or a sum of two tensors. In all other cases return None: ``rest`` may then be
        a part of the block, not the stream.
        """
        first = self.layers[min(members)]
        block, is_inside = first.call.block, False  # True from the block's entry on
        candidates = [first.in_order(first.call.hidden_states)]
        candidates = [x.to(rest.device) for x in candidates if x.shape == rest.shape]
        branch_outputs: list[Tensor] = []
        for key, (ran_before, value) in self.calm.items():
            if min(members) <= ran_before <= ran and value.numel() == rest.numel():
                x = reading(value).to(rest.device)
                if x.shape != rest.shape:
                    continue
                if ran_before == min(members) and key.enters:
                    candidates.append(x)
                is_block = key.enters and key.module is block  # tensors come in the run's order
                is_inside = is_inside or ran_before > min(members) or is_block
                if is_inside and not key.enters:
                    branch_outputs.append(x)
        # relations are likely from a few tokens: check each at all tokens
        for kind, x, other in likely_relations(rest, candidates, branch_outputs):
            if kind == "scaled":
                scale = (x * rest).sum() / x.square().sum()  # by least squares
                if is_same(rest, x) or is_same(rest, scale * x):
                    return rest
            elif kind == "shifted":
                if is_constant(rest - x, rest):  # a bias belongs to no token
                    return x
            elif is_same(rest - x, other):  # "part": other is another branch of the block
                return rest if kind == "sum" else x
        return None

    def _append_gated(
        self, join: _Join, key: _Key, x: Tensor, noisy: Tensor, reading: _Reading
    ) -> bool:
        """Add ``x`` to the branches if ``x`` is a branch times a gate, an output of some module.

        Its change is no multiple of the branch's change, since the gate differs between tokens.
        """
        if len(join.members) > 1:
            return False
        (ran, value), width, (k,) = self.calm[key], x.shape[-1], join.members
        gates = [
            reading(gate.value).to(x.device)
            for gate_key, gate in self.calm.items()
            if not gate_key.enters and gate.ran == ran and gate.value.shape == value.shape
        ]
        # the steps to modules' outputs: without branch 0, the mixer's own output
        ways = [branch.steps for branch in join.branches[k][:0:-1]]  # latest first
        for one, other in itertools.combinations(join.branches[k][1:], 2):
            if one.change.shape == other.change.shape:  # a projection and its LoRA adapter
                ways.append(weighted_sum([one.steps, other.steps], [1, 1]) or ())
        for steps in ways:
            z = along(steps, self.leaves[k].to(x))
            if z.shape[-1] not in (width, 2 * width):
                continue
            for start in range(0, z.shape[-1] - width + 1, width):  # z or its halves
                z_part = z[..., start : start + width]
                for gate in gates:
                    if bool((z_part * gate - x).abs().max() <= rounding_of(x)):
                        selection = torch.eye(z.shape[-1]).to(x)[:, start : start + width]
                        to_half = [] if z.shape[-1] == width else [AffineStep(matrix=selection)]
                        change = change_at(noisy, x, self.slots[k].at)
                        way = [*steps, *to_half, AffineStep(gate)]
                        join.branches[k].append(Branch(way, change))
                        return True
        return False

    def _follow_module(
        self, join: _Join, key: _Key, x: Tensor, reading: _Reading, ways: Mapping[int, Way]
    ) -> None:
        """If a branch enters a norm or linear module, add the module's output to the branches."""
        module, _, enters, _ = key
        output_key = key._replace(enters=False, nth=0)
        if not enters or output_key not in self.calm or output_key not in self.noisy:
            return
        out, noisy_out = self.calm[output_key].value, self.noisy[output_key].value
        has_parts = next(module.children(), None) is not None
        if out.shape[:-1] != self.calm[key].value.shape[:-1] or has_parts:
            return
        out, noisy_out = reading(out), reading(noisy_out)
        if is_same(out, x):  # dropout, identity
            return
        steps = steps_of(module, x, out)
        if steps is None:
            return
        for i, (k, way) in enumerate(ways.items()):  # the bias belongs to the first layer's way
            own_steps = steps if i == 0 else [step._replace(bias=None) for step in steps]
            change = change_at(noisy_out, out, self.slots[k].at)
            join.branches[k].append(Branch([*way, *own_steps], change))

    def _follow_concatenated(
        self, join: _Join, key: _Key, x: Tensor, noisy: Tensor, reading: _Reading
    ) -> None:
        """Add a projection's output to the branches if its input concatenates branches.

        Each layer's way then has the rows of the projection's matrix that read this layer.
        """
        output_key, start, inputs = key._replace(enters=False, nth=0), 0, {}
        if not key.enters or len(join.members) < 2 or output_key not in self.noisy:
            return
        for k in join.members:
            width = self.leaves[k].shape[-1]
            columns = slice(start, start + width)
            change = change_at(noisy, x, self.slots[k].at)[..., columns]
            way = fit(join.branches[k], change, x[..., columns])
            if way is None:
                return
            inputs[k], start = (columns, way), start + width
        out, noisy_out = reading(self.calm[output_key].value), reading(self.noisy[output_key].value)
        steps = steps_of(key.module, x, out) if start == x.shape[-1] else None
        if steps is None or steps[0].matrix is None or len(steps) > 1:
            return
        for i, (k, (columns, way)) in enumerate(inputs.items()):
            bias = None if i else steps[0].bias  # it belongs to the first layer's way
            step = AffineStep(matrix=steps[0].matrix[columns], bias=bias)
            change = change_at(noisy_out, out, self.slots[k].at)
            join.branches[k].append(Branch([*way, step], change))

    def _find_by_value(self, join: _Join) -> None:
        """Search for a residual stream that enters no module, or that only enters a fused norm.

        Before or after the sum the output may pass a gate or norm that is no module.
        """
        k, *others = join.members
        if not others and self._find_factored(join, k):
            return
        if not join.bare_ways or self.layers[max(join.members)].has_stream:
            self._find_normed(join)

    def _find_factored(self, join: _Join, k: int) -> bool:
        """Search for x = rest + gate * y, or x = rest + norm(y), with layer k's output y.

        Return True if such a tensor x, and a tensor ``rest`` before layer k, were found.
        """
        y, change, at = self.leaves[k], join.branches[k][0].change, self.slots[k].at
        for key, (ran, value) in self.calm.items():
            if ran != k + 1 or key not in self.noisy:
                continue
            for reading in self._readings(value, k):
                x = reading(value)
                if x.shape != y.shape:
                    continue
                x_change = change_at(reading(self.noisy[key].value), x, at)
                for other_key, tensor in self.calm.items():
                    if tensor.ran != k or not other_key.enters or tensor.value.shape != value.shape:
                        continue
                    rest = reading(tensor.value).to(x.device)
                    gate = (x - rest) / y.to(x.device)  # fits any tensors: test it on the noise
                    error = (x_change - rows_at(gate, at) * change).abs().max()
                    is_gate = bool(error <= rounding_of(x_change, 64))
                    way = [AffineStep(gate)] if is_gate else norm_of(y.to(x.device), x - rest, None)
                    if way is not None and not is_constant(x - rest, x):
                        join.sum = _StreamSum({k: way}, rest, key, reading)
                        return True
        return False

    def _find_normed(self, join: _Join) -> None:
        """Search for norm(stream + outputs), which add-and-norm kernels return without the sum."""
        ways = {k: join.branches[k][-1].steps for k in join.members}
        outputs = [along(way, self.leaves[k]) for k, way in ways.items()]
        if any(x.shape != outputs[0].shape for x in outputs):
            return
        added = sum(outputs[1:], outputs[0])
        reading = next(self._readings(added, max(join.members)))
        nearby = [
            (key, reading(tensor.value))
            for key, tensor in self.calm.items()
            if tensor.ran >= min(join.members) and tensor.value.shape == added.shape
        ]
        for key, x in nearby:  # x may be the norm, and ``rest`` the stream
            if not key.enters or is_same(x, added):
                continue
            for _, rest in nearby:
                if rest is x or is_constant(rest, rest):
                    continue
                if norm_of(rest + added, x, None) is not None:
                    join.sum = _StreamSum(ways, rest, None, reading)
                    return

    def _readings(self, value: Tensor, k: int) -> Iterator[_Reading]:
        """Yield functions that may rearrange ``value`` to the token order of layer k's operator."""
        layer = self.layers[k]
        batch, tokens, _ = self.leaves[k].shape
        if value.shape[0] == batch and value.numel() == batch * tokens * value.shape[-1]:
            yield lambda x: x.reshape(batch, tokens, -1)
            if value.shape[:2] == (batch, tokens):  # perhaps in a layer's order of tokens
                for order in self.orders:
                    positions = order.argsort().to(value.device)
                    yield functools.partial(torch.index_select, dim=1, index=positions)
        elif value.dim() == 2 and len(value) == batch * tokens:  # as experts read tokens
            yield lambda x: x.reshape(batch, tokens, -1)
        elif value.dim() == 4 and len(value) == batch and value.shape[2:].numel() == tokens:
            yield lambda x: x.flatten(2).transpose(1, 2)  # images (B, E, H, W)
        if layer.map is not None and value.shape[:-1] == layer.output.shape[:-1]:
            yield layer.in_order


def _sum_of_outputs(ways: Mapping[int, Way], leaves: Sequence[Tensor], like: Tensor) -> Tensor:
    """Return the sum of layers' outputs (B, L, E), after their steps to the stream."""
    outputs = [along(way, leaves[k].to(like)) for k, way in ways.items()]
    return sum(outputs[1:], outputs[0])
