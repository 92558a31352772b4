"""Small vision-language models of transformers, with random parameters, and inputs for them."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers.versions import named
from torch import Tensor, nn

from zoo.architectures import Case, Make
from zoo.delta import EXPERTS, GROUPED, INDEXED, LATENT_EXPERTS, without_kernels
from zoo.mamba import randomise

#: The token in whose place a feature of an image stands, and the size of the vocabulary.
IMAGE, VOCABULARY = 17, 19
_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
_QWEN: dict[str, Any] = {
    **_TEXT, **GROUPED, "head_dim": 8, "rms_norm_eps": 1e-3,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
_TOWER: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 10, "patch_size": 2}
_QWEN_TOWER: dict[str, Any] = {
    **_TOWER, "depth": 2, "num_heads": 2, "in_channels": 3, "temporal_patch_size": 1,
    "spatial_merge_size": 2, "out_hidden_size": 16, "num_position_embeddings": 16,
}  # fmt: skip
_GLM: dict[str, Any] = {
    **_TEXT, **LATENT_EXPERTS, **INDEXED, "rms_norm_eps": 1e-3,
    "layer_types": ["linear_attention", "full_attention"], "mlp_layer_types": ["dense", "sparse"],
}  # fmt: skip
_GLM_TOWER = {k: v for k, v in _QWEN_TOWER.items() if k != "num_position_embeddings"}
_CONV = {"layer_types": ["conv", "full_attention"]}
_SIGLIP: dict[str, Any] = {
    **_TOWER, "num_hidden_layers": 2, "num_attention_heads": 2, "num_patches": 16,
    "vision_use_head": False,
}  # fmt: skip
_LFM3_TOWER: dict[str, Any] = {
    **_TOWER, **_CONV, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "temporal_patch_size": 1,
}  # fmt: skip

#: By family: stem of the class names, options of the text's and the tower's configuration.
_MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen3_5": ("Qwen3_5", _QWEN, _QWEN_TOWER),
    "qwen3_5_moe": ("Qwen3_5Moe", {**_QWEN, **EXPERTS}, _QWEN_TOWER),
    "glm5_next": ("Glm5Next", _GLM, _GLM_TOWER),
    "lfm2_vl": ("Lfm2Vl", {**_TEXT, **_CONV}, _SIGLIP),
    "lfm3_vl": ("Lfm3Vl", {**_TEXT, **_CONV}, _LFM3_TOWER),
}
FAMILIES = tuple(_MODELS)
#: Whose towers have an adapter.
SEEING = tuple(family for family in FAMILIES if family != "lfm3_vl")


def vision_language_model(
    family: str, patch: pytest.MonkeyPatch, head: str = "ForConditionalGeneration"
) -> Any:
    """The family's model in float64."""
    stem, text, tower = _MODELS[family]
    own = family.removesuffix("_vl")  # where the mixers of the text are
    without_kernels(importlib.import_module(f"transformers.models.{own}.modeling_{own}"), patch)
    own = {"image_token_id": IMAGE, "projector_hidden_size": 14, "num_labels": 3, "pad_token_id": 0}
    config = named(f"{stem}Config")(text_config=text, vision_config=tower, **own)
    if "experts_implementation" in text:
        config.text_config._experts_implementation = "eager"
    return randomise(named(stem + head)(config).double())


@dataclass(frozen=True)
class Pictured:
    """A batch of texts with images, padded on the left.

    Attributes:
        ids: (B, L), with :data:`IMAGE` where a feature of an image stands.
        pixels: the patches of all images, as the model's processor lays them out.
        others: what else the model is given, by name.
        images: of which example each image is.
        patches: of which example each patch is, where those of all images come end to end.
    """

    ids: Tensor
    pixels: Tensor
    others: dict[str, Tensor]
    images: Tensor
    patches: Tensor

    @property
    def of_pixels(self) -> Tensor:
        """Of which example each row of pixels is."""
        return self.images if self.pixels.dim() == 3 else self.patches

    def alone(self, example: int) -> Pictured:
        """One of the examples, without its padding."""
        real = self.others["attention_mask"][example].bool()
        own, mine = self.images == example, self.patches == example
        others = {
            name: x[example : example + 1, real] if x.shape == self.ids.shape else x[own]
            for name, x in self.others.items()
        }
        pixels = self.pixels[self.of_pixels == example]
        ids = self.ids[example : example + 1, real]
        return Pictured(ids, pixels, others, self.images[own], self.patches[mine])

    def of(self, model: Any) -> Any:
        """The model as a function of ids, pixels and the others."""
        names = list(self.others)

        def forward(ids: Tensor, pixels: Tensor, *others: Tensor) -> Any:
            more = dict(zip(names, others, strict=True))
            return model(input_ids=ids, pixel_values=pixels, **more)

        return forward


