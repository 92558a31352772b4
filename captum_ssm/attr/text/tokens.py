"""Names of the tokens of a text, and each token's piece of the text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch

from ...errors import InputError
from .codec import Codec, Pieces


@dataclass(frozen=True)
class Tokens(Sequence[str]):
    """Names of the tokens of a text, with each token's piece of the text.

    Pass the object as names of tokens to pictures, reports, Insights and ``named()``. Parts of a
    word are then drawn without a gap, and several tokens of one character as this character.

    Attributes:
        names: the name of each token.
        pieces: each token's piece of the text; joined, the pieces are the text. If several tokens
            make one character, the first has the character and the others ``""``. A special token
            has None. Default: None, not known, which draws tokens with gaps.

    Raises:
        InputError: if names and pieces differ in length.

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
                f"pieces has {len(self.pieces)} entries for {len(self.names)} names. Pass one "
                "piece per name, with None for a special token."
            )

    @classmethod
    def of(cls, tokenizer: Any, ids: Any) -> Tokens:
        """Decode token ids to names and pieces of the text.

        Args:
            tokenizer: any object with ``encode(text)`` and ``decode(ids)``.
            ids: token ids of one text (L,), as a tensor or a list.

        Raises:
            InputError: if ids do not have the shape (L,).
        """
        listed = torch.as_tensor(ids).detach().cpu()
        if listed.dim() != 1:
            raise InputError(
                f"ids has shape {tuple(listed.shape)}. Pass the token ids (L,) of one text, such "
                "as ids[0]."
            )
        codec = tokenizer if isinstance(tokenizer, Codec) else Codec(tokenizer)
        return cls(codec.names(listed), codec.pieces(listed))

    def chosen(self, indices: Iterable[int]) -> Tokens:
        """Return the tokens at some indices, which must be ascending."""
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
