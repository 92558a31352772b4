"""The catalogue of methods, held to the methods."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.entry_points import declare
from zoo.small import VOCABULARY, mamba_lm

import captum_ssm
from captum_ssm import LatimFlow, LatimLogit, LatimNorm, MambaLRP
from captum_ssm.attr.catalogue import DEFAULT, METHODS, Entry, method_named
from captum_ssm.attr.engine.method import SSMAttribution
from captum_ssm.errors import OptionError
from captum_ssm.testing.options import OPTIONS, Values

LIMITS = {"discard_ratio": (0.0, 0.999), "start_layer": (0, None)}


def test_every_method_has_an_entry() -> None:
    public = [getattr(captum_ssm.attr, name) for name in captum_ssm.attr.__all__]
    methods = {x for x in public if isinstance(x, type) and issubclass(x, SSMAttribution)}
    assert {entry.method for entry in METHODS} == methods
    assert all(getattr(captum_ssm, entry.name) is entry.method for entry in METHODS)
    assert set(DEFAULT.values()) == {LatimFlow}


@pytest.mark.parametrize("entry", METHODS, ids=lambda entry: entry.name)
def test_options(entry: Entry) -> None:
    parameters = inspect.signature(entry.method.attribute).parameters
    chosen = [name for name in parameters if OPTIONS.get(name, Values()).differ]
    assert [option.name for option in entry.options] == chosen
    for option in entry.options:
        assert option.default == parameters[option.name].default
        assert option.limits == LIMITS.get(option.name)
        tried = [*OPTIONS[option.name].differ, *OPTIONS[option.name].same]
        words = {each for each in tried if isinstance(each, str)} - {"unified-conv"}
        given = {*option.words} - {None, "cls"}
        assert given == (words if given else set()), option.name


@pytest.mark.parametrize("method", [LatimFlow, LatimLogit, MambaLRP])
def test_contributions_are_multiplied_by_the_input(method: Any) -> None:
    model = mamba_lm().double()
    asked = method(model)
    assert asked.multiplies_by_inputs and not LatimNorm(model).multiplies_by_inputs
    ids = torch.randperm(VOCABULARY)[None, :7]
    target = int(ids[0, -1])  # no token of the prompt: embedding and head are tied
    ids, silent = ids[:, :-1], torch.arange(6) == 2
    with torch.no_grad():
        model.get_input_embeddings().weight[ids[0, 2]] = 0
        model.get_input_embeddings().weight[ids[0, 4]] *= 2
    options = {"baselines": 0} if method is LatimFlow else {}  # nothing, not the mean of the tokens
    relevance = asked.attribute(ids, target=(-1, target), **options)[0]
    if method is not LatimLogit:  # its map of the earlier layers has shares for every token
        assert not relevance[silent].any()
    assert relevance[~silent].all()


def test_methods_of_installed_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match="is not a method"):
        method_named("own_flow", "methods")
    declare(tmp_path, monkeypatch, "captum_ssm.methods", "OwnFlow = captum_ssm:LatimFlow")
    assert method_named("own_flow", "methods") is LatimFlow
