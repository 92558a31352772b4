"""The recall task: a prompt says who owns which object, and asks for one owner's object.

A prompt states several facts and ends in an incomplete sentence, the question::

    today anna owns the red lamp . bob owns the kite . ? anna owns the

The right next word is the object of the asked name (``lamp``). The evidence for this answer is
known: the object and the name in the asked fact. Because the numbers of facts, filler words and
adjectives vary, the position of the evidence varies, too.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from ..errors import InputError, OptionError
from .vocabulary import PAD, WordVocabulary


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


STOP, ASK, VERB, ARTICLE = ".", "?", "owns", "the"
NAMES = _words(
    "anna bob carl dora emil fay gus hana ivan jane karl lena milo nora otto pia quinn rosa "
    "sven tina"
)
OBJECTS = _words(
    "lamp kite drum boat ring sword clock piano basket mirror ladder candle violin hammer "
    "carpet bottle"
)
ADJECTIVES = _words("red old tiny heavy golden broken")
FILLERS = _words("today also perhaps meanwhile indeed later surely again")

MIN_FACTS, MAX_FACTS, MAX_FILLERS = 2, 8, 2


@lru_cache(maxsize=1)
def recall_vocabulary() -> WordVocabulary:
    """Return the task's vocabulary of 55 words; every call returns the same object.

    Example:
        >>> from captum_ssm.models.recall import recall_vocabulary
        >>> vocabulary = recall_vocabulary()
        >>> len(vocabulary), vocabulary.encode("anna owns the lamp .")
        (55, [5, 3, 4, 25, 1])
    """
    return WordVocabulary([PAD, STOP, ASK, VERB, ARTICLE, *NAMES, *OBJECTS, *ADJECTIVES, *FILLERS])


@dataclass(frozen=True)
class Fact:
    """One stated fact, and the positions of its owner and object in the prompt.

    Attributes:
        name: the owner's name.
        value: the owned object.
        name_position: position of the name, from 0.
        value_position: position of the object.
    """

    name: str
    value: str
    name_position: int
    value_position: int


@dataclass(frozen=True)
class Example:
    """One prompt with its right answer and its gold sources, the positions of the evidence.

    Attributes:
        words: the words of the prompt.
        tokens: the ids of ``words``.
        facts: all facts in the order of the prompt.
        asked: the index of the asked fact in ``facts``.
        question_name_position: position of the asked name in the question.
    """

    words: tuple[str, ...]
    tokens: tuple[int, ...]
    facts: tuple[Fact, ...]
    asked: int
    question_name_position: int

    @property
    def text(self) -> str:
        """The prompt as one string."""
        return " ".join(self.words)

    @property
    def answer(self) -> str:
        """The right next word: the asked object."""
        return self.facts[self.asked].value

    @property
    def answer_id(self) -> int:
        """The token id of :attr:`answer`."""
        return self.tokens[self.value_position]

    @property
    def value_position(self) -> int:
        """The primary gold source: the position of the object of the asked fact."""
        return self.facts[self.asked].value_position

    @property
    def name_position(self) -> int:
        """The secondary gold source: the position of the name in the asked fact."""
        return self.facts[self.asked].name_position

    @property
    def source_positions(self) -> tuple[int, int]:
        """Both gold sources: the positions of the object and of the name in the asked fact."""
        return (self.value_position, self.name_position)


def parse_prompt(text: str) -> Example:
    """Read a prompt of the task, and find its gold answer and sources.

    Args:
        text: facts and a question, with spaces between words and marks.

    Raises:
        InputError: when a word is unknown, or the text is not a prompt of this task.

    Example:
        >>> from captum_ssm.models.recall import parse_prompt
        >>> example = parse_prompt("anna owns the lamp . bob owns the kite . ? bob owns the")
        >>> example.answer, example.source_positions  # kite is at 8, bob at 5
        ('kite', (8, 5))
    """
    words = tuple(text.split())
    tokens = tuple(recall_vocabulary().encode(text))
    fact_words, question = words[:-4], words[-4:]
    asked_name = question[1] if len(question) == 4 else ""
    is_question = asked_name in NAMES and question == (ASK, asked_name, VERB, ARTICLE)
    if not is_question or ASK in fact_words:
        raise InputError(
            f"text={text!r}: a prompt must end in one question '{ASK} NAME {VERB} {ARTICLE}'. Pass "
            f"facts and a question, such as 'anna owns the lamp {STOP} {ASK} anna owns the'."
        )

    facts: list[Fact] = []
    start = 0
    while start < len(fact_words):
        if STOP not in fact_words[start:]:
            raise InputError(f"text={text!r}: add the missing '{STOP}' after the last fact.")
        stop = words.index(STOP, start)
        facts.append(_parse_fact(words, start, stop))
        start = stop + 1
    named = [fact.name for fact in facts]
    if named.count(asked_name) != 1:
        raise InputError(
            f"text={text!r} has {named.count(asked_name)} facts about {asked_name!r}, for whom the "
            "question asks. State exactly one."
        )
    return Example(words, tokens, tuple(facts), named.index(asked_name), len(fact_words) + 1)


def _parse_fact(words: Sequence[str], start: int, stop: int) -> Fact:
    """Parse the fact ``[FILLER ...] NAME owns the [ADJECTIVE] OBJECT`` in ``words[start:stop]``."""
    name_position = start
    while name_position < stop and words[name_position] in FILLERS:
        name_position += 1
    body = list(words[name_position:stop])
    # NAME owns the ADJECTIVE OBJECT: the adjective is word 3
    without_adjective = [word for i, word in enumerate(body) if not (i == 3 and word in ADJECTIVES)]
    well_formed = (
        len(without_adjective) == 4
        and without_adjective[0] in NAMES
        and without_adjective[1:3] == [VERB, ARTICLE]
        and without_adjective[3] in OBJECTS
    )
    if not well_formed:
        raise InputError(
            f"text has the fact {' '.join(words[start : stop + 1])!r}. Write each fact as "
            f"'[FILLER ...] NAME {VERB} {ARTICLE} [ADJECTIVE] OBJECT {STOP}', such as "
            f"'today anna {VERB} {ARTICLE} red lamp {STOP}'."
        )
    return Fact(without_adjective[0], without_adjective[3], name_position, stop - 1)


def generate(count: int, seed: int | random.Random, n_facts: int | None = None) -> list[Example]:
    """Draw random prompts of the task; the same seed returns the same prompts.

    Names are distinct within a prompt. Objects are drawn with replacement, so two facts can have
    the same object.

    Args:
        count: the number of examples.
        seed: a seed, or a random generator.
        n_facts: the number of facts in every prompt, 1 to 20. Default: None, a random number from
            2 to 8 for each prompt.

    Raises:
        OptionError: when ``n_facts`` is not 1 to 20, or ``count`` is below 0.

    Example:
        >>> from captum_ssm.models.recall import generate
        >>> (example,) = generate(1, seed=0, n_facts=3)
        >>> len(example.facts), example.words[-4], example.words[-2:]
        (3, '?', ('owns', 'the'))
        >>> generate(1, seed=0, n_facts=3) == [example]
        True
    """
    if n_facts is not None and not 1 <= n_facts <= len(NAMES):
        raise OptionError(f"n_facts={n_facts}: use 1 to {len(NAMES)}, the number of names.")
    if count < 0:
        raise OptionError(f"count={count}: use 0 or more.")
    rng = seed if isinstance(seed, random.Random) else random.Random(seed)
    return [_draw_prompt(rng, n_facts) for _ in range(count)]


def _draw_prompt(rng: random.Random, n_facts: int | None) -> Example:
    fact_count = rng.randint(MIN_FACTS, MAX_FACTS) if n_facts is None else n_facts
    words: list[str] = []
    facts: list[Fact] = []
    for name in rng.sample(NAMES, fact_count):
        words += rng.choices(FILLERS, k=rng.randint(0, MAX_FILLERS))
        name_position = len(words)
        words += [name, VERB, ARTICLE]
        if rng.random() < 0.5:
            words.append(rng.choice(ADJECTIVES))
        value = rng.choice(OBJECTS)
        facts.append(Fact(name, value, name_position, len(words)))
        words += [value, STOP]
    asked_index = rng.randrange(fact_count)
    words += [ASK, facts[asked_index].name, VERB, ARTICLE]
    tokens = tuple(recall_vocabulary().encode(" ".join(words)))
    return Example(tuple(words), tokens, tuple(facts), asked_index, len(words) - 3)


@torch.no_grad()
def accuracy(model: torch.nn.Module, examples: Sequence[Example], batch_size: int = 64) -> float:
    """Return the share of prompts, 0 to 1, for which the model predicts the right next word.

    Args:
        model: a causal language model with the interface of transformers: it accepts ``input_ids``
            and ``attention_mask``, and its output has ``logits``.
        examples: the prompts, at least one.
        batch_size: the number of prompts in one forward pass. Default: 64.

    Raises:
        InputError: when ``examples`` is empty.
        OptionError: when ``batch_size`` is below 1.

    Example:
        >>> from captum_ssm.models import load_bundled
        >>> from captum_ssm.models.recall import accuracy, parse_prompt
        >>> model, _ = load_bundled("recall-mamba")
        >>> accuracy(model, [parse_prompt("anna owns the lamp . ? anna owns the")])
        1.0
    """
    if not examples:
        raise InputError("examples is empty. Pass at least one prompt.")
    if batch_size < 1:
        raise OptionError(f"batch_size={batch_size}: use 1 or more.")
    device, pad, right_count = next(model.parameters()).device, recall_vocabulary().pad_id, 0
    for start in range(0, len(examples), batch_size):
        batch = examples[start : start + batch_size]
        width = max(len(x.tokens) for x in batch)
        # padded on the left, so that the last token of each row ends the question
        rows = [[pad] * (width - len(x.tokens)) + list(x.tokens) for x in batch]
        ids = torch.tensor(rows, device=device)
        logits = model(input_ids=ids, attention_mask=(ids != pad).long()).logits
        answers = logits[:, -1].argmax(-1).tolist()
        right_count += sum(answer == x.answer_id for answer, x in zip(answers, batch, strict=True))
    return right_count / len(examples)
