"""Prompts of every form: the tokens they become, and the features they are explained by."""

from __future__ import annotations

import oracles
import pytest
import torch
from captum.attr import TextTemplateInput, TextTokenInput
from tokenizers import Tokenizer
from zoo import language
from zoo.small import mamba_lm

from captum_ssm import ImplicitAttentionRollout, LatimFlow, SSMLLMAttribution
from captum_ssm.attr.text.codec import Codec
from captum_ssm.attr.text.prompt import read_prompt

pytestmark = pytest.mark.slow

PROMPT = "anna owns the lamp . bob owns the"
MESSAGES = [{"role": "user", "content": "anna owns"}, {"role": "bot", "content": "the lamp"}]


@pytest.fixture
def explain():
    return SSMLLMAttribution(LatimFlow(mamba_lm()), language.word_tokenizer(chat=True))


def test_text_and_ids_are_the_same(explain):
    wanted = explain.attribute(PROMPT, "lamp")
    ids = torch.tensor([language.word_tokenizer().encode(PROMPT)])
    forms = (ids, ids[0], ids.int(), ids.tolist()[0], ids.tolist(), tuple(ids.tolist()[0]),
             ids.numpy())  # fmt: skip
    for prompt in forms:
        found = explain.attribute(prompt, "lamp")
        assert torch.equal(found.token_attr, wanted.token_attr)
        assert found.input_tokens == wanted.input_tokens == ["<s>", *PROMPT.split()]


def test_chats_go_through_the_template(explain):
    text = "user : anna owns . bot : the lamp . bot :"
    wanted = explain.attribute(explain.codec.encode(text, special=False), "lamp")
    found = explain.attribute(MESSAGES, "lamp")
    assert found.input_tokens == text.split()  # the template's text, and no <s> of the tokenizer's
    assert torch.equal(found.token_attr, wanted.token_attr)


@pytest.mark.parametrize("skip", [["<s>", "the"], [0, 3], ["<s>", 3], ["the", "<s>", "unheard"]])
def test_skipped_tokens_are_left_out(explain, skip):
    whole = explain.attribute(PROMPT, "lamp bob")
    found = explain.attribute(PROMPT, "lamp bob", skip_tokens=skip)
    keep = [i for i, word in enumerate(whole.input_tokens) if word not in ("<s>", "the")]
    assert torch.equal(found.token_attr, whole.token_attr[:, keep])
    assert torch.equal(found.seq_attr, whole.seq_attr[keep])
    assert torch.equal(found.generated_attr, whole.generated_attr)
    assert found.input_tokens == [whole.input_tokens[i] for i in keep]


@pytest.mark.parametrize("skip", [None, ["<s>", "owns"]])
def test_token_inputs_bring_their_features(explain, skip):
    prompt = TextTokenInput(PROMPT, language.word_tokenizer(), skip_tokens=skip)
    found = explain.attribute(prompt, "lamp bob")
    assert found.input_tokens == prompt.values
    wanted = explain.attribute(PROMPT, "lamp bob", skip_tokens=skip)
    assert torch.equal(found.token_attr, wanted.token_attr)
    also = explain.attribute(prompt, "lamp bob", skip_tokens=["the"])
    assert also.input_tokens == [v for v in prompt.values if v != "the"]


TEMPLATES = {
    "places": ("{} owns {} . {} owns", ["anna", "the lamp", "bob"]),
    "another order": ("{1} owns {2} . {0} owns", ["bob", "anna", "the lamp"]),
    "names": ("{a} owns {b} . {c} owns", {"a": "anna", "b": "the lamp", "c": "bob"}),
    "function": (lambda a, b, c: f"{a} owns {b} . {c} owns", ["anna", "the lamp", "bob"]),
}
WORD_PLACES = {"anna": [1], "the lamp": [3, 4], "bob": [6]}


@pytest.mark.parametrize("case", TEMPLATES)
def test_template_values_gather_their_tokens(explain, case):
    prompt = TextTemplateInput(*TEMPLATES[case])
    whole = explain.attribute("anna owns the lamp . bob owns", "the $5")
    found = explain.attribute(prompt, "the $5")
    assert found.input_tokens == prompt.values
    wanted = [whole.token_attr[:, WORD_PLACES[value]].sum(1) for value in prompt.values]
    assert oracles.relative_error(found.token_attr, torch.stack(wanted, 1)) <= 1e-6


def test_grouped_template_values_share_their_sum(explain):
    prompt = TextTemplateInput("{} owns {} . {} owns", ["anna", "the lamp", "bob"], mask=[7, 3, 7])
    whole = explain.attribute("anna owns the lamp . bob owns", "the $5").token_attr
    found = explain.attribute(prompt, "the $5").token_attr
    together = whole[:, [1, 6]].sum(1)
    wanted = torch.stack([together, whole[:, [3, 4]].sum(1), together], 1)
    assert oracles.relative_error(found, wanted) <= 1e-6


def test_tokens_across_values_are_divided_by_characters():
    codec = Codec(language.piece_tokenizer())
    text = "abbab"
    ids, spans = codec.encode_with_spans(text)
    assert any(last - first > 1 for first, last in spans)
    shares = read_prompt(TextTemplateInput("a{}b{}", ["b", "ab"]), codec).features(
        torch.eye(len(ids), dtype=torch.float64)
    )
    for row, (first, last) in zip(shares, spans, strict=True):
        inside = [max(0, min(last, end) - max(first, at)) for at, end in ((1, 2), (3, 5))]
        wanted = torch.tensor(inside, dtype=torch.float64) / max(1, sum(inside))
        assert torch.allclose(row, wanted, atol=1e-12)


def test_plain_tokenizers_serve():
    whole = language.word_tokenizer()
    raw = Tokenizer.from_str(whole.backend_tokenizer.to_str())

    class Bare:
        def encode(self, text):
            return [language.WORDS.index(word) for word in text.split()]

        def decode(self, ids):
            return " ".join(language.WORDS[i] for i in ids)

    method = ImplicitAttentionRollout(mamba_lm())
    wanted = SSMLLMAttribution(method, whole).attribute(PROMPT, "lamp bob", skip_tokens=["the"])
    for tokenizer, prompt in ((raw, PROMPT), (Bare(), "<s> " + PROMPT)):
        found = SSMLLMAttribution(method, tokenizer).attribute(
            prompt, "lamp bob", skip_tokens=["the"]
        )
        assert torch.equal(found.token_attr, wanted.token_attr)
        assert found.output_tokens == ["lamp", "bob"]
        assert found.input_tokens[1:] == wanted.input_tokens[1:]
