"""Which methods are offered, with which arguments, and which examples pass the filter."""

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
)
from helpers.insights_examples import Untouched, cnn, table_model
from torch import nn
from zoo.small import classifier, mamba_lm, vision

from captum_ssm import LatimFlow, MambaAttribution
from captum_ssm.attr.catalogue import METHODS
from captum_ssm.attr.engine.method import SSMAttribution
from captum_ssm.errors import OptionError
from captum_ssm.insights import FilterConfig
from captum_ssm.insights.applicability import obstacle
from captum_ssm.insights.config import (
    BaselinesConfig,
    BoolConfig,
    ConfigParameters,
    NumberConfig,
    StrConfig,
    StrEnumConfig,
    TupleConfig,
    described,
)
from captum_ssm.insights.filters import OutputScore
from captum_ssm.insights.methods import (
    ATTRIBUTION_METHOD_CONFIG,
    ATTRIBUTION_NAMES_TO_METHODS,
    DEFAULTS_FROM_INPUTS,
    SUPPORTED_ATTRIBUTION_METHODS,
    parameters_of,
)

GOOD = [
    (NumberConfig(25, (2, None)), 2, 2),
    (NumberConfig(0.5, (0.0, 1.0)), 1, 1.0),
    (StrEnumConfig(None, [None, "b"]), None, None),
    (BaselinesConfig(), "mean", "mean"),
    (BaselinesConfig(), "0", 0.0),
    (StrConfig(""), "x y", "x y"),
    (BoolConfig(), True, True),
    (TupleConfig(), "(3,-5 5)", (3, -5, 5)),
    (TupleConfig(), 4, (4,)),
    (TupleConfig((1,)), "", None),
    (TupleConfig(), ((1, 2), (3,)), ((1, 2), (3,))),
]


def test_a_value_keeps_its_type():
    for kind, value, read in GOOD:
        found = kind.parse("x", value)
        assert found == read and type(found) is type(read)


BAD = {
    "whole number": [
        (NumberConfig(25, (2, None)), 2.5),
        *((TupleConfig(), value) for value in ("3, x", "3.5", [1, 2.0], [True], {})),
    ],
    "at least 2": [(NumberConfig(25, (2, None)), 1)],
    "from 1 to 100": [(NumberConfig(1, (1, 100)), value) for value in (101, 10**400)],
    "at most 100": [(NumberConfig(1, (None, 100)), 101)],
    "number": [
        *((NumberConfig(25), value) for value in ("25", True)),
        *((NumberConfig(0.5), value) for value in (float("nan"), float("inf"))),
    ],
    r"one of.*\['a', 'b'\]": [(StrEnumConfig("a", ["a", "b"]), value) for value in ("c", None, {})],
    "true or false": [(BoolConfig(), value) for value in (1, "yes")],
}


def test_an_unusable_value_is_named():
    for what, cases in BAD.items():
        for kind, value in cases:
            with pytest.raises(OptionError, match=f"^steps=.*{what}"):
                kind.parse("steps", value)


def test_what_is_not_given_has_its_default_and_what_is_unknown_passes():
    parameters = ConfigParameters(
        {"n": NumberConfig(3), "s": StrConfig("1 2"), "t": TupleConfig()},
        post_process={"s": lambda text: [int(word) for word in text.split()]},
    )
    assert parameters.parse({}) == {"n": 3, "s": [1, 2], "t": None}
    given = {"n": 5, "s": "7", "other": object()}
    assert parameters.parse(given) == given | {"s": [7], "t": None}
    assert given["s"] == "7"


def test_the_page_is_told_which_numbers_are_whole():
    parameters = ConfigParameters({"n": NumberConfig(3, (1, None)), "f": NumberConfig(0.0)})
    told = described(parameters)
    assert told["n"] == {"value": 3, "limit": (1, None), "type": "number", "whole": True}
    assert told["f"]["whole"] is False


