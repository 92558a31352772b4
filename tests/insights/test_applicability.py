"""Which methods fit, found without running anything."""

from __future__ import annotations

import re

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

#: A method, a model, its inputs, and why they do not fit; None if they do.
CASES = [
    (IntegratedGradients, cnn, (IMAGE,), None),
    (Saliency, mamba_lm, (EMBEDDINGS,), None),
    (DeepLift, cnn, (IMAGE, NUMBERS), None),
    (GuidedBackprop, cnn, (IMAGE,), None),
    (FeatureAblation, mamba_lm, (IDS,), None),
    (LatimFlow, mamba_lm, (IDS,), None),
    (LatimFlow, classifier, (EMBEDDINGS,), None),
    (MambaAttribution, vision, (IMAGE,), None),
    (MambaAttribution, lambda: mamba_lm().forward, (IDS,), None),
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


def test_what_fits_and_why_the_rest_does_not():
    for method, model, inputs, reason in CASES:
        found = obstacle(method, model(), inputs)
        if reason is None:
            assert found is None
        else:
            assert found is not None and re.search(reason, found)
            assert len(found) < 200 and not found.endswith(".")
    for method in (IntegratedGradients, GuidedBackprop, LatimFlow, Occlusion):  # nothing is run
        obstacle(method, nn.Sequential(Untouched(), nn.ReLU()), (IMAGE,))
