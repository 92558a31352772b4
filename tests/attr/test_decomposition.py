"""The decomposition against dense matrices of the frozen network, and what it is made of."""

from __future__ import annotations

import oracles
import pytest
import torch
from helpers.frozen_networks import NETWORKS
from oracles import frozen_network as frozen
from zoo.small import WIDTH, images, mamba_lm, token_ids, vision

from captum_ssm import LatimFlow, MambaLRP
from captum_ssm.attr.engine.decompose import Decomposition, exact, stacked
from captum_ssm.errors import OptionError

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("method, rule", [(LatimFlow, "frozen"), (MambaLRP, "half")])
@pytest.mark.parametrize("network", NETWORKS)
def test_relevance_is_that_of_the_matrices(network, method, rule):
    model, *parts = network()
    model.double()
    ids = token_ids(2, 7)
    for target in [(6, 3), (2, 5)]:
        found = method(model).decompose(ids, target, rule=rule).inputs
        wanted = torch.stack(
            [frozen.relevance(model, *parts, row, target, rule == "half") for row in ids]
        )
        assert oracles.relative_error(found, wanted) <= NETWORKS[network]
        assert not found[:, target[0] + 1 :].any()


def test_gates_make_a_difference():
    model, ids = mamba_lm(), token_ids()
    frozen_gate = LatimFlow(model).attribute(ids, (-1, 3), rule="frozen")
    half = LatimFlow(model).attribute(ids, (-1, 3), rule="half")
    assert oracles.relative_error(half, frozen_gate) > 1e-2
    assert torch.equal(half, MambaLRP(model).attribute(ids, (-1, 3)))
    assert torch.equal(frozen_gate, MambaLRP(model).attribute(ids, (-1, 3), rule="frozen"))


def test_constants_are_named_by_the_modules_that_add_them():
    model = mamba_lm(use_bias=True)
    model.lm_head.bias = torch.nn.Parameter(torch.randn(19))
    found = LatimFlow(model).decompose(token_ids(3), (-1, 3), rule="frozen")
    layers = range(3)
    wanted = {f"backbone.layers.{i}.mixer{part}" for i in layers for part in ("", ".in_proj")}
    wanted |= {f"backbone.layers.{i}.mixer.out_proj" for i in layers} | {"lm_head"}
    assert set(found.biases) == wanted
    assert all(bias.shape == (3,) and bias.any() for bias in found.biases.values())
    bias = model.lm_head.bias[3].detach()
    torch.testing.assert_close(found.biases["lm_head"], bias.expand(3))
    assert torch.equal(found.bias, sum(found.biases.values()))


@pytest.mark.parametrize("rule", ["frozen", "centred"])
def test_what_enters_and_leaves_mixers_by_feature(rule):
    model, ids = mamba_lm(use_bias=True), token_ids(2)
    explain, targets = LatimFlow(model), [(-1, 3), (4, 2)]
    whole = [explain.decompose(ids, target, rule=rule) for target in targets]
    each = explain.decompose_each(ids, targets, rule=rule, features=True, internal_batch_size=1)
    one = explain.decompose(ids, targets[0], rule=rule, features=True, roles=False)
    for found, wanted in zip([*each, one], [*whole, whole[0]], strict=True):
        assert oracles.relative_error(found.inputs, wanted.inputs) <= 1e-5
        for name in ("streams", "mixers"):
            pairs = list(zip(getattr(found, name), getattr(wanted, name), strict=True))
            assert len(pairs) == 3
            for by_feature, by_token in pairs:
                assert by_feature.shape == (2, 11, model.config.hidden_size)
                assert oracles.relative_error(by_feature.sum(-1), by_token) <= 1e-5
    first = explain.decompose(ids, targets[0], features=True)  # the embeddings are that stream
    assert oracles.relative_error(first.streams[0], first.inputs) <= 1e-5
    with pytest.raises(OptionError, match="features='yes'"):
        explain.decompose(ids, targets[0], features="yes")


def test_of_images_by_feature():
    model, pictures = vision("middle"), images(2)
    found = LatimFlow(model).decompose(pictures, 3, features=True)
    summed = LatimFlow(model).decompose(pictures, 3)
    for name in ("streams", "mixers"):
        for by_feature, by_token in zip(getattr(found, name), getattr(summed, name), strict=True):
            assert by_feature.shape == (2, 13, WIDTH)
            assert oracles.relative_error(by_feature.sum(-1), by_token) <= 1e-5


def test_the_parts_of_a_batch_are_stacked():
    model, ids = mamba_lm(use_bias=True), token_ids(3)
    whole = LatimFlow(model).decompose(ids, (-1, 3))
    parts = [LatimFlow(model).decompose(row[None], (-1, 3)) for row in ids]
    found = stacked(parts)
    for name in ("inputs", "output", "tokens", "bias"):
        assert oracles.relative_error(getattr(found, name), getattr(whole, name)) <= 1e-5
    for name in ("streams", "mixers"):
        pairs = zip(getattr(found, name), getattr(whole, name), strict=True)
        assert all(oracles.relative_error(*pair) <= 1e-5 for pair in pairs)
    assert found.biases.keys() == whole.biases.keys()


def test_what_is_exact():
    inputs, output = torch.tensor([[1.0, 2.0], [3.0, -3.0]]), torch.tensor([3.0, 0.5])

    def found(bias: float) -> Decomposition:
        biases = {"a": torch.tensor([0.0, bias])}
        return Decomposition(inputs, (), (), biases, output, torch.zeros(2))

    assert exact(found(0.5)) and not exact(found(0.6))
    assert not exact(found(float("nan")))


def test_rounding_of_what_passes_a_layer_counts():
    inputs, output = torch.ones(1, 2), torch.tensor([2.01])

    def found(past: torch.Tensor | None) -> Decomposition:
        return Decomposition(inputs, (), (), {}, output, torch.zeros(1), past=past)

    assert not exact(found(None)) and not exact(found(torch.zeros(1, 2)))
    assert exact(found(torch.tensor([[9.0, -9.0]])))  # of what cancels, too
    assert exact(found(torch.zeros(1, 2).bfloat16()))
