"""LatimFlow's decomposition: against the frozen network, what it takes, gives and refuses."""

from __future__ import annotations

from typing import Any

import oracles
import pytest
import torch
from helpers.frozen_networks import NETWORKS
from helpers.versions import transformers5
from oracles import frozen_network as frozen
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from zoo import attention, mamba2
from zoo.mamba import randomise, transformers_model
from zoo.small import mamba_lm, token_ids

from captum_ssm import LatimFlow, MambaLRP
from captum_ssm.errors import GradientModeError, NotLinearError, OptionError

pytestmark = pytest.mark.slow
TARGET = (-1, 3)


def close(found: Tensor, wanted: Tensor, tolerance: float = 1e-5) -> bool:
    return oracles.relative_error(found, wanted) <= tolerance


@pytest.mark.parametrize("method, rule", [(LatimFlow, "frozen"), (MambaLRP, "half")])
@pytest.mark.parametrize("network", NETWORKS)
def test_relevance_is_that_of_the_matrices(network, method, rule):
    model, *parts = network()
    model.double()
    ids = token_ids(2, 7)
    for target in [(6, 3), (2, 5)]:
        found = method(model).decompose(ids, target, rule=rule).inputs
        wanted = torch.stack(
            [frozen.relevance(model, *parts, row, target, rule == "half") for row in ids]
        )
        assert oracles.relative_error(found, wanted) <= NETWORKS[network]
        assert not found[:, target[0] + 1 :].any()


def test_constants_are_named_by_the_modules_that_add_them():
    model = mamba_lm(use_bias=True)
    model.lm_head.bias = torch.nn.Parameter(torch.randn(19))
    found = LatimFlow(model).decompose(token_ids(3), (-1, 3), rule="frozen")
    layers = range(3)
    wanted = {f"backbone.layers.{i}.mixer{part}" for i in layers for part in ("", ".in_proj")}
    wanted |= {f"backbone.layers.{i}.mixer.out_proj" for i in layers} | {"lm_head"}
    assert set(found.biases) == wanted
    assert all(bias.shape == (3,) and bias.any() for bias in found.biases.values())
    bias = model.lm_head.bias[3].detach()
    torch.testing.assert_close(found.biases["lm_head"], bias.expand(3))
    assert torch.equal(found.bias, sum(found.biases.values()))


@pytest.mark.parametrize("rule", ["frozen", "centered"])
def test_what_enters_and_leaves_mixers_by_feature(rule):
    model, ids = mamba_lm(use_bias=True), token_ids(2)
    explain, targets = LatimFlow(model), [(-1, 3), (4, 2)]
    whole = [explain.decompose(ids, target, rule=rule) for target in targets]
    each = explain.decompose_each(ids, targets, rule=rule, features=True, internal_batch_size=1)
    one = explain.decompose(ids, targets[0], rule=rule, features=True, roles=False)
    for found, wanted in zip([*each, one], [*whole, whole[0]], strict=True):
        assert oracles.relative_error(found.inputs, wanted.inputs) <= 1e-5
        for name in ("streams", "mixers"):
            pairs = list(zip(getattr(found, name), getattr(wanted, name), strict=True))
            assert len(pairs) == 3
            for by_feature, by_token in pairs:
                assert by_feature.shape == (2, 11, model.config.hidden_size)
                assert oracles.relative_error(by_feature.sum(-1), by_token) <= 1e-5
    # the embeddings are the first stream
    first = explain.decompose(ids, targets[0], rule="frozen", features=True)
    assert oracles.relative_error(first.streams[0], first.inputs) <= 1e-5
    with pytest.raises(OptionError, match="features='yes'"):
        explain.decompose(ids, targets[0], features="yes")


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * gradients[0]


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_of_the_users_own_are_refused(reentrant):
    model = mamba_lm()
    block = model.backbone.layers[1]
    own = block.forward

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(lambda x: own(x, *args, **kwargs), x, use_reentrant=reentrant)

    block.forward = forward
    with pytest.raises(NotLinearError, match=r"torch\.utils\.checkpoint"):
        LatimFlow(model).attribute(token_ids(1), TARGET)


def without_rule(model: Any) -> Any:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.lgamma(x)

    model.backbone.norm_f = nn.Sequential(model.backbone.norm_f, Odd())
    return model


