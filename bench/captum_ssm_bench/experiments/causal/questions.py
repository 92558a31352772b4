"""What is asked of a model, and what the task could have put in the place of each unit.

Units are the tokens of a text, its words if tokens are bytes, or the patches of an image, row by
row.  A token is replaced by one
of its kind from other texts of the task: a key by a key, a digit by a digit.  What is the only one
of its kind stays, such as the mark that a question begins with.  A patch is replaced by the patch
that another scene has at its place.

Shapes: N inputs, U units, L tokens, h and w patches down and across.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any
from zlib import crc32

import torch
import torch.nn.functional as F
from torch import Tensor

from captum_ssm.models import recall
from captum_ssm.models.sentences import TextReader

from ...tasks import retrieval, translation
from ...tasks.copying import ALPHABET, CopyingTask
from ...tasks.linked import LinkedTask
from ...tasks.pairs import KEYS, VALUES, PairsTask
from ...tasks.recall_task import RecallTask
from ...tasks.retrieval import FrequentWordTask, PasskeyTask
from ...tasks.scenes import SceneTask
from ...tasks.translation import TranslationTask
from ...training.text_recipes import RatedTexts

#: Texts that replacements are taken from.
_POOL = 256
#: The order of fewer units says little.
LEAST_MOVABLE = 6
#: The share of a patch that the object covers in a patch that the answer is read off.
_COVERED = 0.5
#: (count, seed) to other inputs of the task, (count, ...).
Draw = Callable[[int, int], Tensor]
#: Words that are drawn for each other.
Kinds = Sequence[Collection[str]]


@dataclass(frozen=True, eq=False)
class Question:
    """One output of a model at one input.

    Attributes:
        name: of the example; all that is drawn for it follows from its name.
        inputs: ids (1, L), or an image (1, C, H, W).
        target: which output, in Captum's form.
        draw: gives other inputs, whose movable units are all drawn anew.
        movable: the units that are, (U,) of booleans.
        gold: the units that the answer is read off, (U,) of booleans; none where nobody knows.
        classes: the outputs that the target competes with. Default: None, all.
        grid: patches down and across, (h, w). Default: None, units are tokens.
        mask: the pixels of what the target names, (1, H, W). Default: None, none is known.
        words: the unit of each token, (L,), where a unit has several. Default: None, each token is
            a unit.
    """

    name: str
    inputs: Tensor
    target: Any
    draw: Draw
    movable: Tensor
    gold: Tensor
    classes: tuple[int, ...] | None = None
    grid: tuple[int, int] | None = None
    mask: Tensor | None = None
    words: Tensor | None = None

    def seed(self, purpose: str) -> int:
        """What is drawn for a purpose is drawn from; the same for all models and methods."""
        return crc32(f"{self.name}/{purpose}".encode())

    def references(self, purpose: str, count: int) -> Tensor:
        """Other inputs of the task, (count, ...); the same ones for the same purpose."""
        return self.draw(count, self.seed(purpose))

    def exchanged(self, references: Tensor, kept: Tensor) -> Tensor:
        """The input with units of references (N, ...) in place of all that are not kept."""
        return torch.where(self.spread(kept), self.inputs, references)

    def spread(self, units: Tensor) -> Tensor:
        """One value for each unit (N, U), at each token (N, L) or pixel (N, 1, H, W)."""
        if self.words is not None:
            return units[:, self.words]
        if self.grid is None:
            return units
        patches = units.view(-1, 1, *self.grid)
        down, across = (
            size // count for size, count in zip(self.inputs.shape[2:], self.grid, strict=True)
        )
        found: Tensor = patches.repeat_interleave(down, 2).repeat_interleave(across, 3)
        return found

    def by_unit(self, values: Tensor) -> Tensor:
        """Sums over the features of each unit, (N, L, E) or (N, C, H, W) to (N, U)."""
        if self.grid is None:
            return self.by_word(values.sum(-1))
        summed = F.adaptive_avg_pool2d(values.sum(1), self.grid).flatten(1)
        return summed * (values[0, 0].numel() / summed.shape[1])

    def by_word(self, values: Tensor) -> Tensor:
        """Sums over the tokens of each unit, (N, L) to (N, U)."""
        if self.words is None:
            return values
        found = values.new_zeros(len(values), len(self.movable))
        return found.index_add(1, self.words.to(values.device), values)

    @property
    def places(self) -> Tensor:
        """The tokens of movable units, (L,) of booleans."""
        return self.spread(self.movable[None])[0]


class LinkedQuestions:
    """One answered word of each text of a task.

    Args:
        task: one of those of the bundled models.
    """

    def __init__(self, task: LinkedTask) -> None:
        self._task = task
        others = task.batch(task.draw(_POOL, seed=0)).input_ids.flatten()
        id_of = task.vocabulary.id_of
        kinds = [torch.tensor([id_of(word) for word in kind]) for kind in _KINDS[type(task)](task)]
        self._pools = [others[torch.isin(others, kind)] for kind in kinds]

    def question(self, name: str) -> Question:
        """One answered word that surely has a source, of a text with enough to be replaced."""
        rng = random.Random(name)
        while True:
            batch = self._task.batch(self._task.draw(1, rng))
            known = batch.gold()[0].any(-1)
            queries, tokens = batch.targets.queries, batch.targets.tokens
            chosen = rng.choice([i for i, query in enumerate(queries.tolist()) if known[query]])
            query = int(queries[chosen])
            found = self.asked(name, batch.input_ids, query, int(tokens[chosen]))
            if int(found.movable.sum()) >= LEAST_MOVABLE:
                return replace(found, gold=batch.gold()[0, query, : query + 1])

    def asked(self, name: str, ids: Tensor, query: int, token: int) -> Question:
        """One answered word of a text (1, L); what follows the asking token is not read yet."""
        return _of_text(name, ids[:, : query + 1], (-1, token), self._pools)


class RatedQuestions:
    """The class of each text of those that are kept from training.

    Args:
        task: the texts.
        reader: how the model reads them.
    """

    def __init__(self, task: RatedTexts, reader: TextReader) -> None:
        self._reader = reader
        self._texts = [t for t in task.texts("test") if len(t.words) >= LEAST_MOVABLE]
        words = [word for text in self._texts for word in text.words]
        self._pool = torch.tensor([reader.vocabulary.id_of(word) for word in words])

    def question(self, name: str) -> Question:
        """The class that people gave a text."""
        reader = self._reader
        text = random.Random(name).choice(self._texts)
        ids = reader.ids([text.words])
        told = reader.classes[text.label]
        places = [(reader.words(ids)[0].nonzero().flatten(), self._pool)]
        target = told if reader.encoder else (-1, told)
        return _of_places(name, ids, target, places, classes=reader.classes)


class SceneQuestions:
    """The class of the object of each scene.

    Args:
        task: draws the scenes.
        patch: side of the model's patches.
    """

    def __init__(self, task: SceneTask, patch: int) -> None:
        self._task, self._side = task, task.size // patch

    def question(self, name: str) -> Question:
        """The class that a scene shows."""
        scene = self._task.draw(1, crc32(name.encode()))
        grid = (self._side, self._side)
        covered = F.adaptive_avg_pool2d((scene.masks > 0).float(), grid).flatten()
        return Question(
            name,
            scene.images,
            int(scene.labels),
            lambda count, seed: self._task.draw(count, seed).images,
            movable=torch.ones_like(covered, dtype=torch.bool),
            gold=covered >= _COVERED,
            grid=grid,
            mask=scene.masks > 0,
        )


def _of_text(name: str, ids: Tensor, target: tuple[int, int], pools: Sequence[Tensor]) -> Question:
    """A text in which the words of each pool are drawn from it, if it holds more than one."""
    places = [
        (torch.isin(ids[0], pool).nonzero().flatten(), pool)
        for pool in pools
        if bool((pool != pool[:1]).any())
    ]
    return _of_places(name, ids, target, places)


def _of_places(
    name: str,
    ids: Tensor,
    target: Any,
    places: Sequence[tuple[Tensor, Tensor]],
    classes: tuple[int, int] | None = None,
) -> Question:
    """A text (1, L), and of each kind where its words stand and those that are drawn for them."""
    movable = torch.zeros(ids.shape[1], dtype=torch.bool)
    for where, _ in places:
        movable[where] = True

    def draw(count: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        others = ids.repeat(count, 1)
        for where, pool in places:
            drawn = torch.randint(len(pool), (count, len(where)), generator=generator)
            others[:, where] = pool[drawn]
        return others

    return Question(name, ids, target, draw, movable, torch.zeros_like(movable), classes)


_NUMBER_WORDS = (
    (*translation.UNITS, (translation.UNITS[0][0], translation.EIN)),
    translation.TEENS,
    translation.TENS,
    (translation.HUNDRED, translation.THOUSAND),
)
_KINDS: Mapping[type, Callable[[Any], Kinds]] = {
    CopyingTask: lambda task: [ALPHABET[: task.symbols]],
    PairsTask: lambda task: [KEYS[: task.symbols], VALUES[: task.symbols]],
    RecallTask: lambda _: [recall.NAMES, recall.OBJECTS, recall.ADJECTIVES, recall.FILLERS],
    TranslationTask: lambda _: [
        kind for pairs in _NUMBER_WORDS for kind in zip(*pairs, strict=True)
    ],
    PasskeyTask: lambda _: [
        retrieval.DIGITS,
        retrieval.NAMES,
        {*retrieval.OWNED, retrieval.IS, *chain.from_iterable(retrieval.SENTENCES)},
    ],
    FrequentWordTask: lambda _: [(retrieval.STOP, *retrieval.CODED)],
}
