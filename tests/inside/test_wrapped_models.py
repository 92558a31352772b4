"""Layers of models that are wrapped, compiled or read from the other end."""

from __future__ import annotations

from typing import Any

import oracles
import pytest
import torch
from torch import Tensor, nn
from zoo.small import WIDTH, mamba_lm, token_ids

from captum_ssm import LayerLatimFlow

TARGET = (-1, 3)
BLOCK = "backbone.layers.1"


def close(found: Tensor, wanted: Tensor) -> bool:
    return oracles.relative_error(found.double(), wanted.double()) <= 1e-5


@pytest.mark.slow
def test_virtual_tokens_are_tokens_of_a_layer() -> None:
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=3, token_dim=WIDTH, num_layers=3,
        num_attention_heads=1,
    )  # fmt: skip
    model, ids = mamba_lm(), token_ids()
    tuned = peft.get_peft_model(model, config).eval()
    found = LayerLatimFlow(tuned, model.backbone.layers[1]).decompose(ids, TARGET)
    assert found.inputs.shape == (2, 14, WIDTH) and not found.virtual.any()
    prompts = tuned.get_prompt(batch_size=2).detach()
    read = torch.cat([prompts, model.get_input_embeddings()(ids)], 1).detach()
    forward = lambda x: model(inputs_embeds=x).logits  # noqa: E731
    assert close(LayerLatimFlow(forward, BLOCK, model).attribute(read, TARGET), found.inputs)


class BothWays(nn.Module):
    """Every second block reads from the last token to the first."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        x = self.model.backbone.embeddings(ids)
        for number, block in enumerate(self.model.backbone.layers):
            x = block(x.flip(1)).flip(1) if number % 2 else block(x)
        out: Tensor = self.model.lm_head(self.model.backbone.norm_f(x))
        return out


@pytest.mark.slow
def test_a_layer_that_reads_from_the_other_end() -> None:
    model, ids = BothWays(mamba_lm()).eval(), token_ids()
    explain = [LayerLatimFlow(model, f"model.backbone.layers.{i}") for i in range(3)]
    given = [each.attribute(ids, (4, 3), None, True) for each in explain]
    returned = [each.attribute(ids, (4, 3)) for each in explain]
    assert close(given[1].flip(1), returned[0]) and close(returned[1].flip(1), given[2])


@pytest.mark.slow
def test_a_compiled_model() -> None:
    model, ids = mamba_lm(), token_ids()
    wanted = LayerLatimFlow(model, BLOCK).attribute(ids, TARGET)
    compiled = torch.compile(model, backend="eager")
    for layer in (BLOCK, compiled.backbone.layers[1]):
        assert close(LayerLatimFlow(compiled, layer).attribute(ids, TARGET), wanted)
    block = model.backbone.layers[1]
    model.backbone.layers[1] = torch.compile(block, backend="eager")
    for layer in (BLOCK, model.backbone.layers[1], block):
        assert close(LayerLatimFlow(model, layer).attribute(ids, TARGET), wanted)
    model.backbone.layers[1] = block
    block.compile(backend="eager")
    assert close(LayerLatimFlow(model, BLOCK).attribute(ids, TARGET), wanted)
