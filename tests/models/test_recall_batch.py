"""Prompts in batches: what cannot be answered is refused in the package's own words."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from captum_ssm.errors import CaptumSSMError, InputError, OptionError
from captum_ssm.models.recall import generate, parse_prompt, with_value
from captum_ssm.models.recall_batch import accuracy, collate, predict


class Echo(torch.nn.Module):
    """Says the last word again, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.rows: list[int] = []

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        self.rows.append(len(input_ids))
        assert bool(attention_mask[:, -1].all())
        return SimpleNamespace(logits=self.scale * torch.nn.functional.one_hot(input_ids, 55))


def test_batches_change_nothing(seed: int) -> None:
    model, examples = Echo(), generate(7, seed)
    whole = predict(model, examples, batch_size=7)
    assert whole.tolist() == [example.tokens[-1] for example in examples]
    assert torch.equal(predict(model, examples, batch_size=3), whole)
    assert model.rows == [7, 3, 3, 1]
    assert accuracy(model, examples) == 0.0  # "the" is no object


EXAMPLE = parse_prompt("anna owns the lamp . ? anna owns the")


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: predict(Echo(), []), InputError, "examples is empty.*at least one"),
        (lambda: accuracy(Echo(), []), InputError, "examples is empty.*at least one"),
        (lambda: collate([]), InputError, "examples is empty.*at least one"),
        (lambda: predict(Echo(), [EXAMPLE], 0), OptionError, "batch_size=0: use 1 or more"),
        (lambda: accuracy(Echo(), [EXAMPLE], -2), OptionError, "batch_size=-2: use 1 or more"),
        (lambda: generate(-1, 0), OptionError, "count=-1: use 0 or more"),
        (lambda: generate(1, 0, 21), OptionError, "n_facts=21: use 1 to 20"),
        (lambda: generate(1, 0, 0), OptionError, "n_facts=0: use 1 to 20"),
        (lambda: with_value(EXAMPLE, 0, "red"), OptionError, "value='red' is no object.*lamp"),
        (lambda: with_value(EXAMPLE, 1, "kite"), OptionError, "fact=1: the prompt has 1"),
        (lambda: with_value(EXAMPLE, -1, "kite"), OptionError, "fact=-1: the prompt has 1"),
        (lambda: parse_prompt(""), InputError, "text='': a prompt must end"),
        (lambda: parse_prompt("? anna owns"), InputError, "a prompt must end"),
        (lambda: parse_prompt("? ? anna owns the"), InputError, "a prompt must end"),
        (lambda: parse_prompt("lamp . ? anna owns the"), InputError, "text has the fact 'lamp .'"),
    ],
)
def test_bad_calls(call: Callable[[], object], error: type[CaptumSSMError], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        call()
    assert isinstance(caught.value, ValueError)
