"""Random configurations of transformers' softmax attention, inside its models.

The models are run on embeddings, so that rotations and masks are their own.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from fuzz.fuzzing import fuzz
from fuzz.mixer_checks import Inputs, Made, check, inputs
from hypothesis import given
from hypothesis import strategies as st
from zoo.attention import FAMILIES, IMAGES, TEXTS, attention_model, attention_names
from zoo.delta import FAMILIES as DELTA
from zoo.delta import without_kernels
from zoo.mamba import randomise

from captum_ssm import trace

#: Families that know positions by number, so that padding on the left moves them.
NUMBERED = ("bert", "gpt2")
#: Families that have what they are told of keys and values by number of heads.
GROUPED = [f for f in TEXTS if "num_key_value_heads" in FAMILIES[f][2] and f != "kimi_linear"]
#: Sizes that every family's other options go with: 16 features in all.
_OPTIONS: dict[str, Any] = {
    "heads": st.sampled_from([1, 2, 4]),
    "groups": st.sampled_from([1, 2, 4]),
    "attention": st.sampled_from(["sdpa", "eager"]),
    "window": st.integers(2, 40),
    "bias": st.booleans(),
    "eps": st.sampled_from([0.02, 0.1]),
}
_WINDOWS = {"mistral": "sliding_window", "recurrent_gemma": "attention_window_size"}
_BIASES = ("llama", "bamba", "jamba", "granitemoehybrid", "nemotron_h")


def options_of(family: str, drawn: dict[str, Any]) -> dict[str, Any]:
    """The family's own names of what is drawn."""
    heads = drawn["heads"]
    options: dict[str, Any] = {"n_head" if family == "gpt2" else "num_attention_heads": heads}
    if family in GROUPED:
        options["num_key_value_heads"] = heads // min(heads, drawn["groups"])
    elif family == "kimi_linear":
        options["num_key_value_heads"] = heads
    if family in _WINDOWS:
        options[_WINDOWS[family]] = drawn["window"]
    if family in _BIASES:
        options["attention_bias"] = drawn["bias"]
    if family == "recurrent_gemma":
        options |= {"head_dim": 16 // heads, "sliding_window": drawn["window"]}
    return options


class Attentions(Made):
    """A model of which the layers of softmax attention are looked at."""

    def layers(self, hidden: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
        with torch.no_grad(), trace(self.module, layers=attention_names(self.module)) as t:
            self.module(inputs_embeds=hidden, attention_mask=mask, use_cache=False)
        assert t.layers
        return t.layers


def make(family: str, drawn: dict[str, Any]) -> Made:
    model = attention_model(family, drawn["attention"], **options_of(family, drawn))
    _well_conditioned(model, drawn["eps"])
    numbered = family in NUMBERED
    return Attentions(
        model,
        16,
        sides=("right",) if numbered else ("left", "right"),
        causal=family != "bert",
        double=False,
        upcast=False,
        longest=128,
    )


def _well_conditioned(model: Any, eps: float) -> None:
    """Norms of few features must not blow rounding errors up."""
    for module in model.modules():
        for name in ("variance_epsilon", "eps"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, eps)


@pytest.fixture(scope="module", autouse=True)
def own_functions() -> Iterator[None]:
    """The models' own torch functions, not the kernels of other packages."""
    with pytest.MonkeyPatch.context() as patch:
        for family in DELTA:
            name = f"transformers.models.{family}.modeling_{family}"
            without_kernels(importlib.import_module(name), patch)
        yield


@pytest.mark.parametrize("family", TEXTS)
@fuzz(quick=1, long=40)
@given(st.fixed_dictionaries(_OPTIONS), inputs())
def test_texts(family: str, options: dict[str, Any], drawn: Inputs) -> None:
    torch.manual_seed(drawn.seed)
    made = make(family, options)
    if options["attention"] == "eager" and drawn.dtype == torch.float64:
        made.sides = ()  # the models make NaN of a token that may read nothing
    check(made, drawn)


@pytest.mark.parametrize("family", IMAGES)
@fuzz(quick=2, long=40)
@given(st.fixed_dictionaries(_OPTIONS), inputs())
def test_images(family: str, options: dict[str, Any], drawn: Inputs) -> None:
    """Attention by itself: images have as many tokens as they have."""
    torch.manual_seed(drawn.seed)
    settings = {"vit": transformers.ViTConfig, "deit": transformers.DeiTConfig}[family]
    config = settings(
        hidden_size=16, num_attention_heads=options["heads"], qkv_bias=options["bias"]
    )
    config._attn_implementation = options["attention"]
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    name = {"vit": "ViTAttention", "deit": "DeiTAttention"}[family]
    module = randomise(getattr(modeling, name)(config))
    check(Made(module, 16, causal=False, double=False), drawn)
