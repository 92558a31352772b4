"""The page of Insights, as a person uses it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from helpers.chromium import Page
from helpers.insights_examples import (
    CLASSES,
    Always,
    cnn,
    numbers,
    photos,
    softmax,
    table,
    table_model,
)
from zoo.small import VOCABULARY, mamba_lm

from captum_ssm.insights import AttributionVisualizer, Batch, FilterConfig, TextFeature
from captum_ssm.insights.calculation import AttributionCalculation

pytestmark = pytest.mark.browser

HOSTILE = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "</script>",
    "\"'><b>",
    "$x_1$",
    "zero\u200bwidth",
    "\u202eturned",
    "new\nline",
    "tab\t",
    "\x00",
    "",
    "שלום",
    "مرحبا",
    "👩\u200d🚀",
    "e\u0301",
    "javascript:alert(1)",
    "${alert(1)}",
    "&amp;",
    "__proto__",
]
#: What is seen of some of them.
SEEN = {
    "zero\u200bwidth": "zero\\u{200b}width",
    "\u202eturned": "\\u{202e}turned",
    "new\nline": "new\\u{a}line",
    "tab\t": "tab\\u{9}",
    "\x00": "\\u{0}",
    "": "(empty)",
}


@pytest.fixture
def opened(page: Page) -> Iterator[Any]:
    """Opens a visualizer's page, and in the end finds that all went well there."""
    served: list[AttributionVisualizer] = []

    def open_(visualizer: AttributionVisualizer, width: int = 1280) -> Page:
        served.append(visualizer)
        visualizer.serve()
        page.resize(width)
        page.goto(visualizer.url)
        settled(page)
        return page

    yield open_
    assert page.errors == [] and page.dialogs == []
    ports = {visualizer.serve() for visualizer in served}
    for address in map(urlsplit, page.requests):
        assert (address.scheme, address.hostname) == ("http", "127.0.0.1")
        assert address.port in ports
    for visualizer in served:
        visualizer.close()


def settled(page: Page) -> None:
    """Waits until the page has shown what it was asked for."""
    busy = "document.querySelector('main').hasAttribute('aria-busy')"
    page.wait_for(f"!{busy} && document.querySelector('#status').textContent !== ''")


def show(page: Page, button: str = "#show") -> None:
    page.click(button)
    settled(page)


def shade(page: Page, selector: str) -> list[float]:
    """Red, green, blue and opacity of a background."""
    found = page.style(selector, "background-color").partition("(")[2].rstrip(")")
    colour = [float(part) for part in found.replace("/", ",").split(",")]
    return [*colour, 1.0] if len(colour) == 3 else colour


def choose(page: Page, selector: str, value: str) -> None:
    """Chooses in a list as its own popup would."""
    page.evaluate(
        f"""(() => {{
          const list = document.querySelector({json.dumps(selector)});
          list.value = {json.dumps(value)};
          list.dispatchEvent(new Event('change', {{bubbles: true}}));
        }})()"""
    )


def fill(page: Page, selector: str, text: str) -> None:
    page.evaluate(f"document.querySelector({json.dumps(selector)}).select()")
    page.evaluate(f"document.querySelector({json.dumps(selector)}).focus()")
    page.type(text)


def texts(page: Page, selector: str) -> list[str]:
    found = page.evaluate(
        f"[...document.querySelectorAll({json.dumps(selector)})].map((e) => e.textContent)"
    )
    return [str(text) for text in found]


def pressed(page: Page) -> list[str]:
    return [text.partition(" (")[0] for text in texts(page, '[aria-pressed="true"]')]


def prompts(words: list[str], *ids: list[int]) -> AttributionVisualizer:
    model = mamba_lm(vocab_size=len(words))
    feature = TextFeature("prompt", None, None, lambda ids: [words[i] for i in ids[0]])
    batches = [Batch(torch.tensor([row]), None) for row in ids]
    visualizer = AttributionVisualizer(model, words, feature, batches, softmax)
    visualizer.config = FilterConfig("LatimFlow", {"rule": "frozen"})  # which tells no roles
    return visualizer