CLASSES = ["ant", "bee", "bee"]
ANT, BEE, OTHER_BEE = (OutputScore(1.0, i, name) for i, name in enumerate(CLASSES))
PASSES = {
    "all": [([ANT], None, True), ([], None, True)],
    "correct": [
        ([ANT, BEE], ANT, True),
        ([ANT, BEE], BEE, False),
        ([BEE], OTHER_BEE, False),  # two classes of one name are two classes
        ([ANT], None, False),  # what is right is not known
        ([], ANT, False),
    ],
    "incorrect": [
        ([ANT, BEE], BEE, True),
        ([ANT, BEE], ANT, False),
        ([BEE], OTHER_BEE, True),
        ([ANT], None, False),
        ([], ANT, False),
    ],
}
OF_ANTS = [([ANT, BEE], BEE, True), ([BEE, ANT], ANT, False), ([], None, False)]


def test_what_passes():
    for prediction, cases in PASSES.items():
        for predicted, actual, passes in cases:
            assert FilterConfig(prediction=prediction).passes(predicted, actual) is passes
    for predicted, actual, passes in OF_ANTS:
        assert FilterConfig(classes=["ant"]).passes(predicted, actual) is passes
    assert FilterConfig(classes=["ant", "bee"]).passes([BEE, ANT], None)
    assert not FilterConfig(classes=["ant"], prediction="correct").passes([ANT], BEE)


def test_what_is_known():
    assert FilterConfig() == ("Integrated Gradients", {}, "all", [], 4, ())  # as Captum's
    beside = [("LatimFlow", {"rule": "half"}), ["Saliency", {}]]
    FilterConfig(classes=("ant",), num_examples=100, beside=beside).checked(CLASSES)


NO_CHOICES = [
    ({"attribution_method": "Oracle"}, "attribution_method='Oracle'.*LatimFlow.*Saliency"),
    ({"attribution_arguments": 3}, "attribution_arguments=3"),
    ({"prediction": "right"}, r"prediction='right': use one of \('all'"),
    ({"classes": ["cat"]}, r"classes=\['cat'\]"),
    ({"classes": "ant"}, "classes='ant'. Pass a list"),
    ({"num_examples": 0}, "num_examples=0: use 1 to 100"),
    ({"num_examples": True}, "num_examples"),
    ({"beside": "Saliency"}, "beside='Saliency'. Pass a list"),
    ({"beside": ["Saliency"]}, "beside contains 'Saliency'. Pass pairs of a method"),
    ({"beside": [("Oracle", {})]}, "beside='Oracle' is not known.*Saliency"),
    ({"beside": [("Saliency", {})] * 4}, "at most 3"),
]


def test_what_is_not_known_is_named():
    for options, what in NO_CHOICES:
        with pytest.raises(OptionError, match=what):
            FilterConfig(**options).checked(CLASSES)


OURS = [m for m in SUPPORTED_ATTRIBUTION_METHODS if issubclass(m, SSMAttribution)]


def test_all_methods_that_the_package_offers_are_there():
    assert {method.__name__ for method in OURS} == {method.name for method in METHODS}
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
    (DeepLift, cnn, (IMAGE, NUMBERS), None),
    (GuidedBackprop, cnn, (IMAGE,), None),
    (FeatureAblation, mamba_lm, (IDS,), None),
    (LatimFlow, mamba_lm, (IDS,), None),
    (LatimFlow, classifier, (EMBEDDINGS,), None),
    (MambaAttribution, lambda: mamba_lm().forward, (IDS,), None),
    (IntegratedGradients, mamba_lm, (IDS,), "integers"),
    (IntegratedGradients, mamba_lm, (NUMBERS, IDS), "integers"),
    (DeepLift, lambda: cnn().forward, (IMAGE,), "Module"),
    (GuidedBackprop, table_model, (NUMBERS,), "ReLU"),
    (Deconvolution, vision, (IMAGE,), "ReLU"),
    (LatimFlow, cnn, (IMAGE,), "No token mixer"),
    (LatimFlow, lambda: nn.LSTM(4, 2), (EMBEDDINGS,), "."),
    (LatimFlow, lambda: lambda x: x, (IDS,), "No torch.nn.Module"),
    (LatimFlow, mamba_lm, (NUMBERS,), r"float32 of shape \(1, 4\)"),
    (LatimFlow, mamba_lm, (IDS, NUMBERS), "one input, but the model has 2"),
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
