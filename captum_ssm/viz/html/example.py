"""Convert the user's arguments to the single examples of a report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...attr.call.given import Reader, is_text
from ...attr.call.inputs import as_tuple, batch_parts, check_batch, single_input
from ...attr.text.codec import Codec
from ...attr.text.tokens import Tokens
from ...errors import InputError
from ...tracing import find_model

#: Names of tokens: one list for a single example, or a list for each example.
Names = Sequence[str] | Sequence[Sequence[str]]


@dataclass(frozen=True, eq=False)
class ShownExample:
    """One example of a report, with the model's further arguments.

    Attributes:
        inputs: token ids (1, L), embeddings (1, L, E) or an image (1, C, H, W).
        target: the explained output, in Captum's forms, or None.
        additional: further arguments of the model, as a tuple.
        names: the names of the tokens, or None.
    """

    inputs: Tensor
    target: Any
    additional: tuple[Any, ...]
    names: Sequence[str] | None

    @property
    def is_image(self) -> bool:
        """Return True if the input is an image."""
        return self.inputs.dim() == 4


@dataclass(frozen=True, eq=False)
class Subject:
    """The explained model, and the names of its tokens and classes.

    Attributes:
        forward_func: the function that runs the model.
        module: the model.
        layers: names or modules of the mixers to use, or None for all.
        codec: the tokenizer, or None.
        labels: names of the classes, or None.
    """

    forward_func: Callable[..., Any]
    module: nn.Module
    layers: Sequence[str | nn.Module] | None
    codec: Codec | None
    labels: Sequence[str] | None


def read_examples(
    subject: Subject, inputs: Any, target: Any, additional_forward_args: Any, tokens: Names | None
) -> list[ShownExample]:
    """Split the user's inputs into single examples; texts become token ids."""
    reader = Reader(subject.codec, subject.forward_func, subject.module)
    inputs = [inputs] if is_text(inputs) else inputs
    are_texts = isinstance(inputs, list | tuple) and any(map(is_text, inputs))
    arguments = {"target": target, "additional_forward_args": additional_forward_args}
    if are_texts:
        arguments["target"] = reader.target(target)
    else:
        arguments["inputs"] = inputs
        reader.convert(arguments, {})  # converts a tokenizer's output in place
        inputs = arguments["inputs"]
    target, additional = arguments["target"], as_tuple(arguments["additional_forward_args"])
    if are_texts or not isinstance(inputs, Tensor | tuple):
        if additional or tokens is not None:
            raise InputError(
                "inputs contains texts, which the tokenizer converts to tokens. Leave out tokens "
                "and additional_forward_args, or pass token ids."
            )
        return list(_examples_of_texts(reader, inputs, target))
    tensor, _ = single_input(inputs)
    check_batch(tensor, additional)
    names_by_example = _token_names(tensor, tokens, subject.codec)
    return [
        ShownExample(part(tensor), part.target(target), tuple(part(x) for x in additional), names)
        for part, names in zip(batch_parts(len(tensor), 1), names_by_example, strict=True)
    ]


def _examples_of_texts(reader: Reader, texts: Any, target: Any) -> Iterator[ShownExample]:
    """Tokenize texts one by one, without padding; raise InputError if ``texts`` are no texts."""
    if reader.codec is None:
        raise InputError("inputs has texts, but tokenizer=None. Pass the model's tokenizer or ids.")
    if not isinstance(texts, list | tuple) or not all(map(is_text, texts)):
        raise InputError(
            f"inputs is of type {type(texts).__name__}. Pass token ids (B, L), embeddings "
            "(B, L, E) or images (B, C, H, W). With tokenizer= pass a str, a conversation or a "
            "list of them, with transform= PIL images."
        )
    if not texts:
        raise InputError("inputs is an empty list. Pass at least one text.")
    for text, part in zip(texts, batch_parts(len(texts), 1), strict=True):
        ids = reader.inputs(text)
        if not ids.numel():
            raise InputError(f"inputs has the text {text!r} without tokens. Leave it out.")
        yield ShownExample(ids, part.target(target), (), Tokens.of(reader.codec, ids[0]))


def transformed(images: Any, transform: Callable[[Any], Any]) -> Tensor:
    """Apply the user's transform to one or several images; return (B, C, H, W)."""
    outputs = map(transform, images if isinstance(images, list | tuple) else [images])
    # image processors of transformers return mappings
    tensors = (x["pixel_values"][0] if isinstance(x, Mapping) else x for x in outputs)
    return torch.stack(list(map(torch.as_tensor, tensors)))


def _token_names(
    inputs: Tensor, tokens: Names | None, codec: Codec | None
) -> Sequence[Sequence[str] | None]:
    """Return the names of each example's tokens; None for an example whose names are unknown."""
    batch = len(inputs)
    if tokens is None:
        if codec is None or inputs.dim() != 2 or inputs.is_floating_point():
            return [None] * batch
        return [Tokens.of(codec, ids) for ids in inputs]
    if inputs.dim() == 4:
        raise InputError("tokens cannot name the patches of images. Leave tokens out.")
    if isinstance(tokens, str):
        raise InputError(f"tokens is the text {tokens!r}. Pass a list of names for each sequence.")
    if all(isinstance(name, str) for name in tokens):
        if batch == 1:
            return [cast("Sequence[str]", tokens)]
        raise InputError(f"tokens has one list of names. Pass {batch} lists, one per example.")
    if len(tokens) != batch:
        raise InputError(f"tokens has {len(tokens)} lists. Pass {batch}, one per example.")
    return list(tokens)


def find_subject(
    forward_func: Callable[..., Any],
    model: nn.Module | None,
    layers: Sequence[str | nn.Module] | None,
    tokenizer: Any,
    labels: Sequence[str] | None,
) -> Subject:
    """Collect the model, tokenizer and class names; see :func:`captum_ssm.viz.report`."""
    if tokenizer is None:  # a pipeline of transformers has its own
        tokenizer = getattr(forward_func, "tokenizer", None)
    codec = None if tokenizer is None else Codec(tokenizer)
    return Subject(forward_func, find_model(forward_func, model), layers, codec, labels)
