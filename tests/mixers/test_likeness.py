"""Classes that are served by the adapter of another one."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from zoo.mamba import transformers_model
from zoo.short_conv import make_model

from captum_ssm import LatimFlow, register_mixer, supported_architectures, trace
from captum_ssm.errors import (
    AdapterError,
    NoMixerError,
    OptionError,
    ReconstructionError,
    UnsupportedMixerError,
)
from captum_ssm.mixers import registry
from captum_ssm.mixers.likeness import classes_with_parts, parts_of

MAMBA = "transformers.models.mamba.modeling_mamba.MambaMixer"
FALCON = "transformers.models.falcon_mamba.modeling_falcon_mamba.FalconMambaMixer"


def copied(name: str, **changed: Any) -> Any:
    """A Mamba whose mixers are of a class of that name that has MambaMixer's code."""
    model = transformers_model("mamba")
    own = type(model.backbone.layers[0].mixer)
    body = {k: v for k, v in vars(own).items() if k not in ("__dict__", "__weakref__")}
    made = type(name, (nn.Module,), {**body, **changed, "__module__": __name__})
    for layer in model.backbone.layers:
        layer.mixer.__class__ = made
    return model


def mixer_class(model: Any) -> Any:
    return type(model.backbone.layers[0].mixer)


def explain(model: Any, **options: Any) -> Tensor:
    delta: Tensor = LatimFlow(model).attribute(
        torch.randint(19, (2, 6)), (-1, 3), return_convergence_delta=True, **options
    )[1]
    return delta


@pytest.mark.parametrize("named", ["class", "full name", "subclass"])
def test_a_copy_is_served_by_the_adapter_of_its_model(named: str) -> None:
    model = copied("HomeMadeMixer")
    served = type(transformers_model("mamba").backbone.layers[0].mixer)
    like = {"class": served, "full name": MAMBA, "subclass": type("Sub", (served,), {})}[named]
    register_mixer(mixer_class(model), like=like)
    assert explain(model).abs().max() <= 1e-5
    own = supported_architectures()[-1]
    assert (own.family, own.like, own.joins) == ("Mamba", MAMBA, "residual")
    assert own.class_path == f"{__name__}.HomeMadeMixer" and not own.tested_version


def test_what_like_may_name() -> None:
    register_mixer("some.Falcon", like="falcon mamba", family="Mine", joins="parallel")
    own = supported_architectures()[-1]
    assert (own.family, own.like, own.joins) == ("Mine", FALCON, "parallel")
    register_mixer("some.Other", like="some.Falcon")  # takes over what it is like, joins too
    assert supported_architectures()[-1].joins == "parallel"
    before = supported_architectures()
    for like in ("Mambo", "some.package.Mixer", nn.Linear):
        with pytest.raises(OptionError, match=r"like=.* is neither a supported class") as caught:
            register_mixer("some.Mamba", like=like)
        assert repr(like) in str(caught.value) and "supported_architectures()" in str(caught.value)
    # a family of several classes
    with pytest.raises(OptionError, match=r"'mamba_ssm\.modules\.mamba_simple\.Mamba'") as caught:
        register_mixer("some.Mamba", like="Mamba")
    assert repr(MAMBA) in str(caught.value) and "'Mamba' is a family with " in str(caught.value)
    with pytest.raises(OptionError, match="Pass only one"):
        register_mixer("some.Mamba", print, like=MAMBA)
    with pytest.raises(OptionError, match="or like="):
        register_mixer("some.Mamba")
    assert supported_architectures() == before


# --- what is no copy -----------------------------------------------------------------------------


def test_a_class_that_computes_something_else_is_refused() -> None:
    own = type(transformers_model("mamba").backbone.layers[0].mixer)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        return 1.01 * own.forward(self, *args, **kwargs)

    model = copied("LouderMixer", forward=forward)
    register_mixer(mixer_class(model), like=MAMBA)
    with pytest.raises(ReconstructionError) as caught:
        explain(model)
    text = str(caught.value)
    assert f"LouderMixer is served with like={MAMBA!r}" in text and "something else" in text
    with torch.no_grad(), trace(model) as t:
        model(torch.randint(19, (1, 5)))
    with pytest.raises(ReconstructionError, match="like="):
        t.layers[0].verify()


