"""Vision Mamba's mixers: the operator is the module, in both directions."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import contract
from helpers.contract import ABLATIONS, check, record, record_one
from oracles import relative_error
from oracles import vim as oracle
from torch import Tensor, nn

from captum_ssm import ImplicitAttentionRollout
from captum_ssm.errors import UnsupportedMixerError
from captum_ssm.models import VisionMamba
from captum_ssm.models.vim import VimMixer

pytestmark = pytest.mark.slow

# for any draw of the parameters; typical is 2e-7
FLOAT32 = 1e-5
TYPES = [("none", False), ("v1", False), ("v2", True), ("v2", False)]

#: (kind, halve, **options) to a mixer of E = 5
MakeMixer = Callable[..., Any]


def own_mixer(kind: str, halve: bool, **options: Any) -> Any:
    options = {"d_model": 5, "d_state": 3} | options
    return oracle.randomise(VimMixer(bimamba_type=kind, if_divide_out=halve, **options))


def fork_of(base: Any, halving: str) -> Any:
    """What Vision Mamba's fork adds to mamba_ssm's Mamba; its kernels are the oracle's loops.

    Copies of the fork differ in the name of the attribute ``halving``.
    """

    class Mamba(base):  # type: ignore[misc]
        def __init__(
            self, d_model: int, bimamba_type: str = "none", if_devide_out: bool = False,
            init_layer_scale: float | None = None, **options: Any,
        ) -> None:  # fmt: skip
            super().__init__(d_model, **options)
            self.bimamba_type, self.init_layer_scale = bimamba_type, init_layer_scale
            setattr(self, halving, if_devide_out)
            if init_layer_scale is not None:
                self.gamma = nn.Parameter(init_layer_scale * torch.ones(d_model))
            if bimamba_type != "none":
                self.A_b_log = nn.Parameter(self.A_log.detach().clone())
            if bimamba_type == "v2":
                for name in ("conv1d", "x_proj", "dt_proj", "D"):
                    setattr(self, f"{name}_b", copy.deepcopy(getattr(self, name)))

        def forward(self, hidden_states: Tensor, inference_params: Any = None) -> Tensor:
            if self.use_fast_path and inference_params is None:
                return self.fast(hidden_states)
            out = super().forward(hidden_states, inference_params)  # one direction only
            return out if self.init_layer_scale is None else out * self.gamma

        def fast(self, hidden_states: Tensor) -> Tensor:
            weights, kind = oracle.double_weights(self), (self.bimamba_type, getattr(self, halving))
            out = [oracle.mix(weights, each.double(), *kind) for each in hidden_states]
            return torch.stack(out).to(hidden_states)

    return Mamba


@pytest.fixture
def make_fork(mamba_ssm: Any) -> MakeMixer:
    def make(kind: str, halve: bool, halving: str = "if_devide_out", **options: Any) -> Any:
        options = {"d_model": 5, "d_state": 3} | options
        fork = fork_of(mamba_ssm.Mamba, halving)
        return oracle.randomise(fork(bimamba_type=kind, if_devide_out=halve, **options))

    return make


@pytest.fixture(params=["own", "fork"])
def make_mixer(request: pytest.FixtureRequest) -> MakeMixer:
    return own_mixer if request.param == "own" else request.getfixturevalue("make_fork")


@pytest.fixture(params=TYPES, ids=["none", "v1", "v2 halved", "v2"])
def kind(request: pytest.FixtureRequest) -> tuple[str, bool]:
    found: tuple[str, bool] = request.param
    return found


def alpha(mixer: Any, hidden: Tensor, kind: tuple[str, bool], components: Any) -> Tensor:
    ahead, back = oracle.matrices(mixer, hidden, *kind, components)
    return ahead + back


@pytest.mark.parametrize("options", [
    {"d_conv": 1, "bias": True, "d_state": 16, "dt_rank": 3},
    {"d_conv": 2, "conv_bias": False, "init_layer_scale": 0.2},
])  # fmt: skip
def test_contract(make_mixer: MakeMixer, kind: tuple[str, bool], options: dict[str, Any]) -> None:
    mixer = make_mixer(*kind, **options)

    def matrices(mixer: Any, hidden: Tensor, _: Any) -> dict[str, Tensor]:
        return {name: alpha(mixer, hidden, kind, name) for name in ABLATIONS}

    contract.holds(mixer, 5, matrices)


# --- the published fork ---------------------------------------------------------------------


@pytest.mark.parametrize("halving", ["if_devide_out", "if_divide_out"])
@pytest.mark.parametrize("halve", [False, True])
def test_both_names_of_the_keyword(make_fork: MakeMixer, halving: str, halve: bool) -> None:
    mixer, hidden = make_fork("v2", halve, halving), torch.randn(2, 8, 5)
    layer = record_one(mixer, hidden)
    check(layer)
    wanted = alpha(mixer, hidden, ("v2", halve), "exact")
    assert relative_error(layer.operator.dense(None), wanted) <= FLOAT32


@pytest.mark.parametrize("kind_name", ["v1", "v2"])
def test_slow_paths(make_fork: MakeMixer, kind_name: str) -> None:
    """They drop the second direction, except in repaired copies of the fork."""
    hidden = torch.randn(2, 12, 5)
    mixer = make_fork(kind_name, True, use_fast_path=False)
    with pytest.raises(UnsupportedMixerError, match=r"use_fast_path=False.*load_vim"):
        _ = record_one(mixer, hidden).linear
    mixer.forward = mixer.fast
    check(record_one(mixer, hidden))
    for scale in (None, 0.3):
        mixer = make_fork("none", False, use_fast_path=False, init_layer_scale=scale)
        check(record_one(mixer, hidden))


# --- whole models ---------------------------------------------------------------------------


def classifier(cls: str = "middle", grid: tuple[int, int] = (3, 4), **options: Any) -> Any:
    small = {"patch_size": 4, "depth": 2, "embed_dim": 5, "num_classes": 4, "d_state": 3}
    size = (4 * grid[0], 4 * grid[1])
    return oracle.randomise(VisionMamba(**(small | {"img_size": size, "cls_token": cls} | options)))


def images(batch: int = 2, grid: tuple[int, int] = (3, 4)) -> Tensor:
    return torch.randn(batch, 3, 4 * grid[0], 4 * grid[1])


@pytest.mark.parametrize("cls", ["middle", "head", "end", "double", "none"])
@pytest.mark.parametrize("grid", [(3, 4), (1, 1)])
def test_rollout(cls: str, grid: tuple[int, int]) -> None:
    """The row of the tokens that the head reads, found by itself, on the patch grid."""
    model, pictures = classifier(cls, grid, final_pool_type="mean"), images(2, grid)
    wide, patches = copy.deepcopy(model).double(), grid[0] * grid[1]
    places = oracle.cls_places(cls, patches)
    rolled = torch.eye(patches + len(places)).double()
    for layer in record(wide, pictures.double()):
        ahead, back = oracle.matrices(layer.mixer.module, layer.call.hidden_states, "v2", True)
        rolled = rolled + (ahead + back).mean(1) @ rolled
    row = rolled[:, places].mean(1) if places else rolled.mean(1)
    row = row[:, [t for t in range(row.shape[1]) if t not in places]].reshape(-1, *grid)
    method = ImplicitAttentionRollout(model)
    found = method.attribute(pictures, per_token=True)
    assert relative_error(found, row) <= 1e-5
    spread = F.interpolate(found[:, None], scale_factor=4, mode="bilinear").expand_as(pictures)
    assert relative_error(method.attribute(pictures), spread) <= 1e-6


@pytest.mark.parametrize("pool", ["none", "mean", "max", "all"])
def test_queries_without_a_cls_token(pool: str) -> None:
    model, pictures = classifier("none", final_pool_type=pool), images(1)
    target = (7, 1) if pool == "all" else 1
    query = {"none": [11], "mean": list(range(12)), "all": [7]}
    if pool == "max":  # the tokens at which some class is largest
        logits = copy.deepcopy(model)
        logits.final_pool_type = "all"
        query["max"] = sorted(set(logits(pictures)[0].argmax(0).tolist()))
    rollout = ImplicitAttentionRollout(model)
    found = rollout.attribute(pictures, target, per_token=True)
    wanted = rollout.attribute(pictures, target, query=query[pool], per_token=True)
    assert relative_error(found, wanted) <= 1e-6
