"""Tokens as the words they make, and methods that say nothing, in a real browser."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.chromium import Page
from helpers.pages import read_page
from zoo.language import byte_tokenizer
from zoo.small import mamba_lm

from captum_ssm import ImplicitAttentionRollout, LatimFlow, MambaAttribution, report
from captum_ssm.models import load_bundled

pytestmark = pytest.mark.browser


def box(page: Page, index: int) -> dict[str, Any]:
    """Where a token is."""
    token = f"document.querySelector('#text .token[data-index=\"{index}\"]')"
    found: dict[str, Any] = page.evaluate(f"{token}.getBoundingClientRect().toJSON()")
    return found


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_tokens_of_a_word_touch_each_other(
    page: Page, tmp_path: Path, width: int, scheme: str
) -> None:
    torch.manual_seed(0)
    path = tmp_path / "words.html"
    tokenizer = byte_tokenizer()
    report(mamba_lm(vocab_size=260), "cat on\n好", [LatimFlow], tokenizer=tokenizer, path=path)
    page.resize(width)
    page.prefer(scheme)
    page.goto(path)
    texts = page.evaluate("[...document.querySelectorAll('#text .token')].map((t) => t.innerText)")
    assert texts == ["c", "a", "t", "␣", "o", "n", r"\n", "好", "₂", "₃"]
    boxes = [box(page, index) for index in range(10)]
    gaps = [b["left"] - a["right"] for a, b in pairwise(boxes)]
    assert gaps[0] == gaps[1] == gaps[4] == gaps[7] == gaps[8] == 0
    assert gaps[2] > 1 and gaps[3] > 1
    assert boxes[7]["top"] > boxes[6]["bottom"]  # a line ends there
    assert page.overflow() <= 0 and page.errors == []


@pytest.mark.parametrize(("width", "scheme"), [(1280, "dark"), (390, "light")])
def test_a_method_that_says_nothing_is_pale_and_says_so(
    page: Page, tmp_path: Path, width: int, scheme: str
) -> None:
    model, vocabulary = load_bundled()
    path = tmp_path / "nothing.html"
    methods = [MambaAttribution, ImplicitAttentionRollout]
    prompt = "anna owns the lamp . bob owns the kite . ? anna owns the"
    report(model, prompt, methods, tokenizer=vocabulary, path=path)
    facts = read_page(path).facts["examples"][0]["methods"]
    assert [method["silent"] for method in facts] == [True, False]
    page.resize(width)
    page.prefer(scheme)
    page.goto(path)
    said = page.evaluate(
        "[...document.querySelectorAll('#methods .largest')].map((e) => e.innerText)"
    )
    assert said[0].startswith("says nothing: at most +") and said[1].startswith("strongest +")
    tinted = (
        "[...document.querySelectorAll('#text .token')]"
        ".filter((t) => t.style.backgroundColor).length"
    )
    assert page.evaluate(tinted) == 0
    page.click("#methods label:nth-of-type(2)")
    assert page.evaluate(tinted) > 3
    assert page.overflow() <= 0 and page.errors == []
