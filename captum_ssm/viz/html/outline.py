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
_LIKELIEST, _RIVALS = 5, 3


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
    """The layout of an image: ``size`` in rows and columns of patches, and each patch's token."""

    size: tuple[int, int]
    tokens: Tensor


@dataclass(frozen=True, eq=False)
class Outline:
    """The facts about an example from one forward run.

    Attributes:
        layers: the mixers, in the order in which they ran.
        unpadded: the positions that are not padding.
        query: the query token, counted without padding; None if there are several.
        grid: the layout of an image's patches; None without a grid.
        target: the explained output: the user's target, or the model's prediction.
        explained: a description of the target in words.
        predictions: the likeliest classes, or tokens at the target's position, and rivals.
        targets: a target in Captum's forms for each prediction; ``[target]`` without predictions.
        explained_index: the index of the explained prediction.
    """

    layers: list[LayerOutline]
    unpadded: list[int]
    query: int | None
    grid: Grid | None
    target: Any
    explained: str
    predictions: list[LikelyClass]
    targets: list[Any]
    explained_index: int


def outline(subject: Subject, example: ShownExample) -> Outline:
    """Run the model once on an example, and return layers, predictions and the target."""
    with torch.inference_mode(False), torch.no_grad(), ExitStack() as stack:
        probe = ImageProbe(subject.module) if example.is_image else None
        if probe is not None:
            stack.enter_context(probe.watch())
        with trace(subject.module, layers=subject.layers, graph="tail") as record:
            arguments = subject.forward_func, example.inputs, example.additional
            output = logits_of(call_model(*arguments))
        require_layers(record, subject.module)
        layers = [LayerOutline(x.name, x.architecture, x.tokens) for x in record.layers]
        grid = None
        if probe is not None:  # the first mixer knows its grid, or the probe's runs find it
            first = record.layers[0]
            if first.map is not None:
                grid = Grid(first.map.size, torch.arange(first.tokens))
            else:
                grid = _grid(probe, subject, example, first.tokens)
        mask = record.mask
    require_real_tokens(mask)
    is_real = torch.ones(layers[0].tokens, dtype=torch.bool) if mask is None else mask[0].cpu()
    unpadded = is_real.nonzero().flatten().tolist()
    target = _predicted_target(output, unpadded) if example.target is None else example.target
    target_place = target_index(target, output)
    query = _query(output, target_place, record, mask)
    ids = example.inputs[0] if output.dim() == 3 and example.inputs.dim() == 2 else None
    query = unpadded.index(query) if query in unpadded else None
    predictions = _predictions(subject, output.detach(), target_place, target, ids)
    return Outline(layers, unpadded, query, grid, target, *predictions)


def _query(output: Tensor, index: Tensor | None, record: Trace, mask: Tensor | None) -> int | None:
    """Return the position from which the output is read; None if it is not a single token."""
    try:
        weights = query_weights(None, output, index, record.layers[-1], mask)
    except QueryError:  # methods that need the query will raise it again
        return None
    positions = weights[0].nonzero().flatten().tolist()
    return int(positions[0]) if len(positions) == 1 else None


def _grid(probe: ImageProbe, subject: Subject, example: ShownExample, tokens: int) -> Grid | None:
    """Find which of the first layer's ``tokens`` are patches; None if they are no grid."""

    def run(image: Tensor) -> Any:
        return call_model(subject.forward_func, image, example.additional)

    try:
        index, size = probe.patches(run, example.inputs, tokens)
    except InputError:  # these tokens are shown one after the other
        return None
    return Grid(size, index.cpu())


def _predicted_target(output: Tensor, unpadded: list[int]) -> Any:
    """Return the likeliest class, or (last position, next token); None for a single number."""
    if output.dim() == 3:
        return unpadded[-1], int(output[0, unpadded[-1]].argmax())
    return int(output[0].argmax()) if output.dim() == 2 and output.shape[1] > 1 else None


def _predictions(
    subject: Subject, output: Tensor, index: Tensor | None, target: Any, ids: Tensor | None
) -> tuple[str, list[LikelyClass], list[Any], int]:
    """Return an Outline's fields from ``explained`` on; ``ids`` are the text's tokens, if any."""
    if index is None:
        return f"the model's output, {float(output.flatten()[0]):.4g}", [], [target], 0
    *place, explained = index[0].tolist()  # the place is a position, or empty for a classifier
    logits = output[(0, *place)].cpu().double()
    chance = logits.softmax(-1)
    best = logits.topk(min(_LIKELIEST, len(logits))).indices.tolist()
    # impossible answers have no finite logit to explain
    likely = dict.fromkeys([*(c for c in best if bool(logits[c].isfinite())), explained])
    classes = [*likely, *_rivals([] if ids is None else ids.tolist(), place, logits, likely)]
    labels = [label_of(subject, c, output) for c in classes]
    predictions = [
        LikelyClass(label, float(logits[c]), float(chance[c]), rival=c not in likely)
        for c, label in zip(classes, labels, strict=True)
    ]
    explained_index = classes.index(explained)
    targets: list[Any] = [(*place, c) if place else c for c in classes]
    targets[explained_index] = target  # in the form in which the user passed it
    text = f"the logit of “{labels[explained_index]}”"
    if output.dim() == 3:
        text += f", predicted after token {place[0]}"
    return text, predictions, targets, explained_index


def _rivals(
    ids: Sequence[int], place: Sequence[int], logits: Tensor, likely: Collection[int]
) -> list[int]:
    """Return likely tokens of the text, first those after a copy of the token at ``place``."""
    possible = {k for k in ids if 0 <= k < len(logits) and bool(logits[k].isfinite())}
    query_id = ids[place[0]] if ids and -len(ids) <= place[0] < len(ids) else None
    after_query = {after for token, after in pairwise(ids) if token == query_id}
    rivals = possible.difference(likely)
    return sorted(rivals, key=lambda k: (k not in after_query, -float(logits[k])))[:_RIVALS]


def label_of(subject: Subject, index: int, output: Tensor) -> str:
    """Return the name of a class or a token."""
    if subject.labels is not None and index < len(subject.labels):
        return str(subject.labels[index])
    if output.dim() == 3 and subject.codec is not None:
        return subject.codec.names(torch.tensor([index]))[0]
    names = getattr(getattr(subject.module, "config", None), "id2label", None)
    if output.dim() == 2 and isinstance(names, dict) and index in names:
        return str(names[index])
    return str(index)


def patch_names(outline: Outline) -> list[str]:
    """Return a name for each token: a patch's row and column, "class token", or an index."""
    names = [f"token {i}" for i in outline.unpadded]
    if outline.grid is not None and outline.query is not None:
        names[outline.query] = "class token"
    if outline.grid is not None:
        columns = outline.grid.size[1]
        for i, token in enumerate(outline.grid.tokens.tolist()):
            names[token] = f"row {i // columns}, column {i % columns}"
    return names
