"""What stands between layers, and between the given tokens and those that the model reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.every_method import METHODS, each_method, named
from helpers.rules import frozen_flow
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MambaConfig
from transformers.models.mamba.modeling_mamba import MambaMixer
from zoo.mamba import randomise, transformers_model

from captum_ssm import ImplicitAttention, ImplicitAttentionRollout, LatimFlow, MambaAttribution
from captum_ssm.errors import InputError

pytestmark = pytest.mark.slow


FOLDING = [m for m in METHODS if m.__name__ not in ("LatimFlow", "MambaLRP")]
each_fold = named(FOLDING)
TARGET = (-1, 3)


def with_bos(ids: Tensor) -> Tensor:
    return torch.cat([torch.full_like(ids[:, :1], 7), ids], 1)


#: What a function makes of the ids, and on which of them the relevance of each that is read lies.
CHANGES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "a token in front": (with_bos, lambda r: r[:, 1:]),
    "a slice": (lambda ids: ids[:, 2:], lambda r: torch.cat([torch.zeros_like(r[:, :2]), r], 1)),
    "reversed": (lambda ids: ids.flip(1), lambda r: r.flip(1)),
    "rolled": (lambda ids: ids.roll(2, 1), lambda r: r.roll(-2, 1)),
    "both": (lambda ids: with_bos(ids.flip(1)), lambda r: r[:, 1:].flip(1)),
}


@each_method
def test_relevance_lies_on_the_given_tokens(method: Any) -> None:
    model, ids = transformers_model("mamba"), torch.randint(0, 19, (2, 9))
    for name, (changed, back) in CHANGES.items():
        expected = back(method(model).attribute(changed(ids), target=TARGET))
        function = lambda x, changed=changed: model(changed(x)).logits  # noqa: E731
        found = method(function, model).attribute(ids, target=TARGET)
        assert found.shape == ids.shape
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6, msg=name)


def llama(attention: str = "eager") -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=19, hidden_size=8, intermediate_size=12, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, attn_implementation=attention,
    )  # fmt: skip
    return randomise(LlamaForCausalLM(config).eval())


def gpt2() -> Any:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=19, n_embd=8, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    model = randomise(GPT2LMHeadModel(config).eval())
    with torch.no_grad():
        for block in model.transformer.h:
            block.attn.c_attn.weight.mul_(40)  # so that it is no mean of all tokens
    return model


@pytest.mark.parametrize("make", [llama, lambda: transformers_model("mamba")])
@each_method
def test_a_first_token_that_is_looked_up_by_itself(method: Any, make: Callable[[], Any]) -> None:
    model, ids = make(), torch.randint(0, 19, (2, 9))
    embed, first = model.get_input_embeddings(), torch.full((2, 1), 7)

    def forward(ids: Tensor) -> Tensor:
        logits: Tensor = model(inputs_embeds=torch.cat([embed(first), embed(ids)], 1)).logits
        return logits

    method = frozen_flow if method is LatimFlow else method  # whose baseline is no mean of tokens
    found = method(forward, model).attribute(ids, target=TARGET)
    expected = method(model).attribute(torch.cat([first, ids], 1), target=TARGET)[:, 1:]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@each_method
def test_ids_made_up_anew_are_known_by_their_values(method: Any) -> None:
    model, ids = transformers_model("mamba"), torch.randint(0, 19, (1, 9))
    text = torch.tensor([[*ids[0].tolist(), 4, 5]])
    found = method(lambda x: model(text.clone()).logits, model).attribute(ids, target=TARGET)
    expected = method(model).attribute(text, target=TARGET)[:, :9]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@each_fold
def test_ids_made_up_anew_in_another_order(method: Any) -> None:
    model, ids = transformers_model("mamba"), torch.randint(0, 19, (1, 9))
    forward = lambda x: model(torch.tensor(x.flip(1).tolist())).logits  # noqa: E731
    found = method(forward, model).attribute(ids, target=TARGET)
    expected = method(model).attribute(ids.flip(1), target=TARGET).flip(1)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@each_fold
@pytest.mark.parametrize("ids", [[5, 5, 5, 5], [3, 7, 7, 3], [0, 0, 0]])
def test_ids_that_read_the_same_in_another_order(ids: list[int], method: Any) -> None:
    model, text = transformers_model("mamba"), torch.tensor([ids, ids])
    for name in ("reversed", "rolled", "a token in front"):
        changed, back = CHANGES[name]
        expected = back(method(model).attribute(changed(text), target=TARGET))
        function = lambda x, changed=changed: model(changed(x)).logits  # noqa: E731
        found = method(function, model).attribute(text, target=TARGET)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6, msg=name)


@each_fold
@pytest.mark.parametrize("shift", [0, 2])
def test_a_token_in_front_that_equals_the_first(shift: int, method: Any) -> None:
    """The text that is read begins with the given ids, and the first is another one."""
    model, ids = transformers_model("mamba"), torch.tensor([[7, 3, 5], [7, 11, 2]])
    change = lambda x: with_bos(x.roll(shift, 1) if shift else x[:, 1:])  # noqa: E731
    found = method(lambda x: model(change(x)).logits, model).attribute(ids, target=TARGET)
    read = method(model).attribute(change(ids), target=TARGET)[:, 1:]
    expected = read.roll(-shift, 1) if shift else torch.nn.functional.pad(read, (1, 0))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("make", [llama, lambda: llama("sdpa"), gpt2])
@each_method
def test_packed_positions_are_explained_as_they_are_run(
    method: Any, make: Callable[[], Any]
) -> None:
    """With a cache, which transformers uses unless told not to, they are one text."""
    model, ids = make(), torch.randint(0, 19, (1, 7))
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
    shown: dict[bool, Any] = {}
    for cached in (True, False):

        def forward(x: Tensor, cached: bool = cached) -> Any:
            return model(x, position_ids=positions, use_cache=cached).logits

        shown[cached] = forward(ids)[:, -1, 3]
        explained = LatimFlow(forward, model).decompose(ids, target=TARGET)
        torch.testing.assert_close(explained.output, shown[cached].detach())
        assert explained.delta.abs().max() < 1e-5
        method(forward, model).attribute(ids, target=TARGET)
    assert (shown[True] - shown[False]).abs().max() > 1e-3


def mixer(index: int = 0) -> nn.Module:
    config = MambaConfig(hidden_size=6, num_hidden_layers=2, state_size=3, vocab_size=11)
    return randomise(MambaMixer(config, index))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mixer = nn.LayerNorm(6), mixer()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mixer(self.norm(x))


class Halved(nn.Module):
    """The second layer reads every other token."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = Residual(), Residual()

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.one(x)[:, ::2])


@pytest.mark.parametrize("method", [ImplicitAttention, ImplicitAttentionRollout, MambaAttribution])
def test_tokens_lost_between_layers(method: Any) -> None:
    model, x = Halved().eval(), torch.randn(2, 9, 6)
    with pytest.raises(InputError, match=r"'other\.mixer' does not read all tokens .*layers="):
        method(model).attribute(x, target=(-1, 1))
    # the advice of the message works
    last = method(model, layers=["other.mixer"]).attribute(x, target=(-1, 1), per_token=True)
    assert last.shape == (2, 5)
    assert [len(m[0]) for m in ImplicitAttention(model).matrices(x)] == [9, 5]