# --- loading -------------------------------------------------------------------------------------


def test_the_page_shows_the_first_examples_by_itself(opened):
    page = opened(table(Always(1), [numbers(1, 0, 2, 3, 4)]))
    assert texts(page, "h2") == [
        f"Example {i}: {CLASSES[label]}" for i, label in enumerate([1, 0, 2, 3], 1)
    ]
    assert texts(page, "h3") == ["Always, correct", *["Always, incorrect"] * 3]
    assert page.text("#status") == "4 examples of 4 searched."
    show(page, "#next")
    assert texts(page, "h2") == ["Example 5: eel"]
    assert "end of the dataset" in page.text("#status")
    show(page)
    assert texts(page, "h2") == ["Example 5: eel"]
    show(page, "#next")
    assert texts(page, "h2")[0] == "Example 1: bee"


def test_images_are_drawn_and_relevance_can_be_laid_over_them(opened):
    page = opened(photos(cnn(), [Batch(torch.rand(2, 3, 6, 6), torch.tensor([1, 2]))]))
    page.wait_for("[...document.images].every((image) => image.complete)")
    sizes = page.evaluate("[...document.images].map((i) => [i.naturalWidth, i.naturalHeight])")
    assert sizes == [[6, 6]] * 4 and page.count(".stack canvas") == 2
    assert page.style(".stack canvas", "opacity") == "0.85"
    page.evaluate("document.querySelector('#over-image input').focus()")
    page.key("Home")
    assert page.style(".stack canvas", "opacity") == "0"
    page.key("End")
    assert page.style(".stack canvas", "opacity") == "1"


def test_an_empty_dataset(opened):
    page = opened(table(Always(1), []))
    assert page.text("#status") == "The dataset is empty." and page.count("article") == 0


# --- choosing ------------------------------------------------------------------------------------


def test_filtering_by_prediction_and_class(opened):
    page = opened(table(Always(1), [numbers(1, 0, 2, 1)]))
    choose(page, "#prediction", "incorrect")
    show(page)
    assert texts(page, "h2") == ["Example 2: ant", "Example 3: cat"]
    choose(page, "#prediction", "all")
    fill(page, "#class", "eel")
    page.click("#add-class")
    assert texts(page, "#classes li") == ["eel ×"]
    show(page)
    assert page.count("article") == 0 and "None passes the filter" in page.text("#status")
    page.click("#classes button")
    fill(page, "#class", "bee")
    show(page)
    assert texts(page, "#classes li") == ["bee ×"] and page.count("article") == 4


def test_a_class_that_is_none_is_refused(opened):
    page = opened(table(Always(1), [numbers(1)]))
    fill(page, "#class", "elk")
    page.click("#add-class")
    assert not page.evaluate("document.querySelector('#choices').checkValidity()")
    fill(page, "#class", "eel")
    assert page.evaluate("document.querySelector('#choices').checkValidity()")
    assert texts(page, "#known-classes option") == [""] and page.evaluate(
        "document.querySelector('#known-classes option').value === 'eel'"
    )


def test_methods_and_their_arguments(opened):
    visualizer = table(table_model(), [numbers(1)])
    page = opened(visualizer)
    first = texts(page, "td.number")
    fill(page, "#argument-n_steps", "3")
    choose(page, "#argument-method", "riemann_left")
    show(page)
    second = texts(page, "td.number")
    assert second != first
    assert visualizer.config.attribution_arguments == {"n_steps": 3, "method": "riemann_left"}
    choose(page, "#method", "Saliency")
    assert page.count("#argument-n_steps") == 0
    show(page)
    assert all(float(text) >= 0 for text in texts(page, "td.number"))
    page.click("#argument-abs")
    show(page)
    assert visualizer.config == ("Saliency", {"abs": False}, "all", [], 4, [])
    choose(page, "#method", "Integrated Gradients")
    assert page.evaluate("document.querySelector('#argument-n_steps').value") == "3"
    show(page)
    assert texts(page, "td.number") == second


