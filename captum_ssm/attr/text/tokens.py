"""The tokens of a text: their names, and what each adds to it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch

from ...errors import InputError
from .codec import Codec, Pieces


@dataclass(frozen=True)
class Tokens(Sequence[str]):
    """Names of the tokens of a text, which know where its words begin.

    Wherever names of tokens are asked for, in pictures, reports, Insights and by ``named()``, these
    may stand: parts of a word are then drawn without a gap, and a character's several tokens as it.

    Attributes:
        names: the names.
        pieces: what each adds to the text, spaces in front included: joined, they are the text. The
            first of several tokens of one character adds it, the others ``""``; a mark that is no
            text has None. Default: None, not known: tokens then stand apart.

    Raises:
        InputError: when names and pieces are not equally many.

    Example:
        >>> from captum_ssm.models import load_bundled
        >>> from captum_ssm.viz import Tokens
        >>> tokenizer = load_bundled()[1]
        >>> tokens = Tokens.of(tokenizer, tokenizer.encode("anna owns"))
        >>> list(tokens), tokens.pieces
        (['anna', 'owns'], ['anna', ' owns'])
    """

    names: Sequence[str]
    pieces: Pieces | None = None

    def __post_init__(self) -> None:
        if self.pieces is not None and len(self.pieces) != len(self.names):
            raise InputError(
                f"pieces has {len(self.pieces)} entries for {len(self.names)} names; give one for "
                "each, None for a mark that is no text."
            )

    @classmethod
    def of(cls, tokenizer: Any, ids: Any) -> Tokens:
        """Name the tokens of a text, as a tokenizer reads them.

        Args:
            tokenizer: anything with ``encode(text)`` and ``decode(ids)``.
            ids: of one text (L,), as a tensor or a list.

        Raises:
            InputError: when ids are not of one text.
        """
        listed = torch.as_tensor(ids).detach().cpu()
        if listed.dim() != 1:
            raise InputError(
                f"ids has shape {tuple(listed.shape)}, but names are those of one text. Pass its "
                "ids (L,), such as ids[0]."
            )
        codec = tokenizer if isinstance(tokenizer, Codec) else Codec(tokenizer)
        return cls(codec.names(listed), codec.pieces(listed))

    def chosen(self, indices: Iterable[int]) -> Tokens:
        """Keep some tokens, by their indices in rising order."""
        listed = list(indices)
        pieces = None if self.pieces is None else [self.pieces[i] for i in listed]
        return Tokens([self.names[i] for i in listed], pieces)

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> Tokens: ...

    def __getitem__(self, index: int | slice) -> str | Tokens:
        if isinstance(index, slice):
            return self.chosen(range(len(self))[index])
        return self.names[index]

    def __len__(self) -> int:
        return len(self.names)
