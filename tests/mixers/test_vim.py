"""Vision Mamba's mixers: the operator is the module, in both directions."""

from __future__ import annotations

import copy
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import contract
from helpers.hybrid_checks import check, record_one
from oracles import relative_error
from oracles import vim as oracle
from torch import Tensor, nn

from captum_ssm import ImplicitAttention, ImplicitAttentionRollout, MambaAttribution, trace
from captum_ssm.attr.call.components import parse_components
from captum_ssm.errors import CachedStateError, NonFiniteError, UnsupportedMixerError
from captum_ssm.models import VisionMamba
from captum_ssm.models.vim import VimMixer

pytestmark = pytest.mark.slow

# for any draw of the parameters; typical is 2e-7
FLOAT32 = 1e-5
TYPES = [("none", False), ("v1", False), ("v2", True), ("v2", False)]
CLS = ["middle", "head", "end", "double", "none"]
METHODS = [ImplicitAttention, ImplicitAttentionRollout, MambaAttribution]
ABLATIONS = [
    "s6",
    "unified",
    "exact",
    *(f"unified-{name}" for name in ("conv", "activation", "scan", "gate")),
    *(f"exact-{name}" for name in ("conv", "activation", "scan", "skip", "gate")),
    "exact-scan-skip",
]

#: (kind, halve, **options) to a mixer of E = 5
MakeMixer = Callable[..., Any]


def own_mixer(kind: str, halve: bool, **options: Any) -> Any:
    options = {"d_model": 5, "d_state": 3} | options
    return oracle.randomise(VimMixer(bimamba_type=kind, if_divide_out=halve, **options))


def fork_of(base: Any, halving: str) -> Any:
    """What Vision Mamba's fork adds to mamba_ssm's Mamba, its kernels written as plain functions.

    Copies of the fork differ in the name of the attribute ``halving``.
    """
    scan = import_module("mamba_ssm.ops.selective_scan_interface").selective_scan_ref

    def select(x: Tensor, conv: Any, x_proj: Any, dt_proj: Any) -> tuple[Tensor, ...]:
        weights = conv.weight, conv.bias, 1, conv.padding, 1, len(conv.weight)
        u = F.silu(F.conv1d(x, *weights)[..., : x.shape[-1]])
        rank = dt_proj.weight.shape[1]
        selected = F.linear(u.mT, x_proj.weight)
        state = (x_proj.weight.shape[0] - rank) // 2
        t, b, c = selected.split([rank, state, state], dim=-1)
        return u, F.linear(t, dt_proj.weight).mT, b.mT, c.mT

    class Mamba(base):  # type: ignore[misc]
        def __init__(
            self,
            d_model: int,
            bimamba_type: str = "none",
            if_devide_out: bool = False,
            init_layer_scale: float | None = None,
            **options: Any,
        ) -> None:
            super().__init__(d_model, **options)
            self.bimamba_type = bimamba_type
            setattr(self, halving, if_devide_out)
            self.init_layer_scale = init_layer_scale
            if init_layer_scale is not None:
                self.gamma = nn.Parameter(init_layer_scale * torch.ones(d_model))
            if bimamba_type != "none":
                self.A_b_log = nn.Parameter(self.A_log.detach().clone())
            if bimamba_type == "v2":
                for name in ("conv1d", "x_proj", "dt_proj", "D"):
                    setattr(self, f"{name}_b", copy.deepcopy(getattr(self, name)))

        def forward(self, hidden_states: Tensor, inference_params: Any = None) -> Tensor:
            if self.use_fast_path and inference_params is None:
                out = self.fast(hidden_states)
            else:
                out = super().forward(hidden_states, inference_params)  # one direction only
            return out if self.init_layer_scale is None else out * self.gamma

        def fast(self, hidden_states: Tensor) -> Tensor:
            xz = F.linear(hidden_states, self.in_proj.weight, self.in_proj.bias).mT
            x, z = xz.chunk(2, dim=1)
            a = -torch.exp(self.A_log.float())
            parts = select(x, self.conv1d, self.x_proj, self.dt_proj)
            bias = self.dt_proj.bias.float()
            y = scan(*parts[:2], a, *parts[2:], self.D.float(), z, bias, True)
            if self.bimamba_type == "v1":
                a_b = -torch.exp(self.A_b_log.float())
                u, dt, b, c = (part.flip(-1) for part in parts)
                y = y + scan(u, dt, a_b, b, c, self.D.float(), z.flip(-1), bias, True).flip(-1)
            if self.bimamba_type == "v2":
                a_b = -torch.exp(self.A_b_log.float())
                u, dt, b, c = select(x.flip(-1), self.conv1d_b, self.x_proj_b, self.dt_proj_b)
                bias = self.dt_proj_b.bias.float()
                y = y + scan(u, dt, a_b, b, c, self.D_b.float(), z.flip(-1), bias, True).flip(-1)
                y = y / 2 if getattr(self, halving) else y
            return F.linear(y.mT, self.out_proj.weight, self.out_proj.bias)

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


