"""Which maps of images the hidden-attention (HA) and unified (UN) papers say are better.

Their numbers are percentages, of Vision Mamba on ImageNet.  They come from the authors' scripts,
which differ from their equations, so that both are compared.
"""

from __future__ import annotations

from collections.abc import Iterator

from .verdicts import Comparison, Side, stated

#: What the names of the models end with.
VIM = "-vim"

#: By what the names of the models end with, the distances of the farthest of 64 patches from a cls
#: token in the middle and from one in front.
_FARTHEST = {VIM: "17-32", f"{VIM}-first": "33-64"}
#: The figure shows the first layer and the last two.
_LAYERS = ("layer 0", "layer 2", "layer 3", "mean")

_MASKS = ("pixel accuracy", "mAP", "mIoU")
_AREAS = ("positive, black", "negative, black")

#: By method, of the unified formulation and of HA's: UN table 3.
_SEGMENTED = {
    "ImplicitAttention": ((67.66, 80.00, 47.28), (67.64, 74.88, 45.09)),
    "ImplicitAttentionRollout": ((76.40, 83.90, 58.48), (71.01, 80.78, 51.51)),
    "MambaAttribution": ((79.60, 86.40, 62.51), (74.72, 81.70, 54.24)),
}
#: The same: UN table 1.
_PERTURBED = {
    "ImplicitAttention": ((13.264, 47.705), (17.268, 34.025)),
    "ImplicitAttentionRollout": ((12.830, 50.035), (18.806, 41.864)),
    "MambaAttribution": ((11.350, 51.310), (16.619, 39.632)),
}
#: Each after the formulation that it is held against: UN table 4, HA tables 5 and 6.
_VARIANTS = {
    "UN, table 4": (
        "MambaAttribution",
        {
            "unified": (79.60, 86.40, 62.51),
            "unified-activation": (79.32, 86.22, 62.41),
            "unified-conv": (70.01, 78.87, 50.64),
            "unified-gate": (75.11, 80.12, 55.78),
            "unified-scan": (42.99, 64.13, 26.01),
        },
    ),
    "HA, table 5": (
        "ImplicitAttentionRollout",
        {
            "s6": (71.01, 80.78, 51.51),
            "s6, max": (69.96, 79.41, 48.73),
            "s6, min": (63.02, 66.31, 34.71),
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


def _formulations() -> Iterator[Comparison]:
    for experiment, source, columns, row, tables in (
        ("segmentation", "UN, table 3", _MASKS, "", _SEGMENTED),
        ("image-perturbation", "UN, table 1", _AREAS, "predicted", _PERTURBED),
    ):
        for method, numbers in tables.items():
            for code in ("", ", published code"):
                unified, s6 = (Side(method, f"{name}{code}", row) for name in ("unified", "s6"))
                known = dict(zip((unified, s6), numbers, strict=True))
                yield from stated(experiment, source, columns, known, [(unified, s6)], VIM)


def _variants() -> Iterator[Comparison]:
    for source, (method, numbers) in _VARIANTS.items():
        known = {Side(method, name): row for name, row in numbers.items()}
        whole, *others = known
        pairs = [(whole, other) for other in others]
        yield from stated("segmentation", source, _MASKS, known, pairs, VIM)


def _relevance_propagation() -> Iterator[Comparison]:
    attribution, lrp = Side("MambaAttribution", "s6"), Side("MambaLRP", "patches")
    known = {attribution: (74.72, 81.70, 54.24), lrp: (71.19, 77.04, 49.98)}
    pairs = [(attribution, lrp)]
    yield from stated("segmentation", "HA, table 2", _MASKS, known, pairs, VIM)


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
    *_variants(),
    *_relevance_propagation(),
    *_proximity(),
)
