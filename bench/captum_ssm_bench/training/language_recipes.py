"""The bundled language models: which task each has learned, how large it is, for how long."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.nn.functional as F
from torch import Tensor, nn

from captum_ssm.models.folders import VOCABULARY

from ..tasks.answers import Accuracy, answer_accuracy
from ..tasks.chains import CHAINS
from ..tasks.copying import LONG_COPIES, SHORT_COPIES
from ..tasks.linked import LinkedTask
from ..tasks.pairs import FEW_PAIRS, PAIRS
from ..tasks.recall_task import RecallTask
from ..tasks.retrieval import FREQUENT_WORD, ONE_PASSKEY, TWO_PASSKEYS
from ..tasks.translation import NUMBER_WORDS
from .recipe import HELD_OUT_SEED, Recipe, Round, Scores
from .saving import save_of_transformers
from .small import ModelSize, new_model

#: Texts that a line of progress is measured on.
_HELD_OUT = 256
#: Lengths that are measured one by one, where a task has more.
_MEASURED_LENGTHS = 16


@dataclass(frozen=True)
class LanguageRecipe(Recipe):
    """How a language model is made; the loss is the cross entropy of the answered tokens.

    Attributes:
        task: what it learns.
        size: the model.
        steps: optimiser steps of each round.
        lasting_from: the first layer whose decays and step sizes start near one, negative to count
            from the end. Default: -1, the last layer alone.
        draws: a batch has texts of one length, the greatest of so many draws: long texts are the
            harder ones. Default: 2.
        batch_size: texts per step. Default: 64.
        learning_rate: the peak. Default: 2e-3.
    """

    task: LinkedTask
    size: ModelSize
    steps: tuple[int, ...]
    lasting_from: int = -1
    draws: int = 2
    batch_size: int = 64
    learning_rate: float = 2e-3

    def new(self) -> nn.Module:
        return new_model(self.size, self.task.vocabulary, lasting_from=self.lasting_from)

    def rounds(self, model: nn.Module, seed: int) -> Sequence[Round]:
        task, rng = self.task, random.Random(seed)
        held_out = task.batch(task.draw(_HELD_OUT, HELD_OUT_SEED))

        def loss() -> Tensor:
            length = max(rng.randint(task.shortest, task.longest) for _ in range(self.draws))
            batch = task.batch(task.draw(self.batch_size, rng, length))
            rows, queries, tokens = batch.targets
            output = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask)
            return F.cross_entropy(output.logits[rows, queries], tokens)

        def score() -> float:
            return answer_accuracy(model, held_out).tokens

        return [Round(steps, loss, score, self.learning_rate) for steps in self.steps]

    def measure(self, model: nn.Module) -> Scores:
        found = accuracy_by_length(model, self.task)
        return {f"length {n}": score._asdict() for n, score in found.items()}

    def save(self, model: nn.Module, folder: Path) -> None:
        save_of_transformers(model, folder)
        self.task.vocabulary.to_json(folder / VOCABULARY)


def accuracy_by_length(
    model: nn.Module, task: LinkedTask, per_length: int = 256, seed: int = HELD_OUT_SEED + 1
) -> dict[int, Accuracy]:
    """The accuracy on fresh texts for each length of a task, or for some of many."""
    lengths = range(task.shortest, task.longest + 1)
    step = math.ceil(len(lengths) / _MEASURED_LENGTHS)
    return {
        n: answer_accuracy(model, task.batch(task.draw(per_length, seed + n, n)))
        for n in lengths[::step]
    }


_MAMBA, _MAMBA2 = ModelSize(), ModelSize("mamba2", state=32)
_SMALL, _SMALL2 = ModelSize(layers=1, hidden=32), ModelSize("mamba2", layers=1, hidden=32)

_DELTA = ModelSize("gated-deltanet", head_dim=32)
_SMALL_DELTA = ModelSize("gated-deltanet", layers=1, hidden=32)

#: By the name of the bundled model; first those that learned the papers' tasks.
LANGUAGE_RECIPES = {
    "recall-mamba": LanguageRecipe(RecallTask(), _MAMBA, steps=(3000,), lasting_from=0, draws=1),
    "copying-mamba": LanguageRecipe(SHORT_COPIES, _MAMBA, steps=(1000,)),
    "copying-mamba2": LanguageRecipe(LONG_COPIES, _MAMBA2, steps=(1500, 1500)),
    "translation-mamba": LanguageRecipe(NUMBER_WORDS, _MAMBA, steps=(700,)),
    "translation-mamba2": LanguageRecipe(NUMBER_WORDS, _MAMBA2, steps=(1000,)),
    "passkey-mamba": LanguageRecipe(ONE_PASSKEY, _SMALL, steps=(1000,)),
    "passkey-mamba2": LanguageRecipe(ONE_PASSKEY, _SMALL2, steps=(1000,)),
    "two-passkeys-mamba": LanguageRecipe(TWO_PASSKEYS, _SMALL, steps=(1500,)),
    "two-passkeys-mamba2": LanguageRecipe(TWO_PASSKEYS, _SMALL2, steps=(1500,)),
    "frequent-word-mamba": LanguageRecipe(FREQUENT_WORD, _SMALL, steps=(400,)),
    "frequent-word-mamba2": LanguageRecipe(FREQUENT_WORD, _SMALL2, steps=(600,)),
    "pairs-mamba": LanguageRecipe(PAIRS, _MAMBA, steps=(1500,), draws=1),
    "pairs-mamba2": LanguageRecipe(PAIRS, _MAMBA2, steps=(600,), draws=1, learning_rate=4e-3),
    "pairs-gated-deltanet": LanguageRecipe(PAIRS, _DELTA, steps=(600,), lasting_from=0, draws=1),
    "pairs-rwkv": LanguageRecipe(
        FEW_PAIRS, ModelSize("rwkv"), steps=(2500,), draws=1, learning_rate=4e-3
    ),
    "pairs-griffin": LanguageRecipe(
        FEW_PAIRS, ModelSize("griffin", hidden=80), steps=(1500,), draws=1, learning_rate=4e-3
    ),
    "pairs-bamba": LanguageRecipe(
        PAIRS, ModelSize("bamba"), steps=(1000,), draws=1, learning_rate=3e-3
    ),
    "copying-bamba": LanguageRecipe(
        SHORT_COPIES, ModelSize("bamba"), steps=(600,), learning_rate=3e-3
    ),
    "translation-gated-deltanet": LanguageRecipe(
        NUMBER_WORDS, _DELTA, steps=(500,), lasting_from=0
    ),
    "translation-rwkv": LanguageRecipe(
        NUMBER_WORDS, ModelSize("rwkv"), steps=(2500,), learning_rate=4e-3
    ),
    "passkey-gated-deltanet": LanguageRecipe(ONE_PASSKEY, _SMALL_DELTA, steps=(1000,)),
    "two-passkeys-gated-deltanet": LanguageRecipe(
        TWO_PASSKEYS, _SMALL_DELTA, steps=(2500,), learning_rate=4e-3
    ),
    "chains-mamba": LanguageRecipe(CHAINS, _MAMBA, steps=(600,), draws=1, learning_rate=4e-3),
    "chains-mamba2": LanguageRecipe(CHAINS, _MAMBA2, steps=(400,), draws=1, learning_rate=4e-3),
}
