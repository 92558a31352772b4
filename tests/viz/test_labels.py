"""Tokens as text that shows all of what they are."""

from __future__ import annotations

import sys
import unicodedata

import pytest
import torch
from helpers.pictures import AWKWARD, draw
from hypothesis import given, settings
from hypothesis import strategies as st

from captum_ssm.errors import InputError
from captum_ssm.viz import Tokens, plot_text
from captum_ssm.viz.figure import new_figure
from captum_ssm.viz.labels import FAMILIES, as_words, shown, spelled

SPELLED = {
    "lamp": "lamp",
    " owns": " owns",
    "": "∅",
    "  ": "␣␣",
    "a\nb\t": r"a\nb\t",
    "\x07\x9f": r"\x07\x9f",
    "a\u200bb\u200f\u2066": r"a\u200bb\u200f\u2066",
    "\xad\u3164\u2800": r"\xad\u3164\u2800",
    "❤\ufe0f": "❤\\ufe0f",
    "e\u0301": "e\u0301",
    " \u0301": r" \u0301",
    "\ud800": r"\ud800",
    "שלום": "שלום",
    "<b>$x$\\": "<b>$x$\\",
}


def test_spelled() -> None:
    for token, text in SPELLED.items():
        assert spelled(token) == text


@settings(max_examples=50)
@given(st.text(max_size=8))
def test_whatever_is_spelled_is_seen(token: str) -> None:
    text = spelled(token)
    assert text.isprintable() and text.strip(" ")
    categories = [unicodedata.category(c) for c in text]
    assert categories[0] not in ("Mn", "Me")
    assert not {"Cc", "Cf", "Cs", "Co", "Cn"} & set(categories)


@pytest.mark.slow
def test_every_character_can_be_drawn() -> None:
    """matplotlib warns of glyphs that are missing, and warnings are errors here."""
    figure, axis = new_figure(4, 4)
    some = [chr(c) for c in range(32, sys.maxunicode, 9973)]
    for i, token in enumerate([*AWKWARD, *("x" + c for c in some)]):
        axis.text(0.5, i / 200, shown(token), family=list(FAMILIES))
    draw(figure)


def test_what_the_font_lacks_is_named_and_dollars_are_no_mathematics() -> None:
    assert shown("日") == r"\u65e5"
    assert shown("\U00013000") == r"\U00013000"
    _, axis = new_figure(2, 2)
    text = axis.text(0, 0, shown("$x_1$"))
    assert text._preprocess_math(text.get_text()) == ("$x_1$", False)


def test_words_are_set_as_in_their_text() -> None:
    pieces = [None, "Go", "ing", " home", ".\n", "你", "", "", " \n", "再", None, "见", "a\n\nb"]
    names = ["<s>", "Go", "ing", "home", ".", "x", "y", "z", " \n", "再", "<e>", "见", "a b"]
    found = as_words(Tokens(names, pieces))
    shown = ["<s>", "Go", "ing", "home", r".", "你", "₂", "₃", r" \n", "再", "<e>", "见", r"a\n\nb"]
    assert found.labels == shown
    assert found.joined == [2, 4, 6, 7, 12]
    assert (found.breaks, found.marks) == ([4, 8], [0, 10])
    # they stand apart where the text is not known
    assert as_words(["a", "b\n", "", " c"]) == (["a", r"b\n", "∅", " c"], [], [1], [])
    assert as_words(Tokens(["a"], [""])).labels == ["∅"]
    assert as_words(Tokens(["a", "b"], ["x", "\n y"])).breaks == [0]
    for tokens in (torch.tensor([3, 4]), [3, 4]):
        with pytest.raises(InputError, match="which is no name of a token"):
            plot_text(tokens, torch.rand(2))
