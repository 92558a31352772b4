"""Text to token ids and back, by whatever tokenizer the user has."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError, OptionError
from .spans import NO_TEXT, Span, find_spans


class Codec:
    """A tokenizer, of which no more is asked than ``encode`` and ``decode``.

    Serves tokenizers of transformers and the tokenizers library, the vocabularies of
    :mod:`captum_ssm.tasks`, and any other with these two methods.

    Args:
        tokenizer: the tokenizer.
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
        """The token ids of a text (L,), with the tokens the tokenizer adds to a text or without."""
        encode, options = self._tokenizer.encode, {}
        if not special and _accepts(encode, "add_special_tokens"):
            options["add_special_tokens"] = False
        found = encode(text, **options)
        return torch.tensor(list(getattr(found, "ids", found)), dtype=torch.long)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> Tensor:
        """The token ids (L,) of a conversation, up to where the answer begins."""
        apply = getattr(self._tokenizer, "apply_chat_template", None)
        if apply is None or getattr(self._tokenizer, "chat_template", apply) is None:
            raise InputError(
                f"The prompt is a list of messages, but {self._name} has no chat template that "
                "makes a text of them. Set tokenizer.chat_template, or pass the prompt as a str."
            )
        text = apply(list(messages), tokenize=False, add_generation_prompt=True)
        return self.encode(text, special=False)  # the template writes them itself

    def encode_with_spans(self, text: str) -> tuple[Tensor, list[Span]]:
        """The token ids of a text (L,), and the first and last character of each, half open."""
        if getattr(self._tokenizer, "is_fast", False):
            found = self._tokenizer(text, return_offsets_mapping=True)
            return torch.tensor(found["input_ids"], dtype=torch.long), found["offset_mapping"]
        found = self._tokenizer.encode(text)
        ids = list(getattr(found, "ids", found))
        spans = getattr(found, "offsets", None)  # the tokenizers library tells them
        return torch.tensor(ids, dtype=torch.long), spans or self._found_spans(text, ids)

    def _found_spans(self, text: str, ids: list[int]) -> list[Span]:
        marks = set(getattr(self._tokenizer, "all_special_ids", ()))
        marks.discard(getattr(self._tokenizer, "unk_token_id", None))  # stands for a word
        try:
            return find_spans(text, ids, self._tokenizer.decode, marks)
        except InputError as error:
            raise InputError(
                f"A template's values are found by the characters of each token, which "
                f"{self._name} does not tell, and its tokens do not read as the text. {error} Use "
                "a fast tokenizer of transformers, or pass the prompt as a str or TextTokenInput."
            ) from None

    def names(self, ids: Tensor) -> list[str]:
        """What each token of (L,) reads; its own name where it is no text by itself."""
        read = {token: self._read(token) for token in set(ids.tolist())}
        return [read[token] for token in ids.tolist()]

    def own_names(self, ids: Tensor) -> list[str]:
        """The name of each token of (L,) in the vocabulary, or what it reads."""
        own = getattr(self._tokenizer, "convert_ids_to_tokens", None)
        return self.names(ids) if own is None else [str(name) for name in own(ids.tolist())]

    def _read(self, token: int) -> str:
        text = str(self._tokenizer.decode([token]))
        own = getattr(self._tokenizer, "convert_ids_to_tokens", None)
        if own is None or (text and NO_TEXT not in text):
            return text
        return str(own([token])[0] or f"[{token}]")  # models embed more ids than there are tokens


def _accepts(function: Any, keyword: str) -> bool:
    """Whether a function has a parameter of this name."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # a compiled function may not tell
        return False
    return any(p.name == keyword or p.kind is p.VAR_KEYWORD for p in parameters)
