"""Compute models' predictions and methods' explanations for single examples."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..attr.call.inputs import as_tuple, call_model
from ..attr.call.targets import CONTRASTS, logits_of
from ..attr.engine.method import SSMAttribution
from ..attr.engine.sums import Sums, attribute_with_sums
from ..edges import Edge, EdgeEffects, Edges
from ..errors import CaptumSSMError, InputError, OptionError
from ..explain.knockout import Cut, cut_edges
from ..tracing import find_mixers, find_model
from ..viz.html.parts import decomposition, roles_of, tells_pixels, tells_roles
from ..viz.html.pictures import Raster
from .applicability import obstacle
from .dataset import DatasetExample
from .features import BaseFeature, FeatureOutput
from .filters import FilterConfig, OutputScore
from .flow import Flow, flow_of
from .methods import ATTRIBUTION_NAMES_TO_METHODS, DEFAULTS_FROM_INPUTS, parameters_of, titled
from .rasters import in_input_shape, patches_of, rasters_of

#: The number of classes listed for a prediction.
_NAMED = 4
#: The number of messages between words that are listed.
_MESSAGES = 12
#: Arguments of ``attribute`` that the page does not offer as options.
_NOT_OFFERED = {"self", "inputs", "target", "additional_forward_args"}
#: The score that is displayed with an example's label, as in Captum Insights.
_CERTAIN = 100.0


class Prediction(NamedTuple):
    """A model's prediction for an example.

    Attributes:
        scores: the likeliest classes, likeliest first; empty if the output has no classes.
        output: the model's output, (1, ...).
        grid: height and width of an image's grid of patches. Default: None, no grid.
    """

    scores: list[OutputScore]
    output: Tensor
    grid: tuple[int, int] | None = None

    def target(self, index: int) -> Any:
        """Convert a class index to Captum's target; for a language model, at the last token."""
        if self.output.numel() == 1:
            return None
        return (-1, index) if self.output.dim() == 3 else index


class VisualizationOutput(NamedTuple):
    """The displayed prediction and explanation of one example by one model and method.

    Attributes:
        feature_outputs: the display of each feature.
        actual: the example's label, or None.
        predicted: the likeliest classes, likeliest first.
        active_index: the explained class, or None.
        model_index: index of the model.
        roles: for each role, such as content or gate, the relevance of a text's words, scaled to at
            most 100 over all roles; empty for methods without roles. Default: empty.
        rasters: for each feature a dict: for images the relevance of ``"patches"`` and ``"pixels"``
            if the method returns them, else empty. Default: empty.
        method: the method's name, with the arguments that were set. Default: ``""``.
        method_index: index of the method. Default: 0.
        sum: the expected and the actual sum of relevance, if the method guarantees a sum. Default:
            None.
    """

    feature_outputs: list[FeatureOutput]
    actual: OutputScore | None
    predicted: list[OutputScore]
    active_index: int | None
    model_index: int
    roles: Mapping[str, list[float]] = MappingProxyType({})
    rasters: Sequence[Mapping[str, Raster]] = ()
    method: str = ""
    method_index: int = 0
    sum: Mapping[str, Any] | None = None


