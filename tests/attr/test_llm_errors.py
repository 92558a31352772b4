"""What users are told when a prompt, a target or a tokenizer cannot be used."""

from __future__ import annotations

import pytest
import torch
from captum.attr import TextTemplateInput
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPTNeoXConfig,
    GPTNeoXForSequenceClassification,
)
from zoo import language
from zoo.small import classifier, mamba_lm, token_ids

from captum_ssm import CaptumSSMError, ImplicitAttentionRollout, LatimFlow, SSMLLMAttribution
from captum_ssm.models import Caduceus, HyenaDNA

PROMPT = "anna owns the"


class Bare:
    """A tokenizer with no more than is needed."""

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


PROMPTS = {
    "nothing": ([], ["The prompt is empty"]),
    "an empty tensor": (torch.zeros(1, 0).long(), ["The prompt is empty"]),
    "two sequences": (token_ids(2, 3), ["The prompt", "(2, 3)", "(1, L)"]),
    "a number": (torch.tensor(3), ["The prompt", "()", "(L,)"]),
    "embeddings": (torch.randn(1, 3), ["The prompt", "integers", "float32"]),
    "a mask": (torch.ones(1, 3).bool(), ["The prompt", "integers", "bool"]),
    "fractions": ([0.5, 2.0], ["The prompt", "integers"]),
    "several texts": (["anna", "bob"], ["list of 2", "one prompt", "TextTokenInput"]),
    "ids and text": ([3, "bob"], ["list of 2", "one prompt"]),
    "ragged ids": ([[1, 2], [3]], ["The prompt", "token ids", "[[1, 2], [3]]"]),
    "None": (None, ["NoneType", "str", "chat"]),
    "a dictionary": ({"role": "user"}, ["dict", "a list of"]),
    "an id too large": ([1, 19], ["19", "embeds", "tokenizer"]),
    "an id below zero": ([-1, 2], ["The prompt holds -1", "from 0"]),
    "a chat": ([{"role": "user", "content": "the"}], ["messages", "chat_template", "str"]),
}
TARGETS = {
    "an empty text": ("", ["target=''", "no tokens"]),
    "blanks": ("  ", ["target='  '", "no tokens"]),
    "an empty list": ([], ["target is an empty list"]),
    "an empty tensor": (torch.zeros(0), ["The target is empty"]),
    "an empty text among others": (["the", ""], ["target=''", "no tokens"]),
    "two sequences": (token_ids(2, 3), ["The target", "(2, 3)"]),
    "fractions": ([0.5], ["The target", "integers"]),
    "a number": (3, ["The target", "(L,)"]),
    "a position and a token as text": ([(3, "x")], ["The target", "token ids"]),
    "an id too large": ([19], ["19", "embeds", "tokenizer"]),
}


@pytest.mark.parametrize("case", PROMPTS)
def test_prompts(case):
    prompt, fragments = PROMPTS[case]
    check(lambda: explainer().attribute(prompt, "lamp"), ValueError, fragments)


@pytest.mark.parametrize("case", TARGETS)
def test_targets(case):
    target, fragments = TARGETS[case]
    check(lambda: explainer().attribute(PROMPT, target), ValueError, fragments)


def test_a_prompt_without_tokens():
    check(lambda: explainer(Bare()).attribute(" ", "the"), ValueError, ["The prompt is empty"])


@pytest.mark.parametrize("chat", [{"content": "a", "role": "user"}])
def test_tokenizers_without_chats(chat):
    fragments = ["Bare", "chat template", "str"]
    check(lambda: explainer(Bare()).attribute([chat], "the"), ValueError, fragments)


@pytest.mark.parametrize("missing", ["encode", "decode"])
def test_tokenizers_without_methods(missing):
    tokenizer = type("Half", (), {"encode": list, "decode": str, missing: None})()
    fragments = [f"no method {missing}()", "Half"]
    check(lambda: SSMLLMAttribution(LatimFlow(mamba_lm()), tokenizer), ValueError, fragments)


def test_methods_of_others():
    from captum.attr import Saliency

    fragments = ["attr_method is Saliency", "LatimFlow"]
    check(lambda: SSMLLMAttribution(Saliency(mamba_lm()), Bare()), ValueError, fragments)


# --- features ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("skip", "fragments"),
    [
        ("the", ["skip_tokens='the'", "['the']"]),
        (3, ["skip_tokens=3", "[3]"]),
        ([0, "anna", "owns", "the"], ["leaves none", "4"]),
    ],
)
def test_skipped_tokens(skip, fragments):
    check(lambda: explainer().attribute(PROMPT, "lamp", skip_tokens=skip), ValueError, fragments)