def test_arguments_keep_their_types(opened):
    visualizer = prompts([f"w{i}" for i in range(VOCABULARY)], [1, 2, 3, 4])
    page = opened(visualizer)
    choose(page, "#method", "ImplicitAttentionRollout")
    page.click("#argument-absolute")
    fill(page, "#argument-discard_ratio", "0.125")
    fill(page, "#argument-heads", "0, 3")
    fill(page, "#argument-start_layer", "1")
    choose(page, "#argument-query", "last")
    show(page)
    sent = visualizer.config.attribution_arguments
    assert sent["absolute"] is True and sent["discard_ratio"] == 0.125
    assert sent["heads"] == "0, 3" and sent["query"] == "last"
    assert sent["start_layer"] == 1 and type(sent["start_layer"]) is int
    assert page.count(".error") == 0 and page.count("article") == 1
    fill(page, "#argument-heads", "x")
    show(page)
    assert "use whole numbers" in page.text("section .error")


@pytest.mark.parametrize("steps", ["1", "2.5", "-3"])
def test_a_number_beyond_its_limits_is_not_sent(opened, steps):
    page = opened(table(table_model(), [numbers(1)]))
    fill(page, "#argument-n_steps", steps)
    before = len(page.requests)
    page.click("#show")
    page.click("#next")
    page.wait_for("!document.querySelector('#choices').checkValidity()")
    assert len(page.requests) == before


def test_methods_that_do_not_fit_say_why(opened):
    page = opened(table(table_model(), [numbers(1)]))
    disabled = "[...document.querySelector('#method').options].filter((o) => o.disabled)"
    names = page.evaluate(f"{disabled}.map((o) => o.value)")
    assert "LatimFlow" in names and "Saliency" not in names
    page.click("#unfit summary")
    reasons = dict(zip(texts(page, "#unfit dt"), texts(page, "#unfit dd"), strict=True))
    assert "token ids, embeddings or images" in reasons["LatimFlow"]
    assert "ReLU" in reasons["Guided Backprop"] and "Saliency" not in reasons


# --- explaining ----------------------------------------------------------------------------------


def test_another_class_is_explained_where_it_is_clicked(opened):
    page = opened(table(Always(1), [numbers(1, 2)]))
    assert pressed(page) == ["bee", "bee"]
    before = texts(page, "td.number")
    page.click("article:last-child .predicted button:nth-child(3)")
    page.wait_for("document.querySelector('#status').textContent === 'Explained.'")
    assert pressed(page)[0] == "bee" != pressed(page)[1]
    after = texts(page, "td.number")
    assert after[:3] == before[:3] and after[3:] != before[3:]
    assert page.evaluate("document.activeElement.getAttribute('aria-pressed')") == "true"


def test_what_is_asked_while_the_page_works_has_its_turn(opened):
    page = opened(table(Always(1), [numbers(1, 2)]))
    others = "document.querySelectorAll('.predicted button:nth-child(3)')"
    page.evaluate(f"{others}.forEach((each) => each.click())")
    settled(page)
    assert len(pressed(page)) == 2 and "bee" not in pressed(page)


def test_a_class_is_explained_by_the_method_that_is_shown(opened):
    page = opened(table(table_model(), [numbers(1)]))
    first = texts(page, "td.number")
    choose(page, "#method", "Saliency")  # not shown yet
    page.click(".predicted button:nth-child(2)")
    page.wait_for("document.querySelector('.predicted button:nth-child(2)').ariaPressed === 'true'")
    assert texts(page, "td.number") != first
    page.click(".predicted button")
    page.wait_for("document.querySelector('.predicted button').ariaPressed === 'true'")
    assert texts(page, "td.number") == first