# --- reproduction of the real module --------------------------------------------------------


def test_both_directions_reach_their_sides() -> None:
    """Entries up to the diagonal belong to the forward direction, those beyond to the other."""
    for kind in TYPES:
        mixer, hidden = own_mixer(*kind).double(), torch.randn(1, 7, 5).double()
        ahead, back = oracle.matrices(mixer, hidden, *kind)
        found = record_one(mixer, hidden).linear.restrict(parse_components("unified"))
        matrices = found.operator.dense(None)
        assert relative_error(matrices.tril(-1), (ahead + back).tril(-1)) <= 1e-12
        if kind[0] == "v2":  # in v1 the other direction's values come from the causal convolution
            assert relative_error(matrices.tril(-1), ahead.tril(-1)) <= 1e-12
            assert relative_error(matrices.triu(1), back.triu(1)) <= 1e-12
        assert bool(matrices.triu(1).any()) == (kind[0] != "none")


@pytest.mark.parametrize("what", ["A_b_log", "conv1d_b.weight"])
def test_not_a_number_is_found(what: str) -> None:
    mixer = own_mixer("v2", True)
    with torch.no_grad():
        mixer.get_parameter(what)[0] = torch.nan
    layer = record_one(mixer, torch.randn(1, 5, 5))
    with pytest.raises(NonFiniteError, match="scan" if what == "A_b_log" else "conv"):
        _ = layer.linear


# --- the published fork ---------------------------------------------------------------------


@pytest.mark.parametrize("halving", ["if_devide_out", "if_divide_out"])
@pytest.mark.parametrize("halve", [False, True])
def test_both_names_of_the_keyword(make_fork: MakeMixer, halving: str, halve: bool) -> None:
    mixer = make_fork("v2", halve, halving)
    hidden = torch.randn(2, 8, 5)
    layer = record_one(mixer, hidden)
    check(layer)
    wanted = alpha(mixer, hidden, ("v2", halve), "exact")
    assert relative_error(layer.operator.dense(None), wanted) <= FLOAT32


@pytest.mark.parametrize("kind_name", ["v1", "v2"])
def test_a_dropped_direction_is_refused(make_fork: MakeMixer, kind_name: str) -> None:
    mixer = make_fork(kind_name, True, use_fast_path=False)
    layer = record_one(mixer, torch.randn(2, 12, 5))
    with pytest.raises(UnsupportedMixerError, match=r"use_fast_path=False.*load_vim"):
        _ = layer.linear


@pytest.mark.parametrize("kind_name", ["v1", "v2"])
def test_a_slow_path_with_both_directions_is_served(make_fork: MakeMixer, kind_name: str) -> None:
    """There are repaired copies of the fork."""
    mixer = make_fork(kind_name, True, use_fast_path=False)
    mixer.forward = mixer.fast
    check(record_one(mixer, torch.randn(2, 12, 5)))


def test_the_slow_path_of_one_direction(make_fork: MakeMixer) -> None:
    for scale in (None, 0.3):
        mixer = make_fork("none", False, use_fast_path=False, init_layer_scale=scale)
        check(record_one(mixer, torch.randn(2, 12, 5)))


def test_a_cache_is_refused(make_fork: MakeMixer) -> None:
    mixer = make_fork("v2", True)
    mixer.forward = lambda hidden, inference_params=None: mixer.fast(hidden)
    for args, kwargs in ([object()], {}), ([], {"inference_params": object()}):
        with torch.no_grad(), trace(mixer, operators=False) as t:
            mixer(torch.randn(1, 4, 5), *args, **kwargs)
        with pytest.raises(CachedStateError, match="inference_params"):
            _ = t.layers[0].linear


# --- whole models ---------------------------------------------------------------------------


def classifier(cls: str = "middle", grid: tuple[int, int] = (3, 4), **options: Any) -> Any:
    small = {"patch_size": 4, "depth": 2, "embed_dim": 5, "num_classes": 4, "d_state": 3}
    size = (4 * grid[0], 4 * grid[1])
    return oracle.randomise(VisionMamba(**(small | {"img_size": size, "cls_token": cls} | options)))


