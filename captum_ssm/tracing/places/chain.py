"""Whether the layers of a run are a chain, in which order each reads the tokens, and which belong
together.

Folds multiply what layers do to tokens, one after the other.  That says something of the model only
where each layer reads what those before it left, token by token, in whatever order.  Layers that
read the same stream are one stage, as the two directions of a bidirectional wrapper are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor, nn

from ...errors import InputError
from .. import structure
from ..layer import Layer
from ..structure import INSTEAD, OF_A_TOWER, NotAChain
from .origin import OTHERS, Mixed, Origin, token_places, within_examples
from .rules.groups import plain_number


@dataclass(frozen=True, eq=False)
class Read:
    """What a mixer read, as it was seen in the run.

    Attributes:
        entering: where the sequence that it was called on comes from; None if that was not seen.
        stream: the same of what entered its block; None if it stands alone.
        run: the outermost module around it that ran, and how often that had run by then; None if
            the mixer stands alone.
        begins: whether tokens are followed from this sequence on, as those of an image are that no
            block is given, so that nothing tells what else reads them. Default: False.
    """

    entering: Origin | None
    stream: Origin | None
    run: tuple[nn.Module, int] | None
    begins: bool = False


@dataclass(frozen=True, eq=False)
class Chain(structure.Chain):
    """How the tokens of a run lie that was followed.

    Attributes:
        first: where the tokens that the first layer read come from.
        orders: which of the first layer's tokens each of a layer's is (L,), by the layer's number
            from 1 on; None if they are the same.
    """

    first: Origin
    orders: Mapping[int, Tensor | None]

    def put(self, x: Tensor, origin: Origin | None) -> Tensor:
        """Numbers by the tokens of a tensor (B, L'), in the order of the first layer's (B, L).

        Args:
            x: the numbers.
            origin: of the tensor; None if it was not seen.
        """
        if origin is None or origin.mixed is not None or origin.shape[:2] != x.shape:
            return x  # tokens in another shape, such as those routed to an expert, are in order
        numbers, first = _numbers(origin), _numbers(self.first)
        if numbers.shape != first.shape and self.orders.keys().isdisjoint(origin.sources):
            match = (numbers[:, :, None] == first[:, None]) & (numbers >= 0)[:, :, None]
            return torch.einsum("bi,bij->bj", x, match.to(x))  # others were added meanwhile
        order = _order(origin, self.orders, self.first, "A part between layers")
        return x if order is None else x.index_select(1, order.argsort().to(x.device))


def arrange(layers: Sequence[Layer], reads: Sequence[Read], output: Origin | None) -> Chain:
    """Put the tokens of all layers into the order of the first one's, and layers into stages.

    Args:
        layers: in the order in which they ran.
        reads: what each of them read.
        output: where the model's output comes from; None if that was not seen.

    Raises:
        NotAChain: naming the first layer that does not fit.
        InputError: when something else than mixers has mixed tokens, or nothing tells whether.
    """
    first = _apart(reads[0].entering, f"Layer {layers[0].name!r}")
    given = _given(layers[0], first)
    orders: dict[int, Tensor | None] = {}
    outputs = set[int]()
    for stage, numbers in enumerate(_stages(reads)):
        run = reads[numbers[0] - 1].run
        for number in numbers:
            layer, read = layers[number - 1], reads[number - 1]
            name = f"Layer {layer.name!r}"
            entering = _apart(read.entering, name)
            if not outputs <= set(entering.sources):
                missing = layers[min(outputs - set(entering.sources)) - 1].name
                raise NotAChain(
                    f"{name} does not read what layer {missing!r}, which ran before it, left: the "
                    f"model has branches of layers, or runs several times. {INSTEAD}"
                )
            again = run is not None and read.run is not None and run[0] is read.run[0]
            if again and run != read.run:
                raise NotAChain(
                    f"The model runs several times in one call, side by side. {INSTEAD}"
                )
            orders[number] = None if number == 1 else _order(entering, orders, first, name)
            stream = None
            if read.stream is not None and read.stream.mixed is None:
                stream = _order(read.stream, orders, first, name)
            layer.arrange(stage, orders[number], stream)
        outputs = set(numbers)
    note_streams(layers, reads, output, first)
    last = _order_of_output(output, orders, first, outputs)
    return Chain(given, last, first, orders)


def _stages(reads: Sequence[Read]) -> list[list[int]]:
    """The numbers of layers, those together that read the same, one after the other."""
    numbers = range(1, len(reads) + 1)
    return [[*each] for _, each in groupby(numbers, lambda i: _sources(reads[i - 1].entering))]


def _sources(origin: Origin | None) -> frozenset[int]:
    """What a tensor comes from, or came from until its tokens were mixed."""
    if origin is None:
        return frozenset()
    mixed = origin.mixed
    return frozenset(origin.sources if mixed is None else map(plain_number, mixed.sources))


def note_streams(
    layers: Sequence[Layer],
    reads: Sequence[Read],
    output: Origin | None,
    first: Origin | None = None,
) -> None:
    """Note whether what layers read passes them by on a residual stream.

    It does where it is there behind them other than by what they returned, and more than a gate.

    Args:
        layers: in the order in which they ran.
        reads: what each of them read.
        output: where the model's output comes from; None if that was not seen.
        first: where the tokens that the first layer read come from, of layers that are a chain.
            Default: None; then they have a stream unless it was seen that they have none.

    Raises:
        NotAChain: when a part of what layers of a chain read passes them by, and not the rest.
    """
    stages, has_stream, is_added = _stages(reads), True, False
    behind = [reads[numbers[0] - 1].entering for numbers in stages[1:]]
    for i, (own, left) in enumerate(zip(stages, [*behind, output], strict=True)):
        is_last, entering = i == len(behind), reads[own[0] - 1].entering
        if _sources(left).issuperset(own) and not (i == 0 and reads[0].begins):
            assert left is not None and entering is not None
            passing = entering.live & left.live
            if first is not None:
                name = "The model's output" if is_last else f"Layer {layers[own[-1]].name!r}"
                beside = f"{name} reads what layer {layers[own[0] - 1].name!r} left beside "
                if any(s < OTHERS for s in left.live - entering.live - {*own}):
                    raise NotAChain(f"{beside}what passes several layers by at once. {INSTEAD}")
                # some tokens of the input may not be there any more
                cut = {0} if is_last and left.shape[:2] != first.shape[:2] else set()
                if passing:
                    _require_all(entering.live - passing - cut, beside, layers)
            has_stream = bool(passing)
            is_added = has_stream and left.mixed is None  # else nobody saw to what
        elif not is_last:
            is_added, has_stream = False, True
        for number in own:
            layers[number - 1].is_added, layers[number - 1].has_stream = is_added, has_stream


def _require_all(stopped: frozenset[int], beside: str, layers: Sequence[Layer]) -> None:
    """Raise if a part of what layers read does not pass them by, but for what others fed to it.

    Args:
        stopped: the sources that do not.
        beside: says what is read beside the rest.
        layers: all layers.
    """
    feeding = {i for i, layer in enumerate(layers, 1) if layer.joins == "feeds"}
    lost = max((s for s in stopped - feeding if s < OTHERS), default=None)
    if lost is not None:
        what = f"layer {layers[lost - 1].name!r} left" if lost else "the model was given"
        raise NotAChain(f"{beside}a part of what that read, without what {what}. {INSTEAD}")


def _order_of_output(
    output: Origin | None,
    orders: Mapping[int, Tensor | None],
    first: Origin,
    last: set[int],
) -> Tensor | None:
    if output is None or len(output.shape) < 3:
        return None
    if output.mixed is not None:
        if output.mixed.joined:
            raise _mixing("The model's output", output.mixed)
        return None
    if not last <= set(output.sources) or output.shape[1] != output.sizes[max(last)][1]:
        return None
    return _order(output, orders, first, "The model's output")


def _given(layer: Layer, origin: Origin) -> Tensor | None:
    """Which token of the input each token of the first layer is; None if they are the same."""
    if origin.is_identity(0):
        return None
    places = origin.tokens(0)
    if not places:
        raise NotAChain(f"Layer {layer.name!r} reads nothing of the inputs. {OF_A_TOWER}")
    if len(places) != 1:
        raise NotAChain(
            f"Layer {layer.name!r} reads the tokens of the input in several orders at once. "
            f"{INSTEAD}"
        )
    batch, tokens = origin.sizes[0]
    if len(places[0]) != batch:
        raise InputError(
            f"inputs has a batch of {batch}, but the model's mixers see a batch of "
            f"{len(places[0])}: each example must be explained by itself."
        )
    first = torch.arange(batch, device="cpu")[:, None] * tokens
    found = places[0].long()
    if not bool(((found == -1) | (found // tokens == first // tokens)).all()):
        raise InputError(
            f"Layer {layer.name!r}: tokens of an example come from other examples of the batch, so "
            "none can be explained by itself."
        )
    return within_examples(found, origin.sizes[0])


def _apart(origin: Origin | None, name: str) -> Origin:
    """The origin, of tokens that nothing has mixed."""
    if origin is None:
        raise InputError(
            f"{name} reads a sequence of which torch's functions do not tell how it follows from "
            "inputs. Does forward_func make up ids or embeddings anew, or is the model's code "
            f"compiled, scripted or fused there? Pass what the model reads as inputs. {OF_A_TOWER}"
        )
    if origin.mixed is not None:
        raise _mixing(name, origin.mixed)
    return origin


def _mixing(name: str, mixed: Mixed) -> InputError:
    return InputError(
        f"{name} reads tokens that torch's {mixed.function} has mixed in module {mixed.module!r}, "
        "outside of all known mixers: its share would be missing. If the module is a token mixer, "
        "register an adapter for it (see register_mixer). Else use LatimFlow, or name the layers "
        "to explain with layers=[...]."
    )


def _order(
    origin: Origin, orders: Mapping[int, Tensor | None], first: Origin, name: str
) -> Tensor | None:
    """Which token of the first layer each token is, (L,); None if they are the same.

    Args:
        origin: of the tokens.
        orders: of the layers so far, by their sources.
        first: of the tokens that the first layer read.
        name: of the layer that reads them.
    """
    found: list[Tensor | None] = []
    seen: set[tuple[int, int]] = set()  # most sources lie alike
    for source, entries in origin.sources.items():
        if len(entries) > 1:
            raise NotAChain(
                f"{name} reads the same tokens in {len(entries)} orders at once. {INSTEAD}"
            )
        if source in orders:
            permutation, order = origin.permutation(source), orders[source]
            if (id(permutation), id(order)) not in seen:
                seen.add((id(permutation), id(order)))
                found.append(_common(permutation, order, name))
    if any(source not in orders for source in origin.sources):
        numbers = _numbers(origin)
        match = _match(numbers, _numbers(first))
        if match is not None:
            found.append(_common(match, None, name))
        elif not found or bool((numbers >= 0).all()):
            raise NotAChain(f"{name} reads other tokens than the first layer. {INSTEAD}")
    if any(not _alike(other, found[0]) for other in found[1:]):
        raise NotAChain(
            f"{name} reads what the layers before it left, each in another order of the tokens. "
            f"{INSTEAD}"
        )
    return found[0]


def _numbers(origin: Origin) -> Tensor:
    """A number for every token (B, L) that is of the input or of others, -1 for those of nothing.

    Tokens of one number are the same, whatever they have become.
    """
    numbers = torch.full(origin.shape[:2], -1, device="cpu")
    for source, entries in origin.sources.items():
        places = token_places(origin.shape, entries[0].places)
        if (source == 0 or source >= OTHERS) and places is not None:
            own = source * 2**40 + places.long()
            numbers = torch.where((numbers < 0) & (places >= 0), own, numbers)
    return numbers


def _match(own: Tensor, given: Tensor) -> Tensor | None:
    """Where each numbered token is among others (B, L); None if they are not the same."""
    if own.shape != given.shape:
        return None
    places = torch.arange(own.shape[1], device="cpu").expand(own.shape)
    if torch.equal(own, given):
        return places
    (sorted_own, at), (sorted_given, there) = own.sort(1), given.sort(1)
    once = (sorted_own[:, 1:] > sorted_own[:, :-1]).all()
    if not once or not torch.equal(sorted_own, sorted_given):
        return None
    return places.scatter(1, at, there)


def _common(permutation: Tensor | None, order: Tensor | None, name: str) -> Tensor | None:
    """A permutation (B, L) of tokens in some order, as the order of the first layer's (L,)."""
    if permutation is None:
        raise NotAChain(
            f"{name} reads others than all tokens of the layers before it, each once. {INSTEAD}"
        )
    if not bool((permutation == permutation[:1]).all()):
        raise NotAChain(f"{name} reads the tokens of each example in another order. {INSTEAD}")
    same = torch.arange(permutation.shape[1], device="cpu")
    found = permutation[0] if order is None else order[permutation[0]]
    return None if torch.equal(found, same) else found


def _alike(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)
