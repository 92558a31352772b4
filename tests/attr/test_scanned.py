"""Vectors from a scan's states, and weights read off: like those found query by query."""

from __future__ import annotations

import pytest
import torch
from helpers.latim_vectors import all_vectors, record
from oracles import relative_error, vim
from torch import Tensor
from zoo.mamba import padded_batch, transformers_model

from captum_ssm.attr.vectors import contributions
from captum_ssm.attr.vectors.contributions import Contributions
from captum_ssm.attr.vectors.scanned import scanned
from captum_ssm.attr.vectors.taps import Path
from captum_ssm.models.vim import VimMixer
from captum_ssm.operators import Chain, Permute, SelectiveScan
from captum_ssm.operators.kernels.arithmetic import unseen
from captum_ssm.operators.readings import scan_tiles
from captum_ssm.tracing import Layer


@pytest.mark.parametrize("activation", ["linearized", "silu"])
@pytest.mark.parametrize("positions", [list(range(9)), [0, 1, 2, 4, 5, 8]])
def test_many_queries_are_like_few(activation: str, positions: list[int]) -> None:
    model = transformers_model().double()
    ids, mask = padded_batch([9, 5, 2])
    layer = record(model, ids, attention_mask=mask)[1]
    index = torch.tensor(positions).expand(3, -1)
    assert scanned(Contributions(layer, activation).paths) is not None
    check_many_are_like_few(layer, activation, index)


@pytest.mark.parametrize("activation", ["linearized", "silu"])
@pytest.mark.parametrize("directions", ["none", "v2", "v2, halved"])
@pytest.mark.parametrize("sources", [3, 64])
def test_both_directions(
    activation: str, directions: str, sources: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan_tiles, "_SOURCES", sources)
    kind, _, halved = directions.partition(", ")
    mixer = VimMixer(5, d_state=3, bimamba_type=kind, if_divide_out=bool(halved))
    (layer,) = record(vim.randomise(mixer).double(), torch.randn(2, 11, 5).double())
    found = scanned(Contributions(layer, activation).paths)
    assert found is not None and (found.back is None) == (kind == "none")
    for positions in (range(11), [0, 1, 2, 3, 4, 5], [2, 5, 6, 8, 9, 10]):
        check_many_are_like_few(layer, activation, torch.tensor(positions).expand(2, -1))


def test_other_orders_go_query_by_query() -> None:
    """Tokens that are shuffled, and not reversed, before the scan."""
    scan = SelectiveScan(torch.rand(1, 5, 2), -torch.rand(2, 3), *torch.randn(2, 1, 5, 3))
    order = torch.tensor([1, 0, 2, 4, 3])
    values = torch.randn(1, 5, 2, 1)
    for first, last in ((order, order.argsort()), (order.argsort(), order), (order, order)):
        parts = Permute(first, scan.shape), scan, Permute(last, scan.shape)
        assert scanned([Path(Chain(*parts), [(0, values)])]) is None
    back = torch.arange(5).flip(0)
    parts = Permute(back, scan.shape), scan, Permute(back, scan.shape)
    assert scanned([Path(Chain(*parts), [(0, values)])]) is None  # none runs ahead
    assert scanned([Path(scan, [(0, values)])] * 2) is None  # both do


def check_many_are_like_few(layer: Layer, activation: str, index: Tensor) -> None:
    found = []
    for many in (1, 100):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(contributions, "_MANY_QUERIES", many)
            found.append(all_vectors(layer, activation, queries=index))
    assert found[1].any() and relative_error(*found) <= 1e-12


@pytest.mark.parametrize("change", ["adapter", "before", "after", "none"])
def test_weights_are_read_off_single_calls_alone(change: str) -> None:
    model = transformers_model().double()
    layer = record(model, torch.randint(19, (1, 5)))[0]
    projection = layer.mixer.module.out_proj
    if change == "adapter":
        other = torch.randn_like(projection.weight)
        projection.register_forward_hook(lambda _, args, out: out + args[0] @ other.T)
    elif change == "before":
        projection.register_forward_pre_hook(lambda _, args: (args[0] * 3,))
    elif change == "after":
        projection.register_forward_hook(lambda _, args, out: out.mul_(2))
    wanted = projection.weight.T
    wanted = {
        "adapter": lambda: wanted + other.T,
        "before": lambda: 3 * wanted,
        "after": lambda: 2 * wanted,
        "none": lambda: wanted,
    }[change]()
    with torch.no_grad(), unseen():
        assert relative_error(Contributions(layer).weight, wanted) <= 1e-12
