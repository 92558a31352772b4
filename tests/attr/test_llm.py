"""Prompts and texts: every entry against the method itself, at the cost of one forward run."""

from __future__ import annotations

import oracles
import pytest
import torch
from captum.attr import LLMAttributionResult
from helpers.every_method import each_method, named, without_replays
from zoo import attention, language, mamba2
from zoo.small import mamba_lm

from captum_ssm import (
    ImplicitAttentionRollout,
    LatimALTI,
    LatimFlow,
    LatimNorm,
    MambaAttribution,
    SSMLLMAttribution,
)
from captum_ssm.models import load_bundled

pytestmark = pytest.mark.slow

#: By which relevance stays as it is when a text goes on: it is in comparison with no mean.
FIXED = {LatimFlow: {"rule": "frozen"}}
MODELS = {
    "mamba": mamba_lm,
    "mamba2": lambda: mamba2.make_model("mamba2"),
    "bamba": lambda: mamba2.make_model("bamba"),
    "gpt_neox": lambda: attention.attention_model("gpt_neox"),
}
PROMPT = "anna owns the lamp . bob owns $5 . the"
TEXT = "lamp . bob owns"


def explainer(model, method=ImplicitAttentionRollout, **options):
    return SSMLLMAttribution(method(model), language.word_tokenizer(**options))


def ids_of(tokenizer, prompt=PROMPT, text=TEXT):
    prompt_ids = tokenizer.encode(prompt)
    text_ids = tokenizer.encode(text, add_special_tokens=False)
    assert prompt_ids[0] == 0 and text_ids[0] != 0  # only the prompt begins with <s>
    return torch.tensor([prompt_ids]), torch.tensor(text_ids)


def rows_of(method, prompt, text, **options):
    whole = torch.cat([prompt[0], text])[None]
    start = prompt.shape[1]
    rows = [
        method.attribute(whole, target=(p - 1, int(whole[0, p])), per_token=True, **options)
        for p in range(start, whole.shape[1])
    ]
    return torch.cat(rows)


def check(result, rows, columns, tolerance=1e-5):
    assert isinstance(result, LLMAttributionResult)
    assert oracles.relative_error(result.token_attr, rows[:, :columns]) <= tolerance
    assert oracles.relative_error(result.seq_attr, rows[:, :columns].sum(0)) <= tolerance
    difference = (result.generated_attr - rows[:, columns:]).abs().max()
    assert difference <= tolerance * rows.abs().max()
    assert not result.generated_attr.triu().any()
    for tensor in (result.token_attr, result.seq_attr, result.generated_attr):
        assert tensor.dtype == torch.float32 and tensor.device.type == "cpu"
        assert not tensor.requires_grad
    assert result.token_attr.shape == (len(result.output_tokens), len(result.input_tokens))


@pytest.mark.parametrize("model", ["mamba", "bamba"])
@each_method
def test_rows_are_those_of_the_method_from_one_explained_run(method, model):
    model, tokenizer, runs = MODELS[model](), language.word_tokenizer(), []
    handle = model.register_forward_hook(lambda *_: runs.append(1))
    options = FIXED.get(method, {})
    with without_replays(runs):
        result = SSMLLMAttribution(method(model), tokenizer).attribute(PROMPT, TEXT, **options)
    handle.remove()
    assert len(runs) in (1, 2)  # one that the numbers are compared with
    prompt, text = ids_of(tokenizer)
    check(result, rows_of(method(model), prompt, text, **options), prompt.shape[1])
    assert result.input_tokens == ["<s>", *PROMPT.split()]
    assert result.output_tokens == TEXT.split()


BASELINES = {
    "none": lambda model, ids: None,
    "zero": lambda model, ids: 0.0,
    "mean": lambda model, ids: "mean",
    "ids": lambda model, ids: torch.full_like(ids, 3),
    "embeddings": lambda model, ids: 0.1 * torch.randn(*ids.shape, model.config.hidden_size),
}


@pytest.mark.parametrize("rule", ["centered", None])
@pytest.mark.parametrize("baselines", BASELINES)
def test_rules_and_baselines_are_those_of_the_method(rule, baselines):
    model, tokenizer = mamba_lm(), language.word_tokenizer()
    prompt, text = ids_of(tokenizer)
    length = prompt.shape[1]
    read = torch.cat([prompt[0], text[:-1]])[None]
    options = {"rule": rule, "baselines": BASELINES[baselines](model, read)}
    result = explainer(model, LatimFlow).attribute(PROMPT, TEXT, **options)
    targets = [(length - 1 + i, int(token)) for i, token in enumerate(text)]
    rows = torch.cat([LatimFlow(model).attribute(read, target=t, **options) for t in targets])
    check(result, torch.nn.functional.pad(rows, (0, 1)), length)


@pytest.mark.parametrize("text", ["lamp", "lamp the"])
def test_short_sequences(text):
    model, tokenizer = mamba_lm(), language.word_tokenizer()
    prompt, ids = ids_of(tokenizer, "", text)
    result = explainer(model, LatimFlow).attribute("", text, rule="frozen")  # <s> alone
    check(result, rows_of(LatimFlow(model), prompt, ids, rule="frozen"), 1)


