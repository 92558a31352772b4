"""What each token of the input adds to an activation."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracles
import pytest
import torch
from helpers.activations import blocks_of, own
from helpers.frozen_networks import NETWORKS
from helpers.marks import slow_but
from helpers.versions import not_in_4, transformers5
from oracles import frozen_network as frozen
from torch import Tensor
from zoo.adapters import ADAPTERS
from zoo.small import WIDTH, images, mamba_lm, token_ids, vision
from zoo.wrapped import never_rounded

from captum_ssm import NeuronLatimFlow, NeuronMambaLRP
from captum_ssm.errors import GradientModeError, NonFiniteError, NotLinearError, TargetError

BLOCK = "backbone.layers.1"
#: A token of eleven, and a feature.
NEURON = (7, 2)
EXACT = 1e-6


def close(found: Tensor, wanted: Tensor, limit: float = 1e-5) -> bool:
    return oracles.relative_error(found.double(), wanted.double()) <= limit


@transformers5
@pytest.mark.parametrize("rule", ["frozen", "half"])
@pytest.mark.slow
@pytest.mark.parametrize("network", NETWORKS)
def test_relevance_is_that_of_the_matrices_up_to_a_block(network: Any, rule: Any) -> None:
    model, *parts = network()
    model.double()
    ids, (token, feature) = torch.randint(15, (2, 6)), (4, 3)
    blocks, embed = frozen.blocks(model), model.get_input_embeddings()
    names = {module: name for name, module in model.named_modules()}
    with never_rounded():
        by_matrices = [frozen.matrices(model, *parts, row, rule == "half")[0] for row in ids]
        for place, block in enumerate(blocks):
            explain = NeuronLatimFlow(model, block)
            for at_input in (True, False):
                found = explain.decompose(ids, (token, feature), None, at_input, rule=rule)
                value = own(model, ids, names[block], at_input)
                assert close(found.output, value[:, token, feature], EXACT)
                for row, maps, relevance in zip(ids, by_matrices, found.inputs, strict=True):
                    each = len(maps) // len(blocks)
                    one = torch.zeros(len(row), value.shape[-1]).double()
                    one[token, feature] = 1
                    up_to = maps[: (place + (not at_input)) * each]
                    wanted = frozen.before(one, up_to) * embed(row).detach()
                    assert close(relevance, wanted, EXACT)


@pytest.mark.slow
def test_selectors() -> None:
    model, ids = mamba_lm(use_bias=True), token_ids(3)
    explain = NeuronLatimFlow(model, BLOCK)
    value = own(model, ids, BLOCK)
    examples = torch.arange(3)
    places = torch.tensor([7, 0, 4])
    selectors: dict[str, tuple[Any, Tensor]] = {
        "tuple": (NEURON, value[:, 7, 2]),
        "numpy": ((np.int64(7), np.int32(2)), value[:, 7, 2]),
        "tensors": ((torch.tensor(7), torch.tensor(2)), value[:, 7, 2]),
        "from the end": ((-4, -WIDTH + 2), value[:, 7, 2]),
        "slice": ((slice(2, 5), 2), value[:, 2:5, 2].sum(1)),
        "slices": ((slice(None), slice(1, None, 3)), value[:, :, 1::3].flatten(1).sum(1)),
        "callable": (lambda x: x[:, 7] @ torch.arange(10.0), value[:, 7] @ torch.arange(10.0)),
        "one each": (lambda x: x[examples, places, 2], value[examples, places, 2]),
    }
    for name, (selector, wanted) in selectors.items():
        found = explain.decompose(ids, selector, roles=False)
        assert close(found.output, wanted), name
        assert found.delta.abs().max() <= 1e-5 * found.inputs.abs().sum(), name
        relevance, delta = explain.attribute(ids, selector, return_convergence_delta=True)
        assert relevance.shape == ids.shape and close(relevance, found.tokens), name
        assert delta.abs().max() <= 1e-5 * found.inputs.abs().sum(), name
    given = explain.compute_convergence_delta(0 * relevance, ids, selector)
    assert close(given, wanted - found.bias, 1e-4)


@pytest.mark.slow
def test_what_selects_no_neuron() -> None:
    explain, ids = NeuronLatimFlow(mamba_lm(), BLOCK), token_ids()
    whole = r"=2 is not a neuron of layer 'backbone.layers.1'.*\(2, 11, 10\).*2 ind"
    rows: list[tuple[Any, Any, str]] = [
        (2, TargetError, f"neuron_selector{whole}"),
        (lambda x: x, TargetError, r"returned \(2, 11, 10\).*one number per example, a tensor \(2"),
        ([1, 2], TargetError, r"neuron_selector=\[1, 2\] is not a neuron"),
        (None, TargetError, "neuron_selector=None is not a neuron"),
        (lambda x: x.sum(), TargetError, r"returned \(\) of layer"),
        (lambda x: 3.0, TargetError, "returned float of layer"),
        (lambda x: x[:, 0, 0].detach(), GradientModeError, "does not depend linearly on layer"),
        (lambda x: x[:, -1].norm(dim=-1), GradientModeError, "depend"),
        (lambda x: torch.lgamma(x[:, 0, 0]), NotLinearError, "lgamma"),
        (lambda x: x[:, 0, 0] / 0, NonFiniteError, r"selects \[-?inf, -?inf\] in layer"),
    ]
    places: list[Any] = [(1, 2, 3), (11, 2), (1, -11), (1, 2.0), (1, True), (1, None), (..., 2)]
    slices = [slice(4, 4), slice(0, 4, 0), slice("a", None), slice(None, None, -1)]
    places += [(each, 2) for each in slices]
    for selector, error, said in rows + [(at, TargetError, "is not a neuron") for at in places]:
        with pytest.raises(error, match=said):
            explain.attribute(ids, selector)


def test_images() -> None:
    model, pictures = vision("middle"), images(2)
    explain = NeuronLatimFlow(model, "blocks.0")
    whole = explain.attribute(pictures, (5, 2))
    found, delta = explain.attribute(
        pictures, (5, 2), per_token=True, return_convergence_delta=True
    )
    assert whole.shape == pictures.shape and found.shape == (2, 3, 4)
    assert close(whole.view(2, 3, 3, 4, 4, 3).sum((1, 3, 5)), found)
    assert delta.abs().max() <= 1e-4
    # of a patch itself, its own pixels alone
    patch = NeuronLatimFlow(model, "patch").attribute(pictures, (2, 1, 3), per_token=True)
    elsewhere = torch.ones(3, 4).bool()
    elsewhere[1, 3] = False
    assert patch[:, 1, 3].all() and not patch[:, elsewhere].any()


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["frozen", "half", "centered", "balanced"])
def test_rules_and_baselines(rule: Any) -> None:
    model, ids = mamba_lm(use_bias=True), token_ids()
    explain, other = NeuronLatimFlow(model, BLOCK), token_ids()
    value = own(model, ids, BLOCK)[:, 7, 2]
    embed = model.get_input_embeddings()
    by_embeddings = explain.attribute(ids, NEURON, rule=rule, baselines=embed(other).detach())
    for baselines in (None, 0.0, "mean", other):
        found = explain.decompose(ids, NEURON, rule=rule, baselines=baselines)
        assert close(found.output, value)
        assert found.delta.abs().max() <= 1e-5 * found.inputs.abs().sum()
    assert close(found.tokens, by_embeddings)
    default = NeuronMambaLRP(model, BLOCK).attribute(ids, NEURON)
    assert close(default, explain.attribute(ids, NEURON, rule="half"))


def stream_of(activation: Any) -> Any:
    return activation[0] if isinstance(activation, tuple) else activation


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", slow_but(("mamba",), ("mamba", "zamba2", "gpt_neox", "gla")))
def test_padding_has_no_part(name: str, side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    not_in_4(name, "zamba2")
    case = ADAPTERS[name](monkeypatch)
    block = blocks_of(case)[-1]
    mask = torch.ones_like(case.inputs)
    mask[0, :3] = 0
    real, place, padded = (slice(3, None), 8, 1) if side == "left" else (slice(None, -3), 5, 7)
    mask = mask if side == "left" else mask.flip(1)
    forward = lambda x, m: case.model(x, attention_mask=m, use_cache=False)  # noqa: E731
    explain = NeuronLatimFlow(forward, block, case.model)

    def entry(*at: Any) -> Any:
        return lambda x: stream_of(x)[(slice(None), *at)].flatten(1).sum(1)

    found = explain.attribute(case.inputs, entry([place], 2), mask)
    alone = explain.attribute(case.inputs[:1, real], entry([5], 2), mask[:1, real])
    assert close(found[:1, real], alone, 1e-4)
    assert not found[0, mask[0] == 0].any()
    for selector in (entry([padded], 2), entry(slice(None), 2), entry(padded)):
        with pytest.raises(TargetError, match=f"reads layer '{block}' at padded tokens"):
            explain.attribute(case.inputs, selector, mask)
    of_each = explain.attribute(
        case.inputs, lambda x: (stream_of(x) * mask[..., None]).sum((1, 2)), mask
    )
    assert not of_each[0, mask[0] == 0].any() and of_each[0, mask[0] == 1].all()
