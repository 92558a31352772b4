"""The rules that divide what mixers do, against autograd of functions written by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import oracles
import pytest
import torch
from helpers.adapters import cut_from_their_graphs
from helpers.versions import transformers5
from helpers.widened import InFloat64
from oracles import shares as by_hand
from torch import Tensor, nn
from zoo import architectures, delta, fla_cpu
from zoo import mamba2 as mamba2_models
from zoo.mamba import transformers_model

from captum_ssm import LatimFlow
from captum_ssm.attr.engine.decompose import Decomposition
from captum_ssm.linear import FAMILY
from captum_ssm.linear.mode import Linearizing
from captum_ssm.linear.network import apply_mixer
from captum_ssm.mixers import LinearMixer
from captum_ssm.operators import Chain, Diagonal, ElementwiseRecurrence, Operator, Shape, Sum
from captum_ssm.operators.reorder import Permute, Windowed, Windows

pytestmark = [transformers5, pytest.mark.slow]
TOKENS = 11
RULES = tuple(FAMILY)
DIVIDING = ("centered", "balanced")


class Alone(nn.Module):
    """A mixer by itself.

    Args:
        mixer: the module.
        options: further arguments of its calls.
    """

    def __init__(self, mixer: nn.Module, **options: Any) -> None:
        super().__init__()
        self.mixer, self.options = mixer.double(), options

    @property
    def width(self) -> int:
        module: Any = self.mixer
        for name in ("linear_x", "q_proj", "key"):
            if hasattr(module, name):
                return int(getattr(module, name).in_features)
        return int(module.hidden_size)

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        options = self.options if mask is None else {**self.options, "attention_mask": mask}
        out = self.mixer(hidden, **options)
        return out if isinstance(out, Tensor) else out[0]


Make = Callable[[pytest.MonkeyPatch], Alone]


def of(model: Any, kind: str, **options: Any) -> Alone:
    mixers = [m for m in model.modules() if type(m).__name__ == kind]
    return Alone(mixers[0], **options)


def rg_lru(patch: pytest.MonkeyPatch) -> Alone:
    model = architectures.recurrent_gemma(patch).model
    places = torch.arange(TOKENS)[None]
    options = {"position_ids": places, "attention_mask": None, "use_cache": False}
    return of(model, "RecurrentGemmaRecurrentBlock", **options)


def rwkv(patch: pytest.MonkeyPatch) -> Alone:
    return of(architectures.rwkv(patch).model, "RwkvSelfAttention")


def gla(patch: pytest.MonkeyPatch, **options: Any) -> Alone:
    sizes = {"hidden_size": 16, "num_heads": 2, "expand_k": 0.5, "expand_v": 1.0}
    layer = fla_cpu.install(patch).layer("GatedLinearAttention", mode="chunk", **sizes, **options)
    return Alone(layer)


MIXERS: dict[str, tuple[Make, Callable[..., tuple[by_hand.Factors, by_hand.Outer]]]] = {
    "mamba": (lambda _: of(transformers_model("mamba"), "MambaMixer"), by_hand.mamba),
    "mamba2": (lambda _: of(mamba2_models.make_model("mamba2"), "Mamba2Mixer"), by_hand.mamba2),
    "qwen3_next": (
        lambda patch: Alone(delta.Family("qwen3_next", patch).mixer()),
        by_hand.gated_delta_net,
    ),
    "rg_lru": (rg_lru, by_hand.rg_lru),
    "rwkv": (rwkv, by_hand.rwkv4),
    "gla": (gla, by_hand.gla),
    "gla with a sigmoid": (lambda patch: gla(patch, gate_fn="sigmoid"), by_hand.gla),
    "attention": (
        lambda patch: of(architectures.vit(patch).model, "ViTAttention"),
        by_hand.softmax_attention,
    ),
}
OF_SIGMOIDS = ("rwkv", "gla", "gla with a sigmoid")
MASKED = ("mamba", "mamba2", "qwen3_next")


def explained(
    model: Alone, hidden: Tensor, seed: Tensor, rule: str, mask: Tensor | None = None
) -> Decomposition:
    def number(hidden: Tensor, seed: Tensor, mask: Tensor | None = None) -> Tensor:
        return (model(hidden, mask) * seed).sum((1, 2))

    more = (seed,) if mask is None else (seed, mask)
    return LatimFlow(number, model=model).decompose(hidden, None, more, rule=rule, baselines=0)


def assert_same(found: Decomposition, wanted: by_hand.Shares) -> None:
    size = wanted.output.abs().max() + wanted.inputs.abs().max()

    def differ(one: Tensor, other: Tensor) -> float:
        assert one.shape == other.shape
        return float((one - other).detach().abs().max() / size)

    assert differ(found.output, wanted.output) <= 1e-9
    assert differ(found.inputs, wanted.inputs) <= 1e-9
    assert differ(found.bias, wanted.output - wanted.inputs.flatten(1).sum(1)) <= 1e-9
    references = found.biases.get("references", torch.zeros_like(found.output))
    assert differ(references, wanted.references) <= 1e-9


@pytest.mark.parametrize("name", MIXERS)
def test_relevance_is_that_of_the_averaged_function(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, factors_of = MIXERS[name]
    model = make(monkeypatch)
    hidden, seed = torch.randn(2, 2, TOKENS, model.width, dtype=torch.float64)
    for rule in RULES:
        with InFloat64():
            found = explained(model, hidden, seed, rule)
        entering = hidden.clone().requires_grad_()
        options = {"tangents": rule in DIVIDING} if name in OF_SIGMOIDS else {}
        factors = factors_of(model.mixer, entering, **options)
        assert_same(found, by_hand.divided(*factors, entering, seed, rule))


@pytest.mark.parametrize(("side", "rule"), [("left", "centered"), ("right", "balanced")])
@pytest.mark.parametrize("name", MASKED)
def test_padding_changes_nothing(
    name: str, side: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, factors_of = MIXERS[name]
    model = make(monkeypatch)
    hidden, seed = torch.randn(2, 2, TOKENS, model.width, dtype=torch.float64)
    mask = torch.ones(2, TOKENS, dtype=torch.long)
    padding = slice(3) if side == "left" else slice(TOKENS - 3, TOKENS)
    mask[1, padding] = 0
    seed = seed * mask[..., None]
    found = explained(model, hidden, seed, rule, mask)
    assert not found.inputs[1, padding].any()
    for example, real in enumerate(mask.bool()):
        alone = explained(model, hidden[example, real][None], seed[example, real][None], rule)
        assert oracles.relative_error(found.inputs[example, real][None], alone.inputs) <= 1e-9
        assert float((found.bias[example] - alone.bias).abs().max()) <= 1e-9
    entering = hidden.clone().requires_grad_()
    given = factors_of(model.mixer, entering, mask.bool())
    wanted = by_hand.divided(*given, entering, seed, rule, mask.bool())
    assert_same(found, wanted)


def given_by(operator: Operator, v: Tensor, rule: Any, mask: Tensor | None) -> Tensor:
    """What a mixer of this operator alone returns under the rules."""
    mode = Linearizing(None, rule, where=lambda _: "")
    linear = LinearMixer(v, operator, project=lambda y: y, mask=mask)
    with mode:
        return apply_mixer(linear, mode)


def randn(*size: int) -> Tensor:
    return torch.randn(size, dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize("rule", DIVIDING)
def test_means_run_over_real_tokens_in_the_order_in_which_they_are_read(rule: str) -> None:
    shape = Shape(2, 9, 3, 1)
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[0, :4] = mask[1, 7:] = False
    decay = randn(*shape[:3])
    gate, key, v, seed = randn(*shape), randn(*shape), randn(*shape), randn(*shape)
    turn = Permute(torch.arange(8, -1, -1), shape)
    recurrence = ElementwiseRecurrence(decay.sigmoid())
    ahead = Chain(Diagonal(gate, shape, "gate"), recurrence, Diagonal(key, shape, "scan"))
    back = Chain(turn, *ahead.parts, turn)

    def gradients(operator: Operator, turned: bool) -> tuple[Tensor, ...]:
        given = (v.flip(1), mask.flip(1), seed.flip(1)) if turned else (v, mask, seed)
        out = given_by(operator, given[0], rule, given[1])
        leaves = [v, decay, gate, key]
        return torch.autograd.grad(out, leaves, given[2], retain_graph=True, materialize_grads=True)

    wanted = gradients(ahead, turned=True)
    for operator in (back, Sum(back)):
        torch.testing.assert_close(gradients(operator, turned=False), wanted)
    with_all = given_by(ahead, v, rule, None)
    leaves = [decay, gate]
    plain, of_gate = torch.autograd.grad(
        with_all, leaves, seed, retain_graph=True, materialize_grads=True
    )
    assert plain.any()
    masked = gradients(ahead, turned=False)[2]
    assert (oracles.relative_error(masked, of_gate) > 1e-3) == (rule == "centered")


@pytest.mark.parametrize("rule", DIVIDING)
def test_windows_have_means_of_their_own_and_no_empty_place_counts(rule: str) -> None:
    places = torch.tensor([[3, 0, -1], [-1, 4, 1], [2, -1, -1]])
    windows, held = Windows(places), places.repeat(2, 1) >= 0
    v, seed, content = randn(2, 5, 3, 1), randn(2, 5, 3, 1).detach(), randn(6, 3, 3, 1).detach()
    lowest, factor = torch.randn(2, 6, 3, 3, 1, dtype=torch.float64)

    def cut(x: Tensor) -> Tensor:
        inside = x[:, places.clamp_min(0)].flatten(0, 1)
        return torch.where(held[..., None, None], inside, 0)

    def decays() -> Tensor:
        return torch.sigmoid(cut(v) + lowest)[..., 0]

    def keys() -> Tensor:
        return factor + cut(v)

    padding = torch.where(held[..., None, None], 0, content)
    inner = Chain(ElementwiseRecurrence(decays()), Diagonal(keys(), Shape(6, 3, 3, 1), "scan"))
    windowed = Windowed(inner, windows, padding)
    out = given_by(windowed, v, rule, None)
    (found,) = torch.autograd.grad(out, v, seed)

    def outer(v: Tensor, step: Tensor, key: Tensor) -> Tensor:
        state, out = torch.zeros(6, 3, 1, dtype=v.dtype), []
        for i in range(3):
            state = step[:, i, :, None] * state + key[:, i] * v[:, i]
            out.append(state)
        back = torch.zeros(2, 5, 3, 1, dtype=v.dtype)
        for window, row in enumerate(places.tolist()):
            for place, token in enumerate(row):
                if token >= 0:
                    back[:, token] = out[place][window::3]
        return back

    factors = {
        "v": (cut(v) + padding, "content"),
        "step": (decays(), "step"),
        "key": (keys(), "key"),
    }
    wanted = by_hand.divided(factors, outer, v, seed, rule, held)
    torch.testing.assert_close(out.detach(), outer(cut(v) + padding, decays(), keys()).detach())
    torch.testing.assert_close(found * v.detach(), wanted.inputs)


@pytest.mark.parametrize("rule", RULES)
def test_a_mixer_without_live_factors_is_content_alone_and_is_named(rule: str) -> None:
    model, ids = transformers_model("mamba").double(), torch.randint(15, (2, 9))
    explain = LatimFlow(model)
    before = explain.decompose(ids, (-1, 3), rule=rule, baselines=0)
    assert before.content_only == ()
    names = [name for name, m in model.named_modules() if type(m).__name__ == "MambaMixer"]
    cut_from_their_graphs(model.get_submodule(names[0]))
    found = explain.decompose(ids, (-1, 3), rule=rule, baselines=0, internal_batch_size=1)
    assert found.content_only == (tuple(names) if rule in DIVIDING else ())
    assert "references" not in found.biases
    if rule in DIVIDING:
        frozen = explain.decompose(ids, (-1, 3), rule="frozen")
        torch.testing.assert_close(found.inputs, frozen.inputs)
        assert oracles.relative_error(before.inputs, frozen.inputs) > 1e-3
