"""Every page that the package writes or serves breaks no rule of axe-core."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import axe
from helpers.browser import Page
from helpers.insights_examples import cnn, numbers, photos, softmax, table, table_model
from zoo.small import VOCABULARY, images, mamba_lm, token_ids, vision

from captum_ssm import (
    ImplicitAttentionRollout,
    LatimFlow,
    LatimLogit,
    MambaAttribution,
    SSMLLMAttribution,
    report,
)
from captum_ssm.attr import Comparison
from captum_ssm.insights import AttributionVisualizer, Batch, FilterConfig, TextFeature
from captum_ssm.models import load_bundled
from captum_ssm.viz.html.generated import answers_page

METHODS = [LatimFlow, MambaAttribution, ImplicitAttentionRollout]
PROMPT = "anna owns the lamp . bob owns the kite . ? anna owns the"
ANSWER = "lamp . ? bob owns the kite ."
UNFOLD = "document.querySelectorAll('details').forEach((each) => { each.open = true; })"

Made = Callable[[Path], object]
BUSY = "document.querySelector('[aria-busy]') !== null"


@pytest.fixture
def sized(page: Page, view: int) -> Iterator[Page]:
    """An empty page, at each width and in each theme."""
    if axe.script() is None:
        pytest.skip(f"needs {axe.PACKAGE}, see CONTRIBUTING.md")
    yield page
    assert page.errors == []


def text(path: Path) -> object:
    model, vocabulary = load_bundled()
    return report(model, PROMPT, METHODS, tokenizer=vocabulary, path=path)


def texts(path: Path) -> object:
    names = [[f"{letter}{i}" for i in range(17)] for letter in "ab"]
    options: dict[str, Any] = {"tokens": names, "matrices": ["attention", "contributions"]}
    return report(mamba_lm(), token_ids(2, 17), METHODS, **options, path=path)


def a_folded_text(path: Path) -> object:
    names = [f"w{i}" for i in range(410)]
    return report(mamba_lm(), token_ids(1, 410), [LatimFlow], tokens=names, path=path)


def an_image(path: Path) -> object:
    return report(vision(), images(1), [LatimFlow, MambaAttribution], path=path)


def answers(path: Path) -> object:
    model, vocabulary = load_bundled()
    explain = SSMLLMAttribution(LatimFlow(model), vocabulary)
    found = explain.attribute(PROMPT, ANSWER, spans="word", prompt_spans="word", hops=2)
    return path.write_text(answers_page([found, found], "Who owns what?"), encoding="utf-8")


def a_decomposition(path: Path) -> object:
    model, vocabulary = load_bundled()
    ids, target = torch.tensor([vocabulary.encode(PROMPT)]), (-1, vocabulary.id_of("lamp"))
    found = LatimFlow(model).decompose(ids, target, rule="centred").named(PROMPT.split())
    return found.to_html(path)


def layers(path: Path) -> object:
    model, vocabulary = load_bundled()
    ids, target = torch.tensor([vocabulary.encode(PROMPT)]), (-1, vocabulary.id_of("lamp"))
    return LatimLogit(model).decompose(ids, target).named(PROMPT.split()).to_html(path)


def a_comparison(path: Path) -> object:
    found = Comparison({"one": torch.tensor([[0.5, -1.0]]), "two": torch.tensor([[0.1, 2.0]])})
    return found.named(["a", "b"]).to_html(path)


def maps(path: Path) -> object:
    found = {"one": torch.randn(1, 4, 6), "two": torch.zeros(1, 4, 6)}
    return Comparison(found).to_html(path)


PAGES: dict[Made, str] = {
    text: '#text .token[data-index="3"]',
    texts: '#text .token[data-index="3"]',
    a_folded_text: '#text .token[data-index="405"]',
    an_image: '#picture .token[data-index="3"]',
    answers: '#answer .token[data-index="3"]',
    a_decomposition: '#rows .token[data-index="3"]',
    layers: '#rows .token[data-index="3"]',
    a_comparison: '#rows .token[data-index="1"]',
    maps: "#maps canvas",
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[Made, Path]:
    """Each page, and what is chosen in it."""
    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("pages")
    paths = {make: folder / f"{make.__name__}.html" for make in PAGES}
    for make, path in paths.items():
        make(path)
    return paths


@pytest.mark.parametrize("make", PAGES, ids=lambda make: make.__name__)
def test_a_page_that_is_written(sized: Page, written: dict[Made, Path], make: Made) -> None:
    """Nothing is wrong as it opens, nor with all unfolded and something chosen."""
    sized.goto(written[make])
    assert axe.violations(sized) == []
    sized.evaluate(UNFOLD)
    sized.click(PAGES[make])
    sized.drawn()
    assert axe.violations(sized) == []


def of_texts() -> AttributionVisualizer:
    words = [f"w{i}" for i in range(VOCABULARY)]
    feature = TextFeature("prompt", None, None, lambda ids: [words[i] for i in ids[0]])
    batch = Batch(torch.tensor([[0, 1, 3, 4, 2], [4, 3, 0, 5, 6]]), torch.tensor([1, 2]))
    models = [mamba_lm(), mamba_lm()]
    visualizer = AttributionVisualizer(models, words, feature, [batch], softmax)
    visualizer.config = FilterConfig("LatimFlow", {"rule": "centred"})
    return visualizer


def of_photos() -> AttributionVisualizer:
    return photos(cnn(), [Batch(torch.rand(2, 3, 6, 6), torch.tensor([1, 2]))])


def of_numbers() -> AttributionVisualizer:
    return table(table_model(), [numbers(1, 0, 2)])


@pytest.mark.parametrize(
    ("make", "kept"), [(of_texts, False), (of_texts, True), (of_photos, False), (of_numbers, True)]
)
def test_insights(
    sized: Page, make: Callable[[], AttributionVisualizer], kept: bool, tmp_path: Path
) -> None:
    with make() as visualizer:
        if kept:
            visualizer.snapshot(tmp_path / "kept.html")
            sized.goto(tmp_path / "kept.html")
        else:
            visualizer.serve()
            sized.goto(visualizer.url)
        sized.wait_for(f"!({BUSY}) && document.querySelector('article') !== null")
        assert axe.violations(sized) == []
        sized.evaluate(UNFOLD)
        if make is of_texts and not kept:
            sized.wait_for(f"!({BUSY}) && document.querySelector('.graph svg') !== null")
            sized.click(".cutting form button")
            sized.wait_for(f"!({BUSY}) && document.querySelector('.cutting table') !== null")
        sized.drawn()
        assert axe.violations(sized) == []
        sized.evaluate("document.querySelector('main').setAttribute('aria-busy', 'true')")
        sized.drawn()
        assert axe.violations(sized) == []


def test_a_fault_is_found(sized: Page, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(
        '<!doctype html><html lang="en"><title>t</title><main><h1>t</h1>'
        '<p style="color: #999; background: #aaa">pale</p><img src="data:,"></main></html>',
        encoding="utf-8",
    )
    sized.goto(path)
    found = [line.partition(" ")[0] for line in axe.violations(sized)]
    assert found == ["color-contrast", "image-alt"]
