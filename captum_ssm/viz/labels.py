"""Make labels of pictures and pages from tokens, with every character visible.

Invisible characters are written as ``\\n`` or ``\\u200b``, and in pictures also characters
without a glyph in the font. Before version 3.11 matplotlib draws right-to-left text in the order of
the string, so words read backwards.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from ..attr.text.tokens import Tokens
from ..errors import InputError
from .figure import check_labels

#: Families of the labels of pictures; the second has more glyphs.
FAMILIES = ("monospace", "sans-serif")

#: The label of a token without any characters.
EMPTY = "∅"

#: Characters that are invisible in fonts although ``str.isprintable`` returns True.
_INVISIBLE = frozenset((0x034F, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x2800, 0x3164, 0xFFA0)).union(
    range(0x180B, 0x1810), range(0xFE00, 0xFE10), range(0xE0100, 0xE01F0)
)

#: The digits in the labels of the second, third, ... token of a character.
SUBSCRIPTS = "₀₁₂₃₄₅₆₇₈₉"
_TO_SUBSCRIPTS = str.maketrans("0123456789", SUBSCRIPTS)

#: More labels than this along an axis are thinned out so that they do not collide.
_MAX_LABELS = 64
#: The share of a cell that a letter takes in words of several tokens, drawn without gaps.
_JOINED_WIDTH = 0.76
#: Labels longer than this are cut.
_MAX_LENGTH = 24


class Words(NamedTuple):
    """Labels and layout of a text's tokens.

    Attributes:
        labels: each token's text without outer spaces, or the name of a special token. If several
            tokens encode one character, the second is ``₂``, and so on.
        joined: the indices of tokens without a space between them and the token before.
        breaks: the indices of tokens after which a line ends.
        marks: the indices of special tokens.
    """

    labels: list[str]
    joined: list[int]
    breaks: list[int]
    marks: list[int]


def as_words(tokens: Sequence[str]) -> Words:
    """Return token labels, and the tokens that continue a word, end a line or are special.

    Only :class:`~captum_ssm.viz.Tokens` are joined to words.

    Example:
        >>> from captum_ssm.viz import Tokens
        >>> from captum_ssm.viz.labels import as_words
        >>> as_words(Tokens(["<s>", " la", "mp", "."], [None, " la", "mp", "."]))
        Words(labels=['<s>', 'la', 'mp', '.'], joined=[2, 3], breaks=[], marks=[0])
    """
    for name in tokens:
        if not isinstance(name, str):
            raise InputError(
                f"tokens contains {name!r} of type {type(name).__name__}. Pass the tokens' texts, "
                "such as Tokens.of(tokenizer, ids)."
            )
    pieces = tokens.pieces if isinstance(tokens, Tokens) else None
    if pieces is None:
        breaks = [i for i, name in enumerate(tokens) if "\n" in name]
        return Words([visible_text(name) for name in tokens], [], breaks, [])
    words = Words([], [], [], [])
    # a piece is None for a special token, and "" for the nth token of a character (n > 1)
    nth, previous = 1, None
    for i, (name, piece) in enumerate(zip(tokens, pieces, strict=True)):
        nth = nth + 1 if piece == "" and previous else 1
        if piece is None:
            words.marks.append(i)
        elif nth > 1 or (previous and not previous[-1:].isspace() and not piece[:1].isspace()):
            words.joined.append(i)
        if nth > 1:
            words.labels.append(str(nth).translate(_TO_SUBSCRIPTS))
            continue  # the character's first token says where lines end
        words.labels.append(visible_text(name if piece is None else piece.strip() or piece))
        if piece and i and "\n" in piece[: len(piece) - len(piece.lstrip())] and piece.strip():
            words.breaks.append(i - 1)  # the line break comes before this token's text
        if piece and "\n" in piece[len(piece.rstrip()) :]:
            words.breaks.append(i)
        previous = piece
    return words


def word_continuations(words: Words) -> list[int]:
    """Return the indices of tokens that continue the word of the token before, unlike punctuation.

    In scripts without spaces between words, each token is a word.

    Example:
        >>> from captum_ssm.viz.labels import Words, word_continuations
        >>> word_continuations(Words(["la", "mp", "."], [1, 2], [], []))
        [1]
    """
    texts = words.labels
    return [
        i
        for i in words.joined
        if texts[i][0] in SUBSCRIPTS or (_is_spaced(texts[i - 1][-1]) and _is_spaced(texts[i][0]))
    ]


def _is_spaced(character: str) -> bool:
    """Return True for letters of scripts that put spaces between words, unlike Thai or Chinese."""
    unspaced = "\u0e00" <= character < "\u1000" or "\u3040" <= character < "\uac00"
    return character.isalnum() and not unspaced


def direction_of(text: str) -> str:
    """Return ``"rtl"`` if most letters with a direction run right to left, else ``"ltr"``."""
    kinds = [unicodedata.bidirectional(character) for character in text]
    leftward = sum(kind in ("R", "AL") for kind in kinds)  # AL: Arabic letters
    return "rtl" if leftward > kinds.count("L") else "ltr"


def visible_text(token: str) -> str:
    """Return the token with control, zero-width and lone combining characters as escapes."""
    if token and not token.strip(" "):
        return "␣" * len(token)
    characters, has_base = [], False
    for character in token:
        combining = unicodedata.category(character) in ("Mn", "Me")
        visible = character.isprintable() and ord(character) not in _INVISIBLE
        if combining and not has_base:  # such as an accent without a letter
            visible = False
        characters.append(character if visible else _escape(character))
        has_base = visible and character != " "
    return "".join(characters) or EMPTY


def plot_label(token: str) -> str:
    """Escape a token for matplotlib: invisible characters, missing glyphs and ``$``."""
    drawable = _drawable()
    text = "".join(c if ord(c) in drawable else _escape(c) for c in visible_text(token))
    return text.replace("$", r"\$")


def plot_heading(text: str | None) -> str:
    """Return a picture's heading for matplotlib; empty for None."""
    return plot_label(text) if text else ""


