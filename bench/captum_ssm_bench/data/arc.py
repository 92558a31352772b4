"""ARC (Clark et al. 2018): school questions with several answers to choose from, one JSON a line.

Both layouts are read: that of the authors' files, whose question holds a stem and a list of
choices, and the flat one in which the set is often passed on::

    {"id": "7", "question": {"stem": "...", "choices": [{"text": "...", "label": "A"}]},
     "answerKey": "A"}
    {"id": "7", "question": "...", "choices": {"text": ["..."], "label": ["A"]}, "answerKey": "A"}
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from captum_ssm._files import Where, broken_line, existing_file, field, read_json_lines
from captum_ssm.errors import DataError


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
        >>> question.choices[question.answer]
        'air'
        >>> print(question.prompt)
        Question: Which is a gas?
        A. ice
        B. air
        Answer:
    """
    found = existing_file(path, "a file of ARC's questions, one JSON a line")
    questions = [_question(record, (found, number)) for number, record in read_json_lines(found)]
    if not questions:
        raise DataError(f"{found} holds no question.")
    return questions


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
