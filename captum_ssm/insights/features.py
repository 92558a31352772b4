"""Features: the inputs of a model, and their display."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..attr.text.tokens import Tokens
from ..errors import InputError
from ..viz.html.pictures import heat, photograph

#: One function, several functions to apply in order, or None.
Transforms = Callable[..., Any] | Sequence[Callable[..., Any]] | None


class FeatureOutput(NamedTuple):
    """The display of one feature of one example.

    Attributes:
        name: the feature's name.
        base: the input: base64 of a PNG, a list of words, or a list of labels.
        modified: its relevance: base64 of a PNG, or from -100 to 100 for each word or label.
        type: ``"image"``, ``"text"``, ``"general"`` or ``"empty"``.
        contribution: the feature's share in the relevance of all features, from -1 to 1.
    """

    name: str
    base: Any
    modified: Any
    type: str
    contribution: float


class BaseFeature:
    """Base of all features; a new one defines ``visualization_type`` and ``visualize``.

    Args:
        name: its name, such as ``"Photo"``.
        baseline_transforms: convert a transformed input, without its batch dimension, to its
            baseline; the first of several is used. None means zeros.
        input_transforms: convert an input, without its batch dimension, to the model's input, one
            after the other. None means none.
        visualization_transform: converts the dataset's input for display. None means none.
    """

    def __init__(
        self,
        name: str,
        baseline_transforms: Transforms,
        input_transforms: Transforms,
        visualization_transform: Callable[..., Any] | None,
    ) -> None:
        self.name = name
        self.baseline_transforms = _listed(baseline_transforms)
        self.input_transforms = _listed(input_transforms)
        self.visualization_transform = visualization_transform

    @staticmethod
    def visualization_type() -> str:
        """Return the type of its display, one of the types of :class:`FeatureOutput`."""
        raise NotImplementedError

    def visualize(self, attribution: Any, data: Any, contribution_frac: float) -> FeatureOutput:
        """Return the display of an example.

        Args:
            attribution: the relevance of the transformed input, a batch of one.
            data: the input as it comes from the dataset, a batch of one.
            contribution_frac: the feature's share.
        """
        raise NotImplementedError

    def _output(self, base: Any, modified: Any, contribution: float) -> FeatureOutput:
        return FeatureOutput(self.name, base, modified, self.visualization_type(), contribution)


class ImageFeature(BaseFeature):
    """An image (1, C, H, W): red, green and blue, or shades of gray.

    Args:
        name: its name.
        baseline_transforms, input_transforms: see :class:`BaseFeature`.
        visualization_transform: see :class:`BaseFeature`. Default: None.

    Raises:
        InputError: when the input to show is not an image.

    Example:
        >>> import torch
        >>> from captum_ssm.insights import ImageFeature
        >>> feature = ImageFeature("Photo", baseline_transforms=None, input_transforms=None)
        >>> shown = feature.visualize(torch.eye(8).expand(1, 3, 8, 8), torch.rand(1, 3, 8, 8), 1.0)
        >>> shown.type, shown.base[:5], shown.modified[:5]  # two PNGs, in base64
        ('image', 'iVBOR', 'iVBOR')
    """

    def __init__(
        self,
        name: str,
        baseline_transforms: Transforms,
        input_transforms: Transforms,
        visualization_transform: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__(name, baseline_transforms, input_transforms, visualization_transform)

    @staticmethod
    def visualization_type() -> str:
        return "image"

    def visualize(self, attribution: Any, data: Any, contribution_frac: float) -> FeatureOutput:
        image = self.visualization_transform(data) if self.visualization_transform else data
        return self._output(photograph(image), heat(attribution), contribution_frac)


class TextFeature(BaseFeature):
    """A text: token ids (1, L), or embeddings, whose relevance is summed over features.

    Args:
        name: its name.
        baseline_transforms, input_transforms: see :class:`BaseFeature`.
        visualization_transform: converts ids to words; with :class:`~captum_ssm.viz.Tokens`, as in
            ``lambda ids: Tokens.of(tokenizer, ids[0])``, parts of a word are joined. None keeps the
            numbers.

    Example:
        >>> import torch
        >>> from captum_ssm.insights import TextFeature
        >>> words = ["a", "lamp", "kite"]
        >>> feature = TextFeature("Text", None, None, lambda ids: [words[i] for i in ids[0]])
        >>> shown = feature.visualize(torch.tensor([[1.0, -2.0]]), torch.tensor([[0, 2]]), 1.0)
        >>> shown.base, shown.modified  # in hundredths of the largest
        (['a', 'kite'], [50.0, -100.0])
    """

    @staticmethod
    def visualization_type() -> str:
        return "text"

    def visualize(self, attribution: Any, data: Any, contribution_frac: float) -> FeatureOutput:
        words = self.visualization_transform(data) if self.visualization_transform else data[0]
        relevance = _numbers(attribution)
        relevance = relevance.flatten(1).sum(1) if relevance.dim() > 1 else relevance
        percent = _percent(relevance, relevance.nan_to_num(0, 0, 0).abs().max())
        listed = words.tolist() if isinstance(words, Tensor) else words
        base = words if isinstance(words, Tokens) else [str(word) for word in listed]
        return self._output(base, percent, contribution_frac)


class GeneralFeature(BaseFeature):
    """Numbers (1, C), one for each of several categories.

    Args:
        name: its name.
        categories: the names of the numbers, in their order.

    Raises:
        InputError: when an example does not have one number for each category.

    Example:
        >>> import torch
        >>> from captum_ssm.insights import GeneralFeature
        >>> feature = GeneralFeature("size", ["width", "height"])
        >>> shown = feature.visualize(torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0, 2.0]]), 1.0)
        >>> shown.base, shown.modified  # in hundredths of the length of (3, 4)
        (['width: 1.00', 'height: 2.00'], [60.0, 80.0])
    """

    def __init__(self, name: str, categories: Sequence[str]) -> None:
        super().__init__(name, None, None, None)
        self.categories = categories

    @staticmethod
    def visualization_type() -> str:
        return "general"

    def visualize(self, attribution: Any, data: Any, contribution_frac: float) -> FeatureOutput:
        values, relevance = _numbers(data), _numbers(attribution)
        if values.shape != (len(self.categories),) or relevance.shape != values.shape:
            raise InputError(
                f"the feature {self.name!r} has {len(self.categories)} categories, but its input "
                f"has shape {tuple(data.shape)}; a GeneralFeature needs (1, categories)."
            )
        length = relevance.nan_to_num(0, 0, 0).norm()
        base = [
            f"{category}: {value:.2f}"
            for category, value in zip(self.categories, values.tolist(), strict=True)
        ]
        return self._output(base, _percent(relevance, length), contribution_frac)


class EmptyFeature(BaseFeature):
    """An input that is not shown.

    Args:
        name: its name. Default: ``"empty"``.
        baseline_transforms, input_transforms, visualization_transform: see :class:`BaseFeature`.
            Default: None.

    Example:
        >>> import torch
        >>> from captum_ssm.insights import EmptyFeature
        >>> shown = EmptyFeature("mask").visualize(torch.ones(1, 3), torch.ones(1, 3), 0.5)
        >>> shown.type, shown.base, shown.contribution
        ('empty', None, 0.5)
    """

    def __init__(
        self,
        name: str = "empty",
        baseline_transforms: Transforms = None,
        input_transforms: Transforms = None,
        visualization_transform: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__(name, baseline_transforms, input_transforms, visualization_transform)

    @staticmethod
    def visualization_type() -> str:
        return "empty"

    def visualize(self, attribution: Any, data: Any, contribution_frac: float) -> FeatureOutput:
        return self._output(None, None, contribution_frac)


def _listed(transforms: Transforms) -> list[Callable[..., Any]]:
    if transforms is None:
        return []
    return [transforms] if callable(transforms) else list(transforms)


def _numbers(batch: Tensor) -> Tensor:
    """Return the one example of a batch, in double precision."""
    return batch.detach().cpu().double()[0]


def _percent(relevance: Tensor, whole: Tensor) -> list[float]:
    """Return the relevance in hundredths of ``whole``; zeros where that is zero."""
    divisor = torch.where(whole > 0, whole, 1.0)
    percent: list[float] = (relevance / divisor * 100).tolist()
    return percent
