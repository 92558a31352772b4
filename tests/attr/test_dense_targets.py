"""Models that answer for every pixel: pixels, boxes and masks as targets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracles import relative_error
from torch import Tensor, nn
from zoo.segmentation import u_mamba

from captum_ssm import LatimFlow
from captum_ssm.attr import mean_over
from captum_ssm.errors import InputError, OutputError, TargetError
from captum_ssm.linear import FAMILY

pytestmark = pytest.mark.slow

FLOAT32 = 1e-5


def images(dims: int = 2, batch: int = 2) -> Tensor:
    return torch.randn(batch, 3, *((6, 8) if dims == 2 else (4, 4, 6)))


def logits(model: Any, pictures: Tensor) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(pictures)
    return out


def adds_up(found: Any, wanted: Tensor) -> bool:
    size = found.inputs.abs().flatten(1).sum(1) + wanted.abs()
    for bias in found.biases.values():
        size = size + bias.abs()
    assert relative_error(found.output, wanted) <= FLOAT32
    return bool((found.delta.abs() <= FLOAT32 * size).all())


@pytest.mark.parametrize("rule", FAMILY)
@pytest.mark.parametrize("dims", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_pixel_of_a_segmentation(dims: int, rule: Any) -> None:
    model, pictures = u_mamba(dims), images(dims)
    place = (2, *(size // 2 for size in pictures.shape[2:]))
    wanted = logits(model, pictures)[(slice(None), *place)]
    found = LatimFlow(model).decompose(pictures, place, rule=rule)
    assert found.inputs.shape == pictures.shape and adds_up(found, wanted)
    last = tuple(size - 1 for size in pictures.shape[2:])
    each = LatimFlow(model).decompose(pictures, [place, (0, *last)], rule=rule)
    other = logits(model, pictures)[(1, 0, *last)]
    assert adds_up(each, torch.stack([wanted[0], other]))


@pytest.mark.parametrize("method", [LatimFlow])
@pytest.mark.parametrize("dims", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_mean_over_a_mask_is_the_mean_of_its_pixels(method: Any, dims: int) -> None:
    model, pictures = u_mamba(dims).double(), images(dims).double()
    mask = torch.zeros(pictures.shape[2:], dtype=torch.bool)
    mask[1:3, 2:4] = True
    found, delta = method(mean_over(model, mask)).attribute(
        pictures, target=3, return_convergence_delta=True
    )
    places = mask.nonzero().tolist()
    each = [method(model).attribute(pictures, target=(3, *place)) for place in places]
    assert relative_error(found, torch.stack(each).mean(0)) <= 1e-10
    assert (delta.abs() <= 1e-12 * (1 + found.abs().flatten(1).sum(1))).all()
    alone = method(mean_over(model, torch.stack([mask, ~mask]))).attribute(pictures, target=3)
    assert relative_error(alone[0], found[0]) <= 1e-10
    parts = method(mean_over(model, mask)).attribute(pictures, target=3, internal_batch_size=1)
    assert relative_error(parts, found) <= 1e-10


def test_without_a_mask_the_model_says_which_pixels_a_class_has() -> None:
    model, pictures = u_mamba(), images()
    out = logits(model, pictures)
    means = logits(mean_over(model), pictures)
    given = out.argmax(1)
    for example in range(2):
        for label in range(4):
            theirs = out[example, label][given[example] == label]
            wanted = theirs.mean() if len(theirs) else torch.tensor(0.0)
            assert torch.allclose(means[example, label], wanted, atol=1e-5)
    label = int(given[0, 0, 0])
    found = LatimFlow(mean_over(model)).decompose(pictures[:1], label)
    assert adds_up(found, means[:1, label])


def test_relevance_by_patch_where_convolutions_stand_beside_the_mixer() -> None:
    model, pictures = u_mamba(), images()
    pixels = LatimFlow(model).attribute(pictures, target=(1, 2, 3))
    found = LatimFlow(model).attribute(pictures, target=(1, 2, 3), per_token=True)
    assert relative_error(found, pixels.sum(1)) <= FLOAT32


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = u_mamba()
        self.boxes = nn.Linear(48, 5)

    def forward(self, pictures: Tensor) -> Tensor:
        return self.boxes(self.body(pictures).flatten(2)).mT


def test_a_box_and_its_class() -> None:
    model, pictures = Detector().eval(), images()
    found = LatimFlow(model).decompose(pictures, (4, 1))
    assert adds_up(found, logits(model, pictures)[:, 4, 1])
    with pytest.raises(TargetError, match=r"position 5 is not in \[-5, 5\)"):
        LatimFlow(model).attribute(pictures, target=(5, 1))


@pytest.mark.parametrize(("mask", "message"), [
    (torch.ones(6, 8), r"mask contains a tensor of torch\.float32\. Pass booleans"),
    (torch.zeros(6, 8).bool(), r"mask contains no True\. Pass booleans"),
    (torch.ones(8, 6).bool(), r"mask has shape \(8, 6\).*Pass .* \(6, 8\) or \(2, 6, 8\)"),
    (torch.ones(3, 6, 8).bool(), r"mask has shape \(3, 6, 8\), but the model returned .* for 2"),
])  # fmt: skip
def test_masks_that_do_not_fit(mask: Tensor, message: str) -> None:
    with pytest.raises(InputError, match=message):
        LatimFlow(mean_over(u_mamba(), mask)).attribute(images(), target=1)


def test_targets_that_do_not_fit() -> None:
    with pytest.raises(TargetError, match=r"has 1 index per example.* needs 3"):
        LatimFlow(u_mamba()).attribute(images(), target=1)
    with pytest.raises(OutputError, match=r"needs logits for every pixel .* returned \(2, 4\)"):
        mean_over(lambda pictures: torch.zeros(2, 4))(images())
