"""Decompositions saved on disk, so that an interrupted call can continue."""

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

#: The name of the file that stores the fingerprint of the call.
_FINGERPRINT_FILE = "run.txt"


@dataclass(frozen=True)
class SavedRow:
    """A decomposition loaded from disk, with the attributes of :class:`.Row`."""

    tokens: Tensor
    bias: Tensor
    output: Tensor


def answer_saved(
    targets: Generator[Against, Row, T], total: int, folder: Path | None = None, key: str = ""
) -> Generator[Against, Row, T]:
    """Answer targets from decompositions in ``folder``; yield all others, and save the answers.

    Args:
        targets: a generator of targets, which depend only on earlier decompositions.
        total: the number of progress steps to show, one for each target.
        folder: the folder for decompositions, each saved at once; created if missing. Default:
            None, nothing is saved.
        key: the :func:`fingerprint` of the call; raise if the folder has another one.

    Returns:
        The return value of ``targets``.
    """
    if folder is not None:
        make_folder(folder)
        fingerprint_file = folder / _FINGERPRINT_FILE
        if fingerprint_file.exists() and fingerprint_file.read_text("utf-8") != key:
            raise OptionError(
                f"resume={str(folder)!r} holds results for a different model, text, span or "
                "option. Pass an empty folder, or the folder of this call."
            )
        write_whole(fingerprint_file, key)
    answer: Row | None = None  # the decomposition of the latest target
    progress_steps, index = shown(range(total)), 0
    while True:
        next(progress_steps, None)  # move the bar; there may be fewer targets than steps
        try:
            target = next(targets) if answer is None else targets.send(answer)
        except StopIteration as stop:
            result: T = stop.value
            return result
        # a target depends only on earlier answers, so its number identifies it
        path = None if folder is None else folder / f"{index:06d}.pt"
        index += 1
        if path is not None and path.exists():
            answer = SavedRow(**torch.load(path, weights_only=True))
            continue
        answer = yield target
        if path is not None:
            answer = SavedRow(answer.tokens.cpu(), answer.bias.cpu(), answer.output.cpu())
            with replacing(path) as beside:
                torch.save(vars(answer), beside)


def fingerprint(model: nn.Module, options: Mapping[str, Any], *contents: Any) -> str:
    """Hash the options and the model's parameters and buffers (if offloaded, only their shapes)."""
    digest = hashlib.sha256()
    for content in (*contents, *(f"{name}={options[name]!r}" for name in sorted(options))):
        digest.update(repr(content.tolist() if isinstance(content, Tensor) else content).encode())
    for entry in model.state_dict().values():
        for tensor in _plain_tensors(entry):
            digest.update(repr((tensor.dtype, tuple(tensor.shape))).encode())
            if not tensor.is_meta:
                # uint8, because NumPy has no bfloat16
                digest.update(tensor.cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _plain_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the plain tensors in an entry of a state dict, which may be sharded or quantized."""
    if hasattr(value, "full_tensor"):  # a distributed tensor
        value = value.full_tensor()
    if hasattr(value, "__tensor_flatten__"):  # a tensor subclass, such as a quantized weight
        for name in value.__tensor_flatten__()[0]:
            yield from _plain_tensors(getattr(value, name))
    elif isinstance(value, Tensor):
        yield value.detach()
