"""One example, as one model and one method see it."""

from __future__ import annotations

from typing import NamedTuple

from .calculation import AttributionCalculation, contributions
from .dataset import Example
from .features import FeatureOutput
from .filters import FilterConfig, OutputScore

#: The score of a label, as Captum Insights has it.
_CERTAIN = 100.0


class VisualizationOutput(NamedTuple):
    """What one model and one method say of an example.

    Attributes:
        feature_outputs: what is shown of each feature.
        actual: the class the example is labelled with, or None.
        predicted: the likeliest classes, likeliest first.
        active_index: the class that the relevance is of; None where it is of none.
        model_index: which of the models.
    """

    feature_outputs: list[FeatureOutput]
    actual: OutputScore | None
    predicted: list[OutputScore]
    active_index: int | None
    model_index: int


def explanation(
    calculation: AttributionCalculation,
    config: FilterConfig,
    example: Example,
    model_index: int,
    target: int | None = None,
    filtered: bool = False,
) -> VisualizationOutput | None:
    """What a model and a method make of an example.

    Args:
        calculation: holds models and features.
        config: names the method and its arguments, and the filter.
        example: a batch of one.
        model_index: which of the models.
        target: the class to explain. Default: None, the one that this model predicts.
        filtered: return None if the example does not pass the filter. Default: False.
    """
    model = calculation.models[model_index]
    inputs = calculation.transformed(example)
    prediction = calculation.predict(model, inputs, example.additional)
    actual = None if example.label is None else calculation.score(_CERTAIN, example.label)
    if filtered and not config.passes(prediction.scores, actual):
        return None
    if target is None and prediction.scores:
        target = prediction.scores[0].index
    relevance = calculation.relevance(
        model,
        inputs,
        example.additional,
        None if target is None else prediction.target(target),
        config.attribution_method,
        config.attribution_arguments,
    )
    shares = contributions(relevance)
    outputs = [
        feature.visualize(found, data, share)
        for feature, found, data, share in zip(
            calculation.features, relevance, example.inputs, shares, strict=True
        )
    ]
    return VisualizationOutput(outputs, actual, prediction.scores, target, model_index)
