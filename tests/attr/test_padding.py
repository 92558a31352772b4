"""Padding of every kind: a batch gives what each example gives alone, and padding gets nothing."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import every_method
from helpers.every_method import each_method
from torch import Tensor, nn
from zoo.small import classifier, mamba_lm, token_ids

from captum_ssm import LatimFlow, compare, report
from captum_ssm.errors import InputError, PaddedExampleError

pytestmark = pytest.mark.slow


LENGTHS = (9, 1, 6)


def agree(method: Any, model: nn.Module, target: Any, mask: Tensor, **options: Any) -> None:
    ids = token_ids(*mask.shape)
    padded = method(model).attribute(ids, target, mask, **options)
    assert padded.shape == ids.shape and not padded[mask == 0].any()
    for example, real in enumerate(mask.bool()):
        own = target[example] if isinstance(target, list) else target
        alone = method(model).attribute(ids[example : example + 1, real], own, **options)
        own_mean = method is LatimFlow and alone.numel() == 1  # then the default baseline is it
        assert alone.any() != own_mean
        scale = float(alone.abs().max().clamp_min(1))
        assert (padded[example : example + 1, real] - alone).abs().max() <= 1e-6 * scale


def on_the_right() -> Tensor:
    return torch.stack([(torch.arange(9) < length).long() for length in LENGTHS])


#: A model, and its targets.
MODELS: list[tuple[Any, Any]] = [
    (lambda: mamba_lm(use_bias=True), [(length - 1, 3) for length in LENGTHS]),
    (classifier, 2),
    (lambda: classifier("mean"), 2),
]


@each_method
def test_on_the_right(method: Any) -> None:
    for make, target in MODELS:
        agree(method, make().double(), target, on_the_right())


@each_method
def test_masks_of_any_dtype_and_masks_that_hide_nothing(method: Any) -> None:
    model, ids, mask = mamba_lm(), token_ids(2, 7), torch.ones(2, 7).long()
    expected = method(model).attribute(ids, (-1, 2))
    assert torch.equal(method(model).attribute(ids, (-1, 2), mask), expected)
    mask[0, 3:5] = 0  # a hole is padding too
    expected = method(model).attribute(ids, (-1, 2), mask)
    assert not expected[0, 3:5].any() and expected.any()
    for dtype in (torch.bool, torch.int32, torch.float32):
        found = method(model).attribute(ids, (-1, 2), mask.to(dtype))
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


#: The id that stands for padding.
PADDING = 0


class Masking(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Any:
        return self.model(input_ids, attention_mask=(input_ids != PADDING).long())


def padded(*examples: int, batch: int = 4) -> Tensor:
    ids = token_ids(batch, 6).clamp_min(1)
    ids[:, :2] = PADDING
    ids[list(examples)] = PADDING
    return ids


@pytest.mark.parametrize("name", every_method.CALLS)
def test_by_every_call(name: str) -> None:
    model = Masking(mamba_lm())
    assert every_method.call(name, model, padded(batch=3), (-1, 3))
    with pytest.raises(PaddedExampleError, match=r"^Example 1 of the batch has only padding"):
        every_method.call(name, model, padded(1, 2, batch=3), (-1, 3))
    with pytest.raises(InputError, match=r"^Example 0 of the batch has only padding"):
        every_method.call(name, model, padded(0, batch=1), (-1, 3))


@each_method
def test_the_example_is_counted_in_the_whole_batch(method: Any) -> None:
    model, ids = Masking(mamba_lm()), padded(4, batch=6)
    with pytest.raises(PaddedExampleError, match="Example 4 of the batch"):
        method(model).attribute(ids, target=(-1, 3), internal_batch_size=2)
    with pytest.raises(PaddedExampleError, match="Example 4 of the batch") as caught:
        compare(model, ids, [method], target=(-1, 3), internal_batch_size=2)
    assert caught.value.example == 4


@pytest.mark.parametrize("target", [None, [(-1, 3)] * 6])
def test_a_report_counts_in_the_whole_batch(target: Any, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    with pytest.raises(
        PaddedExampleError, match=r"^Example 4 of the batch has only padding"
    ) as caught:
        report(Masking(mamba_lm()), padded(4, 5, batch=6), [LatimFlow], target=target, path=path)
    assert caught.value.example == 4
    assert not path.exists()


def test_the_error_travels_between_processes() -> None:
    error = pickle.loads(pickle.dumps(PaddedExampleError(3)))
    assert str(error) == str(PaddedExampleError(3)) and error.example == 3
