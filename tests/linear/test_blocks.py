"""Blocks that run again in backward passes give what a whole graph gives, in the memory of one."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from helpers.marks import slow_but
from helpers.rules import frozen_flow
from oracles import relative_error
from torch import Tensor, nn
from zoo import architectures, networks
from zoo.architectures import Case
from zoo.mamba import transformers_model

from captum_ssm import (
    EdgeEffects,
    Feature,
    LatimFlow,
    LayerLatimFlow,
    MambaLRP,
    NeuronLatimFlow,
    SSMLLMAttribution,
    attribution_graph,
)
from captum_ssm.attr.engine.decompose import Decomposition
from captum_ssm.errors import NotLinearError, OptionError
from captum_ssm.linear import linearized
from captum_ssm.linear.blocks import lists_of_blocks
from captum_ssm.models import load_bundled
from captum_ssm.tracing import find_mixers

RULES = ("frozen", "half", "centered", "balanced")
QUICK = ("mamba_ssm",)


def make(name: str, monkeypatch: pytest.MonkeyPatch) -> Case:
    in_zoo = name in architectures.ZOO
    return architectures.ZOO[name](monkeypatch) if in_zoo else networks.make(name, monkeypatch)


def target_of(case: Case) -> Any:
    return 1 if networks.own_output(case).dim() == 2 else (-1, 3)


def parts_of(found: Decomposition) -> dict[str, Tensor]:
    layers = {f"stream {i}": x for i, x in enumerate(found.streams)}
    layers |= {f"mixer {i}": x for i, x in enumerate(found.mixers)}
    roles: dict[Any, Tensor] = {**(found.roles or {}), "virtual": found.virtual}
    return {"inputs": found.inputs, **layers, **roles, **found.biases}


def check_same(found: dict[str, Tensor], expected: dict[str, Tensor], limit: float = 1e-5) -> None:
    size = max(float(x.abs().max()) for x in expected.values())
    assert found.keys() == expected.keys()
    for part, value in found.items():
        assert (value - expected[part]).abs().max() <= limit * size, part


@pytest.mark.parametrize("name", slow_but(QUICK, networks.NETWORKS))
def test_it_equals_the_whole_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By token, layer, role and constant, for each example of a batch."""
    case = make(name, monkeypatch)
    for rule in RULES:
        whole, found = (
            LatimFlow(case.model, rule=rule, recompute=again).decompose(
                case.inputs, target_of(case)
            )
            for again in (False, True)
        )
        check_same(parts_of(found), parts_of(whole))
    assert not any("forward" in vars(module) for module in case.model.modules())


INSIDE = ("mamba_ssm", "mamba2", "bamba", "qwen3_next", "falcon_h1", "rwkv7", "vim")