def images(batch: int = 2, grid: tuple[int, int] = (3, 4)) -> Tensor:
    return torch.randn(batch, 3, 4 * grid[0], 4 * grid[1])


class Reference:
    """A float64 run of a classifier: dense matrices of each layer, and gradients."""

    def __init__(
        self,
        model: Any,
        pictures: Tensor,
        target: int | None = None,
        kind: tuple[str, bool] = ("v2", True),
        components: Any = "unified",
    ) -> None:
        model = copy.deepcopy(model).double()
        blocks = list(model.layers)
        inputs: list[Tensor] = []
        outputs: list[Tensor] = []
        for block in blocks:
            block.mixer.register_forward_pre_hook(lambda _, args: inputs.append(args[0].detach()))
            block.mixer.register_forward_hook(lambda _, args, out: outputs.append(out))
        logits = model(pictures.double())
        if target is not None:
            wanted = logits[:, target].sum()
            self.gradients = torch.autograd.grad(wanted, outputs)
        self.pairs = [
            oracle.matrices(block.mixer, hidden, *kind, components)
            for block, hidden in zip(blocks, inputs, strict=True)
        ]

    def means(self) -> list[Tensor]:
        return [(ahead + back).mean(1) for ahead, back in self.pairs]


def product(matrices: list[Tensor]) -> Tensor:
    total = torch.eye(matrices[0].shape[-1]).double().expand_as(matrices[0])
    for matrix in matrices:
        total = matrix @ total
    return total


def on_grid(row: Tensor, cls: str, grid: tuple[int, int]) -> Tensor:
    places = oracle.cls_places(cls, grid[0] * grid[1])
    return row[:, [t for t in range(row.shape[1]) if t not in places]].reshape(-1, *grid)


@pytest.mark.parametrize("cls", CLS)
@pytest.mark.parametrize("grid", [(3, 4), (2, 1), (1, 1)])
def test_rollout(cls: str, grid: tuple[int, int]) -> None:
    """The row of the tokens that the head reads, found by itself, on the patch grid."""
    model, pictures = classifier(cls, grid, final_pool_type="mean"), images(2, grid)
    eye = torch.eye(grid[0] * grid[1] + len(oracle.cls_places(cls, 1))).double()
    rolled = product([eye + mean for mean in Reference(model, pictures).means()])
    places = oracle.cls_places(cls, grid[0] * grid[1])
    row = rolled[:, places].mean(1) if places else rolled.mean(1)
    method = ImplicitAttentionRollout(model)
    found = method.attribute(pictures, per_token=True)
    assert found.shape == (2, *grid)
    assert relative_error(found, on_grid(row, cls, grid)) <= 1e-5
    whole = method.attribute(pictures)
    assert whole.shape == pictures.shape
    spread = F.interpolate(found[:, None], scale_factor=4, mode="bilinear").expand_as(pictures)
    assert relative_error(whole, spread) <= 1e-6


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("cls", ["middle", "head", "end"])
def test_the_query_is_the_cls_token(cls: str, method: Any) -> None:
    model, pictures = classifier(cls), images()
    (place,) = oracle.cls_places(cls, 12)
    given = method(model).attribute(pictures, 1, query=place, per_token=True)
    assert bool(given.any())
    for query in (None, "cls"):
        assert torch.equal(method(model).attribute(pictures, 1, query=query, per_token=True), given)


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


@pytest.mark.parametrize("method", METHODS)
def test_images_of_another_size_than_the_model_was_built_for(method: Any) -> None:
    model, pictures = classifier("middle", (3, 4)), images(2, (4, 6))
    found = method(model).attribute(pictures, 1, per_token=True)
    assert found.shape == (2, 4, 6)
    wanted = method(model).attribute(pictures, 1, query=12, per_token=True)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"d_conv": 1, "bias": True},
        {"d_conv": 2, "conv_bias": False},
        {"d_state": 16, "dt_rank": 3},
        {"init_layer_scale": 0.2},
    ],
)
def test_contract(make_mixer: MakeMixer, kind: tuple[str, bool], options: dict[str, Any]) -> None:
    mixer = make_mixer(*kind, **options)

    def matrices(mixer: Any, hidden: Tensor, _: Any) -> dict[str, Tensor]:
        names = ABLATIONS[2:3] if options else ABLATIONS
        return {name: alpha(mixer, hidden, kind, name) for name in names}

    contract.holds(mixer, 5, matrices)
