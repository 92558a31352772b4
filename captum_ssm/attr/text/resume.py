"""Answers to questions kept on disk, so that a run of hours that was ended goes on where it was."""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from captum._utils.progress import progress
from torch import Tensor, nn

from ..._files import make_folder, replacing, write_whole
from ...errors import OptionError
from ...operators.kernels.arithmetic import doubled
from ..call.targets import Against
from .hops import Row

T = TypeVar("T")

#: In the folder, what the answers belong to.
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
    """The same questions, less those that the folder holds answers to.

    Args:
        questions: the questions, which follow from the answers alone.
        folder: takes each answer as soon as it is there; made if it is missing.
        of: what the answers belong to; see :func:`fingerprint`.

    Yields:
        The questions that are left.

    Returns:
        What they come to.

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


def counted(
    questions: Generator[Against, Row, T], description: str, total: int
) -> Generator[Against, Row, T]:
    """The same questions, with a bar that shows how many are answered."""
    with progress(desc=description, total=total) as bar:
        answer = None
        while True:
            try:
                question = next(questions) if answer is None else questions.send(answer)
            except StopIteration as stop:
                result: T = stop.value
                return result
            answer = yield question
            bar.update(1)


def fingerprint(model: nn.Module, options: Mapping[str, Any], *parts: Any) -> str:
    """What tells one run from others: the model's weights, and all that is asked of it."""
    digest = hashlib.sha256()
    for part in (*parts, *(f"{name}={options[name]!r}" for name in sorted(options))):
        digest.update(repr(part.tolist() if isinstance(part, Tensor) else part).encode())
    weights: Iterable[Tensor] = (p.detach() for p in model.parameters() if not p.is_meta)
    for weight in weights:
        digest.update(repr(float(doubled(weight).abs().sum())).encode())
    return digest.hexdigest()
