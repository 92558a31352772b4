"""The recall task in the form that all tasks share."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

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

from .linked import Family, LinkedBatch, LinkedText


class RecallTask:
    """Prompts with their answers, in the form that all tasks share; a length counts facts.

    The object of the asked fact is the sure source of the answer, its name a possible one.

    Example:
        >>> from captum_ssm.models.recall import parse_prompt
        >>> from captum_ssm_bench.tasks import RecallTask
        >>> batch = RecallTask().batch([parse_prompt("anna owns the lamp . ? anna owns the")])
        >>> batch.task.vocabulary.decode(batch.targets.tokens)
        'lamp'
        >>> batch.links.sources.tolist(), batch.possible_links.sources.tolist()
        ([3], [0])
    """

    shortest, longest = MIN_FACTS, MAX_FACTS

    @property
    def vocabulary(self) -> WordVocabulary:
        """The vocabulary of the task."""
        return recall_vocabulary()

    @property
    def families(self) -> Sequence[Family]:
        """The objects."""
        return ([(word, word) for word in OBJECTS],)

    def draw(
        self, count: int, seed: int | random.Random, length: int | None = None
    ) -> list[Example]:
        """Prompts, as of :func:`generate`.

        Args:
            count: how many.
            seed: a seed, or a generator to go on drawing from.
            length: the number of facts of every prompt. Default: None, drawn anew for each.

        Returns:
            The prompts.
        """
        return generate(count, seed, length)

    def batch(self, examples: Sequence[Example], device: torch.device | str = "cpu") -> LinkedBatch:
        """Each prompt with its answer, padded on the left.

        Args:
            examples: as of :func:`generate` or :func:`parse_prompt`, at least one.
            device: where the tensors go. Default: ``"cpu"``.

        Returns:
            The batch; sources are looked for in what stands before the question.
        """
        return LinkedBatch.of(self, [_answered(example) for example in examples], device)


def _answered(example: Example) -> LinkedText:
    end = len(example.words)
    return LinkedText(
        words=(*example.words, example.answer),
        answer=end,
        context=range(example.words.index(ASK)),
        sure=((end, example.value_position),),
        possible=((end, example.name_position),),
    )
