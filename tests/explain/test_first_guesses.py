"""Objects print as one line, and take what a user tries first."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import pipeline
from zoo.language import word_tokenizer
from zoo.small import mamba_lm

from captum_ssm import (
    LatimFlow,
    LatimNorm,
    LayerLatimFlow,
    SSMLLMAttribution,
    StateMemory,
    compare,
    report,
)
from captum_ssm.errors import InputError, OptionError
from captum_ssm.models import load_bundled

MODEL, WORDS = load_bundled()
IDS, TARGET = torch.tensor([[1, 2, 3, 4, 5, 6]]), (-1, 3)
MIXER = "backbone.layers.0.mixer"
FLOW = LatimFlow(MODEL)


SAID: dict[str, Callable[[], Any]] = {
    f"LatimNorm(MambaForCausalLM, layers=['{MIXER}'])": lambda: LatimNorm(MODEL, layers=[MIXER]),
    f"LayerLatimFlow(MambaForCausalLM, layer='{MIXER}')": lambda: LayerLatimFlow(MODEL, MIXER),
    "SSMLLMAttribution(LatimFlow(MambaForCausalLM))": lambda: SSMLLMAttribution(FLOW, WORDS),
    "Decomposition(2 examples of 6 tokens)": lambda: FLOW.decompose(IDS.repeat(2, 1), TARGET),
    f"LayerMemory('{MIXER}', heads 0 to 127, 6 tokens)": lambda: StateMemory(MODEL).of(IDS)[0],
    "Comparison(LatimNorm (1, 6))": lambda: compare(MODEL, IDS, LatimNorm, TARGET),
}


@pytest.mark.parametrize("said", SAID)
def test_one_line(said: str) -> None:
    assert repr(SAID[said]()) == said


def test_a_decomposition_shows_its_sum() -> None:
    found = FLOW.decompose(IDS, TARGET)
    said = repr(found)
    numbers = (float(found.output), float(found.tokens.sum()), float(found.bias))
    assert said.startswith(
        "Decomposition(6 tokens: output {:.3g} = tokens {:.3g} + biases {:.3g}".format(*numbers)
    )


@pytest.mark.parametrize("method", [LatimFlow, partial(LayerLatimFlow, layer=MIXER)])
def test_a_rule_of_all_calls(method: Callable[..., Any]) -> None:
    wanted = method(MODEL).attribute(IDS, TARGET, rule="centered")
    assert torch.equal(method(MODEL, rule="centered").attribute(IDS, TARGET), wanted)
    assert not torch.equal(method(MODEL).attribute(IDS, TARGET), wanted)
    with pytest.raises(OptionError, match="rule='none' is not known"):
        method(MODEL, rule="none")


@pytest.mark.parametrize("method", [LatimFlow, LatimNorm])
def test_what_a_tokenizer_returns(method: Callable[..., Any]) -> None:
    ids = torch.tensor([[0, 0, 5, 3, 4], [1, 2, 3, 4, 5]])
    given = {"input_ids": ids, "attention_mask": (ids > 0).long()}
    function = lambda x, mask: MODEL(x, attention_mask=mask).logits  # noqa: E731
    wanted = method(function, MODEL).attribute(ids, TARGET, given["attention_mask"])
    explain = method(MODEL)
    assert torch.equal(explain.attribute(**given, target=TARGET), wanted)
    mask = given["attention_mask"]
    assert torch.equal(explain.attribute(ids, TARGET, attention_mask=mask), wanted)
    embedded = MODEL.get_input_embeddings()(ids).detach()
    found = explain.attribute(embedded, TARGET, attention_mask=mask, per_token=True)
    assert torch.allclose(found, wanted, atol=1e-5)


def test_a_mask_that_has_no_place() -> None:
    with pytest.raises(InputError, match="takes it by no name and place"):
        LatimFlow(lambda x: MODEL(x), MODEL).attribute(IDS, TARGET, attention_mask=IDS > 0)
    with pytest.raises(InputError, match="and additional_forward_args are given"):
        FLOW.attribute(IDS, TARGET, (None,), attention_mask=IDS > 0)


def test_a_pipeline_and_what_it_samples(tmp_path: Path) -> None:
    model, tokenizer = mamba_lm(), word_tokenizer()
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path)
    pipe = pipeline("text-generation", model=str(tmp_path))
    page = report(pipe, "anna owns the lamp", path=tmp_path / "page.html")
    assert "lamp" in page.read_text(encoding="utf-8")
    sampled = {"max_new_tokens": 4, "do_sample": True, "top_k": 5}
    found = SSMLLMAttribution(LatimFlow(model), tokenizer).attribute("anna owns", gen_args=sampled)
    assert bool(found.token_attr.isfinite().all()) and bool(found.token_attr.any())
