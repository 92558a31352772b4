"""Methods of layers and neurons where Captum's own classes take them, held to Captum's."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from captum.attr import (
    Attribution,
    LayerAttribution,
    LayerGradientXActivation,
    NeuronAttribution,
    NeuronGradient,
    NoiseTunnel,
)
from captum.concept import TCAV, Classifier, Concept
from helpers.every_method import METHODS
from torch import Tensor
from zoo.small import WIDTH, classifier, images, mamba_lm, token_ids, vision

from captum_ssm import LayerLatimFlow, LayerMambaLRP, NeuronLatimFlow, NeuronMambaLRP

LAYERS, NEURONS = [LayerLatimFlow, LayerMambaLRP], [NeuronLatimFlow, NeuronMambaLRP]
layers = pytest.mark.parametrize("method", LAYERS)
neurons = pytest.mark.parametrize("method", NEURONS)
BLOCK = "backbone.layers.1"


def by_embeddings(model: Any) -> Any:
    return lambda x: model(inputs_embeds=x).logits


def test_the_classes() -> None:
    model = mamba_lm()
    assert all(isinstance(method(model, BLOCK), LayerAttribution) for method in LAYERS)
    assert all(isinstance(method(model, BLOCK), NeuronAttribution) for method in NEURONS)
    names = [method.get_name() for method in [*METHODS, *LAYERS, *NEURONS]]
    assert len(set(names)) == len(names)
    for method in [*LAYERS, *NEURONS]:
        instance = method(model, BLOCK)
        assert isinstance(instance, Attribution) and instance.layer == BLOCK
        assert instance.get_name() == method.get_name() and instance.forward_func is model
        assert instance.has_convergence_delta() is True and instance.multiplies_by_inputs is True


@pytest.mark.parametrize("method, captums", [
    *((method, LayerGradientXActivation) for method in LAYERS),
    *((method, NeuronGradient) for method in NEURONS),
])  # fmt: skip
def test_the_signatures_start_as_captums(method: Any, captums: Any) -> None:
    ours = list(inspect.signature(method.attribute).parameters.values())
    theirs = list(inspect.signature(captums.attribute).parameters.values())[:5]
    assert [p.name for p in ours[:5]] == [p.name for p in theirs]
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in ours[:5])
    assert all(p.kind is p.KEYWORD_ONLY and p.default is not p.empty for p in ours[5:])
    defaults = {p.name: p.default for p in theirs if p.default is not p.empty}
    own = {p.name: p.default for p in ours}
    assert all(own[name] == default for name, default in defaults.items())
    made = [list(inspect.signature(cls.__init__).parameters)[:3] for cls in (method, captums)]
    assert made[0] == made[1] == ["self", "forward_func", "layer"]
    beneath = method.attribute.__wrapped__
    assert not hasattr(beneath, "__wrapped__")


@layers
@pytest.mark.parametrize("at_input", [False, True])
def test_a_layer_that_nothing_bends_behind(method: Any, at_input: bool, watched: Any) -> None:
    model = watched(classifier("mean"))
    ids, target = token_ids(), torch.tensor([4, 1])
    options = {"rule": "frozen"} if method is LayerLatimFlow else {}
    found = method(model, model.head, **options).attribute(ids, target, None, at_input)
    wanted = LayerGradientXActivation(model, model.head).attribute(ids, target, None, at_input)
    torch.testing.assert_close(found, wanted.detach())
    (several,) = method(model, [model.head], **options).attribute(ids, target, None, at_input)
    assert torch.equal(several, found)


@neurons
def test_a_neuron_that_nothing_bends_before(method: Any, watched: Any) -> None:
    model, pictures = watched(vision("middle")), images(2)
    for neuron in ((2, 1, 3), (slice(0, 4), 1, 3), lambda x: x[:, 2].sum((1, 2))):
        options = {"rule": "frozen"} if method is NeuronLatimFlow else {}
        found = method(model, model.patch, **options).attribute(pictures, neuron)
        gradient = NeuronGradient(model, model.patch).attribute(pictures, neuron)
        torch.testing.assert_close(found, (gradient * pictures).detach())


@pytest.mark.slow
@pytest.mark.parametrize("method", [*LAYERS, *NEURONS])
@pytest.mark.filterwarnings("ignore:Input Tensor . did not already require gradients")
def test_noise_tunnel(method: Any, watched: Any) -> None:
    model = watched(mamba_lm())
    inputs = model.get_input_embeddings()(token_ids(2, 6)).detach()
    asked = {"target": (4, 3)} if method in LAYERS else {"neuron_selector": (4, 3)}
    instance = method(by_embeddings(model), BLOCK, model)
    torch.manual_seed(7)
    found = NoiseTunnel(instance).attribute(
        inputs, nt_type="vargrad", nt_samples=4, stdevs=0.1, **asked
    )
    torch.manual_seed(7)
    noise = torch.normal(0, torch.full((8, 6, WIDTH), 0.1)).view(2, 4, 6, WIDTH)
    by_hand = [instance.attribute(x, **asked) for x in inputs[:, None] + noise]
    wanted = torch.stack(by_hand).var(1, correction=0)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-5)


class Difference(Classifier):
    """The difference of the means of two concepts."""

    def __init__(self) -> None:
        self.weight = torch.zeros(0)

    def train_and_eval(self, dataloader: Any, **_: Any) -> dict[str, float]:
        both = list(dataloader)
        x, y = (torch.cat([part[i] for part in both]) for i in (0, 1))
        self.kinds = y.unique().tolist()
        means = [x[y == kind].mean(0) for kind in self.kinds]
        self.weight = torch.stack([means[0] - means[1], means[1] - means[0]])
        return {"accs": 1.0}

    def weights(self) -> Tensor:
        return self.weight

    def classes(self) -> list[int]:
        return self.kinds


@layers
def test_tcav(method: Any, watched: Any, tmp_path: Path) -> None:
    model, layer = watched(vision("middle")), "blocks.0"
    concepts = [
        Concept(number, f"concept {number}", torch.utils.data.DataLoader(images(6), batch_size=3))
        for number in range(2)
    ]
    search = TCAV(
        model, [layer], layer_attr_method=method(model, layer), classifier=Difference(),
        save_path=str(tmp_path),
    )  # fmt: skip
    pictures = images(8)
    scores = search.interpret(pictures, [concepts], target=3)
    relevance = method(model, layer).attribute(pictures, 3).flatten(1)
    (cav,) = (found[layer] for found in search.cavs.values())
    along = relevance @ cav.stats["weights"].float().T
    found = scores["0-1"][layer]["sign_count"]
    torch.testing.assert_close(found, (along > 0).float().mean(0))
