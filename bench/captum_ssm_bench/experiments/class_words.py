"""Which words of a text a class follows from (after HA tables 3 and 9, UN table 2 and figure 6).

Maps are of the true class.  Three questions are asked of each: how soon the most relevant words
alone make the model tell the class, and how little it minds to lose the least relevant ones; what
hiding the most relevant fifth does; and whether words of the class in a lexicon of valences, which
people would name as reasons, are more relevant than others.

Shapes: L tokens of a text, R rows of a method.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from captum_ssm.attr.call.components import parse_components
from captum_ssm.attr.engine.sharing import shared_forward
from captum_ssm.metrics import average_precision, roc_auc
from captum_ssm.metrics.text_perturbation import (
    Texts,
    text_activation,
    text_perturbation,
    text_pruning,
)
from captum_ssm.models.folders import VOCABULARY
from captum_ssm.models.sentences import TextReader
from captum_ssm.models.vocabulary import UNKNOWN, WordVocabulary
from captum_ssm.tracing import repaired_scans, trace

from ..bundled import weights_of
from ..data.valence import RatedText, load_lexicon
from ..harness.experiment import Cell, Column, Experiment, Subject
from ..harness.records import Rows
from ..harness.subjects import bundled
from ..training.text_recipes import TEXT_RECIPES, RatedTexts
from .linked_texts import device_of
from .token_maps import (
    ABLATIONS,
    ACTIVATIONS,
    COMPONENTS,
    Target,
    TokenMap,
    choice_maps,
    token_maps,
)
from .word_weights import WordWeights

RANDOM, WORD_WEIGHTS = Cell("random"), Cell("TF-IDF regression")
#: Share of the words that is hidden at once.
HIDDEN = 0.2


@dataclass(frozen=True)
class RatedExample:
    """One text.

    Attributes:
        text: the text.
        name: of the example, the same for all models.
        reader: how the model reads it.
        ids: (1, L).
        words: the tokens that are its words, (1, L) of booleans.
        reasons: the words with a valence of the class's sign, (1, L) of booleans.
    """

    text: RatedText
    name: str
    reader: TextReader
    ids: Tensor
    words: Tensor
    reasons: Tensor

    @property
    def target(self) -> Target:
        """Where the class is told, and as what."""
        return int(self.reader.mark(self.ids)), self.reader.classes[self.text.label]


class TextClasses(Experiment):
    """Maps of every method against what classifiers of texts make of changed texts."""

    name = "valence"
    title = (
        "Words that the class of a text follows from (after HA tables 3 and 9 and figure 5, UN "
        "table 2 and figure 6)"
    )
    columns = (
        Column("AUAC", ("auac",)),
        Column("AU-MSE", ("au_mse",), "low"),
        Column("accuracy, top fifth hidden", ("hidden",), "low"),
        Column("lexicon AUC", ("auc",)),
        Column("lexicon AP", ("ap",)),
    )
    baselines = (RANDOM.method, WORD_WEIGHTS.method)
    note = (
        "AU-MSE is no measure of a map with a sign: what it says speaks against the class is taken "
        "out first, and its absence changes the logits. By AU-MSE such a map can be worse than one "
        "drawn by chance that finds nothing."
    )

    def subjects(self) -> Sequence[Subject]:
        return [bundled(name) for name in TEXT_RECIPES]

    def cells(self) -> Sequence[Cell]:
        return [*self._maps, WORD_WEIGHTS, RANDOM]

    def example(self, subject: Subject, index: int, seed: int) -> RatedExample:
        text = self._drawn(seed)[index % len(self._texts)]
        return example_of(text, f"{seed}/{index}", self._reader(subject.name), self._lexicon)

    def measure(self, model: nn.Module, example: RatedExample, cell: Cell) -> Rows:
        maps = self._relevance(model, example, cell)
        return text_scores(model, example, maps) if maps else {}

    def together(self) -> AbstractContextManager[None]:
        return shared_forward("all", streams=True)

    def _relevance(
        self, model: nn.Module, example: RatedExample, cell: Cell
    ) -> Mapping[str, Tensor]:
        """The relevance of each token, (L,), by row; none, if another cell says the same."""
        if cell == RANDOM:
            return {"": _random(example)}
        if cell == WORD_WEIGHTS:
            return {"": self._weights.relevance(example.reader, example.ids[0], example.text.label)}
        ids = example.ids.to(device_of(model))
        if model not in self._components:
            self._components[model] = components_of(model, ids)
        if not says_more(cell, self._components[model]):
            return {}
        found = self._maps[cell](model, ids, [example.target])
        return {row: each[0].cpu() for row, each in found.items()}

    def _reader(self, name: str) -> TextReader:
        if name not in self._readers:
            vocabulary = WordVocabulary.from_json(weights_of(name).parent / VOCABULARY)
            self._readers[name] = TEXT_RECIPES[name].reader(vocabulary)
        return self._readers[name]

    def _drawn(self, seed: int) -> list[RatedText]:
        """The texts in an order of the seed's own."""
        return random.Random(seed).sample(self._texts, len(self._texts))

    @cached_property
    def _readers(self) -> dict[str, TextReader]:
        return {}

    @cached_property
    def _components(self) -> WeakKeyDictionary[nn.Module, frozenset[str]]:
        return WeakKeyDictionary()

    @cached_property
    def _texts(self) -> list[RatedText]:
        return self._task.texts("test")

    @cached_property
    def _lexicon(self) -> Mapping[str, float]:
        return load_lexicon()

    @cached_property
    def _weights(self) -> WordWeights:
        vocabulary = self._reader(next(iter(TEXT_RECIPES))).vocabulary  # the same for all
        return WordWeights.of(self._task.texts("train"), vocabulary)

    @property
    def _task(self) -> RatedTexts:
        return next(iter(TEXT_RECIPES.values())).task

    @cached_property
    def _maps(self) -> dict[Cell, TokenMap]:
        return {**token_maps(), **choice_maps()}


