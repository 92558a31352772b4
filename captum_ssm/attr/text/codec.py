"""Text to token ids and back by any tokenizer, and the characters that each token stands for."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ...errors import InputError, OptionError


class Codec:
    """A tokenizer with at least ``encode`` and ``decode``.

    Serves tokenizers of transformers and the tokenizers library, the vocabularies of
    :mod:`captum_ssm.models.recall`, and any other with these two methods.
    """

    def __init__(self, tokenizer: Any) -> None:
        for method in ("encode", "decode"):
            if not callable(getattr(tokenizer, method, None)):
                raise OptionError(
                    f"tokenizer has no method {method}(), got {type(tokenizer).__name__}. Pass the "
                    "model's tokenizer, with encode(text) and decode(ids)."
                )
        self._tokenizer = tokenizer

    @property
    def _name(self) -> str:
        return type(self._tokenizer).__name__

    def encode(self, text: str, *, special: bool) -> Tensor:
        """Return a text's token ids (L,), with or without the marks that the tokenizer adds."""
        encode, options = self._tokenizer.encode, {}
        if not special and _accepts(encode, "add_special_tokens"):
            options["add_special_tokens"] = False
        found = encode(text, **options)
        return torch.tensor(list(getattr(found, "ids", found)), dtype=torch.long)

    def ids_of(self, text: str | Sequence[Mapping[str, str]]) -> Tensor:
        """Return the token ids (L,) of a text, marks included, or of a conversation."""
        return self.encode(text, special=True) if isinstance(text, str) else self.encode_chat(text)

    def token(self, text: str) -> int:
        """Return the id of a text that is one token.

        Raises:
            InputError: when it is none or several, which the message names.
        """
        ids = self.encode(text, special=False)
        if len(ids) != 1:
            raise InputError(
                f"{text!r} is {len(ids)} tokens, {self.names(ids)}; one is asked for. Name one of "
                "them, or give its id."
            )
        return int(ids[0])

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> Tensor:
        """Return the token ids (L,) of a conversation, up to where the answer begins."""
        apply = getattr(self._tokenizer, "apply_chat_template", None)
        if apply is None or getattr(self._tokenizer, "chat_template", apply) is None:
            raise InputError(
                f"The prompt is a list of messages, but {self._name} has no chat template that "
                "makes a text of them. Set tokenizer.chat_template, or pass the prompt as a str."
            )
        text = apply(list(messages), tokenize=False, add_generation_prompt=True)
        return self.encode(text, special=False)  # the template writes them itself

    def encode_with_spans(self, text: str) -> tuple[Tensor, list[Span]]:
        """Return a text's token ids (L,), and the span of characters of each."""
        if getattr(self._tokenizer, "is_fast", False):
            found = self._tokenizer(text, return_offsets_mapping=True)
            return torch.tensor(found["input_ids"], dtype=torch.long), found["offset_mapping"]
        found = self._tokenizer.encode(text)
        ids = list(getattr(found, "ids", found))
        spans = getattr(found, "offsets", None)  # of the tokenizers library
        return torch.tensor(ids, dtype=torch.long), spans or self._found_spans(text, ids)

    def read(self, ids: Tensor) -> tuple[str, list[Span]]:
        """Return the text of tokens (L,), and the span of characters of each."""
        text = self.text_of(ids)
        try:
            return text, find_spans(text, ids.tolist(), self._tokenizer.decode, self._marks)
        except InputError as error:
            raise InputError(
                f"The characters of each token cannot be found by decoding with {self._name}. "
                f"{error} Pass ranges of tokens as spans."
            ) from None

    def text_of(self, ids: Tensor) -> str:
        """Return the text of tokens (L,), without the tokenizer's marks."""
        decode, options = self._tokenizer.decode, {}
        if _accepts(decode, "skip_special_tokens"):
            options["skip_special_tokens"] = True
        return str(decode(ids.tolist(), **options))

    def pieces(self, ids: Tensor) -> Pieces | None:
        """Return each token's piece of the text of (L,); None if not known, or too long to show."""
        if len(ids) > _MOST:
            return None
        listed, text = ids.tolist(), self.text_of(ids).rstrip(NO_TEXT)  # a text may end too early
        try:
            spans = find_spans(text, listed, self._tokenizer.decode, self._marks)
        except InputError:
            return None
        found: list[str | None] = []
        at, before = 0, (0, 0)
        for token, (start, end) in zip(listed, spans, strict=True):
            if start == end and (token in self._marks or end == len(text)):
                found.append(None)
            else:
                found.append("" if (start, end) == before else text[at:end])
                before = start, end
            at = max(at, end)
        return found

    @property
    def _marks(self) -> set[int]:
        """Ids that stand for no text; the id of unknown words stands for one."""
        marks = set(getattr(self._tokenizer, "all_special_ids", ()))
        marks.discard(getattr(self._tokenizer, "unk_token_id", None))
        return marks

    def _found_spans(self, text: str, ids: list[int]) -> list[Span]:
        """Find the spans of a template's tokens."""
        try:
            return find_spans(text, ids, self._tokenizer.decode, self._marks)
        except InputError as error:
            raise InputError(
                f"A template's values are found by the characters of each token, which "
                f"{self._name} does not tell, and its tokens do not read as the text. {error} Use "
                "a fast tokenizer of transformers, or pass the prompt as a str or TextTokenInput."
            ) from None

    def names(self, ids: Tensor) -> list[str]:
        """Return the text of each token (L,), or its name in the vocabulary if it has no text."""
        read = {token: self._read(token) for token in set(ids.tolist())}
        return [read[token] for token in ids.tolist()]

    def own_names(self, ids: Tensor) -> list[str]:
        """Return the name of each token (L,) in the vocabulary, or its text."""
        to_pieces = getattr(self._tokenizer, "convert_ids_to_tokens", None)
        if to_pieces is None:
            return self.names(ids)
        return [str(name) for name in to_pieces(ids.tolist())]

    def _read(self, token: int) -> str:
        text = str(self._tokenizer.decode([token]))
        to_pieces = getattr(self._tokenizer, "convert_ids_to_tokens", None)
        if to_pieces is None or (text and NO_TEXT not in text):
            return text
        name = to_pieces([token])[0]
        return str(name or f"[{token}]")  # models embed more ids than there are tokens


