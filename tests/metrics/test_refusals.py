"""Whatever cannot be measured is refused by a message that names it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from metrics.test_image_perturbation import Linear
from metrics.test_ranking import SCORES, batch
from metrics.test_segmentation import scene
from zoo.small import WIDTH, classifier, token_ids

from captum_ssm import LatimFlow, metrics
from captum_ssm.errors import InputError, NonFiniteError, OptionError, QueryError, TargetError

LINKS = torch.eye(6, 5).bool()[None].repeat(2, 1, 1)
ONES = torch.ones(2, 3)
MAPS, GOLD = scene()


def sampled(*values: Any) -> metrics.Sample:
    sample = metrics.Sample()
    for each in values:
        sample.update(torch.as_tensor(each))
    return sample


def scores(maps: Any = MAPS, gold: Any = GOLD, *options: Any, **named: Any) -> None:
    metrics.SegmentationScores(*options, **named).update(maps, gold)


def perturbed(**changed: Any) -> None:
    given = {"forward_func": Linear((3, 4, 4)), "images": torch.randn(2, 3, 4, 4)}
    metrics.image_perturbation(**(given | {"relevance": torch.randn(2, 4, 4)} | changed))


def read(inputs: Any = None, fill: Any = 0, *mask: Any, **options: Any) -> metrics.Texts:
    return metrics.Texts(
        classifier(), token_ids(2, 5) if inputs is None else inputs, fill, *mask, **options
    )


def of_texts(relevance: Any = ONES, **options: Any) -> None:
    metrics.text_perturbation(read(token_ids(2, 3)), relevance, **options)


def measured(measure: Callable[..., object], inputs: Any = None, **options: Any) -> None:
    own = {"fill": 0} if measure is metrics.token_infidelity else {"replacements": torch.arange(4)}
    inputs = token_ids(2, 6) if inputs is None else inputs
    measure(LatimFlow(classifier()), inputs, 1, **(own | options))


def both(**options: Any) -> list[Callable[[], None]]:
    return [
        lambda m=m: measured(m, **options)
        for m in (metrics.token_infidelity, metrics.token_sensitivity)
    ]


def ranked(change: Callable[..., Any]) -> list[Callable[[], object]]:
    return [lambda score=score: score(*change(*batch())) for score in SCORES]


EMBEDDINGS = torch.randn(2, 6, WIDTH)
#: Of each error, its words, and one call or several that raise it.
REFUSED: dict[type[Exception], dict[str, Any]] = {
    InputError: {
        "predicted … (6, 5)": lambda: metrics.link_counts(LINKS[0], LINKS[0]),
        "possible … 0 and 1": lambda: metrics.link_counts(LINKS, LINKS, LINKS.float() * 2),
        "target_words has 2": lambda: metrics.words_of_tokens(LINKS, [0, 1], [0] * 5),
        "source_words": lambda: metrics.words_of_tokens(LINKS, [0] * 6, [-2] * 5),
        "inputs … captum.metrics": both(inputs=torch.randn(1, 3, 4, 4)),
        "mask … all tokens of example": both(mask=torch.zeros(2, 6)),
        "fill": [
            lambda: measured(metrics.token_infidelity, EMBEDDINGS, fill=torch.zeros(3)),
            lambda: read(torch.randn(2, 5, 4), torch.ones(3)),
        ],
        "per_token": lambda: measured(
            metrics.token_infidelity, EMBEDDINGS, fill=0.0, options={"per_token": True}
        ),
        "maps … (2, 3)": lambda: metrics.token_faithfulness(ONES, ONES),
        "gold … (1, 3, 2) … (1, 2, 3)": lambda: metrics.token_faithfulness(
            ONES[None], ONES.mT[None]
        ),
        "3 maps … 2 images": lambda: perturbed(relevance=torch.randn(3, 4, 4)),
        "fill … (2,)": lambda: perturbed(fill=torch.ones(2)),
        "output … (2, 3, 4, 4)": lambda: perturbed(forward_func=lambda x: x),
        "1 rows": lambda: perturbed(forward_func=lambda x: x[:1].flatten(1)),
        "gold … 0 and 1": ranked(lambda s, g: (s, g * 2)),
        "scores … (23,) … 2 dimensions": ranked(lambda s, g: (s[0], g[0])),
        "complex": ranked(lambda s, g: (s + 1j, g)),
        "scores has shape (2, 3) … others has (2, 2)": lambda: metrics.pearson(ONES, ONES[:, 1:]),
        "(2, 2) … 3": lambda: metrics.span_relevance(ONES, [(2, 2)]),
        "count=3 … 2 examples": lambda: metrics.hardest_examples(ONES, [0, 1], 3),
        "words has 1 … relevance has 2": lambda: metrics.key_words(["a"], torch.ones(2)),
        "demonstrations": lambda: metrics.amplify_prompt([], "q"),
        "update": lambda: metrics.Sample().value(),
        "3 numbers per example": lambda: sampled([1.0, 2.0], ONES),
        "infinity": lambda: sampled([math.inf]),
        "values": lambda: sampled(1.0),
        "other has the statistic": lambda: sampled([1.0]).merge(
            metrics.Sample(lambda sums, counts: sums)
        ),
        "one column for each": lambda: metrics.Curve(torch.tensor([0.5]), ONES),
        "maps … gold": lambda: scores(gold=GOLD[:, 1:]),
        "gold … 3 … ignored=-1": lambda: scores(gold=GOLD + 2),
        "maps … (5,)": lambda: metrics.unit_range(MAPS[0, 0]),
        "threshold": lambda: metrics.SegmentationScores().merge(metrics.SegmentationScores(0.5)),
        "predicted … -1 to 1 … 0 to 1": lambda: metrics.confusion(GOLD, GOLD, 2),
        "counts … (2, 3)": lambda: metrics.iou(ONES),
        "present … (4, 2)": lambda: metrics.pseudo_masks(MAPS[:, None], torch.ones(4, 2)),
        "relevance … (2, 3) … (2, 2)": lambda: of_texts(ONES[:, 1:]),
        "inputs … (3,)": lambda: read(torch.ones(3).long()),
        "attention_mask … every token of the text": lambda: read(None, 0, torch.zeros(2, 5)),
    },
    OptionError: {
        "share=0": both(share=0),
        "samples=0": both(samples=0),
        "internal_batch_size=1 … 2": both(internal_batch_size=1),
        "fill=0.5": [lambda: measured(metrics.token_infidelity, fill=0.5), lambda: read(None, 0.5)],
        "fill": lambda: measured(metrics.token_infidelity, fill=torch.tensor(0.5)),
        "replacements": lambda: measured(metrics.token_sensitivity, replacements=None),
        "radius": lambda: measured(
            metrics.token_sensitivity, EMBEDDINGS, radius=0.0, replacements=None
        ),
        "fill='noise' … 'blur'": lambda: perturbed(fill="noise"),
        "fractions … from 0 to 1": lambda: perturbed(fractions=[0.5, 1.1]),
        "sigma": [
            lambda: metrics.blurred(MAPS[:, None], 0),
            lambda: metrics.blurred(MAPS[:, None], -1.0),
        ],
        "std": lambda: metrics.black([0.5], [0.0]),
        "k=": [lambda k=k: metrics.recall_at_k(*batch(), k) for k in (0, -1, 2.0, True)],
        "count=0": lambda: metrics.key_words(["a"], torch.ones(1), 0),
        "confidence": [lambda c=c: sampled([1.0]).interval(c) for c in (0, 1.0)],
        "fractions": lambda: metrics.Curve(torch.tensor([0.5]), ONES[:, :1]).area(),
        "threshold='otsu' … 'mean'": lambda: metrics.foreground(MAPS, "otsu"),
        "ranking='both'": lambda: scores(ranking="both"),
        "background=2": lambda: metrics.pseudo_masks(MAPS[:, None], torch.ones(4, 1), 2),
        "fractions … every token … fixed": lambda: of_texts(fractions=[0.5, 1.0], how="delete"),
        "how='swap' … 'delete'": lambda: of_texts(how="swap"),
    },
    NonFiniteError: {
        "relevance": lambda: perturbed(relevance=torch.full((2, 4, 4), math.nan)),
        "maps": lambda: scores(MAPS / 0),
        "scores … NaN … 161 of 161": ranked(lambda s, g: (s / 0 * 0, g)),
    },
    TargetError: {
        "target=4 … 0 to 3": lambda: perturbed(target=4),
        "0 to 2": lambda: metrics.misclassification_confidence(ONES, [0, 3]),
    },
    QueryError: {
        "query=": [
            lambda query=query: metrics.token_similarity(torch.randn(2, 3, 4), query=query)
            for query in (3, -4, torch.tensor([0, 5]), torch.tensor([0, 1, 2]), 1.5)
        ]
    },
}


@pytest.mark.parametrize("error", REFUSED)
def test_refusals(error: type[Exception]) -> None:
    for said, calls in REFUSED[error].items():
        for call in calls if isinstance(calls, list) else [calls]:
            with pytest.raises(error) as caught:
                call()
            assert all(part in str(caught.value) for part in said.split(" … ")), said
