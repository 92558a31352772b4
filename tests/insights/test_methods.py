"""The tables of methods, held to the methods themselves."""

from __future__ import annotations

import inspect
import re

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
from zoo.small import classifier, mamba_lm, token_ids, vision

from captum_ssm import LatimFlow, MambaAttribution
from captum_ssm.attr.engine.method import SSMAttribution
from captum_ssm.insights.applicability import obstacle
from captum_ssm.insights.config import ContrastConfig, NumberConfig, StrEnumConfig
from captum_ssm.insights.methods import (
    ATTRIBUTION_METHOD_CONFIG,
    ATTRIBUTION_NAMES_TO_METHODS,
    DEFAULTS_FROM_INPUTS,
    SUPPORTED_ATTRIBUTION_METHODS,
    parameters_of,
)

OURS = [m for m in SUPPORTED_ATTRIBUTION_METHODS if issubclass(m, SSMAttribution)]


def test_all_methods_that_the_package_offers_are_there():
    import captum_ssm.attr

    public = [getattr(captum_ssm.attr, name) for name in captum_ssm.attr.__all__]
    classes = [c for c in public if isinstance(c, type) and issubclass(c, SSMAttribution)]
    assert set(OURS) == set(classes) and len(OURS) == 9
    assert {m.get_name(): m for m in SUPPORTED_ATTRIBUTION_METHODS} == ATTRIBUTION_NAMES_TO_METHODS
    assert set(ATTRIBUTION_METHOD_CONFIG) <= set(ATTRIBUTION_NAMES_TO_METHODS)


def test_arguments_are_those_of_the_method_with_its_defaults():
    for name in ATTRIBUTION_METHOD_CONFIG:
        accepted = inspect.signature(ATTRIBUTION_NAMES_TO_METHODS[name].attribute).parameters
        for argument, kind in parameters_of(name).params.items():
            assert argument in accepted
            # Insights has always taken half as many steps, and windows depend on the inputs
            if argument not in ("n_steps", "sliding_window_shapes"):
                assert kind.value == accepted[argument].default, (name, argument)
            assert kind.parse(argument, kind.value) == kind.value


@pytest.mark.slow
@pytest.mark.parametrize("method", OURS)
def test_every_choice_and_limit_is_one_that_the_method_accepts(method):
    model, ids = mamba_lm(), token_ids(1, 5)
    for argument, kind in parameters_of(method.get_name()).params.items():
        values = getattr(kind, "limit", ()) or ()
        if isinstance(kind, StrEnumConfig | ContrastConfig):
            values = [word for word in values if word not in (kind.value, "cls")]
        elif not isinstance(kind, NumberConfig):
            continue
        for value in (value for value in values if value is not None):
            found = method(model).attribute(ids, target=(-1, 3), **{argument: value})
            assert found.shape == ids.shape and found.isfinite().all(), (argument, value)


#: Of the shape of inputs, the window and its strides.
WINDOWS = {
    (1, 3, 32, 17): ((3, 4, 2), (3, 2, 1)),
    (1, 1, 5, 5): ((1, 1, 1), (1, 1, 1)),
    (1, 9): ((1,), (1,)),
    (1, 9, 4): ((1, 4), (1, 4)),
}


def test_occluding_windows_suit_the_inputs():
    suggest = DEFAULTS_FROM_INPUTS["Occlusion"]
    for shape, (window, stride) in WINDOWS.items():
        found = suggest((torch.zeros(shape),))
        assert found == {"sliding_window_shapes": window, "strides": stride}
        both = suggest((torch.zeros(shape), torch.zeros(1, 2)))
        assert both == {"sliding_window_shapes": (window, (1,)), "strides": (stride, (1,))}


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
