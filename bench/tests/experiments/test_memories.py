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
from captum_ssm_bench import EXPERIMENTS, Cell, Key, lines, load_bundled
from captum_ssm_bench.experiments.answers.erasers import EXCHANGED, TAKEN_OUT, held_with
from captum_ssm_bench.experiments.answers.forgetting import MEMORY

ERASERS, PASSKEYS = EXPERIMENTS["erasers"], EXPERIMENTS["forgotten-passkeys"]


def subject_of(experiment: Any, name: str) -> Any:
    return next(each for each in experiment.subjects() if each.name == name)


@pytest.mark.parametrize(
    "name", ["chains-mamba2", "pairs-gated-deltanet", "pairs-rwkv", "pairs-griffin"]
)
def test_as_it_was_a_state_holds_what_it_holds(name: str, seed: int) -> None:
    model, _ = load_bundled(name)
    example = ERASERS.example(subject_of(ERASERS, name), 0, seed)
    for layer in StateMemory(model).of(example.ids):
        end = example.ids.shape[1] - 1
        own = held_with(layer, example.source, end, eraser=end, step=end)
        torch.testing.assert_close(own, layer.held(end)[0, example.source], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("cell", [TAKEN_OUT, EXCHANGED], ids=lambda cell: cell.method)
def test_steps_that_read_their_own_token_alone_are_predicted(cell: Cell, seed: int) -> None:
    """The steps of Mamba-2's first layer, whose convolution leaves them out."""
    subject = subject_of(ERASERS, "pairs-mamba2")
    model = subject.load(torch.device("cpu"))
    for index in range(4):
        found = ERASERS.measure(model, ERASERS.example(subject, index, seed), cell)["layer 0"]
        assert found["predicted"] == pytest.approx(found["true"], rel=1e-3, abs=1e-5)
        assert found["true"] > 0 or cell == EXCHANGED


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


def test_shares_that_tell_right_from_wrong() -> None:
    def results(shares: list[float]) -> Any:
        for example, (share, right) in enumerate(zip(shares, (1, 1, 0, 0), strict=True)):
            numbers = {
                "share": share,
                "right": right,
                "wrong": 1 - right,
                "both": share * right,
                "lost": share * (1 - right),
                "share squared": share**2,
            }
            yield Key("forgotten-passkeys", "m", *MEMORY, 0, example), {"read": numbers}

    (line,) = lines(PASSKEYS, results([0.6, 0.6, 0.2, 0.2]))
    assert line.entries["correlation"].value == pytest.approx(1)
    assert line.entries["where right"].value == pytest.approx(0.6)
    assert line.entries["where wrong"].value == pytest.approx(0.2)
    (line,) = lines(PASSKEYS, results([0.1, 0.3, 0.1, 0.3]))
    assert line.entries["correlation"].value == pytest.approx(0, abs=1e-9)
