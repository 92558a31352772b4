"""How much of a long input is held at a time: peaks of live memory, without a run of that length.

Every tensor that torch makes is counted from when it is there until it is gone, so that the peak
is the same on every machine.  It is told in sequences of the model's width, 4 bytes each.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from helpers.rules import frozen_flow
from helpers.versions import transformers5
from zoo.mamba import transformers_model

from captum_ssm import (
    EdgeEffects,
    ImplicitAttentionRollout,
    LatimFlow,
    LayerLatimFlow,
    SSMLLMAttribution,
)
from captum_ssm.explain.estimate import Live
from captum_ssm.tracing import record, structure

pytestmark = [transformers5, pytest.mark.slow]
TOKENS, WIDTH, LAYERS = 512, 48, 4


def sequences(call: Callable[[], object]) -> float:
    counted = Live()
    with counted:
        call()
    return counted.peak / (4 * TOKENS * WIDTH)


class Numbers:
    def encode(self, text: str) -> list[int]:
        return [int(number) for number in text.split()]

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


def model(layers: int = LAYERS) -> Any:
    sizes = {"hidden_size": WIDTH, "state_size": 2, "time_step_rank": 2}
    return transformers_model("mamba", num_hidden_layers=layers, **sizes).requires_grad_(False)


def test_a_span_holds_what_one_token_does() -> None:
    """Of each layer three sequences of twice the width: gates, activations and steps.

    In the last one, whose projections are there as well, 16 of the width come on top, and five are
    those of the stream.
    """
    ids, explain = torch.randint(15, (TOKENS,)), SSMLLMAttribution(frozen_flow(model()), Numbers())
    of_one = sequences(lambda: frozen_flow(model()).attribute(ids[None], (-1, 3)))
    options: dict[str, Any] = {"spans": "all", "contrast": "all"}
    of_span = sequences(lambda: explain.attribute(ids[:-64], ids[-64:], **options))
    assert of_one <= (LAYERS * 6 + 16 + 5) * 1.05
    assert of_span <= of_one * 1.1
    # a layer more adds what is kept of it, and little that has few channels
    more = sequences(lambda: frozen_flow(model(LAYERS + 2)).attribute(ids[None], (-1, 3)))
    assert more - of_one <= 2 * 7


@pytest.mark.parametrize(
    ("ask", "options", "rule"),
    [("attribute", {}, "frozen"), ("decompose", {"roles": False}, "centered")],
)
def test_blocks_that_run_again_add_their_stream_alone(
    ask: str, options: dict[str, Any], rule: str
) -> None:
    """Of deep models, whose streams outweigh the graph of a block."""

    def of(layers: int) -> float:
        explain = getattr(LatimFlow(model(layers), rule=rule, recompute=True), ask)
        return sequences(lambda: explain(torch.randint(15, (1, TOKENS)), (-1, 3), **options))

    assert of(36) - of(24) <= 12 * 1.1


@pytest.mark.parametrize(("of", "kept"), [
    (lambda m: LayerLatimFlow(m, "backbone.layers.3.mixer", recompute=True).attribute, 1),
    (lambda m: EdgeEffects(m, recompute=True).attribute, 6),
    (lambda m: EdgeEffects(m, rule="half", recompute=True).attribute, 4),
])  # fmt: skip
def test_inside_a_model_a_block_more_adds_few_streams(of: Any, kept: int) -> None:
    """Of edges what a mixer is given and returns, gradients, and what norms read."""

    def read(attribute: Any) -> None:
        found = attribute(ids, (-1, 3))
        _ = isinstance(found, torch.Tensor) or found.rows([-1])

    ids, methods = torch.randint(15, (1, TOKENS)), [of(model(layers)) for layers in (10, 16)]
    few, many = (sequences(partial(read, each)) for each in methods)
    assert many - few <= 6 * kept * 1.1


def test_a_row_holds_two_sequences_of_each_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mixer's input and output: replays hold nothing more, if no operator is kept."""
    monkeypatch.setattr(record, "_OPERATOR_DIVISOR", 2**60)
    monkeypatch.setattr(structure, "_TESTS", 4)
    ids = torch.randint(15, (1, TOKENS))
    rollouts = (ImplicitAttentionRollout(model(n)) for n in (LAYERS, 3 * LAYERS))
    fewer, more = (sequences(partial(each.attribute, ids)) for each in rollouts)
    assert more - fewer <= 2 * LAYERS * 2.1
