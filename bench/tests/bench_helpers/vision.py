"""Small vision models with random parameters, for scenes of 16 x 16 pixels in 4 x 4 patches."""

from __future__ import annotations

from typing import Any

import torch
from oracles import vim as vim_oracle
from torch import Tensor
from zoo.attention import attention_model

from captum_ssm.models import VisionMamba
from captum_ssm_bench.tasks.scenes import SceneTask

SIDE, GRID, PATCHES = 16, (4, 4), 16
#: Scenes that the models take.
SCENES = SceneTask(size=SIDE)
CLASSES = len(SCENES.classes)


def vim(cls: str = "middle", depth: int = 2) -> Any:
    """A Vision Mamba."""
    model = VisionMamba(
        img_size=SIDE,
        patch_size=4,
        depth=depth,
        embed_dim=10,
        num_classes=CLASSES,
        d_state=3,
        cls_token=cls,  # type: ignore[arg-type]
    )
    return vim_oracle.randomise(model)


def vit() -> Any:
    """A vision transformer of transformers, with the cls token in front."""
    return attention_model("vit", image_size=SIDE, num_labels=CLASSES)


def scene_image() -> Tensor:
    """A random scene, (1, 3, 16, 16)."""
    return SCENES.draw(1, int(torch.randint(2**31, ()))).images


def streams(model: Any, image: Tensor) -> list[Tensor]:
    """What enters the first block and what each block returns, (1, 17, E)."""
    if not isinstance(model, VisionMamba):
        return _streams_of_vit(model, image)
    patches = model.patch_embed(image).flatten(2).mT
    (at,) = model.cls_positions(PATCHES)
    x = torch.cat([patches[:, :at], model.cls_token, patches[:, at:]], 1) + model.pos_embed
    found = [x]
    for layer in model.layers:
        found.append(found[-1] + layer.mixer(layer.norm(found[-1])))
    return found


def _streams_of_vit(model: Any, image: Tensor) -> list[Tensor]:
    found: list[Tensor] = []
    # what each layer's norm and, in the end, the model's norm are given
    norms = [*(layer.layernorm_before for layer in model.vit.layers), model.vit.layernorm]
    handles = [
        norm.register_forward_pre_hook(lambda _, args: found.append(args[0])) for norm in norms
    ]
    model(image)
    for handle in handles:
        handle.remove()
    return found


def patch_places(model: Any) -> list[int]:
    """Where the patches stand among the 17 tokens."""
    at = model.cls_positions(PATCHES)[0] if isinstance(model, VisionMamba) else 0
    return [t for t in range(PATCHES + 1) if t != at]


MODELS = {"vim": vim, "vim first": lambda: vim("head"), "vit": vit}
