"""Run the model once on a report's example, to find layers, predictions and the query token.

Shapes: L tokens, V vocabulary, K classes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...attr.call.inputs import call_model
from ...attr.call.layout import ImageProbe
from ...attr.call.query import query_weights
from ...attr.call.targets import logits_of, target_index
from ...errors import InputError, QueryError
from ...tracing import Trace, require_layers, require_real_tokens, trace
from .example import ShownExample, Subject

#: The number of likeliest classes, and the number of rivals from the text.
_NAMED, _IN_TEXT = 5, 3


class LayerOutline(NamedTuple):
    """One layer: the mixer's name in the model, its family, and the number of its tokens."""

    name: str
    architecture: str
    tokens: int


class LikelyClass(NamedTuple):
    """A class or token, its logit and probability.

    ``rival`` is True for a token of the text that is neither explained nor among the likeliest.
    """

    label: str
    logit: float
    probability: float
    rival: bool = False


@dataclass(frozen=True, eq=False)
class Grid:
    """The layout of an image: rows and columns of patches, and the token of each patch."""

    size: tuple[int, int]
    tokens: Tensor


@dataclass(frozen=True, eq=False)
class Outline:
    """The facts about an example from one forward run.

    Attributes:
        layers: the mixers, in the order in which they ran.
        real: the positions that are not padding.
        asking: the query token, counted without padding; None if there are several.
        grid: the layout of an image's patches; None without a grid.
        target: the explained output: the user's target, or the model's prediction.
        explained: a description of the target in words.
        predictions: the likeliest classes, or tokens at the target's position, and rivals.
        targets: a target in Captum's forms for each prediction; ``[target]`` without predictions.
        asked: the index of the explained prediction.
    """

    layers: list[LayerOutline]
    real: list[int]
    asking: int | None
    grid: Grid | None
    target: Any
    explained: str
    predictions: list[LikelyClass]
    targets: list[Any]
    asked: int


def outline(subject: Subject, example: ShownExample) -> Outline:
    """Run the model once on an example, and return layers, predictions and the target."""
    with torch.inference_mode(False), torch.no_grad(), ExitStack() as stack:
        probe = ImageProbe(subject.module) if example.is_image else None
        if probe is not None:
            stack.enter_context(probe.watch())
        with trace(subject.module, layers=subject.layers, graph="tail") as record:
            given = subject.forward_func, example.inputs, example.additional
            output = logits_of(call_model(*given))
        require_layers(record, subject.module)
        layers = [LayerOutline(x.name, x.architecture, x.tokens) for x in record.layers]
        grid = None
        if probe is not None:
            first = record.layers[0]
            if first.map is not None:
                grid = Grid(first.map.size, torch.arange(first.tokens))
            else:
                grid = _grid(probe, subject, example, first.tokens)
        mask = record.mask
    require_real_tokens(mask)
    real = torch.ones(layers[0].tokens, dtype=torch.bool) if mask is None else mask[0].cpu()
    positions = real.nonzero().flatten().tolist()
    target = _predicted(output, positions) if example.target is None else example.target
    index = target_index(target, output)
    asking = _asking(output, index, record, mask)
    ids = example.inputs[0] if output.dim() == 3 and example.inputs.dim() == 2 else None
    asking = positions.index(asking) if asking in positions else None
    predictions = _predictions(subject, output.detach(), index, target, ids)
    return Outline(layers, positions, asking, grid, target, *predictions)


def _asking(output: Tensor, index: Tensor | None, record: Trace, mask: Tensor | None) -> int | None:
    """Return the position of the query; None if the query is not a single token."""
    try:
        weights = query_weights(None, output, index, record.layers[-1], mask)
    except QueryError:  # methods that read a row will raise
        return None
    asked = weights[0].nonzero().flatten().tolist()
    return int(asked[0]) if len(asked) == 1 else None


def _grid(probe: ImageProbe, subject: Subject, example: ShownExample, tokens: int) -> Grid | None:
    def run(image: Tensor) -> Any:
        return call_model(subject.forward_func, image, example.additional)

    try:
        index, size = probe.patches(run, example.inputs, tokens)
    except InputError:  # tokens that are no grid of patches are shown one after the other
        return None
    return Grid(size, index.cpu())


def _predicted(output: Tensor, positions: list[int]) -> Any:
    """Return the likeliest class, or next token; None for a single number."""
    if output.dim() == 3:
        return positions[-1], int(output[0, positions[-1]].argmax())
    return int(output[0].argmax()) if output.dim() == 2 and output.shape[1] > 1 else None


def _predictions(
    subject: Subject, output: Tensor, index: Tensor | None, target: Any, ids: Tensor | None
) -> tuple[str, list[LikelyClass], list[Any], int]:
    """Return the target in words, predictions, their targets, and the explained one's index."""
    if index is None:
        return f"the model's output, {float(output.flatten()[0]):.4g}", [], [target], 0
    *place, chosen = index[0].tolist()
    logits = output[(0, *place)].cpu().double()
    chances = logits.softmax(-1)
    best = logits.topk(min(_NAMED, len(logits))).indices.tolist()
    # impossible answers have no finite logit to explain
    said = dict.fromkeys([*(k for k in best if bool(logits[k].isfinite())), chosen])
    named = [*said, *_rivals([] if ids is None else ids.tolist(), place, logits, said)]
    predictions = [
        LikelyClass(
            label_of(subject, k, output), float(logits[k]), float(chances[k]), k not in said
        )
        for k in named
    ]
    asked = named.index(chosen)
    targets: list[Any] = [(*place, k) if place else k for k in named]
    targets[asked] = target  # in the user's own words
    label = label_of(subject, chosen, output)
    where = f", predicted after token {place[0]}" if output.dim() == 3 else ""
    return f"the logit of “{label}”{where}", predictions, targets, asked


def _rivals(
    ids: Sequence[int], place: Sequence[int], logits: Tensor, said: Collection[int]
) -> list[int]:
    """Return rivals: likely tokens of the text, first those that follow a copy of the query."""
    found = {k for k in ids if 0 <= k < len(logits) and bool(logits[k].isfinite())}.difference(said)
    asking = ids[place[0]] if ids and -len(ids) <= place[0] < len(ids) else None
    behind = {after for before, after in pairwise(ids) if before == asking}
    return sorted(found, key=lambda k: (k not in behind, -float(logits[k])))[:_IN_TEXT]


def label_of(subject: Subject, index: int, output: Tensor) -> str:
    """Return the name of a class or a token."""
    if subject.labels is not None and index < len(subject.labels):
        return str(subject.labels[index])
    if output.dim() == 3 and subject.codec is not None:
        return subject.codec.names(torch.tensor([index]))[0]
    known = getattr(getattr(subject.module, "config", None), "id2label", None)
    if output.dim() == 2 and isinstance(known, dict) and index in known:
        return str(known[index])
    return str(index)


def patch_names(known: Outline) -> list[str]:
    """Return a name for each token: a patch's row and column, "class token", or an index."""
    names = [f"token {i}" for i in known.real]
    if known.grid is not None and known.asking is not None:
        names[known.asking] = "class token"
    if known.grid is not None:
        columns = known.grid.size[1]
        for place, token in enumerate(known.grid.tokens.tolist()):
            names[token] = f"row {place // columns}, column {place % columns}"
    return names
