"""Errors with a remedy: the argument by its name, what was found, what to do."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from helpers.every_method import METHODS, each_method, each_of_queries
from torch import Tensor, nn
from transformers import DynamicCache, MambaConfig
from transformers.models.mamba.modeling_mamba import MambaMixer
from zoo.small import VOCABULARY, WIDTH, mamba_lm, token_ids

from captum_ssm import (
    CaptumSSMError,
    ImplicitAttention,
    ImplicitAttentionRollout,
    LatimALTI,
    LatimFlow,
    LatimNorm,
    MambaAttribution,
)
from captum_ssm.errors import InputError

pytestmark = pytest.mark.slow

Row, Rollout, Weighted = ImplicitAttention, ImplicitAttentionRollout, MambaAttribution
CODE, LAYERS = {"recipe": "published_code"}, "backbone.layers."
IDS, OTHER = torch.tensor([[3, 1, 4], [1, 5, 9]]), mamba_lm()


def check(call, builtin, fragments):
    with pytest.raises(CaptumSSMError) as caught:
        call()
    assert isinstance(caught.value, builtin)
    message = str(caught.value)
    assert not [f for f in fragments if f not in message], message
    assert message.endswith((".", "?", ")"))


# --- options -------------------------------------------------------------------------------------

#: Beside what the contract of methods and ``test_wrong_types`` refuse: calls on a model and ids
#: (2, 5), and fragments of the error.
CALLS: dict[str, tuple[Callable[[Any, Tensor], Any], list[str]]] = {
    "a preset": (lambda m, x: Row(m).attribute(x, components="unifed"),
                 ["components='unifed'", "'unified'", "'s6'"]),
    "a mask": (lambda m, x: Row(m).attribute(x, None, torch.ones(3, 5)),
               ["batch of 2", "additional_forward_args[0] has 3", "(3, 5)"]),
    "a second argument": (lambda m, x: Row(m).attribute(x, None, (None, torch.ones(5, 5, WIDTH))),
                          ["batch of 2", "additional_forward_args[1] has 5", "(5, 5, 10)"]),
    "recipe, reduction": (lambda m, x: Row(m).attribute(x, **CODE, reduce="max"),
                          ["'published_code'", "reduce='mean'"]),
    "recipe, queries": (lambda m, x: Row(m).attribute(x, **CODE, query=[1, 2]),
                        ["one query token", "'last'"]),
    "recipe, rows": (lambda m, x: Rollout(m).attribute(x, **CODE, normalize_rows=True),
                     ["'published_code'", "normalize_"]),
    "recipe, ratio": (lambda m, x: Rollout(m).attribute(x, **CODE, discard_ratio=0.1),
                      ["'published_code'", "discard_"]),
    "recipe, clamp": (lambda m, x: Weighted(m).attribute(x, (-1, 3), **CODE, clamp="abs"),
                      ["'published_code'", "clamp"]),
    "one example": (lambda m, x: Row(m).matrices(x[0]), ["(5,)", "batch dimension"]),
    "positions": (lambda m, x: LatimNorm(m).maps(x, positions=torch.zeros(3, 1).long()),
                  ["positions has 3 rows, but the batch has 2"]),
    "mean": (lambda m, x: LatimALTI(m, residual=False).attribute(x, query="last"),
             ["residual=False. Pass aggregate='mean'"]),
}  # fmt: skip


@pytest.mark.parametrize("case", CALLS)
def test_calls(case: str) -> None:
    call, fragments = CALLS[case]
    check(lambda: call(mamba_lm(), token_ids(2, 5)), ValueError, fragments)


# --- inputs --------------------------------------------------------------------------------------


#: What is given as inputs, and the advice; the contract of methods refuses others.
INPUTS: dict[str, tuple[Any, list[str]]] = {
    "two inputs": ((IDS, IDS), ["inputs holds 2 tensors", "additional_forward_args"]),
    "a ragged list": (
        [[1, 2], [3]],
        ["inputs is of type list, not a tensor", "torch.tensor(inputs)"],
    ),
    "text": ("hello", ["inputs is of type str, not a tensor", "tokenizer="]),
    "words": (np.array(["a"]), ["inputs is of type ndarray, not a tensor"]),
    "tensors": ([torch.ones(3), torch.ones(3)], ["torch.stack(inputs)"]),
    "other names": ({"ids": IDS}, ["one of the tensors in it (['ids'])"]),
    "ids of three dimensions": (torch.ones(2, 5, 1).long(), ["token ids of shape (B, L)"]),
    "pixels that are integers": (torch.ones(2, 3, 4, 4).byte(), ["image processor"]),
    "complex numbers": (torch.ones(2, 5, WIDTH) * 1j, ["dtype torch.complex64"]),
}


@pytest.mark.parametrize("case", INPUTS)
def test_inputs(case: str) -> None:
    inputs, fragments = INPUTS[case]
    check(lambda: Row(mamba_lm()).attribute(inputs, (-1, 3)), ValueError, fragments)


def embedded(model: Any) -> Any:
    return lambda x: model(inputs_embeds=x).logits


VECTORS = torch.ones(2, 5, WIDTH)
BAD = VECTORS.index_fill(1, torch.tensor(2), torch.nan)
LARGE = torch.tensor([[3, VOCABULARY, 4]])
#: A function over a model, what it is asked, and fragments of every method's error.
OF_ALL: dict[str, tuple[Callable[[Any], Any], tuple[Any, ...], list[str]]] = {
    "floats": (lambda m: m, (IDS.float(),), ["token ids (B, L)", "NoiseTunnel, need embeddings"]),
    "large ids": (lambda m: m, (LARGE,), ["from 3 to 19, which", "tokenizer"]),
    "embeddings": (lambda m: lambda x: m(x).logits, (VECTORS,), ["model(inputs_embeds=inputs)"]),
    "embeddings twice": (lambda m: m, (VECTORS, (-1, 3), (None, VECTORS)),
                         ["additional_forward_args", "has inputs_embeds, too"]),
    "not finite": (embedded, (BAD,), ["0.mixer'", "component", "NaN or infinity", "the input"]),
    "another model": (lambda m: lambda x: OTHER(x), (IDS,), [
        "called none of them", f"{LAYERS}0.mixer", "forward_func"]),
    "a cache": (lambda m: m, (IDS, (-1, 3), (None, None, DynamicCache(config=MambaConfig()))), [
        "cache_params=DynamicCache", "the whole sequence", "without a cache"]),
}  # fmt: skip


@pytest.mark.parametrize("case", OF_ALL)
def test_errors_of_every_method(case: str) -> None:
    make, (inputs, *more), fragments = OF_ALL[case]
    model, asked = mamba_lm(), {"target": (-1, 3)} if not more else {}
    behind_a_cache = {"LatimFlow", "MambaLRP"} if case == "a cache" else set()
    for method in METHODS:
        if method.__name__ in behind_a_cache:
            continue
        call = partial(method(make(model), model).attribute, inputs, *more, **asked)
        check(call, (ValueError, ArithmeticError), fragments)


@each_of_queries
def test_examples_that_are_not_explained_by_themselves(method: Any) -> None:
    model = mamba_lm()
    twice = method(lambda x: model(x.repeat(2, 1)), model=model)
    check(lambda: twice.attribute(IDS, (-1, 3)), ValueError, ["batch of 2", "4"])
    summed = method(lambda x: model(x).logits.sum(0, keepdim=True), model=model)
    check(lambda: summed.attribute(IDS, (-1, 3)), ValueError, ["batch of 2", "batch of 1"])


class SomeSSM(nn.Module):
    def forward(self, x):
        return x.cumsum(1)


class Beside(nn.Module):
    def __init__(self, extra):
        super().__init__()
        self.lm, self.extra = mamba_lm(), extra

    def forward(self, ids):
        self.extra(torch.zeros(1, 2, 3))
        return self.lm(ids)


def beside(extra: nn.Module) -> Callable[[], Any]:
    return lambda: Row(Beside(extra)).attribute(torch.tensor([[3, 1, 2]]))


def layers(layers: Any) -> Callable[[], Any]:
    return lambda: Row(mamba_lm(), layers=layers)


#: A call, the builtin that Captum's users expect, and fragments of the error.
MODELS: dict[str, tuple[Callable[[], Any], type, list[str]]] = {
    "no mixer": (lambda: Row(nn.Sequential(nn.Linear(3, 2))), ValueError, [
        "No token mixer", "Sequential", "Falcon Mamba", "docs/", "register_mixer"]),
    "unknown mixer": (lambda: Row(nn.Sequential(SomeSSM())), TypeError, [
        "'0'", "SomeSSM", "no adapter", "Mamba, Falcon Mamba", "docs/", "register_mixer"]),
    "beside a known one": (beside(SomeSSM()), TypeError, [
        "'extra'", "SomeSSM", "no adapter, and it ran", "register_mixer", "layers=[...]"]),
    "recurrent layer": (beside(nn.LSTM(3, 3)), TypeError, ["'extra'", "LSTM", "no adapter"]),
    "gru": (beside(nn.GRU(3, 3)), TypeError, ["'extra'", "GRU"]),
    "function": (lambda: Row(lambda x: x), TypeError, ["forward_func", "lambda", "model=module"]),
    "no module": (lambda: Row(lambda x: x, model="mamba"), TypeError, [
        "model must be a torch.nn.Module", "str"]),
    "unknown layer": (layers([f"{LAYERS}7.mixer"]), ValueError, [
        "layers", f"'{LAYERS}7.mixer'", f"{LAYERS}0.mixer"]),
    "no mixer of it": (layers(["lm_head"]), ValueError, ["'lm_head'", f"{LAYERS}2.mixer"]),
    "another model's": (layers([MambaMixer(MambaConfig(), 0)]), ValueError, [
        "layers", "MambaMixer", f"{LAYERS}2.mixer"]),
    "no layers": (layers([]), ValueError, ["layers"]),
    "a name": (layers(f"{LAYERS}0.mixer"), ValueError, ["layers"]),
}  # fmt: skip


@pytest.mark.parametrize("case", MODELS)
def test_models(case: str) -> None:
    check(*MODELS[case])


@each_method
def test_layers_vouch_for_other_mixers(method):
    model = Beside(SomeSSM())
    ids = token_ids()
    chosen = [f"lm.backbone.layers.{i}.mixer" for i in range(3)]
    found = method(model, layers=chosen)
    expected = method(model.lm).attribute(ids, target=(-1, 3))
    assert torch.equal(found.attribute(ids, target=(-1, 3)), expected)


OUTPUTS: dict[str, Callable[[Tensor], Any]] = {
    "NoneType": lambda out: None, "str": lambda out: "cat", "dict": lambda out: {"prediction": out},
    "tuple": lambda out: ("cat", out), "ndarray": lambda out: out.detach().numpy(),
}  # fmt: skip


@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs(name: str) -> None:
    model = mamba_lm()
    odd = Weighted(lambda x: OUTPUTS[name](model(x).logits), model=model)
    said = [name, "not a tensor", "logits", "forward_func", "model=module"]
    check(lambda: odd.attribute(token_ids(), target=(-1, 3)), TypeError, said)


def test_a_model_that_writes_into_a_mixers_input() -> None:
    model, seen = mamba_lm(), list[Tensor]()
    model.backbone.layers[1].norm.register_forward_hook(lambda *args: seen.append(args[2]))

    def write(*_: Any) -> None:
        seen[-1].detach().mul_(2)

    model.backbone.norm_f.register_forward_pre_hook(write)
    for method in (Row, Rollout):
        check(lambda method=method: method(model).attribute(IDS, (-1, 3)),
              (ValueError, RuntimeError), [f"{LAYERS}1.mixer", "in place"])  # fmt: skip


# --- gradients -----------------------------------------------------------------------------------


class Detached(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.block(*args, **kwargs).detach()


def without_grad(model: Any) -> Any:
    return torch.no_grad()(lambda x: model(x).logits)


def cut(model: Any) -> Any:
    model.backbone.layers[1] = Detached(model.backbone.layers[1])
    return model


#: What takes the gradient of a model away, and fragments of the error.
GRADIENTS: dict[str, tuple[Callable[[Any], Any], list[str]]] = {
    "no_grad": (without_grad, ["no gradients", "no_grad", "detach"]),
    "detached": (lambda m: lambda x: m(x).logits.detach(), ["no gradients", "no_grad", "detach"]),
    "a layer": (cut, ["No gradient of the target reaches", f"'{LAYERS}0.mixer'", "layers=[...]"]),
}


@pytest.mark.parametrize("recipe", ["paper", "published_code"])
@pytest.mark.parametrize("case", GRADIENTS)
def test_gradients_that_are_missing(case: str, recipe: str) -> None:
    make, fragments = GRADIENTS[case]
    model, ids = mamba_lm(), token_ids()
    asked = {"target": (-1, 3), "recipe": recipe}
    check(lambda: Weighted(make(model), model).attribute(ids, **asked), RuntimeError, fragments)
    if case == "a layer":
        last = Weighted(model, layers=[f"{LAYERS}2.mixer"])
        assert last.attribute(ids, **asked).isfinite().all()  # the advice works


def test_there_is_no_asynchronous_form() -> None:
    with pytest.raises(NotImplementedError, match="LatimFlow"):
        LatimFlow(mamba_lm()).attribute_future()


def test_a_mask_of_the_whole_batch_in_a_closure() -> None:
    model, ids = mamba_lm(), token_ids(2, 6)
    mask = torch.ones_like(ids)
    for method in (LatimFlow, Rollout):
        explain = method(lambda x: model(x, attention_mask=mask).logits, model=model)
        with pytest.raises(InputError, match="internal_batch_size"):
            explain.attribute(ids, (-1, 3), internal_batch_size=1)
