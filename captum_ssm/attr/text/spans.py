"""Stretches of a text: tokens by the sentence, paragraph, turn or feature that they belong to."""

from __future__ import annotations

import re
import warnings
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ...errors import InputError, OptionError
from ..call import checks
from .codec import NO_TEXT, Codec, Pieces
from .prompt import Prompt

#: Patterns of the characters behind a stretch, at which it ends.
_ENDS = {
    "word": r"\s+",
    "sentence": r"(?:(?<=[.!?…。！？])|(?<=[.!?…。！？][\"'”’)\]]))\s+|(?<=[。！？])|\s*\n\s*",
    "paragraph": r"\s*\n\s*\n\s*",
}
#: Stretches by name, of a text and of a prompt.
TEXT_SPANS = ("token", "word", "sentence", "paragraph", "all")
PROMPT_SPANS = (*TEXT_SPANS, "turn")

#: Stretches of a text: a name, a pattern of the separators, or ranges of tokens.
Spans = str | re.Pattern[str] | Sequence[Any]


def read_spans(name: str, spans: Spans, ids: Tensor, codec: Codec) -> list[range]:
    """Return the spans of a text, as ranges of its tokens in rising order.

    Args:
        name: name of the argument.
        spans: its value.
        ids: the text's tokens (n,).
        codec: the tokenizer.

    Raises:
        OptionError: for a value that is not a name, pattern or list of ranges.
        InputError: for ranges that overlap, are empty or lie outside, and for tokens whose
            characters cannot be found.
    """
    count = len(ids)
    if isinstance(spans, str):
        checks.choice(name, spans, TEXT_SPANS)
        if spans == "token":
            return [range(i, i + 1) for i in range(count)]
        if spans == "all":
            return [range(count)]
        if codec.text_of(ids).endswith(NO_TEXT):
            warnings.warn(
                f"The text ends inside a character, so that {name}={spans!r} cannot be told: each "
                "token is a span of its own.",
                stacklevel=2,
            )
            return [range(i, i + 1) for i in range(count)]
        return _between(re.compile(_ENDS[spans]), ids, codec)
    if isinstance(spans, re.Pattern):
        return _between(spans, ids, codec)
    if not isinstance(spans, list | tuple):
        raise OptionError(
            f"{name}={spans!r} must be one of {', '.join(map(repr, TEXT_SPANS))}, a compiled "
            "pattern of the separators, or a list of ranges of tokens such as [(0, 5)]."
        )
    found = [_range(name, one) for one in spans]
    if not found:
        raise InputError(f"{name} is empty: it names no tokens. Name at least one span.")
    for span in found:
        if not 0 <= span.start < span.stop <= count:
            raise InputError(
                f"{name} names tokens {span.start} to {span.stop}, but a span has at least one, "
                f"and there are {count}, numbered 0 to {count - 1}."
            )
    found.sort(key=lambda span: span.start)
    for one, other in pairwise(found):
        if other.start < one.stop:
            raise InputError(
                f"{name} names tokens {other.start} to {min(one.stop, other.stop)} twice: the "
                f"spans {one.start} to {one.stop} and {other.start} to {other.stop} overlap."
            )
    return found


def _range(name: str, one: Any) -> range:
    """Read a range of tokens from a range, a slice, or (first, behind the last)."""
    if isinstance(one, range) and one.step == 1:
        return one
    ends = (one.start or 0, one.stop) if isinstance(one, slice) else one
    numbers = [checks.as_integer(end) for end in ends] if isinstance(ends, tuple | list) else []
    if len(numbers) != 2 or numbers[0] is None or numbers[1] is None:
        raise OptionError(f"{name} holds {one!r}; a span is (first token, token behind the last).")
    return range(numbers[0], numbers[1])


def _between(separator: re.Pattern[str], ids: Tensor, codec: Codec) -> list[range]:
    """Return the stretches between separators; a token belongs to that of its first character."""
    text, places = codec.read(ids)
    begins = [0, *(match.end() for match in separator.finditer(text))]
    return _of_characters(begins, text, places)


