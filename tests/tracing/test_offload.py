"""Models whose weights accelerate brings in for each forward call: explained as if they stayed."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import oracles
import pytest
import torch
from torch import Tensor, nn
from zoo.architectures import ZOO, Case, every, explain
from zoo.mamba import transformers_model

from captum_ssm import LatimALTI, LatimFlow, LatimLogit, MambaAttribution, register_mixer, trace
from captum_ssm.errors import AdapterError, WeightsError
from captum_ssm.tracing import find_mixers

pytestmark = pytest.mark.slow

accelerate = pytest.importorskip("accelerate")

SAME = 1e-6
CPU = torch.device("cpu")


@pytest.fixture
def case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Case:
    return ZOO[request.param](monkeypatch)


def blocks(model: nn.Module) -> list[str]:
    return [type(block).__name__ for mixer in find_mixers(model) for block in mixer.blocks]


def offloaded(model: nn.Module, **options: Any) -> Any:
    return accelerate.cpu_offload(copy.deepcopy(model), execution_device=CPU, **options)


class Held:
    """Which of the mixers' weights are absent, and the forwards that bring them in.

    Others may be in memory: where images are laid out, a run is stopped before the first block,
    and the next run takes away what it left.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.mixers = nn.ModuleList(mixer.module for mixer in find_mixers(model))
        self.absent = [name for name, p in self.mixers.named_parameters() if p.is_meta]
        self.attributes = [dict(vars(module)) for module in model.modules()]
        assert self.absent

    def check(self) -> None:
        assert [name for name, p in self.mixers.named_parameters() if p.is_meta] == self.absent
        for module, before in zip(self.model.modules(), self.attributes, strict=True):
            now = vars(module)
            assert set(now) == set(before)
            for name in ("forward", "_old_forward", "_hf_hook"):
                assert now.get(name) is before.get(name)


# --- all architectures ---------------------------------------------------------------------------


@every()
def test_offloaded_by_blocks(case: Case) -> None:
    expected = explain(case.model, case)
    model = offloaded(case.model, preload_module_classes=blocks(case.model))
    held = Held(model)
    assert all(p.is_meta for mixer in find_mixers(model) for p in mixer.module.parameters())
    assert expected.difference(explain(model, case)) <= SAME
    held.check()


@pytest.mark.parametrize("method", [LatimFlow, LatimALTI, LatimLogit])
@pytest.mark.parametrize("case", ["rwkv", "recurrent_gemma", "gpt_neox"], indirect=True)
def test_blocks_that_go_on_after_their_mixer(case: Case, method: Any) -> None:
    expected = method(case.model).attribute(case.inputs, (-1, 3))
    model = offloaded(case.model, preload_module_classes=blocks(case.model))
    held = Held(model)
    found = method(model).attribute(case.inputs, (-1, 3))
    assert oracles.relative_error(found, expected) <= SAME
    held.check()


# --- one of them ---------------------------------------------------------------------------------


def ids() -> Tensor:
    return torch.randint(19, (2, 6))


def model_and_matrices() -> tuple[Any, Tensor, list[Tensor]]:
    model, tokens = transformers_model("mamba", use_bias=True), ids()
    with torch.no_grad(), trace(model) as t:
        model(tokens)
    return model, tokens, [layer.operator.dense(None) for layer in t.layers]


def check(model: Any, tokens: Tensor, matrices: list[Tensor]) -> None:
    with torch.no_grad(), trace(model) as t:
        model(tokens)
        assert all(layer.reconstruction_error() <= 1e-5 for layer in t.layers)
    for layer, wanted in zip(t.layers, matrices, strict=True):
        assert layer.reconstruction_error() <= 1e-5
        assert oracles.relative_error(layer.operator.dense(None), wanted) <= SAME


def test_offloaded_to_a_disk(tmp_path: Path) -> None:
    model, tokens, matrices = model_and_matrices()
    check(accelerate.disk_offload(model, str(tmp_path), execution_device=CPU), tokens, matrices)


class Weights(dict[str, Tensor]):
    def __deepcopy__(self, memo: Any) -> Any:
        raise AssertionError("the weights of the whole model were copied")


@pytest.mark.parametrize("method", [LatimFlow, LatimALTI, MambaAttribution])
def test_half_precision_copies_no_whole_model(method: Any) -> None:
    model, tokens = transformers_model("mamba").bfloat16(), ids()
    expected = method(model).attribute(tokens, (-1, 3))
    weights = Weights({name: tensor.clone() for name, tensor in model.state_dict().items()})
    accelerate.cpu_offload(model, execution_device=CPU, state_dict=weights)
    found = method(model).attribute(tokens, (-1, 3))
    assert oracles.relative_error(found, expected) <= SAME


def test_hooks_are_back_after_an_error() -> None:
    def fail(module: Any, call: Any) -> Any:
        assert not module.in_proj.weight.is_meta
        raise ZeroDivisionError

    model, tokens, _ = model_and_matrices()
    register_mixer(type(model.backbone.layers[0].mixer), fail)
    accelerate.cpu_offload(model, execution_device=CPU)
    held = Held(model)
    for operators in (False, True):
        with pytest.raises(AdapterError, match="fail raised ZeroDivisionError"):
            with torch.no_grad(), trace(model, operators=operators) as t:
                model(tokens)
            t.layers[0].linear  # noqa: B018
        held.check()


def test_weights_that_nobody_brings_in_are_refused() -> None:
    """A linear layer with weights on the meta device returns arbitrary numbers."""
    model, tokens, _ = model_and_matrices()
    with torch.no_grad(), trace(model, operators=False) as t:
        model(tokens)
    model.backbone.layers[1].mixer.out_proj.to("meta")
    t.layers[0].verify()
    with pytest.raises(WeightsError, match=r"layers\.1\.mixer'.*'out_proj\.weight'.*accelerate"):
        t.layers[1].linear  # noqa: B018
