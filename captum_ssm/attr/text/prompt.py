"""Conversion of prompts in any accepted form to token ids and features."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from captum.attr import TextTemplateInput, TextTokenInput
from torch import Tensor

from ...errors import InputError, OptionError
from .codec import Codec, Pieces

#: The option ``skip_tokens``: ids or strings of tokens.
SkipTokens = Sequence[int] | Sequence[str] | None

#: The first of the private Unicode characters that mark the values of a template.
_MARK = 0xF0000

ACCEPTED = (
    "Pass a str, token ids as a list of ints or a tensor (L,) or (1, L), a list of chat messages "
    "{'role': ..., 'content': ...}, or captum's TextTokenInput or TextTemplateInput."
)


@dataclass(frozen=True, eq=False)
class Prompt:
    """The token ids and features of one prompt.

    Attributes:
        ids: token ids (L,).
        names: names of the features.
        features: function from relevance of tokens (..., L) to relevance of features (..., n_in).
        kept: booleans (L,), True for tokens that belong to a feature.
        pieces: each feature's piece of the text; None if not known, or if features are not
            contiguous.
    """

    ids: Tensor
    names: list[str]
    features: Callable[[Tensor], Tensor]
    kept: Tensor
    pieces: Pieces | None = None


def read_prompt(prompt: Any, codec: Codec, skip_tokens: SkipTokens = None) -> Prompt:
    """Convert a prompt in any accepted form to a :class:`Prompt`."""
    if isinstance(prompt, TextTemplateInput):
        if skip_tokens is not None:
            raise OptionError(
                f"skip_tokens={skip_tokens!r} is not for a TextTemplateInput, whose features are "
                "its values. Leave skip_tokens out, or pass the prompt as a str."
            )
        return _read_template(prompt, codec)
    if isinstance(prompt, TextTokenInput):  # Captum's values are names of the unmasked tokens
        ids = _require_tokens(prompt.inp_tensor[0], "The prompt")
        is_feature = torch.ones_like(ids, dtype=torch.bool)
        if prompt.itp_mask is not None:
            is_feature = prompt.itp_mask[0].cpu()
        names = [""] * len(ids)
        for position, value in zip(
            is_feature.nonzero().flatten().tolist(), prompt.values, strict=True
        ):
            names[position] = value
    else:
        ids = _require_tokens(_ids_of(prompt, codec), "The prompt")
        is_feature, names = torch.ones_like(ids, dtype=torch.bool), codec.names(ids)
    is_feature = is_feature & ~_is_skipped(ids, codec, skip_tokens)
    positions = is_feature.nonzero().flatten()
    if not len(positions):
        raise InputError(
            f"skip_tokens={list(skip_tokens or ())!r} leaves none of the prompt's {len(ids)} "
            "tokens to explain. Pass fewer tokens to skip."
        )
    pieces, indices = codec.pieces(ids), positions.tolist()
    if pieces is not None:
        pieces = [pieces[i] for i in indices]
    return Prompt(ids, [names[i] for i in indices], lambda x: x[..., positions], is_feature, pieces)


def read_ids(value: Any, name: str) -> Tensor:
    """Convert a list, tensor or array (L,) or (1, L) to token ids (L,); errors use the ``name``."""
    try:
        ids = torch.as_tensor(value).detach().cpu()
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"{name} is {value!r}. Pass token ids, which are integers.") from None
    if ids.dim() == 2 and len(ids) == 1:
        ids = ids[0]
    if ids.dim() != 1:
        raise InputError(
            f"{name} has shape {tuple(ids.shape)}. Pass one sequence of token ids, (L,) or (1, L)."
        )
    if ids.numel() and (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool):
        raise InputError(f"{name} has dtype {ids.dtype}. Pass token ids, which are integers.")
    if bool((ids < 0).any()):
        raise InputError(f"{name} contains {int(ids.min())}. Pass token ids of at least 0.")
    return _require_tokens(ids.long(), name)


def _require_tokens(ids: Tensor, name: str) -> Tensor:
    """Return token ids on the CPU; raise if there are none."""
    if not len(ids):
        raise InputError(f"{name} has no tokens. Pass at least one token.")
    return ids.cpu()


def _ids_of(prompt: Any, codec: Codec) -> Tensor:
    """Return the token ids (L,) of a str, a conversation, a list or a tensor."""
    if isinstance(prompt, str):
        return codec.ids_of(prompt)
    if isinstance(prompt, list | tuple) and prompt:
        if all(isinstance(message, Mapping) for message in prompt):
            return codec.ids_of(prompt)
        if any(isinstance(text, str) for text in prompt):
            raise InputError(
                f"The prompt is a {type(prompt).__name__} of {len(prompt)} entries that contains "
                f"text, but a call explains one prompt. {ACCEPTED}"
            )
    if not isinstance(prompt, list | tuple | Tensor) and not hasattr(prompt, "__array__"):
        raise InputError(f"The prompt is of type {type(prompt).__name__}. {ACCEPTED}")
    return read_ids(prompt, "The prompt")


def _is_skipped(ids: Tensor, codec: Codec, skip_tokens: SkipTokens) -> Tensor:
    """Return booleans (L,), True for tokens whose id or text is in ``skip_tokens``."""
    is_list = isinstance(skip_tokens, Sequence | None) and not isinstance(skip_tokens, str)
    if not is_list or not all(isinstance(token, Integral | str) for token in skip_tokens or ()):
        raise OptionError(
            f"skip_tokens={skip_tokens!r} is not a list of token ids or strings. Pass a list, such "
            f"as skip_tokens=[{skip_tokens!r}]."
        )
    skipped = set(skip_tokens or ())
    if not skipped:
        return torch.zeros_like(ids, dtype=torch.bool)
    # the user may pass the id, the text or the name in the vocabulary
    identities = zip(ids.tolist(), codec.names(ids), codec.own_names(ids), strict=True)
    return torch.tensor([not skipped.isdisjoint(token) for token in identities])


def _read_template(prompt: TextTemplateInput, codec: Codec) -> Prompt:
    """Convert a template to a :class:`Prompt` whose features are the template's values.

    A token's relevance is divided among values by the fraction of its characters in each value.
    """
    text = prompt.to_model_input()
    ids, token_spans = codec.encode_with_spans(text)
    ids = _require_tokens(ids, "The prompt")
    shares = torch.zeros(prompt.n_itp_features, len(ids), dtype=torch.float64)
    for value, start, end in _find_values(prompt, text):
        # with a mask, several values may be one feature
        feature = value if prompt.mask is None else prompt.formatted_mask[value]
        for token, (token_start, token_end) in enumerate(token_spans):
            shares[feature, token] += max(0, min(end, token_end) - max(start, token_start))
    shares /= shares.sum(0).clamp_min(1)  # tokens outside all values have share 0

    def features(relevance: Tensor) -> Tensor:
        """Convert relevance of tokens (..., L) to the shape of Captum's values."""
        by_feature: Tensor = prompt.format_attr(relevance @ shares.to(relevance).T)
        return by_feature

    return Prompt(ids, list(prompt.values), features, shares.sum(0) > 0)


def _find_values(prompt: TextTemplateInput, text: str) -> list[tuple[int, int, int]]:
    """Return (value index, start, end) for each occurrence of a value in the filled template."""
    # fill the template with each value between two marks, private characters for its index
    marked = [f"{chr(_MARK + i)}{value}{chr(_MARK + i)}" for i, value in enumerate(prompt.values)]
    if prompt.dict_keys:
        text_with_marks = prompt.format_fn(**dict(zip(prompt.dict_keys, marked, strict=True)))
    else:
        text_with_marks = prompt.format_fn(*marked)
    # the first mark of a value is its start, the second its end; marks are not counted
    places, starts, characters = [], dict[int, int](), []
    for character in text_with_marks:
        index = ord(character) - _MARK
        if not 0 <= index < len(marked):
            characters.append(character)
        elif index in starts:
            places.append((index, starts.pop(index), len(characters)))
        else:
            starts[index] = len(characters)
    if starts or "".join(characters) != text:
        raise InputError(
            "The template changes its values or depends on them, so the values cannot be found in "
            "the text. Pass a template that only inserts values, such as '{} feels {} right now'."
        )
    return places
