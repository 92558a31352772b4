"""Find by replays on which tokens and layers a module's input or output depends."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .hooks import first_floating, observing
from .layer import Layer
from .replays import Replays, changed

#: Smallest and largest number of random token sets that are tried. More sets are tried as long as
#: several token orders fit, as with few tokens, or with orders that differ at a single token.
_FEWEST, _MOST = 3, 8
_SEED = 2_718_281


class Part(NamedTuple):
    """A tensor of a run: a module's input or output, or the run's input.

    Attributes:
        module: the module; None for the run's input.
        call: the number of the module's call, from 1.
        enters: True for an input of the module, False for an output.
        ran: the number of mixers that had run before.
    """

    module: nn.Module | None
    call: int
    enters: bool
    ran: int

    @property
    def key(self) -> tuple[Any, ...]:
        """The module, the call and ``enters``, which identify the tensor."""
        return self[:3]


#: The run's input, as a :class:`Part`.
INPUT = Part(None, 0, False, 0)


class Place(NamedTuple):
    """The tokens and the layers on which a :class:`Part` depends.

    Attributes:
        given: for each token of the first layer the index of this token in the tensor (B, L), or
            -1 if the tensor lacks the token; None if all indices are the same.
        mixers: the number of the last mixer on which the tensor depends, from 1; 0 for none.
    """

    given: Tensor | None
    mixers: int


def places_of_parts(
    replays: Replays,
    stages: Sequence[Sequence[Layer]],
    given: Tensor | None,
    order: Tensor | None,
    parts: Sequence[Part],
    looked_up: Tensor | None,
) -> list[Place | None]:
    """Find the tokens and layers on which tensors of a run depend, if these do not mix tokens.

    Args:
        replays: the replays of the run, whose layers are already arranged.
        stages: groups of layers; the layers of a group read the same residual stream.
        given: for each token of the first layer the token's index in the input (B, L); None if
            the same.
        order: for each output token the token's index in the first layer (L,); None if the same.
        parts: the keys of the tensors.
        looked_up: for each token of the input the position of its explained id (B, L'), -1 for
            none; None if the positions are the same.

    Returns:
        One :class:`Place` for each part; None for a part whose tokens or layers were not found.
    """
    layers, index_of = replays.layers, {layer: k for k, layer in enumerate(replays.layers)}
    embeddings, shifted = replays.beginning.looked_up, replays.beginning.shifted
    # a module that reads the previous token returns its recorded output in replays: use its input
    parts = [p._replace(enters=True) if p.module in shifted else p for p in parts]
    replays.root = replays.start if embeddings is None else embeddings
    batch, tokens = replays.leaf(0).shape[:2]
    indices = torch.arange(tokens, device="cpu").expand(batch, -1)
    known_orders = [None, order, *(layer.order for layer in layers)]
    orders = [indices[0] if x is None else x.cpu() for x in known_orders]
    # a reading: for each token of the first layer its index in a part; the identity comes first.
    # A part may have the tokens of any layer, of the output or of the input, or their reverse
    candidates = [x.argsort().expand(batch, -1) for x in orders]
    candidates += [x.flip(0).argsort().expand(batch, -1) for x in orders]
    if given is not None:
        candidates.append(given.cpu())
    readings: list[Tensor] = []  # the candidates, each once
    for candidate in candidates:
        if not any(torch.equal(candidate, reading) for reading in readings):
            readings.append(candidate)
    generator = torch.Generator("cpu").manual_seed(_SEED)

    def random_half(shape: torch.Size) -> Tensor:
        """Return a mask (B, L) of a random half of each example's tokens."""
        return torch.rand(shape, generator=generator, device="cpu").argsort(1) < (shape[1] + 1) // 2

    def replay(masks: Mapping[int, Tensor], root: bool) -> tuple[Tensor, list[Tensor | None]]:
        """Replay with noise in layers' outputs at ``masks`` (B, L), and if ``root`` in the root.

        Return the first layer's input and the values of the parts.
        """
        first_inputs: list[Tensor] = []

        def leaf(k: int, x: Tensor) -> Tensor:
            if k == 0:
                first_inputs.append(x)
            mask, order = masks.get(k), layers[k].order
            if mask is None:
                return replays.leaf(k).clone()
            mask = mask if order is None else mask.index_select(1, order.to(mask.device))
            return replays.noisy(replays.leaf(k), mask, k)

        def noisy_root(x: Tensor) -> Tensor:
            """Add noise to a random half of the root's tokens, and append it to ``root_masks``."""
            root_masks.append(random_half(x.shape[:2]))
            return replays.noisy(x, root_masks[-1])

        with _values_recorded(parts) as values, torch.no_grad():
            replays.run(leaf, noisy_root if root else None)
        return first_inputs[0], [values.get(part.key) for part in parts]

    root_masks: list[Tensor] = []
    calm_input, calm_values = replay({}, False)

    def changed_tokens(i: int, x: Tensor | None) -> Tensor | None:
        """Return a mask (B, L') of the tokens at which ``x``, the value of ``parts[i]``, changed.

        Return None if ``x`` was not computed, or has no tokens that divide by example.
        """
        if parts[i].module is None:  # the run's input: noise is where the last replay put it
            if embeddings is not None or looked_up is None:
                return root_masks[-1]
            ids = looked_up.cpu()  # the noise is at explained ids: move it to the input's tokens
            return root_masks[-1].gather(1, ids.clamp_min(0)) & (ids >= 0)
        calm = calm_values[i]
        if x is None or calm is None or x.shape != calm.shape:
            return None
        if x.dim() < 2 or x.shape[:-1].numel() % batch:
            return None
        return changed(*(y.reshape(batch, -1, y.shape[-1]) for y in (x, calm))).cpu()

    # readings that fit all replays so far, with the source of noise: 0 root, 1 layers, 2 both
    fitting = [list(itertools.product(readings, range(3))) for _ in parts]
    for draw in range(_MOST):  # until one reading is left for each part
        if draw >= _FEWEST and all(len({id(x) for x, _ in pairs}) < 2 for pairs in fitting):
            break
        on = random_half(indices.shape)
        first_input, values = replay(dict.fromkeys(range(len(layers)), on), True)
        arrived = changed(first_input, calm_input).cpu()
        expected = arrived, on, arrived | on
        for i, x in enumerate(values):
            mask = changed_tokens(i, x)
            fitting[i] = [
                (reading, source)
                for reading, source in fitting[i]
                if mask is not None and _agrees(mask, reading, expected[source])
            ]
    # does a part read the last mixer before it? each stage has noise at tokens of its own
    stage_of = {index_of[layer]: i for i, stage in enumerate(stages) for layer in stage}
    reads_last = [False] * len(parts)
    for start in range(0, len(stages), tokens):  # at most as many stages as tokens at once
        tested = range(start, min(start + tokens, len(stages)))
        stage_at = indices.clone() % len(tested) + start  # the stage with noise at each token
        masks = {k: stage_at == stage for k, stage in stage_of.items() if stage in tested}
        _, values = replay(masks, False)
        for i, x in enumerate(values):
            ran = parts[i].ran
            mask = changed_tokens(i, x) if ran else None
            if mask is None or not fitting[i] or stage_of[ran - 1] not in tested:
                continue
            reading = fitting[i][0][0]
            in_order = mask.gather(1, reading.clamp_min(0)) & (reading >= 0)
            reads_last[i] = bool((in_order & (stage_at == stage_of[ran - 1])).any())
    out: list[Place | None] = []
    for i, (_, _, _, ran) in enumerate(parts):
        if not fitting[i]:
            out.append(None)
            continue
        # a part that does not read the last stage depends on the mixers before this stage
        stage = [index_of[layer] for layer in stages[stage_of[ran - 1]]] if ran else [0]
        reading, mixers = fitting[i][0][0], ran if reads_last[i] else stage[0]
        out.append(Place(None if reading is readings[0] else reading, mixers))
    return out


def _agrees(mask: Tensor, reading: Tensor, expected: Tensor) -> bool:
    """Return True if ``mask`` (B, L'), read in the order ``reading``, is ``expected`` (B, L)."""
    if int(reading.max()) >= mask.shape[1]:
        return False
    in_order, exists = mask.gather(1, reading.clamp_min(0)), reading >= 0
    return bool(((in_order == expected) | ~exists).all())  # at tokens that the part has


@contextmanager
def _values_recorded(parts: Sequence[Part]) -> Iterator[dict[tuple[Any, ...], Tensor]]:
    """Record the tensors that ``parts`` name in the run inside the ``with``, by their keys."""
    values: dict[tuple[Any, ...], Tensor] = {}
    wanted = {part.key for part in parts}

    def note(module: nn.Module, call: int, enters: bool, value: Any) -> None:
        x = first_floating(value) if (module, call, enters) in wanted else None
        if x is not None:
            values[module, call, enters] = x.detach().clone()

    with observing({part.module for part in parts if part.module is not None}, note):
        yield values
