"""Image perturbation against a loop over pixels, with a classifier that can be followed by hand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from captum_ssm.metrics import black, blurred, change_order, image_perturbation, pixel_relevance
from captum_ssm.metrics.fills import filled


class Linear(nn.Module):
    """Logits that are linear in the pixels."""

    def __init__(self, shape: tuple[int, ...], classes: int = 4) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(classes, *shape))
        self.sizes: list[int] = []

    def forward(self, images: Tensor) -> Tensor:
        self.sizes.append(len(images))
        return torch.einsum("bchw,kchw->bk", images, self.weight.to(images.dtype))


def by_loop(model, image, relevance, target, fractions, fill, most_first):
    """One image, one share and one pixel at a time."""
    height, width = relevance.shape
    places = [(r, c) for r in range(height) for c in range(width)]
    places.sort(key=lambda at: relevance[at].item(), reverse=most_first)
    correct, chances = [], []
    for share in fractions:
        changed = image.clone()
        for r, c in places[: int(height * width * share + 1e-9)]:
            changed[:, r, c] = fill[:, r, c]
        logits = model(changed[None])[0]
        correct.append(float(logits.argmax() == target))
        chances.append(logits.softmax(-1)[target].item())
    return correct, chances


@pytest.mark.parametrize("fill", [0.3, "mean", "blur", "color", "image"])
@torch.no_grad()
def test_like_a_loop_over_pixels(fill):
    images = torch.randn(3, 3, 9, 10, dtype=torch.float64)
    relevance = torch.randn(3, 9, 10, dtype=torch.float64)
    given = fill
    if fill == "color":  # as many channels as images
        given = torch.randn(3)
        whole = given.double()[:, None, None].expand_as(images)
    elif fill == "image":
        given = whole = torch.randn_like(images)
    elif isinstance(fill, float):
        whole = torch.full_like(images, fill)
    else:
        whole = filled(images, fill).expand_as(images)
    # 0.7 * 90 is a little below 63 in binary
    shares, target = [0.0, 0.1, 0.45, 0.7, 1.0], [1, 3, 0]
    for first in (True, False):
        model = Linear(images.shape[1:]).double()
        options = {"most_first": first, "fractions": shares, "fill": given}
        found = image_perturbation(
            model, images, relevance, target, internal_batch_size=2, **options
        )
        assert max(model.sizes) == 2
        for i in range(3):
            loop = by_loop(model, images[i], relevance[i], target[i], shares, whole[i], first)
            assert found.correct.values[i].tolist() == loop[0]
            assert found.probability.values[i].tolist() == pytest.approx(loop[1], abs=1e-7)
    by_default = image_perturbation(model, images, relevance, fractions=[0, 0.5], fill=given)
    assert by_default.correct.values[:, 0].tolist() == [1] * 3  # of the predicted class


def test_pixel_relevance():
    relevance = torch.randn(2, 3, 8, 6)
    torch.testing.assert_close(pixel_relevance(relevance, (8, 6)), relevance.sum(1))
    grid = torch.randn(2, 4, 3)
    expected = F.interpolate(grid[:, None], scale_factor=2, mode="bilinear")[:, 0]
    torch.testing.assert_close(pixel_relevance(grid, (8, 6)), expected)


def test_order_of_ties():
    relevance = torch.tensor([[1.0, 2.0, 1.0, 2.0]])
    assert change_order(relevance, most_first=True).tolist() == [[2, 0, 3, 1]]
    assert change_order(relevance, most_first=False).tolist() == [[0, 2, 1, 3]]
    mask = torch.tensor([[1, 0, 1, 1]])
    assert change_order(relevance, most_first=True, mask=mask).tolist() == [[1, 3, 2, 0]]
    seen = set()
    generator = torch.Generator().manual_seed(3)
    for _ in range(60):
        order = change_order(relevance, most_first=True, generator=generator)[0].tolist()
        assert {order[1], order[3]} == {0, 1}
        seen.add(tuple(order))
    assert len(seen) == 4


def test_fills():
    assert torch.allclose(black([0.5, 0.2], [0.25, 0.4]), torch.tensor([-2, -0.5]).double())
    images = torch.rand(2, 3, 9, 40)
    flat = torch.full((1, 2, 7, 5), 0.3)
    torch.testing.assert_close(blurred(flat), flat)
    torch.testing.assert_close(
        blurred(images, 500.0).std((2, 3)), torch.zeros(2, 3), atol=0.08, rtol=0
    )
    ndimage = pytest.importorskip("scipy.ndimage")
    expected = ndimage.gaussian_filter(
        images.double().numpy(), (0, 0, 2, 2), mode="nearest", radius=(0, 0, 6, 6)
    )
    torch.testing.assert_close(blurred(images.double(), 2.0), torch.as_tensor(expected))
