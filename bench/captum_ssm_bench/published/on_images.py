"""Which maps of images the hidden-attention (HA) and unified (UN) papers say are better.

Their numbers are percentages, of Vision Mamba and DeiT on ImageNet.  They come from the authors'
scripts, which differ from their equations, so that both are compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

from ..experiments.image_maps import CODE
from ..experiments.masks import BACKGROUND_SCORES
from ..harness.verdicts import Comparison, Side, stated

#: What the names of the models end with.
VIM, VIT = "-vim", "-vit"

#: By what the names of the models end with, the distances of the farthest of 64 patches from a cls
#: token in the middle and from one in front.
_FARTHEST = {VIM: "17-32", f"{VIM}-first": "33-64"}
#: The figure shows the first layer and the last two.
_LAYERS = ("layer 0", "layer 2", "layer 3", "mean")

_MASKS = ("pixel accuracy", "mAP", "mIoU")
#: The only one of which less is better.
_POSITIVE = "positive, black"
_AREAS = (_POSITIVE, "negative, black")

_FORMULATIONS = ("unified", "s6")
#: By method, of these formulations: UN table 3.
SEGMENTED = {
    "ImplicitAttention": ((67.66, 80.00, 47.28), (67.64, 74.88, 45.09)),
    "ImplicitAttentionRollout": ((76.40, 83.90, 58.48), (71.01, 80.78, 51.51)),
    "MambaAttribution": ((79.60, 86.40, 62.51), (74.72, 81.70, 54.24)),
}
#: The same: UN table 1.
PERTURBED = {
    "ImplicitAttention": ((13.264, 47.705), (17.268, 34.025)),
    "ImplicitAttentionRollout": ((12.830, 50.035), (18.806, 41.864)),
    "MambaAttribution": ((11.350, 51.310), (16.619, 39.632)),
}
#: Of the transformer, whose attention has one formulation: HA tables 2 and 1.
OF_ATTENTION = (
    ("ImplicitAttention", "unified"),
    ("ImplicitAttentionRollout", "unified"),
    ("TransformerAttribution", "lrp"),
)
SEGMENTED_BY_ATTENTION = ((59.69, 77.25, 36.94), (66.84, 80.34, 47.85), (79.26, 84.85, 60.63))
PERTURBED_BY_ATTENTION = ((20.687, 40.766), (20.594, 43.525), (15.351, 48.089))
#: Each after the formulation that it is held against: UN table 4, HA tables 5 and 6.
VARIANTS = {
    "UN, table 4": (
        "MambaAttribution",
        {
            "unified": (79.60, 86.40, 62.51),
            "unified-activation": (79.32, 86.22, 62.41),
            "unified-conv": (70.01, 78.87, 50.64),
            "unified-gate": (75.11, 80.12, 55.78),
            "unified-scan": (42.99, 64.13, 26.01),
            "s6": (72.39, 80.09, 53.19),
        },
    ),
    "HA, table 5": (
        "ImplicitAttentionRollout",
        {
            "s6": (71.01, 80.78, 51.51),
            "s6, max": (69.96, 79.41, 48.73),
            "s6, min": (63.02, 66.31, 34.71),
            "s6, product": (74.04, 74.16, 50.46),
            "s6, discard 0.2": (70.23, 80.55, 50.86),
            "s6, discard 0.4": (69.59, 80.57, 50.45),
            "s6, discard 0.6": (70.17, 79.22, 50.66),
            "s6, discard 0.8": (70.23, 78.96, 48.95),
        },
    ),
    "HA, table 6": (
        "MambaAttribution",
        {
            "s6": (74.72, 81.70, 54.24),
            "s6, no clamp": (68.15, 80.95, 48.71),
            "s6, absolute": (69.82, 81.12, 48.16),
        },
    ),
}

_Numbers = Mapping[Side, Sequence[float]]


class _Table(NamedTuple):
    """A table of UN's in the unified formulation, and the one of HA's that it repeats."""

    experiment: str
    #: In the order of the formulations.
    sources: tuple[str, str]
    columns: Sequence[str]
    row: str
    of_mamba: Mapping[str, Sequence[Sequence[float]]]
    of_attention: Sequence[Sequence[float]]


_TABLES = (
    _Table(
        "segmentation",
        ("UN, table 3", "HA, table 2"),
        _MASKS,
        "",
        SEGMENTED,
        SEGMENTED_BY_ATTENTION,
    ),
    _Table(
        "image-perturbation",
        ("UN, table 1", "HA, table 1"),
        _AREAS,
        "predicted",
        PERTURBED,
        PERTURBED_BY_ATTENTION,
    ),
)
#: By the equations, and by the authors' scripts.
_CODES = ("", f", {CODE}")


def _formulations() -> Iterator[Comparison]:
    for table in _TABLES:
        for method, numbers in table.of_mamba.items():
            for code in _CODES:
                unified, s6 = (Side(method, f"{name}{code}", table.row) for name in _FORMULATIONS)
                known = dict(zip((unified, s6), numbers, strict=True))
                pairs, (source, _) = [(unified, s6)], table.sources
                yield from stated(table.experiment, source, table.columns, known, pairs, VIM)


def _methods() -> Iterator[Comparison]:
    """Raw attention, rollout and attribution against each other, in one formulation."""
    for table in _TABLES:
        for place, (name, source) in enumerate(zip(_FORMULATIONS, table.sources, strict=True)):
            for code in _CODES:
                known = {
                    Side(method, f"{name}{code}", table.row): numbers[place]
                    for method, numbers in table.of_mamba.items()
                }
                yield from _by_number(table.experiment, source, table.columns, known, VIM)
        sides = (Side(*each, table.row) for each in OF_ATTENTION)
        known = dict(zip(sides, table.of_attention, strict=True))
        yield from _by_number(table.experiment, table.sources[1], table.columns, known, VIT)


def _variants() -> Iterator[Comparison]:
    for source, (method, numbers) in VARIANTS.items():
        known = {Side(method, name): row for name, row in numbers.items()}
        whole, *others = known
        pairs = [(whole, other) for other in others]
        yield from _by_number("segmentation", source, _MASKS, known, VIM, pairs)


def _by_number(
    experiment: str,
    source: str,
    columns: Sequence[str],
    numbers: _Numbers,
    models: str,
    pairs: Iterable[tuple[Side, Side]] | None = None,
) -> Iterator[Comparison]:
    """Of each pair the row that a column says is better, which another column may say is worse.

    Args:
        experiment: name of the experiment.
        source: the table.
        columns: names of columns.
        numbers: by row, its numbers in these columns.
        models: see :class:`Comparison`.
        pairs: rows to compare. Default: None, every two.
    """
    compared = list(combinations(numbers, 2) if pairs is None else pairs)
    for place, column in enumerate(columns):
        own = {side: (row[place],) for side, row in numbers.items()}
        for one, other in compared:
            first_is_less = own[one] < own[other]
            pair = (one, other) if first_is_less == (column == _POSITIVE) else (other, one)
            yield from stated(experiment, source, (column,), own, [pair], models)


def _relevance_propagation() -> Iterator[Comparison]:
    attribution, lrp = Side("MambaAttribution", "s6"), Side("MambaLRP", "patches")
    known = {attribution: (74.72, 81.70, 54.24), lrp: (71.19, 77.04, 49.98)}
    pairs = [(attribution, lrp)]
    yield from stated("segmentation", "HA, table 2", _MASKS, known, pairs, VIM)


def _activation_maps() -> Iterator[Comparison]:
    """Theirs are of DeiT; here both are of one model, for each score of the background."""
    for score in BACKGROUND_SCORES:
        attribution, cam = (
            Side(*each, f"background {score}")
            for each in (("MambaAttribution", "unified"), ("CAM", ""))
        )
        known = {attribution: (52.11,), cam: (35.99,)}
        pairs = [(attribution, cam)]
        yield from stated("pseudo-masks", "UN, table 6", ("mIoU",), known, pairs, VIM)


def _proximity() -> Iterator[Comparison]:
    """The patches beside the cls token against the farthest ones."""
    for models, farthest in _FARTHEST.items():
        for layer in _LAYERS:
            near, far = (
                Side("ImplicitAttention", "s6", f"{layer}, distance {distance}")
                for distance in ("01", farthest)
            )
            yield Comparison(
                "cls-influence", "relative influence", near, far, "HA, figure 2", models=models
            )


#: All that is said of images.
IMAGES: tuple[Comparison, ...] = (
    *_formulations(),
    *_methods(),
    *_variants(),
    *_relevance_propagation(),
    *_activation_maps(),
    *_proximity(),
)
