"""A process that forks while another of its threads explains: its child has nothing of that."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.every_method import FEW, call, close
from helpers.forks import FORKS, in_a_fork, in_another_thread
from helpers.insights_examples import table, table_model
from helpers.snapshots import hooks, process_state
from torch import Tensor, nn
from zoo import architectures

from captum_ssm.insights import Batch

pytestmark = [*FORKS, pytest.mark.slow]


def check(name: str, model: nn.Module, inputs: Tensor, target: Any) -> None:
    wanted = call(name, model, inputs, target)
    before, process = hooks(model), process_state(model)
    held = list(model.parameters()), [dict(vars(module)) for module in model.modules()]

    def work() -> list[Any]:
        added = [key for kind, now in hooks(model).items() for key in now.keys() - before[kind]]
        assert len(added) == 1, "hooks of a thread that is gone"  # one is the test's own
        assert process_state(model) == process
        assert all(a is b for a, b in zip(model.parameters(), held[0], strict=True))
        for module, attributes in zip(model.modules(), held[1], strict=True):
            assert all(vars(module)[key] is value for key, value in attributes.items())
        return [x.numpy() for x in call(name, model, inputs, target)]

    with in_another_thread(model, lambda: call(name, model, inputs, target)) as found:
        forked = in_a_fork(work)
    assert close([torch.as_tensor(x) for x in forked], wanted)
    assert close(found[0], wanted)
    assert hooks(model) == before
    assert process_state(model) == process


@pytest.mark.parametrize(("make", "name"), FEW)
def test_every_method(make: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make(monkeypatch)
    check(name, case.model, case.inputs, case.target["target"])


@pytest.mark.parametrize("name", ["LatimFlow", "MambaAttribution"])
def test_checkpointing_is_the_models_own_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = architectures.jamba(monkeypatch)
    case.model.train()
    case.model.gradient_checkpointing_enable({"use_reentrant": True})
    check(name, case.model, case.inputs, case.target["target"])


def test_parameters_made_in_inference_mode_are_their_own_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with torch.inference_mode():
        case = architectures.mamba(monkeypatch)
    check("LatimFlow", case.model, case.inputs.clone(), case.target["target"])


def test_examples_are_looked_through() -> None:
    model, batch = table_model(), Batch(torch.rand(2, 3), labels=None)
    other = table(table_model(), [batch])
    with in_another_thread(model, table(model, [batch]).visualize) as found:
        assert in_a_fork(lambda: len(other.visualize())) == 2
    assert len(found[0]) == 2
