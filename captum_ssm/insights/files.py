"""Datasets of text files or image files; the name of a file's folder is its label."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .._files import existing_folder, read_lines, read_text
from ..attr.text.codec import Codec
from ..attr.text.tokens import Tokens
from ..errors import DataError, InputError, OptionError
from ..explain.loading import Loaded
from ..models.image_files import SUFFIXES
from .dataset import Batch
from .features import ImageFeature, TextFeature
from .vocabularies import check_tokenizers


def class_names(loaded: Loaded, names: Sequence[str] | None) -> list[str]:
    """Return ``names``, or else the model's class names; for a language model, all tokens."""
    config = getattr(loaded.model, "config", None)
    if names is None and loaded.labels is not None:
        return list(loaded.labels)
    if names is None and loaded.is_language:
        count = config.vocab_size if config is not None else len(loaded.tokenizer)
        return Codec(loaded.tokenizer).names(torch.arange(count))
    if names is None and config is not None:
        return [str(config.id2label[i]) for i in range(len(config.id2label))]
    if names is None:
        # the last linear layer is the classifier
        linear_layers = [m for m in loaded.model.modules() if isinstance(m, nn.Linear)]
        return [str(i) for i in range(linear_layers[-1].out_features)]
    return list(names)


def common_classes(
    models: Sequence[str], loaded: Sequence[Loaded], names: Sequence[str] | None
) -> list[str]:
    """Return the class names of several models; raise if their classes or tokens differ."""
    if all(entry.tokenizer is not None for entry in loaded):
        check_tokenizers(models, [entry.tokenizer for entry in loaded])
    first, *others = (class_names(entry, names) for entry in loaded)
    for model, classes in zip(models[1:], others, strict=True):
        for index, (own, other) in enumerate(zip(first, classes, strict=False)):
            if own != other:
                raise OptionError(
                    f"class {index} is {own!r} in {models[0]} and {other!r} in {model}. Models on "
                    "one page must have the same classes. Name the classes with --labels, or serve "
                    "the models one by one."
                )
    return first


class TextFiles:
    """A dataset of texts: the lines of a file, or the ``*.txt`` files of a folder.

    Args:
        path: the file or the folder.
        loaded: the models, whose tokenizers must return the same tokens.
        classes: the names of the classes.
    """

    def __init__(self, path: Path, loaded: Sequence[Loaded], classes: Sequence[str]) -> None:
        self._codecs = [Codec(entry.tokenizer) for entry in loaded]
        self._device = _device(loaded)
        if path.is_file():
            texts: list[tuple[str, int | None]] = [(line, None) for line in read_lines(path)]
        else:
            texts = [
                (read_text(file), label) for file, label in _labeled_files(path, (".txt",), classes)
            ]
        self._texts = [(text, label) for text, label in texts if text.strip()]
        if not self._texts:
            raise DataError(f"{path} contains no text. Pass a file or folder with text.")

    @property
    def feature(self) -> TextFeature:
        """The feature that displays the tokens of a text."""
        return TextFeature("Text", None, None, lambda ids: Tokens.of(self._codecs[0], ids[0]))

    def __iter__(self) -> Iterator[Batch]:
        for written, label in self._texts:
            ids, *others = (codec.encode(written, special=True) for codec in self._codecs)
            if not len(ids):
                raise InputError(f"the text {written!r} has no tokens. Remove it.")
            if not all(torch.equal(ids, other) for other in others):
                raise OptionError(
                    f"the tokenizers of the models return different tokens for {written!r}. Name "
                    "one tokenizer for all models with --tokenizer, or serve them one by one."
                )
            yield Batch(ids[None].to(self._device), _label_tensor(label))


class Images:
    """A dataset of the image files in a folder; each file is read when it is needed."""

    def __init__(self, path: Path, loaded: Sequence[Loaded], classes: Sequence[str]) -> None:
        self._loaded = loaded
        self._device = _device(loaded)
        self._files = _labeled_files(path, SUFFIXES, classes)

    @property
    def feature(self) -> ImageFeature:
        """The feature that displays an image, as it is passed to the models."""
        return ImageFeature("Image", None, None)

    def __iter__(self) -> Iterator[Batch]:
        for file, label in self._files:
            image, *others = (entry.read_images([file]) for entry in self._loaded)
            if not all(torch.equal(image, other) for other in others):
                raise OptionError(
                    f"the models convert {file} to different inputs, in size or normalization. "
                    "Serve the models one by one."
                )
            yield Batch(image.to(self._device), _label_tensor(label))


def _device(loaded: Sequence[Loaded]) -> torch.device:
    return next(loaded[0].model.parameters()).device


def _label_tensor(label: int | None) -> Any:
    return None if label is None else torch.tensor([label])


def _labeled_files(
    path: Path, suffixes: Sequence[str], classes: Sequence[str]
) -> list[tuple[Path, int | None]]:
    """Return files and labels: first the folder's files, then files in subfolders of classes."""
    root = existing_folder(path, f"files that end in {', '.join(suffixes)}")
    numbers = {name: number for number, name in enumerate(classes)}
    labeled: list[tuple[Path, int | None]] = [(file, None) for file in _files(root, suffixes)]
    for folder in sorted(p for p in root.iterdir() if p.is_dir() and _files(p, suffixes)):
        if folder.name not in numbers:
            known = ", ".join(list(classes)[:8])
            raise DataError(
                f"{folder} does not have the name of one of the {len(classes)} classes ({known}, "
                "...). Rename the folder, or name the classes with --labels."
            )
        labeled += [(file, numbers[folder.name]) for file in _files(folder, suffixes)]
    if not labeled:
        raise DataError(
            f"{root} contains no file that ends in {', '.join(suffixes)}. Pass a folder with files."
        )
    return labeled


def _files(folder: Path, suffixes: Sequence[str]) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.is_file() and p.suffix.lower() in suffixes)
