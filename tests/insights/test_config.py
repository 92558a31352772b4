"""Kinds of arguments."""

from __future__ import annotations

import pytest

from captum_ssm.errors import OptionError
from captum_ssm.insights import FilterConfig
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

GOOD = [
    (NumberConfig(25, (2, None)), 2, 2),
    (NumberConfig(0.5, (0.0, 1.0)), 0.25, 0.25),
    (NumberConfig(0.5, (0.0, 1.0)), 1, 1.0),
    (StrEnumConfig("a", ["a", "b"]), "b", "b"),
    (StrEnumConfig(None, [None, "b"]), None, None),
    (BaselinesConfig(), None, None),
    (BaselinesConfig(), "mean", "mean"),
    (BaselinesConfig(), "0", 0.0),
    (BaselinesConfig(), 0.5, 0.5),
    (StrConfig(""), "x y", "x y"),
    (BoolConfig(), True, True),
    (TupleConfig(), "3, 5 5", (3, 5, 5)),
    (TupleConfig(), "(3,-5)", (3, -5)),
    (TupleConfig(), 4, (4,)),
    (TupleConfig((1,)), "", None),
    (TupleConfig(), None, None),
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


CHOICES = [
    {},
    {"attribution_method": "LatimFlow", "attribution_arguments": {"rule": "half"}},
    {"classes": ("ant",), "num_examples": 1},
    {"num_examples": 100},
    {"beside": [("LatimFlow", {"rule": "half"}), ["Saliency", {}]]},
]


def test_what_is_known():
    assert FilterConfig() == ("Integrated Gradients", {}, "all", [], 4, ())  # as Captum's
    for options in CHOICES:
        FilterConfig(**options).checked(CLASSES)


NO_CHOICES = [
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
    for options, what in NO_CHOICES:
        with pytest.raises(OptionError, match=what):
            FilterConfig(**options).checked(CLASSES)
