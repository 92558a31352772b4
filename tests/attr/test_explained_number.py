"""The explained number is the one that forward_func returns when nobody looks on."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from zoo import networks
from zoo.attention import attention_model
from zoo.mamba import transformers_model

from captum_ssm import (
    EdgeEffects,
    LatimFlow,
    LatimLogit,
    MambaAttribution,
    MambaLRP,
    TransformerAttribution,
)
from captum_ssm.errors import CachedStateError, ReconstructionError
from tests.oracles import relative_error

pytestmark = pytest.mark.slow

TARGET = (-1, 5)
METHODS = (LatimFlow, MambaLRP, LatimLogit)
#: Whatever compares the number that it explains.
COMPARING: dict[str, Callable[..., Any]] = {
    **{method.__name__: method for method in METHODS},
    "MambaAttribution": MambaAttribution,
    "TransformerAttribution": TransformerAttribution,
    "EdgeEffects": EdgeEffects,
    "EdgeEffects, frozen": functools.partial(EdgeEffects, rule="frozen"),
}
MODELS: dict[str, tuple[Callable[[pytest.MonkeyPatch], Any], str]] = {
    "llama": (lambda _: attention_model("llama"), "past_key_values"),
    "mamba": (lambda _: transformers_model("mamba"), "cache_params"),
    "qwen3_next": (lambda p: networks.make("qwen3_next", p).model, "past_key_values"),
    "jamba": (lambda p: networks.make("jamba", p).model, "past_key_values"),
}


def draw(model: nn.Module) -> tuple[Tensor, Tensor]:
    ids = torch.randint(1, 15, (1, 9))
    return ids, model.get_input_embeddings()(ids).detach()


def in_chunks(model: Any, cache: str, **asked: bool) -> Callable[[Tensor], Tensor]:
    def given(x: Tensor) -> dict[str, Tensor]:
        return {"inputs_embeds": x} if x.is_floating_point() else {"input_ids": x}

    def function(x: Tensor) -> Tensor:
        first = model(**given(x[:, :5]), **asked)
        second = model(**given(x[:, 5:]), **{cache: getattr(first, cache)})
        logits: Tensor = second.logits
        return logits

    return function


@pytest.mark.parametrize("asked", [{"use_cache": True}, {}], ids=["asked for", "by default"])
@pytest.mark.parametrize("name", MODELS)
def test_prefill_in_chunks_is_refused_by_name(
    name: str, asked: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    make, cache = MODELS[name]
    model = make(monkeypatch)
    function = in_chunks(model, cache, **asked)
    for method in METHODS:
        for x in draw(model):
            with pytest.raises(CachedStateError, match=cache) as raised:
                method(function, model=model).attribute(x, target=TARGET)
            assert "Pass embeddings" not in str(raised.value)


def test_one_call_that_asks_for_a_cache_is_explained() -> None:
    model = transformers_model("mamba")
    ids, _ = draw(model)
    asking = LatimFlow(lambda x: model(x, use_cache=True).logits, model=model)
    found = asking.attribute(ids, target=TARGET)
    assert relative_error(found, LatimFlow(model).attribute(ids, target=TARGET)) <= 1e-6


def test_two_calls_of_their_own_are_explained() -> None:
    model = transformers_model("mamba")
    ids, _ = draw(model)
    both = LatimFlow(lambda x: model(x).logits + model(x).logits, model=model)
    one = LatimFlow(model).attribute(ids, target=TARGET)
    assert relative_error(both.attribute(ids, target=TARGET), 2 * one) <= 1e-5


class Chunked(nn.Module):
    """A model that reads its input in chunks, and hands its own state on out of sight."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        first = self.model(inputs_embeds=x[:, :5], return_dict=False)
        cache = next((y for y in first if not isinstance(y, Tensor)), None)
        given = {} if cache is None else {"past_key_values": cache}
        logits: Tensor = self.model(inputs_embeds=x[:, 5:], **given).logits
        return logits


CHANGED: dict[str, Callable[[Any], tuple[Any, Any]]] = {
    "a wrapper's chunks": lambda m: (Chunked(m), None),
    "gradients": lambda m: (
        lambda e: m(inputs_embeds=e).logits * (2 if torch.is_grad_enabled() else 1),
        m,
    ),
    "a live input": lambda m: (
        lambda e: m(inputs_embeds=e.flip(1) if e.requires_grad else e).logits,
        m,
    ),
}


@pytest.mark.parametrize("how", CHANGED)
@pytest.mark.parametrize("method", [LatimFlow, MambaLRP])
def test_another_number_is_refused(method: type[LatimFlow], how: str) -> None:
    torch.manual_seed(1)  # a random model may hardly read the first chunk
    function, model = CHANGED[how](attention_model("llama"))
    _, embeddings = draw(model or function.model)
    explain = method(function, model=model)
    for call in (explain.attribute, explain.decompose):
        with pytest.raises(ReconstructionError, match="in a plain run"):
            call(embeddings, target=TARGET)
    assert explain.attribute(embeddings, target=TARGET, verify=False).isfinite().all()


@pytest.mark.parametrize("explain", [x for x in COMPARING if "Flow" not in x and "LRP" not in x])
def test_another_number_is_refused_without_rules(explain: str) -> None:
    function, model = CHANGED["gradients"](attention_model("llama"))
    _, embeddings = draw(model)
    method = COMPARING[explain](function, model=model)
    with pytest.raises(ReconstructionError, match="in a plain run"):
        method.attribute(embeddings, target=TARGET)
    method.attribute(embeddings, target=TARGET, verify=False)


@pytest.mark.parametrize("explain", COMPARING)
def test_errors_of_the_function_alone_are_not_swallowed(explain: str) -> None:
    model = attention_model("llama")
    ids, _ = draw(model)

    def function(x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            raise KeyError("the user's own")
        logits: Tensor = model(x).logits
        return logits

    with pytest.raises(KeyError, match="the user's own"):
        COMPARING[explain](function, model=model).attribute(ids, target=TARGET)


#: Kinds of models, and how they run.
SOUND = {
    "mamba": "float32", "mamba2": "bfloat16", "gla": "float16", "jamba": "autocast",
    "qwen3_next": "bfloat16", "recurrent_gemma": "autocast", "llama with attention": "float16",
}  # fmt: skip


@pytest.mark.parametrize(("name", "how"), SOUND.items())
def test_sound_functions_are_not_accused(
    name: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = networks.make(name, monkeypatch)
    model = case.model if how == "autocast" else case.model.to(getattr(torch, how))
    context = torch.autocast("cpu", torch.bfloat16) if how == "autocast" else nullcontext()
    method = LatimFlow(lambda x: model(x), model=model)
    with context:
        for other in (EdgeEffects, MambaAttribution):
            other(lambda x: model(x), model=model).attribute(case.inputs, **case.target)
        found = method.attribute(case.inputs, **case.target)
        wanted = LatimFlow(model).attribute(case.inputs, **case.target)
    assert torch.equal(found, wanted)
