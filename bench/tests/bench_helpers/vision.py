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


MODELS = {"vim": vim, "vim first": lambda: vim("head"), "vit": vit}
