"""The catalogue of methods, held to the methods."""

from __future__ import annotations

import subprocess
import sys

import pytest

import captum_ssm
from captum_ssm.attr.catalogue import DEFAULT, METHODS, Cost, Entry

OPTIONS = {
    "LatimFlow": {"contrast": None, "rule": None, "baselines": None, "zero_bias": False},
    "MambaLRP": {"contrast": None, "rule": None, "baselines": None, "zero_bias": False},
    "ImplicitAttentionRollout": {
        "query": None,
        "components": "unified",
        "reduce": "mean",
        "heads": None,
        "normalize_rows": False,
        "absolute": False,
        "discard_ratio": 0.0,
        "start_layer": 0,
        "recipe": "paper",
    },
    "ImplicitAttention": {
        "query": None,
        "components": "unified",
        "reduce": "mean",
        "heads": None,
        "start_layer": 0,
        "recipe": "paper",
    },
    "MambaAttribution": {
        "query": None,
        "components": "unified",
        "reduce": "mean",
        "heads": None,
        "clamp": "relu",
        "normalize_rows": False,
        "start_layer": 0,
        "recipe": "paper",
    },
    "TransformerAttribution": {
        "query": None,
        "components": "unified",
        "heads": None,
        "normalize_rows": False,
        "start_layer": 0,
    },
    "LatimNorm": {"query": None, "start_layer": 0},
    "LatimLogit": {"contrast": None, "mixing": "alti"},
    "LatimALTI": {"query": None, "aggregate": "rollout", "start_layer": 0},
}
#: Those whose default is to say nothing may be left out in words, too.
WORDS = {
    "aggregate": ("rollout", "mean"),
    "baselines": (None, "mean"),
    "clamp": ("relu", "abs", "none"),
    "components": ("s6", "unified", "exact"),
    "contrast": (None, "mean", "others", "all", "runner-up"),
    "rule": (None, "frozen", "half", "equal", "centred"),
    "mixing": ("alti", "projection"),
    "query": (None, "last", "mean", "cls"),
    "recipe": ("paper", "published_code"),
    "reduce": ("mean", "max", "min", "product"),
}
LIMITS = {"discard_ratio": (0.0, 0.999), "start_layer": (0, None)}


def test_every_method_has_an_entry() -> None:
    assert [entry.name for entry in METHODS] == list(OPTIONS)
    assert all(getattr(captum_ssm, entry.name) is entry.method for entry in METHODS)
    assert set(DEFAULT) <= {entry.method for entry in METHODS}


@pytest.mark.parametrize("entry", METHODS, ids=lambda entry: entry.name)
def test_options(entry: Entry) -> None:
    assert {option.name: option.default for option in entry.options} == OPTIONS[entry.name]
    for option in entry.options:
        assert option.words == WORDS.get(option.name, ())
        assert option.limits == LIMITS.get(option.name)


def test_costs_in_words() -> None:
    assert str(Cost("")) == ""
    assert str(Cost("2 maps", backward=3)) == "2 maps, 3 backward"
    assert str(Cost("", backward=1, linear=True)) == "1 backward, linear"


@pytest.mark.processes
def test_no_method_waits_for_the_catalogue() -> None:
    """It is read by those who list methods; the package, and a method, do without it."""
    said = (
        "import sys, captum_ssm, captum_ssm.attr; print('captum_ssm.attr.catalogue' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
