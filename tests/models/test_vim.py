"""Vision Mamba: the released checkpoints load, and the logits are those of plain loops."""

from __future__ import annotations

import argparse
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import relative_error
from oracles import vim as oracle
from torch import Tensor

from captum_ssm.errors import CheckpointError, OptionError
from captum_ssm.models import VisionMamba, load_vim, vim_small, vim_tiny

pytestmark = pytest.mark.slow

RELEASED = [("tiny", 7_148_008), ("small", 25_796_584)]
TYPES = [("none", True), ("v1", True), ("v2", True), ("v2", False)]
CLS = ["middle", "head", "end", "double", "none"]
POOLS = ["none", "mean", "max", "all"]
SMALL = {
    "img_size": (12, 20),
    "patch_size": 4,
    "depth": 2,
    "embed_dim": 6,
    "num_classes": 5,
    "d_state": 3,
}


def small(**options: Any) -> Any:
    return oracle.randomise(VisionMamba(**(SMALL | options)))


def images(batch: int = 2, size: tuple[int, int] = (12, 20)) -> Tensor:
    return torch.randn(batch, 3, *size)


def released(width: int, depth: int) -> dict[str, Tensor]:
    return dict(VisionMamba(embed_dim=width, depth=depth).state_dict())


@pytest.mark.slow
@pytest.mark.parametrize(("size", "count"), RELEASED)
def test_constructors_have_the_released_sizes(size: str, count: int) -> None:
    with torch.device("meta"):
        model = vim_tiny() if size == "tiny" else vim_small()
    assert len(model.state_dict()) == 415
    assert sum(p.numel() for p in model.parameters()) == count


@pytest.mark.parametrize("form", ["model", "bare", "training", "safetensors"])
def test_forms_of_files(form: str, tmp_path: Path) -> None:
    model = small()
    weights = model.state_dict()
    path = tmp_path / ("vim.safetensors" if form == "safetensors" else "vim.pth")
    if form == "safetensors":
        pytest.importorskip("safetensors.torch").save_file(weights, path)
    elif form == "training":  # what the published training script writes
        args = argparse.Namespace(lr=1e-3, output_dir="somewhere")
        torch.save({"model": weights, "optimizer": {"state": {}}, "epoch": 3, "args": args}, path)
    else:
        torch.save({"model": weights} if form == "model" else weights, path)
    before = torch.get_rng_state()
    loaded = load_vim(str(path), img_size=(12, 20))
    assert torch.equal(torch.get_rng_state(), before)
    pictures = images()
    assert torch.equal(loaded(pictures), model(pictures))
    assert all(p.requires_grad for p in loaded.parameters())


@pytest.mark.parametrize("options", [
    {"cls_token": "double"},
    {"cls_token": "none", "final_pool_type": "mean"},
    {"cls_token": "head"},
    {"cls_token": "none", "pos_embed": False},
    {"bimamba_type": "none"},
    {"bimamba_type": "v1"},
    {"if_divide_out": False},
    {"rms_norm": False},
    {"bias": True, "conv_bias": False},
    {"init_layer_scale": 0.5, "num_classes": 0},
    {"channels": 1, "d_conv": 3, "dt_rank": 2, "d_inner": 9},
])  # fmt: skip
def test_sizes_are_read_off_the_weights(options: dict[str, Any], tmp_path: Path) -> None:
    model = small(**({"img_size": 20} | options)).double()
    torch.save(model.state_dict(), tmp_path / "vim.pth")
    told = ("final_pool_type", "if_divide_out", "pos_embed")
    given = {name: value for name, value in options.items() if name in told}
    if options.get("cls_token") in ("head", "none"):
        given["cls_token"] = options["cls_token"]
    loaded = load_vim(tmp_path / "vim.pth", **given)
    pictures = torch.randn(2, options.get("channels", 3), 20, 20).double()
    assert {p.dtype for p in loaded.parameters()} == {torch.float64}
    assert torch.equal(loaded(pictures), model(pictures))


@pytest.mark.parametrize(
    ("built", "given"),
    [
        ({"img_size": 224, "patch_size": 16, "stride": 8}, {}),  # as the released fine-tuned ones
        ({"img_size": 12, "patch_size": 4, "stride": 2}, {"stride": 2}),
        ({"img_size": (12, 20), "patch_size": 4, "stride": 2}, {"img_size": (12, 20)}),
        ({"img_size": 32, "patch_size": 4}, {}),
    ],
)
def test_grids_are_read_off_the_weights(
    built: dict[str, Any], given: dict[str, Any], tmp_path: Path
) -> None:
    model = small(**built)
    torch.save(model.state_dict(), tmp_path / "vim.pth")
    loaded = load_vim(tmp_path / "vim.pth", **given)
    assert loaded.grid == model.grid
    assert loaded.patch_embed.proj.stride == model.patch_embed.proj.stride


