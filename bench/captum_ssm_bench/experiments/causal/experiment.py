"""Does relevance agree with what true interventions do?

Shapes: U units.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from captum_ssm.attr.engine.run import shared_forward
from captum_ssm.metrics import (
    kendall,
    pearson,
    pixel_relevance,
    segmentation_average_precision,
    spearman,
)
from captum_ssm.models.folders import VOCABULARY
from captum_ssm.models.vmamba import VMamba
from captum_ssm.models.vocabulary import WordVocabulary
from captum_ssm.tracing import repaired_scans

from ...bundled import weights_of
from ...harness.experiment import Cell, Column, Experiment, Subject
from ...harness.records import Numbers, Rows
from ...harness.statistics import ratio
from ...harness.subjects import bundled
from ...tasks.scenes import SCENES
from ...training.image_recipes import IMAGE_RECIPES
from ...training.loop import RECIPES
from ...training.text_recipes import TEXT_RECIPES, TextRecipe
from .interventions import SUFFICIENT, Answers
from .methods import METHODS, SHAPLEY, Method
from .questions import LinkedQuestions, Question, RatedQuestions, SceneQuestions

#: The models on which rules may be chosen and their numbers set.  Whatever is chosen by looking at
#: them looks better on them than it is, so that nothing is claimed from them.
CHOOSING = (
    "recall-mamba",
    "copying-mamba",
    "copying-mamba2",
    "translation-mamba",
    "translation-mamba2",
    "passkey-mamba",
    "passkey-mamba2",
    "two-passkeys-mamba",
    "two-passkeys-mamba2",
    "frequent-word-mamba",
    "frequent-word-mamba2",
    "pairs-gated-deltanet",
    "pairs-bamba",
    "pairs-rwkv",
    "valence-mamba",
    "valence-bert",
)
#: The models that what was chosen is confirmed on.  They were named before anything was chosen, and
#: are looked at once it is: of six kinds of mixers (Mamba, Mamba-2, RWKV-4's average, RG-LRU, the
#: gated delta rule, Mamba-2 with attention) and four tasks.  What a gate that is a sigmoid is
#: compared with was chosen on pairs-rwkv, which was one of these before; translation-rwkv, made
#: after that, is in its place.
CONFIRMING = (
    "pairs-mamba",
    "pairs-mamba2",
    "pairs-griffin",
    "copying-bamba",
    "translation-gated-deltanet",
    "translation-rwkv",
    "valence-rwkv",
)
#: Those of images, the first to choose on and the others to confirm.
CHOOSING_IMAGES, CONFIRMING_IMAGES = ("scenes-vit",), ("scenes-vim", "scenes-vim-first")
#: Another one of images, of two stages.
IN_STAGES = ("scenes-vmamba",)


class Questioned(Experiment):
    """Base of experiments on one output of a model for each example."""

    def subjects(self) -> Sequence[Subject]:
        """Last those that ask for texts of others, without which a run ends there."""
        names = [name for group in self.groups.values() for name in group]
        return [bundled(name) for name in sorted(names, key=TEXT_RECIPES.__contains__)]

    def example(self, subject: Subject, index: int, seed: int) -> Question:
        return questions_of(subject.name).question(f"{seed}/{index}")


class Causal(Questioned):
    """Relevance of tokens and patches against Shapley values, and against leaving each one out."""

    name = "causal"
    title = "Agreement of relevance with true interventions"
    examples = 40
    columns = (
        Column("ρ Shapley", ("spearman",)),
        Column("r Shapley", ("pearson",)),
        Column("τ Shapley", ("kendall",)),
        Column("ρ left out", ("left_out",)),
        Column("insertion", ("insertion",)),
        Column("deletion", ("deletion",), "low"),
        Column("sufficiency", ("sufficiency",)),
        Column("top 1", ("top1",)),
        Column("mask AP", ("mask_ap",)),
        Column("error of the sum", ("off_the_sum", "size_of_the_sum"), "low", ratio),
        Column("passes", ("passes",), "low"),
    )
    baselines = ("random", SHAPLEY.method)
    groups = MappingProxyType(
        {
            "choosing": CHOOSING,
            "confirming": CONFIRMING,
            "choosing on images": CHOOSING_IMAGES,
            "confirming on images": CONFIRMING_IMAGES,
            "images in stages": IN_STAGES,
        }
    )
    against = Cell("ExpectedGradients", "8 references")
    #: What fills each row.
    methods: Mapping[Cell, Method] = METHODS

    def __init__(self) -> None:
        #: Of the latest example, so that its truth is found once for all methods.
        self._latest: Answers | None = None

    def cells(self) -> Sequence[Cell]:
        return list(self.methods)

    def measure(self, model: nn.Module, example: Any, cell: Cell) -> Rows:
        if cell.method == "LatimLogit" and isinstance(model, VMamba):
            return {}  # which has maps of several sizes
        if self._latest is None or self._latest.question is not example:
            self._latest = Answers(model, example)
        answers, method = self._latest, self.methods[cell]
        relevance = method.explain(answers).detach().cpu().double()
        if cell == SHAPLEY:
            return {"": {**scores(answers, relevance, method), **halves(answers)}}
        return {"": scores(answers, relevance, method)}

    @contextmanager
    def together(self) -> Iterator[None]:
        with repaired_scans(), shared_forward("all", streams=True):
            yield


@cache
def questions_of(name: str) -> LinkedQuestions | RatedQuestions | SceneQuestions:
    """What is asked of a bundled model; its task's texts are drawn once."""
    if name in IMAGE_RECIPES:
        return SceneQuestions(SCENES, IMAGE_RECIPES[name].size.patch)
    recipe = RECIPES[name]
    if isinstance(recipe, TextRecipe):
        vocabulary = WordVocabulary.from_json(weights_of(name).parent / VOCABULARY)
        return RatedQuestions(recipe.task, recipe.reader(vocabulary))
    return LinkedQuestions(recipe.task)


