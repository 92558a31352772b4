"""The rules that divide what mixers do, against autograd of functions written by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import oracles
import pytest
import torch
from oracles import shares as by_hand
from torch import Tensor, nn
from zoo import architectures, delta, fla_cpu
from zoo import mamba2 as mamba2_models
from zoo.mamba import transformers_model

from captum_ssm import LatimFlow
from captum_ssm.attr.engine.decompose import Decomposition
from captum_ssm.linear import FAMILY

pytestmark = pytest.mark.transformers5
TOKENS = 11
RULES = tuple(FAMILY)
DIVIDING = ("equal", "centred")


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
        return int(getattr(module, "hidden_size", 0) or module.linear_x.in_features)

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


def gla(patch: pytest.MonkeyPatch) -> Alone:
    options = {"hidden_size": 16, "num_heads": 2, "expand_k": 0.5, "expand_v": 1.0}
    return Alone(fla_cpu.install(patch).layer("GatedLinearAttention", mode="chunk", **options))


MIXERS: dict[str, tuple[Make, Callable[..., tuple[by_hand.Factors, by_hand.Outer]]]] = {
    "mamba": (lambda _: of(transformers_model("mamba"), "MambaMixer"), by_hand.mamba),
    "mamba2": (lambda _: of(mamba2_models.make_model("mamba2"), "Mamba2Mixer"), by_hand.mamba2),
    "qwen3_next": (
        lambda patch: Alone(delta.Family("qwen3_next", patch).mixer()),
        by_hand.gated_delta_net,
    ),
    "rg_lru": (rg_lru, by_hand.rg_lru),
    "gla": (gla, by_hand.gla),
}
MASKED = ("mamba", "mamba2", "qwen3_next")


def explained(
    model: Alone, hidden: Tensor, seed: Tensor, rule: str, mask: Tensor | None = None
) -> Decomposition:
    def number(hidden: Tensor, seed: Tensor, mask: Tensor | None = None) -> Tensor:
        return (model(hidden, mask) * seed).sum((1, 2))

    more = (seed,) if mask is None else (seed, mask)
    return LatimFlow(number, model=model).decompose(hidden, None, more, rule=rule, baselines=0)


def assert_same(found: Decomposition, wanted: by_hand.Shares) -> None:
    """Relative to the largest output or relevance: parts may be nothing but rounding."""
    size = wanted.output.abs().max() + wanted.inputs.abs().max()

    def differ(one: Tensor, other: Tensor) -> float:
        assert one.shape == other.shape
        return float((one - other).detach().abs().max() / size)

    assert differ(found.output, wanted.output) <= 1e-9
    assert differ(found.inputs, wanted.inputs) <= 1e-9
    assert differ(found.bias, wanted.output - wanted.inputs.flatten(1).sum(1)) <= 1e-9
    references = found.biases.get("references", torch.zeros_like(found.output))
    assert differ(references, wanted.references) <= 1e-9


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", MIXERS)
def test_relevance_is_that_of_the_averaged_function(
    name: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, factors_of = MIXERS[name]
    model = make(monkeypatch)
    hidden, seed = torch.randn(2, 2, TOKENS, model.width, dtype=torch.float64)
    found = explained(model, hidden, seed, rule)
    entering = hidden.clone().requires_grad_()
    wanted = by_hand.divided(*factors_of(model.mixer, entering), entering, seed, rule)
    assert_same(found, wanted)


@pytest.mark.parametrize("rule", DIVIDING)
@pytest.mark.parametrize("side", ["left", "right"])
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
