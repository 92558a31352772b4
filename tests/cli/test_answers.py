"""``captum-ssm explain`` on whole answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.pages import read_page

from captum_ssm import LatimFlow, SSMLLMAttribution
from captum_ssm.models import load_bundled

PROMPT = "anna owns the lamp . bob owns the kite . ? anna owns the"
ANSWER = "lamp . ? bob owns the kite ."
ASKED = ("explain", "recall-mamba", "--text", PROMPT, "--out")


def test_numbers_of_a_given_answer(tmp_path: Path, run: Callable[..., str]) -> None:
    out = tmp_path / "answers.json"
    said = run(*ASKED, out, "--answer", ANSWER, "--hops", "2", "--rule", "half")
    (found,) = json.loads(out.read_text())["answers"]
    model, vocabulary = load_bundled()
    expected = SSMLLMAttribution(LatimFlow(model), vocabulary).attribute(
        PROMPT, ANSWER, spans="sentence", prompt_spans="sentence", hops=2, rule="half",
        contrast="all",
    )  # fmt: skip
    assert found["names"] == ["lamp .", "?", "bob owns the kite ."]
    assert found["features"] == expected.input_tokens
    assert len(found["hops"]) == len(expected.spans.hops) > 1
    last = torch.tensor(found["hops"][-1]["prompt"])
    assert torch.allclose(last, expected.token_attr, atol=1e-5)
    assert "'bob owns the kite .'" in said and f"wrote {out}" in said


@pytest.mark.slow
def test_a_picture_of_what_is_generated(tmp_path: Path, run: Callable[..., str]) -> None:
    out = tmp_path / "answers.png"
    run(*ASKED, out, "--generate", "2", "--spans", "token", "--prompt-spans", "token")
    assert out.stat().st_size > 1000
    method = ["--method", "ImplicitAttentionRollout"]
    run(*ASKED[:4], PROMPT, "--generate", "1", "--out", out, *method, "--force")
    assert (tmp_path / "answers-2.png").exists()


def test_a_page_of_what_is_generated(tmp_path: Path, run: Callable[..., str]) -> None:
    out = tmp_path / "answers.html"
    run(*ASKED, out, "--generate", "3", "--hops", "1", "--title", "Who owns what?")
    page = read_page(out)
    assert page.texts("h1") == ["Who owns what?"]
    assert page.facts["about"].startswith("recall-mamba: relevance by LatimFlow, of each token")
    (example,) = page.facts["examples"]
    assert example["prompt"]["labels"] == PROMPT.split()
    assert len(example["answer"]["labels"]) == 3 and example["answer"]["labels"][0] == "lamp"
    assert len(example["blocks"]) == 2