def scores(answers: Answers, relevance: Tensor, method: Method) -> Numbers:
    """The numbers of one method's relevance (U,) of one question."""
    question, shapley = answers.question, answers.shapley.mean(0)
    inserted, deleted = answers.probabilities(relevance)
    return {
        **agreement(relevance, shapley, question.movable),
        "left_out": agreement(relevance, answers.left_out, question.movable)["spearman"],
        "insertion": float(inserted.area()),
        "deletion": float(deleted.area()),
        "sufficiency": float(inserted.values[0, SUFFICIENT]),
        "top1": first_is_gold(relevance, question),
        "mask_ap": on_the_mask(relevance, question),
        "off_the_sum": abs(float(relevance[question.movable].sum() - shapley.sum())),
        "size_of_the_sum": abs(float(shapley.sum())),
        "passes": method.passes(answers),
    }


def agreement(relevance: Tensor, truth: Tensor, movable: Tensor) -> Numbers:
    """Correlations of relevance (U,) with the truth (U,) over movable units.

    Relevance that is the same everywhere names no order: its agreement is 0.
    """
    one, other = relevance[movable][None], truth[movable][None]
    says_nothing = bool((one == one[:, :1]).all())
    return {
        measure.__name__: 0.0 if says_nothing else float(measure(one, other))
        for measure in (spearman, pearson, kendall)
    }


def halves(answers: Answers) -> Numbers:
    """The agreement of one half of the permutations with the other."""
    one, other = (half.mean(0) for half in answers.shapley.chunk(2))
    return agreement(one, other, answers.question.movable)


def first_is_gold(relevance: Tensor, question: Question) -> float:
    """Whether the most relevant of the movable units is one that the answer is read off."""
    if not bool(question.gold.any()):
        return math.nan
    first = relevance.masked_fill(~question.movable, -math.inf).argmax()
    return float(question.gold[first])


def on_the_mask(relevance: Tensor, question: Question) -> float:
    """The average precision of a map of patches as a guess at the object's pixels."""
    if question.grid is None or question.mask is None:
        return math.nan
    _, height, width = question.mask.shape
    sized = pixel_relevance(relevance.view(1, *question.grid), (height, width))
    return float(segmentation_average_precision(sized, question.mask))