def test_a_class_without_the_parts_is_refused() -> None:
    model = make_model("lfm2")
    register_mixer(type(model.model.layers[0].conv), like=MAMBA)
    with pytest.raises(AdapterError, match=rf"which is served with like='{re.escape(MAMBA)}'"):
        explain(model)


# --- proposals -----------------------------------------------------------------------------------


def test_the_line_that_is_proposed_serves() -> None:
    model = copied("HomeMadeMixer")
    with pytest.raises(UnsupportedMixerError) as caught:
        explain(model)
    line = re.search(r"register_mixer\('[^)]*\)", str(caught.value))
    assert line is not None and MAMBA in line[0]
    assert "'backbone.layers.0.mixer'" in str(caught.value) and "checked" in str(caught.value)
    eval(line[0], {"register_mixer": register_mixer})
    assert explain(model).abs().max() <= 1e-5


def test_the_likest_name_is_proposed() -> None:
    parts = parts_of(transformers_model("mamba").backbone.layers[0].mixer)
    names = {"TinyFalconMixer": FALCON, "FalconMambaMixer": FALCON, "Mixer": MAMBA}
    assert all(classes_with_parts(name, parts)[0] == first for name, first in names.items())
    with pytest.raises(NoMixerError, match=r"MambaCell', like='transformers\.models\.mamba"):
        explain(copied("MambaCell"))  # which does not look like a mixer


def test_nothing_is_proposed_for_other_parts() -> None:
    """Parts hold parameters."""
    model = copied("HomeMadeMixer")
    for layer in model.backbone.layers:
        layer.mixer.extra = nn.Linear(2, 2)
    with pytest.raises(UnsupportedMixerError) as caught:
        explain(model)
    assert "like=" not in str(caught.value)
    module = nn.Module()
    module.mix, module.act, module.weight = nn.Linear(2, 2), nn.SiLU(), nn.Parameter(torch.ones(1))
    module.register_parameter("bias", None)
    module.register_buffer("slopes", torch.ones(1))
    assert parts_of(module) == {"mix", "weight"}


# --- code of the hub -----------------------------------------------------------------------------


@pytest.fixture
def of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a Mamba of code that a model brings along: transformers' own with changes."""
    dynamic = importlib.import_module("transformers.dynamic_module_utils")
    monkeypatch.setattr(dynamic, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    mamba = importlib.import_module("transformers.models.mamba.modeling_mamba")

    def make(old: str = "", new: str = "") -> Any:
        source = inspect.getsource(mamba).replace("from ... import", "from transformers import")
        source = source.replace("from ...", "from transformers.")
        source = source.replace("from .conf", "from transformers.models.mamba.conf")
        assert old in source
        folder = tmp_path / f"model{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        (folder / "modeling_copy.py").write_text(source.replace(old, new) if old else source)
        kind = dynamic.get_class_from_dynamic_module("modeling_copy.MambaForCausalLM", str(folder))
        own = transformers_model("mamba")
        model = kind(own.config).eval()
        model.load_state_dict(own.state_dict())
        return model

    return make


def test_copies_from_the_hub_are_served_at_once(of_the_hub: Any) -> None:
    model = of_the_hub()
    assert explain(model).abs().max() <= 1e-5
    entry = registry.adapter_for(model.backbone.layers[0].mixer)
    assert entry is not None and entry[0].like == MAMBA
    assert entry[0].class_path.startswith("transformers_modules.")
    model = of_the_hub("self.out_proj(", "1.01 * self.out_proj(")
    with pytest.raises(ReconstructionError, match=f"served with like='{re.escape(MAMBA)}'"):
        explain(model)
    model = of_the_hub("MambaMixer", "OwnMixer")  # another name wants the user's word
    with pytest.raises(UnsupportedMixerError, match=f"like='{re.escape(MAMBA)}'"):
        explain(model)
    register_mixer(mixer_class(model), like=MAMBA)
    assert explain(model).abs().max() <= 1e-5
