"""What users are told when a prompt, a target or a tokenizer cannot be used."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from captum.attr import Saliency, TextTemplateInput
from transformers import BertConfig, BertForMaskedLM
from zoo import language
from zoo.small import classifier, mamba_lm, token_ids

from captum_ssm import CaptumSSMError, ImplicitAttentionRollout, LatimFlow, SSMLLMAttribution
from captum_ssm.models import Caduceus, HyenaDNA

PROMPT = "anna owns the"


class Bare:
    def encode(self, text):
        return [2 for _ in text.split()]

    def decode(self, ids):
        return "owns"


def explainer(tokenizer=None, model=None):
    model = mamba_lm() if model is None else model
    return SSMLLMAttribution(
        ImplicitAttentionRollout(model),
        language.word_tokenizer() if tokenizer is None else tokenizer,
    )


def check(call, builtin, fragments):
    with pytest.raises(CaptumSSMError) as caught:
        call()
    assert isinstance(caught.value, builtin)
    message = str(caught.value)
    assert not [f for f in fragments if f not in message], message
    assert message.endswith((".", "?", ")"))


PROMPTS: dict[str, tuple[Any, list[str]]] = {
    "nothing": ([], ["The prompt has no tokens"]),
    "two sequences": (token_ids(2, 3), ["The prompt", "(2, 3)", "(1, L)"]),
    "embeddings": (torch.randn(1, 3), ["The prompt", "integers", "float32"]),
    "fractions": ([0.5, 2.0], ["The prompt", "integers"]),
    "several texts": (["anna", "bob"], ["list of 2", "one prompt", "TextTokenInput"]),
    "ids and text": ([3, "bob"], ["list of 2", "one prompt"]),
    "a dictionary": ({"role": "user"}, ["dict", "a list of"]),
    "an id too large": ([1, 19], ["19", "vocabulary", "tokenizer"]),
    "an id below zero": ([-1, 2], ["The prompt contains -1", "at least 0"]),
    "a chat": ([{"role": "user", "content": "the"}], ["messages", "chat_template", "str"]),
}
TARGETS: dict[str, tuple[Any, list[str]]] = {
    "an empty text": ("", ["target=''", "no tokens"]),
    "an empty list": ([], ["target is an empty list"]),
    "an empty text among others": (["the", ""], ["target=''", "no tokens"]),
    "two sequences": (token_ids(2, 3), ["The target", "(2, 3)"]),
    "fractions": ([0.5], ["The target", "integers"]),
    "a position and a token as text": ([(3, "x")], ["The target", "token ids"]),
    "an id too large": ([19], ["19", "vocabulary", "tokenizer"]),
}
#: Options, beside the target "lamp" where they have none.
OPTIONS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "one skipped": ({"skip_tokens": "the"}, ["skip_tokens='the'", "['the']"]),
    "all skipped": ({"skip_tokens": [0, "anna", "owns", "the"]}, ["leaves none", "4"]),
    "no gen_args": ({"target": None, "gen_args": 3}, ["gen_args"]),
    "generation and target": ({"gen_args": {"max_new_tokens": 2}}, ["gen_args", "target"]),
    "several texts": ({"target": None, "gen_args": {
        "max_new_tokens": 2, "num_return_sequences": 2, "do_sample": True}},
        ["gen_args=", "(2, ", "4 tokens"]),  # both may end with the next token
    "per_token": ({"per_token": True}, ["per_token=True"]),
    "delta": ({"return_convergence_delta": True}, ["return_convergence_delta=True"]),
    "targets": ({"targets": True}, ["targets=True"]),
    "parts": ({"internal_batch_size": 1.5}, ["internal_batch_size"]),
}  # fmt: skip
TEMPLATES: dict[str, tuple[Any, dict[str, Any], list[str]]] = {
    "skipped": (TextTemplateInput("{}", ["the"]), {"skip_tokens": [0]}, ["skip_tokens"]),
    "shortened": (TextTemplateInput(lambda a: a[:2], ["the"]), {}, ["template", "'{} feels"]),
    "padded": (TextTemplateInput("{:>9} owns", ["the"]), {}, ["template", "values"]),
    "decides": (TextTemplateInput(lambda a: a if a == "the" else "bob", ["the"]), {},
                ["template", "depends"]),
}  # fmt: skip
#: Of a tokenizer with no more than its two methods.
BARE: dict[str, tuple[Any, list[str]]] = {
    "nothing": (" ", ["The prompt has no tokens"]),
    "a chat": ([{"content": "a", "role": "user"}], ["Bare", "chat template", "str"]),
    "a template": (TextTemplateInput("{} owns", ["anna"]), [
        "Bare", "'owns', but the text has 'anna owns'", "fast tokenizer"]),
}  # fmt: skip
CASES = {
    **{f"prompt: {name}": (None, x, {}, said) for name, (x, said) in PROMPTS.items()},
    **{f"target: {name}": (None, PROMPT, {"target": x}, y) for name, (x, y) in TARGETS.items()},
    **{f"option: {name}": (None, PROMPT, *row) for name, row in OPTIONS.items()},
    **{f"template: {name}": (None, *row) for name, row in TEMPLATES.items()},
    **{f"bare: {name}": (Bare(), x, {"target": "the"}, y) for name, (x, y) in BARE.items()},
}


@pytest.mark.parametrize("case", CASES)
def test_prompts_targets_and_options(case: str) -> None:
    tokenizer, prompt, options, said = CASES[case]
    asked = {"target": "lamp"} | options
    check(lambda: explainer(tokenizer).attribute(prompt, **asked), ValueError, said)


def test_tokenizers_without_methods() -> None:
    for missing in ("encode", "decode"):
        tokenizer = type("Half", (), {"encode": list, "decode": str, missing: None})()
        check(lambda t=tokenizer: explainer(t), ValueError, [f"no method {missing}()", "Half"])
    said = ["attr_method is Saliency", "LatimFlow"]
    check(lambda: SSMLLMAttribution(Saliency(mamba_lm()), Bare()), ValueError, said)


def test_models_without_a_head() -> None:
    said = ["MambaModel", "no language-modeling head", "ForCausalLM"]
    check(lambda: explainer(model=mamba_lm().backbone), TypeError, said)
    classes = classifier("last")
    said = ["(position, token)", "shape (1, 5)", "logits (B, L, vocabulary)"]
    check(lambda: explainer(model=classes).attribute(PROMPT, "lamp"), ValueError, said)
    said = ["target=None", "Classifier", "generate()"]
    check(lambda: explainer(model=classes).attribute(PROMPT), ValueError, said)


def caduceus() -> Any:
    return Caduceus(d_model=6, n_layer=2, vocab_size=16, d_state=3).eval()


def masked_lm():
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 12}
    return BertForMaskedLM(
        BertConfig(vocab_size=19, num_hidden_layers=1, initializer_range=0.5, **sizes)
    ).eval()


@pytest.mark.parametrize("make", [masked_lm, caduceus])
@pytest.mark.parametrize("options", [{}, {"spans": "all"}, {"spans": "token", "hops": 1}])
def test_models_that_read_both_ways(make, options):
    explain = SSMLLMAttribution(LatimFlow(make()), language.word_tokenizer())
    fragments = ["bidirectional", "token by token"]
    check(lambda: explain.attribute([3, 4, 5], [4, 3, 5], **options), ValueError, fragments)


@pytest.mark.slow
@pytest.mark.parametrize("spans", [None, "token"])
def test_what_fourier_transforms_leave_is_no_reading(spans):
    model = HyenaDNA(d_model=6, n_layer=2, l_max=96, filter_order=5).eval()
    explain = SSMLLMAttribution(LatimFlow(model), language.word_tokenizer())
    ids = torch.randint(7, 11, (80,)).tolist()
    assert explain.attribute(ids[:5], ids[5:], spans=spans).token_attr.shape == (75, 5)


def test_asynchronous_form():
    with pytest.raises(NotImplementedError, match="attribute\\(\\)"):
        explainer().attribute_future(PROMPT)