@pytest.mark.slow
def test_files_that_do_not_fit_are_named(tmp_path: Path) -> None:
    def refused(content: Any, message: str) -> None:
        torch.save(content, tmp_path / "vim.pth")
        with pytest.raises(CheckpointError, match=message):
            load_vim(tmp_path / "vim.pth")

    whole = released(32, 3)
    for key in released(32, 1):
        lacking = {name: weight for name, weight in whole.items() if name != key}
        refused({"model": lacking}, rf"vim\.pth does not fit.*lack.*{re.escape(repr(key))}")
        shape = whole[key].shape
        changed = whole | {key: torch.zeros(*shape[:-1], shape[-1] + 1)}
        refused({"model": changed}, re.escape(repr(key)))
    for key in ("dist_token", "layers.0.mixer.E", "layers.x.norm.weight", "rope"):
        refused({"model": whole | {key: torch.zeros(3)}}, f"unknown weights '{key}'")
    for key in ("patch_embed.proj.weight", "pos_embed", "layers.0.mixer.A_log"):
        refused(released(32, 1) | {key: torch.zeros(5)}, rf"'{key}' has shape \(5,\)")
    some = {name: weight for name, weight in whole.items() if not name.startswith("layers.1")}
    refused(some, r"lacks 'layers\.1.* and 9 more")
    for content in ([1, 2], {"model": {"a": 1}}, torch.zeros(2)):
        refused(content, "does not contain a dict of tensors")
    refused({"model": {}}, r"lack 'patch_embed\.proj\.weight'")


def test_a_grid_that_is_no_square_must_be_told(tmp_path: Path) -> None:
    torch.save(small().state_dict(), tmp_path / "vim.pth")
    with pytest.raises(CheckpointError, match=r"15 patches.*img_size=\(height, width\)"):
        load_vim(tmp_path / "vim.pth")
    with pytest.raises(CheckpointError, match="15 patches"):
        load_vim(tmp_path / "vim.pth", img_size=32)


class Trap:
    def __reduce__(self) -> Any:
        return (print, ("code ran",))


def test_no_code_of_a_file_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"model": Trap()}, tmp_path / "vim.pth")
    with pytest.raises(CheckpointError, match="without running code") as caught:
        load_vim(tmp_path / "vim.pth")
    assert isinstance(caught.value.__cause__, pickle.UnpicklingError)
    assert "code ran" not in capsys.readouterr().out


@pytest.mark.parametrize("cls", CLS)
def test_every_variant(cls: str) -> None:
    pictures = images()
    for kind, halve in TYPES:
        model = small(cls_token=cls, bimamba_type=kind, if_divide_out=halve).double()
        wanted = oracle.forward(model, pictures, cls, "none", kind, halve)
        assert relative_error(model(pictures.double()), wanted) <= 1e-10
        assert relative_error(model.float()(pictures), wanted) <= 1e-5
    for pool in POOLS:  # ignored if there is a cls token
        model = small(cls_token=cls, final_pool_type=pool).double()
        found = model(pictures.double())
        assert found.shape == ((2, 15, 5) if (cls, pool) == ("none", "all") else (2, 5))
        assert (
            relative_error(found, oracle.forward(model, pictures, cls, pool, "v2", True)) <= 1e-10
        )


@pytest.mark.parametrize("options", [
    {"rms_norm": False},
    {"pos_embed": False},
    {"bias": True, "conv_bias": False, "init_layer_scale": 0.1},
    {"stride": 3, "img_size": (10, 13)},
    {"img_size": 4},
    {"img_size": (4, 8), "cls_token": "end"},
    {"d_conv": 7, "d_inner": 5, "dt_rank": 3},
])  # fmt: skip
def test_other_sizes(options: dict[str, Any]) -> None:
    model = small(**options).double()
    size = (SMALL | options)["img_size"]
    pictures = images(2, (size, size) if isinstance(size, int) else size)
    wanted = oracle.forward(model, pictures, options.get("cls_token", "middle"), "none", "v2", True)
    assert relative_error(model(pictures.double()), wanted) <= 1e-10


@pytest.mark.parametrize("cls", CLS)
def test_position_embeddings_of_other_sizes(cls: str) -> None:
    """The patches' embeddings are those of a bicubic resize; the cls tokens keep theirs."""
    model = small(cls_token=cls, img_size=(12, 20))
    assert model(images(2, (16, 8))).shape == (2, 5)
    places = oracle.cls_places(cls, 15)
    flat = model.pos_embed.detach()[0]
    patches = flat[[t for t in range(len(flat)) if t not in places]]
    resized = torch.nn.functional.interpolate(
        patches.T.reshape(1, 6, 3, 5), size=(4, 2), mode="bicubic"
    )
    rows = list(resized[0].flatten(1).T)
    for place, old in zip(oracle.cls_places(cls, 8), places, strict=True):
        rows.insert(place, flat[old])
    other = small(cls_token=cls, img_size=(16, 8))
    other.load_state_dict(model.state_dict() | {"pos_embed": torch.stack(rows)[None]})
    pictures = images(2, (16, 8))
    assert relative_error(model(pictures), other(pictures)) <= 1e-6


def test_unknown_options() -> None:
    for options in ({"cls_token": "left"}, {"final_pool_type": "sum"}, {"bimamba_type": "v3"}):
        ((name, value),) = options.items()
        with pytest.raises(OptionError, match=f"{name}='{value}'"):
            VisionMamba(**(SMALL | options))
