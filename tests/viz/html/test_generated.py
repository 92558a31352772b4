"""Pages of answers: what they hold is what the method says of each word."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.pages import ReadPage, read_page
from zoo.small import mamba_lm

from captum_ssm import LatimFlow, MambaAttribution, MambaLRP, SSMLLMAttribution, report
from captum_ssm.errors import InputError, OptionError
from captum_ssm.models import load_bundled

PROMPT = "anna owns the lamp . bob owns the kite . ? anna owns the"


def rows(page: ReadPage, block: str, words: int) -> np.ndarray:
    """The rows of a block, (words, features + words)."""
    data = base64.b64decode(page.by_id(block))
    largest = np.frombuffer(data, "<f4", words)
    steps = np.frombuffer(data, "<i2", offset=4 * words).reshape(words, -1)
    return steps / 32767 * largest[:, None]


@pytest.mark.slow
def test_it_holds_what_the_method_says_of_each_word(tmp_path: Path) -> None:
    model, vocabulary = load_bundled()
    path = tmp_path / "new" / "answers.html"
    options: dict[str, Any] = {"tokenizer": vocabulary, "generate": 4, "hops": 1, "title": "T & U"}
    assert report(model, PROMPT, path=path, **options) == path
    page = read_page(path)
    assert page.texts("title") == page.texts("h1") == ["T & U"]
    (example,) = page.facts["examples"]
    expected = SSMLLMAttribution(LatimFlow(model), vocabulary).attribute(
        PROMPT, spans="word", prompt_spans="word", hops=1, contrast="mean",
        gen_args={"max_new_tokens": 4, "do_sample": False},
    )  # fmt: skip
    assert example["prompt"]["labels"] == PROMPT.split()
    assert example["answer"]["labels"] == expected.output_tokens
    assert example["prompt"]["sentences"] == [0, 5, 10, 11]
    assert page.facts["about"].endswith("by LatimFlow, of each token's logit less the mean of all")
    assert len(example["blocks"]) == len(expected.spans.hops) == 2
    for block, hop, constants in zip(
        example["blocks"], expected.spans.hops, example["constants"], strict=True
    ):
        wanted = torch.cat([hop.prompt, hop.text + hop.unresolved], 1).numpy()
        limit = np.abs(wanted).max(1, keepdims=True) / 60000
        assert (np.abs(rows(page, block, 4) - wanted) <= limit).all()
        np.testing.assert_allclose(constants, hop.constants, rtol=1e-4)


@pytest.mark.slow
def test_methods_without_sums_and_several_texts(tmp_path: Path) -> None:
    model, vocabulary = load_bundled()
    path, method = tmp_path / "answers.html", MambaAttribution(model)
    report(model, [PROMPT, "bob owns the"], {"mine": method}, tokenizer=vocabulary, generate=2,
           names=["one", "two"], path=path)  # fmt: skip
    page = read_page(path)
    assert [example["name"] for example in page.facts["examples"]] == ["one", "two"]
    assert page.facts["about"].startswith("MambaForCausalLM: relevance by mine, without")
    (block,) = page.facts["examples"][1]["blocks"]
    found = SSMLLMAttribution(method, vocabulary).attribute(
        "bob owns the", gen_args={"max_new_tokens": 2, "do_sample": False}
    )
    assert found.token_attr[0, 2] > 0.9 and found.generated_attr[1, 0] > 0.9  # the identity
    shown = rows(page, block, 2)
    assert not shown[0, 2:].any() and not shown[1, 3:].any()
    np.testing.assert_allclose(shown[0, :2], found.token_attr[0, :2], rtol=1e-3)
    np.testing.assert_allclose(shown[1, :3], found.token_attr[1], rtol=1e-3, atol=1e-7)


REFUSED = [
    ({"generate": 0}, OptionError, "generate=0"),
    ({"target": (-1, 3)}, OptionError, "target is not for answers"),
    ({"matrices": False}, OptionError, "matrices is not for answers"),
    ({"methods": [LatimFlow, MambaLRP]}, OptionError, "methods names 2"),
    ({"options": {"flow": {}}}, OptionError, "options names 'flow', but the method is 'Latim"),
    ({"tokenizer": None}, InputError, "tokenizer"),
    ({"names": ["a", "b"]}, InputError, "names"),
    ({"inputs": []}, InputError, "inputs is an empty list"),
    ({"inputs": 3}, InputError, "inputs is of type int"),
]


def test_refusals(tmp_path: Path) -> None:
    model, vocabulary = load_bundled()
    given = {"generate": 1, "tokenizer": vocabulary, "path": tmp_path / "answers.html"}
    given |= {"inputs": "anna owns the"}
    for options, error, said in REFUSED:
        with pytest.raises(error, match=said):
            report(model, **(given | options))
    other = mamba_lm()
    other.generate = None
    with pytest.raises(OptionError, match="no generate"):
        report(other, **given)
    assert not list(tmp_path.iterdir())
