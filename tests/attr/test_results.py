"""What results are like in modes, dtypes and states that the contract of methods does not try."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from helpers.every_method import each_method
from torch import Tensor
from zoo.small import WIDTH, mamba_lm, token_ids, vision

from captum_ssm.errors import GradientModeError

pytestmark = pytest.mark.slow

TARGET = (-1, 3)


def scale(expected: Tensor) -> float:
    """The largest relevance; the entries of a token itself, where shown, are about one."""
    return float(expected.abs().max().clamp_min(0.02))


@each_method
def test_inputs_made_under_inference_mode(method: Any) -> None:
    model = mamba_lm()
    with torch.inference_mode():
        inputs, mask = torch.randn(2, 7, WIDTH), torch.ones(2, 7)
    expected = method(model).attribute(inputs.clone(), TARGET)
    assert torch.equal(method(model).attribute(inputs, TARGET), expected)
    assert torch.equal(method(model).attribute(inputs, TARGET, mask), expected)


@each_method
def test_models_made_under_inference_mode(method: Any) -> None:
    ordinary, pictures = vision("middle").double(), torch.randn(2, 3, 12, 12).double()
    expected = method(ordinary).attribute(pictures, 2)
    with torch.inference_mode():
        model = copy.deepcopy(ordinary)
        if method.needs_gradient:
            with pytest.raises(GradientModeError, match=r"inference_mode\(\) forbids"):
                method(model).attribute(pictures, 2)
    torch.testing.assert_close(method(model).attribute(pictures, 2), expected)
    assert all(p.is_inference() for p in model.parameters())


@each_method
def test_inputs_that_record_gradients(method: Any) -> None:
    model, ids = mamba_lm(), token_ids(2, 7)
    inputs = model.get_input_embeddings()(ids)
    expected = method(model).attribute(inputs.detach(), TARGET)
    leaf = inputs.detach().clone().requires_grad_()
    for given in (leaf, leaf * 1, inputs):
        found = method(model).attribute(given, TARGET)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        assert not found.requires_grad
    assert leaf.grad is None and leaf.requires_grad
    assert all(p.grad is None for p in model.parameters())


@each_method
def test_float16_and_autocast(method: Any) -> None:
    model, ids = mamba_lm(), token_ids(2, 7)
    expected = method(model).attribute(ids, TARGET)
    with torch.autocast("cpu", torch.bfloat16):
        found = method(model).attribute(ids, TARGET)
    assert torch.isfinite(found).all()
    assert (found - expected).abs().max() <= 0.1 * scale(expected)
    half = model.half()
    found = method(half).attribute(ids, TARGET)
    expected = method(copy.deepcopy(half).float()).attribute(ids, TARGET)
    assert torch.isfinite(found).all()
    assert (found.float() - expected).abs().max() <= 0.1 * scale(expected)


def living_tensors() -> int:
    return sum(issubclass(type(o), Tensor) for o in gc.get_objects())


@each_method
def test_memory_is_given_back(method: Any) -> None:
    model, ids = mamba_lm(), token_ids(2, 7)
    attribution = method(model)
    attribution.attribute(ids, TARGET)
    gc.collect()
    gc.disable()
    try:
        before = living_tensors()
        attribution.attribute(ids, TARGET)
        gc.collect()
        after = living_tensors()
    finally:
        gc.enable()
    assert after <= before
    reference = weakref.ref(model)
    del model, attribution
    gc.collect()
    assert reference() is None


@each_method
def test_progress_is_shown_only_if_asked_for(
    method: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    model, ids = mamba_lm(), token_ids(2, 7)
    method(model).attribute(ids, TARGET)
    assert capsys.readouterr() == ("", "")
    if hasattr(method, "default_rule"):
        return  # which takes no layers one by one
    method(model).attribute(ids, TARGET, show_progress=True)
    shown = capsys.readouterr()
    assert shown.out == "" and method.get_name() in shown.err and "100%" in shown.err