def _of_characters(
    begins: Sequence[int], text: str, places: Sequence[tuple[int, int]]
) -> list[range]:
    """Return the stretches that begin at characters ``begins``, by the tokens' ``places``."""
    found: list[range] = []
    latest = -1
    for token, (start, end) in enumerate(places):
        while start < end and text[start].isspace() and start + 1 < end:
            start += 1
        which = max(latest, bisect_right(begins, start) - 1)
        if which == latest:
            found[-1] = range(found[-1].start, token + 1)
        else:
            found.append(range(token, token + 1))
        latest = which
    return found


def with_spans(prompt: Prompt, spans: Any, codec: Codec, messages: Any) -> Prompt:
    """Return the prompt with stretches of it as features.

    Args:
        prompt: the prompt, by token.
        spans: as for :func:`read_spans`, ``"turn"`` for the messages of a chat, or Captum's
            feature mask: integers (L,) or (1, L), one for each feature.
        codec: the tokenizer.
        messages: the user's argument.
    """
    ids = prompt.ids
    if isinstance(spans, Tensor):
        groups, names = _masked(spans, ids)
        pieces = None
    else:
        if isinstance(spans, str) and checks.choice("prompt_spans", spans, PROMPT_SPANS) == "turn":
            found = _turns(ids, codec, messages)
        else:
            found = read_spans("prompt_spans", spans, ids, codec)
        groups = torch.full((len(ids),), -1)
        for number, span in enumerate(found):
            groups[span.start : span.stop] = number
        names = [codec.text_of(ids[span.start : span.stop]) for span in found]
        pieces = joined(codec.pieces(ids), found)
    shares = (groups == torch.arange(len(names))[:, None]).double() * prompt.kept  # (features, L)
    return replace(
        prompt,
        names=names,
        features=lambda x: x @ shares.to(x).T,
        kept=shares.sum(0) > 0,
        pieces=pieces,
    )


def joined(pieces: Pieces | None, spans: Sequence[range]) -> Pieces | None:
    """Join the pieces of the tokens of each span."""
    if pieces is None:
        return None
    texts = [[x for x in pieces[span.start : span.stop] if x is not None] for span in spans]
    return ["".join(text) if text else None for text in texts]


def stretches(pieces: Pieces, name: str) -> list[range]:
    """Return the stretches, ``"word"``, ``"sentence"`` or ``"paragraph"``, as ranges of pieces."""
    text, places = "", list[tuple[int, int]]()
    for piece in pieces:
        if piece == "" and places:  # of the same character
            places.append(places[-1])
            continue
        places.append((len(text), len(text) + len(piece or "")))
        text += piece or ""
    begins = [0, *(match.end() for match in re.finditer(_ENDS[name], text))]
    return _of_characters(begins, text, places)


def _masked(mask: Tensor, ids: Tensor) -> tuple[Tensor, list[str]]:
    """Read Captum's feature mask: the number of each token's feature (L,), and their names."""
    found = mask[0] if mask.dim() == 2 and len(mask) == 1 else mask
    if found.shape != ids.shape or found.is_floating_point():
        raise OptionError(
            f"prompt_spans is a mask {tuple(mask.shape)} of {mask.dtype}, but the prompt has "
            f"{len(ids)} tokens. Pass integers (L,), the same for tokens of one feature."
        )
    values, groups = torch.unique(found.cpu().long(), return_inverse=True)
    return groups, [f"feature {value}" for value in values.tolist()]


def _turns(ids: Tensor, codec: Codec, messages: Any) -> list[range]:
    """Return the messages of a chat, each with the template's text in front of it."""
    contents = [m.get("content") for m in messages] if _is_chat(messages) else []
    if not contents or not all(isinstance(content, str) for content in contents):
        raise OptionError(
            "prompt_spans='turn' is for a prompt that is a list of chat messages {'role': ..., "
            "'content': ...}. Use 'paragraph', a compiled pattern, or ranges of tokens."
        )
    text, places = codec.read(ids)
    begins, at = [0], 0
    for content in contents[:-1]:
        where = text.find(content.strip(), at)
        if where < 0:
            raise InputError(
                f"prompt_spans='turn': the message {content[:20]!r} is not found in the text that "
                "the template makes. Pass ranges of tokens."
            )
        at = where + len(content.strip())
        begins.append(at)
    return _of_characters(begins, text, places)


def _is_chat(messages: Any) -> bool:
    return isinstance(messages, list | tuple) and all(isinstance(m, dict) for m in messages)
