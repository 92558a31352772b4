"""Sums over tokens as one target, spans of a text, and hops back to the prompt."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from zoo.small import mamba_lm

from captum_ssm import (
    ImplicitAttentionRollout,
    LatimALTI,
    LatimFlow,
    LatimLogit,
    LatimNorm,
    MambaAttribution,
    MambaLRP,
    SSMLLMAttribution,
    TransformerAttribution,
)
from captum_ssm.attr import SumTarget
from captum_ssm.attr.engine import linear_method
from captum_ssm.errors import InputError, OptionError, TargetError
from captum_ssm.models import load_bundled

pytestmark = pytest.mark.slow

PROMPT = "anna owns the lamp . bob owns the kite . ? anna owns the"
TEXT = "lamp . ? bob owns the kite ."
POSITIONS, TOKENS, WEIGHTS = [5, 7, 10], [3, 4, 5], [1.0, 0.5, -2.0]


def near(found: Tensor, expected: Tensor, bound: float = 2e-6) -> bool:
    size = float(expected.abs().max())
    return float((found - expected).abs().max()) <= bound * max(size, 1e-6)


# --- one target of several tokens ----------------------------------------------------------------


@pytest.mark.parametrize("contrast", [None, "mean", "all", "others", "runner-up", (-1, 2)])
@pytest.mark.parametrize("method", [LatimFlow, LatimLogit])
def test_a_sum_is_the_sum_of_its_tokens(method: Any, contrast: Any) -> None:
    model, ids = mamba_lm().double(), torch.randint(15, (2, 12))
    explain = method(model)
    found = explain.attribute(ids, SumTarget(POSITIONS, TOKENS, WEIGHTS), contrast=contrast)
    second = contrast if isinstance(contrast, tuple) else None
    each = None if second else contrast
    expected = sum(
        weight * explain.attribute(ids, (position, token), contrast=each)
        for position, token, weight in zip(POSITIONS, TOKENS, WEIGHTS, strict=True)
    )
    if second:
        expected = expected - explain.attribute(ids, second)
    assert near(found, expected)


@pytest.mark.parametrize("method", [ImplicitAttentionRollout, LatimNorm, LatimALTI])
def test_methods_that_know_no_target_take_the_mean_row(method: Any) -> None:
    model, ids = mamba_lm().double(), torch.randint(15, (2, 12))
    found = method(model).attribute(ids, SumTarget(POSITIONS, TOKENS))
    rows = [method(model).attribute(ids, (position, 0)) for position in POSITIONS]
    assert near(3 * found, sum(rows))


@pytest.mark.parametrize("method", [MambaAttribution, TransformerAttribution])
def test_methods_that_take_gradients_take_that_of_the_sum(method: Any) -> None:
    model, ids = mamba_lm().double(), torch.randint(15, (2, 12))
    found = method(model).attribute(ids, SumTarget([7, 7], [3, 4], [1.0, 1.0]))

    def summed(ids: Tensor) -> Tensor:
        return model(ids).logits[:, 7, [3, 4]].sum(-1)

    assert near(found, method(summed, model).attribute(ids, query=7))


def test_sums_of_each_example_and_in_parts_of_a_batch() -> None:
    model, ids = mamba_lm().double(), torch.randint(15, (3, 9))
    total = SumTarget(
        torch.tensor([[3, 4], [5, 6], [7, -1]]), torch.tensor([[1, 2], [3, 4], [5, 6]])
    )
    whole = LatimFlow(model).attribute(ids, total, contrast="all")
    parts = LatimFlow(model).attribute(ids, total, contrast="all", internal_batch_size=2)
    assert near(parts, whole)
    for b, (where, what) in enumerate([((3, 4), (1, 2)), ((5, 6), (3, 4)), ((7, -1), (5, 6))]):
        alone = sum(
            LatimFlow(model).attribute(ids[b : b + 1], pair, contrast="all")
            for pair in zip(where, what, strict=True)
        )
        assert near(whole[b : b + 1], alone)


@pytest.mark.parametrize(("make", "said"), [
    (lambda: SumTarget([1], [2, 3]), "Pass equal shapes"),
    (lambda: SumTarget(torch.zeros(0).long(), torch.zeros(0).long()), "at least one"),
    (lambda: SumTarget([1.5], [2]), "SumTarget has positions=\\[1.5\\]"),
    (lambda: SumTarget([[1], [1, 2]], [2]), "SumTarget has positions=.*integers"),
    (lambda: SumTarget([12], [2]), "position 12"),
    (lambda: SumTarget([1], [19]), "token 19"),
    (lambda: SumTarget(torch.ones(3, 2).long(), torch.ones(3, 2).long()), "3 examples"),
])  # fmt: skip
def test_sums_that_do_not_fit(make: Any, said: str) -> None:
    with pytest.raises(TargetError, match=said):
        LatimFlow(mamba_lm()).attribute(torch.randint(15, (2, 12)), make())


# --- spans ----------------------------------------------------------------------------------------


def explainer(method: Any = LatimFlow) -> SSMLLMAttribution:
    model, vocabulary = load_bundled()
    return SSMLLMAttribution(method(model), vocabulary)


@pytest.mark.parametrize("method", [LatimFlow, LatimLogit, ImplicitAttentionRollout])
def test_a_span_is_the_sum_of_its_tokens(method: Any) -> None:
    explain = explainer(method)
    options = {} if method is ImplicitAttentionRollout else {"contrast": "all"}
    tokens = explain.attribute(PROMPT, TEXT, **options)
    for spans, ranges in (
        ("token", [range(i, i + 1) for i in range(8)]),
        ("sentence", [range(2), range(2, 3), range(3, 8)]),
        ("all", [range(8)]),
        ([(0, 3), slice(4, 6)], [range(3), range(4, 6)]),
        (re.compile(r"(?<=owns) "), [range(5), range(5, 8)]),
    ):
        found = explain.attribute(PROMPT, TEXT, spans=spans, **options)
        assert [span for span in found.spans.ranges] == ranges
        for row, own, span in zip(found.token_attr, found.generated_attr, ranges, strict=True):
            some = slice(span.start, span.stop)
            assert near(row, tokens.token_attr[some].sum(0), 5e-6)
            assert near(own, tokens.generated_attr[some].sum(0), 5e-6)
    assert found.output_tokens == ["lamp . ? bob owns", "the kite ."]


def test_what_a_span_adds_up_to() -> None:
    explain = explainer()
    found = explain.attribute(
        PROMPT, TEXT, spans="sentence", prompt_spans="sentence", contrast="all"
    )
    model, vocabulary = load_bundled()
    ids = torch.tensor([vocabulary.encode(f"{PROMPT} {TEXT}")])
    chances = model(ids[:, :-1]).logits.log_softmax(-1)[0]
    each = chances[torch.arange(13, 21), ids[0, 14:]]
    expected = torch.stack([each[span.start : span.stop].sum() for span in found.spans.ranges])
    assert near(found.spans.outputs.float(), expected.detach(), 1e-5)
    sentences = ["anna owns the lamp .", "bob owns the kite .", "?", "anna owns the"]
    assert found.input_tokens == sentences
    by_token = explain.attribute(PROMPT, TEXT, spans="sentence", contrast="all")
    sums = [
        by_token.token_attr[:, some].sum(1)
        for some in (slice(0, 5), slice(5, 10), slice(10, 11), slice(11, 14))
    ]
    assert near(found.token_attr, torch.stack(sums, 1), 5e-6)


def test_a_batch_of_one_and_a_budget() -> None:
    asked, whole = {"spans": "sentence"}, explainer(MambaAttribution)
    expected = whole.attribute(PROMPT, TEXT, **asked).token_attr
    for options in ({"internal_batch_size": 1}, {"memory_budget": "1MiB"}):
        assert near(whole.attribute(PROMPT, TEXT, **asked, **options).token_attr, expected)
    for options, said in (
        ({"internal_batch_size": 0}, "internal_batch_size=0"),
        ({"memory_budget": 1}, "memory_budget=1 bytes is too small"),
    ):
        with pytest.raises(OptionError, match=said):
            whole.attribute(PROMPT, TEXT, **asked, **options)


def test_features_of_the_prompt_by_mask_and_ranges() -> None:
    explain = explainer()
    whole = explain.attribute(PROMPT, TEXT, spans="all")
    mask = torch.tensor([0, 0, 0, 7, 7] + 9 * [3])
    found = explain.attribute(PROMPT, TEXT, spans="all", prompt_spans=mask)
    assert found.input_tokens == ["feature 0", "feature 3", "feature 7"]
    parts = whole.token_attr[0].split([3, 2, 9])
    expected = torch.stack([parts[0].sum(), parts[2].sum(), parts[1].sum()])
    assert near(found.token_attr[0], expected, 5e-6)
    # what is of no feature is not lost
    found = explain.attribute(PROMPT, TEXT, spans="all", prompt_spans=[(0, 3)])
    assert near(found.token_attr[0], parts[0].sum()[None], 5e-6)
    assert near(found.spans.outputs, whole.spans.outputs, 1e-6)
    plain = explain.attribute(PROMPT, TEXT, prompt_spans="sentence")
    assert tuple(plain.token_attr.shape) == (8, 4)


class Chat:
    chat_template = "plain"

    def __init__(self, vocabulary: Any) -> None:
        self.encode, self.decode = vocabulary.encode, vocabulary.decode

    def apply_chat_template(self, messages: Any, **options: Any) -> str:
        return " ".join(f"? {message['content']}" for message in messages)


def test_turns_of_a_chat() -> None:
    model, vocabulary = load_bundled()
    explain = SSMLLMAttribution(LatimFlow(model), Chat(vocabulary))
    turns = ["anna owns the lamp .", "bob owns the kite .", "anna owns the"]
    messages = [{"role": "user", "content": turn} for turn in turns]
    found = explain.attribute(messages, "lamp .", spans="all", prompt_spans="turn")
    assert found.input_tokens == [f"? {turn}" for turn in turns]
    with pytest.raises(OptionError, match="turn"):
        explain.attribute(PROMPT, "lamp .", spans="all", prompt_spans="turn")


@pytest.mark.parametrize(("options", "error", "said"), [
    ({"spans": "line"}, OptionError, "spans='line'"),
    ({"spans": 3}, OptionError, "spans=3"),
    ({"spans": [(0, 1, 2)]}, OptionError, "spans contains"),
    ({"spans": []}, InputError, "spans is an empty list"),
    ({"spans": [(0, 9)]}, InputError, "the text has 8 tokens"),
    ({"spans": [(2, 2)]}, InputError, "start < stop"),
    ({"spans": [(0, 3), (2, 5)]}, InputError, "overlap"),
    ({"prompt_spans": "stanza"}, OptionError, "prompt_spans"),
    ({"prompt_spans": torch.zeros(3).long()}, OptionError, "14"),
    ({"prompt_spans": [(3, 20)]}, InputError, "the text has 14 tokens"),
    ({"hops": -1}, OptionError, "hops"),
    ({"hops": 1.5}, OptionError, "hops"),
])  # fmt: skip
def test_wrong_spans(options: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        explainer().attribute(PROMPT, TEXT, **options)
    with pytest.raises(OptionError, match="hops=2 needs"):
        explainer(MambaAttribution).attribute(PROMPT, TEXT, hops=2)


# --- hops -----------------------------------------------------------------------------------------


def by_hand(explain: Any, prompt: Tensor, text: Tensor, hops: int) -> Tensor:
    ids = torch.cat([prompt, text[:-1]])[None]
    method, start = explain.attr_method, len(prompt)

    def row(token: int, contrast: str) -> tuple[Tensor, float]:
        target = (start + token - 1, int(text[token]))
        found = method.decompose(ids, target, contrast=contrast)
        return found.tokens[0].double(), float(found.output)

    total = sum(row(token, "all")[0] for token in range(len(text)))
    for _ in range(hops):
        passed = total.clone()
        for token in range(len(text) - 1):
            relevance, number = row(token, "mean")
            share = total[start + token]
            passed[start + token] -= share
            passed += share * relevance / number
        total = passed
    return total


@pytest.mark.parametrize("method", [LatimFlow, LatimLogit])
def test_hops_pass_relevance_on_along_the_tokens_own_rows(
    method: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("captum_ssm.attr.text.hops._LEAST", 0.0)
    monkeypatch.setattr("captum_ssm.attr.text.hops._SMALLEST_REST", 0.0)
    explain = explainer(method)
    rule = {} if method is LatimLogit else {"rule": method.default_rule}
    _, vocabulary = load_bundled()
    prompt, text = (torch.tensor(vocabulary.encode(words)) for words in (PROMPT, "lamp . ?"))
    for hops in (0, 1, 2):
        found = explain.attribute(
            PROMPT, "lamp . ?", spans="all", contrast="all", hops=hops, **rule
        )
        expected = by_hand(explain, prompt, text, hops)
        assert not found.spans.hops[-1].unresolved.any()
        assert near(found.token_attr[0].double(), expected[: len(prompt)], 1e-5)
        own = expected[len(prompt) :]
        assert float((found.generated_attr[0, :-1] - own).abs().max()) < 1e-4


@pytest.mark.parametrize("rule", ["frozen", "centered"])
def test_nothing_is_lost_on_the_way(rule: str) -> None:
    found = explainer().attribute(
        PROMPT, TEXT, spans="sentence", prompt_spans="sentence", contrast="all", hops=5, rule=rule
    )
    parts = found.spans
    assert len(parts.hops) > 1
    for hop in parts.hops:
        assert near(hop.total, parts.outputs, 1e-5)
    assert near(parts.delta, torch.zeros(3).double(), 1) or parts.delta.abs().max() < 1e-4
    last = parts.hops[-1]
    assert float(last.text.abs().sum()) <= 0.05 * float(parts.hops[0].text.abs().sum())


def test_a_token_that_is_no_more_likely_than_others_keeps_what_it_was_given() -> None:
    """Its own row has no sum to be divided by."""
    model, vocabulary = load_bundled()
    with torch.no_grad():
        model.lm_head.weight[vocabulary.encode("drum")[0]] = model.lm_head.weight.mean(0)
    explain = SSMLLMAttribution(LatimFlow(model), vocabulary)
    found = explain.attribute(PROMPT, "lamp drum .", spans="token", contrast="all", hops=2)
    last = found.spans.hops[-1]
    assert last.unresolved[2, 1] != 0
    assert not last.unresolved[:, 0].any()
    assert near(last.total, found.spans.outputs, 1e-5)


def test_the_rule_of_hops() -> None:
    """The frozen network gives nothing to queries, from which hops go on."""
    asked: dict[str, Any] = {"spans": "all", "contrast": "all"}
    found = explainer().attribute(PROMPT, TEXT, hops=1, **asked)
    for rule, same in (("balanced", True), ("frozen", False)):
        told = explainer().attribute(PROMPT, TEXT, hops=1, rule=rule, **asked)
        assert torch.equal(found.token_attr, told.token_attr) is same
    lrp = explainer(MambaLRP).attribute(PROMPT, TEXT, hops=1, **asked)
    half = explainer().attribute(PROMPT, TEXT, hops=1, rule="half", **asked)
    assert near(lrp.token_attr, half.token_attr)


def test_results_in_other_forms() -> None:
    found = explainer().attribute(PROMPT, TEXT, spans="sentence", contrast="all", hops=1)
    rows = found.spans.rows()
    for s, output in enumerate(found.spans.outputs.tolist()):
        for hop in (0, 1):
            total = sum(r["relevance"] for r in rows if r["span"] == s and r["hop"] == hop)
            assert abs(total - output) < 1e-4
    read = json.loads(found.spans.to_json())
    assert read["names"] == ["lamp .", "?", "bob owns the kite ."]
    assert read["spans"] == [[0, 2], [2, 3], [3, 8]]
    assert torch.tensor(read["hops"][1]["prompt"]).shape == (3, 14)
    found.plot_token_attr()


# --- against another text, and in several sittings ------------------------------------------------


@pytest.mark.parametrize("hops", [0, 2])
def test_a_text_against_another_of_any_length(hops: int) -> None:
    explain, asked = explainer(), {"spans": "all", "contrast": "all", "hops": hops}
    found = explain.attribute(PROMPT, "lamp .", against="kite . ? anna", **asked)
    one, other = (explain.attribute(PROMPT, text, **asked) for text in ("lamp .", "kite . ? anna"))
    assert near(found.token_attr, one.token_attr - other.token_attr)
    assert near(found.spans.outputs, one.spans.outputs - other.spans.outputs, 1e-5)
    assert near(found.spans.hops[-1].total, found.spans.outputs, 1e-5)
    with pytest.raises(OptionError, match="against="):
        explain.attribute(PROMPT, "lamp .", against="kite .", spans="token")


def test_a_run_that_was_ended_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {"spans": "sentence", "contrast": "all", "hops": 2}
    explain = explainer()
    whole = explain.attribute(PROMPT, TEXT, **asked)
    own, answered, limit = linear_method._decompose_each, [], 4

    def counted(*args: Any) -> Any:
        if len(answered) == limit:
            raise KeyboardInterrupt
        answered.append(args)
        return own(*args)

    monkeypatch.setattr(linear_method, "_decompose_each", counted)
    asked["resume"] = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        explain.attribute(PROMPT, TEXT, **asked)
    assert len(list((tmp_path / "run").glob("*.pt"))) == 4
    answered, limit = [], 100
    found = explain.attribute(PROMPT, TEXT, **asked)
    assert near(found.token_attr, whole.token_attr, 1e-6)
    assert near(found.generated_attr, whole.generated_attr, 1e-6)
    assert len(answered) == len(list((tmp_path / "run").glob("*.pt"))) - 4
    answered = []
    explain.attribute(PROMPT, TEXT, **asked)
    assert not answered
    for other in ({"rule": "half"}, {"hops": 1}, {"spans": "all"}, {"contrast": "mean"}):
        with pytest.raises(OptionError, match="a different model"):
            explain.attribute(PROMPT, TEXT, **{**asked, **other})
    with pytest.raises(OptionError, match="resume="):
        explain.attribute(PROMPT, TEXT, resume=tmp_path / "run")


@pytest.mark.parametrize("change", ["negated", "permuted", "buffer"])
def test_answers_of_another_model_are_refused(tmp_path: Path, change: str) -> None:
    explain = explainer()
    asked = {"spans": "all", "resume": tmp_path / "run"}
    weight, scale = explain.model.lm_head.weight, torch.ones(2)
    explain.model.register_buffer("scale", scale)
    explain.attribute(PROMPT, "lamp .", **asked)
    explain.attribute(PROMPT, "lamp .", **asked)
    with torch.no_grad():
        if change == "buffer":
            scale[1] = 2
        else:
            weight[3] = -weight[3] if change == "negated" else weight[3].flip(0)
    with pytest.raises(OptionError, match="a different model"):
        explain.attribute(PROMPT, "lamp .", **asked)
