"""Rows of zeros and gradients of zero have defined answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.pages import read_page
from torch import Tensor
from zoo.extreme import FAMILIES, TARGET, language_model, token_ids
from zoo.extreme import with_silent_mixers as silent

from captum_ssm import (
    ImplicitAttention,
    ImplicitAttentionRollout,
    LatimALTI,
    LatimFlow,
    LatimLogit,
    MambaAttribution,
    MambaLRP,
    report,
)

pytestmark = pytest.mark.slow

ROWS = [("mamba", torch.float64), ("mamba2", torch.float32), ("mamba2", torch.bfloat16)]


def own_entry(ids: Tensor) -> Tensor:
    return torch.nn.functional.one_hot(torch.full((len(ids),), ids.shape[1] - 1), ids.shape[1])


@pytest.mark.parametrize(("family", "dtype"), ROWS)
def test_rollout_of_matrices_of_zeros(family: str, dtype: torch.dtype) -> None:
    model, ids = silent(language_model(family)).to(dtype), token_ids()
    for options in ({}, {"normalize_rows": True}, {"absolute": True}, {"discard_ratio": 0.5}):
        found = ImplicitAttentionRollout(model).attribute(ids, **options)
        assert torch.equal(found, own_entry(ids).to(found))
    assert not ImplicitAttentionRollout(model).attribute(ids, recipe="published_code").any()
    assert not ImplicitAttention(model).attribute(ids).any()


@pytest.mark.parametrize("family", FAMILIES)
def test_alti_of_matrices_of_zeros(family: str) -> None:
    model, ids = silent(language_model(family)), token_ids()
    for residual in (False, True):
        for found in LatimALTI(model, residual=residual).maps(ids):
            torch.testing.assert_close(found, torch.eye(ids.shape[1]).expand_as(found))


def test_a_report_of_nothing(tmp_path: Path) -> None:
    model, ids = silent(language_model("mamba")), token_ids(1)
    path = report(model, ids, target=TARGET, path=tmp_path / "report.html")
    facts = str(read_page(path).facts)
    assert "LatimFlow, balanced" in facts and "LatimFlow, frozen" in facts
    assert "nan" not in facts and "NaN" not in facts


@pytest.mark.parametrize(("family", "dtype"), ROWS)
def test_attribution_without_gradient(family: str, dtype: torch.dtype) -> None:
    model, ids = without_head(language_model(family)).to(dtype), token_ids()
    for options in ({}, {"clamp": "none"}, {"normalize_rows": True}):
        found = MambaAttribution(model).attribute(ids, TARGET, **options)
        assert torch.equal(found, own_entry(ids).to(found))
    published = MambaAttribution(model).attribute(ids, TARGET, recipe="published_code")
    assert not published.any()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", [LatimFlow, LatimLogit, MambaLRP])
def test_decompositions_of_an_output_of_zero(method: type, family: str) -> None:
    model, ids = without_head(language_model(family)), token_ids()
    found, delta = method(model).attribute(ids, TARGET, return_convergence_delta=True)
    assert not found.any()
    assert not delta.any()


def without_head(model: Any) -> Any:
    """A model whose logit of the target is 0, whatever it reads."""
    with torch.no_grad():
        model.lm_head.weight[TARGET[-1]] = 0
    return model
