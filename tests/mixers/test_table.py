"""What the table of architectures says of a mixer is so in the models that the tests know."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any, get_args

import pytest
import torch
from helpers.sessions import thorough
from oracles import relative_error
from torch import Tensor, nn
from zoo import timm_cpu
from zoo.adapters import ADAPTERS
from zoo.architectures import Case, language, pictures
from zoo.language import word_tokenizer
from zoo.mamba import randomise
from zoo.vision_language import TOWERS

from captum_ssm import (
    ImplicitAttention,
    ImplicitAttentionRollout,
    LatimFlow,
    MambaAttribution,
    SSMLLMAttribution,
)
from captum_ssm.errors import CaptumSSMError
from captum_ssm.mixers import Architecture, supported_architectures
from captum_ssm.mixers.likeness import PARTS, parts_of
from captum_ssm.mixers.line import TRANSFORMERS_4, Ability
from captum_ssm.mixers.registry import adapter_for, class_path
from captum_ssm.mixers.table import BUILT_IN


class Decoder(nn.Module):
    """A language model of torch's own layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(19, 8), nn.Linear(8, 19)
        layer = nn.TransformerEncoderLayer(8, 2, 10, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        tokens = input_ids.shape[1]
        later = torch.ones(tokens, tokens, dtype=torch.bool, device=input_ids.device).triu(1)
        return self.head(self.layers(self.embed(input_ids), later, is_causal=True))


def of_torch(_: pytest.MonkeyPatch) -> Case:
    return language(randomise(Decoder()))


def timm(_: pytest.MonkeyPatch) -> Case:
    transformer = timm_cpu.timm().models.vision_transformer.VisionTransformer
    small = {"patch_size": 4, "embed_dim": 12, "depth": 2, "num_heads": 3, "num_classes": 5}
    return pictures(randomise(transformer(img_size=12, **small)), (12, 12))


def mambavision(patch: pytest.MonkeyPatch) -> Case:
    timm_cpu.timm()
    package = timm_cpu.mambavision(patch)
    small = {"dim": 4, "in_dim": 6, "depths": [1, 1, 3, 2], "num_heads": [1, 1, 2, 4]}
    model = package.mamba_vision_T(window_size=[8, 8, 3, 3], num_classes=5, **small)
    return pictures(model.eval(), (96, 96))


KNOWN = {**ADAPTERS, **TOWERS, "torch": of_torch}
CASES = {**KNOWN, "timm": timm, "mambavision": mambavision}
every = pytest.mark.parametrize(
    "case",
    [
        *thorough(KNOWN, ("mamba2",)),
        pytest.param("timm", marks=pytest.mark.timm),
        pytest.param("mambavision", marks=pytest.mark.mambavision),
    ],
    indirect=True,
)


@pytest.fixture
def case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Case:
    return CASES[request.param](monkeypatch)


def rows_of(model: Any) -> dict[str, Architecture]:
    found = (adapter_for(module) for module in model.modules())
    return {each[0].class_path: each[0] for each in found if each is not None}


def is_alone(case: Case) -> bool:
    return adapter_for(case.model) is not None


def target_of(case: Case) -> Any:
    scored = case.inputs.dim() == 4 or "Classification" in type(case.model).__name__
    return 1 if scored else (-1, 3)


def decomposed(case: Case) -> None:
    found = LatimFlow(case.model).decompose(case.inputs, target_of(case), roles=False)
    size = found.inputs.abs().flatten(1).sum(1) + found.output.abs()
    assert bool((found.delta.abs() <= 1e-5 * size).all())


def folded(case: Case) -> None:
    for matrices in ImplicitAttention(case.model).matrices(case.inputs):
        assert bool(matrices.isfinite().all() and matrices.any())
    rolled = ImplicitAttentionRollout(case.model).attribute(case.inputs)
    weighted = MambaAttribution(case.model).attribute(case.inputs, target_of(case))
    assert bool(rolled.isfinite().all() and rolled.any())
    assert bool(weighted.isfinite().all())  # nothing where the stream ends in a LayerNorm


def generated(case: Case) -> None:
    """Two tokens behind an example, as the model writes them, are decomposed like any target."""
    explain = SSMLLMAttribution(LatimFlow(case.model), word_tokenizer())
    if case.inputs.is_floating_point():
        explain.attribute([1, 2, 3], target=[4, 5])
    prompt, text = case.inputs[0], case.inputs[0]
    options = (
        {"use_cache": False} if "use_cache" in signature(case.model.forward).parameters else {}
    )
    for _ in range(2):
        with torch.no_grad():
            logits = case.model(text[None], **options)
        text = torch.cat([text, getattr(logits, "logits", logits)[0, -1:].argmax(-1)])
    found = explain.attribute(prompt.tolist(), target=text[-2:].tolist())
    for i in range(2):
        at = len(prompt) + i - 1
        own = LatimFlow(case.model).attribute(
            text[None, :-1], target=(at, int(text[at + 1])), per_token=True
        )
        assert relative_error(found.token_attr[i], own[0, : len(prompt)]) <= 1e-5


EXPLAINS: dict[Ability, Callable[[Case], None]] = {
    "LatimFlow": decomposed,
    "fold methods": folded,
    "generated text": generated,
}


@every
@pytest.mark.parametrize("ability", get_args(Ability))
def test_models_have_what_no_row_of_theirs_lacks(case: Case, ability: Ability) -> None:
    if any(ability in row.lacks for row in rows_of(case.model).values()):
        own = (RuntimeError, ValueError) if ability == "generated text" else ()  # that read no text
        with pytest.raises((CaptumSSMError, *own)):
            EXPLAINS[ability](case)
    elif ability != "generated text" or not is_alone(case):
        EXPLAINS[ability](case)


@pytest.mark.full
@pytest.mark.transformers5
def test_every_row_is_known_by_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what a row does not lack, by one none of whose other rows lacks it either."""
    shown: dict[str, set[Ability | str]] = {}
    for make in KNOWN.values():
        case = make(monkeypatch)
        rows = rows_of(case.model)
        has = {x for x in get_args(Ability) if not any(x in row.lacks for row in rows.values())}
        for path in rows:
            shown.setdefault(path, set()).update(has | ({"alone"} if is_alone(case) else {"whole"}))
    for row in supported_architectures():
        if row.package in ("timm", "mambavision") or row.tested_version == TRANSFORMERS_4:
            continue  # which need an environment of their own
        if "images" in row.lacks.get("fold methods", ""):
            continue  # towers: tests/models/test_vision_language.py runs them beside their texts
        assert row.class_path in shown, row.class_path
        assert ("whole" not in shown[row.class_path]) == row.alone, row.class_path
        assert set(get_args(Ability)) - set(row.lacks) <= shown[row.class_path], row.class_path


@pytest.mark.full
@pytest.mark.transformers5
def test_parts_are_those_of_instances(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every class that is proposed for its parts, timm's and MambaVision's aside."""
    found = set()
    for make in ADAPTERS.values():
        for module in make(monkeypatch).model.modules():
            if adapter_for(module) is not None:
                found.add((parts_of(module), class_path(type(module))))
    for row, names in PARTS.items():
        for name in names.split():
            outside = name in ("Attention", "MambaVisionMixer")
            known = {path for parts, path in found if parts == set(row.split())}
            assert outside or any(f".{path}".endswith(f".{name}") for path in known), (row, name)


def test_reasons_are_given_for_what_a_row_can_lack() -> None:
    for line in BUILT_IN:
        assert set(line.lacks) <= set(get_args(Ability)) and all(line.lacks.values()), line
