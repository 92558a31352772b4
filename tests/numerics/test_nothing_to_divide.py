"""Rows of zeros, gradients of zero and examples that are padding alone have defined answers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import relative_error
from torch import Tensor
from zoo.extreme import FAMILIES, TARGET, language_model, token_ids
from zoo.extreme import with_silent_mixers as silent

from captum_ssm import (
    ImplicitAttention,
    ImplicitAttentionRollout,
    LatimALTI,
    LatimFlow,
    LatimLogit,
    LatimNorm,
    MambaAttribution,
    MambaLRP,
    report,
)
from captum_ssm.attr.engine.published import min_max
from captum_ssm.errors import PaddedExampleError

METHODS = (LatimFlow, LatimLogit, ImplicitAttention, ImplicitAttentionRollout, MambaAttribution)
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def own_entry(ids: Tensor) -> Tensor:
    """1 at the last token, which is the query, and 0 elsewhere."""
    return torch.nn.functional.one_hot(torch.full((len(ids),), ids.shape[1] - 1), ids.shape[1])


# --- mixers that mix nothing --------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rollout_of_matrices_of_zeros(dtype: torch.dtype, family: str) -> None:
    model, ids = silent(language_model(family)).to(dtype), token_ids()
    for options in ({}, {"normalize_rows": True}, {"absolute": True}, {"discard_ratio": 0.5}):
        found = ImplicitAttentionRollout(model).attribute(ids, **options)
        assert torch.equal(found, own_entry(ids).to(found))
    assert not ImplicitAttentionRollout(model).attribute(ids, recipe="published_code").any()
    assert not ImplicitAttention(model).attribute(ids).any()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("residual", [False, True])
def test_alti_of_matrices_of_zeros(residual: bool, family: str) -> None:
    """A token that nothing contributes to is its own."""
    model, ids = silent(language_model(family)), token_ids()
    for found in LatimALTI(model, residual=residual).maps(ids):
        torch.testing.assert_close(found, torch.eye(ids.shape[1]).expand_as(found))


@pytest.mark.parametrize("dtype", DTYPES)
def test_min_max_of_rows_that_are_constant(dtype: torch.dtype) -> None:
    for value in (0.0, 1.0, -3.0, 1e-30):
        assert torch.isfinite(min_max(torch.full((2, 5), value, dtype=dtype))).all()


def test_a_report_of_nothing(tmp_path: Path) -> None:
    model, ids = silent(language_model("mamba")), token_ids(1)
    path = report(model, ids, target=TARGET, path=tmp_path / "report.html")
    page = path.read_text(encoding="utf-8")
    assert LatimNorm.name in page
    assert "NaN" not in re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)


# --- gradients of zero --------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"clamp": "none"}, {"normalize_rows": True}])
def test_attribution_without_gradient(
    options: dict[str, Any], dtype: torch.dtype, family: str
) -> None:
    model, ids = without_head(language_model(family)).to(dtype), token_ids()
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
    """No output depends on anything."""
    model.lm_head.weight = torch.nn.Parameter(torch.zeros_like(model.lm_head.weight))
    return model


# --- examples of padding alone ------------------------------------------------------------------


@pytest.fixture(params=FAMILIES)
def padded(request: pytest.FixtureRequest) -> tuple[Any, Tensor, Tensor]:
    """A model, ids and a mask (B, L) whose second example holds no token."""
    ids = token_ids(3)
    mask = torch.ones_like(ids)
    mask[1] = 0
    mask[2, :4] = 0
    return language_model(request.param), ids, mask


def masked(method: type, model: Any) -> Any:
    return method(lambda ids, mask: model(ids, attention_mask=mask).logits, model=model)


@pytest.mark.parametrize("method", [*METHODS, LatimALTI, LatimNorm, MambaLRP])
def test_padding_alone_is_refused_and_the_others_are_explained(
    method: type, padded: tuple[Any, Tensor, Tensor]
) -> None:
    model, ids, mask = padded
    with pytest.raises(PaddedExampleError, match="Example 1 of the batch is padding alone"):
        masked(method, model).attribute(ids, TARGET, mask)
    found = masked(method, model).attribute(ids[::2], TARGET, mask[::2])
    assert torch.isfinite(found).all() and not found[mask[::2] == 0].any()
    for example in (0, 2):
        one = slice(example, example + 1)
        alone = masked(method, model).attribute(ids[one], TARGET, mask[one])
        assert relative_error(found[example // 2], alone[0]) <= 1e-5


@pytest.mark.parametrize("query", [None, "last", "mean", 0])
@pytest.mark.parametrize("method", [ImplicitAttention, ImplicitAttentionRollout])
def test_padding_alone_has_no_token_to_ask_for(
    method: type, query: Any, padded: tuple[Any, Tensor, Tensor]
) -> None:
    model, ids, mask = padded
    with pytest.raises(PaddedExampleError, match="Example 1 of the batch"):
        masked(method, model).attribute(ids, None, mask, query=query)


def test_matrices_of_padding_alone(padded: tuple[Any, Tensor, Tensor]) -> None:
    model, ids, mask = padded
    with pytest.raises(PaddedExampleError, match="Example 1 of the batch"):
        masked(ImplicitAttention, model).matrices(ids, additional_forward_args=mask)
    for method in (LatimALTI, LatimNorm):
        with pytest.raises(PaddedExampleError, match="Example 1 of the batch"):
            masked(method, model).maps(ids, additional_forward_args=mask)