def _accepts(function: Any, keyword: str) -> bool:
    """Return True if a function has a parameter of this name."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # a compiled function may not tell
        return False
    return any(p.name == keyword or p.kind is p.VAR_KEYWORD for p in parameters)


#: Each token's piece of a text, spaces in front included: joined, they are the text.  The first of
#: several tokens of one character has all of it, the others ""; a special token has None.
Pieces: TypeAlias = list[str | None]
#: First and last character of a token, half open.
Span: TypeAlias = tuple[int, int]
#: Token ids to the text that they read as.
Read: TypeAlias = Callable[[Sequence[int]], str]

#: The text that tokenizers decode parts of a character to.
NO_TEXT = "\N{REPLACEMENT CHARACTER}"

#: Tokens that may have to be read together: the parts of characters that overlap.
_LONGEST = 64
#: Tokens of a text of which pages are made; reading longer ones along would take long.
_MOST = 20_000
#: Characters of the text that an error quotes.
_QUOTED = 20


def find_spans(text: str, ids: Sequence[int], read: Read, silent: Container[int]) -> list[Span]:
    """Find the characters of each token, by reading the tokens along the text.

    All tokens of one character get its span. Whitespace and case are ignored, as tokenizers may
    drop them.

    Args:
        text: the text that was encoded.
        ids: its tokens.
        read: the tokenizer's decoding.
        silent: ids without characters, such as special tokens.

    Returns:
        Start and end for each token; empty at their place for silent ones.

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
        count, piece = _readable(ids[len(spans) : len(spans) + _LONGEST], before, read)
        start, end = _place(text, at, piece)
        spans += [(start, end)] * count
        at, before = end, list(ids[len(spans) - count : len(spans)])
    if text[at:].strip():
        raise InputError(f"Its {len(ids)} tokens end before {text[at : at + _QUOTED]!r}.")
    return spans


def _readable(ids: Sequence[int], before: list[int], read: Read) -> tuple[int, str]:
    """Return the number of first tokens that make whole characters, and their text."""
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
    """Return the span of a piece, the next one behind character ``at``; raise if it differs."""
    if piece.isspace():
        return (at, at + len(piece)) if text.startswith(piece, at) else (at, at)
    word = piece.strip()
    while at < len(text) and text[at].isspace():
        at += 1
    end = at + len(word)
    if text[at:end].lower() != word.lower():
        raise InputError(f"A token reads {word!r} where the text is {text[at : at + _QUOTED]!r}.")
    return at, end
