"""The bundled image classifiers: which scenes each has learned, how large it is, for how long."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from captum_ssm.models.folders import model_of
from captum_ssm.models.vim import VisionMamba
from captum_ssm.models.vmamba import VMamba

from ..tasks.scenes import SCENES, SceneBatch, SceneTask
from .recipe import HELD_OUT_SEED, Recipe, Round, Scores
from .saving import save_of_transformers, save_plain

#: Scenes that a line of progress is measured on, and that a trained model is.
_HELD_OUT, _MEASURED = 256, 1024
#: Scenes that go through the model at once.
_AT_ONCE = 128
#: Of a Vision Transformer channels of a head, and of it and a VMamba the width of the perceptron
#: over that of the stream.
_HEAD, _WIDER = 12, 2
#: Its weights at first, whose default of transformers is made for larger widths, and its positions.
_SPREAD, _AMPLITUDE = 0.1, 0.5


@dataclass(frozen=True)
class ImageModelSize:
    """The architecture and size of the model to train.

    Attributes:
        architecture: ``"vim"``, the package's own Vision Mamba, ``"vmamba"``, its own VMamba in
            two stages, or ``"vit"``, the Vision Transformer of transformers. Default: ``"vim"``.
        layers: number of blocks, of a VMamba half of them in each stage. Default: 4.
        hidden: width of the residual stream, of a VMamba that of the first stage. Default: 48.
        state: states per channel of a Vision Mamba or a VMamba. Default: 4.
        patch: side of the patches. Default: 4.
        cls_token: where the cls token of a Vision Mamba stands, ``"middle"`` or ``"head"``; that
            of a Vision Transformer is the first. Default: ``"middle"``.
    """

    architecture: Literal["vim", "vmamba", "vit"] = "vim"
    layers: int = 4
    hidden: int = 48
    state: int = 4
    patch: int = 4
    cls_token: Literal["middle", "head"] = "middle"


@dataclass(frozen=True)
class ImageRecipe(Recipe):
    """How an image classifier is made; the loss is the cross entropy of the classes.

    Objects that are brighter than all else are learned soon, those of random brightness late or
    never from scratch.  So only the last round trains on the task itself, those before it on
    scenes with bright objects.

    Attributes:
        task: what it learns.
        size: the model.
        steps: optimiser steps of each round.
        batch_size: scenes per step. Default: 32.
        learning_rate: the peak. Default: 2e-3.
        mask_loss: weight of a second loss, the cross entropy of what each pixel shows, as a
            :class:`.PixelReader` tells it from the tokens of patches. Default: 0, it is left out.
    """

    task: SceneTask
    size: ImageModelSize
    steps: tuple[int, ...]
    batch_size: int = 32
    learning_rate: float = 2e-3
    mask_loss: float = 0.0

    def new(self) -> nn.Module:
        return _NEW[self.size.architecture](self.size, self.task)

    def rounds(self, model: nn.Module, seed: int) -> Sequence[Round]:
        rng = random.Random(seed)
        held_out = self.task.draw(_HELD_OUT, HELD_OUT_SEED)
        width, patch, classes = self.size.hidden, self.size.patch, len(self.task.classes)
        reader = PixelReader(width, patch, classes) if self.mask_loss else None

        def score() -> float:
            return image_accuracy(model, held_out)

        def part(task: SceneTask, steps: int) -> Round:
            def loss() -> Tensor:
                batch = task.draw(self.batch_size, rng.getrandbits(62), held_out=False)
                return self._loss(model, reader, batch)

            return Round(steps, loss, score, self.learning_rate, reader)

        bright = replace(self.task, polarity="bright")
        *before, last = self.steps
        return [*(part(bright, steps) for steps in before), part(self.task, last)]

    def _loss(self, model: nn.Module, reader: PixelReader | None, batch: SceneBatch) -> Tensor:
        if reader is None:
            return F.cross_entropy(_logits(model, batch.images), batch.labels)
        with patch_tokens(model) as tokens:
            named = F.cross_entropy(_logits(model, batch.images), batch.labels)
        return named + self.mask_loss * F.cross_entropy(reader(tokens[0]), batch.masks)

    def measure(self, model: nn.Module) -> Scores:
        """The accuracy on backgrounds that are held out, and on those of the training."""
        return {
            name: {"accuracy": image_accuracy(model, self.task.draw(_MEASURED, seed, held_out))}
            for name, seed, held_out in (
                ("held-out", HELD_OUT_SEED + 1, True),
                ("known backgrounds", HELD_OUT_SEED + 2, False),
            )
        }

    def save(self, model: nn.Module, folder: Path) -> None:
        named = {"id2label": dict(enumerate(self.task.classes))}
        if isinstance(model, VisionMamba):
            save_plain(model, named | _vim_options(self.size, self.task), folder)
        elif isinstance(model, VMamba):
            save_plain(model, named | _vmamba_options(self.size, self.task), folder)
        else:
            save_of_transformers(model, folder)


class PixelReader(nn.Module):
    """A linear head on the tokens of patches, which is trained with a model and then dropped.

    A label says once per image what a mask says once per pixel, and from labels alone attention is
    slow to learn outlines.

    Args:
        width: E.
        patch: p.
        classes: K; a pixel may show the background as well.
    """

    def __init__(self, width: int, patch: int, classes: int) -> None:
        super().__init__()
        self.patch = patch
        self.head = nn.Linear(width, (classes + 1) * patch**2)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the background and of the classes, (B, K + 1, S, S), of patches (B, N, E)."""
        side = math.isqrt(tokens.shape[1])
        read = self.head(tokens).mT.unflatten(2, (side, side))  # (B, (K + 1) p p, S / p, S / p)
        return F.pixel_shuffle(read, self.patch)


