"""An example without a single real token is refused, by every method in the same words."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import every_method
from helpers.sessions import thorough
from torch import Tensor, nn
from zoo import networks
from zoo.small import mamba_lm, token_ids

from captum_ssm import ImplicitAttentionRollout, LatimFlow, LatimLogit, compare, report, trace
from captum_ssm.errors import InputError, PaddedExampleError

#: The id that stands for padding.
PADDING = 0
QUICK = ("mamba", "bamba", "llama with attention", "fla GLA")


class Masking(nn.Module):
    """Hides the tokens of one id, as pipelines do."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Any:
        return self.model(input_ids, attention_mask=(input_ids != PADDING).long())


def padded(*examples: int, batch: int = 4) -> Tensor:
    """Token ids, some of whose examples are padding alone, and the others in part."""
    ids = token_ids(batch, 6).clamp_min(1)
    ids[:, :2] = PADDING
    ids[list(examples)] = PADDING
    return ids


@pytest.mark.full
@pytest.mark.parametrize("name", [*every_method.CALLS, *(m.__name__ for m in every_method.METHODS)])
def test_by_every_method(name: str) -> None:
    model = Masking(mamba_lm())
    assert every_method.call(name, model, padded(batch=3), (-1, 3))
    with pytest.raises(PaddedExampleError, match=r"^Example 1 of the batch is padding"):
        every_method.call(name, model, padded(1, 2, batch=3), (-1, 3))
    with pytest.raises(InputError, match=r"^Example 0 of the batch is padding"):
        every_method.call(name, model, padded(0, batch=1), (-1, 3))


@pytest.mark.full
@pytest.mark.parametrize("name", thorough(networks.MASKED, QUICK))
def test_in_every_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = networks.make(name, monkeypatch)
    model = Masking(case.model)
    for method in (LatimFlow, LatimLogit, ImplicitAttentionRollout):
        with pytest.raises(PaddedExampleError, match="Example 2"):
            method(model).attribute(padded(2), target=(-1, 3))
        assert method(model).attribute(padded(), target=(-1, 3)).any()


@pytest.mark.parametrize("size", [1, 2, 3, 9])
@pytest.mark.parametrize("method", [LatimFlow, LatimLogit, ImplicitAttentionRollout])
def test_the_example_is_counted_in_the_whole_batch(method: Any, size: int) -> None:
    model = Masking(mamba_lm())
    ids = padded(4, batch=6)
    with pytest.raises(PaddedExampleError, match="Example 4 of the batch"):
        method(model).attribute(ids, target=(-1, 3), internal_batch_size=size)
    with pytest.raises(PaddedExampleError, match="Example 4 of the batch") as caught:
        compare(model, [method], ids, target=(-1, 3), internal_batch_size=size)
    assert caught.value.example == 4


@pytest.mark.parametrize("target", [None, (-1, 3), [(-1, 3)] * 6])
def test_a_report_counts_in_the_whole_batch(target: Any, tmp_path: Path) -> None:
    """It explains one example at a time, and finds out before the first one what it can explain."""
    path = tmp_path / "report.html"
    with pytest.raises(PaddedExampleError, match=r"^Example 4 of the batch is padding") as caught:
        report(Masking(mamba_lm()), padded(4, 5, batch=6), [LatimFlow], target=target, path=path)
    assert caught.value.example == 4
    assert not path.exists()


def test_a_trace_still_shows_what_the_mixers_did() -> None:
    model, ids = Masking(mamba_lm()), padded(1)
    with torch.no_grad(), trace(model) as t:
        model(ids)
    for layer in t.layers:
        layer.verify()
        assert not layer.operator.dense()[1].any()


def test_the_error_travels_between_processes() -> None:
    error = pickle.loads(pickle.dumps(PaddedExampleError(3)))
    assert str(error) == str(PaddedExampleError(3)) and error.example == 3
