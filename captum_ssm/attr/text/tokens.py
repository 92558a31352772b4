"""The tokens of a text: their names, and their pieces of the text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch

from ...errors import InputError
from .codec import Codec, Pieces


@dataclass(frozen=True)
class Tokens(Sequence[str]):
    """Names of the tokens of a text, with the text's pieces.

    Pass them as names of tokens to pictures, reports, Insights and ``named()``. Parts of a word are
    then drawn without a gap, and several tokens of one character as that character.

    Attributes:
        names: the names.
        pieces: each token's piece of the text; joined, they are the text. The first of several
            tokens of one character has it, the others ``""``; a special token has None. Default:
            None, not known: tokens are drawn apart.

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
                "each, None for a special token."
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
                f"ids has shape {tuple(listed.shape)}, but names are for one text. Pass its ids "
                "(L,), such as ids[0]."
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
