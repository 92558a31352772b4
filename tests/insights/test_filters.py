"""The filter."""

from __future__ import annotations

import pytest

from captum_ssm.errors import OptionError
from captum_ssm.insights import FilterConfig
from captum_ssm.insights.filters import OutputScore

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


GOOD = [
    {},
    {"attribution_method": "LatimFlow", "attribution_arguments": {"rule": "half"}},
    {"classes": ("ant",), "num_examples": 1},
    {"num_examples": 100},
    {"beside": [("LatimFlow", {"rule": "half"}), ["Saliency", {}]]},
]


def test_what_is_known():
    assert FilterConfig() == ("Integrated Gradients", {}, "all", [], 4, ())  # as Captum's
    for options in GOOD:
        FilterConfig(**options).checked(CLASSES)


BAD = [
    ({"attribution_method": "Oracle"}, "attribution_method='Oracle'.*LatimFlow.*Saliency"),
    ({"attribution_method": []}, "attribution_method"),
    ({"attribution_arguments": 3}, "attribution_arguments=3"),
    ({"prediction": "right"}, r"prediction='right': use one of \('all'"),
    ({"classes": ["cat"]}, r"classes=\['cat'\]"),
    ({"classes": "ant"}, "classes='ant' must be a list"),
    ({"classes": [{}]}, "classes"),
    ({"num_examples": 0}, "num_examples=0: use 1 to 100"),
    ({"num_examples": 101}, "num_examples"),
    ({"num_examples": True}, "num_examples"),
    ({"beside": "Saliency"}, "beside='Saliency' must be a list"),
    ({"beside": ["Saliency"]}, "beside holds 'Saliency'; each must be a method and its arguments"),
    ({"beside": [("Saliency", 1)]}, r"beside holds \('Saliency', 1\)"),
    ({"beside": [("Oracle", {})]}, "beside='Oracle' is not known.*Saliency"),
    ({"beside": [("Saliency", {})] * 4}, "at most 3"),
]


def test_what_is_not_known_is_named():
    for options, what in BAD:
        with pytest.raises(OptionError, match=what):
            FilterConfig(**options).checked(CLASSES)
