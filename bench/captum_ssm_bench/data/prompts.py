"""Questions and long texts that models are asked, one JSON a line.

ARC (Clark et al. 2018) is read in the layout of the authors' files, whose question holds a stem and
a list of choices, and in the flat one in which it is often passed on::

    {"id": "7", "question": {"stem": "...", "choices": [{"text": "...", "label": "A"}]},
     "answerKey": "A"}
    {"id": "7", "question": "...", "choices": {"text": ["..."], "label": ["A"]}, "answerKey": "A"}

RULER (Hsieh et al. 2024) is read as its generator writes it: ``index``, ``input``, ``outputs``,
``length``, and in later versions an ``answer_prefix`` with which the model's answer is to begin.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from captum_ssm._files import Where, broken_line, existing_file, field, read_json_lines
from captum_ssm.errors import DataError

Prompt = TypeVar("Prompt")


@dataclass(frozen=True)
class ChoiceQuestion:
    """A question with several answers, one of which is right.

    Attributes:
        name: its id.
        question: the text.
        choices: the answers.
        labels: what the answers are called, such as A to D or 1 to 4.
        answer: which of the answers is right, from 0.
    """

    name: str
    question: str
    choices: tuple[str, ...]
    labels: tuple[str, ...]
    answer: int

    @property
    def prompt(self) -> str:
        """The question with its choices, ending where the label of the answer would follow."""
        listed = [f"{label}. {c}" for label, c in zip(self.labels, self.choices, strict=True)]
        return "\n".join([f"Question: {self.question}", *listed, "Answer:"])


@dataclass(frozen=True)
class LongPrompt:
    """A long text, a question, and what the answer must hold.

    Attributes:
        index: its number.
        prompt: what a model goes on from, with the beginning of the answer if there is one.
        answers: what is to be found in the answer, one or more.
        length: in tokens of the generator's tokenizer, room for the answer included.
    """

    index: int
    prompt: str
    answers: tuple[str, ...]
    length: int


def load_arc(path: str | Path) -> list[ChoiceQuestion]:
    """The questions of a file such as ``ARC-Easy-Test.jsonl``, in its order.

    Args:
        path: the file, in either layout.

    Returns:
        The questions, all in memory.

    Raises:
        DataNotFoundError: when there is no such file.
        DataError: when a line cannot be read, which is named, or there is none.

    Example:
        >>> import json, tempfile
        >>> from pathlib import Path
        >>> from captum_ssm_bench.data import load_arc
        >>> choices = {"text": ["ice", "air"], "label": ["A", "B"]}
        >>> line = {"question": "Which is a gas?", "choices": choices, "answerKey": "B"}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "questions.jsonl").write_text(json.dumps(line))
        ...     (question,) = load_arc(Path(folder, "questions.jsonl"))
        >>> print(question.prompt)
        Question: Which is a gas?
        A. ice
        B. air
        Answer:
    """
    return _read(path, "ARC's questions", _question)


def load_ruler(path: str | Path) -> list[LongPrompt]:
    """The examples of one task, such as ``niah_single_1/validation.jsonl``; see :func:`load_arc`.

    Args:
        path: the file.

    Returns:
        The examples, all in memory.
    """
    return _read(path, "RULER's examples", _long_prompt)


def _read(
    path: str | Path, what: str, made: Callable[[dict[str, Any], Where], Prompt]
) -> list[Prompt]:
    found = existing_file(path, f"a file of {what}, one JSON a line")
    prompts = [made(record, (found, number)) for number, record in read_json_lines(found)]
    if not prompts:
        raise DataError(f"{found} holds none of {what}.")
    return prompts


def _question(record: dict[str, Any], where: Where) -> ChoiceQuestion:
    question = field(record, "question", (dict, str), where)
    if isinstance(question, dict):
        stem, listed = field(question, "stem", str, where), field(question, "choices", list, where)
        if not all(isinstance(choice, dict) for choice in listed):
            raise broken_line(*where, "has choices that are not objects")
        texts = [field(choice, "text", str, where) for choice in listed]
        labels = [field(choice, "label", str, where) for choice in listed]
    else:
        stem, choices = question, field(record, "choices", dict, where)
        texts, labels = (field(choices, name, list, where) for name in ("text", "label"))
    if not texts or len(texts) != len(labels):
        raise broken_line(*where, f"has {len(texts)} choices, but {len(labels)} labels")
    if not all(isinstance(value, str) for value in [*texts, *labels]):
        raise broken_line(*where, "has choices or labels that are not strings")
    key = field(record, "answerKey", str, where)
    if labels.count(key) != 1:
        raise broken_line(*where, f"has the answer {key!r}, but its choices are called {labels}")
    name = str(record.get("id", where[1]))
    return ChoiceQuestion(name, stem, tuple(texts), tuple(labels), labels.index(key))


def _long_prompt(record: dict[str, Any], where: Where) -> LongPrompt:
    answers = field(record, "outputs", (list, str), where)
    answers = [answers] if isinstance(answers, str) else answers
    if not answers or not all(isinstance(answer, str) and answer for answer in answers):
        raise broken_line(*where, "has 'outputs' that are not one or more strings")
    prefix = field(record, "answer_prefix", str, where) if "answer_prefix" in record else ""
    return LongPrompt(
        index=field(record, "index", int, where),
        prompt=field(record, "input", str, where) + prefix,
        answers=tuple(answers),
        length=field(record, "length", int, where),
    )
