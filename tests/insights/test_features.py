"""Batches, and what is shown of each kind of input."""

from __future__ import annotations

import base64
import itertools
import math
from io import BytesIO

import numpy as np
import pytest
import torch
from matplotlib import colormaps
from matplotlib.image import imread

from captum_ssm.errors import InputError
from captum_ssm.insights import Batch, GeneralFeature, ImageFeature, TextFeature
from captum_ssm.insights.dataset import examples_of
from captum_ssm.insights.features import FeatureOutput


def pixels(png: str) -> np.ndarray:
    """(H, W, 3) of 0 to 255."""
    return np.round(imread(BytesIO(base64.b64decode(png, validate=True)))[..., :3] * 255)


def shown(image: torch.Tensor, relevance: torch.Tensor | None = None) -> FeatureOutput:
    relevance = torch.randn(image.shape) if relevance is None else relevance
    return ImageFeature("photo", None, None).visualize(relevance, image, 0.5)


INPUTS = [
    (lambda x: x, lambda x: x),
    (lambda x: x.half(), lambda x: x.half().double()),
    (lambda x: (x * 255).round(), lambda x: (x * 255).round() / 255),
    (lambda x: (x * 255).to(torch.uint8), lambda x: (x * 255).to(torch.uint8).double() / 255),
    (lambda x: x > 0.5, lambda x: (x > 0.5).double()),
    (lambda x: x - 0.4, lambda x: (x - x.min()) / (x.max() - x.min())),
]


def test_an_image_of_any_range_and_number_of_channels():
    for channels, (given, wanted) in itertools.product((2, 3), INPUTS):
        image = torch.rand(1, channels, 5, 7, dtype=torch.float64)
        image[0, 0, 0, :2] = torch.tensor([0.0, 1.0])
        expected = wanted(image)[0]
        if channels != 3:
            expected = expected.mean(0, keepdim=True).expand(3, -1, -1)
        expected = expected.permute(1, 2, 0).numpy() * 255
        found = pixels(shown(given(image)).base)
        assert np.abs(found - expected).max() <= 0.5 + 1e-6
    for channels in (1, 3):
        nothing = torch.zeros(1, channels, 4, 3)
        output = shown(nothing, nothing)
        assert (pixels(output.base) == 0).all()
        assert pixels(output.modified).min() > 240  # white, whatever the colour scale is
        assert output[2:] == (output.modified, "image", 0.5)


def test_numbers_that_are_none_are_grey_and_leave_the_others_alone():
    relevance, image = torch.randn(1, 3, 6, 5), torch.rand(1, 3, 6, 5)
    holed, clean = relevance.clone(), relevance.clone()
    holed[0, 1, 2, 3], holed[0, 0, 4, 0] = math.nan, math.inf
    clean[0, :, 2, 3] = clean[0, :, 4, 0] = 0
    image[0, 0, 0, 0] = math.nan
    found, expected = (pixels(shown(image, r).modified) for r in (holed, clean))
    grey = np.zeros((6, 5), dtype=bool)
    grey[2, 3] = grey[4, 0] = True
    assert (found[grey] == 128).all()
    np.testing.assert_array_equal(found[~grey], expected[~grey])


def test_relevance_is_centered_at_zero_and_its_scale_spares_the_few_largest():
    relevance = torch.zeros(1, 2, 10, 10)
    relevance[0, 0] = torch.linspace(-1, 1, 100).view(10, 10)
    relevance[0, 1, 5, 5] = 9.0  # channels are summed
    summed = relevance.sum(1)[0]
    end = sorted(abs(v) for v in summed.flatten().tolist())[98]  # of 100, none of which is 0
    assert end == 1.0
    shares = ((summed / end).clamp(-1, 1) + 1) / 2
    expected = colormaps["PuOr"](shares.double().numpy())[..., :3] * 255
    assert np.abs(pixels(shown(torch.rand(1, 3, 10, 10), relevance).modified) - expected).max() <= 1


def test_inputs_that_cannot_be_shown_are_named():
    for shape in ((1, 3), (2, 3, 4, 4), (1, 3, 0, 4)):
        with pytest.raises(InputError, match="cannot be shown as an image"):
            shown(torch.rand(shape), torch.rand(1, 3, 4, 4))
    feature = GeneralFeature("size", ["width", "height"])
    for shape in ((1, 3), (1, 2, 2)):
        with pytest.raises(InputError, match="'size' has 2 categories"):
            feature.visualize(torch.zeros(shape), torch.zeros(shape), 1.0)
    # and a transformation sees the whole
    white = ImageFeature("photo", None, None, visualization_transform=lambda x: x * 0 + len(x))
    found = white.visualize(torch.rand(1, 3, 4, 4), torch.rand(1, 3, 4, 4), 1.0)
    assert (pixels(found.base) == 255).all()


def test_words_and_their_relevance():
    ids = torch.tensor([[2, 0, 1]])
    for dtype in (torch.float64, torch.bfloat16):
        of_embeddings = torch.randn(1, 3, 4).to(dtype)
        output = TextFeature("text", None, None, None).visualize(of_embeddings, ids, 1.0)
        sums = of_embeddings[0].double().sum(-1)
        assert output.base == ["2", "0", "1"]
        assert output.modified == pytest.approx((100 * sums / sums.abs().max()).tolist())
    for feature in (TextFeature("text", None, None, None), GeneralFeature("size", [*"abc"])):
        assert feature.visualize(torch.zeros(1, 3), ids, 1.0).modified == [0.0, 0.0, 0.0]
    found = TextFeature("text", None, None, None).visualize(
        torch.tensor([[math.nan, 4, -1]]), ids, 1.0
    )
    assert math.isnan(found.modified[0]) and found.modified[1:] == [100.0, -25.0]


def test_a_batch_is_cut_into_examples():
    photo, question = torch.rand(3, 2, 4, 4), torch.randint(9, (3, 5))
    lengths, whole = torch.tensor([5, 4, 5]), torch.tensor(7)
    batch = Batch((photo, question), torch.tensor([2, 0, 1]), (lengths, "mode", whole))
    for i, example in enumerate(examples_of(batch)):
        assert torch.equal(example.inputs[0], photo[i : i + 1])
        assert torch.equal(example.inputs[1], question[i : i + 1])
        assert torch.equal(example.additional[0], lengths[i : i + 1])
        assert example.additional[1:] == ("mode", whole)
        assert example.label == [2, 0, 1][i] and type(example.label) is int


def test_labels_in_every_form():
    for labels in ([1, 0], (1, 0), torch.tensor([[1], [0]])):
        found = [example.label for example in examples_of(Batch(torch.rand(2, 1), labels))]
        assert found == [1, 0]
    assert [e.label for e in examples_of(Batch(torch.rand(2, 1), None))] == [None, None]


BAD = [
    ((torch.rand(2, 1), torch.zeros(2)), "contains a tuple.*Batch"),
    (Batch([torch.rand(2, 1)], None), "Pass a tensor whose first dimension"),
    (Batch(torch.tensor(1.0), None), "Pass a tensor whose first dimension"),
    (Batch((torch.rand(2, 1), torch.rand(3, 1)), None), r"has 2 examples.*3 in a tensor.*\(3, 1\)"),
    (Batch(torch.rand(2, 1), None, torch.rand(1)), "has 2 examples.*1 in a tensor"),
    (Batch(torch.rand(2, 1), torch.zeros(3)), "3 labels for 2 examples"),
]


def test_a_batch_that_does_not_fit_is_named():
    for batch, what in BAD:
        with pytest.raises(InputError, match=what):
            list(examples_of(batch))
