"""The bundled classifiers of texts: negative or positive, by three architectures."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from captum_ssm.models.folders import VOCABULARY, model_of
from captum_ssm.models.sentences import TextReader, class_vocabulary
from captum_ssm.models.vocabulary import UNKNOWN, WordVocabulary

from ..valence import SOURCES, RatedText, load_valence
from .recipe import Recipe, Round, Scores
from .saving import save_of_transformers
from .small import ModelSize, new_model

#: By architecture, the class of transformers.
CLASSES = {
    "mamba": "MambaForCausalLM",
    "rwkv": "RwkvForCausalLM",
    "bert": "BertForSequenceClassification",
}
#: Texts that are measured at once, of nearly one length.
_MEASURED = 128
#: Batches among whose texts those of nearly one length are put together.
_POOL = 16
#: Scale of what words say by themselves: sums of many small numbers are to reach valences.
_BAG = 2.0


@dataclass(frozen=True)
class ClassifierSize:
    """The architecture and size of a classifier of texts.

    Attributes:
        architecture: ``"mamba"``, ``"rwkv"`` or ``"bert"``. Default: ``"mamba"``.
        layers: number of blocks. Default: 2.
        hidden: width of the residual stream. Default: 32.
    """

    architecture: str = "mamba"
    layers: int = 2
    hidden: int = 32


@dataclass(frozen=True)
class RatedTexts:
    """The rated texts of some sources, as a task.

    Attributes:
        sources: of :func:`~captum_ssm_bench.valence.load_valence`. Default: all of them.
        least: how often a word of the training texts must occur to be known. Default: 3.
    """

    sources: tuple[str, ...] = tuple(SOURCES)
    least: int = 3

    def texts(self, split: str) -> list[RatedText]:
        """The texts of a split, from where the environment says that they are."""
        return load_valence(split=split, sources=self.sources)

    @cached_property
    def vocabulary(self) -> WordVocabulary:
        """The words of the training texts."""
        return class_vocabulary((text.words for text in self.texts("train")), self.least)


@dataclass(frozen=True)
class TextRecipe(Recipe):
    """How a classifier of texts is made.

    The loss is the cross entropy with what the rating says, not with the label alone: the model's
    margin between the classes is to be the valence.  The first round trains the words alone, as a
    bag: the margin is what the sum of their embeddings says.  The second trains the model and
    leaves the words as they are: it would learn the few texts by heart, by their rare words.

    In both, words are hidden at random, so that the model knows hidden words when it is explained.
    The weights of the two classes begin, and so remain, as each other's negative: a class's logit
    is half the margin, and to explain the one is to explain the other.

    Attributes:
        task: the texts.
        size: the model.
        steps: optimiser steps of the words and of the model, one number if they are the same.
        words_rate: the peak learning rate of the words. Default: 3e-3.
        learning_rate: that of the model. Default: 4e-3.
        hidden_words: share of words that become ``<unk>`` in training. Default: 0.3.
        spread: standard deviation of the first embeddings. Default: 0.1.
        bag_size: texts per step of the words. Default: 256.
        batch_size: texts per step of the model. Default: 64.
    """

    task: RatedTexts
    size: ClassifierSize
    steps: tuple[int, ...]
    words_rate: float = 3e-3
    learning_rate: float = 4e-3
    hidden_words: float = 0.3
    spread: float = 0.1
    bag_size: int = 256
    batch_size: int = 64

    def reader(self, vocabulary: WordVocabulary) -> TextReader:
        """How the model reads texts."""
        return TextReader(vocabulary, encoder=self.size.architecture == "bert")

    def new(self) -> nn.Module:
        vocabulary = self.task.vocabulary
        model = _plain(self.size, vocabulary)
        negative, positive = self.reader(vocabulary).classes
        with torch.no_grad():
            model.get_input_embeddings().weight.normal_(std=self.spread)
            told = class_weights(model)
            told[negative] = -told[positive]
        fresh: nn.Module = model
        return fresh

    def rounds(self, model: nn.Module, seed: int) -> Sequence[Round]:
        reader, rng = self.reader(self.task.vocabulary), random.Random(seed)
        texts, held_out = self.task.texts("train"), self.task.texts("validation")
        batches = alike(texts, self.batch_size, rng)
        whole: Any = model

        def words_loss() -> Tensor:
            drawn = rng.sample(texts, self.bag_size)
            ids = self._hidden(reader, reader.ids([text.words for text in drawn]))
            return rating_loss(bag_logits(model, reader, ids), drawn)

        def loss() -> Tensor:
            drawn = next(batches)
            ids = self._hidden(reader, reader.ids([text.words for text in drawn]))
            embedded = whole.get_input_embeddings()(ids).detach()
            return rating_loss(reader.logits(model, ids, embedded), drawn)

        words, *rest = self.steps
        rest = rest or [words]
        by_words = partial(class_accuracy, partial(bag_logits, model, reader), reader, held_out)
        by_model = partial(class_accuracy, partial(reader.logits, model), reader, held_out)
        return [
            Round(words, words_loss, by_words, self.words_rate),
            *(Round(steps, loss, by_model, self.learning_rate) for steps in rest),
        ]

    def _hidden(self, reader: TextReader, ids: Tensor) -> Tensor:
        """The ids with some words hidden at random."""
        chosen = (torch.rand(ids.shape) < self.hidden_words) & reader.words(ids)
        return ids.masked_fill(chosen, reader.vocabulary.id_of(UNKNOWN))

    def measure(self, model: nn.Module) -> Scores:
        reader = self.reader(self.task.vocabulary)
        told = partial(reader.logits, model)
        parts = {source: load_valence(sources=[source]) for source in self.task.sources}
        parts["all"] = [text for part in parts.values() for text in part]
        return {
            source: {"accuracy": class_accuracy(told, reader, part)}
            for source, part in parts.items()
        }

    def save(self, model: nn.Module, folder: Path) -> None:
        save_of_transformers(model, folder)
        self.task.vocabulary.to_json(folder / VOCABULARY)


def alike(texts: Sequence[RatedText], size: int, rng: random.Random) -> Iterator[list[RatedText]]:
    """Batches without end, each of texts of nearly one length."""
    while True:
        pool = rng.sample(texts, min(len(texts), _POOL * size))
        pool.sort(key=lambda text: len(text.words))
        cuts = list(range(0, len(pool) - size + 1, size))
        rng.shuffle(cuts)
        yield from (pool[cut : cut + size] for cut in cuts)


def class_weights(model: Any) -> Tensor:
    """The weights that tell the classes, one row for each number of the model's output."""
    told = getattr(model, "classifier", None) or model.get_output_embeddings()
    weights: Tensor = told.weight
    return weights