def test_several_targets_share_the_prompt(monkeypatch):
    explain, encoded = explainer(mamba_lm(), LatimFlow), []
    texts = ["lamp", "the $5 .", "bob"]
    wanted = [explain.attribute(PROMPT, text) for text in texts]
    ids = explain.codec.encode(texts[2], special=False)
    encode = type(explain.codec).encode
    monkeypatch.setattr(
        type(explain.codec), "encode", lambda *a, **k: encoded.append(a[1]) or encode(*a, **k)
    )
    found = explain.attribute(PROMPT, [*texts[:2], ids])
    assert encoded == [PROMPT, *texts[:2]]
    assert isinstance(found, list) and len(found) == 3
    for result, other in zip(found, wanted, strict=True):
        assert torch.equal(result.token_attr, other.token_attr)
        assert result.output_tokens == other.output_tokens
    (alone,) = explain.attribute(PROMPT, ["lamp"])
    assert torch.equal(alone.seq_attr, wanted[0].seq_attr)


@pytest.mark.parametrize("gen_args", [None, {"max_new_tokens": 3, "do_sample": False}])
@pytest.mark.parametrize("model", ["mamba", "gpt_neox"])
def test_the_model_generates_its_own_target(model, gen_args):
    model = MODELS[model]()
    explain, runs = explainer(model), []
    prompt, _ = ids_of(language.word_tokenizer())
    wanted = model.generate(prompt, **(gen_args or {"max_new_tokens": 25, "do_sample": False}))
    new = wanted[0, prompt.shape[1] :]
    generate = model.generate

    def counted(*args, **kwargs):
        found = generate(*args, **kwargs)
        runs.clear()
        return found

    model.generate = counted
    handle = model.register_forward_hook(lambda *_: runs.append(1))
    with without_replays(runs):
        result = explain.attribute(PROMPT, gen_args=gen_args)
    handle.remove()
    assert len(runs) == 1  # besides those of the generation
    assert torch.equal(result.token_attr, explain.attribute(PROMPT, new).token_attr)
    assert result.output_tokens == explain.codec.names(new)


def test_generate_of_mamba_ssm_counts_the_prompt():
    model, asked = mamba_lm(), []

    def generate(input_ids, max_length, top_k=1, **kwargs):
        asked.append((max_length, kwargs))
        return torch.cat([input_ids, torch.tensor([[4, 2]])], dim=1)

    model.generate = generate
    result = explainer(model).attribute(PROMPT)
    assert asked[0][0] == len(result.input_tokens) + 25
    assert result.output_tokens == ["lamp", "owns"]


@pytest.mark.parametrize(("method", "options"), [
    (LatimFlow, {"contrast": "others"}),
    (LatimFlow, {"contrast": (-1, 2)}),
    (LatimFlow, {"rule": "half"}),
    (ImplicitAttentionRollout, {"components": "s6", "normalize_rows": True}),
    (MambaAttribution, {"clamp": "abs", "start_layer": 1}),
    (LatimALTI, {"aggregate": "mean"}),
])  # fmt: skip
def test_options_go_to_the_method(method, options):
    model, tokenizer = mamba_lm(), language.word_tokenizer()
    explain = SSMLLMAttribution(method(model), tokenizer)
    prompt, text = ids_of(tokenizer, text="lamp")
    result = explain.attribute(PROMPT, "lamp", **options)
    target = (prompt.shape[1] - 1, int(text))
    wanted = method(model).attribute(prompt, target=target, per_token=True, **options)
    assert oracles.relative_error(result.token_attr, wanted) <= 1e-6
    plain = explain.attribute(PROMPT, "lamp")
    assert oracles.relative_error(result.token_attr, plain.token_attr) > 1e-4


@each_method
def test_the_bundled_model_with_its_vocabulary(method):
    model, vocabulary = load_bundled()
    prompt = "anna owns the lamp . bob owns the kite . ? anna owns the"
    result = SSMLLMAttribution(method(model), vocabulary).attribute(
        prompt, gen_args={"max_new_tokens": 1}, skip_tokens=["owns", vocabulary.id_of("the")]
    )
    assert result.output_tokens == ["lamp"]
    assert result.input_tokens == [w for w in prompt.split() if w not in ("owns", "the")]
    if method not in (MambaAttribution, LatimNorm):
        assert result.input_tokens[int(result.seq_attr[:-1].argmax())] == "lamp"


@named([LatimFlow, ImplicitAttentionRollout])
def test_virtual_tokens_move_no_position(method):
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=3, token_dim=10, num_layers=2,
        num_attention_heads=1,
    )  # fmt: skip
    tokenizer = language.word_tokenizer()
    model = mamba_lm(vocab_size=len(tokenizer))
    tuned = peft.get_peft_model(model, config).eval()
    options = FIXED.get(method, {})
    found = SSMLLMAttribution(method(tuned), tokenizer).attribute(PROMPT, target=TEXT, **options)
    prompt, text = ids_of(tokenizer)
    embedded = model.get_input_embeddings()(torch.cat([prompt[0], text[:-1]])[None])
    whole = torch.cat([tuned.get_prompt(batch_size=1), embedded], 1).detach()
    length = prompt.shape[1]
    for i, token in enumerate(text.tolist()):
        target = 3 + length - 1 + i, token
        row = method(model).attribute(whole, target=target, per_token=True, **options)[0, 3:]
        torch.testing.assert_close(found.token_attr[i], row[:length], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found.generated_attr[i, :-1], row[length:], rtol=1e-4, atol=1e-5)