@contextmanager
def patch_tokens(model: Any) -> Iterator[list[Tensor]]:
    """Keep the tokens of the patches (B, N, E) that a classifier's last norm returns.

    The classifier is a Vision Mamba with one cls token, or a Vision Transformer of transformers.
    """
    kept: list[Tensor] = []

    def keep(norm: nn.Module, args: tuple[Any, ...], tokens: Tensor) -> None:
        at = model.cls_positions(tokens.shape[1] - 1)[0] if isinstance(model, VisionMamba) else 0
        kept.append(tokens[:, [t for t in range(tokens.shape[1]) if t != at]])

    norm = model.norm_f if isinstance(model, VisionMamba) else model.vit.layernorm
    handle = norm.register_forward_hook(keep)
    try:
        yield kept
    finally:
        handle.remove()


def image_accuracy(model: nn.Module, scenes: SceneBatch) -> float:
    """The share of scenes whose label a classifier finds."""
    with torch.no_grad():
        found = [
            _logits(model, images).argmax(-1) for images in torch.split(scenes.images, _AT_ONCE)
        ]
    return float((torch.cat(found) == scenes.labels).double().mean())


def _logits(model: nn.Module, images: Tensor) -> Tensor:
    output = model(images)
    logits: Tensor = output if isinstance(output, Tensor) else output.logits
    return logits


def _new_vim(size: ImageModelSize, task: SceneTask) -> nn.Module:
    return VisionMamba(**_vim_options(size, task))


def _vim_options(size: ImageModelSize, task: SceneTask) -> dict[str, Any]:
    return {
        "img_size": task.size,
        "patch_size": size.patch,
        "depth": size.layers,
        "embed_dim": size.hidden,
        "num_classes": len(task.classes),
        "cls_token": size.cls_token,
        "d_state": size.state,
    }


def _new_vmamba(size: ImageModelSize, task: SceneTask) -> nn.Module:
    return VMamba(**_vmamba_options(size, task))


def _vmamba_options(size: ImageModelSize, task: SceneTask) -> dict[str, Any]:
    return {
        "patch_size": size.patch,
        "depths": tuple(n for n in (size.layers // 2, size.layers - size.layers // 2) if n),
        "dims": size.hidden,
        "num_classes": len(task.classes),
        "d_state": size.state,
        "ssm_ratio": 1.0,
        "mlp_ratio": float(_WIDER),
        "patch_embed": "v1",
        "downsample": "v2",
    }


def _new_vit(size: ImageModelSize, task: SceneTask) -> nn.Module:
    settings = {
        "image_size": task.size,
        "patch_size": size.patch,
        "num_hidden_layers": size.layers,
        "hidden_size": size.hidden,
        "num_attention_heads": max(1, size.hidden // _HEAD),
        "intermediate_size": _WIDER * size.hidden,
        "initializer_range": _SPREAD,
        "id2label": dict(enumerate(task.classes)),
        "label2id": {name: label for label, name in enumerate(task.classes)},
    }
    model = model_of("ViTForImageClassification", settings)
    waves = _waves(task.size // size.patch, size.hidden // 4)
    with torch.no_grad():
        model.vit.embeddings.position_embeddings[0, 1:, : waves.shape[1]] = _AMPLITUDE * waves
    fresh: nn.Module = model
    return fresh


def _waves(side: int, count: int) -> Tensor:
    """Positions that are alike where patches are near: waves across and down, (side^2, 4 count).

    Their lengths fall from two sides of the image towards two patches.
    """
    rates = math.pi / side * side ** (torch.arange(count) / count)
    places = torch.arange(side, dtype=torch.float32)
    down, across = (
        each.flatten()[:, None] * rates for each in torch.meshgrid(places, places, indexing="ij")
    )
    return torch.cat([across.sin(), across.cos(), down.sin(), down.cos()], 1)


_NEW = {"vim": _new_vim, "vmamba": _new_vmamba, "vit": _new_vit}

_MIDDLE, _VMAMBA, _VIT = (
    ImageModelSize(),
    ImageModelSize("vmamba", hidden=32),
    ImageModelSize("vit"),
)

#: By the name of the bundled model.
IMAGE_RECIPES = {
    "scenes-vim": ImageRecipe(SCENES, _MIDDLE, steps=(300, 2500)),
    "scenes-vim-first": ImageRecipe(SCENES, replace(_MIDDLE, cls_token="head"), steps=(300, 2500)),
    "scenes-vmamba": ImageRecipe(SCENES, _VMAMBA, steps=(300, 2500)),
    "scenes-vit": ImageRecipe(SCENES, _VIT, steps=(300, 8000), learning_rate=4e-3, mask_loss=1.0),
}
