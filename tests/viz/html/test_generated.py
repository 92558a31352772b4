"""Pages of answers and of results: what they hold is what methods say."""

from __future__ import annotations

import html
import re
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.pages import ReadPage, addresses, read_page
from zoo.small import images, mamba_lm, token_ids, vision

from captum_ssm import (
    ImplicitAttentionRollout,
    LatimFlow,
    LatimLogit,
    MambaAttribution,
    MambaLRP,
    SSMLLMAttribution,
    compare,
    report,
)
from captum_ssm.attr import Comparison
from captum_ssm.errors import InputError, OptionError
from captum_ssm.models import load_bundled

PROMPT = "anna owns the lamp . bob owns the kite . ? anna owns the"


def rows(page: ReadPage, block: str, words: int) -> np.ndarray:
    """The rows of a block, (words, features + words)."""
    data = page.block(block)
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
    assert page.facts["about"].endswith("by LatimFlow, for each token's logit minus the mean logit")
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
    ({"target": (-1, 3)}, OptionError, "target is not accepted with generate=1"),
    ({"matrices": False}, OptionError, "matrices is not accepted with"),
    ({"methods": [LatimFlow, MambaLRP]}, OptionError, "methods has 2"),
    ({"options": {"flow": {}}}, OptionError, "options has 'flow'. Pass only options for 'Latim"),
    ({"tokenizer": None}, InputError, "tokenizer"),
    ({"names": ["a", "b"]}, InputError, "names"),
    ({"inputs": []}, InputError, "inputs is empty"),
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


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "report.html"


@pytest.mark.parametrize("rule", ["frozen", pytest.param("centered", marks=pytest.mark.slow)])
def test_every_prediction_has_its_own_relevance(path: Path, rule: Any) -> None:
    model, ids = mamba_lm(), token_ids(1, 9)
    methods, options = {"flow": LatimFlow, "other": MambaAttribution}, {"flow": {"rule": rule}}
    report(model, ids, methods, options=options, target=(5, 7), matrices=False, path=path)
    page = read_page(path)
    (example,) = page.facts["examples"]
    flow, other = example["methods"]
    assert other["answers"] == []
    logits = model(ids).logits[0, 5].detach()
    best = list(dict.fromkeys([*logits.topk(5).indices.tolist(), 7]))
    assert example["asked"] == best.index(7)
    said = [(int(p["label"]), p["rival"]) for p in example["predictions"]]
    assert said[: len(best)] == [(token, False) for token in best]
    # rivals are of the text, first what stood behind the asking token there
    text = ids[0].tolist()
    rivals = sorted(set(text) - set(best), key=lambda k: -float(logits[k]))
    behind = [k for k in rivals if text[5] in [text[i - 1] for i in range(1, 9) if text[i] == k]]
    rivals = [*behind, *(k for k in rivals if k not in behind)][:3]
    assert said[len(best) :] == [(token, True) for token in rivals]
    best += rivals
    assert len(flow["answers"]) == len(best)
    for token, answer in [*zip(best, flow["answers"], strict=True)][::2]:
        found = LatimFlow(model).decompose(ids, (5, token), rule=rule)
        size = float(found.tokens.abs().max())
        np.testing.assert_allclose(answer["values"], found.tokens[0], atol=1e-4 * size)
        assert answer["output"] == pytest.approx(float(logits[token]), abs=1e-4)
        assert answer["bias"] == pytest.approx(float(found.bias[0]), abs=1e-4)
        assert set(answer["roles"]) == (set() if rule == "frozen" else set(found.roles or {}))
    # the page takes differences, which are what the method says of a contrast
    one, rival = flow["answers"][0], flow["answers"][1]
    pair = {"target": (5, best[0]), "contrast": (5, best[1]), "rule": rule}
    exact = LatimFlow(model).attribute(ids, **pair)[0]
    difference = np.array(one["values"]) - np.array(rival["values"])
    np.testing.assert_allclose(difference, exact, atol=1e-4 * float(exact.abs().max()))


WORDS = ["anna", "owns", "<script>", "lamp", "."]


def written(found: Any, tmp_path: Path, **options: Any) -> dict[str, Any]:
    """The facts of a result's page."""
    path = tmp_path / "new" / "found.html"
    assert found.to_html(path, **options) == path
    page = read_page(path)
    assert addresses(page) == []
    return page.facts


