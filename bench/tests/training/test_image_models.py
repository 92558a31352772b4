"""Image classifiers: made by recipes, saved and loaded; the shipped ones do what cards say."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from scipy import ndimage
from sklearn.metrics import roc_auc_score

pytest.importorskip("transformers")
pytest.importorskip("safetensors")
pytest.importorskip("skimage")

from captum_ssm.errors import CheckpointError, OptionError
from captum_ssm.models import VisionMamba, VMamba
from captum_ssm.models.folders import load_folder
from captum_ssm_bench import load_bundled
from captum_ssm_bench.bundled import BUNDLED, weights_of
from captum_ssm_bench.cli import main
from captum_ssm_bench.tasks.scenes import SCENES, SceneTask
from captum_ssm_bench.training.image_recipes import (
    IMAGE_RECIPES,
    ImageModelSize,
    ImageRecipe,
    image_accuracy,
)
from captum_ssm_bench.training.loop import train, train_model
from captum_ssm_bench.training.recipes import RECIPES

TINY = SceneTask(size=16, lines=1, spots=2)
SIZES = {
    "vim": ImageModelSize("vim", layers=1, hidden=16, state=4, patch=8),
    "first": ImageModelSize("vim", layers=1, hidden=16, state=4, patch=8, cls_token="head"),
    "vmamba": ImageModelSize("vmamba", layers=1, hidden=16, state=2, patch=8),
    "vit": ImageModelSize("vit", layers=1, hidden=24, patch=8),
}


SHIPPED = [name for name in IMAGE_RECIPES if name in BUNDLED]
#: The least accuracy on a few hundred fresh scenes, a little below what the cards tell.
LEAST = {"scenes-vim": 0.86, "scenes-vim-first": 0.91, "scenes-vmamba": 0.84, "scenes-vit": 0.91}


def _recipe(size: str, steps: tuple[int, ...] = (2, 1)) -> ImageRecipe:
    return ImageRecipe(TINY, SIZES[size], steps=steps, batch_size=3)


def _quiet(line: str) -> None:
    pass


def _same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def _logits(model: torch.nn.Module, images: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        output = model(images)
    return output if isinstance(output, torch.Tensor) else output.logits


@pytest.mark.parametrize("size", SIZES)
def test_the_same_seed_gives_the_same_model(size: str, seed: int) -> None:
    one, again, other = (
        train_model(_recipe(size), each, log=_quiet) for each in (seed, seed, seed + 1)
    )
    assert _same(one, again) and not _same(one, other)
    assert not one.training


def test_all_rounds_but_the_last_show_bright_objects_and_none_held_out(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    drawn: list[tuple[int, str, bool]] = []
    draw = SceneTask.draw

    def watched(task: SceneTask, count: int, seed: int, held_out: bool = True) -> Any:
        drawn.append((count, task.polarity, held_out))
        return draw(task, count, seed, held_out)

    monkeypatch.setattr(SceneTask, "draw", watched)
    train_model(_recipe("vim", steps=(2, 1, 3)), seed, log=_quiet)
    progress, *batches = drawn
    assert progress[1:] == ("random", True)
    assert batches == 3 * [(3, "bright", False)] + 3 * [(3, "random", False)]


@pytest.mark.parametrize("size", SIZES)
def test_a_saved_model_loads_again(size: str, tmp_path: Path, seed: int) -> None:
    recipe = _recipe(size)
    model = train_model(recipe, seed, log=_quiet)
    recipe.save(model, tmp_path)
    again, classes = load_folder(tmp_path)
    assert classes == TINY.classes
    assert type(again) is type(model) and not again.training
    images = TINY.draw(3, seed).images
    assert torch.equal(_logits(model, images), _logits(again, images))
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors"}


def test_the_cls_token_stands_where_it_is_told() -> None:
    places = {size: _recipe(size).new().cls_positions(10) for size in ("vim", "first")}
    assert places == {"vim": [5], "first": [0]}


@pytest.mark.parametrize("width", [24, 36])
def test_positions_of_a_transformer_start_as_waves(width: int) -> None:
    task, patch = SceneTask(size=24), 4
    size = ImageModelSize("vit", layers=1, hidden=width, patch=patch)
    fresh: Any = ImageRecipe(task, size, steps=(1,)).new()
    positions = fresh.vit.embeddings.position_embeddings
    side, count = task.size // patch, width // 4
    rates = [math.pi / side * side ** (k / count) for k in range(count)]
    for row in range(side):
        for column in range(side):
            wanted = [
                f(place * rate) / 2
                for place in (column, row)
                for f in (math.sin, math.cos)
                for rate in rates
            ]
            found = positions[0, 1 + row * side + column]
            assert torch.allclose(found, torch.tensor(wanted), atol=1e-6)
    assert positions.requires_grad and positions.abs().max() < 1


@pytest.mark.parametrize("right", [0, 3, 7])
def test_accuracy_counts_right_labels(right: int, seed: int) -> None:
    scenes = TINY.draw(7, seed)
    answers = scenes.labels.clone()
    answers[right:] = (answers[right:] + 1) % len(TINY.classes)

    class Answering(torch.nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            found = (images.flatten(1)[:, None] == scenes.images.flatten(1)).all(-1).int().argmax(1)
            return torch.nn.functional.one_hot(answers[found]).float()

    assert image_accuracy(Answering(), scenes) == pytest.approx(right / 7)


@pytest.mark.parametrize("name", ["scenes-vim", "scenes-vmamba", "scenes-vit"])
def test_command_line(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    recipe = replace(IMAGE_RECIPES[name], task=TINY, batch_size=2)
    monkeypatch.setitem(RECIPES, name, recipe)
    command = f"train {name} --out {tmp_path} --seed 3 --layers 1 --hidden 24 --steps 2"
    assert main(command.split()) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in printed[:1]] == [["step", "2/2"]]
    assert [line.partition(":")[0] for line in printed[1:]] == ["held-out", "known backgrounds"]
    model, classes = load_bundled(name, tmp_path)
    assert classes == TINY.classes
    changed = replace(recipe, size=replace(recipe.size, layers=1, hidden=24), steps=(2,))
    assert _same(model, train_model(changed, 3, log=_quiet))


def test_a_size_that_the_model_does_not_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"heads=3: the size of 'scenes-vit'.*'hidden'"):
        train("scenes-vit", tmp_path / "out", heads=3)
    with pytest.raises(OptionError, match="architecture='cnn'"):
        ImageModelSize("cnn")  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module", params=SHIPPED)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def shipped(name: str) -> torch.nn.Module:
    return load_bundled(name)[0]


def test_accuracy_on_fresh_scenes(name: str, shipped: torch.nn.Module, seed: int) -> None:
    assert image_accuracy(shipped, SCENES.draw(512, seed)) >= LEAST[name]


@pytest.mark.parametrize("held_out", [False, True])
def test_accuracy_on_known_and_new_backgrounds(
    name: str, shipped: torch.nn.Module, held_out: bool, seed: int
) -> None:
    assert image_accuracy(shipped, SCENES.draw(2048, seed, held_out)) >= LEAST[name] + 0.015


def test_the_object_is_the_cause(name: str, shipped: torch.nn.Module, seed: int) -> None:
    """Without the object, the model finds the class no more often than by chance."""
    scenes = SCENES.draw(400, seed)
    bare = replace(scenes, images=scenes.backgrounds)
    chance = 1 / len(SCENES.classes)
    assert image_accuracy(shipped, bare) <= chance + 5 * (chance * (1 - chance) / 400) ** 0.5


def test_shipped_files(name: str) -> None:
    folder = weights_of(name).parent
    assert {path.name for path in folder.iterdir()} == {
        "README.md",
        "config.json",
        "model.safetensors",
    }
    assert weights_of(name).stat().st_size <= 500_000
    assert tuple(json.loads((folder / "config.json").read_text("utf-8"))["id2label"].values()) == (
        SCENES.classes
    )


def test_the_card_says_how_the_model_is_made(name: str, shipped: torch.nn.Module) -> None:
    card = " ".join((weights_of(name).parent / "README.md").read_text("utf-8").split())
    recipe = IMAGE_RECIPES[name]
    count = f"{sum(p.numel() for p in shipped.parameters()):,}".replace(",", " ")
    assert card.startswith(f"# {name} ")
    assert f"{count} parameters" in card
    assert f'load_bundled("{name}")' in card
    assert f"{recipe.size.layers} layers, width {recipe.size.hidden}" in card
    assert all(f"{steps} steps" in card for steps in recipe.steps)


@pytest.mark.parametrize("column, polarity", [(1, "random"), (2, "bright")])
def test_the_baselines_of_the_card(
    name: str, column: int, polarity: Literal["random", "bright"], seed: int
) -> None:
    card = (weights_of(name).parent / "README.md").read_text("utf-8")
    scenes = replace(SCENES, polarity=polarity).draw(300, seed)
    images = scenes.images
    median = images.flatten(2).quantile(0.5, -1, interpolation="lower")[..., None, None]
    maps = {
        "brightness": images.mean(1),
        "edges": torch.stack([sobel(image) for image in images]),
        "distance from the median colour": (images - median).abs().sum(1),
    }
    shares = F.avg_pool2d((scenes.masks > 0).float()[:, None], 4).flatten(1)
    for what, found in maps.items():
        patches = F.avg_pool2d(found[:, None], 4).flatten(1)
        areas = torch.tensor(
            [
                roc_auc_score((share > 0.5).numpy(), each.numpy())
                for share, each in zip(shares, patches, strict=True)
                if (share > 0.5).any()
            ]
        )
        (row,) = (line for line in card.splitlines() if line.startswith(f"| {what} |"))
        said = float(row.split("|")[1 + column])
        assert abs(said - areas.mean()) <= 6 * areas.std() / len(areas) ** 0.5 + 0.001, what


def sobel(image: torch.Tensor) -> torch.Tensor:
    """The length of the gradient of an image (3, S, S) over its colours."""
    parts = [
        torch.from_numpy(ndimage.sobel(channel.numpy(), axis, mode="nearest"))
        for channel in image
        for axis in (0, 1)
    ]
    return torch.stack(parts).square().sum(0).sqrt()


def test_what_ships_is_known() -> None:
    assert set(SHIPPED) == set(LEAST)


def test_the_weights_of_every_recipe_ship() -> None:
    assert set(RECIPES) == set(BUNDLED)


def test_a_folder_without_a_key_is_refused(tmp_path: Path) -> None:
    recipe = _recipe("vim")
    recipe.save(recipe.new(), tmp_path)
    path = tmp_path / "config.json"
    settings = json.loads(path.read_text())
    del settings["id2label"]
    path.write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match=r"has no key: .*vocab\.json.*id2label"):
        load_folder(tmp_path)


def test_a_weight_too_few_is_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    recipe = _recipe("vit")
    recipe.save(recipe.new(), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["classifier.bias"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"ViTForImageClassification.*classifier\.bias"):
        load_folder(tmp_path)


def test_both_architectures_are_of_equal_size() -> None:
    sizes = [sum(p.numel() for p in recipe.new().parameters()) for recipe in IMAGE_RECIPES.values()]
    assert max(sizes) <= 1.15 * min(sizes)


def test_it_is_the_class_that_users_have(name: str, shipped: torch.nn.Module) -> None:
    import transformers

    classes = {
        "vim": VisionMamba,
        "vmamba": VMamba,
        "vit": transformers.ViTForImageClassification,
    }
    assert type(shipped) is classes[IMAGE_RECIPES[name].size.architecture]
    assert not shipped.training
    assert all(p.dtype == torch.float32 and p.isfinite().all() for p in shipped.parameters())


def test_loading_leaves_the_random_state_alone(name: str) -> None:
    before = torch.get_rng_state()
    load_bundled(name)
    assert torch.equal(torch.get_rng_state(), before)
