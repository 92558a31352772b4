"""Which characters of a text each of its tokens stands for, where the tokenizer does not say."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import TypeAlias

from ..errors import InputError

#: First and last character of a token, half open.
Span: TypeAlias = tuple[int, int]
#: Token ids to the text that they read as.
Read: TypeAlias = Callable[[Sequence[int]], str]

#: What tokenizers decode the parts of a broken character to.
NO_TEXT = "\N{REPLACEMENT CHARACTER}"

#: Characters of the text that an error quotes.
_QUOTED = 20


def find_spans(text: str, ids: Sequence[int], read: Read, silent: Container[int]) -> list[Span]:
    """The characters of each token, by reading the tokens along the text.

    Tokens that are parts of one character all stand for it.  Whitespace may be the token's or not,
    and upper and lower case are the same, as tokenizers drop them.

    Args:
        text: what was encoded.
        ids: its tokens.
        read: the tokenizer's decoding.
        silent: ids that stand for no characters, such as that of a mark in front.

    Returns:
        Start and end for each token; silent ones have none, at the place where they stand.

    Raises:
        InputError: when the tokens do not read as the text.
    """
    spans: list[Span] = []
    at, before = 0, list[int]()  # how far the text is read, and the tokens read last
    while len(spans) < len(ids):
        if ids[len(spans)] in silent:
            spans.append((at, at))
            before = []
            continue
        count, piece = _readable(ids[len(spans) :], before, read)
        start, end = _place(text, at, piece)
        spans += [(start, end)] * count
        at, before = end, list(ids[len(spans) - count : len(spans)])
    if text[at:].strip():
        raise InputError(f"Its {len(ids)} tokens end before {text[at : at + _QUOTED]!r}.")
    return spans


def _readable(ids: Sequence[int], before: list[int], read: Read) -> tuple[int, str]:
    """How many of the tokens make whole characters, and what they add to the text of ``before``."""
    known = read(before) if before else ""
    for count in range(1, len(ids) + 1):
        group = list(ids[:count])
        whole = read(before + group)
        # some tokens read otherwise by themselves: "##ing" in "going"
        piece = whole.removeprefix(known) if whole.startswith(known) else read(group)
        if piece and NO_TEXT not in piece:
            return count, piece
    return len(ids), ""


def _place(text: str, at: int, piece: str) -> Span:
    """Where the text goes on with this piece."""
    if piece.isspace():
        return (at, at + len(piece)) if text.startswith(piece, at) else (at, at)
    word = piece.strip()
    while at < len(text) and text[at].isspace():
        at += 1
    end = at + len(word)
    if text[at:end].lower() != word.lower():
        raise InputError(f"A token reads {word!r} where the text is {text[at : at + _QUOTED]!r}.")
    return at, end
