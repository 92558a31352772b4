"""The page that is kept: whole, and with what was explained when it was made."""

from __future__ import annotations

import html
import re

import pytest
from helpers.insights_examples import Always, numbers, table, table_model
from helpers.pages import addresses, digest, read_page

from captum_ssm.errors import OptionError
from captum_ssm.insights import FilterConfig


def test_it_is_one_file_that_asks_for_nothing(tmp_path):
    path = tmp_path / "new" / "page.html"
    with table(table_model(), [numbers(1, None)]) as visualizer:
        assert visualizer.snapshot(path) == path.read_text(encoding="utf-8")
    page = read_page(path)
    assert set(addresses(page)) == {"data:,", "#examples"}
    (style,), script = page.texts("style"), page.texts("script")[-1]
    assert digest(style) in page.policy and digest(script) in page.policy
    assert "connect-src" not in page.policy and "default-src 'none'" in page.policy


def test_it_holds_the_examples_that_are_shown_and_their_classes(tmp_path):
    visualizer = table(table_model(), [numbers(1, 0, 2)])
    visualizer.config = FilterConfig("Saliency", num_examples=2, beside=[("Input X Gradient", {})])
    shown = visualizer.visualize()
    visualizer.snapshot(tmp_path / "page.html", classes=3)
    facts = read_page(tmp_path / "page.html").facts
    examples = facts["examples"]["examples"]
    assert [example["number"] for example in examples] == [1, 2]
    for example, outputs in zip(examples, shown, strict=True):
        for told, output in zip(example["models"], outputs, strict=True):
            found = told["feature_outputs"][0]["modified"]
            assert found == pytest.approx(output.feature_outputs[0].modified)
            for score in output.predicted[:3]:
                place = f"{example['id']},0,{output.method_index},{score.index}"
                assert facts["relevance"][place]["active_index"] == score.index
    assert len(facts["relevance"]) == 2 * 2 * 3


def test_a_notebook_shows_it_in_a_frame():
    shown = table(Always(1), [numbers(1)])._repr_html_()
    (page,) = re.findall(r'<iframe srcdoc="([^"]*)"', shown)
    assert html.unescape(page).startswith("<!doctype html>") and "src=" not in shown


def test_a_number_of_classes_that_is_none_is_refused():
    for classes in (0, -1, True, 1.5):
        with pytest.raises(OptionError, match="classes="):
            table(Always(1), [numbers(1)]).snapshot(classes=classes)
