"""Layers of vision models: influence on the cls token by distance, and likeness of tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("transformers")
pytest.importorskip("skimage")

from bench_helpers.vision import GRID, MODELS, PATCHES, SCENES, patch_places, streams, vim, vit

from captum_ssm import ImplicitAttention, LatimNorm
from captum_ssm.errors import InputError
from captum_ssm_bench import Cell, Key, lines
from captum_ssm_bench.experiments.patches import Patches, patches_of
from captum_ssm_bench.experiments.vision_layers import ClsInfluence, Oversmoothing, by_distance
from captum_ssm_bench.tasks.scenes import SceneBatch

INFLUENCE = ClsInfluence()
SMOOTHING = Oversmoothing(task=SCENES)
#: 16 patches around a cls token in the middle, and behind one in front.
BINS = {
    "vim": {"01": [1], "02": [2], "03-04": [3, 4], "05-08": [5, 6, 7, 8]},
    "vim first": {
        "01": [1],
        "02": [2],
        "03-04": [3, 4],
        "05-08": [5, 6, 7, 8],
        "09-16": list(range(9, 17)),
    },
}
BINS["vit"] = BINS["vim first"]


def scene() -> SceneBatch:
    return SCENES.draw(1, int(torch.randint(2**31, ())))


@pytest.mark.parametrize("name", MODELS)
def test_the_patches_among_the_tokens(name: str) -> None:
    model = MODELS[name]()
    found = patches_of(model, scene().images)
    assert found.index.tolist() == patch_places(model)
    assert found.grid == GRID and found.tokens == PATCHES + 1
    assert found.cls() == (PATCHES // 2 if name == "vim" else 0)


def test_a_model_without_a_cls_token() -> None:
    with pytest.raises(InputError, match="16 tokens for 16 patches"):
        patches_of(vim("none"), scene().images).cls()


@pytest.mark.parametrize("formulation", ["s6", "unified", "exact"])
@pytest.mark.parametrize("name", MODELS)
def test_influence_by_distance(name: str, formulation: str) -> None:
    model, example = MODELS[name](), scene()
    rows = INFLUENCE.measure(model, example, Cell("ImplicitAttention", formulation))
    if name == "vit" and formulation != "unified":
        assert rows == {}
        return
    places = patch_places(model)
    (cls,) = set(range(PATCHES + 1)) - set(places)
    matrices = ImplicitAttention(model).matrices(example.images, components=formulation)
    assert len(rows) == (1 + len(matrices)) * len(BINS[name])
    for label in BINS[name]:
        shares = [rows[f"layer {i}, distance {label}"] for i in range(len(matrices))]
        mean = sum(share["bin"] / share["all"] for share in shares) / len(shares)
        numbers = rows[f"mean, distance {label}"]
        assert numbers["bin"] / numbers["all"] == pytest.approx(mean, rel=1e-4)
    for i, matrix in enumerate(matrices):
        for label, distances in BINS[name].items():
            entries = [abs(float(matrix[0, cls, t])) for t in places if abs(t - cls) in distances]
            numbers = rows[f"layer {i}, distance {label}"]
            assert numbers["bin"] == pytest.approx(sum(entries) / len(entries), rel=1e-5)
            whole = sum(abs(float(matrix[0, cls, t])) for t in places) / PATCHES
            assert numbers["all"] == pytest.approx(whole, rel=1e-5)


def test_influence_as_lengths_of_contributions() -> None:
    model, example = vim(), scene()
    rows = INFLUENCE.measure(model, example, Cell("LatimNorm l2"))
    maps = LatimNorm(model).maps(example.images)
    for i, found in enumerate(maps):
        beside = [float(found[0, 8, t]) for t in (7, 9)]
        assert rows[f"layer {i}, distance 01"]["bin"] == pytest.approx(sum(beside) / 2, rel=1e-5)


def test_relative_influence_is_one_without_a_bias() -> None:
    patches = Patches(torch.tensor(patch_places(vim())), GRID, PATCHES + 1)
    results = [
        (
            Key("cls-influence", "m", "ImplicitAttention", "s6", 0, i),
            dict(by_distance(torch.full((PATCHES,), 0.1 + i), patches)),
        )
        for i in range(3)
    ]
    for line in lines(INFLUENCE, results):
        assert line.entries["relative influence"].value == pytest.approx(1)


def mean_similarity(tokens: Tensor) -> float:
    """Over all pairs of distinct tokens (N, E), by loops."""
    pairs = [
        float(F.cosine_similarity(tokens[i].double(), tokens[j].double(), dim=0))
        for i in range(len(tokens))
        for j in range(i)
    ]
    return sum(pairs) / len(pairs)


@pytest.mark.parametrize("name", MODELS)
def test_likeness_of_the_streams_tokens(name: str) -> None:
    model, example = MODELS[name](), scene()
    rows = SMOOTHING.measure(model, example, Cell("stream"))
    with torch.no_grad():
        wanted = streams(model, example.images)
    names = ["input", *(f"layer {i}" for i in range(len(wanted) - 1))]
    assert list(rows) == names
    places = patch_places(model)
    for row, stream in zip(names, wanted, strict=True):
        found = rows[row]["similarity"]
        assert found == pytest.approx(mean_similarity(stream[0, places]), abs=1e-5)
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("name", MODELS)
def test_likeness_of_what_mixers_return(name: str) -> None:
    model, example = MODELS[name](), scene()
    mixers: list[Any] = (
        [block.attention for block in model.vit.layers]
        if name == "vit"
        else [block.mixer for block in model.layers]
    )
    kept: list[Tensor] = []

    def keep(module: Any, args: Any, output: Any) -> None:
        kept.append(output if isinstance(output, Tensor) else output[0])

    handles = [mixer.register_forward_hook(keep) for mixer in mixers]
    model(example.images)
    for handle in handles:
        handle.remove()
    rows = SMOOTHING.measure(model, example, Cell("mixer"))
    assert list(rows) == [f"layer {i}" for i in range(len(mixers))]
    for numbers, output in zip(rows.values(), kept, strict=True):
        tokens = output.detach()[0, patch_places(model)]
        assert numbers["similarity"] == pytest.approx(mean_similarity(tokens), abs=1e-5)


def test_every_cell_of_a_transformer_has_finite_numbers() -> None:
    model, example = vit(), scene()
    for experiment in (INFLUENCE, SMOOTHING):
        for cell in experiment.cells():
            for numbers in experiment.measure(model, example, cell).values():
                assert all(abs(x) < float("inf") for x in numbers.values())
