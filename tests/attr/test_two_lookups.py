"""Token ids that a model looks up more than once: every look-up is the explained input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.rules import frozen_flow
from torch import Tensor, nn
from transformers import MambaConfig, MambaForCausalLM

from captum_ssm import LatimFlow, LatimLogit, MambaLRP
from captum_ssm.errors import OptionError
from tests.oracles import relative_error

pytestmark = pytest.mark.slow

TARGET = (-1, 5)
NAMES = ("frozen", "half", "centered", "balanced")


def mamba(**more: Any) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}
    return MambaForCausalLM(MambaConfig(**sizes, **more)).eval().double()


def with_adapter(model: nn.Module, layer: str) -> Any:
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=[layer])).eval()
    for name, weight in adapted.named_parameters():
        if "lora" in name:
            weight.data = torch.randn_like(weight, dtype=torch.float64)
    return adapted


class Embedding(nn.Module):
    """An embedding and a second look-up of the same ids."""

    def __init__(self, first: nn.Embedding, how: str) -> None:
        super().__init__()
        self.first, self.how = first, how
        self.second = nn.Embedding(first.num_embeddings, 3).to(first.weight)
        self.up = nn.Linear(3, first.embedding_dim, bias=False).to(first.weight)

    @property
    def weight(self) -> Tensor:
        return self.first.weight

    def forward(self, ids: Tensor) -> Tensor:
        first, table = self.first(ids), self.second.weight
        again = {
            "embedding": lambda: self.second(ids),
            "getitem": lambda: table[ids],
            "shifted": lambda: self.second(ids.roll(1, 1)),
        }[self.how]()
        return first + self.up(again)


def made(how: str) -> Any:
    model = mamba()
    model.backbone.embeddings = Embedding(model.backbone.embeddings, how)
    return model


def draw() -> Tensor:
    torch.manual_seed(1)
    return torch.randint(1, 40, (2, 8))


MODELS = {
    "LoRA on Mamba": lambda: with_adapter(mamba(), "embeddings"),
    "embedding": lambda: made("embedding"),
    "getitem": lambda: made("getitem"),
}


def of_embeddings(method: Any, model: Any, ids: Tensor, **options: Any) -> Tensor:
    """Relevance (B, L) of the same embeddings, handed to the model in place of ids."""
    given = model.get_input_embeddings()(ids).detach()
    explained = method(lambda e: model(inputs_embeds=e).logits, model=model)
    found: Tensor = explained.attribute(given, target=TARGET, **options)
    return found.sum(-1)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("method", [LatimFlow, MambaLRP, LatimLogit])
def test_relevance_is_that_of_the_embeddings(method: Any, name: str) -> None:
    model, ids = MODELS[name](), draw()
    found = method(model).attribute(ids, target=TARGET)
    assert relative_error(found, of_embeddings(method, model, ids)) <= 1e-9


@pytest.mark.parametrize("rule", NAMES)
def test_by_every_rule_and_role(rule: Any) -> None:
    model, ids = made("embedding"), draw()
    found = LatimFlow(model).decompose(ids, target=TARGET, rule=rule)
    assert relative_error(found.tokens, of_embeddings(LatimFlow, model, ids, rule=rule)) <= 1e-9
    assert found.roles is not None
    assert relative_error(sum(found.roles.values()), found.tokens) <= 1e-9
    assert found.delta.abs().max() <= 1e-6
    assert found.sizes == (16, 3)


def test_ids_in_another_order() -> None:
    model, ids = made("shifted"), draw()
    embedding = model.backbone.embeddings
    first, again = embedding.first(ids).detach(), embedding(ids).detach()
    flow = frozen_flow(lambda e: model(inputs_embeds=e).logits, model=model)
    gradient = flow.attribute(again, target=TARGET) / again
    own = (gradient * first).sum(-1)
    wanted = own + (gradient * (again - first)).sum(-1).roll(-1, 1)
    found = frozen_flow(model).attribute(ids, target=TARGET)
    assert relative_error(found, wanted) <= 1e-9


def test_baselines() -> None:
    model, ids = made("embedding"), draw()
    flow = LatimFlow(model)
    same = flow.attribute(ids, target=TARGET, baselines=ids)
    assert same.abs().max() == 0
    with pytest.raises(OptionError, match="2 embedding tables"):
        flow.attribute(ids, target=TARGET, baselines=1.0)
