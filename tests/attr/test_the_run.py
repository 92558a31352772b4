"""Explanations are of what ``forward_func`` computed, set up as it was when it ran."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.every_method import each_method, named
from torch import Tensor, nn
from zoo.mamba import transformers_model

import captum_ssm
from captum_ssm import ImplicitAttentionRollout, LatimFlow, LatimNorm
from captum_ssm.errors import (
    CaptumSSMError,
    InputError,
    NotLinearError,
    ReconstructionError,
    TargetError,
)
from captum_ssm.tracing import Layer

pytestmark = pytest.mark.slow


TARGET = (-1, 3)


def tokens() -> Tensor:
    return torch.randint(0, 19, (2, 9))


def assert_same(method: Any, forward: Callable[[Tensor], Any], model: nn.Module, same: Any) -> None:
    ids = tokens()
    torch.testing.assert_close(forward(ids), same(ids).logits)
    found = method(forward, model).attribute(ids, target=TARGET)
    expected = method(same).attribute(ids, target=TARGET)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    usual = method(model).attribute(ids, target=TARGET)
    assert (usual - expected).abs().max() > 1e-3 * expected.abs().max()


@named([LatimFlow, LatimNorm, ImplicitAttentionRollout])
def test_an_adapter_switched_off(method: Any) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=3, target_modules=["in_proj", "x_proj"], init_lora_weights=False)
    tuned = peft.get_peft_model(transformers_model("mamba"), config).eval()
    same = copy.deepcopy(tuned).unload()

    def forward(ids: Tensor) -> Tensor:
        with tuned.disable_adapter():
            return tuned(ids).logits

    assert_same(method, forward, tuned, same)


@each_method
def test_a_hook_for_the_time_of_the_call(method: Any) -> None:
    model = transformers_model("mamba")
    same = copy.deepcopy(model)
    with torch.no_grad():
        same.backbone.layers[1].mixer.in_proj.weight.mul_(-2)

    def forward(ids: Tensor) -> Tensor:
        projection = model.backbone.layers[1].mixer.in_proj
        with projection.register_forward_hook(lambda module, args, out: -2 * out):
            return model(ids).logits

    assert_same(method, forward, model, same)


class Backwards(nn.Module):
    """A mixer that reads its tokens from the other end, too, which its class does not tell."""

    def __init__(self, mixer: Any) -> None:
        super().__init__()
        kind = type(mixer)

        def forward(own: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            plain = kind.forward(own, hidden_states, *args, **kwargs)
            return plain + kind.forward(own, hidden_states.flip(1), *args, **kwargs).flip(1)

        mixer.__class__ = type(kind.__name__, (kind,), {"forward": forward})


@each_method
def test_a_subclass_is_held_to_its_own_output(method: Any) -> None:
    model = transformers_model("mamba")
    Backwards(model.backbone.layers[0].mixer)
    with pytest.raises(ReconstructionError, match=r"layers\.0\.mixer"):
        method(model).attribute(tokens(), target=TARGET)


def steered(module: nn.Module, args: Any, out: Tensor) -> Tensor:
    return out + torch.linspace(-1, 1, out.shape[-1])


def no_delta(method: Any, forward: Any, model: nn.Module, ids: Tensor) -> None:
    if method.__name__ in ("LatimLogit", "LatimFlow"):
        asked = {"target": TARGET, "return_convergence_delta": True}
        assert method(forward, model).attribute(ids, **asked)[1].abs().max() < 1e-5


@each_method
def test_a_hook_that_adds_is_explained_or_refused_by_name(method: Any) -> None:
    model, ids = transformers_model("mamba"), tokens()
    model.backbone.layers[0].mixer.register_forward_hook(steered)
    vectors = ("LatimALTI", "LatimLogit", "LatimNorm", "TransformerAttribution")
    if method.__name__ not in vectors:
        method(model).attribute(ids, target=TARGET)
        return
    with pytest.raises(InputError, match=r"layers\.0\.mixer': a forward hook .* LatimFlow"):
        method(model).attribute(ids, target=TARGET)


FOLLOW = ("LatimFlow", "MambaLRP")


#: What hooks make of a mixer's output besides scaling it, and the refusal of what folds layers.
MOVES: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "flip": (lambda out: out.flip(1), "in another order of the tokens|has mixed"),
    "shift": (lambda out: out.roll(1, 1), "in another order of the tokens|has mixed"),
    "centre": (lambda out: out - out.mean(1, keepdim=True), r"has mixed.*layers\.\d"),
    "sums": (lambda out: out.cumsum(1), r"has mixed.*layers\.\d"),
}


@each_method
def test_a_hook_that_moves_tokens_is_followed_or_refused(method: Any) -> None:
    for where, move in ((0, "flip"), (1, "shift"), (0, "centre"), (1, "sums")):
        model, ids = transformers_model("mamba"), tokens()
        change, complaint = MOVES[move]
        hooked = model.backbone.layers[where].mixer
        hooked.register_forward_hook(lambda module, args, out, change=change: change(out))
        if method.__name__ in FOLLOW:
            found = method(model).decompose(ids, TARGET)
            torch.testing.assert_close(found.output, model(ids).logits[:, -1, 3])
            assert found.delta.abs().max() < 1e-5
        elif method.__name__ == "LatimLogit" and where == 1:
            no_delta(method, model, model, ids)  # of the last mixer it reads gradients alone
        else:
            with pytest.raises(InputError, match=complaint):
                method(model).attribute(ids, target=TARGET)


@each_method
def test_a_hook_that_writes_to_the_output(method: Any) -> None:
    model, ids = transformers_model("mamba"), tokens()
    same = copy.deepcopy(model)

    def silenced(module: nn.Module, args: Any, out: Tensor) -> None:
        out.mul_(0)

    model.backbone.layers[1].mixer.register_forward_hook(silenced)
    same.backbone.layers[1].mixer.register_forward_hook(lambda module, args, out: 0 * out)
    torch.testing.assert_close(model(ids).logits, same(ids).logits)
    if method.__name__ in ("LatimALTI", "LatimNorm", "TransformerAttribution"):
        with pytest.raises(InputError, match=r"layers\.1\.mixer.*in place.*let it return"):
            method(model).attribute(ids, target=TARGET)
        return
    found, expected = (method(m).attribute(ids, target=TARGET) for m in (model, same))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


class Written(nn.Module):
    def __init__(self, onto: str) -> None:
        super().__init__()
        self.model, self.onto = transformers_model("mamba"), onto

    def forward(self, ids: Tensor) -> Tensor:
        backbone = self.model.backbone
        x = backbone.embeddings(ids).clone()
        for block in backbone.layers:
            out = block.mixer(block.norm(x))
            if self.onto == "output":
                out += x
                x = out
            else:
                x += out
        logits: Tensor = self.model.lm_head(backbone.norm_f(x))
        return logits


@each_method
def test_sums_in_place_are_explained_or_refused_with_the_remedy(method: Any) -> None:
    ids = tokens()
    for onto in ("output", "stream"):
        model = Written(onto).eval()
        expected = method(model.model).attribute(ids, target=TARGET)
        try:
            found = method(model).attribute(ids, target=TARGET)
        except CaptumSSMError as error:
            assert method.__name__ not in FOLLOW
            assert "out-of-place" in str(error)
        else:
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", FOLLOW)
def test_examples_that_mix_are_not_blamed_on_functions(name: str) -> None:
    model = transformers_model("mamba")

    def centered(ids: Tensor) -> Tensor:
        logits: Tensor = model(ids).logits
        return logits - logits.mean(0, keepdim=True)

    with pytest.raises(NotLinearError, match=r"examples of the batch mix.*one by one") as refused:
        getattr(captum_ssm, name)(centered, model).attribute(tokens(), target=TARGET)
    assert "functions of its own" not in str(refused.value)


@each_method
def test_a_target_at_padding_names_the_remedy(method: Any) -> None:
    model, ids = transformers_model("mamba"), tokens()
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    with pytest.raises(TargetError, match=r"padded token of example 1.*\[\(8, 3\), \(5, 3\)\]"):
        method(model).attribute(ids, target=TARGET, additional_forward_args=(mask,))
    found = method(model).attribute(ids, [(8, 3), (5, 3)], additional_forward_args=(mask,))
    alone = method(model).attribute(ids[1:, :6], target=(5, 3))
    torch.testing.assert_close(found[1:, :6], alone, rtol=1e-4, atol=1e-5)


@each_method
def test_nothing_of_a_run_waits_for_the_collector(
    method: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU the operators of a large model would fill its memory until garbage is collected."""
    model, ids, layers = transformers_model("mamba"), tokens(), list[weakref.ref[Layer]]()
    own = Layer.__init__

    def init(layer: Layer, *args: Any) -> None:
        layers.append(weakref.ref(layer))
        own(layer, *args)

    monkeypatch.setattr(Layer, "__init__", init)
    gc.collect()
    gc.disable()
    try:
        method(model).attribute(ids, target=TARGET)
        assert layers or method.__name__ in FOLLOW
        assert not any(layer() for layer in layers)
    finally:
        gc.enable()