def bag_logits(model: Any, reader: TextReader, ids: Tensor) -> Tensor:
    """What the words of texts say of the classes by themselves, (B, 2)."""
    words = reader.words(ids)
    embedded = model.get_input_embeddings()(ids) * words[..., None]
    count = words.sum(-1, keepdim=True).clamp_min(1)
    told = class_weights(model)[list(reader.classes)]
    logits: Tensor = _BAG * (embedded.sum(1) / count.sqrt()) @ told.T
    return logits


def rating_loss(logits: Tensor, texts: Sequence[RatedText]) -> Tensor:
    """The cross entropy of the classes (B, 2) with the chances that the valences say."""
    valence = torch.tensor([text.valence for text in texts]).to(logits)
    return F.binary_cross_entropy_with_logits(logits[:, 1] - logits[:, 0], valence.sigmoid())


@torch.no_grad()
def class_accuracy(
    logits: Callable[[Tensor], Tensor], reader: TextReader, texts: Sequence[RatedText]
) -> float:
    """The share of texts whose class is told right by logits of ids, (B, 2)."""
    ordered = sorted(texts, key=lambda text: len(text.words))
    right = 0
    for start in range(0, len(ordered), _MEASURED):
        part = ordered[start : start + _MEASURED]
        told = logits(reader.ids([text.words for text in part])).argmax(-1)
        right += int((told == torch.tensor([text.label for text in part])).sum())
    return right / len(ordered)


def _plain(size: ClassifierSize, vocabulary: WordVocabulary) -> Any:
    """A freshly initialised model of transformers; the last layer of a Mamba forgets little."""
    if size.architecture == "mamba":
        language = ModelSize("mamba", size.layers, size.hidden, state=8)
        return new_model(language, vocabulary, lasting_from=-1)
    settings: dict[str, Any] = {
        "vocab_size": len(vocabulary),
        "hidden_size": size.hidden,
        "num_hidden_layers": size.layers,
        "pad_token_id": vocabulary.pad_id,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    own: dict[str, dict[str, Any]] = {
        "rwkv": {"tie_word_embeddings": True},
        "bert": {
            "num_attention_heads": 4,
            "intermediate_size": 2 * size.hidden,
            "max_position_embeddings": 192,
            "num_labels": 2,
        },
    }
    return model_of(CLASSES[size.architecture], settings | own[size.architecture])


#: By the name of the bundled model.
TEXT_RECIPES = {
    "valence-mamba": TextRecipe(
        RatedTexts(), ClassifierSize("mamba"), (250, 300), learning_rate=6e-3
    ),
    "valence-rwkv": TextRecipe(RatedTexts(), ClassifierSize("rwkv"), (250, 250)),
    "valence-bert": TextRecipe(
        RatedTexts(), ClassifierSize("bert"), (250, 200), learning_rate=3e-3
    ),
}
