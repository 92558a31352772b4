"""What states hold without who erased it, and of passkeys that are answered or lost."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from captum_ssm import StateMemory
from captum_ssm_bench import EXPERIMENTS, Key, lines, load_bundled
from captum_ssm_bench.experiments.answers.erasers import TAKEN_OUT, held_with
from captum_ssm_bench.experiments.answers.forgetting import MEMORY

ERASERS, PASSKEYS = EXPERIMENTS["erasers"], EXPERIMENTS["forgotten-passkeys"]


def subject_of(experiment: Any, name: str) -> Any:
    return next(each for each in experiment.subjects() if each.name == name)


def test_the_true_change_is_that_of_the_text_without_the_eraser(seed: int) -> None:
    subject = subject_of(ERASERS, "pairs-gated-deltanet")
    model = subject.load(torch.device("cpu"))
    example = ERASERS.example(subject, 1, seed)
    ids, source = example.ids, example.source
    found = ERASERS.measure(model, example, TAKEN_OUT)
    for number, layer in enumerate(StateMemory(model).of(ids)):
        written = layer.held(source)[0, source]
        eraser = int(layer.erased(source, -1)[0].argmax())
        assert eraser > source
        left = []
        for at in range(source + 1, ids.shape[1]):
            rest = [place for place in range(ids.shape[1]) if place != at]
            other = StateMemory(model).of(ids[:, rest])[number]
            left.append(float(other.held(-1)[0, source] / written))
        numbers, true = found[f"layer {number}"], left[eraser - source - 1]
        before = float(layer.held(-1)[0, source] / written)
        assert numbers["held"] == pytest.approx(before, rel=1e-4)
        assert numbers["true"] == pytest.approx(true - before, rel=1e-3, abs=1e-5)
        assert numbers["first"] == float(true == max(left))
        assert numbers["blindly"] == 1 / len(left)
        undone = [
            float(held_with(layer, source, ids.shape[1] - 1, eraser=source + 1 + place))
            for place in range(len(left))
        ]
        assert numbers["undone first"] == float(undone.index(max(undone)) == left.index(max(left)))
        assert numbers["predicted"] == pytest.approx(
            undone[eraser - source - 1] / float(written) - before, rel=1e-3, abs=1e-5
        )


def test_how_well_changes_are_predicted() -> None:
    """R2 of 1, 2, 4 predicted as 1, 2, 3: all but 1 of a spread of 14 / 3."""
    results = []
    for example, (true, predicted) in enumerate(((1.0, 1.0), (2.0, 2.0), (4.0, 3.0))):
        numbers = dict.fromkeys(("held", "first", "undone first", "blindly"), 0.0) | {
            "true": true,
            "true squared": true**2,
            "error squared": (predicted - true) ** 2,
            "predicted": predicted,
        }
        results.append((Key("erasers", "m", *TAKEN_OUT, 0, example), {"layer 0": numbers}))
    (line,) = lines(ERASERS, results)
    assert line.entries["R2"].value == pytest.approx(1 - 3 / 14)


class Knows(nn.Module):
    """A shipped model, that says what is handed to it."""

    def __init__(self, model: nn.Module, said: int) -> None:
        super().__init__()
        self.model, self.said = model, said

    def forward(self, input_ids: torch.Tensor) -> Any:
        logits = self.model(input_ids=input_ids).logits
        return SimpleNamespace(
            logits=logits + 1e3 * nn.functional.one_hot(torch.tensor(self.said), logits.shape[-1])
        )


def test_shares_of_a_digit_and_whether_it_is_answered(seed: int) -> None:
    subject = subject_of(PASSKEYS, "passkey-mamba")
    model = subject.load(torch.device("cpu"))
    example = PASSKEYS.example(subject, 0, seed)
    words = load_bundled("passkey-mamba")[1].tokens(example.ids[0])
    assert words[example.source].isdigit() and len(words) >= 637
    (layer,) = StateMemory(model).of(example.ids)
    right = PASSKEYS.measure(Knows(model, example.digit), example, MEMORY)
    wrong = PASSKEYS.measure(Knows(model, example.digit - 1), example, MEMORY)
    assert {numbers["right"] for numbers in right.values()} == {1.0}
    assert {numbers["right"] for numbers in wrong.values()} == {0.0}
    read = float(layer.read(-1)[0, example.source])
    assert right["read, layer 0"]["share"] == wrong["read, layer 0"]["share"] == pytest.approx(read)
    held = layer.held(-1)[0]
    share = float(held[example.source : example.source + 4].sum() / held.sum())
    assert right["held, layer 0"]["both"] == wrong["held, layer 0"]["lost"] == pytest.approx(share)
