"""Conversion of text to token ids and back, and the characters of each token."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ...errors import InputError, OptionError


class Codec:
    """A wrapper for any tokenizer with the methods ``encode`` and ``decode``.

    Examples are tokenizers of transformers and of the tokenizers library, and the vocabularies of
    :mod:`captum_ssm.models.recall`.
    """

    def __init__(self, tokenizer: Any) -> None:
        for method in ("encode", "decode"):
            if not callable(getattr(tokenizer, method, None)):
                raise OptionError(
                    f"tokenizer is {type(tokenizer).__name__}, which has no method {method}(). "
                    "Pass the model's tokenizer, with encode(text) and decode(ids)."
                )
        self._tokenizer = tokenizer

    @property
    def _name(self) -> str:
        return type(self._tokenizer).__name__

    def encode(self, text: str, *, special: bool) -> Tensor:
        """Return a text's token ids (L,), with or without the tokenizer's special tokens."""
        encode, options = self._tokenizer.encode, {}
        if not special and _accepts(encode, "add_special_tokens"):
            options["add_special_tokens"] = False
        encoding = encode(text, **options)
        # a list of ids, or an object of the tokenizers library
        return torch.tensor(list(getattr(encoding, "ids", encoding)), dtype=torch.long)

    def ids_of(self, text: str | Sequence[Mapping[str, str]]) -> Tensor:
        """Return the token ids (L,) of a text, with special tokens, or of a conversation."""
        return self.encode(text, special=True) if isinstance(text, str) else self.encode_chat(text)

    def token(self, text: str) -> int:
        """Return the id of a text that is one token.

        Raises:
            InputError: if the text has no token or several tokens.
        """
        ids = self.encode(text, special=False)
        if len(ids) != 1:
            raise InputError(
                f"{text!r} has {len(ids)} tokens, {self.names(ids)}. Pass the text or the id of "
                "one token."
            )
        return int(ids[0])

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> Tensor:
        """Return the token ids (L,) of a conversation, ending where the answer begins."""
        apply = getattr(self._tokenizer, "apply_chat_template", None)
        if apply is None or getattr(self._tokenizer, "chat_template", apply) is None:
            raise InputError(
                f"The prompt is a list of messages, but {self._name} has no chat template to "
                "convert it to a text. Set tokenizer.chat_template, or pass the prompt as a str."
            )
        text = apply(list(messages), tokenize=False, add_generation_prompt=True)
        return self.encode(text, special=False)  # the template adds special tokens

    def encode_with_spans(self, text: str) -> tuple[Tensor, list[Span]]:
        """Return a text's token ids (L,), and the span of characters of each token."""
        if getattr(self._tokenizer, "is_fast", False):  # one of transformers, with offsets
            encoding = self._tokenizer(text, return_offsets_mapping=True)
            return torch.tensor(encoding["input_ids"], dtype=torch.long), encoding["offset_mapping"]
        encoding = self._tokenizer.encode(text)
        ids = list(getattr(encoding, "ids", encoding))
        spans = getattr(encoding, "offsets", None)  # only the tokenizers library has offsets
        return torch.tensor(ids, dtype=torch.long), spans or self._match_spans(text, ids)

    def decode_with_spans(self, ids: Tensor) -> tuple[str, list[Span]]:
        """Decode token ids (L,); return the text, and the span of characters of each token."""
        text = self.text_of(ids)
        try:
            return text, find_spans(text, ids.tolist(), self._tokenizer.decode, self._special_ids)
        except InputError as error:
            raise InputError(
                f"Spans of characters need the characters of each token, which cannot be found "
                f"with {self._name}. {error} Pass ranges of tokens as spans."
            ) from None

    def text_of(self, ids: Tensor) -> str:
        """Decode token ids (L,) to a text without special tokens."""
        decode, options = self._tokenizer.decode, {}
        if _accepts(decode, "skip_special_tokens"):
            options["skip_special_tokens"] = True
        return str(decode(ids.tolist(), **options))

    def pieces(self, ids: Tensor) -> Pieces | None:
        """Return each token's piece of the decoded text; None if not known or if L is too large."""
        if len(ids) > _MOST:
            return None
        # without the end of a text that stops inside a character
        tokens, text = ids.tolist(), self.text_of(ids).rstrip(NO_TEXT)
        try:
            spans = find_spans(text, tokens, self._tokenizer.decode, self._special_ids)
        except InputError:
            return None
        pieces: list[str | None] = []
        end_so_far, span_before = 0, (0, 0)
        for token, (start, end) in zip(tokens, spans, strict=True):
            # a special token, or the start of a character that is incomplete
            if start == end and (token in self._special_ids or end == len(text)):
                pieces.append(None)
            else:  # "" for a further token of the same character
                pieces.append("" if (start, end) == span_before else text[end_so_far:end])
                span_before = start, end
            end_so_far = max(end_so_far, end)
        return pieces

    @property
    def _special_ids(self) -> set[int]:
        """The ids of special tokens, which have no text. The unknown token is not included."""
        ids = set(getattr(self._tokenizer, "all_special_ids", ()))
        ids.discard(getattr(self._tokenizer, "unk_token_id", None))
        return ids

    def _match_spans(self, text: str, ids: list[int]) -> list[Span]:
        """Find each token's span of characters in a text, if the tokenizer returns no offsets."""
        try:
            return find_spans(text, ids, self._tokenizer.decode, self._special_ids)
        except InputError as error:
            raise InputError(
                f"A TextTemplateInput needs the characters of each token, but {self._name} returns "
                f"no offsets, and the decoded tokens differ from the text. {error} Use a fast "
                "tokenizer of transformers, or pass the prompt as a str or TextTokenInput."
            ) from None

    def names(self, ids: Tensor) -> list[str]:
        """Return each token's text, or the name in the vocabulary for a token without text."""
        names_by_id = {token: self._name_of(token) for token in set(ids.tolist())}  # each id once
        return [names_by_id[token] for token in ids.tolist()]

    def own_names(self, ids: Tensor) -> list[str]:
        """Return each token's name in the vocabulary, or the text if the tokenizer has no names."""
        to_pieces = getattr(self._tokenizer, "convert_ids_to_tokens", None)
        if to_pieces is None:
            return self.names(ids)
        return [str(name) for name in to_pieces(ids.tolist())]

    def _name_of(self, token: int) -> str:
        """Return a token's text, or its name in the vocabulary if it has no text."""
        text = str(self._tokenizer.decode([token]))
        to_pieces = getattr(self._tokenizer, "convert_ids_to_tokens", None)
        if to_pieces is None or (text and NO_TEXT not in text):
            return text
        name = to_pieces([token])[0]
        return str(name or f"[{token}]")  # embedding tables may have more rows than the vocabulary


