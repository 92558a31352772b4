"""LATIM with norms: maps, relevance and contribution vectors are those of the loop."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import oracles
import pytest
import torch
from oracles import latim as oracle
from oracles import mamba2_formula, relative_error, vim
from oracles import vim as vim_oracle
from torch import Tensor
from zoo import architectures, mamba2
from zoo.mamba import padded_batch, randomise, transformers_model
from zoo.small import mamba_lm, token_ids

from captum_ssm import LatimNorm, trace
from captum_ssm.attr.vectors import contributions, scan_tiles
from captum_ssm.models import VisionMamba
from captum_ssm.models.vim import VimMixer
from captum_ssm.tracing import Layer

pytestmark = pytest.mark.slow


EXACT = 1e-12


CHOICES = ["linearized", "silu", "taylor1", "taylor2", "relu", "identity"]


def by_loop(
    model: Any, ids: Tensor, activation: str, p: int, mask: Tensor | None = None
) -> list[Tensor]:
    found = []
    keep = torch.ones_like(ids) if mask is None else mask
    with torch.no_grad(), trace(model) as t:
        model(ids, attention_mask=mask)
    for layer in t.layers:
        vectors = oracle.mamba1(layer.mixer.module, layer.call.hidden_states, activation, mask)
        size = vectors.abs().sum(-1) if p == 1 else vectors.square().sum(-1).sqrt()
        found.append(size * keep[:, :, None] * keep[:, None])
    return found


@pytest.mark.parametrize("activation", CHOICES)
@pytest.mark.parametrize("family", ["mamba", "falcon_mamba"])
def test_maps_are_the_loops(family: str, activation: str) -> None:
    p = 1 if family == "mamba" else 2
    model = transformers_model(family, use_bias=True).double()
    ids, mask = padded_batch([7, 4, 1])
    wanted = by_loop(model, ids, activation, p, mask)
    found = LatimNorm(model, p=p, activation=activation).maps(ids, None, None, mask)
    assert all(relative_error(*pair) <= EXACT for pair in zip(found, wanted, strict=True))


def layers_of(model: Any, *args: Any, **kwargs: Any) -> list[Layer]:
    with torch.no_grad(), trace(model) as t:
        model(*args, **kwargs)
    return list(t.layers)


def masked(model: Any) -> Callable[..., Tensor]:
    return lambda ids, mask: model(ids, attention_mask=mask).logits


def of_real(vectors: Tensor, mask: Tensor) -> Tensor:
    """The norms of vectors (B, L, L, E) whose tokens are no padding."""
    keep = mask.to(vectors)
    return vectors.norm(dim=-1) * keep[:, :, None] * keep[:, None]


@pytest.mark.parametrize("activation", CHOICES)
@pytest.mark.parametrize("family", ["mamba2", "falcon_h1"])
def test_mamba_2_with_groups_and_norms(family: str, activation: str) -> None:
    model = mamba2.make_model(family).double()
    ids, mask = padded_batch([6, 3])
    names = mamba2.mixer_names(model)
    method = LatimNorm(masked(model), model, activation=activation)
    found = method.maps(ids, additional_forward_args=mask)
    for layer, one in zip(layers_of(model, ids, attention_mask=mask), found, strict=True):
        if layer.name not in names:
            continue
        form = mamba2_formula.form_of(layer.mixer.module, model.config)
        hidden = layer.call.hidden_states
        wanted = oracle.mamba2(layer.mixer.module, hidden, form, activation, mask)
        assert relative_error(one, of_real(wanted, mask)) <= EXACT


@pytest.mark.parametrize("activation", CHOICES)
@pytest.mark.parametrize("tokens", [1, 8])
def test_both_directions_of_vision_mamba(tokens: int, activation: str) -> None:
    mixer = VimMixer(5, d_state=3, bimamba_type="v2", if_divide_out=True)
    mixer = vim.randomise(mixer).double()
    hidden = torch.randn(2, tokens, 5).double()
    (found,) = LatimNorm(mixer, activation=activation).maps(hidden)
    wanted = oracle.vim(mixer, hidden, activation)
    assert relative_error(found, wanted.norm(dim=-1)) <= EXACT


def test_constants_beside_the_values_do_not_round(mamba_ssm: Any) -> None:
    """Mamba2 passes channels that are not mixed to out_proj as well, however large."""
    mixer = mamba_ssm.make_mamba2(8, d_ssm=8, headdim=4, d_state=3, ngroups=1)
    (error,) = LatimNorm(randomise(mixer)).decomposition_error(30 * torch.randn(2, 6, 8))
    assert error <= 1e-5


@pytest.mark.parametrize("activation", ["linearized", "silu"])
@pytest.mark.parametrize("form", ["v1", "v2", "none"])
def test_rows_of_a_scan_are_those_of_single_queries(form: str, activation: str) -> None:
    sizes = {"img_size": 12, "patch_size": 4, "embed_dim": 6, "depth": 2, "d_state": 3}
    model = vim_oracle.randomise(VisionMamba(**sizes, num_classes=4, bimamba_type=form))
    method, images = LatimNorm(model.double(), activation=activation), torch.randn(2, 3, 12, 12)
    whole = method.maps(images.double())
    for position in (0, 4, 9):
        for found, rows in zip(
            method.maps(images.double(), positions=[position]), whole, strict=True
        ):
            assert relative_error(found[:, 0], rows[:, position]) <= EXACT


@pytest.mark.parametrize("change", ["adapter", "before", "after"])
def test_projections_are_what_hooks_make_of_them(change: str) -> None:
    model, ids = transformers_model().double(), torch.randint(19, (2, 6))
    projection = model.backbone.layers[0].mixer.out_proj
    other = torch.randn_like(projection.weight)
    same = copy.deepcopy(model)
    weight = same.backbone.layers[0].mixer.out_proj.weight
    with torch.no_grad():
        weight.copy_({"adapter": weight + other, "before": 3 * weight, "after": 2 * weight}[change])
    if change == "adapter":
        projection.register_forward_hook(lambda _, args, out: out + args[0] @ other.T)
    elif change == "before":
        projection.register_forward_pre_hook(lambda _, args: (args[0] * 3,))
    else:
        projection.register_forward_hook(lambda _, args, out: out.mul_(2))
    found, wanted = LatimNorm(model).maps(ids), LatimNorm(same).maps(ids)
    assert relative_error(found[0], wanted[0]) <= EXACT


@pytest.mark.parametrize("hidden_act", ["gelu", "relu"])
def test_silu_stands_for_the_models_own_activation(
    hidden_act: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {"gelu": torch.nn.functional.gelu, "relu": torch.relu}[hidden_act]
    monkeypatch.setitem(oracle.FUNCTIONS, "silu", own)
    model, ids = transformers_model(hidden_act=hidden_act).double(), torch.randint(19, (2, 6))
    found, wanted = LatimNorm(model, activation="silu").maps(ids), by_loop(model, ids, "silu", 2)
    assert all(relative_error(*pair) <= EXACT for pair in zip(found, wanted, strict=True))


@pytest.mark.parametrize(
    ("name", "differ"), [("gpt_neox", False), ("lfm2", False), ("qwen3_next", True)]
)
def test_choices_differ_where_there_is_an_activation(
    name: str, differ: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = architectures.ZOO[name](monkeypatch)
    first, *others = (LatimNorm(case.model, activation=a).maps(case.inputs)[0] for a in CHOICES)
    assert all((relative_error(first, other) > 1e-5) is differ for other in others)


def test_layers_and_positions() -> None:
    model, ids = transformers_model(num_hidden_layers=3).double(), torch.randint(19, (2, 8))
    method = LatimNorm(model)
    whole = method.maps(ids)
    assert len(whole) == 3 and not torch.equal(whole[0], whole[1])
    chosen = method.maps(ids, layers=[-1, 0, 2])
    assert all(torch.equal(m, whole[i]) for m, i in zip(chosen, [2, 0, 2], strict=True))
    for positions in ([5, -1, 0], (3,), range(2, 6), torch.tensor([7, 7, 1])):
        rows = torch.as_tensor(positions) % 8
        for found, all_rows in zip(method.maps(ids, positions=positions), whole, strict=True):
            assert relative_error(found, all_rows[:, rows]) <= EXACT
    each = torch.tensor([[7, 2], [-8, 3]])
    for found, all_rows in zip(method.maps(ids, positions=each), whole, strict=True):
        assert relative_error(found[0], all_rows[0, [7, 2]]) <= EXACT
        assert relative_error(found[1], all_rows[1, [0, 3]]) <= EXACT


@pytest.mark.parametrize("name", ["mamba", "gpt_neox", "vim"])
def test_tiles_of_any_size(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = architectures.ZOO[name](monkeypatch)
    whole = LatimNorm(case.model).maps(case.inputs)
    for elements in (1, 100, 2000):
        monkeypatch.setattr(contributions, "_TILE_ELEMENTS", elements)
        monkeypatch.setattr(scan_tiles, "_TILE_ELEMENTS", elements)
        monkeypatch.setattr(scan_tiles, "_SOURCES", 1 + elements // 50)
        for found, wanted in zip(LatimNorm(case.model).maps(case.inputs), whole, strict=True):
            assert relative_error(found, wanted) <= 1e-5


@pytest.mark.parametrize("options", [{}, {"p": 1}, {"activation": "silu"}])
def test_attribute_is_the_mean_of_the_querys_rows(options: dict[str, Any]) -> None:
    model, ids = mamba_lm(), token_ids(2, 7)
    method = LatimNorm(model, **options)
    maps = torch.stack(method.maps(ids))  # (layers, B, L, L)
    for query, row in [("last", maps[:, :, -1]), (2, maps[:, :, 2]), ("mean", maps.mean(2)),
                       ([1, 4], maps[:, :, [1, 4]].mean(2))]:  # fmt: skip
        found = method.attribute(ids, query=query)
        assert relative_error(found, row.mean(0)) <= 1e-5
        later = method.attribute(ids, query=query, start_layer=1)
        assert relative_error(later, row[1:].mean(0)) <= 1e-5
    each = method.attribute(ids, target=[(3, 1), (6, 2)])
    assert relative_error(each[0], maps[:, 0, 3].mean(0)) <= 1e-5
    assert relative_error(each[1], maps[:, 1, 6].mean(0)) <= 1e-5


def test_branches_count_as_they_join_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    case = architectures.minimax(monkeypatch)
    with trace(case.model) as t:
        case.model(case.inputs)
    scales = [layer.linear.branch_scale for layer in t.layers]
    maps = LatimNorm(case.model).maps(case.inputs)
    wanted = sum(s * m[:, -1] for s, m in zip(scales, maps, strict=True)) / len(maps)
    found = LatimNorm(case.model).attribute(case.inputs, query="last")
    assert relative_error(found, wanted) <= 1e-5


@pytest.mark.parametrize("activation", CHOICES)
def test_decomposition_error_by_hand(activation: str) -> None:
    """mean |y - sum of T - bias| / mean |y| over real tokens, the module's own y."""
    model = transformers_model(use_bias=True).double()
    ids, mask = padded_batch([8, 3])
    found = LatimNorm(model, activation=activation).decomposition_error(
        ids, additional_forward_args=mask
    )
    with torch.no_grad(), trace(model) as t:
        model(ids, attention_mask=mask)
    for error, layer in zip(found, t.layers, strict=True):
        mixer = layer.mixer.module
        with torch.no_grad():
            parts = oracles.mamba1_parts(mixer, layer.call.hidden_states, mask)
        summed = oracle.mamba1(mixer, layer.call.hidden_states, activation, mask).sum(2)
        if activation == "linearized":
            assert error <= 1e-6
            continue
        missed = (parts.output - summed - mixer.out_proj.bias.detach())[mask == 1].abs().mean()
        wanted = missed / parts.output[mask == 1].abs().mean()
        # the module itself rounds parts of its scan to float32
        assert error == pytest.approx(wanted.item(), rel=1e-4)
