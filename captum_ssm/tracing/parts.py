"""Find by replays on which tokens and layers a module's input or output depends."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .hooks import observing, swap_first
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


def place(
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
    layers, number = replays.layers, {layer: k for k, layer in enumerate(replays.layers)}
    embeddings, shifted = replays.beginning.looked_up, replays.beginning.shifted
    # a part that reads the token before returns its recorded output in replays
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

    def drawn(shape: torch.Size) -> Tensor:
        """Return a mask (B, L) of a random half of each example's tokens."""
        return torch.rand(shape, generator=generator, device="cpu").argsort(1) < (shape[1] + 1) // 2

    def run(on: Mapping[int, Tensor], root: bool) -> tuple[Tensor, list[Tensor | None]]:
        """Replay with noise; return the first layer's input and the values of all ``parts``."""
        entering: list[Tensor] = []

        def leaf(k: int, x: Tensor) -> Tensor:
            if k == 0:
                entering.append(x)
            at, turn = on.get(k), layers[k].order
            if at is None:
                return replays.leaf(k).clone()
            at = at if turn is None else at.index_select(1, turn.to(at.device))
            return replays.noisy(replays.leaf(k), at, k)

        def begin(x: Tensor) -> Tensor:
            begun.append(drawn(x.shape[:2]))
            return replays.noisy(x, begun[-1])

        with _first_tensors(parts) as found, torch.no_grad():
            replays.run(leaf, begin if root else None)
        return entering[0], [found.get(p[:3]) for p in parts]

    begun: list[Tensor] = []
    first, calm = run({}, False)

    def moved(at: int, x: Tensor | None) -> Tensor | None:
        """Return a mask (B, L') of the tokens at which ``x``, the value of ``parts[at]``, changed.

        Return None if ``x`` was not computed, or has no tokens that divide by example.
        """
        if parts[at].module is None:  # the input, which has noise where the last run began
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

    # the orders in which parts may read tokens, with noise of the root, of layers, or of both
    fitting = [list(itertools.product(kept, range(3))) for _ in parts]
    for draw in range(_MOST):
        if draw >= _FEWEST and all(len({id(x) for x, _ in some}) < 2 for some in fitting):
            break
        on = drawn(own.shape)
        entered, now = run(dict.fromkeys(range(len(layers)), on), True)
        arrived = changed(entered, first).cpu()
        for at, x in enumerate(now):
            met = moved(at, x)
            fitting[at] = [
                (reading, kind)
                for reading, kind in fitting[at]
                if met is not None and _agrees(met, reading, (arrived, on, arrived | on)[kind])
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
            reading = fitting[at][0][0]
            mine = met.gather(1, reading.clamp_min(0)) & (reading >= 0)
            reads[at] = bool((mine & (slots == stage_of[ran - 1])).any())
    out: list[Place | None] = []
    for at, (_, _, _, ran) in enumerate(parts):
        if not fitting[at]:
            out.append(None)
            continue
        stage = [number[layer] for layer in stages[stage_of[ran - 1]]] if ran else [0]
        found = fitting[at][0][0]
        out.append(Place(None if found is kept[0] else found, ran if reads[at] else stage[0]))
    return out


def _agrees(met: Tensor, reading: Tensor, expected: Tensor) -> bool:
    """Return True if a tensor, reordered by ``reading``, changed exactly at expected tokens."""
    if int(reading.max()) >= met.shape[1]:
        return False
    mine, there = met.gather(1, reading.clamp_min(0)), reading >= 0
    return bool(((mine == expected) | ~there).all())


@contextmanager
def _first_tensors(parts: Sequence[Part]) -> Iterator[dict[tuple[Any, ...], Tensor]]:
    """Record the tensors that ``parts`` name in the run inside the ``with``, by module and call."""
    found: dict[tuple[Any, ...], Tensor] = {}
    wanted = {part[:3] for part in parts}

    def note(module: nn.Module, call: int, enters: bool, value: Any) -> None:
        x = swap_first(value, lambda x: x)[1] if (module, call, enters) in wanted else None
        if x is not None:
            found[module, call, enters] = x.detach().clone()

    with observing({part.module for part in parts if part.module is not None}, note):
        yield found
