"""Features: the inputs of a model, and the display of their relevance."""

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
        base: the displayed input: a PNG in base64, a list of words, or a list of labels.
        modified: the relevance: a PNG in base64, or a number from -100 to 100 per word or label.
        type: ``"image"``, ``"text"``, ``"general"`` or ``"empty"``.
        contribution: the feature's share of the relevance of all features, from -1 to 1.
    """

    name: str
    base: Any
    modified: Any
    type: str
    contribution: float


class BaseFeature:
    """Base class of features; a subclass defines ``visualization_type`` and ``visualize``.

    Args:
        name: the feature's name on the page, such as ``"Photo"``.
        baseline_transforms: function from a transformed input without batch dimension to its
            baseline. Only the first function of a list is used. None: the baseline is zero.
        input_transforms: functions that convert the dataset's input, without batch dimension, to
            the model's input, in this order. None: the input is not changed.
        visualization_transform: function that converts the dataset's input for display. None: the
            input is not changed.
    """

    def __init__(
        self,
        name: str,
        baseline_transforms: Transforms,
        input_transforms: Transforms,
        visualization_transform: Callable[..., Any] | None,
    ) -> None:
        self.name = name
        self.baseline_transforms = _as_list(baseline_transforms)
        self.input_transforms = _as_list(input_transforms)
        self.visualization_transform = visualization_transform

    @staticmethod
    def visualization_type() -> str:
        """Return the feature's ``type`` in :class:`FeatureOutput`, such as ``"text"``."""
        raise NotImplementedError

    def visualize(self, attribution: Any, data: Any, contribution_frac: float) -> FeatureOutput:
        """Return the display of the feature for one example.

        Args:
            attribution: the relevance of the transformed input, a batch of one.
            data: the input from the dataset, a batch of one.
            contribution_frac: the feature's share of the relevance of all features.
        """
        raise NotImplementedError

    def _output(self, base: Any, modified: Any, contribution: float) -> FeatureOutput:
        return FeatureOutput(self.name, base, modified, self.visualization_type(), contribution)


class ImageFeature(BaseFeature):
    """An image (1, C, H, W), in RGB or gray.

    Args:
        name: the feature's name on the page.
        baseline_transforms, input_transforms: see :class:`BaseFeature`.
        visualization_transform: see :class:`BaseFeature`. Default: None.

    Raises:
        InputError: when the displayed input is not an image.

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
    """A text: token ids (1, L), or embeddings (1, L, E), whose relevance is summed over E.

    Args:
        name: the feature's name on the page.
        baseline_transforms, input_transforms: see :class:`BaseFeature`.
        visualization_transform: function from token ids to words. With ``lambda ids:
            Tokens.of(tokenizer, ids[0])`` of :class:`~captum_ssm.viz.Tokens`, tokens are joined to
            words. None: the ids are displayed.

    Example:
        >>> import torch
        >>> from captum_ssm.insights import TextFeature
        >>> words = ["a", "lamp", "kite"]
        >>> feature = TextFeature("Text", None, None, lambda ids: [words[i] for i in ids[0]])
        >>> shown = feature.visualize(torch.tensor([[1.0, -2.0]]), torch.tensor([[0, 2]]), 1.0)
        >>> shown.base, shown.modified  # the largest absolute relevance is 100
        (['a', 'kite'], [50.0, -100.0])
    """

    @staticmethod
    def visualization_type() -> str:
        return "text"

    def visualize(self, attribution: Any, data: Any, contribution_frac: float) -> FeatureOutput:
        words = self.visualization_transform(data) if self.visualization_transform else data[0]
        relevance = _example_values(attribution)
        relevance = relevance.flatten(1).sum(1) if relevance.dim() > 1 else relevance
        percent = _as_percent(relevance, relevance.nan_to_num(0, 0, 0).abs().max())
        labels = words.tolist() if isinstance(words, Tensor) else words
        base = words if isinstance(words, Tokens) else [str(word) for word in labels]
        return self._output(base, percent, contribution_frac)


class GeneralFeature(BaseFeature):
    """A vector (1, C) with one value for each of C categories.

    Args:
        name: the feature's name on the page.
        categories: the names of the C numbers.

    Raises:
        InputError: when an example does not have one number for each category.

    Example:
        >>> import torch
        >>> from captum_ssm.insights import GeneralFeature
        >>> feature = GeneralFeature("size", ["width", "height"])
        >>> shown = feature.visualize(torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0, 2.0]]), 1.0)
        >>> shown.base, shown.modified  # the norm of the relevance is 100
        (['width: 1.00', 'height: 2.00'], [60.0, 80.0])
    """

    def __init__(self, name: str, categories: Sequence[str]) -> None:
        super().__init__(name, None, None, None)
        self.categories = categories

    @staticmethod
    def visualization_type() -> str:
        return "general"

    def visualize(self, attribution: Any, data: Any, contribution_frac: float) -> FeatureOutput:
        values, relevance = _example_values(data), _example_values(attribution)
        if values.shape != (len(self.categories),) or relevance.shape != values.shape:
            raise InputError(
                f"the feature {self.name!r} has {len(self.categories)} categories, but its input "
                f"has shape {tuple(data.shape)}. Pass one number per category."
            )
        norm = relevance.nan_to_num(0, 0, 0).norm()
        base = [
            f"{category}: {value:.2f}"
            for category, value in zip(self.categories, values.tolist(), strict=True)
        ]
        return self._output(base, _as_percent(relevance, norm), contribution_frac)


class EmptyFeature(BaseFeature):
    """An input that is not displayed.

    Args:
        name: the feature's name on the page. Default: ``"empty"``.
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


def _as_list(transforms: Transforms) -> list[Callable[..., Any]]:
    if transforms is None:
        return []
    return [transforms] if callable(transforms) else list(transforms)


def _example_values(batch: Tensor) -> Tensor:
    """Return the one example of a batch as a float64 tensor on the CPU."""
    return batch.detach().cpu().double()[0]


def _as_percent(relevance: Tensor, reference: Tensor) -> list[float]:
    """Return relevance in percent of ``reference``, or zeros if ``reference`` is zero."""
    divisor = torch.where(reference > 0, reference, 1.0)
    percent: list[float] = (relevance / divisor * 100).tolist()
    return percent