@pytest.mark.parametrize("name", slow_but(QUICK, INSIDE))
def test_layers_neurons_and_graphs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between blocks, and inside a block, which then keeps its graph."""
    case = make(name, monkeypatch)
    model, target, mixers = case.model, target_of(case), find_mixers(case.model)
    block, mixer = list(lists_of_blocks(model, mixers).values())[1], mixers[1].name
    for layer, at_input in ((block, False), (block, True), (mixer, False), (f"{mixer}.heads", 0)):
        for kind, asked in ((LayerLatimFlow, target), (NeuronLatimFlow, some_of)):
            given = case.inputs, asked, None, bool(at_input)
            whole, found = (kind(model, layer, recompute=again) for again in (False, True))
            check_same(parts_of(found.decompose(*given)), parts_of(whole.decompose(*given)))
    for nodes in (None, [Feature(block, 2), mixers[0].name]):
        graph = partial(attribution_graph, model, case.inputs[:1], target, nodes=nodes)
        whole, found = (graph(recompute=again).edges for again in (False, True))
        assert relative_error(found, whole) <= 1e-5
    with pytest.raises(OptionError, match="each block contains one of the layers"):
        graph(nodes=[each.name for each in mixers], recompute=True)


def some_of(x: Any) -> Tensor:
    number: Tensor = (x[0] if isinstance(x, tuple) else x).flatten(1)[:, 3::7].sum(1)
    return number


def test_a_layer_whose_input_enters_several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make("zamba with attention", monkeypatch)
    layer = find_mixers(case.model)[1].name
    for kind, asked in ((LayerLatimFlow, (-1, 3)), (NeuronLatimFlow, some_of)):
        whole, found = (kind(case.model, layer, recompute=again) for again in (False, True))
        expected = whole.attribute(case.inputs, asked)
        assert relative_error(found.attribute(case.inputs, asked), expected) <= 1e-5
    with pytest.raises(OptionError, match="cannot separate the streams"):
        found.decompose(case.inputs, asked)


@pytest.mark.parametrize("rule", [None, "balanced"])
@pytest.mark.parametrize("name", slow_but(QUICK, (*INSIDE, "zamba2", "mamba2_ssm")))
def test_edges(name: str, rule: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make(name, monkeypatch)
    methods = (EdgeEffects(case.model, rule=rule, recompute=again) for again in (False, True))
    whole, found = (method.attribute(case.inputs, target_of(case)) for method in methods)
    assert found.first_order == whole.first_order
    for one, other in zip(found.layers, whole.layers, strict=True):
        assert relative_error(one.matrix(), other.matrix()) <= (2e-5 if rule else 1e-6)
        assert not one.matrix().requires_grad


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("name", ["mamba_ssm", "mamba2_ssm", "rwkv7", "zamba with attention"])
def test_each_stream_sums_to_the_output(
    name: str, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the constants behind it, where tensors enter several blocks, or are read before."""
    case = make(name, monkeypatch)
    with linearized(case.model, case.inputs) as network:
        case.model(case.inputs)
    mixers = [step.name for step in network.steps]
    found = frozen_flow(case.model, recompute=again).decompose(case.inputs, (-1, 3))
    blocks = [".".join(name.split(".")[: 3 if name.count(".") > 2 else 2]) for name in mixers]
    left = dict(found.biases)
    for place, (block, stream) in enumerate(zip(blocks, found.streams, strict=True)):
        if block not in blocks[:place]:
            behind = sum(left.values(), torch.zeros_like(found.output))
            assert (stream.sum(1) + behind - found.output).abs().max() <= 1e-5
        for name in [name for name in left if f"{name}.".startswith(f"{block}.")]:
            if place + 1 == len(blocks) or blocks[place + 1] != block:
                del left[name]


def test_padding_and_several_targets() -> None:
    model = transformers_model("mamba")
    ids = torch.randint(15, (2, 9))
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, :3] = 0
    whole, again = (MambaLRP(model, recompute=recompute) for recompute in (False, True))

    def forward(ids: Tensor, mask: Tensor) -> Any:
        return model(ids, attention_mask=mask)

    targets = [(-1, 3), (-2, 5)]
    found, expected = (
        type(method)(forward, model, recompute=method.recompute).attribute_each(ids, targets, mask)
        for method in (again, whole)
    )
    assert relative_error(found, expected) <= 1e-6 and not found[:, 1, :3].any()
    for rule in (None, "half"):
        edges = (EdgeEffects(forward, model, rule=rule, recompute=x) for x in (True, False))
        found, expected = (each.attribute(ids, targets, mask).matrix() for each in edges)
        assert relative_error(found, expected) <= 1e-6 and not found[1, :, :3].any()


def test_answers() -> None:
    model, vocabulary = load_bundled()
    prompt = "anna owns the lamp . bob owns the kite . ? anna owns"
    found = [
        SSMLLMAttribution(frozen_flow(model, recompute=again), vocabulary).attribute(
            prompt, " the lamp", spans="all"
        )
        for again in (False, True)
    ]
    assert relative_error(found[1].token_attr, found[0].token_attr) <= 1e-6


def test_a_hook_of_the_users_changes_an_output_once() -> None:
    model = transformers_model("mamba")
    ids = torch.randint(15, (1, 7))
    hook = model.backbone.layers[0].register_forward_hook(lambda m, args, out: 2 * out)
    found = [frozen_flow(model, recompute=again).attribute(ids, (-1, 3)) for again in (False, True)]
    hook.remove()
    assert relative_error(found[1], found[0]) <= 1e-6
    assert relative_error(frozen_flow(model).attribute(ids, (-1, 3)), found[0]) > 1e-3


class Block(nn.Module):
    """A mixer in a residual stream, with something after it."""

    def __init__(self, mixer: nn.Module, after: Any) -> None:
        super().__init__()
        self.mixer, self.after = mixer, after

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.after(x, self.mixer(x))
        return result


class Model(nn.Module):
    def __init__(self, after: Any, mixers: int = 2) -> None:
        super().__init__()
        whole = transformers_model("mamba", num_hidden_layers=mixers).backbone
        self.embed = whole.embeddings
        self.layers = nn.ModuleList(Block(layer.mixer, after) for layer in whole.layers)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x.sum(-1)


