"""The page of a report as it is by default: two questions, and every prediction explained."""

from __future__ import annotations

from helpers.browser import Page

from captum_ssm.attr.catalogue import DEFAULT, QUESTIONS

PAGE = "questions"


def test_two_questions(opened: Page) -> None:
    rows = [x for x in opened.texts("#methods .name", "innerText") if "\n" in x]
    assert [row.split("\n")[-2:] for row in rows] == [
        [question, name] for question, name in zip(QUESTIONS.values(), DEFAULT, strict=True)
    ]
    opened.click("#methods label:last-of-type")
    assert opened.text("#shown").startswith("Background: relevance by LatimFlow, frozen.")


def test_no_prediction_makes_the_page_wider(opened: Page) -> None:
    for chip in range(2, 6):
        opened.click(f"#targets .chip:nth-of-type({chip})")
        assert opened.overflow() <= 0
        assert opened.text("#cuts .framed") == "lamp"
