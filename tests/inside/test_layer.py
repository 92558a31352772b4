"""What each element of an activation adds to an output."""

from __future__ import annotations

from typing import Any

import oracles
import pytest
import torch
from helpers.activations import blocks_of, own
from helpers.frozen_networks import NETWORKS
from helpers.marks import slow_but
from helpers.rules import frozen_flow, frozen_layer, frozen_neuron
from helpers.versions import not_in_4, transformers5
from oracles import frozen_network as frozen
from torch import Tensor, nn
from zoo.adapters import ADAPTERS
from zoo.small import WIDTH, classifier, mamba_lm, token_ids
from zoo.wrapped import never_rounded

from captum_ssm import LayerLatimFlow, LayerMambaLRP
from captum_ssm.errors import LayerError, OptionError, TargetError

METHODS = pytest.mark.parametrize("method", [LayerLatimFlow, LayerMambaLRP])
TARGET = (-1, 3)
BLOCK = "backbone.layers.1"
EXACT = 1e-6


def close(found: Tensor, wanted: Tensor, limit: float = 1e-5) -> bool:
    return oracles.relative_error(found.double(), wanted.double()) <= limit


@transformers5
@pytest.mark.parametrize("rule", ["frozen", "half"])
@pytest.mark.slow
@pytest.mark.parametrize("network", NETWORKS)
def test_relevance_is_that_of_the_matrices_behind_a_block(network: Any, rule: Any) -> None:
    model, layers, norms, attentions, final = network()
    model.double()
    ids, target = torch.randint(15, (2, 6)), (4, 3)
    blocks = frozen.blocks(model)
    with never_rounded():
        found = [
            LayerLatimFlow(model, list(blocks)).attribute(ids, target, None, at_input, rule=rule)
            for at_input in (True, False)
        ]
        for example, row in enumerate(ids):
            maps, head, seen = frozen.matrices(
                model, layers, norms, attentions, final, row, rule == "half"
            )
            streams = [seen[norm] for norm in norms[:: len(norms) // len(blocks)]]
            each = len(maps) // len(blocks)
            for place, stream in enumerate([*streams, seen[final]]):
                behind = frozen.before(frozen.of_logit(model, head, target), maps[place * each :])
                if place < len(blocks):
                    assert close(found[0][place][example], behind * stream, EXACT)
                if place:
                    assert close(found[1][place - 1][example], behind * stream, EXACT)


def test_what_passes_a_mixer_by_is_the_stream_before_it() -> None:
    model, ids = mamba_lm(use_bias=True), token_ids()
    found = frozen_layer(model, f"{BLOCK}.mixer").decompose(ids, TARGET)
    assert found.delta.abs().max() <= 1e-5 * found.inputs.abs().sum()
    without = {name: bias for name, bias in found.biases.items() if f"{BLOCK}.mixer" in name}
    assert not without and found.virtual.abs().min() > 0
    assert found.past is not None and found.past.shape == (2, 11, WIDTH)
    assert close(found.past.flatten(1).sum(1), found.virtual, 1e-4)
    in_parts = frozen_layer(model, f"{BLOCK}.mixer").decompose(ids, TARGET, internal_batch_size=1)
    assert in_parts.past is not None and close(in_parts.past, found.past)
    explain = frozen_layer(model, f"{BLOCK}.mixer")
    relevance, delta = explain.attribute(ids, TARGET, return_convergence_delta=True)
    assert close(delta, found.virtual, 1e-4)
    again = explain.compute_convergence_delta(2 * relevance, ids, TARGET)
    assert close(again, found.virtual - found.inputs.flatten(1).sum(1), 1e-4)


@pytest.mark.slow
@METHODS
def test_forms_of_inputs(method: Any) -> None:
    model, ids = mamba_lm(), token_ids(3)
    explain = method(model, BLOCK)
    wanted = explain.attribute(ids, TARGET)
    assert wanted.shape == (3, 11, WIDTH) and not wanted.requires_grad
    embedded = model.get_input_embeddings()(ids).detach()
    by_embeddings = method(lambda x: model(inputs_embeds=x).logits, BLOCK, model)
    forms = {
        "tuple": explain.attribute((ids,), TARGET),
        "embeddings": by_embeddings.attribute(embedded, TARGET),
        "in parts": explain.attribute(ids, TARGET, internal_batch_size=2),
        "module": method(model, model.backbone.layers[1]).attribute(ids, TARGET),
        "wrapped": method(lambda x: model(x).logits, BLOCK, model).attribute(ids, TARGET),
        "alone": torch.cat([explain.attribute(row[None], TARGET) for row in ids]),
        "without gradients": torch.no_grad()(explain.attribute)(ids, TARGET),
    }
    for name, found in forms.items():
        assert close(found, wanted), name
    targets = [(-1, 3), (2, 4), (0, 0)]
    each = explain.attribute(ids, targets, internal_batch_size=2)
    for row, target, found in zip(ids, targets, each, strict=True):
        assert close(found, explain.attribute(row[None], target)[0])


@pytest.mark.slow
def test_a_list_of_layers() -> None:
    model, ids = mamba_lm(), token_ids()
    names = ["backbone.layers.2.mixer.heads", model.backbone.layers[0], "backbone.embeddings"]
    explain = frozen_layer(model, names)
    found, deltas = explain.attribute(ids, TARGET, return_convergence_delta=True)
    for name, relevance, delta in zip(names, found, deltas, strict=True):
        wanted = frozen_layer(model, name).decompose(ids, TARGET)
        assert close(relevance, wanted.inputs) and close(delta, wanted.virtual + wanted.delta, 1e-4)
    with pytest.raises(LayerError, match="list"):
        explain.decompose(ids, TARGET)


class Apart(nn.Module):
    def __init__(self, block: Any) -> None:
        super().__init__()
        self.norm, self.mixer = block.norm, block.mixer

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
        return self.mixer(self.norm(x)), {"stream": x, "size": x.shape[1]}


class ModelApart(nn.Module):
    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.model, self.dtype = model, dtype
        self.blocks = nn.ModuleList(Apart(block) for block in model.backbone.layers)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.model.backbone.embeddings(ids).to(self.dtype)
        for block in self.blocks:
            mixed, beside = block(x.to(torch.float32))
            assert mixed.dtype == torch.float32 and beside["size"] == ids.shape[1]
            x = mixed.to(self.dtype) + beside["stream"].to(self.dtype)
        out: Tensor = self.model.lm_head(self.model.backbone.norm_f(x.float()))
        return out


@pytest.mark.slow
def test_several_tensors() -> None:
    model, ids = ModelApart(mamba_lm(), torch.float64).eval(), token_ids()
    explain = frozen_layer(model, "blocks.1")
    found, delta = explain.attribute(ids, TARGET, return_convergence_delta=True)
    mixed, stream = found
    assert mixed.shape == stream.shape == (2, 11, WIDTH)
    after, before = (
        frozen_layer(model, "blocks.2").attribute(ids, TARGET, None, True),
        frozen_layer(model, "blocks.1.mixer").attribute(ids, TARGET),
    )
    assert close(mixed + stream, after) and close(mixed, before)
    assert delta.abs().max() <= 1e-5 * mixed.abs().sum()
    assert explain.compute_convergence_delta(found, ids, TARGET).abs().max() <= 1e-4
    neuron = frozen_neuron(model, "blocks.1")
    found = neuron.attribute(ids, lambda both: both[0][:, 7, 2])
    assert close(found, frozen_neuron(model, "blocks.1.mixer").attribute(ids, (7, 2)), 1e-4)
    with pytest.raises(TargetError, match=r"several tensors\. Pass a function that"):
        neuron.attribute(ids, (7, 2))


def test_outputs_of_transformers() -> None:
    model, ids = mamba_lm(), token_ids()
    found = frozen_layer(model, "backbone").attribute(ids, TARGET)
    assert close(found, frozen_layer(model, "backbone.norm_f").attribute(ids, TARGET))
    whole = frozen_layer(model, "").attribute(ids, TARGET)
    assert whole.shape == (2, 11, 19)
    assert close(whole[:, -1, 3], model(ids).logits[:, -1, 3]) and whole.count_nonzero() == 2


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", slow_but(("mamba",), ("mamba", "zamba2", "gpt_neox", "gla")))
def test_padding_has_no_part(name: str, side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    not_in_4(name, "zamba2")
    case = ADAPTERS[name](monkeypatch)
    block = blocks_of(case)[0]
    mask = torch.ones_like(case.inputs)
    real = slice(3, None) if side == "left" else slice(None, -3)
    mask[0, :3] = 0
    if side == "right":
        mask = mask.flip(1)
    forward = lambda x, m: case.model(x, attention_mask=m, use_cache=False)  # noqa: E731
    explain = frozen_layer(forward, block, case.model)
    target = (8 if side == "left" else 5, 3)
    found = explain.attribute(case.inputs, target, mask)
    alone = explain.attribute(case.inputs[:1, real], (5, 3), mask[:1, real])
    if isinstance(found, tuple):  # a block that passes something on beside the stream
        found, alone = torch.cat(found, -1), torch.cat(alone, -1)
    assert close(found[:1, real], alone, 1e-4)
    padded = mask[0] == 0
    assert not found[0, padded].any() and found[1, : target[0]].any()


@pytest.mark.slow
@pytest.mark.parametrize("layer", [BLOCK, f"{BLOCK}.mixer.heads"])
@pytest.mark.parametrize("rule", ["frozen", "half", "centered", "balanced"])
@never_rounded()
def test_baselines_are_the_layers_own(layer: str, rule: Any) -> None:
    model, ids = mamba_lm(use_bias=True).double(), token_ids()
    explain = frozen_layer(model, layer)
    from_zero = explain.decompose(ids, TARGET, rule=rule, baselines=0)
    start = torch.randn_like(from_zero.inputs)
    value = own_heads(model, ids) if layer.endswith("heads") else own(model, ids, layer)
    gradient = from_zero.inputs / value
    mean = value.mean(1, keepdim=True)
    for baselines, wanted in (
        (start, start),
        ((start,), start),
        (start[0, 0], start[0, 0]),
        (0.5, 0.5),
        ("mean", mean),
        (None, 0 if rule in ("frozen", "half") else mean),
    ):
        found = explain.decompose(ids, TARGET, rule=rule, baselines=baselines)
        assert close(found.inputs, gradient * (value - wanted), 1e-5)
        assert found.delta.abs().max() <= 1e-5 * found.output.abs().max()


def own_heads(model: Any, ids: Tensor) -> Tensor:
    value = own(model, ids, f"{BLOCK}.mixer.out_proj", True)
    return value[..., None]


@pytest.mark.slow
def test_what_is_no_baseline_of_a_layer() -> None:
    explain, ids = frozen_layer(mamba_lm(), BLOCK), token_ids()
    for wrong in ("zero", True, float("nan"), torch.zeros(2, 5), torch.zeros(2, 11).long(), [1, 2]):
        with pytest.raises(OptionError, match="baselines="):
            explain.attribute(ids, TARGET, baselines=wrong)
    of_head = frozen_layer(classifier("mean"), "head")  # whose input has no tokens
    for options in ({"baselines": "mean"}, {"rule": "centered"}):
        with pytest.raises(OptionError, match=r"baselines='mean'.*'head' has shape \(2, 5\)"):
            of_head.attribute(ids, 1, **options)  # type: ignore[arg-type]
        assert of_head.attribute(ids, 1, **(options | {"baselines": 0.0})).shape == (2, 5)


@pytest.mark.slow
@METHODS
def test_without_constants(method: Any) -> None:
    model, ids = mamba_lm(use_bias=True), token_ids()
    rule = "half" if issubclass(method, LayerMambaLRP) else "frozen"
    found = method(model, BLOCK, rule=rule).decompose(ids, TARGET, zero_bias=True)
    assert not found.biases and not found.virtual.any()
    assert close(found.inputs.flatten(1).sum(1), found.output)
    whole = frozen_flow(model).decompose(ids, TARGET, zero_bias=True, features=True, rule=rule)
    assert close(
        method(model, "backbone.layers.2", rule=rule)
        .decompose(ids, TARGET, None, True, zero_bias=True)
        .inputs,
        whole.streams[2],
    )


@pytest.mark.slow
def test_a_compiled_model() -> None:
    model, ids = mamba_lm(), token_ids()
    wanted = frozen_layer(model, BLOCK).attribute(ids, TARGET)
    compiled = torch.compile(model, backend="eager")
    for layer in (BLOCK, compiled.backbone.layers[1]):
        assert close(frozen_layer(compiled, layer).attribute(ids, TARGET), wanted)
    block = model.backbone.layers[1]
    model.backbone.layers[1] = torch.compile(block, backend="eager")
    for layer in (BLOCK, model.backbone.layers[1], block):
        assert close(frozen_layer(model, layer).attribute(ids, TARGET), wanted)
    model.backbone.layers[1] = block
    block.compile(backend="eager")
    assert close(frozen_layer(model, BLOCK).attribute(ids, TARGET), wanted)
