"""The filter."""

from __future__ import annotations

import pytest

from captum_ssm.errors import OptionError
from captum_ssm.insights import FilterConfig
from captum_ssm.insights.filters import OutputScore

CLASSES = ["ant", "bee", "bee"]
ANT, BEE, OTHER_BEE = (OutputScore(1.0, i, name) for i, name in enumerate(CLASSES))

PASSES = [
    ({}, [ANT], None, True),
    ({}, [], None, True),
    ({"prediction": "correct"}, [ANT, BEE], ANT, True),
    ({"prediction": "correct"}, [ANT, BEE], BEE, False),
    ({"prediction": "incorrect"}, [ANT, BEE], BEE, True),
    ({"prediction": "incorrect"}, [ANT, BEE], ANT, False),
    # two classes of one name are two classes
    ({"prediction": "correct"}, [BEE], OTHER_BEE, False),
    ({"prediction": "incorrect"}, [BEE], OTHER_BEE, True),
    # what is right is not known
    ({"prediction": "correct"}, [ANT], None, False),
    ({"prediction": "incorrect"}, [ANT], None, False),
    ({"prediction": "correct"}, [], ANT, False),
    ({"prediction": "incorrect"}, [], ANT, False),
    ({"classes": ["ant"]}, [ANT, BEE], BEE, True),
    ({"classes": ["ant"]}, [BEE, ANT], ANT, False),
    ({"classes": ["ant", "bee"]}, [BEE, ANT], None, True),
    ({"classes": ["ant"]}, [], None, False),
    ({"classes": ["ant"], "prediction": "correct"}, [ANT], BEE, False),
]


def test_what_passes():
    for options, predicted, actual, passes in PASSES:
        assert FilterConfig(**options).passes(predicted, actual) is passes, options


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
    ({"prediction": {}}, "prediction"),
    ({"classes": ["cat"]}, r"classes=\['cat'\]"),
    ({"classes": "ant"}, "classes='ant' must be a list"),
    ({"classes": 5}, "classes=5"),
    ({"classes": [{}]}, "classes"),
    ({"num_examples": 0}, "num_examples=0: use 1 to 100"),
    ({"num_examples": 101}, "num_examples"),
    ({"num_examples": 2.0}, "num_examples"),
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
