"""Dictionaries against formulas written out, and folders of SAELens of several versions.

Folders were compared once with SAELens 6.54.12 itself: of every architecture it reads what is saved
here to the same features, and what it saves is read here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from captum_ssm.errors import CheckpointError, DataNotFoundError
from captum_ssm.inside.dictionary import SparseAutoencoder

safetensors = pytest.importorskip("safetensors.torch")

WIDTH, FEATURES = 5, 12
KINDS: dict[str, dict[str, Any]] = {
    "standard": {"architecture": "standard"},
    "no-bias-taken": {"architecture": "standard", "apply_b_dec_to_input": False},
    "topk": {"architecture": "topk", "k": 3},
    "topk-rescaled": {"architecture": "topk", "k": 3, "rescale_acts_by_decoder_norm": True},
    "jumprelu": {"architecture": "jumprelu"},
    "gated": {"architecture": "gated"},
}


def made(kind: str, seed: int) -> SparseAutoencoder:
    torch.manual_seed(seed)
    found = SparseAutoencoder(WIDTH, FEATURES, layer="blocks.3", **KINDS[kind]).double()
    with torch.no_grad():
        for weights in found.parameters():
            weights.normal_()
        if kind == "jumprelu":  # half of what is positive lies below
            found.threshold.mul_(2).abs_()
    return found


def by_hand(kind: str, w: dict[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    found = []
    for i in range(FEATURES):
        taken = x if kind == "no-bias-taken" else x - w["b_dec"]
        p = float(sum(taken[e] * w["W_enc"][e, i] for e in range(WIDTH)))
        if kind == "gated":
            size = p * torch.exp(w["r_mag"][i]) + w["b_mag"][i]
            found.append(max(float(size), 0.0) if p + float(w["b_gate"][i]) > 0 else 0.0)
            continue
        b = p + float(w["b_enc"][i])
        if kind == "jumprelu":
            b = b if b > float(w["threshold"][i]) else 0.0
        if kind == "topk-rescaled":
            b *= float(w["W_dec"][i].square().sum().sqrt())
        found.append(b)
    if kind.startswith("topk"):
        least = sorted(found)[-3]
        found = [b if b >= least else 0.0 for b in found]
    features = torch.tensor([max(b, 0.0) for b in found], dtype=torch.float64)
    decoded = w["b_dec"].clone()
    for i, b in enumerate(features):
        row = w["W_dec"][i]
        decoded += b * (row / row.square().sum().sqrt() if kind == "topk-rescaled" else row)
    return features, decoded


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def vectors(seed: int) -> Tensor:
    return torch.randn(
        4, 3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )


@torch.no_grad()
def test_features_and_what_they_stand_for(kind: str, seed: int, vectors: Tensor) -> None:
    found = made(kind, seed)
    features = found.encode(vectors)
    decoded = found.decode(features)
    weights = {name: value.detach() for name, value in found.state_dict().items()}
    assert features.shape == (4, 3, FEATURES) and decoded.shape == vectors.shape
    for row in range(4):
        expected, vector = by_hand(kind, weights, vectors[row, 0])
        torch.testing.assert_close(features[row, 0], expected)
        torch.testing.assert_close(decoded[row, 0], vector)
    torch.testing.assert_close(found(vectors), decoded)
    assert 0 < int((features > 0).sum()) < features.numel()


def test_gradients_are_those_of_what_is_active(kind: str, seed: int, vectors: Tensor) -> None:
    found, x = made(kind, seed), vectors[0, 0].clone().requires_grad_()
    jacobian = torch.autograd.functional.jacobian(found.encode, x)
    step = 1e-6 * torch.eye(WIDTH, dtype=torch.float64)
    with torch.no_grad():
        moved = [(found.encode(x + d) - found.encode(x - d)) / 2e-6 for d in step]
    torch.testing.assert_close(jacobian, torch.stack(moved, -1), rtol=1e-6, atol=1e-7)


@torch.no_grad()
def test_a_folder_holds_everything(kind: str, seed: int, vectors: Tensor, tmp_path: Path) -> None:
    saved = made(kind, seed)
    saved.metadata["model_name"] = "some-model"
    saved.save(tmp_path / "made" / "here")
    found = SparseAutoencoder.load(tmp_path / "made" / "here")
    assert torch.equal(found.encode(vectors), saved.encode(vectors))
    assert torch.equal(found.decode(found.encode(vectors)), saved(vectors))
    assert (found.architecture, found.k, found.layer) == (saved.architecture, saved.k, "blocks.3")
    assert found.metadata["model_name"] == "some-model" and not found.training


#: The names of the weights that SAELens 6 writes, by architecture.
WEIGHTS = {
    "standard": {"W_enc", "b_enc", "W_dec", "b_dec"},
    "topk": {"W_enc", "b_enc", "W_dec", "b_dec"},
    "jumprelu": {"W_enc", "b_enc", "threshold", "W_dec", "b_dec"},
    "gated": {"W_enc", "b_gate", "r_mag", "b_mag", "W_dec", "b_dec"},
}


def test_the_layout_is_that_of_saelens_6(kind: str, seed: int, tmp_path: Path) -> None:
    saved = made(kind, seed)
    saved.save(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"cfg.json", "sae_weights.safetensors"}
    settings = json.loads((tmp_path / "cfg.json").read_text("utf-8"))
    weights = safetensors.load_file(tmp_path / "sae_weights.safetensors")
    metadata = settings.pop("metadata")
    assert set(weights) == WEIGHTS[saved.architecture]
    assert weights["W_enc"].shape == (WIDTH, FEATURES) == weights["W_dec"].T.shape
    assert metadata["hook_name"] == "blocks.3"
    assert int(metadata["sae_lens_version"].split(".")[0]) >= 6
    rescale = KINDS[kind].get("rescale_acts_by_decoder_norm", False)
    of_topk = {"k": 3, "rescale_acts_by_decoder_norm": rescale}
    assert settings == {
        "architecture": saved.architecture,
        "d_in": WIDTH,
        "d_sae": FEATURES,
        "dtype": "float64",
        "device": "cpu",
        "apply_b_dec_to_input": kind != "no-bias-taken",
        "normalize_activations": "none",
        "reshape_activations": "none",
        **(of_topk if saved.architecture == "topk" else {}),
    }


def folder_of(tmp_path: Path, weights: dict[str, Tensor] | None = None, **settings: Any) -> Path:
    whole = {"architecture": "standard", "d_in": WIDTH, "d_sae": FEATURES, "dtype": "float32"}
    whole |= {"metadata": {"hook_name": "blocks.3.hook_resid_post", "sae_lens_version": "6.5.0"}}
    whole |= settings
    whole = {name: value for name, value in whole.items() if value is not None}
    (tmp_path / "cfg.json").write_text(json.dumps(whole), "utf-8")
    torch.manual_seed(0)
    basic = {
        "W_enc": torch.randn(WIDTH, FEATURES),
        "b_enc": torch.randn(FEATURES),
        "W_dec": torch.randn(FEATURES, WIDTH),
        "b_dec": torch.randn(WIDTH),
    }
    held = {name: value.contiguous() for name, value in {**basic, **(weights or {})}.items()}
    safetensors.save_file(held, tmp_path / "sae_weights.safetensors")
    return tmp_path


def test_the_name_of_a_module_comes_before_that_of_a_hook(tmp_path: Path) -> None:
    both = {"hook_name": "blocks.3.hook_resid_post", "hf_hook_name": "model.layers.3"}
    found = SparseAutoencoder.load(folder_of(tmp_path, metadata=both))
    assert found.layer == "model.layers.3"
    found.save(tmp_path / "again")
    written = json.loads((tmp_path / "again" / "cfg.json").read_text("utf-8"))["metadata"]
    assert written.items() >= both.items()


def test_earlier_versions_keep_everything_in_one_list(tmp_path: Path) -> None:
    folder = folder_of(
        tmp_path,
        {"scaling_factor": torch.ones(FEATURES)},
        metadata=None,
        architecture=None,
        dtype="torch.float32",
        hook_point="blocks.3.hook_resid_post",
        model_name="gpt2-small",
        activation_fn_str="relu",
        normalize_activations=False,
        finetuning_scaling_factor=False,
        lr=3e-4,
    )
    found = SparseAutoencoder.load(folder)
    assert (found.architecture, found.layer) == ("standard", "blocks.3.hook_resid_post")
    known = {"model_name": "gpt2-small", "hook_name": "blocks.3.hook_resid_post"}
    assert found.metadata == known and found.apply_b_dec_to_input
    assert SparseAutoencoder.load(folder, layer="model.layers.3").layer == "model.layers.3"
    earlier = {"activation_fn_str": "topk", "activation_fn_kwargs": {"k": 3}}
    found = SparseAutoencoder.load(folder_of(tmp_path, metadata=None, **earlier))
    assert (found.architecture, found.k) == ("topk", 3)
    threshold = {"log_threshold": torch.randn(FEATURES)}
    found = SparseAutoencoder.load(folder_of(tmp_path, threshold, architecture="jumprelu"))
    torch.testing.assert_close(found.threshold.detach(), threshold["log_threshold"].exp())
    found = SparseAutoencoder.load(folder_of(tmp_path, dtype="bfloat16"))
    assert {value.dtype for value in found.parameters()} == {torch.bfloat16}
    assert found(torch.randn(2, WIDTH)).dtype == torch.bfloat16


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"architecture": "temporal"}, r"architecture = 'temporal'; one of \('standard'"),
    ({"normalize_activations": "layer_norm"}, "normalize_activations = 'layer_norm'.* Multiply"),
    ({"normalize_activations": True, "metadata": None}, "normalize_activations = True"),
    ({"reshape_activations": "hook_z"}, "reshape_activations = 'hook_z'"),
    ({"metadata": {"hook_name": "blocks.3.attn.hook_z"}}, "reshape_activations = 'hook_z'"),
    ({"metadata": {"hook_head_index": 2}}, "hook_head_index = 2; None is.* single head"),
    ({"finetuning_scaling_factor": True}, "finetuning_scaling_factor = True"),
    ({"activation_fn": "tanh-relu"}, "activation_fn = 'tanh-relu'; 'relu' is accepted"),
    ({"dtype": "int8"}, "dtype = 'int8'; one of"),
    ({"d_in": None}, "d_in = None; a number of 1 or more"),
    ({"d_sae": -3}, "d_sae = -3"),
    ({"architecture": "topk"}, "k = None; a number"),
    ({"architecture": "topk", "k": 13}, r"cfg\.json has settings that fit no dictionary: k=13"),
    ({"rescale_acts_by_decoder_norm": True}, "k=None, rescale_acts.*'standard' has no such"),
    ({"d_in": 6}, r"does not fit cfg\.json.*W_enc"),
    ({"architecture": "gated"}, r"does not fit cfg\.json.*b_gate"),
]


def test_what_cannot_be_honored_is_refused(tmp_path: Path) -> None:
    for settings, said in REFUSED:
        with pytest.raises(CheckpointError, match=f"(?s){said}"):
            SparseAutoencoder.load(folder_of(tmp_path, **settings))
    learned = {"scaling_factor": torch.full((FEATURES,), 2.0)}
    with pytest.raises(CheckpointError, match="scaling_factor"):
        SparseAutoencoder.load(folder_of(tmp_path, learned))


def test_broken_folders(tmp_path: Path) -> None:
    with pytest.raises(DataNotFoundError, match=r"cfg\.json does not exist"):
        SparseAutoencoder.load(tmp_path)
    folder_of(tmp_path)
    (tmp_path / "sae_weights.safetensors").write_bytes(b"no weights")
    with pytest.raises(CheckpointError, match="not a complete safetensors file"):
        SparseAutoencoder.load(tmp_path)
    (tmp_path / "sae_weights.safetensors").unlink()
    with pytest.raises(DataNotFoundError, match=r"sae_weights\.safetensors does not exist"):
        SparseAutoencoder.load(tmp_path)
    (tmp_path / "cfg.json").write_text("[]", "utf-8")
    with pytest.raises(CheckpointError, match=r"contains a list\. Pass a folder with"):
        SparseAutoencoder.load(tmp_path)
