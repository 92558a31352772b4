"""Answers to questions kept on disk, from which an interrupted run continues."""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..._files import make_folder, replacing, write_whole
from ...errors import OptionError
from ..call.progress import shown
from ..call.targets import Against
from .hops import Row

T = TypeVar("T")

#: In the folder, the fingerprint of the run.
_OF = "run.txt"


@dataclass(frozen=True)
class SavedRow:
    """A row that was read back; see :class:`~captum_ssm.attr.text.hops.Row`."""

    tokens: Tensor
    bias: Tensor
    output: Tensor


def kept(
    questions: Generator[Against, Row, T], folder: Path, of: str
) -> Generator[Against, Row, T]:
    """Yield the questions whose answers are not in a folder, and keep their answers there.

    Args:
        questions: the questions, which depend on the answers alone.
        folder: stores each answer as soon as it is found; created if missing.
        of: the :func:`fingerprint` of the run.

    Yields:
        The questions that are left; it is sent their answers.

    Returns:
        The result of ``questions``.

    Raises:
        OptionError: when the folder holds answers of another run.
        WriteError: when nothing can be written in it.
    """
    make_folder(folder)
    note = folder / _OF
    if note.exists() and note.read_text("utf-8") != of:
        raise OptionError(
            f"resume={str(folder)!r} holds the answers of another model, text, span or option. "
            "Name an empty folder, or the one of this run."
        )
    write_whole(note, of)
    number, answer = 0, None
    while True:
        try:
            question = next(questions) if answer is None else questions.send(answer)
        except StopIteration as stop:
            result: T = stop.value
            return result
        path = folder / f"{number:06d}.pt"
        if path.exists():
            answer = SavedRow(**torch.load(path, weights_only=True))
        else:
            row = yield question
            answer = SavedRow(row.tokens.cpu(), row.bias.cpu(), row.output.cpu())
            with replacing(path) as beside:
                torch.save(vars(answer), beside)
        number += 1


def counted(questions: Generator[Against, Row, T], total: int) -> Generator[Against, Row, T]:
    """Yield the same questions, each a step of the bar."""
    answer, numbers = None, shown(range(total))
    while True:
        next(numbers, None)
        try:
            question = next(questions) if answer is None else questions.send(answer)
        except StopIteration as stop:
            result: T = stop.value
            return result
        answer = yield question


def fingerprint(model: nn.Module, options: Mapping[str, Any], *parts: Any) -> str:
    """Hash the model's parameters and buffers, of offloaded ones the shapes, and all options."""
    digest = hashlib.sha256()
    for part in (*parts, *(f"{name}={options[name]!r}" for name in sorted(options))):
        digest.update(repr(part.tolist() if isinstance(part, Tensor) else part).encode())
    for value in model.state_dict().values():
        for tensor in _plain(value):
            digest.update(repr((tensor.dtype, tuple(tensor.shape))).encode())
            if not tensor.is_meta:
                digest.update(tensor.cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _plain(value: Any) -> Iterator[Tensor]:
    """Yield the ordinary tensors that an entry of a state dict consists of, if it is a tensor."""
    if hasattr(value, "full_tensor"):  # of which each process has a part
        value = value.full_tensor()
    if hasattr(value, "__tensor_flatten__"):  # such as a quantized one, and its scales
        for name in value.__tensor_flatten__()[0]:
            yield from _plain(getattr(value, name))
    elif isinstance(value, Tensor):
        yield value.detach()
