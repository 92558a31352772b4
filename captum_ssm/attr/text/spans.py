"""Spans of a text: ranges of tokens of a word, sentence, paragraph, chat message or feature."""

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

#: Patterns of the separators between spans, by name.
_SEPARATORS = {
    "word": r"\s+",
    "sentence": r"(?:(?<=[.!?…。！？])|(?<=[.!?…。！？][\"'”’)\]]))\s+|(?<=[。！？])|\s*\n\s*",
    "paragraph": r"\s*\n\s*\n\s*",
}
#: Names of spans of a text, and of a prompt.
TEXT_SPANS = ("token", "word", "sentence", "paragraph", "all")
PROMPT_SPANS = (*TEXT_SPANS, "turn")

#: The option ``spans``: a name, a compiled pattern of the separators, or ranges of tokens.
Spans = str | re.Pattern[str] | Sequence[Any]


def read_spans(name: str, spans: Spans, ids: Tensor, codec: Codec) -> list[range]:
    """Return the spans of a text as ascending ranges of its tokens.

    Args:
        name: the name of the argument, for errors.
        spans: the value of the argument.
        ids: token ids of the text (n,).
        codec: the tokenizer.
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
                f"The text ends inside a character, so {name}='token' is used. Pass a text that "
                f"ends with a whole character to find {name}={spans!r}.",
                stacklevel=2,
            )
            return [range(i, i + 1) for i in range(count)]
        return _split_at(re.compile(_SEPARATORS[spans]), ids, codec)
    if isinstance(spans, re.Pattern):
        return _split_at(spans, ids, codec)
    if not isinstance(spans, list | tuple):
        raise OptionError(
            f"{name}={spans!r} is not accepted. Pass one of {', '.join(map(repr, TEXT_SPANS))}, a "
            "compiled pattern of the separators, or a list of ranges of tokens such as [(0, 5)]."
        )
    ranges = [_as_range(name, entry) for entry in spans]
    if not ranges:
        raise InputError(f"{name} is an empty list. Pass at least one span.")
    for span in ranges:
        if not 0 <= span.start < span.stop <= count:
            raise InputError(
                f"{name} contains ({span.start}, {span.stop}), but the text has {count} tokens. "
                f"Pass spans (start, stop) with 0 <= start < stop <= {count}."
            )
    ranges.sort(key=lambda span: span.start)
    for span, following in pairwise(ranges):
        if following.start < span.stop:
            raise InputError(
                f"{name} contains ({span.start}, {span.stop}) and ({following.start}, "
                f"{following.stop}), which overlap. Pass spans without common tokens."
            )
    return ranges


def _as_range(name: str, entry: Any) -> range:
    """Convert a range, a slice or a pair (start, stop) to a range of tokens."""
    if isinstance(entry, range) and entry.step == 1:
        return entry
    ends = (entry.start or 0, entry.stop) if isinstance(entry, slice) else entry
    numbers = [checks.as_integer(end) for end in ends] if isinstance(ends, tuple | list) else []
    if len(numbers) != 2 or numbers[0] is None or numbers[1] is None:
        raise OptionError(f"{name} contains {entry!r}. Pass pairs (first token, token after last).")
    return range(numbers[0], numbers[1])


def _split_at(separator: re.Pattern[str], ids: Tensor, codec: Codec) -> list[range]:
    """Return spans that end after separators; a token is in the span of its first character."""
    text, token_spans = codec.decode_with_spans(ids)
    starts = [0, *(match.end() for match in separator.finditer(text))]
    return _tokens_of_spans(starts, text, token_spans)


def _tokens_of_spans(
    starts: Sequence[int], text: str, token_spans: Sequence[tuple[int, int]]
) -> list[range]:
    """Return token ranges of the spans that begin at characters ``starts`` of a text.

    ``token_spans`` has each token's characters. A token belongs to the span of its first character
    that is no space. Spans without a token are left out.
    """
    ranges: list[range] = []
    previous_index = -1
    for token, (start, end) in enumerate(token_spans):
        # a token of only whitespace keeps its last character
        while start < end and text[start].isspace() and start + 1 < end:
            start += 1
        # spans ascend, so a token is never in an earlier span than the token before it
        index = max(previous_index, bisect_right(starts, start) - 1)
        if index == previous_index:
            ranges[-1] = range(ranges[-1].start, token + 1)
        else:
            ranges.append(range(token, token + 1))
        previous_index = index
    return ranges


def with_spans(prompt: Prompt, spans: Any, codec: Codec, messages: Any) -> Prompt:
    """Return the prompt with spans of tokens as features.

    Args:
        prompt: the prompt, with tokens as features.
        spans: as for :func:`read_spans`; ``"turn"`` for the messages of a chat; or Captum's
            feature mask, which has the number of each token's feature, (L,) or (1, L).
        codec: the tokenizer.
        messages: the prompt as the user passed it.
    """
    ids = prompt.ids
    if isinstance(spans, Tensor):
        features, names = _features_of_mask(spans, ids)
        pieces = None
    else:
        if isinstance(spans, str) and checks.choice("prompt_spans", spans, PROMPT_SPANS) == "turn":
            ranges = _spans_of_turns(ids, codec, messages)
        else:
            ranges = read_spans("prompt_spans", spans, ids, codec)
        features = torch.full((len(ids),), -1)  # each token's feature; -1 outside all spans
        for index, span in enumerate(ranges):
            features[span.start : span.stop] = index
        names = [codec.text_of(ids[span.start : span.stop]) for span in ranges]
        pieces = joined(codec.pieces(ids), ranges)
    # (n_in, L): 1 for tokens of a feature that the prompt keeps
    shares = (features == torch.arange(len(names))[:, None]).double() * prompt.kept
    return replace(
        prompt,
        names=names,
        features=lambda x: x @ shares.to(x).T,
        kept=shares.sum(0) > 0,
        pieces=pieces,
    )


def joined(pieces: Pieces | None, spans: Sequence[range]) -> Pieces | None:
    """Concatenate the text pieces of the tokens of each span; None for a span of special tokens."""
    if pieces is None:
        return None
    texts = [[x for x in pieces[span.start : span.stop] if x is not None] for span in spans]
    return ["".join(text) if text else None for text in texts]


def split_pieces(pieces: Pieces, name: str) -> list[range]:
    """Split a text at words, sentences or paragraphs (``name``) into ranges of ``pieces``."""
    text, token_spans = "", list[tuple[int, int]]()  # the text, and each piece's characters in it
    for piece in pieces:
        if piece == "" and token_spans:  # a further token of the same character
            token_spans.append(token_spans[-1])
            continue
        token_spans.append((len(text), len(text) + len(piece or "")))
        text += piece or ""
    starts = [0, *(match.end() for match in re.finditer(_SEPARATORS[name], text))]
    return _tokens_of_spans(starts, text, token_spans)


def _features_of_mask(mask: Tensor, ids: Tensor) -> tuple[Tensor, list[str]]:
    """Return each token's feature index (L,) and the features' names, from a feature mask."""
    feature_ids = mask[0] if mask.dim() == 2 and len(mask) == 1 else mask
    if feature_ids.shape != ids.shape or feature_ids.is_floating_point():
        raise OptionError(
            f"prompt_spans is a mask of shape {tuple(mask.shape)} and {mask.dtype}, but the prompt "
            f"has {len(ids)} tokens. Pass integers ({len(ids)},), equal for tokens of one feature."
        )
    values, index = torch.unique(feature_ids.cpu().long(), return_inverse=True)
    return index, [f"feature {value}" for value in values.tolist()]


def _spans_of_turns(ids: Tensor, codec: Codec, messages: Any) -> list[range]:
    """Return one span per chat message, including the template's text before the message."""
    contents = [m.get("content") for m in messages] if _is_chat(messages) else []
    if not contents or not all(isinstance(content, str) for content in contents):
        raise OptionError(
            "prompt_spans='turn' needs a prompt that is a list of chat messages {'role': ..., "
            "'content': ...}. Pass 'paragraph', a compiled pattern, or ranges of tokens."
        )
    text, token_spans = codec.decode_with_spans(ids)
    starts, search_start = [0], 0
    for content in contents[:-1]:  # the next span starts where this message ends
        start = text.find(content.strip(), search_start)
        if start < 0:
            raise InputError(
                f"prompt_spans='turn' cannot find the message {content[:20]!r} in the text from "
                "the chat template. Pass ranges of tokens."
            )
        search_start = start + len(content.strip())
        starts.append(search_start)
    return _tokens_of_spans(starts, text, token_spans)


def _is_chat(messages: Any) -> bool:
    return isinstance(messages, list | tuple) and all(isinstance(m, dict) for m in messages)
