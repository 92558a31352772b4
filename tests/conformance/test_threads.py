"""Several threads that explain one model at once find what each would find alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from helpers.every_method import FEW, call, close
from helpers.snapshots import Snapshot, process_state
from torch import Tensor
from zoo import architectures

from captum_ssm import LatimFlow

pytestmark = pytest.mark.slow


def at_once(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    ready, found = threading.Barrier(len(calls)), [None] * len(calls)

    def work(index: int) -> None:
        ready.wait(60)
        try:
            found[index] = calls[index]()
        except BaseException as error:
            found[index] = error

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    errors = [each for each in found if isinstance(each, BaseException)]
    if errors:
        raise errors[0]
    return found


def other(inputs: Tensor) -> Tensor:
    if inputs.dim() == 4:
        return torch.randn_like(inputs)
    return torch.cat([inputs.flip(1), inputs], 1)


@pytest.mark.parametrize(("make", "name"), FEW)
def test_one_model(make: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make(monkeypatch)
    target = case.target["target"]
    inputs = [case.inputs, other(case.inputs)]
    wanted = [call(name, case.model, x, target) for x in inputs]
    before, process = Snapshot(case.model), process_state(case.model)

    def several(x: Tensor) -> list[list[Tensor]]:
        return [call(name, case.model, x, target) for _ in range(3)]

    found = at_once([lambda x=x: several(x) for x in inputs])  # type: ignore[misc]
    for runs, expected in zip(found, wanted, strict=True):
        assert all(close(run, expected) for run in runs)
    before.check()
    assert process_state(case.model) == process


def test_methods_that_differ_in_what_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """One asks for no checkpoints, the other for those that have a graph inside."""
    case = architectures.jamba(monkeypatch)
    case.model.train()
    case.model.gradient_checkpointing_enable({"use_reentrant": True})
    given = case.inputs, case.target["target"]
    names = ["LatimFlow", "MambaAttribution"] * 2
    wanted = [call(name, case.model, *given) for name in names]
    before = Snapshot(case.model)
    held = [vars(m).get("_gradient_checkpointing_func") for m in case.model.modules()]

    def several(name: str) -> list[list[Tensor]]:
        return [call(name, case.model, *given) for _ in range(4)]

    found = at_once([lambda n=name: several(n) for name in names])  # type: ignore[misc]
    for runs, expected in zip(found, wanted, strict=True):
        assert all(close(run, expected) for run in runs)
    before.check()
    assert held == [vars(m).get("_gradient_checkpointing_func") for m in case.model.modules()]


def test_embeddings_for_a_model_that_takes_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    case = architectures.mamba_ssm(monkeypatch)
    (layer,) = (m for m in case.model.modules() if isinstance(m, torch.nn.Embedding))
    inputs = [layer(x).detach() for x in (case.inputs, other(case.inputs))]
    target = case.target["target"]
    wanted = [call("MambaAttribution", case.model, x, target) for x in inputs]

    def several(x: Tensor) -> list[list[Tensor]]:
        return [call("MambaAttribution", case.model, x, target) for _ in range(4)]

    found = at_once([lambda x=x: several(x) for x in inputs])  # type: ignore[misc]
    for runs, expected in zip(found, wanted, strict=True):
        assert all(close(run, expected) for run in runs)


def test_blocks_that_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread has its own in place of the blocks' forward."""
    case = architectures.mamba_ssm(monkeypatch)
    given = case.inputs, case.target["target"]
    (wanted,) = call("LatimFlow", case.model, *given)

    def several(again: bool) -> list[Tensor]:
        flow = LatimFlow(case.model, recompute=again)
        return [flow.attribute(*given) for _ in range(6)]

    for runs in at_once([lambda a=a: several(a) for a in (True, False, True)]):  # type: ignore[misc]
        assert all(torch.allclose(run, wanted, atol=1e-6) for run in runs)
    assert not any("forward" in vars(module) for module in case.model.modules())
