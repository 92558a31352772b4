"""Which methods fit, found without running anything."""

from __future__ import annotations

import pytest
import torch
from captum.attr import (
    Deconvolution,
    DeepLift,
    FeatureAblation,
    GuidedBackprop,
    IntegratedGradients,
    Occlusion,
    Saliency,
)
from helpers.insights_examples import Untouched, cnn, table_model
from torch import nn
from zoo.small import classifier, mamba_lm, vision

from captum_ssm import LatimFlow, MambaAttribution
from captum_ssm.insights.applicability import obstacle

IDS = torch.ones(1, 4, dtype=torch.long)
NUMBERS = torch.rand(1, 4)
EMBEDDINGS = torch.rand(1, 4, 10)
IMAGE = torch.rand(1, 3, 12, 12)

FITS = [
    (IntegratedGradients, cnn, (IMAGE,)),
    (Saliency, table_model, (NUMBERS,)),
    (Saliency, mamba_lm, (EMBEDDINGS,)),
    (DeepLift, cnn, (IMAGE, NUMBERS)),
    (GuidedBackprop, cnn, (IMAGE,)),
    (Deconvolution, cnn, (IMAGE,)),
    (FeatureAblation, mamba_lm, (IDS,)),
    (Occlusion, cnn, (IMAGE,)),
    (LatimFlow, mamba_lm, (IDS,)),
    (LatimFlow, classifier, (EMBEDDINGS,)),
    (MambaAttribution, vision, (IMAGE,)),
    (MambaAttribution, lambda: mamba_lm().forward, (IDS,)),
]

DOES_NOT = [
    (IntegratedGradients, mamba_lm, (IDS,), "integers"),
    (IntegratedGradients, mamba_lm, (NUMBERS, IDS), "integers"),
    (DeepLift, lambda: cnn().forward, (IMAGE,), "Module"),
    (GuidedBackprop, table_model, (NUMBERS,), "ReLU"),
    (Deconvolution, vision, (IMAGE,), "ReLU"),
    (LatimFlow, cnn, (IMAGE,), "No token mixer"),
    (LatimFlow, lambda: cnn().forward, (IMAGE,), "No token mixer"),
    (LatimFlow, lambda: nn.LSTM(4, 2), (EMBEDDINGS,), "."),
    (LatimFlow, lambda: lambda x: x, (IDS,), "No torch.nn.Module"),
    (LatimFlow, mamba_lm, (NUMBERS,), r"float32 of shape \(1, 4\)"),
    (LatimFlow, mamba_lm, (IDS[..., None],), r"int64 of shape \(1, 4, 1\)"),
    (LatimFlow, mamba_lm, (IDS, NUMBERS), "one input, and the model takes 2"),
]


@pytest.mark.parametrize(("method", "model", "inputs"), FITS)
def test_fits(method, model, inputs):
    assert obstacle(method, model(), inputs) is None


@pytest.mark.parametrize(("method", "model", "inputs", "reason"), DOES_NOT)
def test_does_not_fit_and_why(method, model, inputs, reason):
    import re

    found = obstacle(method, model(), inputs)
    assert found is not None and re.search(reason, found)
    assert len(found) < 200 and not found.endswith(".")


@pytest.mark.parametrize("method", [IntegratedGradients, GuidedBackprop, LatimFlow, Occlusion])
def test_nothing_is_run(method):
    obstacle(method, nn.Sequential(Untouched(), nn.ReLU()), (IMAGE,))
