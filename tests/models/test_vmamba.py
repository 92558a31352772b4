"""VMamba: the released checkpoints load, and sizes are read off the weights."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import vmamba as oracle
from torch import Tensor

from captum_ssm.errors import CheckpointError, OptionError
from captum_ssm.models import VMamba, load_vmamba

pytestmark = pytest.mark.slow

#: Width, depths, channels of mixers as a multiple of the width, and millions of parameters as
#: published.
RELEASED = [
    (96, (2, 2, 8, 2), 1, 30),
    (96, (2, 2, 15, 2), 2, 50),
    (128, (2, 2, 15, 2), 2, 89),
]
SMALL: dict[str, Any] = {"depths": (1, 2), "dims": 6, "num_classes": 5, "d_state": 2}
#: Those of the first version.
FIRST = {"forward_type": "v0", "patch_embed": "v1", "downsample": "v1", "mlp_ratio": 0.0}


def small(**options: Any) -> Any:
    return oracle.randomise(VMamba(**SMALL | options))


def saved(weights: dict[str, Tensor], folder: Path) -> Path:
    torch.save({"model": weights}, folder / "vmamba.pth")
    return folder / "vmamba.pth"


@pytest.mark.slow
@pytest.mark.parametrize(("width", "depths", "ratio", "millions"), RELEASED)
def test_the_released_names_and_shapes(
    width: int, depths: tuple[int, ...], ratio: int, millions: int
) -> None:
    with torch.device("meta"):
        model = VMamba(depths=depths, dims=width, ssm_ratio=ratio, d_state=1, conv_bias=False)
    wanted = oracle.released_shapes(width, depths, ratio)
    assert {name: tuple(w.shape) for name, w in model.state_dict().items()} == wanted
    assert round(sum(w.numel() for w in model.parameters()) / 1e6) == millions


def test_a_released_file_loads(tmp_path: Path) -> None:
    """Of the released names and form, at a small width."""
    shapes = oracle.released_shapes(8, (1, 2, 1), 2)
    weights = {name: torch.randn(shape) for name, shape in shapes.items()}
    model = load_vmamba(saved(weights, tmp_path))
    assert not model.training and model.state_dict().keys() == weights.keys()
    assert all(torch.equal(w, weights[name]) for name, w in model.state_dict().items())
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 1000)


@pytest.mark.parametrize("options", [
    {},
    FIRST,
    {"patch_size": 2, "patch_embed": "v1", "downsample": "v2", "dims": (4, 10)},
    {"forward_type": "v05", "conv_bias": False, "dt_rank": 3, "ssm_ratio": 1.5},
    {"forward_type": "v05_noz_onnone", "d_conv": 0, "patch_norm": False, "pos_embed": (4, 6)},
    {"patch_size": 8, "channels": 1, "d_conv": 5, "depths": (1,), "mlp_ratio": 3.0},
])  # fmt: skip
def test_sizes_are_read_off_the_weights(options: dict[str, Any], tmp_path: Path) -> None:
    model = small(**options).double()
    loaded = load_vmamba(saved(model.state_dict(), tmp_path))
    images = torch.randn(2, options.get("channels", 3), 16, 24).double()
    with torch.no_grad():
        assert torch.equal(loaded(images), model(images))


def test_what_weights_do_not_tell(tmp_path: Path) -> None:
    model = small(forward_type="v051d_noz_oact", act="gelu")
    path = saved(model.state_dict(), tmp_path)
    images = torch.randn(1, 3, 16, 24)
    with torch.no_grad():
        assert not torch.allclose(load_vmamba(path)(images), model(images))
        told = load_vmamba(path, forward_type="v051d_noz_oact", act="gelu")
        assert torch.equal(told(images), model(images))
    with pytest.raises(CheckpointError, match=r"forward_type='v05' has a gate, but its"):
        load_vmamba(path, forward_type="v05")


def test_names_of_the_first_release_and_convolutions_of_one_token(tmp_path: Path) -> None:
    model = small(**FIRST)
    old: dict[str, Tensor] = {}
    for name, weight in model.state_dict().items():
        for new, was in (
            ("patch_embed.0", "patch_embed.proj"),
            ("patch_embed.2", "patch_embed.norm"),
            (".norm.", ".ln_1." if ".blocks." in name else ".norm."),
            (".op.", ".self_attention."),
            ("classifier.", ""),
        ):
            name = name.replace(new, was)
        is_projection = name.endswith("_proj.weight")
        old[name] = weight[:, :, None, None] if is_projection else weight
    assert "head.weight" in old and "layers.0.blocks.0.self_attention.A_logs" in old
    images = torch.randn(1, 3, 16, 24)
    with torch.no_grad():
        assert torch.equal(load_vmamba(saved(old, tmp_path))(images), model(images))


@pytest.mark.slow
def test_refusals(tmp_path: Path) -> None:
    for key in ("patch_embed.0.weight", "layers.0.blocks.0.op.out_proj.weight"):
        weights = dict(small().state_dict())
        weights.pop(key)
        with pytest.raises(CheckpointError, match=rf"vmamba\.pth does not fit .*{re.escape(key)}"):
            load_vmamba(saved(weights, tmp_path))
    for key in ("layers.0.blocks.0.op.A_logs", "layers.1.blocks.0.op.Ds"):
        weights = dict(small().state_dict())
        weights[key] = weights[key][..., None]
        with pytest.raises(CheckpointError, match=re.escape(key)):
            load_vmamba(saved(weights, tmp_path))
    for options, message in (
        ({"patch_embed": "v3"}, "patch_embed='v3' is not known"),
        ({"downsample": "none"}, "downsample='none' is not known"),
        ({"dims": (4, 8, 16)}, "pass one depth"),
        ({"forward_type": "v052dc"}, "forward_type='v052dc' is not supported"),
    ):
        with pytest.raises(OptionError, match=message):
            VMamba(**SMALL | options)