def in_place(x: Tensor, y: Tensor) -> Tensor:
    x += y
    return x + 0


IDS = torch.tensor([[1, 5, 3, 2]])


@pytest.mark.parametrize("reads", [False, True])
def test_an_output_that_two_later_blocks_read_or_none(reads: bool) -> None:
    model = Model(torch.add, mixers=3)
    first, second, third = model.layers

    def forward(ids: Tensor) -> Tensor:
        x = first(model.embed(ids))
        y = second(x)
        found: Tensor = third(y + 2 * x if reads else x)
        return found.sum(-1)

    model.forward = forward  # type: ignore[method-assign]
    found = [frozen_flow(model, recompute=again).decompose(IDS, -1) for again in (False, True)]
    check_same(parts_of(found[1]), parts_of(found[0]), 1e-6)


@pytest.mark.parametrize(("after", "complaint"), [
    (in_place, "is changed in place"),
    (lambda x, y: torch.relu(x + y), "ends in an activation"),
])  # fmt: skip
def test_blocks_that_cannot_run_again(after: Any, complaint: str) -> None:
    model = Model(after)
    assert frozen_flow(model).attribute(IDS, -1).shape == IDS.shape
    with pytest.raises(NotLinearError, match=f"odule 'layers.*{complaint}"):
        frozen_flow(model, recompute=True).attribute(IDS, -1)


def test_models_without_a_list_of_blocks() -> None:
    model = Model(torch.add)
    model.layers = nn.Sequential(*model.layers)
    model.forward = lambda ids: model.layers(model.embed(ids)).sum(-1)  # type: ignore[method-assign]
    with pytest.raises(OptionError, match=r"no nn\.ModuleList of Model"):
        frozen_flow(model, recompute=True).attribute(IDS, -1)


def test_mixers_run_without_rules_and_again_with_them() -> None:
    """Twice each, the second time from the last to the first."""
    model, called = transformers_model("mamba"), []
    for mixer in find_mixers(model):
        mixer.module.register_forward_pre_hook(
            lambda module, args, name=mixer.name: called.append((name, torch.is_grad_enabled()))
        )
    frozen_flow(model, recompute=True).attribute(torch.randint(15, (1, 7)), (-1, 3), verify=False)
    names = [mixer.name for mixer in find_mixers(model)]
    assert called == [(name, False) for name in names] + [(name, True) for name in names[::-1]]


def fill_at_first(module: nn.Module) -> Any:
    """Run out of memory when a module is called for the first time."""
    calls: list[int] = []

    def fill(module: nn.Module, args: Any) -> None:
        calls.append(len(calls))
        if calls == [0]:
            raise torch.cuda.OutOfMemoryError("no room")

    return module.register_forward_pre_hook(fill)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("explain", [
    lambda given, **more: LatimFlow(given[0], **more).attribute(*given[1:]),
    lambda given, **more: LayerLatimFlow(given[0], "backbone.norm_f", **more).attribute(*given[1:]),
    lambda given, **more: attribution_graph(*given, **more).edges,
    lambda given, **more: EdgeEffects(given[0], **more).attribute(*given[1:]).matrix(),
])  # fmt: skip
def test_where_memory_runs_out_blocks_run_again(explain: Any) -> None:
    model: Any = transformers_model("mamba", num_hidden_layers=2).double()
    given, full = (model, torch.randint(15, (1, 9)), (-1, 3)), model.backbone.norm_f
    with fill_at_first(full), pytest.warns(UserWarning, match="recompute=True"):
        found = explain(given)
    assert torch.equal(found, explain(given, recompute=True))
    with fill_at_first(full), pytest.raises(torch.cuda.OutOfMemoryError, match="no room"):
        explain(given, recompute=False)


def test_where_blocks_cannot_run_again_the_full_memory_is_said() -> None:
    """Of one mixer, which no list of blocks contains."""
    model = nn.Sequential(transformers_model("mamba", num_hidden_layers=1).backbone.layers[0])
    with (
        fill_at_first(model[0].norm),
        pytest.raises(torch.cuda.OutOfMemoryError, match="no room") as caught,
    ):
        LatimFlow(model).attribute(torch.randn(1, 5, model[0].norm.weight.numel()), (-1, 3))
    assert isinstance(caught.value.__cause__, OptionError)
