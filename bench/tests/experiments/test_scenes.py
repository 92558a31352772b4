"""Scenes as examples, and the models that classify them."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("skimage")

from bench_helpers.vision import SCENES, vim

from captum_ssm.errors import OptionError
from captum_ssm_bench import EXPERIMENTS, Subject
from captum_ssm_bench.bundled import BUNDLED
from captum_ssm_bench.experiments.on_scenes import OnScenes, image_of, predicted
from captum_ssm_bench.experiments.pixel_removal import ImagePerturbation

ANYONE = Subject("scenes-vim", lambda device: vim(), "")
ON_SCENES = ("image-perturbation", "segmentation", "pseudo-masks", "cls-influence", "oversmoothing")


def test_examples_follow_from_seed_and_index() -> None:
    experiment = ImagePerturbation(task=SCENES)
    first, same, other, seed = (
        experiment.example(ANYONE, index, seed) for index, seed in ((3, 1), (3, 1), (4, 1), (3, 2))
    )
    assert torch.equal(first.images, same.images) and torch.equal(first.masks, same.masks)
    assert not torch.equal(first.images, other.images)
    assert not torch.equal(first.images, seed.images)
    assert first.images.shape == (1, 3, 16, 16)


def test_the_experiments_are_known_by_name() -> None:
    for name in ON_SCENES:
        experiment = EXPERIMENTS[name]
        assert experiment.name == name and isinstance(experiment, OnScenes)
        assert all(subject.name in BUNDLED for subject in experiment.subjects())


def test_models_that_are_not_bundled_are_refused() -> None:
    with pytest.raises(OptionError, match="'no-such-model': no such bundled model"):
        ImagePerturbation(models=("no-such-model",)).subjects()


def test_the_predicted_class() -> None:
    model, scene = vim(), SCENES.draw(1, 5)
    assert image_of(scene, model) is scene.images
    assert predicted(model, scene.images) == int(model(scene.images)[0].argmax())


def test_what_cells_share_changes_no_number() -> None:
    experiment, model = ImagePerturbation(task=SCENES), vim()
    scene = experiment.example(ANYONE, 0, 0)
    cells = experiment.chosen(["MambaAttribution", "LatimALTI rollout", "GradCAM", "CAM"])
    alone = [experiment.measure(model, scene, cell) for cell in cells]
    with experiment.together():
        assert [experiment.measure(model, scene, cell) for cell in cells] == alone