def _accepts(function: Any, keyword: str) -> bool:
    """Return True if a function has a parameter of this name."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # a compiled function may have no signature
        return False
    return any(p.name == keyword or p.kind is p.VAR_KEYWORD for p in parameters)


#: Each token's piece of a text, with leading spaces; joined, the pieces are the text.  The first of
#: several tokens of one character has this character, the others ""; special tokens have None.
Pieces: TypeAlias = list[str | None]
#: The first character of a token, and the character after the last.
Span: TypeAlias = tuple[int, int]
#: A function that decodes token ids to text.
Decode: TypeAlias = Callable[[Sequence[int]], str]

#: The text to which tokenizers decode incomplete characters.
NO_TEXT = "\N{REPLACEMENT CHARACTER}"

#: Largest number of tokens that are decoded together to complete a character.
_LONGEST = 64
#: Largest number of tokens for which pieces are computed; longer texts would take too long.
_MOST = 20_000
#: The number of characters of the text that an error shows.
_QUOTED = 20


def find_spans(text: str, ids: Sequence[int], decode: Decode, silent: Container[int]) -> list[Span]:
    """Find the characters of each token, by decoding tokens and comparing them with the text.

    All tokens that make one character get the span of this character. Differences in whitespace and
    case are ignored, because tokenizers may change both. Raise if other characters differ.

    ``silent`` ids, such as special tokens, have no text and get an empty span.
    """
    spans: list[Span] = []
    char, previous = 0, list[int]()  # index of the next character, and the tokens just before it
    while len(spans) < len(ids):  # len(spans) is the index of the next token
        if ids[len(spans)] in silent:
            spans.append((char, char))
            previous = []
            continue
        count, piece = _decode_whole(ids[len(spans) : len(spans) + _LONGEST], previous, decode)
        start, end = _locate(text, char, piece)
        spans += [(start, end)] * count
        char, previous = end, list(ids[len(spans) - count : len(spans)])
    if text[char:].strip():
        raise InputError(f"The {len(ids)} tokens end before {text[char : char + _QUOTED]!r}.")
    return spans


def _decode_whole(ids: Sequence[int], previous: list[int], decode: Decode) -> tuple[int, str]:
    """Return how many tokens after ``previous`` decode to a whole character, and their text."""
    prefix = decode(previous) if previous else ""
    for count in range(1, len(ids) + 1):  # a character may have several tokens
        group = list(ids[:count])
        text = decode(previous + group)
        # after others, some tokens decode differently than by themselves: "##ing" in "going"
        piece = text.removeprefix(prefix) if text.startswith(prefix) else decode(group)
        if piece and NO_TEXT not in piece:
            return count, piece
    return len(ids), ""  # no whole character: all tokens get an empty span


def _locate(text: str, start: int, piece: str) -> Span:
    """Return the span of ``piece`` in ``text`` at ``start`` or after whitespace, or raise."""
    if piece.isspace():  # may be missing in the text
        return (start, start + len(piece)) if text.startswith(piece, start) else (start, start)
    word = piece.strip()
    while start < len(text) and text[start].isspace():
        start += 1
    end = start + len(word)
    if text[start:end].lower() != word.lower():
        raise InputError(
            f"A token is {word!r}, but the text has {text[start : start + _QUOTED]!r}."
        )
    return start, end