def test_the_label_can_be_explained_as_well(opened):
    model = torch.nn.Linear(3, 5)
    torch.nn.init.normal_(model.weight, std=1e-6)
    model.bias.data.copy_(torch.arange(5, 0, -1))
    page = opened(table(model, [numbers(4)]))
    assert texts(page, ".predicted button")[-1] == "eel (the label)"
    page.click(".predicted button:last-child")
    page.wait_for("document.querySelector('#status').textContent === 'Explained.'")
    assert pressed(page) == ["eel"] and texts(page, "h3") == ["Linear, incorrect"]


def test_two_models_side_by_side(opened):
    page = opened(table([Always(1), Always(3)], [numbers(1, 0)]))
    assert texts(page, "h3") == [
        "Model 1, Always, correct",
        "Model 2, Always, incorrect",
        "Model 1, Always, incorrect",
        "Model 2, Always, incorrect",
    ]
    assert pressed(page) == ["bee", "dog"] * 2
    boxes = page.evaluate(
        "[...document.querySelectorAll('article:first-child section')]"
        ".map((s) => s.getBoundingClientRect().top)"
    )
    assert boxes[0] == boxes[1]
    choose(page, "#prediction", "correct")
    show(page)
    assert texts(page, "h3") == ["Model 1, Always, correct", "Model 2, Always"]
    assert "Does not pass the filter." in texts(page, "section p")


def test_an_error_of_a_model_is_shown_in_its_place(opened, monkeypatch):
    def broken(*arguments, **options):
        raise ValueError("<b>out of order</b>")

    page = opened(table(table_model(), [numbers(1)]))
    monkeypatch.setattr(AttributionCalculation, "relevance", broken)
    show(page)
    assert page.text("section .error") == "<b>out of order</b>" and page.count("section b") == 0


def test_a_server_that_has_ended_is_told(page):
    with table(Always(1), [numbers(1)]) as visualizer:
        visualizer.serve()
        page.goto(visualizer.url)
        settled(page)
    page.click("#show")
    page.wait_for("document.querySelector('#status').classList.contains('error')")
    assert "does not answer" in page.text("#status")


# --- text ----------------------------------------------------------------------------------------


def test_hostile_texts_are_text(opened):
    page = opened(prompts(HOSTILE, list(range(len(HOSTILE)))))
    assert texts(page, ".token") == [SEEN.get(word, word) for word in HOSTILE]
    assert page.count("main script, main b, main img") == 0
    page.click("details:not(#unfit) summary")
    page.wait_for("document.querySelectorAll('.numbers tr').length > 0")
    assert texts(page, ".numbers th") == texts(page, ".token")
    for word in HOSTILE[:3]:
        fill(page, "#class", word)
        page.click("#add-class")
    assert texts(page, "#classes li") == [f"{word} ×" for word in HOSTILE[:3]]
    page.evaluate("new Promise((done) => setTimeout(done, 100))")
    assert page.overflow() == 0


def test_relevant_words_are_coloured(opened):
    words = [f"w{i}" for i in range(VOCABULARY)]
    visualizer = prompts(words, [3, 1, 4, 1, 5])
    page = opened(visualizer)
    (output,) = visualizer.search(visualizer.view).examples[0][1]
    percent = output.feature_outputs[0].modified
    told = page.evaluate("[...document.querySelectorAll('.token')].map((w) => w.dataset.percent)")
    assert [float(number) for number in told] == pytest.approx(percent, abs=6e-4)
    more, less = (shade(page, f".{sign}.swatch") for sign in ("more", "less"))
    for i, share in enumerate(percent, 1):
        *colour, opacity = shade(page, f".token:nth-child({i})")
        assert opacity == pytest.approx(0.62 * abs(share) / 100, abs=0.62 / 64)
        assert not opacity or colour == (more if share > 0 else less)[:3]


def test_a_right_to_left_text_runs_to_the_left(opened):
    page = opened(prompts(["שלום", "עולם", "x"], [0, 1, 2]))
    places = page.evaluate(
        "[...document.querySelectorAll('.token')].map((w) => w.getBoundingClientRect().left)"
    )
    assert places == sorted(places, reverse=True)


# --- keys, width, themes -------------------------------------------------------------------------


