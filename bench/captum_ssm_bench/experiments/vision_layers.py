"""What the layers of vision models do: who influences the cls token, how alike tokens become.

Shapes: L tokens, N patches, E width of the stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from captum_ssm.attr import ImplicitAttention, LatimNorm
from captum_ssm.metrics import token_similarity
from captum_ssm.tracing import find_mixers, trace

from ..harness.experiment import Cell, Column
from ..harness.records import Numbers, Rows
from .image_maps import COMPONENTS, attention_alone
from .on_scenes import VIM, VIM_FIRST, VIT, OnScenes, image_of
from .patches import Patches, patches_of


def ratio(sums: Tensor, _: Tensor) -> Tensor:
    """The first sum over the second, (..., 2) to (..., 1)."""
    return sums[..., :1] / sums[..., 1:]


class ClsInfluence(OnScenes):
    """How much the cls token takes from patches near it and far from it, layer by layer.

    The rows are bins of the distance in the sequence, of each layer and of their mean.  Influence
    is the absolute value of the matrix's entry, or the length of the contribution; relative
    influence is that of the bin over that of all patches, so that a layer without a bias has 1
    everywhere.
    """

    name = "cls-influence"
    title = "Influence of patches on the cls token by their distance (after HA figure 2)"
    columns = (Column("relative influence", ("bin", "all"), "", ratio),)
    note = (
        "Patches near a cls token in the middle are those in the middle of the image, where most "
        "objects lie, patches near one in front are those of a corner: what a transformer, which "
        "has no decay, takes from them tells how much of the influence is due to the image."
    )

    def __init__(self, models: Sequence[str] = (VIM, VIM_FIRST, VIT)) -> None:
        super().__init__(models)

    def cells(self) -> Sequence[Cell]:
        return [*(Cell("ImplicitAttention", each) for each in COMPONENTS), Cell("LatimNorm l2")]

    def measure(self, model: nn.Module, example: Any, cell: Cell) -> Rows:
        if cell.formulation in ("s6", "exact") and attention_alone(model):
            return {}  # the same as unified
        image = image_of(example, model)
        patches = patches_of(model, image)
        influence = [row[patches.index].abs() for row in _rows(model, image, cell, patches.cls())]
        layers = {f"layer {i}": each for i, each in enumerate(influence)}
        layers["mean"] = torch.stack([each / each.mean() for each in influence]).mean(0)
        return {
            f"{layer}, {name}": numbers
            for layer, each in layers.items()
            for name, numbers in by_distance(each, patches)
        }


def _rows(model: nn.Module, image: Tensor, cell: Cell, query: int) -> list[Tensor]:
    """The query's row of each layer, (L,)."""
    if cell.method == "LatimNorm l2":
        found = LatimNorm(model).maps(image, positions=[query])
        return [each[0, 0] for each in found]
    matrices = ImplicitAttention(model).matrices(image, components=cell.formulation)
    return [each[0, query] for each in matrices]


def by_distance(influence: Tensor, patches: Patches) -> Iterator[tuple[str, Numbers]]:
    """The mean influence of patches (N,) in bins that double: 1, 2, 3 to 4, 5 to 8, ..."""
    distance = (patches.index - patches.cls()).abs()
    last, until = 0, 1
    while last < int(distance.max()):
        inside = (distance > last) & (distance <= until)
        name = f"{last + 1:02}" if until == last + 1 else f"{last + 1:02}-{until:02}"
        yield (
            f"distance {name}",
            {"bin": float(influence[inside].mean()), "all": float(influence.mean())},
        )
        last, until = until, 2 * until


class Oversmoothing(OnScenes):
    """How alike the patches' tokens are, layer by layer: their mean pairwise cosine similarity.

    ``stream`` is what blocks return, ``mixer`` what mixers do; the row ``input`` is what enters
    the first block.
    """

    name = "oversmoothing"
    title = "How alike tokens become (after HA, appendix of the arXiv version)"
    columns = (Column("cosine similarity", ("similarity",), "low"),)

    def cells(self) -> Sequence[Cell]:
        return [Cell("stream"), Cell("mixer")]

    def measure(self, model: nn.Module, example: Any, cell: Cell) -> Rows:
        image = image_of(example, model)
        index = patches_of(model, image).index
        tokens = _streams(model, image) if cell.method == "stream" else _mixed(model, image)
        return {
            row: {"similarity": float(token_similarity(each[:, index]))}
            for row, each in tokens.items()
        }


def _mixed(model: nn.Module, image: Tensor) -> dict[str, Tensor]:
    """What mixers return, (1, L, E) each."""
    with torch.no_grad(), trace(model) as record:
        model(image)
    return {f"layer {i}": layer.in_order(layer.output) for i, layer in enumerate(record.layers)}


def _streams(model: nn.Module, image: Tensor) -> dict[str, Tensor]:
    """What enters the first block, and what blocks return, (1, L, E) each."""
    blocks = list(dict.fromkeys(mixer.blocks[-1] for mixer in find_mixers(model)))
    found: dict[str, Tensor] = {}

    def enter(module: nn.Module, args: tuple[Any, ...]) -> None:
        found["input"] = args[0]

    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        stream = output if isinstance(output, Tensor) else output[0]
        found[f"layer {blocks.index(module)}"] = stream

    with ExitStack() as stack, torch.no_grad():
        stack.callback(blocks[0].register_forward_pre_hook(enter).remove)
        for block in blocks:
            stack.callback(block.register_forward_hook(leave).remove)
        model(image)
    return found
