"""The head that is trained beside an image classifier: which pixel it reads from which token."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("transformers")
pytest.importorskip("skimage")

from bench_helpers.vision import MODELS, PATCHES, SCENES, patch_places, scene_image, streams

from captum_ssm_bench.training.image_recipes import ImageModelSize, ImageRecipe
from captum_ssm_bench.training.loop import fit
from captum_ssm_bench.training.pixel_reader import PixelReader, patch_tokens
from captum_ssm_bench.training.recipe import Round

SIZES = {
    "vim": ImageModelSize("vim", layers=1, hidden=12, state=2, patch=4),
    "vim first": ImageModelSize("vim", layers=1, hidden=12, state=2, patch=4, cls_token="head"),
    "vit": ImageModelSize("vit", layers=1, hidden=24, patch=4),
}
WEIGHT = 0.7


def recipe(name: str, mask_loss: float) -> ImageRecipe:
    return ImageRecipe(SCENES, SIZES[name], steps=(2, 1), batch_size=3, mask_loss=mask_loss)


def last_tokens(model: Any, name: str, images: Tensor) -> Tensor:
    """The patches' tokens behind the last norm, (B, N, E), from the model's parts."""
    if name == "vit":
        tokens: Tensor = model.vit(images).last_hidden_state
    else:
        tokens = torch.cat([model.norm_f(streams(model, image[None])[-1]) for image in images])
    return tokens[:, patch_places(model)]


def test_each_pixel_is_read_from_the_patch_that_it_lies_in() -> None:
    reader, tokens = PixelReader(width=5, patch=3, classes=2), torch.randn(2, 4, 5)
    found = reader(tokens)
    assert found.shape == (2, 3, 6, 6)
    for y in range(6):
        for x in range(6):
            read = reader.head(tokens[:, 2 * (y // 3) + x // 3]).view(2, 3, 3, 3)
            assert torch.allclose(found[:, :, y, x], read[:, :, y % 3, x % 3], atol=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_the_tokens_of_the_patches(name: str) -> None:
    model, image = MODELS[name](), scene_image()
    with patch_tokens(model) as kept:
        model(image)
    (tokens,) = kept
    assert tokens.shape[1] == PATCHES
    assert torch.allclose(tokens, last_tokens(model, name, image), atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_no_hook_is_left_behind_an_error(name: str) -> None:
    model = MODELS[name]()
    with pytest.raises(RuntimeError, match="no image"), patch_tokens(model):
        raise RuntimeError("no image")
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("name", SIZES)
def test_the_second_loss_is_that_of_the_pixels(name: str, seed: int) -> None:
    model = recipe(name, 0).new()
    plain, both = (recipe(name, weight).rounds(model, seed)[0] for weight in (0, WEIGHT))
    assert plain.help is None and isinstance(both.help, PixelReader)
    task = replace(SCENES, polarity="bright")
    batch = task.draw(3, random.Random(seed).getrandbits(62), held_out=False)
    read = both.help(last_tokens(model, name, batch.images))
    pixels = [
        -read[i, :, y, x].log_softmax(0)[batch.masks[i, y, x]]
        for i in range(3)
        for y in range(SCENES.size)
        for x in range(SCENES.size)
    ]
    wanted = WEIGHT * torch.stack(pixels).mean()
    assert torch.allclose(both.loss() - plain.loss(), wanted, atol=1e-5)


@pytest.mark.parametrize("name", SIZES)
def test_all_rounds_train_one_reader_which_is_no_part_of_the_model(name: str, seed: int) -> None:
    model = recipe(name, WEIGHT).new()
    names = set(model.state_dict())
    first, second = recipe(name, WEIGHT).rounds(model, seed)
    assert isinstance(first.help, PixelReader) and first.help is second.help
    before = first.help.head.weight.detach().clone()
    fit(model, first, log=lambda line: None)
    assert not torch.equal(first.help.head.weight, before)
    assert set(model.state_dict()) == names


def test_what_helps_is_trained_until_it_helps() -> None:
    """A frozen model whose tokens are one-hot: only the reader can learn which pixel is whose."""
    tokens = torch.eye(4)[None]
    masks = torch.randint(3, (1, 8, 8))
    model, reader = torch.nn.Linear(1, 1), PixelReader(width=4, patch=4, classes=2)
    part = Round(
        steps=150,
        loss=lambda: F.cross_entropy(reader(tokens), masks),
        score=lambda: 0.0,
        learning_rate=0.1,
        help=reader,
    )
    fit(model, part, log=lambda line: None)
    assert torch.equal(reader(tokens).argmax(1), masks)
