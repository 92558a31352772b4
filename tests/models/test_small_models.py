"""Fresh models start as their recipe says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from captum_ssm.bench.tasks import CopyingTask
from captum_ssm.errors import OptionError
from captum_ssm.models.small import MODELS, ModelSize, new_model

VOCABULARY = CopyingTask(symbols=5).vocabulary


@pytest.mark.parametrize("architecture", MODELS)
@pytest.mark.parametrize(("lasting_from", "lasting"), [(0, {0, 1, 2}), (-1, {2}), (1, {1, 2})])
def test_lasting_layers_keep_what_they_have_seen(
    architecture: str, lasting_from: int, lasting: set[int]
) -> None:
    size = ModelSize(architecture, layers=3, hidden=12, state=5, conv_kernel=3, head_dim=6)
    model: Any = new_model(size, VOCABULARY, lasting_from=lasting_from)
    for i, block in enumerate(model.backbone.layers):
        mixer = block.mixer
        bias = mixer.dt_proj.bias if architecture == "mamba" else mixer.dt_bias
        steps = torch.nn.functional.softplus(bias)
        keeps = bool((mixer.A_log == -8).all()) and bool(((steps - 1).abs() < 1e-6).all())
        assert keeps == (i in lasting)
        assert keeps or (mixer.A_log.min() >= 0 and steps.max() < 0.5), "as transformers has it"


@pytest.mark.parametrize("architecture", MODELS)
def test_sizes_are_those_asked_for(architecture: str) -> None:
    size = ModelSize(architecture, layers=1, hidden=12, state=5, conv_kernel=3, head_dim=6)
    model: Any = new_model(size, VOCABULARY)
    config, mixer = model.config, model.backbone.layers[0].mixer
    assert (config.vocab_size, config.pad_token_id) == (7, 0)
    assert model.lm_head.weight is model.backbone.embeddings.weight
    assert model.backbone.embeddings.weight.shape == (7, 12)
    assert mixer.out_proj.weight.shape == (12, 24)
    assert mixer.conv1d.weight.shape[-1] == 3
    if architecture == "mamba":
        assert mixer.A_log.shape == (24, 5)
    else:
        assert mixer.A_log.shape == (4,)
        assert mixer.in_proj.weight.shape == (24 + 24 + 5 + 5 + 4, 12)


def test_unknown_architecture() -> None:
    with pytest.raises(OptionError, match="architecture='mamba3'"):
        ModelSize("mamba3")