def pictured(family: str, grids: Sequence[Sequence[tuple[int, int]]]) -> Pictured:
    """Texts with images of the given grids of patches, one list of images for each text.

    Every 2 by 2 patches become one token.
    """
    texts = []
    for number, images in enumerate(grids):
        text = torch.randint(3, IMAGE, (2 + number,)).tolist()
        for height, width in images:
            text += [IMAGE] * (height * width // 4) + torch.randint(3, IMAGE, (2,)).tolist()
        texts.append(text)
    longest = max(map(len, texts))
    ids = torch.tensor([[0] * (longest - len(text)) + text for text in texts])
    mask = torch.tensor([[0] * (longest - len(text)) + [1] * len(text) for text in texts])
    sizes = torch.tensor([size for images in grids for size in images])
    count = sizes.prod(1)
    images = torch.arange(len(grids)).repeat_interleave(torch.tensor(list(map(len, grids))))
    of_whom = images, images.repeat_interleave(count)
    if family == "lfm2_vl":
        pixels = torch.randn(len(sizes), int(count.max()), 12).double()
        kept = torch.arange(pixels.shape[1]) < count[:, None]
        shown = {"spatial_shapes": sizes, "pixel_attention_mask": kept.long()}
        return Pictured(ids, pixels, shown | {"attention_mask": mask}, *of_whom)
    frames = torch.cat([torch.ones(len(sizes), 1, dtype=torch.long), sizes], 1)
    shown = {"image_grid_thw": frames, "attention_mask": mask}
    if family.startswith("qwen"):
        shown["mm_token_type_ids"] = (ids == IMAGE).long()
    return Pictured(ids, torch.randn(int(count.sum()), 12).double(), shown, *of_whom)


class TowerForClassification(nn.Module):
    """Classes of images, by the mean of what a tower makes of their patches."""

    def __init__(self, family: str) -> None:
        super().__init__()
        self.family = family
        stem, _, options = _TOWERS[family]
        config = named(f"{stem}VisionConfig")(**options)
        self.tower = named(f"{stem}VisionModel")(config)
        self.head = nn.Linear(16 if family.startswith("qwen") else 8, 3)

    def forward(self, pixels: Tensor) -> Tensor:
        if self.family == "siglip":  # (B, 3, H, W), the others' patches are (B, L, F)
            return self.head(self.tower(pixels).last_hidden_state.mean(1))
        batch, size = len(pixels), torch.full((len(pixels), 2), 4)
        if self.family == "siglip2":
            kept = torch.ones(pixels.shape[:2], dtype=torch.long)
            found = self.tower(pixels, pixel_attention_mask=kept, spatial_shapes=size)
            return self.head(found.last_hidden_state.mean(1))
        frames = torch.cat([torch.ones(batch, 1, dtype=torch.long), size], 1)
        merged = self.tower(pixels.flatten(0, 1), grid_thw=frames).pooler_output
        return self.head(merged.view(batch, 4, -1).mean(1))


_IMAGES: dict[str, Any] = {k: v for k, v in _SIGLIP.items() if k != "num_patches"}
_TOWERS: dict[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {
    "qwen3_5": ("Qwen3_5", (2, 16, 12), _QWEN_TOWER),
    "qwen3_5_moe": ("Qwen3_5Moe", (2, 16, 12), _QWEN_TOWER),
    "siglip": ("Siglip", (2, 3, 8, 8), {**_IMAGES, "image_size": 8}),
    "siglip2": ("Siglip2", (2, 16, 12), _SIGLIP),
}


def _tower(_: pytest.MonkeyPatch, family: str) -> Case:
    return Case(randomise(TowerForClassification(family)), torch.randn(_TOWERS[family][1]))


#: A small model of every tower that has an adapter.
TOWERS: dict[str, Make] = {
    f"tower of {family}": functools.partial(_tower, family=family) for family in _TOWERS
}