def width(token: str) -> int:
    """Return a token's width in cells of a monospaced font."""
    label = plot_label(token).replace(r"\$", "$")
    return sum(unicodedata.category(c) not in ("Mn", "Me") for c in label)


def widths(labels: Sequence[str], joined: Collection[int]) -> list[float]:
    """Return each label's width in cells; labels of one word are drawn closer together."""

    def is_joined(i: int) -> bool:
        return i in joined or i + 1 in joined

    return [width(label) * (_JOINED_WIDTH if is_joined(i) else 1) for i, label in enumerate(labels)]


def truncate(token: str, longest: int = _MAX_LENGTH) -> str:
    """Return the token, or its beginning and an ellipsis if the token is too long."""
    return token if len(token) <= longest else token[: longest - 1] + "…"


def label_axis(axis: Any, labels: Sequence[str] | None, count: int, name: str) -> None:
    """Label as many ticks of an axis as fit with tokens, or positions; errors use ``name``."""
    check_labels(labels, count, name)
    ticks = range(0, count, -(-count // _MAX_LABELS))
    words = None if labels is None else as_words(labels).labels
    names = [str(i) if words is None else plot_label(truncate(words[i])) for i in ticks]
    size = max(4.0, min(8.0, 260 / len(ticks)))  # in points, smaller for more labels
    axis.set_ticks(list(ticks), names, fontsize=size, fontfamily=list(FAMILIES))
    if axis.axis_name == "x":
        axis.set_tick_params(rotation=90)


def _escape(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")


def _drawable() -> frozenset[int]:
    """Return the code points that the label fonts can draw, from a cache."""
    from matplotlib import rcParams

    return _glyphs_of(tuple(rcParams["font.monospace"]), tuple(rcParams["font.sans-serif"]))


@lru_cache(maxsize=4)
def _glyphs_of(monospace: tuple[str, ...], sans: tuple[str, ...]) -> frozenset[int]:
    """Return the code points that the label fonts can draw; the arguments only key the cache."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    files = [findfont(FontProperties(family=[name])) for name in FAMILIES]
    return frozenset().union(*(get_font(file).get_charmap() for file in files))