def example_of(
    text: RatedText, name: str, reader: TextReader, lexicon: Mapping[str, float]
) -> RatedExample:
    """A text as an example.

    Args:
        text: with one word or more.
        name: of the example.
        reader: how the model reads it.
        lexicon: valences of words.
    """
    ids = reader.ids([text.words])
    words = reader.words(ids)
    reasons = torch.zeros_like(words)
    sign = 1 if text.label else -1
    reasons[words] = torch.tensor(
        [sign * lexicon.get(word, 0) > 0 for word in text.words[: reader.longest]]
    )
    return RatedExample(text, name, reader, ids, words, reasons)


def text_scores(model: nn.Module, example: RatedExample, maps: Mapping[str, Tensor]) -> Rows:
    """The numbers of each map (L,), by row.

    Args:
        model: a classifier.
        example: a text.
        maps: relevance of its tokens.
    """
    count, device = len(maps), device_of(model)
    relevance = torch.stack([each.double() for each in maps.values()]).to(device)  # (R, L)
    reader, label = example.reader, example.text.label
    texts = Texts(
        lambda ids: reader.logits(model, ids),
        example.ids.expand(count, -1).to(device),
        reader.vocabulary.id_of(UNKNOWN),
        fixed=~example.words.expand(count, -1).to(device),
    )
    with repaired_scans():
        hidden = text_perturbation(texts, relevance, label, fractions=[HIDDEN])
        found = {
            "auac": text_activation(texts, relevance, label).area(),
            "au_mse": text_pruning(texts, relevance).area(),
            "hidden": hidden.correct.values[:, 0],
        }
    gold = [each.expand(count, -1).to(device) for each in (example.reasons, example.words)]
    found["auc"], found["ap"] = (f(relevance, *gold) for f in (roc_auc, average_precision))
    return {
        row: {name: float(values[i]) for name, values in found.items()}
        for i, row in enumerate(maps)
    }


def components_of(model: nn.Module, ids: Tensor) -> frozenset[str]:
    """The components that the mixers of a model have.

    Args:
        model: a classifier.
        ids: of any text, (1, L).
    """
    with torch.no_grad(), trace(model) as found:
        model(ids)
    leaves = (leaf for layer in found.layers for leaf in layer.operator.leaves())
    return frozenset(leaf.component for leaf in leaves if leaf.component is not None)


def says_more(cell: Cell, components: frozenset[str]) -> bool:
    """Whether a formulation says what none before it does, of mixers with these components.

    Args:
        cell: a method in a formulation.
        components: of the mixers.
    """
    variant, _, choice = cell.formulation.partition(", ")
    if choice:
        return says_more(Cell(cell.method, variant), components)
    if variant in ACTIVATIONS:
        return variant == ACTIVATIONS[0] or "activation" in components
    known = ("unified", *(each for each in (*COMPONENTS, *ABLATIONS) if each != "unified"))
    if variant not in known:
        return True
    before = known[: known.index(variant)]
    kept = parse_components(variant) & components
    return bool(kept) and kept not in [parse_components(each) & components for each in before]


def _random(example: RatedExample) -> Tensor:
    """Relevance by chance, the same for all models."""
    chance = random.Random(example.name)
    drawn = torch.zeros(example.ids.shape[1])
    drawn[example.words[0]] = torch.tensor(
        [chance.random() for _ in range(int(example.words.sum()))]
    )
    return drawn
