"""Checks that are noted on a device and read together, at once on a processor."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from helpers.counts import Counts
from helpers.stand_in import StandIn
from torch import Tensor
from zoo.mamba import transformers_model

from captum_ssm import ImplicitAttentionRollout, LatimFlow
from captum_ssm.errors import NonFiniteError
from captum_ssm.operators.kernels.truths import (
    all_finite,
    at_most,
    finite_together,
    holds,
    is_doubted,
    nonzero_range,
    read_together,
)


@pytest.fixture
def device() -> Iterator[StandIn]:
    with StandIn() as found:
        yield found


def checked(*numbers: float) -> list[bool]:
    """What each check says, of numbers on the device."""
    x = torch.tensor(numbers, device="cuda")
    return [holds((x > 0).all()), at_most(x.max(), 9.0), all_finite(x), finite_together([x, -x])]


def test_all_checks_are_one_wait(device: StandIn) -> None:
    device.counts = Counts()
    assert read_together(lambda: checked(1.0, 2.0)) == [True] * 4
    assert device.counts.questions == 1


@pytest.mark.parametrize("number", [-1.0, 10.0, float("inf"), float("nan")])
def test_what_does_not_hold_is_answered_at_once_the_second_time(
    device: StandIn, number: float
) -> None:
    seen = []

    def call() -> list[bool]:
        seen.append(is_doubted())
        return checked(1.0, number)

    assert read_together(call) == checked(1.0, number) != [True] * 4
    assert seen == [False, True]
    assert not is_doubted()


def test_an_error_that_follows_from_what_does_not_hold_gives_way(device: StandIn) -> None:
    def call() -> None:
        if not checked(-1.0)[0]:
            raise ValueError("what is wrong")
        raise KeyError("what came of it")

    with pytest.raises(ValueError, match="what is wrong"):
        read_together(call)


@pytest.mark.slow
@pytest.mark.parametrize("method", [LatimFlow, ImplicitAttentionRollout])
def test_a_model_that_is_not_finite_is_refused_in_the_same_words(
    device: StandIn, method: type
) -> None:
    model, ids = transformers_model("mamba"), torch.arange(6)[None]
    with torch.no_grad():
        model.backbone.layers[1].mixer.A_log[0] = torch.nan
    target = {"target": (-1, 3)} if method is LatimFlow else {}

    def said() -> str:
        with pytest.raises(NonFiniteError) as caught:
            method(model).attribute(ids.to(model.lm_head.weight.device), **target)
        return str(caught.value)

    wanted = said()
    model.to("cuda")
    assert said() == wanted


def weights(*tokens: int) -> Tensor:
    return torch.zeros(2, 6, device="cuda").index_fill(1, torch.tensor(tokens, device="cuda"), 1)


#: Tokens with weights, layer by layer; those that are reached; and how often the device is asked.
REACHED = [
    ([(3,), (1, 3), (0, 2), (0, 1)], [(3, 4), (1, 4), (0, 4), (0, 4)], 3),
    # a mixer that lets nothing through to its own token does not say that none does
    ([(3,), (1,), (0, 3)], [(3, 4), (1, 2), (0, 4)], 3),
    ([(3,), (1, 4), (0, 5)], [(3, 4), (1, 5), (0, 6)], None),
    ([(3,), (3,), (2, 5)], [(3, 4), (3, 4), (2, 6)], None),
]


@pytest.mark.parametrize(("tokens", "wanted", "questions"), REACHED)
def test_tokens_that_are_reached(
    device: StandIn,
    tokens: list[tuple[int, ...]],
    wanted: list[tuple[int, int]],
    questions: int | None,
) -> None:
    rows = [weights(*some) for some in tokens]
    device.counts = Counts()
    found = read_together(lambda: [nonzero_range(row) for row in rows])
    assert found == [range(*ends) for ends in wanted]
    assert questions in (None, device.counts.questions)
    if questions is None:  # a processor is asked each time
        assert [nonzero_range(row.cpu()) for row in rows] == found