def test_methods_side_by_side(tmp_path: Path) -> None:
    found = compare(
        mamba_lm(), token_ids(2, 5), [LatimFlow, ImplicitAttentionRollout], target=(-1, 3)
    )
    facts = written(found.named([WORDS, WORDS[::-1]]), tmp_path, title="T & U")
    assert read_page(tmp_path / "new" / "found.html").texts("h1") == ["T & U"]
    assert [e["words"]["labels"] for e in facts["examples"]] == [WORDS, WORDS[::-1]]
    for number, example in enumerate(facts["examples"]):
        assert [row["name"] for row in example["rows"]] == list(found)
        for row, relevance in zip(example["rows"], found.values(), strict=True):
            np.testing.assert_allclose(row["values"], relevance[number], rtol=1e-4, atol=1e-9)
            assert row["scale"] == max(map(abs, row["values"]))
        assert "identity" not in example["rows"][0]["note"]
        assert "identity" in example["rows"][1]["note"]


def test_a_decomposition_is_written_out(tmp_path: Path) -> None:
    found = LatimFlow(mamba_lm()).decompose(token_ids(1, 5), (-1, 3), rule="centered")
    (example,) = written(found, tmp_path)["examples"]
    assert example["words"]["labels"] == list("01234")
    assert [row["name"] for row in example["rows"]][:2] == ["relevance", "as content"]
    np.testing.assert_allclose(example["rows"][0]["values"], found.tokens[0], rtol=1e-4)
    np.testing.assert_allclose(example["rows"][1]["values"], found.roles["content"][0], rtol=1e-4)
    assert len({row["scale"] for row in example["rows"]}) == 1
    parts = dict(example["sum"]["parts"])
    assert sum(parts.values()) == pytest.approx(example["sum"]["output"], abs=1e-4)
    np.testing.assert_allclose(example["layers"][1], found.streams[1][0], rtol=1e-4, atol=1e-9)
    assert len(example["layers"]) == 3


@pytest.mark.slow
def test_decompositions_of_logits_and_of_images(tmp_path: Path) -> None:
    logits = LatimLogit(mamba_lm()).decompose(token_ids(1, 5), (-1, 3))
    (example,) = written(logits, tmp_path)["examples"]
    np.testing.assert_allclose(example["rows"][0]["values"], logits.tokens[0], rtol=1e-4)
    pixels = LatimFlow(vision("middle", (3, 4))).decompose(images(1), 0)
    (example,) = written(pixels, tmp_path)["examples"]
    (shown,), wanted = example["maps"], pixels.inputs[0].sum(0)
    assert example["rows"] == [] and shown["size"] == list(wanted.shape)
    np.testing.assert_allclose(shown["values"], wanted.flatten(), rtol=1e-3, atol=1e-7)


def test_what_says_nothing_says_so(tmp_path: Path) -> None:
    rows = {
        MambaAttribution.get_name(): torch.tensor([[1e-5, 2e-5, 1.0]]),
        ImplicitAttentionRollout.get_name(): torch.tensor([[0.2, 0.0, 1.0]]),
        "zero": torch.zeros(1, 3),
    }
    (example,) = written(Comparison(rows), tmp_path)["examples"]
    notes = [row["note"] for row in example["rows"]]
    assert ["negligible" in note for note in notes] == [True, False, False]
    assert [note == "All values are zero." for note in notes] == [False, False, True]


def test_notebooks_show_a_frame_that_is_whole_by_itself() -> None:
    shown = Comparison({"one": torch.tensor([[0.5, -1.0]])}).named(["</iframe>", "b"])._repr_html_()
    (frame,) = re.findall(r"<iframe ([^>]*)></iframe>", shown)
    assert 'sandbox="allow-scripts"' in frame
    page = html.unescape(re.search(r'srcdoc="([^"]*)"', frame)[1])
    assert page.startswith("<!doctype html>") and "default-src" in page
    assert not re.search(r"https?://", page)


def test_show_is_below_the_cell_or_in_a_browser(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, opened = Comparison({"one": torch.tensor([[0.5]])}), []
    monkeypatch.setattr("webbrowser.open", opened.append)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    found.show()
    (file,) = tmp_path.iterdir()
    assert opened == [file.as_uri()] and f"wrote {file}" in capsys.readouterr().out
    assert "<!doctype html>" in file.read_text()
    displayed: list[Comparison] = []
    shell = types.SimpleNamespace(kernel=object())
    python = types.SimpleNamespace(get_ipython=lambda: shell)
    display = types.SimpleNamespace(display=displayed.append)
    monkeypatch.setitem(sys.modules, "IPython", python)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    found.show()
    assert displayed[0] is found and len(opened) == 1