TEMPLATES = {
    "skipped tokens": (TextTemplateInput("{}", ["the"]), {"skip_tokens": [0]}, ["skip_tokens"]),
    "shortened values": (
        TextTemplateInput(lambda a: a[:2], ["the"]),
        {},
        ["template", "'{} feels"],
    ),
    "padded values": (TextTemplateInput("{:>9} owns", ["the"]), {}, ["template", "values"]),
    "values that decide": (
        TextTemplateInput(lambda a: a if a == "the" else "bob", ["the"]),
        {},
        ["template", "depends"],
    ),
}


@pytest.mark.parametrize("case", TEMPLATES)
def test_templates(case):
    prompt, options, fragments = TEMPLATES[case]
    check(lambda: explainer().attribute(prompt, "lamp", **options), ValueError, fragments)


def test_templates_need_tokens_that_read_as_the_text():
    prompt = TextTemplateInput("{} owns", ["anna"])
    fragments = ["Bare", "'owns' where the text is 'anna owns'", "fast tokenizer"]
    check(lambda: explainer(Bare()).attribute(prompt, "the"), ValueError, fragments)


# --- models and their texts ----------------------------------------------------------------------


def test_models_without_a_head():
    fragments = ["MambaModel", "no language-modelling head", "ForCausalLM"]
    check(lambda: explainer(model=mamba_lm().backbone), TypeError, fragments)
    config = GPTNeoXConfig(
        vocab_size=19, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=9,
    )  # fmt: skip
    model = GPTNeoXForSequenceClassification(config)
    check(lambda: explainer(model=model), TypeError, ["GPTNeoXForSequenceClassification"])


def test_models_that_return_classes():
    fragments = ["(position, token)", "shape (1, 5)", "logits (B, L, vocabulary)"]
    explain = explainer(model=classifier("last"))
    check(lambda: explain.attribute(PROMPT, "lamp"), ValueError, fragments)


def test_models_that_cannot_generate():
    fragments = ["target=None", "Classifier", "generate()"]
    check(lambda: explainer(model=classifier("last")).attribute(PROMPT), ValueError, fragments)


def dna_lm(kind):
    torch.manual_seed(0)
    if kind == "caduceus":
        return Caduceus(d_model=6, n_layer=2, vocab_size=16, d_state=3).eval()
    return HyenaDNA(d_model=6, n_layer=2, l_max=96, filter_order=5).eval()


def masked_lm():
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 12}
    return BertForMaskedLM(
        BertConfig(vocab_size=19, num_hidden_layers=1, initializer_range=0.5, **sizes)
    ).eval()


@pytest.mark.parametrize("make", [masked_lm, lambda: dna_lm("caduceus")], ids=["bert", "caduceus"])
@pytest.mark.parametrize("options", [{}, {"spans": "all"}, {"spans": "token", "hops": 1}])
def test_models_that_read_both_ways(make, options):
    explain = SSMLLMAttribution(LatimFlow(make()), language.word_tokenizer())
    fragments = ["reads both ways", "word by word"]
    check(lambda: explain.attribute([3, 4, 5], [4, 3, 5], **options), ValueError, fragments)


@pytest.mark.parametrize("spans", [None, "token"])
def test_what_fourier_transforms_leave_is_no_reading(spans):
    explain = SSMLLMAttribution(LatimFlow(dna_lm("hyenadna").float()), language.word_tokenizer())
    ids = torch.randint(7, 11, (80,)).tolist()
    assert explain.attribute(ids[:5], ids[5:], spans=spans).token_attr.shape == (75, 5)


@pytest.mark.parametrize(
    "gen_args", [{"max_new_tokens": 2, "num_return_sequences": 2, "do_sample": True}]
)
def test_several_generated_texts(gen_args):
    fragments = ["gen_args=", "(2, ", "4 tokens"]  # both may end with the next token
    check(lambda: explainer().attribute(PROMPT, gen_args=gen_args), ValueError, fragments)


def test_generation_and_target_together():
    fragments = ["gen_args", "target"]
    check(
        lambda: explainer().attribute(PROMPT, "lamp", gen_args={"max_new_tokens": 2}),
        ValueError,
        fragments,
    )


@pytest.mark.parametrize("name", ["per_token", "return_convergence_delta", "targets"])
def test_options_that_are_not_the_users(name):
    check(
        lambda: explainer().attribute(PROMPT, "lamp", **{name: True}), ValueError, [f"{name}=True"]
    )


def test_asynchronous_form():
    with pytest.raises(NotImplementedError, match="attribute\\(\\)"):
        explainer().attribute_future(PROMPT)
