"""Layers and neurons that are refused, and models that are left as they were."""

from __future__ import annotations

import contextlib
from typing import Any

import oracles
import pytest
import torch
from torch import Tensor, nn
from zoo.architectures import hook_count
from zoo.small import mamba_lm, token_ids

from captum_ssm import LayerLatimFlow, NeuronLatimFlow
from captum_ssm.errors import (
    GradientModeError,
    LayerError,
    NotLinearError,
    OptionError,
    TargetError,
)

TARGET = (-1, 3)
BLOCK = "backbone.layers.1"
#: A token of eleven, and a feature.
NEURON = (7, 2)


def close(found: Tensor, wanted: Tensor) -> bool:
    return oracles.relative_error(found.double(), wanted.double()) <= 1e-5


def test_what_is_no_layer() -> None:
    model = mamba_lm()
    cases: list[tuple[Any, str]] = [
        (mamba_lm().backbone.layers[0], "of type MambaBlock, but not a module of the model"),
        ("backbone.layers.7", r"'backbone.layers.7', but not a module.*layers.0.mixer.heads"),
        (7, "of type int, but not a module"),
        (None, "of type NoneType, but not a module"),
        (f"{BLOCK}.mixer.in_proj", r"inside the mixer 'backbone.layers.1.mixer'.*heads"),
        (f"{BLOCK}.heads", r"one of these mixers with .*: backbone.layers.0.mixer"),
    ]
    for layer, said in cases:
        with pytest.raises(LayerError, match=said):
            LayerLatimFlow(model, layer)
        with pytest.raises(LayerError, match=said):
            LayerLatimFlow(model, ["backbone", layer])
    heads = LayerLatimFlow(model, f"{BLOCK}.mixer.heads")
    with pytest.raises(LayerError, match="which has no input"):
        heads.attribute(token_ids(), TARGET, None, True)


class Tail(nn.Module):
    """Runs parts of a model's own, and holds one that never runs."""

    def __init__(self, model: Any, **parts: nn.Module) -> None:
        super().__init__()
        self.model, self.parts = model, nn.ModuleDict(parts)

    def forward(self, ids: Tensor) -> Tensor:
        out = self.model(ids).logits
        if "twice" in self.parts:
            out = self.parts["twice"](self.parts["twice"](out))
        if "flat" in self.parts:
            out = self.parts["flat"](out.flatten(0, 1)).view_as(out)
        if "frozen" in self.parts:
            with torch.no_grad():
                out = out + 0 * self.parts["frozen"](out.detach())
        return out


def test_layers_without_an_activation() -> None:
    for part, said in (
        ("never", "'parts.never' was not called"),
        ("twice", "'parts.twice' runs several times"),
        ("flat", r"'parts.flat' .*shape \(22, 19\), in which the 2 examples do not come first"),
        ("frozen", "'parts.frozen' returns depends on the inputs, or it runs under no_grad"),
    ):
        model = Tail(mamba_lm(), **{part: nn.Linear(19, 19)}).eval()
        with pytest.raises(LayerError, match=said):
            LayerLatimFlow(model, f"parts.{part}").attribute(token_ids(), TARGET)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layer, reentrant, said",
    [
        ("backbone.layers.0", False, "torch.utils.checkpoint"),
        (f"{BLOCK}.norm", True, "no_grad"),
        (f"{BLOCK}.norm", False, "torch.utils.checkpoint"),
        (f"{BLOCK}.mixer.heads", True, "no_grad"),
        # the way from there to the output is not run again
        (f"{BLOCK}.mixer", False, None),
        (BLOCK, True, None),
    ],
)
def test_checkpoints_of_the_users_own(layer: str, reentrant: bool, said: str | None) -> None:
    model, ids = mamba_lm(), token_ids(1)
    wanted = LayerLatimFlow(model, layer).attribute(ids, TARGET)
    block = model.backbone.layers[1]
    inner = block.forward

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        run = lambda x: inner(x, *args, **kwargs)  # noqa: E731
        return torch.utils.checkpoint.checkpoint(run, x, use_reentrant=reentrant)

    block.forward = forward
    if said is None:
        assert close(LayerLatimFlow(model, layer).attribute(ids, TARGET), wanted)
        return
    with pytest.raises((NotLinearError, LayerError), match=said):
        LayerLatimFlow(model, layer).attribute(ids, TARGET)


@pytest.mark.slow
def test_nothing_is_left_on_the_model() -> None:
    model, ids = mamba_lm(), token_ids()
    before = model(ids).logits

    def fail(x: Tensor) -> Tensor:
        raise KeyError("own")

    hooks = hook_count(model)
    for explain in (
        lambda: NeuronLatimFlow(model, BLOCK).attribute(ids, NEURON),
        lambda: NeuronLatimFlow(model, f"{BLOCK}.mixer.heads").attribute(ids, fail),
        lambda: NeuronLatimFlow(model, BLOCK).attribute(ids, (99, 99)),
        lambda: NeuronLatimFlow(lambda x: fail(model(x)), BLOCK, model).attribute(ids, NEURON),
        lambda: LayerLatimFlow(model, BLOCK).attribute(ids, (-1, 3), None, True),
        lambda: LayerLatimFlow(model, BLOCK).attribute(ids, (-1, 99)),
        lambda: LayerLatimFlow(lambda x: fail(model(x)), BLOCK, model).attribute(ids, (-1, 3)),
    ):
        with contextlib.suppress(KeyError, TargetError):
            explain()
        assert hook_count(model) == hooks and torch.is_grad_enabled()
        assert torch.equal(model(ids).logits, before)


def test_modes_and_arguments() -> None:
    model, ids = mamba_lm(), token_ids()
    embeddings = "backbone.embeddings"
    for method, asked, side in (
        (LayerLatimFlow, TARGET, "layer"),
        (NeuronLatimFlow, NEURON, "neuron"),
    ):
        explain = method(model, BLOCK)
        with torch.inference_mode(), pytest.raises(GradientModeError, match="inference_mode"):
            explain.attribute(ids, asked)
        with pytest.raises(TargetError):
            explain.attribute(ids, (-1, 99))
        with pytest.raises(OptionError, match=f"attribute_to_{side}_input"):
            explain.attribute(ids, asked, None, "yes")
        with pytest.raises(NotImplementedError, match=method.__name__):
            explain.attribute_each(ids, [TARGET])
        with pytest.raises(LayerError, match="takes depends on the inputs"):
            method(model, embeddings).attribute(ids, asked, None, True)
        with pytest.raises(LayerError, match="runs several times"):
            twice = lambda x: model(x).logits + model(x.flip(1)).logits  # noqa: E731
            method(twice, BLOCK, model).attribute(ids, asked)
    with pytest.raises(LayerError, match="not a module of the model"):
        NeuronLatimFlow(model, "backbone.layers.9")
    with pytest.raises(LayerError, match="type list"):
        NeuronLatimFlow(model, [BLOCK])
