"""VideoMamba: official names, the formula in plain loops, and relevance over space and time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import relative_error
from oracles import vim as oracle
from torch import Tensor

from captum_ssm import LatimFlow, MambaLRP, trace
from captum_ssm.errors import CheckpointError, InputError
from captum_ssm.models import VideoMamba, load_video_mamba

FLOAT32 = 1e-5


def small(**options: Any) -> Any:
    sizes = {"img_size": 12, "patch_size": 4, "depth": 2, "embed_dim": 6, "num_classes": 5}
    return oracle.randomise(VideoMamba(4, **sizes | {"d_state": 3} | options))


def clips(batch: int = 2) -> Tensor:
    return torch.randn(batch, 3, 4, 12, 12)


def by_hand(model: Any, clip: Tensor) -> Tensor:
    """The logits of one clip, patch by patch."""
    w, clip = oracle.double_weights(model), clip.double()
    kernel = w["patch_embed.proj.weight"]
    depth, side = kernel.shape[2:4]
    tokens = [w["cls_token"][0, 0] + w["pos_embed"][0, 0]]
    for t in range(clip.shape[1] // depth):
        for n in range((clip.shape[2] // side) ** 2):
            y, x = (side * i for i in divmod(n, clip.shape[2] // side))
            patch = clip[:, t * depth : (t + 1) * depth, y : y + side, x : x + side]
            place = w["pos_embed"][0, 1 + n] + w["temporal_pos_embedding"][0, t]
            tokens.append((kernel * patch).sum((1, 2, 3, 4)) + w["patch_embed.proj.bias"] + place)
    stream = torch.stack(tokens)
    for layer in range(len(model.layers)):
        start = f"layers.{layer}.mixer."
        mixer = {k.removeprefix(start): v for k, v in w.items() if k.startswith(start)}
        entering = oracle.norm(w, f"layers.{layer}.norm", stream)
        stream = stream + oracle.mix(mixer, entering, "v2", halve=False)
    return oracle.norm(w, "norm_f", stream)[0] @ w["head.weight"].T + w["head.bias"]


@pytest.mark.parametrize("tubelet", [1, 2])
def test_the_formula_and_the_file(tubelet: int, tmp_path: Path) -> None:
    model, given = small(tubelet=tubelet, img_size=8), clips()[..., :8, :8]
    wanted = torch.stack([by_hand(model, clip) for clip in given])
    with torch.no_grad():
        assert relative_error(model(given), wanted) <= FLOAT32
        torch.save(model.state_dict(), tmp_path / "video.pth")
        assert torch.equal(load_video_mamba(tmp_path / "video.pth")(given), model(given))


def test_names_and_shapes_of_the_released_tiny_model() -> None:
    """Of 8 frames in 14 x 14 patches of 16."""
    with torch.device("meta"):
        shapes = {name: tuple(w.shape) for name, w in VideoMamba().state_dict().items()}
    wanted = oracle.released_shapes(192)
    wanted["patch_embed.proj.weight"] = (192, 3, 1, 16, 16)
    wanted["temporal_pos_embedding"] = (1, 8, 192)
    assert shapes == wanted


def test_refusals(tmp_path: Path) -> None:
    for key in ("temporal_pos_embedding", "layers.1.mixer.D_b", "head.weight"):
        weights = dict(small().state_dict())
        weights.pop(key)
        torch.save(weights, tmp_path / "video.pth")
        with pytest.raises(CheckpointError, match=rf"does not fit a VideoMamba: .*'{key}'"):
            load_video_mamba(tmp_path / "video.pth")
    with pytest.raises(InputError, match=r"3 x 9 patches in time and space; .* for 4 x 9"):
        small()(clips()[:, :, :3])


@pytest.mark.parametrize("method", [LatimFlow, MambaLRP])
def test_relevance_over_space_and_time_adds_up(method: Any) -> None:
    model, given = small(), clips()
    found, delta = method(model).attribute(given, target=2, return_convergence_delta=True)
    assert found.shape == given.shape
    with torch.no_grad():
        size = found.abs().flatten(1).sum(1) + model(given)[:, 2].abs()
        with trace(model) as record:
            model(given)
    assert (delta.abs() <= FLOAT32 * size).all()
    assert all(layer.reconstruction_error() <= FLOAT32 for layer in record.layers)
    by_time, by_place = found.sum((1, 3, 4)), found.sum((1, 2))
    assert relative_error(by_time.sum(1), by_place.sum((1, 2))) <= 1e-4


def test_a_frame_alone_bears_what_it_alone_may_bear() -> None:
    """Of a model blind to all frames but one, no other gets relevance."""
    model = small(tubelet=2)
    with torch.no_grad():
        model.patch_embed.proj.weight[:, :, 0] = 0
    found = LatimFlow(model).attribute(clips(), target=0).sum((1, 3, 4))
    assert not found[:, ::2].any() and found[:, 1::2].all()