#: What is made of a model, and how it is refused.
REFUSED: dict[str, tuple[Any, Any, str]] = {
    "its own backward": (lambda m: lambda x: Cubed.apply(m(x).logits), NotLinearError, "Cubed"),
    "no rule": (without_rule, NotLinearError, r"'backbone.norm_f.1'.*lgamma"),
    "softmax": (lambda m: lambda x: m(x).logits.softmax(-1), GradientModeError, "softmax"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_functions_that_are_refused(case: str) -> None:
    (make, error, said), model = REFUSED[case], mamba_lm()
    function = make(model)
    with pytest.raises(error, match=said):
        LatimFlow(function, model=model).attribute(token_ids(), TARGET)


@pytest.mark.parametrize("method, zero_bias, rule, other", [
    (LatimFlow, False, "balanced", "centered"),
    (MambaLRP, False, "half", "centered"),
    (MambaLRP, True, "half", "frozen"),
])  # fmt: skip
def test_the_rule_unless_another_is_named(method, zero_bias, rule, other):
    assert rule == method.default_rule
    explain, ids = method(mamba_lm(use_bias=True)), token_ids()
    given = explain.attribute(ids, TARGET)
    calls = {
        "attribute": lambda **o: explain.attribute(ids, TARGET, **o),
        "decompose": lambda **o: explain.decompose(ids, TARGET, **o).inputs,
        "decompose_each": lambda **o: explain.decompose_each(ids, [TARGET], **o)[0].inputs,
        "delta": lambda **o: explain.compute_convergence_delta(given, ids, TARGET, **o),
    }
    for name, call in calls.items():
        found = call(zero_bias=zero_bias)
        assert torch.equal(found, call(rule=rule, zero_bias=zero_bias)), name
        assert torch.equal(found, call(rule=None, zero_bias=zero_bias)), name
        if name != "delta" or not zero_bias:  # without constants all rules share one output
            assert not close(found, call(rule=other, zero_bias=zero_bias), 1e-2), name


def test_tokens_are_compared_with_their_mean_unless_told_otherwise():
    model, ids = mamba_lm(), token_ids()
    found = LatimFlow(model).decompose(ids, TARGET, rule="centered")
    told = LatimFlow(model).decompose(ids, TARGET, rule="centered", baselines="mean")
    assert torch.equal(found.inputs, told.inputs) and found.biases["baselines"].all()
    by_nothing = LatimFlow(model).decompose(ids, TARGET, rule="centered", baselines=0)
    assert not close(found.inputs, by_nothing.inputs, 1e-2)


def test_experts_with_biases():
    """Tokens of several examples meet in an expert, whose bias belongs to them all."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(12, 3)
            self.experts = nn.ModuleList(
                nn.Sequential(nn.Linear(12, 7), nn.SiLU(), nn.Linear(7, 12)) for _ in range(3)
            )

        def forward(self, x: Tensor) -> Tensor:
            flat = x.reshape(-1, x.shape[-1])
            weights, chosen = self.router(flat).softmax(-1).topk(2)
            out = torch.zeros_like(flat)
            for index, expert in enumerate(self.experts):
                token, rank = torch.where(chosen == index)
                part = expert(flat[token]) * weights[token, rank, None]
                out.index_add_(0, token, part)
            return out.view_as(x)

    model = mamba2.make_model("bamba")
    for layer in model.model.layers:
        layer.feed_forward = randomise(Experts())
    explain, ids = LatimFlow(model), token_ids(4)
    found = explain.decompose(ids, TARGET)
    assert (found.delta.abs() / found.inputs.abs().flatten(1).sum(1)).max() <= 1e-5
    alone = torch.cat([explain.attribute(row[None], TARGET) for row in ids])
    assert close(found.tokens, alone)


@transformers5
@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_experts_of_transformers(implementation):
    model, ids = attention.attention_model("jamba"), token_ids(3)
    wanted = LatimFlow(model).attribute(ids, TARGET)
    model.set_experts_implementation(implementation)
    assert close(LatimFlow(model).attribute(ids, TARGET), wanted)


class Conditioned(nn.Module):
    """A network whose block is given a vector for all tokens beside the stream."""

    def __init__(self) -> None:
        super().__init__()
        model = transformers_model()
        self.embed, self.head, self.block = model.backbone.embeddings, model.lm_head, nn.Module()
        self.block.mixer = model.backbone.layers[0].mixer
        self.block.forward = lambda x, vector: x + self.block.mixer(x) + vector[:, None]
        self.blocks = nn.ModuleList([self.block])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        logits: Tensor = self.head(self.blocks[0](x, x.mean(1)))
        return logits


def test_a_vector_beside_the_stream_is_no_part_of_its_relevance():
    model, ids = Conditioned().eval(), torch.randint(19, (2, 6))
    both = LatimFlow(model).decompose(ids, target=(-1, 3))
    alone = LatimFlow(model).decompose(ids[:1], target=(-1, 3))
    assert both.streams[0].shape == (2, 6)
    assert oracles.relative_error(alone.streams[0], both.streams[0][:1]) < 1e-5
