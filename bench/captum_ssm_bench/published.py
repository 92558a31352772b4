"""Which rows of our tables papers say are better than others, and what we ask beside them.

HA is the hidden-attention paper, UN the unified one.  Their numbers are percentages, of Vision
Mamba and DeiT on ImageNet, and come from the authors' scripts, which differ from their equations:
both are compared.  Where LATIM looks at one layer, the best one is taken here; its own maps are
those with SiLU, and its Mamba-Attention and -Attribution those of HA.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, combinations, product

from .experiments.image_maps import CODE
from .harness.tables import Side
from .harness.verdicts import BEST, Comparison

#: The numbers of a row, by column, as they are printed.
Numbers = Sequence[float | str]
#: What the names of models of one architecture end with.
MAMBA, MAMBA2, VIM, VIT = "-mamba", "-mamba2", "-vim", "-vit"

ATTENTION, ATTRIBUTION = Side("ImplicitAttention", "s6", BEST), Side("MambaAttribution", "s6")
LRP = Side("MambaLRP", "half")
NORM, ALTI = Side("LatimNorm l2", "silu", BEST), Side("LatimALTI", "silu", BEST)
LOGIT = Side("LatimLogit", "silu")
_ROWS = (ATTENTION, ATTRIBUTION, LRP, NORM, ALTI, LOGIT)
_LATIM, _BEFORE = (NORM, ALTI, LOGIT), (ATTENTION, ATTRIBUTION)

#: Pixel accuracy, mAP and mIoU of a segmentation, in UN's table 3: unified, then S6.
MASKS = ("pixel accuracy", "mAP", "mIoU")
SEGMENTED = {
    "ImplicitAttention": ((67.66, 80.00, 47.28), (67.64, 74.88, 45.09)),
    "ImplicitAttentionRollout": ((76.40, 83.90, 58.48), (71.01, 80.78, 51.51)),
    "MambaAttribution": ((79.60, 86.40, 62.51), (74.72, 81.70, 54.24)),
}
_FORMULATIONS = ("unified", "s6")
#: The same of the transformer, whose attention has one formulation: HA table 2.
SEGMENTED_BY_ATTENTION = {
    Side("ImplicitAttention", "unified"): (59.69, 77.25, 36.94),
    Side("ImplicitAttentionRollout", "unified"): (66.84, 80.34, 47.85),
    Side("TransformerAttribution", "lrp"): (79.26, 84.85, 60.63),
}
SEGMENTED_BY_LRP = (71.19, 77.04, 49.98)
#: Each after the formulation that it is held against, by table.
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


def _stated(
    experiment: str,
    source: str,
    columns: Sequence[str],
    numbers: Mapping[Side, Numbers],
    pairs: Iterable[tuple[Side, Side]],
    models: str = "",
) -> Iterator[Comparison]:
    """What a table says in each column of pairs, the better row first."""
    for better, worse in pairs:
        for column, *both in zip(columns, numbers[better], numbers[worse], strict=True):
            high, low = (x if isinstance(x, str) else f"{x:.2f}" for x in both)
            said = f"{high} against {low}"
            yield Comparison(experiment, column, better, worse, source, said, models)


def _masks(
    source: str,
    numbers: Mapping[Side, Sequence[float]],
    models: str,
    pairs: Iterable[tuple[Side, Side]] | None = None,
) -> Iterator[Comparison]:
    """Of each pair, or of every two, the row that a column says is better."""
    compared = list(combinations(numbers, 2) if pairs is None else pairs)
    for place, column in enumerate(MASKS):
        own = {side: (row[place],) for side, row in numbers.items()}
        ordered = [(b, a) if own[a] < own[b] else (a, b) for a, b in compared]
        yield from _stated("segmentation", source, (column,), own, ordered, models)


def _latim() -> Iterator[Comparison]:
    ranking = ("AUC", "AP", "R@K")
    of_mamba: list[Numbers] = [(0.84, 0.36, 0.22), (0.83, 0.31, 0.19), (0.40, 0.22, 0.20)]
    of_mamba += [(0.88, 0.41, 0.27), (0.86, 0.47, 0.36), (0.85, 0.44, 0.31)]
    numbers = dict(zip(_ROWS, of_mamba, strict=True))
    pairs = list(product(_LATIM, (*_BEFORE, LRP)))
    yield from _stated("copying", "LATIM, table 2", ranking, numbers, pairs, MAMBA)
    of_mamba2: list[Numbers] = [(0.79, 0.49, 0.39), (0.79, 0.47, 0.39)]
    of_mamba2 += [(0.98, 0.86, 0.74), (0.85, 0.71, 0.63), (0.87, 0.70, 0.61)]
    rows = [side for side in _ROWS if side != LRP]
    numbers, pairs = dict(zip(rows, of_mamba2, strict=True)), list(product(_LATIM, _BEFORE))
    yield from _stated("copying", "LATIM, table 2", ranking, numbers, pairs, MAMBA2)
    # ranges over sizes of models and pairs of languages
    ranges = ["0.79-0.85", "0.68-0.87", "0.47-0.68", "0.44-0.49", "0.52-0.55", "0.67-0.71"]
    numbers = {side: (said,) for side, said in zip(_ROWS, ranges, strict=True)}
    pairs = [*product((NORM, ALTI), _BEFORE), (NORM, ALTI), (NORM, LOGIT), (LRP, LOGIT)]
    yield from _stated("translation", "LATIM, table 3", ("AER",), numbers, pairs, MAMBA)
    ranges = ["0.69-0.85", "0.66-0.82", "0.35-0.52", "0.38-0.51", "0.60-0.76"]
    numbers = {side: (said,) for side, said in zip(rows, ranges, strict=True)}
    pairs = [*product((NORM, ALTI), _BEFORE), (NORM, LOGIT)]
    yield from _stated("translation", "LATIM, table 3", ("AER",), numbers, pairs, MAMBA2)
    for task in ("passkey", "two-passkeys"):
        yield Comparison(task, "AP", NORM, ATTENTION, "LATIM, figure 8", models=MAMBA2)
    name, silu = "decomposition-error", Side("Latim", "silu", "mean")
    for other in ("taylor1", "taylor2", "relu", "identity"):
        worse = Side("Latim", other, "mean")
        yield Comparison(name, "error", silu, worse, "LATIM, figure 4")
    first, second = (silu._replace(row=f"layer {i}") for i in range(2))
    numbers = {first: ("0.21",), second: ("0.45 and 0.57 in deeper layers",)}
    yield from _stated(name, "LATIM, table 4", ("error",), numbers, [(first, second)])


def _images() -> Iterator[Comparison]:
    codes = ("", f", {CODE}")
    for method, numbers in SEGMENTED.items():
        for code in codes:
            unified, s6 = (Side(method, f"{name}{code}") for name in _FORMULATIONS)
            known = dict(zip((unified, s6), numbers, strict=True))
            pair = [(unified, s6)]
            yield from _stated("segmentation", "UN, table 3", MASKS, known, pair, VIM)
    for place, (name, source) in enumerate(
        zip(_FORMULATIONS, ("UN, table 3", "HA, table 2"), strict=True)
    ):
        for code in codes:
            known = {Side(m, f"{name}{code}"): both[place] for m, both in SEGMENTED.items()}
            yield from _masks(source, known, VIM)
    yield from _masks("HA, table 2", SEGMENTED_BY_ATTENTION, VIT)
    for source, (method, rows) in VARIANTS.items():
        known = {Side(method, name): row for name, row in rows.items()}
        whole, *others = known
        yield from _masks(source, known, VIM, [(whole, other) for other in others])
    pair = [(ATTRIBUTION, Side("MambaLRP", "patches"))]
    both = (SEGMENTED["MambaAttribution"][1], SEGMENTED_BY_LRP)
    known = dict(zip(pair[0], both, strict=True))
    yield from _stated("segmentation", "HA, table 2", MASKS, known, pair, VIM)


def _asked_here() -> Iterator[Comparison]:
    """Do the exact division of the activation, and exact relevance, find sources better?

    The top source of a passkey's digit may be any digit of it, so that it decides little.
    """
    columns = {"copying": "top 1", "translation": "AER", "passkey": "AP", "two-passkeys": "AP"}
    columns |= {"frequent-word": "AP", "recall": "top 1"}
    flow, usual = (
        Side("LatimFlow", "frozen"),
        (Side("IntegratedGradients"), Side("FeatureAblation")),
    )
    pairs = [(silu._replace(formulation="linearized"), silu) for silu in _LATIM]
    pairs += [(flow, other) for other in (*_BEFORE, *_LATIM, LRP, *usual)]
    pairs += [(s6._replace(formulation="unified"), s6) for s6 in _BEFORE]
    for (experiment, column), (better, worse) in product(columns.items(), pairs):
        yield Comparison(experiment, column, better, worse, "asked here")


#: The statements of papers, and those that are asked about here alone.
PUBLISHED: tuple[Comparison, ...] = tuple(chain(_latim(), _images()))
ASKED_HERE: tuple[Comparison, ...] = tuple(_asked_here())
