"""The recall task in the form that all tasks share."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from captum_ssm.models.recall import (
    ASK,
    MAX_FACTS,
    MIN_FACTS,
    OBJECTS,
    Example,
    generate,
    recall_vocabulary,
)
from captum_ssm.models.vocabulary import WordVocabulary

from .linked import Family, LinkedTask, LinkedText


class RecallTask(LinkedTask):
    """Prompts with their answers, of :func:`~captum_ssm.models.recall.generate`.

    A length counts facts.  The object of the asked fact is the sure source of the answer, its name
    a possible one.
    """

    shortest, longest = MIN_FACTS, MAX_FACTS

    @property
    def words(self) -> Iterable[str]:
        """All words of the task."""
        return self.vocabulary.vocab[1:]

    @property
    def vocabulary(self) -> WordVocabulary:
        """That of the bundled model."""
        return recall_vocabulary()

    @property
    def families(self) -> Sequence[Family]:
        """The objects."""
        return ([(word, word) for word in OBJECTS],)

    def draw(
        self, count: int, seed: int | random.Random, length: int | None = None
    ) -> list[Example]:
        """Prompts; see :meth:`LinkedTask.draw`."""
        return generate(count, seed, length)

    def example(self, rng: random.Random, length: int) -> Example:
        """One prompt."""
        return generate(1, rng, length)[0]

    def linked(self, example: Example) -> LinkedText:
        """A prompt with its answer; sources are looked for in the words before the question."""
        end = len(example.words)
        return LinkedText(
            words=(*example.words, example.answer),
            answer=end,
            context=range(example.words.index(ASK)),
            sure=((end, example.value_position),),
            possible=((end, example.name_position),),
        )