class AttributionCalculation:
    """Compute models' predictions and their explanations for single examples."""

    def __init__(
        self,
        models: Sequence[Any],
        classes: Sequence[str],
        features: Sequence[BaseFeature],
        score_func: Callable[[Tensor], Tensor] | None = None,
        use_label_for_attr: bool = True,
    ) -> None:
        self.models = models
        self.classes = classes
        self.features = features
        self.score_func = score_func
        self.use_label_for_attr = use_label_for_attr

    def transformed(self, example: DatasetExample) -> tuple[Tensor, ...]:
        """Return the models' inputs, after each feature's transforms."""
        if len(example.inputs) != len(self.features):
            raise InputError(
                f"features has {len(self.features)} entries, but the examples have "
                f"{len(example.inputs)} inputs. Pass one feature for each input, such as an "
                "EmptyFeature for an input that is not displayed."
            )
        return tuple(
            _transformed(feature.input_transforms, tensor)
            for feature, tensor in zip(self.features, example.inputs, strict=True)
        )

    def baselines(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the features' baselines, in the shapes of the transformed inputs."""
        return tuple(
            _transformed(feature.baseline_transforms[:1], tensor).expand_as(tensor)
            if feature.baseline_transforms
            else torch.zeros_like(tensor)
            for feature, tensor in zip(self.features, inputs, strict=True)
        )

    def predict(self, model: Any, inputs: tuple[Tensor, ...], additional: Any) -> Prediction:
        """Return a model's prediction for the transformed inputs of one example."""
        patches = patches_of(model, inputs)
        with torch.no_grad(), nullcontext() if patches is None else patches.watch():
            output = _logits(model, inputs, additional)
            last = output[:, -1] if output.dim() == 3 else output
            scores = last if self.score_func is None else self.score_func(last)
        classes = self._likeliest_classes(scores.detach().cpu().double().flatten())
        return Prediction(classes, output, None if patches is None else patches.grid)

    def _likeliest_classes(self, scores: Tensor) -> list[OutputScore]:
        """Return the classes with the highest of some scores (K,), highest first."""
        if len(scores) == 1:
            # one number is the probability of class 1, or the index of a class
            return [self.score(float(scores), i) for i in self._class_near(float(scores))]
        if len(scores) > len(self.classes):
            raise InputError(
                f"the model returns {len(scores)} scores, but classes has {len(self.classes)} "
                "names. Pass a name for each score."
            )
        best = scores.topk(min(_NAMED, len(scores)))
        return [
            self.score(score, index)
            for score, index in zip(best.values.tolist(), best.indices.tolist(), strict=True)
        ]

    def _class_near(self, number: float) -> list[int]:
        """Return a list of the class index within 0.5 of a number; empty if there is none."""
        return [i for i in range(len(self.classes)) if abs(number - i) <= 0.5][:1]

    def score(self, score: float, index: int) -> OutputScore:
        """Return the page's entry for a class: its score, index and name."""
        if not 0 <= index < len(self.classes):
            raise InputError(
                f"a label is {index}, but classes has {len(self.classes)} names. Use labels from 0 "
                f"to {len(self.classes) - 1}, or name all classes."
            )
        return OutputScore(score, index, str(self.classes[index]))

    def obstacle(self, name: str, model: Any, inputs: tuple[Tensor, ...]) -> str | None:
        """Return the reason why a method cannot explain a model with these inputs, or None."""
        return obstacle(ATTRIBUTION_NAMES_TO_METHODS[name], model, inputs)

    def relevance(
        self,
        model: Any,
        inputs: tuple[Tensor, ...],
        additional: tuple[Any, ...],
        target: Any,
        name: str,
        arguments: Mapping[str, Any],
    ) -> tuple[tuple[Tensor, ...], Sums | None]:
        """Return a method's relevance for each transformed input, and the sums of relevance.

        Relevance has the input's shape, or (1, h, w) if the method only scores image patches.
        """
        if (reason := self.obstacle(name, model, inputs)) is not None:
            raise OptionError(f"{name} does not fit this model: {reason}. Use a different method.")
        kind = ATTRIBUTION_NAMES_TO_METHODS[name]
        forward_func = model if issubclass(kind, SSMAttribution) else Logits(model, len(inputs))
        options = self._method_options(name, inputs, arguments, target)
        if inputs[0].dim() == 4 and not tells_pixels(kind):
            options = {"per_token": True} | options
        attributions, sums = attribute_with_sums(
            kind(forward_func),
            inputs,
            target=target if self.use_label_for_attr else None,
            additional_forward_args=additional or None,
            **options,
        )
        relevance = tuple(tensor.detach() for tensor in as_tuple(attributions))
        if inputs[0].dim() == 4 and relevance[0].dim() == 2:
            raise InputError(
                f"{name} returns relevance of {relevance[0].shape[1]} tokens, which do not form a "
                "grid of image patches. Use a method that scores pixels, such as LatimFlow."
            )
        return relevance, sums

    def roles(
        self,
        model: Any,
        inputs: tuple[Tensor, ...],
        additional: tuple[Any, ...],
        target: Any,
        name: str,
        arguments: Mapping[str, Any],
    ) -> dict[str, list[float]]:
        """Return the relevance of a text's words for each role, scaled to at most 100."""
        kind = ATTRIBUTION_NAMES_TO_METHODS[name]
        options = self._method_options(name, inputs, arguments, target)
        if not self._is_one_text:
            return {}
        if not tells_roles(kind, options, inputs[0]):
            return {}
        explained = target if self.use_label_for_attr else None
        question = inputs[0], explained, additional or None
        method: Any = kind(model)
        scores = roles_of(decomposition(method, *question, options=options, roles=True))
        largest = max((float(x.abs().max()) for x in scores.values()), default=1.0)
        return {role: (x[0].cpu().double() / largest * 100).tolist() for role, x in scores.items()}

    @property
    def _is_one_text(self) -> bool:
        return [feature.visualization_type() for feature in self.features] == ["text"]

    def layers(self, model: Any) -> list[str]:
        """Return the names of mixers whose messages can be cut, if the input is one text."""
        if not self._is_one_text:
            return []
        try:
            return [mixer.name for mixer in find_mixers(find_model(model))]
        except CaptumSSMError:  # a model of another kind
            return []

    def messages(self, model: Any, example: DatasetExample, target: int) -> list[Edge]:
        """Return the messages between words with the largest estimated effects on the target."""
        ids, explained = self._ids_target(model, example, target)
        effects = EdgeEffects(model).attribute(ids, explained, example.additional or None)
        return effects.top(_MESSAGES)[0]

    def cut(self, model: Any, example: DatasetExample, target: int, edges: Sequence[Edges]) -> Cut:
        """Return a model's predictions for a text with and without some messages between words."""
        ids, explained = self._ids_target(model, example, target)
        method, additional = EdgeEffects(model), example.additional or None

        def label(index: int, output: Tensor) -> str:
            return self.score(0.0, index).label

        return cut_edges(method, ids, explained, edges, label, additional=additional)

    def flow(self, model: Any, example: DatasetExample, target: int) -> Flow:
        """Return the flow of relevance from a text's words through the layers to a class."""
        return flow_of(model, *self._ids_target(model, example, target), example.additional)

    def _ids_target(self, model: Any, example: DatasetExample, target: int) -> tuple[Tensor, Any]:
        """Return the ids of an example's one text, and the target for a class index."""
        if not self._is_one_text:
            raise OptionError(
                f"features are {[feature.visualization_type() for feature in self.features]}, but "
                "messages and flow are between words of one text. Use one TextFeature."
            )
        (ids,) = self.transformed(example)
        explained = self.predict(model, (ids,), example.additional).target(target)
        return ids, explained if self.use_label_for_attr else None

    def _method_options(
        self, name: str, inputs: tuple[Tensor, ...], arguments: Mapping[str, Any], target: Any
    ) -> dict[str, Any]:
        """Return a method's options, with defaults that depend on features and inputs."""
        accepted = inspect.signature(ATTRIBUTION_NAMES_TO_METHODS[name].attribute).parameters
        options = parameters_of(name).parse(arguments)
        if unknown := set(options) - (set(accepted) - _NOT_OFFERED):
            known = sorted(set(accepted) - _NOT_OFFERED)
            raise OptionError(f"{name} has no argument {sorted(unknown)[0]!r}. Use one of {known}.")
        if name in DEFAULTS_FROM_INPUTS:
            suggested = DEFAULTS_FROM_INPUTS[name](inputs)
            options |= {key: value for key, value in suggested.items() if options.get(key) is None}
        kind = ATTRIBUTION_NAMES_TO_METHODS[name]
        if "baselines" in accepted and not issubclass(kind, SSMAttribution):  # ours have their own
            options["baselines"] = self.baselines(inputs)
        contrast = options.get("contrast")
        if isinstance(contrast, str) and contrast not in CONTRASTS:
            options["contrast"] = self._contrast_target(contrast, target)
        return options

    def _contrast_target(self, label: str, target: Any) -> Any:
        """Convert a class name to a target with the same token position as ``target``."""
        if label not in self.classes:
            raise OptionError(
                f"contrast={label!r} is neither a class nor one of {', '.join(CONTRASTS)}. Use one "
                "of them, or the name of a class."
            )
        index = list(self.classes).index(label)
        return (*target[:-1], index) if isinstance(target, tuple) else index


class Logits(nn.Module):
    """Wrap a model so that it returns a tensor of logits, as Captum's methods require."""

    def __init__(self, model: Any, inputs: int) -> None:
        super().__init__()
        self.model = model
        self._inputs = inputs

    def forward(self, *arguments: Any) -> Tensor:
        return _logits(self.model, arguments[: self._inputs], arguments[self._inputs :])


def explanation(
    calculation: AttributionCalculation,
    config: FilterConfig,
    example: DatasetExample,
    model_index: int,
    target: int | None = None,
    filtered: bool = False,
    method_index: int = 0,
) -> VisualizationOutput | None:
    """Explain a model's prediction for an example with one method.

    Args:
        calculation: the models and features.
        config: the methods with their arguments, and the filter.
        example, model_index, target, filtered, method_index: see
            :meth:`~captum_ssm.insights.AttributionVisualizer.explain`.
    """
    model = calculation.models[model_index]
    name, arguments = config.methods[method_index]
    inputs = calculation.transformed(example)
    prediction = calculation.predict(model, inputs, example.additional)
    actual = None if example.label is None else calculation.score(_CERTAIN, example.label)
    if filtered and not config.passes(prediction.scores, actual):
        return None
    if target is None and prediction.scores:
        target = prediction.scores[0].index
    question = (  # the arguments of both relevance() and roles()
        model,
        inputs,
        example.additional,
        None if target is None else prediction.target(target),
        name,
        arguments,
    )
    relevance, sums = calculation.relevance(*question)
    shares = shares_of(relevance)
    rasters = [rasters_of(scores, prediction.grid) for scores in relevance]
    outputs = [
        feature.visualize(in_input_shape(scores, tensor), data, share)
        for feature, scores, tensor, data, share in zip(
            calculation.features, relevance, inputs, example.inputs, shares, strict=True
        )
    ]
    roles = calculation.roles(*question)
    return VisualizationOutput(
        feature_outputs=outputs,
        actual=actual,
        predicted=prediction.scores,
        active_index=target,
        model_index=model_index,
        roles=roles,
        rasters=rasters,
        method=titled(name, arguments),
        method_index=method_index,
        sum=None if sums is None else sums[0].facts,
    )


def shares_of(relevance: Sequence[Tensor]) -> list[float]:
    """Return each feature's signed share of relevance; absolute shares sum to 1, or all are 0."""
    sums = torch.stack([tensor.cpu().double().sum() for tensor in relevance])
    total = sums.abs().sum()
    shares: list[float] = (sums / torch.where(total > 0, total, 1.0)).tolist()
    return shares


def _logits(model: Any, inputs: tuple[Tensor, ...], additional: tuple[Any, ...]) -> Tensor:
    """Run a model on the inputs of one example, and return its logits."""
    if len(inputs) == 1:
        return logits_of(call_model(model, inputs[0], additional))
    return logits_of(model(*inputs, *additional))


def _transformed(transforms: Sequence[Callable[..., Any]], batch: Tensor) -> Tensor:
    """Apply transforms to the one example of a batch, and return it as a batch."""
    example: Any = batch.squeeze(0)
    for transform in transforms:
        example = transform(example)
    transformed: Tensor = example.unsqueeze(0)
    return transformed
