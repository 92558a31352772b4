"""Fresh models start as their recipe says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from captum_ssm.errors import OptionError
from captum_ssm.models import WordVocabulary
from captum_ssm.tracing import find_mixers, repaired_scans
from captum_ssm_bench.training.small import ModelSize, new_model

VOCABULARY = WordVocabulary(["<pad>", "a", "b", "c", "d", "e", "="])


@pytest.mark.parametrize(("architecture", "lasting_from", "lasting"), [
    ("mamba", 0, {0, 1, 2}),
    ("mamba2", -1, {2}),
    pytest.param("gated-deltanet", 1, {1, 2}, marks=pytest.mark.slow),
])  # fmt: skip
def test_lasting_layers_keep_what_they_have_seen(
    architecture: str, lasting_from: int, lasting: set[int]
) -> None:
    size = ModelSize(architecture, layers=3, hidden=12, state=5, conv_kernel=3, head_dim=6)
    model: Any = new_model(size, VOCABULARY, lasting_from=lasting_from)
    for i, block in enumerate(model.base_model.layers):
        mixer = block.linear_attn if architecture == "gated-deltanet" else block.mixer
        bias = mixer.dt_proj.bias if architecture == "mamba" else mixer.dt_bias
        steps = torch.nn.functional.softplus(bias)
        keeps = bool((mixer.A_log == -8).all()) and bool(((steps - 1).abs() < 1e-6).all())
        assert keeps == (i in lasting)
        assert keeps or bool((mixer.A_log > -8).all()), "as transformers has it"


@pytest.mark.parametrize(("architecture", "kinds"), [
    ("mamba", ["MambaMixer"] * 2),
    ("gated-deltanet", ["Qwen3NextGatedDeltaNet"] * 2),
    ("rwkv", ["RwkvSelfAttention"] * 2),
    ("bamba", ["BambaMixer", "BambaAttention"]),
])  # fmt: skip
@pytest.mark.slow
def test_models_are_made_of_the_mixers_that_they_are_named_after(
    architecture: str, kinds: list[str]
) -> None:
    size = ModelSize(architecture, hidden=24, head_dim=12)
    model: Any = new_model(size, VOCABULARY)
    assert [type(each.module).__name__ for each in find_mixers(model)] == kinds
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert model.get_input_embeddings().weight.shape == (len(VOCABULARY), 24)
    ids = torch.randint(1, len(VOCABULARY), (2, 5))
    with repaired_scans():
        assert model(ids).logits.shape == (2, 5, len(VOCABULARY))


def test_unknown_architecture() -> None:
    with pytest.raises(OptionError, match="architecture='mamba3'"):
        ModelSize("mamba3")