def test_everything_works_by_keys_alone(opened):
    page = opened(table(Always(1), [numbers(1, 0, 2, 3, 4, 0)]))
    seen = []
    for _ in range(15):
        page.key("Tab")
        seen.append(page.focused())
    order = [name for name in seen if "#" in name]
    assert seen[0] == "a.skip"
    wanted = ["button#theme", "select#method", "input#argument-n_steps", "select#argument-method"]
    wanted += [
        "button#add-method",
        "select#prediction",
        "input#class",
        "button#add-class",
        "input#count",
    ]
    wanted += ["button#show", "button#next"]
    assert [name for name in order if name in wanted] == wanted
    page.evaluate("document.querySelector('#prediction').focus()")
    page.key("i")  # incorrect
    for _ in range(5):
        page.key("Tab")
        if page.focused() == "button#show":
            break
    page.key("Enter")
    settled(page)
    page.wait_for("document.querySelectorAll('h2').length === 4")
    assert texts(page, "h2")[0] == "Example 2: ant"
    page.key("Tab")
    page.key(" ")
    page.wait_for("document.querySelectorAll('h2').length === 1")
    page.key("Tab")
    assert "aria-pressed" in page.evaluate("document.activeElement.outerHTML")
    page.key("Tab")
    page.key("Enter")
    page.wait_for("document.querySelector('#status').textContent === 'Explained.'")
    assert page.evaluate("document.activeElement.getAttribute('aria-pressed')") == "true"


@pytest.mark.parametrize("kind", ["images", "texts", "table"])
def test_a_narrow_page_is_not_wider_than_its_window(opened, kind):
    visualizers = {
        "images": lambda: photos([cnn(), cnn()], [Batch(torch.rand(1, 3, 6, 6), None)]),
        "texts": lambda: prompts([*HOSTILE, "long" * 60], list(range(len(HOSTILE) + 1))),
        "table": lambda: table([Always(1), Always(2)], [numbers(1)]),
    }
    page = opened(visualizers[kind](), width=390)
    assert page.overflow() == 0
    page.click("details:not(#unfit) summary" if kind == "texts" else "#unfit summary")
    assert page.overflow() == 0


def test_dark_and_light(opened, page):
    page.prefer("dark")
    opened(table(Always(1), [numbers(1)]))
    colours = []
    for _ in range(4):
        colours.append(page.style("body", "background-color"))
        page.click("#theme")
    automatic, light, dark, again = colours
    assert automatic == dark == again != light
    page.click("#theme")  # light, dark, then automatic again
    page.click("#theme")
    page.prefer("light")
    page.wait_for("document.querySelector('#theme').textContent === 'Theme: automatic'")
    page.wait_for(f"getComputedStyle(document.body).backgroundColor === {json.dumps(light)}")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_every_colour(opened, page, scheme):
    page.prefer(scheme)
    opened(table(Always(1), [numbers(1)]))
    contrast = """(() => {
      const paint = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
      const light = (colour) => {
        paint.fillStyle = colour;
        paint.fillRect(0, 0, 1, 1);
        const parts = [...paint.getImageData(0, 0, 1, 1).data].slice(0, 3).map((v) => v / 255);
        const linear = parts.map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
      };
      const style = getComputedStyle(document.documentElement);
      const value = (name) => style.getPropertyValue(name).trim();
      const back = (name) => {
        if (!['--more', '--less'].includes(name)) return light(value(name));
        light(value('--panel')); // a tint lies on it
        return light(`rgb(${value(name)} / ${value('--densest')})`);
      };
      return [['--ink', '--page'], ['--ink', '--panel'], ['--quiet', '--panel'],
        ['--quiet', '--page'], ['--ink', '--more'], ['--ink', '--less'],
        ['--on-accent', '--accent'], ['--error', '--panel'], ['--error', '--page'],
      ].map(([text, ground]) => {
        const [a, b] = [light(value(text)), back(ground)].sort((x, y) => y - x);
        return (a + 0.05) / (b + 0.05);
      });
    })()"""
    assert min(page.evaluate(contrast)) >= 4.5
